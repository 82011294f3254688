"""Whether experiments meet what was published, in words."""

from __future__ import annotations

from attnlens.records import Experiment, Report
from attnlens.sentences.reports import standing
from attnlens.wording import NO_VALUE, clean, counted, listed

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
