"""The command `converge`: synthetic experiments, one head of a model, or checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer

from attnlens import requests
from attnlens.cli import parameters as opt
from attnlens.cli.outputs import NO_MODEL, check_reading, checked_model, option_name, run_command
from attnlens.cli.show import guard, say
from attnlens.errors import UsageError
from attnlens.requests.experiments import DescentRequest, SyntheticRequest
from attnlens.requests.run_options import SharedRequest

COMMON = {*opt.OUTPUT_OPTIONS, "seed", "strict"}
INPUT = set(requests.Feeding.model_fields) - {"revision", "seed"}
SYNTHETIC = opt.parameters(SyntheticRequest)
FOLLOWED = opt.parameters(requests.CheckpointsRequest, without=("adapter", "engine"))
SYNTHETIC_RUN, HEAD_RUN, SERIES_RUN = "the synthetic experiments", "a head", "checkpoints"
SERIES = {"models", "checkpoints", "revisions", "head", "source", "analyzer", "layers", "heads"}
KINDS: dict[str, set[str]] = {
    SYNTHETIC_RUN: {*SYNTHETIC},
    HEAD_RUN: {"models", "head", "iterations"} | INPUT,
    SERIES_RUN: SERIES | {*SharedRequest.model_fields} | INPUT,
}
"""Options of each kind of run, in addition to the common ones."""
TRAINED = "Checkpoints and heads"
MODELS = opt.argument(
    "models",
    "With --head or --revisions: a model. With --checkpoints: folders, files or hub ids, or `demo`. "
    "If omitted: the synthetic experiments.",
    list[str] | None,
    "[MODEL]...",
    shown=False,
)
CHOICES = {
    **opt.option(
        "--checkpoints",
        bool,
        "Follow every head through these checkpoints, e.g. `--checkpoints a b c`; without names, demo's checkpoints.",
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
        "Train on the selection problem of this head, e.g. `3.7`: on the module's inputs if scores are bilinear in "
        "them, else on queries and keys.",
        panel=TRAINED,
        metavar="LAYER.HEAD",
    ),
}


@guard
@opt.with_options(MODELS | CHOICES | opt.STRICT, SYNTHETIC | FOLLOWED, opt.OUTPUT_OPTIONS)
def converge(context: typer.Context) -> None:
    """Test whether training selects tokens like a max-margin classifier: synthetic, one head, or checkpoints."""
    params = context.params
    kind = kind_of(params)
    refuse_other(kind, context, KINDS)
    models = [checked_model(model) for model in params["models"] or []]
    if kind == SYNTHETIC_RUN:
        synthetic = opt.build(SyntheticRequest, params)
        run_command(
            params, (), synthetic, lambda analyses, tell: analyses.converge_synthetic(progress=tell, request=synthetic)
        )
    elif kind == HEAD_RUN:
        if len(models) > 1:
            raise UsageError(f"--head takes one model, not {len(models)}.", "Name one model, or add --checkpoints.")
        head, feeding = requests.head(params["head"]), opt.build(requests.Feeding, params)
        keywords = {"head": head, **opt.build(DescentRequest, params).explicit()}
        _say_demo(models, params)
        run_command(
            params,
            models,
            feeding,
            lambda analyses, tell: analyses.converge_head(*models, progress=tell, request=feeding, **keywords),
        )
    else:
        where = requests.one_head(params["head"], params["layers"], params["heads"])
        series = opt.build(requests.CheckpointsRequest, params, **where)
        check_reading(series)
        names = params["revisions"]
        revisions = [] if names is None else [name.strip() for name in names.split(",")]
        if not all(revisions):
            raise UsageError(f"--revisions {names!r} contains an empty name.", "Write e.g. step10,step20.")
        _say_demo(models, params)
        run_command(
            params,
            models,
            series,
            lambda analyses, tell: analyses.follow(models or None, series, revisions=revisions, progress=tell),
        )


def _say_demo(models: Sequence[str], params: Mapping[str, object]) -> None:
    if not models and not params["quiet"]:
        say(NO_MODEL)


def kind_of(params: Mapping[str, Sequence[str]]) -> str:
    """Return the kind of run that the parameters request. Raise UsageError for models without a question."""
    if params["checkpoints"] or params["revisions"] is not None:
        return SERIES_RUN
    if params["head"] is not None:
        return HEAD_RUN
    if params["models"]:
        raise UsageError(
            f"`converge {params['models'][0]}` needs --head, --checkpoints or --revisions.",
            "Add one of them, or omit the model to run the synthetic experiments.",
        )
    return SYNTHETIC_RUN


def refuse_other(kind: str, context: typer.Context, kinds: Mapping[str, set[str]]) -> None:
    """Raise UsageError for an option of another of the `kinds` of run that this kind would ignore."""
    for name in opt.command_line_options(context):
        others = [other for other, names in kinds.items() if name in names]
        if name not in kinds[kind] | COMMON:
            option = option_name(name)
            raise UsageError(f"{option} is an option of {' and '.join(others)}, not of {kind}.", f"Leave out {option}.")
