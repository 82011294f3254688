"""Render documents as GitHub markdown, rows as CSV, and checks for CI systems (JUnit XML, annotations, summary)."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

from attnlens.records import Check, Report
from attnlens.report.sections.checked import Case, describe_breach, describe_check, document, worst
from attnlens.report.sections.section import Cell, Document, Heading, Row, Section, Table
from attnlens.wording import clean

FORMULA = ("=", "+", "-", "@", "\t", "\r", "|", "%")
"""Characters with which a text can start that a spreadsheet runs as a formula."""


def spreadsheet(rows: Sequence[Row]) -> str:
    """Format rows as CSV with nine significant digits.

    Texts that a spreadsheet could run as a formula are preceded by an apostrophe.
    """
    buffer, columns = io.StringIO(), list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(map(harmless, columns))
    writer.writerows([_format_cell(row.get(name)) for name in columns] for row in rows)
    return buffer.getvalue()


def harmless(text: str) -> str:
    """Return the text on one line, preceded by an apostrophe if a spreadsheet could run it as a formula."""
    line = clean(text)
    return f"'{line}" if line.startswith(FORMULA) else line


def _format_cell(cell: Cell) -> str:
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float):
        return f"{cell:.9g}"
    return "" if cell is None else harmless(cell) if isinstance(cell, str) else str(cell)


MOST_HEADS = 100  # maximum number of heads per failure; more would hide the other results in a CI system


def junit(report: Report) -> str:
    """Format a report's checks as JUnit XML; characters that XML 1.0 forbids are replaced."""
    cases = [(check.subject, check.rule, check) for check in report.checks]
    return junit_cases(clean(f"attnlens check {report.model.id}"), cases, report.model.layer_name)


