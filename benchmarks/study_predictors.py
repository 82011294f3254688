"""Rank correlation over heads of each measure with what another kernel costs.

python benchmarks/study_predictors.py [--quick] [--models NAME ...] [--json FILE] [--png FILE]

Every scalar measure of attnlens that is a property of the model, against the harm of five kernels that stand alone in
one head at a time, untrained: the rise of the loss, or 1 − cosine of the last hidden states. A correlation is named
only where it holds after Holm's correction for all measures looked at (permutations of heads, kernel by kernel) and
its 95 % interval over layers lies on one side of 0. Simultaneous intervals over heads have level 1 − 0.05/measures.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import studies
import torch
from matplotlib.patches import Rectangle
from subjects import machine
from subjects import models as installed

from attnlens import models, run, texts
from attnlens.plots import style
from attnlens.statistics import rank_correlation

if TYPE_CHECKING:
    from torch import Tensor

DRAWS = 20000
"""Permutations of heads."""
CALIBRATION = 16
"""Windows, apart from those evaluated, that `rank` is fitted on."""


def main() -> None:
    """Print a row for each model, kernel and measure that holds."""
    given = studies.arguments(__doc__)
    print(machine())
    torch.set_num_threads(1)
    places, found = installed(quick=given.quick), []
    for name, sequences, block in (("demo", 8 if given.quick else 32, 4), ("MiniLM", 12, 2)):
        if name in places and (not given.models or name in given.models):
            cut = texts.Cut(tokens=64, sequences=sequences, batch_size=block)
            found.append(study(name, places[name], cut, quick=given.quick))
            if given.json:
                studies.write(given.json, {"machine": machine(), "models": found})
    if given.png:
        draw(found, given.png)


def study(name: str, place: str, cut: texts.Cut, *, quick: bool) -> dict[str, Any]:
    """All measures against the harm of all kernels in one model."""
    start = time.perf_counter()
    loaded = models.load(place)
    contents = texts.sample(place)
    made = studies.blocks_of(loaded, contents, cut)
    apart = texts.batches(loaded, contents, replace(cut, sequences=CALIBRATION), apart_from=made)
    names = [batch.parts[0] for batch in made]
    readings = measures(loaded, cut)
    size = loaded.model.config.hidden_size // loaded.model.config.num_attention_heads
    print(f"\n{name}: {made.sequences} windows of {made.tokens} tokens of {len(set(names))} texts", flush=True)
    result = {"model": name, "windows": made.sequences, "tokens": made.tokens, "texts": len(set(names))}
    kernels: dict[str, Any] = {}
    for words in ("rbf",) if quick else ("rbf", "linear", "elu", "window:32", f"rank:{size // 2}"):
        harm, layers, _ = studies.harms(loaded, made, words, apart if words.startswith("rank") else None)
        kernels[words] = compared(readings, harm, names, layers)
        print(told(words, kernels[words]), flush=True)
    return result | {"heads": harm.shape[1], "kernels": kernels, "seconds": round(time.perf_counter() - start)}


def measures(loaded: models.Loaded, cut: texts.Cut) -> dict[str, Tensor]:
    """Each measure of each head: a mean over the same windows, or of its weights; those that vary over heads."""
    size = {"tokens": cut.tokens, "sequences": cut.sequences, "batch_size": cut.batch_size}
    report = run.inspect(loaded, source="both", analyzers=("symmetry", "spectrum"), **size)
    every = sorted({name for head in report.heads for name in head.measures})
    found = {name: torch.tensor([value_of(head, name) for head in report.heads]).double() for name in every}
    return {n: v for n, v in found.items() if int((~v.isnan()).sum()) >= 8 and len(v[~v.isnan()].unique()) > 2}


def value_of(head: Any, name: str) -> float:
    """A head's value, NaN where it has none."""
    measure = head.measures.get(name)
    return math.nan if measure is None or measure.value is None else float(measure.value)


def compared(readings: dict[str, Tensor], harm: Tensor, names: list[str], layers: list[int]) -> dict[str, Any]:
    """One kernel: the correlation of each measure, its intervals and its corrected p-value."""
    mean, stable = harm.mean(0), studies.reliability(harm, names)
    lost = int(mean.isnan().sum())
    p_values = holm({name: permuted(value, mean) for name, value in readings.items()})
    rows = {}
    for name, value in readings.items():
        rho = rank_correlation(value, mean)
        wide = rank_correlation(value, mean, level=1 - 0.05 / len(readings), draws=10000)
        layer = rank_correlation(value, mean, layers)
        holds = p_values[name] < 0.05 and layer.low * layer.high > 0
        rows[name] = {"rho": rho.value, "heads95": rho[1:], "simultaneous": wide[1:], "layers95": layer[1:]}
        rows[name] |= {"p_holm": p_values[name], "holds": bool(holds)}
    return {"reliability": stable, "median_harm": float(mean.nanmedian()), "diverged": lost, "measures": rows}


