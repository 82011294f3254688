"""Sections on the changes between two models, the effect of an adapter, and studies that compare trained kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    Shift,
    Spread,
    StudyCell,
    StudyColumn,
)
from attnlens.report.sections.layers import place_columns
from attnlens.report.sections.section import Cell, Column, Row, Section, Table
from attnlens.report.sentences import comparisons as words
from attnlens.report.sentences.reports import adapter
from attnlens.report.shapes import Shapes
from attnlens.wording import (
    NO_VALUE,
    big,
    clean,
    decimals_for,
    decimals_with_error,
    format_count,
    format_error,
    format_number,
    short,
    source_of,
    title_of,
)

UNITS = {"perplexity": "perplexity", "BLEU": "BLEU", "accuracy": "accuracy, %"}
SPEED = "× SDPA: training steps beside those of a standard transformer (Eq. 4) with torch's attention, in one loop."
ERRORS = "±, p: over seeds, on the same test examples; p: paired by seed, corrected for all pairs of the table (Holm)."
PUBLISHED = "published: {}; other data and far larger models: orders are compared, not values."
HEADS = (
    "medians over heads, before training → as tested, of the first seed's run; tokens.* and selection.* of log k on 8 "
    "held-out sequences, weights.* of s W_Q W_Kᵀ; – has no value: shares of causal heads, the SVM of kernels that are "
    "no functions of products or have a position bias, kernels that can be negative, primal layers."
)


def study_sections(report: Report) -> Iterator[Section]:
    """Yield the sections of every study, each task by itself."""
    for study in report.studies:
        yield Section(f"{clean(study.name)}: {clean(study.question)}", lines=tuple(words.not_trained(study)))
        for task in study.tasks:
            cells = [cell for cell in study.cells if cell.task == task.name]
            notes = tuple(f"{clean(c.name)}: {clean(c.problem)}." for c in cells if c.problem)
            findings = (*words.agreement(study, task), *words.told_apart(study, task), *words.at_the_edge(study, task))
            kind = "" if task.form in task.name else f" ({task.form})"
            order = "more" if task.higher_is_better else "less"
            yield Section(
                clean(f"{task.name}{kind}, {UNITS[task.metric]}, {order} is better"),
                lines=(words.how_trained(study, task), *findings, *words.left_out(task)),
                table=_cell_table(task, cells),
                notes=(*notes, *_notes(task, cells)),
            )
            if any(cell.heads for cell in cells):
                yield Section(f"{clean(task.name)}: heads", table=_heads(cells), notes=(HEADS,))


def _notes(task: StudyColumn, cells: list[StudyCell]) -> Iterator[str]:
    """Yield an explanation of the columns that the table contains."""
    if any(cell.se is not None for cell in cells):
        yield ERRORS
    yield SPEED
    if task.published and any(cell.published is not None or cell.published_diverged for cell in cells):
        yield PUBLISHED.format(clean(task.published))


def _cell_table(task: StudyColumn, cells: list[StudyCell]) -> Table:
    """Build a table with one row per cell, in the order of the paper."""
    names = (Column("cell", [clean(cell.name) for cell in cells], words=True),)
    scores = ("loss", "chrF") if task.form == "translation" else ()
    published = [f"{cell.published:g}" for cell in cells if cell.published is not None]
    decimals = max((len(number.partition(".")[2]) for number in published), default=0)
    sizes = (f"{big(cell.parameters)} ({big(cell.kernel_parameters)})" for cell in cells)
    speeds = (f"{big(round(cell.tokens_per_second))} ({cell.beside_sdpa:.2f})" for cell in cells)
    columns = [
        Column("ours", [_ours(task, cell) for cell in cells]),
        Column("published", [_format_published(cell, decimals) for cell in cells]),
        *(Column(name, [_score(cell, name) for cell in cells]) for name in scores),
        Column("rate", [f"{cell.rate:g}" for cell in cells]),
        Column("parameters\n(of kernels)", tuple(sizes)),
        Column("tokens/s\n(× SDPA)", tuple(speeds)),
    ]
    if any(cell.features for cell in cells):
        columns.append(Column("feature\ndimension", [cell.features or NO_VALUE for cell in cells]))
    if all(cell.published is None and not cell.published_diverged for cell in cells):
        del columns[1]
    return Table(names, columns)


def _heads(cells: list[StudyCell]) -> Table:
    """Build a table with one row per cell: the median over heads of each measure, before training → as tested."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.heads))
    rows = Column("cell", [clean(cell.name) for cell in cells], words=True)
    return Table(
        (rows,),
        tuple(
            Column(title_of(name), [_format_change(c, name) for c in cells], group=source_of(name)) for name in names
        ),
    )


