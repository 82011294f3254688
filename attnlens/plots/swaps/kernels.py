"""The cost of each kernel as a dot with its interval, beside its controls in grey."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnlens.plots.captions import fitted
from attnlens.plots.style import CATEGORIES, MUTED, PlainNumbers
from attnlens.sentences.swaps.controls import distance, distance_ci95, effect_name, is_hybrid, rise_interval, rise_words
from attnlens.wording import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnlens.choices import ControlRole
    from attnlens.records import Control, Swap

COLOUR = CATEGORIES[0]
GREY = "#8c8c8c"
MARKS: dict[ControlRole, tuple[str, str]] = {
    "same size": ("D", "◆"),
    "one key": ("v", "▼"),
    "floor": ("X", "✖"),
    "filter alone": ("<", "◀"),
    "without filter": (">", "▶"),
    "far part, healed": ("^", "▲"),
}
"""How controls are drawn, and the same in a text."""
ROLES: dict[ControlRole, str] = {
    "same size": "sinks and window of its size",
    "one key": "one key",
    "floor": "all keys alike",
    "filter alone": "filter alone",
    "without filter": "without its filter",
    "far part, healed": "its far part, healed",
}
"""What they are, in a few words."""
OF_HYBRIDS: dict[ControlRole, str] = {"filter alone": "window alone", "without filter": "far part alone"}
"""The same of hybrids."""
WIDE = 30.0
"""How many times as large as the smallest effect the largest must be for the axis to become logarithmic."""
FINEST = 1e-3
"""Effects below are drawn on the straight part of a logarithmic axis."""
NAME = 40
"""Characters of a kernel's name."""


def draw_kernels(axes: Axes, swaps: Sequence[Swap]) -> None:
    """Δ of the loss, or a distance where there is no loss, with its 95 % interval; diverged ones are named."""
    axes.axvline(0, color=MUTED, linewidth=0.8, linestyle=(0, (4, 2)), zorder=0)
    for row, swap in enumerate(swaps):
        draw_controls(axes, swap, row)
        _draw(axes, swap, row)
    every = [effect for swap in swaps for effect in (effect_of(swap), *map(cost_of, swap.controls))]
    _scale(axes, [effect for effect in every if effect is not None])
    axes.set_yticks(range(len(swaps)), list(map(name_of, swaps)))
    axes.set_ylim(len(swaps) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    for row in range(1, len(swaps)):
        axes.axhline(row - 0.5, color="#e6e6e6", linewidth=0.5, zorder=0)
    axes.set_xlabel("Δ of the " * (swaps[0].judged_by == "loss") + effect_name(swaps[0]), labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)


def draw_controls(axes: Axes, swap: Swap, row: int) -> None:
    """Its controls as grey marks of their own shapes in the kernel's row; nothing without a loss."""
    for control in swap.controls:
        cost = cost_of(control)
        if cost is not None and swap.judged_by == "loss":
            axes.plot([cost], [row], MARKS[control.role][0], color=GREY, markersize=4, linestyle="none", zorder=2)


def cost_of(control: Control) -> float | None:
    """Δ of the loss under a control."""
    return None if control.loss is None else control.loss.delta


def legend_of(swaps: Sequence[Swap]) -> str:
    """What the grey marks are, in words; empty where there are none."""
    of = {swap.kernel: {one.role for one in swap.controls if cost_of(one) is not None} for swap in swaps}
    there = {role for roles in of.values() for role in roles}
    words = ROLES | (OF_HYBRIDS if all(is_hybrid(swap) for swap in swaps if "filter alone" in of[swap.kernel]) else {})
    told = ", ".join(f"{sign} {words[role]}" for role, (_, sign) in MARKS.items() if role in there)
    return f"grey: {told}" if told else ""


def name_of(swap: Swap) -> str:
    """The kernel, and under it by how much the perplexity rises, with its interval."""
    name = fitted(clean(swap.kernel), NAME)
    if swap.loss is None or swap.perplexity is None:
        return name
    ends = rise_interval(swap.loss)
    return f"{name}\nperplexity {rise_words(swap.loss)}{f' ({ends})' if ends else ''}"


def effect_of(swap: Swap) -> float | None:
    """Δ of the loss, or the distance that stands in its place."""
    if swap.judged_by != "loss":
        return distance(swap, swap)
    return None if swap.loss is None else swap.loss.delta


def ends_of(swap: Swap) -> tuple[float, float] | None:
    """Its 95 % interval."""
    if swap.judged_by != "loss":
        return distance_ci95(swap, swap)
    return None if swap.loss is None else swap.loss.ci95


def _draw(axes: Axes, swap: Swap, row: int) -> None:
    effect = effect_of(swap)
    if effect is None:
        axes.annotate(
            "diverged" if swap.diverged else "no value",
            (0.99, row),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize=6.5,
            color=COLOUR,
            style="italic",
        )
        return
    ends = ends_of(swap)
    if ends is not None:
        axes.plot(ends, [row, row], color=COLOUR, linewidth=1.4, alpha=0.6, solid_capstyle="butt")
    axes.plot([effect], [row], "o", color=COLOUR, markersize=4.5, linestyle="none")


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
