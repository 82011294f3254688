"""The command `swap-kernel` and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from attnlens.choices import KERNEL
from attnlens.cli import parameters as opt
from attnlens.cli.outputs import Inputs, Outputs, deliver
from attnlens.cli.show import guarded, interruptible_at_once
from attnlens.cli.work import begin_workers, end_strictly, named_model, working
from attnlens.errors import UsageError
from attnlens.requests import SwapRequest

Kernels = Annotated[
    list[str] | None,
    opt.option(
        "--kernel",
        help="Which kernel, as in `rbf:gamma=1+window:64`; repeatable, to compare several. "
        "`attnlens list kernels` names them.",
        metavar="NAME",
        show_default=KERNEL,
    ),
]
Plan = Annotated[str | None, opt.output("--plan", "Write the ranks of --budget or --ranks as JSON.")]


@guarded
@opt.also(opt.parameters(SwapRequest), opt.SHOWN)
def swap_kernel(
    context: typer.Context,
    model: opt.Model = None,
    kernel: Kernels = None,
    plan: Plan = None,
    windows_csv: opt.WindowsCsv = None,
    strict: opt.Strict = False,
    **_shared: Any,
) -> None:
    """Re-run a model with another attention kernel, and measure what that does to it."""
    given = context.params
    outputs = Outputs.of(given)
    settings = asked(given)
    name = named_model(model, quiet=outputs.quiet)
    outputs.check(Inputs.of(given, [name]))
    begin_workers(settings)
    with interruptible_at_once():
        from attnlens import run

    stopped, unsaved, written = False, None, None
    with working(outputs) as tell:
        try:
            report, written = run.swapped(name, progress=tell, **settings)
        except run.Interrupted as stop:
            report, stopped = stop.report, True
        except run.UnsavedError as error:
            report, unsaved = error.report, error
    saved = [f"the changed model to {given['save']}"] if given["save"] is not None and unsaved is None else []
    deliver(outputs, report, interrupted=stopped, saved=saved)
    if unsaved is not None:
        raise unsaved
    if written is not None:
        written()
    if strict:
        end_strictly(report)


def asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `run.swapped`, checked.

    Raises UsageError for words that make no sense or contradict each other, TextError for a stdin that is not there.
    """
    found = opt.keywords(SwapRequest, given)
    if given["plan"] is not None and found["budget"] is None and found["ranks"] is None:
        raise UsageError("--plan is given and there is none to write.", "Add --budget, as in --budget loss:1%.")
    from attnlens.requests.swap import SwapOptions  # late, because it loads the kernels

    kernels = given["kernel"] or [KERNEL]
    options = SwapOptions.of(kernels, found)
    options.reach(found["layers"], found["heads"])
    return {**found, "kernels": kernels, "ranks": options.ranks}  # a plan that comes through a pipe is read once
