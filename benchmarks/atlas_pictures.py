"""Draw the pictures of docs/atlas.md: each measure in every model of the atlas, as a whole and by depth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnlens.report.atlas import DEPTHS, LEVELS, Distribution, TrainedModel
from attnlens.report.pictures import style
from attnlens.wording import title_of

SHOWN = (
    *("weights.symmetry", "weights.definiteness", "weights.positivity", "weights.directionality"),
    *("tokens.entropy", "tokens.max_weight", "tokens.effective_rank", "tokens.share_first"),
    *("tokens.share_key", "tokens.share_position", "tokens.share_content", "tokens.share_skew"),
)
"""Measures of the first picture."""
BY_DEPTH = ("weights.symmetry", "weights.definiteness", "tokens.entropy", "tokens.share_key", "tokens.share_position")
COLUMNS = 4  # panels per row
SIDES = ((2.5, 97.5, 0.8), (25, 75, 3.6))
"""Lower and upper percentage, and the width of the line between them."""


def draw_pictures(models: Sequence[TrainedModel]) -> dict[str, bytes]:
    """Draw all pictures; return them by file name."""
    with style.house_style():
        return {
            "atlas-measures.png": style.encode_figure(_draw_measures(models), ".png"),
            "atlas-depth.png": style.encode_figure(_draw_depths(models), ".png"),
        }


def _draw_measures(models: Sequence[TrainedModel]) -> Figure:
    """Draw one panel per measure and one row per model: median, quartiles, and the middle 95 % of its heads."""
    rows = -(-len(SHOWN) // COLUMNS)
    figure = style.new_figure(8.6, 0.45 + rows * (0.42 + 0.17 * len(models)))
    panels = figure.subplots(rows, COLUMNS, sharey=True).flat
    for axes, measure in zip(panels, SHOWN, strict=True):
        for row, model in enumerate(models):
            if distribution := model.measures.get(measure, {}).get("all"):
                _draw_bar(axes, row, distribution, _choose_colour(models, model))
            else:
                axes.text(0.02, row, "no value", transform=axes.get_yaxis_transform(), va="center", color=style.MUTED)
        if _find_lowest_quantile(models, measure, 0) < 0:
            axes.axvline(0, color=style.MUTED, linewidth=0.5, zorder=0)
        axes.set_yticks(range(len(models)), [f"{model.name}, {model.part}, {model.heads}" for model in models])
        axes.set_ylim(len(models) - 0.4, -0.6)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_title(f"{measure.partition('.')[0]}: {title_of(measure)}")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0.03, 1, 1), h_pad=0.9, w_pad=1.4)
    _add_caption(
        figure,
        "Dot: median head; thick: quartiles; thin: the middle 95 % of the heads. After each model: part and heads. "
        "tokens.*: windows of 128 tokens; rxnmapper and rxnfp: single reactions.",
    )
    return figure


def _draw_bar(axes: Axes, row: float, distribution: Distribution, colour: str) -> None:
    for low, high, width in SIDES:
        ends = [distribution.quantiles[LEVELS.index(level)] for level in (low, high)]
        axes.plot(ends, [row, row], color=colour, linewidth=width, solid_capstyle="butt")
    axes.plot(
        distribution.quantiles[LEVELS.index(50)],
        row,
        "o",
        color="white",
        markeredgecolor=style.INK,
        markersize=3.4,
        markeredgewidth=0.8,
    )


def _draw_depths(models: Sequence[TrainedModel]) -> Figure:
    """Draw one panel per measure: each model's median and quartiles in the thirds of its layers."""
    figure = style.new_figure(8.6, 2.35)
    panels = figure.subplots(1, len(BY_DEPTH))
    for axes, measure in zip(panels, BY_DEPTH, strict=True):
        for number, model in enumerate(models):
            depths = model.measures.get(measure, {})
            if not set(DEPTHS) <= set(depths):
                continue
            offsets = np.arange(len(DEPTHS)) + 0.07 * (number - (len(models) - 1) / 2)
            colour = _choose_colour(models, model)
            quartiles = np.array([[depths[d].quantiles[LEVELS.index(q)] for d in DEPTHS] for q in (25, 50, 75)])
            axes.vlines(offsets, quartiles[0], quartiles[2], color=colour, linewidth=1.6, alpha=0.55)
            axes.plot(offsets, quartiles[1], "o-", color=colour, markersize=3, linewidth=1, label=model.lineage)
        axes.set_xticks(range(len(DEPTHS)), DEPTHS)
        axes.set_xlim(-0.4, len(DEPTHS) - 0.6)
        axes.set_title(f"{measure.partition('.')[0]}: {title_of(measure)}")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0.13, 1, 1), w_pad=0.8)
    lines, names = panels[2].get_legend_handles_labels()
    handles = dict(zip(names, lines, strict=True))
    figure.legend(
        handles.values(), handles, loc="lower center", ncols=len(handles), frameon=False, bbox_to_anchor=(0.5, 0.055)
    )
    _add_caption(
        figure,
        "Thirds of the layers; dots: median heads, bars: quartiles. rxnmapper's layers share their weights, which "
        "have no depth; rxnfp: three models.",
    )
    return figure


def _find_lowest_quantile(models: Sequence[TrainedModel], measure: str, level: float) -> float:
    """Return the smallest of the models' quantiles at this level."""
    distributions = [model.measures[measure]["all"] for model in models if measure in model.measures]
    return min(spread.quantiles[LEVELS.index(level)] for spread in distributions)


def _choose_colour(models: Sequence[TrainedModel], model: TrainedModel) -> str:
    """Return the colour of the model's lineage."""
    colours = (style.CATEGORIES[0], *style.CATEGORIES[2:3], *style.CATEGORIES[4:])
    return colours[list(dict.fromkeys(other.lineage for other in models)).index(model.lineage)]


def _add_caption(figure: Figure, words: str) -> None:
    figure.text(0.01, 0.012, words, color=style.MUTED, fontsize=6.5)
