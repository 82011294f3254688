"""Tests that an inspection cut into units gives one run's bytes: killed, sharded, merged, on clusters; and refusals."""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import clusters
import forkserver
import pytest
import tiny
import torch
from attnlens.engines import readers
from attnlens.engines.slurm_jobs import SlurmWorkers
from attnlens.run.inspect.packing import FORM, packed, unpacked
from attnlens.unit_files import RUN
from hostile import refused, saved
from program import attnlens as program
from program import environment_with
from program import refused as ended
from reports import bytes_of, timeless
from safetensors.torch import save
from sealing import flipped, seal, unit_of, unsealed

import attnlens
from attnlens import requests, run
from attnlens.errors import AttnlensError, ModelError, OutputError, UsageError
from attnlens.run import provenance as fingerprint
from attnlens.run.inspect import work
from attnlens.run.inspect.survey import Inspection
from attnlens.runs.progress import Interrupted

ASKED: dict[str, Any] = {"tokens": 16, "sequences": 12, "batch_size": 1, "analyzers": ["symmetry"]}
"""Four layers and twelve batches: sixteen units."""
WORDS = (*["--tokens", "16", "--sequences", "12", "--batch-size", "1", "--analyzer", "symmetry", "--no-progress"],)
"""The same for the program."""
UNITS = 16
FEW: dict[str, Any] = {"source": "weights", "analyzers": ["symmetry"]}
"""Four units that take a moment."""
THREE = ("1/3", "2/3", "3/3")


def told_at(unit: int) -> tuple[str, int]:
    """What progress tells when so many units are read: of the layers' weights first, then of the batches."""
    return ("weights", unit) if unit <= 4 else ("tokens", unit - 4)


def finished(folder: Path) -> list[Path]:
    """The files of finished units that lie in a folder of work."""
    return sorted(folder.glob("*/*.unit"))


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    """Runs without a folder of work of their own leave nothing to others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def whole(_own_cache, tmp_path_factory) -> str:
    """What a run that nothing disturbs reports."""
    return bytes_of(attnlens.inspect("demo", **ASKED, work=tmp_path_factory.mktemp("whole") / "work"))


@pytest.fixture(scope="module")
def few(_own_cache, tmp_path_factory) -> str:
    """The same of weights alone."""
    return bytes_of(attnlens.inspect("demo", **FEW, work=tmp_path_factory.mktemp("few") / "work"))


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The names of the units that this process reads, in their order."""
    honest, names = Inspection.read_unit, []

    def counted(self, unit):
        names.append(unit.name)
        return honest(self, unit)

    monkeypatch.setattr(Inspection, "read_unit", counted)
    return names


def started(*words: object) -> subprocess.Popen[str]:
    """The program, which its forkserver kills with what stands for it here."""
    command = [str(forkserver.commands() / "attnlens"), *map(str, words)]
    return subprocess.Popen(
        command, env=environment_with(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def awaited(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until it holds, or the process ends."""
    for _ in range(60_000):
        if condition() or process.poll() is not None:
            return
        time.sleep(0.001)
    raise AssertionError("It never came to pass.")


# --- killed ---------------------------------------------------------------------------------------------------------


def test_a_run_that_is_killed_at_any_moment_goes_on_to_the_same_bytes(whole, read, tmp_path):
    """Twenty times: before the first unit, between them and after the last; what was finished is not read again."""
    moments, left, killed = random.Random(0), Counter(), 0  # noqa: S311
    for time_of in range(20):
        folder = tmp_path / str(time_of)
        count, later = moments.randint(0, UNITS), moments.uniform(0, 0.05)
        process = started("inspect", "demo", *WORDS, "--work", folder)
        awaited(lambda count=count, folder=folder: len(finished(folder)) >= count, process)
        time.sleep(later + (0 if count else moments.uniform(0, 2)))
        process.kill()
        process.communicate()  # whose end comes with that of the run
        killed += process.returncode == -signal.SIGKILL
        kept = len(finished(folder))
        read.clear()
        if time_of % 4 == 0:
            done = program("inspect", "demo", *WORDS, "--work", folder, "--json", tmp_path / "report.json")
            assert done.returncode == 0, done.stderr
            assert bytes_of(tmp_path / "report.json") == whole
        else:
            assert bytes_of(attnlens.inspect("demo", **ASKED, work=folder)) == whole
            assert len(read) == UNITS - kept
            left[kept] += 1
        assert not folder.exists(), "what is kept is removed with the report"
    assert killed >= 17, "after the last unit a run may end by itself"
    assert sum(count for kept, count in left.items() if 0 < kept < UNITS) >= 8
    assert len(left) >= 5


def test_what_is_gone_on_from_is_what_lies_there(read, few, tmp_path):
    """A control: with numbers put in the place of a finished unit's the report is another one."""
    attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path)
    first = finished(tmp_path)[0]
    first_bytes = first.read_bytes()
    calls = [
        (name, (given[0], given[1], given[2], {key: 2 * value for key, value in given[3].items()}, *given[4:]))
        if name == "add_weights"
        else (name, given)
        for name, given in unpacked(unsealed(first_bytes), "")
    ]
    seal(first, packed(calls))
    read.clear()
    again = attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path)
    assert read == []
    assert bytes_of(again.model_copy(update={"part": None})) != few
    anew = attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path, resume=False)
    assert len(read) == 4
    assert bytes_of(anew.model_copy(update={"part": None})) == few
    assert first.read_bytes() == first_bytes, "the same unit has the same bytes"


