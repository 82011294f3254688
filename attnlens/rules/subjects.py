"""Find what a rule is about (a measure, one of its columns, a field of the report), and the analyzers that it needs."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnlens.errors import UsageError
from attnlens.records import Baseline, Head, Measure, Record, Report
from attnlens.registry import every_analyzer, measure_infos
from attnlens.rules.rule import Rule
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
    name, column = _measure(report, stem(rule.subject))
    return _of_heads(report, rule, name, column) if name else _of_field(report, rule, stem(rule.subject))


def absolute(subject: str) -> bool:
    """Whether numbers are taken without their sign: `|weights.symmetry.z|`."""
    return len(subject) > 2 and subject[0] == subject[-1] == "|"


def stem(subject: str) -> str:
    """The subject without the bars that take numbers without their sign."""
    return subject[1:-1].strip() if absolute(subject) else subject


def _measure(report: Report, name: str) -> tuple[str, str]:
    """The measure and the column that are meant; empty where it is no measure of the report."""
    stem, _, column = name.rpartition(".")
    for measure, part in ((name, "value"), (stem, column)):
        if part in ("value", *COLUMNS) and any(measure in head.measures for head in report.heads):
            return measure, part
    return "", ""


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
    numbers = [(head, None if measure is None else _column(measure, column)) for head, measure in read]
    sign = abs if absolute(rule.subject) else float
    present = tuple((head, sign(number)) for head, number in numbers if number is not None)
    if not present:
        reasons = [measure.reason for _, measure in read if measure is not None and measure.reason]
        why = f"{len(named)} heads have no {column}" if named else "no head of the report is among those that it names"
        raise _nothing(rule, f"{why}{f', because {reasons[0]}' if reasons else ''}")
    return Matched(present, len(named) - len(present))


def _column(measure: Measure, column: str) -> float | None:
    if column == "null":
        return None if measure.null is None else measure.null.mean
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


def needed(rules: Sequence[Rule], baseline: Baseline | None) -> dict[str, Any]:
    """The options `analyzers` and `source` of a run that measures no more than is checked.

    Raises UsageError, before anything is loaded, for a rule about what no analyzer measures and no report has.
    """
    if baseline is not None:
        return {"analyzers": baseline.settings.analyzers, "source": baseline.settings.source}
    _refuse_unknown(rules)
    every = every_analyzer()
    read = [found for found in every if any(info.name in rule.subject for info in found.measures for rule in rules)]
    if not read:
        return {}
    sources = {found.source for found in read}
    return {
        "analyzers": list(dict.fromkeys(found.name for found in read)),
        "source": sources.pop() if len(sources) == 1 else "both",
    }


def _refuse_unknown(rules: Sequence[Rule]) -> None:
    known = measure_infos()
    for rule in rules:
        name = stem(rule.subject)
        if name.partition(".")[0] in FIELDS or any(name == info or name.startswith(f"{info}.") for info in known):
            continue
        near = difflib.get_close_matches(name[:100], known, n=1)
        raise UsageError(
            f"{rule.place}{rule.spelling} matches nothing: no analyzer measures {rule.named}.",
            f"{f'Did you mean {near[0]!r}? ' if near else ''}`attnlens list measures` names them.",
        )
