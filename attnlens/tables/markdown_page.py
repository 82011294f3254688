"""A report as markdown, with other people's strings escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from attnlens.records import Report
from attnlens.shapes import Shapes
from attnlens.tables import facts
from attnlens.tables.experiments import experiment_sections
from attnlens.tables.layers import layer_rows, measure_columns, name_columns
from attnlens.tables.sections import in_markdown
from attnlens.tables.swaps import swap_markdown
from attnlens.tables.terminal import Column
from attnlens.wording import clean

SYNTAX = re.compile(r"(?<![^\W_])_|_(?![^\W_])|[!-~](?<![\w .,;/()+%='-])")
"""ASCII that could be read as more than a letter; an underscore within a word is harmless."""


def markdown(report: Report) -> str:
    """The summary as GitHub markdown, one table a source; every string of the report is escaped, for it is data."""
    shapes = Shapes(report)
    model = escaped(facts.title(report))
    lines = [f"## attnlens {escaped(report.command)}: {model}", "", escaped(facts.header(report)), ""]
    sentences = [facts.ran_on(report), facts.conventions(report), facts.identity(report), *facts.notes(report)]
    lines += [f"- {escaped(sentence)}" for sentence in sentences if sentence]
    lines += ["", f"**{escaped(facts.standing(report)[0])}**", ""]
    lines += _tables(shapes)
    if report.swap is not None:
        lines += swap_markdown(report, escaped)
    lines += in_markdown(experiment_sections(report, whole=True), escaped)
    named = [": ".join(facts.extreme(found)) for found in report.summary.extremes]
    lines += _bullets("Most extreme heads (ranks, not tests)", named)
    lines += _bullets("Skipped", facts.skipped(report.coverage.skipped))
    lines += _bullets("No value", facts.without_value(shapes))
    return "\n".join(lines).rstrip() + "\n"


def escaped(text: str) -> str:
    """The text with every character that markdown or HTML could read as more than a letter as its character code.

    GitHub looks for @mentions after decoding, so a blank of no width follows that sign; `www.` would become a link.
    """
    coded = SYNTAX.sub(lambda found: f"&#{ord(found.group())};", clean(text))
    return re.sub("www[.]", "www&#46;", coded, flags=re.IGNORECASE).replace("&#64;", "&#64;&#8203;")


def _tables(shapes: Shapes) -> Iterator[str]:
    if not shapes.readings:
        return
    rows = layer_rows(shapes)
    names, columns = name_columns(shapes, rows), measure_columns(shapes, rows)
    for source in dict.fromkeys(column.group for column in columns):
        yield f"### {escaped(source)}"
        yield ""
        yield from _table([*names, *(column for column in columns if column.group == source)])
        yield ""
    yield escaped(facts.reading_help(rows, shapes))
    if facts.constants(shapes):
        yield escaped(facts.constants(shapes))
    yield ""


def _table(columns: Sequence[Column]) -> Iterator[str]:
    yield _row([column.title for column in columns])
    yield "|" + " ---: |" * len(columns)
    for cells in zip(*(column.cells for column in columns), strict=True):
        yield _row(cells)
    for cells in zip(*(column.foot for column in columns), strict=False):
        if any(cells[1:]):
            yield _row(cells)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(escaped(cell) for cell in cells) + " |"


def _bullets(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return [f"### {title}", "", *(f"- {escaped(line)}" for line in lines), ""]
