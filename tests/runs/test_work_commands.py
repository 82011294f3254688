"""Tests that a command's report is the same however its units were computed: killed, sharded, shared out, or failed."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_hub
import forkserver
import pytest
import tiny
from hostile import refused, saved
from program import attnlens as program
from program import environment_with
from program import refused as ended
from reports import bytes_of, timeless
from safetensors.torch import load, save

import attnlens
from attnlens.errors import ModelError, OutputError, ShardFinished, UsageError
from attnlens.lab.heal.pipeline import Descent
from attnlens.lab.ranks import search
from attnlens.lab.ranks.pipeline import rank_work
from attnlens.requests import RanksRequest, SwapRequest
from attnlens.runs import store as store_module
from attnlens.runs.inspect import pipeline
from attnlens.runs.inspect.inspection import Inspection
from attnlens.runs.progress import Interrupted
from attnlens.runs.series import Series
from attnlens.runs.swap import pipeline as swap_pipeline
from attnlens.runs.swap.kernel_run import KernelRun
from attnlens.runs.swap.pipeline import swap_work
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
SWEPT: dict[str, Any] = {"length": 32, "windows": 4, "batch_size": 2, "generate": 2, "sweep": "layers"}
"""Two batches, four layers and three kernels: 24 parts."""
HEALED: dict[str, Any] = {"length": 16, "windows": 4, "batch_size": 4, "train": 24}
"""Without `generate`, which the program has no option for."""
BUDGET = SMALL | {"layers": [1], "budget": "loss:10%", "latents": "group=1"}
SERIES: dict[str, Any] = {"analyzers": ["symmetry"], "length": 16, "windows": 4, "layers": [0, 1]}


def words_of(options: dict[str, Any]) -> list[str]:
    """Return options as the program takes them."""
    words = ["--no-progress"]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-').replace('analyzers', 'analyzer')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return words


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> list[str]:
    """Three checkpoints of this machine, not in the order of their steps."""
    folder, found = tmp_path_factory.mktemp("series"), sorted(CHECKPOINTS.iterdir())[:3]
    copies = [shutil.copytree(place, folder / place.name) for place in (found[1], found[0], found[2])]
    for copy in copies:
        for file in CHECKPOINTS.parent.glob("tokenizer*"):
            shutil.copy(file, copy)
    return [*map(str, copies)]


@dataclass(frozen=True)
class Case:
    """A command, the same call of the library, and what it computes piece by piece."""

    words: list[str]
    call: Callable[..., attnlens.Report]
    computing: tuple[type | Any, str]
    """The function that is called for each piece."""
    pieces: str
    """The files of pieces, in a folder of work."""
    times: int
    """How often it is killed."""


@pytest.fixture
def case(request, places) -> Case:
    kernels = [word for kernel in KERNELS for word in ("--kernel", kernel)]
    return {
        "inspect": lambda: Case(
            ["inspect", "demo", *words_of(INSPECTED)],
            lambda **more: attnlens.inspect("demo", **INSPECTED | more),
            (Inspection, "read_unit"),
            "*/*.safetensors",
            4,
        ),
        "converge": lambda: Case(
            ["converge", *places, "--checkpoints", *words_of(SERIES)],
            lambda **more: attnlens.converge_checkpoints(places, **SERIES | more),
            (Series, "read_unit"),
            "*/*.safetensors",
            2,
        ),
        "sweep": lambda: Case(
            ["swap-kernel", "demo", *kernels, *words_of(SWEPT)],
            lambda **more: attnlens.swap_kernel("demo", KERNELS, **SWEPT | more),
            (SweptBatch, "losses"),
            "*/*/batch-*.safetensors",
            3,
        ),
        "heal": lambda: Case(
            ["heal", "demo", "--kernel", "rbf", *words_of(HEALED)],
            lambda **more: attnlens.heal("demo", "rbf", **HEALED | more),
            (Descent, "advance"),
            "*/*/heal-*.safetensors",
            2,
        ),
        "budget": lambda: Case(
            ["ranks", "demo", *words_of(BUDGET)],
            lambda **more: attnlens.find_ranks("demo", **BUDGET | more),
            (search, "losses"),
            "*/*/losses-on-*.safetensors",
            2,
        ),
    }[request.param]()


ALL = pytest.mark.parametrize("case", ["inspect", "converge", "sweep", "heal", "budget"], indirect=True)
SHARED = pytest.mark.parametrize("case", ["inspect", "converge", "sweep"], indirect=True)
_whole: dict[str, tuple[str, int]] = {}


@pytest.fixture
def whole(request, case, tmp_path) -> str:
    """What a run that nothing disturbs reports."""
    name = request.node.callspec.params["case"]
    if name not in _whole:
        with counted(*case.computing) as calls:
            _whole[name] = bytes_of(case.call(work=tmp_path / "whole")), len(calls)
        assert is_cleared(tmp_path / "whole"), "what is kept is removed with the report"
    return _whole[name][0]


class counted:  # noqa: N801  # a function in its uses
    """Counts the calls of a function."""

    def __init__(self, owner: Any, name: str) -> None:
        self.patch, self.calls = pytest.MonkeyPatch(), []
        honest = getattr(owner, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            self.calls.append(arguments)
            return honest(*arguments, **options)

        self.patch.setattr(owner, name, counting)

    def __enter__(self) -> list[Any]:
        return self.calls

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


@pytest.fixture
def read() -> Iterator[list[Any]]:
    """The units of inspections that this process computes."""
    with counted(Inspection, "read_unit") as calls:
        yield calls


@pytest.fixture
def measured() -> Iterator[list[Any]]:
    """The kernels that this process measures."""
    with counted(KernelRun, "run") as calls:
        yield calls


def finished(folder: Path, pattern: str = "*/*.safetensors") -> list[Path]:
    """Return the files of finished units in a folder of work.

    `glob.glob` passes over a folder that a running process removes meanwhile; `Path.glob` raises FileNotFoundError.
    """
    return sorted(map(Path, glob.glob(str(folder / pattern))))  # noqa: PTH207


def is_cleared(folder: Path) -> bool:
    """Whether no file is left in a folder of work."""
    return not any(path.is_file() for path in folder.rglob("*"))


def shard_of(call: Callable[[], object]) -> ShardFinished:
    """What a shard says at its end."""
    with pytest.raises(ShardFinished) as caught:
        call()
    return caught.value


def started(*words: object) -> subprocess.Popen[str]:
    """The program, which its forkserver kills with what stands for it here."""
    command = [str(forkserver.commands() / "attnlens"), *map(str, words)]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment_with(), text=True, **streams)


def awaited(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until it holds, or the process ends."""
    for _ in range(120_000):
        if condition() or process.poll() is not None:
            return
        time.sleep(0.001)
    raise AssertionError("It never came to pass.")


