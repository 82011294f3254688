"""A curve of every head as fans over layers, all together or by thirds of the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from attnlens.choices import Part
from attnlens.plots.captions import Band, bands, curve_caption, first_step, heading, long_enough, typeset
from attnlens.plots.style import (
    CROWD,
    INK,
    MUTED,
    PlainNumbers,
    figure_of,
    legend_above,
    new_figure,
    size_in_points,
    tick_positions,
)
from attnlens.shapes import Shapes
from attnlens.wording import clean, counted, source_of, title_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEPTH = ListedColormap(colormaps["viridis"](np.linspace(0, 0.92, 256)), name="depth")
"""Dark is the first layer, light the last; the lightest yellow is left out, which paper swallows."""

FORMULA, ASIDE = 24, 40
"""Characters of a formula that fit under a small picture, and along the side of one on a page of its own."""

WIDE_RANGE = 20.0
"""How far the largest number must lie above the end of a falling median curve for the axis to be logarithmic."""

PART_LINES = ("-", "--", ":")
"""The medians of encoder, decoder and cross where they share axes."""


def fan_figure(shapes: Shapes, name: str) -> Figure:
    """One curve of every head, axes for each part of the model, with a caption."""
    found = bands(shapes, name)
    wide, gap = (4.9, 0.0) if len(found) == 1 else (2.9, 0.3)
    page = 0.75 + len(found) * (wide + gap) - gap + 0.75
    caption = curve_caption(shapes, name, int(page * 16))
    below = 0.6 + 0.14 * (caption.count("\n") + 1)
    above = 0.45 if len(found) == 1 else 0.62
    tall = 3.6 + below + above
    figure = new_figure(page, tall)
    for number, band in enumerate(found):
        left = 0.75 + number * (wide + gap)
        axes = figure.add_axes((left / page, below / tall, wide / page, 3.6 / tall))
        draw_fan(axes, shapes, name, part=band.part, bar=number == len(found) - 1)
        if len(found) > 1:
            axes.set_title(band.part)
        if number:
            axes.tick_params(labelleft=False)
        else:
            formula = clean(shapes.info(name).formula)
            axes.set_ylabel(formula if 0 < len(formula) <= ASIDE else title_of(name), labelpad=1.5)
    right = (page - 0.75) / page
    figure.text(
        0.75 / page, 1 - 0.2 / tall, heading(shapes.info(name)), fontsize=11, weight="bold", va="center", color=INK
    )
    figure.text(right, 1 - 0.2 / tall, source_of(name), fontsize=8, ha="right", va="center", color=MUTED)
    figure.text(0.75 / page, (below - 0.42) / tall, caption, fontsize=6.8, va="top", color=MUTED, linespacing=1.35)
    return figure


def draw_fan(axes: Axes, shapes: Shapes, name: str, *, part: Part | None = None, bar: bool = True) -> None:
    """The heads' curves in their layers' colours, of one part or of all.

    Over those of one part the median (black) and the quartiles (dashed); where there are several, their medians.
    """
    info, every = shapes.info(name), bands(shapes, name)
    first = first_step(info)
    shown = [band for band in every if part in (None, band.part)]
    found = [(row, curve) for row, curve in shapes.curves[name] if part in (None, shapes.parts[row])]
    depth = Normalize(0, max(1, len(shapes.layers) - 1))
    draw_lines(axes, found, first, depth)
    if len(shown) == 1:
        draw_band(axes, shown[0].quartiles, first)
    else:
        _draw_medians(axes, shown, first)
    limit_values(axes, [curve for _, curve in shapes.curves[name]], [band.quartiles[1] for band in every])
    limit_steps(axes, first, max(len(curve) for _, curve in found))
    axes.set_xlabel("index k" if info.steps == "index" else info.steps, labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    if bar:
        show_depths(axes, shapes, depth)


def draw_lines(axes: Axes, found: list[tuple[int, Float[np.ndarray, " steps"]]], first: int, depth: Normalize) -> None:
    """The curves of heads, each in the colour of its layer's row."""
    # in a mixed order, so that the last layers do not cover the first; with a seed, so that the file stays the same
    curves = [found[index] for index in np.random.default_rng(0).permutation(len(found))]
    lines = LineCollection(
        [np.column_stack([first + np.arange(len(curve)), curve]) for _, curve in curves],
        array=np.array([row for row, _ in curves], dtype=float),
        cmap=DEPTH,
        norm=depth,
        linewidths=0.7,
        alpha=float(np.clip(60 / len(curves), 0.12, 0.6)),
        rasterized=len(curves) > CROWD,
    )
    axes.add_collection(lines)


