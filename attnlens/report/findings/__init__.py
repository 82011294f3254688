"""Findings: the answers that a report gives, and the commands that follow from them.

Contents: `heads` (inspections: each head against chance), `swaps` (with plans of ranks), `comparisons`,
`verdicts` (`doctor`, experiments, studies).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attnlens.records import Finding, Kind
from attnlens.report.findings import comparisons, heads, swaps, verdicts
from attnlens.report.shapes import Shapes

KINDS: dict[Kind, tuple[Callable[[Shapes], Iterable[Finding]], Callable[[Shapes], Iterable[str]]]] = {
    "inspection": (heads.findings, heads.next_commands),
    "swap": (swaps.swap_findings, swaps.after_swap),
    "comparison": (comparisons.comparison_findings, comparisons.after_comparison),
    "doctor": (verdicts.doctor_findings, verdicts.after_doctor),
    "experiments": (verdicts.experiment_findings, verdicts.after_experiments),
    "studies": (verdicts.study_findings, verdicts.after_studies),
}
"""For each kind of report, the functions that yield its findings, and the commands to run next, most useful first."""
COMMANDS = 2  # Maximum number of commands shown


def find(shapes: Shapes) -> list[Finding]:
    """Return the findings of a report in display order."""
    return list(KINDS[shapes.report.kind][0](shapes))


def next_commands(shapes: Shapes) -> list[str]:
    """Suggest at most COMMANDS commands for the next step, based on a report's findings."""
    return list(dict.fromkeys(KINDS[shapes.report.kind][1](shapes)))[:COMMANDS]
