"""Reads what `check` holds against what: the report or the model, the rules, the baseline; and judges."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlens import requests
from attnlens.addresses import BETWEEN
from attnlens.arguments import names_report
from attnlens.cli import parameters as opt
from attnlens.cli.defaults import FILES
from attnlens.cli.input_files import Inputs
from attnlens.cli.outputs import Outputs
from attnlens.cli.show import interruptible_at_once, say
from attnlens.cli.work import checked_model, working
from attnlens.errors import UsageError
from attnlens.files import check_writable, identity, write_atomically
from attnlens.requests.check import JudgingRequest

if TYPE_CHECKING:
    from attnlens.records import Baseline, Check, Report
    from attnlens.rules.rule import Rule

READING = opt.parameters(requests.InspectRequest, without=("show",))
"""How a model is read."""
RECOMPUTED = {*requests.options(requests.Loading), "text", "pairs", "image", "audio", "batch_size"}
"""Those of them that a report can't hold, and --recompute takes."""


def refuse_ignored(given: Mapping[str, Any], typed: list[str]) -> None:
    """Raise UsageError for what would be ignored: a model's options beside a report, and halves of pairs of options."""
    pairs = {"model": "recompute", "recompute": "model", "update_baseline": "baseline"}
    for name, other in pairs.items():
        if given[name] and not given[other]:
            raise UsageError(
                f"{_shown(name)} is given without {_shown(other)}.",
                "See: attnlens check --help, for what goes together.",
            )
    if not names_report(given["subject"]):
        if given["model"]:
            raise UsageError(f"{given['subject']} is no report to recompute.", "Name a report, and then the model.")
        return
    taken = {opt.parameter_of(name, found) for name, found in requests.options(requests.InspectRequest).items()}
    taken -= RECOMPUTED if given["model"] else set()
    for name in typed:
        if name in taken:
            raise UsageError(
                f"{_shown(name)} says how a model is read, and {given['subject']} is a report.",
                f"Leave out {_shown(name)}, or name a model.",
            )


def _shown(name: str) -> str:
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def rules_of(given: Mapping[str, Any]) -> list[Rule]:
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


def baseline_of(given: Mapping[str, Any]) -> Baseline | None:
    """The baseline to hold against; None where there is none, or where it is to be written."""
    from attnlens.records import read_baseline

    name = given["baseline"]
    if name is not None and BETWEEN in name:
        raise UsageError(f"--baseline names a file of this machine, and not {name}.", "Give the path of one.")
    if name is None or given["update_baseline"]:
        return None
    if identity(Path(name)) == identity(Path(given["subject"])):
        raise UsageError(f"The report and its baseline are the same file, {name}.", "Name two files.")
    return read_baseline(Path(name))


def check_places(outputs: Outputs, given: Mapping[str, Any], rules: list[Rule]) -> None:
    """Raise, before the work, where something can't be written or would replace what is read."""
    subject, model, baseline = given["subject"], given["model"], given["baseline"]
    inputs = Inputs.of(given, [model or subject] if model or not names_report(subject) else [])
    for name, what in {subject: "the report", **{rule.file: "the rules" for rule in rules if rule.file}}.items():
        inputs.files.setdefault(identity(Path(name)), what)
    if given["update_baseline"]:
        check_writable(Path(baseline))
        if what := inputs.holding(Path(baseline)):
            raise UsageError(f"--update-baseline would replace {baseline}, {what}.", "Write it somewhere else.")
    if baseline is not None:
        inputs.files[identity(Path(baseline))] = "the baseline"
    outputs.check(inputs)


def report_of(
    subject: str, given: Mapping[str, Any], outputs: Outputs, rules: list[Rule], kept: Baseline | None
) -> Report:
    """The report, read or made."""
    if names_report(subject):
        from attnlens.records import read_report

        return read_report(subject)
    from attnlens.rules.subjects import needed

    settings = opt.keywords(requests.InspectRequest, given)
    if not settings["analyzers"] and settings["source"] == "both" and not given["update_baseline"]:
        settings |= needed(rules, kept)
    with interruptible_at_once():
        from attnlens import run
    with working(outputs) as tell:
        return run.inspect(checked_model(subject), progress=tell, **settings)


def judged(
    report: Report, given: Mapping[str, Any], outputs: Outputs, rules: list[Rule], kept: Baseline | None
) -> Report:
    """The report with its checks; the baseline is written where that is asked for, before anything can fail."""
    from attnlens.rules.judging import Tolerance, baseline_of, verdict

    asked = opt.keywords(JudgingRequest, given)
    tolerance = Tolerance(*(asked.pop(name) for name in ("relative", "absolute", "fdr")))
    found = verdict(report, rules, kept, tolerance, given["baseline"], **asked)
    if given["update_baseline"]:
        write_atomically(Path(given["baseline"]), baseline_of(report).to_json().encode())
        if not outputs.quiet:
            say(f"Wrote {given['baseline']}")
    again = [] if given["recompute"] is None else _again(report, given, outputs)
    return found.model_copy(update={"checks": [*found.checks, *again]})


def _again(report: Report, given: Mapping[str, Any], outputs: Outputs) -> list[Check]:
    """How a second computation of some heads came out."""
    options = requests.options(requests.InspectRequest)
    typed = opt.keywords(requests.InspectRequest, given)
    more = {name: typed[name] for name in RECOMPUTED if typed[name] != options[name].default}
    with interruptible_at_once():
        from attnlens import run
    with working(outputs) as tell:
        return run.recompute(report, checked_model(given["model"]), given["recompute"], progress=tell, **more)