def test_a_run_of_other_settings_models_and_versions_does_not_go_on_from_it(read, tmp_path, monkeypatch):
    attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path)
    read.clear()
    attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path)
    assert read == [], "a control"
    for other in ({"seed": 1}, {"dtype": "float64"}, {"heads": [0]}, {"analyzers": ["spectrum"]}):
        attnlens.inspect("demo", **FEW | other, shard="1/1", work=tmp_path)
        assert len(read) == 4, other
        read.clear()
    attnlens.inspect(str(saved(tmp_path / "other")), **FEW, shard="1/1", work=tmp_path)
    assert len(read) == 2
    read.clear()
    monkeypatch.setattr(attnlens, "__version__", "99.0")
    attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path)
    assert len(read) == 4


def test_a_run_of_other_code_of_the_same_version_does_not_go_on_from_it(read, tmp_path, monkeypatch):
    package = tmp_path / "attnlens"
    (package / "linalg").mkdir(parents=True)
    (package / "linalg" / "spectra.py").write_text("first")
    monkeypatch.setattr(fingerprint, "PACKAGE", package)
    for content, count in (("first", 4), ("first", 0), ("other", 4)):
        (package / "linalg" / "spectra.py").write_text(content)
        fingerprint.own_code.cache_clear()
        read.clear()
        attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path / "work")
        assert len(read) == count, content
    fingerprint.own_code.cache_clear()


def test_an_interruption_keeps_what_is_finished_and_the_next_run_goes_on(whole, read, tmp_path):
    process = started("inspect", "demo", *WORDS, "--work", tmp_path, "--json", tmp_path / "report.json")
    awaited(lambda: len(finished(tmp_path)) >= 3, process)
    process.send_signal(signal.SIGINT)
    told = process.communicate()[1]
    assert process.returncode == 130, told
    assert "Interrupted" in told
    kept = len(finished(tmp_path))
    assert 3 <= kept < UNITS
    partial = json.loads((tmp_path / "report.json").read_text())
    assert partial["coverage"]["skipped"][0]["reason"] == "the run was interrupted"
    assert bytes_of(attnlens.inspect("demo", **ASKED, work=tmp_path)) == whole
    assert len(read) == UNITS - kept


def test_an_interrupted_call_of_python_keeps_what_is_finished(whole, read, tmp_path):
    def interrupt(stage: str, done: int, _total: int) -> None:
        if (stage, done) == told_at(7):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        attnlens.inspect("demo", **ASKED, work=tmp_path, progress=interrupt)
    assert caught.value.report.settings.sequences == 3, "four layers, three batches"
    assert len(finished(tmp_path)) == 7
    read.clear()
    assert bytes_of(attnlens.inspect("demo", **ASKED, work=tmp_path)) == whole
    assert len(read) == UNITS - 7


# --- shards ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(_own_cache, tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    """The folder that three shards worked in, not in their order and one of them twice; their reports."""
    folder, reports = tmp_path_factory.mktemp("shards"), {}
    for shard in ("3/3", "1/3", "2/3", "1/3"):
        reports[shard] = folder / f"{shard[0]}.json"
        reports[shard].write_text(attnlens.inspect("demo", **ASKED, shard=shard, work=folder / "work").to_json())
    return folder / "work", reports


def test_shards_merged_from_their_folder_or_their_reports_in_any_order_are_one_run(whole, shards, tmp_path):
    folder, reports = shards
    assert len(finished(folder)) == UNITS
    assert bytes_of(run.merge(str(folder))) == whole
    for order in permutations(THREE):
        assert bytes_of(run.merge(*(str(reports[shard]) for shard in order))) == whole
    assert bytes_of(run.merge(str(folder), *map(str, reports.values()), str(reports["2/3"]))) == whole
    done = program("merge", *reports.values(), "--json", tmp_path / "merged.json", "--windows-csv", tmp_path / "m.csv")
    assert done.returncode == 0, done.stderr
    again = program("inspect", "demo", *WORDS, "--json", tmp_path / "run.json", "--windows-csv", tmp_path / "r.csv")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "m.csv").read_bytes() == (tmp_path / "r.csv").read_bytes()
    merged, alone = (json.loads((tmp_path / name).read_text()) for name in ("merged.json", "run.json"))
    assert timeless(merged | {"windows_file": None}) == timeless(alone | {"windows_file": None})
    other = bytes_of(attnlens.inspect("demo", **ASKED | {"seed": 1, "windows": "random"}))
    assert other != whole, "a control"


