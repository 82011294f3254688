"""The command `check`: a report, or a model's, held against rules and a baseline."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnlens.cli import held
from attnlens.cli import parameters as opt
from attnlens.cli.commands.converge import FAILED, GIVEN
from attnlens.cli.delivery import Failures, show, write_data
from attnlens.cli.outputs import DATA, STDOUT, Outputs, product
from attnlens.cli.show import complain, guarded, say
from attnlens.errors import OutputError
from attnlens.requests.check import PANEL, JudgingRequest

if TYPE_CHECKING:
    from attnlens.records import Report
    from attnlens.sections.section import Document

Subject = Annotated[
    str,
    typer.Argument(metavar="REPORT|MODEL", help="A report of --json, or a model, which is inspected first."),
]
Again = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="With --recompute: the model that the report should be of.")
]
RuleFile = Annotated[
    str | None,
    opt.option(
        "--rules",
        help='TOML file with a table `[check]`, as in `"tokens.entropy" = ["min > 0.05"]`.',
        metavar="FILE",
        show_default="attnlens.toml, or [tool.attnlens.check] of pyproject.toml",
        call_only="read",
    ),
]
Rules = Annotated[
    list[str] | None,
    opt.option(
        "--rule",
        help="A rule, as in `tokens.entropy: min > 0.05`; repeatable. With it no default file of rules is read.",
        metavar="RULE",
        call_only="read",
    ),
]
BaselineFile = Annotated[
    str | None,
    opt.option("--baseline", panel=PANEL, help="What heads should read.", metavar="FILE", call_only="read"),
]
Update = Annotated[
    bool,
    opt.option(
        "--update-baseline", panel=PANEL, help="Accept this report: write --baseline anew.", call_only="written"
    ),
]
Recompute = Annotated[
    int | None,
    opt.option("--recompute", help="Recompute so many of the report's heads from MODEL.", metavar="NUMBER", min=1),
]
Annotations = Annotated[
    bool,
    opt.option(
        "--annotations",
        panel=opt.OUTPUT,
        help="Annotate the ten worst as GitHub shows them, and write the step's summary; on where GITHUB_ACTIONS is.",
    ),
]
Junit = Annotated[str | None, opt.output("--junit", "Write a testcase a rule as JUnit XML.")]
CsvRows = Annotated[str | None, opt.output("--csv", "Write one row a head that breaks a rule as CSV.")]


@guarded
@opt.also(opt.parameters(JudgingRequest) | held.READING, opt.TOLD)
def check(
    context: typer.Context,
    subject: Subject,
    model: Again = None,
    rules: RuleFile = None,
    rule: Rules = None,
    baseline: BaselineFile = None,
    update_baseline: Update = False,
    recompute: Recompute = None,
    annotations: Annotations = False,
    junit: Junit = None,
    csv: CsvRows = None,
    markdown: opt.Markdown = None,
    **_shared: Any,
) -> None:
    """Hold a report, or a model, against rules and a baseline; exit 1 where one fails. Without torch for a report."""
    given = context.params
    typed = [name for name in given if (source := context.get_parameter_source(name)) and source.name in GIVEN]
    held.refuse_ignored(given, typed)
    outputs, asked = Outputs.of(given), held.rules_of(given)
    kept = held.baseline_of(given)
    held.check_places(outputs, given, asked)
    report = held.judged(held.report_of(subject, given, outputs, asked, kept), given, outputs, asked, kept)
    _deliver(outputs, report, given)
    failed = [one.rule for one in report.checks if not one.passed]
    if failed:
        from attnlens.wording import counted, listed

        complain(
            f"{len(failed)} of {counted(len(report.checks), 'rule')} failed: {listed(failed, 3)}.",
            "The table says what was found; --json, --csv and --junit keep it.",
        )
        raise typer.Exit(FAILED)


def _writers() -> dict[str, Callable[[Report], str]]:
    """The text of each kind of file; loaded where one is asked for."""
    from attnlens.render.csv_text import spreadsheet
    from attnlens.render.junit import junit
    from attnlens.render.markdown import markdown
    from attnlens.sections import checked

    return {
        "json": lambda report: report.to_json(),
        "csv": lambda report: spreadsheet(checked.rows(report)),
        "markdown": lambda report: markdown(checked.document(report)),
        "junit": junit,
    }


def _deliver(outputs: Outputs, report: Report, given: Mapping[str, Any]) -> None:
    """Write the data, show the table, annotate; what fails is raised when the rest is done."""
    failures = Failures()
    written: list[str] = []
    if outputs.files(*DATA):
        write_data(outputs, report, _writers(), failures, written)
    with failures.kept():
        show(outputs, report, _document)
    if given["annotations"] or os.environ.get("GITHUB_ACTIONS") == "true":
        with failures.kept():
            _annotate(report, stderr=outputs.json == STDOUT)
    if written and not outputs.quiet:
        say(f"Wrote {', '.join(written)}")
    failures.end(interrupted=False)


def _document(_outputs: Outputs, report: Report) -> Document:
    from attnlens.sections import checked

    return checked.document(report)


def _annotate(report: Report, *, stderr: bool) -> None:
    """Print workflow commands, and add the verdict to the step's summary where there is one."""
    from attnlens.render.github import step_summary, workflow_commands

    with product():
        for line in workflow_commands(report):
            typer.echo(line, err=stderr)
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if place:
        try:
            with Path(place).open("a", encoding="utf-8") as file:
                file.write(step_summary(report))
        except (OSError, ValueError) as error:
            raise OutputError(
                f"The step's summary {place} can't be written: {error}.",
                "Unset GITHUB_STEP_SUMMARY, or make it writable.",
            ) from None
