"""Sections and rows on comparisons of two models, on adapters, and on studies.

A study trains attention variants from scratch; a cell of its table is one variant trained on one task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import mean, stdev

import numpy as np

from attnlens.analyzers.registry import FORMS, KEY_ANGLE, OWN_ROWS, QUERY_ANGLE, ROWS, select_adapter_analyzers
from attnlens.records import Comparison, Head, MeasureChange, Report, StudyCell, StudyColumn, StudyPair, StudyTable
from attnlens.records.comparison import DISTANCE, SMALLEST_SHARE
from attnlens.records.studies import LEVEL
from attnlens.report.sections.layers import place_columns
from attnlens.report.sections.section import Cell, Column, Row, Section, Table, View, build_table, section
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
    format_p,
    group_pairs,
    join_items,
    short,
    source_of,
    title_of,
)

SPEED = "× SDPA: training speed relative to a standard transformer (Eq. 4) with torch's attention, in the same loop."
ERRORS = "±, p: over seeds, on the same test examples; p: paired by seed, corrected for all pairs of the table (Holm)."
PUBLISHED = "published: {}; from far larger models and other data, so compare rankings, not values."
HEADS = (
    "Medians over heads, before training → as tested, in the first seed's run. tokens.* and selection.* use log k on 8 "
    "held-out sequences; weights.* use s W_Q W_Kᵀ. –: no value, e.g. in primal layers, for shares of causal heads, for "
    "kernels that can be negative, and for SVMs if the kernel has a position bias or is not a function of ⟨q, k⟩."
)
FEW_WORDS = 5  # BLEU below which translations share little more than single words with their references


@section(10, "studies")
def study_sections(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield the sections of each study, task by task."""
    for study in shapes.report.studies:
        options = {"classification": "classification (--series or --labelled)"}
        forms = join_items(options.get(form, form) for form in study.not_trained)
        missing = (f"Not trained because no data was given: {forms}.",) if forms else ()
        yield Section(f"{clean(study.name)}: {clean(study.question)}", lines=missing)
        for task in study.tasks:
            cells = [cell for cell in study.cells if cell.task == task.name]
            notes = [f"{clean(cell.name)}: {clean(cell.problem)}." for cell in cells if cell.problem]
            notes += [ERRORS, SPEED] if any(cell.se is not None for cell in cells) else [SPEED]
            compared = any(cell.published is not None or cell.published_diverged for cell in cells)
            if task.published and compared:
                notes.append(PUBLISHED.format(clean(task.published)))
            kind = "" if task.form in task.name else f" ({task.form})"
            order = "more" if task.higher_is_better else "less"
            unit = ", %" * (task.metric == "accuracy")
            title = clean(f"{task.name}{kind}, {task.metric}{unit}, {order} is better")
            lines, table = [*_task_lines(study, task, cells)], _cell_table(task, cells, compared)
            yield Section(title, lines=lines, table=table, notes=notes)
            if any(cell.heads for cell in cells):
                yield Section(f"{clean(task.name)}: heads", table=_head_table(cells), notes=(HEADS,))


def _task_lines(study: StudyTable, task: StudyColumn, cells: list[StudyCell]) -> Iterator[str]:
    """Yield sentences on how a task's cells were trained, how they compare, and caveats."""
    sizes, seeds = task.sizes, max(len(cell.runs) for cell in cells)
    tried = sizes["rates"]
    rates = [rate for rate in tried if isinstance(rate, int | float)] if isinstance(tried, list) else []
    several = [f"{cell.name} the best of {cell.forms}" for cell in cells if cell.forms > 1]
    more = f"; forms: {join_items(several, between='; ')}" if several else ""
    yield clean(
        f"Each cell: {sizes['layers']} layers of width {sizes['d_model']}, {sizes['steps']} steps of {sizes['batch']} "
        f"sequences, {format_count(seeds, 'seed')}; the learning rate is the best of {len(rates) or 1} by validation "
        f"loss after {sizes['search_steps']} steps{more}; {big(max(cell.tokens for cell in cells))} tokens per run. "
        f"Scale: {study.scale}."
    )
    yield from _agreement(study, task)
    yield from _best_cells(study, task, [cell for cell in cells if cell.mean is not None])
    edge = [cell.name for cell in cells if len(rates) > 1 and cell.rate in (min(rates), max(rates))]
    if edge:
        yield f"Best at the lowest or highest rate tried, so rates beyond may be better: {join_items(edge, 6, '; ')}."
    if seeds < 2:
        yield "With one seed, there are no standard errors and no comparisons."
    if task.form == "translation" and task.left_out:
        counts = join_items(f"{count} of {part}" for part, count in task.left_out.items())
        yield f"Pairs left out because a side exceeds {task.length} tokens: {counts}."
    elif task.left_out:
        yield f"Texts: {join_items(f'{count} {what}' for what, count in task.left_out.items())}."
    if task.repeated:
        yield f"Left out of training because they are also in the held-out data: {format_count(task.repeated, 'pair')}."


