"""Find the measures of a head that predict the harm of another kernel, over models, kernels and measures.

python benchmarks/study_predictors.py [--quick] [--models NAME ...] [--json FILE] [--figure FILE]

Runs `attnlens swap-kernel --sweep heads` for five untrained kernels, each in one head at a time, and prints and draws
the result of each measure for all models and kernels together. SmolLM2 is swept with two kernels and few windows.
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
from subjects import describe_machine, find_models, write_json

import attnlens
from attnlens.models import loading
from attnlens.report.pictures import charts, style

if TYPE_CHECKING:
    from attnlens.records import Swap

SUBJECTS = {"demo": (32, 8), "MiniLM": (12, 2), "SmolLM2": (6, 2)}
"""Number of windows of 64 tokens, and batch size."""


def main() -> None:
    """Print a row for each model, kernel and measure that holds."""
    options = studies.parse_options(__doc__)
    print(describe_machine())
    torch.set_num_threads(1)
    places, results = find_models(quick=options.quick), []
    for name, (sequences, block) in SUBJECTS.items():
        if name in places and (not options.models or name in options.models):
            results.append(
                study_model(name, places[name], 8 if options.quick else sequences, block, quick=options.quick)
            )
            if options.json:
                write_json(options.json, {"machine": describe_machine(), "models": results})
    if options.figure:
        draw_figure(results, options.figure)


def study_model(name: str, path: str, sequences: int, block: int, *, quick: bool) -> dict[str, Any]:
    """Compare all measures with the harm of all kernels in one model."""
    start = time.perf_counter()
    loaded = loading.load(path)
    config = loaded.model.config
    rank = f"rank:{config.hidden_size // config.num_attention_heads // 2}"
    all_kernels = ("rbf", "window:32", "linear", "elu", rank)
    kernels = all_kernels[: 1 if quick else 2 if name == "SmolLM2" else 5]
    cut = {"length": 64, "windows": sequences, "batch_size": block}
    report = attnlens.swap_kernel(loaded, kernels, sweep="heads", allow_signed=True, **cut)
    texts = [text.name for text in report.settings.texts]
    print(f"\n{name}: {report.settings.windows} windows of 64 tokens of {len(texts)} texts", flush=True)
    rows = {kernel: build_row(swap) for kernel, swap in zip(kernels, report.swaps, strict=True)}
    for kernel, kernel_row in rows.items():
        print(format_rows(kernel, kernel_row), flush=True)
    size = {"windows": report.settings.windows, "tokens": 64, "texts": len(texts), "heads": report.coverage.heads}
    return {"model": name, **size, "kernels": rows, "seconds": round(time.perf_counter() - start)}


def build_row(swap: Swap) -> dict[str, Any]:
    """Build the row of each measure from a sweep."""
    prediction = swap.prediction
    assert prediction is not None
    deltas = [effect.delta for effect in swap.sweep if effect.delta is not None]
    named = ("rho", "heads_ci95", "layers_ci95", "sequences_ci95", "p_corrected", "holds")
    return {
        "reliability": prediction.reliability,
        "median_harm": float(np.median(deltas)),
        "diverged": prediction.diverged,
        "measures": {
            predictor.measure: {name: getattr(predictor, name) for name in named} for predictor in swap.predictors
        },
    }


def format_rows(kernel: str, result: dict[str, Any]) -> str:
    """Format a kernel's rows: the measures that hold, the strongest first."""
    rows = sorted(result["measures"].items(), key=lambda item: -abs(item[1]["rho"]))
    ceiling = math.sqrt(result["reliability"])
    lines = [f"  {kernel}: median harm {result['median_harm']:.2g}, ceiling {ceiling:.2f}, {len(rows)} measures"]
    for name, item in [item for item in rows if item[1]["holds"]][:6] or rows[:1]:
        heads, layers = ("[{:.2f}, {:.2f}]".format(*item[key]) for key in ("heads_ci95", "layers_ci95"))
        verdict = "" if item["holds"] else " (does not hold)"
        ratio = item["rho"] / ceiling if ceiling else math.nan
        lines.append(
            f"    {name}: ρ {item['rho']:.2f} {heads} over heads, {layers} over layers, p {item['p_corrected']:.2g} "
            f"corrected, ratio to the ceiling {ratio:.2f}{verdict}"
        )
    return "\n".join(lines)


def draw_figure(results: list[dict[str, Any]], path: str) -> None:
    """Draw one map per model: measures × kernels, ρ in bold if it holds after correction."""
    names = sorted({name for result in results for rows in result["kernels"].values() for name in rows["measures"]})
    with style.house_style():
        figure = style.new_figure(2.3 + 2.6 * len(results), 0.19 * len(names) + 1.3, dpi=200)
        panels = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
        for axes, result in zip(panels, results, strict=True):
            table = np.full((len(names), len(result["kernels"])), np.nan)
            for column, rows in enumerate(result["kernels"].values()):
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
                    Rectangle(corner, 1, 1, facecolor=charts.MISSING, edgecolor=style.MUTED, hatch="/////", lw=0)
                )
            image = axes.imshow(table, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
            under = [f"{words}\n({math.sqrt(rows['reliability']):.2f})" for words, rows in result["kernels"].items()]
            axes.set_xticks(range(len(under)), under, fontsize=6.5)
            axes.set_yticks(range(len(names)), names)
            axes.set_title(f"{result['model']}, {result['heads']} heads, {result['windows']} windows")
        figure.supxlabel(
            "Spearman's ρ of a measure with the harm of a kernel, over heads. Bold: holds after correction for all "
            "measures and over layers. In brackets: the ρ expected of a measure\nthat predicts the harm up to noise. "
            "Hatched: causal heads lack this share, because their mask hides the pairs that determine it.",
            fontsize=6,
            color=style.MUTED,
        )
        figure.tight_layout(rect=(0, 0, 0.93, 1))
        bar = figure.add_axes((0.94, 0.3, 0.01, 0.4))
        figure.colorbar(image, cax=bar).ax.tick_params(labelsize=6)
        Path(path).write_bytes(style.encode_figure(figure, ".png"))


if __name__ == "__main__":
    main()
