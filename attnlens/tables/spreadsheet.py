"""Writes a report as rows for a spreadsheet, none of which a spreadsheet takes for a formula."""

from __future__ import annotations

import csv as standard
import io

from attnlens.errors import UsageError
from attnlens.records import Head, HeadId, Report
from attnlens.tables.experiments import experiment_csv
from attnlens.tables.swaps import swap_csv
from attnlens.wording import clean

FORMULA = ("=", "+", "-", "@", "\t", "\r", "|", "%")
"""First characters at which a spreadsheet may start to calculate."""


def csv(report: Report) -> str:
    """One row a head: site, layer, head, kv_head, part, and for each measure `name`, `name.se`, `name.z`.

    The columns of `Report.to_dataframe`; of a swap, a row a stage, or a unit swapped alone;
    of experiments, a row a figure, or a row per head, measure and step. A category stands by
    its name, a missing value is an empty cell, numbers carry nine significant digits; a text that a spreadsheet
    could run as a formula gets an apostrophe before it.
    """
    if report.swap is not None:
        return swap_csv(report, harmless)
    if report.experiments:
        return experiment_csv(report, harmless)
    rows = [_row(head) for head in report.heads]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = standard.writer(buffer, lineterminator="\n")
    writer.writerow([harmless(name) for name in columns])
    writer.writerows([row.get(name, "") for name in columns] for row in rows)
    return buffer.getvalue()


def windows_csv(report: Report) -> str:
    """One row a window and head (of a swap a window, kernel and stage): what standard errors and intervals rest on.

    Raises UsageError where no window was read.
    """
    if report.windows is None or not report.windows.windows:
        raise UsageError("No window of a text was read.", "Leave out --windows-csv, or --source weights.")
    buffer = io.StringIO()
    units = report.windows.units[0] if report.windows.units else {}
    writer = standard.DictWriter(buffer, ["text", "window", *units, *report.windows.values], lineterminator="\n")
    writer.writerow({name: harmless(name) for name in writer.fieldnames})
    for row in report.windows.rows():
        writer.writerow({name: _number(x) if isinstance(x, float) else harmless(str(x)) for name, x in row.items()})
    return buffer.getvalue()


def harmless(text: str) -> str:
    """The text, on one line, as text for a spreadsheet."""
    line = clean(text)
    return f"'{line}" if line.startswith(FORMULA) else line


def _row(head: Head) -> dict[str, str]:
    row = {name: harmless(str(getattr(head, name))) for name in HeadId.model_fields}
    for name, measure in head.measures.items():
        row[name] = _number(measure.value) if measure.label is None else harmless(measure.label)
        if measure.se is not None:
            row[f"{name}.se"] = _number(measure.se)
        if measure.z is not None:
            row[f"{name}.z"] = _number(measure.z)
    return row


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:.9g}"
