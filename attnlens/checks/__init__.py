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

    `report` is a Report or the path of its JSON file. `rules` is a table {"tokens.entropy": ["min > 0.05"]}, the path
    of a TOML file with a table [check], or strings such as "tokens.entropy: min > 0.05". `baseline` is the path of a
    baseline file. A head fails if its change from the baseline exceeds both the share `relative` (default 0.05) of the
    baseline's value and `absolute` (default: `relative` times the measure's range). If both values have standard
    errors, the change must also be significant at the false-discovery rate `fdr` (default 0.05). Raise UsageError if a
    rule is invalid or matches nothing, if the report is partial (unless `allow_partial` is True), or if the baseline
    belongs to a different run.
    """
    from attnlens.checks.judging import check_report
    from attnlens.checks.rule import Tolerance, parse_rules
    from attnlens.records import Report, read_baseline
    from attnlens.report.report import read_report

    subject = report if isinstance(report, Report) else read_report(checked_path("report", report))
    parsed = [] if rules in ((), None) and baseline is not None else parse_rules(rules)
    bounds = {"relative": relative, "absolute": absolute, "fdr": fdr}
    tolerance = Tolerance(**{name: number for name, number in bounds.items() if number is not None})
    loaded = None if baseline is None else read_baseline(checked_path("baseline", baseline))
    file = None if baseline is None else str(baseline)
    return check_report(subject, parsed, loaded, tolerance, file, allow_partial=allow_partial)
