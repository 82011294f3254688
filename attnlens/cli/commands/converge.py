"""The commands that train: `converge`, `verify` and `study`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from attnlens import requests
from attnlens.choices import STUDIES
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
from attnlens.cli.show import complain, guarded, say
from attnlens.errors import UnaskedError, UsageError
from attnlens.requests import CheckpointsRequest
from attnlens.requests.experiments import DescentRequest, StudyRequest, SyntheticRequest, checked_synthetic, table
from attnlens.requests.run_options import SharedRequest

Table = Annotated[str, typer.Argument(metavar="TABLE", help=f"{', '.join(f'`{name}`' for name in STUDIES)}, or `all`.")]


@guarded
@opt.also(opt.parameters(StudyRequest), opt.SHOWN)
def study(context: typer.Context, name: Table = "all", **_shared: Any) -> None:
    """Train small models and rerun the papers' tables: kernels, positions, order, values, dimension, primal."""
    params = context.params
    table(name)
    outputs = Outputs.of(params)
    settings = opt.keywords(StudyRequest, params)
    outputs.check(Inputs.of(params, ()))
    begin_workers({**settings, "jobs": settings["jobs"] or os.cpu_count() or 1})

    def work(analyses: Any, tell: Any) -> Any:
        try:
            return analyses.study(name, progress=tell, **settings), None
        except KeyboardInterrupt:
            say("What is finished is kept: the same command goes on from there.")
            raise

    run_and_deliver(outputs, work)


FAILED = 1
"""Exit code if a requested check failed."""
EVERYWHERE = {"seed", "strict", "quiet", "verbose", "no_progress", "debug", "json", "csv", "png", "html", "markdown"}
LOADING = set(requests.options(requests.Loading)) - {"revision"}
TEXT = set(requests.options(requests.Feeding)) - {*LOADING, "revision", "seed"}
SYNTHETIC = opt.parameters(SyntheticRequest)
"""Options of the synthetic experiments."""
SERIES = {"models", "checkpoints", "revisions", "head", "source", "analyzer", "layers", "heads"}
WORK = {*requests.options(SharedRequest)}
KINDS: dict[str, set[str]] = {
    "the synthetic experiments": {*SYNTHETIC},
    "a head": {"models", "head", *requests.options(DescentRequest), "revision"} | TEXT | LOADING,
    "checkpoints": SERIES | WORK | TEXT | LOADING,
}
"""Options of each kind of run, in addition to the common ones."""
JOBS = {"the synthetic experiments": "converge_synthetic", "a head": "converge_head", "checkpoints": "followed"}
"""Function of `analyses` for each kind of run."""

Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]...",
        help="With --head or --revisions: a model. With --checkpoints: folders, files or hub ids, or `demo`. "
        "Without: the synthetic experiments.",
        show_default=False,
    ),
]
Checkpoints = Annotated[
    bool,
    opt.option(
        "--checkpoints",
        panel=opt.TRAINED,
        help="Follow every head through these checkpoints (as in `--checkpoints a b c`; none: the demo's own).",
    ),
]
Revisions = Annotated[
    str | None,
    opt.option(
        "--revisions",
        panel=opt.TRAINED,
        call_only="read",
        help="Follow every head through these revisions of a hub model, as in `step1000,step2000`.",
        metavar="NAMES",
    ),
]
Head = Annotated[
    str | None,
    opt.option(
        "--head",
        panel=opt.TRAINED,
        help="A head's own selection problem, as in `3.7`: on the module's inputs where M lives on them, else on "
        "queries and keys.",
        metavar="LAYER.HEAD",
    ),
]
Quick = Annotated[bool, opt.option("--quick", help="Fewer trials and wider tolerances, in under half a minute.")]


FOLLOWED = opt.parameters(CheckpointsRequest, without=("select",))
"""Options of a series of checkpoints."""


