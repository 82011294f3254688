"""Reads units of work here or elsewhere, and keeps what is finished until the report is written."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import ValidationError

from attnlens.engines.choice import check_engine, engine
from attnlens.engines.completion import Done, completed, tried
from attnlens.engines.local_processes import threads_each
from attnlens.errors import AttnlensError, OutputError, UsageError
from attnlens.records import ShardPart
from attnlens.unit_files import OTHER_WORK, Folder, UnitFiles, store_of, work_root
from attnlens.wording import clean

LOG = logging.getLogger("attnlens")
OWN_MEMORY = "memory:"
"""How addresses begin of what fsspec keeps in one process."""
UNSEEN = "its file is not here: workers and this process need one folder for --work"
"""Why a unit that a cluster read has no value."""
OTHERS = "it is read by another shard"
"""Why a shard's report lacks what it was not to read."""


class AnyUnit(Protocol):
    """A unit of work."""

    @property
    def name(self) -> str:
        """What tells it from the others of its run."""


Unit = TypeVar("Unit", bound=AnyUnit)
Unit_co = TypeVar("Unit_co", bound=AnyUnit, covariant=True)
Value = TypeVar("Value")


class Framed(Protocol[Unit_co]):
    """What is known of a run before its units are read."""

    @property
    def units(self) -> Sequence[Unit_co]:
        """All units, in the order in which the report takes them in."""

    def model_dump_json(self) -> str:
        """The same as text."""


@dataclass
class UnitReader(Generic[Unit, Value]):
    """Reads units in this process, one after the other, and keeps nothing."""

    read: Callable[[Unit], Value]
    """Reads one unit."""
    lacking: bool = field(default=False, init=False)
    """Whether a unit failed: what is finished stays then for the next try."""

    def units(self, frame: Framed[Unit]) -> Sequence[Unit]:
        """The units that this run reads."""
        return frame.units

    def through(self, frame: Framed[Unit]) -> Iterator[Done[Unit, Value]]:
        """What came of each unit; one that fails is tried once more."""
        for unit in self.units(frame):
            yield tried(self.finished, unit)

    def finished(self, unit: Unit) -> Value:
        """What a unit found."""
        return self.read(unit)

    def failed(self, _unit: Unit, _reason: str) -> None:
        """Take note of a unit that could not be read."""
        self.lacking = True

    def part(self, _frame: Framed[Unit]) -> ShardPart | None:
        """What lets reports of shards be joined; None where all was read."""
        return None

    def clear(self, _frame: Framed[Unit]) -> bool:
        """Remove what is kept, here nothing; whether all units were read."""
        return not self.lacking


@dataclass
class KeptUnits(UnitReader[Unit, Value]):
    """The same with finished units in files, from which it goes on; of one shard, where one was asked for."""

    files: UnitFiles
    pack: Callable[[Value], bytes]
    """What a unit's file holds of what it found."""
    unpack: Callable[[bytes, str], Value]
    """The other way, from the file of that name. Raises OutputError where it holds no such thing."""
    shard: tuple[int, int] | None = None
    resume: bool = True
    whole: Callable[[Value], bool] = lambda _: True
    """Whether what is kept of a unit is all that it could find; what is not is read again."""

    def units(self, frame: Framed[Unit]) -> Sequence[Unit]:
        """All, or every N-th from the I-th on."""
        return frame.units if self.shard is None else frame.units[self.shard[0] - 1 :: self.shard[1]]

    def through(self, frame: Framed[Unit]) -> Iterator[Done[Unit, Value]]:
        """What came of each unit."""
        self._describe(frame)
        yield from super().through(frame)
        self._describe(frame)  # another run may have cleared it, and units were written after

    def _describe(self, frame: Framed[Unit]) -> None:
        self.files.describe(frame.model_dump_json().encode(), partial(_is_frame, type(frame)))

    def finished(self, unit: Unit) -> Value:
        """What a unit found: from its file where there is one, else read and written."""
        value = self.known(unit)
        if value is None:
            value = self.read(unit)
            self.keep(unit, value)
        return value

    def known(self, unit: Unit) -> Value | None:
        """What an earlier run found; None where it did not finish the unit, or is not to be gone on from."""
        value = self.kept(unit) if self.resume else None
        return value if value is not None and self.whole(value) else None

    def kept(self, unit: Unit) -> Value | None:
        """What the file of a unit holds; None where there is none."""
        content = self.files.read(unit.name)
        return None if content is None else self.unpack(content, self.files.where(unit.name))

    def keep(self, unit: Unit, value: Value) -> None:
        """Write what a unit found."""
        self.files.write(unit.name, self.pack(value))

    def failed(self, unit: Unit, reason: str) -> None:
        """Note it beside the finished units, for `merge`."""
        super().failed(unit, reason)
        self.files.fail(unit.name, reason)

    def part(self, frame: Framed[Unit]) -> ShardPart | None:
        """The finished units of the shard, as their files have them, and why others could not be read."""
        if self.shard is None:
            return None
        contents = {unit.name: self.files.file(unit.name) for unit in self.units(frame)}
        reasons = {name: self.files.failure(name) for name, content in contents.items() if not content}
        return ShardPart(
            run=self.files.run,
            index=self.shard[0],
            count=self.shard[1],
            frame=frame.model_dump_json(),
            units={name: base64.b64encode(content).decode() for name, content in contents.items() if content},
            failed={name: reason for name, reason in reasons.items() if reason is not None},
        )

    def clear(self, frame: Framed[Unit]) -> bool:
        """Remove what is kept, when the report is written; a shard's units stay until they are merged."""
        if self.shard is None and not self.lacking:
            self.files.clear([unit.name for unit in frame.units])
        return super().clear(frame)


