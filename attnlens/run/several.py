"""Inspects several models, one report each, and goes on where an earlier run stopped."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from attnlens import requests, texts
from attnlens.arguments import dataset_rows, public
from attnlens.engines import Done, completed, engine, tried
from attnlens.engines.readers import check_work, resources
from attnlens.errors import UsageError
from attnlens.files import make_folder, read_bytes, sha256, with_home, write_atomically
from attnlens.models.locate import commit_of
from attnlens.requests import InspectRequest, reading
from attnlens.requests.work_options import KeptRequest
from attnlens.run.fingerprint import code_of, versions
from attnlens.run.inspect.pipeline import inspected
from attnlens.run.progress import Progress, silent
from attnlens.unit_files import UnitFiles, key_of, store_of, work_root
from attnlens.wording import clean

LOG = logging.getLogger("attnlens")
SAY_LIST = "Write one model a line: a hub id, a folder or a file."
OUTER = ("shard", "engine", "jobs", "address")
"""Options that share out the models, and not a model's own work."""
READ = ("text", "pairs", "image", "audio", "adapter")
"""Options that name files whose content decides what is found."""


@dataclass(frozen=True)
class ModelOutcome:
    """What came of one model of a list."""

    model: str
    report: Path | None
    """Where its report lies; None where there is none."""
    said: str
    """How much of it was analysed, or why there is no report."""


@dataclass(frozen=True)
class Survey:
    """The run over a list of models, as each of its processes needs it."""

    reports: Path
    given: Mapping[str, Any]
    """The options, as they were given."""
    files: UnitFiles
    resume: bool

    def outcome(self, model: str) -> ModelOutcome:
        """Inspect one model and write its report, or take the report that an earlier run wrote and nobody changed."""
        unit = f"{model} {_stamp(model, self.given)}"
        path = self.reports / f"{_slug(model)}.json"
        before = self.files.read(unit) if self.resume else None
        digest, _, said = ("" if before is None else before.decode()).partition(" ")
        if not path.is_file() or sha256(path) != digest:
            inner = {name: value for name, value in self.given.items() if name not in OUTER}
            report, written = inspected(model, None, silent, inner)
            said = report.coverage.sentence
            write_atomically(path, report.to_json().encode())
            if written():  # a model of which a unit failed is read again by the same call
                self.files.write(unit, f"{sha256(path)} {said}".encode())
        return ModelOutcome(model, path, said)


def models_in(path: str) -> list[str]:
    """The models that a file lists, one a line; empty lines and those that begin with # are left out.

    Raises UsageError where it can't be read, or lists none.
    """
    content = read_bytes(path, UsageError, SAY_LIST)
    try:
        lines = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text in UTF-8.", SAY_LIST) from None
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise UsageError(f"{path} lists no model.", SAY_LIST)
    return found


@public
def inspect_each(
    models: Sequence[str],
    reports: str | os.PathLike[str],
    *,
    progress: Progress = silent,
    **more: Unpack[InspectRequest],
) -> list[ModelOutcome]:
    """Inspect each of the models and write its report into the folder `reports`, as MODEL.json.

    `more` are the options of `inspect`; `shard`, `engine` and `jobs` share out the models. A model that fails costs no
    other its report; one that fails is tried once more. What is finished is not done again by
    the same call, unless its files have changed. Raises UsageError for words that make no sense, OutputError where the
    folder can't be written.
    """
    given = requests.checked(InspectRequest, more)
    _refuse_one_name(models)
    if "-" in map(str, given["text"]):
        raise UsageError("A text from stdin can be read for one model alone.", "Write it to a file.")
    check_work(given)
    folder = Path(requests.folder("reports", reports))
    make_folder(folder)
    files = _files(folder, more, given)
    files.describe("\n".join(models).encode())
    index, _, count = (given["shard"] or "1/1").partition("/")
    survey, mine = Survey(folder, dict(more), files, given["resume"]), list(models)[int(index) - 1 :: int(count)]
    found: dict[str, ModelOutcome] = {}
    for done, outcome in enumerate(_outcomes(survey, mine, given)):
        found[outcome.model] = outcome
        if outcome.report is None:
            LOG.warning("%s has no report: %s", outcome.model, clean(outcome.said))
        progress("models", done + 1, len(mine))
    return [found[model] for model in mine]


def _refuse_one_name(models: Sequence[str]) -> None:
    """Raise UsageError where a model is listed twice, or the reports of two would have one name on some disk."""
    taken: dict[str, str] = {}
    for model in models:
        other = taken.get(_slug(model).casefold())
        if other == model:
            raise UsageError(f"{model} is listed twice.", "Leave it out once.")
        if other is not None:
            raise UsageError(f"The reports of {other} and {model} would have one name.", "Leave out one of them.")
        taken[_slug(model).casefold()] = model


def _files(folder: Path, more: Mapping[str, Any], given: Mapping[str, Any]) -> UnitFiles:
    """Where it is noted which models are done: under a name of the options, what is read, analyzers' code, versions."""
    asked = {name: str(value) for name, value in more.items() if name not in (*OUTER, *KeptRequest.__annotations__)}
    read = [str(part) for name in READ for part in _listed(given[name])]
    adapted = given["adapter"] is not None
    chosen, _ = reading.chosen(
        reading.settings(given), given["analyzers"], given["select"], given["show"], adapted=adapted
    )
    code = [code_of(one).hex() for one in chosen]
    facts = {"to": str(folder.resolve()), "options": asked, "versions": versions(), "code": code}
    hashes = {str(file): sha256(file) for path in read for file in _files_in(with_home(path))}
    rows = {path: texts.read(path, offline=given["offline"]).text for path in read if dataset_rows(path)}
    key = key_of(facts | {"read": hashes | rows})
    return UnitFiles(store_of(work_root(given["work"])), key, ".done", "models.txt")


def _listed(value: Any) -> Sequence[Any]:
    """Several values, one, or none, as a sequence."""
    return value if isinstance(value, list | tuple) else [] if value is None else [value]


def _outcomes(survey: Survey, models: Sequence[str], given: Mapping[str, Any]) -> Iterator[ModelOutcome]:
    if given["engine"] == "local" and given["jobs"] == 1:
        yield from (_told(tried(survey.outcome, model)) for model in models)
        return
    with engine(given["engine"], **resources(given)) as workers:
        yield from map(_told, completed(workers, partial(Survey.outcome, survey), models))


def _told(done: Done[str, ModelOutcome]) -> ModelOutcome:
    return done.value or ModelOutcome(done.unit, None, done.reason or "it has no report")


def _stamp(model: str, given: Mapping[str, Any]) -> str:
    """What changes where a model's files do: on a hub its commit. Raises ModelError where there is no such model."""
    commit = commit_of(model, given.get("revision"), offline=given.get("offline", False))
    if commit is not None:
        return commit
    found = [(str(file), file.stat()) for file in _files_in(with_home(model))]
    return key_of({"files": [(name, one.st_size, one.st_mtime_ns) for name, one in found]}) if found else ""


def _files_in(path: Path) -> list[Path]:
    """The files of a folder and of those in it; a file itself; none where there is neither."""
    return [file for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()]


def _slug(model: str) -> str:
    """The model's name as a file is called."""
    return re.sub(r"[^A-Za-z0-9.@_-]+", "-", model).strip("-.") or "model"