def _agreement(study: StudyTable, task: StudyColumn) -> Iterator[str]:
    """Yield sentences that compare the order of the cells by their results with the published order."""
    for order in (order for order in study.orderings if order.task == task.name):
        total = order.agree + order.disagree + order.undecided
        yield clean(
            f"By {order.measure}, against {study.source} ({task.published}): of {format_count(total, 'pair')}, "
            f"{order.agree} ordered as published, {order.disagree} reversed, {order.undecided} without a significant "
            f"difference; Kendall's τ {order.tau:.2f} (95 % {order.low:.2f} to {order.high:.2f})."
        )
        better = []
        for pair in _significant_pairs(study, task, order.measure):
            if pair.agrees is False:
                second_better = (pair.difference < 0) != (pair.measure == "loss")  # a smaller loss is better
                first, second = (pair.second, pair.first) if second_better else (pair.first, pair.second)
                better.append(f"{first} better than {second} (p {format_p(pair.p_holm)})")
        if better:
            yield f"Not as published: {join_items(better, 4, '; ')}."


def _best_cells(study: StudyTable, task: StudyColumn, cells: Sequence[StudyCell]) -> Iterator[str]:
    """Yield one sentence per measure on the best cell and the cells that are not significantly worse."""
    for measure in dict.fromkeys(pair.measure for pair in study.pairs if pair.task == task.name):
        means = {cell.name: mean(run.scores[measure] for run in cell.runs) for cell in cells}
        best = min(means, key=lambda name: means[name] if measure == "loss" else -means[name])
        beaten = [pair for pair in _significant_pairs(study, task, measure) if best in (pair.first, pair.second)]
        behind = {best, *(name for pair in beaten for name in (pair.first, pair.second))}
        level = [cell.name for cell in cells if cell.name not in behind]
        largest = max((pair.p_holm or 0.0 for pair in beaten), default=0.0)
        others = f"not significantly worse: {join_items(level, 4, '; ')}"
        verdict = others if level else f"better than all others (largest p {format_p(largest)})"
        yield f"Best by {measure}: {clean(best)}; {verdict}."
    if task.metric == "BLEU" and cells and max(cell.mean or 0.0 for cell in cells) < FEW_WORDS:
        yield f"With BLEU below {FEW_WORDS}, hardly a phrase is translated, so the loss is more reliable."


def _significant_pairs(study: StudyTable, task: StudyColumn, measure: str) -> Sequence[StudyPair]:
    of_measure = [pair for pair in study.pairs if (pair.task, pair.measure) == (task.name, measure)]
    return [pair for pair in of_measure if pair.p_holm is not None and pair.p_holm <= LEVEL]


