"""Sections on the measures of heads: medians by layer, the table of every head, and the most extreme heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnlens.analyzers.registry import NOT_IDENTIFIED
from attnlens.records import Head, HeadId, ModelInfo
from attnlens.report.findings.heads import CHANCE, LEVEL, THRESHOLD, HeadTests
from attnlens.report.sections.facts import no_errors, null_cell, population
from attnlens.report.sections.reference import null_words
from attnlens.report.sections.section import TEXTS, Column, Section, Table, View, section, sort_by_group
from attnlens.report.shapes import MeasureMap, Shapes, alternate_sources, group_of, middle
from attnlens.wording import (
    NO_VALUE,
    capitalise,
    clean,
    decimals_for,
    decimals_with_error,
    format_error,
    format_number,
    join_items,
    short,
    title_of,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MOST_CELLS = 16_000
"""Most cells (heads × measures) of the table of all heads that a page shows to readers without scripts."""
MOST_TEXTS = 6  # Maximum number of texts with a row at the foot of the table


@section(38, ("inspection", "swap", "doctor", "experiments"), ("page",))
@section(40, "inspection", TEXTS)
@section(40, "experiments", ("markdown",))
def extreme_heads(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield a list of the most extreme heads, if any: those with the smallest or largest value of some measure."""
    name = shapes.report.model.layer_name
    items = [(f"layer {name(e.layer)} head {e.head}", clean(e.text)) for e in shapes.report.summary.extremes]
    if items:
        yield Section("Most extreme heads (ranks, not tests)", items=items)


MARKS = {1: "↑", 0: "", -1: "↓"}  # Mark of a value significantly above or below its reference
MARKED = (
    f"{MARKS[1]} {MARKS[-1]}: significantly above or below chance ({join_items(CHANCE[:3])}, selection.*) or ½ "
    f"({join_items(THRESHOLD)}), at a false-discovery rate of {100 * LEVEL:g} % over heads and measures; other "
    "measures are not tested."
)


