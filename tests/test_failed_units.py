"""Tests that a unit that fails is tried once more, and then missing with its reason, whoever reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from attnlens.engines import tried
from program import attnlens as program
from program import refused as ended
from reports import timeless

import attnlens
from attnlens.errors import AttnlensError, ModelError, OutputError
from attnlens.records import Report
from attnlens.run.inspect.survey import Inspection
from attnlens.runs.progress import Interrupted

FEW: dict[str, Any] = {"source": "weights", "analyzers": ["symmetry"]}
"""Four units."""
PLUGIN = '''
import os
from pathlib import Path
import torch
from attnlens import MeasureInfo, analyzer
from attnlens.errors import ModelError

@analyzer("patchy", "weights", [MeasureInfo("weights.patchy", "One.", "1")], by_default=False)
def patchy(query_key):
    """Does it fail in the layers that PATCHY names?"""
    if query_key.site is not None and str(query_key.site.layer) in os.environ["PATCHY"].split(","):
        with Path(os.environ["PATCHY_LOG"]).open("a") as file:
            file.write(f"{query_key.site.layer}\\n")
        raise {"plain": ZeroDivisionError("no such luck\\nat all"), "memory": MemoryError(),
               "own": ModelError("The model is broken.", "Mend it.")}[os.environ.get("PATCHY_KIND", "plain")]
    return {"weights.patchy": torch.ones(query_key.query.shape[:-2])}
'''


@pytest.fixture
def patchy(tmp_path, monkeypatch) -> Path:
    """Where an analyzer of a third party that fails notes down that it did; the program finds it."""
    plugin = tmp_path / "plugin"
    (plugin / "patchy-1.dist-info").mkdir(parents=True)
    (plugin / "patchy.py").write_text(PLUGIN)
    (plugin / "patchy-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: patchy\nVersion: 1\n")
    (plugin / "patchy-1.dist-info" / "entry_points.txt").write_text("[attnlens.analyzers]\npatchy = patchy\n")
    monkeypatch.setenv("PATCHY_PATH", os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PATCHY_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PATCHY", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "log"


def asked(report: Path, *more: object) -> tuple[object, ...]:
    """The words of a run whose units fail."""
    words = "--source", "weights", "--analyzer", "patchy", "--analyzer", "symmetry", "--no-progress"
    return "inspect", "demo", *words, "--json", report, "--work", report.with_suffix(".work"), *more


def patched(*words: object) -> CompletedProcess[str]:
    """The program, in a process that finds the third party's analyzer."""
    return program(*words, PYTHONPATH=os.environ["PATCHY_PATH"])


