"""The share of a head's kernel that is skew, or indefinite, against the harm of deleting it.

python benchmarks/study_asymmetry.py [--quick] [--models NAME ...] [--json FILE] [--figure FILE]

For every head of trained encoders: tokens.share_skew against what is lost by `skewless`, tokens.share_negative against
what is lost by `negativeless`, and their sum against what is lost by `mercer`, which deletes both; the gates on queries
and keys stay. Harm is 1 − cosine of the last hidden states, or the rise of the masked loss where a model has such a
head. Intervals of Spearman's ρ are over heads (those that share weights stay together), over layers, and over texts;
the ceiling is the largest ρ that the noise of finite samples would let through, from split halves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import studies
import torch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from reactions import FOLDERS, MASKED, chemistry_model, tiny_model, write_reactions
from scipy import stats
from subjects import machine
from subjects import models as installed

from attnlens.models import loading, texts
from attnlens.report.pictures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {"skew": ("skew",), "negative": ("negative",), "both": ("skew", "negative")}
"""Name → the shares that are deleted."""
MASKED_LOSS = ", masked loss"
CAPTION = (
    "A point is a head in its layer, dark in the first layer, yellow in the last. Harm: 1 − cosine of the last hidden "
    "states when this part of one head's log k is deleted.\nρ: Spearman's, with 95 % intervals over heads (layers that "
    "share weights: over their heads) and over layers."
)
KERNELS = {"skew": "skewless", "negative": "negativeless", "both": "mercer"}
"""Name → the kernel that lacks them."""


def main() -> None:
    """Print a row for each model and part."""
    given = studies.arguments(__doc__)
    print(machine())
    torch.set_num_threads(1)
    found = []
    with TemporaryDirectory() as folder:
        for name, place, files, cut in subjects(Path(folder), quick=given.quick):
            if given.models and name not in given.models:
                continue
            found.append(study(name, place, files, cut))
            if given.json:
                studies.write(given.json, {"machine": machine(), "models": found})
    if given.figure:
        draw([one for one in found if not one["model"].endswith(MASKED_LOSS)], given.figure)


def subjects(folder: Path, *, quick: bool) -> Iterator[tuple[str, str, list[str], texts.Cut]]:
    """Name, place, text files (none: the built-in texts) and windows of each encoder."""
    files = write_reactions(folder, 24)
    lines = texts.Cut(tokens=96, sequences=12, batch_size=2, pack=False)
    if quick:
        yield "tiny", tiny_model(folder / "tiny", files), files, lines
        return
    minilm = installed(quick=False).get("MiniLM")
    if minilm is not None:
        yield "MiniLM", minilm, [], texts.Cut(tokens=64, sequences=24, batch_size=4)
    for name in FOLDERS:
        for head, told in (("Model", name), ("ForMaskedLM", name + MASKED_LOSS)):
            place = chemistry_model(name, folder / told, head) if head == "Model" or name in MASKED else None
            if place is not None:
                yield told, place, files, lines


def study(name: str, place: str, files: list[str], cut: texts.Cut) -> dict[str, Any]:
    """Both parts of one model."""
    start = time.perf_counter()
    loaded = loading.load(place, allow_pickle=True)
    made = studies.blocks_of(loaded, texts.read_each(files) or texts.sample(place), cut)
    report = studies.inspected(loaded, files, cut)
    names = [batch.parts[0] for batch in made]
    print(f"\n{name}: {made.sequences} windows of at most {made.tokens} tokens of {len(set(names))} texts", flush=True)
    result: dict[str, Any] = {"model": name, "windows": made.sequences, "tokens": made.tokens, "parts": {}}
    for part, kernel in KERNELS.items():
        x = sum(studies.in_blocks(report, made, f"tokens.share_{share}") for share in PARTS[part])
        y, layers, heads = studies.harms(loaded, made, kernel)
        row = studies.correlation(x, y, names, layers, heads) | {"log_r2": explained(x.mean(0), y.mean(0))}
        row |= {"share": x.mean(0).tolist(), "harm": y.mean(0).tolist(), "layer": layers, "heads": len(set(heads))}
        result["parts"][part] = row
        print(told(part, kernel, row), flush=True)
    result["seconds"] = round(time.perf_counter() - start)
    return result


def label(part: str) -> str:
    """The names of the deleted shares."""
    return " + ".join(f"share_{share}" for share in PARTS[part])


def explained(share: torch.Tensor, harm: torch.Tensor) -> float:
    """R² of a line through log harm over log share; NaN where a harm is not positive."""
    if not bool((harm > 0).all()) or not bool((share > 0).all()):
        return math.nan
    return float(stats.pearsonr(share.log().numpy(), harm.log().numpy()).statistic ** 2)


def told(part: str, kernel: str, row: dict[str, Any]) -> str:
    """A row in words."""
    harm, share = torch.tensor(row["harm"]), torch.tensor(row["share"])
    return (
        f"  {label(part)} (median {share.median():.3f}) and {kernel} (median harm {harm.median():.2g}, largest "
        f"{harm.max():.2g}, {row['heads']} heads): ρ {row['rho']:.2f} {ends(row['heads95'])} over heads, "
        f"{ends(row['layers95'])} over layers, {ends(row['texts95'])} over texts\n"
        f"    ceiling {row['ceiling']:.2f} (ratio {row['ratio_to_ceiling']:.2f}), R² of ranks {row['rank_r2']:.2f}, "
        f"of logarithms {row['log_r2']:.2f}; by text "
        + ", ".join(f"{name} {rho:.2f}" for name, rho in row["by_text"].items())
    )


def ends(interval: tuple[float, float]) -> str:
    """The ends of an interval."""
    return f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def draw(found: list[dict[str, Any]], path: str) -> None:
    """The deleted share against the harm, a panel for each model and part; a point is a head, lighter where deeper."""
    with style.house_style():
        figure = style.new_figure(1.75 * len(found) + 0.5, 6.4, dpi=200)
        panels = figure.subplots(len(PARTS), len(found), squeeze=False)
        for axes, one in zip(panels.T, found, strict=True):
            for axis, (part, row) in zip(axes, one["parts"].items(), strict=True):
                scatter(axis, row, label(part))
            axes[0].set_title(f"{one['model']}\n{axes[0].get_title(loc='left')}", fontsize=6.5)
        for row, kernel in zip(panels, KERNELS.values(), strict=True):
            row[0].set_ylabel(f"harm of {kernel}", fontsize=7)
        figure.text(0.01, 0.008, CAPTION, fontsize=6.5, va="bottom")
        figure.tight_layout(pad=0.6, w_pad=0.8, h_pad=1.0, rect=(0, 0.045, 1, 1))
        Path(path).write_bytes(style.encode_figure(figure, ".png"))


def scatter(axes: Axes, row: dict[str, Any], shares: str) -> None:
    """One panel."""
    axes.scatter(row["share"], row["harm"], c=row["layer"], cmap="viridis", s=8, linewidths=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        fine = axis is axes.xaxis and high < 200 * low
        axis.set_major_locator(LogLocator(subs=(1, 3) if fine else (1,), numticks=9))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(shares, fontsize=6.5)
    axes.tick_params(labelsize=5.5)
    heads, layers = (ends(row[name]).replace("-", "−") for name in ("heads95", "layers95"))
    value = f"{row['rho']:.2f}".replace("-", "−")
    axes.set_title(f"ρ = {value} {heads}\nover layers {layers}", fontsize=6)


if __name__ == "__main__":
    main()
