"""The one verdict behind table, exit code, JSON, JUnit and annotations: a report with its checks."""

from __future__ import annotations

from collections.abc import Sequence

from attnlens.records import Baseline, Report
from attnlens.rules.baselines import against, refuse_other
from attnlens.rules.judging import judged, refuse_unfit
from attnlens.rules.rule import Rule
from attnlens.rules.tolerance import Tolerance


def verdict(
    report: Report,
    rules: Sequence[Rule],
    baseline: Baseline | None = None,
    tolerance: Tolerance = Tolerance(),  # noqa: B008  # it is frozen
    file: str | None = None,
    *,
    allow_partial: bool = False,
    allow_other_model: bool = False,
) -> Report:
    """The report with its `checks`: one a rule, and one a measure of the baseline, whose file is `file`.

    Raises UsageError for a report that nothing can be concluded from, a rule that matches nothing, and a baseline of
    another run.
    """
    refuse_unfit(report, allow_partial=allow_partial)
    checks = judged(report, rules)
    if baseline is not None:
        refuse_other(report, baseline, allow_other_model=allow_other_model)
        checks += against(report, baseline, tolerance, file)
    return report.model_copy(update={"checks": checks})
