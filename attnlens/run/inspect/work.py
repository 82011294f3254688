"""Reads the units of an inspection here or elsewhere, and keeps what is finished until the report is written."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from attnlens import requests
from attnlens.engines import Done, completed, engine, tried
from attnlens.errors import ModelError, OutputError, UsageError
from attnlens.records import ShardPart
from attnlens.requests import InspectRequest
from attnlens.requests.work_options import WorkRequest
from attnlens.run.inspect.assembly import Frame
from attnlens.run.inspect.packing import packed, unpacked
from attnlens.run.inspect.sink import Handed
from attnlens.run.inspect.units import WorkUnit
from attnlens.unit_files import RUN, Folder, UnitFiles, store_of, work_root

Calls = Sequence[Handed]
SUFFIX = ".unit"
UNSEEN = "its file is not here: workers and this process need one folder for --work"
"""Why a unit that a cluster read has no value."""
OTHERS = "it is read by another shard"
"""Why a shard's report lacks what it was not to read."""


@dataclass
class UnitReader:
    """Reads units in this process, one after the other, and keeps nothing."""

    read: Callable[[WorkUnit], Calls]
    """Reads one unit."""
    lacking: bool = field(default=False, init=False)
    """Whether a unit failed: what is finished stays then for the next try."""

    def units(self, frame: Frame) -> list[WorkUnit]:
        """The units that this run reads."""
        return frame.units

    def through(self, frame: Frame) -> Iterator[Done[WorkUnit, Calls]]:
        """What came of each unit; one that fails is tried once more."""
        for unit in self.units(frame):
            yield tried(self.finished, unit)

    def finished(self, unit: WorkUnit) -> Calls:
        """What a unit found."""
        return self.read(unit)

    def part(self, _frame: Frame) -> ShardPart | None:
        """What lets reports of shards be joined; None where all was read."""
        return None

    def clear(self, _frame: Frame) -> None:
        """Remove what is kept: nothing."""


@dataclass
class KeptUnits(UnitReader):
    """The same with finished units in files, from which it goes on; of one shard, where one was asked for."""

    files: UnitFiles
    shard: tuple[int, int] | None = None
    resume: bool = True

    def units(self, frame: Frame) -> list[WorkUnit]:
        """All, or every N-th from the I-th on."""
        return frame.units if self.shard is None else frame.units[self.shard[0] - 1 :: self.shard[1]]

    def through(self, frame: Frame) -> Iterator[Done[WorkUnit, Calls]]:
        """What came of each unit."""
        self.files.describe(frame.model_dump_json().encode())
        yield from super().through(frame)

    def finished(self, unit: WorkUnit) -> Calls:
        """What a unit found: from its file where there is one, else read and written."""
        calls = self.known(unit)
        if calls is None:
            calls = self.read(unit)
            self.keep(unit, calls)
        return calls

    def known(self, unit: WorkUnit) -> Calls | None:
        """What an earlier run found; None where it did not finish the unit, or is not to be gone on from."""
        return self.kept(unit) if self.resume else None

    def kept(self, unit: WorkUnit) -> Calls | None:
        """What the file of a unit holds; None where there is none."""
        content = self.files.read(unit.name)
        return None if content is None else unpacked(content, self.files.name(unit.name))

    def keep(self, unit: WorkUnit, calls: Calls) -> None:
        """Write what a unit found."""
        self.files.write(unit.name, packed(calls))

    def part(self, frame: Frame) -> ShardPart | None:
        """The finished units of the shard, as their files have them."""
        if self.shard is None:
            return None
        contents = {unit.name: self.files.read(unit.name) for unit in self.units(frame)}
        return ShardPart(
            run=self.files.run,
            index=self.shard[0],
            count=self.shard[1],
            frame=frame.model_dump_json(),
            units={name: base64.b64encode(content).decode() for name, content in contents.items() if content},
        )

    def clear(self, frame: Frame) -> None:
        """Remove what is kept, when the report is written; a shard's units stay until they are merged."""
        if self.shard is None and not self.lacking:
            self.files.clear([unit.name for unit in frame.units])


@dataclass
class EngineUnits(KeptUnits):
    """The same with units read by other processes, which write their files; each reads as this one would."""

    job: Job = field(kw_only=True)

    def through(self, frame: Frame) -> Iterator[Done[WorkUnit, Calls]]:
        """What came of each unit as it is done."""
        self.files.describe(frame.model_dump_json().encode())
        waiting = {}
        for unit in self.units(frame):
            calls = self.known(unit)
            if calls is None:
                waiting[unit.name] = unit
            else:
                yield Done(unit, calls, None)
        if not waiting:
            return
        with engine(self.job.given["engine"], **resources(self.job.given)) as workers:
            for done in completed(workers, partial(read_elsewhere, self.job), list(waiting)):
                yield self._told(waiting[done.unit], done)

    def _told(self, unit: WorkUnit, done: Done[str, None]) -> Done[WorkUnit, Calls]:
        """What came of a unit, of which its worker says that it is done."""
        if done.reason is not None:
            return Done(unit, None, done.reason, done.error)
        calls = self.kept(unit)
        if calls is not None:
            return Done(unit, calls, None)
        if self.job.given["engine"] != "local":
            return Done(unit, None, UNSEEN)
        return tried(self.read, unit)  # another run of the same work has cleared it


