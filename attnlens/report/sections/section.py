"""The types that renderers draw: columns, tables, sections, pictures, documents, and rows of a spreadsheet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attnlens.wording import NO_VALUE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]
"""Row of a spreadsheet, column → value; a missing column or None is an empty cell."""


@dataclass(frozen=True)
class Column:
    """Column of a table."""

    title: str
    cells: Sequence[str]  # formatted texts, from top to bottom; the lines after the first one of a cell explain it
    group: str = ""  # heading shared with the neighbouring columns, such as a source
    foot: Sequence[str] = ()  # formatted texts of the rows below the rule
    words: bool = False  # True if the cells are words, which are aligned to the left; False for numbers
    hints: Sequence[str] = ()  # tooltip of each cell, for the HTML page
    alarms: Sequence[bool] = ()  # for each cell, True if it reports a problem; empty if none does


@dataclass(frozen=True)
class Table:
    """Columns that name the rows, which are always shown, and the other columns, the most important first."""

    names: Sequence[Column]
    columns: Sequence[Column]
    fit: Literal["blocks", "first", "folded"] = "blocks"
    """Layout for a limited width: all columns in several blocks, only the first ones that fit, or all, cells folded."""


def build_columns(
    rows: Sequence[Mapping[str, str]], words: Collection[str] = (), group: str = "", missing: str = NO_VALUE
) -> list[Column]:
    """Build a column per key of the rows, in order of first occurrence; a row without a key has the cell `missing`.

    `words`: titles of the columns that are aligned to the left; `group`: heading above all of the columns.
    """
    titles = dict.fromkeys(title for row in rows for title in row)
    return [Column(title, [row.get(title, missing) for row in rows], group, words=title in words) for title in titles]


def build_table(
    rows: Sequence[Mapping[str, str]],
    words: Collection[str] = (),
    names: int = 1,
    fit: Literal["blocks", "first", "folded"] = "blocks",
) -> Table:
    """Build a table from rows with the same keys; the first `names` columns name the row."""
    columns = build_columns(rows, words)
    return Table(columns[:names], columns[names:], fit)


def sort_by_group(columns: Sequence[Column]) -> list[Column]:
    """Sort the columns so that those of one group are adjacent, with the groups in order of their first column."""
    order = list(dict.fromkeys(column.group for column in columns))
    return sorted(columns, key=lambda column: order.index(column.group))


Passage = tuple[str, tuple[tuple[str, tuple[str, ...]], ...]]
"""Caption and text, the text in pieces that each have the kinds of their marks: `query`, `selected`, `support`."""


@dataclass(frozen=True)
class Picture:
    """Picture of a report."""

    stem: str  # file name without its suffix
    draw: Callable[[], Figure]  # raises UsageError if there is nothing to draw
    shows: str = ""  # description for the alternative text


@dataclass(frozen=True)
class Section:
    """Part of a page, shown in the order of its fields."""

    title: str = ""
    picture: Picture | None = None
    lines: Sequence[str] = ()  # sentences, one per paragraph
    items: Sequence[str | tuple[str, str]] = ()  # list items; a pair is a name and its description
    table: Table | None = None
    notes: Sequence[str] = ()  # explanations of the table
    passages: Sequence[Passage] = ()  # texts with marked tokens; as a section, only the terminal shows them
    instead: bool = False
    """True if the page shows it only without scripts; its script draws the same from `Document.explorer`."""


@dataclass(frozen=True)
class Heading:
    """Head of a document, above all sections."""

    title: str  # title of the report, usually the model's name
    command: str
    facts: str  # architecture, size and input of the model
    asides: Sequence[str]  # conventions of the model's attention, and how closely attnlens recomputes it
    notes: Sequence[str]  # caveats for reading the numbers
    standing: str  # how much of the model was read, or the verdict on the experiments, studies or checks
    sound: bool  # True if the whole model was read, or no experiment, study or check failed


@dataclass(frozen=True)
class Document:
    """Whole report from top to bottom."""

    head: Heading | None
    sections: Sequence[Section]
    opening: Sequence[Section] = ()  # first sections of a page: the findings, their errors, and what is missing
    explorer: Mapping[str, object] | None = None
    """Data of the interactive part of a page, between the opening and the sections."""
