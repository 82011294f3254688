"""Reruns tables of the papers: trains small models, and sets their order beside the published one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Unpack

import torch

from attnlens import texts
from attnlens.arguments import public
from attnlens.errors import UsageError
from attnlens.files import check_folder, make_folder
from attnlens.records import Coverage, ModelInfo, Report, Settings
from attnlens.records.studies import StudyTable
from attnlens.requests.fields import checked
from attnlens.requests.study import ALL, STUDIES, StudyRequest, table
from attnlens.run.progress import Progress, silent
from attnlens.run.provenance import report_of
from attnlens.studies.cells import trained_cells
from attnlens.studies.findings import table_of
from attnlens.studies.saved import check_work, save_cells
from attnlens.studies.scales import SCALES, Scale
from attnlens.studies.tables import TABLES, Cell, Table
from attnlens.studies.tasks import Reversal, StudyTask, labelled, language, series, translation


@public
def study(name: str = ALL, *, progress: Progress = silent, **more: Unpack[StudyRequest]) -> Report:
    """Train the cells of a table (kernels, positions, order, values, dimension, primal; all) from several seeds.

    Every cell has the same sizes, steps and data; its learning rate is the one of least validation loss in a shorter
    run; the test set is read once, at the end of each run. Cells are compared over the same seeds (Student's t of a
    pooled variance, Holm over a task's pairs), and their order with the published one (Kendall's τ). What is finished
    lies in the folder `work`, from which the same call goes on, as after an interruption.

    `text` files train language models, `pairs` translators (none: a built-in task), `series` and `labelled` are
    classified. Raises UsageError for words that make no sense and for a table none of whose tasks is given, TextError
    for data that can't be used, OutputError where `work` can't be written.
    """
    asked = checked(StudyRequest, more)
    names = STUDIES if table(name) == ALL else (name,)
    scale = SCALES[asked["scale"]]
    scale = replace(scale, seeds=asked["seeds"] or scale.seeds)
    folder = Path(asked["work"]) if asked["work"] is not None else _cache()
    check_work(folder)
    if asked["save"] is not None:
        check_folder(Path(asked["save"]))
    start = time.perf_counter()
    tasks = _tasks(asked, {cell.task for each in names for cell in TABLES[each].cells}, scale)
    chosen = {each: _cells(TABLES[each], tasks, asked["cells"]) for each in names}
    if not any(chosen.values()):
        raise _nothing(names, asked["cells"])
    make_folder(folder)
    jobs = asked["jobs"] or (1 if torch.cuda.is_available() else os.cpu_count() or 1)
    found: list[StudyTable] = []
    for each, cells in chosen.items():
        if cells:
            of = [task for task in tasks if any(one is task for _, one in cells)]
            kept = asked["save"] is not None
            trained = trained_cells(cells, scale, asked["seed"], folder, jobs, kept, progress)
            if kept:
                save_cells(Path(asked["save"]) / each, trained, folder)
            found.append(table_of(TABLES[each], asked["scale"], scale, of, trained, asked["seed"]))
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


def _tasks(asked: dict[str, Any], forms: set[str], scale: Scale) -> list[StudyTask]:
    """What is trained on, of the forms that the tables have."""
    sizes = {"length": scale.length, "vocabulary": scale.vocabulary}
    found: list[StudyTask] = []
    if "language" in forms:
        read = [(one.name, one.text) for one in texts.read_each(list(asked["text"])) or ()]
        found.append(language(read, **sizes, evaluated=scale.evaluated))
    if "translation" in forms:
        pairs = asked["pairs"]
        found.append(Reversal() if pairs is None else translation(pairs, **sizes, evaluated=scale.evaluated))
    if "classification" in forms and asked["series"] is not None:
        found.append(series(*asked["series"]))
    if "classification" in forms and asked["labelled"] is not None:
        found.append(labelled(asked["labelled"], **sizes))
    return found


def _cells(table: Table, tasks: Sequence[StudyTask], patterns: Sequence[str]) -> list[tuple[Cell, StudyTask]]:
    """Each cell with each task of its form, those that were asked for."""
    every = [(cell, task) for task in tasks for cell in table.cells if cell.task == task.form]
    return [(cell, task) for cell, task in every if not patterns or _named(cell, task, patterns)]


def _named(cell: Cell, task: StudyTask, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, one) for name in (cell.name, f"{task.form}/{cell.name}") for one in patterns)


def _nothing(names: Sequence[str], patterns: Sequence[str]) -> UsageError:
    if patterns:
        rows = list(dict.fromkeys(cell.name for name in names for cell in TABLES[name].cells))
        return UsageError(f"No cell is called {', '.join(patterns)}.", f"The rows are: {'; '.join(rows)}.")
    return UsageError(f"{names[0]} has no task to train on.", "Give --series or --labelled.")


def _cache() -> Path:
    """Where work is kept that no folder was named for."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "attnlens" / "study"
