"""Sentences on comparisons of two models, and on studies, which compare kernels trained from scratch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import mean

import numpy as np

from attnlens.analyzers.registry import FORMS, KEY_ANGLE, OWN_ROWS, QUERY_ANGLE, ROWS
from attnlens.records import Comparison, MeasureChange, Report, StudyCell, StudyColumn, StudyPair, StudyTable
from attnlens.records.studies import LEVEL
from attnlens.wording import big, clean, format_count, join_items, short, source_of

FEW_WORDS = 5
"""BLEU below which a translation shares only single words with its reference."""


def task_lines(study: StudyTable, task: StudyColumn) -> Iterator[str]:
    """Yield how the cells of a task were trained, how they compare, and what to be careful about."""
    cells = [cell for cell in study.cells if cell.task == task.name]
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


def standing(report: Report) -> tuple[str, bool]:
    """Return how many cells were trained and which did not converge, and whether the papers report these failures."""
    cells = [cell for study in report.studies for cell in study.cells]
    failed = [cell for cell in cells if cell.problem]
    text = f"{format_count(len(cells), 'cell')} trained, {sum(len(cell.runs) for cell in cells)} runs"
    if not failed:
        return f"{text}; all converged.", True
    as_published = all(cell.published_diverged for cell in failed)
    return f"{text}; did not converge: {join_items((cell.name for cell in failed), between='; ')}.", as_published


def title(report: Report) -> str:
    """Return the title of a study: the names of its tables."""
    return clean("kernel study: " + ", ".join(study.name for study in report.studies))


def _agreement(study: StudyTable, task: StudyColumn) -> Iterator[str]:
    """Yield how many pairs of cells are ordered as in the paper, Kendall's τ with its interval, and the exceptions."""
    for order in (order for order in study.orderings if order.task == task.name):
        total = order.agree + order.disagree + order.undecided
        yield clean(
            f"By {order.measure}, against {study.source} ({task.published}): of {format_count(total, 'pair')}, "
            f"{order.agree} ordered as published, {order.disagree} reversed, {order.undecided} without a significant "
            f"difference; Kendall's τ {order.tau:.2f} (95 % {order.low:.2f} to {order.high:.2f})."
        )
        against = [pair for pair in significant_pairs(study, task, order.measure) if pair.agrees is False]
        better = []
        for pair in against:  # a smaller loss is better, as is a larger value of any other measure
            first, second = pair.first, pair.second
            swapped = (pair.difference < 0) != (pair.measure == "loss")
            first, second = (second, first) if swapped else (first, second)
            better.append(f"{first} better than {second} (p {pair.p_holm:.2g})")
        if better:
            yield f"Not as published: {join_items(better, 4, '; ')}."


def _best_cells(study: StudyTable, task: StudyColumn, cells: Sequence[StudyCell]) -> Iterator[str]:
    """Yield the best cell by each measure, with the cells that do not differ from it significantly."""
    for measure in dict.fromkeys(pair.measure for pair in study.pairs if pair.task == task.name):
        means = {cell.name: mean(run.scores[measure] for run in cell.runs) for cell in cells}
        best = min(means, key=lambda name: means[name] if measure == "loss" else -means[name])
        beaten = [pair for pair in significant_pairs(study, task, measure) if best in (pair.first, pair.second)]
        behind = {best, *(name for pair in beaten for name in (pair.first, pair.second))}
        level = [cell.name for cell in cells if cell.name not in behind]
        largest = max((pair.p_holm or 0.0 for pair in beaten), default=0.0)
        others = f"not significantly worse: {join_items(level, 4, '; ')}"
        verdict = others if level else f"better than every other (p ≤ {largest:.2g})"
        yield f"Best by {measure}: {clean(best)}; {verdict}."
    if task.metric == "BLEU" and cells and max(cell.mean or 0.0 for cell in cells) < FEW_WORDS:
        yield f"At BLEU below {FEW_WORDS} hardly a phrase is translated: the loss is more reliable here."


def significant_pairs(study: StudyTable, task: StudyColumn, measure: str) -> Sequence[StudyPair]:
    """Return the pairs of a task that differ significantly by a measure (Holm-corrected p at most LEVEL)."""
    of = [pair for pair in study.pairs if (pair.task, pair.measure) == (task.name, measure)]
    return [pair for pair in of if pair.p_holm is not None and pair.p_holm <= LEVEL]


LOCAL = {OWN_ROWS: "own KL", ROWS: "KL as run", FORMS: "‖ΔM‖/‖M‖", QUERY_ANGLE: "angle W_Q°", KEY_ANGLE: "angle W_K°"}
"""Distance between corresponding heads → title of its column."""
ENOUGH_HEADS = 4
"""Least number of heads for which the spread of a measure over heads is used as the unit of changes."""


def rank_distances(comparison: Comparison) -> list[str]:
    """Return the distances that rank the heads, the most informative first, as far as the comparison has them."""
    measures = {row.measure for row in comparison.rows}
    return [name for name in (OWN_ROWS, FORMS, ROWS) if name in measures]


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


def effect_sizes(comparison: Comparison) -> dict[str, float]:
    """Return the interquartile range over the first model's heads, by measure, if above 0 and of ENOUGH_HEADS heads."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in comparison.rows:
        if row.before is not None:
            values[row.measure].append(row.before)
    ranges = {name: float(np.subtract(*np.quantile(numbers, (0.75, 0.25)))) for name, numbers in values.items()}
    return {name: size for name, size in ranges.items() if size > 0 and len(values[name]) >= ENOUGH_HEADS}


def least_changes(comparison: Comparison) -> Iterator[tuple[str, str]]:
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
