"""Sentences on a study: how cells were trained, what is told apart, how the order agrees with the paper's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnlens.records import Report, StudyColumn, StudyPair, StudyTable
from attnlens.records.studies import LEVEL
from attnlens.wording import clean, counted, listed


def how_trained(study: StudyTable) -> str:
    """Sizes, steps and seeds: the same for all cells."""
    sizes = study.sizes
    seeds = max(len(cell.runs) for cell in study.cells)
    rates = sizes["rates"]
    count = len(rates) if isinstance(rates, list) else 1
    return clean(
        f"Each cell: {sizes['layers']} layers of width {sizes['d_model']}, {sizes['steps']} steps of {sizes['batch']} "
        f"sequences, {counted(seeds, 'seed')}; the learning rate is the best of {count} by validation loss after "
        f"{sizes['search_steps']} steps. Scale: {study.scale}."
    )


def standing(report: Report) -> tuple[str, bool]:
    """How many cells were trained, and which did not converge; whether that is what the papers say."""
    cells = [cell for study in report.studies for cell in study.cells]
    failed = [cell for cell in cells if cell.problem]
    said = f"{counted(len(cells), 'cell')} trained, {sum(len(cell.runs) for cell in cells)} runs"
    if not failed:
        return f"{said}; all converged.", True
    as_told = all(cell.published_diverged for cell in failed)
    return f"{said}; did not converge: {listed([cell.name for cell in failed])}.", as_told


def title(report: Report) -> str:
    """Which tables."""
    return clean("kernel study: " + ", ".join(study.name for study in report.studies))


def agreement(study: StudyTable, task: StudyColumn) -> Iterator[str]:
    """How many pairs are decided as in the paper, and τ with its interval; what can't be told."""
    for found in study.orderings:
        if found.task != task.name:
            continue
        total = found.agree + found.disagree + found.undecided
        yield clean(
            f"Against {study.source} ({task.published}): of {counted(total, 'pair')}, {found.agree} decided as "
            f"published, {found.disagree} the other way, {found.undecided} not told apart by these seeds; Kendall's τ "
            f"{found.tau:.2f} (95 % {found.low:.2f} to {found.high:.2f})."
        )
        against = [pair for pair in decided(study, task) if pair.agrees is False]
        if against:
            yield "Not as published: " + listed([_better(pair, task) for pair in against], 4) + "."


def told_apart(study: StudyTable, task: StudyColumn) -> Iterator[str]:
    """Which cell is best, and which are not told apart from it."""
    cells = [cell for cell in study.cells if cell.task == task.name and cell.mean is not None]
    if len(cells) < 2:
        return
    best = (max if task.higher_is_better else min)(cells, key=lambda cell: cell.mean or 0.0)
    behind = {
        pair.second if pair.first == best.name else pair.first
        for pair in decided(study, task)
        if best.name in (pair.first, pair.second)
    }
    level = [cell.name for cell in cells if cell.name not in behind and cell.name != best.name]
    said = f"not told apart from it: {listed(level, 4)}" if level else "better than every other"
    yield f"Lowest: {clean(best.name)}; {said}." if not task.higher_is_better else f"Best: {clean(best.name)}; {said}."


def decided(study: StudyTable, task: StudyColumn) -> Sequence[StudyPair]:
    """The pairs that these seeds tell apart."""
    return [p for p in study.pairs if p.task == task.name and p.p_holm is not None and p.p_holm <= LEVEL]


def _better(pair: StudyPair, task: StudyColumn) -> str:
    """`a better than b (p 0.01)`."""
    first, second = pair.first, pair.second
    if (pair.difference < 0) == task.higher_is_better:
        first, second = second, first
    return f"{first} better than {second} (p {pair.p_holm:.2g})"
