"""Trajectories of heads over checkpoints: a picture for each measure, a line for each head."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize

from attnlens.plots.captions import fitted, heading
from attnlens.plots.experiments.steps import ROOM, scale_steps, scale_values
from attnlens.plots.fans import DEPTH
from attnlens.plots.page import Panel
from attnlens.plots.style import CROWD, INK, MUTED, figure_of, size_in_points, tick_positions
from attnlens.records import Experiment, Trajectory
from attnlens.registry import info_of
from attnlens.sentences.verdicts import measures_of, told_of
from attnlens.wording import clean, counted, source_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes

BAND = "#dcdcdc"
"""The colour of a null, mean ± sd."""
LOG_RANGE = 30.0
"""How many times its least value a median must reach for its axis to be logarithmic."""

STRAY = 2.0
"""How many times the range of all but one value in a hundred the others may widen the axis to."""


def trajectory_panels(experiment: Experiment) -> list[Panel]:
    """A panel for every measure that changes, what a series is about first."""
    every = told_of(experiment) or measures_of(experiment)
    return [_panel(experiment, name) for name in every]


def _panel(experiment: Experiment, name: str) -> Panel:
    info = info_of(name)
    lines = _lines(experiment, name)
    kind = clean(fitted(experiment.curves[name].quantity or source_of(name), 30))
    null = "; grey: null ± sd" if experiment.null(name) is not None else ""
    beyond = _beyond(experiment, name)
    cut = f"; {counted(beyond, 'head')} cut" if beyond else ""
    said = f"{info.meaning}: {info.formula}. " if info.meaning else ""
    heads = f"{_heads(experiment, lines)}{'; grey: null, mean ± sd' if null else ''}."
    left = f" {counted(beyond, 'head')} of {len(lines)} partly beyond the frame." if beyond else ""
    caption = f"{said[:1].upper()}{said[1:]}{heads}{left}"
    draw = partial(draw_trajectories, experiment=experiment, name=name)
    return Panel(name, heading(info), f"{kind}{null}{cut}", caption, draw, bar=_deep(experiment))


def _heads(experiment: Experiment, lines: list[Trajectory]) -> str:
    """Whose lines these are."""
    if len(lines) == 1:
        return f"Layer {lines[0].layer} head {lines[0].head}"
    if not lines:
        return "One number a step"
    return f"{counted(len(lines), 'head')}{', coloured by layer' * _deep(experiment)}. Black: their median"


def draw_trajectories(axes: Axes, *, experiment: Experiment, name: str, bar: bool = True) -> None:
    """The null as a grey band, a thin line a head in its layer's colour, their median thick and black."""
    curve = experiment.curves[name]
    steps = np.asarray(curve.steps, dtype=float)
    lines = _lines(experiment, name)
    null = experiment.null(name)
    if null is not None and null.low is not None and null.high is not None:
        axes.fill_between(steps, _numbers(null.low), _numbers(null.high), color=BAND, linewidth=0, zorder=0)
        axes.plot(steps, _numbers(null.median), color=MUTED, linewidth=0.7, linestyle=(0, (4, 2)), zorder=1)
    if len(lines) > 1:
        _draw_heads(axes, steps, lines, depth(experiment))
    middle = _numbers(curve.median)
    dots = "o" if len(steps) <= 12 else ""
    axes.plot(steps, middle, color="white", linewidth=2.9, zorder=3)
    axes.plot(steps, middle, color="black", linewidth=1.7, zorder=4, marker=dots, markersize=2.6, clip_on=False)
    scale_steps(axes, curve.steps, clean(fitted(experiment.axis, 30)))
    limits = _limits(experiment, name)
    if limits is not None:
        low, high, logarithmic = limits
        scale_values(axes, low, high, logarithmic=logarithmic)
    axes.spines[["top", "right"]].set_visible(False)
    if bar and lines and _deep(experiment):
        depth_bar(axes, experiment)


def depth(experiment: Experiment) -> Normalize:
    """The layers' colours, dark is the first."""
    return Normalize(0, max(1, max((found.layer for found in experiment.trajectories), default=0)))


def depth_bar(axes: Axes, experiment: Experiment) -> None:
    """Which colour is which layer, to the right of the axes."""
    wide, high = size_in_points(axes)
    place = axes.inset_axes((1 + 7 / wide, 0, 7 / wide, 1))
    norm = depth(experiment)
    bar = figure_of(axes).colorbar(ScalarMappable(norm, DEPTH), cax=place)
    bar.outline.set_linewidth(0.4)
    bar.set_ticks(tick_positions(int(norm.vmax or 0) + 1, max(2, int(high / 14))))
    place.invert_yaxis()
    place.tick_params(labelsize=6.5, length=2, pad=1.5)
    place.set_title("layer", fontsize=6.5, pad=6, loc="left", color=INK)


def _draw_heads(axes: Axes, steps: Float[np.ndarray, " steps"], lines: list[Trajectory], colours: Normalize) -> None:
    if not lines:
        return
    # in a mixed order, so that the last layers do not cover the first; with a seed, so that the file stays the same
    mixed = [lines[index] for index in np.random.default_rng(0).permutation(len(lines))]
    axes.add_collection(
        LineCollection(
            [np.column_stack([steps, _numbers(found.values)]) for found in mixed],
            array=np.array([found.layer for found in mixed], dtype=float),
            cmap=DEPTH,
            norm=colours,
            linewidths=0.7,
            alpha=float(np.clip(40 / len(mixed), 0.25, 0.75)),
            rasterized=len(mixed) > CROWD,
            zorder=2,
        )
    )


def _lines(experiment: Experiment, name: str) -> list[Trajectory]:
    return [found for found in experiment.trajectories if found.measure == name]


def _deep(experiment: Experiment) -> bool:
    """Whether more than one layer is followed, so that colours tell layers apart."""
    return len({found.layer for found in experiment.trajectories}) > 1


def _limits(experiment: Experiment, name: str) -> tuple[float, float, bool] | None:
    """Least and largest value shown, and whether by factors; None where there is no value.

    By factors where the median grows by a factor of 30; else all, unless one value in a hundred would double the range.
    """
    middle = _numbers(experiment.curves[name].median)
    values = np.concatenate([middle, *(_numbers(found.values) for found in _lines(experiment, name))])
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    least, most = float(np.nanmin(middle)), float(np.nanmax(middle))
    if values.min() > 0 and most >= LOG_RANGE * least:
        return float(values.min()), float(values.max()), True
    low, high = np.percentile(values, [0.5, 99.5])
    low, high = min(float(low), least), max(float(high), most)
    if values.max() - values.min() <= STRAY * (high - low):
        low, high = float(values.min()), float(values.max())
    return low, high, False


def _beyond(experiment: Experiment, name: str) -> int:
    """How many heads leave the frame, which is a twentieth wider than the values it is made for."""
    limits = _limits(experiment, name)
    if limits is None or limits[2]:
        return 0
    low, high, _ = limits
    room = ROOM * (high - low)
    rows = [_numbers(found.values) for found in _lines(experiment, name)]
    return sum(bool(np.any((row < low - room) | (row > high + room))) for row in rows)


def _numbers(values: list[float | None]) -> Float[np.ndarray, " steps"]:
    return np.array([np.nan if value is None else value for value in values], dtype=float)
