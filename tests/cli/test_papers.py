"""Tests `attnlens converge` and `attnlens reproduce`: exit code, stdout, stderr, files."""

from __future__ import annotations

import json
import signal

import pytest
from checkpoints import checkpoint, other_shape
from experiment_reports import converging, experiment_report, golden
from program import attnlens, python, refused, without_torch
from typer.testing import CliRunner

from attnlens.cli import analyses
from attnlens.cli.commands import app
from attnlens.report.report import read_report

FAST = ("--source", "weights", "--analyzer", "symmetry", "--no-progress")
RUNNER = CliRunner()


def test_the_flag_alone_follows_the_demo_through_its_own_checkpoints(tmp_path):
    files = ("--json", "r.json", "--csv", "r.csv", "--figure", "pictures", "--html", "r.html", "--markdown", "r.md")
    result = attnlens("converge", "--checkpoints", *FAST, *files, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "using demo" in result.stderr
    assert "COMPLETE: 32 of 32 heads" in result.stdout
    assert "weights.symmetry" in result.stdout
    report = read_report(tmp_path / "r.json")
    assert report.experiments[0].curves["weights.symmetry"].steps == [0, 30, 100, 300, 1000, 3000, 6000]
    assert (tmp_path / "pictures" / "overview.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "pictures" / "weights.symmetry.png").exists()
    assert "data:image/" in (tmp_path / "r.html").read_text()
    assert "weights.symmetry" in (tmp_path / "r.md").read_text()
    rows = (tmp_path / "r.csv").read_text().splitlines()
    assert rows[0] == "layer,head,measure,training step,value,se"
    assert rows[1].startswith("0,0,weights.")


@pytest.mark.parametrize(
    "words",
    [
        ("--checkpoints", checkpoint(30), checkpoint(100)),
        (checkpoint(30), "--checkpoints", checkpoint(100)),
        ("--checkpoints", checkpoint(30), "--checkpoints", checkpoint(100), "--head", "1.2"),
    ],
)
def test_checkpoints_may_be_named_in_every_way(words):
    result = attnlens("converge", *words, *FAST, "--json", "-")
    assert result.returncode == 0, result.stderr
    (experiment,) = json.loads(result.stdout)["experiments"]
    assert experiment["settings"]["checkpoints"] == ["step-00030", "step-00100"]
    assert len(experiment["trajectories"]) % (1 if "--head" in words else 32) == 0
    assert {(t["layer"], t["head"]) for t in experiment["trajectories"]} >= {(1, 2)}


def test_one_experiment_prints_ours_and_writes_its_report(tmp_path):
    words = ("converge", "--experiment", "feasibility", "--trials", "4", "--json", "r.json", "--csv", "r.csv")
    result = attnlens(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "one-layer attention (synthetic) · f(X, z) = h(Xᵀ softmax(XWz)) · 100 parameters" in result.stdout
    assert "COMPLETE" not in result.stdout
    report = read_report(tmp_path / "r.json")
    assert (report.command, [e.settings["trials"] for e in report.experiments]) == ("converge", [4])
    assert "feasib" in (tmp_path / "r.csv").read_text()


def test_reports_of_the_same_words_are_the_same_bytes():
    words = ("converge", "--experiment", "feasibility", "--trials", "3", "--json", "-", "-q")
    one, two = (json.loads(attnlens(*words).stdout) for _ in range(2))
    for report in (one, two):
        for field in ("timings", "environment", "peak_memory_bytes"):
            del report[field]
    assert one == two


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--iterations", "0"), "'--iterations'"),
        (("--trials", "0"), "'--trials'"),
        (("--lr", "0.1"), "keyword of the function"),
        (("--experiment", "local-convergense"), "Did you mean 'local-convergence'"),
        (("--head", "3.x"), "LAYER.HEAD"),
        (("--head", "0.1", "--layers", "1"), "--layers applies to checkpoints"),
        (("--checkpoints", "--trials", "3"), "--trials applies to the synthetic experiments"),
        (("--length", "16"), "--length applies to a single head and checkpoints"),
        (("demo",), "needs --head, --checkpoints or --revisions"),
        (("--checkpoints", "demo", "no/such/folder"), "no/such/folder"),
        (("--revisions", "step1,step2"), "one hub model"),
        (("demo", "--revisions", "step1,step2"), "no revision"),
        (("org/model", "--revisions", "step1,,step2"), "empty name"),
        (("--checkpoints", checkpoint(0), checkpoint(30), "--layers", "9"), "There is no layer 9"),
        (("--checkpoints", "--json", "no/such/folder/r.json"), "can't be written"),
    ],
)
def test_what_can_not_be_used_ends_with_two_lines_and_2(words, told):
    refused(attnlens("converge", *words), told)


def test_checkpoints_of_other_shapes_are_refused_by_name(tmp_path):
    result = attnlens("converge", "--checkpoints", checkpoint(30), other_shape(tmp_path, n_head=4))
    refused(result, "n_head is 8 in step-00030, but 4 in step-77", "Give checkpoints of the same model")


@pytest.mark.parametrize(
    "words", [("converge", "--help"), ("reproduce", "--help"), ("converge", "demo"), ("reproduce", "--csv", "")]
)
def test_what_needs_no_work_loads_no_torch(words):
    result = without_torch(*words)
    assert result.returncode in (0, 2)
    assert "Internal error" not in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["passes", "fails", "unpublished"])
