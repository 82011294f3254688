"""The commands of the papers: `converge` and `reproduce`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnlens import requests
from attnlens.choices import CLAIMS, STUDIES
from attnlens.cli import FAILED
from attnlens.cli import parameters as opt
from attnlens.cli.outputs import (
    NO_MODEL,
    Inputs,
    Outputs,
    begin_workers,
    check_reading,
    checked_model,
    end_strictly,
    run_and_deliver,
)
from attnlens.cli.show import complain, guard, say
from attnlens.errors import UnaskedError, UsageError
from attnlens.requests import CheckpointsRequest
from attnlens.requests.experiments import DescentRequest, StudyRequest, SyntheticRequest, checked_table
from attnlens.requests.run_options import SharedRequest

if TYPE_CHECKING:
    from attnlens.records import Report

EVERYWHERE = {"seed", "strict", "quiet", "verbose", "no_progress", "debug", "json", "csv", "figure", "html", "markdown"}
LOADING = set(requests.Loading.model_fields) - {"revision"}
TEXT = set(requests.Feeding.model_fields) - {*LOADING, "revision", "seed"}
SYNTHETIC = opt.parameters(SyntheticRequest)
"""Options of the synthetic experiments."""
SYNTHETIC_RUN, HEAD_RUN, SERIES_RUN = "the synthetic experiments", "a head", "checkpoints"
CLAIMS_RUN, TABLE_RUN = "claims", "a table"
SERIES = {"models", "checkpoints", "revisions", "head", "source", "analyzer", "layers", "heads"}
WORK = {*SharedRequest.model_fields}
CONVERGE_KINDS: dict[str, set[str]] = {
    SYNTHETIC_RUN: {*SYNTHETIC},
    HEAD_RUN: {"models", "head", "iterations"} | TEXT | LOADING,
    SERIES_RUN: SERIES | WORK | TEXT | LOADING,
}
"""Options of each kind of run of `converge`, in addition to the common ones."""
REPRODUCE_KINDS = {CLAIMS_RUN: {"table", "quick"}, TABLE_RUN: {"table", *StudyRequest.model_fields}}
"""Options of each kind of run of `reproduce`, in addition to the common ones."""

Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]...",
        help="With --head or --revisions: a model. With --checkpoints: folders, files or hub ids, or `demo`. "
        "If omitted: the synthetic experiments.",
        show_default=False,
    ),
]
Checkpoints = Annotated[
    bool,
    opt.option(
        "--checkpoints",
        panel=opt.TRAINED,
        help="Follow every head through these checkpoints, e.g. `--checkpoints a b c`; if none, those of the demo.",
    ),
]
Revisions = Annotated[
    str | None,
    opt.option(
        "--revisions",
        panel=opt.TRAINED,
        call_only="read",
        help="Follow every head through these revisions of a hub model, e.g. `step1000,step2000`.",
        metavar="NAMES",
    ),
]
Head = Annotated[
    str | None,
    opt.option(
        "--head",
        panel=opt.TRAINED,
        help="Train on the selection problem of this head, e.g. `3.7`: on the module's inputs if scores "
        "are bilinear in them, else on queries and keys.",
        metavar="LAYER.HEAD",
    ),
]
Quick = Annotated[bool, opt.option("--quick", help="Run fewer trials with wider tolerances (under half a minute).")]


FOLLOWED = opt.parameters(CheckpointsRequest, without=("adapter", "engine"))
"""Options of a series of checkpoints."""


@guard
@opt.also(SYNTHETIC | FOLLOWED, opt.OUTPUT_OPTIONS)
def converge(
    context: typer.Context,
    models: Models = None,
    checkpoints: Checkpoints = False,
    revisions: Revisions = None,
    head: Head = None,
    strict: opt.Strict = False,
    **_shared: object,
) -> None:
    """Test whether training selects tokens like a max-margin classifier: synthetic, one head, or checkpoints."""
    params = context.params
    kind = kind_of(params)
    refuse_other(kind, command_line_options(context), CONVERGE_KINDS)
    outputs = Outputs.of(params)
    work = prepare(kind, params)
    if kind != SYNTHETIC_RUN and not models and not outputs.quiet:
        say(NO_MODEL)
    outputs.check(Inputs.of(params, models or []))
    report = run_and_deliver(outputs, work)
    if strict:
        end_strictly(report)


TABLES = ", ".join(f"`{name}`" for name in STUDIES)
Table = Annotated[
    str,
    typer.Argument(metavar="TABLE", help=f"`{CLAIMS}` (small experiments with published values), {TABLES} or `all`."),
]


@guard
@opt.also(opt.parameters(StudyRequest), opt.OUTPUT_OPTIONS)
def reproduce(context: typer.Context, table: Table = CLAIMS, quick: Quick = False, **_shared: object) -> None:
    """Reproduce the papers' small experiments (exit 1 if a claim fails), or train the models of one of their tables."""
    params = context.params
    outputs = Outputs.of(params)
    request = opt.build(StudyRequest, params)
    if checked_table(table) == CLAIMS:
        refuse_other(CLAIMS_RUN, command_line_options(context), REPRODUCE_KINDS)
    outputs.check(Inputs.of(params, ()))
    if table != CLAIMS:
        begin_workers(request.engine, request.jobs or os.cpu_count() or 1)

    def work(analyses: Any, tell: Any) -> Any:
        try:
            return analyses.reproduce(table, quick=quick, progress=tell, **request.explicit()), None
        except KeyboardInterrupt:
            if table != CLAIMS:
                say("Finished runs are kept: repeat the command to resume.")
            raise

    report = run_and_deliver(outputs, work)
    failed = [experiment.name for experiment in report.experiments if experiment.passed is False]
    if failed:
        from attnlens.wording import join_items

        complain(
            f"Results that differ from the published ones: {join_items(failed, 12)}.",
            "The table shows the measured values; --json contains all of them.",
        )
        raise typer.Exit(FAILED)


