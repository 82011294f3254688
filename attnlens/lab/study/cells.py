"""A table's cells: learning-rate search, runs over seeds and speed, and the records and comparisons made from them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from attnlens.errors import ModelError
from attnlens.lab.study.tables import PaperCell, PaperTable, Scale, ScaleName, describe_features
from attnlens.lab.study.tasks import Examples, StudyTask, TaskForm
from attnlens.lab.study.training import Run, build_accelerator, count_tokens, take_step
from attnlens.lab.study.units import RunOutcome, TrainingUnit, build_model, hash_task, train_unit
from attnlens.maths.linalg.spectra import one_thread
from attnlens.maths.statistics.associations import Blocks, holm, pairs_of
from attnlens.models.kernel_transformers import AttentionForm
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
from attnlens.runs.progress import Progress
from attnlens.runs.store import Store
from attnlens.runs.work import Compute, WorkPlan, run_units


def build_table(
    table: PaperTable,
    name: ScaleName,
    scales: Mapping[TaskForm, Scale],
    tasks: Sequence[StudyTask],
    results: Sequence[CellResult],
    seed: int,
    not_trained: Sequence[TaskForm] = (),
) -> StudyTable:
    """Build the record of a table next to the paper's numbers; `not_trained`: forms of task without data."""
    task_of = {task.name: task for task in tasks}
    cells = [_build_cell(result, task_of[result.task], seed) for result in results]
    pairs = [pair for task in tasks for pair in _compare_pairs(cells, task)]
    # Holm's correction covers all comparisons of the table
    corrected = holm([math.nan if pair.p is None else pair.p for pair in pairs])
    pairs = [
        pair.model_copy(update={"p_holm": None if math.isnan(p) else p})
        for pair, p in zip(pairs, corrected, strict=True)
    ]
    by_measure = [(task, measure) for task in tasks for measure in list_measures(task)]
    orderings = [_correlate_order(cells, task, measure, pairs) for task, measure in by_measure]
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
                sizes=_with_lists(asdict(scales[task.form])),
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
        orderings=[ordering for ordering in orderings if ordering is not None],
    )


