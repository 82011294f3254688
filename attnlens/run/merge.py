"""Joins the parts of a sharded run of inspect, converge or swap-kernel: the report has the bytes of one run's."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from attnlens.arguments import public
from attnlens.errors import UsageError
from attnlens.records import Report, ShardPart, read_report
from attnlens.run.inspect.assembly import Frame, assembled
from attnlens.run.inspect.packing import unpacked
from attnlens.run.inspect.sink import Handed
from attnlens.run.inspect.units import WorkUnit
from attnlens.run.inspect.work import SUFFIX, difference, first_difference
from attnlens.run.swap.units import readings
from attnlens.run.swap.units.readings import KernelUnit, SwapFrame, swap_report
from attnlens.run.training import kept
from attnlens.run.training.kept import CheckpointUnit, SeriesFrame, series_report
from attnlens.unit_files import FAILED, RUN, Store, UnitFiles, store_of, unsealed

AnyFrame = Frame | SeriesFrame | SwapFrame
NamedUnit = TypeVar("NamedUnit", WorkUnit, CheckpointUnit, KernelUnit)
SAY_ONE = "Give folders and reports of one run alone; --work DIR holds one folder for each run."
SAY_SHARDS = "Give the folders that --work named, or the JSON reports of all shards."


@dataclass(frozen=True)
class SharedKind:
    """A kind of run that can be shared out."""

    said: str
    """What a run of it is called."""
    frame: type[AnyFrame]
    """What describes a run."""
    mark: bytes
    """What stands in the JSON of that and of no other kind's."""
    suffix: str
    """How the names of units' files end."""
    unpack: Callable[[bytes, str], Any]
    """What a unit's file holds."""
    report: Callable[[Any, Mapping[Any, Any], Mapping[str, float], Mapping[Any, str]], Report]
    """The report, from what was found of units; those that are missing have a reason."""


def _inspected(
    frame: Frame, found: Mapping[WorkUnit, Sequence[Handed]], timings: Mapping[str, float], missing: Any
) -> Report:
    return assembled(frame, found, timings, missing=missing)[0]


KINDS = (
    SharedKind("a series of checkpoints", SeriesFrame, b'"checkpoints":', kept.SUFFIX, kept.unpacked, series_report),
    SharedKind("a run of swap-kernel", SwapFrame, b'"kernels":', readings.SUFFIX, readings.unpacked, swap_report),
    SharedKind("an inspection", Frame, b"", SUFFIX, unpacked, _inspected),
)
"""The last is what is none of the others."""


@dataclass
class FoundUnits:
    """What was found of one run, wherever it lay."""

    frame: AnyFrame | None = None
    where: str = ""
    """The place that first named the run."""
    units: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    """The finished units by name, and which file each is from."""
    failed: dict[str, str] = field(default_factory=dict)
    """The units that could not be read by name, and why."""
    shards: dict[int, int] = field(default_factory=dict)
    """The shards whose reports were given, by number, and of how many."""
    folders: list[tuple[Store, list[str]]] = field(default_factory=list)
    """The places in which finished units lie, and the names of all files of the run that may be there."""

    def add(self, frame: AnyFrame, where: str) -> None:
        """Take in one more place of the same run. Raises UsageError where it is of another, naming the field."""
        if self.frame is None:
            self.frame, self.where = frame, where
        elif self.frame.key != frame.key:
            found = _difference(self.frame, frame) or "a field of theirs"
            raise UsageError(f"{self.where} and {where} are of different runs: {found}.", SAY_ONE)

    def clear(self) -> None:
        """Remove the run's files from the folders: its report is written."""
        for store, names in self.folders:
            store.remove(names)


@public
def merge(*places: str) -> Report:
    """The report of a run whose units were read by several shards: the bytes of one run, timings apart.

    `places` are folders (or addresses of fsspec) that `work` named, and JSON reports of shards, in any order; one may
    be given twice. All of them stay as they are; the command removes the units of folders once it has written the
    report as JSON. A unit that its shard could not read has its reason, as in one run, and nothing is removed. Raises
    UsageError where places are of different models, settings or versions, naming the field, and where a unit is
    missing, naming it; OutputError where a unit's file is damaged, or that of another unit.
    """
    return merged(*places)[0]


def merged(*places: str) -> tuple[Report, Callable[[], None]]:
    """The report, and what is to be called when it is written: what the folders hold of it is not needed then."""
    if not places:
        raise UsageError("No shard is named.", SAY_SHARDS)
    parts = FoundUnits()
    for place in places:
        if place.endswith(".json"):
            _of_report(place, parts)
        else:
            _of_folder(place, parts)
    if parts.frame is None:
        raise UsageError(f"{places[0]} holds no run's finished units.", SAY_SHARDS)
    lacking = [name for name in parts.failed if name not in parts.units]
    return _joined(parts.frame, parts), (lambda: None) if lacking else parts.clear


