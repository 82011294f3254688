"""Sections on the changes between two models, the effect of an adapter, and studies that compare trained kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean, stdev

import numpy as np

from attnlens.analyzers.registry import OWN_ROWS, find_measure, select_adapter_analyzers
from attnlens.records import (
    Comparison,
    Head,
    HeadChange,
    MeasureChange,
    Outcome,
    Report,
    Spread,
    StudyCell,
    StudyColumn,
)
from attnlens.report.sections.layers import place_columns
from attnlens.report.sections.section import Cell, Column, Row, Section, Table, build_columns, build_table
from attnlens.report.sentences import comparisons as words
from attnlens.report.sentences.reports import adapter
from attnlens.wording import (
    NO_VALUE,
    big,
    clean,
    decimals_for,
    decimals_with_error,
    format_count,
    format_error,
    format_number,
    join_items,
    short,
    source_of,
    title_of,
)

UNITS = {"perplexity": "perplexity", "BLEU": "BLEU", "accuracy": "accuracy, %"}
SPEED = "× SDPA: training speed relative to a standard transformer (Eq. 4) with torch's attention, in the same loop."
ERRORS = "±, p: over seeds, on the same test examples; p: paired by seed, corrected for all pairs of the table (Holm)."
PUBLISHED = "published: {}; on other data with far larger models: compare orders, not values."
HEADS = (
    "medians over heads, before training → as tested, of the first seed's run; tokens.* and selection.* of log k on 8 "
    "held-out sequences, weights.* of s W_Q W_Kᵀ. – : no value, for shares of causal heads, the SVM of kernels that "
    "are not functions of products or have a position bias, kernels that can be negative, and primal layers."
)


def study_sections(report: Report) -> Iterator[Section]:
    """Yield the sections of every study, each task by itself."""
    for study in report.studies:
        options = {"classification": "classification (--series or --labelled)"}
        forms = join_items(options.get(form, form) for form in study.not_trained)
        missing = (f"Not trained because no data was given: {forms}.",) if forms else ()
        yield Section(f"{clean(study.name)}: {clean(study.question)}", lines=missing)
        for task in study.tasks:
            cells = [cell for cell in study.cells if cell.task == task.name]
            notes = [f"{clean(cell.name)}: {clean(cell.problem)}." for cell in cells if cell.problem]
            notes += [ERRORS, SPEED] if any(cell.se is not None for cell in cells) else [SPEED]
            if task.published and _has_published(cells):
                notes.append(PUBLISHED.format(clean(task.published)))
            kind = "" if task.form in task.name else f" ({task.form})"
            order = "more" if task.higher_is_better else "less"
            title = clean(f"{task.name}{kind}, {UNITS[task.metric]}, {order} is better")
            yield Section(title, lines=[*words.task_lines(study, task)], table=_cell_table(task, cells), notes=notes)
            if any(cell.heads for cell in cells):
                yield Section(f"{clean(task.name)}: heads", table=_heads(cells), notes=(HEADS,))


def _has_published(cells: list[StudyCell]) -> bool:
    return any(cell.published is not None or cell.published_diverged for cell in cells)


def _cell_table(task: StudyColumn, cells: list[StudyCell]) -> Table:
    """Build a table with one row per cell, in the order of the paper."""
    published = [f"{cell.published:g}" for cell in cells if cell.published is not None]
    decimals = max((len(number.partition(".")[2]) for number in published), default=0)
    rows = []
    for cell in cells:
        row = {"cell": clean(cell.name), "ours": _ours(task, cell)}
        if _has_published(cells):
            number = format_number(cell.published, decimals)
            row["published"] = "did not converge" if cell.published_diverged else number
        if task.form == "translation":
            row |= {name: _score(cell, name) for name in ("loss", "chrF")}
        row["rate"] = f"{cell.rate:g}"
        row["parameters\n(of kernels)"] = f"{big(cell.parameters)} ({big(cell.kernel_parameters)})"
        row["tokens/s\n(× SDPA)"] = f"{big(round(cell.tokens_per_second))} ({cell.beside_sdpa:.2f})"
        if any(each.features for each in cells):
            row["feature\ndimension"] = cell.features or NO_VALUE
        rows.append(row)
    return build_table(rows, {"cell"})


def _heads(cells: list[StudyCell]) -> Table:
    """Build a table with one row per cell: the median over heads of each measure, before training → as tested."""

    def format_change(cell: StudyCell, name: str) -> str:
        looks = cell.heads[name].median if name in cell.heads else []
        ends = [looks[0], looks[cell.tested_look]] if cell.tested_look < len(looks) else []
        return " → ".join(NO_VALUE if value is None else short(value) for value in ends) or NO_VALUE

    names = dict.fromkeys(name for cell in cells for name in cell.heads)
    columns = [Column(title_of(name), [format_change(cell, name) for cell in cells], source_of(name)) for name in names]
    return Table([Column("cell", [clean(cell.name) for cell in cells], words=True)], columns)


def _ours(task: StudyColumn, cell: StudyCell) -> str:
    if cell.mean is None:
        return "did not converge"
    factor = 100 if task.metric == "accuracy" else 1
    return _with_error(cell.mean * factor, None if cell.se is None else cell.se * factor)


def _score(cell: StudyCell, name: str) -> str:
    """Format the mean of a further score over seeds, with its standard error."""
    values = [run.scores[name] for run in cell.runs if name in run.scores]
    if not values or cell.mean is None:
        return NO_VALUE
    return _with_error(mean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else None)


def _with_error(value: float, error: float | None) -> str:
    decimals = decimals_with_error([value], error)
    return format_number(value, decimals) + ("" if error is None else f" ± {format_error(error, decimals)}")


def study_rows(report: Report) -> Iterator[Row]:
    """Yield one spreadsheet row per training run."""
    for study in report.studies:
        for cell in study.cells:
            for run in cell.runs:
                yield {
                    **{"table": study.name, "task": cell.task, "cell": cell.name, "seed": run.seed, "rate": cell.rate},
                    **run.scores,
                    **{"validation_loss": min(run.losses, default=None), "problem": run.problem},
                    **{"parameters": cell.parameters, "kernel_parameters": cell.kernel_parameters},
                    **{"tokens": cell.tokens, "seconds": run.seconds, "published": cell.published},
                }


def adapter_sections(report: Report) -> Iterator[Section]:
    """Yield a section on the adapter, how far it moved M, and the heads that it moved furthest; nothing without one."""
    if report.model.adapter is None:
        return
    first, *others = (info.name for analyzer in select_adapter_analyzers("weights") for info in analyzer.measures)
    measured = [head for head in report.heads if _value(head, first) is not None]
    ranked = sorted(measured, key=lambda head: -(_value(head, first) or 0.0))
    lines = [adapter(report)]
    if ranked:
        sizes = [_value(head, first) or 0.0 for head in ranked]
        moved, median = sum(size > 0 for size in sizes), float(np.median(sizes))
        lines.append(
            f"It changed M in {moved} of {format_count(len(ranked), 'head')}; ‖M' − M‖/‖M‖: median {short(median)}, "
            f"largest {short(sizes[0])}."
        )
    top = [head for head in ranked[:12] if _value(head, first)]
    yield Section("Adapter", lines=lines, table=_table(top, (first, *others)) if top else None)


def _table(heads: Sequence[Head], names: Sequence[str]) -> Table:
    """Build a table with one row per head: its distances, and headline measures as base, adapted and difference."""
    columns = [_column(title_of(name), [_value(head, name) for head in heads]) for name in names]
    for name in dict.fromkeys(name for head in heads for name in head.measures):
        base = [getattr(head.measures.get(name), "base", None) for head in heads]
        if find_measure(name).headline and any(value is not None for value in base):
            adapted, title = [_value(head, name) for head in heads], title_of(name)
            pairs = zip(base, adapted, strict=True)
            differences = [None if old is None or new is None else new - old for old, new in pairs]
            columns += [_column("base", base, title), _column("adapted", adapted, title)]
            columns.append(_column("difference", differences, title))
    return Table(place_columns(heads), columns)


def _column(title: str, values: Sequence[float | None], group: str = "") -> Column:
    decimals = decimals_for([value for value in values if value is not None])
    return Column(title, [format_number(value, decimals) for value in values], group)


def _value(head: Head, name: str) -> float | None:
    return head.measures[name].value if name in head.measures else None


EXPLAINED = (
    "own KL: each block of the second model gets the first model's hidden states, so only that block's own change "
    "counts. KL as run includes the effect of earlier blocks."
)


def compared_models(report: Report) -> str:
    """Return the title of a comparison: `base → model`."""
    assert report.comparison is not None  # noqa: S101
    return f"{report.comparison.base.title} → {report.model.title}"


def comparison_sections(report: Report, *, all_heads: bool) -> Iterator[Section]:
    """Yield the changed heads, worst first, and the smallest changes that would have been named."""
    comparison = report.comparison
    assert comparison is not None  # noqa: S101
    if comparison.shifts:
        rows = [
            {"measure": shift.measure, "first model": _quartiles(shift.before), "second model": _quartiles(shift.after)}
            for shift in comparison.shifts
        ]
        note = "Medians over heads, with quartiles. The heads do not correspond, so nothing is tested."
        yield Section("Distributions over heads", table=build_table(rows, {"measure"}), notes=[note])
        return
    heads = changed_heads(comparison)
    if heads:
        shown = heads if all_heads else heads[:16]  # as many as fit on a page of a terminal
        yield _head_section(shown, comparison, len(heads) - len(shown))
    least = tuple(words.least_changes(comparison))
    if least:
        yield Section("Smallest changes that would have been named (median over heads)", items=least)


def _quartiles(part: Spread) -> str:
    low, middle, high = map(short, part.quartiles)
    return f"{middle} ({low} to {high})"


def overview_lines(report: Report) -> tuple[str, ...]:
    """State how the models as wholes differ, and how many heads changed."""
    comparison = report.comparison
    assert comparison is not None  # noqa: S101
    changes = () if comparison.shifts else (*words.change_sentences(comparison), *_predictions(comparison.outcome))
    return tuple(map(clean, (*comparison.notes, *changes)))


def changed_heads(comparison: Comparison) -> list[tuple[HeadChange, dict[str, MeasureChange]]]:
    """List the heads with a named change and all of their changes, by `words.rank_distances`, largest first."""
    rows: dict[tuple[int, int], dict[str, MeasureChange]] = defaultdict(dict)
    for row in comparison.rows:
        rows[row.layer, row.head][row.measure] = row
    heads = [(head, rows[head.layer, head.head]) for head in comparison.heads]
    changed = [(head, changes) for head, changes in heads if any(row.named for row in changes.values())]
    names = words.rank_distances(comparison)
    return sorted(changed, key=lambda pair: [-(pair[1][name].delta or 0.0) if name in pair[1] else 0 for name in names])


def _head_section(
    heads: Sequence[tuple[HeadChange, dict[str, MeasureChange]]], comparison: Comparison, more: int
) -> Section:
    sizes, largest = words.effect_sizes(comparison), "largest change of a measure"
    titles = {name: title for name, title in words.LOCAL.items() if any(name in changes for _, changes in heads)}
    rows = []
    for head, changes in heads:
        named = [row for row in changes.values() if row.named]
        partner = "" if head.partner == head.head else f" → {head.partner}"
        row = {"layer": str(head.layer), "head": f"{head.head}{partner}", "form M": head.relation or NO_VALUE}
        distances = [(title, _distance(changes.get(name))) for name, title in titles.items()]
        row |= {**dict(distances[:3]), "named": str(len(named)), largest: _largest(named, sizes), **dict(distances[3:])}
        rows.append(row)
    columns = build_columns(rows, {"head", "form M", largest})
    hints = {title: [_hint(changes.get(name)) for _, changes in heads] for name, title in titles.items()}
    columns = [replace(column, hints=hints.get(column.title, ())) for column in columns]
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


def _hint(row: MeasureChange | None) -> str:
    if row is None or row.q is None:
        return "" if row is None else clean(row.reason or "")
    return f"q {row.q:.2g}; rounding alone {short(row.rounding or 0.0)}"


def _largest(named: Sequence[MeasureChange], sizes: dict[str, float]) -> str:
    """Format the named measure with the largest change relative to its interquartile range over the first model."""
    rows = [row for row in named if row.measure in sizes and row.delta is not None and row.before is not None]
    if not rows:
        return NO_VALUE
    row = max(rows, key=lambda row: abs(row.delta or 0.0) / sizes[row.measure])
    return f"{row.measure} {short(row.before or 0.0)} → {short(row.after or 0.0)}"


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
