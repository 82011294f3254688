"""A panel of a page of pictures, the page's head and foot, and the title and note over each panel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlens.plots.captions import fitted
from attnlens.plots.style import INK, MUTED

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
