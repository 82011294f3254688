"""From trained cells to a table's records: means, comparisons between cells, agreement with the published order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import torch

from attnlens.records.provenance import File
from attnlens.records.studies import (
    LEVEL,
    Curve,
    StudyCell,
    StudyColumn,
    StudyOrdering,
    StudyPair,
    StudyRun,
    StudyTable,
)
from attnlens.statistics.blocks import Blocks, holm, pairs_of
from attnlens.studies.cells import CellResult
from attnlens.studies.scales import Scale, ScaleName
from attnlens.studies.tables import PaperTable, features_of
from attnlens.studies.tasks import StudyTask, TaskForm
from attnlens.studies.units import RunOutcome


def table_of(
    table: PaperTable,
    name: ScaleName,
    scales: Mapping[TaskForm, Scale],
    tasks: Sequence[StudyTask],
    found: Sequence[CellResult],
    seed: int,
    not_trained: Sequence[TaskForm] = (),
) -> StudyTable:
    """What was found, with the paper's numbers beside it; `not_trained` for want of data."""
    cells = [_cell(one, next(task for task in tasks if task.name == one.task), seed) for one in found]
    pairs = _corrected([pair for task in tasks for pair in _pairs(cells, task)])
    by = [(task, measure) for task in tasks for measure in measures_of(task)]
    return StudyTable(
        name=table.name,
        question=table.question,
        source=table.source,
        scale=name,
        tasks=[
            StudyColumn(
                name=task.name,
                form=task.form,
                metric=task.metric,
                higher_is_better=task.higher_is_better,
                vocabulary=task.vocabulary,
                length=task.length,
                sizes={
                    name: list(value) if isinstance(value, tuple) else value
                    for name, value in asdict(scales[task.form]).items()
                },
                left_out={what: count for what, count in getattr(task, "left_out", {}).items() if count},
                repeated=getattr(task, "repeated", 0),
                files=[File(name=name, sha256=digest) for name, digest in task.files.items()],
                published=table.data.get(task.form),
            )
            for task in tasks
        ],
        cells=cells,
        not_trained=list(not_trained),
        pairs=pairs,
        orderings=[one for task, measure in by for one in _ordering(cells, task, measure, pairs)],
    )


def _cell(found: CellResult, task: StudyTask, seed: int) -> StudyCell:
    runs = [
        StudyRun(
            seed=seed + number,
            scores=run.scores,
            steps=[step for step, loss in run.curve if math.isfinite(loss)],
            losses=[loss for _, loss in run.curve if math.isfinite(loss)],
            seconds=run.seconds,
            problem=run.problem or None,
        )
        for number, run in enumerate(found.runs)
    ]
    mean, se = _mean(runs, task)
    first = found.runs[0]
    return StudyCell(
        name=found.cell.name,
        task=task.name,
        form={name: list(v) if isinstance(v, tuple) else v for name, v in asdict(found.unit.form).items()},
        rate=found.unit.run.rate,
        forms=len(found.cell.forms),
        searched=[(rate, loss if math.isfinite(loss) else None) for rate, loss in found.searched],
        mean=mean,
        se=se,
        runs=runs,
        parameters=first.parameters,
        kernel_parameters=first.kernel_parameters,
        tokens=max(run.tokens for run in found.runs),
        tokens_per_second=found.speed.tokens_per_second,
        beside_sdpa=found.speed.beside_sdpa,
        heads=_heads(first),
        features=features_of(found.cell, found.unit.scale),
        published=found.cell.published,
        published_diverged=found.cell.diverged,
    )


def _heads(run: RunOutcome) -> dict[str, Curve]:
    """Each measure against the step, where it was read."""
    steps = [float(step) for step, _ in run.curve]
    names = dict.fromkeys(name for read in run.watched for name in read)
    return {
        name: Curve(steps=steps[: len(run.watched)], median=[read.get(name) for read in run.watched], quantity=name)
        for name in names
    }