def _format_change(cell: StudyCell, name: str) -> str:
    looks = cell.heads[name].median if name in cell.heads else []
    ends = [looks[0], looks[cell.tested_look]] if cell.tested_look < len(looks) else []
    return " → ".join(NO_VALUE if value is None else short(value) for value in ends) or NO_VALUE


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


def _format_published(cell: StudyCell, decimals: int) -> str:
    if cell.published_diverged:
        return "did not converge"
    return NO_VALUE if cell.published is None else format_number(cell.published, decimals)


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
            f"It moved M in {moved} of {format_count(len(ranked), 'head')}; ‖M' − M‖/‖M‖: median {short(median)}, "
            f"largest {short(sizes[0])}."
        )
    top = [head for head in ranked[:12] if _value(head, first)]
    yield Section("Adapter", lines=lines, table=_table(top, (first, *others)) if top else None)


def _table(heads: Sequence[Head], names: Sequence[str]) -> Table:
    """Build a table with one row per head: its distances, and headline measures as base, adapted and difference."""
    columns = [Column(title_of(name), _cells([_value(head, name) for head in heads])) for name in names]
    for name in dict.fromkeys(name for head in heads for name in head.measures):
        pairs = [(getattr(head.measures.get(name), "base", None), _value(head, name)) for head in heads]
        if not find_measure(name).headline or all(base is None for base, _ in pairs):
            continue
        differences = [None if base is None or value is None else value - base for base, value in pairs]
        for title, values in (("base", [base for base, _ in pairs]), ("adapted", [value for _, value in pairs])):
            columns.append(Column(title, _cells(values), group=title_of(name)))
        columns.append(Column("difference", _cells(differences), group=title_of(name)))
    return Table(place_columns(heads), columns)


def _cells(values: Sequence[float | None]) -> tuple[str, ...]:
    decimals = decimals_for([value for value in values if value is not None])
    return tuple(format_number(value, decimals) for value in values)


def _value(head: Head, name: str) -> float | None:
    return head.measures[name].value if name in head.measures else None


EXPLAINED = (
    "own KL: each block of the second model takes the hidden states that the first one's took: what differs is of that "
    "block. KL as run holds what the blocks before it changed, too."
)


@dataclass(frozen=True)
class Compared:
    """Head of a comparison with its changes, keyed by measure."""

    head: HeadChange
    rows: dict[str, MeasureChange]

    @property
    def named(self) -> list[MeasureChange]:
        """Changes that are named, that is, found at the false-discovery rate."""
        return [row for row in self.rows.values() if row.named]

    def delta(self, name: str) -> float | None:
        """Return the change of a measure; None if the measure is missing or has no value."""
        return self.rows[name].delta if name in self.rows else None


def compared_models(report: Report) -> str:
    """Return the title of a comparison: `base → model`."""
    comparison = report.comparison
    return report.model.title if comparison is None else f"{comparison.base.title} → {report.model.title}"


def comparison_opening(shapes: Shapes) -> Iterator[Section]:
    """Yield the section on how the models as wholes differ, and how many heads changed."""
    comparison = shapes.report.comparison
    assert comparison is not None  # noqa: S101
    yield Section("What changed", items=tuple(map(clean, (*_of_heads(comparison), *comparison.notes))))


def comparison_sections(report: Report, *, all_heads: bool, opened: bool = False) -> Iterator[Section]:
    """Yield how the models as wholes differ, unless `opened` (shown before), and the changed heads, worst first."""
    comparison = report.comparison
    assert comparison is not None  # noqa: S101
    if not opened:
        yield Section(lines=tuple(map(clean, (*comparison.notes, *_of_heads(comparison)))))
    if comparison.shifts:
        yield _shift_section(comparison.shifts)
        return
    ranked = [entry for entry in worst_first(comparison) if entry.named]
    changed = ranked if all_heads else ranked[:16]  # as many as fit on a page of a terminal
    if changed:
        yield _head_section(changed, comparison, len(ranked))
    least = tuple(words.least_changes(comparison))
    if least:
        yield Section("Smallest changes that would have been named (median over heads)", items=least)


def _of_heads(comparison: Comparison) -> list[str]:
    return [] if comparison.shifts else [*words.discoveries(comparison), *_predictions(comparison.outcome)]


def worst_first(comparison: Comparison) -> list[Compared]:
    """Sort the heads by the distances of `words.worth`, largest first; heads without a named change come last."""
    rows: dict[tuple[int, int], dict[str, MeasureChange]] = defaultdict(dict)
    for row in comparison.rows:
        rows[row.layer, row.head][row.measure] = row
    heads = [Compared(record, rows[record.layer, record.head]) for record in comparison.heads]
    return sorted(
        heads, key=lambda head: [-(head.delta(name) or 0.0) if head.named else 1.0 for name in words.worth(comparison)]
    )


