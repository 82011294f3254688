"""The types that renderers draw: columns, tables, sections, pictures, documents, and rows of a sheet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attnlens.report.sections.explorer import Explorer

Cell = str | int | float | bool | None
"""Value of one cell of a sheet; None leaves the cell empty."""
Row = Mapping[str, Cell]


@dataclass(frozen=True)
class Column:
    """Column of a table: its title and its cells from top to bottom."""

    title: str
    """Heading of the column; its words can be put on separate lines."""
    cells: Sequence[str]
    """Formatted texts, one per row. The lines after the first one of a cell explain it."""
    group: str = ""
    """Heading shared with the neighbouring columns, such as a source."""
    foot: Sequence[str] = ()
    """Formatted texts of the rows below the rule."""
    words: bool = False
    """True if the cells are words, which are aligned to the left; False for numbers."""
    hints: Sequence[str] = ()
    """Tooltip of each cell, for the HTML page."""
    alarms: Sequence[bool] = ()
    """For each cell, True if it reports a problem; empty if none does."""


@dataclass(frozen=True)
class Table:
    """Table: the columns that name its rows, and the other columns."""

    names: Sequence[Column]
    """Columns that name the rows; always shown."""
    columns: Sequence[Column]
    """Other columns, the most important first. Columns of one group are shown together."""
    fit: Literal["blocks", "first", "folded"] = "blocks"
    """Layout for a limited width: all columns in several blocks, only the first ones that fit, or all, cells folded."""


def sort_by_group(columns: Sequence[Column]) -> list[Column]:
    """Sort the columns so that those of one group are adjacent, with the groups in order of their first column."""
    order = list(dict.fromkeys(column.group for column in columns))
    return sorted(columns, key=lambda column: order.index(column.group))


Passage = tuple[str, tuple[tuple[str, tuple[str, ...]], ...]]
"""Caption and text, the text in pieces that each have the kinds of their marks: `query`, `selected`, `support`."""


@dataclass(frozen=True)
class Picture:
    """Picture of a report."""

    stem: str
    """File name without its suffix."""
    draw: Callable[[], Figure]
    """Function that draws the picture; raises UsageError if there is nothing to draw."""
    shows: str = ""
    """Description of the picture, for its alternative text."""


@dataclass(frozen=True)
class Section:
    """Part of a page, shown in the order of its fields."""

    title: str = ""
    """Heading; empty for a section without one."""
    picture: Picture | None = None
    lines: Sequence[str] = ()
    """Sentences, one per paragraph."""
    items: Sequence[str | tuple[str, str]] = ()
    """List items; a pair is a name and its description."""
    table: Table | None = None
    notes: Sequence[str] = ()
    """Explanations of the table."""
    passages: Sequence[Passage] = ()
    """Texts with marked tokens; as a section, only the terminal shows them."""
    instead: bool = False
    """True if the page shows it only without scripts; its script draws the same from `Document.explorer`."""


@dataclass(frozen=True)
class Heading:
    """Head of a document, above all sections."""

    title: str
    """Title of the report, usually the model's name."""
    command: str
    """Command that made the report."""
    facts: str
    """Architecture, size and input of the model."""
    asides: Sequence[str]
    """Conventions of the model's attention, and how closely attnlens recomputes it."""
    notes: Sequence[str]
    """Caveats for reading the numbers."""
    standing: str
    """How much of the model was read, or the verdict on the experiments, studies or checks."""
    sound: bool
    """True if nothing is missing: the whole model was read, or no experiment, study or check failed."""


@dataclass(frozen=True)
class Document:
    """Whole report from top to bottom."""

    head: Heading | None
    """Head of the document; None if it consists of its sections only."""
    sections: Sequence[Section]
    opening: Sequence[Section] = ()
    """First sections of a page: the findings, their errors, and what is missing."""
    explorer: Explorer | None = None
    """Data of the interactive part of a page, between the opening and the sections."""


@dataclass(frozen=True)
class Sheet:
    """Columns and rows for a spreadsheet."""

    columns: Sequence[str]
    rows: Sequence[Row]
    """For each row, column → cell; a missing column is an empty cell."""


def sheet(rows: Sequence[Row]) -> Sheet:
    """Build a sheet from rows; its columns are those of all rows, in order of first occurrence."""
    return Sheet(list(dict.fromkeys(name for row in rows for name in row)), rows)
