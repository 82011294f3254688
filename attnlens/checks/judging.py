"""Judge a report by rules and a baseline: find the values that each rule covers, and build a Check from them."""

from __future__ import annotations

import difflib
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnlens.analyzers.registry import find_measure, list_analyzers, measure_infos
from attnlens.checks.rule import Criterion, Rule, RuleCondition, Tolerance
from attnlens.errors import UsageError
from attnlens.files import format_value
from attnlens.records import Baseline, BaselineMeasure, Breach, Check, Head, HeadId, Measure, Record, Report
from attnlens.wording import clean, join_items

SAME_TEXT = ("windows", "length", "pack", "placement", "seed", "select", "source")
"""Settings that a report and its baseline must have in common."""


def baseline_of(report: Report) -> Baseline:
    """Build a baseline from the values of the report's heads. Raise UsageError if no head has a measure."""
    names = report.measure_names()
    if not names:
        raise UsageError("The report contains no measures to store in a baseline.", "Make one with attnlens inspect.")
    heads = [HeadId(**{name: getattr(head, name) for name in HeadId.model_fields}) for head in report.heads]
    measures = {}
    for name in names:
        column = [head.measures.get(name) for head in report.heads]
        values = [None if measure is None else measure.value for measure in column]
        errors = [None if measure is None else measure.se for measure in column]
        measures[name] = BaselineMeasure(values=values, errors=errors)
    return Baseline(model=report.model, settings=report.settings, heads=heads, measures=measures)


def refuse_other(report: Report, baseline: Baseline) -> None:
    """Raise UsageError, which names the field, unless both have the same heads on the same text.

    Names and paths of models and texts are ignored.
    """
    for field, ours, theirs in _fields(report, baseline):
        if ours != theirs:
            raise UsageError(
                f"The baseline belongs to a different run: {field} is {format_value(theirs)} in the baseline, but "
                f"{format_value(ours)} in the report.",
                "Check a report with the baseline's settings, or accept this one with --update-baseline.",
            )


def _fields(report: Report, baseline: Baseline) -> Iterator[tuple[str, Any, Any]]:
    """Yield what both must have in common: name, value in the report, value in the baseline."""
    for name in ("architecture", "parameters"):
        yield f"model.{name}", getattr(report.model, name), getattr(baseline.model, name)
    for name in ("text", "noise"):
        fed = [getattr(of.settings, name) for of in (report, baseline)]
        ours, theirs = (None if content is None else content.sha256 for content in fed)
        yield f"settings.{name}.sha256", ours, theirs
    for name in SAME_TEXT:
        yield f"settings.{name}", getattr(report.settings, name), getattr(baseline.settings, name)
    report_heads, baseline_heads = ([(head.site, head.head) for head in of.heads] for of in (report, baseline))
    yield "the number of heads", len(report_heads), len(baseline_heads)
    yield from (("a head", *pair) for pair in zip(report_heads, baseline_heads, strict=False))
    known = set(report.measure_names())
    missing = [name for name in baseline.measures if name not in known]
    yield "measures", join_items(missing) + " missing" if missing else "", ""


def against(report: Report, baseline: Baseline, tolerance: Tolerance, file: str | None = None) -> list[Check]:
    """Build one check per measure: the heads that moved beyond the tolerance and chance, or lost or gained a value.

    z = (now − then)/√(se² + se²), which assumes independent runs: for the same windows, that is conservative
    (`compare` pairs them). p is from the normal distribution; Benjamini–Hochberg over heads × measures. A value
    without a standard error is always treated as significant.
    """
    moves = {name: _moves(report, name, column) for name, column in baseline.measures.items()}
    tested = [move for changes in moves.values() for move in changes if move.p is not None]
    significant = reject_by_fdr([move.p for move in tested if move.p is not None], tolerance.fdr)
    by_chance = {id(move) for move, real in zip(tested, significant, strict=True) if not real}
    bounds = {name: tolerance.of(find_measure(name)) for name in moves}
    beyond = {
        name: [move for move in changes if move.beyond(bounds[name]) and id(move) not in by_chance]
        for name, changes in moves.items()
        if any(move.then is not None or move.now is not None for move in changes)
    }
    return [_build_check(name, changes, len(moves[name]), bounds[name], file) for name, changes in beyond.items()]