def _head_section(changed: Sequence[Compared], comparison: Comparison, total: int) -> Section:
    sizes = words.effect_sizes(comparison)
    names = (
        Column("layer", [str(entry.head.layer) for entry in changed]),
        Column("head", [_place(entry.head) for entry in changed], words=True),
    )
    distances = {name: title for name, title in words.LOCAL.items() if any(name in entry.rows for entry in changed)}
    columns = []
    for name, title in distances.items():
        hints = tuple(_hint(entry, name) for entry in changed)
        columns.append(Column(title, [_distance(entry, name) for entry in changed], hints=hints))
    columns[3:3] = [  # after the first three distances
        Column("named", [str(len(entry.named)) for entry in changed]),
        Column("largest change of a measure", [_largest(entry, sizes) for entry in changed], words=True),
    ]
    columns.insert(0, Column("form M", [entry.head.relation or NO_VALUE for entry in changed], words=True))
    more = total - len(changed)
    notes = ["* is named."]
    if OWN_ROWS in distances:
        notes.insert(0, EXPLAINED)
    if more > 0:
        notes.append(f"{format_count(more, 'more head')} with named changes: --table, --csv or --json.")
    table = Table(names, columns, fit="first")
    return Section("Heads that changed, worst first", table=table, notes=tuple(notes))


def _place(head: HeadChange) -> str:
    return str(head.head) if head.partner == head.head else f"{head.head} → {head.partner}"


def _distance(entry: Compared, name: str) -> str:
    row = entry.rows.get(name)
    if row is None or row.delta is None:
        return NO_VALUE
    if row.named or row.delta > (row.rounding or 0.0):
        return f"{short(row.delta)}{'*' * row.named}"
    return "0" if row.delta == 0 else "rounding"


def _hint(entry: Compared, name: str) -> str:
    row = entry.rows.get(name)
    if row is None or row.q is None:
        return "" if row is None else clean(row.reason or "")
    return f"q {row.q:.2g}; rounding alone {short(row.rounding or 0.0)}"


def _largest(entry: Compared, sizes: dict[str, float]) -> str:
    """Format the named measure with the largest change relative to its interquartile range over the first model."""
    rows = [row for row in entry.named if row.measure in sizes and row.delta is not None and row.before is not None]
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
        yield f"Loss {loss.before:.4f} → {loss.after:.4f} nats a token: {loss.delta:+.4f}{ends}."
    if outcome.kl is not None and outcome.top1_agreement is not None:
        same = f"the same first choice for {outcome.top1_agreement:.1%}"
        yield f"KL of the predictions {short(outcome.kl)} nats a token; {same}."
    elif outcome.hidden_cosine is not None:
        yield f"Cosine of the last hidden states {outcome.hidden_cosine:.6f}."


def _shift_section(shifts: Sequence[Shift]) -> Section:
    names = (Column("measure", [shift.measure for shift in shifts], words=True),)
    columns = (
        Column("first model", [_quartiles(shift.before) for shift in shifts]),
        Column("second model", [_quartiles(shift.after) for shift in shifts]),
    )
    notes = ("Medians over heads, with the quartiles. They are of other heads, so that nothing is tested.",)
    return Section("Distributions over heads", table=Table(names, columns), notes=notes)


def _quartiles(part: Spread) -> str:
    low, middle, high = map(short, part.quartiles)
    return f"{middle} ({low} to {high})"


def comparison_rows(report: Report) -> list[Row]:
    """Build one row per head and measure, or, if heads do not correspond, one per measure."""
    comparison = report.comparison
    if comparison is None:
        return []
    if comparison.shifts:
        return [_shift_row(shift) for shift in comparison.shifts]
    partners = {(head.layer, head.head): head for head in comparison.heads}
    rows: list[Row] = []
    for row in comparison.rows:
        head = partners[row.layer, row.head]
        where: dict[str, Cell] = {"site": head.site, "layer": row.layer, "head": row.head, "partner": head.partner}
        values = {name: getattr(row, name) for name in MeasureChange.model_fields if name not in where}
        rows.append(where | {"relation": head.relation} | values)
    return rows


def _shift_row(shift: Shift) -> dict[str, Cell]:
    cells: dict[str, Cell] = {"measure": shift.measure}
    for which, part in (("before", shift.before), ("after", shift.after)):
        cells[f"{which}.heads"] = part.heads
        cells |= dict(zip((f"{which}.q25", f"{which}.median", f"{which}.q75"), part.quartiles, strict=True))
        cells[f"{which}.median.se"] = part.median_se
    return cells
