"""Names the work of an inspection, keeps its units, and reads them in other processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from attnlens.engines.readers import (
    EngineUnits,
    KeptUnits,
    UnitReader,
    can_keep,
    is_elsewhere,
    shard_of,
)
from attnlens.errors import ModelError
from attnlens.requests import InspectRequest
from attnlens.run.in_memory import refuse_work
from attnlens.run.inspect.assembly import Frame
from attnlens.run.inspect.packing import packed, unpacked
from attnlens.run.inspect.sink import Handed
from attnlens.run.inspect.units import WorkUnit
from attnlens.unit_files import RUN, UnitFiles, store_of, work_root

Calls = Sequence[Handed]
SUFFIX = ".unit"
InspectionReader = UnitReader[WorkUnit, Calls]


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
    kept = KeptUnits(inspection.read_unit, files, packed, unpacked, resume=job.given["resume"])
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
        facts["settings"].pop("notes")
    if one.from_files != other.from_files:
        return "the model was loaded in one and read from its files in the other, as --from-files does everywhere"
    contents = [facts.pop("content") for facts in (ours, theirs)]
    other_content = (
        "the config, some weights, what is fed or an analyzer's code is another" if len({*contents}) > 1 else None
    )
    found = difference(ours, theirs) or other_content
    ids = one.model.id, other.model.id
    if found is not None and ".stamp is " in found:
        found += ", the file's time of change: copy with times (cp -p)"
    if found is not None and found.startswith("model.") and ids[0] != ids[1]:
        return f"model.id is {ids[0]} in one and {ids[1]} in the other, and {found}"
    return found


def difference(one: Any, other: Any, where: str = "") -> str | None:
    """The first place at which two contents differ, with both values; None where they are the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        inner = (difference(one.get(name), other.get(name), f"{where}.{name}") for name in {**one, **other})
        return next((found for found in inner if found is not None), None)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return difference(dict(enumerate(one)), dict(enumerate(other)), where)
    if one == other:
        return None
    said = [str(value)[:60] for value in (one, other)]
    return f"{where.removeprefix('.')} is {said[0]} in one and {said[1]} in the other"


def reader_of(
    given: Mapping[str, Any], frame: Frame, read: Callable[[WorkUnit], Calls], model: object
) -> InspectionReader:
    """How the units of a run are read, by what was asked for.

    Raises UsageError for a model in memory whose work is to be kept or read elsewhere: no file says which it is.
    """
    if not isinstance(model, str | os.PathLike):
        refuse_work(given, InspectRequest)
        return UnitReader(read)
    here = kept_units(given, frame, read)
    if not isinstance(here, KeptUnits):
        return here
    here.shard = shard_of(given)
    if not is_elsewhere(given):
        return here
    # whether the model fits into memory is decided here, once for all processes
    job = Job(model, {**given, "from_files": frame.from_files}, frame.key, work_root(given["work"]))
    elsewhere = partial(read_elsewhere, job)
    return EngineUnits(read, here.files, packed, unpacked, here.shard, here.resume, elsewhere=elsewhere, given=given)


def kept_units(given: Mapping[str, Any], frame: Frame, read: Callable[[WorkUnit], Calls]) -> InspectionReader:
    """Units that are read here one after the other, and kept where that was asked for or the cache can be written."""
    if not can_keep(given["work"]):
        return UnitReader(read)
    files = UnitFiles(store_of(work_root(given["work"])), frame.key, SUFFIX)
    return KeptUnits(read, files, packed, unpacked, resume=given["resume"])
