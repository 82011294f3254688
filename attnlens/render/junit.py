"""Checks as JUnit XML: one testcase a rule."""

from __future__ import annotations

from xml.etree import ElementTree

from attnlens.records import Check, Report
from attnlens.sentences import checked
from attnlens.wording import clean

MOST = 100
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
        lines = [checked.accusation(check, breach) for breach in check.breaches[:MOST]]
        more = len(check.breaches) - MOST
        failure.text = "\n".join([checked.told(check), *lines, *([f"and {more} more"] if more > 0 else [])])
