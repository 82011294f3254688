"""Train and compare the cells of a table: learning-rate search, runs over seeds, and the records of the results."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, count, product
from pathlib import Path
from typing import Literal, get_args

import torch

from attnlens.choices import STUDIES
from attnlens.errors import ModelError, UsageError
from attnlens.files import check_folder, unwritten_folder
from attnlens.lab.study.examples import Reversal, StudyTask, TaskForm
from attnlens.lab.study.tables import PAPER, SCALES, TABLES, PaperCell, PaperTable, Scale, describe_features
from attnlens.lab.study.tasks import iwslt, language, load_labelled, series, translation, wikitext
from attnlens.lab.study.units import RunOutcome, TrainingUnit, hash_task, measure_speeds, model_folder, train_unit
from attnlens.maths.linalg.spectra import one_thread
from attnlens.maths.statistics.associations import Blocks, holm, pairs_of
from attnlens.models import texts
from attnlens.records import Coverage, ModelInfo, Settings, studies
from attnlens.records.provenance import File
from attnlens.report.report import Report
from attnlens.requests.experiments import ALL, StudyRequest
from attnlens.runs.progress import Progress, silent
from attnlens.runs.provenance import assemble_report
from attnlens.runs.store import Store
from attnlens.runs.work import Compute, WorkPlan, run_units
from attnlens.wording import join_items

SEARCH_SEED = 1_000_003  # seed of the runs of the learning-rate search, which are not reported
MEASURES: dict[TaskForm, tuple[Literal["perplexity", "BLEU", "accuracy"], tuple[str, ...]]] = {
    "language": ("perplexity", ("loss",)),
    "translation": ("BLEU", ("BLEU", "loss")),
    "classification": ("accuracy", ("accuracy",)),
}
"""The papers' measure, and the scores used to compare cells. Translation models are also compared by the loss, because
BLEU hardly distinguishes models that translate badly."""


def build_table(
    table: PaperTable,
    scale_name: str,
    scales: Mapping[TaskForm, Scale],
    tasks: Sequence[StudyTask],
    cells: Sequence[studies.StudyCell],
    not_trained: Sequence[TaskForm] = (),
) -> studies.StudyTable:
    """Build the record of a table, with the paper's numbers; `not_trained` lists the task forms that have no data."""
    uncorrected = [pair for task in tasks for pair in _compare_pairs(cells, task)]
    # Holm's correction covers all comparisons of the table
    corrected = holm([math.nan if pair.p is None else pair.p for pair in uncorrected])
    pairs = [
        pair.model_copy(update={"p_holm": None if math.isnan(p) else p})
        for pair, p in zip(uncorrected, corrected, strict=True)
    ]
    return studies.StudyTable(
        name=table.name,
        question=table.question,
        source=table.source,
        scale=scale_name,
        tasks=[
            studies.StudyColumn(
                name=task.name,
                form=task.form,
                metric=MEASURES[task.form][0],
                higher_is_better=task.form != "language",
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
        cells=list(cells),
        not_trained=list(not_trained),
        pairs=pairs,
        orderings=[ordering for task in tasks for ordering in _correlate_orders(cells, task, pairs)],
    )


def build_cell(
    cell: PaperCell,
    task: StudyTask,
    unit: TrainingUnit,
    outcomes: Sequence[RunOutcome],
    searched: Sequence[tuple[float, float]],
    speed: tuple[float, float],
    seed: int,
) -> studies.StudyCell:
    """Build a cell's record from the chosen unit, the form's (rate, validation loss) pairs, and the runs over seeds."""
    runs = [
        studies.StudyRun(
            seed=seed + number,
            scores=run.scores,
            steps=[step for step, loss in run.curve if math.isfinite(loss)],
            losses=[loss for _, loss in run.curve if math.isfinite(loss)],
            seconds=run.seconds,
            problem=run.problem or None,
        )
        for number, run in enumerate(outcomes)
    ]
    mean, se, first = None, None, outcomes[0]
    if not any(run.problem for run in runs):
        values = torch.tensor([run.scores[MEASURES[task.form][1][0]] for run in runs], dtype=torch.float64)
        mean = float(values.mean())
        se = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None
        if task.form == "language":  # perplexity from its logarithm, the loss; error by the delta method
            mean, se = math.exp(mean), None if se is None else math.exp(mean) * se
    steps = [float(step) for step, _ in first.curve]
    heads = {
        name: studies.Curve(steps=steps, median=[medians.get(name) for medians in first.watched], quantity=name)
        for name in dict.fromkeys(chain.from_iterable(first.watched))
    }
    return studies.StudyCell(
        name=cell.name,
        task=task.name,
        form=json.loads(json.dumps(asdict(unit.form))),
        rate=unit.rate,
        forms=len(cell.forms),
        searched=[(rate, loss if math.isfinite(loss) else None) for rate, loss in searched],
        mean=mean,
        se=se,
        runs=runs,
        parameters=first.parameters,
        kernel_parameters=first.kernel_parameters,
        tokens=max(run.tokens for run in outcomes),
        tokens_per_second=speed[0],
        beside_sdpa=speed[1],
        heads=heads,
        features=describe_features(unit.form, unit.scale.d_model // unit.scale.heads),
        published=cell.published,
        published_diverged=cell.diverged,
    )


def _compare_pairs(cells: Sequence[studies.StudyCell], task: StudyTask) -> Iterator[studies.StudyPair]:
    """Yield for each measure all pairs of converged cells, with p-values and whether they agree with the paper's order.

    Yield nothing if there is a single seed.
    """
    converged = [cell for cell in cells if cell.task == task.name and cell.mean is not None]
    if len(converged) < 2 or len(converged[0].runs) < 2:
        return
    for measure in MEASURES[task.form][1]:
        values = torch.tensor([[run.scores[measure] for run in cell.runs] for cell in converged], dtype=torch.float64)
        seeds = Blocks(values, [cell.published_diverged for cell in converged])
        # 1 if the measure and the published metric improve in the same direction, else −1
        sign = -1 if measure == "loss" and task.form != "language" else 1
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


def _correlate_orders(
    cells: Sequence[studies.StudyCell], task: StudyTask, pairs: Sequence[studies.StudyPair]
) -> Iterator[studies.StudyOrdering]:
    """Yield for each measure Kendall's τ with the published order, if two or more trained cells have published values.

    The interval of τ covers both orders of each undecided pair. The interval contains the true τ with a probability of
    95 %, because Holm's correction bounds the probability of any false decision by 5 %.
    """
    published = {cell.name: cell.published for cell in cells if cell.task == task.name and cell.published is not None}
    known = [pair for pair in pairs if pair.task == task.name and {pair.first, pair.second} <= published.keys()]
    for measure in dict.fromkeys(pair.measure for pair in known):
        compared = [pair for pair in known if pair.measure == measure]
        ordered = [pair for pair in compared if published[pair.first] != published[pair.second]]
        decided = [pair for pair in ordered if pair.p_holm is not None and pair.p_holm <= studies.LEVEL]
        agree = sum(bool(pair.agrees) for pair in decided)
        disagree, undecided = len(decided) - agree, len(ordered) - len(decided)
        yield studies.StudyOrdering(
            task=task.name,
            measure=measure,
            tau=sum(0 if pair.agrees is None else 2 * pair.agrees - 1 for pair in compared) / len(compared),
            low=(agree - disagree - undecided) / len(compared),
            high=(agree - disagree + undecided) / len(compared),
            agree=agree,
            disagree=disagree,
            undecided=undecided,
        )


def train_cells(
    cells: Sequence[tuple[PaperCell, StudyTask]],
    make: Callable[[], Sequence[StudyTask]],
    scales: Mapping[TaskForm, Scale],
    seed: int,
    work: WorkPlan,
    store: Store,
    folder: Path | None,
    progress: Progress,
) -> list[studies.StudyCell]:
    """Train every cell: choose form and learning rate by the validation loss of short runs, then train with all seeds.

    In the first seed's run, heads are measured and, if `folder` is given, the model is saved at every evaluation.
    `make` builds the tasks again in worker processes. Raises ModelError if a run fails, and OutputError if `folder`
    cannot be written.
    """
    tasks = list(dict.fromkeys(task for _, task in cells))
    digests = {task.name: hash_task(task) for task in tasks}
    search_units = [
        [
            TrainingUnit(task.name, form, scales[task.form], rate, scales[task.form].search_steps, SEARCH_SEED)
            for form, rate in product(cell.forms, scales[task.form].rates)
        ]
        for cell, task in cells
    ]
    total, numbers = sum(len(units) + units[0].scale.seeds for units in search_units), count(1)

    def outcomes(units: Iterable[TrainingUnit], stage: str) -> dict[TrainingUnit, RunOutcome]:
        named = {unit.name(digests[unit.task]): unit for unit in units}
        with one_thread():
            results = run_units(
                list(named),
                prepare_training(lambda: tasks, named, store)[1],
                work,
                store,
                worker_setup=(prepare_training, (make, named, store)),
                report_unit=lambda _name: progress(stage, next(numbers), total),
            )
        if results.stopped:
            raise KeyboardInterrupt
        for name, reason in results.missing.items():
            remedy = "Run the same command again, with fewer --jobs if memory ran out; finished runs are kept."
            raise ModelError(f"A model of {named[name].task} could not be trained: {reason}", remedy)
        return {named[name]: RunOutcome(**value) for name, value in results.values.items()}

    searched = outcomes(chain.from_iterable(search_units), "search")
    chosen = [min(units, key=lambda unit: searched[unit].loss) for units in search_units]
    seed_units = []
    for unit in chosen:
        seeded = replace(unit, steps=unit.scale.steps, tested=True)
        first, *others = (replace(seeded, seed=seed + number) for number in range(unit.scale.seeds))
        seed_units.append([replace(first, watched=True, saved=folder is not None), *others])
    trained = outcomes(chain.from_iterable(seed_units), "train")
    speeds, built = dict[TrainingUnit, tuple[float, float]](), []
    with one_thread():
        for task in tasks:
            speeds |= measure_speeds([unit for unit in chosen if unit.task == task.name], task)
    for (cell, task), tried, best, by_seed in zip(cells, search_units, chosen, seed_units, strict=True):
        if folder is not None:
            destination = folder / slug(task.name) / slug(cell.name)
            try:
                shutil.copytree(model_folder(store, by_seed[0].name(digests[task.name])), destination)
            except OSError as error:
                raise unwritten_folder(destination, error.strerror or str(error)) from None
        rates = [(unit.rate, searched[unit].loss) for unit in tried if unit.form == best.form]
        runs = [trained[unit] for unit in by_seed]
        built.append(build_cell(cell, task, best, runs, rates, speeds[best], seed))
    return built


def slug(name: str) -> str:
    """Convert a name to a folder name of lower-case letters, digits, dots, plus signs and hyphens."""
    return re.sub(r"[^a-z0-9.+]+", "-", name.lower()).strip("-.") or "unnamed"


def prepare_training(
    make: Callable[[], Sequence[StudyTask]], units: Mapping[str, TrainingUnit], store: Store
) -> tuple[Mapping[str, object], Compute]:
    """Return the store's facts and a function that trains a unit by name; `make` builds the units' tasks."""
    task_of = {task.name: task for task in make()}
    return store.facts, lambda name: train_unit(units[name], task_of[units[name].task], store)


def train_table(name: str, request: StudyRequest, progress: Progress = silent) -> Report:
    """Train the cells of the table `name`, or of all tables, with several seeds; compare the cells in a report."""
    jobs = request.jobs or (1 if torch.cuda.is_available() else os.cpu_count() or 1)
    if request.engine == "local" and "-" in request.text:
        jobs = 1  # only this process can read stdin
    work = WorkPlan(work=request.work, jobs=jobs, engine=request.engine, address=request.address)
    work.check(request.text)
    defaults = PAPER if request.scale == "paper" else dict.fromkeys(get_args(TaskForm), SCALES[request.scale])
    scales = {form: replace(scale, seeds=request.seeds or scale.seeds) for form, scale in defaults.items()}
    if request.save is not None:
        check_folder(Path(request.save))
    # task forms with data: from the user's files or built in
    forms = {"language", "translation"} | {form for option, form in DATA.items() if getattr(request, option)}
    chosen = _select_cells(STUDIES if name == ALL else (name,), request, forms)
    start = time.perf_counter()
    make = partial(load_tasks, request, {cell.task for cells in chosen.values() for cell in cells}, scales)
    tasks = make()
    task_names = [task.name for task in tasks]  # cells are matched to tasks by name
    if twice := [name for name in task_names if task_names.count(name) > 1]:
        raise UsageError(f"Two tasks have the same name, {twice[0]}.", "Rename one of the files.")
    tables = []
    store = Store(work.root / "study", {"command": "study"})
    for table_name, cells in chosen.items():
        table = TABLES[table_name]
        folder = None if request.save is None else Path(request.save) / table_name
        pairs = [(cell, task) for task in tasks for cell in cells if cell.task == task.form]
        trained = train_cells(pairs, make, scales, request.seed, work, store, folder, progress)
        present = [task for task in tasks if any(paired is task for _, paired in pairs)]
        missing = sorted({cell.task for cell in table.cells} - forms)
        tables.append(build_table(table, request.scale, scales, present, trained, missing))
    trained_models = f"models trained here, {request.scale}"
    largest = max(cell.parameters for table in tables for cell in table.cells)
    return assemble_report(
        "reproduce",
        "studies",
        model=ModelInfo(id=trained_models, architecture="KernelTransformer", parameters=largest),
        settings=Settings(seed=request.seed, dtype="float32"),
        coverage=Coverage(sites=0, heads=0, analysed=0),
        studies=tables,
        timings={"study": time.perf_counter() - start},
    )


DATA: dict[str, TaskForm] = {"series": "classification", "labelled": "classification"}
DATA |= {"pairs": "translation", "text": "language"}  # option → form of the task that uses the option's files


def _select_cells(names: Sequence[str], request: StudyRequest, forms: Set[str]) -> dict[str, list[PaperCell]]:
    """Return each table's cells that have data and match a pattern of `request.cells` (default: all).

    Tables without such cells are omitted. Raise UsageError if a pattern matches no cell, or if a given file is used by
    none of the selected cells.
    """

    def matches(cell: PaperCell, pattern: str) -> bool:
        return any(fnmatchcase(row, pattern) for row in (cell.name, f"{cell.task}/{cell.name}"))

    available = {name: [cell for cell in TABLES[name].cells if cell.task in forms] for name in names}
    all_cells = list(chain.from_iterable(available.values()))
    for pattern in request.cells:
        if not any(matches(cell, pattern) for cell in all_cells):
            hint = "" if "classification" in forms else " Classification cells need --series or --labelled."
            rows = dict.fromkeys(f"{cell.task}/{cell.name}" for cell in all_cells)
            raise UsageError(f"No cell matches {pattern!r}.", f"Choose from: {join_items(rows, 8, '; ')}.{hint}")
    selected = {
        name: [cell for cell in cells if any(matches(cell, pattern) for pattern in request.cells or ["*"])]
        for name, cells in available.items()
    }
    trained = {cell.task for cells in selected.values() for cell in cells}
    for option, form in DATA.items():
        if getattr(request, option) and form not in trained:
            raise UsageError(f"None of the selected cells uses --{option}.", f"Omit --{option}, or select other cells.")
    return {name: cells for name, cells in selected.items() if cells}


def load_tasks(request: StudyRequest, forms: Set[TaskForm], scales: Mapping[TaskForm, Scale]) -> list[StudyTask]:
    """Load the tasks of `forms` from the user's files, the papers' data (scale `paper`) or built-in data."""
    papers = request.scale == "paper"
    tasks: list[StudyTask] = []
    if request.series is not None:
        tasks.append(series(*request.series))
    if request.labelled is not None:
        tasks.append(load_labelled(request.labelled, scales["classification"]))
    if request.pairs is not None:
        tasks.append(translation(request.pairs, scales["translation"]))
    elif "translation" in forms:
        tasks.append(iwslt(scales["translation"]) if papers else Reversal())
    if "language" in forms:
        contents = [(content.name, content.text) for content in texts.read_each(list(request.text))]
        use_wikitext = papers and not request.text
        tasks.append(wikitext(scales["language"]) if use_wikitext else language(contents, scales["language"]))
    return tasks[::-1]
