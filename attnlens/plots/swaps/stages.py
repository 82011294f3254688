"""Difference from the original at each stage and under each control, as dots with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from attnlens.plots.captions import fitted, typeset
from attnlens.plots.style import CATEGORIES, INK, MUTED, PlainNumbers
from attnlens.plots.swaps.kernels import GREY
from attnlens.sentences.controls import rise_interval, rise_words
from attnlens.sentences.effects import loss_decimals
from attnlens.sentences.judged import distance, distance_ci95, effect_name
from attnlens.wording import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnlens.records import Outcome, Swap

NAME = 26
"""Characters of a control's name."""
BLUE, ORANGE = CATEGORIES[0], CATEGORIES[2]


def draw_stages(axes: Axes, swap: Swap) -> None:
    """The loss of original, swapped, fitted, healed, and in grey of its controls; without a loss, their distance."""
    controls = [one for one in swap.controls if one.loss is not None] if draws_loss(swap) else []
    spelled = [fitted(clean(one.kernel or one.role), NAME) for one in controls]
    names = ["original", *(stage.name for stage in swap.stages), *spelled]
    own = _original(swap)
    places = [place for one in (*swap.stages, *controls) if (place := _place(swap, one)) is not None]
    span = min([*places, own or 0.0]), max([*places, own or 0.0])
    if own is not None:
        axes.axvline(own, color=MUTED, linewidth=0.8, linestyle=(0, (4, 2)), zorder=0)
        axes.plot([own], [0], "o", color=INK, markersize=5)
        _label(axes, own, 0, "center", _decimals(swap))
    for row, stage in enumerate(swap.stages, 1):
        _draw(axes, swap, stage, row, span)
    for row, control in enumerate(controls, 1 + len(swap.stages)):
        _draw(axes, swap, control, row, span, GREY)
    axes.set_yticks(range(len(names)), names)
    for label in axes.get_yticklabels()[1 + len(swap.stages) :]:
        label.set_color(MUTED)
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


def _draw(axes: Axes, swap: Swap, stage: Outcome, row: int, span: tuple[float, float], colour: str = BLUE) -> None:
    place = _place(swap, stage)
    if place is None:
        text = "diverged" if stage.diverged else "no value"
        axes.annotate(text, (0.03, row), xycoords=("axes fraction", "data"), va="center", color=ORANGE, style="italic")
        return
    ends = _ends(swap, stage)
    if ends is not None:
        axes.plot(ends, [row, row], color=colour, linewidth=1.6, alpha=0.55, solid_capstyle="butt")
    axes.plot([place], [row], "o", color=colour, markersize=5)
    more = _perplexity(stage) if draws_loss(swap) else ""
    _label(axes, place, row, _side(place, span) if more else "center", _decimals(swap), more)


def _perplexity(stage: Outcome) -> str:
    """`perplexity +5.6 %, 4.9 to 6.4 %`; empty where there is none."""
    if stage.perplexity is None or stage.loss is None:
        return ""
    ends = rise_interval(stage.loss)
    return f"perplexity {rise_words(stage.loss)}{f' ({ends})' if ends else ''}"


def _place(swap: Swap, stage: Outcome) -> float | None:
    if draws_loss(swap):
        return None if stage.loss is None else stage.loss.after
    return distance(swap, stage)


def _ends(swap: Swap, stage: Outcome) -> tuple[float, float] | None:
    """The 95 % interval: of the difference, where there is a loss, from the original on."""
    if not draws_loss(swap):
        return distance_ci95(swap, stage)
    if stage.loss is None or stage.loss.ci95 is None:
        return None
    low, high = stage.loss.ci95
    return stage.loss.before + low, stage.loss.before + high


def _side(place: float, span: tuple[float, float]) -> str:
    """On which side of a place its label begins, so that it stays within the axes."""
    share = (place - span[0]) / (span[1] - span[0]) if span[1] > span[0] else 0.5
    return "left" if share < 0.4 else "right" if share > 0.6 else "center"


def _label(axes: Axes, place: float, row: int, side: str, decimals: int, more: str = "") -> None:
    text = typeset(place, decimals) + (f" · {more}" if more else "")
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    shift = {"left": -8, "right": 8}.get(side, 0)
    axes.annotate(
        text, (place, row), (shift, 7), textcoords="offset points", ha=side, fontsize=7, color=INK, bbox=white
    )


def _decimals(swap: Swap) -> int:
    return min(3, loss_decimals([stage.loss for stage in swap.stages if stage.loss is not None]))