def _joined(frame: AnyFrame, parts: FoundUnits) -> Report:
    missing = [unit.name for unit in frame.units if unit.name not in parts.units and unit.name not in parts.failed]
    if missing and any(RUN not in store.names() for store, names in parts.folders if RUN in names):
        raise UsageError(
            f"The units in {parts.where} were removed while they were read, as another run or merge wrote its report.",
            "Take that report.",
        )
    if missing:
        raise UsageError(_told(frame, parts, missing), "Run the shards that read them once more, then merge again.")
    if not parts.units:
        name, reason = next(iter(parts.failed.items()))
        raise UsageError(f"No unit could be read: {name}: {reason}.", "Run the shards once more, then merge again.")
    kind = _kind_of(frame)
    found = {unit: kind.unpack(*parts.units[unit.name]) for unit in frame.units if unit.name in parts.units}
    return kind.report(frame, found, {}, _reasons(frame.units, parts))


def _reasons(units: Sequence[NamedUnit], parts: FoundUnits) -> dict[NamedUnit, str]:
    """Why units could not be read, in the run's order."""
    return {unit: parts.failed[unit.name] for unit in units if unit.name not in parts.units}


def _kind_of(frame: AnyFrame) -> SharedKind:
    return next(kind for kind in KINDS if type(frame) is kind.frame)


def _difference(one: AnyFrame, other: AnyFrame) -> str | None:
    """The first field in which two runs differ."""
    if isinstance(one, Frame) and isinstance(other, Frame):
        return first_difference(one, other)
    if isinstance(one, Frame) or isinstance(other, Frame) or type(one) is not type(other):
        return f"one is {_kind_of(one).said}, the other {_kind_of(other).said}"
    return difference(one.facts, other.facts)


def _told(frame: AnyFrame, parts: FoundUnits, missing: Sequence[str]) -> str:
    """Which units are missing, and of which shards where that is known."""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    count = next(iter(parts.shards.values()), 0)
    lacking = (
        sorted({place % count + 1 for place, name in enumerate(unit.name for unit in frame.units) if name in missing})
        if count
        else []
    )
    of = f", of shard {', '.join(f'{number}/{count}' for number in lacking)}" if lacking else ""
    return f"{len(missing)} of {len(frame.units)} units are missing: {missing[0]}{more}{of}."


def _of_report(path: str, parts: FoundUnits) -> None:
    part = read_report(path).part
    if part is None:
        raise UsageError(f"{path} is no report of a shard.", SAY_SHARDS)
    frame = _frame(part.frame.encode(), path)
    if part.run != frame.key:
        raise UsageError(f"{path} is damaged: its run is not the one that it is named by.", "Run its shard once more.")
    parts.add(frame, path)
    parts.units |= _contents(part, frame.key, path)
    parts.failed |= part.failed
    parts.shards[part.index] = part.count


def _contents(part: ShardPart, run: str, path: str) -> dict[str, tuple[bytes, str]]:
    try:
        files = {name: base64.b64decode(content, validate=True) for name, content in part.units.items()}
    except (binascii.Error, ValueError):
        raise UsageError(f"{path} holds a unit that is no base64.", "Run its shard once more.") from None
    return _opened(files, run, {name: f"{path} ({name})" for name in files})


def _opened(files: Mapping[str, bytes], run: str, where: Mapping[str, str]) -> dict[str, tuple[bytes, str]]:
    """What units found, by their files. Raises OutputError where one is damaged, or another unit's."""
    return {name: (unsealed(run, name, content, where[name]), where[name]) for name, content in files.items()}


def _of_folder(root: str, parts: FoundUnits) -> None:
    place = store_of(root)
    names = place.names()
    if not names:
        raise UsageError(f"{root} is no folder with finished units.", SAY_SHARDS)
    runs = [place] if RUN in names else [place.inside(name) for name in names]
    for run in runs:
        content = run.read(RUN)
        if content is not None:
            frame = _frame(content, str(run))
            parts.add(frame, str(run))
            files = UnitFiles(run, frame.key, _kind_of(frame).suffix)
            parts.folders.append((run, files.files_of(unit.name for unit in frame.units)))
            parts.units |= _lying(run, frame)
            parts.failed |= {unit: reason.decode() for unit, (reason, _) in _lying(run, frame, FAILED).items()}
    parts.folders.append((place, []))  # which goes, too, where nothing else lies there


def _lying(run: Store, frame: AnyFrame, end: str = "") -> dict[str, tuple[bytes, str]]:
    """What the files of units hold in a run's folder, by unit; their names may have an `end`."""
    files = UnitFiles(run, frame.key, _kind_of(frame).suffix)
    there = set(run.names())
    named = {unit.name: files.name(unit.name) + end for unit in frame.units}
    contents = {unit: run.read(name) for unit, name in named.items() if name in there}
    found = {unit: content for unit, content in contents.items() if content is not None}
    return _opened(found, frame.key, {unit: f"{run}/{named[unit]} ({unit})" for unit in found})


def _frame(content: bytes, where: str) -> AnyFrame:
    kind = next(kind for kind in KINDS if kind.mark in content)
    try:
        frame = kind.frame.model_validate_json(content)
    except ValidationError as error:
        named = ".".join(map(str, error.errors()[0]["loc"])) or "what is in it"
        raise UsageError(
            f"{where} was written by another version, or damaged: {named} does not fit.", "Run its shards once more."
        ) from None
    if not frame.sound:
        raise UsageError(f"{where} is damaged: its units do not fit.", "Run its shards once more.")
    return frame
