"""Render documents for a terminal, with tables fitted to its width, and create consoles on stdout and stderr."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from attnlens.report.sections.section import Column, Document, HeatMap, Section, Table, sort_by_group
from attnlens.wording import clean, visible

if TYPE_CHECKING:
    from attnlens.records import Finding

FILLING = re.compile(" +$", re.MULTILINE)  # trailing blanks
PIPED = 100  # width in columns if the output is not a terminal and COLUMNS is not set


class _Page(Console):
    def print(self, *objects: object, **settings: Any) -> None:  # rich's settings have no common type
        """Print without cropping long lines and, in a pipe or file, without trailing blanks."""
        settings.setdefault("crop", False)
        if self.is_terminal:
            super().print(*objects, **settings)
            return
        with self.capture() as printed:
            super().print(*objects, **settings)
        self.file.write(FILLING.sub("", printed.get()))
        self.file.flush()

    def on_broken_pipe(self) -> None:
        """Re-raise the BrokenPipeError, because rich would exit with a different exit code."""
        raise  # noqa: PLE0704  # rich calls this while it handles the BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """Return a console of width COLUMNS or, if that is 0 or unset, of the terminal's width (100 without a terminal)."""
    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 0
    if stream.isatty():
        # rich would take COLUMNS=0 as a width of 0; without a width it uses COLUMNS or the terminal's width
        unknown = columns.isdecimal() and not width
        return _Page(stderr=stderr, highlight=False, width=shutil.get_terminal_size().columns if unknown else None)
    # with TERM=dumb, rich respects a width only together with a height
    return _Page(stderr=stderr, highlight=False, width=width or PIPED, height=25)


GAP, BETWEEN = 2, 3  # blanks between columns, and between columns whose cells are folded
MARKS = {"selected": "bold blue", "support": "yellow", "query": "bold underline"}
"""Kind of marked token → its style."""


ALARMS = ("FAILED", "FAIL", "DIFFERS")  # Verdicts that report a problem


def document(doc: Document) -> Group:
    """Render the document for the terminal; colours only repeat information in the text."""
    lines: list[RenderableType] = []
    if (head := doc.head) is not None:
        standing = (clean(head.standing), "bold blue" if head.sound else "bold yellow")
        lines.append(Text.assemble((clean(head.title), "bold"), " · ", clean(head.facts), " · ", standing))
        lines += [Text(clean(note), style="yellow") for note in head.notes]
    for section in doc.sections:
        if lines and (section.title or section.table is not None):
            lines.append("")
        lines += _render_section(section)
    return Group(*lines)


def _render_section(section: Section) -> Iterator[RenderableType]:
    for place, command in enumerate(section.commands):  # commands are never folded, so that they can be copied
        label = section.title if place == 0 else ""
        line = Text.assemble((f"{label:{len(section.title)}}  ", "bold"), (clean(command), "cyan"))
        line.no_wrap, line.overflow = True, "ignore"
        yield line
    if section.commands:
        indented = (0, 0, 0, len(section.title) + 2)
        yield from (Padding(Text(clean(line), style="dim", overflow="fold"), indented) for line in section.lines)
        return
    if section.title:
        yield Text(clean(section.title), style="bold")
    if section.findings:
        yield _answers(section.findings)
    if section.heat_map is not None:
        yield Shades(section.heat_map)
    yield from (Text(clean(line), overflow="fold") for line in section.lines)
    sentences = [item for item in section.items if isinstance(item, str)]
    yield from (Padding(Text(clean(item), overflow="fold"), (0, 0, 0, 2)) for item in sentences)
    pairs = [item for item in section.items if not isinstance(item, str)]
    if pairs:
        grid = Grid.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for name, description in pairs:
            grid.add_row(Text(clean(name)), Text(clean(description)))
        yield grid
    if section.table is not None:
        yield FittedTable(section.table)
    yield from (Text(clean(line), style="dim") for line in section.notes)
    for caption, pieces in section.passages:
        styled = ((visible(piece), " ".join(MARKS[kind] for kind in kinds)) for piece, kinds in pieces)
        yield Text(clean(caption), style="dim")
        yield Padding(Text.assemble(*styled, overflow="fold"), (0, 0, 0, 2))


LABELS = 10, 14  # Widths of the column of questions; the larger one if a question would exceed QUESTION_LINES
QUESTION_LINES = 3


def _answers(findings: Sequence[Finding]) -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    narrow, wide = LABELS
    fits = all(len(wrap(finding.question, narrow)) <= QUESTION_LINES for finding in findings)
    longest = max((len(word) for finding in findings for word in clean(finding.question).split()), default=0)
    grid.add_column(max_width=max(narrow if fits else wide, longest))
    grid.add_column(overflow="fold")
    for finding in findings:
        style = "bold yellow" if finding.severity == "problem" else ""
        text = Text.assemble((clean(finding.answer), style), " ", (clean(finding.evidence), "dim"))
        text.rstrip()
        grid.add_row(Text(clean(finding.question), style="bold"), text)
    return grid


