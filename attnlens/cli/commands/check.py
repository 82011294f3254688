"""The command `check`: check a report or a model against rules and a baseline."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from attnlens import requests
from attnlens.arguments import names_report
from attnlens.cli import parameters as opt
from attnlens.cli.exit_codes import FAILED
from attnlens.cli.outputs import (
    STDOUT,
    Outputs,
    checked_model,
    deliver,
    describe_input,
    find_inputs,
    guard_stdout,
    working,
)
from attnlens.cli.parameters import FILES
from attnlens.cli.show import complain, say
from attnlens.errors import OutputError, UsageError
from attnlens.files import check_writable, local_path
from attnlens.requests.run_options import CheckRequest, SharedRequest
from attnlens.wording import join_items

if TYPE_CHECKING:
    from attnlens.checks.rule import Rule
    from attnlens.records import Baseline, Report

READING = opt.parameters(requests.InspectRequest, without=("show", *SharedRequest.model_fields))  # For inspections
RECOMPUTED = {*requests.Loading.model_fields, "device_map", "text", "pairs", "image", "audio", "batch_size"}
"""Options in READING that also apply to --recompute, because the report does not determine them."""

SUBJECT = opt.argument("subject", "A report written by --json, or a model to inspect first.", str, "REPORT|MODEL")
MODEL = opt.argument("model", "With --recompute: the model from which the report was computed.", metavar="MODEL")
JUNIT = opt.output("--junit", "Write a JUnit XML file with one test case per rule.")
CSV = opt.output(
    "--csv", "Write a CSV file: one row per head that breaks a rule, and one row per rule that no head breaks."
)


@opt.with_options(
    SUBJECT | MODEL | JUNIT | CSV | opt.MARKDOWN, opt.parameters(CheckRequest) | READING, opt.REPORT_OPTIONS
)
def check(context: typer.Context) -> None:
    """Check a report or model against rules and a baseline; exit 1 if a check fails.

    Checking a report does not require torch."""
    from attnlens.checks import judging  # late, because it loads the records
    from attnlens.checks.rule import Tolerance
    from attnlens.records.comparison import count_checks
    from attnlens.report.render.markdown import junit, markdown, spreadsheet
    from attnlens.report.report import read_report
    from attnlens.report.sections import checked

    params = context.params
    subject, model, request = params["subject"], params["model"], opt.build(CheckRequest, params)
    _refuse_ignored(subject, model, request, opt.command_line_options(context))
    outputs, rules = Outputs.of(params), _load_rules(request)
    stored = _load_baseline(subject, request)
    inputs = find_inputs(params, [model or subject] if model or not names_report(subject) else [])
    _add_inputs(subject, request, inputs, rules)
    outputs.check(inputs)
    reading = opt.build(requests.InspectRequest, params)
    if not (names_report(subject) or reading.analyzers or request.update_baseline) and reading.source == "both":
        reading = reading.with_options(**judging.choose_options(rules, stored))
    if names_report(subject):
        report = read_report(subject)
    else:
        with working(outputs, type(reading).model_fields) as (analyses, progress):
            report = analyses.inspect(checked_model(subject), progress=progress, request=reading)
    tolerance = Tolerance(request.relative, request.absolute, request.fdr)
    judged = judging.check_report(
        report, rules, stored, tolerance, request.baseline, allow_partial=request.allow_partial
    )
    if request.update_baseline and request.baseline is not None:  # first, before anything else can fail
        judging.build_baseline(report).write_json(request.baseline)
        if not outputs.quiet:
            say(f"Wrote {request.baseline}")
    if model is not None and request.recompute is not None:
        options = {name: value for name, value in reading.explicit().items() if name in RECOMPUTED}
        with working(outputs) as (analyses, progress):
            again = analyses.recompute(report, checked_model(model), request.recompute, progress=progress, **options)
        judged = judged.model_copy(update={"checks": [*judged.checks, *again]})
    annotated = request.annotations or os.environ.get("GITHUB_ACTIONS") == "true"
    annotate = partial(_annotate, judged, stderr=outputs.json == STDOUT) if annotated else None
    document = partial(checked.document, updated=request.update_baseline)
    writers: dict[str, Callable[[Report], str]] = {
        "json": lambda report: report.to_json(),
        "csv": lambda report: spreadsheet(checked.rows(report)),
        "markdown": lambda report: markdown(document(report)),
        "junit": junit,
    }
    deliver(outputs, judged, writers, document, annotate=annotate)
    failed = [each.short_rule for each in judged.checks if not each.passed]
    if failed:
        problem = f"{len(failed)} of {count_checks(judged.checks)} failed: {join_items(failed, 3)}."
        complain(problem, "The table shows each failure and its worst heads.")
        raise typer.Exit(FAILED)


def _refuse_ignored(subject: str, model: str | None, request: CheckRequest, names: list[str]) -> None:
    """Raise UsageError for arguments and options without effect, such as --device if a report is checked."""
    for first, second, missing in (
        ("MODEL", "--recompute", model and not request.recompute),
        ("--recompute", "MODEL", request.recompute and not model),
        ("--update-baseline", "--baseline", request.update_baseline and request.baseline is None),
    ):
        if missing:
            raise UsageError(f"{first} has no effect without {second}.", f"Add {second}, or omit {first}.")
    if not names_report(subject):
        if model:
            problem = f"With two arguments, the first must be a report, but {subject} is not a report."
            raise UsageError(problem, "Give a report (.json), followed by its model.")
        return
    ignored = set(READING) - (RECOMPUTED if model else set())
    for flag in (opt.option_name(name) for name in names if name in ignored):
        raise UsageError(f"{flag} applies to models, but {subject} is a report.", f"Omit {flag}, or give a model.")


def _load_rules(request: CheckRequest) -> list[Rule]:
    """Return the rules from --rules and --rule; if both are missing, those in the first default file that has any.

    Raise UsageError if there is nothing to check.
    """
    from attnlens.checks.rule import parse_rule, read_rules

    rules = [] if request.rules is None else read_rules(Path(request.rules))
    rules += map(parse_rule, request.rule)
    places = (Path(name) for name in FILES if not rules and Path(name).is_file())
    rules = rules or next(filter(None, (read_rules(place, named=False) for place in places)), [])
    if not rules and request.baseline is None and request.recompute is None:
        remedy = "Add --rule 'tokens.entropy: min > 0.05' or --baseline FILE, or a table [check] to attnlens.toml."
        raise UsageError("No rules to check.", remedy)
    return rules


def _load_baseline(subject: str, request: CheckRequest) -> Baseline | None:
    """Return the baseline to compare with; None if --baseline is missing or --update-baseline is given.

    Raise UsageError if the baseline can't be read, or if it is the report itself.
    """
    from attnlens.records import read_baseline

    if request.baseline is None:
        return None
    path = local_path(request.baseline, "--baseline")
    if request.update_baseline:
        return None
    if os.path.realpath(request.baseline) == os.path.realpath(subject):
        raise UsageError(f"Report and baseline are the same file, {request.baseline}.", "Give two different files.")
    return read_baseline(path)


def _add_inputs(subject: str, request: CheckRequest, inputs: dict[str, str], rules: list[Rule]) -> None:
    """Add the files of report, rules and baseline to `inputs`. Raise AttnlensError if --baseline can't be written."""
    for name, what in {subject: "the report", **{rule.file: "the rules" for rule in rules if rule.file}}.items():
        inputs.setdefault(os.path.realpath(name), what)
    if request.baseline is not None:
        if request.update_baseline:
            check_writable(Path(request.baseline))
            if what := describe_input(inputs, Path(request.baseline)):
                raise UsageError(f"--baseline would replace {request.baseline}, {what}.", "Choose another path.")
        inputs[os.path.realpath(request.baseline)] = "the baseline"


def _annotate(report: Report, *, stderr: bool) -> None:
    """Print GitHub workflow commands, and append a summary to the file that GITHUB_STEP_SUMMARY names, if set."""
    from attnlens.report.render.markdown import step_summary, workflow_commands

    with guard_stdout():
        for line in workflow_commands(report):
            typer.echo(line, err=stderr)
    if place := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(place).open("a", encoding="utf-8") as file:
                file.write(step_summary(report))
        except (OSError, ValueError) as error:
            problem = f"The step summary {place} can't be written: {error}."
            raise OutputError(problem, "Unset GITHUB_STEP_SUMMARY, or make the file writable.") from None
