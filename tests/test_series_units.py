"""Tests that a series of checkpoints is the same whoever reads them: kept, sharded, merged, by other processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import clusters
import forkserver
import pytest
from attnlens.engines import readers
from hostile import refused
from program import attnlens as program
from program import refused as ended
from reports import bytes_of
from sealing import flipped, seal, unsealed

import attnlens
from attnlens import run
from attnlens.errors import ModelError, OutputError, UsageError
from attnlens.run.inspect.survey import Inspection
from attnlens.run.training import kept, series
from attnlens.run.training.series import Series

CHECKPOINTS = Path(attnlens.__file__).parent / "demo" / "checkpoints"
ASKED: dict[str, Any] = {"analyzers": ["symmetry"], "tokens": 16, "sequences": 4, "layers": [0, 1]}
WORDS = "--analyzer", "symmetry", "--tokens", "16", "--sequences", "4", "--layers", "0,1", "--no-progress"


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> list[str]:
    """Three checkpoints of this machine, not in the order of their steps."""
    folder = tmp_path_factory.mktemp("series")
    found = sorted(CHECKPOINTS.iterdir())[:3]
    copies = [shutil.copytree(place, folder / place.name) for place in (found[1], found[0], found[2])]
    for copy in copies:
        for file in CHECKPOINTS.parent.glob("tokenizer*"):
            shutil.copy(file, copy)
    return [*map(str, copies)]


@pytest.fixture(scope="module")
def whole(places, tmp_path_factory) -> str:
    """What a run that nothing disturbs reports."""
    return bytes_of(attnlens.converge_checkpoints(places, **ASKED, work=tmp_path_factory.mktemp("whole") / "work"))


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The checkpoints that this process reads."""
    honest, names = Series._read, []

    def noted(self, checkpoint, tokenizer):
        names.append(checkpoint.name)
        return honest(self, checkpoint, tokenizer)

    monkeypatch.setattr(Series, "_read", noted)
    return names


def units(folder: Path) -> list[Path]:
    """The files of finished checkpoints."""
    return sorted(folder.glob("*/*.checkpoint"))


def test_a_series_in_shards_by_the_program_merges_to_one_runs_bytes(places, whole, tmp_path):
    folder = tmp_path / "work"
    for index in (2, 1):
        shard = "--shard", f"{index}/2", "--work", folder, "--json", tmp_path / f"{index}.json"
        done = program("converge", *places, "--checkpoints", *WORDS, *shard)
        assert done.returncode == 0, done.stderr
        assert "another shard" in done.stdout
    assert len(units(folder)) == 3
    assert [path.name for place in folder.iterdir() for path in place.iterdir() if path.is_dir()] == []
    for parts in ((tmp_path / "1.json", tmp_path / "2.json"), (tmp_path / "2.json", tmp_path / "1.json"), (folder,)):
        merged = program("merge", *parts, "--json", tmp_path / "merged.json")
        assert merged.returncode == 0, merged.stderr
        assert bytes_of(tmp_path / "merged.json") == whole
    assert not folder.exists()
    other = attnlens.converge_checkpoints(places, **ASKED | {"seed": 1, "windows": "random"})
    assert bytes_of(other) != whole, "a control"


def test_two_processes_read_what_one_reads(places, whole, tmp_path):
    done = program(
        "converge",
        *places,
        "--checkpoints",
        *WORDS,
        "--jobs",
        "2",
        "--work",
        tmp_path / "work",
        "--json",
        tmp_path / "r.json",
    )
    assert done.returncode == 0, done.stderr
    assert bytes_of(tmp_path / "r.json") == whole
    assert not (tmp_path / "work").exists()


def test_other_processes_read_what_is_not_there(places, whole, read, tmp_path):
    attnlens.converge_checkpoints(places, **ASKED, shard="1/2", work=tmp_path)
    read.clear()
    with forkserver.workers():
        assert bytes_of(attnlens.converge_checkpoints(places, **ASKED, jobs=2, work=tmp_path)) == whole
    assert read == []


