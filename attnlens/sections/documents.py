"""A report as a document, a list of pictures, or rows of a sheet."""

from __future__ import annotations

from collections.abc import Iterator

from attnlens.errors import UsageError
from attnlens.records import Report
from attnlens.sections import checked
from attnlens.sections.details import details, glossary, provenance
from attnlens.sections.every_head import head_tables
from attnlens.sections.kinds import kind_of
from attnlens.sections.page.explorer import explorer
from attnlens.sections.section import Document, Heading, Picture, Section, Sheet, sheet
from attnlens.sections.selections import selections
from attnlens.sentences import reports
from attnlens.shapes import Shapes


def summary(report: Report, *, whole: bool = False, all_heads: bool = False, verbose: bool = False) -> Document:
    """What fits on one page of a terminal, the selections that were asked for, and what else is.

    `whole`: every measure and note; `all_heads`: every head; `verbose`: how the report was made.
    """
    kind, shapes = kind_of(report), Shapes(report)
    told = [*kind.summary(shapes, whole), *checked.sections(report), *_missing(shapes)]
    if not whole:
        told += selections(report)
    if all_heads:
        told += head_tables(shapes)
    if verbose and kind.headed:
        told += [*kind.more(report), details(report)]
    return Document(_head(report, whole) if kind.headed else None, tuple(told))


def page(report: Report) -> Document:
    """The report on one page of any length. Raises UsageError where it has nothing to draw."""
    kind, shapes = kind_of(report), Shapes(report)
    measures = glossary(map(shapes.info, kind.measured(shapes)))
    picture = [Section("At a glance", picture=kind.overview(shapes))] if kind.pictured else []
    opening = (*kind.opening(shapes), *_missing(shapes))
    explored = kind.explored(report)
    told = (*picture, *checked.sections(report), *kind.page(shapes), *measures, provenance(report))
    return Document(
        _head(report, whole=True), told, opening, explorer(shapes if explored is report else Shapes(explored))
    )


def pictures(report: Report) -> list[Picture]:
    """All pictures of the report, its overview first. Raises UsageError where it has nothing to draw."""
    return kind_of(report).pictures(Shapes(report))


def overview(report: Report) -> Picture:
    """The one picture that stands for the report. Raises UsageError where it has nothing to draw."""
    return kind_of(report).overview(Shapes(report))


def rows(report: Report) -> Sheet:
    """One row a head: site, layer, head, kv_head, part, and for each measure `name`, `name.se`, `name.z`.

    The columns of `Report.to_dataframe`; of a swap, a row a stage, or a unit swapped alone;
    of experiments, a row a figure, or a row per head, measure and step. A category stands by its name.
    """
    return sheet(kind_of(report).rows(report))


def windows(report: Report) -> Sheet:
    """One row a window and head (of a swap a window, kernel and stage): what standard errors and intervals rest on.

    Raises UsageError where no window was read.
    """
    found = report.windows
    if found is None or not found.windows:
        raise UsageError("No window of a text was read.", "Leave out --windows-csv, or --source weights.")
    units = found.units[0] if found.units else {}
    return Sheet(["text", "window", *units, *found.values], list(found.rows()))


def _head(report: Report, whole: bool) -> Heading:
    asides = (reports.ran_on(report), reports.conventions(report), reports.identity(report))
    kind = kind_of(report)
    standing, sound = kind.standing(report)
    return Heading(
        title=kind.title(report),
        command=report.command,
        facts=reports.header(report),
        asides=tuple(filter(None, asides)),
        notes=tuple(reports.notes(report) if whole else (*report.settings.notes, *reports.other_base(report))),
        standing=standing,
        sound=sound,
    )


def _missing(shapes: Shapes) -> Iterator[Section]:
    skipped = reports.skipped(shapes.report.coverage.skipped)
    lists = {"Skipped": skipped, "No value": reports.without_value(shapes)}
    yield from (Section(title, items=tuple(lines)) for title, lines in lists.items() if lines)
