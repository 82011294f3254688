"""Charts (heat maps, fans of lines, dots with intervals), and pages of charts in matplotlib's constrained layout."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, groupby
from string import ascii_lowercase
from typing import TYPE_CHECKING, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import EllipseCollection, LineCollection
from matplotlib.colors import Colormap, Normalize
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FixedLocator, FuncFormatter

from attnlens.analyzers.registry import find_measure, list_analyzers
from attnlens.choices import PARTS, Part
from attnlens.report.pictures import style
from attnlens.report.sections.facts import population
from attnlens.report.sections.facts import title as title_of_report
from attnlens.report.sections.reference import null_words
from attnlens.report.shapes import Names, drop_rotary
from attnlens.wording import big, capitalise, clean, source_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from matplotlib.axis import Axis
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure

    from attnlens.records import Report


def as_array(values: Iterable[float | None]) -> Float[np.ndarray, " values"]:
    """Return the values as an array, with NaN for missing values."""
    return np.array(list(values), dtype=float)


MISSING = "#dddddd"
CROWD = 400  # number of lines above which a vector file contains pixels instead of lines, to stay small
Colours = tuple[Colormap, Normalize, str]
"""Colour map, norm, and ends of the colour bar that get an arrow: `min`, `max`, `both` or `neither`."""
Place = tuple[int, int, Part]  # layer, head and part of a cell


@dataclass(frozen=True)
class HeadGrid:
    """Values with one row per layer, sorted by part, and one column per head; NaN for missing values."""

    values: Float[np.ndarray, "layers heads"]
    layers: Sequence[int]
    heads: Sequence[int]
    parts: Sequence[Part]  # part of each layer


def grid_of(places: Sequence[Place], values: Iterable[float | None]) -> HeadGrid:
    """Arrange values by layer and head; `places` contains the layer, head and part of each value."""
    part_of = {layer: part for layer, _, part in places}
    layers = sorted(part_of, key=lambda layer: (PARTS.index(part_of[layer]), layer))
    heads = sorted({head for _, head, _ in places})
    cells = {place[:2]: value for place, value in zip(places, values, strict=True)}
    rows = [[cells.get((layer, head)) for head in heads] for layer in layers]
    return HeadGrid(np.array(rows, dtype=float), layers, heads, [part_of[layer] for layer in layers])


def heat_map(axes: Axes, grid: HeadGrid, colours: Colours, label: str = "", number: Names = str) -> Colorbar:
    """Draw a map with the first layer at the top and missing values hatched; return its colour bar."""
    colour_map, norm, extend = colours
    masked = np.ma.masked_invalid(grid.values)
    image = axes.imshow(masked, cmap=colour_map, norm=norm, aspect="auto", interpolation="nearest", zorder=1)
    hatch(axes, np.ma.getmaskarray(masked), "/////")
    label_indices(axes.xaxis, grid.heads)
    axes.set_xlabel("head")
    label_layers(axes, [number(layer) for layer in grid.layers], grid.parts)
    axes.spines[:].set_visible(True)
    return _colour_bar(axes, image, label, extend)


def _colour_bar(axes: Axes, mappable: ScalarMappable, label: str, extend: str = "neither") -> Colorbar:
    place = axes.inset_axes((1.03, 0, 0.03, 1))  # left, bottom, width, height, as shares of the axes
    figure = axes.get_figure(root=True)
    assert figure is not None  # noqa: S101  # for the type checker: these axes are in a figure
    bar = figure.colorbar(mappable, cax=place, extend=extend)
    bar.outline.set_linewidth(0.4)
    bar.set_label(label, fontsize=6.5, labelpad=2)
    place.tick_params(labelsize=6.5, length=2, pad=1.5)
    return bar


def hatch(axes: Axes, cells: Bool[np.ndarray, "layers heads"], pattern: str) -> None:
    """Hatch the cells that are True, with one rectangle per run of neighbours in a row to keep files small."""
    for row, hatched in enumerate(cells):
        runs = np.flatnonzero(np.diff(hatched, prepend=False, append=False)).reshape(-1, 2)
        for start, stop in runs.tolist():
            hatch_box(axes, (start - 0.5, row - 0.5), stop - start, 1, pattern)


def hatch_box(axes: Axes, corner: tuple[float, float], width: float, height: float, pattern: str = "/////") -> None:
    """Draw a hatched rectangle for a missing value."""
    look: style.Style = {
        "facecolor": MISSING,
        "edgecolor": style.MUTED,
        "hatch": pattern,
        "linewidth": 0,
        "zorder": 0.9,
    }
    axes.add_patch(Rectangle(corner, width, height, **look))


def mark_cells(
    axes: Axes, cells: Bool[np.ndarray, "layers heads"], colour: str, edge: str = "none", *, below: float = 0.0
) -> None:
    """Draw a dot in each cell that is True, `below` cells under its centre."""
    size = [min(0.25, 0.014 * max(cells.shape))]
    colours: style.Style = {"facecolors": colour, "edgecolors": edge, "linewidths": 0.4, "zorder": 2}
    offsets: style.Style = {"offsets": np.argwhere(cells)[:, ::-1] + [0, below], "offset_transform": axes.transData}
    units: Literal["x", "y"] = "x" if cells.shape[1] >= cells.shape[0] else "y"
    axes.add_collection(EllipseCollection(size, size, [0], units=units, **offsets, **colours), autolim=False)


def write_cells(axes: Axes, texts: Mapping[tuple[int, int], str], grid: HeadGrid, colours: Colours) -> None:
    """Write texts, keyed by (row, column), into a map's cells, in black or white depending on the cell's colour."""
    colour_map, norm, _ = colours
    for (row, column), text in texts.items():
        luma = np.dot(colour_map(norm(grid.values[row, column]))[:3], (0.299, 0.587, 0.114))
        ink = "black" if luma > 0.55 else "white"
        axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=ink)


def label_indices(axis: Axis, names: Sequence[int] | Sequence[str]) -> None:
    """Label a map's rows or columns along an axis, with as many of their names as there is room for."""
    axis.set_major_locator(style.IndexTicks(len(names)))
    axis.set_major_formatter(FuncFormatter(lambda place, _: str(names[round(place)])))


