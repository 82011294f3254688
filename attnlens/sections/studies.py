"""A study as tables: cells ours beside published, which pairs are told apart, and how the orders agree."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, stdev

from attnlens.records import Report, StudyCell, StudyColumn
from attnlens.sections.section import Column, Row, Section, Table
from attnlens.sentences.studies import agreement, at_the_edge, how_trained, left_out, not_trained, told_apart
from attnlens.wording import NO_VALUE, big, clean, decimals_with_error, short, source_of, spread, title_of, written

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
    """All tables, each task by itself."""
    for study in report.studies:
        yield Section(f"{clean(study.name)}: {clean(study.question)}", lines=tuple(not_trained(study)))
        for task in study.tasks:
            cells = [cell for cell in study.cells if cell.task == task.name]
            notes = tuple(f"{clean(c.name)}: {clean(c.problem)}." for c in cells if c.problem)
            told = (*agreement(study, task), *told_apart(study, task), *at_the_edge(study, task))
            kind = "" if task.form in task.name else f" ({task.form})"
            order = "more" if task.higher_is_better else "less"
            yield Section(
                clean(f"{task.name}{kind}, {UNITS[task.metric]}, {order} is better"),
                lines=(how_trained(study, task), *told, *left_out(task)),
                table=_table(task, cells),
                notes=(*notes, *_notes(task, cells)),
            )
            if any(cell.heads for cell in cells):
                yield Section(f"{clean(task.name)}: heads", table=_heads(cells), notes=(HEADS,))


def _notes(task: StudyColumn, cells: list[StudyCell]) -> Iterator[str]:
    """What the columns mean, of those that there are."""
    if any(cell.se is not None for cell in cells):
        yield ERRORS
    yield SPEED
    if task.published and any(cell.published is not None or cell.published_diverged for cell in cells):
        yield PUBLISHED.format(clean(task.published))


def _table(task: StudyColumn, cells: list[StudyCell]) -> Table:
    """A row a cell, as the paper has them."""
    names = (Column("", "cell", tuple(clean(cell.name) for cell in cells), words=True),)
    beside = ("loss", "chrF") if task.form == "translation" else ()
    known = [f"{cell.published:g}" for cell in cells if cell.published is not None]
    decimals = max((len(number.partition(".")[2]) for number in known), default=0)
    sizes = (f"{big(cell.parameters)} ({big(cell.kernel_parameters)})" for cell in cells)
    speeds = (f"{big(round(cell.tokens_per_second))} ({cell.beside_sdpa:.2f})" for cell in cells)
    columns = [
        Column("", "ours", tuple(_ours(task, cell) for cell in cells)),
        Column("", "published", tuple(_published(cell, decimals) for cell in cells)),
        *(Column("", name, tuple(_score(cell, name) for cell in cells)) for name in beside),
        Column("", "rate", tuple(f"{cell.rate:g}" for cell in cells)),
        Column("", "parameters\n(of kernels)", tuple(sizes)),
        Column("", "tokens/s\n(× SDPA)", tuple(speeds)),
    ]
    if any(cell.features for cell in cells):
        columns.append(Column("", "feature\ndimension", tuple(cell.features or NO_VALUE for cell in cells)))
    if all(cell.published is None and not cell.published_diverged for cell in cells):
        del columns[1]
    return Table(names, tuple(columns))


def _heads(cells: list[StudyCell]) -> Table:
    """A row a cell: each measure before training → after."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.heads))
    rows = Column("", "cell", tuple(clean(cell.name) for cell in cells), words=True)
    return Table(
        (rows,), tuple(Column(source_of(name), title_of(name), tuple(_moved(c, name) for c in cells)) for name in names)
    )


def _moved(cell: StudyCell, name: str) -> str:
    looks = cell.heads[name].median if name in cell.heads else []
    ends = [looks[0], looks[cell.tested_look]] if cell.tested_look < len(looks) else []
    return " → ".join(NO_VALUE if value is None else short(value) for value in ends) or NO_VALUE


def _ours(task: StudyColumn, cell: StudyCell) -> str:
    if cell.mean is None:
        return "did not converge"
    factor = 100 if task.metric == "accuracy" else 1
    return _with_error(cell.mean * factor, None if cell.se is None else cell.se * factor)


def _score(cell: StudyCell, name: str) -> str:
    """The mean of another score over seeds, with its error."""
    values = [run.scores[name] for run in cell.runs if name in run.scores]
    if not values or cell.mean is None:
        return NO_VALUE
    return _with_error(mean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else None)


def _with_error(value: float, error: float | None) -> str:
    decimals = decimals_with_error([value], error)
    return written(value, decimals) + ("" if error is None else f" ± {spread(error, decimals)}")


def _published(cell: StudyCell, decimals: int) -> str:
    if cell.published_diverged:
        return "did not converge"
    return NO_VALUE if cell.published is None else written(cell.published, decimals)


def study_rows(report: Report) -> Iterator[Row]:
    """A row a training run, for a spreadsheet."""
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