# --- killed and interrupted -------------------------------------------------------------------------------------------


@ALL
def test_a_command_that_is_killed_at_any_moment_resumes_to_the_same_report(case, whole, request, tmp_path):
    """Before the first piece, between them, while one is written; what is finished is not computed again."""
    name = request.node.callspec.params["case"]
    moments, total = random.Random(name), _whole[name][1]  # noqa: S311
    resumed = 0
    for number in range(case.times):
        folder = tmp_path / str(number)
        most = 1 if name == "heal" else max(1, total - 1)  # healing writes a single file again and again
        count = 0 if number == 2 else moments.randint(1, most)
        process = started(*case.words, "--work", folder)
        awaited(lambda count=count, folder=folder: len(finished(folder, case.pieces)) >= count, process)
        time.sleep(moments.uniform(0, 0.05 if count else 1.5))
        process.kill()
        process.communicate()  # whose end comes with that of the run
        kept, whole_units = len(finished(folder, case.pieces)), len(finished(folder))
        if name == "sweep":  # whose parts are cleared with their kernel
            kept += total // 3 * whole_units
        with counted(*case.computing) as calls:
            if number == 0:
                done = program(*case.words, "--work", folder, "--json", tmp_path / "report.json")
                assert done.returncode == 0, done.stderr
                assert bytes_of(tmp_path / "report.json") == whole
            else:
                assert bytes_of(case.call(work=folder)) == whole
                if name == "heal":
                    assert (len(calls) < total) == bool(kept or whole_units)
                else:
                    assert len(calls) <= total - kept
                resumed += 0 < len(calls) < total
        assert not list(folder.rglob("*.safetensors")), "what is kept is removed with the report"
    assert resumed, "one of them was in the middle"


