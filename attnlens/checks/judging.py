"""Check a report against rules and a baseline: build a Check for each rule, and for each measure of the baseline."""

from __future__ import annotations

import difflib
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from shlex import quote
from statistics import median

from attnlens.analyzers.registry import find_measure, list_analyzers, measure_infos
from attnlens.checks.rule import Rule, Tolerance
from attnlens.errors import UsageError
from attnlens.files import format_value
from attnlens.records import Baseline, BaselineMeasure, Breach, Check, Head, HeadId, Record, Report
from attnlens.records.comparison import BLOCKS
from attnlens.wording import clean, format_count, join_items

EQUAL_SETTINGS = ("windows", "length", "pack", "placement", "seed", "select", "source")
"""Settings that a report and its baseline must share."""


def build_baseline(report: Report) -> Baseline:
    """Build a baseline from the values of the report's heads. Raise UsageError if no head has a measure."""
    names = report.measure_names()
    if not names:
        raise UsageError("The report contains no measures for a baseline.", "Create a report with `attnlens inspect`.")
    heads = [HeadId(**{name: getattr(head, name) for name in HeadId.model_fields}) for head in report.heads]
    measures = {}
    for name in names:
        column = [head.measures.get(name) for head in report.heads]
        values, errors = ([getattr(measure, part, None) for measure in column] for part in ("value", "se"))
        measures[name] = BaselineMeasure(values=values, errors=errors)
    return Baseline(model=report.model, settings=report.settings, heads=heads, measures=measures)


def _refuse_other(report: Report, baseline: Baseline) -> None:
    """Raise UsageError for the first property of `_list_settings` in which report and baseline differ.

    Also raise UsageError if the report lacks a measure of the baseline.
    """
    remedy = "Use the baseline's settings, or accept the report with --update-baseline."
    for (field, ours), (_, theirs) in zip(_list_settings(report), _list_settings(baseline), strict=False):
        if ours != theirs:
            difference = f"{field} is {format_value(theirs)} in the baseline, but {format_value(ours)} in the report"
            if field.startswith("settings.text"):
                then, now = (getattr(run.settings.text, "name", None) for run in (baseline, report))
                if then != now:
                    difference = f"settings.text is {then} in the baseline, but {now} in the report"
                remedy = "Measure both on the same text with --text FILE, or accept the report with --update-baseline."
            raise UsageError(f"The baseline belongs to a different run: {difference}.", remedy)
    known = set(report.measure_names())
    if missing := join_items([name for name in baseline.measures if name not in known]):
        raise UsageError(f"The baseline belongs to a different run: the report lacks {missing}.", remedy)


def _list_settings(run: Report | Baseline) -> Iterator[tuple[str, object]]:
    """Yield the name and value of each property that a report must share with its baseline."""
    yield from ((f"model.{name}", getattr(run.model, name)) for name in ("architecture", "parameters"))
    for name in ("text", "noise"):
        yield f"settings.{name}.sha256", getattr(getattr(run.settings, name), "sha256", None)
    yield from ((f"settings.{name}", getattr(run.settings, name)) for name in EQUAL_SETTINGS)
    yield "the number of heads", len(run.heads)
    yield from (("a head", (head.site, head.head)) for head in run.heads)


def check_baseline(report: Report, baseline: Baseline, tolerance: Tolerance, file: str | None = None) -> list[Check]:
    """Build one check per measure with a value. A head fails if its value appears, vanishes or changes too much.

    A change is too large if it exceeds the tolerance and, if it has a p-value, is significant after Benjamini–Hochberg
    adjustment over all heads and measures. The two-sided p is that of t = (now − then)/√(se_now² + se_then²) under
    Student's distribution with the degrees of freedom of one run. The two runs are treated as independent, which is
    conservative if both read the same windows (`compare` pairs the windows).
    """
    changes = {name: _compare_column(report, name, column) for name, column in baseline.measures.items()}
    tested = [change.p for column in changes.values() for change in column if change.p is not None]
    largest = largest_rejected(tested, tolerance.fdr)
    checks = []
    for name, column in changes.items():
        if all(change.base is None and change.value is None for change in column):
            continue
        bounds = tolerance.of(find_measure(name))
        significant = [
            change
            for change in sorted(column, key=_size, reverse=True)
            if _size(change) > max(bounds.absolute or 0.0, bounds.relative * abs(change.base or 0.0))
            and (change.p is None or change.p <= largest)
        ]
        wanted = f"as in the baseline ({bounds})"
        checks.append(
            Check(
                id=f"baseline: {name}",
                rule=f"{name}: {wanted}",
                subject=name,
                wanted=wanted,
                passed=not significant,
                median=_median(change.value for change in column),
                base=_median(change.base for change in column),
                heads=len(column),
                breaches=significant,
                file=file,
            )
        )
    return checks


