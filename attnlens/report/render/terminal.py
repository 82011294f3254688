"""Terminal output: sections and tables fitted to the width of the page, and consoles on stdout and stderr."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, zip_longest
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from attnlens.report.sections.section import Column, Document, Heading, Passage, Section, Table, sort_by_group
from attnlens.wording import clean, visible

FILLING = re.compile(" +$", re.MULTILINE)  # trailing blanks
PIPED = 100  # width of the page if the output is not a terminal and COLUMNS is not set


class _Page(Console):
    def print(self, *objects: Any, **settings: Any) -> None:
        """Print as rich does, but without trailing blanks if the output is a pipe or file."""
        if self.is_terminal:
            super().print(*objects, **settings)
            return
        with self.capture() as printed:
            super().print(*objects, **settings)
        self.file.write(FILLING.sub("", printed.get()))
        self.file.flush()

    def on_broken_pipe(self) -> None:
        """Re-raise the BrokenPipeError for the caller; rich would exit with its own exit code."""
        raise  # noqa: PLE0704  # rich calls this while it handles the BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr, as wide as the terminal or COLUMNS, or 100 columns in a pipe.

    It respects NO_COLOR. COLUMNS=0, which some schedulers set, counts as not set.
    """
    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 0
    if stream.isatty():
        # rich would take COLUMNS=0 as a width of 0; without a width it uses COLUMNS or the terminal's width
        unknown = columns.isdecimal() and not width
        return _Page(stderr=stderr, highlight=False, width=shutil.get_terminal_size().columns if unknown else None)
    # with TERM=dumb, rich respects a width only together with a height
    return _Page(stderr=stderr, highlight=False, width=width or PIPED, height=25)


GAP = 2  # blanks between columns
BETWEEN = 3  # blanks between columns of a FoldedTable
MARKS = {"selected": "bold blue", "support": "yellow", "query": "bold underline"}
"""Style of marked tokens; the signs in the text carry the meaning without colour."""
HIDDEN = "{shown} of {all} columns fit on this page; a wider terminal shows more."


def document(doc: Document) -> Group:
    """Render the document for the terminal. Colour never carries information that the text lacks."""
    lines = [] if doc.head is None else [*_head(doc.head)]
    for section in doc.sections:
        if lines and (section.title or section.table is not None):
            lines.append("")
        lines += _render_section(section)
    return Group(*lines)


def _head(head: Heading) -> Iterator[RenderableType]:
    yield Text.assemble((clean(head.title), "bold"), " · ", clean(head.facts))
    yield from (Text(clean(line), style="dim") for line in head.asides)
    yield from (Text(clean(note), style="yellow") for note in head.notes)
    yield Text(clean(head.standing), style="bold blue" if head.sound else "bold yellow")


def _render_section(section: Section) -> Iterator[RenderableType]:
    if section.title:
        yield Text(clean(section.title), style="bold")
    yield from (Text(clean(line), overflow="fold") for line in section.lines)
    yield from _items(section.items)
    if section.table is not None:
        yield FoldedTable(section.table) if section.table.fit == "folded" else FittedTable(section.table)
    yield from (Text(clean(line), style="dim") for line in section.notes)
    for passage in section.passages:
        yield from _passage(passage)


def _items(items: Sequence[str | tuple[str, str]]) -> Iterator[RenderableType]:
    pairs = [item for item in items if not isinstance(item, str)]
    for item in items:
        if isinstance(item, str):
            yield Padding(Text(clean(item), overflow="fold"), (0, 0, 0, 2))
    if pairs:
        grid = Grid.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for name, what in pairs:
            grid.add_row(Text(clean(name)), Text(clean(what)))
        yield grid


def _passage(passage: Passage) -> Iterator[RenderableType]:
    caption, pieces = passage
    text = Text(overflow="fold")
    for piece, kinds in pieces:
        text.append(visible(piece), style=" ".join(MARKS[kind] for kind in kinds))
    yield Text(clean(caption), style="dim")
    yield Padding(text, (0, 0, 0, 2))


Line = tuple[str, str]  # text and style of one line of a cell


