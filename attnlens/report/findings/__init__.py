"""Findings: the answers that a report gives, and the commands to run next.

Contents: `heads` (inspections: each head against chance), `swaps` (with plans of ranks), `comparisons`,
`verdicts` (`doctor`, experiments, studies).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from shlex import quote

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
"""For each kind of report, the functions that yield its findings and, most useful first, the commands to run next."""
COMMANDS = 2  # Maximum number of commands shown


def show_again(shapes: Shapes) -> str:
    """Return the option of `attnlens report` that shows more than the report's summary; "" if there is nothing more."""
    report = shapes.report
    if report.kind == "doctor":
        return "--table" if any(each.verdict == "differs" for each in report.backends or []) else ""
    if report.kind == "experiments":
        drawn = any(each.trajectories or verdicts.CORRELATION in each.final for each in report.experiments)
        return "--figure curves.png" if drawn else "--table"
    files = {"inspection": "heads.html", "swap": "cost.html", "comparison": "changes.html", "studies": "table.html"}
    return f"--html {files[report.kind]}"


def find(shapes: Shapes) -> list[Finding]:
    """Return the findings of a report in display order."""
    return list(KINDS[shapes.report.kind][0](shapes))


def next_commands(shapes: Shapes) -> list[str]:
    """Return at most COMMANDS commands to run next and, if the report was saved, a command that shows more of it."""
    commands = list(dict.fromkeys(KINDS[shapes.report.kind][1](shapes)))[:COMMANDS]
    written, options = shapes.written, show_again(shapes)
    if written is not None and written.offline:
        without_model = "attnlens reproduce", "attnlens converge --experiment"
        commands = [each if each.startswith(without_model) else f"{each} --offline" for each in commands]
    if written is not None and written.report is not None and not written.shown and options:
        commands.append(f"attnlens report {quote(written.report)} {options}")
    return commands


def advise_saving(shapes: Shapes) -> str:
    """Return advice to save the result of a long command; "" if the command is short or the result was saved."""
    report, written, options = shapes.report, shapes.written, show_again(shapes)
    if written is None or report.kind in ("inspection", "doctor"):
        return ""
    if report.plan is not None and swaps.plan_file(written) is None:
        scope = (
            f"attnlens ranks {heads.model_argument(report)} --ranks FILE --save smaller{' --offline' * written.offline}"
        )
        return f"Add --plan FILE to this command to keep the ranks; then, {scope} applies them."
    if written.report is not None or written.shown or report.plan is not None:
        return ""
    return f"Add --json FILE to this command to keep its result; then, attnlens report FILE {options} shows more of it."
