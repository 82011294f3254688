"""Tests that JUnit, SARIF, annotations, markdown and CSV say what the checks say, and show strangers' text as text."""

from __future__ import annotations

import csv
import json
import re
from io import StringIO
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import views
from junitparser import Failure, JUnitXml
from reports import planted, synthetic_report
from test_html import HOSTILE, STEERING, Tags

import attnlens
from attnlens.records import Report
from attnlens.render.csv_text import spreadsheet
from attnlens.render.github import step_summary, workflow_commands
from attnlens.render.html import html
from attnlens.render.junit import junit
from attnlens.render.markdown import markdown
from attnlens.render.sarif import MOST_BYTES, MOST_RESULTS, sarif, uri
from attnlens.rules.judging import verdict
from attnlens.rules.rule import tabled
from attnlens.sections import checked

# the file that Microsoft.CodeAnalysis.Sarif ships (npm: @microsoft/sarif-multitool-linux 5.7.0, MIT), indented anew
SCHEMA = json.loads((Path(__file__).parent / "data" / "sarif-2.1.0.json").read_text(encoding="utf-8"))
RULES = {
    "weights.planted": ["min > 0.15", "median < 0.05", "count == 4"],
    "model.parameters": ["value > 1"],
}
LINES = {"weights.planted": [2, 3, 4, 5], "model.parameters": [6, 6]}


def report_of(rules=RULES, lines=LINES, values=((0.1, 0.2), (0.3, 0.05)), file="attnlens.toml") -> Report:
    return verdict(planted(np.array(values)), tabled(rules, file, lines))


def sarif_of(report: Report):
    """The run, after the published schema has accepted the file."""
    told = json.loads(sarif(report))
    jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker()).validate(told)
    return told["runs"][0]


def test_the_schema_refuses_what_is_no_sarif():
    told = json.loads(sarif(report_of()))
    del told["runs"][0]["results"][0]["message"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(told, SCHEMA)


def test_junit_has_a_testcase_a_rule_and_is_read_back():
    report = report_of()
    suites = JUnitXml.fromstring(junit(report).encode())
    (suite,) = suites
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (4, 2, 0, 0)
    cases = {case.name: case for case in suite}
    assert list(cases) == [check.rule for check in report.checks]
    failed = [name for name, case in cases.items() if any(isinstance(one, Failure) for one in case.result)]
    assert failed == ["weights.planted: min > 0.15", "weights.planted: median < 0.05"]
    (failure,) = cases["weights.planted: min > 0.15"].result
    assert "2 of 4 heads, worst layer 1 head 1: 0.05" in failure.message
    assert "layer 0 head 0 (encoder): weights.planted is 0.1" in failure.text


def test_sarif_has_a_result_a_head_at_the_line_of_its_rule():
    run = sarif_of(report_of())
    places = [
        (result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"],
         result["locations"][0]["physicalLocation"]["region"]["startLine"],
         result["ruleId"])
        for result in run["results"]
    ]  # fmt: skip
    assert places == [
        ("attnlens.toml", 4, "weights.planted: median <"),
        ("attnlens.toml", 3, "weights.planted: min >"),
        ("attnlens.toml", 3, "weights.planted: min >"),
    ]
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
    assert len(rules) == 4
    assert "toolExecutionNotifications" not in run["invocations"][0]


def test_fingerprints_name_rule_and_head_and_outlive_the_numbers():
    def prints(**changed):
        found = sarif_of(report_of(**changed))["results"]
        return [result["partialFingerprints"]["ruleAndHead/v1"] for result in found]

    assert len(set(prints())) == 3
    moved = {"weights.planted": [9, 9, 9, 9], "model.parameters": [10, 10]}
    other = RULES | {"weights.planted": ["min > 0.16", "median < 0.04", "count == 4"]}
    assert prints(rules=other, lines=moved, values=((0.11, 0.2), (0.3, 0.06))) == prints()
    assert set(prints(values=((0.1, 0.2), (0.05, 0.3)))) != set(prints())


def test_sarif_stays_within_the_limits_and_says_what_it_left_out():
    first, *rest = report_of().checks
    breaches = [first.breaches[0].model_copy(update={"head": head}) for head in range(26_000)]
    many = report_of().model_copy(update={"checks": [first.model_copy(update={"breaches": breaches}), *rest]})
    text = sarif(many)
    run = json.loads(text)["runs"][0]
    kept = len(run["results"])
    assert 15_000 < kept <= MOST_RESULTS
    assert len(text.encode()) <= MOST_BYTES
    (said,) = run["invocations"][0]["toolExecutionNotifications"]
    assert f"26001 heads and rules failed; the {kept} worst are here" in said["message"]["text"]
    assert "head 0 " in run["results"][1]["message"]["text"], "the worst first"


def test_annotations_are_the_worst_ten_and_every_rule_has_its_worst():
    values = np.linspace(0, 1, 40).reshape(4, 10)
    report = verdict(planted(values), tabled({"weights.planted": ["max < 0.1", "min > 0.9"]}, "a,b:c%.toml", {}))
    lines = workflow_commands(report)
    assert len(lines) == 10
    place = "::error file=a%252Cb%253Ac%2525.toml,line=1,title=attnlens weights.planted::"
    assert all(line.startswith(place) for line in lines)
    assert "layer 3 head 9" in lines[0]
    assert "layer 0 head 0" in lines[1]
    assert workflow_commands(report_of({"weights.planted": "max < 9"})) == []


def test_places_are_written_from_the_workspace_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert uri("a b/ü#?.toml") == "a%20b/%C3%BC%23%3F.toml"
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "deep"))
    assert uri("deep/../deep/x.toml") == "deep/x.toml".partition("/")[2]
    assert uri("x.toml").startswith("file:///")


