"""Sections and rows on checks (rules, and heads that break rules) and on `doctor` (sites, backends and masks)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from attnlens.records import BackendCheck, Breach, Check, MaskCheck, Report, Sight
from attnlens.records.comparison import BLOCKS, count_checks
from attnlens.report.sections.facts import build_heading
from attnlens.report.sections.section import (
    TEXTS,
    Cell,
    Column,
    Document,
    Row,
    Section,
    Table,
    View,
    build_table,
    section,
)
from attnlens.report.shapes import Names, Shapes
from attnlens.wording import NO_VALUE, SCIENTIFIC, clean, format_count, format_number, format_p

SHOWN = 10  # Maximum number of heads listed; --json and --csv contain all


def describe_check(check: Check, name: Names = str) -> str:
    """Describe the outcome of a check: measured value, condition, number of failures, and the worst failure.

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
    wanted = f"allowed {_tolerance(check)}" if check.against_baseline else f"wanted {check.wanted}"
    return clean(f"{_format_place(breach, name)}: {check.subject} is {_format_breach(breach)}, {wanted}")


def _tolerance(check: Check) -> str:
    """Return the allowed deviation from the baseline: `±5 % or ±0.1` for `as in the baseline (±5 %, ±0.1)`."""
    return check.wanted.partition("(")[2].rstrip(")").replace(", ", " or ")


def _format_place(breach: Breach, name: Names) -> str:
    return f"block {breach.site}" if breach.head is None else f"layer {name(breach.layer)} head {breach.head}"


def _format_breach(breach: Breach) -> str:
    """Format the value of a head or block and, if known, the baseline and the p-value of the difference."""
    now = _format_value(breach.value)
    before = "" if breach.base is None else f", before {number(breach.base)}"
    chance = "" if breach.base is None or breach.p is None else f" (p {format_p(breach.p)})"
    return f"{now}{before}{chance}"


def _format_found(check: Check) -> str:
    """Format the value that a check tested or, if it tested each head, the worst failing or the median value."""
    if check.value is not None:
        return number(check.value)
    if check.breaches:
        return f"worst {_format_value(check.breaches[0].value)}"
    return NO_VALUE if check.median is None else f"median {number(check.median)}"


def _format_base(check: Check) -> str | None:
    """Format the baseline's value of the head, or median over heads, that `_format_found` formats."""
    if check.base is None:
        return None
    return _format_value(check.breaches[0].base) if check.breaches else f"median {number(check.base)}"


def _format_value(value: float | None) -> str:
    return "no value" if value is None else number(value)


def number(value: float) -> str:
    """Format a number with four significant digits, or with all digits if it is whole and below 10⁶."""
    whole = value == round(value) and abs(value) < 1e6
    text = f"{value:.0f}" if whole else f"{value:.4g}"
    return text.replace("-", "−", 1) if value < 0 else text


