"""The loss and the validation distance during healing, each on its own axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from attnlens.plots.style import CATEGORIES, INK, MUTED, PlainNumbers, size_in_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnlens.records import Healing, Swap

GAP = 0.08
"""Share of the height that lies between the two axes."""
LABEL = 36
"""Points between an axis and its name, so that the two names stand in one line."""
APART = 0.17
"""Share of the width that lies between two named steps at least."""


def draw_healing(axes: Axes, swap: Swap, healing: Healing) -> None:
    """Loss above, distance below, one step axis; where only one of them was measured, it has all the room.

    On a shared axis the larger would flatten the smaller: each has its own, which need not begin at 0.
    """
    losses = [(step.step, step.loss) for step in healing.curve if step.loss is not None]
    distances = [(step.step, step.validation) for step in healing.curve if step.validation is not None]
    places = _halves(axes) if losses and distances else [axes]
    if losses:
        _draw(places[0], losses, "loss, nats", CATEGORIES[0])
        own = next((stage.loss.before for stage in swap.stages if stage.loss is not None), None)
        if own is not None:
            places[0].axhline(own, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    if distances:
        _draw(places[-1], distances, "1 − cosine" if swap.task == "hidden" else "KL, nats", CATEGORIES[2])
    last = max((step.step for step in healing.curve), default=healing.steps) or 1
    wide, _ = size_in_points(axes)
    for place in places:
        place.yaxis.set_label_coords(-LABEL / wide, 0.5)
        place.axvline(healing.best, color=MUTED, linewidth=0.8, linestyle=":")
        _spread_steps(place, last)
    for place in places[:-1]:
        place.tick_params(labelbottom=False)
    places[-1].set_xlabel("optimiser step, √ scale", labelpad=1.5)


def _halves(axes: Axes) -> list[Axes]:
    axes.set(xticks=[], yticks=[], facecolor="none")
    axes.spines[:].set_visible(False)
    tall = (1 - GAP) / 2
    return [axes.inset_axes((0, bottom, 1, tall)) for bottom in (1 - tall, 0)]


def _draw(axes: Axes, points: Sequence[tuple[int, float]], name: str, colour: str) -> None:
    axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, linewidth=1.2, clip_on=False)
    axes.margins(y=0.12)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(PlainNumbers())
    axes.set_ylabel(name, labelpad=2)
    axes.spines[["top", "right"]].set_visible(False)


def _spread_steps(axes: Axes, last: int) -> None:
    """Steps spread as their square root, since the first ones do most."""
    axes.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
    axes.set_xlim(0, last * 1.03)
    axes.xaxis.set_major_locator(FixedLocator(named_steps(last)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(PlainNumbers())


def named_steps(last: int) -> list[int]:
    """0, the last step and between them as many of 1, 2, 5, 10, … as stand apart on the √ scale."""
    named = [last]
    round_steps = [digit * 10**power for power in range(len(str(last))) for digit in (1, 2, 5)]
    for step in sorted(round_steps, reverse=True):
        if step < last and min(np.sqrt(named[-1]) - np.sqrt(step), np.sqrt(step)) >= APART * np.sqrt(last):
            named.append(step)
    return [0, *reversed(named)]
