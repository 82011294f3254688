"""Files, versions, times and memory of a report, and what its measures mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attnlens.records import Report
from attnlens.registry import MeasureInfo
from attnlens.sections.section import Column, Section, Table
from attnlens.sentences import reports
from attnlens.wording import clean, listed


def details(report: Report) -> Section:
    """What a reader needs to repeat the run: tool, environment, settings, files with checksums, seconds, memory."""
    return Section("Details", items=tuple(_facts(report)))


def provenance(report: Report) -> Section:
    """What is needed to know a run again: versions, seed, text and files with checksums."""
    made, settings = report.environment, report.settings
    text = [f"text: {settings.text.name}, sha256 {settings.text.sha256}"] if settings.text else []
    lines = [
        f"{report.tool.name} {report.tool.version}, Python {made.python}, torch {made.torch}, "
        f"transformers {made.transformers}, {made.platform}; seed {settings.seed}",
        *text,
        *(f"{file.name}: sha256 {file.sha256}" for file in report.model.files),
    ]
    return Section("How it was made", items=tuple(lines))


def glossary(infos: Iterable[MeasureInfo]) -> Iterator[Section]:
    """What each measure means; nothing where none is known."""
    known = [info for info in infos if info.meaning]
    names = Column("", "measure", tuple(clean(info.name) for info in known), words=True)
    columns = (
        Column("", "meaning", tuple(clean(info.meaning) for info in known), words=True),
        Column("", "formula", tuple(clean(info.formula) for info in known), words=True),
    )
    if known:
        yield Section("What is measured", table=Table((names,), columns, fit="folded"))


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
    for note in reports.notes(report):
        yield "note", note
    for file in report.model.files:
        yield "file", f"{file.name}, sha256 {file.sha256}"
    for stage, seconds in report.timings.items():
        yield "time", f"{stage}: {seconds:.2f} s"
    yield "memory", f"at most {report.peak_memory_bytes / 2**20:,.0f} MiB"