def _median(values: Iterable[float | None]) -> float | None:
    """Compute the median of the values that are not None; return None if there are none."""
    present = [value for value in values if value is not None]
    return median(present) if present else None


def _size(change: Breach) -> float:
    """Return |value − base|; ∞ if only one of the two is known, and 0 if neither is."""
    if change.value is None or change.base is None:
        return 0.0 if change.value is change.base else math.inf
    return abs(change.value - change.base)


def _compare_column(report: Report, name: str, column: BaselineMeasure) -> list[Breach]:
    """Return each head's change in one measure since the baseline.

    p is None if a value or standard error is missing, or if the change divided by its error is not finite.
    """
    from scipy.special import stdtr  # imported late, because rules need no test

    changes = []
    for head, then, error in zip(report.heads, column.values, column.errors, strict=True):
        measure, p = head.measures.get(name), None
        now, se = (None, None) if measure is None else (measure.value, measure.se)
        if measure is not None and now is not None and then is not None and se is not None and error is not None:
            spread, change = math.hypot(se, error), abs(now - then)
            if spread > 0 and math.isfinite(change / spread):  # infinite for numbers near the largest float
                p = float(2 * stdtr(max(1, report.settings.freedom(measure.n or 0)), -change / spread))
        changes.append(build_breach(head, now, then, p))
    return changes


def largest_rejected(p_values: Sequence[float], rate: float) -> float:
    """Return the largest p-value p_(k) ≤ rate·k/n (Benjamini & Hochberg 1995), or −1 if there is none."""
    ordered = sorted(p_values)
    # not strict: the procedure rejects at equality; `maths.statistics` has the same function but needs torch
    return max((p for rank, p in enumerate(ordered, 1) if p <= rate * rank / len(ordered)), default=-1.0)


def check_report(
    report: Report,
    rules: Sequence[Rule],
    baseline: Baseline | None = None,
    tolerance: Tolerance = Tolerance(),  # noqa: B008  # it is frozen
    file: str | None = None,
    *,
    allow_partial: bool = False,
) -> Report:
    """Return the report with `checks`: one per rule and, if a baseline is given, one per measure with a value.

    `file` is the path of the baseline. Raise UsageError if an inspection has no heads, if the report is partial (unless
    `allow_partial` is True), if a rule matches nothing, or if the baseline belongs to a different run.
    """
    if report.command == "inspect" and not report.heads:
        raise UsageError("The report has no heads to check.", "Check a report that contains heads.")
    if not report.coverage.complete and not allow_partial:
        problem = f"The report is incomplete. {report.coverage.sentence}."
        raise UsageError(problem, "Complete the run, or add --allow-partial (allow_partial=True).")
    checks = _check_rules(report, rules)
    if baseline is not None:
        _refuse_other(report, baseline)
        checks += check_baseline(report, baseline, tolerance, file)
    return report.model_copy(update={"checks": checks})


NO_BLOCKS = "only `attnlens compare` on text reports blocks, and only blocks that run once per forward pass"
COLUMNS = ("se", "z", "base", "null")  # suffixes of a measure, as in `tokens.entropy.se`; `null` is the null's mean
# First parts of dotted paths into the report, and whole paths to suggest for misspelled ones
FIELDS = ("coverage", "model", "settings", "summary", "swap", "comparison", "doctor", "experiments")
KNOWN = ("summary.identity_error", "swap.loss.delta", "swap.kl", "coverage.analysed", "model.parameters")


def _match_heads(report: Report, rule: Rule) -> list[tuple[Head, float | None]]:
    """Return the heads that a rule covers, with their values; [] if the rule's subject is not a measure.

    Raise UsageError if no covered head has a value.
    """
    name, _, column = rule.stem.rpartition(".")
    if any(rule.stem in head.measures for head in report.heads):
        name, column = rule.stem, "value"
    elif column not in ("value", *COLUMNS) or not any(name in head.measures for head in report.heads):
        return []
    heads = [head for head in report.heads if rule.covers(head, report.model)]
    numbers: list[float | None] = []
    for measure in (head.measures.get(name) for head in heads):
        source, field = (measure.null, "mean") if measure is not None and column == "null" else (measure, column)
        number: float | None = getattr(source, field, None)
        numbers.append(abs(number) if rule.absolute and number is not None else number)
    if all(number is None for number in numbers):
        why = "no head of this report matches the rule's filters"
        if heads:
            why = f"{format_count(len(heads), 'head')} {'has' if len(heads) == 1 else 'have'} no {column}"
        reason = next((head.measures[name].reason for head in heads if name in head.measures), None)
        raise _no_match(rule, f"{why}{f', because {reason}' if reason else ''}")
    return list(zip(heads, numbers, strict=True))