def label_layers(axes: Axes, layers: Sequence[str], parts: Sequence[str]) -> None:
    """Label the layers on the y axis, the first at the top; if there are several parts, add the names of the parts."""
    label_indices(axes.yaxis, layers)
    axes.set_ylim(len(layers) - 0.5, -0.5)
    groups = [(part, [row for row, of in enumerate(parts) if of == part]) for part in dict.fromkeys(parts)]
    if len(groups) == 1:
        axes.set_ylabel("layer")
        return
    # "layer" goes above the numbers, because the parts' names take its usual place
    axes.annotate("layer", (0, 1), (-4, 3), "axes fraction", textcoords="offset points", fontsize=6.5, ha="right")
    for part, rows in groups:
        if rows[0] > 0:
            axes.axhline(rows[0] - 0.5, color="white", linewidth=2.5)
            axes.axhline(rows[0] - 0.5, color=style.INK, linewidth=0.6)
        at, place = (0, (rows[0] + rows[-1]) / 2), ("axes fraction", "data")
        axes.annotate(part, at, (-24, 0), place, "offset points", rotation=90, ha="center", va="center")


Points = tuple["Float[np.ndarray, ' steps']", "Float[np.ndarray, ' steps']"]  # steps and values of a line


def fan_chart(
    axes: Axes, lines: Sequence[tuple[int, Points]], layers: int, opacity: tuple[float, float, float] = (60, 0.12, 0.6)
) -> None:
    """Draw one thin line per head in the colour of its layer.

    `lines` contains (row of the layer, points) pairs, and `layers` is the number of rows. `opacity` contains the sum
    over all lines, and the minimum and maximum for a single line.
    """
    if not lines:
        return
    # in random order, so that the last layers do not cover the first; seeded, so that the file is reproducible
    mixed = [lines[index] for index in np.random.default_rng(0).permutation(len(lines))]
    total, least, most = opacity
    collection = LineCollection(
        [np.column_stack(points) for _, points in mixed],
        array=np.array([row for row, _ in mixed], dtype=float),
        cmap=style.DEPTH,
        norm=scale_depth(layers),
        linewidths=0.7,
        alpha=float(np.clip(total / len(mixed), least, most)),
        rasterized=len(mixed) > CROWD,
    )
    axes.add_collection(collection)


def scale_depth(layers: int) -> Normalize:
    """Return the norm that maps a layer's row to [0, 1], the domain of the colour map DEPTH."""
    return Normalize(0, max(1, layers - 1))


