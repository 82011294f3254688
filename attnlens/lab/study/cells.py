"""A table's cells: learning-rate search, runs over seeds and speed, and the records and comparisons made from them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch

from attnlens.errors import ModelError
from attnlens.lab.study.tables import PaperCell, PaperTable, Scale, ScaleName, features_of
from attnlens.lab.study.tasks import Examples, StudyTask, TaskForm
from attnlens.lab.study.training import Run, accelerator_of, count_of, step_of
from attnlens.lab.study.units import RunOutcome, TrainingUnit, digest_of, model_of, trained
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
from attnlens.runs.store import Store
from attnlens.runs.work import Compute, WorkPlan, run_units


def table_of(
    table: PaperTable,
    name: ScaleName,
    scales: Mapping[TaskForm, Scale],
    tasks: Sequence[StudyTask],
    found: Sequence[CellResult],
    seed: int,
    not_trained: Sequence[TaskForm] = (),
) -> StudyTable:
    """Build the record of a table next to the paper's numbers; `not_trained`: forms of task without data."""
    cells = [_build_cell(one, next(task for task in tasks if task.name == one.task), seed) for one in found]
    compared = [pair for task in tasks for pair in _compare_pairs(cells, task)]
    # Holm's correction covers all comparisons of the table
    corrected = holm([math.nan if pair.p is None else pair.p for pair in compared])
    holms = [{"p_holm": None if math.isnan(p) else p} for p in corrected]
    pairs = [pair.model_copy(update=update) for pair, update in zip(compared, holms, strict=True)]
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
        orderings=[one for task, measure in by for one in _correlate_order(cells, task, measure, pairs)],
    )


def _build_cell(found: CellResult, task: StudyTask, seed: int) -> StudyCell:
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
        heads=_head_curves(first),
        features=features_of(found.cell, found.unit.scale),
        published=found.cell.published,
        published_diverged=found.cell.diverged,
    )


def _head_curves(run: RunOutcome) -> dict[str, Curve]:
    """Build the curve of each head measure over steps."""
    steps = [float(step) for step, _ in run.curve]
    names = dict.fromkeys(name for read in run.watched for name in read)
    return {
        name: Curve(steps=steps[: len(run.watched)], median=[read.get(name) for read in run.watched], quantity=name)
        for name in names
    }


def _mean(runs: Sequence[StudyRun], task: StudyTask) -> tuple[float | None, float | None]:
    """Compute mean and standard error of the measure over seeds; for perplexity from its logarithm."""
    if any(run.problem for run in runs):
        return None, None
    values = torch.tensor([run.scores[measures_of(task)[0]] for run in runs], dtype=torch.float64)
    mean = float(values.mean())
    se = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None
    if task.metric == "perplexity":
        return math.exp(mean), None if se is None else math.exp(mean) * se
    return mean, se


def measures_of(task: StudyTask) -> tuple[str, ...]:
    """Return the scores that compare cells, the paper's first; for translation also the loss, which separates better.

    BLEU scores the words written, so models that hardly translate yet all have a little of it.
    """
    return {"language": ("loss",), "translation": ("BLEU", "loss"), "classification": ("accuracy",)}[task.form]


def _compare_pairs(cells: Sequence[StudyCell], task: StudyTask) -> Iterator[StudyPair]:
    """Yield each pair of converged cells by measure, with p over seeds and whether the paper has the same order."""
    converged = [cell for cell in cells if cell.task == task.name and cell.mean is not None]
    if len(converged) < 2 or len(converged[0].runs) < 2:
        return
    for measure in measures_of(task):
        values = torch.tensor([[run.scores[measure] for run in cell.runs] for cell in converged], dtype=torch.float64)
        compared = Blocks(values, [cell.published_diverged for cell in converged])
        for (a, b), p in zip(pairs_of(len(converged)), compared.p_values(), strict=True):
            difference = float(compared.means[a] - compared.means[b])
            # 1 if the measure and the published metric improve in the same direction, else −1
            sign = 1 if (measure != "loss") == task.higher_is_better else -1
            yield StudyPair(
                task=task.name,
                measure=measure,
                first=converged[a].name,
                second=converged[b].name,
                difference=difference,
                p=None if math.isnan(p) else p,
                p_holm=None,
                agrees=_agrees(sign * difference, converged[a], converged[b]),
            )