def _match_blocks(report: Report, rule: Rule) -> list[tuple[Breach, float | None]]:
    """Return the blocks that contain a head covered by the rule, with the changes in their outputs.

    Without filters, all blocks are covered. Raise UsageError if no block has a value.
    """
    blocks = [] if report.comparison is None else report.comparison.blocks
    covered: list[tuple[Breach, float | None]] = []
    for block in blocks:
        inside = (head for head in report.heads if head.site.startswith(f"{block.path}."))
        heads = [head for head in inside if rule.covers(head, report.model)]
        if heads or not rule.selection:
            layer, part = block.layers[0] if block.layers else 0, (heads or report.heads)[0].part
            covered.append((Breach(site=block.path, layer=layer, head=None, part=part, value=None), block.change))
    if all(change is None for _, change in covered):
        raise _no_match(
            rule, "no block of this comparison has a value and matches the filters" if blocks else NO_BLOCKS
        )
    return covered


def _match_field(report: Report, rule: Rule) -> float:
    try:
        number = _value_at(report, rule.stem if rule.stem.partition(".")[0] in FIELDS else "")
    except LookupError:
        curve = any(rule.stem in head.curves for head in report.heads)
        why = f"{rule.named} is a curve, but rules compare numbers" if curve else f"the report has no {rule.named}"
        source = report.settings.source
        if {source, rule.stem.partition(".")[0]} == {"weights", "tokens"}:
            why += f", because it was made with --source {source}"
            raise _no_match(rule, why, "Inspect with --source both.") from None
        if rule.stem in measure_infos():
            why += ", because this report was made with other analyzers"
            raise _no_match(rule, why, "Inspect again without --analyzer, or with the measure's analyzer.") from None
        raise _unknown_subject(rule, report.measure_names(), why) from None
    if rule.aggregate != "value" or rule.filters:
        problem = f"{rule.place}{rule.named} is a single number, but the condition {rule.wanted!r} needs several heads."
        raise UsageError(problem, f"Write the rule: --rule {quote(f'{rule.subject}: value {rule.comparison}')}")
    if not isinstance(number, bool | int | float) or abs(number) > sys.float_info.max:
        what = "has no value" if number is None else "is not a number"
        raise _no_match(rule, f"{rule.named} {what} in this report")
    return float(abs(number) if rule.absolute else number)


def _no_match(rule: Rule, why: str, remedy: str = "Correct or remove the rule: it could never fail.") -> UsageError:
    return UsageError(f"{rule.place}{rule.spelling} matches nothing: {clean(why)}.", remedy)


def _value_at(value: object, path: str) -> object:
    """Return the value at a dotted path; keys of mappings can contain dots. Raise LookupError if the path is wrong."""
    name, _, remainder = path.partition(".")
    if isinstance(value, Mapping):
        name = max((key for key in value if path == key or path.startswith(f"{key}.")), key=len, default="")
        remainder, inner = path[len(name) + 1 :], value[name]
    elif isinstance(value, Record) and name in type(value).model_fields:
        inner = getattr(value, name)
    elif isinstance(value, Sequence) and not isinstance(value, str) and name.isdecimal() and len(name) < 5:
        inner = value[int(name)]
    else:
        items = value if isinstance(value, list) else []
        inner = {getattr(item, "name", None): item for item in reversed(items)}[name]
    return _value_at(inner, remainder) if remainder else inner


def _unknown_subject(rule: Rule, names: Sequence[str], why: str) -> UsageError:
    """Build the error for a rule whose subject is neither a measure (one of `names`) nor a field of the report."""
    near = difflib.get_close_matches(rule.stem[:100], [*names, *KNOWN], n=1)
    known = join_items(names, 40) or "fields such as swap.loss.delta (this report has no measures)"
    listed = "`attnlens list measures` lists all measures."
    return _no_match(rule, why, f"Did you mean {clean(near[0])!r}? {listed}" if near else f"Choose from: {known}.")


