"""Output of reports: files whose kind is given by their suffix, pictures, and the HTML page in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from attnlens import arguments
from attnlens.errors import OutputError, UsageError
from attnlens.files import local_path, write_atomically
from attnlens.records import Report
from attnlens.report.render.markdown import markdown, spreadsheet
from attnlens.report.sections import documents

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _plan(report: Report) -> str:
    if report.plan is None:
        raise UsageError("The report has no plan.", "Create one with: attnlens ranks --budget loss:1%")
    return report.plan.to_json()


def _page(report: Report) -> str:
    from attnlens.report.render.html import html  # imported in functions here and below because it loads matplotlib

    return html(documents.page(report))


WRITERS: dict[str, Callable[[Report], str]] = {
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


def save(report: Report, path: str | Path) -> None:
    """Write the report to a file, of the kind given by the path's suffix. Raises OutputError for an unknown suffix."""
    from attnlens.report.pictures.style import FORMATS
    from attnlens.report.render.html import encode_picture

    target = local_path(arguments.path("path", path))
    suffix = target.suffix.lower()
    if suffix in FORMATS:
        write_atomically(target, encode_picture(documents.overview(report), suffix))
    elif suffix in ENDINGS:
        write_atomically(target, WRITERS[ENDINGS[suffix]](report).encode())
    else:
        raise OutputError(
            f"{target} can't be written: its ending says no kind of file.",
            f"End it in {', '.join((*ENDINGS, *FORMATS))}.",
        )


def plot(report: Report) -> Figure:
    """Draw the overview, which `save` writes as a picture."""
    from attnlens.report.pictures.style import house_style

    with house_style():
        return documents.overview(report).draw()


def wrap_in_iframe(report: Report) -> str | None:
    """Return the HTML page in an iframe; None if the report has nothing to draw."""
    try:
        return FRAME.format(escape(_page(report)))
    except UsageError:
        return None


def drawings(report: Report, target: Path) -> dict[Path, Callable[[], bytes]]:
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
