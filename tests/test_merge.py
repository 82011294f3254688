"""Tests that merged units are removed when their report is written, and stay wherever it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attnlens.unit_files import RUN, Folder
from hostile import refused
from program import attnlens as program
from program import refused as ended
from reports import timeless

import attnlens
from attnlens import run
from attnlens.errors import UsageError

FEW: dict[str, Any] = {"source": "weights", "analyzers": ["symmetry"]}
"""Four units."""


@pytest.fixture
def shards(tmp_path) -> tuple[Path, list[Path]]:
    """The folder of work of two shards, and their reports."""
    reports = [tmp_path / f"{index}.json" for index in (1, 2)]
    for index, path in enumerate(reports, 1):
        path.write_text(attnlens.inspect("demo", **FEW, shard=f"{index}/2", work=tmp_path / "work").to_json())
    return tmp_path / "work", reports


def units(folder: Path) -> int:
    """How many finished units lie in a folder of work."""
    return len(list(folder.glob("*/*.unit")))


def test_the_units_of_a_folder_are_removed_when_the_report_is_written(shards, tmp_path):
    folder, _ = shards
    done = program("merge", folder, "--json", tmp_path / "merged.json")
    assert done.returncode == 0, done.stderr
    assert not folder.exists()
    one = json.loads(attnlens.inspect("demo", **FEW, work=tmp_path / "other").to_json())
    assert timeless(json.loads((tmp_path / "merged.json").read_text())) == timeless(one)


def test_other_runs_and_files_of_the_folder_and_reports_stay(shards, tmp_path):
    folder, reports = shards
    place = next(folder.iterdir())
    attnlens.inspect("demo", **FEW | {"seed": 1}, shard="1/2", work=folder)
    (place / "notes.txt").touch()
    before = [path.read_bytes() for path in reports]
    assert program("merge", *reports, "--json", tmp_path / "merged.json").returncode == 0
    assert units(folder) == 6, "what is merged of reports leaves folders alone"
    done = program("merge", place, *reports, "--json", tmp_path / "merged.json")
    assert done.returncode == 0, done.stderr
    assert units(folder) == 2
    assert [path.name for path in place.iterdir()] == ["notes.txt"]
    assert [path.read_bytes() for path in reports] == before


def test_units_stay_where_no_report_is_written(shards, tmp_path):
    folder, reports = shards
    assert program("merge", folder, "--csv", tmp_path / "heads.csv").returncode == 0, "it was only shown"
    run.merge(str(folder), *map(str, reports))
    assert units(folder) == 4
    assert program("merge", folder, "--json", "-").returncode == 0
    assert not folder.exists(), "a control: stdout took it"


@pytest.mark.parametrize("option", ["--json", "--csv", "--html"])
def test_units_stay_where_any_output_could_not_be_written(option, shards, tmp_path):
    folder, _ = shards
    (tmp_path / "full").symlink_to("/dev/full")
    words = ["--json", tmp_path / "merged.json"] if option != "--json" else []
    ended_by = program("merge", folder, *words, option, tmp_path / "full")
    assert ended_by.returncode == 2, ended_by.stderr
    assert "No space left" in ended_by.stderr
    assert units(folder) == 4
    assert run.merge(str(folder)).coverage.complete


def test_a_merge_that_lacks_a_unit_removes_none(shards, tmp_path):
    folder, _ = shards
    next(folder.glob("*/*.unit")).unlink()
    ended(program("merge", folder, "--json", tmp_path / "merged.json"), "1 of 4 units are missing")
    assert units(folder) == 3


def test_of_two_merges_at_once_both_report_or_one_says_that_the_other_did(shards, monkeypatch):
    """The other one clears after this one has read as many units."""
    folder, _ = shards
    whole, other = run.merged(str(folder))
    honest, read = Folder.read, []
    there = {path: path.read_bytes() for path in folder.glob("*/*")}

    def interrupting(at: int):
        def reading(self: Folder, name: str) -> bytes | None:
            found = honest(self, name)
            if name != RUN:
                read.append(name)
            if len(read) == at:
                other()
            return found

        return reading

    for at in (1, 3):
        read.clear()
        monkeypatch.setattr(Folder, "read", interrupting(at))
        refused(UsageError, lambda: run.merge(str(folder)), "removed while they were read", "Take that report.")
        assert not folder.exists()
        for path, content in there.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    read.clear()
    monkeypatch.setattr(Folder, "read", interrupting(4))
    late, clear = run.merged(str(folder))
    assert timeless(json.loads(late.to_json())) == timeless(json.loads(whole.to_json()))
    assert not folder.exists()
    clear()
