"""Output of reports: files whose kind is given by their suffix, pictures, and the HTML page in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from attnlens import arguments, records
from attnlens.errors import OutputError, UsageError
from attnlens.files import local_path, write_atomically
from attnlens.records.measures import read_record
from attnlens.records.provenance import convert_report
from attnlens.report.render.markdown import markdown, spreadsheet
from attnlens.report.sections import documents

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _plan(report: records.Report) -> str:
    if report.plan is None:
        raise UsageError("The report has no plan.", "Create one with: attnlens ranks --budget loss:1%")
    return report.plan.to_json()


def _page(report: records.Report) -> str:
    from attnlens.report.render.html import html  # imported in functions here and below because it loads matplotlib

    return html(documents.page(report))


WRITERS: dict[str, Callable[[records.Report], str]] = {
    "json": lambda report: report.to_json(),
    "csv": lambda report: spreadsheet(documents.rows(report)),
    "windows_csv": lambda report: spreadsheet(documents.windows(report)),
    "markdown": lambda report: markdown(documents.summary(report, whole=True)),
    "plan": _plan,
    "html": _page,
}
"""Function that returns the text of a report, by kind of file."""
ENDINGS = {".json": "json", ".csv": "csv", ".md": "markdown", ".html": "html"}
FRAME = '<iframe sandbox srcdoc="{}" style="width: 100%; height: 44rem; border: 1px solid #ddd"></iframe>'
"""Frame of the page in a notebook: sandboxed, so that it runs no scripts and its styles do not affect the notebook."""


class Report(records.Report):
    """The report of a command, which can be saved in every format, drawn, and shown in a notebook."""

    def save(self, path: str | Path) -> None:
        """Write the report in the format of the path's suffix: .json, .csv, .md, .html, .png, .svg or .pdf.

        Raise OutputError for another suffix or if the path can't be written, UsageError if there is nothing to draw.
        """
        from attnlens.report.pictures.style import FORMATS
        from attnlens.report.render.html import encode_picture

        target = local_path(arguments.path("path", path))
        suffix = target.suffix.lower()
        if suffix in FORMATS:
            write_atomically(target, encode_picture(documents.overview(self), suffix))
        elif suffix in ENDINGS:
            write_atomically(target, WRITERS[ENDINGS[suffix]](self).encode())
        else:
            raise OutputError(
                f"{target}: no report has the suffix {suffix!r}.", f"Choose from: {', '.join((*ENDINGS, *FORMATS))}."
            )

    def plot(self) -> Figure:
        """Draw the overview as a matplotlib Figure. Raise UsageError if the report has nothing to draw."""
        from attnlens.report.pictures.style import house_style

        with house_style():
            return documents.overview(self).draw()

    def _repr_html_(self) -> str | None:
        """Return the HTML page in a frame for notebooks; None if there is nothing to draw: they show the repr then."""
        try:
            return FRAME.format(escape(_page(self)))
        except UsageError:
            return None


def read_report(path: str | Path) -> Report:
    """Read a report, validating every field. Raise UsageError if it is missing, is not JSON, or is not a report."""
    return read_record(Report, path, "not a report", "Give the path of a report from --json.", convert_report)


def drawings(report: records.Report, target: Path) -> dict[Path, Callable[[], bytes]]:
    """Return for each file a function that draws it and returns its bytes; nothing is drawn yet.

    A folder gets `overview.png` and a picture per measure, curve, stage or experiment. A path that ends in .png, .svg
    or .pdf gets only the overview, or the margins of the selection if there is exactly one. Raises UsageError if the
    report has nothing to draw, OutputError if the target has another suffix.
    """
    from attnlens.report.render.html import encode_picture, file_names, is_file

    if is_file(target):
        return {target: partial(encode_picture, documents.overview(report), target.suffix.lower())}
    pictures = documents.pictures(report)
    names = file_names(picture.stem for picture in pictures)
    return {target / name: partial(encode_picture, picture) for name, picture in zip(names, pictures, strict=True)}
