"""Judge a report by rules and by a baseline: one Check per rule and per measure of the baseline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnlens.errors import UsageError
from attnlens.files import written
from attnlens.records import Baseline, BaselineMeasure, Breach, Check, Head, HeadId, Measure, Report
from attnlens.registry import MeasureInfo, info_of
from attnlens.rules.grammar import Criterion, RuleCondition
from attnlens.rules.rule import Rule
from attnlens.rules.subjects import Matched, matched
from attnlens.wording import listed

RELATIVE, FDR = 0.05, 0.05
"""Where none are named."""


@dataclass(frozen=True)
class Tolerance:
    """A head has moved where it is off by more than either bound, and by more than chance."""

    relative: float = RELATIVE
    """Of the baseline's value."""
    absolute: float | None = None
    """In the measure's own unit; None: `relative` of the measure's range, where it has one."""
    fdr: float = FDR
    """The share of heads that may be named by chance, of those that are named by a p-value."""

    def __str__(self) -> str:
        return f"±{100 * self.relative:g} %" + (f", ±{self.absolute:g}" if self.absolute else "")

    def of(self, info: MeasureInfo) -> Tolerance:
        """The same for one measure: between −1 and 1, 5 % are 0.1, so that what is near 0 may move as what is not."""
        bounded = info.low is not None and info.high is not None
        width = info.high - info.low if bounded else 0.0  # type: ignore[operator]  # neither is None
        return self if self.absolute is not None else replace(self, absolute=self.relative * width)

    def __post_init__(self) -> None:
        """Raise UsageError for bounds that make no sense."""
        for name, most in (("relative", math.inf), ("absolute", math.inf), ("fdr", 1.0)):
            number: Any = getattr(self, name)
            if name == "absolute" and number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < most:
                raise UsageError(f"{name}={written(number)} is no tolerance.", "Give a number from 0 on, such as 0.05.")


def judged(report: Report, rules: Iterable[Rule]) -> list[Check]:
    """Each rule's outcome on the report, in the rules' order; of a comparison its changes are measures too.

    Raises UsageError where a rule matches nothing.
    """
    report = report.with_changes()
    taken: Counter[str] = Counter()
    checks = []
    for rule in rules:
        taken[rule.id] += 1
        again = f" #{taken[rule.id]}" if taken[rule.id] > 1 else ""
        checks.append(_check(report, rule, rule.id + again))
    return checks


def refuse_unfit(report: Report, *, allow_partial: bool) -> None:
    """Raise UsageError for a report that nothing can be concluded from: no head was analysed, or not all were."""
    coverage = report.coverage
    if report.command == "inspect" and not report.heads:
        raise UsageError("The report has 0 heads, so that no rule could fail.", "Check a report that has some.")
    if not coverage.complete and not allow_partial:
        raise UsageError(
            f"The report is not whole. {coverage.sentence}.", "Make it whole, or add --allow-partial (allow_partial)."
        )


def _check(report: Report, rule: Rule, identity: str) -> Check:
    found = matched(report, rule)
    number = found.field if found.field is not None else aggregated(found, rule.condition)
    broken = [] if found.field is not None else _broken(found.heads, rule.condition, number)
    passed = not broken if number is None else rule.condition.comparison.holds(number)
    return Check(
        id=identity,
        rule=rule.spelling,
        subject=rule.subject,
        wanted=rule.wanted,
        passed=passed,
        value=number,
        heads=None if found.field is not None else len(found.heads),
        without=found.without,
        breaches=[] if passed else [breach(head, value) for head, value in broken],
        file=rule.file,
        line=rule.line,
    )


def aggregated(found: Matched, asked: RuleCondition) -> float | None:
    """The aggregate over heads; None for `value`, under which every head stands for itself."""
    numbers = sorted(value for _, value in found.heads)
    if asked.quantile is not None:
        return _quantile(numbers, asked.quantile)
    if asked.share is not None:
        return sum(map(asked.share.holds, numbers)) / len(numbers)
    if asked.aggregate == "mean":
        return math.fsum(number / len(numbers) for number in numbers)
    return {"min": numbers[0], "max": numbers[-1], "count": float(len(numbers))}.get(asked.aggregate)


def _quantile(numbers: Sequence[float], share: float) -> float:
    """Between the two nearest in proportion (type 7 of Hyndman & Fan 1996, numpy's own), without a difference of both,
    which may be beyond all numbers.
    """
    place = share * (len(numbers) - 1)
    below = math.floor(place)
    above = min(below + 1, len(numbers) - 1)
    return (1 - (place - below)) * numbers[below] + (place - below) * numbers[above]


