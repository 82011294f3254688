"""Output of reports: functions that write one as text or as pictures, by kind of file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from attnlens import records
from attnlens.errors import UsageError
from attnlens.report.render.markdown import markdown, spreadsheet
from attnlens.report.sections import documents


def _plan(report: records.Report) -> str:
    if report.plan is None:
        raise UsageError("The report has no plan.", "Create one with: attnlens ranks --budget loss:1%")
    return report.plan.to_json()


def build_page(report: records.Report) -> str:
    """Build the HTML page. Raise UsageError if there is nothing to draw."""
    from attnlens.report.render.html import html  # imported in functions here and below because it loads matplotlib

    return html(documents.page(report))


WRITERS: dict[str, Callable[[records.Report], str]] = {  # Function that returns the text of a report, by kind of file
    "json": lambda report: report.to_json(),
    "csv": lambda report: spreadsheet(documents.rows(report)),
    "windows_csv": lambda report: spreadsheet(documents.windows(report)),
    "markdown": lambda report: markdown(documents.summary(report, whole=True)),
    "plan": _plan,
    "html": build_page,
}
ENDINGS = {".json": "json", ".csv": "csv", ".md": "markdown", ".html": "html"}


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