def test_a_shards_report_says_what_it_lacks_and_has_no_other_values(shards):
    reports = [json.loads(path.read_text()) for path in shards[1].values()]
    assert {len(report["part"]["units"]) for report in reports} == {5, 6}
    assert sum(len(report["part"]["units"]) for report in reports) == UNITS
    for report in reports:
        reasons = [skip["reason"] for skip in report["coverage"]["skipped"]]
        assert any(reason.endswith(readers.OTHERS) for reason in reasons)
        assert report["settings"]["sequences"] == 4


def test_a_folder_of_three_shards_is_read_by_a_plain_run(whole, shards, read, tmp_path):
    folder = tmp_path / "work"
    for shard in THREE:
        attnlens.inspect("demo", **ASKED, shard=shard, work=folder)
    assert len(read) == UNITS
    read.clear()
    assert bytes_of(attnlens.inspect("demo", **ASKED, work=folder)) == whole
    assert read == []


def test_shards_of_what_is_gathered_and_of_a_model_with_two_towers_are_one_run(tmp_path):
    some = {"tokens": 16, "sequences": 2}
    cases = {
        "gathered": ("demo", some | {"layers": [0, 1], "heads": [0, 3], "analyzers": ["selection", "ksvd"]}),
        "shown": ("demo", some | {"layers": [1], "heads": [2], "show": "attention"}),
    }
    for name, (model, asked) in cases.items():
        one = bytes_of(attnlens.inspect(model, **asked))
        for shard in ("2/2", "1/2"):
            attnlens.inspect(model, **asked, shard=shard, work=tmp_path / name)
        assert bytes_of(run.merge(str(tmp_path / name))) == one, name


def test_shards_of_files_that_are_read_in_parts_are_one_run(tmp_path):
    asked = FEW | {"from_files": True}
    one = attnlens.inspect("demo", **asked)
    for shard in ("2/2", "1/2"):
        attnlens.inspect("demo", **asked, shard=shard, work=tmp_path)
    merged = run.merge(str(tmp_path))
    assert bytes_of(merged) == bytes_of(one)
    assert merged.summary.identity_error is None


STEPS = {
    "SLURM_ARRAY_TASK_COUNT": "3",
    "SLURM_ARRAY_TASK_MIN": "0",
    "SLURM_ARRAY_TASK_MAX": "4",
    "SLURM_ARRAY_TASK_STEP": "2",
}
"""Of an array of the tasks 0, 2 and 4."""
ENVIRONMENTS = [
    ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "4"}, "2/3"),
    ({"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MIN": "0"}, "1/2"),
    ({"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "2"}, "2/2"),
    ({**STEPS, "SLURM_ARRAY_TASK_ID": "4"}, "3/3"),
    ({"RANK": "2", "WORLD_SIZE": "3"}, "3/3"),
    ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_ARRAY_TASK_ID": "1"}, "1/1"),
]


@pytest.mark.parametrize(("environment", "shard"), ENVIRONMENTS, ids=[shard for _, shard in ENVIRONMENTS])
def test_which_shard_a_process_is_stands_in_its_environment(environment, shard, monkeypatch, tmp_path):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    part = attnlens.inspect("demo", **FEW, shard="auto", work=tmp_path).part
    assert f"{part.index}/{part.count}" == shard


OUTSIDE = [
    {},
    {"RANK": "0"},
    {"RANK": "3", "WORLD_SIZE": "3"},
    {"RANK": "x", "WORLD_SIZE": "3"},
    {"RANK": "0", "WORLD_SIZE": "0"},
    {"SLURM_ARRAY_TASK_ID": "1"},
    {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "0"},
    {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "2"},
    {**STEPS, "SLURM_ARRAY_TASK_ID": "1"},
    {**STEPS, "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_MAX": "7", "SLURM_ARRAY_TASK_STEP": "1"},
]


@pytest.mark.parametrize("environment", OUTSIDE, ids=str)
def test_an_environment_that_names_no_shard_is_refused(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refused(UsageError, lambda: attnlens.inspect("demo", **FEW, shard="auto"), "shard", "I/N")


def test_the_program_reads_its_shard_from_torchruns_variables(tmp_path):
    for rank in (0, 1):
        asked = "--source", "weights", "--analyzer", "symmetry", "--no-progress", "--work", tmp_path, "--shard", "auto"
        done = program("inspect", "demo", *asked, RANK=str(rank), WORLD_SIZE="2")
        assert done.returncode == 0, done.stderr
        assert len(finished(tmp_path)) == 2 * (rank + 1)


def test_four_processes_give_one_processs_bytes_and_one_reads_what_they_wrote(whole, read, tmp_path):
    attnlens.inspect("demo", **ASKED, shard="1/2", work=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in finished(tmp_path)}
    assert len(before) == len(read) == UNITS // 2
    read.clear()
    with forkserver.workers():
        anew = attnlens.inspect("demo", **ASKED, shard="1/1", work=tmp_path, jobs=4, resume=False)
    assert bytes_of(anew.model_copy(update={"part": None})) == whole
    assert read == [], "others read"
    written = {path: path.stat().st_mtime_ns for path in finished(tmp_path)}
    assert len(written) == UNITS
    assert all(written[path] > then for path, then in before.items()), "and did not go on from what was there"
    one = attnlens.inspect("demo", **ASKED, shard="1/1", work=tmp_path, jobs=1)
    assert bytes_of(one.model_copy(update={"part": None})) == whole
    assert read == [], "nothing was left to read"
    assert {path: path.stat().st_mtime_ns for path in finished(tmp_path)} == written
    assert bytes_of(attnlens.inspect("demo", **ASKED, work=tmp_path, jobs=2)) == whole, "for which no process is begun"


# --- two runs at once -----------------------------------------------------------------------------------------------


def test_two_programs_that_work_in_one_folder_at_once_both_report_rightly(whole, tmp_path):
    reports = [tmp_path / f"{number}.json" for number in range(3)]
    running = [started("inspect", "demo", *WORDS, "--work", tmp_path / "work", "--json", path) for path in reports]
    for process in running:
        assert process.communicate() == (None, f"Wrote {reports[running.index(process)]}\n")
        assert process.returncode == 0
    assert [bytes_of(path) for path in reports] == [whole] * 3
    assert finished(tmp_path / "work") == []


def test_a_shard_whose_folder_another_run_clears_can_be_merged_still(few, tmp_path):
    """What was finished before is read again by who comes next; what is written after is told by its run.json."""

    def clear(_stage: str, done: int, _total: int) -> None:
        if done == 2:
            attnlens.inspect("demo", **FEW, work=tmp_path)

    attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path, progress=clear)
    assert len(finished(tmp_path)) == 2
    refused(UsageError, lambda: run.merge(str(tmp_path)), "2 of 4 units are missing")
    attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path)
    assert bytes_of(run.merge(str(tmp_path))) == few