def _broken(
    heads: Sequence[tuple[Head, float]], asked: RuleCondition, number: float | None
) -> list[tuple[Head, float]]:
    """The heads that are to blame, the worst first; none where only all heads together are."""
    comparison = asked.comparison
    if asked.share is not None and number is not None:
        too_many = comparison.operator in ("<", "<=") or number > comparison.high
        blamed, by = [(head, value) for head, value in heads if asked.share.holds(value) is too_many], asked.share
        return sorted(blamed, key=lambda one: by.excess(one[1]), reverse=True)
    if asked.aggregate not in ("min", "max", "value"):
        return []
    blamed = [(head, value) for head, value in heads if not comparison.holds(value) and _at_end(asked, value)]
    return sorted(blamed, key=lambda one: comparison.excess(one[1]), reverse=True)


def _at_end(asked: RuleCondition, value: float) -> bool:
    """Whether a head that is not as wanted makes the aggregate fail: max > 0.5 fails through no head alone."""
    comparison: Criterion = asked.comparison
    if asked.aggregate == "min":
        return comparison.operator in (">", ">=") or (comparison.operator in ("in", "==") and value < comparison.low)
    if asked.aggregate == "max":
        return comparison.operator in ("<", "<=") or (comparison.operator in ("in", "==") and value > comparison.high)
    return True


def breach(head: HeadId, value: float | None, base: float | None = None, p: float | None = None) -> Breach:
    """A head that breaks a rule, with what it reads."""
    return Breach(site=head.site, layer=head.layer, head=head.head, part=head.part, value=value, base=base, p=p)


SAME_TEXT = ("sequences", "tokens", "pack", "windows", "seed", "select", "source")
"""The settings that a report and its baseline must have in common."""


def baseline_of(report: Report) -> Baseline:
    """What the report's heads read, as a baseline. Raises UsageError where no head has a measure."""
    names = report.measure_names()
    if not names:
        raise UsageError("The report has no measures that a baseline could hold.", "Make one with attnlens inspect.")
    heads = [HeadId(**{name: getattr(head, name) for name in HeadId.model_fields}) for head in report.heads]
    measures = {name: _column(report, name) for name in names}
    return Baseline(model=report.model, settings=report.settings, heads=heads, measures=measures)


def _column(report: Report, name: str) -> BaselineMeasure:
    found = [head.measures.get(name) for head in report.heads]
    return BaselineMeasure(
        values=[None if one is None else one.value for one in found],
        errors=[None if one is None else one.se for one in found],
    )


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
    from scipy.stats import false_discovery_control

    moves = {name: _moves(report, name, column) for name, column in baseline.measures.items()}
    tested = [move for found in moves.values() for move in found if move.p is not None]
    q = false_discovery_control([move.p for move in tested]) if tested else []
    by_chance = {id(move) for move, rate in zip(tested, q, strict=True) if not rate <= tolerance.fdr}
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
    gone = Measure(value=None, reason="it was not measured")
    moves = []
    for head, then, error in zip(report.heads, column.values, column.errors, strict=True):
        now, p = head.measures.get(name, gone), None
        if now.value is not None and then is not None and now.se is not None and error is not None:
            spread, change = math.hypot(now.se, error), abs(now.value - then)
            if spread > 0 and math.isfinite(change / spread):  # which it is not of numbers near the largest
                p = math.erfc(change / spread / 2**0.5)
        moves.append(Move(head, now.value, then, p))
    return moves


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
        line=None if file is None else 1,
    )


def verdict(
    report: Report,
    rules: Sequence[Rule],
    baseline: Baseline | None = None,
    tolerance: Tolerance = Tolerance(),  # it is frozen
    file: str | None = None,
    *,
    allow_partial: bool = False,
) -> Report:
    """The report with its `checks`: one a rule, and one a measure of the baseline, whose file is `file`.

    Raises UsageError for a report that nothing can be concluded from, a rule that matches nothing, and a baseline of
    another run.
    """
    refuse_unfit(report, allow_partial=allow_partial)
    checks = judged(report, rules)
    if baseline is not None:
        refuse_other(report, baseline)
        checks += against(report, baseline, tolerance, file)
    return report.model_copy(update={"checks": checks})
