"""The command `check`: a report, or a model's, held against rules and a baseline."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnlens import requests
from attnlens.cli import parameters as opt
from attnlens.cli.commands.converge import FAILED, GIVEN
from attnlens.cli.defaults import FILES
from attnlens.cli.delivery import Failures, show, write_data
from attnlens.cli.input_files import FILES as MODEL_FILES
from attnlens.cli.input_files import Inputs
from attnlens.cli.outputs import STDOUT, Outputs, product
from attnlens.cli.show import complain, guarded, interruptible_at_once, say
from attnlens.cli.work import checked_model, working
from attnlens.errors import OutputError, UsageError
from attnlens.files import OPEN_FILES, check_writable, identity, write_atomically
from attnlens.requests.check import PANEL, JudgingRequest

if TYPE_CHECKING:
    from attnlens.records import Baseline, Report
    from attnlens.rules.rule import Rule
    from attnlens.sections.section import Document

Subject = Annotated[
    str,
    typer.Argument(metavar="REPORT|MODEL", help="A report of --json, or a model, which is inspected first."),
]
Again = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="With --recompute: the model that the report should be of.")
]
RuleFile = Annotated[
    str | None,
    opt.option(
        "--rules",
        help="TOML file with a table `[check]`, as in `\"tokens.entropy\" = [\"min > 0.05\"]`.",
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
Sarif = Annotated[str | None, opt.output("--sarif", "Write the failures as SARIF 2.1.0.")]
CsvRows = Annotated[str | None, opt.output("--csv", "Write one row a head that breaks a rule as CSV.")]
READING = opt.parameters(requests.InspectRequest, without=("show",))
"""How a model is read."""
RECOMPUTED = {*requests.options(requests.Loading), "text", "pairs", "image", "audio", "batch_size"}
"""Those of them that a report can't hold, and --recompute takes."""


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
    sarif: Sarif = None,
    csv: CsvRows = None,
    markdown: opt.Markdown = None,
    **_shared: Any,
) -> None:
    """Hold a report, or a model, against rules and a baseline; exit 1 where one fails. Without torch for a report."""
    given = context.params
    typed = [name for name in given if (source := context.get_parameter_source(name)) and source.name in GIVEN]
    _refuse_ignored(given, typed)
    outputs = Outputs.of(given)
    held = _rules(given)
    kept = _baseline(given, held)
    _check_places(outputs, given, held)
    report = _judged(_subject(subject, given, outputs, held, kept), given, outputs, held, kept)
    _deliver(outputs, report, given)
    failed = [one.rule for one in report.checks if not one.passed]
    if failed:
        from attnlens.wording import counted, listed

        complain(
            f"{len(failed)} of {counted(len(report.checks), 'rule')} failed: {listed(failed, 3)}.",
            "The table says what was found; --json, --csv, --junit and --sarif keep it.",
        )
        raise typer.Exit(FAILED)


def is_report(name: str) -> bool:
    """Whether the name is a report's: a file that is no model's, an open one, or what ends like a report."""
    is_file = os.path.isfile(name) and not name.endswith(MODEL_FILES)  # noqa: PTH113  # never raises
    return is_file or name.endswith(".json") or name.startswith(OPEN_FILES)


def _refuse_ignored(given: Mapping[str, Any], typed: list[str]) -> None:
    """Raise UsageError for what would be ignored: a model's options beside a report, and halves of pairs of options."""
    pairs = {"model": "recompute", "recompute": "model", "update_baseline": "baseline"}
    for name, other in pairs.items():
        if given[name] and not given[other]:
            raise UsageError(
                f"{_shown(name)} is given without {_shown(other)}.", "See: attnlens check --help, for what goes together."
            )
    if not is_report(given["subject"]):
        if given["model"]:
            raise UsageError(f"{given['subject']} is no report to recompute.", "Name a report, and then the model.")
        return
    taken = {opt.parameter_of(name, found) for name, found in requests.options(requests.InspectRequest).items()}
    taken -= RECOMPUTED if given["model"] else set()
    for name in typed:
        if name in taken:
            raise UsageError(
                f"{_shown(name)} says how a model is read, and {given['subject']} is a report.", f"Leave out {_shown(name)}."
            )


def _shown(name: str) -> str:
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def _rules(given: Mapping[str, Any]) -> list[Rule]:
    """The rules of the call; where it has none, those of the first default file that has any."""
    from attnlens.rules.rule import read_rules, spelled

    found = [] if given["rules"] is None else read_rules(Path(given["rules"]))
    found += map(spelled, given["rule"] or ())
    places = (Path(name) for name in FILES if not found and Path(name).is_file())
    found = found or next(filter(None, (read_rules(place, named=False) for place in places)), [])
    if not found and given["baseline"] is None and given["recompute"] is None:
        raise UsageError(
            "There is no rule to check.",
            "Write --rule 'tokens.entropy: min > 0.05', a table [check] in attnlens.toml, or --baseline FILE.",
        )
    return found