@section(35, ("inspection", "experiments"), ("page",))
@section(98, views=("terminal",))
def head_table(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield a table of heads × measures, with errors, median nulls and, as tooltips, reasons for missing values.

    A page gets a sentence instead of a table with more than MOST_CELLS cells.
    """
    if view == "page" and len(shapes.report.heads) * len(shapes.readings) > MOST_CELLS:
        line = "Too many heads for a table without scripts: --csv writes them all."
        yield Section("Every head", lines=(line,), instead=True)
        return
    if not shapes.readings:
        return
    nulls = any(reading.null for reading in shapes.readings.values())
    first, *others = place_columns(shapes.report.heads, shapes.report.model)
    first = replace(first, foot=["null", "± sd"] * nulls, hints=[head.site for head in shapes.report.heads])
    names = [first, *(replace(column, foot=["", ""] * nulls) for column in others)]
    signs = {} if view == "page" else HeadTests(shapes).signs  # the page shows nulls and z of each head
    columns = sort_by_group([_head_column(shapes, reading, nulls, signs) for reading in shapes.readings.values()])
    scope = population(shapes.report)
    note = no_errors(shapes.report) or (scope and f"±: standard error; {scope}")
    notes = [f"{note}."] if note else []
    notes += [MARKED] if any(name in shapes.readings for name in signs) else []
    yield Section("Every head", table=Table(names, columns), notes=notes, instead=view == "page")


def place_columns(heads: Sequence[HeadId], model: ModelInfo) -> list[Column]:
    """Build the columns that name heads: layer, head and, if they belong to several parts of the model, part."""
    layers = [model.layer_number(head.layer) for head in heads]
    columns = [Column("layer", layers), Column("head", [str(head.head) for head in heads])]
    if len({head.part for head in heads}) > 1:
        columns.append(Column("part", [head.part for head in heads], words=True))
    return columns


def missing_reason(head: Head, name: str) -> str:
    """Return the reason why a head has no value of a measure; "" if it has a value."""
    return head.measures[name].reason or "" if name in head.measures else "not measured"


def _head_column(
    shapes: Shapes, reading: MeasureMap, nulls: bool, signs: Mapping[str, Int[np.ndarray, " heads"]]
) -> Column:
    heads = shapes.report.heads
    cells = []
    decimals = decimals_with_error(reading.present.tolist(), reading.error)
    numbers = zip(reading.values[shapes.cells].tolist(), reading.errors[shapes.cells].tolist(), strict=True)
    for (value, error), sign in zip(numbers, signs.get(reading.name, [0] * len(heads)), strict=True):
        named = reading.labels and not np.isnan(value)
        text = clean(reading.labels[round(value)]) if named else _with_error(value, error, decimals)
        cells.append(text + MARKS[int(sign)])
    reasons = [missing_reason(head, reading.name) for head in heads]
    mean, _, sd = null_cell(*reading.null).partition(" ± ") if reading.null else ("", "", "")
    foot = (mean, f"±{sd}" if sd else "") if nulls else ()
    return Column(title_of(reading.name), cells, group=group_of(reading.info), foot=foot, hints=reasons)


@section(40, ("inspection", "experiments"), ("page",))
@section(10, "inspection", TEXTS)
@section(10, "experiments", ("markdown",))
def layer_sections(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield medians over heads, with one row per layer, in a single table or, in Markdown, in one table per source."""
    if not shapes.readings:
        return
    summary = shapes.report.summary
    texts = [clean(f"{text.name} ({text.sequences})") for text in summary.texts[:MOST_TEXTS]]
    # rows of the footer: all heads, each text, the sd between texts, the null of the median
    foot = ["all"] * (len(shapes.layers) > 1) + texts + ["between texts"] * bool(summary.between_texts)
    foot += ["null", "± sd"] * bool(summary.median_nulls)
    names = [Column("layer", shapes.layer_numbers, foot=foot)]
    names += [Column("part", shapes.parts, words=True)] if len(set(shapes.parts)) > 1 else []
    # renderers expect footers of equal length
    names, columns = (
        [replace(column, foot=[*column.foot, *[""] * (len(foot) - len(column.foot))]) for column in part]
        for part in (names, measure_columns(shapes))
    )
    constants = [
        f"{clean(reading.name)} {reading.labels.get(round(reading.present[0])) or short(reading.present[0])}"
        for reading in shapes.readings.values()
        if reading.constant
    ]
    same = f"The same for every head: {join_items(constants, 8)}." if constants else ""
    notes = [*filter(None, [reading_help(shapes), same])]
    if view == "markdown":
        for source in dict.fromkeys(column.group for column in columns):
            group = [replace(column, group="") for column in columns if column.group == source]
            yield Section(source, table=Table(names, group))
        yield Section(notes=notes)
    elif columns or view == "terminal":
        table = Table(names, columns) if columns else None
        yield Section("By layer" * (view == "page"), table=table, notes=notes)


def measure_columns(shapes: Shapes) -> list[Column]:
    """Build a column per measure that differs between heads, headlines first, and one for layer symmetry, if known."""
    varying = {name: reading for name, reading in shapes.readings.items() if not reading.constant}
    headlines = [name for name, reading in varying.items() if reading.info.headline]
    others = [name for name in varying if name not in headlines]
    columns = [
        _layer_column(varying[name], shapes) for name in [*alternate_sources(headlines), *alternate_sources(others)]
    ]
    summary = shapes.report.summary
    pairs = zip(summary.layer_numbers, summary.layer_symmetry, strict=False)
    symmetry = {layer: value for layer, value in pairs if value is not None}
    if symmetry:
        decimals = decimals_for([*symmetry.values()])
        cells = [format_number(symmetry.get(layer), decimals) for layer in shapes.layers]
        foot = [format_number(float(np.median([*symmetry.values()])), decimals)] * (len(cells) > 1)
        columns.append(Column("layer symmetry", cells, "weights", foot))
    return columns


def reading_help(shapes: Shapes) -> str:
    """Explain the layer table: rows, errors, nulls, spaces, and measures that are not identified."""
    summary, readings, alone = shapes.report.summary, shapes.readings.values(), len(shapes.report.heads) == 1
    scope = population(shapes.report)
    error = f"± is the standard error{' of that median' * (not alone)}{f' ({scope})' if scope else ''}"
    nulls = [reading.info for reading in readings if reading.null]
    chance = f"null is {null_words(nulls)},{' for the median of the same number of heads,' * (not alone)} mean ± sd"
    parts = [
        "" if alone else "rows are medians over heads",
        error if summary.median_errors else no_errors(shapes.report),
        "a text with a single window has no errors in its row" * any(text.reasons for text in summary.texts),
        chance if nulls else "",
        "in brackets: number of windows of a text" * bool(summary.texts),
        "“between texts” is the sd of the texts' medians" * bool(summary.between_texts),
    ]
    sentence = "; ".join(filter(None, parts))
    sentences = [f"{capitalise(sentence)}."] if sentence else []
    spaces = dict.fromkeys(reading.info.space for reading in readings if reading.info.space)
    if len(spaces) > 1:
        sentences.append(f"{' and '.join(spaces)}: two different problems; compare values only within one.")
    unsure = [reading.name for reading in readings if reading.info.identified == "nowhere"]
    sentences += [f"{join_items(unsure)}: {NOT_IDENTIFIED}"] if unsure else []
    return " ".join(sentences)


def _layer_column(reading: MeasureMap, shapes: Shapes) -> Column:
    summary, name, count = shapes.report.summary, reading.name, len(shapes.layers)
    title, group = title_of(name), group_of(reading.info)
    rows = [*reading.values, *([reading.values] if count > 1 else [])]  # the last row is the footer, over all heads
    if reading.labels:
        texts = [_commonest(reading, values) for values in rows]
        return Column(title, texts[:count], group, texts[count:])
    medians = [middle(values) for values in rows]
    by_layer = dict(zip(summary.layer_numbers, summary.layer_errors, strict=False))
    error, null = summary.median_errors.get(name), summary.median_nulls.get(name)
    errors = [*(by_layer.get(layer, {}).get(name) for layer in shapes.layers), error]
    shown = [*medians, middle(reading.values), *((null.mean, null.sd) if null else ())]
    decimals = decimals_with_error([number for number in shown if not np.isnan(number)], error)
    texts = [_with_error(median, each, decimals) for median, each in zip(medians, errors, strict=False)]
    foot = texts[count:]
    for text in summary.texts[:MOST_TEXTS]:
        median = text.medians.get(name)
        foot.append("" if median is None else _with_error(median, text.median_errors.get(name), decimals))
    if summary.between_texts:
        between = summary.between_texts.get(name)
        foot.append("" if between is None else format_error(between, decimals))
    if null is not None:
        foot += [format_number(null.mean, decimals), f"±{format_error(null.sd, decimals)}"]
    return Column(title, texts[:count], group, foot)


def _with_error(median: float, error: float | None, decimals: int) -> str:
    number = format_number(median, decimals)
    return number if error is None or np.isnan([median, error]).any() else f"{number}±{format_error(error, decimals)}"


def _commonest(reading: MeasureMap, values: Float[np.ndarray, "*heads"]) -> str:
    """Format the most frequent category with its count among the heads with a value: `positive 5/8`; `–` if none."""
    counts = Counter(round(value) for value in values[~np.isnan(values)].tolist())
    if not counts:
        return NO_VALUE
    number, count = counts.most_common(1)[0]
    return f"{clean(reading.labels[number])} {count}/{counts.total()}"
