"""The readings of a series as an experiment: trajectories head by head, medians and quartiles over heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from statistics import quantiles

from pydantic import BaseModel, ConfigDict

from attnlens.errors import ModelError
from attnlens.files import sha256
from attnlens.models.locate import Location
from attnlens.records import Coverage, Curve, Experiment, File, Head, Measure, Null, Report, Skipped, Trajectory
from attnlens.registry import Analyzer, Gathering
from attnlens.run.provenance import code_of, report_of
from attnlens.runs.progress import INTERRUPTED
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


QUESTION = "How do the heads change while the model is trained?"


class CheckpointReading(BaseModel):
    """What was read of one checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """As a person would call the checkpoint."""
    step: int | None
    """The training step that its name tells, None where it tells none."""
    report: Report
    """As `inspect` gives it."""
    loss: float | None
    """Nats per predicted token on the same text."""
    no_loss: str | None = None
    """Why there is none."""
    complete: bool = True
    """Whether every part of it could be read."""


def training(done: Sequence[CheckpointReading]) -> Experiment:
    """The readings as one experiment: trajectories head by head, and their medians and quartiles over heads."""
    by_step = all(reading.step is not None for reading in done)
    steps = [float(reading.step or 0) if by_step else float(n) for n, reading in enumerate(done)]
    heads = [{(head.layer, head.head): head for head in reading.report.heads} for reading in done]
    every = list(dict.fromkeys(name for reading in done for name in reading.report.measure_names()))
    curves, trajectories = dict[str, Curve](), list[Trajectory]()
    losses = [reading.loss for reading in done]
    if any(loss is not None for loss in losses):
        curves["loss"] = Curve(steps=steps, median=losses, quantity="nats per token")
    for name in every:
        columns = [{place: head.measures[name] for place, head in at.items() if name in head.measures} for at in heads]
        if _numeric(columns):
            nulls = [reading.report.summary.median_nulls.get(name) for reading in done]
            curves |= _curves(name, steps, columns, nulls)
            trajectories += _trajectories(name, columns)
    final = {name: curve.median[-1] for name, curve in curves.items() if curve.null_of is None}
    return Experiment(
        name="training",
        question=QUESTION,
        settings={"checkpoints": [reading.name for reading in done], "steps": [*steps]},
        final={"loss": None, **final},
        reasons={
            name: (done[-1].no_loss if name == "loss" else None) or "no head has a value at the last checkpoint"
            for name, value in {"loss": None, **final}.items()
            if value is None
        },
        axis="training step" if by_step else "checkpoint",
        curves=curves,
        trajectories=trajectories,
    )


HeadMeasures = dict[tuple[int, int], Measure]
"""One measure of every head at one checkpoint."""


def _numeric(columns: Sequence[HeadMeasures]) -> bool:
    """Whether any head has a number, and none has a category."""
    measures = [measure for column in columns for measure in column.values()]
    return any(measure.value is not None for measure in measures) and all(measure.label is None for measure in measures)


def _curves(
    name: str, steps: list[float], columns: Sequence[HeadMeasures], nulls: Sequence[Null | None]
) -> Iterator[tuple[str, Curve]]:
    """Median and quartiles over heads; and what the median reads by chance, where that is known, ± one sd."""
    values = [[measure.value for measure in column.values() if measure.value is not None] for column in columns]
    thirds = [_quartiles(present) for present in values]
    low, middle, high = (list(column) for column in zip(*thirds, strict=True))
    yield name, Curve(steps=steps, median=middle, low=low, high=high)
    if any(null is not None for null in nulls):
        chance = [
            (None,) * 3 if null is None else (null.mean - null.sd, null.mean, null.mean + null.sd) for null in nulls
        ]
        low, middle, high = (list(column) for column in zip(*chance, strict=True))
        yield f"{name}: null", Curve(steps=steps, median=middle, low=low, high=high, null_of=name)


def _quartiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    if not values:
        return None, None, None
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return low, middle, high


def _trajectories(name: str, columns: Sequence[HeadMeasures]) -> Iterator[Trajectory]:
    for layer, head in sorted({place for column in columns for place in column}):
        found = [column.get((layer, head)) for column in columns]
        values = [None if measure is None else measure.value for measure in found]
        errors = [None if measure is None else measure.se for measure in found]
        known = any(error is not None for error in errors)
        yield Trajectory(layer=layer, head=head, measure=name, values=values, se=errors if known else None)
