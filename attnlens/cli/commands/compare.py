"""The command `compare`."""

from __future__ import annotations

import typer

from attnlens.cli import parameters as opt
from attnlens.cli.outputs import check_reading, checked_model, run_command
from attnlens.cli.show import guard
from attnlens.requests import CompareRequest

NAMES = "hub id, folder, file, `demo`, or a report (`.json`)"
FIRST = opt.argument("first", f"The reference model: {NAMES}.", str, "FIRST")
SECOND = opt.argument("second", f"The model to compare with it; --adapter applies to this one: {NAMES}.", str, "SECOND")


@guard
@opt.with_options(FIRST | SECOND | opt.TABLE | opt.STRICT, opt.parameters(CompareRequest), opt.OUTPUT_OPTIONS)
def compare(context: typer.Context) -> None:
    """Find the heads that differ between two models, with standard errors, p values and a false-discovery rate."""
    params = context.params
    request = opt.build(CompareRequest, params)
    check_reading(request)
    names = [checked_model(params[name]) for name in ("first", "second")]
    models = [name for name in names if not name.endswith(".json")]
    run_command(
        params, models, request, lambda analyses, tell: analyses.compare(*names, progress=tell, request=request)
    )