def kind_of(values: Mapping[str, Any]) -> str:
    """Return the kind of run that the parameters request. Raise UnaskedError for models without a question."""
    if values["checkpoints"] or values["revisions"] is not None:
        return SERIES_RUN
    if values["head"] is not None:
        return HEAD_RUN
    if values["models"]:
        raise UnaskedError(values["models"][0])
    return SYNTHETIC_RUN


def refuse_other(kind: str, options: list[str], kinds: Mapping[str, set[str]]) -> None:
    """Raise UsageError for an option of another of the `kinds` of run that this kind would ignore."""
    for name in options:
        others = [other for other, names in kinds.items() if name in names]
        if name not in kinds[kind] | EVERYWHERE:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} is an option of {' and '.join(others)}, not of {kind}.", f"Leave out {option}.")


def prepare(kind: str, values: Mapping[str, Any]) -> Callable[[Any, Any], tuple[Report, Callable[[], None] | None]]:
    """Check the options of that kind of run, and return its work. Raise UsageError for invalid options."""
    models = [checked_model(model) for model in values["models"] or []]
    if kind == SYNTHETIC_RUN:
        synthetic = opt.build(SyntheticRequest, values)
        return lambda analyses, tell: (analyses.converge_synthetic(progress=tell, **synthetic.explicit()), None)
    if kind == HEAD_RUN:
        if len(models) > 1:
            raise UsageError(f"--head takes one model, not {len(models)}.", "Name one model, or add --checkpoints.")
        head = requests.head(values["head"])
        options = opt.build(requests.Feeding, values).explicit() | opt.build(DescentRequest, values).explicit()
        model = models[0] if models else "demo"
        return lambda analyses, tell: (analyses.converge_head(model, head=head, progress=tell, **options), None)
    where = requests.one_head(values["head"], values["layers"], values["heads"])
    request = opt.build(CheckpointsRequest, values, **where)
    check_reading(request)
    revisions = [] if values["revisions"] is None else [word.strip() for word in values["revisions"].split(",")]
    if not all(revisions):
        raise UsageError(f"--revisions {values['revisions']!r} contains an empty name.", "Write e.g. step10,step20.")
    begin_workers(request.engine, request.jobs)
    return lambda analyses, tell: analyses.follow(models or None, request, revisions=revisions, progress=tell)


def command_line_options(context: typer.Context) -> list[str]:
    """Return the parameters that were set on the command line of this call."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