def _cell_table(task: StudyColumn, cells: list[StudyCell], compared: bool) -> Table | None:
    """Build a table with one row per cell of a task; if `compared`, add the published numbers."""
    published = [f"{cell.published:g}" for cell in cells if cell.published is not None]
    decimals = max((len(number.partition(".")[2]) for number in published), default=0)
    factor = 100 if task.metric == "accuracy" else 1
    rows: list[dict[str, str | None]] = []
    for cell in cells:
        error = None if cell.se is None else cell.se * factor
        number = format_number(cell.published, decimals) if compared else None
        scores = {}  # further scores: means over seeds with their standard errors
        for name in ("loss", "chrF") if task.form == "translation" else ():
            values = [run.scores[name] for run in cell.runs if name in run.scores and cell.mean is not None]
            spread = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            scores[name] = _with_error(mean(values), spread) if values else NO_VALUE
        row = {
            "cell": clean(cell.name),
            "ours": "did not converge" if cell.mean is None else _with_error(cell.mean * factor, error),
            "published": "did not converge" if cell.published_diverged else number,
            **scores,
            "rate": f"{cell.rate:g}",
            "parameters\n(of kernels)": f"{big(cell.parameters)} ({big(cell.kernel_parameters)})",
            "tokens/s\n(× SDPA)": f"{big(round(cell.tokens_per_second))} ({cell.beside_sdpa:.2f})",
            "feature\ndimension": cell.features or None,
        }
        rows.append(row)
    return build_table(rows, {"cell"}, {"cell"})


def _head_table(cells: list[StudyCell]) -> Table:
    """Build a table of cells × measures: medians over heads, before training and at the tested step."""

    def format_change(cell: StudyCell, name: str) -> str:
        looks = cell.heads[name].median if name in cell.heads else []
        ends = [looks[0], looks[cell.tested_evaluation]] if cell.tested_evaluation < len(looks) else []
        return " → ".join(NO_VALUE if value is None else short(value) for value in ends) or NO_VALUE

    names = dict.fromkeys(name for cell in cells for name in cell.heads)
    columns = [Column(title_of(name), [format_change(cell, name) for cell in cells], source_of(name)) for name in names]
    return Table([Column("cell", [clean(cell.name) for cell in cells], words=True)], columns)


def _with_error(value: float, error: float | None) -> str:
    decimals = decimals_with_error([value], error)
    return format_number(value, decimals) + ("" if error is None else f" ± {format_error(error, decimals)}")


def study_rows(report: Report) -> list[Row]:
    """Build one spreadsheet row per training run."""
    return [
        {
            **{"table": study.name, "task": cell.task, "cell": cell.name, "seed": run.seed, "rate": cell.rate},
            **run.scores,
            **{"validation_loss": min(run.losses, default=None), "problem": run.problem},
            **{"parameters": cell.parameters, "kernel_parameters": cell.kernel_parameters},
            **{"tokens": cell.tokens, "seconds": run.seconds, "published": cell.published},
        }
        for study in report.studies
        for cell in study.cells
        for run in cell.runs
    ]


LOCAL = {OWN_ROWS: "own KL", ROWS: "KL as run", FORMS: "‖ΔM‖/‖M‖", QUERY_ANGLE: "angle W_Q°", KEY_ANGLE: "angle W_K°"}
"""Distance between corresponding heads of two models → title of its column."""
EXPLAINED = (
    "own KL: each block of the second model gets the first model's hidden states, so only that block's own change "
    "counts. KL as run includes the effect of earlier blocks."
)


def rank_distances(comparison: Comparison) -> list[str]:
    """Return the names of the distances by which heads are ranked, the most informative first."""
    measures = {row.measure for row in comparison.rows}
    return [name for name in (OWN_ROWS, FORMS, ROWS) if name in measures]


def effect_sizes(comparison: Comparison) -> dict[str, float]:
    """Map each measure to its interquartile range over the first model's heads, the unit of effect sizes."""
    rows = (row for row in comparison.rows if not row.measure.startswith(DISTANCE))
    return {row.measure: row.smallest / SMALLEST_SHARE for row in rows if row.smallest is not None}


