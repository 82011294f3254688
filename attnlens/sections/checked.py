"""Checks as a table of rules and a list of the heads that break them; as rows of a sheet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from attnlens.records import Breach, Check, Report
from attnlens.sections.section import Cell, Column, Document, Heading, Section, Sheet, Table, sheet
from attnlens.sentences import checked
from attnlens.wording import NO_VALUE, big, clean, counted

SHOWN = 10
"""Heads that are listed; --json and --csv have all."""


def document(report: Report) -> Document:
    """The verdict on one page: the model, how many rules hold, each rule, and the worst heads."""
    standing, sound = checked.outcome(report)
    model, heads = report.model, counted(report.coverage.heads, "head")
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
    """Every rule as a row; the worst heads of all rules together."""
    checks = report.checks
    if not checks:
        return
    names = Column("", "rule", tuple(clean(check.rule) for check in checks), words=True)
    columns = (
        Column("", "found", tuple(_found(check) for check in checks)),
        Column("", "heads", tuple(_heads(check) for check in checks)),
        Column(
            "",
            "verdict",
            tuple("holds" if check.passed else "FAILS" for check in checks),
            words=True,
            alarms=tuple(not check.passed for check in checks),
        ),
    )
    yield Section("Rules", table=Table((names,), columns, fit="folded"))
    blamed = worst(checks)
    if blamed:
        more = f", the first {SHOWN} of {len(blamed)}" if len(blamed) > SHOWN else ""
        items = tuple(checked.accusation(check, breach) for check, breach in blamed[:SHOWN])
        yield Section(f"Heads that break rules{more}", items=items)


def worst(checks: Sequence[Check]) -> list[tuple[Check, Breach]]:
    """Every head that breaks a rule: of each rule the worst, then of each the second worst, and so on.

    Measures have different units, so that heads of different rules can't be ordered by size.
    """
    ranks = zip_longest(*([(check, breach) for breach in check.breaches] for check in checks))
    return [pair for rank in ranks for pair in rank if pair is not None]


def rows(report: Report) -> Sheet:
    """One row a head that breaks a rule, and one for every rule that none breaks alone."""
    found: list[dict[str, Cell]] = []
    for check in report.checks:
        own: dict[str, Cell] = {
            **{"rule": check.rule, "passed": check.passed, "found": check.value, "heads": check.heads},
            "file": check.file,
        }
        blamed: list[dict[str, Cell]] = [
            {
                **{"site": breach.site, "layer": breach.layer, "head": breach.head, "part": breach.part},
                **{"value": breach.value, "base": breach.base, "p": breach.p},
            }
            for breach in check.breaches
        ]
        found += [own | row for row in blamed] or [own]
    return sheet(found)


def _found(check: Check) -> str:
    return NO_VALUE if check.value is None else checked.number(check.value)


def _heads(check: Check) -> str:
    if check.heads is None:
        return NO_VALUE
    of = f"{check.heads} of {check.heads + check.without}" if check.without else str(check.heads)
    return f"{len(check.breaches)} of {of}" if check.breaches and not check.without else of
