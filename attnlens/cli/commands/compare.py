"""The command `compare` and its options."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from attnlens.cli import parameters as opt
from attnlens.cli.outputs import Inputs, Outputs, deliver
from attnlens.cli.show import guarded, interruptible_at_once
from attnlens.cli.work import check_reading, checked_model, end_strictly, working
from attnlens.requests import CompareRequest

NAMES = "hub id, folder, file, `demo`, or a report (`.json`)"
First = Annotated[
    str, typer.Argument(metavar="FIRST", help=f"The first model, by which changes are measured: {NAMES}.")
]
Second = Annotated[
    str, typer.Argument(metavar="SECOND", help=f"The second one, of which --adapter and --revision are: {NAMES}.")
]


@guarded
@opt.also(opt.parameters(CompareRequest, dtype="float32"), opt.SHOWN)
def compare(
    context: typer.Context,
    first: First,
    second: Second,
    all_heads: opt.AllHeads = False,
    strict: opt.Strict = False,
    **_shared: Any,
) -> None:
    """Which heads changed between two models: on the same windows, with errors, p values and a false-discovery rate."""
    given = context.params
    outputs = Outputs.of(given)
    settings = opt.keywords(CompareRequest, given)
    check_reading({**settings, "show": None})
    names = [checked_model(name) for name in (first, second)]
    outputs.check(Inputs.of(given, [name for name in names if not name.endswith(".json")]))
    with interruptible_at_once():
        from attnlens import run

    with working(outputs) as tell:
        report = run.compare(names[0], names[1], progress=tell, **settings)
    deliver(outputs, report)
    if strict:
        end_strictly(report)