def resources(given: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine is told, by what was asked for: processes here share the cores."""
    cores = os.cpu_count() or 1
    threads = max(1, cores // given["jobs"]) if given["engine"] == "local" else 1
    root = work_root(given["work"])
    if given["engine"] == "slurm" and "://" in root:
        raise UsageError(
            "Slurm's jobs write into a folder, and --work names an address.", "Name a folder they all see."
        )
    folder = Path(root) / "slurm" if given["engine"] == "slurm" else None
    on_gpu = given["device"].startswith("cuda") or (given["device"] == "auto" and torch.cuda.is_available())
    more = {"address": given["address"], "folder": folder, "threads": threads, "gpus": int(on_gpu)}
    return {"jobs": given["jobs"], **more}


@dataclass(frozen=True)
class Job:
    """What another process needs to read units of a run: the words of the call, and the run's name."""

    model: str | os.PathLike[str]
    given: Mapping[str, Any]
    """The options, checked."""
    run: str
    root: str
    """Where units are kept."""


_opened: dict[str, tuple[Any, Frame]] = {}
"""In another process: the inspection of the run that it reads units of."""


def read_elsewhere(job: Job, name: str) -> None:
    """In another process: read the unit of that name, and write its file.

    Raises ModelError where this process finds another model, text or program than the one that asked.
    """
    from attnlens.run.inspect.pipeline import opened  # a worker begins here, and the pipeline comes here too

    if job.run not in _opened:
        _opened.clear()
        _opened[job.run] = opened(job.model, job.given)
    inspection, frame = _opened[job.run]
    if frame.key != job.run:
        raise ModelError(
            f"A worker finds other facts than the run that it works for: {differing(frame, job)}.",
            "Give all of them the same files, texts and versions.",
        )
    files = UnitFiles(store_of(job.root), job.run, SUFFIX)
    kept = KeptUnits(inspection.read_unit, files, resume=job.given["resume"])
    unit = next(unit for unit in frame.units if unit.name == name)
    kept.finished(unit)


def differing(frame: Frame, job: Job) -> str:
    """The first field in which a worker's run is another than the one that asked for it."""
    content = store_of(job.root).inside(job.run).read(RUN)
    try:
        asked = None if content is None else Frame.model_validate_json(content)
    except ValidationError:
        asked = None
    return "its torch" if asked is None else first_difference(asked, frame) or "its torch"


def first_difference(one: Frame, other: Frame) -> str | None:
    """The first field in which two runs differ, with both values; None where they are the same."""
    ours, theirs = (
        frame.model_dump(mode="json", exclude={"identity_error", "skipped", "seen"}) for frame in (one, other)
    )
    for facts in (ours, theirs):
        facts["model"].pop("id")  # which is not what tells runs apart
    contents = [facts.pop("content") for facts in (ours, theirs)]
    other_content = "the config, what is fed or an analyzer's code is another" if len({*contents}) > 1 else None
    found = _difference(ours, theirs, "") or other_content
    ids = one.model.id, other.model.id
    if found is not None and found.startswith("model.") and ids[0] != ids[1]:
        return f"model.id is {ids[0]} in one and {ids[1]} in the other, and {found}"
    return found


def _difference(one: Any, other: Any, where: str) -> str | None:
    if isinstance(one, dict) and isinstance(other, dict):
        inner = (_difference(one.get(name), other.get(name), f"{where}.{name}") for name in {**one, **other})
        return next((found for found in inner if found is not None), None)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return _difference(dict(enumerate(one)), dict(enumerate(other)), where)
    if one == other:
        return None
    said = [str(value)[:60] for value in (one, other)]
    return f"{where.removeprefix('.')} is {said[0]} in one and {said[1]} in the other"


def reader_of(given: Mapping[str, Any], frame: Frame, read: Callable[[WorkUnit], Calls], model: object) -> UnitReader:
    """How the units of a run are read, by what was asked for.

    Raises UsageError for a model in memory whose work is to be kept or read elsewhere: no file says which it is.
    """
    if not isinstance(model, str | os.PathLike):
        asked = [
            name
            for name in requests.options(WorkRequest)
            if given[name] != requests.options(InspectRequest)[name].default
        ]
        if asked:
            raise UsageError(
                f"The model is in memory, where no other process finds it, so that {asked[0]} would be ignored.",
                "Give its name or folder, or leave the option out.",
            )
        return UnitReader(read)
    if given["address"] is not None and given["engine"] != "ray":
        raise UsageError("--address is that of a Ray cluster.", "Leave it out, or add --engine ray.")
    here = kept_units(given, frame, read)
    if not isinstance(here, KeptUnits):
        if given["shard"] is not None or given["engine"] != "local" or given["jobs"] > 1:
            raise OutputError("The user's cache can't be written, where parts of a run are kept.", "Add --work DIR.")
        return here
    if (given["engine"] != "local" or given["jobs"] > 1) and "-" in map(str, given["text"]):
        raise UsageError("A text from stdin can't be read by several processes.", "Write it to a file.")
    root, files = work_root(given["work"]), here.files
    index, _, count = (given["shard"] or "").partition("/")
    shard = (int(index), int(count)) if given["shard"] is not None else None
    if given["engine"] == "local" and given["jobs"] == 1:
        return KeptUnits(read, files, shard, given["resume"])
    return EngineUnits(read, files, shard, given["resume"], job=Job(model, dict(given), frame.key, root))


def kept_units(given: Mapping[str, Any], frame: Frame, read: Callable[[WorkUnit], Calls]) -> UnitReader:
    """Units that are read here one after the other, and kept where that was asked for or the cache can be written."""
    root = work_root(given["work"])
    if given["work"] is None and not _can_keep(root):
        return UnitReader(read)
    return KeptUnits(read, UnitFiles(store_of(root), frame.key, SUFFIX), resume=given["resume"])


def _can_keep(root: str) -> bool:
    """Whether the user's cache can be written; where it can't, nothing is kept, and nothing else is lost."""
    try:
        Folder(Path(root)).make()
    except OutputError:
        return False
    return os.access(root, os.W_OK)