@pytest.mark.parametrize("moment", [1, 5, UNITS - 1])
def test_a_run_that_ends_and_clears_in_the_middle_of_another_does_it_no_harm(moment, whole, tmp_path):
    other = []

    def another(stage: str, done: int, _total: int) -> None:
        if (stage, done) == told_at(moment) and not other:
            other.append(bytes_of(attnlens.inspect("demo", **ASKED, work=tmp_path / "work")))
            assert not (tmp_path / "work").exists()

    assert bytes_of(attnlens.inspect("demo", **ASKED, work=tmp_path / "work", progress=another)) == whole
    assert other == [whole]
    assert not (tmp_path / "work").exists()


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["5/4", "0/2", "x", "1", "1/", "/2", "-1/2", "1/0", "1.5/2", "1/2/3", "", " 1/2", 1])
def test_what_is_no_shard_is_refused(shard):
    refused(UsageError, lambda: attnlens.inspect("demo", **FEW, shard=shard), "shard", "I/N")


def test_the_program_refuses_with_two_lines_and_exit_code_2(shards, tmp_path):
    ended(program("inspect", "demo", "--shard", "5/4"), "no shard", "I/N")
    ended(program("merge", tmp_path), "no folder with finished units")
    ended(program("merge", shards[1]["1/3"], shards[1]["3/3"]), "units are missing", "of shard 2/3")
    (tmp_path / "file").touch()
    ended(program("inspect", "demo", *WORDS, "--work", tmp_path / "file"), "file", "folder")
    ray = "--engine", "ray", "--address", "nonsense"
    ended(program("inspect", "demo", *ray, *WORDS), "No Ray cluster is at nonsense")
    ended(program("inspect", "demo", "--engine", "dask"), "dask")


def test_merge_names_the_units_and_the_shards_that_are_missing(shards, tmp_path):
    _, reports = shards
    refused(
        UsageError,
        lambda: run.merge(str(reports["1/3"]), str(reports["2/3"])),
        f"5 of {UNITS} units are missing: weights of layer 2 and 4 more, of shard 3/3.",
    )
    refused(UsageError, lambda: run.merge(str(reports["2/3"])), "of shard 1/3, 3/3.")
    attnlens.inspect("demo", **FEW, shard="1/2", work=tmp_path)
    found = refused(UsageError, lambda: run.merge(str(tmp_path)), "2 of 4 units are missing: weights of layer 1")
    assert "of shard" not in found.problem, "a folder does not say who was to read them"


