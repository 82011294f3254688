"""Changes between two models as sentences, tables and rows of a sheet, and the effect of an adapter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from attnlens.analyzers.registry import (
    FORMS,
    KEY_ANGLE,
    OWN_ROWS,
    QUERY_ANGLE,
    ROWS,
    find_measure,
    select_adapter_analyzers,
)
from attnlens.records import Comparison, Head, HeadChange, MeasureChange, Outcome, Report, Spread
from attnlens.report.sections.layers import place_columns
from attnlens.report.sections.section import (
    SUMMARIES,
    Cell,
    Column,
    Row,
    Section,
    Table,
    View,
    build_columns,
    build_table,
    section,
)
from attnlens.report.shapes import Shapes
from attnlens.wording import (
    NO_VALUE,
    clean,
    decimals_for,
    format_count,
    format_number,
    join_items,
    short,
    source_of,
    title_of,
)

LOCAL = {OWN_ROWS: "own KL", ROWS: "KL as run", FORMS: "‖ΔM‖/‖M‖", QUERY_ANGLE: "angle W_Q°", KEY_ANGLE: "angle W_K°"}
"""Distance between corresponding heads → title of its column."""
ENOUGH_HEADS = 4
"""Least number of heads for which the spread of a measure over heads is used as the unit of changes."""
EXPLAINED = (
    "own KL: each block of the second model gets the first model's hidden states, so only that block's own change "
    "counts. KL as run includes the effect of earlier blocks."
)


def rank_distances(comparison: Comparison) -> list[str]:
    """Return the distances that rank the heads, the most informative first, as far as the comparison has them."""
    measures = {row.measure for row in comparison.rows}
    return [name for name in (OWN_ROWS, FORMS, ROWS) if name in measures]


def effect_sizes(comparison: Comparison) -> dict[str, float]:
    """Return the interquartile range over the first model's heads, by measure, if above 0 and of ENOUGH_HEADS heads."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in comparison.rows:
        if row.before is not None:
            values[row.measure].append(row.before)
    ranges = {name: float(np.subtract(*np.quantile(numbers, (0.75, 0.25)))) for name, numbers in values.items()}
    return {name: size for name, size in ranges.items() if size > 0 and len(values[name]) >= ENOUGH_HEADS}


