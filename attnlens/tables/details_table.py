"""Files, versions, times and memory of a report."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from attnlens.records import Report
from attnlens.tables import facts
from attnlens.tables.sections import printed
from attnlens.tables.series import series_sections
from attnlens.tables.swaps import swap_sites
from attnlens.wording import clean, listed


def details(report: Report) -> Group:
    """What a reader needs to repeat the run: tool, environment, settings, files with checksums, seconds, memory."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in _facts(report):
        table.add_row(Text(name, style="dim"), Text(clean(fact)))
    return Group(swap_sites(report), *printed(series_sections(report)), "", Text("Details", style="bold"), table)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    versions, settings = report.environment, report.settings
    yield "tool", f"{report.tool.name} {report.tool.version}"
    yield "python", f"{versions.python}, torch {versions.torch}, transformers {versions.transformers}"
    yield "platform", versions.platform
    yield "source", settings.source
    yield "seed", str(settings.seed)
    if settings.analyzers:
        yield "analyzers", listed(settings.analyzers, 20)
    if settings.text is not None:
        yield "text", f"{settings.text.name}, sha256 {settings.text.sha256}"
    if settings.noise is not None:
        yield "noise", f"{settings.noise.name}, sha256 {settings.noise.sha256}"
    for note in facts.notes(report):
        yield "note", note
    for file in report.model.files:
        yield "file", f"{file.name}, sha256 {file.sha256}"
    for stage, seconds in report.timings.items():
        yield "time", f"{stage}: {seconds:.2f} s"
    yield "memory", f"at most {report.peak_memory_bytes / 2**20:,.0f} MiB"
