"""A report as a document, a list of pictures, or rows of a sheet; the kinds of report, and what is told of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from attnlens.errors import UsageError
from attnlens.records import Head, HeadId, Report
from attnlens.registry import MeasureInfo
from attnlens.report.sections import checked, comparisons, layers
from attnlens.report.sections.checked import site_checks
from attnlens.report.sections.explorer import explorer, selections
from attnlens.report.sections.figures import experiment_sections, figure_cells, series_sections, step_cells
from attnlens.report.sections.section import Cell, Column, Document, Heading, Picture, Row, Section, Sheet, Table, sheet
from attnlens.report.sections.swap_tables import swap_rows
from attnlens.report.sections.swaps import site_sections, swap_sections
from attnlens.report.sentences import comparisons as studies
from attnlens.report.sentences import reports
from attnlens.report.sentences.reports import outcome, told_of
from attnlens.report.shapes import Shapes
from attnlens.wording import clean, listed


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
    """What a reader needs to repeat the run: tool, environment, settings, files with checksums, seconds, memory."""
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


MOST_CELLS = 16_000
"""Heads times measures up to which a page has a table of them beside the numbers that its script draws."""
TOO_MANY = Section(
    "Every head", lines=("There are too many heads for a table without scripts: --csv writes them all.",), instead=True
)
FURTHEST = 1e300
"""The largest number, either side of 0, that an axis reaches: float64 ends at 1.8e308, and differences are drawn."""


@dataclass(frozen=True)
class Kind:
    """What is told of one kind of report, whose shapes are found once for all of it."""

    summary: Callable[[Shapes, bool], Iterable[Section]]
    """Below the model and its coverage; True: whole."""
    page: Callable[[Shapes], Iterable[Section]]
    """Where there is room for everything."""
    rows: Callable[[Report], Sequence[Row]]
    """For a spreadsheet."""
    pictures: Callable[[Shapes], list[Picture]]
    """All of them, the overview first. Raises UsageError where there is nothing to draw."""
    alone: Callable[[Shapes], Picture | None] = lambda _shapes: None
    """What stands for the report in the place of its overview."""
    measured: Callable[[Shapes], list[str]] = lambda _shapes: []
    """The measures and curves whose meaning a page explains."""
    standing: Callable[[Report], tuple[str, bool]] = reports.standing
    """How much was read, or how the experiments ended; whether that is all, or as published."""
    more: Callable[[Report], Iterable[Section]] = lambda _report: ()
    """What else --verbose shows."""
    title: Callable[[Report], str] = reports.title
    """Of what the report is."""
    opening: Callable[[Shapes], Iterable[Section]] = layers.found_sections
    """What a page says first."""
    explored: Callable[[Report], Report] = lambda report: report
    """The report whose heads a page lets its reader explore."""
    headed: bool = True
    """Whether the model and its coverage stand above a summary."""
    pictured: bool = True
    """Whether a page shows its overview."""

    def overview(self, shapes: Shapes) -> Picture:
        """The picture that stands for the report. Raises UsageError where there is nothing to draw."""
        first, *_ = self.pictures(shapes)
        return self.alone(shapes) or first


def kind_of(report: Report) -> Kind:
    """The kind of this report."""
    if report.comparison is not None:
        return COMPARISON
    if report.swap is not None:
        return SWAP
    if report.experiments:
        return EXPERIMENTS
    if report.studies:
        return STUDIES
    return CHECKS if report.command == "doctor" else HEADS


def _head_summary(shapes: Shapes, whole: bool) -> Iterator[Section]:
    yield from layers.layer_sections(shapes, whole=whole)
    yield from layers.typical_line(shapes)
    yield from comparisons.adapter_sections(shapes.report)
    yield from layers.extreme_heads(shapes.report)


def _head_page(shapes: Shapes) -> Iterator[Section]:
    yield from comparisons.adapter_sections(shapes.report)
    if shapes.report.heads:
        few = len(shapes.report.heads) * len(shapes.readings) <= MOST_CELLS
        yield replace(layers.head_table(shapes), instead=True) if few else TOO_MANY
        yield from layers.layer_tables(shapes)


def _head_row(head: Head) -> dict[str, Cell]:
    row: dict[str, Cell] = {name: getattr(head, name) for name in HeadId.model_fields}
    for name, measure in head.measures.items():
        row[name] = measure.value if measure.label is None else measure.label
        row |= {
            f"{name}.{part}": value for part in ("se", "z", "base") if (value := getattr(measure, part)) is not None
        }
    return row


def _head_pictures(shapes: Shapes) -> list[Picture]:
    from attnlens.report import pictures  # late here and below: it loads matplotlib

    if not shapes.readings and not shapes.curves:
        raise UsageError("The report has no measures to draw.", "Make one with: attnlens inspect MODEL --json FILE.")
    curves = {name: np.concatenate([curve for _, curve in found]) for name, found in shapes.curves.items()}
    for name, values in ({name: reading.present for name, reading in shapes.readings.items()} | curves).items():
        if np.any(np.abs(values) > FURTHEST):
            raise UsageError(
                f"{clean(name)} has values beyond {FURTHEST:g}, which no picture can show.", "Write them with --csv."
            )
    shows = "maps of layers by heads, shares and curves"
    found = [Picture("overview", partial(pictures.overview_figure, shapes), shows)]
    found += [Picture(name, partial(pictures.map_figure, shapes, name)) for name in shapes.readings]
    found += [Picture(name, partial(pictures.fan_figure, shapes, name)) for name in shapes.curves]
    return [*found, *_margins(shapes)]


def _margins(shapes: Shapes) -> list[Picture]:
    """The selections that are shown."""
    from attnlens.report import pictures

    return [
        Picture(
            f"selection-{one.layer}.{one.head}", partial(pictures.margins_figure, shapes.report, one), "its margins"
        )
        for one in shapes.report.selections
    ]


def _head_measures(shapes: Shapes) -> list[str]:
    return [*shapes.readings, *shapes.curves]


def _panelled(kind: str, shows: str) -> Callable[[Shapes], list[Picture]]:
    """The pictures of a report whose `{kind}_overview` and `{kind}_panels` are in plots."""

    def pictures(shapes: Shapes) -> list[Picture]:
        from attnlens.report import pictures

        report, overview = shapes.report, getattr(pictures, f"{kind}_overview")
        panels = getattr(pictures, f"{kind}_panels")(report)
        if not panels and kind == "experiment":
            raise UsageError("The experiments have no curves to draw.", "Leave out --png and --html.")
        drawn = (Picture(panel.stem, partial(pictures.panel_figure, report, panel)) for panel in panels)
        return [Picture("overview", partial(overview, report), shows), *drawn]

    return pictures


def _experiment_summary(shapes: Shapes, whole: bool) -> Iterator[Section]:
    if whole:
        yield from _head_summary(shapes, whole)  # the head that was trained anew, as the model has it
    yield from experiment_sections(shapes.report, whole=whole)


def _experiment_rows(report: Report) -> list[Row]:
    followed: list[Row] = [row for experiment in report.experiments for row in step_cells(experiment)]
    return followed or [row for experiment in report.experiments for row in figure_cells(experiment)]


def _experiment_measures(shapes: Shapes) -> list[str]:
    followed = (told_of(experiment) for experiment in shapes.report.experiments if experiment.trajectories)
    return [*_head_measures(shapes), *(name for names in followed for name in names)]


HEADS = Kind(
    summary=_head_summary,
    page=_head_page,
    rows=lambda report: list(map(_head_row, report.heads)),
    pictures=_head_pictures,
    alone=lambda shapes: _margins(shapes)[0] if len(shapes.report.selections) == 1 else None,
    measured=_head_measures,
)
SWAP = Kind(
    summary=lambda shapes, _whole: swap_sections(shapes.report),
    page=lambda shapes: [*swap_sections(shapes.report), *site_sections(shapes.report)],
    rows=lambda report: swap_rows(report.swaps),
    pictures=_panelled("swap", "what the kernel does"),
    more=site_sections,
)
COMPARISON = Kind(
    summary=lambda shapes, whole: comparisons.comparison_sections(shapes.report, all_heads=whole),
    page=lambda shapes: comparisons.comparison_sections(shapes.report, all_heads=True, opened=True),
    rows=comparisons.comparison_rows,
    pictures=_panelled("comparison", "which heads changed, and how surely"),
    title=comparisons.compared_models,
    opening=comparisons.comparison_opening,
    explored=Report.with_changes,
)
EXPERIMENTS = Kind(
    summary=_experiment_summary,
    page=lambda shapes: [*experiment_sections(shapes.report, whole=True), *_head_page(shapes)],
    rows=_experiment_rows,
    pictures=_panelled("experiment", "curves of the experiments"),
    measured=_experiment_measures,
    standing=outcome,
    more=series_sections,
)
STUDIES = Kind(
    summary=lambda shapes, _whole: comparisons.study_sections(shapes.report),
    page=lambda shapes: comparisons.study_sections(shapes.report),
    rows=lambda report: list(comparisons.study_rows(report)),
    pictures=_panelled("study", "what each cell reached, and how it learned"),
    standing=studies.standing,
    title=studies.title,
    opening=lambda _shapes: (),
)
CHECKS = replace(
    HEADS,
    summary=lambda shapes, _whole: site_checks(shapes.report),
    page=lambda shapes: site_checks(shapes.report),
    headed=False,
    pictured=False,
)


def summary(report: Report, *, whole: bool = False, all_heads: bool = False, verbose: bool = False) -> Document:
    """What fits on one page of a terminal, the selections that were asked for, and what else is.

    `whole`: every measure and note; `all_heads`: every head; `verbose`: how the report was made.
    """
    kind, shapes = kind_of(report), Shapes(report)
    told = [*kind.summary(shapes, whole), *checked.sections(report), *_missing(shapes)]
    if not whole:
        told += selections(report)
    if all_heads:
        told += layers.head_tables(shapes)
    if verbose and kind.headed:
        told += [*kind.more(report), Section("Details", items=tuple(_facts(report)))]
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
