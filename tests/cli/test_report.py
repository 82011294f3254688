"""Tests of the command `report`: a saved report is drawn again as the run that made it would have drawn it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import views
from program import attnlens, refused, without_torch
from reports import synthetic_report
from swap_reports import swap_report

from attnlens.records import SiteCheck, Summary
from attnlens.report.report import Report, read_report

FILES = ("--html", "r.html", "--csv", "r.csv", "--markdown", "r.md", "--json", "again.json", "--figure", "r.png")


def saved(folder: Path, report: Report) -> str:
    report.write_json(folder / "r.json")
    return str(folder / "r.json")


@pytest.mark.parametrize("made", [synthetic_report(3, 2), swap_report()], ids=["inspect", "swap"])
def test_a_saved_report_is_written_as_what_its_run_writes(tmp_path: Path, made: Report) -> None:
    path = saved(tmp_path, made)
    result = without_torch("report", path, *FILES, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    report = read_report(path)
    assert (tmp_path / "again.json").read_bytes() == Path(path).read_bytes()
    assert (tmp_path / "r.html").read_text() == views.page(report)
    assert (tmp_path / "r.csv").read_text() == views.csv(report)
    assert (tmp_path / "r.md").read_text() == views.markdown(report)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert made.model.title in result.stdout


def test_without_a_file_to_write_the_tables_are_shown(tmp_path: Path) -> None:
    result = attnlens("report", saved(tmp_path, synthetic_report(2, 2)), "--table")
    assert result.returncode == 0
    assert "COMPLETE: 4 of 4 heads" in result.stdout


def test_pictures_go_into_a_folder(tmp_path: Path) -> None:
    path = saved(tmp_path, synthetic_report(2, 2, source="weights"))
    assert attnlens("report", path, "-q", "--figure", "all", cwd=tmp_path).returncode == 0
    assert (tmp_path / "all" / "weights.symmetry.png").exists()


def test_a_report_of_doctor_has_a_page_of_its_sites(tmp_path: Path) -> None:
    check = SiteCheck(
        **{"site": "h.0.attn", "part": "decoder", "heads": 8, "route": "interface", "weights_error": 2e-7},
        **{"tokens_error": 1e-7, "passed": True, "verdict": "agrees"},
    )
    told = {"command": "doctor", "kind": "doctor", "heads": [], "doctor": [check], "summary": Summary(verdict="agrees")}
    path = saved(tmp_path, synthetic_report(1, 8).model_copy(update=told))
    result = without_torch("report", path, "-q", "--html", "doctor.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "h.0.attn" in (tmp_path / "doctor.html").read_text()


def edited(folder: Path, **fields: object) -> Path:
    """The file of a report with other fields."""
    path = folder / "r.json"
    path.write_text(json.dumps(json.loads(synthetic_report(2, 2).to_json()) | fields))
    return path


def test_what_is_no_report_is_refused_in_two_lines(tmp_path: Path) -> None:
    refused(without_torch("report"), "REPORT")
    refused(without_torch("report", tmp_path / "none.json"), "none.json")
    refused(without_torch("report", edited(tmp_path, schema_version="3")), "schema_version")
    (tmp_path / "nan.json").write_text(synthetic_report(1, 1).to_json().replace('"value": ', '"value": NaN, "x": ', 1))
    refused(without_torch("report", tmp_path / "nan.json"), "not a report")


def test_an_output_replaces_no_input_and_a_report_without_heads_has_no_page(tmp_path: Path) -> None:
    path = saved(tmp_path, synthetic_report(1, 2))
    before = Path(path).read_bytes()
    refused(without_torch("report", path, "--json", path), "the report")
    assert Path(path).read_bytes() == before
    result = without_torch("report", edited(tmp_path, heads=[]), "-q", "--html", tmp_path / "page.html")
    refused(result, "no measures to draw")
    assert not (tmp_path / "page.html").exists()