@dataclass(frozen=True)
class FoldedTable:
    """Table of all columns, whose cells take as many lines as they need; the lines after the first are dimmed.

    Written line by line because a rich table took a fifth of the run time of `list`.
    """

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Compute the column widths for the page, and print the rows."""
        columns, gaps = (*self.table.names, *self.table.columns), BETWEEN * len(self.table.columns)
        heads = [[(clean(column.title), "bold")] for column in columns]
        rows = [
            [_split_cell(cell, self._style(column, row)) for column, cell in zip(columns, cells, strict=True)]
            for row, cells in enumerate(zip(*(column.cells for column in columns), strict=True))
        ]
        widest = [max(cell_len(text) for cell in cells for text, _ in cell) for cells in zip(heads, *rows, strict=True)]
        widths = _limit_widths(widest, options.max_width - gaps)
        for cells in (heads, *rows):
            folded = [[*_fold_cell(cell, width, console)] for cell, width in zip(cells, widths, strict=True)]
            depth = max(map(len, folded))
            if cells is heads:  # align titles to the bottom, directly above the rule
                folded = [[("", "")] * (depth - len(lines)) + lines for lines in folded]
            for lines in zip_longest(*folded, fillvalue=("", "")):
                for number, ((text, style), width, column) in enumerate(zip(lines, widths, columns, strict=True)):
                    gap, fill = " " * (BETWEEN if number else 0), " " * (width - cell_len(text))
                    yield Segment(gap + fill * (not column.words))
                    yield Segment(text, console.get_style(style))
                    yield Segment(fill * column.words)
                yield Segment.line()
            if cells is heads:
                yield Segment(("-" if options.ascii_only else "─") * (sum(widths) + gaps) + "\n")

    def _style(self, column: Column, row: int) -> str:
        if any(column.alarms[row : row + 1]):
            return "bold yellow"
        return "bold" if column in self.table.names else ""


def _limit_widths(widest: Sequence[int], room: int) -> list[int]:
    """Return the column widths, with the widest columns cut to a common width if the sum exceeds the room."""
    widths = list(widest)
    while sum(widths) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return widths


def _split_cell(cell: str, style: str) -> list[Line]:
    first, *notes = cell.split("\n")
    return [(clean(first), style), *((clean(line), "dim") for line in notes)]


def _fold_cell(cell: Sequence[Line], width: int, console: Console) -> Iterator[Line]:
    """Yield the lines of a cell, wrapped to the width."""
    for text, style in cell:
        short = cell_len(text) <= width
        yield from [(text, style)] if short else ((line.plain, style) for line in Text(text).wrap(console, width))


@dataclass(frozen=True)
class FittedTable:
    """Table whose columns are never wrapped: the first that fit are shown, or all in several blocks."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Choose the columns that fit on the page, and print them."""
        names, columns = (tuple(map(_clean_column, part)) for part in (self.table.names, self.table.columns))
        remaining = list(columns)
        while remaining:
            chosen = _fitting(names, remaining, options.max_width)
            remaining = [column for column in remaining if column not in chosen]
            yield from _block(names, sort_by_group(chosen), "-" if options.ascii_only else "─")
            if self.table.fit == "first":
                break
            if remaining:
                yield ""
        if remaining:
            yield Text(HIDDEN.format(shown=len(columns) - len(remaining), all=len(columns)), style="dim")


def _clean_column(column: Column) -> Column:
    """Return the column with terminal control characters replaced in all of its texts."""
    cells, foot = (tuple(map(clean, texts)) for texts in (column.cells, column.foot))
    return replace(column, group=clean(column.group), title=clean(column.title), cells=cells, foot=foot)


def _width(column: Column) -> int:
    """Compute the least width that breaks no word of the title and no cell."""
    return max(map(len, [*column.title.split(), *column.cells, *column.foot]), default=1)


def _fitting(names: Sequence[Column], columns: Sequence[Column], width: int) -> list[Column]:
    """Return the first columns that fit next to the names; at least one, even if the page is too narrow."""
    used = sum(_width(column) + GAP for column in names) - GAP
    ends = accumulate((GAP + _width(column) for column in columns), initial=used)
    count = sum(end <= width for end in ends) - 1
    return list(columns[: max(1, count)])


def _block(names: Sequence[Column], columns: Sequence[Column], rule: str) -> RenderResult:
    if any(column.group for column in columns):
        yield _group_line(names, columns, rule)
    all_columns = [*names, *columns]
    table = Grid(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), show_footer=False)
    table.show_footer = any(column.foot for column in all_columns)
    for column in all_columns:
        table.add_column(
            Text(column.title),
            Text("\n".join(column.foot)),
            width=_width(column),
            justify="left" if column.words else "right",
            vertical="bottom",
            header_style="bold",
            footer_style="none",
        )
    for cells in zip(*(column.cells for column in all_columns), strict=True):
        table.add_row(*map(Text, cells))
    yield table


def _group_line(names: Sequence[Column], columns: Sequence[Column], rule: str) -> Text:
    """Format the line of groups, each above its columns: `weights ──────  tokens ──────`."""
    line = Text(" " * sum(_width(column) + GAP for column in names), no_wrap=True, overflow="crop")
    for group, members in groupby(columns, key=lambda column: column.group):
        width = sum(_width(column) + GAP for column in members) - GAP
        shown = max(width, min(len(group), width + GAP - 1))  # a longer name can extend into the gap
        line.append(f"{group} ".ljust(width, rule)[:shown].ljust(width + GAP), style="bold")
    line.rstrip()
    return line
