"""Difference from the original at each stage and under each control, as dots with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from attnlens.plots.captions import fitted, typeset
from attnlens.plots.style import CATEGORIES, INK, MUTED, PlainNumbers
from attnlens.plots.swaps.kernels import GREY
from attnlens.sentences.swaps.controls import distance, distance_ci95, effect_name, rise_interval, rise_words
from attnlens.sentences.swaps.effects import figures, loss_decimals
from attnlens.wording import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnlens.records import Control, Outcome, Swap

NAME = 30
"""Characters of a control's name."""
BLUE, ORANGE = CATEGORIES[0], CATEGORIES[2]


def draw_stages(axes: Axes, swap: Swap) -> None:
    """The loss of original, swapped, fitted, healed, and in grey of its controls; without a loss, their distance."""
    controls = drawn_controls(swap)
    names = names_of(swap)
    own = _original(swap)
    if own is not None:
        axes.axvline(own, color=MUTED, linewidth=0.8, linestyle=(0, (4, 2)), zorder=0)
        axes.plot([own], [0], "o", color=INK, markersize=5)
        _label(axes, own, 0, _decimals(swap))
    for row, stage in enumerate(swap.stages, 1):
        _draw(axes, swap, stage, row)
    for row, control in enumerate(controls, 1 + len(swap.stages)):
        _draw(axes, swap, control, row, GREY)
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


def drawn_controls(swap: Swap) -> list[Control]:
    """The controls that have a loss to draw; none of a model without one."""
    return [one for one in swap.controls if one.loss is not None] if draws_loss(swap) else []


def names_of(swap: Swap) -> list[str]:
    """Original, stages and controls, and under each its perplexity: by how much it rises, with the interval."""
    controls = drawn_controls(swap)
    spelled = [fitted(clean(one.kernel or one.role), NAME) for one in controls]
    changed: list[tuple[str, Outcome]] = [(stage.name, stage) for stage in swap.stages]
    changed += zip(spelled, controls, strict=True)
    gap = " " if controls else "\n"  # few rows leave room for a third line, and other panels need the width
    first = next((stage.perplexity.before for stage in swap.stages if stage.perplexity), None)
    own = f"original\nperplexity {figures(first)}" if first is not None and draws_loss(swap) else "original"
    return [own, *(f"{name}{_rise(one, gap) if draws_loss(swap) else ''}" for name, one in changed)]


def _rise(found: Outcome, gap: str) -> str:
    """On a line of its own `+5.6 %`, after a gap `(4.9 to 6.4 %)`; empty where there is none."""
    if found.perplexity is None or found.loss is None:
        return ""
    ends = rise_interval(found.loss)
    return f"\n{rise_words(found.loss)}{f'{gap}({ends})' if ends else ''}"


def draws_loss(swap: Swap) -> bool:
    """Whether there is a loss to draw."""
    return swap.judged_by == "loss"


def _original(swap: Swap) -> float | None:
    if not draws_loss(swap):
        return 0.0
    return next((stage.loss.before for stage in swap.stages if stage.loss is not None), None)


def _draw(axes: Axes, swap: Swap, stage: Outcome, row: int, colour: str = BLUE) -> None:
    place = _place(swap, stage)
    if place is None:
        text = "diverged" if stage.diverged else "no value"
        axes.annotate(text, (0.03, row), xycoords=("axes fraction", "data"), va="center", color=ORANGE, style="italic")
        return
    ends = _ends(swap, stage)
    if ends is not None:
        axes.plot(ends, [row, row], color=colour, linewidth=1.6, alpha=0.55, solid_capstyle="butt")
    axes.plot([place], [row], "o", color=colour, markersize=5)
    _label(axes, place, row, _decimals(swap))


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


def _label(axes: Axes, place: float, row: int, decimals: int) -> None:
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    text = typeset(place, decimals)
    axes.annotate(
        text, (place, row), (0, 7), textcoords="offset points", ha="center", fontsize=7, color=INK, bbox=white
    )


def _decimals(swap: Swap) -> int:
    return min(3, loss_decimals([stage.loss for stage in swap.stages if stage.loss is not None]))