ASCII_SHADES = " .:+#"  # Shades of a map on a terminal that shows only ASCII, from low to high values


@dataclass(frozen=True)
class Shades:
    """Map of values as shaded characters, in ASCII if the terminal supports only ASCII."""

    heat_map: HeatMap

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a line of column labels, then one line per row."""
        lines = self.heat_map.lines(ASCII_SHADES) if options.ascii_only else self.heat_map.lines()
        yield from (Text(line, no_wrap=True) for line in lines)


@dataclass(frozen=True)
class FittedTable:
    """Table fitted to the terminal's width by wrapping cells or by splitting its columns into blocks."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one table with wrapped cells, or several tables, each with as many columns as fit."""
        names, columns = ([*map(_clean_column, part)] for part in (self.table.names, self.table.columns))
        if self.table.fit == "folded":
            yield _grid([*names, *columns], folded=True)
            return
        remaining = columns
        while remaining:
            used = sum(_width(column) + GAP for column in names) - GAP
            ends = accumulate((GAP + _width(column) for column in remaining), initial=used)
            count = max(1, sum(end <= options.max_width for end in ends) - 1)  # at least 1, however narrow the page is
            block = sort_by_group(remaining[:count])
            while len(block) > 1 and used + sum(GAP + width for width in _widths(block)) > options.max_width:
                count -= 1  # names of groups need more room
                block = sort_by_group(remaining[:count])
            if any(column.group for column in block):
                indent = sum(width + GAP for width in _widths(names))
                yield from _group_lines(indent, block, "-" if options.ascii_only else "─")
            yield _grid([*names, *block])
            remaining = remaining[count:]
            if remaining:
                yield ""


def _clean_column(column: Column) -> Column:
    """Return the column with terminal control characters replaced in its title, group, cells and footer."""
    cells = ["\n".join(map(clean, cell.split("\n"))) for cell in column.cells]
    foot = [*map(clean, column.foot)]
    return replace(column, group=clean(column.group), title=clean(column.title), cells=cells, foot=foot)


def _width(column: Column) -> int:
    """Compute the smallest width of a column that fits every cell, the footer, and every word of the title."""
    return max(map(cell_len, [*column.title.split(), *column.cells, *column.foot]), default=1)


def _widths(columns: Sequence[Column]) -> list[int]:
    """Compute the width of each column; widen the last column of a group until every word of the group's name fits."""
    widths = [*map(_width, columns)]
    end = 0
    for group, members in groupby(columns, key=lambda column: column.group):
        start, end = end, end + len([*members])
        width = sum(widths[start:end]) + GAP * (end - start - 1)
        widths[end - 1] += max(0, max(map(cell_len, group.split()), default=0) - width)
    return widths


def _group_lines(indent: int, columns: Sequence[Column], rule: str) -> Iterator[Text]:
    """Yield lines with the names of the groups of columns, `weights ────  tokens ────`, wrapped if necessary."""
    widths, names = list[int](), list[list[str]]()
    remaining = iter(_widths(columns))
    for group, members in groupby(columns, key=lambda column: column.group):
        widths.append(sum(next(remaining) + GAP for _ in members) - GAP)
        names.append(wrap(group, widths[-1]))
    height = max(map(len, names))
    for row in range(height):
        fill = rule if row == height - 1 else " "
        line = Text(" " * indent, no_wrap=True, overflow="crop")
        for width, lines in zip(widths, names, strict=True):
            text = [*[""] * (height - len(lines)), *lines][row]
            line.append(f"{text} ".ljust(width, fill)[:width].ljust(width + GAP), style="bold")
        line.rstrip()
        yield line


def _grid(columns: Sequence[Column], *, folded: bool = False) -> Grid:
    """Build a table; if `folded`, wrap the cells and print the first column in bold."""
    right = (BETWEEN if folded else GAP) - 1  # the box adds one blank
    table = Grid(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, right, 0, 0))
    table.show_footer = any(column.foot for column in columns)
    for column, width in zip(columns, _widths(columns), strict=True):
        table.add_column(
            Text(column.title),
            Text("\n".join(column.foot)),
            width=None if folded else width,
            justify="left" if column.words else "right",
            vertical="top" if folded else "bottom",
            overflow="fold",
            header_style="bold",
            footer_style="none",
        )
    for row in range(len(columns[0].cells) if columns else 0):
        cells = []
        for place, column in enumerate(columns):
            first, *notes = column.cells[row].split("\n")
            strong = "bold" if folded and not place else ""
            style = "bold yellow" if folded and first in ALARMS else strong
            cells.append(Text.assemble((first, style), *((f"\n{note}", "dim") for note in notes)))
        table.add_row(*cells)
    return table
