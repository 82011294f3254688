"""Which measure of a head predicts what another kernel costs it: a map over models, kernels and measures.

python benchmarks/study_predictors.py [--quick] [--models NAME ...] [--json FILE] [--figure FILE]

`attnlens swap-kernel --sweep heads` for five kernels, untrained, that stand alone in one head at a time; what it says
of each measure is printed and drawn for all models and kernels together. SmolLM2 is swept with two kernels and few
windows.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import studies
import torch
from matplotlib.patches import Rectangle
from subjects import machine
from subjects import models as installed

import attnlens
from attnlens.models import loading
from attnlens.report.pictures import style

if TYPE_CHECKING:
    from attnlens.records import Swap

SUBJECTS = {"demo": (32, 8), "MiniLM": (12, 2), "SmolLM2": (6, 2)}
"""Windows of 64 tokens, and how many go through the model at once."""


def main() -> None:
    """Print a row for each model, kernel and measure that holds."""
    given = studies.arguments(__doc__)
    print(machine())
    torch.set_num_threads(1)
    places, found = installed(quick=given.quick), []
    for name, (sequences, block) in SUBJECTS.items():
        if name in places and (not given.models or name in given.models):
            found.append(study(name, places[name], 8 if given.quick else sequences, block, quick=given.quick))
            if given.json:
                studies.write(given.json, {"machine": machine(), "models": found})
    if given.figure:
        draw(found, given.figure)


def study(name: str, place: str, sequences: int, block: int, *, quick: bool) -> dict[str, Any]:
    """All measures against the harm of all kernels in one model."""
    start = time.perf_counter()
    loaded = loading.load(place)
    config = loaded.model.config
    rank = f"rank:{config.hidden_size // config.num_attention_heads // 2}"
    every = ("rbf", "window:32", "linear", "elu", rank)
    kernels = every[: 1 if quick else 2 if name == "SmolLM2" else 5]
    cut = {"length": 64, "windows": sequences, "batch_size": block}
    report = attnlens.swap_kernel(loaded, kernels, sweep="heads", allow_signed=True, **cut)
    texts = [text.name for text in report.settings.texts]
    print(f"\n{name}: {report.settings.windows} windows of 64 tokens of {len(texts)} texts", flush=True)
    rows = {kernel: row(swap) for kernel, swap in zip(kernels, report.swaps, strict=True)}
    for kernel, one in rows.items():
        print(told(kernel, one), flush=True)
    size = {"windows": report.settings.windows, "tokens": 64, "texts": len(texts), "heads": report.coverage.heads}
    return {"model": name, **size, "kernels": rows, "seconds": round(time.perf_counter() - start)}


def row(swap: Swap) -> dict[str, Any]:
    """What a sweep says of each measure."""
    prediction = swap.prediction
    assert prediction is not None
    deltas = [effect.delta for effect in swap.sweep if effect.delta is not None]
    named = ("rho", "heads_ci95", "layers_ci95", "sequences_ci95", "p_corrected", "holds")
    return {
        "reliability": prediction.reliability,
        "median_harm": float(np.median(deltas)),
        "diverged": prediction.diverged,
        "measures": {one.measure: {name: getattr(one, name) for name in named} for one in swap.predictors},
    }


def told(kernel: str, found: dict[str, Any]) -> str:
    """A kernel's rows: the measures that hold, the strongest first."""
    rows = sorted(found["measures"].items(), key=lambda one: -abs(one[1]["rho"]))
    ceiling = math.sqrt(found["reliability"])
    lines = [f"  {kernel}: median harm {found['median_harm']:.2g}, ceiling {ceiling:.2f}, {len(rows)} measures"]
    for name, one in [one for one in rows if one[1]["holds"]][:6] or rows[:1]:
        heads, layers = ("[{:.2f}, {:.2f}]".format(*one[key]) for key in ("heads_ci95", "layers_ci95"))
        verdict = "" if one["holds"] else " (does not hold)"
        ratio = one["rho"] / ceiling if ceiling else math.nan
        lines.append(
            f"    {name}: ρ {one['rho']:.2f} {heads} over heads, {layers} over layers, p {one['p_corrected']:.2g} "
            f"corrected, ratio to the ceiling {ratio:.2f}{verdict}"
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
            "Spearman's ρ of a measure with the harm of a kernel, over heads. Bold: holds after correction for all "
            "measures and over layers. In brackets: the ρ expected of a measure\nthat told the harm but for its noise. "
            "Hatched: causal heads have no such share, since their mask hides pairs, which leaves it open.",
            fontsize=6,
            color=style.MUTED,
        )
        figure.tight_layout(rect=(0, 0, 0.93, 1))
        bar = figure.add_axes((0.94, 0.3, 0.01, 0.4))
        figure.colorbar(image, cax=bar).ax.tick_params(labelsize=6)
        Path(path).write_bytes(style.encode_figure(figure, ".png"))


if __name__ == "__main__":
    main()
