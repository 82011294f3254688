"""Perplexity and validation distance during healing, each on its own axis, over tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from attnlens.plots.style import CATEGORIES, INK, MUTED, PlainNumbers, size_in_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnlens.records import Healing, Swap

GAP = 0.08
"""Share of the height that lies between the two axes."""
LABEL = 36
"""Points between an axis and its name, so that the two names stand in one line."""
THOUSANDS = 20_000
"""From where on numbers are written in thousands."""
APART = 0.17
"""Share of the width that lies between two named places at least."""


def draw_healing(axes: Axes, swap: Swap, healing: Healing) -> None:
    """Perplexity above, distance below, over tokens; where only one of them was measured, it has all the room.

    On a shared axis the larger would flatten the smaller: each has its own, which need not begin at 0. Reports of
    before tokens were counted are drawn over optimiser steps. Hollow: during attention transfer.
    """
    by_tokens = all(step.tokens is not None for step in healing.curve)
    at = {step.step: int(step.tokens or 0) if by_tokens else step.step for step in healing.curve}
    transfer = {at[step.step] for step in healing.curve if step.stage == "transfer"}
    losses = [(at[step.step], math.exp(step.loss)) for step in healing.curve if step.loss is not None]
    distances = [(at[step.step], step.validation) for step in healing.curve if step.validation is not None]
    places = _halves(axes) if losses and distances else [axes]
    if losses:
        _draw(places[0], losses, "perplexity", CATEGORIES[0], transfer)
        own = next((stage.loss.before for stage in swap.stages if stage.loss is not None), None)
        if own is not None:
            places[0].axhline(math.exp(own), color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    if distances:
        _draw(places[-1], distances, _distance_name(swap, healing), CATEGORIES[2], transfer)
    last = max(at.values(), default=healing.steps) or 1
    wide, _ = size_in_points(axes)
    for place in places:
        place.yaxis.set_label_coords(-LABEL / wide, 0.5)
        place.axvline(at.get(healing.best, healing.best), color=MUTED, linewidth=0.8, linestyle=":")
        _spread(place, last)
    for place in places[:-1]:
        place.tick_params(labelbottom=False)
    places[-1].set_xlabel(f"{'tokens trained on' if by_tokens else 'optimiser step'}, √ scale", labelpad=1.5)


def _distance_name(swap: Swap, healing: Healing) -> str:
    if healing.goal == "text":
        return "loss, kept back"
    return "1 − cosine" if swap.task == "hidden" else "KL, nats"


def _halves(axes: Axes) -> list[Axes]:
    axes.set(xticks=[], yticks=[], facecolor="none")
    axes.spines[:].set_visible(False)
    tall = (1 - GAP) / 2
    return [axes.inset_axes((0, bottom, 1, tall)) for bottom in (1 - tall, 0)]


def _draw(axes: Axes, points: Sequence[tuple[int, float]], name: str, colour: str, hollow: Collection[int]) -> None:
    axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, linewidth=1.2, clip_on=False)
    inside = [point for point in points if point[0] in hollow]
    if inside:
        (marks,) = axes.plot(*zip(*inside, strict=True), "o", color=colour, markersize=3, clip_on=False, zorder=3)
        marks.set_markerfacecolor("white")
    axes.margins(y=0.12)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(PlainNumbers())
    axes.set_ylabel(name, labelpad=2)
    axes.spines[["top", "right"]].set_visible(False)


def _spread(axes: Axes, last: int) -> None:
    """Steps or tokens spread as their square root, since the first ones do most."""
    axes.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
    axes.set_xlim(0, last * 1.03)
    axes.xaxis.set_major_locator(FixedLocator(named_steps(last)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(PlainNumbers() if last < THOUSANDS else FuncFormatter(_short))


def _short(number: float, _place: int | None = None) -> str:
    """196 k, 2 M: as many thousands or millions, of three digits."""
    unit, name = (1e6, " M") if number >= 1e6 else (1e3, " k")
    return f"{number / unit:.3g}{name}" if number else "0"


def named_steps(last: int) -> list[int]:
    """0, the last step and between them as many of 1, 2, 5, 10, … as stand apart on the √ scale."""
    named = [last]
    round_steps = [digit * 10**power for power in range(len(str(last))) for digit in (1, 2, 5)]
    for step in sorted(round_steps, reverse=True):
        if step < last and min(np.sqrt(named[-1]) - np.sqrt(step), np.sqrt(step)) >= APART * np.sqrt(last):
            named.append(step)
    return [0, *reversed(named)]
