"""The names of a series' units of work, and its report put together from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path

from attnlens.errors import ModelError
from attnlens.files import sha256
from attnlens.models.locate import Location
from attnlens.records import Coverage, File, Head, Report, Skipped
from attnlens.registry import Analyzer, Gathering
from attnlens.run.fingerprint import code_of
from attnlens.run.progress import INTERRUPTED
from attnlens.run.provenance import report_of
from attnlens.run.training.trajectories import CheckpointReading, training
from attnlens.runs.work import key_of
from attnlens.texts import Content, Cut

BESIDE = ("*.json", "*.txt", "*.model", "*.py", "*.jinja")
"""What lies beside weights and determines with them what is read: configs, tokenizers, a model's own code."""


def digest_of(place: Location) -> str:
    """A hash of a checkpoint's weights and of what lies beside them."""
    beside = (path for pattern in BESIDE for path in place.folder.glob(pattern))
    files = sorted({*place.weights, *beside} if place.form != "gguf" else place.weights)
    return key_of({path.name: sha256(path) for path in files if path.is_file()})


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


def series_report(
    names: Mapping[str, str],
    found: Mapping[str, CheckpointReading],
    timings: Mapping[str, float],
    missing: Mapping[str, str],
) -> Report:
    """Return the report of a series whose units found these readings; the others have a reason, or none yet.

    `names` are those of the checkpoints by unit. Raises ModelError if two of them have not the same heads.
    """
    done = list(found.values())
    for reading in done[1:]:
        refuse_other_heads(done[0], reading)
    late = [
        Skipped(site=name, reason=missing.get(unit, INTERRUPTED)) for unit, name in names.items() if unit not in found
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
