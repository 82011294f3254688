"""Checks for CI systems: JUnit XML, and GitHub's annotations and step summary."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

from attnlens.records import Check, Report
from attnlens.render.markdown import markdown
from attnlens.sections import checked
from attnlens.sections.checked import document, worst
from attnlens.wording import clean

MOST_HEADS = 100
"""Heads that a failure names; more would hide the rest of a pipeline's page."""


def junit(report: Report) -> str:
    """The checks of a report; a text that XML 1.0 can't hold is cleaned, everything else escaped."""
    failed = str(sum(not check.passed for check in report.checks))
    counts = {"tests": str(len(report.checks)), "failures": failed, "errors": "0", "skipped": "0"}
    suites = ElementTree.Element("testsuites", {"name": "attnlens"} | counts)
    name = clean(f"attnlens check {report.model.id}")
    suite = ElementTree.SubElement(suites, "testsuite", {"name": name} | counts)
    for check in report.checks:
        _testcase(suite, check)
    ElementTree.indent(suites, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _testcase(suite: ElementTree.Element, check: Check) -> None:
    place = {} if check.file is None else {"file": clean(check.file)}
    named = {"classname": clean(f"attnlens.{check.subject}"), "name": clean(check.rule)}
    case = ElementTree.SubElement(suite, "testcase", named | place | {"time": "0"})
    if not check.passed:
        failure = ElementTree.SubElement(case, "failure", message=checked.told(check), type="rule")
        lines = [checked.accusation(check, breach) for breach in check.breaches[:MOST_HEADS]]
        more = len(check.breaches) - MOST_HEADS
        failure.text = "\n".join([checked.told(check), *lines, *([f"and {more} more"] if more > 0 else [])])


MOST_ANNOTATIONS = 10
"""Annotations of one kind that GitHub shows of a step."""
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
