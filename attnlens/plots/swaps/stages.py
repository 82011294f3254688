"""Difference from the original at each stage, as dots with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from attnlens.plots.captions import typeset
from attnlens.plots.style import CATEGORIES, INK, MUTED, PlainNumbers
from attnlens.sentences.effects import loss_decimals
from attnlens.sentences.judged import distance, distance_ci95, effect_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnlens.records import Stage, Swap

BLUE, ORANGE = CATEGORIES[0], CATEGORIES[2]


def draw_stages(axes: Axes, swap: Swap) -> None:
    """The loss of original, swapped, fitted, healed down the side; without a loss, their distance to the original."""
    names = ["original", *(stage.name for stage in swap.stages)]
    own = _original(swap)
    if own is not None:
        axes.axvline(own, color=MUTED, linewidth=0.8, linestyle=(0, (4, 2)), zorder=0)
        axes.plot([own], [0], "o", color=INK, markersize=5)
        _label(axes, own, 0, own, _decimals(swap))
    for row, stage in enumerate(swap.stages, 1):
        _draw(axes, swap, stage, row)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.6)
    axes.margins(x=0.16)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(PlainNumbers())
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel(effect_name(swap), labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    if own is None and all(_place(swap, stage) is None for stage in swap.stages):
        axes.set_xticks([])


def draws_loss(swap: Swap) -> bool:
    """Whether there is a loss to draw."""
    return swap.judged_by == "loss"


def _original(swap: Swap) -> float | None:
    if not draws_loss(swap):
        return 0.0
    return next((stage.loss.before for stage in swap.stages if stage.loss is not None), None)


def _draw(axes: Axes, swap: Swap, stage: Stage, row: int) -> None:
    place = _place(swap, stage)
    if place is None:
        text = "diverged" if stage.diverged else "no value"
        axes.annotate(text, (0.03, row), xycoords=("axes fraction", "data"), va="center", color=ORANGE, style="italic")
        return
    ends = _ends(swap, stage)
    if ends is not None:
        axes.plot(ends, [row, row], color=BLUE, linewidth=1.6, alpha=0.55, solid_capstyle="butt")
    axes.plot([place], [row], "o", color=BLUE, markersize=5)
    _label(axes, place, row, place, _decimals(swap))


def _place(swap: Swap, stage: Stage) -> float | None:
    if draws_loss(swap):
        return None if stage.loss is None else stage.loss.after
    return distance(swap, stage)


def _ends(swap: Swap, stage: Stage) -> tuple[float, float] | None:
    """The 95 % interval: of the difference, where there is a loss, from the original on."""
    if not draws_loss(swap):
        return distance_ci95(swap, stage)
    if stage.loss is None or stage.loss.ci95 is None:
        return None
    low, high = stage.loss.ci95
    return stage.loss.before + low, stage.loss.before + high


def _label(axes: Axes, place: float, row: int, number: float, decimals: int) -> None:
    text = typeset(number, decimals)
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axes.annotate(
        text, (place, row), (0, 7), textcoords="offset points", ha="center", fontsize=7, color=INK, bbox=white
    )


def _decimals(swap: Swap) -> int:
    return min(3, loss_decimals([stage.loss for stage in swap.stages if stage.loss is not None]))
