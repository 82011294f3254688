"""Names the work of a series of checkpoints, of which each is a unit, and puts its report together from the units."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from attnlens.engines.readers import OTHERS, EngineUnits, KeptUnits, shard_of
from attnlens.errors import ModelError
from attnlens.files import sha256
from attnlens.models.locate import Location
from attnlens.records import Coverage, File, Head, Report, ShardPart, Skipped
from attnlens.registry import Analyzer, Gathering
from attnlens.run.fingerprint import code_of
from attnlens.run.progress import INTERRUPTED
from attnlens.run.provenance import report_of
from attnlens.run.training.trajectories import CheckpointReading, training
from attnlens.texts import Content, Cut
from attnlens.unit_files import UnitFiles, key_of, refused, store_of, work_root

if TYPE_CHECKING:
    from attnlens.run.training.series import Series

SUFFIX = ".checkpoint"
BESIDE = ("*.json", "*.txt", "*.model", "*.py", "*.jinja")
"""What lies beside weights and determines with them what is read: configs, tokenizers, a model's own code."""


@dataclass(frozen=True)
class CheckpointUnit:
    """A checkpoint as a unit of work."""

    name: str
    """What tells it from the others: what a person calls it, and a hash of its files."""
    place: int
    """Its number in the series."""


class SeriesFrame(BaseModel):
    """What is known of a series before its checkpoints are read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: dict[str, str]
    """Of the program, torch and transformers."""
    options: dict[str, str]
    """What was asked for."""
    content: str
    """A hash of the texts, of the adapter, and of the analyzers' own code."""
    checkpoints: list[str]
    """Their names, in the order of the series."""
    digests: list[str]
    """A hash of each one's files."""

    @property
    def facts(self) -> dict[str, Any]:
        """All that determines what its units find."""
        return self.model_dump(mode="json")

    @property
    def key(self) -> str:
        """What names the run: a hash of these."""
        return key_of(self.facts)

    @property
    def sound(self) -> bool:
        """Whether each checkpoint has its hash: one that is read from a file may lie."""
        return len(self.checkpoints) == len(self.digests) > 0

    @property
    def units(self) -> list[CheckpointUnit]:
        """The checkpoints, in their order."""
        named = zip(self.checkpoints, self.digests, strict=True)
        return [CheckpointUnit(f"{name} {digest}", place) for place, (name, digest) in enumerate(named)]


def digest_of(place: Location) -> str:
    """A hash of a checkpoint's weights and of what lies beside them."""
    beside = (path for pattern in BESIDE for path in place.folder.glob(pattern))
    files = sorted({*place.weights, *beside} if place.form != "gguf" else place.weights)
    return key_of({path.name: sha256(path) for path in files if path.is_file()})


def packed(reading: CheckpointReading) -> bytes:
    """What the file of a checkpoint holds: its reading, with all digits, of which a report's own JSON has nine."""
    return json.dumps(reading.model_dump()).encode()


def unpacked(content: bytes, where: str) -> CheckpointReading:
    """The reading that a file holds. Raises OutputError where it holds none."""
    try:
        return CheckpointReading.model_validate_json(content)
    except ValidationError:
        raise refused(where) from None


def content_hash(
    contents: Sequence[Content],
    cut: Cut,
    analyzers: Iterable[Analyzer | Gathering],
    adapter: str | PathLike[str] | None,
) -> str:
    """A hash of what is fed, of an adapter's files, and of the analyzers' own code."""
    named = [*cut.image, *cut.audio]
    folder = Path(adapter) if adapter is not None else None
    files = sorted(path for path in folder.glob("*") if path.is_file()) if folder is not None else []
    facts = {
        "texts": [(one.name, one.text) for one in contents],
        "fed": [sha256(path) for path in map(Path, named) if path.is_file()],
        "adapter": [str(adapter), *map(sha256, files)],
        "code": [code_of(one).hex() for one in analyzers],
    }
    return key_of(facts)


