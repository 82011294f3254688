"""Colour maps of layers × heads, and fans with one curve per head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import BoundaryNorm, CenteredNorm, Colormap, ListedColormap, Normalize, to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from attnlens.choices import Part
from attnlens.report.pictures.style import (
    CATEGORIES,
    CROWD,
    INK,
    MISSING,
    MUTED,
    PlainNumbers,
    bands,
    curve_caption,
    figure_of,
    first_step,
    full_caption,
    heading,
    label_layers,
    legend_above,
    long_enough,
    new_figure,
    size_in_points,
    tick_positions,
    typeset,
)
from attnlens.report.shapes import MeasureMap, Shapes
from attnlens.wording import clean, counted, decimals_for, source_of, title_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure


DEPTH = ListedColormap(colormaps["viridis"](np.linspace(0, 0.92, 256)), name="depth")
"""Colours from dark (first layer) to light (last layer), without the lightest yellow, which is invisible on paper."""

FORMULA, ASIDE = 24, 40
"""Characters of a formula that fit under a small picture, and along the side of a picture on its own page."""

WIDE_RANGE = 20.0
"""Ratio of the largest number to the end of a falling median curve above which the axis is logarithmic."""

PART_LINES = ("-", "--", ":")  # line styles of the medians of encoder, decoder and cross on shared axes


def fan_figure(shapes: Shapes, name: str) -> Figure:
    """Draw one curve per head, with one pair of axes per part of the model, and a caption."""
    parts = bands(shapes, name)
    wide, gap = (4.9, 0.0) if len(parts) == 1 else (2.9, 0.3)
    page = 0.75 + len(parts) * (wide + gap) - gap + 0.75
    caption = curve_caption(shapes, name, int(page * 16))
    below = 0.6 + 0.14 * (caption.count("\n") + 1)
    above = 0.45 if len(parts) == 1 else 0.62
    tall = 3.6 + below + above
    figure = new_figure(page, tall)
    for number, band in enumerate(parts):
        left = 0.75 + number * (wide + gap)
        axes = figure.add_axes((left / page, below / tall, wide / page, 3.6 / tall))
        draw_fan(axes, shapes, name, part=band.part, bar=number == len(parts) - 1)
        if len(parts) > 1:
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
    """Draw the heads' curves in their layers' colours, for one part or for all.

    One part also gets its median (black) and quartiles (dashed); several parts get only their medians.
    """
    info, all_bands = shapes.info(name), bands(shapes, name)
    first = first_step(info)
    shown = [band for band in all_bands if part in (None, band.part)]
    lines = [(row, curve) for row, curve in shapes.curves[name] if part in (None, shapes.parts[row])]
    depth = Normalize(0, max(1, len(shapes.layers) - 1))
    _draw_curves(axes, lines, first, depth)
    if len(shown) == 1:
        draw_band(axes, shown[0].quartiles, first)
    else:
        for band, style in zip(shown, PART_LINES, strict=False):
            label = f"{'' if band is not shown[0] else 'median: '}{band.part}"
            _draw_black(axes, first + np.arange(band.steps), band.quartiles[1], style, 1.4, label)
        legend_above(axes, len(shown), handlelength=2.2)
    limit_values(axes, [curve for _, curve in shapes.curves[name]], [band.quartiles[1] for band in all_bands])
    limit_steps(axes, first, max(len(curve) for _, curve in lines))
    axes.set_xlabel("index k" if info.steps == "index" else info.steps, labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    if bar:
        show_depths(axes, shapes.layers, depth)


def draw_lines(
    axes: Axes, lines: list[tuple[int, Float[np.ndarray, "steps 2"]]], depth: Normalize, opacity: tuple[float, ...]
) -> None:
    """Draw lines in the colour of their layers; `opacity`: sum over all lines, and least and largest of one line."""
    # in random order, so that the last layers do not cover the first; seeded, so that the file is reproducible
    mixed = [lines[index] for index in np.random.default_rng(0).permutation(len(lines))]
    total, least, most = opacity
    axes.add_collection(
        LineCollection(
            [points for _, points in mixed],
            array=np.array([layer for layer, _ in mixed], dtype=float),
            cmap=DEPTH,
            norm=depth,
            linewidths=0.7,
            alpha=float(np.clip(total / len(mixed), least, most)),
            rasterized=len(mixed) > CROWD,
        )
    )


def _draw_curves(
    axes: Axes, found: list[tuple[int, Float[np.ndarray, " steps"]]], first: int, depth: Normalize
) -> None:
    lines = [(row, np.column_stack([first + np.arange(len(curve)), curve])) for row, curve in found]
    draw_lines(axes, lines, depth, (60, 0.12, 0.6))


def draw_band(axes: Axes, quartiles: Float[np.ndarray, "3 steps"], first: int) -> None:
    """Draw the median as a solid black line and the quartiles dashed."""
    steps = first + np.arange(quartiles.shape[1])
    for line, (style, width) in zip(quartiles, (("--", 0.9), ("-", 1.6), ("--", 0.9)), strict=True):
        _draw_black(axes, steps, line, style, width)


def _draw_black(
    axes: Axes,
    steps: Float[np.ndarray, " steps"],
    line: Float[np.ndarray, " steps"],
    style: str,
    width: float,
    label: str = "",
) -> None:
    """Draw a black line with a white border; all borders are below all black lines, so that neighbours stay intact."""
    axes.plot(steps, line, color="white", linewidth=width + 1.2, zorder=2)
    axes.plot(steps, line, color="black", linewidth=width, zorder=3, linestyle=style, label=label)


def limit_steps(axes: Axes, first: int, count: int) -> None:
    """Set the x axis to `count` steps starting at `first`."""
    axes.set_xlim(first, first + max(1, count - 1))
    steps = tick_positions(first + count, 7)
    axes.set_xticks([first, *(step for step in steps if step > first)])


def limit_values(
    axes: Axes, curves: list[Float[np.ndarray, " steps"]], medians: list[Float[np.ndarray, " steps"]]
) -> None:
    """Set the y axis to include all curves; use a logarithmic scale if the medians fall far."""
    values = np.concatenate(curves)
    if falls_far(values, medians):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        # values below a millionth of the largest are rounding noise and would squeeze the visible range
        axes.set_ylim(max(values[values > 0].min(), 1e-6 * values.max()) / 1.2, 1.2 * values.max())
    else:
        room = 0.04 * (values.max() - values.min()) or 0.5
        axes.set_ylim(values.min() - room, values.max() + room)
        axes.yaxis.set_major_formatter(PlainNumbers())


def falls_far(values: Float[np.ndarray, " all"], medians: list[Float[np.ndarray, " steps"]]) -> bool:
    """Check whether these values with these medians need a logarithmic axis."""
    falling = values.min() >= 0 and all(median[0] > median[-1] > 0 for median in medians)
    return bool(falling and values.max() > WIDE_RANGE * min(median[-1] for median in medians))


def show_depths(axes: Axes, layers: Sequence[int], norm: Normalize, colour: str = "black") -> None:
    """Draw a colour bar of the layers next to the axes, unless there is only one layer."""
    if len(layers) == 1:
        return
    wide, high = size_in_points(axes)
    place = axes.inset_axes((1 + 7 / wide, 0, 7 / wide, 1))
    bar = figure_of(axes).colorbar(ScalarMappable(norm, DEPTH), cax=place)
    bar.outline.set_linewidth(0.4)
    rows = tick_positions(len(layers), max(2, int(high / 14)))
    bar.set_ticks(rows, labels=[str(layers[row]) for row in rows])
    place.invert_yaxis()
    place.tick_params(labelsize=6.5, length=2, pad=1.5)
    place.set_title("layer", fontsize=6.5, pad=6, loc="left", color=colour)


THIRDS = 3


@dataclass(frozen=True)
class Depth:
    """Heads of some neighbouring layers, with their curves."""

    title: str  # `layers 0–3`, or the part if the model has several
    rows: tuple[int, ...]  # rows of the layers in `Shapes.layers`
    curves: list[tuple[int, Float[np.ndarray, " steps"]]]  # layer row and curve of each head

    @property
    def quartiles(self) -> Float[np.ndarray, "3 steps"]:
        """Lower quartile, median and upper quartile over heads whose curves have at least the most common length."""
        found: Float[np.ndarray, "3 steps"] = np.percentile(
            long_enough([curve for _, curve in self.curves]), [25, 50, 75], axis=0
        )
        return found

    @property
    def note(self) -> str:
        """Start of the median with its quartiles: Chen et al.'s number at index 0."""
        low, middle, high = (typeset(float(value), 2) for value in self.quartiles[:, 0])
        return f"starts at {middle} (quartiles {low} to {high}), {counted(len(self.curves), 'head')}"


