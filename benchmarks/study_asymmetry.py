"""Compare the skew or indefinite share of a head's kernel with the harm of deleting it.

python benchmarks/study_asymmetry.py [--quick] [--models NAME ...] [--json FILE] [--figure FILE]

For every head of trained encoders: tokens.share_skew against the harm of `skewless`, tokens.share_negative against that
of `negativeless`, and their sum against that of `mercer`, which deletes both; the gates on queries and keys stay. Harm
is 1 − cosine of the last hidden states, or the rise of the masked loss if a model has such a head. Intervals of
Spearman's ρ are over heads (those that share weights stay together), over layers, and over texts; the ceiling is the
largest ρ that the noise of finite samples allows, from split halves.
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
from reactions import FOLDERS, MASKED, build_chemistry_model, build_tiny_model, write_reactions
from scipy import stats
from subjects import describe_machine, find_models, write_json

from attnlens.models import loading, texts
from attnlens.report.pictures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {"skew": ("skew",), "negative": ("negative",), "both": ("skew", "negative")}
"""Name → shares of log k that are deleted."""
MASKED_LOSS = ", masked loss"
CAPTION = (
    "Each point is a head, dark in the first layer, yellow in the last. Harm: 1 − cosine of the last hidden "
    "states when this part of one head's log k is deleted.\nρ: Spearman's, with 95 % intervals over heads (layers that "
    "share weights: over their heads) and over layers."
)
KERNELS = {"skew": "skewless", "negative": "negativeless", "both": "mercer"}
"""Name → kernel without these shares."""


def main() -> None:
    """Print a row for each model and part."""
    options = studies.parse_options(__doc__)
    print(describe_machine())
    torch.set_num_threads(1)
    results = []
    with TemporaryDirectory() as folder:
        for name, path, files, cut in list_subjects(Path(folder), quick=options.quick):
            if options.models and name not in options.models:
                continue
            results.append(study_model(name, path, files, cut))
            if options.json:
                write_json(options.json, {"machine": describe_machine(), "models": results})
    if options.figure:
        draw_figure([result for result in results if not result["model"].endswith(MASKED_LOSS)], options.figure)


def list_subjects(folder: Path, *, quick: bool) -> Iterator[tuple[str, str, list[str], texts.Cut]]:
    """Yield name, path, text files (none: the built-in texts) and windows of each encoder."""
    files = write_reactions(folder, 24)
    lines = texts.Cut(tokens=96, sequences=12, batch_size=2, pack=False)
    if quick:
        yield "tiny", build_tiny_model(folder / "tiny", files), files, lines
        return
    minilm = find_models(quick=False).get("MiniLM")
    if minilm is not None:
        yield "MiniLM", minilm, [], texts.Cut(tokens=64, sequences=24, batch_size=4)
    for name in FOLDERS:
        for head, label in (("Model", name), ("ForMaskedLM", name + MASKED_LOSS)):
            path = build_chemistry_model(name, folder / label, head) if head == "Model" or name in MASKED else None
            if path is not None:
                yield label, path, files, lines


def study_model(name: str, path: str, files: list[str], cut: texts.Cut) -> dict[str, Any]:
    """Study both parts of one model."""
    start = time.perf_counter()
    loaded = loading.load(path, allow_pickle=True)
    batches = studies.build_blocks(loaded, texts.read_each(files) or texts.sample(path), cut)
    report = studies.inspect_windows(loaded, files, cut)
    names = [batch.parts[0] for batch in batches]
    print(
        f"\n{name}: {batches.sequences} windows of at most {batches.tokens} tokens of {len(set(names))} texts",
        flush=True,
    )
    result: dict[str, Any] = {"model": name, "windows": batches.sequences, "tokens": batches.tokens, "parts": {}}
    for part, kernel in KERNELS.items():
        x = sum(studies.average_blocks(report, batches, f"tokens.share_{share}") for share in PARTS[part])
        y, layers, heads = studies.measure_harms(loaded, batches, kernel)
        row = studies.correlate_harm(x, y, names, layers, heads) | {"log_r2": fit_logarithms(x.mean(0), y.mean(0))}
        row |= {"share": x.mean(0).tolist(), "harm": y.mean(0).tolist(), "layer": layers, "heads": len(set(heads))}
        result["parts"][part] = row
        print(format_row(part, kernel, row), flush=True)
    result["seconds"] = round(time.perf_counter() - start)
    return result


def name_shares(part: str) -> str:
    """Name the deleted shares."""
    return " + ".join(f"share_{share}" for share in PARTS[part])


def fit_logarithms(share: torch.Tensor, harm: torch.Tensor) -> float:
    """Return R² of a line through log harm over log share; NaN if a harm is not positive."""
    if not bool((harm > 0).all()) or not bool((share > 0).all()):
        return math.nan
    return float(stats.pearsonr(share.log().numpy(), harm.log().numpy()).statistic ** 2)


def format_row(part: str, kernel: str, row: dict[str, Any]) -> str:
    """Format a row."""
    harm, share = torch.tensor(row["harm"]), torch.tensor(row["share"])
    return (
        f"  {name_shares(part)} (median {share.median():.3f}) and {kernel} (median harm {harm.median():.2g}, largest "
        f"{harm.max():.2g}, {row['heads']} heads): ρ {row['rho']:.2f} {format_interval(row['heads95'])} over heads, "
        f"{format_interval(row['layers95'])} over layers, {format_interval(row['texts95'])} over texts\n"
        f"    ceiling {row['ceiling']:.2f} (ratio {row['ratio_to_ceiling']:.2f}), R² of ranks {row['rank_r2']:.2f}, "
        f"of logarithms {row['log_r2']:.2f}; by text "
        + ", ".join(f"{name} {rho:.2f}" for name, rho in row["by_text"].items())
    )


def format_interval(interval: tuple[float, float]) -> str:
    """Format the ends of an interval."""
    return f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def draw_figure(results: list[dict[str, Any]], path: str) -> None:
    """Draw the deleted share against the harm: one panel per model and part, one point per head, coloured by layer."""
    with style.house_style():
        figure = style.new_figure(1.75 * len(results) + 0.5, 6.4, dpi=200)
        panels = figure.subplots(len(PARTS), len(results), squeeze=False)
        for axes, result in zip(panels.T, results, strict=True):
            for axis, (part, row) in zip(axes, result["parts"].items(), strict=True):
                draw_panel(axis, row, name_shares(part))
            axes[0].set_title(f"{result['model']}\n{axes[0].get_title(loc='left')}", fontsize=6.5)
        for row, kernel in zip(panels, KERNELS.values(), strict=True):
            row[0].set_ylabel(f"harm of {kernel}", fontsize=7)
        figure.text(0.01, 0.008, CAPTION, fontsize=6.5, va="bottom")
        figure.tight_layout(pad=0.6, w_pad=0.8, h_pad=1.0, rect=(0, 0.045, 1, 1))
        Path(path).write_bytes(style.encode_figure(figure, ".png"))


def draw_panel(axes: Axes, row: dict[str, Any], shares: str) -> None:
    """Draw one panel."""
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
    heads, layers = (format_interval(row[name]).replace("-", "−") for name in ("heads95", "layers95"))
    value = f"{row['rho']:.2f}".replace("-", "−")
    axes.set_title(f"ρ = {value} {heads}\nover layers {layers}", fontsize=6)


if __name__ == "__main__":
    main()
