"""What each layer reads: medians over its heads, with their errors, as columns of finished text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from attnlens.registry import NOT_IDENTIFIED
from attnlens.sections.section import Column, Section, Table
from attnlens.sentences.findings import no_errors, null_words, population
from attnlens.shapes import MeasureMap, Shapes, by_turns, group_of, middle
from attnlens.wording import (
    NO_VALUE,
    clean,
    decimals_for,
    decimals_with_error,
    listed,
    short,
    spread,
    title_of,
    written,
)

MOST_ROWS = 48
"""Layers up to which each has its row."""

MOST_TEXTS = 6
"""Texts up to which each has its row at the foot."""
GROUPED_ROWS = 40
"""About how many rows a larger model has."""


@dataclass(frozen=True)
class LayerRows:
    """Which layers share a row: rows of the maps, part by part."""

    groups: tuple[tuple[int, ...], ...]
    """For each table row, rows of the maps."""
    size: int
    """How many layers a row holds (the last of a part may hold fewer)."""


def layer_sections(shapes: Shapes, *, whole: bool) -> Iterator[Section]:
    """A row per layer, medians over heads: the measures that fit on a page, or, `whole`, a table of each source.

    The sources take turns, in the report's order of importance. Above 48 layers neighbours share a row.
    """
    if not shapes.readings:
        return
    rows = layer_rows(shapes)
    names, columns = name_columns(shapes, rows), measure_columns(shapes, rows)
    notes = tuple(filter(None, (reading_help(rows, shapes), constants(shapes))))
    if not whole:
        yield Section(table=Table(names, columns, fit="first") if columns else None, notes=notes)
        return
    for source in dict.fromkeys(column.group for column in columns):
        own = tuple(replace(column, group="") for column in columns if column.group == source)
        yield Section(source, table=Table(names, own))
    yield Section(notes=notes)


def layer_rows(shapes: Shapes) -> LayerRows:
    """A row a layer up to 48 layers; beyond, neighbours of one part share a row, so that about 40 rows remain."""
    count = len(shapes.layers)
    size = 1 if count <= MOST_ROWS else -(-count // GROUPED_ROWS)
    groups: list[tuple[int, ...]] = []
    for _, members in groupby(range(count), key=lambda row: shapes.parts[row]):
        rows = list(members)
        groups += [tuple(rows[start : start + size]) for start in range(0, len(rows), size)]
    return LayerRows(tuple(groups), size)


def name_columns(shapes: Shapes, rows: LayerRows) -> tuple[Column, ...]:
    """The layers' numbers and, where there are several, their parts; below them what the foot's rows are."""
    numbers = tuple(_span(shapes, group) for group in rows.groups)
    foot = _foot_names(shapes, rows)
    layer = Column("", "layer", numbers, foot)
    if len(set(shapes.parts)) == 1:
        return (layer,)
    return layer, Column("", "part", tuple(shapes.parts[group[0]] for group in rows.groups), ("",) * len(foot), True)


def _foot_names(shapes: Shapes, rows: LayerRows) -> tuple[str, ...]:
    """All heads, where there is more than one row of them; each text where there are several, and their sd; the null of
    the median, where a measure has one.
    """
    summary = shapes.report.summary
    texts = [f"{text.name} ({text.sequences})" for text in summary.texts[:MOST_TEXTS]]
    between = ["between texts"] if summary.between_texts else []
    null = ["null", "± sd"] if summary.median_nulls else []
    every = ["all"] if len(rows.groups) > 1 else []
    return (*every, *(clean(name) for name in texts), *between, *null)


def measure_columns(shapes: Shapes, rows: LayerRows) -> tuple[Column, ...]:
    """A column for every measure that differs between heads, sources taking turns, headlines first; then the sum's."""
    varying = {name: reading for name, reading in shapes.readings.items() if not reading.constant}
    headlines = [name for name, reading in varying.items() if reading.info.headline]
    others = [name for name in varying if name not in headlines]
    columns = [_column(varying[name], rows, shapes) for name in [*by_turns(headlines), *by_turns(others)]]
    return (*columns, *_summed(shapes, rows))