def _check_rules(report: Report, rules: Iterable[Rule]) -> list[Check]:
    """Build one check per rule, in order; rules can also refer to the changes between two compared models."""
    report = report.with_changes()
    occurrences = Counter[str]()
    checks = []
    for rule in rules:
        occurrences[rule.id] += 1
        covered: Sequence[tuple[Head | Breach, float | None]] = (
            _match_blocks(report, rule) if rule.stem == BLOCKS else _match_heads(report, rule)
        )
        number = None if covered else _match_field(report, rule)
        heads = [(head, value) for head, value in covered if value is not None]
        if heads:
            number = aggregate([value for _, value in heads], rule)
        broken = _breaking_heads(heads, rule, number)
        passed = not broken if number is None else rule.comparison.holds(number)
        checks.append(
            Check(
                id=rule.id + (f" #{occurrences[rule.id]}" if occurrences[rule.id] > 1 else ""),
                rule=rule.spelling,
                subject=rule.subject,
                wanted=rule.wanted,
                passed=passed,
                value=number,
                median=_median(value for _, value in heads) if number is None else None,
                heads=len(heads) if heads else None,
                without=len(covered) - len(heads),
                breaches=[] if passed else [build_breach(head, value) for head, value in broken],
                file=rule.file,
            )
        )
    return checks


def aggregate(values: Iterable[float], rule: Rule) -> float | None:
    """Compute the rule's aggregate of the heads' values; None for `value`, which applies to each head separately."""
    numbers = sorted(values)
    if rule.aggregate == "median" or rule.aggregate[0] == "q":
        # linear interpolation (type 7 of Hyndman & Fan 1996, numpy's default) without the difference of the two values,
        # which can overflow
        place = (0.5 if rule.aggregate == "median" else float(rule.aggregate[1:]) / 100) * (len(numbers) - 1)
        below, above = math.floor(place), math.ceil(place)
        return (1 - (place - below)) * numbers[below] + (place - below) * numbers[above]
    if rule.share is not None:
        return sum(map(rule.share.holds, numbers)) / len(numbers)
    if rule.aggregate == "mean":
        return math.fsum(number / len(numbers) for number in numbers)
    return {"min": numbers[0], "max": numbers[-1], "count": float(len(numbers))}.get(rule.aggregate)


def _breaking_heads(
    heads: Sequence[tuple[Head | Breach, float]], rule: Rule, number: float | None
) -> list[tuple[Head | Breach, float]]:
    """Return the heads (or blocks) that break the rule, worst first; [] if no single head causes the failure."""
    comparison, by = rule.comparison, rule.share or rule.comparison
    if rule.share is not None and number is not None:
        too_many = comparison.operator in ("<", "<=") or number > comparison.high
        blamed = [(head, value) for head, value in heads if by.holds(value) is too_many]
    else:
        blamed = [(head, value) for head, value in heads if not by.holds(value) and _is_decisive(rule, value)]
    return sorted(blamed, key=lambda pair: by.excess(pair[1]), reverse=True)


def _is_decisive(rule: Rule, value: float) -> bool:
    """Return True if one head with this value suffices to break the rule; no single head breaks `max > 0.5`."""
    comparison, lowest = rule.comparison, rule.aggregate == "min"
    if rule.aggregate not in ("min", "max"):
        return rule.aggregate == "value"
    if comparison.operator in ("in", "=="):
        return value < comparison.low if lowest else value > comparison.high
    return comparison.operator in ((">", ">=") if lowest else ("<", "<="))


def build_breach(
    head: HeadId | Breach, value: float | None, base: float | None = None, p: float | None = None
) -> Breach:
    """Build the record of a head or block: its value, its value in the baseline (`base`), and the change's p-value."""
    return Breach(site=head.site, layer=head.layer, head=head.head, part=head.part, value=value, base=base, p=p)


def choose_options(rules: Sequence[Rule], baseline: Baseline | None) -> dict[str, object]:
    """Return the options `analyzers` and `source` for `inspect`: those of the baseline or those that the rules require.

    Without a baseline, return {} if the rules require no analyzer. Raise UsageError if no analyzer computes the subject
    of a rule.
    """
    if baseline is not None:
        return {"analyzers": baseline.settings.analyzers, "source": baseline.settings.source}
    known = list(measure_infos())
    for rule in rules:
        measured = any(f"{rule.stem}.".startswith(f"{name}.") for name in known)
        if not measured and rule.stem.partition(".")[0] not in FIELDS:
            raise _unknown_subject(rule, known, f"no analyzer computes {rule.named}")
    subjects = " ".join(rule.subject for rule in rules)
    read = [each for each in list_analyzers() if any(info.name in subjects for info in each.measures)]
    if not read:
        return {}
    names, sources = list(dict.fromkeys(each.name for each in read)), {each.source for each in read}
    return {"analyzers": names, "source": sources.pop() if len(sources) == 1 else "both"}
