"""Tests that JUnit, annotations, markdown and CSV say what the checks say, and show strangers' text as text."""

from __future__ import annotations

import csv
import re
from io import StringIO

import numpy as np
import views
from hostile_reports import HOSTILE, STEERING
from junitparser import Failure, JUnitXml
from reports import planted, synthetic_report
from views import Tags

import attnlens
from attnlens.checks.judging import build_baseline, check_report
from attnlens.checks.rule import parse_table
from attnlens.report.render.html import html
from attnlens.report.render.markdown import junit, markdown, spreadsheet, step_summary, uri, workflow_commands
from attnlens.report.report import Report
from attnlens.report.sections import checked

RULES = {"weights.planted": ["min > 0.15", "median < 0.05", "count == 4"], "model.parameters": ["value > 1"]}


def report_of(rules=RULES, values=((0.1, 0.2), (0.3, 0.05)), file="attnlens.toml") -> Report:
    return check_report(planted(np.array(values)), parse_table(rules, file))


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
    assert "layer 0 head 0: weights.planted is 0.1" in failure.text


def test_annotations_are_the_worst_ten_with_places_from_the_workspace_on(tmp_path, monkeypatch):
    values = np.linspace(0, 1, 40).reshape(4, 10)
    report = check_report(planted(values), parse_table({"weights.planted": ["max < 0.1", "min > 0.9"]}, "a,b:c%.toml"))
    lines = workflow_commands(report)
    assert len(lines) == 10
    place = "::error file=a%252Cb%253Ac%2525.toml,title=attnlens weights.planted::"
    assert all(line.startswith(place) for line in lines)
    assert "layer 3 head 9" in lines[0]
    assert "layer 0 head 0" in lines[1]
    renamed = report.model_copy(update={"checks": [report.checks[0].model_copy(update={"subject": "a, b: c"})]})
    assert ",title=attnlens a%2C b%3A c::" in workflow_commands(renamed)[0]
    assert workflow_commands(report_of({"weights.planted": "max < 9"})) == []
    monkeypatch.chdir(tmp_path)
    assert uri("a b/ü#?.toml") == "a%20b/%C3%BC%23%3F.toml"
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "deep"))
    assert uri("deep/../deep/x.toml") == "deep/x.toml".partition("/")[2]
    assert uri("x.toml").startswith("file:///")


def hostile() -> Report:
    """Checks whose every string is a stranger's."""
    report = planted(np.array([[0.1, 0.9]]), name := f"tokens.{HOSTILE}")
    heads = [head.model_copy(update={"site": f"=cmd|{HOSTILE}"}) for head in report.heads]
    model = report.model.model_copy(update={"id": f"=cmd|' /C calc'!A0{HOSTILE}", "architecture": HOSTILE})
    rules = parse_table({name: ["max < 0.5", "median < 0.1"]}, f"%0A::error::{HOSTILE}.toml")
    return check_report(report.model_copy(update={"heads": heads, "model": model}), rules)


FORMS = {
    "junit": junit,
    # without the blank of no width that stands behind an @ so that nobody is called
    "summary": lambda report: step_summary(report).replace("&#64;&#8203;", "@"),
    "annotations": lambda report: "\n".join(workflow_commands(report)),
    "csv": lambda report: spreadsheet(checked.rows(report)),
    "markdown": lambda report: markdown(checked.document(report)),
    "html": lambda report: html(checked.document(report)),
    "terminal": lambda report: views.printed(checked.document(report)),
    # what strings hold is data, but as bytes on a terminal nothing steers
    "json": lambda report: re.sub("[\u200b-\u200f\u202a-\u202e\u2066-\u2069]", "", report.to_json()),
}


def test_hostile_names_stay_text_in_each_format_and_steer_nothing():
    for name, form in FORMS.items():
        assert not STEERING.search(form(hostile())), name
    report = hostile()
    (suite,) = JUnitXml.fromstring(junit(report).encode())
    assert all("<script>" in case.name for case in suite)
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


def test_the_table_shows_every_rule_the_csv_every_head_and_checks_survive_the_file(tmp_path):
    report = report_of()
    report.write_json(tmp_path / "r.json")
    assert attnlens.read_report(tmp_path / "r.json").to_json() == report.to_json()
    shown = views.printed(checked.document(report))
    assert "FAILED: 2 of 4 rules" in " ".join(shown.split())
    assert shown.count("FAILED") == 3, "the heading and two rows"
    assert "layer 1 head 1: weights.planted is 0.05, wanted min > 0.15" in shown
    rows = list(csv.DictReader(StringIO(spreadsheet(checked.rows(report)))))
    assert [(row["rule"], row["layer"], row["value"]) for row in rows] == [
        ("weights.planted: min > 0.15", "1", "0.05"),
        ("weights.planted: min > 0.15", "0", "0.1"),
        ("weights.planted: median < 0.05", "", ""),
        ("weights.planted: count == 4", "", ""),
        ("model.parameters: value > 1", "", ""),
    ]
    passed = attnlens.check(synthetic_report(2, 2), {"tokens.entropy": "min > 0"})
    assert "PASSED: 1 of 1 rule" in " ".join(views.printed(checked.document(passed)).split())


def test_a_baseline_shows_the_value_found_beside_baseline_and_tolerance():
    first, second = (planted(np.array(values)) for values in (((0.1, 0.2), (0.3, 0.4)), ((0.1, 0.2), (0.5, 0.6))))
    judged = check_report(second, parse_table({"weights.planted": ["value > 0"]}), build_baseline(first))
    value, against = judged.checks
    assert (value.median, value.base) == (0.35, None)
    assert (against.median, against.base) == (0.35, 0.25)
    text = markdown(checked.document(judged))
    gone = planted(np.array(((0.1, 0.2), (0.3, np.nan))))
    lost = markdown(checked.document(check_report(gone, {}, build_baseline(first))))
    assert "| weights.planted | worst no value | 0.4 |" in lost, "not the median of the other heads"
    assert "| rule | found | baseline | tolerance | heads | verdict |" in text
    shown = "both values are of the head that deviates most; medians could be equal"
    assert re.search(r"\| weights.planted \| worst 0.5 \| 0.3 \| ±5 %[^|]* \| 2 of 4 fail \| FAILED \|", text), shown
    same = markdown(checked.document(check_report(first, {}, build_baseline(first))))
    assert re.search(r"\| weights.planted \| median 0.25 \| median 0.25 \| ±5 %[^|]* \| 4 \| passed \|", same)
    assert checked.rows(judged)[-1] | {"baseline.median": 0.25, "median": 0.35} == checked.rows(judged)[-1]


def test_an_updated_baseline_is_not_an_empty_check():
    report = planted(np.array(((0.1, 0.2),)))
    assert checked.document(report, updated=True).head.standing == "Baseline updated: 2 heads"
    assert checked.document(report).head.standing == "No rule was checked"
