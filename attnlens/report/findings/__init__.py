"""Findings: the answers that a report gives, and the commands that follow from them.

Contents: `heads` (inspections: each head against chance), `changes` (swaps, plans of ranks, comparisons), `verdicts`
(`doctor`, experiments, studies).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attnlens.records import Finding, Kind
from attnlens.report.findings import changes, heads, verdicts
from attnlens.report.shapes import Shapes

FINDERS: dict[Kind, Callable[[Shapes], Iterable[Finding]]] = {
    "inspection": heads.findings,
    "swap": changes.swap_findings,
    "comparison": changes.comparison_findings,
    "doctor": verdicts.doctor_findings,
    "experiments": verdicts.experiment_findings,
    "studies": verdicts.study_findings,
}
"""Function that derives the findings of each kind of report."""
NEXT: dict[Kind, Callable[[Shapes], Iterable[str]]] = {
    "inspection": heads.next_commands,
    "swap": changes.after_swap,
    "comparison": changes.after_comparison,
    "doctor": verdicts.after_doctor,
    "experiments": verdicts.after_experiments,
    "studies": verdicts.after_studies,
}
"""Function that yields the commands that follow from the findings, the most useful first."""
COMMANDS = 2  # Number of commands shown


def find(shapes: Shapes) -> list[Finding]:
    """Return the findings of a report, in the order in which they are read."""
    return list(FINDERS[shapes.report.kind](shapes))


def next_commands(shapes: Shapes) -> list[str]:
    """Return two commands that follow from the findings of a report."""
    return list(dict.fromkeys(NEXT[shapes.report.kind](shapes)))[:COMMANDS]
