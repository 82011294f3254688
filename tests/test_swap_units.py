"""Tests that kernels are the same whoever measures them: kept, killed, sharded, merged, by other processes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import clusters
import forkserver
import pytest
from attnlens.engines.readers import OTHERS
from attnlens.run.swap.units import readings, work
from hostile import refused, saved
from program import attnlens as program
from program import environment_with
from program import refused as ended
from reports import bytes_of
from safetensors.torch import load, save
from sealing import flipped, seal, unsealed

import attnlens
from attnlens import run
from attnlens.errors import ModelError, OutputError, UsageError
from attnlens.records import Report
from attnlens.requests.healing import STATE
from attnlens.run.swap.healing.course import Course
from attnlens.run.swap.one_kernel import KernelRun
from attnlens.run.swap.pipeline import prepared
from attnlens.run.swap.sweep import SweptBatch

KERNELS = ["window:4", "window:12", "rbf"]
ASKED: dict[str, Any] = {"tokens": 48, "sequences": 8, "batch_size": 4, "generate": 4, "predictors": False}
SWEPT = ASKED | {"sweep": "layers"}
"""Two batches, four layers and three kernels: 24 parts."""
HEALED: dict[str, Any] = {"tokens": 16, "sequences": 4, "batch_size": 4, "generate": 0, "heal": 24, "sweep": "layers"}
PARTS = 24


def words_of(asked: dict[str, Any]) -> list[str]:
    """The same options for the program."""
    words = ["--no-progress", "--no-predictors"] if "predictors" in asked else ["--no-progress"]
    for name, value in asked.items():
        words += [] if name == "predictors" else [f"--{name.replace('_', '-')}", str(value)]
    return words


WORDS = [word for kernel in KERNELS for word in ("--kernel", kernel)]


def units(folder: Path) -> list[Path]:
    """The files of finished kernels."""
    return sorted(folder.glob("*/*.kernel"))


def parts(folder: Path) -> list[Path]:
    """The files of parts of kernels."""
    return sorted(folder.glob("*/*/*.part"))


def other_weights(place: Path) -> None:
    """The same model with one number changed."""
    path = place / "model.safetensors"
    tensors = load(path.read_bytes())
    name = next(name for name in sorted(tensors) if name.endswith("wte.weight"))
    tensors[name][0, 0] += 1
    path.write_bytes(save(tensors, {"format": "pt"}))


@pytest.fixture(scope="module")
def whole(demo) -> Report:
    """What a run reports of which nothing is kept."""
    return attnlens.swap_kernel(demo, KERNELS, **SWEPT)


@pytest.fixture(scope="module")
def healed(demo) -> str:
    """The same of a healing."""
    return bytes_of(attnlens.swap_kernel(demo, "rbf", **HEALED))


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The kernels that this process reads."""
    honest, names = KernelRun.read, []

    def noted(self):
        names.append(self.candidate.kernel.spelling.partition(":gamma")[0])
        return honest(self)

    monkeypatch.setattr(KernelRun, "read", noted)
    return names


@pytest.fixture
def swept(monkeypatch) -> list[tuple[int, int | None]]:
    """The layers and heads that this process swaps alone, once for each batch."""
    honest, done = SweptBatch.losses, []

    def noted(self, site, head):
        done.append((site.layer, head))
        return honest(self, site, head)

    monkeypatch.setattr(SweptBatch, "losses", noted)
    return done


# --- kept -------------------------------------------------------------------------------------------------------------


def test_what_is_kept_changes_no_number_and_nothing_stays_of_it(demo, whole, tmp_path):
    folder = tmp_path / "work"
    found = attnlens.swap_kernel("demo", KERNELS, **SWEPT, work=folder)
    assert bytes_of(found) == bytes_of(whole)
    assert found.windows == whole.windows
    assert list(found.windows.values) == list(whole.windows.values)
    assert not folder.exists()
    assert bytes_of(attnlens.swap_kernel(demo, KERNELS, **SWEPT | {"seed": 1, "windows": "random"})) != bytes_of(
        whole
    ), "a control"


