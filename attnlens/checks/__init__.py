"""Check a report against rules and a baseline, without torch.

`rule` parses rules and defines tolerances, `judging` finds and checks the values that a rule covers, and
`pytest_plugin` defines fixtures for pytest.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from attnlens.arguments import path as checked_path
from attnlens.arguments import public

if TYPE_CHECKING:
    from attnlens.records import Report


@public
def check(
    report: Report | str | PathLike[str],
    rules: object = (),
    *,
    baseline: str | PathLike[str] | None = None,
    relative: float | None = None,
    absolute: float | None = None,
    fdr: float | None = None,
    allow_partial: bool = False,
) -> Report:
    """Check a report against rules and a baseline, and return the report with the outcomes in `checks`.

    `rules` is a table {"tokens.entropy": ["min > 0.05"]}, the path of a TOML file with a table [check], or strings such
    as "tokens.entropy: min > 0.05". `relative`, `absolute` and `fdr` set the tolerance for changes from the baseline.
    Raise UsageError if a rule is invalid or matches nothing, if the report is partial (unless `allow_partial` is True),
    or if the baseline belongs to a different run.
    """
    from attnlens.checks.judging import verdict
    from attnlens.checks.rule import Tolerance, collect_rules
    from attnlens.records import Report, read_baseline
    from attnlens.report.report import read_report

    subject = report if isinstance(report, Report) else read_report(checked_path("report", report))
    parsed = [] if rules in ((), None) and baseline is not None else collect_rules(rules)
    bounds = {"relative": relative, "absolute": absolute, "fdr": fdr}
    tolerance = Tolerance(**{name: number for name, number in bounds.items() if number is not None})
    loaded = None if baseline is None else read_baseline(checked_path("baseline", baseline))
    file = None if baseline is None else str(baseline)
    return verdict(subject, parsed, loaded, tolerance, file, allow_partial=allow_partial)
