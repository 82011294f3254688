"""The form of `inspect` that goes through a list of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from attnlens.cli import parameters as opt
from attnlens.cli.outputs import Outputs
from attnlens.cli.show import interruptible_at_once, say
from attnlens.cli.work import PARTLY, begin_workers, check_reading, working
from attnlens.errors import ModelError, UsageError
from attnlens.requests import InspectRequest

ALONE = ("json", "csv", "windows_csv", "png", "html", "markdown", "head", "show", "dry_run")
"""Options that are of one model."""


def inspect_each(model: str | None, given: Mapping[str, Any]) -> None:
    """Inspect every model of a list, write their reports, and tell what came of each.

    With --strict the exit code is 3 where one has none. Raises ModelError where none has one.
    """
    if given["models"] is None or given["reports"] is None:
        raise UsageError(
            "--models and --reports go together.", "Name a list of models, and a folder for their reports."
        )
    if model is not None:
        raise UsageError(f"{model} is named beside a list of models.", "Add it to the list.")
    if named := [name for name in ALONE if given[name]]:
        raise UsageError(f"--{named[0].replace('_', '-')} is of one model.", "Leave it out: each model has its report.")
    settings = opt.keywords(InspectRequest, given)
    check_reading(settings)
    begin_workers(settings)
    with interruptible_at_once():
        from attnlens import run

    listed = run.models_in(given["models"])
    with working(Outputs.of(given)) as tell:
        found = run.inspect_each(listed, given["reports"], progress=tell, **settings)
    for outcome in found:
        if outcome.report is None and given["quiet"]:
            say(f"{outcome.model}: {outcome.said}")
        elif not given["quiet"]:
            typer.echo(f"{outcome.model}: {outcome.said}" + (f" → {outcome.report}" if outcome.report else ""))
    failed = [outcome for outcome in found if outcome.report is None]
    if len(failed) == len(found):
        first = failed[0]
        raise ModelError(f"No model has a report; {first.model}: {first.said.rstrip('.')}.", "Mend the list.")
    if failed:
        say(f"{len(failed)} of {len(found)} models have no report.")
    if failed and given["strict"]:
        raise typer.Exit(PARTLY)