def document(report: Report, *, updated: bool = False) -> Document:
    """Build the document of a check: the model, the number of failed rules, each rule, and the worst heads.

    `updated` is True if the report's values were written as a baseline.
    """
    failed, rules = sum(not check.passed for check in report.checks), count_checks(report.checks)
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
    """Yield a table with one row per rule, and a list of the worst heads and blocks that break rules."""
    checks = shapes.report.checks
    if not checks:
        return
    rows = []
    for check in checks:
        total = format_count(check.heads or 0, "block") if check.subject == BLOCKS else str(check.heads)
        heads = f"{len(check.breaches)} of {total} fail" if check.breaches else total
        without = f", {check.without} without a value" if check.without else ""
        row = {
            "rule": clean(check.short_rule),
            "found": _format_found(check),
            "baseline": _format_base(check),
            "tolerance": _tolerance(check) if check.against_baseline else None,
            "heads": NO_VALUE if check.heads is None else f"{heads}{without}",
            "verdict": "passed" if check.passed else "FAILED",
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
    """List (check, breach) pairs: the worst breach of each rule, then the second worst of each rule, …"""
    # measures have different units, so heads of different rules cannot be ordered by size
    ranks = zip_longest(*([(check, breach) for breach in check.breaches] for check in checks))
    return [pair for rank in ranks for pair in rank if pair is not None]


def rows(report: Report) -> list[Row]:
    """Build the spreadsheet rows of a check: one per failing head or block, and one per rule without any."""
    rows: list[Row] = []
    for check in report.checks:
        rule: dict[str, Cell] = {"rule": check.rule, "passed": check.passed, "found": check.value, "heads": check.heads}
        rule |= {"median": check.median, "baseline.median": check.base, "file": check.file}
        names = ("site", "layer", "head", "part", "value", "base", "p")
        rows += [rule | {name: getattr(breach, name) for name in names} for breach in check.breaches] or [rule]
    return rows


@section(10, "doctor", ("screen", *TEXTS, "page"))
def site_checks(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield a table of sites with the relative errors of their attention weights; the screen omits agreeing sites."""
    report = shapes.report
    checks = [check for check in report.doctor if view != "screen" or check.verdict != "agrees"]
    if view == "screen" and not checks:
        return  # the heading contains the notes
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


@section(20, "doctor", ("screen", *TEXTS, "page"))
def backend_table(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield a table of properties × backends, outputs that depend on the wrong tokens, and tests that did not run.

    The screen shows only the first fault of each backend and mask.
    """
    backends, layer_name = shapes.report.backends or [], shapes.report.model.layer_name
    ran = [each for each in backends if each.verdict != "not run"]
    masks = list(dict.fromkeys(mask.mask for each in ran for mask in each.masks if mask.verdict != "not checked"))
    if ran:
        yield _property_section(ran, masks, layer_name)
    faults = [
        f"{each.backend}, {mask.mask}: {describe_fault(fault, layer_name)}"
        for each in ran
        for mask in each.masks
        for fault in mask.faults[: 1 if view == "screen" else None]
    ]
    if faults:
        yield Section("Outputs that depend on the wrong tokens", items=faults)
    left_out = [f"{each.backend}: {clean(each.reason or '')}" for each in backends if each.verdict == "not run"]
    left_out += [
        f"{each.backend}, {mask.mask}: {clean(mask.reason)}"
        for each in ran
        for mask in each.masks
        if mask.verdict == "not checked" and mask.reason
    ]
    if left_out:
        yield Section("Not tested", items=left_out)


def _property_section(ran: Sequence[BackendCheck], masks: Sequence[str], name: Names) -> Section:
    predicting = any(each.greedy_agreement is not None for each in ran)
    properties = ["outputs", *["same token"] * predicting, *masks]
    columns = [Column("", properties, words=True)]
    for each in ran:
        agreement = "agrees" if is_close(each) else "DIFFERS"
        verdicts = ["rounds" if each.verdict == "rounds" else agreement]
        errors = [_format_error(each.output_error)]
        if predicting:
            share = each.greedy_agreement  # rounded down, so that 100 % means all
            verdicts.append(NO_VALUE if share is None else f"{math.floor(1000 * share) / 10:g} %")
            errors.append("")
        checked = {mask.mask: mask for mask in each.masks if mask.verdict != "not checked"}
        for mask in map(checked.get, masks):
            verdicts.append(NO_VALUE if mask is None else _format_mask(mask, name))
            errors.append(NO_VALUE if mask is None or not mask.error_judged else _format_error(mask.error))
        title = each.backend if each.dtype == "float64" else f"{each.backend} ({each.dtype})"
        columns += [Column(title, verdicts, words=True), Column("error", errors)]
    meaning = "; same token: equal top-1" if predicting else ""
    notes = [f"Errors relative to float64 (masks: up to 16 tokens){meaning}."]
    if any(not is_close(each) and mask.verdict == "agrees" for each in ran for mask in each.masks):
        notes.append(
            "A mask agrees if each output depends on the right tokens; its error includes that of the backend."
        )
    if any(NO_VALUE in column.cells for column in columns):
        notes.append(f"{NO_VALUE}: not tested, or not comparable because padding moves the positions.")
    return Section("Backends and masks", table=Table(columns[:1], columns[1:], fit="folded"), notes=tuple(notes))


def is_close(check: BackendCheck) -> bool:
    """Return True if a backend's outputs agree with those in float64, within the tolerance or up to rounding."""
    if check.verdict == "rounds":
        return True
    return check.output_error is not None and check.output_error <= (check.tolerance or 0)


def untested_masks(report: Report) -> list[MaskCheck]:
    """Return the mask tests that were requested by name but did not run."""
    named = str(report.settings.options.get("masks", "")).split(",")
    masks = [mask for each in report.backends or [] for mask in each.masks]
    return [mask for mask in masks if mask.verdict == "not checked" and mask.mask in named]


def _format_error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.0e}" if error else "0"


def _format_mask(mask: MaskCheck, name: Names) -> str:
    """Format a mask's verdict or, if an output depends on the wrong tokens, the first fault."""
    if not mask.faults or mask.faults[0].token is None:
        return "agrees" if mask.verdict == "agrees" else "DIFFERS"
    first = mask.faults[0]
    verb = "SEES" if first.kind == "sees" else "MISSES"
    where = "" if first.layer is None else f", layer {name(first.layer)}"
    return f"{first.output} {verb} {first.token}{where}"


def describe_fault(fault: Sight, name: Names) -> str:
    """Describe an output that depends on the wrong tokens: which token it sees or misses, and in which layer.

    `name` returns the name of a layer.
    """
    where = "the model's output" if fault.layer is None else f"layer {name(fault.layer)} ({clean(fault.site or '')})"
    if fault.kind == "differs":
        size = "is not finite" if fault.change is None else f"differs by {fault.change:.0e}"
        return f"token {fault.output} {size} in {where}"
    verb = "sees hidden" if fault.kind == "sees" else "does not see"
    return f"token {fault.output} {verb} token {fault.token} in {where}"


Case = tuple[str, str, Check | str]
"""Test case of a JUnit file: class name, name, and the outcome or the reason why the test did not run."""


def doctor_cases(report: Report) -> Iterator[Case]:
    """Yield one test case per site, per backend, and per mask of a backend."""
    for site in report.doctor:
        errors = [error for error in (site.tokens_error, site.weights_error) if error is not None]
        check = _check("doctor.sites", site.site, "the model's attention", site.passed, max(errors, default=None))
        yield "doctor.sites", site.site, (site.reason or "") if site.verdict == "not checked" else check
    for each in report.backends or []:
        group = f"doctor.{each.backend}"
        wanted = f"outputs as in float64, error at most {each.tolerance or 0:.0e}"
        check = _check(group, "outputs", wanted, is_close(each), each.output_error)
        yield group, "outputs", (each.reason or "") if each.verdict == "not run" else check
        for mask in each.masks:
            faults = [describe_fault(fault, report.model.layer_name) for fault in mask.faults]
            wanted = "; ".join(faults) or mask.reason or "outputs as declared"
            check = _check(group, mask.mask, wanted, mask.verdict == "agrees", mask.error)
            yield group, mask.mask, (mask.reason or "") if mask.verdict == "not checked" else check


def _check(group: str, name: str, wanted: str, passed: bool, error: float | None) -> Check:
    subject = f"{group}: {name}"
    return Check(id=subject, rule=subject, subject=subject, wanted=wanted, passed=passed, value=error)
