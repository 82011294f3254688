"""Reruns tables of the papers: trains small models, and sets their order beside the published one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Unpack, get_args

import torch

from attnlens import texts
from attnlens.arguments import public
from attnlens.choices import STUDIES
from attnlens.errors import UsageError
from attnlens.files import check_folder
from attnlens.records import Coverage, ModelInfo, Report, Settings
from attnlens.records.studies import StudyTable
from attnlens.requests.fields import checked
from attnlens.requests.study import ALL, StudyRequest, table
from attnlens.run.provenance import report_of
from attnlens.runs.progress import Progress, silent
from attnlens.runs.work import Store, WorkPlan
from attnlens.studies.cells import StudyPlan, table_of, trained_cells
from attnlens.studies.tables import TABLES, PaperCell, Scale, scale_of
from attnlens.studies.tasks import (
    Reversal,
    StudyTask,
    TaskForm,
    iwslt,
    labelled,
    language,
    series,
    translation,
    wikitext,
)
from attnlens.studies.units import save_cells
from attnlens.wording import listed


@public
def study(name: str = ALL, *, progress: Progress = silent, **more: Unpack[StudyRequest]) -> Report:
    """Train the cells of a table (kernels, positions, order, values, dimension, primal; all) from several seeds.

    Every cell has the same sizes, steps and data; its learning rate is the one of least validation loss in a shorter
    run; the test set is read once, at the end of each run. Cells are compared over the same seeds (moderated
    paired t, Holm over a task's pairs), and their order with the published one (Kendall's τ). What is finished
    lies in the folder `work`, from which the same call goes on, as after an interruption.

    `text` files train language models (none: the King James text), `pairs` translators (none: a built-in task),
    `series` and `labelled` are classified; at the scale `paper` WikiText-103 and IWSLT'14 stand in for no file.
    Raises UsageError for words that make no sense and for a table none of whose tasks is given, TextError for data that
    can't be used or had, OutputError where `work` can't be written.
    """
    asked = checked(StudyRequest, more)
    names = STUDIES if table(name) == ALL else (name,)
    work = _work(asked)
    work.check(asked["text"])
    scales = {form: _scale(form, asked) for form in get_args(TaskForm)}
    if asked["save"] is not None:
        check_folder(Path(asked["save"]))
    chosen = _chosen(names, asked)
    start = time.perf_counter()
    make = partial(tasks_of, asked, {cell.task for cells in chosen.values() for cell in cells}, scales)
    tasks = make()
    _check_names(tasks)
    found: list[StudyTable] = []
    plan = StudyPlan(
        scales, asked["seed"], work, Store(work.root / "study", {"command": "study"}), kept=asked["save"] is not None
    )
    for each, cells in chosen.items():
        pairs = [(cell, task) for task in tasks for cell in cells if cell.task == task.form]
        trained = trained_cells(pairs, make, plan, progress)
        if plan.kept:
            save_cells(Path(asked["save"]) / each, trained, plan.store)
        of = [task for task in tasks if any(one is task for _, one in pairs)]
        missing = sorted({cell.task for cell in TABLES[each].cells} - _forms(asked))
        found.append(table_of(TABLES[each], asked["scale"], scales, of, trained, asked["seed"], missing))
    return _report(found, asked, time.perf_counter() - start)


def _report(found: list[StudyTable], asked: dict[str, Any], seconds: float) -> Report:
    largest = max(cell.parameters for one in found for cell in one.cells)
    return report_of(
        "study",
        model=ModelInfo(
            id=f"models trained here, {asked['scale']}", architecture="KernelTransformer", parameters=largest
        ),
        settings=Settings(seed=asked["seed"], dtype="float32"),
        coverage=Coverage(sites=0, heads=0, analysed=0),
        studies=found,
        timings={"study": seconds},
    )


def _chosen(names: Sequence[str], asked: dict[str, Any]) -> dict[str, list[PaperCell]]:
    """The cells of each table of which there is data, and that were asked for.

    Raises UsageError for a pattern that is the name of none, and for a file that none of them is trained on.
    """
    forms = _forms(asked)
    every = {name: [cell for cell in TABLES[name].cells if cell.task in forms] for name in names}
    rows = dict.fromkeys(f"{cell.task}/{cell.name}" for cells in every.values() for cell in cells)
    for pattern in asked["cells"]:
        if not any(_named(row, [pattern]) for row in rows):
            without = "" if "classification" in forms else " Those of classification need --series or --labelled."
            raise UsageError(f"No cell is called {pattern}.", f"There are: {listed(rows, 8, '; ')}.{without}")
    found = {
        name: [cell for cell in cells if _named(f"{cell.task}/{cell.name}", asked["cells"])]
        for name, cells in every.items()
    }
    trained = {cell.task for cells in found.values() for cell in cells}
    for option, form in DATA.items():
        if asked[option] and form not in trained:
            raise UsageError(f"No cell is trained on --{option}.", "Leave it out, or ask for other cells.")
    return {name: cells for name, cells in found.items() if cells}


DATA: dict[str, TaskForm] = {
    "series": "classification",
    "labelled": "classification",
    "pairs": "translation",
    "text": "language",
}
"""Option → the form of task that its files are for."""


def _forms(asked: dict[str, Any]) -> set[TaskForm]:
    """The forms of task for which there is data: the user's, or what is built in."""
    found: set[TaskForm] = {"language", "translation"}
    return found | {form for option, form in DATA.items() if asked[option]}


