"""The commands `compare` and `swap-kernel` with their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from attnlens.choices import KERNEL
from attnlens.cli import parameters as opt
from attnlens.cli.outputs import (
    Inputs,
    Outputs,
    begin_workers,
    check_reading,
    checked_model,
    deliver,
    end_strictly,
    named_model,
    run_and_deliver,
    working,
)
from attnlens.cli.show import guarded, interruptible_at_once
from attnlens.errors import UsageError
from attnlens.requests import CompareRequest, SwapRequest

NAMES = "hub id, folder, file, `demo`, or a report (`.json`)"
First = Annotated[
    str, typer.Argument(metavar="FIRST", help=f"The first model, by which changes are measured: {NAMES}.")
]
Second = Annotated[str, typer.Argument(metavar="SECOND", help=f"The second one, that --adapter applies to: {NAMES}.")]


@guarded
@opt.also(opt.parameters(CompareRequest), opt.SHOWN)
def compare(
    context: typer.Context,
    first: First,
    second: Second,
    table: opt.Table = False,
    strict: opt.Strict = False,
    **_shared: Any,
) -> None:
    """Which heads changed between two models: on the same windows, with errors, p values and a false-discovery rate."""
    params = context.params
    outputs = Outputs.of(params)
    request = opt.build(CompareRequest, params)
    check_reading(request)
    names = [checked_model(name) for name in (first, second)]
    outputs.check(Inputs.of(params, [name for name in names if not name.endswith(".json")]))
    report = run_and_deliver(
        outputs, lambda analyses, tell: (analyses.compare(*names, progress=tell, **request.explicit()), None)
    )
    if strict:
        end_strictly(report)


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
@opt.also(opt.parameters(SwapRequest, without=("engine", "shard")), opt.SHOWN)
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
    params = context.params
    outputs = Outputs.of(params)
    kernels, request = build(params)
    name = named_model(model, quiet=outputs.quiet)
    outputs.check(Inputs.of(params, [name]))
    begin_workers(request.engine, request.jobs)
    with interruptible_at_once():
        from attnlens.cli import analyses

    stopped, unsaved, written = False, None, None
    with working(outputs) as tell:
        try:
            report, written = analyses.run_swap(name, kernels, request, tell)
        except analyses.Interrupted as stop:
            report, stopped = stop.report, True
        except analyses.UnsavedError as error:
            report, unsaved = error.report, error
    saved = [f"the changed model to {params['save']}"] if params["save"] is not None and unsaved is None else []
    deliver(outputs, report, interrupted=stopped, saved=saved)
    if unsaved is not None:
        raise unsaved
    if written is not None:
        written()
    if strict:
        end_strictly(report)


def build(values: Mapping[str, Any]) -> tuple[tuple[str, ...], SwapRequest]:
    """Return the kernels and the request of a command's parameters, checked against each other."""
    request = opt.build(SwapRequest, values)
    if values["plan"] is not None and request.budget is None and request.ranks is None:
        raise UsageError("--plan is given and there is none to write.", "Add --budget, as in --budget loss:1%.")
    from attnlens.requests.swap import SwapOptions  # late, because it loads the kernels

    kernels = tuple(values["kernel"] or [KERNEL])
    options = SwapOptions.of(kernels, request)
    options.reach(request.layers, request.heads)
    return kernels, request.changed(ranks=options.ranks)  # a plan from a pipe can only be read once
