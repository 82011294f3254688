"""Sentences of checks: how a rule came out, and what a head that breaks it reads."""

from __future__ import annotations

from attnlens.records import Breach, Check, Report
from attnlens.wording import clean, counted


def outcome(report: Report) -> tuple[str, bool]:
    """`FAILED: 2 of 7 rules`, or `PASSED: 7 of 7 rules`; whether they all hold."""
    if not report.checks:
        return "No rule was checked.", True
    failed = sum(not check.passed for check in report.checks)
    rules = counted(len(report.checks), "rule")
    return (f"FAILED: {failed} of {rules}", False) if failed else (f"PASSED: {len(report.checks)} of {rules}", True)


def told(check: Check) -> str:
    """What was found and what was wanted, how many heads break it and the worst of them."""
    found = "" if check.value is None else f"found {number(check.value)}, "
    blamed = f"; {broken(check)}" if check.breaches else ""
    return clean(f"{check.subject}: {found}wanted {check.wanted}{blamed}")


def broken(check: Check) -> str:
    """`3 of 72 heads, worst layer 3 head 7: 0.031`."""
    worst = check.breaches[0]
    return f"{len(check.breaches)} of {counted(check.heads or 0, 'head')}, worst {place(worst)}: {reads(worst)}"


def place(breach: Breach) -> str:
    """Which head it is, in words."""
    return f"layer {breach.layer} head {breach.head}"


def reads(breach: Breach) -> str:
    """What the head reads, beside what it read before where that is known."""
    now = "no value" if breach.value is None else number(breach.value)
    if breach.base is None:
        return now
    chance = "" if breach.p is None else f" (p {breach.p:.1g})"
    return f"{now}, before {number(breach.base)}{chance}"


def accusation(check: Check, breach: Breach) -> str:
    """The sentence on one head that breaks a rule."""
    return clean(f"{place(breach)} ({breach.part}): {check.subject} is {reads(breach)}, wanted {check.wanted}")


def number(value: float) -> str:
    """A number with four figures, a whole one as it is."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.4g}"