def test_merge_refuses_what_holds_no_units(tmp_path, shards):
    (tmp_path / "empty").mkdir()
    (tmp_path / "whole.json").write_text(attnlens.inspect("demo", **FEW).to_json())
    (tmp_path / "none.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    (tmp_path / "file").touch()
    refused(UsageError, run.merge, "No shard is named.")
    refused(UsageError, lambda: run.merge(str(tmp_path / "empty")), "is no folder with finished units")
    refused(UsageError, lambda: run.merge(str(tmp_path / "gone")), "is no folder with finished units")
    refused(UsageError, lambda: run.merge(str(tmp_path / "whole.json")), "whole.json is no report of a shard")
    for name in ("other", "file", "none.json", "gone.json"):
        with pytest.raises(AttnlensError) as caught:
            run.merge(str(tmp_path / name))
        assert name in caught.value.problem
    assert run.merge(str(shards[0])).coverage.complete, "a control"


def test_merge_names_the_field_in_which_runs_differ(shards, tmp_path, monkeypatch):
    first = str(shards[1]["1/3"])

    def shard_of(model: str, **asked: Any) -> str:
        path = tmp_path / f"{len(list(tmp_path.glob('*.json')))}.json"
        path.write_text(attnlens.inspect(model, **ASKED | asked, shard="2/3", work=tmp_path / "work").to_json())
        return str(path)

    other = str(saved(tmp_path / "gpt2"))
    refused(UsageError, lambda: run.merge(first, shard_of("demo", tokens=8)), "settings.texts.0.")
    refused(UsageError, lambda: run.merge(first, shard_of("demo", seed=3)), "settings.seed is 0 in one and 3")
    refused(UsageError, lambda: run.merge(first, shard_of(other)), "model.id is demo in one")
    refused(UsageError, lambda: run.merge(str(tmp_path / "work")), "are of different runs", "of one run alone")
    monkeypatch.setattr(attnlens, "__version__", "99.0")
    refused(
        UsageError, lambda: run.merge(first, shard_of("demo")), "versions.attnlens is", "in one and 99.0 in the other"
    )
    assert run.merge(str(shards[0])).coverage.complete, "a control: a merge needs no version of this process"


def _frame(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A shard's report whose frame is another."""
    report = json.loads(path.read_text())
    frame = json.loads(report["part"]["frame"])
    change(frame)
    report["part"]["frame"] = json.dumps(frame)
    return path.with_name("changed.json") if path.with_name("changed.json").write_text(json.dumps(report)) else path


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a field of another version": lambda frame: frame.update(more=1),
    "no sites": lambda frame: frame.pop("sites"),
    "a site that is none": lambda frame: frame.update(sites=[{"path": "x"}]),
    "fewer groups than sites": lambda frame: frame["key_heads"].pop(),
    "more sequences than texts": lambda frame: frame.update(batches=[10**12]),
    "a batch of fewer than none": lambda frame: frame.update(batches=[13, -1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_merge_refuses_a_frame_that_can_not_be(lie, shards):
    path = _frame(shards[1]["1/3"], LIES[lie])
    refused(UsageError, lambda: run.merge(str(path)), "changed.json", "damaged")
    same = _frame(shards[1]["1/3"], lambda frame: None)
    refused(UsageError, lambda: run.merge(str(same)), "units are missing")  # a control


def test_a_unit_that_is_cut_off_is_named(tmp_path):
    attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path)
    path = finished(tmp_path)[2]
    for content in (path.read_bytes()[:-1], path.read_bytes()[:100], b""):
        path.write_bytes(content)
        refused(OutputError, lambda: attnlens.inspect("demo", **FEW, work=tmp_path), path.name, "--no-resume")
        refused(OutputError, lambda: run.merge(str(tmp_path)), path.name, "weights of layer", "--no-resume")
    path.unlink()
    assert attnlens.inspect("demo", **FEW, work=tmp_path).coverage.complete


def test_a_unit_with_one_other_byte_is_refused(unit):
    """Wherever the byte stands; what the file held again is read as before."""
    path, content = unit
    asked = FEW | {"layers": [0], "work": path.parent.parent}
    places = random.Random(0).sample(range(len(content)), 40)  # noqa: S311
    for place in (0, *places, len(content) - 1):
        path.write_bytes(flipped(content, place))
        for call in (
            lambda: attnlens.inspect("demo", **asked, shard="1/1"),
            lambda: run.merge(str(path.parent.parent)),
        ):
            refused(OutputError, call, path.name, "weights of layer 0", "is damaged")
    path.write_bytes(content)
    assert attnlens.inspect("demo", **asked, shard="1/1").coverage.complete, "a control"


def test_another_units_file_is_refused(few, tmp_path):
    """One of the same run, and the same unit's of another run, whose numbers differ."""
    attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path / "own")
    attnlens.inspect("demo", **FEW | {"seed": 1}, shard="1/1", work=tmp_path / "other")
    files = {unit_of(path): path for path in finished(tmp_path / "own")}
    others = {unit_of(path): path for path in finished(tmp_path / "other")}
    path = files["weights of layer 1"]
    content = path.read_bytes()
    for copied in (files["weights of layer 0"], others["weights of layer 1"]):
        path.write_bytes(copied.read_bytes())
        for call in (
            lambda: attnlens.inspect("demo", **FEW, work=tmp_path / "own"),
            lambda: run.merge(str(tmp_path / "own")),
        ):
            refused(OutputError, call, path.name, "weights of layer 1", "another unit's", "--no-resume")
    path.write_bytes(content)
    assert bytes_of(run.merge(str(tmp_path / "own"))) == few, "a control"


def test_a_unit_in_a_report_that_is_damaged_or_anothers_is_named(tmp_path, few):
    whole = json.loads(attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path / "work").to_json())
    name, place = "weights of layer 2", tmp_path / "report.json"
    units = whole["part"]["units"]
    content = base64.b64decode(units[name])
    for wrong in (base64.b64encode(flipped(content, len(content) // 2)).decode(), units["weights of layer 3"]):
        place.write_text(json.dumps(whole | {"part": whole["part"] | {"units": units | {name: wrong}}}))
        refused(OutputError, lambda: run.merge(str(place)), "report.json", name, "run that shard again")
    place.write_text(json.dumps(whole))
    assert bytes_of(run.merge(str(place))) == few, "a control"


def test_a_unit_in_a_report_that_is_cut_off_is_named(tmp_path):
    report = json.loads(attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path).to_json())
    units = report["part"]["units"]
    name = "weights of layer 2"
    assert name in units
    for content, kind, words in (
        ("?", UsageError, "no base64"),
        (base64.b64encode(base64.b64decode(units[name])[:-1]).decode(), OutputError, name),
    ):
        units[name] = content
        (tmp_path / "cut.json").write_text(json.dumps(report))
        refused(kind, lambda: run.merge(str(tmp_path / "cut.json")), "cut.json", words)


class Payload:
    """What touches a file where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


def told(text: str) -> bytes:
    """A unit's file that says this."""
    return save({"0": torch.ones(2)}, {FORM: text})


HOSTILE: dict[str, Callable[[list[Any]], bytes]] = {
    "another form": lambda _: save({"0": torch.ones(2)}, {"attnlens unit 99": "[]"}),
    "no metadata": lambda _: save({"0": torch.ones(2)}),
    "no JSON": lambda _: told("{"),
    "no list": lambda _: told("{}"),
    "a method that is none of a sink": lambda _: told('[["__init__", []]]'),
    "a method that notes nothing down": lambda _: told('[["read_tokens", [1, 2, 3, 4, 5]]]'),
    "no method": lambda _: told("[[3, []]]"),
    "a record of another kind": lambda _: told('[["skip", [{"record": "Popen", "of": {"args": "id"}}, "", [], null]]]'),
    "a record that is none": lambda _: told('[["add_shown", [[{"record": "Selection", "of": {}}], []]]]'),
    "what is not shown": lambda _: told('[["add_shown", [[1], [2]]]]'),
    "a site that is none": lambda _: told('[["add_layer", [{"plain": "Site", "of": {"a": 1}}, 1.0]]]'),
    "an analyzer that is none": lambda _: told('[["skip", [{"analyzer": "a", "source": "b"}, "", [], null]]]'),
    "a tensor that is none": lambda _: told('[["add_losses", [{"tensor": "7"}, {"tensor": "0"}, 3]]]'),
    "an empty object": lambda _: told('[["skip", [{}, "", [], null]]]'),
    "an unknown object": lambda _: told('[["skip", [{"eval": "1"}, "", [], null]]]'),
    "too few": lambda _: told('[["skip", []]]'),
    "too many": lambda _: told(f'[["skip", {[0] * 100_000}]]'),
    "other types": lambda _: told('[["add_layer", ["x", "y"]]]'),
    "nested": lambda _: told("[" * 100_000 + "]" * 100_000),
    "nested in a call": lambda _: told('[["skip", [' + "[" * 900 + "]" * 900 + "]]]"),
    "large": lambda _: told("[" + '["skip", ["a", "b", [], 3]],' * 100_000 + "0]"),
    "numbers of fewer heads": lambda calls: packed([_with(call, 3, lambda value: value[:1]) for call in calls]),
}


def _with(call: Any, place: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A call of weights' readings with others in their place."""
    name, given = call
    if name != "add_weights":
        return call
    readings = {key: change(value) for key, value in given[place].items()}
    return name, (*given[:place], readings, *given[place + 1 :])


@pytest.fixture(scope="module")
def unit(_own_cache, tmp_path_factory) -> tuple[Path, bytes]:
    """The file of a unit, and what it holds."""
    folder = tmp_path_factory.mktemp("unit")
    attnlens.inspect("demo", **FEW | {"layers": [0]}, shard="1/1", work=folder)
    [path] = finished(folder)
    return path, path.read_bytes()


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_unit_is_refused(fault, unit):
    path, content = unit
    seal(path, HOSTILE[fault](unpacked(unsealed(content), "")))
    asked = FEW | {"layers": [0], "work": path.parent.parent}
    for call in (
        lambda: attnlens.inspect("demo", **asked, shard="1/1"),
        lambda: run.merge(str(path.parent.parent)),
    ):
        refused(OutputError, call, path.name, "or not of this version", "--no-resume")
    path.write_bytes(content)
    assert attnlens.inspect("demo", **asked, shard="1/1").coverage.complete, "a control"


def test_nothing_in_a_unit_is_run(unit, tmp_path):
    path, content = unit
    for payload in (pickle.dumps(Payload(tmp_path / "trace")), _torch_file(Payload(tmp_path / "trace"), tmp_path)):
        seal(path, payload)
        asked = FEW | {"layers": [0], "work": path.parent.parent}
        refused(OutputError, lambda asked=asked: attnlens.inspect("demo", **asked, shard="1/1"), path.name)
        assert not (tmp_path / "trace").exists()
    path.write_bytes(content)
    pickle.loads(pickle.dumps(Payload(tmp_path / "trace")))  # noqa: S301  # a control
    assert (tmp_path / "trace").exists()


def _torch_file(payload: Payload, place: Path) -> bytes:
    torch.save(payload, place / "payload.pt")
    return (place / "payload.pt").read_bytes()


def test_the_programs_own_faults_are_not_put_on_a_file(unit, monkeypatch, tmp_path):
    """Only what was read from a file is the file's fault."""
    honest = Inspection.read_unit
    monkeypatch.setattr(
        Inspection,
        "read_unit",
        lambda self, unit: [_with(call, 3, lambda value: value[:1]) for call in honest(self, unit)],
    )
    with pytest.raises(IndexError):
        attnlens.inspect("demo", **FEW, work=tmp_path)


# --- where work can't be kept ---------------------------------------------------------------------------------------


def test_work_in_a_place_that_can_not_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for place in ("file", "file/inside"):
        refused(OutputError, lambda place=place: attnlens.inspect("demo", **FEW, work=tmp_path / place), "file")
    assert (tmp_path / "file").read_bytes() == b""
    assert attnlens.inspect("demo", **FEW, work=tmp_path / "folder").coverage.complete, "a control"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_work_in_a_folder_without_rights_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    refused(OutputError, lambda: attnlens.inspect("demo", **FEW, work=tmp_path / "work"), "Permission denied")


def test_a_disk_that_is_full_is_said_and_finished_units_stay(few, read, tmp_path):
    attnlens.inspect("demo", **FEW, shard="1/1", work=tmp_path)
    place = finished(tmp_path)[0].parent
    frame = work.Frame.model_validate_json((place / RUN).read_bytes())
    files = work.UnitFiles(work.store_of(str(tmp_path)), frame.key, work.SUFFIX)
    last = place / files.name(frame.units[-1].name)
    last.unlink()
    last.symlink_to("/dev/full")
    refused(
        OutputError, lambda: attnlens.inspect("demo", **FEW, work=tmp_path, resume=False), "No space left", last.name
    )
    last.unlink()
    assert len(finished(tmp_path)) == 3
    read.clear()
    assert bytes_of(attnlens.inspect("demo", **FEW, work=tmp_path)) == few
    assert len(read) == 1


def test_a_users_cache_that_can_not_be_written_costs_no_more_than_what_it_would_keep(few, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert bytes_of(attnlens.inspect("demo", **FEW)) == few


def test_without_a_folder_units_are_kept_in_the_users_cache(few, read, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    attnlens.inspect("demo", **FEW, shard="1/2")
    assert len(finished(tmp_path / "attnlens" / "work")) == 2
    read.clear()
    assert bytes_of(attnlens.inspect("demo", **FEW)) == few
    assert len(read) == 2
    assert not list(tmp_path.rglob("*.*"))


def test_a_model_in_memory_has_no_work_elsewhere(demo, tmp_path):
    for asked in ({"work": tmp_path}, {"shard": "1/2"}, {"jobs": 2}, {"resume": False}, {"engine": "ray"}):
        [name] = asked
        refused(UsageError, lambda asked=asked: attnlens.inspect(demo, **FEW, **asked), "in memory", name)
    assert attnlens.inspect(demo, **FEW).coverage.complete


def test_what_the_work_lacks_is_said_before_the_model_is_read(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(attnlens.models, "load", lambda *_, **__: pytest.fail("it was loaded"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for asked, said in (
        ({"work": tmp_path / "file"}, "can't be written: Not a directory"),
        ({"work": tmp_path / "new" / "work", "engine": "slurm"}, "no sbatch"),
        ({"engine": "ray", "address": "127.0.0.1:9"}, "No Ray cluster is at 127.0.0.1:9"),
        ({"from_files": True, "source": "both"}, "can't run on a text"),
    ):
        kind = OutputError if "written" in said else UsageError
        refused(kind, lambda asked=asked: attnlens.inspect("demo", **FEW | asked), said)
    assert not (tmp_path / "new").exists(), "and nothing is left of it"


def test_a_strict_shard_is_judged_by_its_own_units(tmp_path):
    words = ("inspect", "demo", "--source", "weights", "--analyzer", "symmetry", "-q", "--no-progress", "--strict")
    assert program(*words, "--shard", "1/2", "--work", tmp_path / "work", "--json", tmp_path / "r.json").returncode == 0


@pytest.mark.parametrize(("name", "package", "said"), [("ray", "ray", "Ray"), ("slurm", "submitit", "submitit")])
def test_an_engine_that_is_not_installed_is_refused(name, package, said, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    refused(UsageError, lambda: attnlens.inspect("demo", **FEW, engine=name, work=tmp_path), f"{said} is not installed")


def test_an_engine_with_what_it_does_not_take_is_refused(monkeypatch, tmp_path):
    refused(
        UsageError,
        lambda: attnlens.inspect("demo", **FEW, jobs=2, address="127.0.0.1:1", work=tmp_path),
        "--address is that of a Ray cluster",
    )
    refused(UsageError, lambda: attnlens.inspect("demo", **FEW, jobs=2, work="memory://units"), "don't see", "--work")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(UsageError, lambda: attnlens.inspect("demo", **FEW, engine="slurm", work=tmp_path), "no sbatch")


# --- addresses ------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory():
    """An address in the memory of this process."""
    import fsspec

    system = fsspec.filesystem("memory")
    yield "memory://units/work", system
    system.rm("/units", recursive=True) if system.exists("/units") else None


def test_units_are_kept_at_an_address_of_fsspec(few, read, memory):
    address, system = memory
    for shard in ("2/2", "1/2"):
        attnlens.inspect("demo", **FEW, shard=shard, work=address)
    assert len(system.glob("/units/work/*/*.unit")) == 4
    assert bytes_of(run.merge(address)) == few
    read.clear()
    assert bytes_of(attnlens.inspect("demo", **FEW, work=address)) == few
    assert read == []
    assert system.glob("/units/work/*/*.unit") == []


def test_a_unit_that_is_cut_off_at_an_address_is_named_and_addresses_that_nobody_knows_are_refused(memory):
    address, system = memory
    attnlens.inspect("demo", **FEW, shard="1/1", work=address)
    path = system.glob("/units/work/*/*.unit")[0]
    system.pipe_file(path, system.cat_file(path)[:-1])
    refused(OutputError, lambda: attnlens.inspect("demo", **FEW, work=address), path.rpartition("/")[2])
    refused(OutputError, lambda: attnlens.inspect("demo", **FEW, work="nonsense://a"), "nonsense", "--work")
    refused(OutputError, lambda: run.merge("nonsense://a"), "nonsense")


# --- clusters -------------------------------------------------------------------------------------------------------


def test_jobs_of_slurm_give_the_same_bytes_and_leave_nothing(few, read, tmp_path, monkeypatch):
    states = clusters.slurm(tmp_path, monkeypatch)
    attnlens.inspect("demo", **FEW, shard="1/2", work=tmp_path / "work")
    read.clear()
    with forkserver.workers():
        report = attnlens.inspect("demo", **FEW, engine="slurm", jobs=2, work=tmp_path / "work")
    assert bytes_of(report) == few
    assert read == []
    assert not (tmp_path / "work").exists()
    [script] = states.glob("*.sh")
    assert "#SBATCH --array=0-1%2" in script.read_text().splitlines()
    assert len(list(states.glob("*.state"))) == 2


def test_submitits_own_processes_give_the_same_bytes(read, tmp_path, monkeypatch):
    asked = FEW | {"layers": [1]}
    here = bytes_of(attnlens.inspect("demo", **asked))
    states = clusters.slurm(tmp_path, monkeypatch)
    monkeypatch.setitem(SlurmWorkers.__init__.__kwdefaults__, "cluster", "local")
    read.clear()
    assert bytes_of(attnlens.inspect("demo", **asked, engine="slurm", work=tmp_path / "work")) == here
    assert read == []
    assert not (tmp_path / "work").exists()
    assert list(states.iterdir()) == [], "sbatch was not asked"


def test_a_worker_that_finds_another_model_is_refused_by_its_name(tmp_path):
    """A file that was changed between the run and its worker."""
    place = saved(tmp_path / "gpt2")
    asked = requests.checked(requests.InspectRequest, FEW | {"work": tmp_path / "work"})
    attnlens.inspect(place, **FEW, shard="1/2", work=tmp_path / "work")
    [name] = (path.name for path in (tmp_path / "work").iterdir())
    job = work.Job(place, asked, name, str(tmp_path / "work"))
    work.read_elsewhere(job, "weights of layer 1")
    assert len(finished(tmp_path / "work")) == 2, "a control"
    work._opened.clear()
    tiny.gpt2().save_pretrained(place)
    refused(ModelError, lambda: work.read_elsewhere(job, "weights of layer 1"), "model.files")
    work._opened.clear()


def test_a_damaged_description_of_a_run_is_written_again(tmp_path):
    attnlens.inspect("demo", **FEW, shard="1/2", work=tmp_path)
    [described] = tmp_path.glob(f"*/{RUN}")
    whole = described.read_bytes()
    described.write_text("garbage")
    refused(UsageError, lambda: run.merge(str(tmp_path)), "damaged")
    attnlens.inspect("demo", **FEW, shard="2/2", work=tmp_path)
    assert described.read_bytes() == whole
    assert run.merge(str(tmp_path)).coverage.complete