def draw_over(
    axes: Axes,
    points: Points,
    dash: str,
    width: float,
    *,
    colour: str | tuple[float, ...] = "black",
    label: str = "",
    marker: str = "",
) -> None:
    """Draw a line with a solid white border that makes it stand out against other lines."""
    axes.plot(*points, color="white", linewidth=width + 1.2, zorder=2)
    look: style.Style = {"color": colour, "linestyle": dash, "linewidth": width, "marker": marker, "markersize": 2.6}
    axes.plot(*points, zorder=3, label=label, **look)


@dataclass(frozen=True)
class Dot:
    """One estimate in a row of a dot plot."""

    value: float | None  # None: only `text` is written
    ends: tuple[float, float] | None = None  # ends of the value's interval
    colour: str = style.CATEGORIES[0]
    marker: str = "o"
    size: float = 4.5
    hollow: bool = False
    text: str = ""  # text to show instead of a missing value


def dot_plot(axes: Axes, rows: Sequence[Collection[Dot]], names: Sequence[str] | None = None) -> None:
    """Draw rows of dots with their intervals, the first row at the top, and label the rows with `names`."""
    for row, dot in ((row, dot) for row, dots in enumerate(rows) for dot in dots):
        if dot.value is None:
            place: style.Style = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
            axes.text(0.99, row, dot.text, color=style.CATEGORIES[2], style="italic", **place)
            continue
        if dot.ends is not None:
            axes.plot(dot.ends, [row, row], color=dot.colour, linewidth=1.4, alpha=0.6, solid_capstyle="butt")
        face = "white" if dot.hollow else dot.colour
        axes.plot(dot.value, row, dot.marker, color=dot.colour, markerfacecolor=face, markersize=dot.size)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.08)
    if names is not None:
        axes.set_yticks(range(len(rows)), names)
        axes.tick_params(axis="y", length=0)


WIDTH, SIDE = 10.0, 0.3  # inches: width of an overview; left and right margin of any page
HEAD, FOOT = 0.66, 0.26  # inches: height of an overview's title with the line of facts; height of its footer
AROUND, HEADING = 0.98, 0.2  # inches: height of a panel's title and axis labels; height of a row's heading
TITLE, FACTS, FOOTNOTE = 66, 155, 170  # characters that fit into an overview's title, its line of facts, and its footer
MARGIN = 0.08  # inches free above a single picture
BESIDE = 0.3  # inches of a panel's width that its title and note leave free
TITLE_PER_INCH, NOTE_PER_INCH, CAPTION_PER_INCH = 14, 20, 18.5
"""Number of characters that fit into an inch of a panel's title, of its note, and of a caption."""
LINE = 0.128  # inches per line of a caption
WEIGHTS = "weights."  # start of the names of measures that do not depend on the input


@dataclass(frozen=True)
class Panel:
    """Chart with its texts and size, drawn on a page with other charts or in a separate file."""

    stem: str  # file name without suffix
    title: str  # title above the chart
    note: str  # line under the title; empty if there is a legend instead
    caption: str  # explanation, shown in a separate file
    draw: Callable[[Axes], None]
    rows: int = 12  # height, in lines of text
    width: float = 4.6  # width of the axes in inches in a separate file
    layers: Sequence[str] = ()
    """Names of the layers, if colours represent layers; the last such panel in a row gets a colour bar."""
    parts: Sequence[Panel] = ()  # panels that are drawn instead of this panel, three per row


@dataclass(frozen=True)
class Row:
    """A row of panels on a page; None leaves a cell empty."""

    panels: Sequence[Panel | None]
    height: float  # height of the axes in inches
    heading: str = ""  # text above the row, under a thin line

    @property
    def total(self) -> float:
        """Total height of the axes, axis labels, titles and heading, in inches."""
        return self.height + AROUND + HEADING * bool(self.heading)


def model_facts(report: Report) -> list[str]:
    """Return the model's architecture and number of parameters as texts."""
    model = report.model
    return [clean(model.architecture), f"{big(model.parameters)} parameters" if model.parameters else ""]


