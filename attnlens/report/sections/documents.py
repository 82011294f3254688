"""A report as a document, a list of pictures, or rows of a sheet; the kinds of report and the contents of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from attnlens.analyzers.registry import MeasureInfo
from attnlens.errors import UsageError
from attnlens.records import Kind, Report
from attnlens.report.sections import checked, comparisons, layers
from attnlens.report.sections.checked import site_checks
from attnlens.report.sections.explorer import explorer, selections
from attnlens.report.sections.figures import experiment_rows, experiment_sections, series_sections
from attnlens.report.sections.section import Document, Heading, Picture, Row, Section, build_table
from attnlens.report.sections.swaps import site_sections, swap_rows, swap_sections
from attnlens.report.sentences import comparisons as studies
from attnlens.report.sentences import reports
from attnlens.report.sentences.reports import changed_measures, outcome
from attnlens.report.shapes import Shapes
from attnlens.wording import clean, join_items


def glossary(infos: Iterable[MeasureInfo]) -> Iterator[Section]:
    """Yield a table of the meaning and formula of each measure; nothing if the registry has no meaning for any."""
    rows = [
        {"measure": clean(info.name), "meaning": clean(info.meaning), "formula": clean(info.formula)}
        for info in infos
        if info.meaning
    ]
    if rows:
        yield Section("What is measured", table=build_table(rows, set(rows[0]), fit="folded"))


def _provenance(report: Report) -> Iterator[tuple[str, str]]:
    """Yield what identifies a run, as (name, fact): tool, environment, settings, checksums of texts and files."""
    versions, settings = report.environment, report.settings
    yield "tool", f"{report.tool.name} {report.tool.version}"
    yield "python", f"{versions.python}, torch {versions.torch}, transformers {versions.transformers}"
    yield "platform", versions.platform
    yield "source", settings.source
    yield "seed", str(settings.seed)
    if settings.analyzers:
        yield "analyzers", join_items(settings.analyzers, 20)
    files = [("text", settings.text), ("noise", settings.noise), *(("file", file) for file in report.model.files)]
    yield from ((kind, f"{file.name}, sha256 {file.sha256}") for kind, file in files if file is not None)


MOST_CELLS = 16_000
"""Largest number of heads times measures for which a page contains a table of all heads for readers without scripts."""
TOO_MANY = Section(
    "Every head", lines=("Too many heads for a table without scripts: --csv writes them all.",), instead=True
)
FURTHEST = 1e300
"""Largest absolute value that an axis can show: float64 ends at 1.8e308, and drawing computes differences."""


@dataclass(frozen=True)
class Presentation:
    """Views of one kind of report. Most functions take its Shapes, which are computed once."""

    summary: Callable[[Shapes, bool], Iterable[Section]]  # below the head; the flag asks for every measure and note
    page: Callable[[Shapes], Iterable[Section]]  # sections of the HTML page, where length is not limited
    rows: Callable[[Report], Sequence[Row]]  # for a spreadsheet
    pictures: Callable[[Shapes], list[Picture]]
    """All pictures, the overview first. Raises UsageError if there is nothing to draw."""
    measures: Callable[[Shapes], list[str]] = lambda _shapes: []  # measures and curves that the page explains
    standing: Callable[[Report], tuple[str, bool]] = reports.standing
    """How much was read, or the verdict on the experiments; True if that is everything, or as published."""
    more: Callable[[Report], Iterable[Section]] = lambda _report: ()  # sections added by --verbose
    title: Callable[[Report], str] = reports.title
    opening: Callable[[Shapes], Iterable[Section]] = layers.finding_sections  # first sections of the HTML page
    explored: Callable[[Report], Report] = lambda report: report  # report shown by the page's interactive part


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
        by_layer = layers.layer_sections(shapes, whole=False)
        yield from (replace(section, title="By layer") for section in by_layer if section.table)


def _head_pictures(shapes: Shapes) -> list[Picture]:
    from attnlens.report import pictures  # imported in functions here and below because it loads matplotlib

    if not shapes.readings and not shapes.curves:
        raise UsageError("The report has no measures to draw.", "Create one with: attnlens inspect MODEL --json FILE")
    curves = {name: np.concatenate([curve for _, curve in parts]) for name, parts in shapes.curves.items()}
    for name, values in ({name: reading.present for name, reading in shapes.readings.items()} | curves).items():
        if np.any(np.abs(values) > FURTHEST):
            raise UsageError(
                f"{clean(name)} has values beyond {FURTHEST:g}, too large to draw.", "Write them with --csv."
            )
    shows = "maps of layers by heads, shares and curves"
    head_pictures = [Picture("overview", partial(pictures.overview_figure, shapes), shows)]
    head_pictures += [Picture(name, partial(pictures.map_figure, shapes, name)) for name in shapes.readings]
    head_pictures += [Picture(name, partial(pictures.fan_figure, shapes, name)) for name in shapes.curves]
    for selection in shapes.report.inspection.selections:
        stem = f"selection-{selection.layer}.{selection.head}"
        head_pictures.append(
            Picture(stem, partial(pictures.margins_figure, shapes.report, selection), "margins of the selection")
        )
    return head_pictures


def _panel_pictures(kind: str, shows: str) -> Callable[[Shapes], list[Picture]]:
    """Return a function that lists the pictures made by `{kind}_overview` and `{kind}_panels` of `report.pictures`."""

    def pictures(shapes: Shapes) -> list[Picture]:
        from attnlens.report import pictures

        report, overview = shapes.report, getattr(pictures, f"{kind}_overview")
        panels = getattr(pictures, f"{kind}_panels")(report)
        if not panels and kind == "experiment":
            raise UsageError("The experiments have no curves to draw.", "Leave out --figure and --html.")
        drawn = (Picture(panel.stem, partial(pictures.panel_figure, report, panel)) for panel in panels)
        return [Picture("overview", partial(overview, report), shows), *drawn]

    return pictures


HEADS = Presentation(
    summary=_head_summary,
    page=_head_page,
    rows=lambda report: [head.cells() for head in report.heads],
    pictures=_head_pictures,
    measures=lambda shapes: [*shapes.readings, *shapes.curves],
)
SWAP = Presentation(
    summary=lambda shapes, _whole: swap_sections(shapes.report),
    page=lambda shapes: [*swap_sections(shapes.report), *site_sections(shapes.report)],
    rows=lambda report: swap_rows(report.swaps),
    pictures=_panel_pictures("swap", "effects of the kernel"),
    more=site_sections,
)
COMPARISON = Presentation(
    summary=lambda shapes, whole: [
        Section(lines=comparisons.overview_lines(shapes.report)),
        *comparisons.comparison_sections(shapes.report, all_heads=whole),
    ],
    page=lambda shapes: comparisons.comparison_sections(shapes.report, all_heads=True),
    rows=comparisons.comparison_rows,
    pictures=_panel_pictures("comparison", "which heads changed, and with what certainty"),
    title=comparisons.compared_models,
    opening=lambda shapes: [Section("What changed", items=comparisons.overview_lines(shapes.report))],
    explored=Report.with_changes,
)
EXPERIMENTS = Presentation(
    # if whole, with the original values of the head that the experiment retrained
    summary=lambda shapes, whole: [
        *(_head_summary(shapes, whole) if whole else ()),
        *experiment_sections(shapes.report, whole=whole),
    ],
    page=lambda shapes: [*experiment_sections(shapes.report, whole=True), *_head_page(shapes)],
    rows=experiment_rows,
    pictures=_panel_pictures("experiment", "curves of the experiments"),
    measures=lambda shapes: [
        *HEADS.measures(shapes),
        *(name for each in shapes.report.experiments if each.trajectories for name in changed_measures(each)),
    ],
    standing=outcome,
    more=lambda report: [
        section
        for experiment in report.experiments
        if experiment.trajectories
        for section in series_sections(experiment, whole=True)
    ],
)
STUDIES = Presentation(
    summary=lambda shapes, _whole: comparisons.study_sections(shapes.report),
    page=lambda shapes: comparisons.study_sections(shapes.report),
    rows=lambda report: list(comparisons.study_rows(report)),
    pictures=_panel_pictures("study", "results and learning curves"),
    standing=studies.standing,
    title=studies.title,
    opening=lambda _shapes: (),
)
SITES = replace(
    HEADS, summary=lambda shapes, _whole: site_checks(shapes.report), page=lambda shapes: site_checks(shapes.report)
)
PRESENTATIONS: dict[Kind, Presentation] = {
    "inspection": HEADS,
    "swap": SWAP,
    "comparison": COMPARISON,
    "doctor": SITES,
    "experiments": EXPERIMENTS,
    "studies": STUDIES,
}


def summary(report: Report, *, whole: bool = False, all_heads: bool = False, verbose: bool = False) -> Document:
    """Build the summary for a terminal: the findings, the selections requested, and what the flags add.

    `whole`: every measure and note, no selections; `all_heads`: every head; `verbose`: how the report was made.
    """
    kind, shapes, headed = PRESENTATIONS[report.kind], Shapes(report), report.kind != "doctor"
    sections = [*kind.summary(shapes, whole), *checked.sections(report), *_missing(shapes)]
    if not whole:
        sections += selections(report)
    if all_heads:
        sections.append(layers.head_table(shapes))
    if verbose and headed:
        details = [*_provenance(report), *(("note", note) for note in reports.notes(report))]
        details += [("time", f"{stage}: {seconds:.2f} s") for stage, seconds in report.timings.items()]
        details.append(("memory", f"at most {report.peak_memory_bytes / 2**20:,.0f} MiB"))
        sections += [*kind.more(report), Section("Details", items=details)]
    return Document(_head(report, whole) if headed else None, tuple(sections))


def page(report: Report) -> Document:
    """Build the HTML page of a report, of any length. Raises UsageError if there is nothing to draw."""
    kind, shapes = PRESENTATIONS[report.kind], Shapes(report)
    picture = [] if report.kind == "doctor" else [Section("At a glance", picture=overview(report))]
    opening = (*kind.opening(shapes), *_missing(shapes))
    explored = kind.explored(report)
    measures = glossary(map(shapes.info, kind.measures(shapes)))
    made = Section("How it was made", items=tuple(_provenance(report)))
    sections = (*picture, *checked.sections(report), *kind.page(shapes), *measures, made)
    data = explorer(shapes if explored is report else Shapes(explored))
    return Document(_head(report, whole=True), sections, opening, data)


def pictures(report: Report) -> list[Picture]:
    """Return all pictures of a report, the overview first. Raises UsageError if there is nothing to draw."""
    return PRESENTATIONS[report.kind].pictures(Shapes(report))


def overview(report: Report) -> Picture:
    """Return the overview, or the margins of the selection if there is exactly one.

    Raises UsageError if there is nothing to draw.
    """
    first, *others = pictures(report)
    return others[-1] if report.kind == "inspection" and len(report.inspection.selections) == 1 else first


def rows(report: Report) -> Sequence[Row]:
    """Build the rows of a report, with the columns of `Report.to_dataframe`.

    One row per head: site, layer, head, kv_head, part, and for each measure `name`, `name.se`, `name.z`. Swaps have one
    row per stage, control or unit swapped alone; experiments one per figure, or per head, measure and step. Categories
    are given by name.
    """
    return PRESENTATIONS[report.kind].rows(report)


def windows(report: Report) -> Sequence[Row]:
    """Build the rows of the values per window, from which standard errors and intervals are computed.

    One row per window and head; in a swap one per window, kernel and stage. Raises UsageError if no window was read.
    """
    values = report.windows
    if values is None or not values.windows:
        raise UsageError("No window of a text was read.", "Leave out --windows-csv, or --source weights.")
    units = values.units[0] if values.units else {}
    columns = dict.fromkeys(["text", "window", *units, *values.values])
    return [columns | row for row in values.rows()]


def _head(report: Report, whole: bool) -> Heading:
    asides = (reports.ran_on(report), reports.conventions(report), reports.identity(report))
    kind = PRESENTATIONS[report.kind]
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
    lists = {"Skipped": reports.list_skipped(shapes.report.coverage.skipped), "No value": reports.without_value(shapes)}
    yield from (Section(title, items=lines) for title, lines in lists.items() if lines)
