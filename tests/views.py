"""A report as each of the program's forms, from its record alone."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from attnlens import export
from attnlens.files import make_folder, write_atomically
from attnlens.records import Report
from attnlens.render import terminal
from attnlens.render.pictures import is_file
from attnlens.sections import documents
from attnlens.sections.every_head import head_tables
from attnlens.sections.section import Document, Section
from attnlens.shapes import Shapes


def printed(told: Document, width: int = 100) -> str:
    """What a terminal of that width shows, without colours."""
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(terminal.document(told))
    return console.file.getvalue()  # type: ignore[attr-defined]


def alone(*sections: Section) -> Document:
    """Sections without a head."""
    return Document(None, sections)


def summary(report: Report, width: int = 100) -> str:
    return printed(documents.summary(report), width)


def all_heads(report: Report, width: int = 100) -> str:
    return printed(alone(*head_tables(Shapes(report))), width)


def details(report: Report, width: int = 100) -> str:
    return printed(documents.summary(report, verbose=True), width)


def markdown(report: Report) -> str:
    return export.WRITERS["markdown"](report)


def csv(report: Report) -> str:
    return export.WRITERS["csv"](report)


def page(report: Report) -> str:
    return export.WRITERS["html"](report)


def save_pictures(report: Report, target: Path) -> list[Path]:
    """Draw the report as `--png` does; the files written."""
    found = export.drawings(report, target)
    if not is_file(target):
        make_folder(target)
    for path, draw in found.items():
        write_atomically(path, draw())
    return list(found)
