"""Judges a report by rules: of each rule one Check."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from attnlens.errors import UsageError
from attnlens.records import Breach, Check, Head, HeadId, Report
from attnlens.rules.grammar import Criterion, RuleCondition
from attnlens.rules.rule import Rule
from attnlens.rules.subjects import Matched, matched


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
