"""Judges a report by rules: finds what each rule is about, and makes one Check of it."""

from __future__ import annotations

import difflib
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnlens.errors import UsageError
from attnlens.records import Baseline, Breach, Check, Head, HeadId, Measure, Record, Report
from attnlens.registry import every_analyzer, measure_infos
from attnlens.rules.rule import Criterion, Rule, RuleCondition
from attnlens.wording import clean, listed

COLUMNS = ("se", "z", "base", "null")
"""What else a measure has, behind its name: `tokens.entropy.se`; `null` is the null's mean."""
FIELDS = ("coverage", "model", "settings", "summary", "swap", "comparison", "doctor", "experiments")
"""Where a dotted path into the report may begin."""
KNOWN = ("summary.identity_error", "swap.loss.delta", "swap.kl", "coverage.analysed", "model.parameters")
"""Paths that are suggested for what comes near."""


@dataclass(frozen=True)
class Matched:
    """What a rule is about, as numbers."""

    heads: tuple[tuple[Head, float], ...] = ()
    """The heads that the rule names and that have a value."""
    without: int = 0
    """How many that it names have none."""
    field: float | None = None
    """The number of a field; None where it is about heads."""


def matched(report: Report, rule: Rule) -> Matched:
    """What the rule is about in this report. Raises UsageError where that is nothing: such a rule would never fail."""
    subject = stem(rule.subject)
    name, _, column = subject.rpartition(".")
    for measure, part in ((subject, "value"), (name, column)):
        if part in ("value", *COLUMNS) and any(measure in head.measures for head in report.heads):
            return _of_heads(report, rule, measure, part)
    return _of_field(report, rule, subject)


def absolute(subject: str) -> bool:
    """Whether numbers are taken without their sign: `|weights.symmetry.z|`."""
    return len(subject) > 2 and subject[0] == subject[-1] == "|"


def stem(subject: str) -> str:
    """The subject without the bars that take numbers without their sign."""
    return subject[1:-1].strip() if absolute(subject) else subject


def _of_heads(report: Report, rule: Rule, name: str, column: str) -> Matched:
    kept = rule.condition
    named = [
        head
        for head in report.heads
        if (kept.layers is None or head.layer in kept.layers)
        and (kept.heads is None or head.head in kept.heads)
        and (kept.part is None or head.part == kept.part)
    ]
    read = [(head, head.measures.get(name)) for head in named]
    numbers = [(head, _column(measure, column)) for head, measure in read]
    sign = abs if absolute(rule.subject) else float
    present = tuple((head, sign(number)) for head, number in numbers if number is not None)
    if not present:
        reasons = [measure.reason for _, measure in read if measure is not None and measure.reason]
        why = f"{len(named)} heads have no {column}" if named else "no head of the report is among those that it names"
        raise _nothing(rule, f"{why}{f', because {reasons[0]}' if reasons else ''}")
    return Matched(present, len(named) - len(present))


def _column(measure: Measure | None, column: str) -> float | None:
    if measure is None or column == "null":
        return None if measure is None or measure.null is None else measure.null.mean
    number: float | None = getattr(measure, column)
    return number


def _of_field(report: Report, rule: Rule, name: str) -> Matched:
    number = _at(report, name) if name.partition(".")[0] in FIELDS else _Missing
    if number is _Missing:
        raise _unknown(report, rule, name)
    if rule.condition.aggregate != "value" or rule.condition.filters:
        raise UsageError(
            f"{rule.place}{rule.named} is one number, and {rule.wanted} asks for several.",
            f'Write "{rule.named}" = ["value {rule.condition.comparison}"].',
        )
    if not isinstance(number, bool | int | float) or abs(number) > sys.float_info.max:
        what = "has no value" if number is None else "is no number"
        raise _nothing(rule, f"{rule.named} {what} in this report")
    return Matched(field=float(abs(number) if absolute(rule.subject) else number))


def _nothing(rule: Rule, why: str) -> UsageError:
    return UsageError(
        f"{rule.place}{rule.spelling} matches nothing: {clean(why)}.",
        "Mend the rule, or take it out: what matches nothing would never fail.",
    )


class _Missing:
    """Stands for a field that the report does not have."""


