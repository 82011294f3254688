"""Which measures of a series of checkpoints are shown, and in which order."""

from __future__ import annotations

from attnlens.records import Experiment
from attnlens.shapes import by_turns

NULL = ": null"
"""What the name of a measure's null curve ends in."""
SELECTION = ("decided", "svm_cosine", "efficiency_q05", "efficiency")
ASKED = (
    "loss",
    *SELECTION,
    *(f"projected_{name}" for name in SELECTION[1:]),
    "symmetry",
    "effective_rank",
    "entropy",
)
"""What a series of checkpoints is about, by source or by name; these measures stand before the others."""


def heads_of(experiment: Experiment) -> int:
    """How many heads are followed."""
    return len({(found.layer, found.head) for found in experiment.trajectories})


def asked_for(name: str) -> bool:
    """Whether a measure is among those that a series of checkpoints is about."""
    return _rank(name) < len(ASKED)


def measures_of(experiment: Experiment) -> list[str]:
    """The measures of a series in the order in which they are shown: what was asked first, then by turns of sources."""
    names = [name for name in experiment.curves if not name.endswith(NULL)]
    asked = sorted(filter(asked_for, names), key=_rank)
    return [*asked, *by_turns(name for name in names if name not in asked)]


def told_of(experiment: Experiment) -> list[str]:
    """Those of the measures that change from one checkpoint to the next."""
    return [name for name in measures_of(experiment) if len(set(experiment.curves[name].median)) > 1]


def _rank(name: str) -> int:
    parts = {name.partition(".")[0], name.rpartition(".")[2]}
    return next((place for place, word in enumerate(ASKED) if word in parts), len(ASKED))
