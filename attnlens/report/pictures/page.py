"""Pages of panels: overviews with several pictures, and single pictures with their captions.

matplotlib's constrained layout places all axes, so that names, numbers, legends and colour bars of any size have room.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.layout_engine import ConstrainedLayoutEngine

from attnlens.report.pictures.charts import show_depths
from attnlens.report.pictures.style import DPI, INK, MUTED, Style, new_figure, shorten_label, title_panel, wrap_lines
from attnlens.wording import big, clean

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from attnlens.records import Report

WIDTH = 10.0
"""Width of an overview in inches."""
SIDE = 0.3
"""Inches free on the left and on the right of a page."""
HEAD, FOOT = 0.66, 0.26
"""Inches of an overview's title with the line of facts, and of its footer."""
AROUND, HEADING = 0.98, 0.2
"""Inches above and below a panel's axes for its title and axis, and of the heading of a row."""
TITLE, FACTS, FOOTNOTE = 66, 155, 170
"""Characters that fit in an overview's title, line of facts and footer."""
MARGIN = 0.08
"""Inches free above a single picture."""
BESIDE = 0.3
"""Inches of a panel's width that its title and note leave free."""
TITLE_PER_INCH, NOTE_PER_INCH, CAPTION_PER_INCH = 14, 18, 18.5
"""Characters of a panel's title, of its note, and of a caption that fit in an inch."""
LINE = 0.128
"""Inches per line of a caption."""


@dataclass(frozen=True)
class Panel:
    """One picture, with its texts and size."""

    stem: str  # file name without suffix
    title: str  # content of the picture
    note: str  # line under the title; empty if a legend takes its place
    caption: str  # explanation for readers, shown if the picture has its own file
    draw: Callable[[Axes], None]
    rows: int = 12  # number of lines of text that its height has room for
    width: float = 4.6  # inches of its axes if it has its own file
    layers: Sequence[int] = ()  # the layers that colours stand for; the last such panel of a row gets a colour bar
    parts: Sequence[Panel] = ()  # panels that are drawn instead of it, three per row

    @property
    def height(self) -> float:
        """Height of its axes in inches if it has its own file."""
        return float(np.clip(0.2 * self.rows, 2.0, 8.0))


@dataclass(frozen=True)
class Row:
    """A row of panels on a page; None leaves a place empty."""

    panels: Sequence[Panel | None]
    height: float  # of the axes, in inches
    heading: str = ""  # text above the row, under a thin line

    @property
    def total(self) -> float:
        """Height with titles and axes, in inches."""
        return self.height + AROUND + HEADING * bool(self.heading)


def arrange(panels: Sequence[Panel], across: int, height: float) -> list[Row]:
    """Arrange panels in rows of `across`; the last row ends with empty places."""
    places = [*panels, *[None] * (-len(panels) % across)]
    return [Row(places[start : start + across], height) for start in range(0, len(places), across)]


def overview(rows: Sequence[Row], title: str, facts: Iterable[str], footnote: Iterable[str], hint: str = "") -> Figure:
    """Draw a page of panels with lettered titles; `hint` is written at the bottom left."""
    height = HEAD + sum(row.total for row in rows) + FOOT
    figure = new_figure(WIDTH, height, dpi=300)
    left, right = SIDE / WIDTH, 1 - SIDE / WIDTH
    texts: Style = {"va": "center", "color": INK}
    figure.text(left, 1 - 0.27 / height, shorten_label(title, TITLE), fontsize=14, weight="bold", **texts)
    figure.text(left, 1 - 0.52 / height, shorten_label(" · ".join(filter(None, facts)), FACTS), fontsize=8, **texts)
    small: Style = {"va": "center", "color": MUTED, "fontsize": 6.5}
    figure.text(left, 0.13 / height, hint, **small)
    figure.text(right, 0.13 / height, shorten_label(" · ".join(filter(None, footnote)), FOOTNOTE), ha="right", **small)
    _draw_rows(figure, rows, letters=cycle("abcdefghijklmnopqrstuvwxyz"))
    _fix_layout(figure, HEAD, FOOT)
    return figure


