"""Train and compare a table's cells: learning-rate search, runs over seeds, speed, and the records made from them."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import NamedTuple, get_args

import torch

from attnlens.choices import STUDIES
from attnlens.errors import ModelError, UsageError
from attnlens.files import check_folder, make_folder, unwritten_folder
from attnlens.lab.study.tables import TABLES, PaperCell, PaperTable, Scale, ScaleName, describe_features, scale_of
from attnlens.lab.study.tasks import (
    Reversal,
    StudyTask,
    TaskForm,
    iwslt,
    language,
    load_labelled,
    series,
    translation,
    wikitext,
)
from attnlens.lab.study.units import (
    RunOutcome,
    TrainingUnit,
    build_accelerator,
    build_model,
    count_tokens,
    hash_task,
    model_folder,
    slug,
    take_step,
    train_unit,
)
from attnlens.maths.linalg.spectra import one_thread
from attnlens.maths.statistics.associations import Blocks, holm, pairs_of
from attnlens.models import texts
from attnlens.models.kernel_transformers import AttentionForm
from attnlens.records import Coverage, ModelInfo, Settings, studies
from attnlens.records.provenance import File
from attnlens.report.report import Report
from attnlens.requests.experiments import ALL, StudyRequest
from attnlens.runs.progress import Progress, silent
from attnlens.runs.provenance import report_of
from attnlens.runs.store import Store
from attnlens.runs.work import Compute, WorkPlan, run_units
from attnlens.wording import join_items


def build_table(
    table: PaperTable,
    name: ScaleName,
    scales: Mapping[TaskForm, Scale],
    tasks: Sequence[StudyTask],
    results: Sequence[CellResult],
    seed: int,
    not_trained: Sequence[TaskForm] = (),
) -> studies.StudyTable:
    """Build the record of a table next to the paper's numbers; `not_trained`: forms of task without data."""
    task_of = {task.name: task for task in tasks}
    cells = [_build_cell(result, task_of[result.task], seed) for result in results]
    uncorrected = [pair for task in tasks for pair in _compare_pairs(cells, task)]
    # Holm's correction covers all comparisons of the table
    corrected = holm([math.nan if pair.p is None else pair.p for pair in uncorrected])
    pairs = [
        pair.model_copy(update={"p_holm": None if math.isnan(p) else p})
        for pair, p in zip(uncorrected, corrected, strict=True)
    ]
    orderings = [_correlate_order(cells, task, measure, pairs) for task in tasks for measure in MEASURES_OF[task.form]]
    return studies.StudyTable(
        name=table.name,
        question=table.question,
        source=table.source,
        scale=name,
        tasks=[
            studies.StudyColumn(
                name=task.name,
                form=task.form,
                metric=task.metric,
                higher_is_better=task.higher_is_better,
                vocabulary=task.vocabulary,
                length=task.length,
                sizes=json.loads(json.dumps(asdict(scales[task.form]))),
                left_out={what: count for what, count in task.left_out.items() if count},
                repeated=task.repeated,
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


def _build_cell(result: CellResult, task: StudyTask, seed: int) -> studies.StudyCell:
    runs = [
        studies.StudyRun(
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
    return studies.StudyCell(
        name=result.cell.name,
        task=task.name,
        form=json.loads(json.dumps(asdict(result.unit.form))),
        rate=result.unit.rate,
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
            name: studies.Curve(steps=steps, median=[medians.get(name) for medians in first.watched], quantity=name)
            for name in measures
        },
        features=describe_features(result.cell, result.unit.scale),
        published=result.cell.published,
        published_diverged=result.cell.diverged,
    )


def _mean(runs: Sequence[studies.StudyRun], task: StudyTask) -> tuple[float | None, float | None]:
    """Compute mean and standard error of the measure over seeds; for perplexity from its logarithm."""
    if any(run.problem for run in runs):
        return None, None
    values = torch.tensor([run.scores[MEASURES_OF[task.form][0]] for run in runs], dtype=torch.float64)
    mean = float(values.mean())
    se = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None
    if task.metric == "perplexity":
        return math.exp(mean), None if se is None else math.exp(mean) * se
    return mean, se


MEASURES_OF: dict[TaskForm, tuple[str, ...]] = {
    "language": ("loss",),
    "translation": ("BLEU", "loss"),
    "classification": ("accuracy",),
}
"""Scores that compare cells, the paper's first. For translation the loss too, which separates better: BLEU scores the
words written, so models that hardly translate yet all have a little of it."""


def _compare_pairs(cells: Sequence[studies.StudyCell], task: StudyTask) -> Iterator[studies.StudyPair]:
    """Yield each pair of converged cells by measure, with p over seeds and whether the paper has the same order."""
    converged = [cell for cell in cells if cell.task == task.name and cell.mean is not None]
    if len(converged) < 2 or len(converged[0].runs) < 2:
        return
    for measure in MEASURES_OF[task.form]:
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
            yield studies.StudyPair(
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
    cells: Sequence[studies.StudyCell], task: StudyTask, measure: str, pairs: Sequence[studies.StudyPair]
) -> studies.StudyOrdering | None:
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
    decided = [pair for pair in ordered if pair.p_holm is not None and pair.p_holm <= studies.LEVEL]
    agree = sum(bool(pair.agrees) for pair in decided)
    disagree, undecided = len(decided) - agree, len(ordered) - len(decided)
    return studies.StudyOrdering(
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


class Speed(NamedTuple):
    """Speed of training steps."""

    tokens_per_second: float  # median over steps
    beside_sdpa: float  # ratio to the standard transformer's speed with SDPA, steps alternating in one loop


def measure_speeds(units: Sequence[TrainingUnit], task: StudyTask) -> dict[TrainingUnit, Speed]:
    """Measure each unit's speed on one batch; a step of the standard transformer precedes each of its steps."""
    batch = next(iter(task.training(units[0].scale.batch, 0)))

    def build_timer(unit: TrainingUnit, implementation: str | None = None) -> Callable[[], float]:
        """Build a function that takes one training step of a new model and returns its seconds."""
        accelerator, model = build_accelerator(), build_model(unit, task)
        if implementation is not None:
            model.config._attn_implementation = implementation  # private: the public setter refuses undeclared ones
        optimiser = torch.optim.AdamW(model.core.parameters(), lr=unit.rate)
        module, optimiser = accelerator.prepare(model.core, optimiser)
        step = partial(take_step, accelerator, module, optimiser, batch, unit.form.eta)
        return lambda: timeit(step, number=1)

    time_standard, speeds = build_timer(replace(units[0], form=STANDARD), "sdpa"), {}
    for unit in units:
        time_unit = build_timer(unit)
        pairs = [(time_standard(), time_unit()) for _ in range(1 + ROUNDS)][1:]
        speeds[unit] = Speed(count_tokens(batch) / median(b for _, b in pairs), median(a / b for a, b in pairs))
    return speeds


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


def save_cells(folder: Path, results: Sequence[CellResult], store: Store) -> None:
    """Copy every cell's saved steps to `folder`/task/cell. Raises OutputError if they cannot be written."""
    for result in results:
        source = model_folder(store, result.first_name)
        destination = folder / slug(result.task) / slug(result.cell.name)
        make_folder(destination.parent)
        try:
            shutil.copytree(source, destination)
        except OSError as error:
            raise unwritten_folder(destination, error.strerror or str(error)) from None


def train_cells(
    cells: Sequence[tuple[PaperCell, StudyTask]], make: MakeTasks, plan: StudyPlan, tell: Progress
) -> list[CellResult]:
    """Train every cell: short runs choose the learning rate of smallest validation loss, which every seed then uses.

    The test set is read once per run, at its end. The heads of the first seed's run are measured during training.
    `make` rebuilds the tasks in other processes. At the end a few steps of each cell are timed.
    """
    tasks = list({id(task): task for _, task in cells}.values())
    digests = {task.name: hash_task(task) for task in tasks}
    search_units = [
        [
            TrainingUnit(task.name, form, scale, rate, scale.search_steps, SEARCH_SEED)
            for form in cell.forms
            for rate in scale.rates
        ]
        for cell, task in cells
        for scale in [plan.scales[task.form]]
    ]
    total = sum(map(len, search_units)) + sum(plan.scales[task.form].seeds for _, task in cells)
    numbers = count(1)

    def outcomes(units: Iterable[TrainingUnit], stage: str) -> dict[TrainingUnit, RunOutcome]:
        """Train units, or load their stored results. Raises ModelError if a unit could not be trained."""

        def count_unit(_name: str) -> None:
            tell(stage, next(numbers), total)

        named = {unit.name(digests[unit.task]): unit for unit in units}
        with one_thread():
            compute = build_trainer(named, tasks, plan.store)
            elsewhere = set_up_worker, (make, named, plan.store)
            results = run_units(list(named), compute, plan.work, plan.store, elsewhere=elsewhere, tell=count_unit)
        if results.stopped:
            raise KeyboardInterrupt
        for name, reason in results.missing.items():
            raise ModelError(f"A model of {named[name].task} could not be trained: {reason}", AGAIN)
        return {named[name]: RunOutcome(**value) for name, value in results.values.items()}

    searched = outcomes([unit for units in search_units for unit in units], "search")
    chosen = [min(units, key=lambda unit: searched[unit].loss) for units in search_units]
    seed_units = [_seed_units(unit, plan) for unit in chosen]
    trained = outcomes([unit for units in seed_units for unit in units], "train")
    speeds: dict[TrainingUnit, Speed] = {}
    with one_thread():
        for task in tasks:
            speeds |= measure_speeds([unit for unit in chosen if unit.task == task.name], task)
    return [
        CellResult(
            cell,
            task.name,
            best,
            tuple(trained[unit] for unit in by_seed),
            by_seed[0].name(digests[task.name]),
            tuple((unit.rate, searched[unit].loss) for unit in tried if unit.form == best.form),
            speeds[best],
        )
        for (cell, task), tried, best, by_seed in zip(cells, search_units, chosen, seed_units, strict=True)
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


def _seed_units(chosen: TrainingUnit, plan: StudyPlan) -> list[TrainingUnit]:
    seeded = replace(chosen, steps=chosen.scale.steps, tested=True)
    first, *others = (replace(seeded, seed=plan.seed + number) for number in range(chosen.scale.seeds))
    return [replace(first, watched=True, saved=plan.save), *others]


def train_table(name: str, request: StudyRequest, progress: Progress = silent) -> Report:
    """Train the cells of a table, or of all tables, from several seeds, and compare them."""
    names = STUDIES if name == ALL else (name,)
    jobs = request.jobs or (1 if torch.cuda.is_available() else os.cpu_count() or 1)
    if request.engine == "local" and "-" in request.text:
        jobs = 1  # only this process can read stdin
    work = WorkPlan(request.work, jobs=jobs, engine=request.engine, address=request.address)
    work.check(request.text)
    defaults = {form: scale_of(request.scale, form) for form in get_args(TaskForm)}
    scales = {form: replace(scale, seeds=request.seeds or scale.seeds) for form, scale in defaults.items()}
    if request.save is not None:
        check_folder(Path(request.save))
    chosen = _select_cells(names, request)
    start = time.perf_counter()
    make = partial(tasks_of, request, {cell.task for cells in chosen.values() for cell in cells}, scales)
    tasks = make()
    task_names = [task.name for task in tasks]  # cells are matched to tasks by name
    if twice := [name for name in task_names if task_names.count(name) > 1]:
        raise UsageError(f"Two tasks have the same name, {twice[0]}.", "Give one of the files another name.")
    tables: list[studies.StudyTable] = []
    plan = StudyPlan(
        scales, request.seed, work, Store(work.root / "study", {"command": "study"}), save=request.save is not None
    )
    for table_name, cells in chosen.items():
        pairs = [(cell, task) for task in tasks for cell in cells if cell.task == task.form]
        trained = train_cells(pairs, make, plan, progress)
        if request.save is not None:
            save_cells(Path(request.save) / table_name, trained, plan.store)
        present = [task for task in tasks if any(paired is task for _, paired in pairs)]
        missing = sorted({cell.task for cell in TABLES[table_name].cells} - _available_forms(request))
        tables.append(build_table(TABLES[table_name], request.scale, scales, present, trained, request.seed, missing))
    largest = max(cell.parameters for table in tables for cell in table.cells)
    return report_of(
        "reproduce",
        "studies",
        model=ModelInfo(
            id=f"models trained here, {request.scale}", architecture="KernelTransformer", parameters=largest
        ),
        settings=Settings(seed=request.seed, dtype="float32"),
        coverage=Coverage(sites=0, heads=0, analysed=0),
        studies=tables,
        timings={"study": time.perf_counter() - start},
    )


def _select_cells(names: Sequence[str], request: StudyRequest) -> dict[str, list[PaperCell]]:
    """Return the cells of each table that have data and match `cells`. Raises UsageError for unmatched patterns."""
    forms = _available_forms(request)
    available = {name: [cell for cell in TABLES[name].cells if cell.task in forms] for name in names}
    rows = dict.fromkeys(f"{cell.task}/{cell.name}" for cells in available.values() for cell in cells)
    for pattern in request.cells:
        if not any(_matches(row, [pattern]) for row in rows):
            hint = "" if "classification" in forms else " Classification cells need --series or --labelled."
            raise UsageError(f"No cell matches {pattern}.", f"Choose from: {join_items(rows, 8, '; ')}.{hint}")
    selected = {
        name: [cell for cell in cells if _matches(f"{cell.task}/{cell.name}", request.cells)]
        for name, cells in available.items()
    }
    trained = {cell.task for cells in selected.values() for cell in cells}
    for option, form in DATA.items():
        if getattr(request, option) and form not in trained:
            raise UsageError(f"None of the selected cells uses --{option}.", "Omit it, or select other cells.")
    return {name: cells for name, cells in selected.items() if cells}


DATA: dict[str, TaskForm] = {
    "series": "classification",
    "labelled": "classification",
    "pairs": "translation",
    "text": "language",
}
"""Option → form of the task its files are for."""


def _available_forms(request: StudyRequest) -> set[TaskForm]:
    """Return the forms of task that have data: from the user's files or built in."""
    built_in: set[TaskForm] = {"language", "translation"}
    return built_in | {form for option, form in DATA.items() if getattr(request, option)}


def _matches(row: str, patterns: Sequence[str]) -> bool:
    """Check whether a pattern matches the row with or without its task; without patterns every row matches."""
    names = row, row.partition("/")[2]
    return not patterns or any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def tasks_of(request: StudyRequest, forms: set[TaskForm], scales: Mapping[TaskForm, Scale]) -> list[StudyTask]:
    """Load the tasks of the needed forms; the user's files are read first, so that bad files are refused early.

    Missing files are replaced by the papers' data at scale `paper`, else by the built-in data.
    """
    sizes = {
        form: {"length": scale.length, "vocabulary": scale.vocabulary, "evaluated": scale.evaluated}
        for form, scale in scales.items()
    }
    papers = request.scale == "paper"
    tasks: list[StudyTask] = []
    if "classification" in forms and request.series is not None:
        tasks.append(series(*request.series))
    if "classification" in forms and request.labelled is not None:
        scale = scales["classification"]
        tasks.append(load_labelled(request.labelled, length=scale.length, vocabulary=scale.vocabulary))
    if "translation" in forms and request.pairs is not None:
        tasks.append(translation(request.pairs, **sizes["translation"]))
    elif "translation" in forms:
        tasks.append(iwslt(**sizes["translation"]) if papers else Reversal())
    if "language" in forms and papers and not request.text:
        tasks.append(wikitext(**sizes["language"]))
    elif "language" in forms:
        contents = [(content.name, content.text) for content in texts.read_each(list(request.text)) or ()]
        tasks.append(language(contents, **sizes["language"]))
    return tasks[::-1]
