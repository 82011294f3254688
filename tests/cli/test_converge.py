"""Tests `attnlens converge` and `attnlens reproduce`: exit code, stdout, stderr, files."""

import json

import pytest
from checkpoints import checkpoint
from experiment_reports import converging, experiment_report, golden
from program import invoke, refused
from reports import bytes_of
from views import absent

from attnlens.cli import analyses
from attnlens.report.report import Report, read_report
from attnlens.runs.series import Series

FAST = ("--source", "weights", "--analyzer", "symmetry", "--no-progress")
FEASIBILITY = ("converge", "--experiment", "feasibility", "--json", "-", "-q")


@pytest.mark.usefixtures("without_layout")
def test_the_flag_alone_follows_the_demo_through_its_own_checkpoints(tmp_path):
    files = ("--json", "r.json", "--csv", "r.csv", "--figure", "pictures", "--html", "r.html", "--markdown", "r.md")
    result = invoke("converge", "--checkpoints", "--layers", "0", *FAST, *files, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "using demo" in result.stderr
    assert not absent(result.stdout, "COMPLETE: 8 of 8 heads", "weights.symmetry")
    report = read_report(tmp_path / "r.json")
    assert report.experiments[0].curves["weights.symmetry"].steps == [0, 30, 100, 300, 1000, 3000, 6000]
    assert (tmp_path / "pictures" / "overview.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "pictures" / "weights.symmetry.png").exists()
    page, marked, rows = ((tmp_path / f"r.{kind}").read_text() for kind in ("html", "md", "csv"))
    assert ("data:image/" in page, "weights.symmetry" in marked) == (True, True)
    assert rows.startswith("layer,head,measure,training step,value,se\n0,0,weights.")


def test_checkpoints_can_be_named_in_every_way():
    one, other = checkpoint(30), checkpoint(100)
    named = ("--checkpoints", one, "--checkpoints", other, "--head", "1.2")
    for words in (
        ("--checkpoints", one, other, "--layers", "1"),
        (one, "--checkpoints", other, "--layers", "1"),
        named,
    ):
        result = invoke("converge", *words, *FAST, "--json", "-")
        assert result.returncode == 0, result.stderr
        (experiment,) = json.loads(result.stdout)["experiments"]
        assert experiment["settings"]["checkpoints"] == ["step-00030", "step-00100"], words
        lines = [(line["layer"], line["head"]) for line in experiment["trajectories"]]
        assert set(lines) == {(1, 2)} if "--head" in words else len(set(lines)) == 8, words


def test_one_experiment_prints_a_table_and_writes_its_report(tmp_path):
    words = ("converge", "--experiment", "feasibility", "--trials", "4", "--json", "r.json", "--csv", "r.csv")
    result = invoke(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    line = "one-layer attention (synthetic) · f(X, z) = h(Xᵀ softmax(XWz)) · float64 on cpu"
    assert absent(result.stdout, line, "COMPLETE") == ["COMPLETE"]
    report = read_report(tmp_path / "r.json")
    assert (report.command, [e.settings["trials"] for e in report.experiments]) == ("converge", [4])
    assert "feasib" in (tmp_path / "r.csv").read_text()


def test_options_come_from_defaults_and_the_same_words_give_the_same_bytes(tmp_path):
    (tmp_path / "attnlens.toml").write_text("iterations = 10\ntrials = 3\n")
    refused(invoke(*FEASIBILITY, cwd=tmp_path), "iterations would be ignored")
    (tmp_path / "attnlens.toml").write_text("trials = 3\n")
    reports = [Report.model_validate_json(invoke(*FEASIBILITY, cwd=tmp_path).stdout) for _ in range(2)]
    assert reports[0].experiments[0].settings["trials"] == 3
    assert bytes_of(reports[0]) == bytes_of(reports[1])
    (tmp_path / "attnlens.toml").write_text('iterations = "fast"\n')
    refused(invoke(*FEASIBILITY, cwd=tmp_path), "iterations must be a whole number")


def test_reproduce_ends_with_1_where_a_row_misses_and_names_it(monkeypatch, tmp_path):
    missed = golden(name="spoiled", final={"vis1 ‖W‖_F": 8.7, "largest gap": 0.0, "rank": 1.0})
    unpublished = golden(published=None, tolerance=None, bounds={})
    for rows, code in (([converging(), golden()], 0), ([converging(), missed], 1), ([unpublished], 0)):
        report = experiment_report(*rows, command="reproduce")
        monkeypatch.setattr(analyses, "reproduce", lambda *_, report=report, **__: report)
        result = invoke("reproduce", "--json", "v.json", "--quick", cwd=tmp_path)
        assert result.returncode == code
        assert ("Results differ from the reference values: spoiled." in result.stderr) == (code == 1)
        assert ("1 of 3 values differs" in " ".join(result.stdout.split())) == (code == 1)
        assert read_report(tmp_path / "v.json").command == "reproduce", "the report is written either way"


@pytest.mark.full
def test_a_heads_own_problem_is_drawn_like_the_others(tmp_path):
    small = ("--windows", "2", "--length", "32", "--iterations", "20")
    result = invoke("converge", "demo", "--head", "3.7", *small, "--json", "h.json", "--figure", "h.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    report = read_report(tmp_path / "h.json")
    assert report.model.id == "demo"
    assert all(experiment.curves for experiment in report.experiments)


def test_an_interruption_preserves_the_finished_checkpoints(tmp_path, monkeypatch):
    honest = Series.read_unit

    def read(series, name):
        if "step-00100" in name:
            raise KeyboardInterrupt
        return honest(series, name)

    monkeypatch.setattr(Series, "read_unit", read)
    result = invoke("converge", "--checkpoints", *FAST, "--json", "r.json", cwd=tmp_path)
    assert result.returncode == 130, result.stderr
    report = read_report(tmp_path / "r.json")
    assert report.experiments[0].settings["checkpoints"] == ["step-00000", "step-00030"]
    assert "interrupted" in report.coverage.sentence
