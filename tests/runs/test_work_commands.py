"""Tests that a command's report is the same however its units are computed: interrupted, sharded, shared or failed."""

from __future__ import annotations

import glob
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_hub
import forkserver
import pytest
import tiny
from hostile import edited, refused, saved, stored, weights
from program import DEMO, environment_with, invoke
from program import attnlens as program
from program import refused as ended
from reports import bytes_of

import attnlens
from attnlens.errors import ModelError, OutputError, ShardFinished, UsageError
from attnlens.lab.heal.pipeline import Descent
from attnlens.lab.ranks import search
from attnlens.lab.ranks.pipeline import rank_work
from attnlens.requests import CheckpointsRequest, InspectRequest, RanksRequest, SwapRequest
from attnlens.runs import series, store
from attnlens.runs.inspect import pipeline
from attnlens.runs.inspect.inspection import Inspection
from attnlens.runs.progress import Interrupted
from attnlens.runs.series import Series
from attnlens.runs.store import hash_json
from attnlens.runs.swap import pipeline as swap_pipeline
from attnlens.runs.swap.kernel_run import KernelRun
from attnlens.runs.swap.saved import UnsavedError
from attnlens.runs.swap.sweep import SweptBatch

INSPECTED = {"length": 16, "windows": 12, "batch_size": 1, "analyzers": ["symmetry"]}  # four layers, twelve batches
FEW = {"source": "weights", "analyzers": ["symmetry"]}  # four units that take a moment
WORDS = ("inspect", "demo", "--source", "weights", "--analyzer", "symmetry", "--no-progress")  # of the program
KERNELS = ["window:4", "window:12", "rbf"]
SMALL = {"length": 16, "windows": 4, "generate": 0}
SWEPT = {"length": 16, "windows": 2, "batch_size": 1, "layers": [0, 1], "generate": 2, "sweep": "layers"}
"""With three kernels: 12 parts."""
HEALED = {"length": 16, "windows": 4, "batch_size": 4, "layers": [1], "train": 24}
BUDGET = SMALL | {"layers": [1], "budget": "loss:10%", "latents": "group=1"}
SERIES = {"analyzers": ["symmetry"], "length": 16, "windows": 4, "layers": [0, 1]}
UNITS = "*/*.safetensors"
PIECES: dict[str, tuple[Any, str, str]] = {
    "inspect": (Inspection, "read_unit", UNITS),
    "converge": (Series, "read_unit", UNITS),
    "sweep": (SweptBatch, "losses", "*/*/batch-*.safetensors"),
    "heal": (Descent, "advance", "*/*/heal-*.safetensors"),
    "budget": (search, "measure_losses", "*/*/losses-on-*.safetensors"),
}
"""The function that is called for each piece of work, and the files of pieces."""
CONTINUING = "heal and continue"
"""Heals as the program does, which always continues texts: that takes long."""
PIECES_OF_PROGRAM = {CONTINUING if name == "heal" else name: pieces for name, pieces in PIECES.items()}
LATER = "The report is written after the last unit.\n"
ODD = "ZeroDivisionError: odd"
ODD_ANALYZER = """
import torch
from attnlens import MeasureInfo, analyzer

@analyzer("odd", "weights", [MeasureInfo("weights.odd", "Odd.", "1")], by_default=False)
def odd(query_key):
    'Where does it fail?'
    if query_key.site.layer == 1:
        raise ZeroDivisionError("odd")
    return {"weights.odd": torch.ones(query_key.query.shape[:-2])}
"""
_whole: dict[str, tuple[str, int]] = {}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[str]:
    """Return three checkpoints with a tokenizer, not in the order of their steps."""
    folder, steps = tmp_path_factory.mktemp("series"), ["step-00030", "step-00000", "step-00100"]
    for copy in (shutil.copytree(DEMO / "checkpoints" / step, folder / step) for step in steps):
        for file in DEMO.glob("tokenizer*"):
            shutil.copy(file, copy)
    return [str(folder / step) for step in steps]


