"""The commands that run no model: `list`, `explain` and `report`, which shows a saved report again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnlens.cli import parameters as opt
from attnlens.cli.outputs import Inputs, Outputs, deliver, product
from attnlens.cli.show import console, guarded
from attnlens.registry import checked_name

if TYPE_CHECKING:
    from attnlens.sections.section import Section

Explained = Annotated[str, typer.Argument(metavar="MEASURE", help="A measure, curve, distance or kernel of `list`.")]


@guarded
def list_(what: opt.Listed = None, markdown: opt.ListedMarkdown = False, debug: opt.Debug = False) -> None:
    """List kernels, analyzers and measures, or which model types are read, or print the report's JSON Schema."""
    kind = None if what is None else checked_name("list", what, opt.LISTED)
    if kind == "schema":
        from attnlens.records import json_schema

        with product():
            typer.echo(json_schema(), nl=False)
        return
    from attnlens import architectures, kernels, registry
    from attnlens.sections import reference as lists

    told = []
    if kind == "architectures":
        told += lists.architecture_list(*architectures.architectures())
    if kind in (None, "kernels"):
        told += lists.kernel_list(
            kernels.kernels().values(), kernels.TIES.values(), kernels.FILTERS.values(), kernels.HYBRIDS.values()
        )
    if kind in (None, "analyzers"):
        told.append(lists.analyzer_list(registry.every_analyzer()))
    if kind in (None, "measures"):
        told.append(lists.measure_list(registry.measure_infos().values()))
    _print(told, markdown=markdown)


@guarded
def explain(name: Explained, markdown: opt.ListedMarkdown = False, debug: opt.Debug = False) -> None:
    """Explain a measure or kernel: formula, range, null, errors, source, and what to do with the answer."""
    from attnlens.sections.reference import explanation

    _print([explanation(name)], markdown=markdown)


def _print(sections: list[Section], *, markdown: bool) -> None:
    from attnlens.sections.section import Document

    told = Document(None, tuple(sections))
    with product():
        if markdown:
            from attnlens.render.markdown import markdown as as_markdown

            typer.echo(as_markdown(told), nl=False)
        else:
            from attnlens.render import terminal

            console().print(terminal.document(told))


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
