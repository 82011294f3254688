"""The readings of a series as an experiment: trajectories head by head, medians and quartiles over heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import quantiles

from pydantic import BaseModel, ConfigDict

from attnlens.records import Curve, Experiment, Measure, Null, Report, Trajectory

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