def _named(row: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the row with its task, or alone; none matches all."""
    names = row, row.partition("/")[2]
    return not patterns or any(fnmatchcase(name, one) for name in names for one in patterns)


def tasks_of(asked: dict[str, Any], forms: set[TaskForm], scales: Mapping[TaskForm, Scale]) -> list[StudyTask]:
    """What is trained on, of the forms that are needed; the user's own files first, so that they are refused early.

    At the scale of the papers their data stand in for files that are not given, elsewhere what is built in.
    """
    sizes = {
        form: {"length": one.length, "vocabulary": one.vocabulary, "evaluated": one.evaluated}
        for form, one in scales.items()
    }
    papers = asked["scale"] == "paper"
    found: list[StudyTask] = []
    if "classification" in forms and asked["series"] is not None:
        found.append(series(*asked["series"]))
    if "classification" in forms and asked["labelled"] is not None:
        scale = scales["classification"]
        found.append(labelled(asked["labelled"], length=scale.length, vocabulary=scale.vocabulary))
    if "translation" in forms and asked["pairs"] is not None:
        found.append(translation(asked["pairs"], **sizes["translation"]))
    elif "translation" in forms:
        found.append(iwslt(**sizes["translation"]) if papers else Reversal())
    if "language" in forms and papers and not asked["text"]:
        found.append(wikitext(**sizes["language"]))
    elif "language" in forms:
        read = [(one.name, one.text) for one in texts.read_each(list(asked["text"])) or ()]
        found.append(language(read, **sizes["language"]))
    return found[::-1]


def _check_names(tasks: Sequence[StudyTask]) -> None:
    """Raise UsageError where two tasks have one name, by which their cells are told apart."""
    names = [task.name for task in tasks]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"Two tasks are called {twice[0]}.", "Give one of the files another name.")


def _scale(form: TaskForm, asked: dict[str, Any]) -> Scale:
    found = scale_of(asked["scale"], form)
    return replace(found, seeds=asked["seeds"] or found.seeds)


def _work(asked: dict[str, Any]) -> WorkPlan:
    """Who trains: so many processes as were asked for, else one per core; this process on a GPU, or for stdin."""
    jobs = asked["jobs"] or (1 if torch.cuda.is_available() else os.cpu_count() or 1)
    if asked["engine"] == "local" and "-" in map(str, asked["text"]):
        jobs = 1
    return WorkPlan(asked["work"], jobs=jobs, engine=asked["engine"], address=asked["address"])