@dataclass(frozen=True)
class Move:
    """One measure of one head, then and now."""

    head: Head
    now: float | None
    then: float | None
    p: float | None
    """Two-sided p-value; None without standard errors."""

    def beyond(self, tolerance: Tolerance) -> bool:
        """Return whether it moved by more than both tolerances."""
        return self.size > max(tolerance.absolute or 0.0, tolerance.relative * abs(self.then or 0.0))

    @property
    def size(self) -> float:
        """Absolute change: infinite if the value appeared or vanished."""
        if self.now is None or self.then is None:
            return 0.0 if self.now is self.then else math.inf
        return abs(self.now - self.then)


def _moves(report: Report, name: str, column: BaselineMeasure) -> list[Move]:
    """Compare one measure of every head with the baseline's column."""
    moves = []
    for head, then, error in zip(report.heads, column.values, column.errors, strict=True):
        now, p = head.measures.get(name, Measure(value=None, reason="it was not measured")), None
        if now.value is not None and then is not None and now.se is not None and error is not None:
            spread, change = math.hypot(now.se, error), abs(now.value - then)
            if spread > 0 and math.isfinite(change / spread):  # not for numbers near the largest float
                p = math.erfc(change / spread / 2**0.5)
        moves.append(Move(head, now.value, then, p))
    return moves


def reject_by_fdr(p_values: Sequence[float], rate: float) -> list[bool]:
    """Return which hypotheses to reject so that at most `rate` of the rejected are true (Benjamini & Hochberg 1995).

    These have the k smallest p-values, k the largest with p_(k) ≤ rate · k/n; `statistics.false_discovery` needs torch.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    # not strict: the procedure rejects at equality
    ranks = [rank for rank, at in enumerate(order, 1) if p_values[at] <= rate * rank / len(p_values)]
    rejected_at = set(order[: max(ranks, default=0)])
    return [at in rejected_at for at in range(len(p_values))]


def _build_check(name: str, beyond: Iterable[Move], heads: int, tolerance: Tolerance, file: str | None) -> Check:
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
    """Return the report with its `checks`: one per rule, and one per measure of the baseline, whose file is `file`."""
    if report.command == "inspect" and not report.heads:
        raise UsageError("The report has 0 heads, so no rule could fail.", "Check a report that contains heads.")
    if not report.coverage.complete and not allow_partial:
        raise UsageError(
            f"The report is incomplete. {report.coverage.sentence}.",
            "Complete the run, or add --allow-partial (allow_partial).",
        )
    checks = check_rules(report, rules)
    if baseline is not None:
        refuse_other(report, baseline)
        checks += against(report, baseline, tolerance, file)
    return report.model_copy(update={"checks": checks})


COLUMNS = ("se", "z", "base", "null")
"""Other values of a measure, after its name: `tokens.entropy.se`; `null` is the null's mean."""
FIELDS = ("coverage", "model", "settings", "summary", "swap", "comparison", "doctor", "experiments")
"""Possible first parts of a dotted path into the report."""
KNOWN = ("summary.identity_error", "swap.loss.delta", "swap.kl", "coverage.analysed", "model.parameters")
"""Paths that are suggested for similar ones."""


@dataclass(frozen=True)
class Matched:
    """Numbers that a rule covers."""

    heads: tuple[tuple[Head, float], ...] = ()
    """Heads that the rule covers and that have a value."""
    without: int = 0
    """Number of covered heads without a value."""
    field: float | None = None
    """Number of a field; None for a rule about heads."""


def match_rule(report: Report, rule: Rule) -> Matched:
    """Find the numbers that the rule covers. Raise UsageError for none: such a rule would never fail."""
    subject = stem(rule.subject)
    name, _, column = subject.rpartition(".")
    for measure, part in ((subject, "value"), (name, column)):
        if part in ("value", *COLUMNS) and any(measure in head.measures for head in report.heads):
            return _match_heads(report, rule, measure, part)
    return _match_field(report, rule, subject)


def absolute(subject: str) -> bool:
    """Return whether the subject uses absolute values: `|weights.symmetry.z|`."""
    return len(subject) > 2 and subject[0] == subject[-1] == "|"


