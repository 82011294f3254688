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
from program import attnlens as program
from program import environment_with, invoke
from program import refused as ended
from reports import bytes_of

import attnlens
from attnlens.errors import ModelError, OutputError, ShardFinished, UsageError
from attnlens.lab.heal.pipeline import Descent
from attnlens.lab.ranks import search
from attnlens.lab.ranks.pipeline import rank_work
from attnlens.requests import CheckpointsRequest, InspectRequest, RanksRequest, SwapRequest
from attnlens.runs import series
from attnlens.runs import store as store_module
from attnlens.runs.inspect import pipeline
from attnlens.runs.inspect.inspection import Inspection
from attnlens.runs.progress import Interrupted
from attnlens.runs.series import Series
from attnlens.runs.store import key_of
from attnlens.runs.swap import pipeline as swap_pipeline
from attnlens.runs.swap.kernel_run import KernelRun
from attnlens.runs.swap.saved import UnsavedError
from attnlens.runs.swap.sweep import SweptBatch

CHECKPOINTS = Path(attnlens.__file__).parent / "models" / "demo" / "checkpoints"
INSPECTED: dict[str, Any] = {"length": 16, "windows": 12, "batch_size": 1, "analyzers": ["symmetry"]}
"""Four layers and twelve batches: sixteen units."""
FEW: dict[str, Any] = {"source": "weights", "analyzers": ["symmetry"]}
"""Four units that take a moment."""
WORDS = ("inspect", "demo", "--source", "weights", "--analyzer", "symmetry", "--no-progress")
"""The same for the program."""
KERNELS = ["window:4", "window:12", "rbf"]
SMALL: dict[str, Any] = {"length": 16, "windows": 4, "generate": 0}
SWEPT: dict[str, Any] = {"length": 16, "windows": 4, "batch_size": 2, "generate": 2, "sweep": "layers"}
"""Two batches, four layers and three kernels: 24 parts."""
HEALED: dict[str, Any] = {"length": 16, "windows": 4, "batch_size": 4, "train": 24}
"""Without `generate`, which the program has no option for."""
BUDGET = SMALL | {"layers": [1], "budget": "loss:10%", "latents": "group=1"}
SERIES: dict[str, Any] = {"analyzers": ["symmetry"], "length": 16, "windows": 4, "layers": [0, 1]}
LATER = "The report is written after the last one.\n"
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


