"""Words for experiments: whether they meet what was published, labels of curves, heads that are followed."""

from __future__ import annotations

import math

from attnlens.records import Experiment, Report
from attnlens.registry import info_of
from attnlens.sentences.reports import standing
from attnlens.shapes import by_turns
from attnlens.wording import NO_VALUE, clean, counted, listed


def worded(experiment: Experiment, name: str) -> str:
    """How a figure, a setting or a curve is written: its label, else its name, an identifier's with blanks."""
    return clean(experiment.labels.get(name) or (name.replace("_", " ") if name.isidentifier() else name))


def setting(experiment: Experiment, name: str) -> str:
    """A setting in words: `lr 0.1`, `d 2 4 10`, `accepted, d = 4: 0.2`."""
    words = worded(experiment, name)
    return f"{words}{':' * (' = ' in words)} {_value(experiment.settings[name])}"


def _value(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_value, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


PASS, FAIL = "pass", "FAIL"


def outcome(report: Report) -> tuple[str, bool]:
    """Whether the experiments meet what was published, or, where they read a model, how much of it was read."""
    return standing(report) if report.coverage.heads else (verdict(report), passed(report))


def verdict(report: Report) -> str:
    """`All 5 experiments meet what was published.`, or which miss it, and how many have nothing to meet."""
    judged = [experiment for experiment in report.experiments if experiment.passed is not None]
    failed = [clean(experiment.name) for experiment in judged if not experiment.passed]
    every = counted(len(report.experiments), "experiment")
    if not judged:
        return f"{every}; nothing published to compare with."
    some = f"{len(judged)} of {every} {'has' if len(judged) == 1 else 'have'} published figures to meet"
    partly = len(judged) < len(report.experiments)
    if failed:
        verb = "misses" if len(failed) == 1 else "miss"
        if partly:
            return f"{some}, and {len(failed)} of these {verb} them: {listed(failed)}."
        return f"{len(failed)} of {every} {verb} what was published: {listed(failed)}."
    if partly:
        return f"{some}, and {'meets' if len(judged) == 1 else 'meet'} them."
    if len(judged) == 1:
        return "The experiment meets what was published."
    return f"All {counted(len(judged), 'experiment')} meet what was published."


def passed(report: Report) -> bool:
    """Whether no experiment misses what was published."""
    return all(experiment.passed is not False for experiment in report.experiments)


def judgement(experiment: Experiment, figure: str) -> str:
    """`pass`, `FAIL`, or – where nothing was published."""
    met = experiment.meets(figure)
    return NO_VALUE if met is None else PASS if met else FAIL


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
