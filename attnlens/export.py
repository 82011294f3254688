"""Writes a report into a file of the kind that its name ends in, draws it, and shows it in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from attnlens import calls, html, plots, tables
from attnlens.errors import OutputError, UsageError
from attnlens.files import write_atomically
from attnlens.records import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WRITERS: dict[str, Callable[[Report], str]] = {
    ".json": lambda report: report.to_json(),
    ".csv": tables.csv,
    ".md": tables.markdown,
    ".html": html.page,
}
PICTURES = (".png", ".svg", ".pdf")
FRAME = '<iframe sandbox srcdoc="{}" style="width: 100%; height: 44rem; border: 1px solid #ddd"></iframe>'
"""What holds a page in a notebook: its styles don't reach the notebook, and it runs no script."""


def save(report: Report, path: str | Path) -> None:
    """Write the report: the ending of the path says as what. Raises OutputError for an ending that means nothing."""
    target = Path(calls.path("path", path))
    suffix = target.suffix.lower()
    if suffix in PICTURES:
        write_atomically(target, plots.overview(report, suffix))
    elif suffix in WRITERS:
        write_atomically(target, WRITERS[suffix](report).encode())
    else:
        raise OutputError(
            f"{target} can't be written: its ending says no kind of file.",
            f"End it in {', '.join((*WRITERS, *PICTURES))}.",
        )


def plot(report: Report) -> Figure:
    """The overview, which `save` writes as a picture."""
    return plots.figure(report)


def framed(report: Report) -> str | None:
    """The HTML page in a frame of its own; None where the report has nothing to draw."""
    try:
        return FRAME.format(escape(html.page(report)))
    except UsageError:
        return None