def kept_checkpoints(
    series: Series, frame: SeriesFrame, elsewhere: Callable[[str], None] | None = None
) -> KeptUnits[CheckpointUnit, CheckpointReading]:
    """Checkpoints that are read here and kept; or by other processes, which `elsewhere` is for."""
    given = series.given
    files = UnitFiles(store_of(work_root(given["work"])), frame.key, SUFFIX)
    how = files, packed, unpacked, shard_of(given), given["resume"], _whole
    if elsewhere is None:
        return KeptUnits(series.read_unit, *how)
    return EngineUnits(series.read_unit, *how, elsewhere=elsewhere, given=given)


def _whole(reading: CheckpointReading) -> bool:
    return not reading.lacking


def series_report(
    frame: SeriesFrame,
    found: Mapping[CheckpointUnit, CheckpointReading],
    timings: Mapping[str, float],
    missing: Mapping[CheckpointUnit, str] | None = None,
    part: ShardPart | None = None,
) -> Report:
    """The report of a series whose checkpoints were read so; those without a reading have a reason.

    Raises ModelError where none could be read, or two of them have not the same heads.
    """
    reasons = missing or {}
    done = [found[unit] for unit in frame.units if unit in found]
    if not done:
        reason = next(reason for reason in reasons.values() if reason != OTHERS)
        raise ModelError(f"No checkpoint could be read: {reason}.", "Run it again; what is finished is kept.")
    for reading in done[1:]:
        refuse_other_heads(done[0], reading)
    late = [
        Skipped(site=frame.checkpoints[unit.place], reason=reasons.get(unit, INTERRUPTED))
        for unit in frame.units
        if unit not in found
    ]
    files = [
        File(name=f"{reading.name}/{file.name}", sha256=file.sha256)
        for reading in done
        for file in reading.report.model.files
    ]
    last = done[-1].report
    return report_of(
        "converge",
        model=last.model.model_copy(update={"files": files}),
        settings=last.settings,
        coverage=_coverage(done, late),
        experiments=[training(done)],
        timings=dict(timings),
        part=part,
    )


def _coverage(done: Sequence[CheckpointReading], late: Sequence[Skipped]) -> Coverage:
    """Heads that were analysed at every checkpoint; what is missing at any; checkpoints that were not read."""
    found = [reading.report.coverage for reading in done]
    missing = [entry for reading in done for entry in _missing(reading, found)]
    distinct = [entry for number, entry in enumerate(missing) if entry not in missing[:number]]
    sources = dict.fromkeys(source for coverage in found for source in coverage.without)
    return Coverage(
        sites=found[-1].sites,
        heads=found[-1].heads,
        analysed=min(coverage.analysed for coverage in found),
        without={source: max(coverage.without.get(source, 0) for coverage in found) for source in sources},
        skipped=[*distinct, *late],
    )


def _missing(reading: CheckpointReading, every: Sequence[Coverage]) -> Iterator[Skipped]:
    """What one checkpoint lacks; what others don't lack names it."""
    for entry in reading.report.coverage.skipped:
        everywhere = all(entry in coverage.skipped for coverage in every)
        reason = entry.reason if everywhere else f"in {reading.name}, {entry.reason}"
        yield entry.model_copy(update={"reason": reason})


def refuse_other_heads(first: CheckpointReading, other: CheckpointReading) -> None:
    """Raise ModelError where two checkpoints don't have the same heads, which a config need not tell."""
    own, its = (_heads(reading.report.heads) for reading in (first, other))
    if own != its:
        raise ModelError(
            f"The checkpoints are of different shapes: {first.name} has {len(own)} heads, {other.name} has {len(its)}.",
            "Give checkpoints of one model.",
        )


def _heads(heads: Sequence[Head]) -> set[tuple[int, int, str]]:
    return {(head.layer, head.head, head.part) for head in heads}
