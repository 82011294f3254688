"""Every site as `doctor` found it, as a table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from attnlens.records import Report, SiteCheck
from attnlens.sections.section import Column, Section, Table
from attnlens.wording import NO_VALUE, clean

WIDEST_SITE = 24
"""Characters of a site's path that a terminal of 100 columns shows on one line."""


def site_checks(report: Report) -> Iterator[Section]:
    """Every site: its route, both errors (relative, worst), and the verdict in words."""
    rows = report.doctor
    names = [clean(row.site) for row in rows]
    shared = _shared_path(names)
    columns = (
        Column("", "part", tuple(row.part for row in rows), words=True),
        Column("", "heads", tuple(str(row.heads) for row in rows)),
        Column("", "route", tuple(row.route for row in rows), words=True),
        Column("", "q·k logits", tuple(_error(row.tokens_error) for row in rows)),
        Column("", "weights × inputs", tuple(_error(row.weights_error) for row in rows)),
        Column(
            "",
            "verdict",
            tuple(map(_verdict, rows)),
            words=True,
            alarms=tuple(row.verdict == "differs" for row in rows),
        ),
    )
    sites = Column("", "site", tuple(f"{'…' * bool(shared)}{name.removeprefix(shared)}" for name in names), words=True)
    notes = (*((f"… stands for {shared}",) if shared else ()), *report.settings.notes)
    yield Section(table=Table((sites,), columns, fit="folded"), notes=notes)


def _verdict(row: SiteCheck) -> str:
    said = "DIFFERS" if row.verdict == "differs" else row.verdict or NO_VALUE
    return f"{said}\n{clean(row.reason)}" if row.reason else said


def _shared_path(sites: Sequence[str]) -> str:
    """What all paths begin with, up to a dot, where they are too long for their column; else nothing."""
    if len(sites) < 2 or max(map(len, sites)) <= WIDEST_SITE:
        return ""
    shared = os.path.commonprefix(list(sites))  # noqa: RUF071  # dotted paths, compared character by character
    return shared[: shared.rfind(".") + 1]


def _error(error: float | None) -> str:
    return NO_VALUE if error is None else f"{error:.1e}"
