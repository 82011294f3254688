"""The command `report`, which shows and draws a saved report again."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from attnlens.cli import parameters as opt
from attnlens.cli.outputs import Inputs, Outputs, deliver
from attnlens.cli.show import guarded

Saved = Annotated[str, typer.Argument(metavar="REPORT", help="A report from --json.")]


@guarded
@opt.also(opt.SHOWN)
def report(context: typer.Context, saved: Saved, all_heads: opt.AllHeads = False, **_shared: Any) -> None:
    """Show a saved report again: its tables, or with --html, --png, --csv and --markdown as files."""
    outputs = Outputs.of(context.params)
    from attnlens.records import read_report  # late, because it loads pydantic

    found = read_report(saved)
    outputs.check(Inputs.of_report(saved))
    deliver(outputs, found)