def caption_panels(
    report: Report, panels: Collection[Panel], title: str, facts: Iterable[str], notes: Iterable[str] = ()
) -> str:
    """Format the caption of a page: title, facts, one paragraph per panel, notes, and explanations of the measures."""
    known = [*filter(None, facts)]
    paragraphs = [f"{title}: {', '.join(known)}" if known else title]
    for letter, panel in zip(cycle(ascii_lowercase), panels, strict=False):
        name = f" ({panel.stem})" if find_measure(panel.stem).meaning else ""
        lines = [line for line in panel.caption.splitlines() if line not in known] or [panel.note]
        letters = f"({letter}) " * (len(panels) > 1)
        paragraphs.append(" ".join([f"{letters}{panel.title}{name}:", *map(_end, lines)]))
    remarks = [*notes]
    if not all(panel.stem.startswith(WEIGHTS) for panel in panels):
        remarks += [f"input: {report.settings.input_summary}"] * bool(report.settings.input_summary)
        remarks.append(population(report))
    paragraphs += map(capitalise, remarks)
    paragraphs += _explain_measures(report, {panel.stem for panel in panels})
    return "".join(f"{_end(clean(paragraph))}\n" for paragraph in paragraphs if paragraph)


def _explain_measures(report: Report, names: Collection[str]) -> list[str]:
    """Return sentences that explain the nulls of these measures and the symbols in their formulas."""
    nulls = {name for head in report.heads for name, measure in head.measures.items() if measure.null is not None}
    nulls |= {name for experiment in report.experiments for name in names if experiment.null(name) is not None}
    infos = [find_measure(name) for name in sorted(nulls.intersection(names))]
    entries = [entry for entry in list_analyzers() if any(info.name in names for info in entry.measures)]
    symbols = dict.fromkeys(entry.definitions for entry in entries if entry.definitions)
    return [f"Null: {null_words(infos)}, as mean ± sd"] * bool(infos) + [
        f"Symbols: {drop_rotary(report, text)}" for text in symbols
    ]


def _end(sentence: str) -> str:
    return sentence if sentence.endswith((".", "?", "!", ":")) or not sentence else f"{sentence}."


def arrange(panels: Sequence[Panel], across: int, height: float) -> list[Row]:
    """Arrange panels in rows of `across` panels; unused cells of the last row stay empty."""
    places = [*panels, *[None] * (-len(panels) % across)]
    return [Row(places[start : start + across], height) for start in range(0, len(places), across)]


def overview(
    report: Report,
    rows: Sequence[Row],
    facts: Iterable[str],
    title: str = "",
    more: Iterable[str] = (),
    hint: str = "",
    *,
    bare: bool = False,
) -> Figure:
    """Draw a page of panels with lettered titles; the figure's label is the caption.

    The page shows `facts` under `title` (by default the model's name), `hint` at the bottom left, and `more` at the
    bottom right. A `bare` page shows the panels only.
    """
    facts, more, title = [*filter(None, facts)], [*more], title or report.model.title
    panels = [panel for row in rows for panel in row.panels if panel is not None]
    caption = caption_panels(report, panels, title, facts, [*more, hint])
    if bare:
        return _bare_figure(rows, caption)
    fed, tool = clean(report.settings.input_summary), report.tool
    footnote = [*more, f"input: {fed}" * bool(fed), f"{clean(tool.name)} {clean(tool.version)}"]
    height = HEAD + sum(row.total for row in rows) + FOOT
    figure = style.new_figure(WIDTH, height, dpi=300)
    figure.set_label(caption)
    left, right = SIDE / WIDTH, 1 - SIDE / WIDTH
    texts: style.Style = {"va": "center", "color": style.INK}
    figure.text(left, 1 - 0.27 / height, style.shorten_label(title, TITLE), fontsize=14, weight="bold", **texts)
    if len(" · ".join(facts)) > FACTS:
        facts = facts[:-1] or facts  # the caption contains the last fact
    figure.text(left, 1 - 0.52 / height, style.shorten_label(" · ".join(facts), FACTS), fontsize=8, **texts)
    small: style.Style = {"va": "center", "color": style.MUTED, "fontsize": 6.5}
    figure.text(left, 0.13 / height, hint, **small)
    figure.text(
        right, 0.13 / height, style.shorten_label(" · ".join(filter(None, footnote)), FOOTNOTE), ha="right", **small
    )
    _draw_rows(figure, _letter(rows) if len(panels) > 1 else rows, HEAD, FOOT)
    return figure


def _letter(rows: Sequence[Row]) -> list[Row]:
    letters = cycle(ascii_lowercase)
    return [
        replace(row, panels=[panel and replace(panel, title=f"{next(letters)}  {panel.title}") for panel in row.panels])
        for row in rows
    ]


