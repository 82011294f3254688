"""How does a curve differ from head to head and with depth? A fan of lines, its median and quartiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from attnlens.plots.captions import curve_caption, heading
from attnlens.plots.style import CROWD, INK, MUTED, figure_of, new_figure, size_in_points, tick_positions
from attnlens.shapes import Shapes
from attnlens.wording import clean, source_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEPTH = ListedColormap(colormaps["viridis"](np.linspace(0, 0.92, 256)), name="depth")
"""Dark is the first layer, light the last; the lightest yellow is left out, which paper swallows."""

FORMULA = 24
"""Characters of a formula that fit along the axis."""

WIDE_RANGE = 20.0
"""How far the largest number must lie above the end of a falling median curve for the axis to be logarithmic."""


def fan_figure(shapes: Shapes, name: str) -> Figure:
    """One curve of every head, with a caption."""
    caption = curve_caption(shapes, name, 105)
    below = 0.6 + 0.14 * (caption.count("\n") + 1)
    tall = 3.6 + below + 0.45
    figure = new_figure(6.4, tall)
    axes = figure.add_axes((0.75 / 6.4, below / tall, 4.9 / 6.4, 3.6 / tall))
    draw_fan(axes, shapes, name)
    figure.text(0.75 / 6.4, 1 - 0.2 / tall, heading(name), fontsize=11, weight="bold", va="center", color=INK)
    figure.text(5.65 / 6.4, 1 - 0.2 / tall, source_of(name), fontsize=8, ha="right", va="center", color=MUTED)
    figure.text(0.75 / 6.4, (below - 0.42) / tall, caption, fontsize=6.8, va="top", color=MUTED, linespacing=1.35)
    return figure


def draw_fan(axes: Axes, shapes: Shapes, name: str) -> None:
    """Every head's curve in its layer's colour; over them the median (black) and the quartiles (dashed)."""
    found = shapes.curves[name]
    depth = Normalize(0, max(1, len(shapes.layers) - 1))
    # in a mixed order, so that the last layers do not cover the first; with a seed, so that the file stays the same
    curves = [found[index] for index in np.random.default_rng(0).permutation(len(found))]
    lines = LineCollection(
        [np.column_stack([np.arange(len(curve)), curve]) for _, curve in curves],
        array=np.array([row for row, _ in curves], dtype=float),
        cmap=DEPTH,
        norm=depth,
        linewidths=0.7,
        alpha=float(np.clip(60 / len(curves), 0.12, 0.6)),
        rasterized=len(curves) > CROWD,
    )
    axes.add_collection(lines)
    quartiles = quartiles_of([curve for _, curve in curves])
    for line, (style, width) in zip(quartiles, (("--", 0.9), ("-", 1.6), ("--", 0.9)), strict=True):
        axes.plot(line, color="white", linewidth=width + 1.2)
        axes.plot(line, color="black", linestyle=style, linewidth=width)
    _limit(axes, [curve for _, curve in curves], quartiles[1])
    axes.set_xlabel(shapes.info(name).steps, labelpad=1.5)
    if len(formula := clean(shapes.info(name).formula)) <= FORMULA:
        axes.set_ylabel(formula, labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    _depth_bar(axes, shapes, depth)


def quartiles_of(curves: list[Float[np.ndarray, " steps"]]) -> Float[np.ndarray, "3 steps"]:
    """Lower quartile, median and upper quartile over heads, step by step; a head that has ended no longer counts."""
    padded = np.full((len(curves), max(map(len, curves))), np.nan)
    for row, curve in enumerate(curves):
        padded[row, : len(curve)] = curve
    return np.asarray(np.nanpercentile(padded, [25, 50, 75], axis=0))


def _limit(axes: Axes, curves: list[Float[np.ndarray, " steps"]], median: Float[np.ndarray, " steps"]) -> None:
    values = np.concatenate(curves)
    axes.set_xlim(0, max(1, len(median) - 1))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    falling = values.min() >= 0 and median[0] > median[-1] > 0
    if falling and values.max() > WIDE_RANGE * median[-1]:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        # rounding noise below a millionth of the largest would squeeze what can be seen
        axes.set_ylim(max(values[values > 0].min(), 1e-6 * values.max()) / 1.2, 1.2 * values.max())
    else:
        room = 0.04 * (values.max() - values.min()) or 0.5
        axes.set_ylim(values.min() - room, values.max() + room)


def _depth_bar(axes: Axes, shapes: Shapes, norm: Normalize) -> None:
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
