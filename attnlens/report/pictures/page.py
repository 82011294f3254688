"""Pages of panels: overviews with several pictures, and single pictures with their captions.

matplotlib's constrained layout places all axes, so that names, numbers, legends and colour bars of any size have room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, groupby
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.layout_engine import ConstrainedLayoutEngine

from attnlens.report.pictures.charts import show_depths
from attnlens.report.pictures.style import DPI, INK, MUTED, Style, new_figure, shorten_label, title_panel, wrap_lines
from attnlens.wording import big, clean

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def model_facts(report: Report) -> list[str]:
    """Format the model's architecture and size."""
    model = report.model
    return [clean(model.architecture), f"{big(model.parameters)} parameters" if model.parameters else ""]


def arrange(panels: Sequence[Panel], across: int, height: float) -> list[Row]:
    """Arrange panels in rows of `across`; the last row ends with empty places."""
    places = [*panels, *[None] * (-len(panels) % across)]
    return [Row(places[start : start + across], height) for start in range(0, len(places), across)]


def overview(
    report: Report, rows: Sequence[Row], facts: Iterable[str], title: str = "", more: Iterable[str] = (), hint: str = ""
) -> Figure:
    """Draw a page of panels with lettered titles.

    `facts` are written under the title (by default the model's name), `more` at the bottom right, before the input and
    the tool, `hint` at the bottom left.
    """
    title, fed, tool = title or report.model.title, clean(report.settings.fed), report.tool
    footnote = [*more, f"input: {fed}" * bool(fed), f"{clean(tool.name)} {clean(tool.version)}"]
    height = HEAD + sum(row.total for row in rows) + FOOT
    figure = new_figure(WIDTH, height, dpi=300)
    left, right = SIDE / WIDTH, 1 - SIDE / WIDTH
    texts: Style = {"va": "center", "color": INK}
    figure.text(left, 1 - 0.27 / height, shorten_label(title, TITLE), fontsize=14, weight="bold", **texts)
    figure.text(left, 1 - 0.52 / height, shorten_label(" · ".join(filter(None, facts)), FACTS), fontsize=8, **texts)
    small: Style = {"va": "center", "color": MUTED, "fontsize": 6.5}
    figure.text(left, 0.13 / height, hint, **small)
    figure.text(right, 0.13 / height, shorten_label(" · ".join(filter(None, footnote)), FOOTNOTE), ha="right", **small)
    letters = cycle("abcdefghijklmnopqrstuvwxyz")
    lettered = [
        replace(row, panels=[panel and replace(panel, title=f"{next(letters)}  {panel.title}") for panel in row.panels])
        for row in rows
    ]
    _draw_rows(figure, lettered, HEAD, FOOT)
    return figure


def panel_figure(report: Report, panel: Panel) -> Figure:
    """Draw one panel, or its parts, with its caption and the model's name, size and input below it."""
    parts = panel.parts or [panel]
    facts = filter(None, [report.model.title, *model_facts(report), clean(report.settings.fed)])
    rows = arrange(parts, min(3, len(parts)), parts[0].height)
    width = 2 * SIDE + len(rows[0].panels) * (parts[0].width + 1.0)
    words = wrap_lines(f"{panel.caption}\n{' · '.join(facts)}", int((width - 2 * SIDE) * CAPTION_PER_INCH))
    below = 0.15 + LINE * (words.count("\n") + 1)
    height = MARGIN + sum(row.total for row in rows) + below
    figure = new_figure(width, height, DPI)
    style: Style = {"fontsize": 6.8, "va": "top", "color": MUTED, "linespacing": 1.35}
    figure.text(SIDE / width, (below - 0.05) / height, words, **style)
    _draw_rows(figure, rows, MARGIN, below)
    return figure


def _draw_rows(figure: Figure, rows: Sequence[Row], above: float, below: float) -> None:
    """Draw the rows between the head and the foot, whose heights are in inches.

    Consecutive rows of equally many panels form a block whose columns are aligned.
    """
    width, height = figure.get_size_inches()
    blocks = [list(block) for _, block in groupby(rows, key=lambda row: len(row.panels))]
    totals = [sum(row.total for row in block) for block in blocks]
    parts = figure.subfigures(len(blocks), 1, height_ratios=totals, squeeze=False)[:, 0]
    for part, block in zip(parts, blocks, strict=True):
        columns = len(block[0].panels)
        heights = [size for row in block for size in (HEADING * bool(row.heading), row.height) if size]
        grid, lines = part.add_gridspec(len(heights), columns, height_ratios=heights), count()
        for row in block:
            heading = grid[next(lines), :] if row.heading else None  # a flat row
            line = next(lines)
            last = max((n for n, panel in enumerate(row.panels) if panel and len(panel.layers) > 1), default=None)
            for column, panel in enumerate(row.panels):
                if panel is None:
                    continue
                axes = part.add_subplot(grid[line, column])
                room = (width - 2 * SIDE) / columns - BESIDE
                texts = (panel.title, TITLE_PER_INCH), (panel.note, NOTE_PER_INCH)
                title_panel(axes, *(shorten_label(text, int(per_inch * room)) for text, per_inch in texts))
                panel.draw(axes)
                if column == last:
                    show_depths(axes, panel.layers)
            if heading is not None:
                strip = part.add_subplot(heading)
                strip.set_axis_off()
                strip.axhline(1, color=MUTED, linewidth=0.4, clip_on=False)
                strip.text(0, 0, row.heading, transform=strip.transAxes, fontsize=8.5, color=MUTED, style="italic")
    # The positions are fixed once for all file formats, and rounded, because the layout's last digits depend on the
    # order in which its solver eliminates variables, which differs from run to run; equal reports give equal bytes.
    rect = (SIDE / width, below / height, 1 - 2 * SIDE / width, 1 - (above + below) / height)
    engine = ConstrainedLayoutEngine(rect=rect, h_pad=0.05, w_pad=0.05, hspace=0.03, wspace=0.03)
    for _ in range(2):  # the first pass changes which ticks have room, and so the width of their labels
        engine.execute(figure)
    for axes in figure.axes:
        axes.set_position(np.round(axes.get_position(original=False).bounds, 5).tolist())
