"""The types that renderers draw, from columns to documents, and the registry of the sections of a report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attnlens.choices import KINDS, Kind
from attnlens.wording import NO_VALUE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attnlens.records import Finding
    from attnlens.report.shapes import Shapes

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]  # Row of a spreadsheet, column → value; a missing column or None is an empty cell


@dataclass(frozen=True)
class Column:
    """Column of a table: title, cells and footer, all formatted as text."""

    title: str
    cells: Sequence[str]  # formatted texts, from top to bottom; lines after the first explain a cell
    group: str = ""  # heading shared with the neighbouring columns, such as a source
    foot: Sequence[str] = ()  # formatted texts of the rows below the rule
    words: bool = False  # True if the cells are words, which are aligned to the left; False for numbers
    hints: Sequence[str] = ()  # tooltip of each cell, for the HTML page


@dataclass(frozen=True)
class Table:
    """Table: columns that identify the rows, then other columns in order of importance."""

    names: Sequence[Column]
    columns: Sequence[Column]
    fit: Literal["blocks", "folded"] = "blocks"
    """Layout for a limited width: several blocks of whole columns, or one block with folded cells."""


def build_columns(
    rows: Sequence[Mapping[str, str | None]], words: Collection[str] = (), group: str = "", missing: str = NO_VALUE
) -> list[Column]:
    """Build a column per key of the rows, in order of first occurrence; omit keys that have no value in any row.

    Columns in `words` are aligned left; `missing` replaces cells that are absent or None.
    """
    cells = {title: [row.get(title) for row in rows] for title in dict.fromkeys(title for row in rows for title in row)}
    return [
        Column(title, [missing if cell is None else cell for cell in column], group, words=title in words)
        for title, column in cells.items()
        if set(column) != {None}
    ]


def build_table(
    rows: Sequence[Mapping[str, str | None]],
    names: Collection[str],
    words: Collection[str] = (),
    fit: Literal["blocks", "folded"] = "blocks",
) -> Table | None:
    """Build a table from rows that map column titles to cells; return None if there are no rows.

    Columns in `names` identify the rows; columns in `words` are aligned left.
    """
    if not rows:
        return None
    columns = build_columns(rows, words)
    first = [column for column in columns if column.title in names]
    return Table(first, [column for column in columns if column.title not in names], fit)


def sort_by_group(columns: Sequence[Column]) -> list[Column]:
    """Sort columns so that those of a group are adjacent, with groups in the order of their first columns."""
    order = list(dict.fromkeys(column.group for column in columns))
    return sorted(columns, key=lambda column: order.index(column.group))


Piece = tuple[str, tuple[str, ...]]  # Part of a text, and the kinds of its marks: `query`, `selected`, `support`
Passage = tuple[str, Sequence[Piece]]  # Caption, and the pieces of a text


@dataclass(frozen=True)
class HeatMap:
    """Grid of values, shown as shades on a terminal and in Markdown; None for a missing value."""

    rows: Sequence[str]  # label of each row
    columns: Sequence[str]  # label of each column
    values: Sequence[Sequence[float | None]]

    def lines(self, shades: str = " ░▒▓█") -> Iterator[str]:
        """Yield a line of column labels, then one line per row with a shade for each value.

        The first shade represents the smallest value, the last the largest, and `?` a missing value.
        """
        present = [value for row in self.values for value in row if value is not None]
        low, high = min(present), max(present)
        label, count = max(map(len, self.rows)), len(self.values[0])
        width = 3 if count <= 16 else 2 if count <= 32 else 1
        step = {3: 1, 2: 2, 1: 8}[width]  # columns per label
        header = "".join(f"{name:<{width * step}}" for name in self.columns[::step])
        yield f"{'':{label}}  {header}".rstrip()
        for name, row in zip(self.rows, self.values, strict=True):
            shares = [None if value is None else (value - low) / ((high - low) or 1) for value in row]
            cells = [
                "?" if share is None else shades[min(len(shades) - 1, int(len(shades) * share))] for share in shares
            ]
            yield f"{name:>{label}} │{''.join(cell * width for cell in cells)}│"


@dataclass(frozen=True)
class Picture:
    """Picture for a page or a file, with its alternative text; drawn on demand."""

    stem: str  # file name without its suffix
    draw: Callable[..., Figure]  # with the keyword `bare`; raises UsageError if there is nothing to draw
    shows: str = ""  # description for the alternative text


@dataclass(frozen=True)
class Section:
    """Part of a document; its contents are shown in the order of the fields."""

    title: str = ""
    picture: Picture | None = None
    findings: Sequence[Finding] = ()
    lines: Sequence[str] = ()  # sentences, one per paragraph
    items: Sequence[str | tuple[str, str]] = ()  # list items; a pair is a name and its description
    table: Table | None = None
    heat_map: HeatMap | None = None  # shown on a terminal and in Markdown
    notes: Sequence[str] = ()  # explanations of the table
    commands: Sequence[str] = ()  # commands to run next
    passages: Sequence[Passage] = ()  # texts with marked tokens; only a terminal shows them in the section
    instead: bool = False
    """True if a page shows the section only to readers without scripts; scripts draw `Document.explorer` instead."""


@dataclass(frozen=True)
class Heading:
    """Title block of a document, above all sections."""

    title: str  # title of the report, usually the model's name
    command: str
    facts: str  # architecture, size and input of the model
    notes: Sequence[str]  # caveats for reading the numbers
    standing: str  # statement on coverage, or verdict on experiments, studies or checks
    sound: bool  # True if everything requested was read, and no experiment, study or check failed


@dataclass(frozen=True)
class Document:
    """Contents of a report as shown, from top to bottom: heading, opening, interactive part, and sections."""

    head: Heading | None
    sections: Sequence[Section]
    opening: Sequence[Section] = ()  # first sections of a page: findings, missing values, and commands to run next
    explorer: Mapping[str, object] | None = None
    """Data of the interactive part of a page, between the opening and the sections; None without this part."""


View = Literal["screen", "terminal", "markdown", "verbose", "opening", "page"]
"""Where sections are shown: on the screen of every command, with --table (`terminal`) or --verbose, in the Markdown
summary, and above (`opening`) or below (`page`) the interactive part of the HTML page."""
TEXTS: tuple[View, ...] = ("terminal", "markdown")  # Views with all tables of a report
Builder = Callable[["Shapes", View], Iterable[Section]]
"""Function that yields sections of a report for a view, or nothing if no section applies."""
_BUILDERS: dict[tuple[Kind, View], list[tuple[int, Builder]]] = {}


def section(
    order: int, kinds: Kind | Sequence[Kind] = KINDS, views: Sequence[View] = (*TEXTS, "page")
) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a builder of sections for these kinds of report and views.

    A view shows sections by ascending `order`. Use 10 to 49 for the subject of a report, 50 to 79 for rules,
    reasons for missing values and selections, and 80 to 99 for explanations and provenance.
    """

    def register(builder: Builder) -> Builder:
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            for view in views:
                _BUILDERS.setdefault((kind, view), []).append((order, builder))
        return builder

    return register


def build_sections(shapes: Shapes, *views: View) -> Iterator[Section]:
    """Yield the sections of a report that are shown in these views, by ascending order.

    A builder registered for several of these views is called only once, with the last of these views.
    """
    kind = shapes.report.kind
    chosen = {builder: (order, view) for view in views for order, builder in _BUILDERS.get((kind, view), [])}
    for builder, (_, view) in sorted(chosen.items(), key=lambda entry: entry[1][0]):
        yield from builder(shapes, view)
