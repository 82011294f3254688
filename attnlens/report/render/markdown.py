"""Sections as GitHub markdown and as CSV, and checks for CI systems: JUnit XML, annotations, step summary."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

from attnlens.records import Report
from attnlens.report.sections import checked
from attnlens.report.sections.checked import document, worst
from attnlens.report.sections.section import Cell, Document, Heading, Section, Sheet, Table
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


MOST_HEADS = 100  # heads that a failure names; more would hide the rest of a pipeline's page


def junit(report: Report) -> str:
    """The checks of a report; a text that XML 1.0 can't hold is cleaned, everything else escaped."""
    failed = str(sum(not check.passed for check in report.checks))
    counts = {"tests": str(len(report.checks)), "failures": failed, "errors": "0", "skipped": "0"}
    suites = ElementTree.Element("testsuites", {"name": "attnlens"} | counts)
    name = clean(f"attnlens check {report.model.id}")
    suite = ElementTree.SubElement(suites, "testsuite", {"name": name} | counts)
    for check in report.checks:
        place = {} if check.file is None else {"file": clean(check.file)}
        named = {"classname": clean(f"attnlens.{check.subject}"), "name": clean(check.rule)}
        case = ElementTree.SubElement(suite, "testcase", named | place | {"time": "0"})
        if not check.passed:
            failure = ElementTree.SubElement(case, "failure", message=checked.told(check), type="rule")
            lines = [checked.accusation(check, breach) for breach in check.breaches[:MOST_HEADS]]
            more = len(check.breaches) - MOST_HEADS
            failure.text = "\n".join([checked.told(check), *lines, *([f"and {more} more"] if more > 0 else [])])
    ElementTree.indent(suites, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


MOST_ANNOTATIONS = 10  # annotations of one kind that GitHub shows of a step
IN_MESSAGES = {ord("%"): "%25", ord("\r"): "%0D", ord("\n"): "%0A"}
IN_PROPERTIES = IN_MESSAGES | {ord(":"): "%3A", ord(","): "%2C"}


def workflow_commands(report: Report) -> list[str]:
    """A workflow command for each of the worst ten: rules that fail through no single head, then heads."""
    alone = [(check, checked.told(check)) for check in report.checks if not check.passed and not check.breaches]
    blamed = [(check, checked.accusation(check, breach)) for check, breach in worst(report.checks)]
    lines = []
    for check, message in [*alone, *blamed][:MOST_ANNOTATIONS]:
        place = {} if check.file is None else {"file": uri(check.file)}
        properties = place | {"title": f"attnlens {check.subject}"}
        said = ",".join(f"{name}={_coded(text, IN_PROPERTIES)}" for name, text in properties.items())
        lines.append(f"::error {said}::{_coded(message, IN_MESSAGES)}")
    return lines


def _coded(text: str, codes: dict[int, str]) -> str:
    return clean(text).translate(codes)


def uri(file: str) -> str:
    """Return the file as GitHub looks for it: quoted, relative to the workspace (else to the current folder)."""
    root = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve()
    path = Path(clean(file)).resolve()
    if path.is_relative_to(root):
        return quote(path.relative_to(root).as_posix(), errors="replace")
    return "file://" + quote(path.as_posix(), errors="replace")


def step_summary(report: Report) -> str:
    """The verdict as markdown, for the page of a step."""
    return markdown(document(report)) + "\n"


SYNTAX = re.compile(r"(?<![^\W_])_|_(?![^\W_])|[!-~](?<![\w .,;/()+%='-])")
"""ASCII that could be read as more than a letter; an underscore within a word is harmless."""


def markdown(told: Document) -> str:
    """The document as GitHub markdown; every string is escaped, for it is data."""
    head = [] if told.head is None else _head(told.head)
    return "\n".join([*head, *(line for section in told.sections for line in _section(section))]).rstrip() + "\n"


def escaped(text: str) -> str:
    """The text with every character that markdown or HTML could read as more than a letter as its character code.

    GitHub looks for @mentions after decoding, so a blank of no width follows that sign; `www.` would become a link.
    """
    coded = SYNTAX.sub(lambda found: f"&#{ord(found.group())};", clean(text))
    return re.sub("www[.]", "www&#46;", coded, flags=re.IGNORECASE).replace("&#64;", "&#64;&#8203;")


def _head(head: Heading) -> Iterator[str]:
    yield from (f"## attnlens {escaped(head.command)}: {escaped(head.title)}", "", escaped(head.facts), "")
    yield from (f"- {escaped(line)}" for line in (*head.asides, *head.notes))
    yield from ("", f"**{escaped(head.standing)}**", "")


def _section(section: Section) -> Iterator[str]:
    if section.title:
        yield from (f"### {escaped(section.title)}", "")
    items = (item if isinstance(item, str) else ": ".join(item) for item in section.items)
    listed = [f"- {escaped(line)}" for line in (*section.lines, *items)]
    yield from (*listed, "") if listed else ()
    if section.table is not None:
        yield from (*_table(section.table), "")
    for line in section.notes:
        yield from (escaped(line), "")


def _table(table: Table) -> Iterator[str]:
    columns = [*table.names, *table.columns]
    yield _row([f"{column.group} {column.title}".strip() for column in columns])
    yield "|" + "".join(f" {':---' if column.words else '---:'} |" for column in columns)
    yield from map(_row, zip(*(column.cells for column in columns), strict=True))
    yield from (_row(cells) for cells in zip(*(column.foot for column in columns), strict=False) if any(cells[1:]))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"