def _at(value: Any, path: str) -> Any:
    """What stands at the dotted path; `_Missing` where nothing does. A key of a map may hold dots itself."""
    if not path:
        return value
    if isinstance(value, Mapping):
        keys = [key for key in value if path == key or path.startswith(f"{key}.")]
        return _at(value[max(keys, key=len)], path[len(max(keys, key=len)) + 1 :]) if keys else _Missing
    name, _, rest = path.partition(".")
    if isinstance(value, Record) and name in type(value).model_fields:
        return _at(getattr(value, name), rest)
    if isinstance(value, Sequence) and not isinstance(value, str) and name.isdecimal() and len(name) < 5:
        return _at(value[int(name)], rest) if int(name) < len(value) else _Missing
    named = [one for one in value if getattr(one, "name", None) == name] if isinstance(value, list) else []
    return _at(named[0], rest) if named else _Missing


def _unknown(report: Report, rule: Rule, name: str) -> UsageError:
    """The error for a subject that is no measure and no field of the report."""
    near = difflib.get_close_matches(name[:100], [*report.measure_names(), *KNOWN], n=1)
    hint = f"Did you mean {clean(near[0])!r}? " if near else ""
    curve = any(name in head.curves for head in report.heads)
    why = f"{rule.named} is a curve, and rules compare numbers" if curve else f"the report has no {rule.named}"
    return UsageError(
        f"{rule.place}{rule.spelling} matches nothing: {why}.",
        f"{hint}There are: {listed(report.measure_names(), 40) or 'no measures, but fields such as swap.loss.delta'}.",
    )


def judged(report: Report, rules: Iterable[Rule]) -> list[Check]:
    """Each rule's outcome on the report, in the rules' order; of a comparison its changes are measures too.

    Raises UsageError where a rule matches nothing.
    """
    report = report.with_changes()
    taken: Counter[str] = Counter()
    checks = []
    for rule in rules:
        taken[rule.id] += 1
        found = matched(report, rule)
        number = found.field if found.field is not None else aggregated(found, rule.condition)
        broken = [] if found.field is not None else _broken(found.heads, rule.condition, number)
        passed = not broken if number is None else rule.condition.comparison.holds(number)
        checks.append(
            Check(
                id=rule.id + (f" #{taken[rule.id]}" if taken[rule.id] > 1 else ""),
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
        )
    return checks


def aggregated(found: Matched, asked: RuleCondition) -> float | None:
    """The aggregate over heads; None for `value`, under which every head stands for itself."""
    numbers = sorted(value for _, value in found.heads)
    if asked.quantile is not None:
        # between the two nearest in proportion (type 7 of Hyndman & Fan 1996, numpy's own), without a difference of
        # both, which may be beyond all numbers
        place = asked.quantile * (len(numbers) - 1)
        below = math.floor(place)
        above = min(below + 1, len(numbers) - 1)
        return (1 - (place - below)) * numbers[below] + (place - below) * numbers[above]
    if asked.share is not None:
        return sum(map(asked.share.holds, numbers)) / len(numbers)
    if asked.aggregate == "mean":
        return math.fsum(number / len(numbers) for number in numbers)
    return {"min": numbers[0], "max": numbers[-1], "count": float(len(numbers))}.get(asked.aggregate)


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


def needed(rules: Sequence[Rule], baseline: Baseline | None) -> dict[str, Any]:
    """The options `analyzers` and `source` of a run that measures no more than is checked.

    Raises UsageError, before anything is loaded, for a rule about what no analyzer measures and no report has.
    """
    if baseline is not None:
        return {"analyzers": baseline.settings.analyzers, "source": baseline.settings.source}
    known = measure_infos()
    for rule in rules:
        name = stem(rule.subject)
        if name.partition(".")[0] not in FIELDS and not any(
            name == info or name.startswith(f"{info}.") for info in known
        ):
            near = difflib.get_close_matches(name[:100], known, n=1)
            raise UsageError(
                f"{rule.place}{rule.spelling} matches nothing: no analyzer measures {rule.named}.",
                f"{f'Did you mean {near[0]!r}? ' if near else ''}`attnlens list measures` names them.",
            )
    every = every_analyzer()
    read = [found for found in every if any(info.name in rule.subject for info in found.measures for rule in rules)]
    if not read:
        return {}
    sources = {found.source for found in read}
    return {
        "analyzers": list(dict.fromkeys(found.name for found in read)),
        "source": sources.pop() if len(sources) == 1 else "both",
    }
