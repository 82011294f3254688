"""Studies, which compare kernels trained from scratch, as sentences, tables and rows of a sheet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, stdev

from attnlens.records import Report, StudyCell, StudyColumn, StudyPair, StudyTable
from attnlens.records.studies import LEVEL
from attnlens.report.sections.section import Column, Row, Section, Table, View, build_table, section
from attnlens.report.shapes import Shapes
from attnlens.wording import (
    NO_VALUE,
    big,
    clean,
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
FEW_WORDS = 5
"""BLEU below which a translation shares only single words with its reference."""


@section(10, "studies")
def study_sections(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield the sections of every study, each task by itself."""
    for study in shapes.report.studies:
        options = {"classification": "classification (--series or --labelled)"}
        forms = join_items(options.get(form, form) for form in study.not_trained)
        missing = (f"Not trained because no data was given: {forms}.",) if forms else ()
        yield Section(f"{clean(study.name)}: {clean(study.question)}", lines=missing)
        for task in study.tasks:
            cells = [cell for cell in study.cells if cell.task == task.name]
            notes = [f"{clean(cell.name)}: {clean(cell.problem)}." for cell in cells if cell.problem]
            notes += [ERRORS, SPEED] if any(cell.se is not None for cell in cells) else [SPEED]
            if task.published and any(map(_published, cells)):
                notes.append(PUBLISHED.format(clean(task.published)))
            kind = "" if task.form in task.name else f" ({task.form})"
            order = "more" if task.higher_is_better else "less"
            title = clean(f"{task.name}{kind}, {UNITS[task.metric]}, {order} is better")
            yield Section(title, lines=[*_task_lines(study, task, cells)], table=_cell_table(task, cells), notes=notes)
            if any(cell.heads for cell in cells):
                yield Section(f"{clean(task.name)}: heads", table=_head_table(cells), notes=(HEADS,))


def _published(cell: StudyCell) -> bool:
    return cell.published is not None or cell.published_diverged


def _task_lines(study: StudyTable, task: StudyColumn, cells: list[StudyCell]) -> Iterator[str]:
    """Yield how the cells of a task were trained, how they compare, and what to be careful about."""
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
        yield f"Best at the lowest or highest rate tried, so others may be better: {join_items(edge, 6, '; ')}."
    if seeds < 2:
        yield "With one seed there are no errors and no comparisons."
    if task.form == "translation" and task.left_out:
        counts = join_items(f"{count} of {part}" for part, count in task.left_out.items())
        yield f"Left out because a side exceeds {task.length} tokens: pairs, {counts}."
    elif task.left_out:
        yield f"Texts: {join_items(f'{count} {what}' for what, count in task.left_out.items())}."
    if task.repeated:
        yield f"Left out of training because they are also in the held-out data: {format_count(task.repeated, 'pair')}."


def _agreement(study: StudyTable, task: StudyColumn) -> Iterator[str]:
    """Yield how many pairs of cells are ordered as in the paper, Kendall's τ with its interval, and the exceptions."""
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
                first, second = pair.first, pair.second
                if (pair.difference < 0) != (pair.measure == "loss"):  # a smaller loss is better, or a larger score
                    first, second = second, first
                better.append(f"{first} better than {second} (p {pair.p_holm:.2g})")
        if better:
            yield f"Not as published: {join_items(better, 4, '; ')}."


def _best_cells(study: StudyTable, task: StudyColumn, cells: Sequence[StudyCell]) -> Iterator[str]:
    """Yield the best cell by each measure, with the cells that do not differ from it significantly."""
    for measure in dict.fromkeys(pair.measure for pair in study.pairs if pair.task == task.name):
        means = {cell.name: mean(run.scores[measure] for run in cell.runs) for cell in cells}
        best = min(means, key=lambda name: means[name] if measure == "loss" else -means[name])
        beaten = [pair for pair in _significant_pairs(study, task, measure) if best in (pair.first, pair.second)]
        behind = {best, *(name for pair in beaten for name in (pair.first, pair.second))}
        level = [cell.name for cell in cells if cell.name not in behind]
        largest = max((pair.p_holm or 0.0 for pair in beaten), default=0.0)
        others = f"not significantly worse: {join_items(level, 4, '; ')}"
        verdict = others if level else f"better than every other (p ≤ {largest:.2g})"
        yield f"Best by {measure}: {clean(best)}; {verdict}."
    if task.metric == "BLEU" and cells and max(cell.mean or 0.0 for cell in cells) < FEW_WORDS:
        yield f"At BLEU below {FEW_WORDS} hardly a phrase is translated: the loss is more reliable here."


def _significant_pairs(study: StudyTable, task: StudyColumn, measure: str) -> Sequence[StudyPair]:
    """Return the pairs of a task that differ significantly by a measure (Holm-corrected p at most LEVEL)."""
    of_measure = [pair for pair in study.pairs if (pair.task, pair.measure) == (task.name, measure)]
    return [pair for pair in of_measure if pair.p_holm is not None and pair.p_holm <= LEVEL]


def _cell_table(task: StudyColumn, cells: list[StudyCell]) -> Table:
    """Build a table with one row per cell, in the order of the paper."""
    published = [f"{cell.published:g}" for cell in cells if cell.published is not None]
    decimals = max((len(number.partition(".")[2]) for number in published), default=0)
    factor, compared = 100 if task.metric == "accuracy" else 1, any(map(_published, cells))
    rows: list[dict[str, str | None]] = []
    for cell in cells:
        error = None if cell.se is None else cell.se * factor
        number = format_number(cell.published, decimals) if compared else None
        row = {
            "cell": clean(cell.name),
            "ours": "did not converge" if cell.mean is None else _with_error(cell.mean * factor, error),
            "published": "did not converge" if cell.published_diverged else number,
            **({name: _score(cell, name) for name in ("loss", "chrF")} if task.form == "translation" else {}),
            "rate": f"{cell.rate:g}",
            "parameters\n(of kernels)": f"{big(cell.parameters)} ({big(cell.kernel_parameters)})",
            "tokens/s\n(× SDPA)": f"{big(round(cell.tokens_per_second))} ({cell.beside_sdpa:.2f})",
            "feature\ndimension": cell.features or None,
        }
        rows.append(row)
    return build_table(rows, {"cell"}, {"cell"})


def _head_table(cells: list[StudyCell]) -> Table:
    """Build a table with one row per cell: the median over heads of each measure, before training → as tested."""

    def format_change(cell: StudyCell, name: str) -> str:
        looks = cell.heads[name].median if name in cell.heads else []
        ends = [looks[0], looks[cell.tested_look]] if cell.tested_look < len(looks) else []
        return " → ".join(NO_VALUE if value is None else short(value) for value in ends) or NO_VALUE

    names = dict.fromkeys(name for cell in cells for name in cell.heads)
    columns = [Column(title_of(name), [format_change(cell, name) for cell in cells], source_of(name)) for name in names]
    return Table([Column("cell", [clean(cell.name) for cell in cells], words=True)], columns)


def _score(cell: StudyCell, name: str) -> str:
    """Format the mean of a further score over seeds, with its standard error."""
    values = [run.scores[name] for run in cell.runs if name in run.scores]
    if not values or cell.mean is None:
        return NO_VALUE
    return _with_error(mean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else None)


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