def read(path: Path) -> dict[str, Any]:
    """A report's JSON."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def of(report: Report) -> str:
    """A report without what times and memory were."""
    return json.dumps(timeless(json.loads(report.to_json())))


def test_a_unit_that_fails_is_partial_with_its_reason_and_the_same_whoever_reads_it(patchy, tmp_path):
    here = patched(*asked(tmp_path / "here.json"))
    assert here.returncode == 0, here.stderr
    assert patchy.read_text() == "1\n1\n", "tried once more"
    assert "failed" not in here.stderr, "--no-progress"
    assert "PARTIAL: 24 of 32 heads, because weights of layer 1: ZeroDivisionError: no such luck" in here.stdout
    elsewhere = patched(*asked(tmp_path / "elsewhere.json", "--jobs", "2"))
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert patchy.read_text() == "1\n" * 4
    assert timeless(read(tmp_path / "here.json")) == timeless(read(tmp_path / "elsewhere.json"))
    for name in ("here", "elsewhere"):
        strict = patched(*asked(tmp_path / f"{name}.json", "--strict", *["--jobs", "2"] * (name == "elsewhere")))
        assert strict.returncode == 3, strict.stderr
        assert "PARTIAL: 24 of 32 heads, because weights of layer 1" in strict.stderr


def test_a_unit_that_fails_is_named_as_it_does(patchy, tmp_path):
    words = [word for word in asked(tmp_path / "a.json") if word != "--no-progress"]
    found = patched(*words)
    assert "weights of layer 1 failed: ZeroDivisionError: no such luck\n" in found.stderr
    assert found.stderr.index("failed") < found.stderr.index("Wrote"), "before the end"


def test_what_is_finished_stays_where_a_unit_failed_and_the_same_command_mends_the_report(
    patchy, tmp_path, monkeypatch
):
    assert patched(*asked(tmp_path / "a.json")).returncode == 0
    units = list((tmp_path / "a.work").glob("*/*.unit"))
    assert len(units) == 3
    monkeypatch.setenv("PATCHY", "0,2,3")  # which are not read again
    again = patched(*asked(tmp_path / "a.json", "--strict"))
    assert again.returncode == 0, again.stderr
    assert not (tmp_path / "a.work").exists()
    monkeypatch.setenv("PATCHY", "none")
    assert patched(*asked(tmp_path / "whole.json")).returncode == 0
    assert timeless(read(tmp_path / "a.json")) == timeless(read(tmp_path / "whole.json"))


def test_shards_of_which_a_unit_failed_merge_to_the_partial_report_of_one_run(patchy, tmp_path, monkeypatch):
    whole, work, merged = tmp_path / "whole.json", ("--work", tmp_path / "work"), tmp_path / "merged.json"
    assert patched(*asked(whole)).returncode == 0
    reports = [tmp_path / f"{index}.json" for index in (1, 2)]
    for index, path in enumerate(reports, 1):
        assert patched(*asked(path, *work, "--shard", f"{index}/2")).returncode == 0
    for places in (reports, [tmp_path / "work"]):
        assert patched("merge", *places, "--strict", "-q").returncode == 3
        done = patched("merge", *places, "--json", merged)
        assert done.returncode == 0, done.stderr
        assert "PARTIAL: 24 of 32 heads, because weights of layer 1: ZeroDivisionError: no such luck" in done.stdout
        assert timeless(read(merged)) == timeless(read(whole))
    assert len(list((tmp_path / "work").glob("*/*.unit"))) == 3, "finished units stay"
    codes = [
        patched(*asked(path, *work, "--shard", f"{i}/2", "--strict")).returncode for i, path in enumerate(reports, 1)
    ]
    assert codes == [0, 3], "layer 1 is the second shard's"
    monkeypatch.setenv("PATCHY", "0,2,3")  # which are not read again
    assert patched(*asked(reports[1], *work, "--shard", "2/2")).returncode == 0
    monkeypatch.setenv("PATCHY", "none")
    assert patched(*asked(whole)).returncode == 0
    assert patched("merge", tmp_path / "work", reports[0], "--json", merged, "--strict").returncode == 0
    assert timeless(read(merged)) == timeless(read(whole))
    assert not (tmp_path / "work").exists()


def test_shards_of_which_every_unit_failed_are_refused_with_the_first_reason(patchy, tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHY", "0,1,2,3")
    for index in (1, 2):
        assert patched(*asked(tmp_path / "r.json", "--shard", f"{index}/2")).returncode == 70
    ended(patched("merge", tmp_path / "r.work"), "weights of layer 0: ZeroDivisionError: no such luck", "once more")


@pytest.mark.parametrize("words", [(), ("--jobs", "2")], ids=["here", "elsewhere"])
def test_an_error_of_what_all_units_share_ends_the_run_whoever_reads_it(words, patchy, tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHY_KIND", "own")
    found = patched(*asked(tmp_path / "a.json", *words))
    ended(found, "The model is broken.", "Mend it.")
    assert patchy.read_text() == "1\n1\n"
    assert not (tmp_path / "a.json").exists()
    assert list((tmp_path / "a.work").glob("*/*.unit")), "what is finished stays"


def test_where_every_unit_fails_there_is_no_report(patchy, tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHY", "0,1,2,3")
    found = patched(*asked(tmp_path / "a.json"))
    assert found.returncode == 70
    assert "ZeroDivisionError: no such luck" in found.stderr
    monkeypatch.setenv("PATCHY_KIND", "memory")
    ended(patched(*asked(tmp_path / "a.json")), "Not enough memory.", "--batch-size")
    ended(patched(*asked(tmp_path / "a.json", "--jobs", "2")), "No head could be analysed: weights of layer")


def failing(monkeypatch, errors: dict[str, list[BaseException]]) -> None:
    """Let units raise these, one at each reading, until none is left."""
    honest = Inspection._read

    def read_unit(self, unit, sink):
        honest(self, unit, sink)
        if errors.get(unit.name):
            raise errors[unit.name].pop(0)

    monkeypatch.setattr(Inspection, "_read", read_unit)


ONCE = {
    "a bug": ValueError("x"),
    "memory": RuntimeError("CUDA out of memory."),
    "a disk": OSError(5, "Input/output error"),
    "a hub": ModelError("The hub is away.", "Try later."),
}


@pytest.mark.parametrize("error", ONCE.values(), ids=ONCE)
def test_a_unit_that_fails_once_costs_nothing(error, monkeypatch, tmp_path):
    one = of(attnlens.inspect("demo", **FEW, work=tmp_path))
    left = {"weights of layer 2": [error]}
    failing(monkeypatch, left)
    assert of(attnlens.inspect("demo", **FEW, work=tmp_path)) == one
    assert left == {"weights of layer 2": []}
    assert not list(tmp_path.glob("*/*"))


def test_a_model_in_memory_and_batches_of_a_text_have_the_same_rule(demo, monkeypatch):
    failing(monkeypatch, {"tokens of batch 1": [ValueError("odd"), ValueError("odd")]})
    asked = {"tokens": 16, "sequences": 4, "batch_size": 2, "analyzers": ["symmetry"]}
    report = attnlens.inspect(demo, **asked)
    assert report.settings.sequences == 2
    assert "tokens of batch 1: ValueError: odd" in report.coverage.sentence


ENDING = {
    "the model": ModelError("a", "b"),
    "the place of work": OutputError("a", "b"),
    "an interruption": KeyboardInterrupt(),
    "the interpreter": SystemExit(3),
}


@pytest.mark.parametrize("error", ENDING.values(), ids=ENDING)
def test_what_concerns_the_whole_run_ends_it(error, monkeypatch, tmp_path):
    failing(monkeypatch, {"weights of layer 2": [error, error]})
    with pytest.raises(Interrupted if isinstance(error, KeyboardInterrupt) else type(error)):
        attnlens.inspect("demo", **FEW, work=tmp_path)
    assert len(list(tmp_path.glob("*/*.unit"))) == 2


def test_an_error_that_is_kept_holds_nothing_that_its_unit_read():
    import gc
    import weakref

    class Large:
        """Stands for a tensor."""

    seen = []

    def fails(_):
        large = Large()
        seen.append(weakref.ref(large))
        raise ValueError("x")

    done = tried(fails, 1)
    gc.collect()
    assert isinstance(done.error, ValueError)
    assert len(seen) == 2
    assert not any(found() for found in seen)
    assert not isinstance(done.error, AttnlensError)