def _agrees(difference: float, first: StudyCell, second: StudyCell) -> bool | None:
    """Check whether the paper has the same order; None if it has no order or the difference is 0."""
    if first.published is None or second.published is None or first.published == second.published or not difference:
        return None
    return (difference > 0) == (first.published > second.published)


def _correlate_order(
    cells: Sequence[StudyCell], task: StudyTask, measure: str, pairs: Sequence[StudyPair]
) -> Iterator[StudyOrdering]:
    """Yield Kendall's τ over the published cells; nothing if there are fewer than two.

    Its interval keeps every decided pair as decided and lets every undecided one go either way. Holm's correction keeps
    the probability of any false decision below 5 %, so the interval covers the true τ in at least 95 % of studies.
    """
    published = {cell.name: cell.published for cell in cells if cell.task == task.name and cell.published is not None}
    task_pairs = [pair for pair in pairs if (pair.task, pair.measure) == (task.name, measure)]
    known = [pair for pair in task_pairs if pair.first in published and pair.second in published]
    if not known:
        return
    ordered = [pair for pair in known if published[pair.first] != published[pair.second]]
    decided = [pair for pair in ordered if pair.p_holm is not None and pair.p_holm <= LEVEL]
    agree = sum(bool(pair.agrees) for pair in decided)
    disagree, undecided = len(decided) - agree, len(ordered) - len(decided)
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


ROUNDS = 12  # steps that are timed, after an untimed first one
STANDARD = AttentionForm(positions="sum", in_value=True)  # the transformer of Vaswani et al. 2017


@dataclass(frozen=True)
class Speed:
    """Speed of training steps."""

    tokens_per_second: float
    """Median over steps."""
    beside_sdpa: float
    """Ratio to the standard transformer's speed with `scaled_dot_product_attention`, steps alternating in one loop."""


def speeds(units: Sequence[TrainingUnit], task: StudyTask) -> Iterator[Speed]:
    """Yield each unit's speed on one batch; a step of the standard transformer precedes each of its steps."""
    if not units:
        return
    batch = next(iter(task.training(units[0].scale.batch, 0)))
    standard = _make_stepper(replace(units[0], form=STANDARD), task, batch, implementation="sdpa")
    for unit in units:
        step_own = _make_stepper(unit, task, batch)
        pairs = [(standard(), step_own()) for _ in range(1 + ROUNDS)][1:]
        yield Speed(count_of(batch) / median(b for _, b in pairs), median(a / b for a, b in pairs))


def _make_stepper(
    unit: TrainingUnit, task: StudyTask, batch: Examples, implementation: str | None = None
) -> Callable[[], float]:
    """Build a function that takes one training step of a new model and returns its seconds."""
    accelerator, model = accelerator_of(), model_of(unit, task)
    if implementation is not None:
        model.config._attn_implementation = implementation
    module, optimiser = accelerator.prepare(model.core, torch.optim.AdamW(model.core.parameters(), lr=unit.run.rate))

    def step() -> float:
        start = time.perf_counter()
        step_of(accelerator, module, optimiser, batch, unit.run)
        return time.perf_counter() - start

    return step


SEARCH_SEED = 1_000_003  # of the learning-rate search runs, which are not reported
AGAIN = "Run the same command again, with fewer --jobs if memory was short: what is finished is kept."
Tell = Callable[[str, int, int], None]


MakeTasks = Callable[[], Sequence[StudyTask]]
"""Function that rebuilds the tasks in another process; their tensors, one per sentence, are too many to send."""


@dataclass(frozen=True)
class StudyPlan:
    """Plan of training: scales, seeds, workers and storage of all cells."""

    scales: Mapping[TaskForm, Scale]  # sizes, steps, rates and number of seeds for each form of task
    seed: int  # the first seed
    work: WorkPlan  # workers that train
    store: Store  # store of outcomes
    kept: bool  # whether the first seed's model is saved at every evaluation


