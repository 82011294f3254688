"""Prints tables in the width of the page, with the columns that fit."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

FILLING = re.compile(" +$", re.MULTILINE)
"""Blanks before the end of a line."""

PIPED = 100
"""Width of the page where the output is no terminal and COLUMNS says nothing."""

GAP = 2
"""Blanks between columns."""


class _Page(Console):
    def print(self, *objects: Any, **settings: Any) -> None:
        """As rich prints; into a pipe or file without the blanks that fill its lines up to a table's width."""
        if self.is_terminal:
            super().print(*objects, **settings)
            return
        with self.capture() as printed:
            super().print(*objects, **settings)
        self.file.write(FILLING.sub("", printed.get()))
        self.file.flush()

    def on_broken_pipe(self) -> None:
        """Let the caller see that nobody reads any longer; rich would end the program with a code of its own."""
        raise  # noqa: PLE0704  # rich calls this while it handles the BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr, as wide as the terminal or COLUMNS says, 100 columns in a pipe; heeds NO_COLOR.

    COLUMNS=0 says nothing, and is what some schedulers set.
    """
    stream = sys.stderr if stderr else sys.stdout
    asked = os.environ.get("COLUMNS", "")
    width = int(asked) if asked.isdecimal() else 0
    if stream.isatty():
        # rich would take the 0 at its word; without a width it follows the terminal's
        unknown = asked.isdecimal() and not width
        return _Page(stderr=stderr, highlight=False, width=shutil.get_terminal_size().columns if unknown else None)
    # rich heeds a width under TERM=dumb only together with a height
    return _Page(stderr=stderr, highlight=False, width=width or PIPED, height=25)


@dataclass(frozen=True)
class Column:
    """One column of numbers: its group (a source), its title in words, its cells from top to bottom."""

    group: str
    """What stands over it and its neighbours; empty for the rows' own names."""
    title: str
    """Its words, which may stand under each other."""
    cells: tuple[str, ...]
    """Finished texts, one a row."""
    foot: tuple[str, ...] = ()
    """Finished texts below the rule."""
    words: bool = False
    """Whether the cells are words, which stand to the left, and not numbers."""

    @property
    def width(self) -> int:
        """Least width that breaks no word and no number."""
        return max(map(len, [*self.title.split(), *self.cells, *self.foot]), default=1)


@dataclass(frozen=True)
class FittedTable:
    """A table whose columns are shown whole or not at all: the first that fit, or (paged) all, block under block."""

    names: tuple[Column, ...]
    """The columns that name the rows; always shown."""
    columns: tuple[Column, ...]
    """The others, the most important first; neighbours of one group are shown together."""
    paged: bool = False
    """Whether columns that don't fit go into a further block."""
    hidden: str = ""
    """What to say where columns are left out; `{shown}` and `{all}` are their numbers."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Choose the columns for the page at hand and print them."""
        rest = list(self.columns)
        while rest:
            chosen = fitting(self.names, rest, options.max_width)
            rest = [column for column in rest if column not in chosen]
            yield from _block(self.names, _grouped(chosen), "-" if options.ascii_only else "─")
            if not self.paged:
                break
            if rest:
                yield ""
        if rest and self.hidden:
            shown = len(self.columns) - len(rest)
            yield Text(self.hidden.format(shown=shown, all=len(self.columns)), style="dim")


def fitting(names: Sequence[Column], columns: Sequence[Column], width: int) -> list[Column]:
    """The first columns that fit beside the names; at least one, so that a narrow page still shows something."""
    used = sum(column.width + GAP for column in names) - GAP
    ends = accumulate((GAP + column.width for column in columns), initial=used)
    count = sum(end <= width for end in ends) - 1
    return list(columns[: max(1, count)])


def _grouped(columns: Sequence[Column]) -> list[Column]:
    """Columns of one group beside each other, the groups in the order of their first column."""
    order = list(dict.fromkeys(column.group for column in columns))
    return sorted(columns, key=lambda column: order.index(column.group))


def _block(names: Sequence[Column], columns: Sequence[Column], rule: str) -> RenderResult:
    if any(column.group for column in columns):
        yield _group_line(names, columns, rule)
    every = [*names, *columns]
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), show_footer=False)
    table.show_footer = any(column.foot for column in every)
    for column in every:
        table.add_column(
            Text(column.title),
            Text("\n".join(column.foot)),
            width=column.width,
            justify="left" if column.words else "right",
            vertical="bottom",
            header_style="bold",
            footer_style="none",
        )
    for cells in zip(*(column.cells for column in every), strict=True):
        table.add_row(*map(Text, cells))
    yield table


def _group_line(names: Sequence[Column], columns: Sequence[Column], rule: str) -> Text:
    """`weights ──────  tokens ──────`, each over its own columns."""
    line = Text(" " * sum(column.width + GAP for column in names), no_wrap=True, overflow="crop")
    for group, members in groupby(columns, key=lambda column: column.group):
        width = sum(column.width + GAP for column in members) - GAP
        line.append(f"{group} ".ljust(width, rule)[:width], style="bold")
        line.append(" " * GAP)
    line.rstrip()
    return line