def words_of(options: dict[str, Any]) -> list[str]:
    """Return options as the program takes them."""
    words = ["--no-progress"]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-').replace('analyzers', 'analyzer')}"
        words += [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return words


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> list[str]:
    """Three checkpoints, not in the order of their steps."""
    folder, found = tmp_path_factory.mktemp("series"), sorted(CHECKPOINTS.iterdir())[:3]
    copies = [shutil.copytree(place, folder / place.name) for place in (found[1], found[0], found[2])]
    for copy in copies:
        for file in CHECKPOINTS.parent.glob("tokenizer*"):
            shutil.copy(file, copy)
    return [*map(str, copies)]


PIECES: dict[str, tuple[Any, str, str]] = {
    "inspect": (Inspection, "read_unit", "*/*.safetensors"),
    "converge": (Series, "read_unit", "*/*.safetensors"),
    "sweep": (SweptBatch, "losses", "*/*/batch-*.safetensors"),
    "heal": (Descent, "advance", "*/*/heal-*.safetensors"),
    "budget": (search, "losses", "*/*/losses-on-*.safetensors"),
}
"""The function that is called for each piece of work, and the files of pieces."""


@pytest.fixture
def case(request, places) -> SimpleNamespace:
    """A command, the same call of the library, and its pieces."""
    kernels = [word for kernel in KERNELS for word in ("--kernel", kernel)]
    function, arguments, options, words = {
        "inspect": (attnlens.inspect, ["demo"], INSPECTED, ["inspect", "demo"]),
        "converge": (attnlens.converge_checkpoints, [places], SERIES, ["converge", *places, "--checkpoints"]),
        "sweep": (attnlens.swap_kernel, ["demo", KERNELS], SWEPT, ["swap-kernel", "demo", *kernels]),
        "heal": (attnlens.heal, ["demo", "rbf"], HEALED, ["heal", "demo", "--kernel", "rbf"]),
        "budget": (attnlens.find_ranks, ["demo"], BUDGET, ["ranks", "demo"]),
    }[request.param]
    call = lambda **others: function(*arguments, **options | others)  # noqa: E731
    *computing, pieces = PIECES[request.param]
    fields = {"words": [*words, *words_of(options)], "computing": computing, "pieces": pieces}
    return SimpleNamespace(name=request.param, call=call, **fields)


def cases(*names: Any) -> Any:
    return pytest.mark.parametrize("case", names, indirect=True)


ALL = cases(*PIECES)
_whole: dict[str, tuple[str, int]] = {}


@pytest.fixture
def whole(case, tmp_path) -> tuple[str, int]:
    """The report of an undisturbed run, and its number of pieces."""
    if case.name not in _whole:
        with counted(*case.computing) as calls:
            _whole[case.name] = bytes_of(case.call(work=tmp_path / "whole")), len(calls)
        assert is_cleared(tmp_path / "whole"), "finished units are removed with the report"
    return _whole[case.name]


@contextmanager
def counted(owner: Any, name: str, most: float = float("inf")) -> Iterator[list[Any]]:
    """Record the calls of a function, which is interrupted after so many."""
    calls, honest = [], getattr(owner, name)

    def counting(*arguments: Any, **options: Any) -> Any:
        if len(calls) >= most:
            raise KeyboardInterrupt
        calls.append(arguments)
        return honest(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counting)
        yield calls


@pytest.fixture
def failing(monkeypatch) -> dict[str, BaseException]:
    """Errors that units of an inspection raise, by name."""
    errors: dict[str, BaseException] = {}
    honest = Inspection._compute_unit

    def compute(self: Inspection, unit: Any) -> Any:
        if error := errors.get(unit.name):
            raise error
        return honest(self, unit)

    monkeypatch.setattr(Inspection, "_compute_unit", compute)
    return errors


def finished(folder: Path, pattern: str = "*/*.safetensors") -> list[Path]:
    """Return the files of finished units; `Path.glob` fails if a process removes a folder meanwhile."""
    return sorted(map(Path, glob.glob(str(folder / pattern))))  # noqa: PTH207


def is_cleared(folder: Path) -> bool:
    return not any(path.is_file() for path in folder.rglob("*"))


def shard_of(call: Callable[[], object]) -> ShardFinished:
    """Return what a shard raises at its end."""
    with pytest.raises(ShardFinished) as caught:
        call()
    return caught.value


def started(*words: object) -> subprocess.Popen[str]:
    """Start the program, which its forkserver kills together with this client."""
    client = [str(forkserver.commands() / "attnlens"), *map(str, words)]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(client, env=environment_with(), text=True, **streams)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until the condition is met, or the process ends."""
    for _ in range(120_000):
        if condition() or process.poll() is not None:
            return
        time.sleep(0.001)
    raise AssertionError("timeout")


@ALL
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
    # healing resumes from its last check; the original's loss is not kept
    assert len(calls) == {"heal": 14, "budget": total - most + 1}.get(case.name, total - most)
    assert costs == []
    assert is_cleared(tmp_path)


def test_a_comparison_of_kernels_that_is_interrupted_reports_the_measured_ones(tmp_path):
    def stop(stage: str, _done: int, _total: int) -> None:
        if stage.endswith(at):
            raise KeyboardInterrupt

    options = SMALL | {"controls": False, "progress": stop}
    at = "rbf:gamma=0.5, compare"
    with pytest.raises(Interrupted) as stopped:
        attnlens.swap_kernel("demo", KERNELS, **options, work=tmp_path)
    assert [swap.kernel for swap in stopped.value.report.swaps] == ["window:4", "window:12"]
    missing = "without kernel rbf:gamma=0.5, because the run was interrupted"
    assert missing in stopped.value.report.coverage.sentence
    at = "compare"
    with pytest.raises(KeyboardInterrupt) as nothing:
        attnlens.swap_kernel("demo", "linear", **options, work=tmp_path)
    assert not isinstance(nothing.value, Interrupted)


def test_healing_begins_anew_if_its_state_is_damaged_or_with_resume_false(monkeypatch, tmp_path, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(KernelRun, "_record", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            attnlens.heal("demo", "rbf", **HEALED, work=tmp_path)
    [state] = tmp_path.glob("*/*/heal-*.safetensors")
    content, steps = state.read_bytes(), []

    def first(self: Descent) -> None:
        steps.append(self.step)
        raise KeyboardInterrupt

    monkeypatch.setattr(Descent, "advance", first)
    for harmed, resume in ((content[:-1], True), (content, False)):
        state.write_bytes(harmed)
        with pytest.raises(KeyboardInterrupt):
            attnlens.heal("demo", "rbf", **HEALED, work=tmp_path, resume=resume)
    assert steps == [0, 0]
    assert f"it is kept as {state.name}.damaged" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
@cases("inspect")
def test_the_program_reports_what_is_finished_after_ctrl_c_and_resumes_after_any_end(case, whole, number, tmp_path):
    process = started(*case.words, "--work", tmp_path / "work", "--json", tmp_path / "report.json")
    wait_for(lambda: len(finished(tmp_path / "work")) >= 5, process)
    process.send_signal(number)
    printed = process.communicate()[1]
    kept = len(finished(tmp_path / "work"))
    assert 5 <= kept < 16
    if number == signal.SIGINT:
        assert process.returncode == 130, printed
        assert "Interrupted" in printed
        partial = json.loads((tmp_path / "report.json").read_text())
        assert partial["coverage"]["skipped"][0]["reason"] == "the run was interrupted"
    else:
        assert not (tmp_path / "report.json").exists()
    with counted(Inspection, "read_unit") as read:
        assert bytes_of(case.call(work=tmp_path / "work")) == whole[0]
    assert len(read) == 16 - kept


@pytest.mark.full
@ALL
def test_a_command_that_is_killed_at_any_moment_resumes_to_the_same_report(case, whole, tmp_path):
    """Before the first piece, between pieces, while one is written; finished pieces are not computed again."""
    moments, (report, total), resumed = random.Random(case.name), whole, 0  # noqa: S311
    for number in range({"inspect": 4, "sweep": 3}.get(case.name, 2)):
        folder = tmp_path / str(number)
        most = 1 if case.name == "heal" else max(1, total - 1)  # healing writes a single file again and again
        count = 0 if number == 2 else moments.randint(1, most)
        process = started(*case.words, "--work", folder)
        wait_for(lambda count=count, folder=folder: len(finished(folder, case.pieces)) >= count, process)
        time.sleep(moments.uniform(0, 0.05 if count else 1.5))
        process.kill()
        process.communicate()
        kept, units = len(finished(folder, case.pieces)), len(finished(folder))
        kept += total // 3 * units * (case.name == "sweep")  # whose parts are cleared with their kernel
        with counted(*case.computing) as calls:
            assert bytes_of(case.call(work=folder)) == report
        assert (len(calls) < total) == bool(kept or units) if case.name == "heal" else len(calls) <= total - kept
        resumed += 0 < len(calls) < total
        assert is_cleared(folder)
    assert resumed, "one of them was in the middle"


@pytest.mark.full
@cases("inspect", "sweep", "heal")
def test_programs_that_work_in_one_folder_at_once_report_the_same(case, whole, tmp_path):
    reports = [tmp_path / f"{number}.json" for number in range(2)]
    running = [started(*case.words, "--work", tmp_path / "work", "--json", path) for path in reports]
    for process, path in zip(running, reports, strict=True):
        assert process.communicate() == (None, f"Wrote {path}\n")
        assert process.returncode == 0
        assert bytes_of(path) == whole[0]
    assert is_cleared(tmp_path / "work")


def around_another(call: Callable[..., attnlens.Report], folder: Path) -> set[str]:
    """Return the reports of a run and of another, which ends and clears the folder in the middle of the first."""
    others: list[str] = []

    def another(_stage: str, done: int, _total: int) -> None:
        if done == 2 and not others:
            others.append("")
            others.append(bytes_of(call(work=folder)))
            assert is_cleared(folder)

    own = bytes_of(call(work=folder, progress=another))
    assert is_cleared(folder)
    return {own, others[1]}


@cases("inspect", *(pytest.param(name, marks=pytest.mark.full) for name in ("converge", "sweep")))
def test_a_run_may_end_and_clear_the_folder_in_the_middle_of_another(case, whole, tmp_path):
    assert around_another(case.call, tmp_path) == {whole[0]}


def test_the_parts_of_a_sweep_may_be_cleared_in_the_middle_by_another_run(tmp_path):
    options = SWEPT | {"windows": 2, "generate": 0, "controls": False}
    call = partial(attnlens.swap_kernel, "demo", KERNELS[:2], **options)
    assert around_another(call, tmp_path) == {bytes_of(call())}


@cases("sweep", "budget")
def test_the_program_keeps_the_pieces_of_an_interrupted_command(case, tmp_path):
    with counted(*case.computing, most=2):
        assert invoke(*case.words, "--work", tmp_path).returncode == 130
    assert finished(tmp_path, case.pieces)


@cases("converge")
def test_the_program_computes_a_shard_of_checkpoints(case, tmp_path):
    done = invoke(*case.words, "--work", tmp_path, "--shard", "2/2")
    assert (done.returncode, done.stderr.partition(";")[0]) == (0, "1 of 3 units are finished")
    assert len(finished(tmp_path)) == 1


def all_different(changes: dict[str, Callable[[], object]], facts: Callable[[], Any]) -> None:
    """Assert that each change gives facts with another key than all before, and none the same key."""
    keys = [key_of(facts())]
    assert key_of(facts()) == keys[0], "the control"
    for name, change in changes.items():
        change()
        key = key_of(facts())
        assert key not in keys, name
        keys.append(key)


def other_weights(place: Path) -> None:
    tensors = weights(place)
    tensors[min(name for name in tensors if name.endswith("wte.weight"))][0, 0] += 1
    stored(place, tensors)


def test_a_run_does_not_resume_from_other_settings(tmp_path):
    for options, count in (({}, 4), ({}, 0), ({"seed": 1}, 4), ({"seed": 1, "resume": False}, 4), ({}, 0)):
        with counted(Inspection, "read_unit") as read:
            shard_of(lambda o=options: attnlens.inspect("demo", **FEW | o, shard="1/1", work=tmp_path / "work"))
        assert len(read) == count, options


def test_the_key_of_an_inspection_depends_on_model_text_options_and_code(monkeypatch, tmp_path):
    place, text = saved(tmp_path / "a"), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    options = {"analyzers": ["symmetry"], "length": 8, "windows": 2, "text": [str(text)]}
    code = tmp_path / "attnlens" / "linalg"
    code.mkdir(parents=True)

    def swap_letters() -> None:
        content = json.loads((place / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["e"], vocabulary["o"] = vocabulary["o"], vocabulary["e"]
        (place / "tokenizer.json").write_text(json.dumps(content))

    def edit_code(text: str) -> None:
        (code / "spectra.py").write_text(text)
        store_module.own_code.cache_clear()
        monkeypatch.setattr(store_module, "PACKAGE", code.parent)

    changes = {
        "weights": lambda: other_weights(place),
        "config": lambda: edited(place / "config.json", scale_attn_by_inverse_layer_idx=True),
        "tokenizer": swap_letters,
        "text": lambda: text.write_text("pack my box with five dozen liquor jugs, said he. " * 20),
        "show": lambda: options.update(show="attention"),
        "seed": lambda: options.update(seed=1),
        "dtype": lambda: options.update(dtype="float64"),
        "heads": lambda: options.update(heads=[0]),
        "analyzers": lambda: options.update(analyzers=["spectrum"]),
        "version": lambda: monkeypatch.setattr(store_module, "_version", lambda _: "99.0"),
        "code": lambda: edit_code("first"),
        "other code": lambda: edit_code("other"),
    }
    all_different(changes, lambda: pipeline.open_in_worker(place, InspectRequest(**options))[0])
    monkeypatch.undo()
    store_module.own_code.cache_clear()


def test_the_key_of_a_swap_depends_on_model_texts_options_and_kernels(monkeypatch, tmp_path):
    place, kernels = saved(tmp_path / "model"), ["rbf"]
    files = {name: tmp_path / f"{name}.txt" for name in ("text", "calibration", "prompts")}
    files["text"].write_text("the quick brown fox jumps over the lazy dog. " * 40)
    files["calibration"].write_text("how vexingly quick daft zebras jump, and wolves. " * 40)
    files["prompts"].write_text("the quick\n")
    options = {"length": 16, "windows": 2, "generate": 2, "fit": True, "controls": False, "prompts": files["prompts"]}
    options |= {"text": [files["text"]], "calibration": [files["calibration"]], "allow_foreign_text": True}
    changes = {
        "weights": lambda: other_weights(place),
        "config": lambda: edited(place / "config.json", resid_pdrop=0.2),
        "generation_config": lambda: (place / "generation_config.json").write_text('{"eos_token_id": [3, 4]}'),
        "kernels": lambda: kernels.append("window:4"),
        "seed": lambda: options.update(seed=1),
        "text": lambda: files["text"].write_text("said he of five dozen liquor jugs. " * 40),
        "calibration": lambda: files["calibration"].write_text("a mad boxer shot a quick gloved jab. " * 40),
        "prompts": lambda: files["prompts"].write_text("0\n0z\n"),
        "boundary of prompts": lambda: files["prompts"].write_text("00\n0z\n"),
        "code of a kernel": lambda: monkeypatch.setattr(swap_pipeline, "code_of", lambda _kernel: b"changed"),
    }
    all_different(changes, lambda: swap_pipeline.open_run(str(place), tuple(kernels), SwapRequest(**options))[0])
    budget = SMALL | {"controls": False, "budget": "loss:10%", "layers": [1]}
    keys = {key_of(rank_work("demo", RanksRequest(**budget, latents=form)).facts) for form in (None, "group=1")}
    assert len(keys) == 2


def test_parts_of_a_sweep_are_used_with_the_same_fit_alone(monkeypatch, tmp_path):
    options = SMALL | {"controls": False, "sweep": "layers", "fit": True, "work": tmp_path}
    for other, left in ((False, 1), (True, 4)):
        with counted(SweptBatch, "losses", most=3), pytest.raises(KeyboardInterrupt):
            attnlens.swap_kernel("demo", "rbf", **options, resume=False)
        if other:  # as on another machine, whose sums are rounded differently
            monkeypatch.setattr("attnlens.runs.swap.kernel_run.digest_of", lambda _fitted: "another")
        with counted(SweptBatch, "losses") as calls:
            attnlens.swap_kernel("demo", "rbf", **options)
        assert len(calls) == left


def test_the_key_of_a_series_depends_on_files_text_and_options(places, tmp_path):
    copies = [shutil.copytree(place, tmp_path / Path(place).name) for place in places]
    options = SERIES | {"text": [tmp_path / "t.txt"]}
    (tmp_path / "t.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)

    def add_space(pattern: str) -> None:
        path = min(copies[0].glob(pattern))
        path.write_text(path.read_text() + " ")

    changes = {
        "weights": lambda: shutil.copy(copies[1] / "model.safetensors", copies[0] / "model.safetensors"),
        "config": lambda: add_space("config*.json"),
        "tokenizer": lambda: add_space("tokenizer*.json"),
        "windows": lambda: options.update(windows=3),
        "text": lambda: (tmp_path / "t.txt").write_text("pack my box with five dozen liquor jugs. " * 40),
    }
    names = [*map(str, copies)]
    all_different(changes, lambda: series.open_in_worker(names, (), CheckpointsRequest(**options))[0])


def test_the_key_of_a_hub_model_depends_on_its_commit(hub, monkeypatch):
    keys = []
    for commit in (fake_hub.COMMIT, fake_hub.COMMIT, "f" * 40):
        monkeypatch.setattr(fake_hub, "COMMIT", commit)
        keys.append(key_of(pipeline.open_in_worker(fake_hub.OPEN, InspectRequest(**FEW))[0]))
    assert keys[0] == keys[1] != keys[2]


def test_units_are_removed_when_all_outputs_are_written_and_stay_if_one_is_not(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    for option in ("--json", "--html", "--csv"):
        done = invoke(*WORDS, "--work", tmp_path / "work", option, tmp_path / "full")
        assert done.returncode == 2
        assert "No space left" in done.stderr
        assert len(finished(tmp_path / "work")) == 4
    assert invoke(*WORDS, "--work", tmp_path / "work", "--json", "-").returncode == 0
    assert is_cleared(tmp_path / "work")


def test_a_model_that_could_not_be_saved_is_not_swept_again(monkeypatch, tmp_path):
    def full(*_: object) -> None:
        raise OutputError("The disk is full.", "Make room.")

    options = SMALL | {"controls": False, "sweep": "layers", "work": tmp_path / "work", "save": tmp_path / "model"}
    with monkeypatch.context() as patch, counted(SweptBatch, "losses") as calls:
        patch.setattr("attnlens.runs.swap.pipeline.save_swapped", full)
        with pytest.raises(UnsavedError):
            attnlens.swap_kernel("demo", "rbf", **options)
    assert len(calls) == 4
    with counted(SweptBatch, "losses") as calls:
        attnlens.swap_kernel("demo", "rbf", **options)
    assert calls == []
    assert (tmp_path / "model" / "attnlens.json").is_file()
    assert is_cleared(tmp_path / "work")


@cases("inspect", "converge", "sweep")
def test_a_shard_and_other_processes_compute_the_units_of_the_same_report(case, whole, tmp_path):
    shard_of(lambda: case.call(work=tmp_path, shard="2/3"))
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
        done = program(*WORDS, *more)
        assert done.returncode == 0, done.stderr
        assert bytes_of(more[-1]) == whole


@pytest.mark.parametrize(
    "options",
    [
        {"length": 8, "windows": 2, "layers": [0], "heads": [0, 3], "analyzers": ["selection", "ksvd"]},
        {"length": 8, "windows": 2, "layers": [1], "heads": [2], "show": "attention"},
        FEW | {"from_files": True},
    ],
    ids=["gathered", "shown", "files"],
)
def test_shards_with_gathered_values_shown_rows_or_deferred_weights_are_one_run(options, tmp_path):
    for shard in ("2/2", "1/2"):
        shard_of(lambda shard=shard: attnlens.inspect("demo", **options, shard=shard, work=tmp_path))
    with counted(Inspection, "read_unit") as read:
        found = bytes_of(attnlens.inspect("demo", **options, work=tmp_path))
    assert read == []
    assert found == bytes_of(attnlens.inspect("demo", **options))


def test_kernels_of_several_shards_use_the_widest_window_of_the_run(demo, tmp_path):
    options = SMALL | {"length": 48, "controls": False}
    for index in (2, 1):
        shard_of(lambda i=index: attnlens.swap_kernel("demo", KERNELS, **options, shard=f"{i}/2", work=tmp_path))
    report = attnlens.swap_kernel("demo", KERNELS, **options, work=tmp_path)
    assert [swap.beyond_window.window for swap in report.swaps] == [12, 12, 12]
    assert report.windows == attnlens.swap_kernel(demo, KERNELS, **options).windows
    alone = attnlens.swap_kernel(demo, "window:4", **options).swap
    assert alone.beyond_window.window == 4, "the control"
    assert alone.beyond_window.tokens > report.swap.beyond_window.tokens


ARRAY = ("COUNT", "MIN", "MAX", "STEP")
ENVIRONMENTS: list[tuple[dict[str, str] | tuple[str, ...], str | None]] = [
    *((("5", "3", "4"), "2/3"), (("0", "2", "0"), "1/2"), (("1", "2"), "2/2"), (("4", "3", "0", "4", "2"), "3/3")),
    *((("1",), None), (("3", "3", "0"), None), (("1", "3", "2"), None)),
    *((("1", "3", "0", "4", "2"), None), (("0", "3", "0", "7", "1"), None)),
    ({"RANK": "2", "WORLD_SIZE": "3"}, "3/3"),
    ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_ARRAY_TASK_ID": "1"}, "1/1"),
    *(({}, None), ({"RANK": "0"}, None), ({"RANK": "3", "WORLD_SIZE": "3"}, None)),
    *(({"RANK": "x", "WORLD_SIZE": "3"}, None), ({"RANK": "0", "WORLD_SIZE": "0"}, None)),
]
"""Environment (a tuple: number of a Slurm array's task, COUNT, MIN, MAX and STEP) → shard; None: it is refused."""


def test_a_process_reads_its_shard_from_its_environment_or_is_refused():
    for values, shard in ENVIRONMENTS:
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(values, tuple):
                names = ("ID", *ARRAY)[: len(values)]
                values = {f"SLURM_ARRAY_TASK_{name}": value for name, value in zip(names, values, strict=True)}
            for name, value in values.items():
                patch.setenv(name, value)
            if shard is None:
                refused(UsageError, lambda: attnlens.inspect("demo", **FEW, shard="auto"), "shard", "I/N")
            else:
                assert InspectRequest(shard="auto").shard == shard, values
    for wrong in ("5/4", "0/2", "x", "1", "1/", "/2", "-1/2", "1/0", "1.5/2", "1/2/3", "", " 1/2", 1):
        refused(UsageError, lambda wrong=wrong: attnlens.inspect("demo", **FEW, shard=wrong), "shard", "I/N")


def inspected(folder: Path, *more: object, quiet: bool = True) -> subprocess.CompletedProcess[str]:
    words = [word for word in WORDS if word != "--no-progress" or quiet]
    return invoke(*words, "--json", folder / "r.json", "--work", folder / "work", *more)


def test_a_unit_that_fails_makes_the_report_partial_and_the_same_command_completes_it(failing, tmp_path):
    failing["weights of layer 1"] = ZeroDivisionError("odd\nat all")
    with counted(Inspection, "_compute_unit") as tries:
        done = inspected(tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"PARTIAL: 24 of 32 heads, because weights of layer 1: {ODD}" in done.stdout
    assert [unit.name for _, unit in tries].count("weights of layer 1") == 2, "it is tried once more"
    strict = inspected(tmp_path, "--strict", quiet=False)
    assert strict.returncode == 3
    assert f"PARTIAL: 24 of 32 heads, because weights of layer 1: {ODD}" in strict.stderr
    assert strict.stderr.index(f"weights of layer 1 failed: {ODD}\n") < strict.stderr.index("Wrote")
    assert len(finished(tmp_path / "work")) == 3
    failing.clear()
    failing.update({f"weights of layer {layer}": ZeroDivisionError("again") for layer in (0, 2, 3)})
    assert inspected(tmp_path, "--strict").returncode == 0, "finished units are not computed again"
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
    first = inspected(tmp_path, "--shard", "1/2", "--strict")
    assert first.returncode == 0, "layer 1 is the second shard's"
    assert first.stderr == f"2 of 4 units are finished; weights of layer 1 and 1 more remain. {LATER}"
    second = inspected(tmp_path, "--shard", "2/2", "--strict")
    assert second.returncode == 3
    assert second.stderr == (
        f"weights of layer 1 failed: {ODD}\n3 of 4 units are finished; weights of layer 1 remains. {LATER}"
    )
    assert inspected(tmp_path, "--shard", "2/2").returncode == 0


def test_an_error_that_concerns_all_units_and_a_failure_of_all_end_the_run(failing, tmp_path):
    failing["weights of layer 3"] = ModelError("The model is broken.", "Mend it.")
    ended(inspected(tmp_path), "The model is broken.", "Mend it.")
    assert not (tmp_path / "r.json").exists()
    assert len(finished(tmp_path / "work")) == 3, "finished units stay"
    (tmp_path / "b").mkdir()
    for error, code, words in ((MemoryError(), 2, "Not enough memory."), (ZeroDivisionError("odd"), 70, ODD)):
        failing.update({f"weights of layer {layer}": error for layer in range(4)})
        done = inspected(tmp_path / "b")
        assert done.returncode == code
        assert words in done.stderr


def test_a_batch_of_a_model_in_memory_that_fails_is_missing(demo, failing):
    failing["tokens of batch 1"] = ValueError("odd")
    report = attnlens.inspect(demo, length=16, windows=4, batch_size=2, analyzers=["symmetry"])
    assert report.settings.windows == 2
    assert "tokens of batch 1: ValueError: odd" in report.coverage.sentence


def test_a_kernel_that_fails_is_missing_with_its_reason_and_its_parts_are_kept(monkeypatch, tmp_path):
    swept, tries, options = KernelRun._sweep, [], SWEPT | {"generate": 0, "controls": False, "work": tmp_path}

    def fails_after_its_sweep(self: KernelRun, swap: Any) -> Any:
        found = swept(self, swap)
        if self.kernel.spelling == "window:12":
            tries.append(1)
            raise ZeroDivisionError("odd")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(KernelRun, "_sweep", fails_after_its_sweep)
        report = attnlens.swap_kernel("demo", KERNELS, **options)
    assert len(tries) == 2
    assert [swap.kernel for swap in report.swaps] == ["window:4", "rbf:gamma=0.5"]
    assert [(skip.site, skip.reason) for skip in report.coverage.skipped] == [("kernel window:12", ODD)]
    with counted(KernelRun, "run") as kernels, counted(SweptBatch, "losses") as parts:
        again = attnlens.swap_kernel("demo", KERNELS, **options)
    assert (len(kernels), len(parts)) == (1, 0)
    assert [swap.kernel for swap in again.swaps] == ["window:4", "window:12", "rbf:gamma=0.5"]
    assert is_cleared(tmp_path)


def test_a_checkpoint_with_a_failed_unit_is_read_again_without_its_finished_units(places, tmp_path, monkeypatch):
    honest, names, fails = Inspection._compute_unit, [], [True]

    def failing(self: Inspection, unit: Any) -> Any:
        names.append(unit.name)
        if "step-00030" in str(self.loaded.folder) and unit.name == "weights of layer 1" and fails:
            raise ZeroDivisionError("odd")
        return honest(self, unit)

    monkeypatch.setattr(Inspection, "_compute_unit", failing)
    report = attnlens.converge_checkpoints(places, **SERIES, work=tmp_path)
    assert f"in step-00030, weights of layer 1: {ODD}" in report.coverage.sentence
    fails.clear()
    names.clear()
    assert attnlens.converge_checkpoints(places, **SERIES, work=tmp_path).coverage.complete
    assert names == ["weights of layer 1"]
    assert is_cleared(tmp_path)


def test_a_checkpoint_that_fails_is_missing_with_its_reason(places, tmp_path, monkeypatch):
    honest, options = Series.read_unit, SERIES | {"windows": 2, "layers": [0], "work": tmp_path}

    def failing(self: Series, name: str) -> Any:
        if "step-00030" in name:
            raise ZeroDivisionError("odd")
        return honest(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Series, "read_unit", failing)
        report = attnlens.converge_checkpoints(places, **options)
    assert [(skip.site, skip.reason) for skip in report.coverage.skipped] == [("step-00030", ODD)]
    with counted(Series, "read_unit") as calls:
        assert attnlens.converge_checkpoints(places, **options).coverage.complete
    assert len(calls) == 1


def test_what_prevents_the_work_is_named_before_the_model_is_loaded(demo, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    inspect, swap = (attnlens.inspect, FEW), (attnlens.swap_kernel, SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(attnlens.models.loading, "load", lambda *_, **__: pytest.fail("it was loaded"))
        for call, options in (inspect, swap, (attnlens.converge_checkpoints, SERIES)):
            model = () if call is attnlens.converge_checkpoints else ("demo",)
            for more, kind, words in (
                ({"work": tmp_path / "file"}, OutputError, "Finished units cannot be kept in"),
                ({"engine": "ray", "address": "127.0.0.1:9"}, UsageError, "No Ray cluster answers at 127.0.0.1:9"),
                ({"jobs": 2, "address": "127.0.0.1:9"}, UsageError, "address applies only to engine='ray'"),
                ({"jobs": 2, "work": "memory://units"}, UsageError, "memory"),
            ):
                refused(kind, lambda c=call, m=model, o=options | more: c(*m, **o), words)
    for more in ({"work": tmp_path}, {"shard": "1/2"}, {"jobs": 2}, {"resume": False}, {"engine": "ray"}):
        name = next(iter(more))
        for call, options in (inspect, swap):
            refused(UsageError, lambda c=call, o=options | more: c(demo, **o), "in memory", name)
        if name in ("jobs", "shard", "engine"):
            call = lambda o=more: attnlens.swap_kernel("demo", "rbf", save=tmp_path / "m", **o)  # noqa: E731
            refused(UsageError, call, f"in this process, which {name} prevents")


def test_the_program_refuses_in_two_lines_with_exit_code_2(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    for words, *parts in (
        (("inspect", "demo", "--shard", "5/4"), "shard", "I/N"),
        ((*WORDS, "--work", tmp_path / "file"), "file", "--work"),
        (("swap-kernel", "demo", "--work", tmp_path / "file" / "x"), "file", "--work"),
        ((*WORDS, "--engine", "ray"), "No Ray cluster answers at 127.0.0.1:9"),
        (("inspect", "demo", "--engine", "dask"), "dask"),
        (("inspect", "demo", "--engine", "slurm"), "slurm"),
        (("swap-kernel", "demo", "--fit", "--calibration", "-", "--jobs", "2"), "from stdin"),
        (("converge", "--shard", "1/2"), "--shard applies to checkpoints"),
        (("converge", "--head", "0.1", "--jobs", "2"), "--jobs applies to checkpoints"),
    ):
        ended(invoke(*words), *parts)


def test_a_worker_that_finds_another_model_is_refused_by_the_difference(tmp_path):
    place = saved(tmp_path / "gpt2")
    honest, options = pipeline.run_units, FEW | {"work": tmp_path / "work"}

    def changed(*arguments: Any, **more: Any) -> Any:
        tiny.gpt2().save_pretrained(place)
        return honest(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch, forkserver.workers():
        patch.setattr(pipeline, "run_units", changed)
        call = lambda: attnlens.inspect(str(place), **options, jobs=2)  # noqa: E731
        refused(ModelError, call, "A worker's inputs differ from those of the run: model.files")