def panel_figure(report: Report, panel: Panel) -> Figure:
    """Draw one panel, or its parts, with its caption and the model's name, size and input below it."""
    model, parts = report.model, panel.parts or [panel]
    size = f"{big(model.parameters)} parameters" if model.parameters else ""
    facts = filter(None, [model.title, clean(model.architecture), size, clean(report.settings.fed)])
    rows = arrange(parts, min(3, len(parts)), parts[0].height)
    width = 2 * SIDE + len(rows[0].panels) * (parts[0].width + 1.0)
    words = wrap_lines(f"{panel.caption}\n{' · '.join(facts)}", int((width - 2 * SIDE) * CAPTION_PER_INCH))
    below = 0.15 + LINE * (words.count("\n") + 1)
    height = MARGIN + sum(row.total for row in rows) + below
    figure = new_figure(width, height, DPI)
    style: Style = {"fontsize": 6.8, "va": "top", "color": MUTED, "linespacing": 1.35}
    figure.text(SIDE / width, (below - 0.05) / height, words, **style)
    _draw_rows(figure, rows)
    _fix_layout(figure, MARGIN, below)
    return figure


def _draw_rows(figure: Figure, rows: Sequence[Row], letters: Iterator[str] | None = None) -> None:
    """Draw the rows; consecutive rows of equally many panels form a block whose columns are aligned."""
    blocks = [list(block) for _, block in groupby(rows, key=lambda row: len(row.panels))]
    totals = [sum(row.total for row in block) for block in blocks]
    parts = figure.subfigures(len(blocks), 1, height_ratios=totals, squeeze=False)[:, 0]
    width = float(figure.get_size_inches()[0]) - 2 * SIDE
    for part, block in zip(parts, blocks, strict=True):
        _draw_block(part, block, width / len(block[0].panels) - BESIDE, letters)


def _draw_block(part: SubFigure, rows: Sequence[Row], room: float, letters: Iterator[str] | None) -> None:
    """Draw rows of equally many panels; `room`: inches for a title. A heading is a flat row without axes."""
    lines: list[str | Row] = []
    for row in rows:
        lines += [row.heading, row] if row.heading else [row]
    heights = [HEADING if isinstance(line, str) else line.height for line in lines]
    grid = part.add_gridspec(len(lines), len(rows[0].panels), height_ratios=heights)
    for place, line in enumerate(lines):
        if isinstance(line, str):
            continue
        coloured = [panel for panel in line.panels if panel is not None and len(panel.layers) > 1][-1:]
        for column, panel in enumerate(line.panels):
            if panel is None:
                continue
            axes = part.add_subplot(grid[place, column])
            title = panel.title if letters is None else f"{next(letters)}  {panel.title}"
            title_panel(
                axes,
                shorten_label(title, int(TITLE_PER_INCH * room)),
                shorten_label(panel.note, int(NOTE_PER_INCH * room)),
            )
            panel.draw(axes)
            if panel in coloured:
                show_depths(axes, panel.layers)
    for place, line in enumerate(lines):
        if isinstance(line, str):
            strip = part.add_subplot(grid[place, :])
            strip.set_axis_off()
            strip.axhline(1, color=MUTED, linewidth=0.4, clip_on=False)
            strip.text(0, 0, line, transform=strip.transAxes, fontsize=8.5, color=MUTED, style="italic")


def _fix_layout(figure: Figure, above: float, below: float) -> None:
    """Place all axes between the head and the foot, whose heights are in inches, once for all file formats.

    The positions are rounded, because the layout's last digits depend on the order in which its solver eliminates
    variables, which differs from run to run; equal reports must give equal bytes.
    """
    width, height = figure.get_size_inches()
    rect = (SIDE / width, below / height, 1 - 2 * SIDE / width, 1 - (above + below) / height)
    engine = ConstrainedLayoutEngine(rect=rect, h_pad=0.05, w_pad=0.05, hspace=0.03, wspace=0.03)
    for _ in range(2):  # the first pass changes which ticks have room, and so the width of their labels
        engine.execute(figure)
    for axes in figure.axes:
        axes.set_position(np.round(axes.get_position(original=False).bounds, 5).tolist())
