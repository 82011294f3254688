"""Maps of layers × heads in colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import BoundaryNorm, CenteredNorm, Colormap, ListedColormap, Normalize, to_hex
from matplotlib.patches import Patch, Rectangle

from attnlens.plots.captions import full_caption, heading, typeset
from attnlens.plots.style import (
    CATEGORIES,
    INK,
    MISSING,
    MUTED,
    PlainNumbers,
    figure_of,
    label_layers,
    new_figure,
    size_in_points,
    tick_positions,
)
from attnlens.shapes import MeasureMap, Shapes
from attnlens.wording import clean, decimals_for, source_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure


def heat_map(
    axes: Axes,
    values: Float[np.ndarray, "layers heads"],
    layers: Sequence[int],
    heads: Sequence[int],
    parts: Sequence[str],
    colours: tuple[Colormap, Normalize, str],
    *,
    named: bool,
) -> Colorbar:
    """Draw the map; its colour bar. `colours`: the map, its norm, which ends of it are cut."""
    colour_map, norm, extend = colours
    masked = np.ma.masked_invalid(values)
    image = axes.imshow(masked, cmap=colour_map, norm=norm, aspect="auto", interpolation="nearest", zorder=1)
    hatch(axes, np.ma.getmaskarray(masked), "/////")
    wide, _ = size_in_points(axes)
    columns = tick_positions(len(heads), max(2, int(wide / 16)))
    axes.set_xticks(columns, [str(heads[column]) for column in columns])
    axes.set_xlabel("head", labelpad=1.5)
    label_layers(axes, layers, parts, named=named)
    place = axes.inset_axes((1 + 7 / wide, 0, 7 / wide, 1))
    bar = figure_of(axes).colorbar(image, cax=place, extend=extend)
    bar.outline.set_linewidth(0.4)
    place.tick_params(labelsize=6.5, length=2, pad=1.5)
    bar.formatter = PlainNumbers()
    return bar


def hatch(axes: Axes, cells: Bool[np.ndarray, "layers heads"], pattern: str) -> None:
    """Hatch these cells; neighbours in a row share a rectangle, so that 5,000 heads stay a small file."""
    for row, hatched in enumerate(cells):
        start = 0
        for found, run in groupby(hatched):
            length = len(list(run))
            if found:
                corner = (start - 0.5, row - 0.5)
                patch = Rectangle(corner, length, 1, facecolor=MISSING, edgecolor=MUTED, hatch=pattern, linewidth=0)
                patch.set_zorder(0.9)
                axes.add_patch(patch)
            start += length


CELL = 0.42
"""Side of a cell in inches, where the page has room for it."""

SAME = 1e-6
"""Relative spread up to which all heads have one colour."""

STEPS = 64
"""Colours by which a page that draws its own maps is told a colour map."""


@dataclass(frozen=True)
class Palette:
    """The colours of a map, for what draws it without matplotlib."""

    name: str
    """The colour map's."""
    colours: tuple[str, ...]
    """From its low end to its high end, evenly spaced; of categories, each one's."""
    low: float
    """What its low end stands for."""
    high: float
    """What its high end stands for."""
    cut: str
    """Which ends stand for all that is beyond, too: neither, min, max, both."""


def map_figure(shapes: Shapes, name: str) -> Figure:
    """One measure over the whole model, with colour bar, numbers where they fit, and a caption."""
    reading = shapes.readings[name]
    width = float(np.clip(CELL * len(shapes.heads), 3.4, 8))
    height = float(np.clip(CELL * len(shapes.layers), 1.6, 8))
    page = width + 1.7
    caption = full_caption(shapes, reading, int(page * 17), null_mark(reading))
    below = 0.6 + 0.14 * (caption.count("\n") + 1)
    figure = new_figure(page, height + below + 0.4)
    tall = height + below + 0.4
    axes = figure.add_axes((0.65 / page, below / tall, width / page, height / tall))
    draw_map(axes, shapes, reading)
    write_numbers(axes, reading)
    source = source_of(name)
    figure.text(0.65 / page, 1 - 0.2 / tall, heading(reading.info), fontsize=11, weight="bold", va="center", color=INK)
    figure.text((0.65 + width) / page, 1 - 0.2 / tall, source, fontsize=8, ha="right", va="center", color=MUTED)
    figure.text(0.65 / page, (below - 0.42) / tall, caption, fontsize=6.8, va="top", color=MUTED, linespacing=1.35)
    if not reading.full:
        patch = Patch(facecolor=MISSING, edgecolor=MUTED, hatch="/////", linewidth=0.4, label="no value")
        # on the line of the axis' name, between the numbers above and the caption below
        place = (1, -0.27 / height)
        axes.legend(handles=[patch], loc="center right", bbox_to_anchor=place, frameon=False, fontsize=7, borderpad=0)
    return figure


