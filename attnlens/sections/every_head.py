"""Every head with every measure as tables."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnlens.sections.section import Column, Section, Table
from attnlens.sentences.findings import no_errors, population
from attnlens.shapes import MeasureMap, Shapes, group_of
from attnlens.wording import NO_VALUE, clean, decimals_for, decimals_with_error, source_of, title_of, written


def head_tables(shapes: Shapes) -> Iterator[Section]:
    """Every head with every scalar measure: a table per source.

    `value±se` where a standard error exists; `–` where there is no value, for which the summary says why.
    """
    for source in dict.fromkeys(source_of(name) for name in shapes.readings):
        columns = [_column(shapes, reading) for name, reading in shapes.readings.items() if source_of(name) == source]
        yield Section(table=Table(_names(shapes), tuple(columns)))


def head_table(shapes: Shapes) -> Section:
    """The same as one table, with its nulls, and with the reasons of what has no value beside it."""
    heads, several = shapes.report.heads, len(set(shapes.parts)) > 1
    places = (f"{head.layer} · {head.head}" for head in heads)
    cells = tuple(f"{head.part} {place}" if several else place for head, place in zip(heads, places, strict=True))
    nulls = any(reading.null for reading in shapes.readings.values())
    name = Column(
        "",
        "part layer · head" if several else "layer · head",
        cells,
        ("null, mean ± sd",) * nulls,
        words=True,
        hints=tuple(head.site for head in heads),
    )
    about = population(shapes.report)
    said = no_errors(shapes.report) or (about and f"±: standard error; {about}")
    columns = tuple(_column(shapes, reading, nulls=nulls) for reading in shapes.readings.values())
    return Section("Every head", table=Table((name,), columns), notes=(f"{said}.",) if said else ())


def _names(shapes: Shapes) -> tuple[Column, ...]:
    heads = shapes.report.heads
    columns = [
        Column("", "layer", tuple(str(head.layer) for head in heads)),
        Column("", "head", tuple(str(head.head) for head in heads)),
    ]
    if len(set(shapes.parts)) > 1:
        columns.append(Column("", "part", tuple(head.part for head in heads), words=True))
    return tuple(columns)


def _column(shapes: Shapes, reading: MeasureMap, *, nulls: bool = False) -> Column:
    heads = shapes.report.heads
    decimals = decimals_with_error(reading.present.tolist(), reading.error)
    cells = tuple(_cell(reading, shapes.cell(head.layer, head.head), decimals) for head in heads)
    found = (head.measures.get(reading.name) for head in heads)
    reasons = tuple("not measured" if measure is None else measure.reason or "" for measure in found)
    return Column(group_of(reading.info), title_of(reading.name), cells, (_null(reading),) * nulls, hints=reasons)


def _cell(reading: MeasureMap, at: tuple[int, int], decimals: int) -> str:
    value, error = reading.values[at], reading.errors[at]
    if np.isnan(value):
        return NO_VALUE
    if reading.labels:
        return clean(reading.labels[round(value)])
    return written(value, decimals) if np.isnan(error) else f"{written(value, decimals)}±{written(error, decimals)}"


def _null(reading: MeasureMap) -> str:
    if reading.null is None:
        return ""
    mean, sd = reading.null
    decimals = decimals_for([sd or mean], figures=2)
    return f"{written(mean, decimals)} ± {written(sd, decimals)}"
