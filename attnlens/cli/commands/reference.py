"""The commands `list` and `explain`, which print a reference, and `report`, which shows a saved report."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import typer

from attnlens.arguments import checked_name
from attnlens.cli import parameters as opt
from attnlens.cli.outputs import Outputs, deliver, guard_stdout
from attnlens.cli.show import console
from attnlens.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnlens.report.sections.section import Section

Entry = TypeVar("Entry")
LISTED = ("kernels", "analyzers", "measures", "architectures", "schema")


def list_explained() -> list[str]:
    """Return the names of the measures, kernels and terms that `explain` accepts."""
    from attnlens.report.sections import reference

    return [*reference.measure_pages(), *reference.kernel_pages(), *reference.TERMS]


WHAT = opt.argument(
    "what",
    "`kernels`, `analyzers`, `measures`, `architectures` or `schema`.",
    shown="kernels, analyzers and measures",
    names=lambda: [*LISTED],
)
PART = opt.argument("part", "List only entries whose name contains this text, such as `gemma`.", metavar="TEXT")
EXPLAINED = opt.argument(
    "name",
    "One measure, curve, distance or kernel (see `attnlens list`), or one term used in the output.",
    list[str],
    "NAME",
    names=list_explained,
)
SAVED = opt.argument("saved", "A report written by --json.", str, "REPORT")


@opt.with_options(WHAT | PART | opt.PRINTED_MARKDOWN | opt.DEBUG)
def list_(context: typer.Context) -> None:
    """List kernels, analyzers, measures, or model types with their level of support; or print the JSON Schema."""
    what = context.params["what"]
    kind = None if what is None else checked_name("list", what, LISTED)
    if kind == "schema":
        from attnlens.records import json_schema

        with guard_stdout():
            typer.echo(json_schema(), nl=False)
        return
    from attnlens import kernels
    from attnlens.analyzers import registry
    from attnlens.records import architectures
    from attnlens.report.sections import reference as lists

    part = (context.params["part"] or "").lower()

    def select(entries: Iterable[Entry], field: str = "name") -> list[Entry]:
        """Return the entries whose name contains the requested text."""
        return [entry for entry in entries if part in getattr(entry, field).lower()]

    sections = []
    if kind == "architectures":
        measured, types = architectures.architectures()
        sections += lists.architecture_list(measured, select(types, "model_type"))
    if kind in (None, "kernels"):
        modifiers = (select(kinds.values()) for kinds in (kernels.TIES, kernels.FILTERS, kernels.HYBRIDS))
        sections += lists.kernel_list(select(kernels.kernels().values()), *modifiers)
    if kind in (None, "analyzers"):
        sections.append(lists.analyzer_list(select(registry.list_analyzers())))
    if kind in (None, "measures"):
        sections.append(lists.measure_list(select(registry.measure_infos().values())))
    if not any(section.table for section in sections):
        raise UsageError(f"No listed name contains {context.params['part']!r}.", "Leave out this text to list all.")
    _print([section for section in sections if section.table], markdown=context.params["markdown"])


@opt.with_options(EXPLAINED | opt.PRINTED_MARKDOWN | opt.DEBUG)
def explain(context: typer.Context) -> None:
    """Explain a measure, kernel or term: formula, range, null distribution, standard error, source, and
    interpretation."""
    from attnlens.report.sections.reference import explanation

    _print([explanation(" ".join(context.params["name"]))], markdown=context.params["markdown"])


def _print(sections: list[Section], *, markdown: bool) -> None:
    from attnlens.report.sections.section import Document

    document = Document(None, tuple(sections))
    with guard_stdout():
        if markdown:
            from attnlens.report.render.markdown import markdown as as_markdown

            typer.echo(as_markdown(document), nl=False)
        else:
            from attnlens.report.render import terminal

            console().print(terminal.document(document))


@opt.with_options(SAVED, opt.OUTPUT_OPTIONS)
def report(context: typer.Context) -> None:
    """Show the findings of a saved report, or export the report with --html, --figure, --csv or --markdown."""
    outputs, saved = Outputs.of(context.params), context.params["saved"]
    from attnlens.report.report import read_report  # late, because building the records takes time

    loaded = read_report(saved)
    outputs.check({os.path.realpath(saved): "the report"})
    deliver(outputs, loaded, source=saved)
