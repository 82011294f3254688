"""The commands: each one parses its options, calls one function, and delivers its report."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import attnlens
from attnlens.arguments import checked_name
from attnlens.cli import PARTLY, UNUSABLE
from attnlens.cli import parameters as opt
from attnlens.cli.commands.check import check
from attnlens.cli.commands.converge import converge, reproduce
from attnlens.cli.commands.swap import compare, heal, ranks, swap_kernel
from attnlens.cli.outputs import (
    Inputs,
    Outputs,
    begin_workers,
    check_place,
    check_reading,
    deliver,
    end_strictly,
    failure,
    named_model,
    product,
    run_and_deliver,
)
from attnlens.cli.parameters import defaults, kinds
from attnlens.cli.show import console, guard
from attnlens.errors import UsageError
from attnlens.requests import DoctorRequest, InspectRequest

if TYPE_CHECKING:
    from attnlens.report.sections.section import Section


Explained = Annotated[str, typer.Argument(metavar="MEASURE", help="A measure, curve, distance or kernel of `list`.")]


@guard
def list_(what: opt.Listed = None, markdown: opt.ListedMarkdown = False, debug: opt.Debug = False) -> None:
    """List kernels, analyzers, measures or supported model types, or print the report's JSON Schema."""
    kind = None if what is None else checked_name("list", what, opt.LISTED)
    if kind == "schema":
        from attnlens.records import json_schema

        with product():
            typer.echo(json_schema(), nl=False)
        return
    from attnlens import kernels
    from attnlens.analyzers import registry
    from attnlens.records import architectures
    from attnlens.report.sections import reference as lists

    sections = []
    if kind == "architectures":
        sections += lists.architecture_list(*architectures.architectures())
    if kind in (None, "kernels"):
        sections += lists.kernel_list(
            kernels.kernels().values(), kernels.TIES.values(), kernels.FILTERS.values(), kernels.HYBRIDS.values()
        )
    if kind in (None, "analyzers"):
        sections.append(lists.analyzer_list(registry.list_analyzers()))
    if kind in (None, "measures"):
        sections.append(lists.measure_list(registry.measure_infos().values()))
    _show(sections, markdown=markdown)


@guard
def explain(name: Explained, markdown: opt.ListedMarkdown = False, debug: opt.Debug = False) -> None:
    """Explain a measure or kernel: formula, range, null, errors, source, and how to interpret the value."""
    from attnlens.report.sections.reference import explanation

    _show([explanation(name)], markdown=markdown)


def _show(sections: list[Section], *, markdown: bool) -> None:
    from attnlens.report.sections.section import Document

    document = Document(None, tuple(sections))
    with product():
        if markdown:
            from attnlens.report.render.markdown import markdown as as_markdown

            typer.echo(as_markdown(document), nl=False)
        else:
            from attnlens.report.render import terminal

            console().print(terminal.document(document))


Saved = Annotated[str, typer.Argument(metavar="REPORT", help="A report from --json.")]


@guard
@opt.also(opt.OUTPUT_OPTIONS)
def report(context: typer.Context, saved: Saved, table: opt.Table = False, **_shared: object) -> None:
    """Show the tables of a saved report, or export it with --html, --figure, --csv or --markdown."""
    outputs = Outputs.of(context.params)
    from attnlens.records import read_report  # late, because building the records takes time

    loaded = read_report(saved)
    outputs.check(Inputs({os.path.realpath(saved): "the report"}))
    deliver(outputs, loaded)


NOT_EXAMINED = ("batch_size", "placement", "intervals", "allow_foreign_text")
"""Options without effect on `doctor`, which compares two sequences of any content in one pass."""
app = typer.Typer(
    name="attnlens",
    help="Analyse the attention of pretrained transformers as kernel machines.",
    epilog="Exit codes: 0 success · 1 a check failed · 2 invalid arguments or input · 3 incomplete, with --strict · "
    "130 interrupted; finished work is kept · 141 output pipe closed.",
    invoke_without_command=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attnlens {attnlens.__version__}")
        raise typer.Exit


@app.callback()
@guard
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Analyse the attention of pretrained transformers as kernel machines."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(UNUSABLE)
    if context.invoked_subcommand in ("list", "explain") or "--help" in sys.argv:
        return  # neither reads defaults, and an error in a file must not prevent help
    check_place()
    options = defaults(Path(), kinds(command.callback for command in app.registered_commands if command.callback))
    context.default_map = dict.fromkeys(getattr(context.command, "commands", {}), options)


@app.command()
@guard
@opt.also(opt.parameters(InspectRequest), opt.OUTPUT_OPTIONS)
def inspect(
    context: typer.Context,
    model: opt.Model = None,
    head: opt.Head = None,
    windows_csv: opt.WindowsCsv = None,
    table: opt.Table = False,
    strict: opt.Strict = False,
    **_shared: object,
) -> None:
    """Measure symmetry, definiteness and spectrum of each head; with `--analyzer selection`, compare it with an SVM."""
    params = context.params
    outputs = Outputs.of(params)
    request = opt.build(InspectRequest, params, **opt.selected_heads(params))
    check_reading(request)
    if outputs.windows_csv is not None and request.source == "weights":
        raise UsageError("With source=weights no windows are read.", "Leave out --windows-csv, or --source weights.")
    name = named_model(model, quiet=outputs.quiet)
    outputs.check(Inputs.of(params, [name]))
    begin_workers(request.engine, request.jobs)
    report = run_and_deliver(outputs, lambda analyses, tell: analyses.run_inspect(name, request, progress=tell))
    if strict:
        end_strictly(report)


app.command()(compare)
app.command(name="swap-kernel")(swap_kernel)
app.command()(ranks)
app.command()(heal)
app.command()(converge)
app.command()(check)


@app.command()
@guard
@opt.also(opt.parameters(DoctorRequest, without=NOT_EXAMINED), opt.REPORT_OPTIONS)
def doctor(context: typer.Context, model: opt.Model = None, strict: opt.Strict = False, **_shared: object) -> None:
    """Verify that attnlens computes attention exactly as this model does; exit 2 if it does not."""
    outputs = Outputs.of(context.params)
    request = opt.build(DoctorRequest, context.params)
    name = named_model(model, quiet=outputs.quiet)
    outputs.check(Inputs.of(context.params, [name]))
    report = run_and_deliver(
        outputs, lambda analyses, tell: (analyses.doctor(name, progress=tell, **request.explicit()), None)
    )
    if report.summary.verdict == "differs":
        raise failure(report)
    if strict and report.summary.verdict != "agrees":
        raise typer.Exit(PARTLY)


app.command()(reproduce)
app.command()(report)
app.command(name="list")(list_)
app.command()(explain)