def test_a_run_that_stops_at_any_moment_goes_on_to_the_same_bytes(whole, read, swept, tmp_path):
    """Five times, after as many parts of sweeps: no kernel and no part that is finished is measured again."""
    moments = random.Random(0)  # noqa: S311
    for time_of in range(5):
        folder, stop_at = tmp_path / str(time_of), moments.randrange(1, PARTS)
        left = stop_at

        def stop(stage: str, done: int, _total: int) -> None:
            nonlocal left
            left -= stage.endswith("sweep") and done > 0
            if not left:
                left = -1
                raise KeyboardInterrupt

        with pytest.raises(run.Interrupted) as stopped:
            attnlens.swap_kernel("demo", KERNELS, **SWEPT, work=folder, progress=stop)
        assert "interrupted" in stopped.value.report.swaps[-1].notes[-1]
        kernels, more = divmod(stop_at, PARTS // 3)
        assert len(units(folder)) == kernels - (more == 0), "the last part's kernel is not finished"
        read.clear()
        swept.clear()
        assert bytes_of(attnlens.swap_kernel("demo", KERNELS, **SWEPT, work=folder)) == bytes_of(whole)
        assert read == KERNELS[kernels - (more == 0) :]
        assert len(swept) == PARTS - stop_at
        assert not folder.exists()


def test_an_interrupted_run_reports_the_kernels_that_it_measured(whole, tmp_path):
    def stop(stage: str, _done: int, _total: int) -> None:
        if stage == "rbf:gamma=0.5, compare":
            raise KeyboardInterrupt

    with pytest.raises(run.Interrupted) as stopped:
        attnlens.swap_kernel("demo", KERNELS, **ASKED, work=tmp_path, progress=stop)
    report = stopped.value.report
    assert [swap.loss for swap in report.swaps] == [swap.loss for swap in whole.swaps[:2]]
    assert [(one.site, one.reason) for one in report.coverage.skipped] == [
        ("kernel rbf:gamma=0.5", "the run was interrupted")
    ]
    assert "without kernel rbf:gamma=0.5, because the run was interrupted" in report.coverage.sentence

    def at_once(stage: str, _done: int, _total: int) -> None:
        if stage.endswith("compare"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as nothing:
        attnlens.swap_kernel("demo", KERNELS, **ASKED, work=tmp_path / "other", progress=at_once)
    assert not isinstance(nothing.value, run.Interrupted)


def test_a_run_that_is_killed_goes_on_to_the_same_bytes(whole, healed, swept, tmp_path):
    """Once in a sweep and once in a healing, whose state is that of its last check."""
    for name, kernels, asked, there, expected in (
        ("sweep", KERNELS, SWEPT, lambda folder: len(units(folder)) == 1 and len(parts(folder)) > 1, bytes_of(whole)),
        ("heal", ["rbf"], HEALED, lambda folder: list(folder.rglob(STATE)) != [], healed),
    ):
        folder, report = tmp_path / name, tmp_path / f"{name}.json"
        chosen = [word for kernel in kernels for word in ("--kernel", kernel)]
        command = ["swap-kernel", "demo", *chosen, *words_of(asked), "--work", str(folder), "--json", str(report)]
        started = subprocess.Popen(
            [str(forkserver.commands() / "attnlens"), *command], env=environment_with(), stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while started.poll() is None and not there(folder) and time.monotonic() < deadline:
            time.sleep(0.002)
        started.send_signal(signal.SIGKILL)
        started.communicate()
        assert not report.exists()
        swept.clear()
        found = attnlens.swap_kernel("demo", kernels, **asked, work=folder)
        assert bytes_of(found) == expected
        if name == "sweep":
            assert 0 < len(swept) <= PARTS - PARTS // 3, "the first kernel is finished"
        assert not folder.exists()


def test_a_healing_goes_on_from_its_last_check_and_with_no_resume_begins_anew(healed, monkeypatch, tmp_path):
    honest, steps = Course.advance, []

    def stopping(self):
        if len(steps) == 13:
            raise KeyboardInterrupt
        steps.append(self.step)
        return honest(self)

    def advance(self):
        steps.append(self.step)
        return honest(self)

    first = []
    for resume in (True, False):
        folder = tmp_path / str(resume)
        steps.clear()
        monkeypatch.setattr(Course, "advance", stopping)
        with pytest.raises(run.Interrupted) as stopped:
            attnlens.swap_kernel("demo", "rbf", **HEALED, work=folder)
        assert stopped.value.report.swap.healing.interrupted
        assert units(folder) == [], "what was interrupted is no finished kernel"
        steps.clear()
        monkeypatch.setattr(Course, "advance", advance)
        assert bytes_of(attnlens.swap_kernel("demo", "rbf", **HEALED, work=folder, resume=resume)) == healed
        assert not folder.exists()
        first.append(steps[0])
    assert first == [10, 0], "from the last check"


def test_a_folder_of_heal_checkpoint_stays_and_is_gone_on_from(healed, monkeypatch, tmp_path):
    honest, steps = Course.advance, []

    def advance(self):
        steps.append(self.step)
        return honest(self)

    monkeypatch.setattr(Course, "advance", advance)
    asked = HEALED | {"heal_checkpoint": tmp_path / "state"}
    assert bytes_of(attnlens.swap_kernel("demo", "rbf", **asked, work=tmp_path / "work")) == healed
    assert (tmp_path / "state" / STATE).is_file()
    assert not (tmp_path / "work").exists()
    assert len(steps) == 24
    assert bytes_of(attnlens.swap_kernel("demo", "rbf", **asked, work=tmp_path / "work")) == healed
    assert len(steps) == 24, "all is there"
    (tmp_path / "state" / STATE).write_text("{")
    refused(UsageError, lambda: attnlens.swap_kernel("demo", "rbf", **asked, work=tmp_path / "work"), "--no-resume")
    other = attnlens.swap_kernel("demo", "rbf", **asked | {"resume": False}, work=tmp_path / "work")
    assert bytes_of(other) == healed
    assert len(steps) == 48


def test_a_model_that_could_not_be_saved_is_not_swept_again(demo, swept, monkeypatch, tmp_path):
    def full(*_: object) -> None:
        raise OutputError("The disk is full.", "Make room.")

    with monkeypatch.context() as patch:
        patch.setattr("attnlens.run.swap.one_kernel.save_swapped", full)
        with pytest.raises(run.UnsavedError):
            attnlens.swap_kernel("demo", "rbf", **SWEPT, work=tmp_path / "work", save=tmp_path / "model")
    assert len(swept) == PARTS // 3
    swept.clear()
    found = attnlens.swap_kernel("demo", "rbf", **SWEPT, work=tmp_path / "work", save=tmp_path / "model")
    assert bytes_of(found) == bytes_of(attnlens.swap_kernel(demo, "rbf", **SWEPT))
    assert len(swept) == PARTS // 3, "of the run in memory, a control"
    assert (tmp_path / "model" / "attnlens.json").is_file()
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    "change", ["weights", "config", "generation_config", "kernels", "options", "text", "calibration", "prompts"]
)
def test_no_kernel_of_another_model_text_or_call_is_taken_up(change, read, tmp_path):
    place = saved(tmp_path / "model")
    files = {name: tmp_path / f"{name}.txt" for name in ("text", "calibration", "prompts")}
    files["text"].write_text("the quick brown fox jumps over the lazy dog. " * 40)
    files["calibration"].write_text("how vexingly quick daft zebras jump, and wolves. " * 40)
    files["prompts"].write_text("the quick\n")
    asked = {"tokens": 16, "sequences": 2, "generate": 2, "fit": True, "controls": False, "prompts": files["prompts"]}
    asked |= {"text": [files["text"]], "calibration": [files["calibration"]], "allow_foreign_text": True}
    kernels = ["rbf"]

    def call() -> list[str]:
        read.clear()
        attnlens.swap_kernel(place, kernels, **asked, shard="1/1", work=tmp_path / "work")
        return read

    assert call() == ["rbf"]
    assert call() == [], "a control"
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
        asked["seed"] = 1
    else:
        files[change].write_text("pack my box\n" if change == "prompts" else "said he of five dozen liquor jugs. " * 40)
    assert call() == ["rbf", "window:4"][: len(kernels)]


def test_no_kernel_of_another_form_prompt_or_fit_is_taken_up(read, swept, monkeypatch, tmp_path):
    small: dict[str, Any] = {"tokens": 16, "sequences": 4, "controls": False, "work": tmp_path / "work"}
    keys = set()
    for kernel in ("rank", "rank:group=1"):
        keys.add(prepared("demo", kernel, small | {"budget": "loss:10%", "generate": 0, "layers": [1]}).frame.key)
    assert len(keys) == 2
    for name, lines in (("one", "0\n0z\n"), ("two", "00\n0z\n")):
        (tmp_path / name).write_text(lines)
        keys.add(prepared("demo", "rbf", small | {"prompts": tmp_path / name, "generate": 2}).frame.key)
    assert len(keys) == 4
    one = prepared("demo", "rbf", small | {"generate": 0})
    assert one.frame.key == prepared("demo", "rbf", small | {"generate": 0}).frame.key, "a control"
    monkeypatch.setattr(work, "code_of", lambda _kernel: b"changed")
    assert one.frame.key != prepared("demo", "rbf", small | {"generate": 0}).frame.key

    def stop(stage: str, done: int, _total: int) -> None:
        if stage == "sweep" and done == 3:
            raise KeyboardInterrupt

    asked = small | {"sweep": "layers", "fit": True, "generate": 0}
    for changed, left in ((False, 1), (True, 4)):
        with pytest.raises(run.Interrupted):
            attnlens.swap_kernel("demo", "rbf", **asked, progress=stop, resume=False)
        swept.clear()
        with monkeypatch.context() as patch:
            if changed:  # as on another machine, whose sums are rounded otherwise
                patch.setattr("attnlens.run.swap.one_kernel.digest_of", lambda _fitted: "another")
            attnlens.swap_kernel("demo", "rbf", **asked)
        assert len(swept) == left


# --- shared out -------------------------------------------------------------------------------------------------------


def test_shards_by_the_program_merge_to_one_runs_bytes(whole, tmp_path):
    folder = tmp_path / "work"
    for index in (3, 1, 2):
        shard = "--shard", f"{index}/3", "--work", folder, "--json", tmp_path / f"{index}.json"
        done = program("swap-kernel", "demo", *WORDS, *words_of(SWEPT), *shard)
        assert done.returncode == 0, done.stderr
        assert "and 1 more, because it is read by another shard" in done.stdout
    assert len(units(folder)) == 3
    assert parts(folder) == []
    shards = [tmp_path / f"{index}.json" for index in (2, 3, 1, 2)]
    assert run.merge(*map(str, shards)).windows == whole.windows
    for where in (shards, [folder]):
        merged = program("merge", *where, "--json", tmp_path / "merged.json")
        assert merged.returncode == 0, merged.stderr
        assert bytes_of(tmp_path / "merged.json") == bytes_of(whole)
    assert not folder.exists()


def test_kernels_of_several_shards_have_one_window_as_those_of_one_run(demo, whole):
    """Control: alone, the narrower window looks at other tokens."""
    reaches = [swap.beyond_window.window for swap in whole.swaps]
    assert reaches == [12, 12, 12]
    assert all(control.beyond_window.window == 12 for swap in whole.swaps for control in swap.controls if control.loss)
    alone = attnlens.swap_kernel(demo, "window:4", **ASKED).swap
    assert alone.beyond_window.window == 4
    assert alone.beyond_window.tokens > whole.swap.beyond_window.tokens
    assert [stage.beyond_window for stage in whole.swap.stages] == [whole.swap.beyond_window]
    widest = attnlens.swap_kernel(demo, "window:12", **ASKED).swap
    assert widest.beyond_window == whole.swaps[1].beyond_window


def test_two_processes_measure_what_one_measures(whole, tmp_path):
    made = "--work", tmp_path / "work", "--json", tmp_path / "r.json"
    done = program("swap-kernel", "demo", *WORDS, *words_of(SWEPT), "--jobs", "2", *made)
    assert done.returncode == 0, done.stderr
    assert bytes_of(tmp_path / "r.json") == bytes_of(whole)
    assert not (tmp_path / "work").exists()


def test_ranks_of_a_budget_and_of_a_plan_are_those_of_one_process(demo, tmp_path):
    asked = {"tokens": 16, "sequences": 4, "generate": 0, "controls": False}
    first = {"layers": [1], "budget": "loss:10%"}
    budget = attnlens.swap_kernel(demo, "rank:group=1", **asked, **first)
    for more, here in ((first, budget), ({"ranks": budget.plan}, None)):
        here = here or attnlens.swap_kernel(demo, "rank", **asked, **more)
        with forkserver.workers():
            kernel = "rank:group=1" if more is first else "rank"
            there = attnlens.swap_kernel("demo", kernel, **asked, **more, jobs=2, work=tmp_path / "work")
        assert bytes_of(there) == bytes_of(here)
        assert there.plan is not None


def test_jobs_of_slurm_measure_kernels(whole, read, tmp_path, monkeypatch):
    states = clusters.slurm(tmp_path, monkeypatch)
    with forkserver.workers():
        found = attnlens.swap_kernel("demo", KERNELS, **SWEPT, engine="slurm", jobs=2, work=tmp_path / "work")
    assert bytes_of(found) == bytes_of(whole)
    assert read == []
    assert len(list(states.glob("*.state"))) == 3


def test_two_runs_in_one_folder_at_once_do_not_harm_each_other(whole, tmp_path):
    found: list[str] = []
    command = ["swap-kernel", "demo", *WORDS, *words_of(SWEPT), "--work", str(tmp_path / "work"), "--json"]

    def begin(name: str) -> None:
        done = program(*command, tmp_path / name)
        assert done.returncode == 0, done.stderr
        found.append(bytes_of(tmp_path / name))

    threads = [threading.Thread(target=begin, args=(f"{number}.json",)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [bytes_of(whole)] * 2
    assert not (tmp_path / "work").exists()


def test_a_kernel_that_fails_is_missing_with_its_reason_and_is_measured_by_the_next_run(
    whole, read, swept, monkeypatch, tmp_path
):
    counting, tries = KernelRun.read, Counter()

    def failing(self):
        if self.candidate.kernel.spelling == "window:12" and tries["fails"] >= 0:
            tries["fails"] += 1
            counting(self)
            raise ZeroDivisionError("odd")
        return counting(self)

    monkeypatch.setattr(KernelRun, "read", failing)
    report = attnlens.swap_kernel("demo", KERNELS, **SWEPT, work=tmp_path / "work")
    assert tries["fails"] == 2, "tried once more"
    assert [swap.kernel for swap in report.swaps] == ["window:4", "rbf:gamma=0.5"]
    assert [(one.site, one.reason) for one in report.coverage.skipped] == [
        ("kernel window:12", "ZeroDivisionError: odd")
    ]
    assert len(units(tmp_path / "work")) == 2
    assert len(parts(tmp_path / "work")) == PARTS // 3, "of the one that failed"
    tries["fails"] = -1
    swept.clear()
    read.clear()
    assert bytes_of(attnlens.swap_kernel("demo", KERNELS, **SWEPT, work=tmp_path / "work")) == bytes_of(whole)
    assert read == ["window:12"]
    assert swept == [], "its parts are finished"
    assert not (tmp_path / "work").exists()


def test_an_error_of_ours_ends_the_run_and_keeps_what_is_finished(read, monkeypatch, tmp_path):
    counting = KernelRun.read

    def failing(self):
        if self.candidate.kernel.spelling == "window:12":
            raise ModelError("It does not run.", "Leave it out.")
        return counting(self)

    monkeypatch.setattr(KernelRun, "read", failing)
    refused(ModelError, lambda: attnlens.swap_kernel("demo", KERNELS, **ASKED, work=tmp_path), "It does not run.")
    assert len(units(tmp_path)) == 1


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_finds_another_model_refuses(tmp_path):
    place = saved(tmp_path / "model")
    asked = {"tokens": 16, "sequences": 2, "generate": 0, "allow_foreign_text": True, "work": tmp_path / "work"}
    one = prepared(str(place), ["rbf", "window:4"], asked)
    words, key = one.words, one.frame.key
    work.read_elsewhere(words, key, one.frame.units[0].name)
    assert len(units(tmp_path / "work")) == 1, "a control"
    work._opened.clear()
    other_weights(place)
    refused(ModelError, lambda: work.read_elsewhere(words, key, one.frame.units[1].name), "A worker finds other files")
    work._opened.clear()


def test_a_file_that_is_no_kernel_is_refused(tmp_path):
    asked = {"tokens": 16, "sequences": 2, "generate": 0, "controls": False}
    attnlens.swap_kernel("demo", ["rbf", "window:4"], **asked, shard="1/1", work=tmp_path)
    path, other = units(tmp_path)
    content = path.read_bytes()
    damaged = [content[:-1], b"", flipped(content, 100), other.read_bytes()]
    for harm in (*damaged, b"{}", b"\xff", _without(content, "windows kl"), _without(content, "back swapped")):
        if harm in damaged:
            path.write_bytes(harm)
        else:
            seal(path, harm, readings.SwapFrame)
        for call in (
            lambda: attnlens.swap_kernel("demo", ["rbf", "window:4"], **asked, work=tmp_path),
            lambda: run.merge(str(tmp_path)),
        ):
            refused(OutputError, call, path.name, "--no-resume")
    path.write_bytes(content)
    assert len(run.merge(str(tmp_path)).swaps) == 2, "a control"


def _without(content: bytes, name: str) -> bytes:
    """A kernel's unit without one of its tensors."""
    whole = unsealed(content)
    told = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]
    tensors = load(whole)
    del tensors[name]
    return save(tensors, told)


def test_a_damaged_part_is_refused_and_no_resume_goes_round_it(whole, tmp_path):
    def stop(stage: str, done: int, _total: int) -> None:
        if stage.endswith("sweep") and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(run.Interrupted):
        attnlens.swap_kernel("demo", KERNELS, **SWEPT, work=tmp_path / "work", progress=stop)
    for path in parts(tmp_path / "work"):
        path.write_bytes(flipped(path.read_bytes(), 20))
    refused(OutputError, lambda: attnlens.swap_kernel("demo", KERNELS, **SWEPT, work=tmp_path / "work"), "--no-resume")
    again = attnlens.swap_kernel("demo", KERNELS, **SWEPT, work=tmp_path / "work", resume=False)
    assert bytes_of(again) == bytes_of(whole)
    assert not (tmp_path / "work").exists()


def test_what_makes_no_sense_is_refused(demo, tmp_path):
    refused(UsageError, lambda: attnlens.swap_kernel("demo", "rbf", **ASKED, shard="2/2"), "1 kernel, and shard 2/2")
    refused(UsageError, lambda: attnlens.swap_kernel(demo, "rbf", **ASKED, work=tmp_path), "in memory", "work")
    refused(UsageError, lambda: attnlens.swap_kernel(demo, "rbf", **ASKED, jobs=2), "in memory", "jobs")
    for more in ({"jobs": 2}, {"shard": "1/2"}, {"engine": "ray"}):
        refused(
            UsageError,
            lambda more=more: attnlens.swap_kernel("demo", "rbf", **ASKED, save=tmp_path / "m", **more),
            f"--save writes the one model that this process makes, and --{next(iter(more))}",
        )
    ended(program("swap-kernel", "demo", "--shard", "5/4"), "shard='5/4' is no shard")
    ended(program("swap-kernel", "demo", "--fit", "--calibration", "-", "--jobs", "2", stdin="x"), "from stdin")
    ended(program("swap-kernel", "demo", "--prompts", "-", "--jobs", "2", stdin="x"), "from stdin")
    ended(program("swap-kernel", "demo", "--engine", "ray", "--address", "nonsense"), "No Ray cluster is at nonsense")
    (tmp_path / "file").write_text("")
    ended(program("swap-kernel", "demo", "--work", tmp_path / "file" / "x"), "can't be written")
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        ended(program("swap-kernel", "demo", "--work", tmp_path / "closed"), "can't be written")


def test_parts_of_other_runs_are_refused_by_what_differs(tmp_path):
    small = {"tokens": 16, "sequences": 2, "generate": 0, "controls": False}
    attnlens.swap_kernel("demo", ["rbf", "window:4"], **small, shard="1/2", work=tmp_path / "a")
    refused(UsageError, lambda: run.merge(str(tmp_path / "a")), "1 of 2 units are missing: window:4")
    copy = shutil.copytree(tmp_path / "a", tmp_path / "b")
    attnlens.swap_kernel("demo", ["rbf", "window:4"], **small | {"seed": 2}, shard="2/2", work=copy)
    refused(UsageError, lambda: run.merge(str(copy)), "of different runs: options.seed is")
    attnlens.inspect("demo", source="weights", analyzers=["symmetry"], shard="1/2", work=tmp_path / "c")
    refused(
        UsageError,
        lambda: run.merge(str(tmp_path / "a"), str(tmp_path / "c")),
        "one is a run of swap-kernel, the other an inspection",
    )


def test_a_run_of_which_no_kernel_could_be_measured_says_why(tmp_path, monkeypatch):
    def failing(_self):
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(KernelRun, "read", failing)
    with pytest.raises(ZeroDivisionError, match="odd"):
        attnlens.swap_kernel("demo", KERNELS, **ASKED, work=tmp_path)
    frame = prepared("demo", KERNELS, {**ASKED}).frame
    reasons = {frame.units[0]: OTHERS, frame.units[1]: "OSError: no such luck"}
    refused(ModelError, lambda: readings.swap_report(frame, {}, {}, reasons), "No kernel could be measured: OSError")


def test_two_healings_in_one_folder_at_once_keep_a_state_that_can_be_gone_on_from(healed, tmp_path):
    command = ["swap-kernel", "demo", "--kernel", "rbf", *words_of(HEALED), "--work", str(tmp_path / "work"), "--json"]
    found: list[str] = []

    def begin(number: int) -> None:
        done = program(*command, tmp_path / f"{number}.json")
        assert done.returncode == 0, done.stderr
        found.append(bytes_of(tmp_path / f"{number}.json"))

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [healed] * 2
    assert not (tmp_path / "work").exists()


def test_a_state_is_removed_by_who_replaces_it_alone(demo, tmp_path):
    """What another run has written meanwhile stays; the control: the file before is gone."""
    other = tmp_path / "state" / "healing-7.safetensors"
    other.parent.mkdir()
    other.write_bytes(b"another run's")
    attnlens.swap_kernel(demo, "rbf", **HEALED, heal_checkpoint=tmp_path / "state")
    names = sorted(path.name for path in other.parent.iterdir())
    assert names == ["healing-24.safetensors", "healing-7.safetensors", STATE]