def stem(subject: str) -> str:
    """Return the subject without the bars for absolute values."""
    return subject[1:-1].strip() if absolute(subject) else subject


def _match_heads(report: Report, rule: Rule, name: str, column: str) -> Matched:
    selection = rule.condition
    named = [
        head
        for head in report.heads
        if (selection.layers is None or head.layer in selection.layers)
        and (selection.heads is None or head.head in selection.heads)
        and (selection.part is None or head.part == selection.part)
    ]
    read = [(head, head.measures.get(name)) for head in named]
    numbers = [(head, _column(measure, column)) for head, measure in read]
    sign = abs if absolute(rule.subject) else float
    present = tuple((head, sign(number)) for head, number in numbers if number is not None)
    if not present:
        reasons = [measure.reason for _, measure in read if measure is not None and measure.reason]
        why = f"{len(named)} heads have no {column}" if named else "the rule names no head of this report"
        raise _no_match(rule, f"{why}{f', because {reasons[0]}' if reasons else ''}")
    return Matched(present, len(named) - len(present))


def _column(measure: Measure | None, column: str) -> float | None:
    if measure is None or column == "null":
        return None if measure is None or measure.null is None else measure.null.mean
    number: float | None = getattr(measure, column)
    return number


def _match_field(report: Report, rule: Rule, name: str) -> Matched:
    number = _value_at(report, name) if name.partition(".")[0] in FIELDS else _Missing
    if number is _Missing:
        raise _unknown_subject(report, rule, name)
    if rule.condition.aggregate != "value" or rule.condition.filters:
        raise UsageError(
            f"{rule.place}{rule.named} is a single number, but {rule.wanted} needs several.",
            f'Write "{rule.named}" = ["value {rule.condition.comparison}"].',
        )
    if not isinstance(number, bool | int | float) or abs(number) > sys.float_info.max:
        what = "has no value" if number is None else "is not a number"
        raise _no_match(rule, f"{rule.named} {what} in this report")
    return Matched(field=float(abs(number) if absolute(rule.subject) else number))


def _no_match(rule: Rule, why: str) -> UsageError:
    return UsageError(
        f"{rule.place}{rule.spelling} matches nothing: {clean(why)}.",
        "Correct or remove the rule: a rule that matches nothing would never fail.",
    )


class _Missing:
    """Marker of a field that the report lacks."""


def _value_at(value: Any, path: str) -> Any:
    """Return the value at a dotted path; `_Missing` if there is none. Keys of maps may contain dots themselves."""
    if not path:
        return value
    if isinstance(value, Mapping):
        keys = [key for key in value if path == key or path.startswith(f"{key}.")]
        return _value_at(value[max(keys, key=len)], path[len(max(keys, key=len)) + 1 :]) if keys else _Missing
    name, _, remainder = path.partition(".")
    if isinstance(value, Record) and name in type(value).model_fields:
        return _value_at(getattr(value, name), remainder)
    if isinstance(value, Sequence) and not isinstance(value, str) and name.isdecimal() and len(name) < 5:
        return _value_at(value[int(name)], remainder) if int(name) < len(value) else _Missing
    named = [item for item in value if getattr(item, "name", None) == name] if isinstance(value, list) else []
    return _value_at(named[0], remainder) if named else _Missing


def _unknown_subject(report: Report, rule: Rule, name: str) -> UsageError:
    """Build the error for a subject that is neither a measure nor a field of the report."""
    near = difflib.get_close_matches(name[:100], [*report.measure_names(), *KNOWN], n=1)
    hint = f"Did you mean {clean(near[0])!r}? " if near else ""
    curve = any(name in head.curves for head in report.heads)
    why = f"{rule.named} is a curve, but rules compare numbers" if curve else f"the report has no {rule.named}"
    return UsageError(
        f"{rule.place}{rule.spelling} matches nothing: {why}.",
        f"{hint}Choose from: "
        f"{join_items(report.measure_names(), 40) or 'no measures; use fields such as swap.loss.delta'}.",
    )