@guarded
@opt.also(SYNTHETIC | FOLLOWED, opt.SHOWN)
def converge(
    context: typer.Context,
    models: Models = None,
    checkpoints: Checkpoints = False,
    revisions: Revisions = None,
    head: Head = None,
    strict: opt.Strict = False,
    **_shared: Any,
) -> None:
    """Does training select tokens as the max-margin solution says? Synthetic, one head, or checkpoints."""
    params = context.params
    kind = kind_of(params)
    refuse_other(kind, typed(context))
    outputs = Outputs.of(params)
    settings = asked(kind, params)
    if kind != "the synthetic experiments" and not models and not outputs.quiet:
        say(NO_MODEL)
    outputs.check(Inputs.of(params, models or []))
    begin_workers(settings)

    def work(analyses: Any, tell: Any) -> Any:
        result = getattr(analyses, JOBS[kind])(progress=tell, **settings)
        return result if kind == "checkpoints" else (result, None)

    report = run_and_deliver(outputs, work)
    if strict:
        end_strictly(report)


@guarded
@opt.also({"seed": FOLLOWED["seed"]}, opt.SHOWN)
def verify(context: typer.Context, quick: Quick = False, **_shared: Any) -> None:
    """Rerun the papers' small experiments: ours, published, tolerance; exit 1 where one misses."""
    outputs, seed = Outputs.of(context.params), context.params["seed"]
    outputs.check(Inputs())
    from attnlens.wording import listed

    report = run_and_deliver(
        outputs, lambda analyses, tell: (analyses.verify(quick=quick, seed=seed, progress=tell), None)
    )
    failed = [experiment.name for experiment in report.experiments if experiment.passed is False]
    if failed:
        complain(f"Not as published: {listed(failed, 12)}.", "The table says what was found; --json keeps it whole.")
        raise typer.Exit(FAILED)


def kind_of(given: Mapping[str, Any]) -> str:
    """Return the kind of run that the parameters request. Raise UnaskedError for models without a question."""
    if given["checkpoints"] or given["revisions"] is not None:
        return "checkpoints"
    if given["head"] is not None:
        return "a head"
    if given["models"]:
        raise UnaskedError(given["models"][0])
    return "the synthetic experiments"


def refuse_other(kind: str, given: list[str]) -> None:
    """Raise UsageError for an option of another kind of run that this one would ignore."""
    for name in given:
        others = [other for other, names in KINDS.items() if name in names]
        if name not in KINDS[kind] | EVERYWHERE:
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} belongs to {' and '.join(others)}, and not to {kind}.",
                f"Leave out {option}, or see: attnlens converge --help",
            )


def asked(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked arguments of the function for that kind of run. Raise UsageError for invalid ones."""
    names = KINDS[kind]
    models = [checked_model(model) for model in given["models"] or []]
    if kind == "the synthetic experiments":
        return checked_synthetic(opt.keywords(SyntheticRequest, given))
    shared = opt.keywords(CheckpointsRequest, given)
    if kind == "a head":
        if len(models) > 1:
            raise UsageError(f"--head takes one model, not {len(models)}.", "Name one, or add --checkpoints.")
        selected = {name: value for name, value in shared.items() if name in names | {"seed"}}
        descent = {name: value for name, value in opt.keywords(DescentRequest, given).items() if value is not None}
        return {**selected, **descent, "model": models[0] if models else "demo", "head": requests.head(given["head"])}
    check_reading({"select": "argmax", "show": None, **shared})
    where = requests.one_head(given["head"], given["layers"], given["heads"])
    revisions = [] if given["revisions"] is None else [word.strip() for word in given["revisions"].split(",")]
    if not all(revisions):
        words = given["revisions"]
        raise UsageError(f"--revisions {words!r} has an empty name.", "Write it like step1000,step2000.")
    selected = {name: value for name, value in shared.items() if name in names | {"seed", "analyzers"}}
    return {**selected, **where, "checkpoints": models or None, "revisions": revisions}


def typed(context: typer.Context) -> list[str]:
    """Return the parameters that were set on the command line of this call."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