def panel_figure(report: Report, panel: Panel, *, bare: bool = False) -> Figure:
    """Draw a panel or its parts, with a short caption below unless `bare`; the figure's label is the full caption."""
    parts = panel.parts or [panel]
    title = title_of_report(report)
    fed = "" if panel.stem.startswith(WEIGHTS) else clean(report.settings.input_summary)
    facts = filter(None, [title, *model_facts(report), fed])
    rows = arrange(parts, min(3, len(parts)), float(np.clip(0.2 * parts[0].rows, 2.0, 8.0)))
    caption = caption_panels(report, [panel], title, model_facts(report))
    if bare:
        return _bare_figure(rows, caption)
    width = 2 * SIDE + len(rows[0].panels) * (parts[0].width + 1.0)
    characters = int((width - 2 * SIDE) * CAPTION_PER_INCH)
    lines = filter(None, [*panel.caption.splitlines(), " · ".join(facts)])
    # a space that does not break keeps a number and its % on one line
    words = "\n".join(textwrap.fill(clean(line).replace(" %", "\xa0%"), characters) for line in lines)
    below = 0.15 + LINE * (words.count("\n") + 1)
    height = MARGIN + sum(row.total for row in rows) + below
    figure = style.new_figure(width, height)
    figure.set_label(caption)
    look: style.Style = {"fontsize": 6.8, "va": "top", "color": style.MUTED, "linespacing": 1.35}
    figure.text(SIDE / width, (below - 0.05) / height, words, **look)
    _draw_rows(figure, rows, MARGIN, below)
    return figure


COLUMN, PAGE = 3.4, 7.0  # inches: width of a bare figure with one panel per row, and with several
MOST_ACROSS = 3  # panels per row of a bare figure; more would be narrower than their labels
NARROW = 5.0  # inches: largest width of the axes of a panel that fits into one column
BARE_SCALE = 0.72  # height of the axes of a bare figure / that of other figures
BARE_SIDE = 0.04  # inches: margin of a bare figure
PER_INCH = 15  # characters per inch of text of size BARE_POINTS


def _bare_figure(rows: Sequence[Row], caption: str) -> Figure:
    """Draw the panels without notes and headings, at the width of one or two columns of a paper."""
    panels = [panel for row in rows for panel in row.panels if panel is not None]
    if max(len(row.panels) for row in rows) > MOST_ACROSS:
        rows = arrange(panels, MOST_ACROSS, rows[0].height)
    titles = Counter(panel.title for panel in panels)
    rows = [
        Row([panel and _bare_panel(panel, titles[panel.title] > 1) for panel in row.panels], BARE_SCALE * row.height)
        for row in rows
    ]
    narrow = all(len(row.panels) == 1 for row in rows) and max(panel.width for panel in panels) <= NARROW
    figure = style.new_figure(COLUMN if narrow else PAGE, 2 * MARGIN + sum(row.total for row in rows), dpi=300)
    figure.set_label(caption)
    if len(panels) > 1:
        rows = _letter(rows)
    else:
        rows = [replace(row, panels=[panel and _remove_title(panel) for panel in row.panels]) for row in rows]
    _draw_rows(figure, rows, MARGIN, MARGIN, bare=True)
    return figure


def _remove_title(panel: Panel) -> Panel:
    """Remove a panel's title; it becomes the label of a colour bar or of a chart's y axis that has no label."""

    def draw(axes: Axes) -> None:
        panel.draw(axes)
        named = isinstance(axes.yaxis.get_major_locator(), FixedLocator)  # its ticks are names of rows
        if not (axes.images or named or axes.get_ylabel()):
            axes.set_ylabel(panel.title)
        for drawn in (*axes.images, *axes.collections):
            if drawn.colorbar is not None and not drawn.colorbar.ax.get_ylabel():
                drawn.colorbar.set_label(panel.title)

    return replace(panel, title="", draw=draw)


def _bare_panel(panel: Panel, ambiguous: bool) -> Panel:
    """Remove a panel's note; if other panels share its title (`ambiguous`), add the measure's source to the title."""
    return replace(panel, note="", title=f"{panel.title} ({source_of(panel.stem)})" if ambiguous else panel.title)


