"""The command `check`, which checks a report, or that of a model, against rules and a baseline."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnlens import requests
from attnlens.arguments import names_report
from attnlens.cli import parameters as opt
from attnlens.cli.commands.converge import FAILED, typed
from attnlens.cli.outputs import (
    STDOUT,
    Failures,
    Inputs,
    Outputs,
    checked_model,
    option_name,
    product,
    show,
    working,
    write_data,
)
from attnlens.cli.parameters import FILES
from attnlens.cli.show import complain, guarded, interruptible_at_once, say
from attnlens.errors import OutputError, UsageError
from attnlens.files import check_writable, local_path, write_atomically
from attnlens.requests.run_options import BASELINE, JudgingRequest

if TYPE_CHECKING:
    from attnlens.checks.rule import Rule
    from attnlens.records import Baseline, Check, Report

READING = opt.parameters(requests.InspectRequest, without=("show",))
"""Options for reading a model."""
RECOMPUTED = {*requests.options(requests.Loading), "text", "pairs", "image", "audio", "batch_size"}
"""Those of them that a report can't contain, and that --recompute takes."""


Subject = Annotated[
    str, typer.Argument(metavar="REPORT|MODEL", help="A report of --json, or a model, which is inspected first.")
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
    opt.option("--baseline", panel=BASELINE, help="What heads should read.", metavar="FILE", call_only="read"),
]
Update = Annotated[
    bool,
    opt.option(
        "--update-baseline", panel=BASELINE, help="Accept this report: write --baseline anew.", call_only="written"
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
@opt.also(opt.parameters(JudgingRequest) | READING, opt.TOLD)
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
    params = context.params
    _refuse_ignored(params, typed(context))
    outputs, parsed = Outputs.of(params), _load_rules(params)
    stored = _load_baseline(params)
    _check_places(outputs, params, parsed)
    report = _judge(_load_report(subject, params, outputs, parsed, stored), params, outputs, parsed, stored)
    _deliver(outputs, report, params)
    failed = [judged.rule for judged in report.checks if not judged.passed]
    if failed:
        from attnlens.wording import counted, listed

        complain(
            f"{len(failed)} of {counted(len(report.checks), 'rule')} failed: {listed(failed, 3)}.",
            "The table says what was found; --json, --csv and --junit keep it.",
        )
        raise typer.Exit(FAILED)


def _refuse_ignored(given: Mapping[str, Any], names: list[str]) -> None:
    """Raise UsageError for ignored options: a model's options with a report, or one of two that belong together."""
    for name, other in {"model": "recompute", "recompute": "model", "update_baseline": "baseline"}.items():
        if given[name] and not given[other]:
            first, second = ("MODEL" if each == "model" else option_name(each) for each in (name, other))
            raise UsageError(
                f"{first} is given without {second}.", "See: attnlens check --help, for what goes together."
            )
    if not names_report(given["subject"]):
        if given["model"]:
            raise UsageError(f"{given['subject']} is no report to recompute.", "Name a report, and then the model.")
        return
    taken = {opt.parameter_of(name, option) for name, option in requests.options(requests.InspectRequest).items()}
    taken -= RECOMPUTED if given["model"] else set()
    for name in names:
        if name in taken:
            raise UsageError(
                f"{option_name(name)} says how a model is read, and {given['subject']} is a report.",
                f"Leave out {option_name(name)}, or name a model.",
            )


def _load_rules(given: Mapping[str, Any]) -> list[Rule]:
    """Return the rules of the call, else those of the first default file that has any."""
    from attnlens.checks.rule import read_rules, spelled

    rules = [] if given["rules"] is None else read_rules(Path(given["rules"]))
    rules += map(spelled, given["rule"] or ())
    places = (Path(name) for name in FILES if not rules and Path(name).is_file())
    rules = rules or next(filter(None, (read_rules(place, named=False) for place in places)), [])
    if not rules and given["baseline"] is None and given["recompute"] is None:
        raise UsageError(
            "There is no rule to check.",
            "Write --rule 'tokens.entropy: min > 0.05', a table [check] in attnlens.toml, or --baseline FILE.",
        )
    return rules


def _load_baseline(given: Mapping[str, Any]) -> Baseline | None:
    """Return the baseline to compare with; None if there is none, or if it is to be written."""
    from attnlens.records import read_baseline

    name = given["baseline"]
    if name is not None:
        local_path(name, "--baseline")
    if name is None or given["update_baseline"]:
        return None
    if os.path.realpath(name) == os.path.realpath(given["subject"]):
        raise UsageError(f"The report and its baseline are the same file, {name}.", "Name two files.")
    return read_baseline(Path(name))


def _check_places(outputs: Outputs, given: Mapping[str, Any], rules: list[Rule]) -> None:
    """Raise before the work if an output can't be written or would replace an input."""
    subject, model, baseline = given["subject"], given["model"], given["baseline"]
    inputs = Inputs.of(given, [model or subject] if model or not names_report(subject) else [])
    for name, what in {subject: "the report", **{rule.file: "the rules" for rule in rules if rule.file}}.items():
        inputs.files.setdefault(os.path.realpath(name), what)
    if given["update_baseline"]:
        check_writable(Path(baseline))
        if what := inputs.description(Path(baseline)):
            raise UsageError(f"--update-baseline would replace {baseline}, {what}.", "Write it somewhere else.")
    if baseline is not None:
        inputs.files[os.path.realpath(baseline)] = "the baseline"
    outputs.check(inputs)


def _load_report(
    subject: str, given: Mapping[str, Any], outputs: Outputs, rules: list[Rule], kept: Baseline | None
) -> Report:
    """Read the report, or make it from a model."""
    if names_report(subject):
        from attnlens.records import read_report

        return read_report(subject)
    from attnlens.checks.judging import needed

    settings = opt.keywords(requests.InspectRequest, given)
    if not settings["analyzers"] and settings["source"] == "both" and not given["update_baseline"]:
        settings |= needed(rules, kept)
    with interruptible_at_once():
        from attnlens.cli import analyses
    with working(outputs) as tell:
        return analyses.inspect(checked_model(subject), progress=tell, **settings)


def _judge(
    report: Report, given: Mapping[str, Any], outputs: Outputs, rules: list[Rule], kept: Baseline | None
) -> Report:
    """Return the report with its checks; a requested baseline is written first, before anything can fail."""
    from attnlens.checks import judging as baselines
    from attnlens.checks.rule import Tolerance

    options = opt.keywords(JudgingRequest, given)
    tolerance = Tolerance(*(options.pop(name) for name in ("relative", "absolute", "fdr")))
    judged = baselines.verdict(report, rules, kept, tolerance, given["baseline"], **options)
    if given["update_baseline"]:
        write_atomically(Path(given["baseline"]), baselines.baseline_of(report).to_json().encode())
        if not outputs.quiet:
            say(f"Wrote {given['baseline']}")
    again = [] if given["recompute"] is None else _recompute(report, given, outputs)
    return judged.model_copy(update={"checks": [*judged.checks, *again]})


def _recompute(report: Report, given: Mapping[str, Any], outputs: Outputs) -> list[Check]:
    """Recompute some heads and return their checks."""
    options = requests.options(requests.InspectRequest)
    typed = opt.keywords(requests.InspectRequest, given)
    more = {name: typed[name] for name in RECOMPUTED if typed[name] != options[name].default}
    with interruptible_at_once():
        from attnlens.cli import analyses
    with working(outputs) as tell:
        return analyses.recompute(report, checked_model(given["model"]), given["recompute"], progress=tell, **more)


def _deliver(outputs: Outputs, report: Report, given: Mapping[str, Any]) -> None:
    """Write the data, show the table, annotate; failures are raised after everything else."""
    failures = Failures()
    written: list[str] = []
    from attnlens.report.render.markdown import junit, markdown, spreadsheet
    from attnlens.report.sections import checked

    writers: dict[str, Callable[[Report], str]] = {
        "json": lambda report: report.to_json(),
        "csv": lambda report: spreadsheet(checked.rows(report)),
        "markdown": lambda report: markdown(checked.document(report)),
        "junit": junit,
    }
    write_data(outputs, report, writers, failures, written)
    with failures.kept():
        show(outputs, report, checked.document)
    if given["annotations"] or os.environ.get("GITHUB_ACTIONS") == "true":
        with failures.kept():
            _annotate(report, stderr=outputs.json == STDOUT)
    if written and not outputs.quiet:
        say(f"Wrote {', '.join(written)}")
    failures.end(interrupted=False)


def _annotate(report: Report, *, stderr: bool) -> None:
    """Print workflow commands, and append the verdict to the step's summary if there is one."""
    from attnlens.report.render.markdown import step_summary, workflow_commands

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
