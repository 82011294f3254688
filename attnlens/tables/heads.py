"""A table for each source, a row for each head."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from attnlens.records import Report
from attnlens.shapes import Reading, Shapes, group_of
from attnlens.tables.facts import without_value
from attnlens.tables.terminal import Column, FittedTable
from attnlens.wording import NO_VALUE, clean, decimals_with_error, source_of, title_of, written


def all_heads(report: Report) -> Group:
    """Every head with every scalar measure: a table per source, in as many blocks of whole columns as the page needs.

    `value±se` where a standard error exists; `–` where there is no value, with the reasons below the tables.
    """
    shapes = Shapes(report)
    return Group(*_tables(shapes), *(Text(f"{NO_VALUE}  {line}", style="dim") for line in without_value(shapes)))


def _tables(shapes: Shapes) -> Iterator[RenderableType]:
    for source in dict.fromkeys(source_of(name) for name in shapes.readings):
        columns = [_column(shapes, reading) for name, reading in shapes.readings.items() if source_of(name) == source]
        yield FittedTable(_names(shapes), tuple(columns), paged=True)
        yield ""


def _names(shapes: Shapes) -> tuple[Column, ...]:
    heads = shapes.report.heads
    columns = [
        Column("", "layer", tuple(str(head.layer) for head in heads)),
        Column("", "head", tuple(str(head.head) for head in heads)),
    ]
    if len(set(shapes.parts)) > 1:
        columns.append(Column("", "part", tuple(head.part for head in heads), words=True))
    return tuple(columns)


def _column(shapes: Shapes, reading: Reading) -> Column:
    decimals = decimals_with_error(reading.present.tolist(), reading.error)
    cells = tuple(_cell(reading, shapes.cell(head.layer, head.head), decimals) for head in shapes.report.heads)
    return Column(group_of(reading.info), title_of(reading.name), cells)


def _cell(reading: Reading, at: tuple[int, int], decimals: int) -> str:
    value, error = reading.values[at], reading.errors[at]
    if np.isnan(value):
        return NO_VALUE
    if reading.labels:
        return clean(reading.labels[round(value)])
    return written(value, decimals) if np.isnan(error) else f"{written(value, decimals)}±{written(error, decimals)}"
