"""Sections as GitHub markdown, with other people's strings escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from attnlens.sections.section import Document, Heading, Section, Table
from attnlens.wording import clean

SYNTAX = re.compile(r"(?<![^\W_])_|_(?![^\W_])|[!-~](?<![\w .,;/()+%='-])")
"""ASCII that could be read as more than a letter; an underscore within a word is harmless."""


def markdown(told: Document) -> str:
    """The document as GitHub markdown; every string is escaped, for it is data."""
    head = [] if told.head is None else _head(told.head)
    return "\n".join([*head, *(line for section in told.sections for line in _section(section))]).rstrip() + "\n"


def escaped(text: str) -> str:
    """The text with every character that markdown or HTML could read as more than a letter as its character code.

    GitHub looks for @mentions after decoding, so a blank of no width follows that sign; `www.` would become a link.
    """
    coded = SYNTAX.sub(lambda found: f"&#{ord(found.group())};", clean(text))
    return re.sub("www[.]", "www&#46;", coded, flags=re.IGNORECASE).replace("&#64;", "&#64;&#8203;")


def _head(head: Heading) -> Iterator[str]:
    yield from (f"## attnlens {escaped(head.command)}: {escaped(head.title)}", "", escaped(head.facts), "")
    yield from (f"- {escaped(line)}" for line in (*head.asides, *head.notes))
    yield from ("", f"**{escaped(head.standing)}**", "")


def _section(section: Section) -> Iterator[str]:
    if section.title:
        yield from (f"### {escaped(section.title)}", "")
    items = (item if isinstance(item, str) else ": ".join(item) for item in section.items)
    listed = [f"- {escaped(line)}" for line in (*section.lines, *items)]
    yield from (*listed, "") if listed else ()
    if section.table is not None:
        yield from (*_table(section.table), "")
    for line in section.notes:
        yield from (escaped(line), "")


def _table(table: Table) -> Iterator[str]:
    columns = [*table.names, *table.columns]
    yield _row([f"{column.group} {column.title}".strip() for column in columns])
    yield "|" + "".join(f" {':---' if column.words else '---:'} |" for column in columns)
    yield from map(_row, zip(*(column.cells for column in columns), strict=True))
    yield from (_row(cells) for cells in zip(*(column.foot for column in columns), strict=False) if any(cells[1:]))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"
