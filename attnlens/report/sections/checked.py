"""Checks as a table of rules, a list of the heads that break rules, and spreadsheet rows; `doctor`'s table of sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from attnlens.records import Breach, Check, Report
from attnlens.report.sections.facts import build_heading
from attnlens.report.sections.section import TEXTS, Cell, Document, Row, Section, View, build_table, section
from attnlens.report.shapes import Shapes
from attnlens.wording import NO_VALUE, SCIENTIFIC, clean, format_count, format_number, format_p

Names = Callable[[int], str]
SHOWN = 10  # Number of heads listed; --json and --csv contain all


def describe_check(check: Check, name: Names = str) -> str:
    """Describe the outcome of a check: value found, value wanted, how many heads break the rule, the worst head.

    `name` returns the name of a layer.
    """
    text = f"{check.subject}: {'' if check.value is None else f'found {number(check.value)}, '}wanted {check.wanted}"
    if check.breaches:
        first = check.breaches[0]
        count = format_count(check.heads or 0, "block" if first.head is None else "head")
        text += f"; {len(check.breaches)} of {count}, worst {_format_place(first, name)}: {_format_breach(first)}"
    return clean(text)


def describe_breach(check: Check, breach: Breach, name: Names = str) -> str:
    """Describe one head or block that breaks a rule."""
    place = _format_place(breach, name) + ("" if breach.head is None else f" ({breach.part})")
    return clean(f"{place}: {check.subject} is {_format_breach(breach)}, wanted {check.wanted}")


def _format_place(breach: Breach, name: Names) -> str:
    return f"block {breach.site}" if breach.head is None else f"layer {name(breach.layer)} head {breach.head}"


def _format_breach(breach: Breach) -> str:
    """Format the head's value, followed by its earlier value and the p-value of the difference if they are known."""
    now = "no value" if breach.value is None else number(breach.value)
    before = "" if breach.base is None else f", before {number(breach.base)}"
    chance = "" if breach.base is None or breach.p is None else f" (p {format_p(breach.p)})"
    return f"{now}{before}{chance}"


def _format_found(check: Check) -> str:
    """Format the value that was compared, or the median over the heads if they are compared individually."""
    if check.value is not None:
        return number(check.value)
    return NO_VALUE if check.median is None else f"median {number(check.median)}"


def number(value: float) -> str:
    """Format a number with four significant digits, or a whole number below 10⁶ with all digits."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.4g}"


def document(report: Report, *, updated: bool = False) -> Document:
    """Build the document of a check: the model, how many rules hold, each rule, and the worst heads.

    `updated` is True if the report's values were written as a baseline.
    """
    failed, rules = sum(not check.passed for check in report.checks), format_count(len(report.checks), "rule")
    standing = f"FAILED: {failed} of {rules}" if failed else f"PASSED: {len(report.checks)} of {rules}"
    if not report.checks:
        heads = format_count(report.coverage.heads, "head")
        standing = f"Baseline updated: {heads}" if updated else "No rule was checked"
    notes = [] if report.coverage.complete else [clean(report.coverage.sentence)]
    head = replace(build_heading(report, whole=True), command="check", notes=notes, standing=standing, sound=not failed)
    return Document(head, tuple(rule_sections(Shapes(report), "terminal")))


@section(5, views=("page",))
@section(55, views=("screen", *TEXTS))
def rule_sections(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield a table with one row per rule, and the list of the worst heads of all rules."""
    checks = shapes.report.checks
    if not checks:
        return
    rows = []
    for check in checks:
        heads = f"{len(check.breaches)} of {check.heads} fail" if check.breaches else str(check.heads)
        without = f", {check.without} without a value" if check.without else ""
        against_baseline = check.id.startswith("baseline: ")
        row = {
            "rule": clean(check.subject if against_baseline else check.rule),
            "found": _format_found(check),
            "baseline": None if check.base is None else f"median {number(check.base)}",
            "tolerance": check.wanted.partition("(")[2].rstrip(")") if against_baseline else None,
            "heads": NO_VALUE if check.heads is None else f"{heads}{without}",
            "verdict": "holds" if check.passed else "FAILS",
        }
        rows.append(row)
    yield Section("Rules", table=build_table(rows, {"rule"}, {"rule", "verdict"}, fit="folded"))
    cases = worst(checks)
    if cases:
        more = f", the first {SHOWN} of {len(cases)} cases" if len(cases) > SHOWN else ""
        items = tuple(describe_breach(check, breach, shapes.report.model.layer_name) for check, breach in cases[:SHOWN])
        what = "Heads and blocks" if any(breach.head is None for _, breach in cases) else "Heads"
        yield Section(f"{what} that break rules{more}", items=items)


def worst(checks: Sequence[Check]) -> list[tuple[Check, Breach]]:
    """List every head that breaks a rule: the worst head of each rule, then the second worst of each, and so on."""
    # measures have different units, so heads of different rules cannot be ordered by size
    ranks = zip_longest(*([(check, breach) for breach in check.breaches] for check in checks))
    return [pair for rank in ranks for pair in rank if pair is not None]


def rows(report: Report) -> list[Row]:
    """Build spreadsheet rows of a check: one per head that breaks a rule, and one per rule that no head breaks."""
    rows: list[Row] = []
    for check in report.checks:
        rule: dict[str, Cell] = {"rule": check.rule, "passed": check.passed, "found": check.value, "heads": check.heads}
        rule |= {"median": check.median, "baseline.median": check.base, "file": check.file}
        names = ("site", "layer", "head", "part", "value", "base", "p")
        rows += [rule | {name: getattr(breach, name) for name in names} for breach in check.breaches] or [rule]
    return rows


@section(10, "doctor", ("screen", *TEXTS, "page"))
def site_checks(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield the table of sites, with relative errors of the attention; the screen omits sites that agree."""
    report = shapes.report
    checks = [check for check in report.doctor if view != "screen" or check.verdict != "agrees"]
    rows = []
    for check in checks:
        verdict = "DIFFERS" if check.verdict == "differs" else check.verdict or NO_VALUE
        row = {
            "site": clean(check.site),
            "part": check.part,
            "heads": str(check.heads),
            "route": check.route,
            "q·k logits": format_number(check.tokens_error, SCIENTIFIC),
            "weights × inputs": format_number(check.weights_error, SCIENTIFIC),
            "verdict": f"{verdict}\n{clean(check.reason)}" if check.reason else verdict,
        }
        rows.append(row)
    table = build_table(rows, {"site"}, {"site", "part", "route", "verdict"}, fit="folded")
    yield Section(table=table, notes=report.settings.notes)