@section(10, "comparison", (*SUMMARIES, "opening"))
def change_section(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield how the models as wholes differ, and how many heads changed."""
    comparison = shapes.report.comparison
    assert comparison is not None  # noqa: S101
    changes = () if comparison.shifts else (*change_sentences(comparison), *_predictions(comparison.outcome))
    lines = [clean(line) for line in (*comparison.notes, *changes)]
    yield Section("What changed", items=lines) if view == "opening" else Section(lines=lines)


def change_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield how many changes are named, and which blocks and heads changed by their own weights or by their inputs."""

    def heads_of(rows: Iterable[MeasureChange]) -> set[tuple[int, int]]:
        return {(row.layer, row.head) for row in rows}

    yield (
        f"{comparison.named:,} of {comparison.tests:,} changes (heads × measures) are named at a false-discovery rate "
        f"of {comparison.fdr:g}, in {len(heads_of(row for row in comparison.rows if row.named))} of "
        f"{format_count(len(comparison.heads), 'head')}."
    )
    blocks = [block for block in comparison.blocks if block.named]
    if blocks:
        largest = max(blocks, key=lambda block: block.change or 0.0)
        yield (
            f"{len(blocks)} of {format_count(len(comparison.blocks), 'block')} compute differently on the same hidden "
            f"states: {join_items([block.path for block in blocks])}, by up to {largest.change or 0.0:.2g} in relative "
            f"norm{f' ({largest.path})' if len(blocks) > 1 else ''}."
        )
    by_measure = {name: [row for row in comparison.rows if row.measure == name] for name in (OWN_ROWS, FORMS, ROWS)}
    named = {name: heads_of(row for row in rows if row.named) for name, rows in by_measure.items()}
    by_weights = named[OWN_ROWS] | heads_of(row for row in by_measure[OWN_ROWS] if row.beyond_rounding)
    changed = {(head.layer, head.head) for head in comparison.heads if head.relation == "changed"}
    forms = named[FORMS] | (by_weights & changed)
    if forms:
        yield f"The form M of {format_count(len(forms), 'head')} changed: {_places(forms)}."
    local = by_weights - forms
    if local:
        unsure = len(local - named[OWN_ROWS])
        yield (
            f"{format_count(len(local), 'head')} attend differently to the same hidden states although their form M is "
            f"unchanged: {_places(local)}{f' ({unsure} of them not significantly on these windows)' if unsure else ''}."
        )
    lone = [row for row in comparison.rows if (row.before is None) != (row.after is None) and row.measure not in LOCAL]
    if lone:
        which = join_items([f"{row.measure} of {row.layer}.{row.head}" for row in lone])
        yield f"{format_count(len(lone), 'measure')} with a value in only one of the models: {which}."
    alike = heads_of(row for row in by_measure[OWN_ROWS] if row.beyond_rounding is False)
    inherited = (named[ROWS] & alike) - by_weights - forms
    if inherited:
        yield f"{format_count(len(inherited), 'head')} changed only because their inputs changed."


def _places(heads: set[tuple[int, int]]) -> str:
    return join_items([f"{layer}.{head}" for layer, head in sorted(heads)])


def _predictions(outcome: Outcome | None) -> Iterator[str]:
    """Yield one sentence per known difference between the models' predictions."""
    if outcome is None:
        return
    loss = outcome.loss
    if loss is not None:
        ends = "" if loss.ci95 is None else f" (95 % interval {loss.ci95[0]:+.4f} to {loss.ci95[1]:+.4f})"
        yield f"Loss {loss.before:.4f} → {loss.after:.4f} nats per token: {loss.delta:+.4f}{ends}."
    if outcome.kl is not None and outcome.top1_agreement is not None:
        same = f"the same first choice for {outcome.top1_agreement:.1%}"
        yield f"KL of the predictions {short(outcome.kl)} nats per token; {same}."
    elif outcome.hidden_cosine is not None:
        yield f"Cosine of the last hidden states {outcome.hidden_cosine:.6f}."


@section(20, "comparison")
def comparison_sections(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield the changed heads, worst first, and the smallest changes that would have been named."""
    comparison = shapes.report.comparison
    assert comparison is not None  # noqa: S101
    if comparison.shifts:
        rows = [
            {"measure": shift.measure, "first model": _quartiles(shift.before), "second model": _quartiles(shift.after)}
            for shift in comparison.shifts
        ]
        note = "Medians over heads, with quartiles. The heads do not correspond, so nothing is tested."
        yield Section("Distributions over heads", table=build_table(rows, {"measure"}, {"measure"}), notes=[note])
        return
    heads = _list_changed_heads(comparison)
    if heads:
        shown = heads[:16] if view == "terminal" else heads  # as many as fit on a page of a terminal
        yield _head_section(shown, comparison, len(heads) - len(shown))
    least = tuple(_least_changes(comparison))
    if least:
        yield Section("Smallest changes that would have been named (median over heads)", items=least)


def _quartiles(part: Spread) -> str:
    low, middle, high = map(short, part.quartiles)
    return f"{middle} ({low} to {high})"


def _list_changed_heads(comparison: Comparison) -> list[tuple[HeadChange, dict[str, MeasureChange]]]:
    """List the heads with a named change and all of their changes, by `rank_distances`, largest first."""
    rows: dict[tuple[int, int], dict[str, MeasureChange]] = defaultdict(dict)
    for row in comparison.rows:
        rows[row.layer, row.head][row.measure] = row
    heads = [(head, rows[head.layer, head.head]) for head in comparison.heads]
    changed = [(head, changes) for head, changes in heads if any(row.named for row in changes.values())]
    names = rank_distances(comparison)
    return sorted(changed, key=lambda pair: [-(pair[1][name].delta or 0.0) if name in pair[1] else 0 for name in names])


def _head_section(
    heads: Sequence[tuple[HeadChange, dict[str, MeasureChange]]], comparison: Comparison, more: int
) -> Section:
    sizes, largest = effect_sizes(comparison), "largest change of a measure"
    titles = {name: title for name, title in LOCAL.items() if any(name in changes for _, changes in heads)}
    rows = []
    for head, changes in heads:
        named = [row for row in changes.values() if row.named]
        partner = "" if head.partner == head.head else f" → {head.partner}"
        row = {"layer": str(head.layer), "head": f"{head.head}{partner}", "form M": head.relation or NO_VALUE}
        distances = [(title, _distance(changes.get(name))) for name, title in titles.items()]
        row |= {**dict(distances[:3]), "named": str(len(named)), largest: _largest(named, sizes), **dict(distances[3:])}
        rows.append(row)
    columns = build_columns(rows, {"head", "form M", largest})
    notes = [EXPLAINED] if OWN_ROWS in titles else []
    notes.append("*: named.")
    if more > 0:
        notes.append(f"{format_count(more, 'more head')} with named changes: --table, --csv or --json.")
    return Section("Heads that changed, worst first", table=Table(columns[:2], columns[2:], "first"), notes=notes)


def _distance(row: MeasureChange | None) -> str:
    if row is None or row.delta is None:
        return NO_VALUE
    if row.named or row.delta > (row.rounding or 0.0):
        return f"{short(row.delta)}{'*' * row.named}"
    return "0" if row.delta == 0 else "rounding"


def _largest(named: Sequence[MeasureChange], sizes: dict[str, float]) -> str:
    """Format the named measure with the largest change relative to its interquartile range over the first model."""
    rows = [row for row in named if row.measure in sizes and row.delta is not None and row.before is not None]
    if not rows:
        return NO_VALUE
    row = max(rows, key=lambda row: abs(row.delta or 0.0) / sizes[row.measure])
    return f"{row.measure} {short(row.before or 0.0)} → {short(row.after or 0.0)}"


def _least_changes(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield (measure, text) on the smallest change of each tokens.* measure that would be named (median over heads)."""
    sizes = effect_sizes(comparison)
    by_measure: dict[str, list[float]] = defaultdict(list)
    for row in comparison.rows:
        if row.least is not None and row.se is not None and source_of(row.measure) == "tokens":
            by_measure[row.measure].append(row.least)
    for name, values in by_measure.items():
        if name in sizes:
            middle = float(np.median(values))
            yield name, f"{short(middle)}, {middle / sizes[name]:.1%} of the heads' interquartile range"


def comparison_rows(report: Report) -> list[Row]:
    """Build one row per head and measure, or, if heads do not correspond, one per measure."""
    comparison = report.comparison
    assert comparison is not None  # noqa: S101
    rows: list[Row] = []
    for shift in comparison.shifts:
        cells: dict[str, Cell] = {"measure": shift.measure}
        for which, part in (("before", shift.before), ("after", shift.after)):
            cells[f"{which}.heads"] = part.heads
            cells |= dict(zip((f"{which}.q25", f"{which}.median", f"{which}.q75"), part.quartiles, strict=True))
            cells[f"{which}.median.se"] = part.median_se
        rows.append(cells)
    if rows:
        return rows
    partners = {(head.layer, head.head): head for head in comparison.heads}
    for row in comparison.rows:
        head = partners[row.layer, row.head]
        where: dict[str, Cell] = {"site": head.site, "layer": row.layer, "head": row.head, "partner": head.partner}
        values = {name: getattr(row, name) for name in MeasureChange.model_fields if name not in where}
        rows.append(where | {"relation": head.relation} | values)
    return rows


@section(30, ("inspection", "experiments"), ("markdown", "page"))
@section(30, "inspection", ("terminal",))
def adapter_section(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield a section on the adapter, how far it moved M, and the heads that it moved furthest; nothing without one."""
    report, record = shapes.report, shapes.report.model.adapter
    if record is None:
        return
    first, *others = (info.name for analyzer in select_adapter_analyzers("weights") for info in analyzer.measures)
    measured = [head for head in report.heads if _value(head, first) is not None]
    ranked = sorted(measured, key=lambda head: -(_value(head, first) or 0.0))
    replaced = f"; {format_count(len(record.replaced), 'parameter')} replaced whole" if record.replaced else ""
    merged = (
        f"{record.kind} adapter {record.id} (r {record.rank}, α {record.alpha:g}) was merged into "
        f"{format_count(record.modules, 'module')} of {report.model.id}{replaced}."
    )
    lines = [clean(merged)]
    if ranked:
        sizes = [_value(head, first) or 0.0 for head in ranked]
        moved, median = sum(size > 0 for size in sizes), float(np.median(sizes))
        lines.append(
            f"It changed M in {moved} of {format_count(len(ranked), 'head')}; ‖M' − M‖/‖M‖: median {short(median)}, "
            f"largest {short(sizes[0])}."
        )
    top = [head for head in ranked[:12] if _value(head, first)]
    yield Section("Adapter", lines=lines, table=_adapter_table(top, (first, *others)) if top else None)


def _adapter_table(heads: Sequence[Head], names: Sequence[str]) -> Table:
    """Build a table with one row per head: its distances, and headline measures as base, adapted and difference."""
    columns = [_number_column(title_of(name), [_value(head, name) for head in heads]) for name in names]
    for name in dict.fromkeys(name for head in heads for name in head.measures):
        base = [getattr(head.measures.get(name), "base", None) for head in heads]
        if find_measure(name).headline and any(value is not None for value in base):
            adapted = [_value(head, name) for head in heads]
            pairs = zip(base, adapted, strict=True)
            differences = [None if old is None or new is None else new - old for old, new in pairs]
            for heading, values in (("base", base), ("adapted", adapted), ("difference", differences)):
                columns.append(_number_column(heading, values, title_of(name)))
    return Table(place_columns(heads), columns)


def _number_column(heading: str, values: Sequence[float | None], group: str = "") -> Column:
    decimals = decimals_for([value for value in values if value is not None])
    return Column(heading, [format_number(value, decimals) for value in values], group)


def _value(head: Head, name: str) -> float | None:
    return head.measures[name].value if name in head.measures else None
