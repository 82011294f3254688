"""Tests that the action, the workflow, the pre-commit hook and the pytest plugin run as a CI system runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from junitparser import JUnitXml
from program import environment_with, in_shell
from reports import synthetic_report

import attnlens
from attnlens.checks.pytest_plugin import assert_attention

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")
WORKFLOW, PRE_COMMIT = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
GREEN, RED = '"tokens.entropy" = "max <= 1"', '"tokens.entropy" = "min > 0.9"'


@pytest.fixture
def place(tmp_path):
    """A repository with a report and rules."""
    synthetic_report(2, 2, curves=False).write_json(tmp_path / "report.json")
    return tmp_path


def written(place, *rules):
    (place / "attnlens.toml").write_text("\n".join(["[check]", *rules, ""]))


def act(place, **chosen):
    """Run the composite action's steps with these inputs; the result of the first that fails, or of the last."""
    assert set(chosen) <= set(ACTION["inputs"])
    inputs = {name: chosen.get(name, run.get("default")) for name, run in ACTION["inputs"].items()}
    assert None not in inputs.values(), "a required input is missing"
    for step in ACTION["runs"]["steps"]:
        if step.get("if") == "inputs.install == 'true'" and inputs["install"] != "true":
            continue
        assert step["shell"] == "bash"
        assert "${{" not in step["run"], "an input in the script itself could run as one"
        expression = r"\$\{\{ inputs\.([\w-]+) \}\}"  # the only kind that the action has; GitHub puts in the values
        env = {name: re.sub(expression, lambda one: inputs[one[1]], value) for name, value in step["env"].items()}
        result = in_shell(f"set -eo pipefail\n{step['run']}", cwd=place, GITHUB_ACTIONS="true", **env)
        if result.returncode:
            return result
    return result


def test_the_action_goes_red_and_green_leaves_its_files_and_takes_its_inputs_as_words(place):
    report = {"subject": "report.json", "install": "false"}
    written(place, GREEN)
    green = act(place, **report, junit="a b.xml")
    assert green.returncode == 0, green.stderr
    assert "::error" not in green.stdout
    written(place, GREEN, RED.replace("tokens.entropy", "tokens.max_weight"))
    red = act(place, **report, junit="a b.xml")
    assert red.returncode == 1
    assert "::error file=attnlens.toml,title=attnlens tokens.max_weight::" in red.stdout
    (suite,) = JUnitXml.fromfile(str(place / "a b.xml"))
    assert (suite.tests, suite.failures) == (2, 1)
    hostile = '$(touch owned); `touch owned` "; touch owned #'
    for name in ("subject", "rules", "rule", "baseline"):
        assert act(place, **report | {name: hostile}).returncode == 2, name
    assert not (place / "owned").exists(), "never as scripts"
    many = act(place, **report, rule="tokens.entropy: max <= 1\ntokens.entropy: min > 2\n")
    assert many.returncode == 1
    assert "FAILED: 1 of 2 rules" in " ".join(many.stdout.split())


def test_the_workflow_of_the_page_runs_up_to_the_upload(place):
    """Its own commands, and this action in the place of the published one; `./model` stands for the demo here."""
    written(place, GREEN)
    codes = []
    for step in WORKFLOW["jobs"]["check"]["steps"]:
        if "run" in step and "pip install" not in step["run"]:
            line = step["run"].replace("./model", "demo --windows 4 --length 16 -q")
            codes.append(in_shell(f"set -eo pipefail\n{line}", cwd=place).returncode)
        elif step.get("uses") == "./attnlens":
            codes.append(act(place, **step["with"]).returncode)
            upload = step["with"]["junit"]
    assert codes == [0, 0]
    assert step["with"]["path"] == upload
    assert step["if"] == "always()", "a red check has results to upload"
    assert (place / upload).exists()


def test_the_pre_commit_hook_runs_its_entry_with_the_arguments_of_the_config_alone(place):
    (hook,) = HOOKS
    (used,) = PRE_COMMIT["repos"][0]["hooks"]
    assert hook["id"] == used["id"]
    assert hook["pass_filenames"] is False
    assert re.search(hook["files"], "models/report.json")
    assert not re.search(hook["files"], "README.md")
    for rule, code in ((GREEN, 0), (RED, 1)):
        written(place, rule)
        assert in_shell(" ".join([hook["entry"], *used["args"]]), cwd=place).returncode == code


PLUGGED = """
import sys

import attnlens
import pytest

LOADED = set(sys.modules) & {"torch", "numpy", "pydantic", "transformers"}

def test_the_plugin_loaded_nothing_heavy():
    assert not LOADED

def test_green(attention_report, assert_attention):
    report = attention_report("report.json")
    assert report is attention_report("report.json")
    assert_attention(report, {"tokens.entropy": ["max <= 1"]})
    assert "torch" not in sys.modules

def test_red(assert_attention):
    assert_attention("report.json", {"tokens.entropy": ["max <= 1", "min > 0.9"]})

def test_nothing(assert_attention):
    with pytest.raises(attnlens.AttnlensError):
        assert_attention("report.json", {"tokens.nothing": ["min > 0.9"]})
"""


def test_the_plugin_gives_a_fixture_and_an_assertion_and_costs_nothing(place):
    (place / "test_it.py").write_text(PLUGGED)
    words = ["-m", "pytest", "-q", "-p", "attnlens.checks.pytest_plugin", "-p", "no:cacheprovider", "test_it.py"]
    env = environment_with(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTHONPATH=str(ROOT))
    run = subprocess.run([sys.executable, *words], cwd=place, env=env, capture_output=True, text=True, check=False)
    assert "1 failed, 3 passed" in run.stdout, run.stdout + run.stderr
    assert "AssertionError: 1 of 2 rules failed:" in run.stdout
    assert "tokens.entropy: found" in run.stdout
    assert "pytest_plugin.py" not in run.stdout.partition("short test summary")[0], "the test's own line is shown"


def test_what_rules_need_is_measured_once_for_each_set_of_options(demo, attention_report, monkeypatch):
    options, inspect = {}, attnlens.inspect
    spy = lambda *args, **more: options.update(more) or inspect(*args, **more)  # noqa: E731
    monkeypatch.setattr(attnlens, "inspect", spy, raising=False)
    assert_attention(demo, {"weights.symmetry": ["value in -1..1"]})
    assert options == {"analyzers": ["symmetry"], "source": "weights"}
    with pytest.raises(AssertionError, match="1 of 1 rules failed"):
        assert_attention(demo, {"weights.symmetry": ["min > 0.99"]})
    monkeypatch.setattr(attnlens, "inspect", lambda *_, **options: object(), raising=False)
    report = attention_report("demo", windows=1)
    assert report is attention_report("demo", windows=1)
    assert report is not attention_report("demo", windows=2)


def test_the_rules_of_the_page_hold_of_the_demo_model(place, inspected):
    (rules,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (place / "attnlens.toml").write_text(rules)
    checks = attnlens.check(inspected, str(place / "attnlens.toml")).checks
    assert [check.passed for check in checks] == [True] * 7