@pytest.fixture
def case(request, checkpoints) -> SimpleNamespace:
    """Return a command: the library call, the program's arguments, and the command's pieces."""
    call, words = {
        "inspect": (partial(attnlens.inspect, "demo", **INSPECTED), ["inspect", "demo"]),
        "converge": (
            partial(attnlens.converge_checkpoints, checkpoints, **SERIES),
            ["converge", *checkpoints, "--checkpoints"],
        ),
        "sweep": (
            partial(attnlens.swap_kernel, "demo", KERNELS, **SWEPT),
            ["swap-kernel", "demo", *(f"--kernel={kernel}" for kernel in KERNELS)],
        ),
        "heal": (partial(attnlens.heal, "demo", "rbf", generate=0, **HEALED), []),
        CONTINUING: (partial(attnlens.heal, "demo", "rbf", **HEALED), ["heal", "demo", "--kernel", "rbf"]),
        "budget": (partial(attnlens.find_ranks, "demo", **BUDGET), ["ranks", "demo"]),
    }[request.param]
    for name, value in call.keywords.items():
        flag = f"--{name.replace('_', '-').replace('analyzers', 'analyzer')}"
        words += [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    *computing, pieces = (PIECES | PIECES_OF_PROGRAM)[request.param]
    words.append("--no-progress")
    return SimpleNamespace(name=request.param, call=call, words=words, computing=computing, pieces=pieces)


@pytest.fixture
def whole(case, tmp_path) -> tuple[str, int]:
    """Return the report of an undisturbed run, and its number of pieces."""
    if case.name not in _whole:
        with counted(*case.computing) as calls:
            _whole[case.name] = bytes_of(case.call(work=tmp_path / "whole")), len(calls)
        assert is_cleared(tmp_path / "whole"), "finished units are removed with the report"
    return _whole[case.name]


@contextmanager
def counted(
    owner: Any, name: str, most: float = float("inf"), fails: Callable[..., BaseException | None] = lambda *_: None
) -> Iterator[list[Any]]:
    """Record the calls of a function, which raises what `fails` returns, and is interrupted after so many calls."""
    calls, honest = [], getattr(owner, name)

    def counting(*arguments: Any, **options: Any) -> Any:
        if len(calls) >= most:
            raise KeyboardInterrupt
        calls.append(arguments)
        if error := fails(*arguments):
            raise error
        return honest(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counting)
        yield calls


@pytest.fixture
def failing() -> Iterator[dict[str, BaseException]]:
    """Return the errors that units of an inspection raise, by name; tests add to them."""
    errors: dict[str, BaseException] = {}
    with counted(Inspection, "_compute_unit", fails=lambda _self, unit: errors.get(unit.name)):
        yield errors


def finished(folder: Path, pattern: str = UNITS) -> list[Path]:
    """Return the files of finished units; `Path.glob` fails if a process removes a folder meanwhile."""
    return sorted(map(Path, glob.glob(str(folder / pattern))))  # noqa: PTH207


def is_cleared(folder: Path) -> bool:
    return not any(path.is_file() for path in folder.rglob("*"))


def start(*words: object) -> subprocess.Popen[str]:
    """Start the program, which its forkserver kills together with this client."""
    client = [str(forkserver.commands() / "attnlens"), *map(str, words)]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(client, env=environment_with(), text=True, **streams)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until the condition is met, or the process ends."""
    deadline = time.monotonic() + 120
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("case", PIECES, indirect=True)
def test_an_interrupted_run_reports_what_is_finished_and_resumes_to_the_same_report(case, whole, tmp_path):
    report, total = whole
    most = {"inspect": 7, "converge": 2, "sweep": total * 2 // 3 + 1, "heal": 13, "budget": total - 2}[case.name]
    with counted(*case.computing, most=most), pytest.raises(KeyboardInterrupt) as caught:
        case.call(work=tmp_path)
    partial = getattr(caught.value, "report", None)
    if case.name == "inspect":
        assert partial.settings.windows == 3, "four layers, three batches"
        assert partial.heads[0].measures["tokens.share_key"].n == 3
        missing = "without 9 of 12 sequences, because the run was interrupted"
        assert partial.coverage.sentence == f"PARTIAL: 32 of 32 heads, {missing}"
        assert len(finished(tmp_path)) == 7
    elif case.name == "converge":
        assert partial.experiments[0].settings["checkpoints"] == ["step-00000", "step-00030"]
    elif case.name == "sweep":
        assert [swap.kernel for swap in partial.swaps][:2] == ["window:4", "window:12"]
    elif case.name == "heal":
        assert partial.swap.healing.interrupted
        assert finished(tmp_path) == [], "an interrupted kernel is not finished"
    else:
        assert not isinstance(caught.value, Interrupted), "there is nothing to report"
    with counted(*case.computing) as calls, counted(search, "sensitivities") as costs:
        assert bytes_of(case.call(work=tmp_path)) == report
    # healing resumes from its last check; the original's loss is not stored
    assert len(calls) == {"heal": 14, "budget": total - most + 1}.get(case.name, total - most)
    assert costs == []
    assert is_cleared(tmp_path)


def test_a_comparison_of_kernels_that_is_interrupted_reports_the_measured_ones(tmp_path):
    def interrupted(kernels: Any, at: str) -> KeyboardInterrupt:
        def stop(stage: str, _done: int, _total: int) -> None:
            if stage.endswith(at):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as stopped:
            attnlens.swap_kernel("demo", kernels, **SMALL, controls=False, progress=stop, work=tmp_path)
        return stopped.value

    report = interrupted(KERNELS, "rbf:gamma=0.5, compare").report
    assert [swap.kernel for swap in report.swaps] == ["window:4", "window:12"]
    assert "without kernel rbf:gamma=0.5, because the run was interrupted" in report.coverage.sentence
    assert not isinstance(interrupted("linear", "compare"), Interrupted)


def test_healing_begins_anew_if_its_state_is_damaged_or_with_resume_false(tmp_path, caplog):
    heal = partial(attnlens.heal, "demo", "rbf", **HEALED | {"train": 2, "generate": 0}, work=tmp_path)
    stop = lambda _: KeyboardInterrupt()  # noqa: E731
    with counted(KernelRun, "_record", fails=lambda *_: ZeroDivisionError()), pytest.raises(ZeroDivisionError):
        heal()
    [state] = tmp_path.glob("*/*/heal-*.safetensors")
    content = state.read_bytes()
    for harmed, resume in ((content[:-1], True), (content, False)):
        state.write_bytes(harmed)
        with counted(Descent, "advance", fails=stop) as calls, pytest.raises(KeyboardInterrupt):
            heal(resume=resume)
        assert [descent.step for (descent,) in calls] == [0]
    assert f"the file is renamed to {state.name}.damaged" in caplog.text


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM, signal.SIGKILL],
    ids=["interrupted", "ended", "killed"],
)
@pytest.mark.parametrize("case", ["inspect"], indirect=True)
def test_the_program_reports_what_is_finished_after_ctrl_c_and_resumes_after_any_end(case, whole, number, tmp_path):
    work, path = tmp_path / "work", tmp_path / "report.json"
    process = start(*case.words, "--work", work, "--json", path)
    wait_for(lambda: len(finished(work)) >= 5, process)
    process.send_signal(number)
    printed = process.communicate()[1]
    units = len(finished(work))
    assert 5 <= units < 16
    assert path.exists() == (number != signal.SIGKILL)
    if number != signal.SIGKILL:
        assert process.returncode == 130, printed
        assert "Interrupted" in printed
        assert json.loads(path.read_text())["coverage"]["skipped"][0]["reason"] == "the run was interrupted"
    with counted(Inspection, "read_unit") as read:
        assert bytes_of(case.call(work=work)) == whole[0]
    assert len(read) == 16 - units


@pytest.mark.full
@pytest.mark.parametrize("case", PIECES_OF_PROGRAM, indirect=True)
def test_a_command_that_is_killed_at_any_moment_resumes_to_the_same_report(case, whole, tmp_path):
    """The run is killed before the first piece, between pieces, or while a piece is written."""
    moments, (report, total), resumed = random.Random(case.name), whole, 0  # noqa: S311
    for number in range({"inspect": 4, "sweep": 3}.get(case.name, 2)):
        folder = tmp_path / str(number)
        most = 1 if case.name == CONTINUING else max(1, total - 1)  # healing writes a single file again and again
        count = 0 if number == 2 else moments.randint(1, most)
        process = start(*case.words, "--work", folder)
        wait_for(lambda count=count, folder=folder: len(finished(folder, case.pieces)) >= count, process)
        time.sleep(moments.uniform(0, 0.05 if count else 1.5))
        process.kill()
        process.communicate()
        pieces, units = len(finished(folder, case.pieces)), len(finished(folder))
        pieces += total // 3 * units * (case.name == "sweep")  # whose parts are cleared with their kernel
        with counted(*case.computing) as calls:
            assert bytes_of(case.call(work=folder)) == report
        if case.name == CONTINUING:
            assert (len(calls) < total) == bool(pieces or units)
        else:
            assert len(calls) <= total - pieces
        resumed += 0 < len(calls) < total
        assert is_cleared(folder)
    assert resumed, "one of them was in the middle"


@pytest.mark.full
@pytest.mark.parametrize("case", ["inspect", "sweep", CONTINUING], indirect=True)
def test_programs_that_work_in_one_folder_at_once_report_the_same(case, whole, tmp_path):
    reports = [tmp_path / f"{number}.json" for number in range(2)]
    running = [start(*case.words, "--work", tmp_path / "work", "--json", path) for path in reports]
    for process, path in zip(running, reports, strict=True):
        assert process.communicate() == (None, f"Wrote {path}\n")
        assert process.returncode == 0
        assert bytes_of(path) == whole[0]
    assert is_cleared(tmp_path / "work")


@pytest.mark.parametrize(
    "case", ["inspect", *(pytest.param(name, marks=pytest.mark.full) for name in ("sweep", "converge"))], indirect=True
)
def test_a_run_may_end_and_clear_the_folder_in_the_middle_of_another(case, whole, tmp_path):
    others: list[str] = []

    def another(_stage: str, done: int, _total: int) -> None:
        if done == 2 and not others:
            others.append("")
            others.append(bytes_of(case.call(work=tmp_path)))
            assert is_cleared(tmp_path)

    assert bytes_of(case.call(work=tmp_path, progress=another)) == others[1] == whole[0]
    assert is_cleared(tmp_path)


@pytest.mark.parametrize("case", ["converge"], indirect=True)
def test_the_program_computes_a_shard_of_checkpoints(case, tmp_path):
    done = invoke(*case.words, "--work", tmp_path, "--shard", "2/2")
    assert (done.returncode, done.stderr.partition(";")[0]) == (0, "1 of 3 units are finished")
    assert len(finished(tmp_path)) == 1


def check_keys(facts: Callable[[], Any], changes: dict[str, Callable[[], object]]) -> None:
    """Assert that unchanged facts have the same key, and that each change gives a new key."""
    keys = [hash_json(facts())]
    assert hash_json(facts()) == keys[0], "the control"
    for name, change in changes.items():
        change()
        keys.append(hash_json(facts()))
        assert keys[-1] not in keys[:-1], name


def change_weights(folder: Path) -> None:
    tensors = weights(folder)
    tensors[min(name for name in tensors if name.endswith("wte.weight"))][0, 0] += 1
    stored(folder, tensors)


def test_a_run_does_not_resume_from_other_settings(tmp_path):
    for options, count in (({}, 4), ({}, 0), ({"seed": 1}, 4), ({"seed": 1, "resume": False}, 4), ({}, 0)):
        with counted(Inspection, "read_unit") as read, pytest.raises(ShardFinished):
            attnlens.inspect("demo", **FEW | options, shard="1/1", work=tmp_path / "work")
        assert len(read) == count, options


def test_the_key_of_an_inspection_depends_on_model_text_options_and_code(monkeypatch, tmp_path):
    folder, text, code = saved(tmp_path / "a"), tmp_path / "text.txt", tmp_path / "attnlens" / "spectra.py"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    options = {"analyzers": ["symmetry"], "length": 8, "windows": 2, "text": [str(text)]}
    others = {"show": "attention", "seed": 1, "dtype": "float64", "heads": [0], "analyzers": ["spectrum"]}
    code.parent.mkdir()

    def swap_letters() -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["e"], vocabulary["o"] = vocabulary["o"], vocabulary["e"]
        (folder / "tokenizer.json").write_text(json.dumps(content))

    def edit_code(text: str) -> None:
        code.write_text(text)
        store.hash_code.cache_clear()
        monkeypatch.setattr(store, "PACKAGE", code.parent)

    changes = {
        "weights": lambda: change_weights(folder),
        "config": lambda: edited(folder / "config.json", scale_attn_by_inverse_layer_idx=True),
        "tokenizer": swap_letters,
        "text": lambda: text.write_text("pack my box with five dozen liquor jugs, said he. " * 20),
        **{name: partial(options.update, {name: value}) for name, value in others.items()},
        "version": lambda: monkeypatch.setattr(store, "_version", lambda _: "99.0"),
        "code": lambda: edit_code("first"),
        "other code": lambda: edit_code("other"),
    }
    check_keys(lambda: pipeline.open_in_worker(folder, InspectRequest(**options))[0], changes)
    monkeypatch.undo()
    store.hash_code.cache_clear()


def test_the_key_of_a_swap_depends_on_model_texts_options_and_kernels(monkeypatch, tmp_path):
    folder, kernels = saved(tmp_path / "model"), ["rbf"]
    text, calibration, prompts = (tmp_path / f"{name}.txt" for name in ("text", "calibration", "prompts"))
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    calibration.write_text("how vexingly quick daft zebras jump, and wolves. " * 40)
    prompts.write_text("the quick\n")
    options = {"length": 16, "windows": 2, "generate": 2, "fit": True, "controls": False, "prompts": prompts}
    options |= {"text": [text], "calibration": [calibration], "allow_foreign_text": True}
    changes = {
        "weights": lambda: change_weights(folder),
        "config": lambda: edited(folder / "config.json", resid_pdrop=0.2),
        "generation_config": lambda: (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}'),
        "kernels": lambda: kernels.append("window:4"),
        "seed": lambda: options.update(seed=1),
        "text": lambda: text.write_text("said he of five dozen liquor jugs. " * 40),
        "calibration": lambda: calibration.write_text("a mad boxer shot a quick gloved jab. " * 40),
        "prompts": lambda: prompts.write_text("0\n0z\n"),
        "boundary of prompts": lambda: prompts.write_text("00\n0z\n"),
        "code of a kernel": lambda: monkeypatch.setattr(swap_pipeline, "read_code", lambda _kernel: b"changed"),
    }
    check_keys(lambda: swap_pipeline.open_run(str(folder), tuple(kernels), SwapRequest(**options))[0], changes)
    requests = [RanksRequest(**BUDGET | {"latents": form}) for form in (None, "group=1")]
    keys = {hash_json(rank_work("demo", request).facts) for request in requests}
    assert len(keys) == 2


def test_parts_of_a_sweep_are_used_with_the_same_fit_alone(monkeypatch, tmp_path):
    options = SMALL | {"layers": [0, 1], "controls": False, "sweep": "layers", "fit": True, "work": tmp_path}
    for another_fit, left in ((False, 1), (True, 2)):
        with counted(SweptBatch, "losses", most=1), pytest.raises(KeyboardInterrupt):
            attnlens.swap_kernel("demo", "rbf", **options, resume=False)
        if another_fit:  # as on another machine, whose sums are rounded differently
            monkeypatch.setattr("attnlens.runs.swap.kernel_run.hash_tensors", lambda _fitted: "another")
        with counted(SweptBatch, "losses") as calls:
            attnlens.swap_kernel("demo", "rbf", **options)
        assert len(calls) == left


def test_the_key_of_a_series_depends_on_files_text_and_options(checkpoints, tmp_path):
    copies = [shutil.copytree(folder, tmp_path / Path(folder).name) for folder in checkpoints]
    text = tmp_path / "t.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    names, options = [*map(str, copies)], SERIES | {"text": [text]}

    def add_space(pattern: str) -> None:
        path = min(copies[0].glob(pattern))
        path.write_text(path.read_text() + " ")

    changes = {
        "weights": lambda: shutil.copy(copies[1] / "model.safetensors", copies[0] / "model.safetensors"),
        "config": lambda: add_space("config*.json"),
        "tokenizer": lambda: add_space("tokenizer*.json"),
        "windows": lambda: options.update(windows=3),
        "text": lambda: text.write_text("pack my box with five dozen liquor jugs. " * 40),
    }
    check_keys(lambda: series.open_in_worker(names, (), CheckpointsRequest(**options))[0], changes)
    options["image"] = [options.pop("text")[0]]
    changes = {"image": lambda: text.write_text("another picture")}
    check_keys(lambda: series.open_in_worker(names, (), CheckpointsRequest(**options))[0], changes)


def test_the_key_of_a_hub_model_depends_on_its_commit(hub, monkeypatch):
    keys = []
    for commit in (fake_hub.COMMIT, fake_hub.COMMIT, "f" * 40):
        monkeypatch.setattr(fake_hub, "COMMIT", commit)
        keys.append(hash_json(pipeline.open_in_worker(fake_hub.OPEN, InspectRequest(**FEW))[0]))
    assert keys[0] == keys[1] != keys[2]


def test_units_are_removed_when_all_outputs_are_written_and_stay_if_one_is_not(tmp_path):
    work = tmp_path / "work"
    (tmp_path / "full").symlink_to("/dev/full")
    for option in ("--json", "--html", "--csv"):
        done = invoke(*WORDS, "--work", work, option, tmp_path / "full")
        assert done.returncode == 2
        assert "No space left" in done.stderr
        assert len(finished(work)) == 4
    assert invoke(*WORDS, "--work", work, "--json", "-").returncode == 0
    assert is_cleared(work)


def test_a_model_that_could_not_be_saved_is_not_swept_again(tmp_path):
    options = SMALL | {"controls": False, "sweep": "layers", "work": tmp_path / "work", "save": tmp_path / "model"}
    fails = lambda *_: OutputError("The disk is full.", "Make room.")  # noqa: E731
    unsaved = counted(swap_pipeline, "save_swapped", fails=fails)
    with counted(SweptBatch, "losses") as calls, unsaved, pytest.raises(UnsavedError):
        attnlens.swap_kernel("demo", "rbf", **options)
    assert len(calls) == 4
    with counted(SweptBatch, "losses") as calls:
        attnlens.swap_kernel("demo", "rbf", **options)
    assert calls == []
    assert (tmp_path / "model" / "attnlens.json").is_file()
    assert is_cleared(tmp_path / "work")


@pytest.mark.parametrize("case", ["inspect", "sweep", pytest.param("converge", marks=pytest.mark.full)], indirect=True)
def test_a_shard_and_other_processes_compute_the_units_of_the_same_report(case, whole, tmp_path):
    with pytest.raises(ShardFinished):
        case.call(work=tmp_path, shard="2/3")
    with forkserver.workers(), counted(*case.computing) as calls:
        assert bytes_of(case.call(work=tmp_path, jobs=2)) == whole[0]
    assert calls == [], "other processes computed what was missing"
    assert is_cleared(tmp_path)


def test_the_program_writes_the_report_after_the_last_shard_and_runs_jobs(tmp_path):
    work = "--work", tmp_path / "work"
    for index, line in (
        (2, f"2 of 4 units are finished; weights of layer 0 and 1 more remain. {LATER}"),
        (1, "All 4 units are finished: run the command without --shard to write the report.\n"),
    ):
        done = invoke(*WORDS, *work, "--shard", f"{index}/2", "--json", tmp_path / "shard.json")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", line)
        assert not (tmp_path / "shard.json").exists(), "a part is not a report"
    whole = bytes_of(attnlens.inspect("demo", **FEW))
    for more in ((*work, "--json", tmp_path / "a.json"), ("--jobs", "2", "--json", tmp_path / "b.json")):
        with forkserver.workers():
            done = invoke(*WORDS, *more)
        assert done.returncode == 0, done.stderr
        assert bytes_of(more[-1]) == whole


@pytest.mark.parametrize(
    "options",
    [
        {"length": 8, "windows": 2, "layers": [0], "heads": [0, 3], "analyzers": ["selection", "ksvd"]},
        {"length": 8, "windows": 2, "layers": [1], "heads": [2], "show": "attention", "analyzers": ["symmetry"]},
        FEW | {"from_files": True, "layers": [0, 1]},
    ],
    ids=["gathered", "shown", "files"],
)
def test_shards_with_gathered_values_shown_rows_or_deferred_weights_are_one_run(options, tmp_path):
    for shard in ("2/2", "1/2"):
        with pytest.raises(ShardFinished):
            attnlens.inspect("demo", **options, shard=shard, work=tmp_path)
    with counted(Inspection, "read_unit") as read:
        report = bytes_of(attnlens.inspect("demo", **options, work=tmp_path))
    assert read == []
    assert report == bytes_of(attnlens.inspect("demo", **options))


def test_kernels_of_several_shards_use_the_widest_window_of_the_run(demo, tmp_path):
    options = SMALL | {"length": 48, "controls": False}
    for shard in ("2/2", "1/2"):
        with pytest.raises(ShardFinished):
            attnlens.swap_kernel("demo", KERNELS[:2], **options, shard=shard, work=tmp_path)
    report = attnlens.swap_kernel("demo", KERNELS[:2], **options, work=tmp_path)
    assert [swap.beyond_window.window for swap in report.swaps] == [12, 12]
    assert report.windows == attnlens.swap_kernel(demo, KERNELS[:2], **options).windows
    alone = attnlens.swap_kernel(demo, "window:4", **options).swap.beyond_window
    assert alone.window == 4, "the control"
    assert alone.tokens > report.swap.beyond_window.tokens


SHARDS = {
    **{"ID=5 COUNT=3 MIN=4": "2/3", "ID=0 COUNT=2 MIN=0": "1/2", "ID=1 COUNT=2": "2/2"},
    **{"ID=4 COUNT=3 MIN=0 MAX=4 STEP=2": "3/3", "RANK=2 WORLD_SIZE=3": "3/3", "RANK=0 WORLD_SIZE=1 ID=1": "1/1"},
    **dict.fromkeys(("ID=1", "ID=3 COUNT=3 MIN=0", "ID=1 COUNT=3 MIN=2", "ID=1 COUNT=3 MIN=0 MAX=4 STEP=2")),
    **dict.fromkeys(("ID=0 COUNT=3 MIN=0 MAX=7 STEP=1", "", "RANK=0", "RANK=3 WORLD_SIZE=3")),
    **dict.fromkeys(("RANK=x WORLD_SIZE=3", "RANK=0 WORLD_SIZE=0")),
}
"""Environment, without the prefix of Slurm's arrays → shard; None: it is refused."""


def test_a_process_reads_its_shard_from_its_environment_and_senseless_shards_are_refused():
    refuse = lambda shard: refused(UsageError, partial(attnlens.inspect, "demo", **FEW, shard=shard), "shard", "I/N")  # noqa: E731
    for variables, shard in SHARDS.items():
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (variable.split("=") for variable in variables.split()):
                patch.setenv(name if name in ("RANK", "WORLD_SIZE") else f"SLURM_ARRAY_TASK_{name}", value)
            if shard is None:
                refuse("auto")
            else:
                assert InspectRequest(shard="auto").shard == shard, variables
    for wrong in ("5/4", "0/2", "x", "1", "1/", "/2", "-1/2", "1/0", "1.5/2", "1/2/3", "", " 1/2", 1):
        refuse(wrong)


def inspect_in(folder: Path, *more: object, words: tuple[str, ...] = WORDS) -> subprocess.CompletedProcess[str]:
    return invoke(*words, "--json", folder / "r.json", "--work", folder / "work", *more)


def test_a_unit_that_fails_makes_the_report_partial_and_the_same_command_completes_it(failing, tmp_path):
    failing["weights of layer 1"] = ZeroDivisionError("odd\nat all")
    with counted(Inspection, "_compute_unit") as tries:
        done = inspect_in(tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"PARTIAL: 24 of 32 heads, because weights of layer 1: {ODD}" in " ".join(done.stdout.split())
    assert [unit.name for _, unit in tries].count("weights of layer 1") == 2, "it is tried once more"
    strict = inspect_in(tmp_path, "--strict", words=WORDS[:-1])
    assert strict.returncode == 3
    assert f"PARTIAL: 24 of 32 heads, because weights of layer 1: {ODD}" in strict.stderr
    assert strict.stderr.index(f"weights of layer 1 failed: {ODD}\n") < strict.stderr.index("Wrote")
    assert len(finished(tmp_path / "work")) == 3
    failing.clear()
    failing.update({f"weights of layer {layer}": ZeroDivisionError("again") for layer in (0, 2, 3)})
    assert inspect_in(tmp_path, "--strict").returncode == 0, "finished units are not computed again"
    assert is_cleared(tmp_path / "work")
    failing.clear()
    assert bytes_of(tmp_path / "r.json") == bytes_of(attnlens.inspect("demo", **FEW))


def test_an_analyzer_of_another_package_that_fails_in_a_worker_makes_the_report_partial(tmp_path):
    (tmp_path / "odd.py").write_text(ODD_ANALYZER)
    (info := tmp_path / "odd-1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[attnlens.analyzers]\nodd = odd\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = [*WORDS[:4], "--analyzer", "odd", "--no-progress", "--work", tmp_path / "work", "--strict"]
    done = program(*words, "--jobs", "2", PYTHONPATH=paths)
    assert done.returncode == 3, done.stderr
    assert f"PARTIAL: 24 of 32 heads, because weights of layer 1: {ODD}" in done.stderr
    assert len(finished(tmp_path / "work")) == 3


def test_a_shard_names_its_failed_unit_and_the_whole_command_computes_it(failing, tmp_path):
    failing["weights of layer 1"] = ZeroDivisionError("odd")
    first, second = (inspect_in(tmp_path, "--shard", shard, "--strict") for shard in ("1/2", "2/2"))
    assert first.returncode == 0, "layer 1 is the second shard's"
    assert first.stderr == f"2 of 4 units are finished; weights of layer 1 and 1 more remain. {LATER}"
    assert second.returncode == 3
    remaining = f"3 of 4 units are finished; weights of layer 1 remains. {LATER}"
    assert second.stderr == f"weights of layer 1 failed: {ODD}\n{remaining}"
    assert inspect_in(tmp_path, "--shard", "2/2").returncode == 0


def test_an_error_that_concerns_all_units_and_a_failure_of_all_end_the_run(failing, tmp_path):
    failing["weights of layer 3"] = ModelError("The model is broken.", "Mend it.")
    ended(inspect_in(tmp_path), "The model is broken.", "Mend it.")
    assert not (tmp_path / "r.json").exists()
    assert len(finished(tmp_path / "work")) == 3, "finished units stay"
    (tmp_path / "b").mkdir()
    for error, code, words in ((MemoryError(), 2, "Not enough memory."), (ZeroDivisionError("odd"), 70, ODD)):
        failing.update({f"weights of layer {layer}": error for layer in range(4)})
        done = inspect_in(tmp_path / "b")
        assert done.returncode == code
        assert words in done.stderr


def test_a_batch_of_a_model_in_memory_that_fails_is_missing(demo, failing):
    failing["tokens of batch 1"] = ValueError("odd")
    report = attnlens.inspect(demo, length=16, windows=4, batch_size=2, analyzers=["symmetry"])
    assert report.settings.windows == 2
    assert "tokens of batch 1: ValueError: odd" in report.coverage.sentence


def test_a_kernel_that_fails_is_missing_with_its_reason_and_its_parts_are_kept(monkeypatch, tmp_path):
    sweep, tries, options = KernelRun._sweep, [], SWEPT | {"generate": 0, "controls": False, "work": tmp_path}

    def fail_after_sweep(self: KernelRun, swap: Any) -> Any:
        swap = sweep(self, swap)
        if self.kernel.spelling == "window:12":
            tries.append(1)
            raise ZeroDivisionError("odd")
        return swap

    with monkeypatch.context() as patch:
        patch.setattr(KernelRun, "_sweep", fail_after_sweep)
        report = attnlens.swap_kernel("demo", KERNELS, **options)
    assert len(tries) == 2
    assert [swap.kernel for swap in report.swaps] == ["window:4", "rbf:gamma=0.5"]
    assert [(skip.site, skip.reason) for skip in report.coverage.skipped] == [("kernel window:12", ODD)]
    with counted(KernelRun, "run") as kernels, counted(SweptBatch, "losses") as parts:
        again = attnlens.swap_kernel("demo", KERNELS, **options)
    assert (len(kernels), len(parts)) == (1, 0)
    assert [swap.kernel for swap in again.swaps] == ["window:4", "window:12", "rbf:gamma=0.5"]
    assert is_cleared(tmp_path)


def test_a_checkpoint_with_a_failed_unit_is_read_again_without_its_finished_units(checkpoints, tmp_path):
    def fails(inspection: Inspection, unit: Any) -> Exception | None:
        of_step = "step-00030" in str(inspection.loaded.folder)
        return ZeroDivisionError("odd") if of_step and unit.name == "weights of layer 1" else None

    converge = partial(attnlens.converge_checkpoints, checkpoints, **SERIES, work=tmp_path)
    with counted(Inspection, "_compute_unit", fails=fails):
        assert f"in step-00030, weights of layer 1: {ODD}" in converge().coverage.sentence
    with counted(Inspection, "_compute_unit") as calls:
        assert converge().coverage.complete
    assert [unit.name for _, unit in calls] == ["weights of layer 1"]
    assert is_cleared(tmp_path)


def test_a_checkpoint_that_fails_is_missing_with_its_reason(checkpoints, tmp_path):
    fails = lambda _series, name: ZeroDivisionError("odd") if "step-00030" in name else None  # noqa: E731
    options = SERIES | {"windows": 2, "layers": [0], "work": tmp_path}
    with counted(Series, "read_unit", fails=fails):
        report = attnlens.converge_checkpoints(checkpoints, **options)
    assert [(skip.site, skip.reason) for skip in report.coverage.skipped] == [("step-00030", ODD)]
    with counted(Series, "read_unit") as calls:
        assert attnlens.converge_checkpoints(checkpoints, **options).coverage.complete
    assert len(calls) == 1


def test_what_prevents_the_work_is_named_before_the_model_is_loaded(demo, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    inspect, swap = partial(attnlens.inspect, **FEW), partial(attnlens.swap_kernel, **SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(attnlens.models.loading, "load", lambda *_, **__: pytest.fail("it was loaded"))
        for call in (partial(inspect, "demo"), partial(swap, "demo"), partial(attnlens.converge_checkpoints, **SERIES)):
            for kind, more, *words in (
                (OutputError, {"work": tmp_path / "file"}, "Finished units cannot be stored in"),
                (UsageError, {"engine": "ray", "address": "127.0.0.1:9"}, "No Ray cluster answers at 127.0.0.1:9"),
                (UsageError, {"jobs": 2, "address": "127.0.0.1:9"}, "applies only to engine='ray'", "Omit address"),
                (UsageError, {"jobs": 2, "work": "memory://units"}, "memory", "--work"),
            ):
                refused(kind, partial(call, **more), *words)
    for name, value in {"work": tmp_path, "shard": "1/2", "jobs": 2, "resume": False, "engine": "ray"}.items():
        for call in (inspect, swap):
            refused(UsageError, partial(call, demo, **{name: value}), "in memory", name)
        if name in ("jobs", "shard", "engine"):
            save = partial(attnlens.swap_kernel, "demo", "rbf", save=tmp_path / "m", **{name: value})
            refused(UsageError, save, f"in this process, which `{name}` prevents")


def test_the_program_refuses_in_two_lines_with_exit_code_2(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    for words, *parts in (
        ((*WORDS, "--engine", "ray"), "No Ray cluster answers at 127.0.0.1:9"),
        (("inspect", "demo", "--engine", "dask"), "dask"),
        (("inspect", "demo", "--engine", "slurm"), "slurm"),
        (("swap-kernel", "demo", "--fit", "--calibration", "-", "--jobs", "2"), "from stdin"),
        (("converge", "--shard", "1/2"), "--shard applies to checkpoints"),
        (("converge", "--head", "0.1", "--jobs", "2"), "--jobs applies to checkpoints"),
    ):
        ended(invoke(*words), *parts)


def test_a_worker_that_finds_another_model_is_refused_by_the_difference(tmp_path):
    folder = saved(tmp_path / "gpt2")
    inspect = partial(attnlens.inspect, str(folder), **FEW, work=tmp_path / "work", jobs=2)
    save_another = lambda *_: tiny.gpt2().save_pretrained(folder)  # noqa: E731
    with forkserver.workers(), counted(pipeline, "run_units", fails=save_another):
        refused(ModelError, inspect, "A worker's inputs differ from those of the run: model.files")