def junit_cases(name: str, cases: Sequence[Case], layer: Callable[[int], str] = str) -> str:
    """Format test cases as a JUnit XML test suite of this name; `layer` returns the name of a layer."""
    outcomes = [outcome for _, _, outcome in cases]
    failed = sum(isinstance(outcome, Check) and not outcome.passed for outcome in outcomes)
    skipped = sum(isinstance(outcome, str) for outcome in outcomes)
    counts = {"tests": str(len(cases)), "failures": str(failed), "errors": "0", "skipped": str(skipped)}
    suites = ElementTree.Element("testsuites", {"name": "attnlens"} | counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": name} | counts)
    for group, title, check in cases:
        place = {"file": clean(check.file)} if isinstance(check, Check) and check.file is not None else {}
        attributes = {"classname": clean(f"attnlens.{group}"), "name": clean(title)}
        case = ElementTree.SubElement(suite, "testcase", attributes | place | {"time": "0"})
        if isinstance(check, str):
            ElementTree.SubElement(case, "skipped", message=clean(check))
        elif not check.passed:
            failure = ElementTree.SubElement(case, "failure", message=describe_check(check, layer), type="rule")
            lines = [describe_breach(check, breach, layer) for breach in check.breaches[:MOST_HEADS]]
            more = len(check.breaches) - MOST_HEADS
            lines += [f"and {more} more"] if more > 0 else []
            failure.text = "\n".join([describe_check(check, layer), *lines])
    ElementTree.indent(suites, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


MOST_ANNOTATIONS = 10  # maximum number of annotations of one kind that GitHub shows per step
IN_MESSAGES = {ord("%"): "%25", ord("\r"): "%0D", ord("\n"): "%0A"}
IN_PROPERTIES = IN_MESSAGES | {ord(":"): "%3A", ord(","): "%2C"}


def workflow_commands(report: Report) -> list[str]:
    """Return up to MOST_ANNOTATIONS GitHub workflow commands that report failed rules and the worst heads or blocks."""
    layer = report.model.layer_name
    rule_errors = [
        (check, describe_check(check, layer)) for check in report.checks if not check.passed and not check.breaches
    ]
    head_errors = [(check, describe_breach(check, breach, layer)) for check, breach in worst(report.checks)]
    lines = []
    for check, message in [*rule_errors, *head_errors][:MOST_ANNOTATIONS]:
        place = {} if check.file is None else {"file": uri(check.file)}
        properties = place | {"title": f"attnlens {check.subject}"}
        options = ",".join(f"{name}={clean(text).translate(IN_PROPERTIES)}" for name, text in properties.items())
        lines.append(f"::error {options}::{clean(message).translate(IN_MESSAGES)}")
    return lines


def uri(file: str) -> str:
    """Return a file's URL-quoted path relative to the workspace or current folder, or a `file:` URL if outside."""
    root = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve()
    path = Path(clean(file)).resolve()
    if path.is_relative_to(root):
        return quote(path.relative_to(root).as_posix(), errors="replace")
    return "file://" + quote(path.as_posix(), errors="replace")


def step_summary(report: Report) -> str:
    """Format the report of a check as markdown, for the summary page of a GitHub step."""
    return markdown(document(report)) + "\n"


SYNTAX = re.compile(r"(?<![^\W_])_|_(?![^\W_])|:(?=\S)|[!-~](?<![\w .,:;?\"/()+%='-])")
"""ASCII characters with a meaning in markdown or HTML. An underscore within a word is harmless, and so is a colon
before a space; other colons can begin an emoji (`:x:`) or be part of an address."""


def markdown(doc: Document) -> str:
    """Render the document as GitHub markdown, with all strings escaped."""
    head = [] if doc.head is None else _head(doc.head)
    return "\n".join([*head, *(line for section in doc.sections for line in _section(section))]).rstrip() + "\n"


def escape_text(text: str) -> str:
    """Replace every character that has a meaning in markdown or HTML with a character reference.

    GitHub finds @mentions after decoding, so a zero-width space is added after each @. The dot of `www.` is replaced
    to prevent a link.
    """
    coded = SYNTAX.sub(lambda match: f"&#{ord(match.group())};", clean(text))
    return re.sub("www[.]", "www&#46;", coded, flags=re.IGNORECASE).replace("&#64;", "&#64;&#8203;")


def _head(head: Heading) -> Iterator[str]:
    yield from (f"## attnlens {escape_text(head.command)}: {escape_text(head.title)}", "", escape_text(head.facts), "")
    yield from (f"- {escape_text(line)}" for line in head.notes)
    yield from ("", f"**{escape_text(head.standing)}**", "")


def _section(section: Section) -> Iterator[str]:
    if section.title:
        yield from (f"### {escape_text(section.title)}", "")
    for finding in section.findings:
        evidence = f" {escape_text(finding.evidence)}" if finding.evidence else ""
        yield f"- **{escape_text(finding.question)}** {escape_text(finding.answer)}{evidence}"
    yield from ("",) if section.findings else ()
    if section.heat_map is not None:
        yield from (*(f"    {line}" for line in section.heat_map.lines()), "")
    yield from (*(f"- {escape_text(command)}" for command in section.commands), "") if section.commands else ()
    items = (item if isinstance(item, str) else ": ".join(item) for item in section.items)
    listed = [f"- {escape_text(line)}" for line in (*section.lines, *items)]
    yield from (*listed, "") if listed else ()
    if section.table is not None:
        yield from (*_table(section.table), "")
    for line in section.notes:
        yield from (escape_text(line), "")


def _table(table: Table) -> Iterator[str]:
    columns = [*table.names, *table.columns]
    yield _row([f"{column.group} {column.title}".strip() for column in columns])
    yield "|" + "".join(f" {':---' if column.words else '---:'} |" for column in columns)
    yield from map(_row, zip(*(column.cells for column in columns), strict=True))
    yield from (_row(cells) for cells in zip(*(column.foot for column in columns), strict=False) if any(cells[1:]))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escape_text, cells)) + " |"
