"""Which measures of a series of checkpoints are shown, and in which order."""

from __future__ import annotations

import math

from attnlens.records import Experiment
from attnlens.registry import info_of
from attnlens.shapes import by_turns


def heads_of(experiment: Experiment) -> int:
    """How many heads are followed."""
    return len({(found.layer, found.head) for found in experiment.trajectories})


def asked_for(name: str) -> bool:
    """Whether a measure is among those that a series of checkpoints is about."""
    return _place(name) < math.inf


def measures_of(experiment: Experiment) -> list[str]:
    """The measures of a series in the order in which they are shown: what was asked first, then by turns of sources."""
    names = [name for name, curve in experiment.curves.items() if curve.null_of is None]
    asked = sorted(filter(asked_for, names), key=_place)
    return [*asked, *by_turns(name for name in names if name not in asked)]


def told_of(experiment: Experiment) -> list[str]:
    """Those of the measures that change from one checkpoint to the next."""
    return [name for name in measures_of(experiment) if len(set(experiment.curves[name].median)) > 1]


def _place(name: str) -> float:
    """Where it stands, the loss, which is no measure of heads, first; ∞ for what a series is not about."""
    return 0 if name == "loss" else info_of(name).series or math.inf