def draw_band(axes: Axes, quartiles: Float[np.ndarray, "3 steps"], first: int) -> None:
    """The median as a black line, the quartiles dashed."""
    steps = first + np.arange(quartiles.shape[1])
    for line, (style, width) in zip(quartiles, (("--", 0.9), ("-", 1.6), ("--", 0.9)), strict=True):
        _draw_black(axes, steps, line, style, width)


def _draw_medians(axes: Axes, shown: list[Band], first: int) -> None:
    for band, style in zip(shown, PART_LINES, strict=False):
        steps = first + np.arange(band.steps)
        _draw_black(
            axes, steps, band.quartiles[1], style, 1.4, f"{'' if band is not shown[0] else 'median: '}{band.part}"
        )
    legend_above(axes, len(shown), handlelength=2.2)


def _draw_black(
    axes: Axes,
    steps: Float[np.ndarray, " steps"],
    line: Float[np.ndarray, " steps"],
    style: str,
    width: float,
    label: str = "",
) -> None:
    """A black line with white around it, all white below all black: neighbours must not thin each other."""
    axes.plot(steps, line, color="white", linewidth=width + 1.2, zorder=2)
    axes.plot(steps, line, color="black", linewidth=width, zorder=3, linestyle=style, label=label)


def limit_steps(axes: Axes, first: int, count: int) -> None:
    """The axis of `count` steps that begin at `first`."""
    axes.set_xlim(first, first + max(1, count - 1))
    steps = tick_positions(first + count, 7)
    axes.set_xticks([first, *(step for step in steps if step > first)])


def limit_values(
    axes: Axes, curves: list[Float[np.ndarray, " steps"]], medians: list[Float[np.ndarray, " steps"]]
) -> None:
    """Room for all curves; a logarithmic axis where the medians fall far."""
    values = np.concatenate(curves)
    if falls_far(values, medians):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        # rounding noise below a millionth of the largest would squeeze what can be seen
        axes.set_ylim(max(values[values > 0].min(), 1e-6 * values.max()) / 1.2, 1.2 * values.max())
    else:
        room = 0.04 * (values.max() - values.min()) or 0.5
        axes.set_ylim(values.min() - room, values.max() + room)
        axes.yaxis.set_major_formatter(PlainNumbers())


def falls_far(values: Float[np.ndarray, " all"], medians: list[Float[np.ndarray, " steps"]]) -> bool:
    """Whether the curves of these values, with these medians, want a logarithmic axis."""
    falling = values.min() >= 0 and all(median[0] > median[-1] > 0 for median in medians)
    return bool(falling and values.max() > WIDE_RANGE * min(median[-1] for median in medians))


def show_depths(axes: Axes, shapes: Shapes, norm: Normalize) -> None:
    """Which colour is which layer, in a bar beside the axes; one layer needs none."""
    if len(shapes.layers) == 1:
        return
    figure = figure_of(axes)
    wide, high = size_in_points(axes)
    place = axes.inset_axes((1 + 7 / wide, 0, 7 / wide, 1))
    bar = figure.colorbar(ScalarMappable(norm, DEPTH), cax=place)
    bar.outline.set_linewidth(0.4)
    rows = tick_positions(len(shapes.layers), max(2, int(high / 14)))
    bar.set_ticks(rows, labels=[str(shapes.layers[row]) for row in rows])
    place.invert_yaxis()
    place.tick_params(labelsize=6.5, length=2, pad=1.5)
    place.set_title("layer", fontsize=6.5, pad=6, loc="left")


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
        # what the black lines are
        handles = [
            Line2D([], [], color="black", label="median"),
            Line2D([], [], color="black", linestyle="--", label="quartiles"),
            *([Line2D([], [], color=MUTED, linestyle=":", label="other groups' medians")] if (len(found) > 1) else []),
        ]
        axes.legend(handles=handles, loc="lower right", frameon=False, fontsize=6.5, handlelength=2.6)
    every = [curve for _, curve in shapes.curves[name]]
    limit_values(axes, every, [group.quartiles[1] for group in found])
    limit_steps(axes, first, max(map(len, every)))
    axes.set_xlabel("index k" if info.steps == "index" else info.steps, labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    if bar:
        show_depths(axes, shapes, depth)


def _title(shapes: Shapes, rows: list[int]) -> str:
    first, last = shapes.layers[rows[0]], shapes.layers[rows[-1]]
    return f"layer {first}" if first == last else f"layers {first}–{last}"
