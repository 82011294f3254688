"""A report as sections of sentences and tables, for terminal, markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from attnlens.tables.terminal import Column, FittedTable
from attnlens.wording import clean


@dataclass(frozen=True)
class Rows:
    """A table: the columns that name its rows, and the others."""

    names: tuple[Column, ...]
    """Always shown."""
    columns: tuple[Column, ...]
    """The most important first."""


@dataclass(frozen=True)
class Section:
    """One part of what is told."""

    title: str
    """Its heading; empty for the first."""
    lines: tuple[str, ...] = ()
    """Sentences, above the table."""
    rows: Rows | None = None
    """The table."""
    below: tuple[str, ...] = ()
    """What one must know to read the table."""
    items: bool = False
    """Whether the lines are a list."""


def printed(told: Iterable[Section]) -> Iterator[RenderableType]:
    """The sections for a terminal."""
    for section in told:
        if section.title:
            yield ""
            yield Text(clean(section.title), style="bold")
        for line in section.lines:
            text = Text(clean(line), overflow="fold")
            yield Padding(text, (0, 0, 0, 2)) if section.items else text
        if section.rows is not None:
            yield FittedTable(section.rows.names, section.rows.columns, paged=True)
        for line in section.below:
            yield Text(clean(line), style="dim")


def in_markdown(told: Iterable[Section], escaped: Callable[[str], str]) -> Iterator[str]:
    """The sections as lines of GitHub markdown; `escaped` makes text of any string."""
    for section in told:
        if section.title:
            yield from (f"### {escaped(section.title)}", "")
        for line in section.lines:
            yield f"- {escaped(line)}"
        if section.lines:
            yield ""
        if section.rows is not None:
            columns = [*section.rows.names, *section.rows.columns]
            yield _row([f"{column.group} {column.title}".strip() for column in columns], escaped)
            yield "|" + "".join(f" {':---' if column.words else '---:'} |" for column in columns)
            for cells in zip(*(column.cells for column in columns), strict=True):
                yield _row(list(cells), escaped)
            yield ""
        for line in section.below:
            yield from (escaped(line), "")


def _row(cells: list[str], escaped: Callable[[str], str]) -> str:
    return "| " + " | ".join(escaped(cell) for cell in cells) + " |"
