"""Compares a report with a baseline, and gives the one verdict behind table, exit code, JSON, JUnit and annotations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from attnlens.errors import UsageError
from attnlens.files import written
from attnlens.records import Baseline, BaselineMeasure, Check, Head, HeadId, Measure, Report
from attnlens.registry import info_of
from attnlens.rules.judging import breach, judged
from attnlens.rules.rule import Rule, Tolerance
from attnlens.wording import listed

SAME_TEXT = ("sequences", "tokens", "pack", "windows", "seed", "select", "source")
"""The settings that a report and its baseline must have in common."""


def baseline_of(report: Report) -> Baseline:
    """What the report's heads read, as a baseline. Raises UsageError where no head has a measure."""
    names = report.measure_names()
    if not names:
        raise UsageError("The report has no measures that a baseline could hold.", "Make one with attnlens inspect.")
    heads = [HeadId(**{name: getattr(head, name) for name in HeadId.model_fields}) for head in report.heads]
    measures = {}
    for name in names:
        column = [head.measures.get(name) for head in report.heads]
        values = [None if measure is None else measure.value for measure in column]
        errors = [None if measure is None else measure.se for measure in column]
        measures[name] = BaselineMeasure(values=values, errors=errors)
    return Baseline(model=report.model, settings=report.settings, heads=heads, measures=measures)


def refuse_other(report: Report, baseline: Baseline) -> None:
    """Raise UsageError, which names the field, unless both are of the same heads on the same text.

    Names and paths of models and texts do not count.
    """
    for field, ours, theirs in _fields(report, baseline):
        if ours != theirs:
            raise UsageError(
                f"The baseline is of another run: {field} is {written(theirs)} there, and {written(ours)} here.",
                "Check a report like the baseline's, or accept this one with --update-baseline.",
            )


def _fields(report: Report, baseline: Baseline) -> Iterator[tuple[str, Any, Any]]:
    """What both must have in common: its name, here, there."""
    for name in ("architecture", "parameters"):
        yield f"model.{name}", getattr(report.model, name), getattr(baseline.model, name)
    for name in ("text", "noise"):
        fed = [getattr(of.settings, name) for of in (report, baseline)]
        ours, theirs = (None if one is None else one.sha256 for one in fed)
        yield f"settings.{name}.sha256", ours, theirs
    for name in SAME_TEXT:
        yield f"settings.{name}", getattr(report.settings, name), getattr(baseline.settings, name)
    here, there = ([(head.site, head.head) for head in of.heads] for of in (report, baseline))
    yield "the number of heads", len(here), len(there)
    yield from (("a head", *pair) for pair in zip(here, there, strict=False))
    known = set(report.measure_names())
    missing = [name for name in baseline.measures if name not in known]
    yield "measures", listed(missing) + " missing" if missing else "", ""


def against(report: Report, baseline: Baseline, tolerance: Tolerance, file: str | None = None) -> list[Check]:
    """One check a measure: the heads that moved beyond the tolerance and beyond chance, or lost or gained a value.

    z = (now − then)/√(se² + se²), which takes both runs as independent: of the same windows, that errs to the side of
    silence (`compare` pairs them). p by the normal distribution; Benjamini–Hochberg over heads × measures. A value
    without a standard error moves for certain.
    """
    moves = {name: _moves(report, name, column) for name, column in baseline.measures.items()}
    tested = [move for found in moves.values() for move in found if move.p is not None]
    kept = rejected([move.p for move in tested if move.p is not None], tolerance.fdr)
    by_chance = {id(move) for move, real in zip(tested, kept, strict=True) if not real}
    bounds = {name: tolerance.of(info_of(name)) for name in moves}
    beyond = {
        name: [move for move in found if move.beyond(bounds[name]) and id(move) not in by_chance]
        for name, found in moves.items()
        if any(move.then is not None or move.now is not None for move in found)
    }
    return [_moved(name, found, len(moves[name]), bounds[name], file) for name, found in beyond.items()]


@dataclass(frozen=True)
class Move:
    """One measure of one head, then and now."""

    head: Head
    now: float | None
    then: float | None
    p: float | None
    """None where it has no standard error."""

    def beyond(self, tolerance: Tolerance) -> bool:
        """Whether it moved by more than both tolerances; a value that came or went did."""
        if self.now is None or self.then is None:
            return self.now is not self.then
        return abs(self.now - self.then) > max(tolerance.absolute or 0.0, tolerance.relative * abs(self.then))

    @property
    def size(self) -> float:
        """How far it moved, for the order."""
        return math.inf if self.now is None or self.then is None else abs(self.now - self.then)


def _moves(report: Report, name: str, column: BaselineMeasure) -> list[Move]:
    """Compare one measure of every head with the baseline's column."""
    moves = []
    for head, then, error in zip(report.heads, column.values, column.errors, strict=True):
        now, p = head.measures.get(name, Measure(value=None, reason="it was not measured")), None
        if now.value is not None and then is not None and now.se is not None and error is not None:
            spread, change = math.hypot(now.se, error), abs(now.value - then)
            if spread > 0 and math.isfinite(change / spread):  # which it is not of numbers near the largest
                p = math.erfc(change / spread / 2**0.5)
        moves.append(Move(head, now.value, then, p))
    return moves


def rejected(p_values: Sequence[float], rate: float) -> list[bool]:
    """Which hypotheses to reject so that at most `rate` of the rejected are true (Benjamini & Hochberg 1995).

    The k smallest p-values, k the largest with p_(k) ≤ rate · k/n; as `statistics.false_discovery`, without torch.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    # not strict: the procedure rejects at equality
    ranks = [rank for rank, at in enumerate(order, 1) if p_values[at] <= rate * rank / len(p_values)]
    kept = set(order[: max(ranks, default=0)])
    return [at in kept for at in range(len(p_values))]


def _moved(name: str, beyond: Iterable[Move], heads: int, tolerance: Tolerance, file: str | None) -> Check:
    worst = sorted(beyond, key=lambda move: move.size, reverse=True)
    wanted = f"as the baseline ({tolerance})"
    return Check(
        id=f"baseline: {name}",
        rule=f"{name}: {wanted}",
        subject=name,
        wanted=wanted,
        passed=not worst,
        heads=heads,
        breaches=[breach(move.head, move.now, move.then, move.p) for move in worst],
        file=file,
    )


def verdict(
    report: Report,
    rules: Sequence[Rule],
    baseline: Baseline | None = None,
    tolerance: Tolerance = Tolerance(),  # noqa: B008  # it is frozen
    file: str | None = None,
    *,
    allow_partial: bool = False,
) -> Report:
    """The report with its `checks`: one a rule, and one a measure of the baseline, whose file is `file`.

    Raises UsageError for a report that nothing can be concluded from, a rule that matches nothing, and a baseline of
    another run.
    """
    if report.command == "inspect" and not report.heads:
        raise UsageError("The report has 0 heads, so that no rule could fail.", "Check a report that has some.")
    if not report.coverage.complete and not allow_partial:
        raise UsageError(
            f"The report is not whole. {report.coverage.sentence}.",
            "Make it whole, or add --allow-partial (allow_partial).",
        )
    checks = judged(report, rules)
    if baseline is not None:
        refuse_other(report, baseline)
        checks += against(report, baseline, tolerance, file)
    return report.model_copy(update={"checks": checks})