def test_reproduce_ends_with_1_where_a_row_misses_and_names_it(name, monkeypatch, tmp_path):
    rows = {
        "passes": [converging(), golden()],
        "fails": [converging(), golden(name="spoiled", final={"vis1 ‖W‖_F": 8.7, "largest gap": 0.0, "rank": 1.0})],
        "unpublished": [golden(published=None, tolerance=None, bounds={})],
    }[name]
    monkeypatch.setattr(analyses, "reproduce", lambda *_, **__: experiment_report(*rows, command="reproduce"))
    monkeypatch.chdir(tmp_path)
    result = RUNNER.invoke(app, ["reproduce", "--json", "v.json", "--quick"])
    assert result.exit_code == (1 if name == "fails" else 0)
    assert ("Results differ from the published ones: spoiled." in result.stderr) == (name == "fails")
    assert ("FAIL" in result.stdout) == (name == "fails")
    assert read_report(tmp_path / "v.json").command == "reproduce", "the report is written either way"


@pytest.mark.full
def test_a_heads_own_problem_is_drawn_like_the_others(tmp_path):
    small = ("--windows", "2", "--length", "32", "--iterations", "20")
    result = attnlens(
        "converge", "demo", "--head", "3.7", *small, "--json", "h.json", "--figure", "h.png", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    report = read_report(tmp_path / "h.json")
    assert report.model.id == "demo"
    assert all(experiment.curves for experiment in report.experiments)


def test_an_interruption_keeps_the_finished_checkpoints(tmp_path):
    words = ["converge", "--checkpoints", "--source", "weights", "--json", "r.json"]
    result = python("-c", INTERRUPTING, *words, cwd=tmp_path)
    assert result.returncode == 130, result.stderr
    report = read_report(tmp_path / "r.json")
    assert report.experiments[0].settings["checkpoints"] == ["step-00000", "step-00030"]
    assert "interrupted" in report.coverage.sentence


INTERRUPTING = f"""
import os, sys
sys.argv[0] = "attnlens"
from attnlens.runs import series
read = series.Series.read_unit
def interrupted(self, name):
    if "step-00100" in name:
        os.kill(os.getpid(), {int(signal.SIGINT)})
    return read(self, name)
series.Series.read_unit = interrupted
from attnlens.cli import main
main()
"""


def test_options_of_files_and_environment_reach_the_command(tmp_path):
    (tmp_path / "attnlens.toml").write_text("iterations = 10\ntrials = 3\n")
    words = ("converge", "--experiment", "feasibility", "--json", "-", "-q")
    result = attnlens(*words, cwd=tmp_path)
    refused(result, "iterations would be ignored")
    (tmp_path / "attnlens.toml").write_text("trials = 3\n")
    assert json.loads(attnlens(*words, cwd=tmp_path).stdout)["experiments"][0]["settings"]["trials"] == 3
    (tmp_path / "attnlens.toml").write_text('iterations = "fast"\n')
    refused(attnlens(*words, cwd=tmp_path), "iterations must be a whole number")
