"""The report on one page: the model, its layers, the most extreme heads, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attnlens.records import Report
from attnlens.shapes import Shapes
from attnlens.tables import facts
from attnlens.tables.experiments import experiment_sections
from attnlens.tables.layers import layer_rows, measure_columns, name_columns
from attnlens.tables.sections import printed
from attnlens.tables.swaps import swap_summary
from attnlens.tables.terminal import FittedTable
from attnlens.wording import clean

HIDDEN = "{shown} of {all} columns fit on this page; a wider terminal shows more."


def summary(report: Report) -> Group:
    """The report on one page: header, coverage, a row per layer (medians over heads), extremes, what was skipped.

    The table shows as many measures as the page is wide, whole columns, in the report's order of importance with the
    sources taking turns. Above 48 layers neighbours share a row, and a line says so. Colour never carries a meaning of
    its own.
    """
    if report.swap is not None:
        return Group(*_header(report), swap_summary(report), *_list("Skipped", facts.skipped(report.coverage.skipped)))
    if report.experiments:
        told = printed(experiment_sections(report))
        return Group(*_header(report), *told, *_list("Skipped", facts.skipped(report.coverage.skipped)))
    shapes = Shapes(report)
    return Group(
        *_header(report),
        *_layers(shapes),
        *_extremes(report),
        *_list("Skipped", facts.skipped(report.coverage.skipped)),
        *_list("No value", facts.without_value(shapes)),
    )


def _header(report: Report) -> Iterator[RenderableType]:
    yield Text.assemble((facts.title(report), "bold"), " · ", facts.header(report))
    for line in filter(None, (facts.ran_on(report), facts.conventions(report), facts.identity(report))):
        yield Text(line, style="dim")
    for note in report.settings.notes:
        yield Text(clean(note), style="yellow")
    sentence, whole = facts.standing(report)
    yield Text(sentence, style="bold blue" if whole else "bold yellow")


def _layers(shapes: Shapes) -> Iterator[RenderableType]:
    if not shapes.readings:
        return
    rows = layer_rows(shapes)
    yield ""
    columns = measure_columns(shapes, rows)
    if columns:
        yield FittedTable(name_columns(shapes, rows), columns, hidden=HIDDEN)
    yield Text(facts.reading_help(rows, shapes), style="dim")
    if facts.constants(shapes):
        yield Text(facts.constants(shapes), style="dim")


def _extremes(report: Report) -> Iterator[RenderableType]:
    found = report.summary.extremes
    if not found:
        return
    yield ""
    yield Text("Most extreme heads (ranks, not tests)", style="bold")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in found:
        where, what = facts.extreme(one)
        table.add_row(Text(where), Text(what))
    yield Padding(table, (0, 0, 0, 2))


def _list(title: str, lines: Sequence[str]) -> Iterator[RenderableType]:
    if not lines:
        return
    yield ""
    yield Text(title, style="bold")
    for line in lines:
        yield Padding(Text(line, overflow="fold"), (0, 0, 0, 2))
