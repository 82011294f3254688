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
    """Build the summary of a report for a terminal or, if `whole`, for Markdown.

    The Markdown summary contains every measure and note, but no selections. `all_heads` adds all tables,
    including the table of every head; `verbose` adds how the report was made. `written` lists the command's files.
    """
    flags: dict[View, bool] = {"screen": not whole, "markdown": whole, "terminal": all_heads, "verbose": verbose}
    views = [view for view, chosen in flags.items() if chosen]
    return Document(build_heading(report, whole), [*build_sections(Shapes(report, written), *views)])


@section(0, ("inspection", "swap", "comparison", "experiments", "studies"), ("page",))
def glance(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield a section with the overview picture."""
    yield Section("At a glance", picture=overview(shapes.report))


def pictures(report: Report) -> list[Picture]:
    """Return all pictures of a report, the overview first. Raise UsageError if the report cannot be drawn."""
    from attnlens.report.pictures import list_pictures  # imported here because it loads matplotlib

    return list_pictures(Shapes(report))


def overview(report: Report) -> Picture:
    """Return the overview or, if an inspection has a single selection, the selection's picture.

    Raise UsageError if the report cannot be drawn.
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

    Kinds of report that are not in ROWS have one row per head, with the columns of `Report.to_dataframe`.
    """
    if report.kind in ROWS:
        return ROWS[report.kind](report)
    return [head.cells() for head in report.heads]


def windows(report: Report) -> Sequence[Row]:
    """Build spreadsheet rows with the values of each window. Raise UsageError if no window was read."""
    values = report.windows
    if values is None or not values.windows:
        remedy = "Omit --windows-csv: only measures that are computed from text have values per window."
        raise UsageError("There are no values per window, because no text was read.", remedy)
    units = values.units[0] if values.units else {}
    columns = dict.fromkeys(["text", "window", *units, *values.values])
    return [columns | row for row in values.rows()]


def _plan(report: Report) -> str:
    if report.plan is None:
        raise UsageError(
            "The report does not contain a plan.", "Create one with: attnlens ranks MODEL --budget loss:1% --plan FILE"
        )
    return report.plan.to_json()


def build_page(report: Report) -> str:
    """Build the HTML page of a report. Raise UsageError if the overview cannot be drawn."""
    from attnlens.report.render.html import html

    shapes = Shapes(report)
    below, opening = [*build_sections(shapes, "page")], [*build_sections(shapes, "opening")]
    explored = Shapes(report.with_changes()) if report.kind == "comparison" else shapes
    return html(Document(build_heading(report, whole=True), below, opening, explorer(explored)))


def build_card(report: Report) -> str:
    """Build the HTML for notebooks: heading, findings, next commands and, if it can be drawn, the overview."""
    from attnlens.report.render.html import card

    document = summary(report)
    try:
        return card(document, overview(report))
    except UsageError:  # nothing to draw, such as for `doctor`
        return card(document, None)


WRITERS: dict[str, Callable[[Report], str]] = {  # Kind of file → function that returns its text
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
    """Map each file to write to a function that draws its picture and returns the picture's bytes and caption.

    A folder gets every picture. A file named after a picture, such as a measure's (`weights.symmetry.pdf` or
    `symmetry.pdf`), gets that picture; any other file gets the overview. `bare` omits title and notes. Raise UsageError
    if the picture cannot be drawn or its name is ambiguous, OutputError if the suffix is not .png, .svg or .pdf.
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
            "Choose a measure that differs between heads, or give the file a different name to draw the overview.",
        )
    return {target: partial(encode_picture, picture or overview(report), target.suffix.lower(), bare=bare)}