def _enlarge_text(figure: Figure, room: float) -> None:
    """Set all text of a figure to BARE_POINTS, and wrap labels to `room`, the width of a panel in inches."""
    for axes in figure.findobj(Axes):
        axes.tick_params(labelsize=style.BARE_POINTS)
        legend = axes.get_legend()
        if legend is not None and not legend.get_in_layout():
            style.legend_above(axes, int(PER_INCH * room))
            legend = axes.get_legend()
            if legend is not None and not axes.get_title(loc="left"):  # without a title, nothing makes room for it
                legend.set_in_layout(True)
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set_text(textwrap.fill(axis.label.get_text(), max(12, int(PER_INCH * room))))
    for text in figure.findobj(Text):
        text.set_fontsize(style.BARE_POINTS)


def _drop_wide_numbers(figure: Figure) -> None:
    """Remove the numbers from each map in which a number is wider than a cell."""
    for axes in figure.axes:
        numbers = [text for text in axes.texts if axes.images and not isinstance(text, Annotation)]
        if numbers:
            cell = axes.bbox.width / (axes.get_xlim()[1] - axes.get_xlim()[0])
            if max(text.get_window_extent().width for text in numbers) > 0.96 * cell:
                for text in numbers:
                    text.remove()


def _draw_rows(figure: Figure, rows: Sequence[Row], above: float, below: float, *, bare: bool = False) -> None:
    """Draw rows of panels, leaving `above` inches free at the top of the figure and `below` inches at the bottom."""
    side = BARE_SIDE if bare else SIDE
    width, height = figure.get_size_inches()
    above_axes: style.Style = {"xycoords": "axes fraction", "textcoords": "offset points", "in_layout": False}
    # consecutive rows of equally many panels form a block whose columns are aligned
    blocks = [list(block) for _, block in groupby(rows, key=lambda row: len(row.panels))]
    totals = [sum(row.total for row in block) for block in blocks]
    parts = figure.subfigures(len(blocks), 1, height_ratios=totals, squeeze=False)[:, 0]
    for part, block in zip(parts, blocks, strict=True):
        columns = len(block[0].panels)
        heights = [size for row in block for size in (HEADING * bool(row.heading), row.height) if size]
        grid, lines = part.add_gridspec(len(heights), columns, height_ratios=heights), count()
        room = (width - 2 * side) / columns - BESIDE
        for row in block:
            heading = grid[next(lines), :] if row.heading else None  # a row only for the heading
            line = next(lines)
            last = max((n for n, panel in enumerate(row.panels) if panel and len(panel.layers) > 1), default=None)
            for column, panel in ((column, panel) for column, panel in enumerate(row.panels) if panel is not None):
                axes = part.add_subplot(grid[line, column])
                shorten = textwrap.fill if bare else style.shorten_label
                title = shorten(panel.title, int(TITLE_PER_INCH * room))
                axes.set_title(title, pad=5 if bare else 15, weight="bold", color=style.INK)
                note = style.shorten_label(panel.note, int(NOTE_PER_INCH * room))
                axes.annotate(note, (0, 1), (0, 5), fontsize=6.5, color=style.MUTED, **above_axes)
                panel.draw(axes)
                if column == last:  # a colour bar of the layers
                    bar = _colour_bar(axes, ScalarMappable(scale_depth(len(panel.layers)), style.DEPTH), "layer")
                    bar.ax.set_ylim(len(panel.layers) - 1, 0)
                    label_indices(bar.ax.yaxis, panel.layers)
            if heading is not None:
                strip = part.add_subplot(heading)
                strip.set_axis_off()
                strip.axhline(1, color=style.MUTED, linewidth=0.4, clip_on=False)
                strip.text(
                    0, 0, row.heading, transform=strip.transAxes, fontsize=8.5, color=style.MUTED, style="italic"
                )
    # Positions are rounded, because the last digits of the layout differ between runs, and equal reports must give
    # equal bytes.
    if bare:
        _enlarge_text(figure, width / max(len(row.panels) for row in rows) - BESIDE)
    rect = (side / width, below / height, 1 - 2 * side / width, 1 - (above + below) / height)
    engine = ConstrainedLayoutEngine(rect=rect, h_pad=0.05, w_pad=0.05, hspace=0.03, wspace=0.03)
    for _ in range(2):  # the first pass changes which ticks have room, and so the width of their labels
        engine.execute(figure)
    for part in parts:  # the positions of axes are relative to these
        part.bbox_relative.set_points(np.round(part.bbox_relative.get_points(), 12))
    for axes in figure.axes:
        axes.set_position(np.round(axes.get_position(original=False).bounds, 5).tolist())
    if bare:
        _drop_wide_numbers(figure)
