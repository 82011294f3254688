"""Says what reading a model's weights from its files will take, from two layers that are read for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from attnlens import weights
from attnlens.errors import UsageError
from attnlens.run.inspect.pipeline import opened
from attnlens.run.provenance import peak_memory

GIB = 2**30


@dataclass(frozen=True)
class ReadingCost:
    """What a run will take."""

    sites: int
    heads: int
    units: int
    bytes: int
    """To read of the weight files."""
    stored: int
    """Bytes of these files."""
    memory: int
    """Largest resident memory while two layers were read, in bytes; that of the whole run is about the same."""
    seconds: float
    """Of reading and analysing, on this machine, one unit after the other."""
    jobs: int
    """Units that were asked to be read at once."""

    def lines(self) -> list[str]:
        """What it says, a sentence each."""
        at_once = min(self.jobs, self.units)
        shared = f"; {self.seconds / at_once:.0f} s by {at_once} jobs, if each is as fast" if at_once > 1 else ""
        return [
            f"{self.sites} sites, {self.heads} heads, {self.units} units of work.",
            f"To read: {_size(self.bytes)} of {_size(self.stored)}.",
            f"Memory: about {_size(self.memory)}, as two layers took.",
            f"Time: about {self.seconds:.0f} s one after the other, by two layers that were read{shared}.",
        ]


def _size(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.2f} MiB"


def estimated(model: str | PathLike[str], given: Mapping[str, Any]) -> ReadingCost:
    """What `inspect --source weights --from-files` of that model will take; two of its layers are read.

    Raises UsageError where texts are to be read, and what `inspect` raises for a model that can't be read so.
    """
    if given.get("source") != "weights":
        raise UsageError("--dry-run tells what reading weights from files takes.", "Add --source weights.")
    if given.get("device_map") is not None:
        raise UsageError("--dry-run tells what reading weights from files takes.", "Leave out --device-map.")
    inspection, frame = opened(model, {**given, "from_files": True})
    deferred = inspection.loaded.deferred
    if deferred is None:
        raise UsageError("The model is in memory.", "Name its folder.")
    needed: dict[str, None] = {}
    for found in inspection.reached:
        wanted = weights.used_weights(inspection.loaded.model, found, found.layout)
        needed |= dict.fromkeys(deferred.needed(found.module, wanted))
    start = time.perf_counter()
    inspection.read_unit(frame.units[0])
    first = time.perf_counter() - start
    start = time.perf_counter()
    inspection.read_unit(frame.units[-1])  # the nulls are drawn by now, as for all but the first
    other = time.perf_counter() - start
    return ReadingCost(
        sites=len(frame.sites),
        heads=sum(map(len, frame.key_heads)),
        units=len(frame.units),
        bytes=deferred.files.size(needed),
        stored=sum(file.bytes for file in frame.model.files_in_parts),
        memory=peak_memory(),
        seconds=first + other * (len(frame.units) - 1),
        jobs=given.get("jobs", 1),
    )
