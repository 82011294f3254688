"""Check a report against rules and a baseline, without torch.

Contents: `check` (the public function), `rule` (parse rules; tolerances), `judging` (find the values a rule covers,
and judge them), `pytest_plugin` (the fixtures `attention_report` and `assert_attention`).
Inputs: a `Report` or its file, rules as texts, table or TOML file, and a baseline file. Outputs: the report with its
`records.Check` list. Importers: `cli`, `runs/doctor.py`, `attnlens` itself, and pytest for the plugin. Imports
`analyzers` (names of measures), `report` and `records`.
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
    """Return the report with its `checks`: the outcome of every rule, and of every measure of the baseline.

    `rules` is a table {"tokens.entropy": ["min > 0.05"]}, the path of a TOML file with a table [check], or texts like
    "tokens.entropy: min > 0.05". `relative`, `absolute` and `fdr` limit the deviation from the baseline. Raise
    UsageError for a rule that is invalid or matches nothing, a partial report, and a baseline of another run.
    """
    from attnlens.checks.judging import verdict
    from attnlens.checks.rule import Tolerance, rules_of
    from attnlens.records import Report, read_baseline
    from attnlens.report.report import read_report

    subject = report if isinstance(report, Report) else read_report(checked_path("report", report))
    parsed = [] if rules in ((), None) and baseline is not None else rules_of(rules)
    bounds = {"relative": relative, "absolute": absolute, "fdr": fdr}
    tolerance = Tolerance(**{name: number for name, number in bounds.items() if number is not None})
    loaded = None if baseline is None else read_baseline(checked_path("baseline", baseline))
    file = None if baseline is None else str(baseline)
    return verdict(subject, parsed, loaded, tolerance, file, allow_partial=allow_partial)
