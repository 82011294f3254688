"""Axes for iterations, training steps and values that span orders of magnitude."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from attnlens.plots.style import PlainNumbers, size_in_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE = 20.0
"""How far the last step must lie above the first one that is not 0 for the axis to be logarithmic."""
DIGIT, BETWEEN = 4.8, 5.0
"""Points that a digit of a step's number takes, and that two numbers keep between them."""
ROOM = 0.05
"""The part of their range that an axis is wider than its values, at each end."""
NARROW = 0.35
"""The part of a decade that the stretch from 0 to the first step takes."""


def scale_steps(axes: Axes, steps: Sequence[float], name: str) -> None:
    """A logarithmic axis where the steps span a factor of 20 or more (0 keeps a place), else a linear one; named."""
    present = sorted(set(steps))
    positive = [step for step in present if step > 0]
    if present and present[0] >= 0 and len(positive) > 2 and positive[-1] >= WIDE * positive[0]:
        if present[0] == 0:
            axes.set_xscale("symlog", linthresh=positive[0], linscale=NARROW)
        else:
            axes.set_xscale("log")
    low, high = (present[0], present[-1]) if present else (0.0, 1.0)
    axes.set_xlim(low, high if high > low else low + 1)
    axes.xaxis.set_major_locator(FixedLocator(_named(axes, present)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))  # each as short as it may be
    axes.set_xlabel(name, labelpad=1.5)


def scale_values(axes: Axes, least: float, most: float, *, logarithmic: bool) -> None:
    """The values' axis, a little wider than they are; powers of ten where it is logarithmic."""
    if logarithmic:
        axes.set_yscale("log")
        low, high = least / 1.3, most * 1.3
        axes.set_ylim(low, high)
        powers = LogLocator(numticks=6).tick_values(low, high)
        axes.yaxis.set_major_locator(FixedLocator([power for power in powers if low <= power <= high]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda tick, _: f"{tick:g}".replace("e-0", "e−").replace("-", "−"))
        )
        return
    room = ROOM * (most - least) or 0.5
    axes.set_ylim(least - room, most + room)
    axes.yaxis.set_major_formatter(PlainNumbers())


def _named(axes: Axes, steps: list[float]) -> list[float]:
    """The steps that get a number: few ones all, of many the round ones, as far as they keep apart; ends first."""
    if len(steps) > 12:
        low, high = steps[0], steps[-1]
        linear = axes.get_xscale() == "linear"
        whole = all(step == int(step) for step in steps)
        found = axes.xaxis.get_major_locator().tick_values(low, high) if linear else [10.0**p for p in range(-6, 10)]
        round_ones = [float(step) for step in found if step == int(step) or not whole]
        steps = [low, *(step for step in round_ones if low < step < high), high]
    places = axes.transScale.transform([(step, 0.5) for step in steps])[:, 0] if steps else np.array([])
    width = size_in_points(axes)[0]
    span = float(np.ptp(places)) or 1.0
    halves = [DIGIT * len(f"{step:g}") / 2 for step in steps]
    kept = sorted({0, len(steps) - 1}) if steps else []
    for index in range(1, len(steps) - 1):
        free = [abs(places[index] - places[other]) / span * width - halves[index] - halves[other] for other in kept]
        if min(free) >= BETWEEN:
            kept.append(index)
    return [steps[index] for index in sorted(kept)]