def _baseline(given: Mapping[str, Any], rules: list[Rule]) -> Baseline | None:
    """The baseline to hold against; None where there is none, or where it is to be written."""
    from attnlens.records import read_baseline

    name = given["baseline"]
    if name is None or given["update_baseline"]:
        return None
    if identity(Path(name)) == identity(Path(given["subject"])):
        raise UsageError(f"The report and its baseline are the same file, {name}.", "Name two files.")
    return read_baseline(Path(name))


def _check_places(outputs: Outputs, given: Mapping[str, Any], rules: list[Rule]) -> None:
    """Raise, before the work, where something can't be written or would replace what is read."""
    subject, model, baseline = given["subject"], given["model"], given["baseline"]
    inputs = Inputs.of(given, [model or subject] if model or not is_report(subject) else [])
    read = {subject: "the report", **{rule.file: "the rules" for rule in rules if rule.file}}
    if baseline is not None:
        read[baseline] = "the baseline"
    for name, what in read.items():
        inputs.files.setdefault(identity(Path(name)), what)
    outputs.check(inputs)
    if given["update_baseline"]:
        check_writable(Path(baseline))
        if identity(Path(baseline)) in {identity(Path(name)) for name in read if name != baseline}:
            raise UsageError(f"--update-baseline would replace {baseline}, which is read.", "Write it somewhere else.")


def _subject(
    subject: str, given: Mapping[str, Any], outputs: Outputs, rules: list[Rule], kept: Baseline | None
) -> Report:
    """The report, read or made."""
    if is_report(subject):
        from attnlens.records import read_report

        return read_report(subject)
    from attnlens.rules.needs import needed

    settings = opt.keywords(requests.InspectRequest, given)
    if not settings["analyzers"] and settings["source"] == "both" and not given["update_baseline"]:
        settings |= needed(rules, kept)
    with interruptible_at_once():
        from attnlens import run
    with working(outputs) as tell:
        return run.inspect(checked_model(subject), progress=tell, **settings)


def _judged(
    report: Report, given: Mapping[str, Any], outputs: Outputs, rules: list[Rule], kept: Baseline | None
) -> Report:
    """The report with its checks; the baseline is written where that is asked for, before anything can fail."""
    from attnlens.rules.baselines import Tolerance, baseline_of
    from attnlens.rules.verdict import verdict

    asked = opt.keywords(JudgingRequest, given)
    tolerance = Tolerance(*(asked.pop(name) for name in ("relative", "absolute", "fdr")))
    found = verdict(report, rules, kept, tolerance, given["baseline"], **asked)
    if given["update_baseline"]:
        write_atomically(Path(given["baseline"]), baseline_of(report).to_json().encode())
        if not outputs.quiet:
            say(f"Wrote {given['baseline']}")
    if given["recompute"] is None:
        return found
    more = {name: value for name, value in opt.keywords(requests.InspectRequest, given).items() if name in RECOMPUTED}
    more = {name: value for name, value in more.items() if value != requests.options(requests.InspectRequest)[name].default}
    with interruptible_at_once():
        from attnlens import run
    with working(outputs) as tell:
        again = run.recompute(report, checked_model(given["model"]), given["recompute"], progress=tell, **more)
    return found.model_copy(update={"checks": [*found.checks, *again]})


def _writers() -> dict[str, Callable[[Report], str]]:
    """The text of each kind of file; loaded where one is asked for."""
    from attnlens.render.csv_text import spreadsheet
    from attnlens.render.junit import junit
    from attnlens.render.markdown import markdown
    from attnlens.render.sarif import sarif
    from attnlens.sections import checked

    return {
        "json": lambda report: report.to_json(),
        "csv": lambda report: spreadsheet(checked.rows(report)),
        "markdown": lambda report: markdown(checked.document(report)),
        "junit": junit,
        "sarif": sarif,
    }


def _deliver(outputs: Outputs, report: Report, given: Mapping[str, Any]) -> None:
    """Write the data, show the table, annotate; what fails is raised when the rest is done."""
    failures = Failures()
    written: list[str] = []
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
    from attnlens.render.github import annotations, step_summary

    with product():
        for line in annotations(report):
            typer.echo(line, err=stderr)
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if place:
        try:
            with Path(place).open("a", encoding="utf-8") as file:
                file.write(step_summary(report))
        except (OSError, ValueError) as error:
            raise OutputError(
                f"The step's summary {place} can't be written: {error}.", "Unset GITHUB_STEP_SUMMARY, or make it writable."
            ) from None