def permuted(value: Tensor, harm: Tensor) -> float:
    """Two-sided p of Spearman's ρ under permutations of heads, (1 + #{|ρ*| ≥ |ρ|})/(1 + draws)."""
    from scipy.stats import rankdata

    there = (~(value + harm).isnan()).numpy()
    x, y = (rankdata(side.numpy()[there]) for side in (value, harm))
    x, y = x - x.mean(), y - y.mean()
    draws = np.random.default_rng(0).permuted(np.tile(y, (DRAWS, 1)), axis=1) @ x
    return float((1 + (np.abs(draws) >= abs(y @ x) - 1e-9).sum()) / (1 + DRAWS))


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """p-values corrected for their number (Holm 1979)."""
    found, most, count = {}, 0.0, len(p_values)
    for place, (name, p_value) in enumerate(sorted(p_values.items(), key=lambda one: one[1])):
        most = max(most, min(1.0, (count - place) * p_value))
        found[name] = most
    return found


def told(words: str, found: dict[str, Any]) -> str:
    """A kernel's rows: the measures that hold, the strongest first."""
    rows = sorted(found["measures"].items(), key=lambda one: -abs(one[1]["rho"]))
    ceiling = math.sqrt(found["reliability"])
    lines = [f"  {words}: median harm {found['median_harm']:.2g}, ceiling {ceiling:.2f}, {len(rows)} measures"]
    for name, row in [one for one in rows if one[1]["holds"]][:6] or rows[:1]:
        reach, layers = ("[{:.2f}, {:.2f}]".format(*row[key]) for key in ("simultaneous", "layers95"))
        ratio = row["rho"] / ceiling if ceiling else math.nan
        lines.append(
            f"    {name}: ρ {row['rho']:.2f} {reach} simultaneous, {layers} over layers, p {row['p_holm']:.2g} "
            f"after Holm, ratio to the ceiling {ratio:.2f}{'' if row['holds'] else ' (does not hold)'}"
        )
    return "\n".join(lines)


def draw(found: list[dict[str, Any]], path: str) -> None:
    """A map for each model: measures × kernels, ρ written where it holds after correction."""
    names = sorted({name for one in found for rows in one["kernels"].values() for name in rows["measures"]})
    with style.house_style():
        figure = style.new_figure(2.3 + 2.6 * len(found), 0.19 * len(names) + 1.3, dpi=200)
        panels = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
        for axes, one in zip(panels, found, strict=True):
            table = np.full((len(names), len(one["kernels"])), np.nan)
            for column, rows in enumerate(one["kernels"].values()):
                for name, row in rows["measures"].items():
                    place = names.index(name)
                    table[place, column] = row["rho"]
                    shown = {"weight": "bold"} if row["holds"] else {"size": 5.5}
                    shown["color"] = "white" if abs(row["rho"]) > 0.5 else style.INK
                    axes.text(
                        column,
                        place,
                        f"{row['rho']:.2f}".replace("-", "−"),
                        ha="center",
                        va="center",
                        **{"size": 6.5} | shown,
                    )
            for column, place in ((c, p) for p, c in np.argwhere(np.isnan(table))):
                corner = (column - 0.5, place - 0.5)
                axes.add_patch(
                    Rectangle(corner, 1, 1, facecolor=style.MISSING, edgecolor=style.MUTED, hatch="/////", lw=0)
                )
            image = axes.imshow(table, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
            under = [f"{words}\n({math.sqrt(rows['reliability']):.2f})" for words, rows in one["kernels"].items()]
            axes.set_xticks(range(len(under)), under, fontsize=6.5)
            axes.set_yticks(range(len(names)), names)
            axes.set_title(f"{one['model']}, {one['heads']} heads, {one['windows']} windows")
        figure.supxlabel(
            "Spearman's ρ of a measure with the harm of a kernel, over heads. Bold: holds after Holm's correction and "
            "over layers. In brackets: the largest ρ that the harm's noise allows.\nHatched: causal heads have no such "
            "share, since their mask hides pairs, which leaves it open.",
            fontsize=6,
            color=style.MUTED,
        )
        figure.tight_layout(rect=(0, 0, 0.93, 1))
        bar = figure.add_axes((0.94, 0.3, 0.01, 0.4))
        figure.colorbar(image, cax=bar).ax.tick_params(labelsize=6)
        Path(path).write_bytes(style.encoded(figure, ".png"))


if __name__ == "__main__":
    main()