def _is_frame(kind: Any, content: bytes) -> bool:
    try:
        kind.model_validate_json(content)
    except ValidationError:
        return False
    return True


@dataclass
class EngineUnits(KeptUnits[Unit, Value]):
    """The same with units read by other processes, which write their files; each reads as this one would."""

    elsewhere: Callable[[str], None] = field(kw_only=True)
    """In another process: reads the unit of that name, and writes its file."""
    given: Mapping[str, Any] = field(kw_only=True)
    """The options, checked."""

    def through(self, frame: Framed[Unit]) -> Iterator[Done[Unit, Value]]:
        """What came of each unit as it is done."""
        self._describe(frame)
        waiting = {}
        for unit in self.units(frame):
            value = self.known(unit)
            if value is None:
                waiting[unit.name] = unit
            else:
                yield Done(unit, value, None)
        if not waiting:
            return
        with engine(self.given["engine"], **resources(self.given)) as workers:
            others = len(waiting) < len(self.units(frame))
            for done in completed(workers, self.elsewhere, list(waiting), others=others):
                yield self._told(waiting[done.unit], done)
        self._describe(frame)

    def _told(self, unit: Unit, done: Done[str, None]) -> Done[Unit, Value]:
        """What came of a unit, of which its worker says that it is done."""
        if done.reason is not None:
            return Done(unit, None, done.reason, done.error)
        value = self.kept(unit)
        if value is not None:
            return Done(unit, value, None)
        if self.given["engine"] != "local":
            return Done(unit, None, UNSEEN)
        return tried(self.read, unit)  # another run of the same work has cleared it


def read_units(
    reader: UnitReader[Unit, Value],
    frame: Framed[Unit],
    found: dict[Unit, Value],
    missing: dict[Unit, str],
    tell: Callable[[Unit], None],
) -> None:
    """Enter what each unit found, or why it failed; an error of ours is of what all units share, and ends the run.

    Any other is the unit's own, which is logged, unless none could be read.
    """
    first: BaseException | None = None
    for done in reader.through(frame):
        if isinstance(done.error, AttnlensError):
            raise done.error
        if done.value is None:
            first = first or done.error
            missing[done.unit] = str(done.reason)
            reader.failed(done.unit, missing[done.unit])
            LOG.warning("%s failed: %s", done.unit.name, clean(missing[done.unit]))
        else:
            found[done.unit] = done.value
        tell(done.unit)
    if first is not None and not found:
        raise first


def resources(given: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine is told, by what was asked for: processes here share the cores."""
    import torch  # late, as engines do without it

    threads = threads_each(given["jobs"]) if given["engine"] == "local" else 1
    root = work_root(given["work"])
    if given["engine"] == "slurm" and "://" in root:
        raise UsageError(
            "Slurm's jobs write into a folder, and --work names an address.", "Name a folder they all see."
        )
    folder = Path(root) / "slurm" if given["engine"] == "slurm" else None
    on_gpu = given["device"].startswith("cuda") or (given["device"] == "auto" and torch.cuda.is_available())
    more = {"address": given["address"], "folder": folder, "threads": threads, "gpus": int(on_gpu)}
    return {"jobs": given["jobs"], **more}


def check_work(given: Mapping[str, Any]) -> None:
    """Before the work: raise UsageError where what is asked makes no sense, OutputError where nothing can be kept."""
    check_engine(given["engine"], given["address"])
    apart = given["shard"] is not None or is_elsewhere(given)
    if apart and not can_keep(given["work"]):
        raise OutputError("The user's cache can't be written, where parts of a run are kept.", "Add --work DIR.")
    if is_elsewhere(given):
        refuse_stdin(given)
        if work_root(given["work"]).startswith(OWN_MEMORY):
            raise UsageError("Other processes don't see what lies in this one's memory.", OTHER_WORK)
    if given["work"] is not None:
        store_of(work_root(given["work"])).check()


def refuse_stdin(given: Mapping[str, Any]) -> None:
    """Raise UsageError where a text comes from stdin."""
    if "-" in map(str, (*given["text"], *given.get("calibration", ()), given.get("prompts"))):
        raise UsageError("A text from stdin can't be read by several processes.", "Write it to a file.")


def is_elsewhere(given: Mapping[str, Any]) -> bool:
    """Whether other processes read the units."""
    return bool(given["engine"] != "local" or given["jobs"] > 1)


def shard_of(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Which of how many shards is asked for."""
    if given["shard"] is None:
        return None
    index, _, count = given["shard"].partition("/")
    return int(index), int(count)


def can_keep(work: str | os.PathLike[str] | None) -> bool:
    """Whether units are kept: where that was asked for, or the user's cache can be written; no more is lost else."""
    root = work_root(work)
    try:
        if work is None:
            Folder(Path(root)).make()
    except OutputError:
        return False
    return work is not None or os.access(root, os.W_OK)
