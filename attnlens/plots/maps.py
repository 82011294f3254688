"""Where in the model is a measure large? A map of layers × heads."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import BoundaryNorm, CenteredNorm, Colormap, ListedColormap, Normalize
from matplotlib.patches import Patch, Rectangle

from attnlens.plots.captions import full_caption, heading, typeset
from attnlens.plots.style import (
    CATEGORIES,
    INK,
    MISSING,
    MUTED,
    figure_of,
    label_layers,
    new_figure,
    size_in_points,
    tick_positions,
)
from attnlens.shapes import Reading, Shapes
from attnlens.wording import clean, decimals_for, source_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

CELL = 0.42
"""Side of a cell in inches, where the page has room for it."""


def map_figure(shapes: Shapes, name: str) -> Figure:
    """One measure over the whole model, with colour bar, numbers where they fit, and a caption."""
    reading = shapes.readings[name]
    width = float(np.clip(CELL * len(shapes.heads), 3.4, 8))
    height = float(np.clip(CELL * len(shapes.layers), 1.6, 8))
    page = width + 1.7
    caption = full_caption(shapes, reading, int(page * 17))
    below = 0.6 + 0.14 * (caption.count("\n") + 1)
    figure = new_figure(page, height + below + 0.4)
    tall = height + below + 0.4
    axes = figure.add_axes((0.65 / page, below / tall, width / page, height / tall))
    draw_map(axes, shapes, reading)
    write_numbers(axes, reading)
    source = source_of(name)
    figure.text(0.65 / page, 1 - 0.2 / tall, heading(name), fontsize=11, weight="bold", va="center", color=INK)
    figure.text((0.65 + width) / page, 1 - 0.2 / tall, source, fontsize=8, ha="right", va="center", color=MUTED)
    figure.text(0.65 / page, (below - 0.42) / tall, caption, fontsize=6.8, va="top", color=MUTED, linespacing=1.35)
    if reading.reasons:
        patch = Patch(facecolor=MISSING, edgecolor=MUTED, hatch="/////", linewidth=0.4, label="no value")
        axes.legend(handles=[patch], loc="upper right", bbox_to_anchor=(1, -0.32 / height), frameon=False, fontsize=7)
    return figure


def draw_map(axes: Axes, shapes: Shapes, reading: Reading, *, named: bool = True) -> AxesImage:
    """The map in the axes: row = layer, layer 0 at the top, column = head; heads without a value are hatched."""
    colours, norm, extend = scale(reading)
    masked = np.ma.masked_invalid(reading.values)
    image = axes.imshow(masked, cmap=colours, norm=norm, aspect="auto", interpolation="nearest", zorder=1)
    _hatch(axes, np.ma.getmaskarray(masked))
    wide, _ = size_in_points(axes)
    columns = tick_positions(len(shapes.heads), max(2, int(wide / 16)))
    axes.set_xticks(columns, [str(shapes.heads[column]) for column in columns])
    axes.set_xlabel("head", labelpad=1.5)
    label_layers(axes, shapes.layers, shapes.parts, named=named)
    _colour_bar(axes, image, reading, extend, 7 / wide, 7 / wide)
    return image


def scale(reading: Reading) -> tuple[Colormap, Normalize, str]:
    """Colours, their norm, and which ends are cut: a diverging map centred at 0 where values can be negative.

    Values far outside what the other heads show (beyond the 1st–99th percentile by more than its width) are drawn in
    the last colour, and the colour bar says so with an arrow: one head must not turn the others into one shade.
    """
    if reading.labels:
        highest = max(max(reading.labels), len(reading.info.labels) - 1)
        colours = [CATEGORIES[number % len(CATEGORIES)] for number in range(highest + 1)]
        return ListedColormap(colours), BoundaryNorm(np.arange(highest + 2) - 0.5, highest + 1), "neither"
    low, high, extend = _limits(reading)
    if reading.signed:
        half = max(abs(low), abs(high)) or 1.0
        return colormaps["RdBu_r"], CenteredNorm(0, half), extend
    return colormaps["viridis"], Normalize(low, high if high > low else low + (abs(low) or 1.0)), extend


def write_numbers(axes: Axes, reading: Reading, size: float = 6.5) -> None:
    """The value in every cell, where every cell has room for it."""
    if reading.labels:
        return
    decimals = min(2, decimals_for(reading.present))
    texts = {cell: typeset(value, decimals) for cell, value in np.ndenumerate(reading.values) if not np.isnan(value)}
    rows, columns = reading.values.shape
    wide, high = size_in_points(axes)
    longest = max(len(text) for text in texts.values())
    if wide / columns < 0.62 * size * longest + 3 or high / rows < 1.5 * size:
        return
    colours, norm, _ = scale(reading)
    for (row, column), text in texts.items():
        red, green, blue, _ = colours(norm(reading.values[row, column]))
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=ink)


def _limits(reading: Reading) -> tuple[float, float, str]:
    values = reading.present
    least, most = float(values.min()), float(values.max())
    low, high = (float(value) for value in np.percentile(values, [1, 99]))
    cut_low, cut_high = low - least > high - low > 0, most - high > high - low > 0
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get((cut_low, cut_high), "neither")
    return (low if cut_low else least), (high if cut_high else most), extend


def _hatch(axes: Axes, missing: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> None:
    """Neighbours in a row share a rectangle, so that a model of 5,000 heads stays a small file."""
    for row, gone in enumerate(missing):
        start = 0
        for empty, run in groupby(gone):
            length = len(list(run))
            if empty:
                corner = (start - 0.5, row - 0.5)
                axes.add_patch(
                    Rectangle(
                        corner, length, 1, facecolor=MISSING, edgecolor=MUTED, hatch="/////", linewidth=0, zorder=0.9
                    )
                )
            start += length


def _colour_bar(axes: Axes, image: AxesImage, reading: Reading, extend: str, gap: float, thickness: float) -> None:
    figure = figure_of(axes)
    place = axes.inset_axes((1 + gap, 0, thickness, 1))
    bar = figure.colorbar(image, cax=place, extend=extend)
    bar.outline.set_linewidth(0.4)
    place.tick_params(labelsize=6.5, length=2, pad=1.5)
    if reading.labels:
        names = reading.labels | dict(enumerate(reading.info.labels))
        bar.set_ticks(sorted(names), labels=[clean(names[number]).replace(" ", "\n") for number in sorted(names)])
        place.tick_params(length=0, which="both")
    if reading.null is not None:
        mean, sd = reading.null
        low, high = place.get_ylim()
        if low <= mean <= high:
            place.axhspan(max(low, mean - sd), min(high, mean + sd), color="black", alpha=0.35, linewidth=0)
            place.axhline(mean, color="black", linewidth=1)
