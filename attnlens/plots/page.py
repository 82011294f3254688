"""Pages of panels: where each panel stands, and what is written around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnlens.plots.captions import fitted, wrapped
from attnlens.plots.style import INK, MUTED, new_figure
from attnlens.records import Report
from attnlens.wording import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAD, FOOT = 0.62, 0.3
"""Inches over all pictures, and under them."""
LINE = 0.13
"""Inches of a further line of a legend."""
TITLE, FACTS, FOOTNOTE = 80, 155, 170
"""Characters that fit into the page's title, into a line of facts, and at the foot, on ten inches."""


@dataclass(frozen=True)
class Panel:
    """One picture."""

    stem: str
    """Its file's name, without the ending."""
    title: str
    """What it shows."""
    note: str
    """The line under the title; empty where a legend stands there."""
    caption: str
    """What a reader must know, in a file of its own."""
    draw: Callable[[Axes], None]
    """Draws it."""
    rows: int = 12
    """About how many rows it has."""
    left: float = 0.42
    """Inches that the names beside it take."""
    wide: float = 4.6
    """Inches that it takes on a page of its own."""
    bar: bool = False
    """Whether a colour bar stands beside it."""
    legend: int = 1
    """Lines between the title and the axes."""


def head(
    figure: Figure, title: str, facts: Iterable[str], footnote: Iterable[str], *, left: float, right: float
) -> None:
    """The title over a line of facts, and how the page was made at its foot; left and right in inches."""
    width, height = figure.get_size_inches()
    where, end = left / width, right / width
    figure.text(where, 1 - 0.27 / height, fitted(title, TITLE), fontsize=14, weight="bold", color=INK, va="center")
    figure.text(where, 1 - 0.52 / height, fitted(_joined(facts), FACTS), fontsize=8, color=INK, va="center")
    foot = fitted(_joined(footnote), FOOTNOTE)
    figure.text(end, 0.13 / height, foot, fontsize=6.5, color=MUTED, ha="right", va="center")


def picture_title(axes: Axes, title: str, note: str, legend: int = 1) -> None:
    """The title over a line that says how to read the picture; where a legend stands there, over its lines."""
    axes.set_title(title, weight="bold", pad=15 + 72 * LINE * (legend - 1), color=INK)
    axes.annotate(note, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", fontsize=6.5, color=MUTED)


def _joined(facts: Iterable[str]) -> str:
    return " · ".join(filter(None, facts))


WIDTH = 10.0
"""Inches of the page."""
LEFT, RIGHT = 0.35, 9.68
"""Where the first column of panels begins and the last one ends, in inches."""
OVER, UNDER, BAR = 0.56, 0.42, 0.62
"""Inches over a panel for its title, under it for its axis, beside it for a colour bar."""
HIGHEST = 30
"""Rows of a panel beyond which a page grows no more."""


def panels_overview(
    panels: list[Panel], title: str, facts: Iterable[str], footnote: Iterable[str], *, crowned: bool = False
) -> Figure:
    """All panels on a page: in one row up to three, else two by two; `crowned`: the first over the others."""
    grid = _grid(panels, crowned=crowned)
    blocks = [_block(row, alone=len(grid) == 1) for row in grid]
    height = HEAD + sum(blocks) + FOOT
    figure = new_figure(WIDTH, height, dpi=300)
    head(figure, title, facts, footnote, left=LEFT, right=RIGHT)
    letters = iter("abcdef")
    for number, row in enumerate(grid):
        bottom = height - HEAD - sum(blocks[: number + 1]) + UNDER
        # rows of equal length share their columns, so that their panels stand exactly below each other
        rows = [other for other in grid if len(other) == len(row)]
        taken = [max(panel.left for panel in column) + BAR for column in zip(*rows, strict=True)]
        right = RIGHT if any(row[-1].bar for row in rows) else RIGHT + BAR - 0.1
        free = (right - LEFT - sum(taken)) / len(taken)
        edges = [LEFT + sum(taken[:column]) + column * free for column in range(len(taken) + 1)]
        for column, panel in enumerate(row):
            begin, end = edges[column] + panel.left, edges[column + 1] - BAR
            tall = blocks[number] - UNDER - OVER - LINE * (panel.legend - 1)
            axes = figure.add_axes((begin / WIDTH, bottom / height, (end - begin) / WIDTH, tall / height))
            picture_title(axes, f"{next(letters)}  {panel.title}", panel.note, panel.legend)
            panel.draw(axes)
    return figure


def panel_figure(report: Report, panel: Panel) -> Figure:
    """One panel with its caption."""
    tall = float(np.clip(0.2 * panel.rows, 2.0, 8.0))
    page = panel.left + 0.2 + panel.wide + BAR
    facts = [report.model.title, clean(report.model.architecture), clean(report.settings.fed)]
    caption = wrapped([panel.caption, " · ".join(fact for fact in facts if fact)], int(page * 16))
    below = 0.62 + 0.14 * (caption.count("\n") + 1)
    height = tall + below + OVER + LINE * (panel.legend - 1)
    figure = new_figure(page, height)
    begin = panel.left + 0.2
    axes = figure.add_axes((begin / page, below / height, panel.wide / page, tall / height))
    picture_title(axes, panel.title, panel.note, panel.legend)
    panel.draw(axes)
    figure.text(0.2 / page, (below - 0.46) / height, caption, fontsize=6.8, va="top", color=MUTED, linespacing=1.35)
    return figure


def _grid(found: list[Panel], *, crowned: bool) -> list[list[Panel]]:
    if crowned:
        return [row for row in (found[:1], found[1:]) if row]
    across = len(found) if len(found) <= 3 else 2
    return [found[start : start + across] for start in range(0, len(found), across)]


def _block(row: list[Panel], *, alone: bool) -> float:
    """Inches that a row of panels takes: more where there are many layers, less where there are few kernels."""
    rows = min(HIGHEST, max(panel.rows for panel in row))
    least = OVER + UNDER + (2.6 if alone else 2.3)
    return least + 0.06 * (rows - 12) if rows > 12 else least if len(row) > 1 else OVER + UNDER + 0.19 * rows
