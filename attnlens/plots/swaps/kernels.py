"""Which kernel costs how much? A dot a kernel with its interval, its symmetric form beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnlens.plots.captions import fitted
from attnlens.plots.style import CATEGORIES, MUTED, PlainNumbers, legend_above
from attnlens.tables.swaps.facts import UNITS, diverged
from attnlens.tables.swaps.pairs import Compared
from attnlens.wording import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnlens.records import Swap

FORMS = (("asymmetric", CATEGORIES[0], "o", -0.14), ("symmetric", CATEGORIES[2], "D", 0.14))
"""Attribute, colour, mark and place beside the row."""
WIDE = 30.0
"""How many times as large as the smallest effect the largest must be for the axis to become logarithmic."""
FINEST = 1e-3
"""Effects below are drawn on the straight part of a logarithmic axis."""
NAME = 30
"""Characters of a kernel's name."""


def draw_kernels(axes: Axes, rows: Sequence[Compared]) -> None:
    """Δ of the loss with its 95 % interval, or 1 − cosine of hidden states; diverged ones are named at the side."""
    axes.axvline(0, color=MUTED, linewidth=0.8, linestyle=(0, (4, 2)), zorder=0)
    both = any(row.symmetric for row in rows) and any(row.asymmetric for row in rows)
    for form, colour, mark, beside in FORMS:
        label: str | None = form
        for row, kernel in enumerate(rows):
            swap: Swap | None = getattr(kernel, form)
            if swap is not None and _draw(axes, swap, row + (beside if both else 0), colour, mark, label):
                label = None
    _scale(axes, [effect for row in rows for swap in row.swaps if (effect := effect_of(swap)) is not None])
    axes.set_yticks(range(len(rows)), [fitted(clean(row.name), NAME) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    for row in range(1, len(rows)):
        axes.axhline(row - 0.5, color="#e6e6e6", linewidth=0.5, zorder=0)
    first = next(rows[0].swaps)
    hidden = first.task == "hidden"
    axes.set_xlabel("1 − cosine of hidden states" if hidden else f"Δ of the loss, {UNITS[first.task]}", labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        legend_above(axes, 2)


def effect_of(swap: Swap) -> float | None:
    """Δ of the loss, or 1 − cosine where there is no loss."""
    if swap.task == "hidden":
        return None if swap.hidden_cosine is None else 1 - swap.hidden_cosine
    return None if swap.loss is None else swap.loss.delta


def _draw(axes: Axes, swap: Swap, row: float, colour: str, mark: str, label: str | None) -> bool:
    """Draw one kernel; whether it has a dot, which the legend can name."""
    effect = effect_of(swap)
    if effect is None:
        what = "diverged" if diverged(swap) else "no value"
        axes.annotate(
            what if mark == FORMS[0][2] else f"symmetric form: {what}",
            (0.99, row),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize=6.5,
            color=colour,
            style="italic",
        )
        return False
    if swap.loss is not None and swap.loss.ci95 is not None:
        axes.plot(swap.loss.ci95, [row, row], color=colour, linewidth=1.4, alpha=0.6, solid_capstyle="butt")
    axes.plot([effect], [row], mark, color=colour, markersize=4.5, linestyle="none", label=label)
    return True


def _scale(axes: Axes, effects: Sequence[float]) -> None:
    """Straight where the effects are of one size, else logarithmic on both sides of a straight part around 0."""
    sizes = sorted(abs(effect) for effect in effects if abs(effect) >= FINEST)
    axes.margins(x=0.08)
    if not sizes or sizes[-1] < WIDE * sizes[0]:
        axes.xaxis.set_major_formatter(PlainNumbers())
        return
    border = 10.0 ** math.floor(math.log10(sizes[0]))
    axes.set_xscale("symlog", linthresh=border, linscale=0.6)
    tops = [border * 10**power for power in range(math.ceil(math.log10(sizes[-1] / border)) + 1)]
    low, high = axes.get_xlim()
    ticks = [0.0, *tops, *(-top for top in tops)]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}".replace("-", "−")))
    axes.set_xlim(low, high)
