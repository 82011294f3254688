"""The command `merge`, which joins the parts of a sharded run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from attnlens.cli import parameters as opt
from attnlens.cli.outputs import Inputs, Outputs, deliver
from attnlens.cli.show import guarded, interruptible_at_once
from attnlens.cli.work import end_strictly, working

Places = Annotated[
    list[str],
    typer.Argument(metavar="DIR|REPORT...", help="Folders that `--work` named, and JSON reports of shards."),
]


@guarded
@opt.also(opt.SHOWN)
def merge(
    context: typer.Context,
    places: Places,
    windows_csv: opt.WindowsCsv = None,
    all_heads: opt.AllHeads = False,
    strict: opt.Strict = False,
    **_shared: Any,
) -> None:
    """Join shards of a run into the report of one run; `--json` removes the units that folders hold."""
    outputs = Outputs.of(context.params)
    outputs.check(Inputs.of_report(*(place for place in places if place.endswith(".json"))))
    with interruptible_at_once():
        from attnlens import run

    with working(outputs):
        report, written = run.merged(*places)
    deliver(outputs, report)
    if outputs.json is not None:
        written()
    if strict:
        end_strictly(report)
