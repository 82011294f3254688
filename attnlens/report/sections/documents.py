"""A report as a document, a list of pictures, or rows of a sheet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from attnlens.errors import UsageError
from attnlens.records import Kind, Report
from attnlens.report.sections.comparisons import comparison_rows, study_rows
from attnlens.report.sections.experiments import changed_measures, experiment_rows
from attnlens.report.sections.explorer import explorer
from attnlens.report.sections.facts import build_heading
from attnlens.report.sections.section import Document, Picture, Row, Section, View, build_sections, build_table, section
from attnlens.report.sections.swaps import swap_rows
from attnlens.report.shapes import Shapes
from attnlens.wording import clean

for _module in iter_modules([str(Path(__file__).parent)]):  # so that the sections of all modules are registered
    import_module(f"attnlens.report.sections.{_module.name}")


def summary(report: Report, *, whole: bool = False, all_heads: bool = False, verbose: bool = False) -> Document:
    """Build the summary for a terminal: the findings, the selections requested, and what the flags add.

    `whole`: every measure and note, no selections; `all_heads`: every head; `verbose`: how the report was made.
    """
    views: list[View] = ["markdown" if whole else "terminal"]
    if all_heads:
        views.append("table")
    if verbose:
        views.append("verbose")
    head = None if report.kind == "doctor" else build_heading(report, whole)
    return Document(head, [*build_sections(Shapes(report), *views)])


def page(report: Report) -> Document:
    """Build the HTML page of a report, of any length. Raises UsageError if there is nothing to draw."""
    shapes = Shapes(report)
    sections, opening = [*build_sections(shapes, "page")], [*build_sections(shapes, "opening")]
    explored = Shapes(report.with_changes()) if report.kind == "comparison" else shapes
    return Document(build_heading(report, whole=True), sections, opening, explorer(explored))


@section(0, ("inspection", "swap", "comparison", "experiments", "studies"), ("page",))
def glance(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield the overview."""
    yield Section("At a glance", picture=overview(shapes.report))


@section(90, ("inspection", "experiments"), ("page",))
def glossary(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield a table of the meaning and formula of each measure; nothing if the registry has no meaning for any."""
    series = [name for each in shapes.report.experiments if each.trajectories for name in changed_measures(each)]
    infos = map(shapes.info, [*shapes.readings, *shapes.curves, *series])
    rows = [
        {"measure": clean(info.name), "meaning": clean(info.meaning), "formula": clean(info.formula)}
        for info in infos
        if info.meaning
    ]
    if rows:
        yield Section("What is measured", table=build_table(rows, {"measure"}, set(rows[0]), fit="folded"))


def pictures(report: Report) -> list[Picture]:
    """Return all pictures of a report, the overview first. Raises UsageError if there is nothing to draw."""
    from attnlens.report.pictures import list_pictures  # imported here because it loads matplotlib

    return list_pictures(Shapes(report))


def overview(report: Report) -> Picture:
    """Return the overview, or the margins of the only selection. Raises UsageError if there is nothing to draw."""
    first, *others = pictures(report)
    return others[-1] if report.kind == "inspection" and len(report.inspection.selections) == 1 else first


ROWS: dict[Kind, Callable[[Report], Sequence[Row]]] = {
    "swap": swap_rows,
    "comparison": comparison_rows,
    "experiments": experiment_rows,
    "studies": study_rows,
}
"""Function that builds the rows of a spreadsheet, by kind; other kinds have one row per head."""


def rows(report: Report) -> Sequence[Row]:
    """Build the rows of a report, with the columns of `Report.to_dataframe`.

    One row per head: site, layer, head, kv_head, part, and for each measure `name`, `name.se`, `name.z`. Swaps have one
    row per stage, control or unit swapped alone; experiments one per figure, or per head, measure and step. Categories
    are given by name.
    """
    if report.kind in ROWS:
        return ROWS[report.kind](report)
    return [head.cells() for head in report.heads]


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