@section(20, "comparison")
def comparison_sections(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield changes in predictions and heads, and detection limits; if heads do not correspond, only distributions."""
    comparison = shapes.report.comparison
    assert comparison is not None  # noqa: S101
    if comparison.shifts:
        rows = []
        for shift in comparison.shifts:
            quartiles = [[short(number) for number in part.quartiles] for part in (shift.before, shift.after)]
            first, second = (f"{middle} ({low} to {high})" for low, middle, high in quartiles)
            rows.append({"measure": shift.measure, "first model": first, "second model": second})
        note = "Medians over heads, with quartiles. The heads do not correspond, so nothing is tested."
        yield Section("Distributions over heads", table=build_table(rows, {"measure"}, {"measure"}), notes=[note])
        return
    yield from _prediction_section(comparison)
    yield from _head_sections(shapes.report, comparison, 16 if view == "terminal" else None)
    if least := [*_least_changes(comparison)]:
        yield Section("Smallest detectable changes (probability of detection 80 %; median over heads)", items=least)


def _prediction_section(comparison: Comparison) -> Iterator[Section]:
    """Yield a table of the KL divergence between the models' predictions and related statistics, if known."""
    if comparison.outcome is None or (change := comparison.outcome.predictions) is None:
        return
    ratio, quantiles = change.perplexity_ratio, {"max": change.largest, "99.9 %": change.q999, "99 %": change.q99}
    quantiles |= {"95 %": change.q95, "median": change.median}
    lines = {
        "KL mean": _with_error(change.mean, change.mean_se),
        **{f"KL {name}": short(value) for name, value in quantiles.items()},
        "same top-1": f"{_with_error(100 * change.same_top, 100 * (change.same_top_se or 0) or None)} %",
        "perplexity": "" if ratio is None else f"× {_with_error(ratio, change.perplexity_ratio_se)}",
    }
    note = f"KL(first ‖ second) in nats over {big(change.tokens)} predictions; ±: standard error over windows or texts."
    rows = [{"predictions": name, "value": value} for name, value in lines.items() if value]
    yield Section("Predictions", table=build_table(rows, {"predictions"}, {"predictions"}), notes=[note])


def _head_sections(report: Report, comparison: Comparison, most: int | None) -> Iterator[Section]:
    """Yield a table of the changed heads, largest change first: at most `most` heads, or all if `most` is None."""
    by_head: dict[tuple[int, int], dict[str, MeasureChange]] = defaultdict(dict)
    for change in comparison.rows:
        by_head[change.layer, change.head][change.measure] = change
    pairs = [(head, by_head[head.layer, head.head]) for head in comparison.heads]
    pairs = [(head, changes) for head, changes in pairs if any(change.named for change in changes.values())]
    names = rank_distances(comparison)
    pairs.sort(key=lambda pair: [-(pair[1][name].delta or 0.0) if name in pair[1] else 0 for name in names])
    heads, more = pairs[:most], len(pairs[most:]) if most else 0
    if not heads:
        return
    sizes, largest = effect_sizes(comparison), "largest change of a measure"
    titles = {name: title for name, title in LOCAL.items() if any(name in changes for _, changes in heads)}
    rows = []
    for head, changes in heads:
        named = [row for row in changes.values() if row.named]
        partner = "" if head.partner == head.head else f" → {head.partner}"
        place = {"layer": report.model.layer_name(head.layer), "head": f"{head.head}{partner}"}
        row = {**place, "form M": head.relation or NO_VALUE}
        distances = [(title, _distance(changes.get(name))) for name, title in titles.items()]
        counts = {"changes*": str(len(named)), largest: _largest(named, sizes)}
        row |= dict(distances[:3]) | counts | dict(distances[3:])
        rows.append(row)
    table = build_table(rows, {"layer", "head"}, {"head", "form M", largest})
    notes = [EXPLAINED] if OWN_ROWS in titles else []
    notes.append("*: significant, and large enough to matter.")
    if more > 0:
        notes.append(f"{format_count(more, 'more head')} changed: see --table, --csv or --json.")
    yield Section("Heads that changed, largest change first", table=table, notes=notes)


def _distance(row: MeasureChange | None) -> str:
    if row is None or row.delta is None:
        return NO_VALUE
    if row.named or row.delta > (row.rounding or 0.0):
        return f"{short(row.delta)}{'*' * row.named}"
    return "0" if row.delta == 0 else "rounding"


def _largest(named: Sequence[MeasureChange], sizes: dict[str, float]) -> str:
    """Format the change that is largest relative to `sizes`: `tokens.entropy 0.2 → 0.4`, or `–` if there is none."""
    rows = [row for row in named if row.measure in sizes and row.delta is not None and row.before is not None]
    row = max(rows, key=lambda row: abs(row.delta or 0.0) / sizes[row.measure], default=None)
    return NO_VALUE if row is None else f"{row.measure} {short(row.before or 0.0)} → {short(row.after or 0.0)}"


def _least_changes(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield (measure, text on the smallest detectable change) for each tokens.* measure."""
    sizes = effect_sizes(comparison)
    known = [row for row in comparison.rows if row.se is not None and source_of(row.measure) == "tokens"]
    for name, values in group_pairs((row.measure, row.least) for row in known if row.least is not None).items():
        if name in sizes:
            middle = float(np.median(values))
            yield name, f"{short(middle)}, {100 * middle / sizes[name]:.1f} % of the heads' interquartile range"


def comparison_rows(report: Report) -> list[Row]:
    """Build one spreadsheet row per head and measure or, if heads do not correspond, one per measure."""
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
    partners = {(head.layer, head.head): head for head in comparison.heads}
    for row in () if rows else comparison.rows:
        head = partners[row.layer, row.head]
        where: dict[str, Cell] = {"site": head.site, "layer": row.layer, "head": row.head, "partner": head.partner}
        values = {name: getattr(row, name) for name in MeasureChange.model_fields if name not in where}
        rows.append(where | {"relation": head.relation} | values)
    return rows


@section(30, ("inspection", "experiments"), ("markdown", "page"))
@section(30, "inspection", ("terminal",))
def adapter_section(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield a section on the adapter, if any: how much it changed M, and the heads that it changed most."""
    report, record = shapes.report, shapes.report.model.adapter
    if record is None:
        return
    first, *others = (info.name for analyzer in select_adapter_analyzers("weights") for info in analyzer.measures)
    moves = [(value, head) for head in report.heads if (value := _value(head, first)) is not None]
    moves.sort(key=lambda move: -move[0])
    replaced = f"; {format_count(len(record.replaced), 'parameter')} replaced entirely" if record.replaced else ""
    merged = (
        f"{record.kind} adapter {record.id} (r {record.rank}, α {record.alpha:g}) was merged into "
        f"{format_count(record.modules, 'module')} of {report.model.id}{replaced}."
    )
    lines = [clean(merged)]
    if moves:
        sizes = [size for size, _ in moves]
        lines.append(
            f"The adapter changed M in {sum(size > 0 for size in sizes)} of {format_count(len(sizes), 'head')}; "
            f"‖M' − M‖/‖M‖: median {short(float(np.median(sizes)))}, largest {short(sizes[0])}."
        )
    top = [head for size, head in moves[:12] if size]
    yield Section("Adapter", lines=lines, table=_adapter_table(shapes, top, (first, *others)) if top else None)


def _adapter_table(shapes: Shapes, heads: Sequence[Head], names: Sequence[str]) -> Table:
    """Build a table with one row per head: changes in M, and headline measures (base, adapted, difference)."""

    def build_column(heading: str, values: Sequence[float | None], group: str = "") -> Column:
        decimals = decimals_for([value for value in values if value is not None])
        return Column(heading, [format_number(value, decimals) for value in values], group)

    columns = [build_column(title_of(name), [_value(head, name) for head in heads]) for name in names]
    for name in dict.fromkeys(name for head in heads for name in head.measures):
        base = [getattr(head.measures.get(name), "base", None) for head in heads]
        if shapes.info(name).headline and any(value is not None for value in base):
            adapted = [_value(head, name) for head in heads]
            pairs = zip(base, adapted, strict=True)
            differences = [None if old is None or new is None else new - old for old, new in pairs]
            for heading, values in (("base", base), ("adapted", adapted), ("difference", differences)):
                columns.append(build_column(heading, values, title_of(name)))
    return Table(place_columns(heads, shapes.report.model), columns)


def _value(head: Head, name: str) -> float | None:
    return head.measures[name].value if name in head.measures else None