@dataclass(frozen=True)
class CellResult:
    """Result of one cell on one task."""

    cell: PaperCell
    """Cell of the table."""
    task: str
    """Name of the task."""
    unit: TrainingUnit
    """Attention form and learning rate chosen by the search."""
    runs: tuple[RunOutcome, ...]
    """Outcome per seed, in the order of seeds."""
    first_name: str
    """Name of the first seed's unit."""
    searched: tuple[tuple[float, float], ...]
    """(learning rate, validation loss) of the search for the chosen form."""
    speed: Speed
    """Speed of its training steps."""


def trained_cells(
    cells: Sequence[tuple[PaperCell, StudyTask]], make: MakeTasks, plan: StudyPlan, tell: Tell
) -> list[CellResult]:
    """Train every cell: short runs choose the learning rate of smallest validation loss, which every seed then uses.

    All cells get the same search and the same steps. The test set is read once per run, at its end. The heads of the
    first seed's run are measured during training. `make` rebuilds the tasks in other processes. At the end a few steps
    of each cell are timed.
    """
    tasks = list({id(task): task for _, task in cells}.values())
    digests = {task.name: digest_of(task) for task in tasks}
    tried = {at: _search_units(cell, task, plan.scales[task.form]) for at, (cell, task) in enumerate(cells)}
    total = sum(map(len, tried.values())) + sum(plan.scales[task.form].seeds for _, task in cells)
    done = 0

    def outcomes(units: Iterable[TrainingUnit], stage: str) -> dict[TrainingUnit, RunOutcome]:
        """Train units, or load their stored results. Raises ModelError if a unit could not be trained."""

        def count(_name: str) -> None:
            nonlocal done
            done += 1
            tell(stage, done, total)

        named = {unit.name(digests[unit.task]): unit for unit in units}
        with one_thread():
            compute = trainer(named, tasks, plan.store)
            elsewhere = opened, (make, named, plan.store)
            found = run_units(list(named), compute, plan.work, plan.store, elsewhere=elsewhere, tell=count)
        if found.stopped:
            raise KeyboardInterrupt
        for name, reason in found.missing.items():
            raise ModelError(f"A model of {named[name].task} could not be trained: {reason}", AGAIN)
        return {named[name]: RunOutcome(**value) for name, value in found.values.items()}

    searched = outcomes([unit for units in tried.values() for unit in units], "search")
    chosen = {at: min(units, key=lambda unit: searched[unit].loss) for at, units in tried.items()}
    seeds = {at: _seed_units(unit, plan) for at, unit in chosen.items()}
    found = outcomes([unit for units in seeds.values() for unit in units], "train")
    speed: dict[int, Speed] = {}
    with one_thread():
        for task in tasks:
            of_task = [at for at, (_, of) in enumerate(cells) if of is task]
            speed |= dict(zip(of_task, speeds([chosen[at] for at in of_task], task), strict=True))
    return [
        CellResult(
            cell,
            task.name,
            chosen[at],
            tuple(found[unit] for unit in seeds[at]),
            seeds[at][0].name(digests[task.name]),
            tuple((unit.run.rate, searched[unit].loss) for unit in tried[at] if unit.form == chosen[at].form),
            speed[at],
        )
        for at, (cell, task) in enumerate(cells)
    ]


def trainer(units: Mapping[str, TrainingUnit], tasks: Sequence[StudyTask], store: Store) -> Compute:
    """Return the function that trains a unit given its name."""
    named = {task.name: task for task in tasks}
    return lambda name: trained(units[name], named[units[name].task], store)


def opened(make: MakeTasks, units: Mapping[str, TrainingUnit], store: Store) -> tuple[Mapping[str, object], Compute]:
    """Set up the same training runs in another process: return the store's facts and the function that trains units."""
    return store.facts, trainer(units, make(), store)


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
    return [replace(units[0], watched=True, kept=plan.kept), *units[1:]]
