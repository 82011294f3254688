"""Checks as a table of rules, a list of the heads that break them, and a sheet; the table of sites of `doctor`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from attnlens.records import Breach, Check, Report, SiteCheck
from attnlens.report.sections.section import Cell, Column, Document, Heading, Section, Sheet, Table, sheet
from attnlens.wording import NO_VALUE, big, clean, format_count


def outcome(report: Report) -> tuple[str, bool]:
    """Return the verdict, `FAILED: 2 of 7 rules` or `PASSED: 7 of 7 rules`, and whether all rules hold."""
    if not report.checks:
        return "No rule was checked.", True
    failed = sum(not check.passed for check in report.checks)
    rules = format_count(len(report.checks), "rule")
    return (f"FAILED: {failed} of {rules}", False) if failed else (f"PASSED: {len(report.checks)} of {rules}", True)


def describe_check(check: Check) -> str:
    """Describe the outcome of a check: value found, value wanted, how many heads break the rule, the worst head."""
    value = "" if check.value is None else f"found {number(check.value)}, "
    heads = ""
    if check.breaches:
        most = check.breaches[0]
        heads = (
            f"; {len(check.breaches)} of {format_count(check.heads or 0, 'head')}, worst {place(most)}: {reads(most)}"
        )
    return clean(f"{check.subject}: {value}wanted {check.wanted}{heads}")


def place(breach: Breach) -> str:
    """Name the head: `layer 3 head 7`."""
    return f"layer {breach.layer} head {breach.head}"


def reads(breach: Breach) -> str:
    """Format the head's value, followed by its earlier value and the p-value of the difference if they are known."""
    now = "no value" if breach.value is None else number(breach.value)
    if breach.base is None:
        return now
    chance = "" if breach.p is None else f" (p {breach.p:.1g})"
    return f"{now}, before {number(breach.base)}{chance}"


def accusation(check: Check, breach: Breach) -> str:
    """Describe one head that breaks a rule."""
    return clean(f"{place(breach)} ({breach.part}): {check.subject} is {reads(breach)}, wanted {check.wanted}")


def number(value: float) -> str:
    """Format a number with four significant digits, a whole number below 10⁶ with all of its digits."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.4g}"


def site_checks(report: Report) -> Iterator[Section]:
    """Yield the table of sites: route, relative error of the attention from tokens and from weights, verdict."""
    rows = report.doctor
    names = [clean(row.site) for row in rows]
    shared, differing = _shared_path(names), tuple(row.verdict == "differs" for row in rows)
    columns = (
        Column("part", [row.part for row in rows], words=True),
        Column("heads", [str(row.heads) for row in rows]),
        Column("route", [row.route for row in rows], words=True),
        Column("q·k logits", [_error(row.tokens_error) for row in rows]),
        Column("weights × inputs", [_error(row.weights_error) for row in rows]),
        Column("verdict", [*map(_verdict, rows)], words=True, alarms=differing),
    )
    sites = Column("site", [f"{'…' * bool(shared)}{name.removeprefix(shared)}" for name in names], words=True)
    notes = (*((f"… stands for {shared}",) if shared else ()), *report.settings.notes)
    yield Section(table=Table((sites,), columns, fit="folded"), notes=notes)


def _verdict(row: SiteCheck) -> str:
    verdict = "DIFFERS" if row.verdict == "differs" else row.verdict or NO_VALUE
    return f"{verdict}\n{clean(row.reason)}" if row.reason else verdict


def _shared_path(sites: Sequence[str]) -> str:
    """Return the common beginning of all paths, up to a dot, if one is too long for its column; else empty."""
    if len(sites) < 2 or max(map(len, sites)) <= 24:  # fits on one line of a terminal of 100 columns
        return ""
    shared = os.path.commonprefix(list(sites))  # noqa: RUF071  # dotted paths, compared character by character
    return shared[: shared.rfind(".") + 1]


def _error(error: float | None) -> str:
    return NO_VALUE if error is None else f"{error:.1e}"


SHOWN = 10
"""Number of heads listed; --json and --csv contain all."""


def document(report: Report) -> Document:
    """Build the document of a check: the model, how many rules hold, each rule, and the worst heads."""
    standing, sound = outcome(report)
    model, heads = report.model, format_count(report.coverage.heads, "head")
    head = Heading(
        title=clean(model.title),
        command="check",
        facts=" · ".join(map(clean, (model.architecture, f"{big(model.parameters)} parameters", heads))),
        asides=(),
        notes=() if report.coverage.complete else (clean(report.coverage.sentence),),
        standing=standing,
        sound=sound,
    )
    return Document(head, tuple(sections(report)))


def sections(report: Report) -> Iterator[Section]:
    """Yield a table with one row per rule, and the list of the worst heads of all rules."""
    checks = report.checks
    if not checks:
        return
    failed = tuple(not check.passed for check in checks)
    names = Column("rule", [clean(check.rule) for check in checks], words=True)
    columns = (
        Column("found", [NO_VALUE if check.value is None else number(check.value) for check in checks]),
        Column("heads", [_heads(check) for check in checks]),
        Column("verdict", ["FAILS" if bad else "holds" for bad in failed], words=True, alarms=failed),
    )
    yield Section("Rules", table=Table([names], columns, fit="folded"))
    cases = worst(checks)
    if cases:
        more = f", the first {SHOWN} of {len(cases)} cases" if len(cases) > SHOWN else ""
        items = tuple(accusation(check, breach) for check, breach in cases[:SHOWN])
        yield Section(f"Heads that break rules{more}", items=items)


def worst(checks: Sequence[Check]) -> list[tuple[Check, Breach]]:
    """List every head that breaks a rule: the worst of each rule, then the second worst of each, and so on.

    Measures have different units, so heads of different rules cannot be ordered by size.
    """
    ranks = zip_longest(*([(check, breach) for breach in check.breaches] for check in checks))
    return [pair for rank in ranks for pair in rank if pair is not None]


def rows(report: Report) -> Sheet:
    """Build the sheet of a check: one row per head that breaks a rule, one row per rule without such heads."""
    cells: list[dict[str, Cell]] = []
    for check in report.checks:
        rule: dict[str, Cell] = {"rule": check.rule, "passed": check.passed, "found": check.value, "heads": check.heads}
        rule["file"] = check.file
        names = ("site", "layer", "head", "part", "value", "base", "p")
        cells += [rule | {name: getattr(breach, name) for name in names} for breach in check.breaches] or [rule]
    return sheet(cells)


def _heads(check: Check) -> str:
    if check.heads is None:
        return NO_VALUE
    heads = f"{len(check.breaches)} of {check.heads} break it" if check.breaches else str(check.heads)
    return f"{heads}, {check.without} without a value" if check.without else heads