def test_an_interrupted_command_reports_what_is_finished_and_resumes(read, tmp_path):
    words = "inspect", "demo", *words_of(INSPECTED), "--work", tmp_path / "work", "--json", tmp_path / "report.json"
    process = started(*words)
    awaited(lambda: len(finished(tmp_path / "work")) >= 5, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130, said
    assert "Interrupted" in said
    kept = len(finished(tmp_path / "work"))
    assert 5 <= kept < 16
    partial = json.loads((tmp_path / "report.json").read_text())
    assert partial["coverage"]["skipped"][0]["reason"] == "the run was interrupted"
    found = attnlens.inspect("demo", **INSPECTED, work=tmp_path / "work")
    assert len(read) == 16 - kept
    assert bytes_of(found) == bytes_of(attnlens.inspect("demo", **INSPECTED))


def stopping(at: str, count: int) -> Callable[[str, int, int], None]:
    """Interrupt when progress has told so much of a stage."""

    def stop(stage: str, done: int, _total: int) -> None:
        if stage.endswith(at) and done >= count:
            raise KeyboardInterrupt

    return stop


def test_an_interrupted_call_carries_the_report_of_what_is_finished(read, tmp_path):
    with pytest.raises(Interrupted) as caught:
        attnlens.inspect("demo", **INSPECTED, work=tmp_path, progress=stopping("tokens", 3))
    assert caught.value.report.settings.windows == 3, "four layers, three batches"
    assert len(finished(tmp_path)) == 7


def test_an_interrupted_series_has_the_checkpoints_that_are_finished(places, tmp_path):
    with pytest.raises(Interrupted) as stopped:
        attnlens.converge_checkpoints(places, **SERIES, work=tmp_path, progress=stopping("checkpoints", 2))
    assert stopped.value.report.experiments[0].settings["checkpoints"] == ["step-00000", "step-00030"]
    with counted(Series, "read_unit") as calls:
        attnlens.converge_checkpoints(places, **SERIES, work=tmp_path)
    assert len(calls) == 1


def test_an_interrupted_run_reports_the_kernels_that_it_measured(tmp_path):
    with pytest.raises(Interrupted) as stopped:
        attnlens.swap_kernel("demo", KERNELS, **SMALL, work=tmp_path, progress=stopping("rbf:gamma=0.5, compare", 0))
    report = stopped.value.report
    assert [swap.kernel for swap in report.swaps] == ["window:4", "window:12"]
    assert "without kernel rbf:gamma=0.5, because the run was interrupted" in report.coverage.sentence
    with pytest.raises(KeyboardInterrupt) as nothing:
        attnlens.swap_kernel("demo", KERNELS, **SMALL, work=tmp_path / "b", progress=stopping("compare", 0))
    assert not isinstance(nothing.value, Interrupted)


@pytest.mark.parametrize("resume", [True, False])
def test_a_healing_resumes_from_its_last_check_and_with_no_resume_begins_anew(resume, monkeypatch, tmp_path):
    honest, steps = Descent.advance, []

    def stops(self: Descent) -> Any:
        if len(steps) == 13:
            raise KeyboardInterrupt
        steps.append(self.step)
        return honest(self)

    with monkeypatch.context() as patch:
        patch.setattr(Descent, "advance", stops)
        with pytest.raises(Interrupted) as stopped:
            attnlens.heal("demo", "rbf", **HEALED, work=tmp_path)
    assert stopped.value.report.swap.healing.interrupted
    assert finished(tmp_path) == [], "an interrupted kernel is not a finished one"
    with counted(Descent, "advance") as calls:
        found = attnlens.heal("demo", "rbf", **HEALED, work=tmp_path, resume=resume)
    assert len(calls) == (14 if resume else 24)
    assert bytes_of(found) == bytes_of(attnlens.heal("demo", "rbf", **HEALED))


def test_a_damaged_state_of_a_healing_is_named_and_the_healing_begins_anew(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(KernelRun, "_record", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attnlens.heal("demo", "rbf", **HEALED, work=tmp_path)
    monkeypatch.undo()
    [state] = tmp_path.glob("*/*/heal-*.safetensors")
    state.write_bytes(state.read_bytes()[:-1])
    with counted(Descent, "advance") as calls:
        attnlens.heal("demo", "rbf", **HEALED, work=tmp_path)
    assert len(calls) == 24
    assert f"it is kept as {state.name}.damaged" in caplog.text


def test_a_search_for_ranks_does_not_measure_a_plan_twice(tmp_path):
    with counted(search, "losses") as calls, counted(search, "sensitivities") as costs:
        found = attnlens.find_ranks("demo", **BUDGET, work=tmp_path / "whole")
    plans = len(calls) - 2  # the model's own losses, on the windows that choose and on those that promise
    assert plans >= 3
    assert len(costs) == 1
    for count in (1, plans - 1):
        honest, left = search.losses, [count + 1]

        def stops(*arguments: Any, honest: Any = honest, left: list[int] = left) -> Any:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return honest(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "losses", stops)
            with pytest.raises(KeyboardInterrupt):
                attnlens.find_ranks("demo", **BUDGET, work=tmp_path / "work")
        with counted(search, "losses") as calls, counted(search, "sensitivities") as costs:
            again = attnlens.find_ranks("demo", **BUDGET, work=tmp_path / "work")
        assert len(calls) == plans + 2 - count
        assert costs == []
        assert bytes_of(again) == bytes_of(found)
        assert again.plan == found.plan


# --- what a run resumes from ------------------------------------------------------------------------------------------


def test_a_run_of_other_settings_models_and_code_does_not_resume_from_it(read, tmp_path, monkeypatch):
    def computes(count: int, model: Any = "demo", **more: Any) -> None:
        read.clear()
        shard_of(lambda: attnlens.inspect(model, **FEW | more, shard="1/1", work=tmp_path / "work"))
        assert len(read) == count, more

    computes(4)
    computes(0)
    for other in ({"seed": 1}, {"dtype": "float64"}, {"heads": [0]}, {"analyzers": ["spectrum"]}, {"resume": False}):
        computes(4, **other)
    computes(2, str(saved(tmp_path / "other")))
    computes(0)
    monkeypatch.setattr(store_module, "_version", lambda name: "99.0")
    computes(4)
    (tmp_path / "attnlens" / "linalg").mkdir(parents=True)
    monkeypatch.setattr(store_module, "PACKAGE", tmp_path / "attnlens")
    for content, count in (("first", 4), ("first", 0), ("other", 4)):
        (tmp_path / "attnlens" / "linalg" / "spectra.py").write_text(content)
        store_module.own_code.cache_clear()
        computes(count)
    store_module.own_code.cache_clear()


def other_weights(place: Path) -> None:
    """The same model with one number changed."""
    path = place / "model.safetensors"
    tensors = load(path.read_bytes())
    tensors[min(name for name in tensors if name.endswith("wte.weight"))][0, 0] += 1
    path.write_bytes(save(tensors, {"format": "pt"}))


@pytest.mark.parametrize("change", ["weights", "config", "tokenizer", "show", "text"])
def test_no_unit_of_another_config_vocabulary_or_text_is_used(change, read, tmp_path):
    place, text = saved(tmp_path / "a"), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    options = {"analyzers": ["symmetry"], "length": 8, "windows": 2, "text": [str(text)], "work": tmp_path / "work"}
    shard_of(lambda: attnlens.inspect(place, **options, shard="1/1"))
    if change == "weights":
        other_weights(place)
    elif change == "config":
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(config | {"scale_attn_by_inverse_layer_idx": True}))
    elif change == "tokenizer":
        content = json.loads((place / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["e"], vocabulary["o"] = vocabulary["o"], vocabulary["e"]
        (place / "tokenizer.json").write_text(json.dumps(content))
    elif change == "text":
        text.write_text("pack my box with five dozen liquor jugs, said he. " * 20)
    read.clear()
    found = attnlens.inspect(place, **options, **({"show": "attention"} if change == "show" else {}))
    assert len(read) == 3
    assert bool(found.inspection.attention) == (change == "show")


@pytest.mark.parametrize(
    "change", ["weights", "config", "generation_config", "kernels", "options", "text", "calibration", "prompts"]
)
def test_no_kernel_of_another_model_text_or_call_is_used(change, measured, tmp_path):
    place = saved(tmp_path / "model")
    files = {name: tmp_path / f"{name}.txt" for name in ("text", "calibration", "prompts")}
    files["text"].write_text("the quick brown fox jumps over the lazy dog. " * 40)
    files["calibration"].write_text("how vexingly quick daft zebras jump, and wolves. " * 40)
    files["prompts"].write_text("the quick\n")
    options = {"length": 16, "windows": 2, "generate": 2, "fit": True, "controls": False, "prompts": files["prompts"]}
    options |= {"text": [files["text"]], "calibration": [files["calibration"]], "allow_foreign_text": True}
    kernels = ["rbf"]

    def computes(count: int) -> None:
        measured.clear()
        shard_of(lambda: attnlens.swap_kernel(place, kernels, **options, shard="1/1", work=tmp_path / "work"))
        assert len(measured) == count

    computes(1)
    computes(0)
    if change == "weights":
        other_weights(place)
    elif change == "config":
        path = place / "config.json"
        path.write_text(path.read_text().replace('"resid_pdrop": 0.1', '"resid_pdrop": 0.2'))
    elif change == "generation_config":
        (place / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    elif change == "kernels":
        kernels.append("window:4")
    elif change == "options":
        options["seed"] = 1
    else:
        files[change].write_text("pack my box\n" if change == "prompts" else "said he of five dozen liquor jugs. " * 40)
    computes(len(kernels))


def test_no_kernel_of_another_form_prompt_code_or_fit_is_used(monkeypatch, tmp_path):
    small = SMALL | {"controls": False, "work": tmp_path / "work"}
    folders = set()
    for latents in (None, "group=1"):
        options = small | {"budget": "loss:10%", "layers": [1], "latents": latents}
        folders.add(rank_work("demo", RanksRequest(**options)).store.folder)
    for name, lines in (("one", "0\n0z\n"), ("two", "00\n0z\n")):
        (tmp_path / name).write_text(lines)
        folders.add(
            swap_work("demo", ("rbf",), SwapRequest(**small | {"prompts": tmp_path / name, "generate": 2})).store.folder
        )
    assert len(folders) == 4
    own = swap_work("demo", ("rbf",), SwapRequest(**small)).store.folder
    assert own == swap_work("demo", ("rbf",), SwapRequest(**small)).store.folder, "a control"
    with monkeypatch.context() as patch:
        patch.setattr(swap_pipeline, "code_of", lambda _kernel: b"changed")
        assert own != swap_work("demo", ("rbf",), SwapRequest(**small)).store.folder
    options = small | {"sweep": "layers", "fit": True}
    for changed, left in ((False, 1), (True, 4)):
        with pytest.raises(Interrupted):
            attnlens.swap_kernel("demo", "rbf", **options, progress=stopping("sweep", 3), resume=False)
        with counted(SweptBatch, "losses") as calls, monkeypatch.context() as patch:
            if changed:  # as on another machine, whose sums are rounded otherwise
                patch.setattr("attnlens.runs.swap.kernel_run.digest_of", lambda _fitted: "another")
            attnlens.swap_kernel("demo", "rbf", **options)
        assert len(calls) == left


@pytest.mark.parametrize("change", ["weights", "config", "tokenizer", "options", "text"])
def test_no_checkpoint_of_other_files_words_or_texts_is_used(change, places, tmp_path):
    copies = [shutil.copytree(place, tmp_path / Path(place).name) for place in places]
    options = SERIES | {"work": tmp_path / "work", "text": [tmp_path / "t.txt"]}
    (tmp_path / "t.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)

    def computes(count: int) -> None:
        with counted(Series, "read_unit") as calls:
            shard_of(lambda: attnlens.converge_checkpoints(copies, **options, shard="1/1"))
        assert len(calls) == count

    computes(3)
    computes(0)
    if change == "weights":
        shutil.copy(copies[1] / "model.safetensors", copies[0] / "model.safetensors")
    elif change == "text":
        (tmp_path / "t.txt").write_text("pack my box with five dozen liquor jugs, said he. " * 40)
    elif change == "options":
        options["windows"] = 3
    else:
        path = min(copies[0].glob(f"{change}*.json"))
        path.write_text(path.read_text() + " ")
    computes(3)


def test_a_hub_model_whose_branch_has_moved_is_read_again(hub, read, tmp_path, monkeypatch):
    for commit, count in ((fake_hub.COMMIT, 2), (fake_hub.COMMIT, 0), ("f" * 40, 2)):
        monkeypatch.setattr(fake_hub, "COMMIT", commit)
        read.clear()
        shard_of(lambda: attnlens.inspect(fake_hub.OPEN, **FEW, shard="1/1", work=tmp_path / "work"))
        assert len(read) == count, commit


def test_units_are_removed_when_all_outputs_are_written_and_stay_if_one_is_not(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    for option in ("--json", "--csv", "--html"):
        done = program(*WORDS, "--work", tmp_path / "work", option, tmp_path / "full")
        assert done.returncode == 2, done.stderr
        assert "No space left" in done.stderr
        assert len(finished(tmp_path / "work")) == 4
    assert program(*WORDS, "--work", tmp_path / "work", "--json", "-").returncode == 0
    assert is_cleared(tmp_path / "work")


def test_a_model_that_could_not_be_saved_is_not_swept_again(monkeypatch, tmp_path):
    def full(*_: object) -> None:
        raise OutputError("The disk is full.", "Make room.")

    options = SMALL | {"sweep": "layers", "work": tmp_path / "work", "save": tmp_path / "model"}
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


# --- shared out -------------------------------------------------------------------------------------------------------


@SHARED
def test_shards_compute_their_parts_and_the_same_command_without_one_writes_the_report(case, whole, tmp_path):
    work = "--work", tmp_path / "work"
    for index, remain in ((3, True), (1, True), (2, False)):
        if case.words[0] == "swap-kernel":  # shards of kernels are offered in Python only
            shard_of(lambda index=index: case.call(work=tmp_path / "work", shard=f"{index}/3"))
            continue
        done = program(*case.words, *work, "--shard", f"{index}/3", "--json", tmp_path / "shard.json")
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert (
            "The report is written"
            if remain
            else "units are finished: run the command without --shard to write the report."
        ) in done.stderr
        assert not (tmp_path / "shard.json").exists(), "a part is not a report"
    with counted(*case.computing) as calls:
        assert bytes_of(case.call(work=tmp_path / "work")) == whole
    assert calls == []
    assert is_cleared(tmp_path / "work")


@SHARED
def test_two_processes_find_what_one_finds_and_compute_what_is_missing_alone(case, whole, tmp_path):
    shard_of(lambda: case.call(work=tmp_path / "work", shard="2/2"))
    done = program(*case.words, "--jobs", "2", "--work", tmp_path / "work", "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    assert bytes_of(tmp_path / "r.json") == whole
    assert is_cleared(tmp_path / "work")
    shard_of(lambda: case.call(work=tmp_path / "work", shard="1/2"))
    with forkserver.workers(), counted(*case.computing) as calls:
        assert bytes_of(case.call(work=tmp_path / "work", jobs=2)) == whole
    assert calls == [], "others computed"


def test_shards_of_what_is_gathered_shown_or_read_from_files_are_one_run(tmp_path):
    some: dict[str, Any] = {"length": 16, "windows": 2}
    for name, options in {
        "gathered": some | {"layers": [0, 1], "heads": [0, 3], "analyzers": ["selection", "ksvd"]},
        "shown": some | {"layers": [1], "heads": [2], "show": "attention"},
        "files": FEW | {"from_files": True},
    }.items():
        for shard in ("2/2", "1/2"):
            shard_of(lambda s=shard, n=name, o=options: attnlens.inspect("demo", **o, shard=s, work=tmp_path / n))
        found = attnlens.inspect("demo", **options, work=tmp_path / name)
        assert bytes_of(found) == bytes_of(attnlens.inspect("demo", **options)), name


def test_kernels_of_several_shards_have_one_window_as_those_of_one_run(demo, tmp_path):
    """Control: alone, the narrower window looks at other tokens."""
    options = SMALL | {"length": 48}
    for index in (2, 1):
        shard_of(lambda i=index: attnlens.swap_kernel("demo", KERNELS, **options, shard=f"{i}/2", work=tmp_path))
    found = attnlens.swap_kernel("demo", KERNELS, **options, work=tmp_path)
    assert [swap.beyond_window.window for swap in found.swaps] == [12, 12, 12]
    assert found.windows == attnlens.swap_kernel(demo, KERNELS, **options).windows
    alone = attnlens.swap_kernel(demo, "window:4", **options).swap
    assert alone.beyond_window.window == 4
    assert alone.beyond_window.tokens > found.swap.beyond_window.tokens


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
    ({}, None),
    ({"RANK": "0"}, None),
    ({"RANK": "3", "WORLD_SIZE": "3"}, None),
    ({"RANK": "x", "WORLD_SIZE": "3"}, None),
    ({"RANK": "0", "WORLD_SIZE": "0"}, None),
    ({"SLURM_ARRAY_TASK_ID": "1"}, None),
    ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "0"}, None),
    ({"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "2"}, None),
    ({**STEPS, "SLURM_ARRAY_TASK_ID": "1"}, None),
    ({**STEPS, "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_MAX": "7", "SLURM_ARRAY_TASK_STEP": "1"}, None),
]


@pytest.mark.parametrize(("environment", "shard"), ENVIRONMENTS, ids=str)
def test_a_process_finds_its_shard_in_its_environment_or_is_refused(environment, shard, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if shard is None:
        refused(UsageError, lambda: attnlens.inspect("demo", **FEW, shard="auto"), "shard", "I/N")
    else:
        assert attnlens.requests.InspectRequest(shard="auto").shard == shard


@pytest.mark.parametrize("shard", ["5/4", "0/2", "x", "1", "1/", "/2", "-1/2", "1/0", "1.5/2", "1/2/3", "", " 1/2", 1])
def test_what_is_not_a_shard_is_refused(shard):
    refused(UsageError, lambda: attnlens.inspect("demo", **FEW, shard=shard), "shard", "I/N")


@pytest.mark.parametrize("case", ["inspect", "sweep", "heal"], indirect=True)
def test_programs_that_work_in_one_folder_at_once_all_report_rightly(case, whole, tmp_path):
    reports = [tmp_path / f"{number}.json" for number in range(2)]
    running = [started(*case.words, "--work", tmp_path / "work", "--json", path) for path in reports]
    for process, path in zip(running, reports, strict=True):
        assert process.communicate() == (None, f"Wrote {path}\n")
        assert process.returncode == 0
    assert [bytes_of(path) for path in reports] == [whole] * 2
    assert not list(tmp_path.glob("work/**/*.safetensors"))


@SHARED
def test_a_run_that_ends_and_clears_in_the_middle_of_another_does_it_no_harm(case, whole, tmp_path):
    other: list[str] = []

    def another(stage: str, done: int, _total: int) -> None:
        if done == 2 and not other:
            other.append("")
            other.append(bytes_of(case.call(work=tmp_path / "work")))
            assert is_cleared(tmp_path / "work")

    assert bytes_of(case.call(work=tmp_path / "work", progress=another)) == whole
    assert other[1:] == [whole]
    assert is_cleared(tmp_path / "work")


# --- failures ---------------------------------------------------------------------------------------------------------

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
    return tmp_path / "log"


def patched(report: Path, *more: object, quiet: bool = True) -> subprocess.CompletedProcess[str]:
    """The program with the third party's analyzer."""
    words = [word for word in WORDS if word != "--no-progress" or quiet]
    files = "--json", report, "--work", report.with_suffix(".work")
    return program(*words, "--analyzer", "patchy", *files, *more, PYTHONPATH=os.environ["PATCHY_PATH"])


def content(path: Path) -> dict[str, Any]:
    """A report's JSON without what differs from run to run."""
    return timeless(json.loads(path.read_text()))


def test_a_failing_unit_is_partial_with_its_reason_whoever_computes_it_and_the_same_command_mends_the_report(
    patchy, tmp_path, monkeypatch
):
    reason = "PARTIAL: 24 of 32 heads, because weights of layer 1: ZeroDivisionError: no such luck"
    here, there, whole = tmp_path / "here.json", tmp_path / "there.json", tmp_path / "whole.json"
    for path, jobs, times in ((here, (), 2), (there, ("--jobs", "2"), 4)):
        done = patched(path, *jobs)
        assert done.returncode == 0, done.stderr
        assert reason in done.stdout
        assert patchy.read_text() == "1\n" * times, "tried once more"
        strict = patched(path, *jobs, "--strict")
        assert strict.returncode == 3
        assert reason in strict.stderr
        patchy.write_text("1\n" * times)
    assert content(here) == content(there)
    said = patched(tmp_path / "said.json", quiet=False).stderr
    assert said.index("weights of layer 1 failed: ZeroDivisionError: no such luck\n") < said.index("Wrote")
    assert len(finished(here.with_suffix(".work"))) == 3
    monkeypatch.setenv("PATCHY", "0,2,3")  # which are not computed again
    assert patched(here, "--strict").returncode == 0
    assert is_cleared(here.with_suffix(".work"))
    monkeypatch.setenv("PATCHY", "none")
    assert patched(whole).returncode == 0
    assert content(here) == content(whole)


def test_shards_of_which_a_unit_failed_name_it_and_the_whole_command_computes_it(patchy, tmp_path, monkeypatch):
    report = tmp_path / "r.json"
    first = patched(report, "--shard", "1/2", "--strict")
    assert first.returncode == 0, "layer 1 is the second shard's"
    later = "The report is written after the last one.\n"
    assert first.stderr == f"2 of 4 units are finished; weights of layer 1 and 1 more remain. {later}"
    second = patched(report, "--shard", "2/2", "--strict")
    assert second.returncode == 3
    assert second.stderr == (
        "weights of layer 1 failed: ZeroDivisionError: no such luck\n"
        "3 of 4 units are finished; weights of layer 1 remains. The report is written after the last one.\n"
    )
    assert patched(report, "--shard", "2/2").returncode == 0
    monkeypatch.setenv("PATCHY", "0,2,3")  # which are not computed again
    assert patched(report, "--strict").returncode == 0
    assert len(content(report)["heads"]) == 32


@pytest.mark.parametrize("jobs", [(), ("--jobs", "2")], ids=["here", "elsewhere"])
def test_an_error_of_what_all_units_share_and_one_in_all_of_them_end_the_run(jobs, patchy, tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHY_KIND", "own")
    monkeypatch.setenv("PATCHY", "3")  # the last of four units: with two workers, it only starts after two others ended
    ended(patched(tmp_path / "a.json", *jobs), "The model is broken.", "Mend it.")
    assert patchy.read_text() == "3\n3\n"
    assert not (tmp_path / "a.json").exists()
    assert finished(tmp_path / "a.work"), "what is finished stays"
    monkeypatch.setenv("PATCHY", "0,1,2,3")
    monkeypatch.setenv("PATCHY_KIND", "memory")
    found = patched(tmp_path / "b.json", *jobs)
    ended(found, "First failure, weights of layer 0: MemoryError" if jobs else "Not enough memory.")
    monkeypatch.setenv("PATCHY_KIND", "plain")
    if not jobs:
        assert patched(tmp_path / "b.json").returncode == 70


def test_a_model_in_memory_and_batches_of_a_text_have_the_same_rule(demo, monkeypatch):
    honest = Inspection._compute_unit

    def fails(self: Inspection, unit: Any) -> Any:
        if unit.name == "tokens of batch 1":
            raise ValueError("odd")
        return honest(self, unit)

    monkeypatch.setattr(Inspection, "_compute_unit", fails)
    report = attnlens.inspect(demo, length=16, windows=4, batch_size=2, analyzers=["symmetry"])
    assert report.settings.windows == 2
    assert "tokens of batch 1: ValueError: odd" in report.coverage.sentence


def test_a_kernel_that_fails_is_missing_with_its_reason_and_its_parts_are_kept(monkeypatch, tmp_path):
    swept, tries = KernelRun._sweep, []

    def fails_after_its_sweep(self: KernelRun, swap: Any) -> Any:
        found = swept(self, swap)
        if self.kernel.spelling == "window:12":
            tries.append(1)
            raise ZeroDivisionError("odd")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(KernelRun, "_sweep", fails_after_its_sweep)
        report = attnlens.swap_kernel("demo", KERNELS, **SWEPT, work=tmp_path / "work")
    assert len(tries) == 2
    assert [swap.kernel for swap in report.swaps] == ["window:4", "rbf:gamma=0.5"]
    skipped = [(one.site, one.reason) for one in report.coverage.skipped]
    assert skipped == [("kernel window:12", "ZeroDivisionError: odd")]
    with counted(KernelRun, "run") as kernels, counted(SweptBatch, "losses") as parts:
        again = attnlens.swap_kernel("demo", KERNELS, **SWEPT, work=tmp_path / "work")
    assert (len(kernels), len(parts)) == (1, 0)
    assert [swap.kernel for swap in again.swaps] == ["window:4", "window:12", "rbf:gamma=0.5"]
    assert is_cleared(tmp_path / "work")


def test_a_checkpoint_of_which_a_unit_failed_is_read_again_and_its_other_units_are_not(places, tmp_path, monkeypatch):
    honest, names, fails = Inspection._compute_unit, [], [True]

    def failing(self: Inspection, unit: Any) -> Any:
        names.append(unit.name)
        if "step-00030" in str(self.loaded.folder) and unit.name == "weights of layer 1" and fails:
            raise ZeroDivisionError("odd")
        return honest(self, unit)

    monkeypatch.setattr(Inspection, "_compute_unit", failing)
    report = attnlens.converge_checkpoints(places, **SERIES, work=tmp_path)
    assert "in step-00030, weights of layer 1: ZeroDivisionError: odd" in report.coverage.sentence
    fails.clear()
    names.clear()
    assert attnlens.converge_checkpoints(places, **SERIES, work=tmp_path).coverage.complete
    assert names == ["weights of layer 1"]
    assert is_cleared(tmp_path)


def test_a_checkpoint_that_fails_is_missing_with_its_reason(places, tmp_path, monkeypatch):
    honest = Series.read_unit

    def failing(self: Series, name: str) -> Any:
        if "step-00030" in name:
            raise ZeroDivisionError("odd")
        return honest(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Series, "read_unit", failing)
        report = attnlens.converge_checkpoints(places, **SERIES, work=tmp_path)
    assert [(one.site, one.reason) for one in report.coverage.skipped] == [("step-00030", "ZeroDivisionError: odd")]
    with counted(Series, "read_unit") as calls:
        assert attnlens.converge_checkpoints(places, **SERIES, work=tmp_path).coverage.complete
    assert len(calls) == 1


# --- refused ----------------------------------------------------------------------------------------------------------


def test_what_the_work_lacks_is_said_before_the_model_is_read(demo, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setattr(attnlens.models.loading, "load", lambda *_, **__: pytest.fail("it was loaded"))
        for call, options in (
            (attnlens.inspect, FEW),
            (attnlens.swap_kernel, SMALL),
            (attnlens.converge_checkpoints, SERIES),
        ):
            model = () if call is attnlens.converge_checkpoints else ("demo",)
            for more, kind, said in (
                ({"work": tmp_path / "file"}, OutputError, "Finished units cannot be kept in"),
                ({"engine": "ray", "address": "127.0.0.1:9"}, UsageError, "No Ray cluster answers at 127.0.0.1:9"),
                ({"jobs": 2, "address": "127.0.0.1:9"}, UsageError, "address applies only to engine='ray'"),
                ({"jobs": 2, "work": "memory://units"}, UsageError, "memory"),
            ):
                refused(kind, lambda c=call, m=model, o=options | more: c(*m, **o), said)
    for more in ({"work": tmp_path}, {"shard": "1/2"}, {"jobs": 2}, {"resume": False}, {"engine": "ray"}):
        for call, options in ((attnlens.inspect, FEW), (attnlens.swap_kernel, SMALL)):
            refused(UsageError, lambda c=call, o=options | more: c(demo, **o), "in memory", next(iter(more)))
    for more in ({"jobs": 2}, {"shard": "1/2"}, {"engine": "ray"}):
        call = lambda more=more: attnlens.swap_kernel("demo", "rbf", save=tmp_path / "m", **more)  # noqa: E731
        refused(UsageError, call, f"in this process, which {next(iter(more))} prevents")


def test_the_program_refuses_with_two_lines_and_exit_code_2(tmp_path):
    (tmp_path / "file").touch()
    ended(program("inspect", "demo", "--shard", "5/4"), "shard", "I/N")
    ended(program(*WORDS, "--work", tmp_path / "file"), "file", "--work")
    ended(program("swap-kernel", "demo", "--work", tmp_path / "file" / "x"), "file", "--work")
    ended(program(*WORDS, "--engine", "ray", RAY_ADDRESS="127.0.0.1:9"), "No Ray cluster answers at 127.0.0.1:9")
    ended(program("inspect", "demo", "--engine", "dask"), "dask")
    ended(program("inspect", "demo", "--engine", "slurm"), "slurm")
    ended(program("swap-kernel", "demo", "--fit", "--calibration", "-", "--jobs", "2", stdin="x"), "from stdin")
    ended(program("converge", "--shard", "1/2"), "--shard applies to checkpoints")
    ended(program("converge", "--head", "0.1", "--jobs", "2"), "--jobs applies to checkpoints")


def test_a_worker_that_finds_another_model_is_refused_by_what_differs(tmp_path):
    place = saved(tmp_path / "gpt2")
    honest, options = pipeline.run_units, FEW | {"work": tmp_path / "work"}

    def changed(*arguments: Any, **more: Any) -> Any:
        tiny.gpt2().save_pretrained(place)
        return honest(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch, forkserver.workers():
        patch.setattr(pipeline, "run_units", changed)
        call = lambda: attnlens.inspect(str(place), **options, jobs=2)  # noqa: E731
        refused(ModelError, call, "A worker's inputs differ from those of the run: model.files")
