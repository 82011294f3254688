"""What can be typed? Each command parses, calls one function, and shows what comes back."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import attnlens
from attnlens.cli import options as opt
from attnlens.cli.converge import converge, verify
from attnlens.cli.defaults import defaults, kinds
from attnlens.cli.outputs import READER_LEFT, Outputs, product
from attnlens.cli.show import INTERRUPTED, UNUSABLE, complain, console, guarded
from attnlens.cli.swap import swap_kernel
from attnlens.cli.verdict import end_strictly, failure
from attnlens.cli.work import named_model, working
from attnlens.errors import AttnlensError
from attnlens.registry import checked_name

TypedWrong: Any = typer.BadParameter.__base__
"""What click raises for words that it can't parse; typer carries its own click, or uses the package, by its version."""

app = typer.Typer(
    name="attnlens",
    help="Look at the attention of pretrained transformers as kernel machines.",
    invoke_without_command=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the program, and end it with the exit code that the contract says."""
    _prepare_terminal()
    code = _exit_code()
    if code == INTERRUPTED:
        # CPython holds an interruption that struck inside exec(), as dataclasses use it while torch is imported,
        # for unhandled even when it was caught, and would end with a signal instead of this code.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    sys.exit(code)


def _prepare_terminal() -> None:
    """Make the streams and the page usable in whatever state the caller left them."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123  # it lives as long as the program
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows ASCII alone still gets its numbers
    if os.environ.get("COLUMNS", "").strip("0") == "":
        os.environ.pop("COLUMNS", None)  # a page of no width, which typer's help would believe


def _exit_code() -> int:
    """Run the command; whatever it could not turn into words itself is turned here."""
    if sys.stdout is None:
        complain("stdout is closed.", "Send it somewhere, as in: attnlens list > FILE")
        return UNUSABLE
    try:
        with product():
            return app(prog_name="attnlens", standalone_mode=False) or 0
    except TypedWrong as error:
        # an option without its value is told without a context, and only within a command
        command = error.ctx.command_path if error.ctx else f"attnlens {sys.argv[1]}"
        complain(error.format_message(), f"Run: {command} --help")
        return UNUSABLE
    except AttnlensError as error:
        complain(error.problem, error.remedy)
        return UNUSABLE
    except typer.Exit as stop:
        return stop.exit_code
    except SystemExit:  # so does typer itself end where nobody reads its help
        return READER_LEFT


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attnlens {attnlens.__version__}")
        raise typer.Exit


@app.callback()
@guarded
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Look at the attention of pretrained transformers as kernel machines."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(UNUSABLE)
    found = defaults(Path(), kinds(command.callback for command in app.registered_commands if command.callback))
    context.default_map = dict.fromkeys(getattr(context.command, "commands", {}), found)


@app.command()
@guarded
@opt.also(opt.FED, opt.LOADED, opt.SHOWN)
def inspect(
    context: typer.Context,
    model: opt.Model = None,
    source: opt.Source = "both",
    analyzer: opt.Analyzers = None,
    head: opt.Head = None,
    select: opt.Select = "argmax",
    show: opt.Show = None,
    seed: opt.Seed = 0,
    all_heads: opt.AllHeads = False,
    strict: opt.Strict = False,
    **_shared: Any,
) -> None:
    """Show per head symmetry, definiteness and spectrum; with `--analyzer selection`, whether it selects as an SVM."""
    _inspect(model, context.params)


def _inspect(model: str | None, given: Mapping[str, Any]) -> None:
    outputs = Outputs.of(given)
    outputs.check()
    settings = opt.asked(given) | opt.loading(given) | opt.shown(given)
    name = named_model(model, quiet=outputs.quiet)
    from attnlens import run

    try:
        with working(outputs) as tell:
            report = run.inspect(name, progress=tell, **settings)
    except run.Interrupted as stop:
        if any(head.measures for head in stop.report.heads):
            outputs.deliver(stop.report)
        raise typer.Exit(INTERRUPTED) from None
    outputs.deliver(report)
    if given["strict"]:
        end_strictly(report)


app.command(name="swap-kernel")(swap_kernel)
app.command()(converge)


@app.command()
@guarded
@opt.also(opt.LOADED)
def doctor(
    context: typer.Context,
    model: opt.Model = None,
    layers: opt.Layers = None,
    heads: opt.Heads = None,
    text: opt.Text = None,
    tokens: opt.Tokens = None,
    sequences: opt.Sequences = 2,
    pack: opt.Pack = True,
    dtype: opt.Dtype = "float64",
    seed: opt.Seed = 0,
    strict: opt.Strict = False,
    json: opt.Json = None,
    quiet: opt.Quiet = False,
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
    **_shared: Any,
) -> None:
    """Prove on this model that what attnlens reads is what the model computes; exit 2 where it is not."""
    from attnlens import run

    outputs = Outputs.of(context.params)
    outputs.check()
    settings = opt.asked(context.params) | opt.loading(context.params)
    name = named_model(model, quiet=quiet)
    with working(outputs) as tell:
        report = run.doctor(name, progress=tell, **settings)
    outputs.deliver(report)
    if not run.sound(report):
        raise failure(report)
    if strict and report.summary.verdict != "agrees":
        raise typer.Exit(3)


app.command()(verify)


@app.command(name="list")
@guarded
def list_(what: opt.Listed = None, debug: opt.Debug = False) -> None:
    """List kernels, analyzers and measures with their one-line meaning, or print the report's JSON Schema."""
    kind = what and checked_name("list", what, ("kernels", "analyzers", "measures", "schema"))
    if kind == "schema":
        from attnlens.records import json_schema

        with product():
            typer.echo(json_schema(), nl=False)
        return
    from attnlens import kernels, registry, tables

    shown = console()
    with product():
        if kind in (None, "kernels"):
            shown.print(
                tables.kernels_table(kernels.kernels().values(), kernels.TIES.values(), kernels.FILTERS.values())
            )
        if kind in (None, "analyzers"):
            shown.print(tables.analyzers_table(registry.every_analyzer()))
        if kind in (None, "measures"):
            shown.print(tables.measures_table(registry.measure_infos().values()))
