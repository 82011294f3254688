"""Writes rows for a spreadsheet, none of which a spreadsheet takes for a formula."""

from __future__ import annotations

import csv
import io

from attnlens.sections.section import Cell, Sheet
from attnlens.wording import clean

FORMULA = ("=", "+", "-", "@", "\t", "\r", "|", "%")
"""First characters at which a spreadsheet may start to calculate."""


def spreadsheet(sheet: Sheet) -> str:
    """The sheet as CSV: a missing value is an empty cell, numbers carry nine significant digits.

    A text that a spreadsheet could run as a formula gets an apostrophe before it.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(map(harmless, sheet.columns))
    writer.writerows([_written(row.get(name)) for name in sheet.columns] for row in sheet.rows)
    return buffer.getvalue()


def harmless(text: str) -> str:
    """The text, on one line, as text for a spreadsheet."""
    line = clean(text)
    return f"'{line}" if line.startswith(FORMULA) else line


def _written(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    return f"{cell:.9g}" if isinstance(cell, float) else harmless(str(cell)) if isinstance(cell, str) else str(cell)
