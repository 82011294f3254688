"""The commands `compare`, `swap-kernel`, `ranks` and `heal` with their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from attnlens.cli.show import guard, interruptible_at_once
from attnlens.requests import CompareRequest, HealRequest, RanksRequest, SwapRequest
from attnlens.requests.swap import heal_options, rank_options, swap_options

NAMES = "hub id, folder, file, `demo`, or a report (`.json`)"
First = Annotated[str, typer.Argument(metavar="FIRST", help=f"The reference model: {NAMES}.")]
Second = Annotated[
    str, typer.Argument(metavar="SECOND", help=f"The model to compare with it; --adapter applies to this one: {NAMES}.")
]


@guard
@opt.also(opt.parameters(CompareRequest), opt.OUTPUT_OPTIONS)
def compare(
    context: typer.Context,
    first: First,
    second: Second,
    table: opt.Table = False,
    strict: opt.Strict = False,
    **_shared: object,
) -> None:
    """Find the heads that differ between two models, with standard errors, p values and a false-discovery rate."""
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


KERNEL_HELP = "e.g. `rbf:gamma=1+window:64`; see `attnlens list kernels`."
Kernels = Annotated[
    list[str] | None,
    opt.option(
        "--kernel",
        help=f"New kernel, {KERNEL_HELP} Repeat the option to compare several.",
        metavar="NAME",
        show_default=KERNEL,
    ),
]
HealedKernel = Annotated[
    list[str] | None, opt.option("--kernel", help=f"New kernel, {KERNEL_HELP}", metavar="NAME", show_default=KERNEL)
]
Plan = Annotated[str | None, opt.output("--plan", "Write the ranks as JSON, for --ranks.")]


@guard
@opt.also(opt.parameters(SwapRequest, without=("engine", "shard")), opt.OUTPUT_OPTIONS)
def swap_kernel(
    context: typer.Context,
    model: opt.Model = None,
    kernel: Kernels = None,
    windows_csv: opt.WindowsCsv = None,
    strict: opt.Strict = False,
    **_shared: object,
) -> None:
    """Run a model with another attention kernel, and measure the effect."""
    request, kernels = opt.build(SwapRequest, context.params), tuple(kernel or [KERNEL])
    swap_options(kernels, request)  # checked here too, because importing `analyses` takes seconds
    begin_workers(request.engine, request.jobs)
    _change(context.params, model, lambda analyses, name, tell: analyses.swap_work(name, kernels, request, tell))


@guard
@opt.also(opt.parameters(RanksRequest), opt.OUTPUT_OPTIONS)
def ranks(
    context: typer.Context,
    model: opt.Model = None,
    plan: Plan = None,
    windows_csv: opt.WindowsCsv = None,
    strict: opt.Strict = False,
    **_shared: object,
) -> None:
    """Find the smallest key rank of each head within a loss budget, and measure the model with these ranks."""
    request = opt.build(RanksRequest, context.params)
    request = request.with_options(ranks=rank_options(request)[1].plan)  # a plan from a pipe can only be read once
    _change(context.params, model, lambda analyses, name, tell: analyses.rank_work(name, request, tell))


@guard
@opt.also(opt.parameters(HealRequest, without=("generate",)), opt.OUTPUT_OPTIONS)
def heal(
    context: typer.Context,
    model: opt.Model = None,
    kernel: HealedKernel = None,
    strict: opt.Strict = False,
    **_shared: object,
) -> None:
    """Replace the kernel, then train the swapped heads to match the original model, or on text."""
    request, kernel = opt.build(HealRequest, context.params), kernel or None
    ranks = heal_options(kernel, request)[2]
    request = request.with_options(ranks=None if ranks is None else ranks.plan)
    _change(context.params, model, lambda analyses, name, tell: analyses.heal_work(name, kernel, request, tell))


def _change(params: Mapping[str, Any], model: str | None, prepare: Callable[[Any, str, Any], Any]) -> None:
    """Run a command that changes a model, deliver its report, and then raise why the model could not be saved.

    `prepare` is (attnlens.cli.analyses, model, progress) → the work of the run.
    """
    outputs = Outputs.of(params)
    name = named_model(model, quiet=outputs.quiet)
    outputs.check(Inputs.of(params, [name]))
    with interruptible_at_once():
        from attnlens.cli import analyses

    stopped, unsaved, written = False, None, None
    with working(outputs) as tell:
        try:
            report, written = prepare(analyses, name, tell).run()
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
    if params["strict"]:
        end_strictly(report)
