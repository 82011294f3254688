"""The commands `converge` and `reproduce`, which repeat experiments from the published papers behind attnlens."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from attnlens import requests
from attnlens.choices import CLAIMS, STUDIES
from attnlens.cli import parameters as opt
from attnlens.cli.exit_codes import FAILED
from attnlens.cli.outputs import NO_MODEL, Work, check_reading, checked_model, run_command, start_workers
from attnlens.cli.show import complain, say
from attnlens.errors import UsageError
from attnlens.requests import Request
from attnlens.requests.experiments import DescentRequest, StudyRequest, SyntheticRequest, checked_table
from attnlens.requests.run_options import SharedRequest
from attnlens.wording import join_items

COMMON = {*opt.OUTPUT_OPTIONS, "seed", "strict"}
INPUT = set(requests.Feeding.model_fields) - {"revision", "seed"}
SYNTHETIC = opt.parameters(SyntheticRequest)
FOLLOWED = opt.parameters(requests.CheckpointsRequest, without=("adapter", "engine"))
SYNTHETIC_RUN, HEAD_RUN, SERIES_RUN = "the synthetic experiments", "a single head", "checkpoints"
SERIES = {"models", "checkpoints", "revisions", "head", "source", "analyzer", "layers", "heads"}
CONVERGE_KINDS: dict[str, set[str]] = {  # Options of each kind of run, in addition to the common ones
    SYNTHETIC_RUN: {*SYNTHETIC},
    HEAD_RUN: {"models", "head", "iterations"} | INPUT,
    SERIES_RUN: SERIES | {*SharedRequest.model_fields} | INPUT,
}
TRAINED = "Checkpoints and heads"
MODELS = opt.argument(
    "models",
    "With --checkpoints: folders, files, hub ids or `demo`. With --head or --revisions: one model. "
    "Without MODEL or any of these options, the synthetic experiments run.",
    list[str] | None,
    "MODEL",
    shown=False,
)
CHOICES = {
    **opt.option(
        "--checkpoints",
        bool,
        "Follow every head through the checkpoints given as MODEL, e.g. `converge a b c --checkpoints`. If MODEL "
        "is omitted, the checkpoints of `demo` are used.",
        panel=TRAINED,
    ),
    **opt.option(
        "--revisions",
        str | None,
        "Follow every head through these revisions of a hub model, e.g. `step1000,step2000`.",
        panel=TRAINED,
        metavar="NAMES",
        call_only="read",
    ),
    **opt.option(
        "--head",
        str | None,
        "Run gradient descent on the token-selection problem of this head, e.g. `3.7`. The problem uses the module's "
        "inputs as tokens if the scores are bilinear in the inputs, and queries and keys otherwise. With --checkpoints "
        "or --revisions: follow only this head.",
        panel=TRAINED,
        metavar="LAYER.HEAD",
    ),
}


@opt.with_options(MODELS | CHOICES | opt.STRICT, SYNTHETIC | FOLLOWED, opt.OUTPUT_OPTIONS)
def converge(context: typer.Context) -> None:
    """Test whether training makes attention select the same tokens as a max-margin classifier: on synthetic data, for
    one head, or across checkpoints."""
    params = context.params
    kind = kind_of(params)
    refuse_other(kind, context, CONVERGE_KINDS)
    models = [checked_model(model) for model in params["models"] or []]
    request, work = {SYNTHETIC_RUN: _synthetic, HEAD_RUN: _one_head, SERIES_RUN: _series}[kind](params, models)
    if kind != SYNTHETIC_RUN and not models and not params["quiet"]:
        say(NO_MODEL)
    run_command(params, models, request, work, CONVERGE_KINDS[kind])


def _synthetic(params: Mapping[str, Any], _models: Sequence[str]) -> tuple[Request, Work]:
    request = opt.build(SyntheticRequest, params)
    return request, lambda analyses, progress: analyses.converge_synthetic(progress=progress, request=request)


def _one_head(params: Mapping[str, Any], models: Sequence[str]) -> tuple[Request, Work]:
    if len(models) > 1:
        raise UsageError(f"--head takes one model, not {len(models)}.", "Name one model, or add --checkpoints.")
    head, request = requests.head(params["head"]), opt.build(requests.Feeding, params)
    keywords = {"head": head, **opt.build(DescentRequest, params).explicit()}
    return request, lambda analyses, progress: analyses.converge_head(
        *models, progress=progress, request=request, **keywords
    )


def _series(params: Mapping[str, Any], models: Sequence[str]) -> tuple[Request, Work]:
    where = requests.one_head(params["head"], params["layers"], params["heads"])
    request, names = opt.build(requests.CheckpointsRequest, params, **where), params["revisions"]
    check_reading(request)
    revisions = [] if names is None else [name.strip() for name in names.split(",")]
    if not all(revisions):
        raise UsageError(f"--revisions {names!r} contains an empty name.", "Write, e.g., --revisions step10,step20.")
    return request, lambda analyses, progress: analyses.run_series(
        models or None, request, revisions=revisions, progress=progress
    )


def kind_of(params: Mapping[str, Sequence[str]]) -> str:
    """Return the kind of run that the parameters request. Raise UsageError if a named model is not used."""
    if params["checkpoints"] or params["revisions"] is not None:
        return SERIES_RUN
    if params["head"] is not None:
        return HEAD_RUN
    if params["models"]:
        problem = f"`converge {params['models'][0]}` needs --head, --checkpoints or --revisions."
        raise UsageError(problem, "Add one of them, or omit the model to run the synthetic experiments.")
    return SYNTHETIC_RUN


def refuse_other(kind: str, context: typer.Context, kinds: Mapping[str, set[str]]) -> None:
    """Raise UsageError if the command line sets an option that this kind of run does not use."""
    for name in opt.command_line_options(context):
        others = [other for other, names in kinds.items() if name in names]
        if name not in kinds[kind] | COMMON:
            option = opt.option_name(name)
            raise UsageError(f"{option} applies to {' and '.join(others)}, not to {kind}.", f"Leave out {option}.")


EXPERIMENTS = opt.argument(
    "experiments",
    f"`{CLAIMS}`: rerun small experiments and compare the results with reference values. "
    f"{', '.join(f'`{name}`' for name in STUDIES)}: train the models of this table. `all`: train all of these models.",
    default=CLAIMS,
    metavar="TABLE",
)
QUICK = opt.option("--quick", bool, "For `claims`: run fewer trials with wider tolerances (under half a minute).")


@opt.with_options(EXPERIMENTS | QUICK, opt.parameters(StudyRequest), opt.OUTPUT_OPTIONS)
def reproduce(context: typer.Context) -> None:
    """Rerun small experiments from the papers behind attnlens (exit 1 if a result differs from its reference value), or
    train the models of a table in these papers."""
    params = context.params
    request, table = opt.build(StudyRequest, params), checked_table(params["experiments"])
    kinds = {CLAIMS: {"experiments", "quick"}, "a table": {*StudyRequest.model_fields}}
    if table == CLAIMS:
        refuse_other(CLAIMS, context, kinds)
    else:
        start_workers(request.engine, request.jobs or os.cpu_count() or 1)
    quick = params["quick"]
    report = run_command(
        params,
        (),
        request,
        lambda analyses, progress: analyses.reproduce(table, quick=quick, progress=progress, request=request),
        kinds[CLAIMS if table == CLAIMS else "a table"],
    )
    failed = [experiment.name for experiment in report.experiments if experiment.passed is False]
    if failed:
        problem = f"Results differ from the reference values: {join_items(failed, 12)}."
        complain(problem, "The table and --json contain the measured and the reference values.")
        raise typer.Exit(FAILED)