def hostile() -> Report:
    """Checks whose every string is a stranger's."""
    name = f"tokens.{HOSTILE}"
    report = planted(np.array([[0.1, 0.9]]), name)
    heads = [head.model_copy(update={"site": f"=cmd|{HOSTILE}"}) for head in report.heads]
    model = report.model.model_copy(update={"id": f"=cmd|' /C calc'!A0{HOSTILE}", "architecture": HOSTILE})
    report = report.model_copy(update={"heads": heads, "model": model})
    rules = tabled({name: ["max < 0.5", "median < 0.1"]}, f"%0A::error::{HOSTILE}.toml", {name: [1, 1, 1]})
    return verdict(report, rules)


def as_json(report: Report) -> str:
    """The strings of the JSON file; what they hold is data, but as bytes on a terminal nothing steers."""
    return re.sub("[\u200b-\u200f\u202a-\u202e\u2066-\u2069]", "", report.to_json())


def as_summary(report: Report) -> str:
    """The step's summary without the blank of no width that stands behind an @ so that nobody is called."""
    return step_summary(report).replace("&#64;&#8203;", "@")


@pytest.mark.parametrize(
    "form",
    [
        junit,
        sarif,
        as_summary,
        lambda report: "\n".join(workflow_commands(report)),
        lambda report: spreadsheet(checked.rows(report)),
        lambda report: markdown(checked.document(report)),
        lambda report: html(checked.document(report)),
        lambda report: views.printed(checked.document(report)),
        as_json,
    ],
    ids=["junit", "sarif", "summary", "annotations", "csv", "markdown", "html", "terminal", "json"],
)
def test_nothing_that_steers_gets_through(form):
    assert not STEERING.search(form(hostile()))


def test_hostile_names_stay_text_in_each_format():
    report = hostile()
    (suite,) = JUnitXml.fromstring(junit(report).encode())
    assert all("<script>" in case.name for case in suite)
    run = sarif_of(report)
    assert all("<script>" in result["ruleId"] for result in run["results"])
    own = [tag for tag, _ in Tags(html(checked.document(report_of()))).tags].count("script")
    page = Tags(html(checked.document(report)))
    assert [tag for tag, _ in page.tags].count("script") == own, "the page's own"
    assert "<script>" not in step_summary(report)
    lines = workflow_commands(report)
    assert all(line.count("::") >= 2 and "\n" not in line for line in lines)
    assert all("::error::" not in line.partition(",title=")[0] for line in lines), "a file's name is no command"
    cells = [cell for row in csv.reader(StringIO(spreadsheet(checked.rows(report)))) for cell in row]
    assert any(cell.startswith("'=cmd|") for cell in cells)
    assert not any(cell.startswith(("=", "+", "@", "|")) for cell in cells)


def test_the_table_shows_every_rule_and_the_csv_every_head():
    report = report_of()
    shown = views.printed(checked.document(report))
    assert "FAILED: 2 of 4 rules" in shown
    assert shown.count("FAILS") == 2
    assert "layer 1 head 1 (encoder): weights.planted is 0.05, wanted min > 0.15" in shown
    rows = list(csv.DictReader(StringIO(spreadsheet(checked.rows(report)))))
    assert [(row["rule"], row["layer"], row["value"]) for row in rows] == [
        ("weights.planted: min > 0.15", "1", "0.05"),
        ("weights.planted: min > 0.15", "0", "0.1"),
        ("weights.planted: median < 0.05", "", ""),
        ("weights.planted: count == 4", "", ""),
        ("model.parameters: value > 1", "", ""),
    ]
    passed = attnlens.check(synthetic_report(2, 2), {"tokens.entropy": "min > 0"})
    assert "PASSED: 1 of 1 rule" in views.printed(checked.document(passed))


def test_checks_survive_the_file(tmp_path):
    report = report_of()
    report.write_json(tmp_path / "r.json")
    assert attnlens.read_report(tmp_path / "r.json").to_json() == report.to_json()
