"""A curve's fans in the first, middle and last third of the layers, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D

from attnlens.plots.bands import first_step, long_enough
from attnlens.plots.captions import typeset
from attnlens.plots.fans import DEPTH, draw_band, draw_lines, limit_steps, limit_values, show_depths
from attnlens.plots.style import MUTED
from attnlens.shapes import Shapes
from attnlens.wording import counted

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes

THIRDS = 3


@dataclass(frozen=True)
class Depth:
    """The heads of some neighbouring layers and their curves."""

    title: str
    """`layers 0–3`, or the part where the model has several."""
    rows: tuple[int, ...]
    """The layers' rows in `Shapes.layers`."""
    curves: list[tuple[int, Float[np.ndarray, " steps"]]]
    """For each head its row and its numbers."""

    @property
    def quartiles(self) -> Float[np.ndarray, "3 steps"]:
        """Lower quartile, median and upper quartile over the heads whose curves are as long as most are."""
        found: Float[np.ndarray, "3 steps"] = np.percentile(
            long_enough([curve for _, curve in self.curves]), [25, 50, 75], axis=0
        )
        return found

    @property
    def note(self) -> str:
        """Where the median starts, with its quartiles: Chen et al.'s number at index 0."""
        low, middle, high = (typeset(float(value), 2) for value in self.quartiles[:, 0])
        return f"starts at {middle} (quartiles {low} to {high}), {counted(len(self.curves), 'head')}"


def depths(shapes: Shapes, name: str) -> list[Depth]:
    """The thirds of the layers that have the curve; of a model with several parts its parts, which see other inputs."""
    there = sorted({row for row, _ in shapes.curves[name]})
    groups: dict[str, list[int]]
    parts = list(dict.fromkeys(shapes.parts[row] for row in there))
    if len(parts) > 1:
        groups = {part: [row for row in there if shapes.parts[row] == part] for part in parts}
    else:
        split = [list(map(int, rows)) for rows in np.array_split(there, min(THIRDS, len(there)))]
        groups = {_title(shapes, rows): rows for rows in split}
    return [
        Depth(title, tuple(rows), [(row, curve) for row, curve in shapes.curves[name] if row in rows])
        for title, rows in groups.items()
    ]


def draw_depth(axes: Axes, *, shapes: Shapes, name: str, number: int, bar: bool) -> None:
    """One group's heads in their layers' colours, its median and quartiles, and dotted the other groups' medians.

    All groups share both axes; `bar` adds the colours' meaning.
    """
    found, info = depths(shapes, name), shapes.info(name)
    first, depth = first_step(info), Normalize(0, max(1, len(shapes.layers) - 1))
    draw_lines(axes, found[number].curves, first, depth)
    for other in (group for group in found if group is not found[number]):
        median = other.quartiles[1]
        colour = DEPTH(depth(float(np.mean(other.rows))))
        steps = first + np.arange(len(median))
        axes.plot(steps, median, color="white", linewidth=2.7, zorder=2)
        axes.plot(steps, median, color=colour, linewidth=1.5, linestyle=":", zorder=2.5)
    draw_band(axes, found[number].quartiles, first)
    if number == 0:
        _show_lines(axes, several=len(found) > 1)
    every = [curve for _, curve in shapes.curves[name]]
    limit_values(axes, every, [group.quartiles[1] for group in found])
    limit_steps(axes, first, max(map(len, every)))
    axes.set_xlabel("index k" if info.steps == "index" else info.steps, labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    if bar:
        show_depths(axes, shapes, depth)


def _show_lines(axes: Axes, *, several: bool) -> None:
    """What the black lines are."""
    handles = [
        Line2D([], [], color="black", label="median"),
        Line2D([], [], color="black", linestyle="--", label="quartiles"),
        *([Line2D([], [], color=MUTED, linestyle=":", label="other groups' medians")] if several else []),
    ]
    axes.legend(handles=handles, loc="lower right", frameon=False, fontsize=6.5, handlelength=2.6)


def _title(shapes: Shapes, rows: list[int]) -> str:
    first, last = shapes.layers[rows[0]], shapes.layers[rows[-1]]
    return f"layer {first}" if first == last else f"layers {first}–{last}"
