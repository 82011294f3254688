"""The commands that change the kernel of a model: `swap-kernel`, `ranks` and `heal`."""

from __future__ import annotations

import typer

from attnlens.choices import KERNEL
from attnlens.cli import parameters as opt
from attnlens.cli.outputs import named_model, run_command
from attnlens.cli.show import guard
from attnlens.requests import HealRequest, RanksRequest, SwapRequest
from attnlens.requests.swap import heal_kernels, rank_kernels, swap_kernels


def _kernel_option(more: str) -> opt.Parameters:
    text = f"New kernel, e.g. `rbf:gamma=1+window:64`; see `attnlens list kernels`.{more}"
    return opt.option("--kernel", list[str] | None, text, metavar="NAME", shown=KERNEL)


@guard
@opt.with_options(
    opt.MODEL | _kernel_option(" Repeat the option to compare several.") | opt.WINDOWS_CSV | opt.STRICT,
    opt.parameters(SwapRequest, without=("engine", "shard")),
    opt.OUTPUT_OPTIONS,
)
def swap_kernel(context: typer.Context) -> None:
    """Run a model with another attention kernel, and measure the effect."""
    params = context.params
    request, kernels = opt.build(SwapRequest, params), tuple(params["kernel"] or [KERNEL])
    swap_kernels(kernels, request)  # checked here too, because importing `analyses` takes seconds
    name = named_model(params)
    run_command(params, [name], request, lambda analyses, tell: analyses.swap_work(name, kernels, request, tell).run())


PLAN = opt.output("--plan", "Write the ranks as JSON, for --ranks.")


@guard
@opt.with_options(opt.MODEL | PLAN | opt.WINDOWS_CSV | opt.STRICT, opt.parameters(RanksRequest), opt.OUTPUT_OPTIONS)
def ranks(context: typer.Context) -> None:
    """Find the smallest key rank of each head within a loss budget, and measure the model with these ranks."""
    request = opt.build(RanksRequest, context.params)
    request = request.with_options(ranks=rank_kernels(request)[1])  # a plan from a pipe can only be read once
    name = named_model(context.params)
    run_command(context.params, [name], request, lambda analyses, tell: analyses.rank_work(name, request, tell).run())


@guard
@opt.with_options(
    opt.MODEL | _kernel_option("") | opt.STRICT, opt.parameters(HealRequest, without=("generate",)), opt.OUTPUT_OPTIONS
)
def heal(context: typer.Context) -> None:
    """Replace the kernel, then train the swapped heads to match the original model, or on text."""
    params = context.params
    request, kernel = opt.build(HealRequest, params), params["kernel"] or None
    request = request.with_options(ranks=heal_kernels(kernel, request)[1])
    name = named_model(params)
    run_command(params, [name], request, lambda analyses, tell: analyses.heal_work(name, kernel, request, tell).run())