def _mean(runs: Sequence[StudyRun], task: StudyTask) -> tuple[float | None, float | None]:
    """The mean of the measure over seeds, and its standard error; of perplexity by its logarithm."""
    if any(run.problem for run in runs):
        return None, None
    values = torch.tensor([run.scores[measures_of(task)[0]] for run in runs], dtype=torch.float64)
    mean = float(values.mean())
    se = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None
    if task.metric == "perplexity":
        return math.exp(mean), None if se is None else math.exp(mean) * se
    return mean, se


def measures_of(task: StudyTask) -> tuple[str, ...]:
    """The scores by which cells are compared, first the paper's: of translations the loss too, which tells more apart.

    BLEU counts words that were written; models that hardly translate yet all have a little of it.
    """
    return {"language": ("loss",), "translation": ("BLEU", "loss"), "classification": ("accuracy",)}[task.form]


def _pairs(cells: Sequence[StudyCell], task: StudyTask) -> Iterator[StudyPair]:
    """Each two cells that converged, by each measure, with p over seeds, and whether the better one is the paper's."""
    of = [cell for cell in cells if cell.task == task.name and cell.mean is not None]
    if len(of) < 2 or len(of[0].runs) < 2:
        return
    for measure in measures_of(task):
        values = torch.tensor([[run.scores[measure] for run in cell.runs] for cell in of], dtype=torch.float64)
        compared = Blocks(values, [cell.published_diverged for cell in of])
        for (a, b), p in zip(pairs_of(len(of)), compared.p_values(), strict=True):
            difference = float(compared.means[a] - compared.means[b])
            # 1 if a better cell has more of the measure and of the paper's, or less of both
            sign = 1 if (measure != "loss") == task.higher_is_better else -1
            yield StudyPair(
                task=task.name,
                measure=measure,
                first=of[a].name,
                second=of[b].name,
                difference=difference,
                p=None if math.isnan(p) else p,
                p_holm=None,
                agrees=_agrees(sign * difference, of[a], of[b]),
            )


def _corrected(pairs: Sequence[StudyPair]) -> list[StudyPair]:
    """The same with p for as many comparisons as there are in the table."""
    every = holm([math.nan if pair.p is None else pair.p for pair in pairs])
    return [
        pair.model_copy(update={"p_holm": None if math.isnan(p) else p}) for pair, p in zip(pairs, every, strict=True)
    ]


def _agrees(difference: float, first: StudyCell, second: StudyCell) -> bool | None:
    """Whether the paper has the same order."""
    if first.published is None or second.published is None or first.published == second.published or not difference:
        return None
    return (difference > 0) == (first.published > second.published)


def _ordering(
    cells: Sequence[StudyCell], task: StudyTask, measure: str, pairs: Sequence[StudyPair]
) -> Iterator[StudyOrdering]:
    """Kendall's τ of the cells that were published, where there are two at least.

    Its interval is what τ can be when every decided pair stands as decided and every other one either way: Holm's
    chance of any false decision is below 5 %, so that the true τ lies inside in 95 % of studies at least.
    """
    published = {cell.name: cell.published for cell in cells if cell.task == task.name and cell.published is not None}
    of = [pair for pair in pairs if (pair.task, pair.measure) == (task.name, measure)]
    known = [pair for pair in of if pair.first in published and pair.second in published]
    if not known:
        return
    told = [pair for pair in known if published[pair.first] != published[pair.second]]
    decided = [pair for pair in told if pair.p_holm is not None and pair.p_holm <= LEVEL]
    agree = sum(bool(pair.agrees) for pair in decided)
    disagree, undecided = len(decided) - agree, len(told) - len(decided)
    yield StudyOrdering(
        task=task.name,
        measure=measure,
        tau=sum(0 if pair.agrees is None else 2 * pair.agrees - 1 for pair in known) / len(known),
        low=(agree - disagree - undecided) / len(known),
        high=(agree - disagree + undecided) / len(known),
        agree=agree,
        disagree=disagree,
        undecided=undecided,
    )
