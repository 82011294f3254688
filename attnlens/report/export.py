"""Export a report as a document, pictures or spreadsheet rows, and as files of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from attnlens.analyzers.registry import measure_infos
from attnlens.errors import UsageError
from attnlens.records import Kind, Report
from attnlens.report import sections
from attnlens.report.render.markdown import junit_cases, markdown, spreadsheet
from attnlens.report.sections.checked import doctor_cases
from attnlens.report.sections.comparisons import comparison_rows, study_rows
from attnlens.report.sections.experiments import experiment_rows
from attnlens.report.sections.explorer import explorer
from attnlens.report.sections.facts import build_heading
from attnlens.report.sections.section import Document, Picture, Row, Section, View, build_sections, section
from attnlens.report.sections.swaps import swap_rows
from attnlens.report.shapes import Shapes, Written
from attnlens.wording import clean

for _module in iter_modules(sections.__path__):  # registers the sections of all modules
    import_module(f"attnlens.report.sections.{_module.name}")


def summary(
    report: Report,
    *,
    whole: bool = False,
    all_heads: bool = False,
    verbose: bool = False,
    written: Written | None = None,
) -> Document:
    """Build the summary for a terminal: the sections of the screen, and the sections that the flags add.

    `whole` builds the summary for Markdown instead, with every measure and note but without selections. `all_heads`
    adds all tables, with every head; `verbose` adds how the report was made. `written` lists the files that the command
    writes.
    """
    flags: dict[View, bool] = {"screen": not whole, "markdown": whole, "terminal": all_heads, "verbose": verbose}
    views = [view for view, chosen in flags.items() if chosen]
    return Document(build_heading(report, whole), [*build_sections(Shapes(report, written), *views)])


@section(0, ("inspection", "swap", "comparison", "experiments", "studies"), ("page",))
def glance(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield a section with the overview picture."""
    yield Section("At a glance", picture=overview(shapes.report))


def pictures(report: Report) -> list[Picture]:
    """Return all pictures of a report, the overview first. Raise UsageError like `list_pictures`."""
    from attnlens.report.pictures import list_pictures  # imported in functions, as below, because it loads matplotlib

    return list_pictures(Shapes(report))


def overview(report: Report) -> Picture:
    """Return the overview or, if an inspection has a single selection, the selection's picture.

    Raise UsageError like `list_pictures`.
    """
    first, *others = pictures(report)
    return others[-1] if report.kind == "inspection" and len(report.inspection.selections) == 1 else first


ROWS: dict[Kind, Callable[[Report], Sequence[Row]]] = {
    "swap": swap_rows,
    "comparison": comparison_rows,
    "experiments": experiment_rows,
    "studies": study_rows,
}
"""Kind of report → function that builds its spreadsheet rows; other kinds have one row per head."""


def rows(report: Report) -> Sequence[Row]:
    """Build the spreadsheet rows of a report.

    Inspections have one row per head, with the columns of `Report.to_dataframe`; swaps have one per stage and one per
    control, or one per head or layer of a sweep; experiments have one per figure, or per head, measure and step; for
    other kinds see ROWS.
    """
    if report.kind in ROWS:
        return ROWS[report.kind](report)
    return [head.cells() for head in report.heads]


def windows(report: Report) -> Sequence[Row]:
    """Build one row per window and head, or per window, kernel and stage. Raise UsageError if no window was read."""
    values = report.windows
    if values is None or not values.windows:
        remedy = "Omit --windows-csv: only measures that are computed from text have values per window."
        raise UsageError("There are no values per window, because no text was read.", remedy)
    units = values.units[0] if values.units else {}
    columns = dict.fromkeys(["text", "window", *units, *values.values])
    return [columns | row for row in values.rows()]


def _plan(report: Report) -> str:
    if report.plan is None:
        raise UsageError("The report does not contain a plan.", "Create one with: attnlens ranks --budget loss:1%")
    return report.plan.to_json()


def build_page(report: Report) -> str:
    """Build the HTML page. Raise UsageError like `list_pictures`, except for `doctor` (no pictures)."""
    from attnlens.report.render.html import html

    shapes = Shapes(report)
    below, opening = [*build_sections(shapes, "page")], [*build_sections(shapes, "opening")]
    explored = Shapes(report.with_changes()) if report.kind == "comparison" else shapes
    return html(Document(build_heading(report, whole=True), below, opening, explorer(explored)))


def build_card(report: Report) -> str:
    """Build the short presentation for notebooks as HTML: heading, findings, next commands and overview."""
    from attnlens.report.render.html import card

    document = summary(report)
    try:
        return card(document, overview(report))
    except UsageError:  # nothing to draw, such as for `doctor`
        return card(document, None)


WRITERS: dict[str, Callable[[Report], str]] = {  # Function that returns a report's text in each kind of file
    "json": lambda report: report.to_json(),
    "csv": lambda report: spreadsheet(rows(report)),
    "windows_csv": lambda report: spreadsheet(windows(report)),
    "markdown": lambda report: markdown(summary(report, whole=True)),
    "plan": _plan,
    "junit": lambda report: junit_cases(clean(f"attnlens doctor {report.model.id}"), [*doctor_cases(report)]),
    "html": build_page,
}
ENDINGS = {".json": "json", ".csv": "csv", ".md": "markdown", ".html": "html"}


def drawings(report: Report, target: Path, *, bare: bool = False) -> dict[Path, Callable[[], tuple[bytes, str]]]:
    """Return the picture files to write, each with a function that draws it and returns its bytes and its caption.

    A folder gets every picture. A file named after a measure (`weights.symmetry.pdf` or `symmetry.pdf`) or another
    picture gets this picture, any other file the overview. `bare` pictures show no title or caption. Raise UsageError
    like `list_pictures`, if the measure cannot be drawn, or if several measures have that name; OutputError for any
    other suffix than .png, .svg and .pdf.
    """
    from attnlens.report.render.html import encode_picture, file_names, is_file

    drawn = pictures(report)
    named = dict(zip(file_names(picture.stem for picture in drawn), drawn, strict=True))
    if not is_file(target):
        return {target / f"{name}.png": partial(encode_picture, picture, bare=bare) for name, picture in named.items()}
    stem = target.stem
    matching = [stem] if stem in named else [name for name in named if name.endswith(f".{stem}")]
    if len(matching) > 1:
        choices = ", ".join(sorted(name + target.suffix for name in matching))
        raise UsageError(f"{stem} is the name of several measures.", f"Use one of: {choices}.")
    picture = named[matching[0]] if matching and stem != "overview" else None
    if picture is None and stem in measure_infos():
        raise UsageError(
            f"{stem} cannot be drawn: the report lacks this measure, or all heads have the same value.",
            "Choose a measure that varies, or give the file another name to draw the overview.",
        )
    return {target: partial(encode_picture, picture or overview(report), target.suffix.lower(), bare=bare)}
