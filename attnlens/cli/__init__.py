"""What can be typed? Each command parses, calls one function, and shows what comes back."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import attnlens
from attnlens.cli import options as opt
from attnlens.cli.show import INTERRUPTED, Outputs, console, guarded, progress
from attnlens.registry import checked_name

app = typer.Typer(
    name="attnlens",
    help="Look at the attention of pretrained transformers as kernel machines.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the program; a reader that closes the pipe early (as `head` does) ends it without a word."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows ASCII alone still gets its numbers
    try:
        app()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            # CPython holds an interruption that struck inside exec(), as dataclasses use it while torch is imported,
            # for unhandled even when it was caught, and would end with a signal instead of this code.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise


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
    commands = getattr(context.command, "commands", {})
    known = {parameter.name for command in commands.values() for parameter in command.params if parameter.name}
    found = opt.defaults(Path.cwd(), known)
    context.default_map = dict.fromkeys(commands, found)


def _model(name: str | None, *, quiet: bool) -> str:
    if name is None and not quiet:
        console(stderr=True).print("No model named: using demo, the small model that ships with attnlens.")
    return name or "demo"


@app.command()
@guarded
def inspect(
    context: typer.Context,
    model: opt.Model = None,
    source: opt.Source = "both",
    analyzer: opt.Analyzers = None,
    layers: opt.Layers = None,
    heads: opt.Heads = None,
    text: opt.Text = None,
    tokens: opt.Tokens = None,
    sequences: opt.Sequences = 32,
    batch_size: opt.BatchSize = 8,
    pack: opt.Pack = True,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    seed: opt.Seed = 0,
    json: opt.Json = None,
    csv: opt.Csv = None,
    png: opt.Png = None,
    html: opt.Html = None,
    markdown: opt.Markdown = None,
    all_heads: opt.AllHeads = False,
    strict: opt.Strict = False,
    offline: opt.Offline = False,
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    allow_pickle: opt.AllowPickle = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
) -> None:
    """Show per head whether its kernel is symmetric and positive definite, and how fast its spectrum falls."""
    outputs = Outputs.of(context.params)
    outputs.check()
    settings = opt.asked(context.params) | opt.loading(context.params)
    _inspect(_model(model, quiet=quiet), settings, outputs, strict=strict)


def _inspect(model: str, settings: dict[str, Any], outputs: Outputs, *, strict: bool) -> None:
    from attnlens import run

    try:
        with progress(shown=outputs.moving) as tell:
            report = run.inspect(model, progress=tell, **settings)
    except run.Interrupted as stop:
        if any(head.measures for head in stop.report.heads):
            outputs.show(stop.report)
            outputs.write(stop.report)
        raise typer.Exit(INTERRUPTED) from None
    outputs.show(report)
    outputs.write(report)
    if strict and not report.coverage.complete:
        raise typer.Exit(3)


@app.command()
@guarded
def doctor(
    context: typer.Context,
    model: opt.Model = None,
    text: opt.Text = None,
    tokens: opt.Tokens = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    json: opt.Json = None,
    offline: opt.Offline = False,
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    allow_pickle: opt.AllowPickle = False,
    quiet: opt.Quiet = False,
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
) -> None:
    """Prove on this model that what attnlens reads is what the model computes (in float64); exit 2 where it is not."""
    from attnlens import run

    outputs = Outputs.of(context.params)
    outputs.check()
    name = _model(model, quiet=quiet)
    with progress(shown=outputs.moving) as tell:
        loading = opt.loading(context.params)
        report = run.doctor(name, text=text or (), tokens=tokens, seed=seed, progress=tell, **loading)
    outputs.show_doctor(report)
    outputs.write(report)
    if not run.sound(report):
        raise typer.Exit(2)


@app.command(name="list")
@guarded
def list_(what: opt.Listed = None, debug: opt.Debug = False) -> None:
    """List analyzers and measures with their one-line meaning, or print the report's JSON Schema."""
    kind = what and checked_name("list", what, ("analyzers", "measures", "schema"))
    if kind == "schema":
        from attnlens.records import json_schema

        typer.echo(json_schema(), nl=False)
        return
    from attnlens import registry, tables

    shown = console()
    if kind != "measures":
        shown.print(tables.analyzers_table(registry.analyzers()))
    if kind != "analyzers":
        shown.print(tables.measures_table(registry.measure_infos().values()))