def _with_lists(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with lists instead of tuples, as in JSON."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def _build_cell(result: CellResult, task: StudyTask, seed: int) -> StudyCell:
    runs = [
        StudyRun(
            seed=seed + number,
            scores=run.scores,
            steps=[step for step, loss in run.curve if math.isfinite(loss)],
            losses=[loss for _, loss in run.curve if math.isfinite(loss)],
            seconds=run.seconds,
            problem=run.problem or None,
        )
        for number, run in enumerate(result.runs)
    ]
    mean, se = _mean(runs, task)
    first = result.runs[0]
    steps = [float(step) for step, _ in first.curve][: len(first.watched)]
    measures = dict.fromkeys(name for medians in first.watched for name in medians)
    return StudyCell(
        name=result.cell.name,
        task=task.name,
        form=_with_lists(asdict(result.unit.form)),
        rate=result.unit.run.rate,
        forms=len(result.cell.forms),
        searched=[(rate, loss if math.isfinite(loss) else None) for rate, loss in result.searched],
        mean=mean,
        se=se,
        runs=runs,
        parameters=first.parameters,
        kernel_parameters=first.kernel_parameters,
        tokens=max(run.tokens for run in result.runs),
        tokens_per_second=result.speed.tokens_per_second,
        beside_sdpa=result.speed.beside_sdpa,
        heads={
            name: Curve(steps=steps, median=[medians.get(name) for medians in first.watched], quantity=name)
            for name in measures
        },
        features=describe_features(result.cell, result.unit.scale),
        published=result.cell.published,
        published_diverged=result.cell.diverged,
    )


def _mean(runs: Sequence[StudyRun], task: StudyTask) -> tuple[float | None, float | None]:
    """Compute mean and standard error of the measure over seeds; for perplexity from its logarithm."""
    if any(run.problem for run in runs):
        return None, None
    values = torch.tensor([run.scores[list_measures(task)[0]] for run in runs], dtype=torch.float64)
    mean = float(values.mean())
    se = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None
    if task.metric == "perplexity":
        return math.exp(mean), None if se is None else math.exp(mean) * se
    return mean, se


def list_measures(task: StudyTask) -> tuple[str, ...]:
    """Return the scores that compare cells, the paper's first; for translation also the loss, which separates better.

    BLEU scores the words written, so models that hardly translate yet all have a little of it.
    """
    return {"language": ("loss",), "translation": ("BLEU", "loss"), "classification": ("accuracy",)}[task.form]


def _compare_pairs(cells: Sequence[StudyCell], task: StudyTask) -> Iterator[StudyPair]:
    """Yield each pair of converged cells by measure, with p over seeds and whether the paper has the same order."""
    converged = [cell for cell in cells if cell.task == task.name and cell.mean is not None]
    if len(converged) < 2 or len(converged[0].runs) < 2:
        return
    for measure in list_measures(task):
        values = torch.tensor([[run.scores[measure] for run in cell.runs] for cell in converged], dtype=torch.float64)
        seeds = Blocks(values, [cell.published_diverged for cell in converged])
        # 1 if the measure and the published metric improve in the same direction, else −1
        sign = 1 if (measure != "loss") == task.higher_is_better else -1
        for (a, b), p in zip(pairs_of(len(converged)), seeds.p_values(), strict=True):
            first, second, difference = converged[a], converged[b], float(seeds.means[a] - seeds.means[b])
            agrees = None  # without a published order, or without a difference
            if first.published is not None and second.published is not None and difference:
                published = first.published - second.published
                agrees = (sign * difference > 0) == (published > 0) if published else None
            yield StudyPair(
                task=task.name,
                measure=measure,
                first=first.name,
                second=second.name,
                difference=difference,
                p=None if math.isnan(p) else p,
                p_holm=None,
                agrees=agrees,
            )


def _correlate_order(
    cells: Sequence[StudyCell], task: StudyTask, measure: str, pairs: Sequence[StudyPair]
) -> StudyOrdering | None:
    """Compute Kendall's τ over the published cells; None if there are fewer than two.

    Its interval keeps every decided pair as decided and lets every undecided one go either way. Holm's correction keeps
    the probability of any false decision below 5 %, so the interval covers the true τ in at least 95 % of studies.
    """
    published = {cell.name: cell.published for cell in cells if cell.task == task.name and cell.published is not None}
    task_pairs = [pair for pair in pairs if (pair.task, pair.measure) == (task.name, measure)]
    known = [pair for pair in task_pairs if pair.first in published and pair.second in published]
    if not known:
        return None
    ordered = [pair for pair in known if published[pair.first] != published[pair.second]]
    decided = [pair for pair in ordered if pair.p_holm is not None and pair.p_holm <= LEVEL]
    agree = sum(bool(pair.agrees) for pair in decided)
    disagree, undecided = len(decided) - agree, len(ordered) - len(decided)
    return StudyOrdering(
        task=task.name,
        measure=measure,
        tau=sum(0 if pair.agrees is None else 2 * pair.agrees - 1 for pair in known) / len(known),
        low=(agree - disagree - undecided) / len(known),
        high=(agree - disagree + undecided) / len(known),
        agree=agree,
        disagree=disagree,
        undecided=undecided,
    )


ROUNDS = 12  # steps that are timed, after an untimed first one
STANDARD = AttentionForm(positions="sum", in_value=True)  # the transformer of Vaswani et al. 2017


@dataclass(frozen=True)
class Speed:
    """Speed of training steps."""

    tokens_per_second: float  # median over steps
    beside_sdpa: float  # ratio to the standard transformer's speed with SDPA, steps alternating in one loop


def measure_speeds(units: Sequence[TrainingUnit], task: StudyTask) -> Iterator[Speed]:
    """Yield each unit's speed on one batch; a step of the standard transformer precedes each of its steps."""
    if not units:
        return
    batch = next(iter(task.training(units[0].scale.batch, 0)))
    time_standard = _build_timer(replace(units[0], form=STANDARD), task, batch, implementation="sdpa")
    for unit in units:
        time_unit = _build_timer(unit, task, batch)
        pairs = [(time_standard(), time_unit()) for _ in range(1 + ROUNDS)][1:]
        yield Speed(count_tokens(batch) / median(b for _, b in pairs), median(a / b for a, b in pairs))


def _build_timer(
    unit: TrainingUnit, task: StudyTask, batch: Examples, implementation: str | None = None
) -> Callable[[], float]:
    """Build a function that takes one training step of a new model and returns its seconds."""
    accelerator, model = build_accelerator(), build_model(unit, task)
    if implementation is not None:
        model.config._attn_implementation = implementation  # private: the public setter refuses undeclared ones
    module, optimiser = accelerator.prepare(model.core, torch.optim.AdamW(model.core.parameters(), lr=unit.run.rate))

    def step() -> float:
        start = time.perf_counter()
        take_step(accelerator, module, optimiser, batch, unit.run)
        return time.perf_counter() - start

    return step


SEARCH_SEED = 1_000_003  # of the learning-rate search runs, which are not reported
AGAIN = "Run the same command again, with fewer --jobs if memory ran out; finished runs are kept."
MakeTasks = Callable[[], Sequence[StudyTask]]
"""Function that rebuilds the tasks in another process; their tensors, one per sentence, are too many to send."""


@dataclass(frozen=True)
class StudyPlan:
    """Plan of training: scales, seeds, workers and storage of all cells."""

    scales: Mapping[TaskForm, Scale]  # sizes, steps, rates and number of seeds for each form of task
    seed: int  # the first seed
    work: WorkPlan  # workers that train
    store: Store  # store of outcomes
    save: bool  # whether the first seed's model is saved at every evaluation


@dataclass(frozen=True)
class CellResult:
    """Result of one cell on one task."""

    cell: PaperCell  # cell of the table
    task: str  # name of the task
    unit: TrainingUnit  # attention form and learning rate chosen by the search
    runs: tuple[RunOutcome, ...]  # outcome per seed, in the order of seeds
    first_name: str  # name of the first seed's unit
    searched: tuple[tuple[float, float], ...]  # (learning rate, validation loss) of the search for the chosen form
    speed: Speed  # speed of its training steps


def train_cells(
    cells: Sequence[tuple[PaperCell, StudyTask]], make: MakeTasks, plan: StudyPlan, tell: Progress
) -> list[CellResult]:
    """Train every cell: short runs choose the learning rate of smallest validation loss, which every seed then uses.

    All cells get the same search and the same steps. The test set is read once per run, at its end. The heads of the
    first seed's run are measured during training. `make` rebuilds the tasks in other processes. At the end a few steps
    of each cell are timed.
    """
    tasks = list({id(task): task for _, task in cells}.values())
    digests = {task.name: hash_task(task) for task in tasks}
    search_units = [_search_units(cell, task, plan.scales[task.form]) for cell, task in cells]
    total = sum(map(len, search_units)) + sum(plan.scales[task.form].seeds for _, task in cells)
    done = 0

    def outcomes(units: Iterable[TrainingUnit], stage: str) -> dict[TrainingUnit, RunOutcome]:
        """Train units, or load their stored results. Raises ModelError if a unit could not be trained."""

        def count(_name: str) -> None:
            nonlocal done
            done += 1
            tell(stage, done, total)

        named = {unit.name(digests[unit.task]): unit for unit in units}
        with one_thread():
            compute = build_trainer(named, tasks, plan.store)
            elsewhere = set_up_worker, (make, named, plan.store)
            results = run_units(list(named), compute, plan.work, plan.store, elsewhere=elsewhere, tell=count)
        if results.stopped:
            raise KeyboardInterrupt
        for name, reason in results.missing.items():
            raise ModelError(f"A model of {named[name].task} could not be trained: {reason}", AGAIN)
        return {named[name]: RunOutcome(**value) for name, value in results.values.items()}

    searched = outcomes([unit for units in search_units for unit in units], "search")
    chosen = [min(units, key=lambda unit: searched[unit].loss) for units in search_units]
    seed_units = [_seed_units(unit, plan) for unit in chosen]
    trained = outcomes([unit for units in seed_units for unit in units], "train")
    speeds: dict[int, Speed] = {}
    with one_thread():
        for task in tasks:
            of_task = [index for index, (_, cell_task) in enumerate(cells) if cell_task is task]
            speeds |= dict(zip(of_task, measure_speeds([chosen[index] for index in of_task], task), strict=True))
    return [
        CellResult(
            cell,
            task.name,
            chosen[index],
            tuple(trained[unit] for unit in seed_units[index]),
            seed_units[index][0].name(digests[task.name]),
            tuple((u.run.rate, searched[u].loss) for u in search_units[index] if u.form == chosen[index].form),
            speeds[index],
        )
        for index, (cell, task) in enumerate(cells)
    ]


def build_trainer(units: Mapping[str, TrainingUnit], tasks: Sequence[StudyTask], store: Store) -> Compute:
    """Return the function that trains a unit given its name."""
    task_of = {task.name: task for task in tasks}
    return lambda name: train_unit(units[name], task_of[units[name].task], store)


def set_up_worker(
    make: MakeTasks, units: Mapping[str, TrainingUnit], store: Store
) -> tuple[Mapping[str, object], Compute]:
    """Set up the same training runs in another process: return the store's facts and the function that trains units."""
    return store.facts, build_trainer(units, make(), store)


def _search_units(cell: PaperCell, task: StudyTask, scale: Scale) -> list[TrainingUnit]:
    return [
        TrainingUnit(task.name, form, scale, Run(rate, scale.search_steps, SEARCH_SEED, form.eta), tested=False)
        for form in cell.forms
        for rate in scale.rates
    ]


def _seed_units(chosen: TrainingUnit, plan: StudyPlan) -> list[TrainingUnit]:
    scale = chosen.scale
    run = replace(chosen.run, steps=scale.steps)
    units = [replace(chosen, run=replace(run, seed=plan.seed + number), tested=True) for number in range(scale.seeds)]
    return [replace(units[0], watched=True, saved=plan.save), *units[1:]]