def reading_help(rows: LayerRows, shapes: Shapes) -> str:
    """What a row of the layers' table is."""
    over = "over heads" if rows.size == 1 else f"over the heads of {rows.size} neighbouring layers"
    summary, alone = shapes.report.summary, len(shapes.report.heads) == 1
    said = [] if alone else [f"rows are medians {over}"]
    if summary.median_errors:
        known = population(shapes.report)
        said.append(f"± is the standard error{'' if alone else ' of that median'}{f' ({known})' if known else ''}")
    elif no_errors(shapes.report):
        said.append(no_errors(shapes.report))
    if any(text.reasons for text in summary.texts):
        said.append("one window of a text has no spread: no errors in its row")
    if any(reading.null for reading in shapes.readings.values()):
        chance = null_words(reading.info for reading in shapes.readings.values() if reading.null)
        said.append(f"null is {chance},{'' if alone else ' as the median of so many heads,'} mean ± sd")
    if summary.texts:
        said.append("beside a text stands how many windows are its")
    if summary.between_texts:
        said.append("“between texts” is the sd of the texts' medians")
    sentence = "; ".join(said)
    sentence = f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""
    spaces = dict.fromkeys(reading.info.space for reading in shapes.readings.values() if reading.info.space)
    apart = f" {' and '.join(spaces)}: two questions, compare within one only." if len(spaces) > 1 else ""
    open_ = [name for name, reading in shapes.readings.items() if reading.info.identified == "nowhere"]
    loose = f" {listed(open_)}: {NOT_IDENTIFIED}" if open_ else ""
    return f"{sentence}{apart}{loose}".strip()


def constants(shapes: Shapes) -> str:
    """The measures that all heads share, which need no column; empty where there are none."""
    same = [
        f"{clean(reading.name)} {reading.labels.get(round(reading.present[0])) or short(reading.present[0])}"
        for reading in shapes.readings.values()
        if reading.constant
    ]
    return f"The same for every head: {listed(same, 8)}." if same else ""


def _span(shapes: Shapes, group: tuple[int, ...]) -> str:
    first, last = shapes.layers[group[0]], shapes.layers[group[-1]]
    return str(first) if first == last else f"{first}–{last}"


def _column(reading: MeasureMap, rows: LayerRows, shapes: Shapes) -> Column:
    title, over = title_of(reading.name), group_of(reading.info)
    everything = tuple(range(len(reading.values)))
    height, several = len(_foot_names(shapes, rows)), len(rows.groups) > 1
    if reading.labels:
        cells = tuple(_commonest(reading, group) for group in rows.groups)
        whole = [_commonest(reading, everything)] if several else []
        return Column(over, title, cells, (*whole, *[""] * (height - len(whole))))
    medians = [middle(reading.values[list(group)]) for group in rows.groups]
    total, summary = middle(reading.values), shapes.report.summary
    errors, error = _errors(reading.name, rows, shapes), summary.median_errors.get(reading.name)
    null = summary.median_nulls.get(reading.name)
    bounds = (null.mean, null.sd) if null else ()
    shown = [number for number in (*medians, total, *bounds) if not np.isnan(number)]
    decimals = decimals_with_error(shown, error)
    cells = tuple(_with_error(*pair, decimals) for pair in zip(medians, errors, strict=True))
    foot = [_with_error(total, error, decimals)] if several else []
    for text in summary.texts[:MOST_TEXTS]:
        median = text.medians.get(reading.name)
        foot.append("" if median is None else _with_error(median, text.median_errors.get(reading.name), decimals))
    if summary.between_texts:
        between = summary.between_texts.get(reading.name)
        foot.append("" if between is None else spread(between, decimals))
    if null is not None:
        foot += [written(null.mean, decimals), f"±{spread(null.sd, decimals)}"]
    return Column(over, title, cells, (*foot, *[""] * (height - len(foot))))


def _errors(name: str, rows: LayerRows, shapes: Shapes) -> list[float | None]:
    """The standard error of each row's median; rows of several layers have none."""
    summary = shapes.report.summary
    known = dict(zip(summary.layer_numbers, summary.layer_errors, strict=False))
    return [known.get(shapes.layers[group[0]], {}).get(name) if len(group) == 1 else None for group in rows.groups]


def _with_error(median: float, error: float | None, decimals: int) -> str:
    number = written(median, decimals)
    return number if error is None or np.isnan(median) else f"{number}±{spread(error, decimals)}"


def _commonest(reading: MeasureMap, group: tuple[int, ...]) -> str:
    values = reading.values[list(group)]
    found = Counter(round(value) for value in values[~np.isnan(values)].tolist())
    if not found:
        return NO_VALUE
    number, count = found.most_common(1)[0]
    return f"{clean(reading.labels[number])} {count}/{found.total()}"


def _summed(shapes: Shapes, rows: LayerRows) -> Iterator[Column]:
    summary = shapes.report.summary
    known = {
        layer: value
        for layer, value in zip(summary.layer_numbers, summary.layer_symmetry, strict=False)
        if value is not None
    }
    if not known:
        return
    values = np.array([known.get(layer, np.nan) for layer in shapes.layers])
    medians = [middle(values[list(group)]) for group in rows.groups]
    decimals = decimals_for([*known.values()])
    cells = tuple(written(median, decimals) for median in medians)
    foot = [written(middle(values), decimals)] if len(rows.groups) > 1 else []
    height = len(_foot_names(shapes, rows))
    yield Column("weights", "layer symmetry", cells, (*foot, *[""] * (height - len(foot))))
