"""The command `study`, which trains small models."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from attnlens.choices import STUDIES
from attnlens.cli import parameters as opt
from attnlens.cli.outputs import Inputs, Outputs, deliver
from attnlens.cli.show import guarded, interruptible_at_once, say
from attnlens.cli.work import begin_workers, working
from attnlens.requests.experiments import StudyRequest, table

Table = Annotated[str, typer.Argument(metavar="TABLE", help=f"{', '.join(f'`{name}`' for name in STUDIES)}, or `all`.")]


@guarded
@opt.also(opt.parameters(StudyRequest), opt.SHOWN)
def study(context: typer.Context, name: Table = "all", **_shared: Any) -> None:
    """Train small models and rerun the papers' tables: kernels, positions, order, values, dimension, primal."""
    given = context.params
    table(name)
    outputs = Outputs.of(given)
    settings = opt.keywords(StudyRequest, given)
    outputs.check(Inputs.of(given, ()))
    begin_workers({**settings, "jobs": settings["jobs"] or os.cpu_count() or 1})
    with interruptible_at_once():
        from attnlens import run

    with working(outputs) as tell:
        try:
            report = run.study(name, progress=tell, **settings)
        except KeyboardInterrupt:
            say("What is finished is kept: the same command goes on from there.")
            raise
    deliver(outputs, report)
