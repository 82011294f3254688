"""Checks as a table of rules, a list of the heads that break rules, and spreadsheet rows; `doctor`'s table of sites."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from attnlens.records import Breach, Check, Report
from attnlens.report.sections.section import TEXTS, Cell, Document, Heading, Row, Section, View, build_table, section
from attnlens.report.shapes import Shapes
from attnlens.wording import NO_VALUE, big, clean, format_count, format_p

Names = Callable[[int], str]
SHOWN = 10  # Number of heads listed; --json and --csv contain all


def describe_check(check: Check, name: Names = str) -> str:
    """Describe the outcome of a check: value found, value wanted, how many heads break the rule, the worst head.

    `name` returns the name of a layer.
    """
    text = f"{check.subject}: {'' if check.value is None else f'found {number(check.value)}, '}wanted {check.wanted}"
    if check.breaches:
        count, first = f"{len(check.breaches)} of {format_count(check.heads or 0, 'head')}", check.breaches[0]
        text += f"; {count}, worst layer {name(first.layer)} head {first.head}: {_format_breach(first)}"
    return clean(text)


def describe_breach(check: Check, breach: Breach, name: Names = str) -> str:
    """Describe one head that breaks a rule."""
    place = f"layer {name(breach.layer)} head {breach.head} ({breach.part})"
    return clean(f"{place}: {check.subject} is {_format_breach(breach)}, wanted {check.wanted}")


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
    model, heads = report.model, format_count(report.coverage.heads, "head")
    failed, rules = sum(not check.passed for check in report.checks), format_count(len(report.checks), "rule")
    standing = f"FAILED: {failed} of {rules}" if failed else f"PASSED: {len(report.checks)} of {rules}"
    head = Heading(
        title=clean(model.title),
        command="check",
        facts=" · ".join(map(clean, (model.architecture, f"{big(model.parameters)} parameters", heads))),
        asides=(),
        notes=() if report.coverage.complete else (clean(report.coverage.sentence),),
        standing=standing if report.checks else f"Baseline updated: {heads}" if updated else "No rule was checked",
        sound=not failed,
    )
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
        yield Section(f"Heads that break rules{more}", items=items)


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
    """Yield the table of sites: route, relative error of the attention from tokens and from weights, verdict.

    The screen omits sites that agree.
    """
    report = shapes.report
    checks = [check for check in report.doctor if view != "screen" or check.verdict != "agrees"]
    sites = [clean(check.site) for check in checks]
    shared = ""  # common beginning of all paths, up to a dot, left out unless all fit on a line of 100 columns
    if len(sites) > 1 and max(map(len, sites)) > 24:
        common = os.path.commonprefix(sites)  # noqa: RUF071  # dotted paths, compared character by character
        shared = common[: common.rfind(".") + 1]
    notes = [f"… stands for {shared}"] if shared else []
    rows = []
    for site, check in zip(sites, checks, strict=True):
        tokens, weights = check.tokens_error, check.weights_error
        verdict = "DIFFERS" if check.verdict == "differs" else check.verdict or NO_VALUE
        row = {
            "site": f"{'…' * bool(shared)}{site.removeprefix(shared)}",
            "part": check.part,
            "heads": str(check.heads),
            "route": check.route,
            "q·k logits": NO_VALUE if tokens is None else f"{tokens:.1e}",
            "weights × inputs": NO_VALUE if weights is None else f"{weights:.1e}",
            "verdict": f"{verdict}\n{clean(check.reason)}" if check.reason else verdict,
        }
        rows.append(row)
    table = build_table(rows, {"site"}, {"site", "part", "route", "verdict"}, fit="folded")
    yield Section(table=table, notes=(*notes, *report.settings.notes))
