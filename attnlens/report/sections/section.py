"""The types that renderers draw: columns, tables, sections, pictures, documents, and rows of a sheet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attnlens.report.sections.explorer import Explorer

Cell = str | int | float | bool | None
"""What stands in a sheet; None: nothing."""
Row = Mapping[str, Cell]


@dataclass(frozen=True)
class Column:
    """One column of a table: its group (a source), its title in words, its cells from top to bottom."""

    group: str
    """What stands over it and its neighbours; empty for the rows' own names."""
    title: str
    """Its words, which may stand under each other."""
    cells: tuple[str, ...]
    """Finished texts, one a row; what follows a line's end explains the first line."""
    foot: tuple[str, ...] = ()
    """Finished texts below the rule."""
    words: bool = False
    """Whether the cells are words, which stand to the left, and not numbers."""
    hints: tuple[str, ...] = ()
    """What more there is to say of each cell, where a page can show it."""
    alarms: tuple[bool, ...] = ()
    """Which cells tell of something wrong; none where empty."""


@dataclass(frozen=True)
class Table:
    """A table: the columns that name its rows, and the others."""

    names: tuple[Column, ...]
    """Always shown."""
    columns: tuple[Column, ...]
    """The most important first; those of one group are shown together."""
    fit: Literal["blocks", "first", "folded"] = "blocks"
    """On a page of limited width: further columns in further blocks, or only those that fit, or all with folded cells.
    """


def grouped(columns: Sequence[Column]) -> list[Column]:
    """Columns of one group beside each other, the groups in the order of their first column."""
    order = list(dict.fromkeys(column.group for column in columns))
    return sorted(columns, key=lambda column: order.index(column.group))


Passage = tuple[str, tuple[tuple[str, tuple[str, ...]], ...]]
"""A caption, and a text as pieces, each with the kinds of its marks: `query`, `selected`, `support`."""


@dataclass(frozen=True)
class Picture:
    """One picture of a report."""

    stem: str
    """Its file's name without the ending."""
    draw: Callable[[], Figure]
    """Raises UsageError where there is nothing to draw."""
    shows: str = ""
    """What one sees, for who can't."""


@dataclass(frozen=True)
class Section:
    """One part of a page, read in the order of its fields."""

    title: str = ""
    """Its heading; empty where it needs none."""
    picture: Picture | None = None
    lines: tuple[str, ...] = ()
    """Sentences."""
    items: tuple[str | tuple[str, str], ...] = ()
    """A list; of a pair the first names what the second tells."""
    table: Table | None = None
    notes: tuple[str, ...] = ()
    """What one must know to read the table."""
    passages: tuple[Passage, ...] = ()
    """Texts with marked tokens, which a terminal alone draws."""
    instead: bool = False
    """Whether a page shows it only where no script can, which draws the same from `Document.explorer`."""


@dataclass(frozen=True)
class Heading:
    """What stands above all sections."""

    title: str
    """Of what: the model's name."""
    command: str
    """Which command made the report."""
    facts: str
    """Architecture, size, input."""
    asides: tuple[str, ...]
    """How the model's attention is put together, and how well it is recomputed."""
    notes: tuple[str, ...]
    """What must be known to read the numbers."""
    standing: str
    """How much was read, or how the experiments ended."""
    sound: bool
    """Whether that is all there is to read, or every experiment as published."""


@dataclass(frozen=True)
class Document:
    """A report from top to bottom."""

    head: Heading | None
    """None where the sections say it all."""
    sections: tuple[Section, ...]
    opening: tuple[Section, ...] = ()
    """What a page says first: what was found, how sure that is, what is missing."""
    explorer: Explorer | None = None
    """What a page lets its reader explore between the opening and the sections."""


@dataclass(frozen=True)
class Sheet:
    """Rows for a spreadsheet."""

    columns: Sequence[str]
    rows: Sequence[Row]
    """Column → cell; a column that a row lacks is empty there."""


def sheet(rows: Sequence[Row]) -> Sheet:
    """The rows with all their columns, in the order in which they first occur."""
    return Sheet(list(dict.fromkeys(name for row in rows for name in row)), rows)