def test_jobs_of_slurm_read_checkpoints(places, whole, read, tmp_path, monkeypatch):
    states = clusters.slurm(tmp_path, monkeypatch)
    with forkserver.workers():
        found = attnlens.converge_checkpoints(places, **ASKED, engine="slurm", jobs=2, work=tmp_path / "work")
    assert bytes_of(found) == whole
    assert read == []
    assert len(list(states.glob("*.state"))) == 3


def test_a_series_goes_on_from_the_checkpoints_that_are_finished(places, whole, read, tmp_path):
    def stop(stage, done, _total):
        if (stage, done) == ("checkpoints", 2):
            raise KeyboardInterrupt

    with pytest.raises(run.Interrupted):
        attnlens.converge_checkpoints(places, **ASKED, work=tmp_path, progress=stop)
    assert len(units(tmp_path)) == 2
    read.clear()
    assert bytes_of(attnlens.converge_checkpoints(places, **ASKED, work=tmp_path)) == whole
    assert read == ["step-00100"]
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []
    attnlens.converge_checkpoints(places, **ASKED, work=tmp_path)
    assert len(read) == 4, "a control: nothing was left to go on from"


@pytest.mark.parametrize("change", ["weights", "config", "tokenizer", "options", "text"])
def test_no_checkpoint_of_other_files_words_or_texts_is_taken_up(change, places, read, tmp_path):
    copies = [shutil.copytree(place, tmp_path / Path(place).name) for place in places]
    asked = ASKED | {"work": tmp_path / "work"}
    if change == "text":
        (tmp_path / "t.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
        asked["text"] = [str(tmp_path / "t.txt")]
    attnlens.converge_checkpoints(copies, **asked, shard="1/1")
    read.clear()
    attnlens.converge_checkpoints(copies, **asked, shard="1/1")
    assert read == [], "a control"
    if change == "weights":
        shutil.copy(copies[1] / "model.safetensors", copies[0] / "model.safetensors")
    elif change == "text":
        (tmp_path / "t.txt").write_text("pack my box with five dozen liquor jugs, said he. " * 40)
    elif change == "options":
        asked["sequences"] = 3
    else:
        path = next(iter(sorted(copies[0].glob(f"{change}*.json"))))
        path.write_text(path.read_text() + " ")
    attnlens.converge_checkpoints(copies, **asked, shard="1/1")
    assert len(read) == 3


def test_a_checkpoint_that_fails_is_missing_with_its_reason_and_is_read_again_by_the_next_run(
    places, whole, read, tmp_path, monkeypatch
):
    counting, fails = Series._read, [True]

    def failing(self, checkpoint, tokenizer):
        if checkpoint.step == 30 and fails:
            raise ZeroDivisionError("odd")
        return counting(self, checkpoint, tokenizer)

    monkeypatch.setattr(Series, "_read", failing)
    report = attnlens.converge_checkpoints(places, **ASKED, work=tmp_path)
    assert report.experiments[0].settings["checkpoints"] == ["step-00000", "step-00100"]
    assert [(one.site, one.reason) for one in report.coverage.skipped] == [("step-00030", "ZeroDivisionError: odd")]
    assert not report.coverage.complete
    assert len(units(tmp_path)) == 2
    fails.clear()
    read.clear()
    assert bytes_of(attnlens.converge_checkpoints(places, **ASKED, work=tmp_path)) == whole
    assert read == ["step-00030"]


def test_a_checkpoint_of_which_a_unit_failed_is_read_again_and_its_other_units_are_not(
    places, whole, tmp_path, monkeypatch
):
    honest, names, fails = Inspection._read, [], [True]

    def failing(self, unit, sink):
        names.append(unit.name)
        if "step-00030" in str(self.loaded.folder) and unit.name == "weights of layer 1" and fails:
            raise ZeroDivisionError("odd")
        honest(self, unit, sink)

    monkeypatch.setattr(Inspection, "_read", failing)
    report = attnlens.converge_checkpoints(places, **ASKED, work=tmp_path)
    assert "in step-00030, weights of layer 1: ZeroDivisionError: odd" in report.coverage.sentence
    fails.clear()
    names.clear()
    assert bytes_of(attnlens.converge_checkpoints(places, **ASKED, work=tmp_path)) == whole
    assert names == ["weights of layer 1"]


def test_an_error_of_ours_ends_the_series(places, tmp_path, monkeypatch):
    def failing(_self, _checkpoint, _tokenizer):
        raise ModelError("a", "b")

    monkeypatch.setattr(Series, "_read", failing)
    refused(ModelError, lambda: attnlens.converge_checkpoints(places, **ASKED, work=tmp_path), "a")


def test_a_worker_that_finds_another_checkpoint_refuses(places, tmp_path):
    copies = [str(shutil.copytree(place, tmp_path / Path(place).name)) for place in places]
    one = series.prepared(copies, (), None, lambda *_: None, ASKED | {"work": tmp_path / "work"})
    words, digests, key = one.words, one.frame.digests, one.frame.key
    series.read_elsewhere(words, digests, key, one.frame.units[0].name)
    assert len(units(tmp_path / "work")) == 1, "a control"
    shutil.copy(Path(copies[0]) / "model.safetensors", Path(copies[2]) / "model.safetensors")
    name = one.frame.units[2].name
    refused(ModelError, lambda: series.read_elsewhere(words, digests, key, name), "A worker finds other files")
    series._opened.clear()


def test_a_file_that_is_no_reading_is_refused(places, tmp_path):
    attnlens.converge_checkpoints(places, **ASKED, shard="1/1", work=tmp_path)
    path = units(tmp_path)[0]
    whole_content = path.read_bytes()
    damaged = [whole_content[:-1], b"", flipped(whole_content, 100), units(tmp_path)[1].read_bytes()]
    for content in (*damaged, b"{}", b"[" * 100_000, b"\xff"):
        if content in damaged:
            path.write_bytes(content)
        else:
            seal(path, content, kept.SeriesFrame)
        for call in (
            lambda: attnlens.converge_checkpoints(places, **ASKED, work=tmp_path),
            lambda: run.merge(str(tmp_path)),
        ):
            refused(OutputError, call, path.name, "--no-resume")
    path.write_bytes(whole_content)
    assert run.merge(str(tmp_path)).experiments, "a control"
    assert kept.unpacked(unsealed(whole_content), "").name.startswith("step-")


def test_what_makes_no_sense_is_refused(places, tmp_path):
    refused(UsageError, lambda: attnlens.converge_checkpoints(places, **ASKED, shard="4/4", work=tmp_path), "shard 4/4")
    refused(UsageError, lambda: attnlens.converge_checkpoints(places, **ASKED, address="x:1"), "--address")
    attnlens.converge_checkpoints(places, **ASKED, shard="1/2", work=tmp_path / "a")
    refused(UsageError, lambda: run.merge(str(tmp_path / "a")), "1 of 3 units are missing: step-00030")
    attnlens.converge_checkpoints(places, **ASKED | {"seed": 2}, shard="2/2", work=tmp_path / "a")
    refused(UsageError, lambda: run.merge(str(tmp_path / "a")), "of different runs: options.seed is")
    attnlens.inspect("demo", source="weights", analyzers=["symmetry"], shard="1/2", work=tmp_path / "b")
    refused(UsageError, lambda: run.merge(str(tmp_path / "a"), str(tmp_path / "b")), "different runs")
    ended(program("converge", "--shard", "1/2"), "--shard belongs to checkpoints")
    ended(program("converge", "--head", "0.1", "--jobs", "2"), "--jobs belongs to checkpoints")


def test_a_series_of_which_no_checkpoint_could_be_read_says_why():
    frame = kept.SeriesFrame(versions={}, options={}, content="", checkpoints=["one", "two"], digests=["1", "2"])
    reasons = {frame.units[0]: readers.OTHERS, frame.units[1]: "OSError: no such luck"}
    refused(ModelError, lambda: kept.series_report(frame, {}, {}, reasons), "No checkpoint could be read: OSError")