def draw_map(axes: Axes, shapes: Shapes, reading: MeasureMap, *, named: bool = True) -> None:
    """The map in the axes: row = layer, layer 0 at the top, column = head; heads without a value are hatched."""
    bar = heat_map(axes, reading.values, shapes.layers, shapes.heads, shapes.parts, scale(reading), named=named)
    if reading.labels:
        names = reading.labels | dict(enumerate(reading.info.labels))
        bar.set_ticks(sorted(names), labels=[clean(names[number]).replace(" ", "\n") for number in sorted(names)])
        bar.ax.tick_params(length=0, pad=3, which="both")
    elif reading.constant:
        bar.set_ticks([float(reading.present[0])])
    if not reading.labels:
        bar.update_ticks()
    if reading.null is not None:
        _mark_null(bar.ax, *reading.null)


def scale(reading: MeasureMap) -> tuple[Colormap, Normalize, str]:
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
    # a spread near the report's nine digits is rounding, and no reason to use all colours
    if high - low <= SAME * abs(high):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    return colormaps["viridis"], Normalize(low, high), extend


def palette(reading: MeasureMap) -> Palette:
    """The same as colours and limits."""
    colours, norm, extend = scale(reading)
    steps = colours.N if isinstance(norm, BoundaryNorm) else STEPS
    samples = tuple(to_hex(colour) for colour in colours(np.linspace(0, 1, steps)))
    return Palette(colours.name, samples, float(norm.vmin or 0), float(norm.vmax or 0), extend)


def null_mark(reading: MeasureMap) -> str:
    """Where the null's mean stands on the colour bar, in words; empty where there is no null."""
    norm = scale(reading)[1]
    if reading.null is None or norm.vmin is None or norm.vmax is None:
        return ""
    if norm.vmin <= reading.null[0] <= norm.vmax:
        return "the black mark on the colour bar"
    return f"which lies {'below' if reading.null[0] < norm.vmin else 'above'} the colour bar"


def write_numbers(axes: Axes, reading: MeasureMap, size: float = 6.5) -> None:
    """The value in every cell, where every cell has room for it."""
    if reading.labels:
        return
    rows, columns = reading.values.shape
    wide, high = size_in_points(axes)
    full = decimals_for(reading.present)
    # fewer decimals than in a table are better than no numbers
    for decimals in range(full, min(2, full) - 1, -1):
        texts = {at: typeset(value, decimals) for at, value in np.ndenumerate(reading.values) if not np.isnan(value)}
        if wide / columns >= 0.62 * size * max(map(len, texts.values())) + 3 and high / rows >= 1.5 * size:
            break
    else:
        return
    colours, norm, _ = scale(reading)
    for (row, column), text in texts.items():
        red, green, blue, _ = colours(norm(reading.values[row, column]))
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=ink)


def _limits(reading: MeasureMap) -> tuple[float, float, str]:
    values = reading.present
    least, most = float(values.min()), float(values.max())
    low, high = (float(value) for value in np.percentile(values, [1, 99]))
    cut_low, cut_high = low - least > high - low > 0, most - high > high - low > 0
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get((cut_low, cut_high), "neither")
    return (low if cut_low else least), (high if cut_high else most), extend


def _mark_null(place: Axes, mean: float, sd: float) -> None:
    """The null as an error bar on the colour bar: its mean across, ± sd upright; white around it, for dark colours."""
    low, high = place.get_ylim()
    if low <= mean <= high:
        reach = [max(low, mean - sd), min(high, mean + sd)]
        for colour, width in (("white", 2.2), ("black", 1.0)):
            place.plot([0.5, 0.5], reach, color=colour, linewidth=width, scalex=False, scaley=False)
            place.plot([0, 1], [mean, mean], color=colour, linewidth=width, scalex=False, scaley=False)