def check_rules(report: Report, rules: Iterable[Rule]) -> list[Check]:
    """Return each rule's outcome on the report, in the rules' order; changes in a comparison count as measures.

    Raise UsageError if a rule matches nothing.
    """
    report = report.with_changes()
    taken: Counter[str] = Counter()
    checks = []
    for rule in rules:
        taken[rule.id] += 1
        values = match_rule(report, rule)
        number = values.field if values.field is not None else aggregate(values, rule.condition)
        broken = [] if values.field is not None else _breaking_heads(values.heads, rule.condition, number)
        passed = not broken if number is None else rule.condition.comparison.holds(number)
        checks.append(
            Check(
                id=rule.id + (f" #{taken[rule.id]}" if taken[rule.id] > 1 else ""),
                rule=rule.spelling,
                subject=rule.subject,
                wanted=rule.wanted,
                passed=passed,
                value=number,
                heads=None if values.field is not None else len(values.heads),
                without=values.without,
                breaches=[] if passed else [breach(head, value) for head, value in broken],
                file=rule.file,
            )
        )
    return checks


def aggregate(match: Matched, condition: RuleCondition) -> float | None:
    """Compute the aggregate over heads; None for `value`, which applies to each head separately."""
    numbers = sorted(value for _, value in match.heads)
    if condition.quantile is not None:
        # linear interpolation (type 7 of Hyndman & Fan 1996, numpy's default) without the difference of the two values,
        # which may overflow
        place = condition.quantile * (len(numbers) - 1)
        below = math.floor(place)
        above = min(below + 1, len(numbers) - 1)
        return (1 - (place - below)) * numbers[below] + (place - below) * numbers[above]
    if condition.share is not None:
        return sum(map(condition.share.holds, numbers)) / len(numbers)
    if condition.aggregate == "mean":
        return math.fsum(number / len(numbers) for number in numbers)
    return {"min": numbers[0], "max": numbers[-1], "count": float(len(numbers))}.get(condition.aggregate)


def _breaking_heads(
    heads: Sequence[tuple[Head, float]], condition: RuleCondition, number: float | None
) -> list[tuple[Head, float]]:
    """Return the heads that break the rule, the worst first; none if only all heads together do."""
    comparison = condition.comparison
    if condition.share is not None and number is not None:
        too_many = comparison.operator in ("<", "<=") or number > comparison.high
        by = condition.share
        blamed = [(head, value) for head, value in heads if by.holds(value) is too_many]
        return sorted(blamed, key=lambda pair: by.excess(pair[1]), reverse=True)
    if condition.aggregate not in ("min", "max", "value"):
        return []
    blamed = [(head, value) for head, value in heads if not comparison.holds(value) and _at_end(condition, value)]
    return sorted(blamed, key=lambda pair: comparison.excess(pair[1]), reverse=True)


def _at_end(condition: RuleCondition, value: float) -> bool:
    """Return whether a single head can make the aggregate fail: max > 0.5 does not fail because of any one head."""
    comparison: Criterion = condition.comparison
    if condition.aggregate == "min":
        return comparison.operator in (">", ">=") or (comparison.operator in ("in", "==") and value < comparison.low)
    if condition.aggregate == "max":
        return comparison.operator in ("<", "<=") or (comparison.operator in ("in", "==") and value > comparison.high)
    return True


def breach(head: HeadId, value: float | None, base: float | None = None, p: float | None = None) -> Breach:
    """Build the record of a head that breaks a rule, with its value."""
    return Breach(site=head.site, layer=head.layer, head=head.head, part=head.part, value=value, base=base, p=p)


def options_for(rules: Sequence[Rule], baseline: Baseline | None) -> dict[str, Any]:
    """Return the options `analyzers` and `source` of a run that measures only what is checked."""
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
                f"{rule.place}{rule.spelling} matches nothing: no analyzer computes {rule.named}.",
                f"{f'Did you mean {near[0]!r}? ' if near else ''}See `attnlens list measures`.",
            )
    analyzers = list_analyzers()
    read = [each for each in analyzers if any(info.name in rule.subject for info in each.measures for rule in rules)]
    if not read:
        return {}
    sources = {each.source for each in read}
    return {
        "analyzers": list(dict.fromkeys(each.name for each in read)),
        "source": sources.pop() if len(sources) == 1 else "both",
    }