def depths(shapes: Shapes, name: str) -> list[Depth]:
    """Group the curve's layers into thirds, or by part if the model has several, since these see different inputs."""
    rows_with_curve = sorted({row for row, _ in shapes.curves[name]})
    groups: dict[str, list[int]]
    parts = list(dict.fromkeys(shapes.parts[row] for row in rows_with_curve))
    if len(parts) > 1:
        groups = {part: [row for row in rows_with_curve if shapes.parts[row] == part] for part in parts}
    else:
        split = [list(map(int, rows)) for rows in np.array_split(rows_with_curve, min(THIRDS, len(rows_with_curve)))]
        groups = {_depth_title(shapes, rows): rows for rows in split}
    return [
        Depth(title, tuple(rows), [(row, curve) for row, curve in shapes.curves[name] if row in rows])
        for title, rows in groups.items()
    ]


def draw_depth(axes: Axes, *, shapes: Shapes, name: str, number: int, bar: bool) -> None:
    """Draw one group's heads in layer colours, its median and quartiles, and the other groups' medians dotted.

    All groups share both axes; `bar` adds the colour bar of the layers.
    """
    groups, info = depths(shapes, name), shapes.info(name)
    first, depth = first_step(info), Normalize(0, max(1, len(shapes.layers) - 1))
    _draw_curves(axes, groups[number].curves, first, depth)
    for other in (group for group in groups if group is not groups[number]):
        median = other.quartiles[1]
        colour = DEPTH(depth(float(np.mean(other.rows))))
        steps = first + np.arange(len(median))
        axes.plot(steps, median, color="white", linewidth=2.7, zorder=2)
        axes.plot(steps, median, color=colour, linewidth=1.5, linestyle=":", zorder=2.5)
    draw_band(axes, groups[number].quartiles, first)
    if number == 0:
        # legend of the black and dotted lines
        handles = [
            Line2D([], [], color="black", label="median"),
            Line2D([], [], color="black", linestyle="--", label="quartiles"),
            *([Line2D([], [], color=MUTED, linestyle=":", label="other groups' medians")] if (len(groups) > 1) else []),
        ]
        axes.legend(handles=handles, loc="lower right", frameon=False, fontsize=6.5, handlelength=2.6)
    curves = [curve for _, curve in shapes.curves[name]]
    limit_values(axes, curves, [group.quartiles[1] for group in groups])
    limit_steps(axes, first, max(map(len, curves)))
    axes.set_xlabel("index k" if info.steps == "index" else info.steps, labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    if bar:
        show_depths(axes, shapes.layers, depth)


def _depth_title(shapes: Shapes, rows: list[int]) -> str:
    first, last = shapes.layers[rows[0]], shapes.layers[rows[-1]]
    return f"layer {first}" if first == last else f"layers {first}–{last}"


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
    """Draw a colour map and return its colour bar. `colours`: colour map, norm, and which ends are cut."""
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
    """Hatch the cells; neighbours in a row share a rectangle, so that a file with 5,000 heads stays small."""
    for row, hatched in enumerate(cells):
        start = 0
        for is_hatched, run in groupby(hatched):
            length = len(list(run))
            if is_hatched:
                corner = (start - 0.5, row - 0.5)
                patch = Rectangle(corner, length, 1, facecolor=MISSING, edgecolor=MUTED, hatch=pattern, linewidth=0)
                patch.set_zorder(0.9)
                axes.add_patch(patch)
            start += length


CELL = 0.42  # side of a cell in inches, if the page has room

SAME = 1e-6  # relative spread up to which all heads get one colour

STEPS = 64  # samples of a colour map passed to pages that draw their own maps


@dataclass(frozen=True)
class Palette:
    """Colours of a map, for renderers without matplotlib."""

    name: str
    colours: tuple[str, ...]  # evenly spaced from the low to the high end, or one per category
    low: float  # value of the low end
    high: float  # value of the high end
    cut: str  # ends that also represent all values beyond: neither, min, max, both


def map_figure(shapes: Shapes, name: str) -> Figure:
    """Draw one measure over the whole model, with colour bar, numbers if they fit, and a caption."""
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
        # at the height of the axis label, between the numbers above and the caption below
        place = (1, -0.27 / height)
        axes.legend(handles=[patch], loc="center right", bbox_to_anchor=place, frameon=False, fontsize=7, borderpad=0)
    return figure


def draw_map(axes: Axes, shapes: Shapes, reading: MeasureMap, *, named: bool = True) -> None:
    """Draw the map: row = layer, layer 0 at the top, column = head; heads without a value are hatched."""
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
    """Choose colours, norm and cut ends of a map; it diverges from 0 if values can be negative.

    Values beyond the 1st–99th percentile by more than its width get the last colour, and the colour bar marks that end
    with an arrow, so that one head does not give all others the same shade.
    """
    if reading.labels:
        highest = max(max(reading.labels), len(reading.info.labels) - 1)
        colours = [CATEGORIES[number % len(CATEGORIES)] for number in range(highest + 1)]
        return ListedColormap(colours), BoundaryNorm(np.arange(highest + 2) - 0.5, highest + 1), "neither"
    low, high, extend = _limits(reading)
    if reading.signed:
        half = max(abs(low), abs(high)) or 1.0
        return colormaps["RdBu_r"], CenteredNorm(0, half), extend
    # reports have nine digits: a relative spread near that is rounding, which must not span all colours
    if high - low <= SAME * abs(high):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    return colormaps["viridis"], Normalize(low, high), extend


def palette(reading: MeasureMap) -> Palette:
    """Return the colours and limits of `scale` as a Palette."""
    colours, norm, extend = scale(reading)
    steps = colours.N if isinstance(norm, BoundaryNorm) else STEPS
    samples = tuple(to_hex(colour) for colour in colours(np.linspace(0, 1, steps)))
    return Palette(colours.name, samples, float(norm.vmin or 0), float(norm.vmax or 0), extend)


def null_mark(reading: MeasureMap) -> str:
    """Describe where the null's mean is on the colour bar; empty without a null."""
    norm = scale(reading)[1]
    if reading.null is None or norm.vmin is None or norm.vmax is None:
        return ""
    if norm.vmin <= reading.null[0] <= norm.vmax:
        return "the black mark on the colour bar"
    return f"which lies {'below' if reading.null[0] < norm.vmin else 'above'} the colour bar"


def write_numbers(axes: Axes, reading: MeasureMap, size: float = 6.5) -> None:
    """Write the value in every cell, if all of them fit."""
    if reading.labels:
        return
    rows, columns = reading.values.shape
    wide, high = size_in_points(axes)
    full = decimals_for(reading.present)
    # fewer decimals than in the table are better than no numbers
    for decimals in range(full, min(2, full) - 1, -1):
        texts = {at: typeset(value, decimals) for at, value in np.ndenumerate(reading.values) if not np.isnan(value)}
        if wide / columns >= 0.62 * size * max(map(len, texts.values())) + 3 and high / rows >= 1.5 * size:
            break
    else:
        return
    colours, norm, _ = scale(reading)
    for (row, column), text in texts.items():
        red, green, blue, _ = colours(norm(reading.values[row, column]))
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"  # luma
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=ink)


def _limits(reading: MeasureMap) -> tuple[float, float, str]:
    values = reading.present
    least, most = float(values.min()), float(values.max())
    low, high = (float(value) for value in np.percentile(values, [1, 99]))
    cut_low, cut_high = low - least > high - low > 0, most - high > high - low > 0
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get((cut_low, cut_high), "neither")
    return (low if cut_low else least), (high if cut_high else most), extend


def _mark_null(place: Axes, mean: float, sd: float) -> None:
    """Draw the null on the colour bar: mean as a horizontal line, ± sd as a vertical one, with a white border."""
    low, high = place.get_ylim()
    if low <= mean <= high:
        reach = [max(low, mean - sd), min(high, mean + sd)]
        for colour, width in (("white", 2.2), ("black", 1.0)):
            place.plot([0.5, 0.5], reach, color=colour, linewidth=width, scalex=False, scaley=False)
            place.plot([0, 1], [mean, mean], color=colour, linewidth=width, scalex=False, scaley=False)
