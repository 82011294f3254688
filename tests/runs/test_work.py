"""Tests that units of work are kept whole, used again, shared out, and survive damage and failures."""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import signal
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forkserver
import fsspec
import pytest
import torch
import work_units
from hostile import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from attnlens.errors import AttnlensError, ModelError, OutputError, ShardFinished, TextError, UsageError
from attnlens.requests import InspectRequest
from attnlens.runs import store as store_module
from attnlens.runs import work
from attnlens.runs.store import RUN, Store, difference, file_stem, hash_json
from attnlens.runs.work import LOST, NOTHING_KEPT, Failure, Stopped, WorkPlan, run_units, try_twice

FACTS = work_units.FACTS
NAMES = ["weights of layer 0", "weights of layer 1", "tokens of batch 0"]
VALUES = {name: {"numbers": torch.arange(3.0) + at, "at": at} for at, name in enumerate(NAMES)}
OTHER = FACTS | {"settings": {"seed": 1}}


class Units:
    """Compute the units of VALUES and list their names; the second unit raises these errors first, one per attempt."""

    def __init__(self, *errors: BaseException) -> None:
        self.computed: list[str] = []
        self.errors = list(errors)

    def __call__(self, name: str) -> Any:
        if name == NAMES[1] and self.errors:
            raise self.errors.pop(0)
        self.computed.append(name)
        return VALUES[name]


@pytest.fixture
def plan(tmp_path) -> WorkPlan:
    return WorkPlan(work=tmp_path / "work")


@pytest.fixture
def store(plan) -> Store:
    return plan.store(FACTS)


@pytest.fixture
def computes(plan, store) -> Callable[..., list[str]]:
    """Return a function that runs all units, checks their values, and returns the names of the computed units."""

    def run(store: Store = store, **more: Any) -> list[str]:
        units = Units()
        outcome = run_units(NAMES, units, plan, store, **more)
        assert same(outcome.values, VALUES)
        assert outcome.missing == {}
        return units.computed

    return run


def same(first: Any, second: Any) -> bool:
    """Return True if two values are equal, down to the bits of their numbers."""
    if isinstance(first, torch.Tensor):
        bits = [part.reshape(-1).view(torch.uint8) for part in (first, second)]
        return first.dtype == second.dtype and first.shape == second.shape and torch.equal(*bits)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and (first == second or (first != first and second != second))


def test_values_come_back_as_they_were_tensors_bit_for_bit_and_tuples_as_lists(store):
    floats = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
    for dtype in (*floats, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        values = [(torch.randn(shape) * 3).to(dtype) for shape in ((), (0,), (2, 0, 3), (2, 3))]
        store.save("a", [*values, values[-1].mT])
        assert same(store.load("a"), [*values, values[-1].mT.contiguous()]), dtype
    whole = torch.arange(6.0, requires_grad=True)
    store.save("a", [whole, whole[:2]])
    assert [part.requires_grad for part in store.load("a")] == [False, False]
    value = {
        0: [1, 2.5, None, True, "é\ud800\n"],
        (1, (2, "x")): {"nan": math.nan, "inf": -math.inf, "tensor": torch.tensor([math.nan, math.inf])},
        "tensor": {"tensor": "0", "pairs": []},
        None: {},
        "large": 2**200,
    }
    store.save("a", value)
    assert same(store.load("a"), value)
    store.save("a", (1, range(2)))
    assert store.load("a") == [1, [0, 1]]


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
KEYS = st.integers() | st.text(max_size=4) | st.tuples(st.integers(), st.integers())
NESTED = st.recursive(LEAVES, lambda part: st.lists(part, max_size=3) | st.dictionaries(KEYS, part, max_size=3))


@given(NESTED)
@settings(max_examples=40, deadline=None)
def test_any_nested_value_comes_back_as_it_was(value):
    assert same(store_module._parse(store_module._serialise(value, "stamp"), "stamp"), value)


def test_a_file_depends_on_its_unit_alone_and_its_name_is_unique(store):
    contents = []
    for _ in range(2):
        store.save("a", VALUES)
        contents.append(store.path("a").read_bytes())
    content, stamp = contents[0], store._stamp("a")
    assert content == contents[1]
    for place in range(0, len(content), 7):
        flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        with pytest.raises(ValueError, match=r".*"):
            store_module._parse(flipped, stamp)
    assert same(store_module._parse(content, stamp), VALUES), "the control"
    stems = [file_stem(name) for name in ("a", "a ", "A", "a/../b", "a" * 1000, "a" * 1001, "é", "", ".", "/")]
    assert len({stem.lower() for stem in stems}) == 10, "also if case is ignored"
    assert all(len(stem) < 100 and "/" not in stem for stem in stems)


def test_a_finished_unit_is_loaded_and_without_resume_all_are_computed(plan, store, computes):
    assert [computes(), computes()] == [NAMES, []]
    store.path(NAMES[1]).unlink()
    assert computes() == [NAMES[1]], "and values are in the order of the run"
    assert computes(Store(store.folder, FACTS, resume=False)) == NAMES
    store.save(NAMES[0], "another")
    assert run_units(NAMES, Units(), plan, store).values[NAMES[0]] == "another", "the control"


def test_an_incomplete_unit_is_computed_again_from_its_finished_parts(plan, store):
    part, usable = Mock(return_value=1), lambda value: value["complete"]
    for complete in (False, True):

        def compute(name: str, complete: bool = complete) -> Any:
            store.inside(name).compute("part", part)
            return {"complete": complete}

        assert run_units(["a"], compute, plan, store, usable=usable).values == {"a": {"complete": complete}}
    part.assert_called_once()
    assert not store.inside("a").folder.exists()
    run_units(["a"], lambda _: pytest.fail("It is complete."), plan, store, usable=usable)
    assert Store(store.folder, FACTS, resume=False).compute("a", lambda: "anew") == "anew"


def stamped(value: Any, store: Store) -> bytes:
    """Return the content of a file with a matching hash, as an attacker could write it."""
    text = json.dumps([store._stamp(NAMES[1]), value]) if not isinstance(value, str) else value
    return save({}, {"attnlens": f"{store_module._digest(text, {})} {text}"})


DAMAGE: dict[str, Callable[[bytes, Store], bytes]] = {
    "cut off": lambda content, _: content[:-1],
    "cut off in its header": lambda content, _: content[:50],
    "empty": lambda *_: b"",
    "one bit in its numbers": lambda content, _: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
    "one byte in its JSON": lambda content, _: content.replace(b"numbers", b"mumbers"),
    "foreign": lambda *_: b"my notes",
    "another program's": lambda *_: save({"a": torch.ones(2)}),
    "a pickle": lambda *_: pickle.dumps(print),
    "another unit's": lambda _, store: store.path(NAMES[0]).read_bytes(),
    "another run's": lambda _, store: store_module._serialise(VALUES[NAMES[1]], f"{hash_json('other')} {NAMES[1]}"),
    "another version's": lambda *_: save({}, {"attnlens": "{}"}),
    "no metadata": lambda *_: b"\2\0\0\0\0\0\0\0{}",
    "deeply nested": lambda _, store: stamped("[" * 100_000 + "]" * 100_000, store),
    "a list": lambda _, store: stamped("[]", store),
    "a missing tensor": lambda _, store: stamped({"tensor": "7"}, store),
    "wrong pairs": lambda _, store: stamped({"pairs": [1]}, store),
    "a wrong key": lambda _, store: stamped({"pairs": [[{"pairs": []}, 1]]}, store),
    "a function for a record": lambda _, store: stamped({"record": "json_schema", "fields": {"pairs": []}}, store),
    "a record of other fields": lambda _, store: stamped({"record": "Measure", "fields": {"pairs": []}}, store),
    "an unknown object": lambda _, store: stamped({"eval": "1"}, store),
}


def test_a_file_that_is_not_the_units_is_named_set_aside_and_computed_again(store, computes, caplog):
    computes()
    path = store.path(NAMES[1])
    aside, content = path.with_name(path.name + ".damaged"), path.read_bytes()
    action = f"the file is renamed to {aside.name}, and the unit is computed again"
    problem = f"{path} is damaged or does not contain the unit {NAMES[1]}: {action}."
    for name, damage in DAMAGE.items():
        harmed = damage(content, store)
        path.write_bytes(harmed)
        caplog.clear()
        assert computes() == [NAMES[1]], name
        assert path.read_bytes() == content, name
        assert aside.read_bytes() == harmed, "nothing is lost"
        assert caplog.messages == [problem]
    store.clear()
    assert [left.name for left in store.folder.iterdir()] == [aside.name]


def test_folders_and_pipes_in_a_units_place_are_set_aside_or_named_and_files_of_others_stay(store, computes, caplog):
    paths = [store.path(name) for name in NAMES]
    aside = [path.with_name(f"{path.name}.damaged") for path in paths]
    mine = [store.folder / name for name in ("notes.txt", "model.safetensors", "backup/x-12.safetensors")]
    for folder in (*paths[:2], aside[1], mine[2].parent):
        folder.mkdir(parents=True)
    for file in (*(path / "model.safetensors" for path in paths[:2]), aside[1] / "file", *mine):
        file.write_text("mine")
    os.mkfifo(paths[2])
    assert computes() == NAMES
    assert "and the unit is computed again" in caplog.messages[0]
    assert "the file cannot be renamed" in caplog.messages[1]
    assert f"The result of {NAMES[1]} is not stored." in caplog.messages[2]
    store.inside(NAMES[0]).save("part", 1)
    (store.folder / f".attnlens.{'0a' * 8}").write_text("of a process that was killed while it wrote a unit")
    store.clear()
    assert set(store.folder.iterdir()) == {*aside, *mine[:2], mine[2].parent, paths[1]}
    assert (paths[1] / "model.safetensors").read_text() == "mine"
    assert mine[2].exists()
    Store(store.folder / "nowhere", {}).clear()


def test_a_run_of_other_facts_has_another_key_and_its_first_difference_is_logged(plan, store, computes, caplog):
    (plan.root / "other").mkdir(parents=True)
    (plan.root / "file").touch()
    for content in ("{", "[]", "3", "[" * 100_000, "\0", "{}", '{"command": "other"}'):
        (plan.root / "other" / RUN).write_text(content)
        computes()
        assert not caplog.messages, content
    assert hash_json(dict(reversed(FACTS.items()))) == hash_json(FACTS), "whatever their order"
    other = plan.store(OTHER)
    assert other.folder != store.folder
    assert other.load(NAMES[0]) is None
    assert computes(other) == NAMES
    difference_of_runs = "settings.seed is 0 instead of 1"
    assert caplog.messages == [f"{store.folder} contains 3 finished units of a different run: {difference_of_runs}."]
    caplog.clear()
    run_units(NAMES[:1], Units(), NOTHING_KEPT, other)
    assert not caplog.messages, "nothing is logged about the user's cache"
    for here, there, expected in (
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}, None),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}], "c": 1}, "a.1.b is 2 instead of 3"),
        ({"a": [1]}, {"a": [1, 2]}, "a is [1] instead of [1, 2]"),
        ({}, {"c": "x" * 1000}, f"c is None instead of {'x' * 30} … {'x' * 30}"),
    ):
        assert difference(here, there) == expected


def test_another_run_may_clear_the_folder_at_any_moment(store, computes, monkeypatch):
    for moment in NAMES:

        def report_unit(name: str, moment: str = moment) -> None:
            if name == moment:
                computes()
                store.clear()
                assert not store.folder.exists()

        computes(report_unit=report_unit)
        store.clear()
    tries, honest = [], store_module.write_atomically

    def write(path: Path, content: bytes) -> None:
        tries.append(path)
        if len(tries) == 1:
            path.parent.rmdir()
        honest(path, content)

    monkeypatch.setattr(store_module, "write_atomically", write)
    store.save("a", 1)
    assert store.load("a") == 1
    assert len(tries) == 3, "twice, and the description of the run"


def test_a_full_disk_is_named_and_the_run_goes_on_but_a_shard_ends(plan, store, computes, monkeypatch, caplog):
    run_units(NAMES[:1], Units(), plan, store)
    full = OutputError("It can't be written: No space left on device.", "Make room.")
    monkeypatch.setattr(store_module, "write_atomically", Mock(side_effect=full))
    assert computes() == NAMES[1:]
    assert [message.split(" is not stored")[0] for message in caplog.messages] == [
        f"The result of {name}" for name in NAMES[1:]
    ]
    assert "No space left on device" in caplog.messages[0]
    units, shard = Units(), WorkPlan(work=plan.work, shard="1/1")
    refused(OutputError, lambda: run_units(NAMES, units, shard, store), "No space left on device")
    assert units.computed == NAMES[1:2], "it was not tried again"
    assert same(store.load(NAMES[0]), VALUES[NAMES[0]]), "what was finished stays"


def test_a_folder_without_permissions_does_not_matter_and_a_file_without_them_is_named(store, computes, monkeypatch):
    denied = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(Path, "glob", denied)
    assert computes() == NAMES
    monkeypatch.setattr(Path, "read_bytes", denied)
    refused(OutputError, lambda: store.load(NAMES[0]), store.path(NAMES[0]).name, "Permission denied", "--work")


def test_an_unusable_place_is_refused_before_the_work_unless_it_is_the_users_cache(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for place in ("file", "file/inside"):
        refused(OutputError, WorkPlan(work=tmp_path / place).check, place, "--work")
    WorkPlan(work=tmp_path / "new").check()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert WorkPlan().store(FACTS).folder == tmp_path / "attnlens" / "work" / hash_json(FACTS)
    monkeypatch.setattr(os, "access", lambda *_: False)
    refused(OutputError, WorkPlan(work=tmp_path / "new").check, "Permission denied", "--work")
    WorkPlan().check()
    assert WorkPlan().store(FACTS) is None
    for needed in (WorkPlan(shard="1/2"), WorkPlan(jobs=2)):
        refused(OutputError, needed.check, "Permission denied")


def test_a_plan_that_contradicts_itself_is_refused(tmp_path, monkeypatch):
    refused(UsageError, WorkPlan(work="nonsense://a/b").check, "nonsense", "--work")
    refused(UsageError, partial(WorkPlan(work=tmp_path, jobs=2).check, ["a.txt", "-"]), "stdin")
    WorkPlan(work=tmp_path, jobs=2).check(["a.txt"])
    monkeypatch.setattr(work, "find_spec", lambda _: None)
    error = refused(UsageError, WorkPlan(work=tmp_path, engine="ray").check, "Ray is not installed.")
    assert error.remedy == 'Run: pip install "attnlens[ray]"'
    assert WorkPlan.of(InspectRequest(work="x", shard="2/3", length=3)) == WorkPlan(work="x", shard="2/3")
    assert WorkPlan.of(InspectRequest()) == NOTHING_KEPT


def test_units_are_kept_at_an_address_as_in_a_folder(tmp_path, caplog, monkeypatch):
    memory, root = fsspec.filesystem("memory"), f"/{tmp_path.name}/work"
    plan, units = WorkPlan(work=f"memory:/{root}"), Units()
    plan.check()
    store = plan.store(FACTS)
    with pytest.raises(ShardFinished):
        run_units(NAMES, units, WorkPlan(work=plan.work, shard="1/2"), store)
    assert units.computed == NAMES[::2]
    run_units(NAMES, units, plan, store)
    assert units.computed == [*NAMES[::2], NAMES[1]]
    store.inside(NAMES[0]).save("part", 1)
    path = f"{root}/{store.folder.name}/{file_stem(NAMES[1])}.safetensors"
    memory.pipe_file(path, memory.cat_file(path)[:-1])
    assert same(run_units(NAMES, units, plan, store).values, VALUES)
    assert units.computed[3:] == NAMES[1:2]
    assert f"the file is renamed to {file_stem(NAMES[1])}.safetensors.damaged" in caplog.text
    run_units(NAMES[:1], units, plan, plan.store(OTHER))
    assert "settings.seed is 0 instead of 1" in caplog.text
    store.clear()
    assert [name for name in memory.find(root) if store.folder.name in name] == [f"{path}.damaged"]
    # botocore's error without credentials is not an OSError
    denied = Mock(side_effect=LookupError("Unable to locate credentials"))
    for name in ("info", "mkdir", "makedirs", "exists"):
        monkeypatch.setattr(type(memory), name, denied)
    refused(OutputError, WorkPlan(work="memory://closed/b").check, "Unable to locate credentials", "--work")


def test_a_unit_that_fails_once_is_tried_again_and_after_the_second_time_by_the_next_run(plan, store, computes, caplog):
    for error in (ValueError("x"), MemoryError(), OSError(5, "x"), ModelError("a.", "b.")):
        outcome = run_units(NAMES, Units(error), plan, store)
        assert same(outcome.values, VALUES), error
        assert outcome.missing == {}
        store.clear()
    units, heard = Units(*[ZeroDivisionError("no such luck\nat all")] * 3), []
    outcome = run_units(NAMES, units, plan, store, report_unit=heard.append)
    assert outcome.missing == {NAMES[1]: "ZeroDivisionError: no such luck"}
    assert list(outcome.values) == [NAMES[0], NAMES[2]]
    assert not outcome.stopped
    assert heard == NAMES
    assert caplog.messages == [f"{NAMES[1]} failed: ZeroDivisionError: no such luck"]
    assert len(units.errors) == 1, "it was tried twice"
    assert computes() == NAMES[1:2]


def test_errors_of_attnlens_and_of_all_units_end_the_run_and_a_users_error_is_not_tried_again(plan, store):
    for kind, tries in ((ModelError, 2), (UsageError, 1), (TextError, 1), (OutputError, 1)):
        units = Units(*[kind("It is broken.", "Mend it.")] * 2)
        refused(kind, partial(run_units, NAMES, units, plan, store), "It is broken.", "Mend it.")
        assert len(units.errors) == 2 - tries, kind
        assert store.load(NAMES[0]) is not None, "what is finished stays"
    for error in (SystemExit(3), GeneratorExit()):
        with pytest.raises(type(error)):
            run_units(NAMES, Units(error), plan, store)
    store.clear()

    def fails(name: str) -> None:
        raise ZeroDivisionError(name)

    for names in (NAMES, NAMES[::-1]):
        with pytest.raises(ZeroDivisionError, match=names[0]):
            run_units(names, fails, plan, store)


def test_an_error_does_not_keep_the_memory_of_its_unit():
    references = []

    def fails(_: str) -> None:
        large = torch.zeros(1)
        references.append(weakref.ref(large))
        raise ValueError("x")

    done = try_twice(fails, "a")
    gc.collect()
    assert isinstance(done.error, ValueError)
    assert [reference() for reference in references] == [None, None]


def test_an_interruption_keeps_what_is_finished_and_hands_over_what_a_unit_has_found(plan, store, computes):
    for error, values in ((KeyboardInterrupt(), NAMES[:1]), (Stopped(NAMES[1], "half"), NAMES[:2])):
        outcome = run_units(NAMES, Units(error), plan, store)
        assert (outcome.stopped, list(outcome.values), outcome.missing) == (True, values, {})
    assert outcome.values[NAMES[1]] == "half"
    shard = WorkPlan(work=plan.work, shard="1/1")
    assert run_units(NAMES, Units(KeyboardInterrupt()), shard, store).stopped
    assert computes() == NAMES[1:], "half a unit is not kept"


def test_shards_compute_each_unit_once_and_name_what_failed_and_remains(plan, store, computes):
    def compute_shard(number: str, *errors: BaseException) -> tuple[list[str], ShardFinished]:
        units = Units(*errors)
        with pytest.raises(ShardFinished) as caught:
            run_units(NAMES, units, WorkPlan(work=plan.work, shard=number), store)
        return units.computed, caught.value

    later = "The report is written after the last unit."
    computed, end = compute_shard("3/3")
    assert computed == [NAMES[2]]
    assert str(end) == f"1 of 3 units are finished; {NAMES[0]} and 1 more remain. {later}"
    computed, end = compute_shard("1/3")
    assert computed == [NAMES[0]]
    assert (end.finished, end.total, list(end.remaining), end.failed) == (2, 3, [NAMES[1]], {})
    computed, end = compute_shard("1/1", *[ValueError("odd")] * 2)
    assert (computed, end.failed) == ([], {NAMES[1]: "ValueError: odd"})
    assert str(end) == f"2 of 3 units are finished; {NAMES[1]} remains. {later}"
    assert compute_shard("4/4")[0] == [], "a shard without a unit computes none"
    assert computes() == [NAMES[1]]
    last = "All 3 units are finished: run the command without --shard to write the report."
    assert str(compute_shard("1/1")[1]).startswith(last)


@pytest.fixture
def spread(tmp_path):
    """Return a function that runs units in two processes, which use nothing that this process has imported."""
    plan = WorkPlan(work=tmp_path / "work", jobs=2)

    def run(names: list[str], seed: int = 0, **more: Any) -> work.Outcome:
        worker_setup = work_units.opened, (str(tmp_path), seed)
        with forkserver.workers():
            here = lambda _: pytest.fail("Not here.")  # noqa: E731
            return run_units(names, here, plan, plan.store(FACTS), worker_setup=worker_setup, **more)

    return run


def test_processes_compute_what_is_not_finished_and_a_killed_one_loses_its_own_unit_alone(spread, tmp_path):
    names = ["a", "b", "killed once", "failing once", "killed always", "failing always", "interrupted", "c"]
    outcome = spread(names)
    assert list(outcome.values) == ["a", "b", "killed once", "failing once", "interrupted", "c"]
    assert outcome.missing == {"killed always": LOST, "failing always": "ZeroDivisionError: no such luck"}
    twice = dict.fromkeys(("killed once", "failing once", "killed always", "failing always"), 2)
    assert work_units.times(tmp_path) == dict.fromkeys(names, 1) | twice
    assert {value["threads"] for value in outcome.values.values()} == {"1"}
    assert os.getpid() not in {value["process"] for value in outcome.values.values()}
    assert spread(["c", "d", "a"]).values.keys() == {"c", "d", "a"}
    assert work_units.times(tmp_path) == dict.fromkeys([*names, "d"], 1) | twice


def test_errors_of_workers_end_the_run_in_two_lines(spread):
    refused(AttnlensError, lambda: spread([f"killed always {n}" for n in range(9)]), "All workers were lost")
    refused(ModelError, lambda: spread(["killed always", "failing always"]), "killed always failed first: the")
    refused(ModelError, lambda: spread(["a", "refused"]), "The model is broken.", "Mend it.")
    refused(ModelError, lambda: spread(["b"], seed=7), "settings.seed is 7 instead of 0", "the same files")


def test_an_interruption_ends_the_processes_and_starts_no_other_unit(spread, tmp_path):
    def interrupt(_name: str) -> None:
        while sum(work_units.times(tmp_path).values()) < 3:
            time.sleep(0.01)
        raise KeyboardInterrupt

    began = time.monotonic()
    assert spread(["a", "long 1", "long 2", "b"], report_unit=interrupt).stopped
    assert time.monotonic() - began < 40, "units of a minute were not awaited"
    assert work_units.times(tmp_path) == {"a": 1, "long 1": 1, "long 2": 1}


def test_ray_does_not_keep_the_handler_that_it_sets_for_the_end_of_the_program(tmp_path):
    own, rays = lambda *_: None, lambda *_: None
    before = signal.signal(signal.SIGTERM, own)
    ray = Mock()
    ray.init.side_effect = lambda **_: signal.signal(signal.SIGTERM, rays)
    try:
        work._start_ray(ray, WorkPlan(work=tmp_path, engine="ray"))
        assert ray.init.called
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_unit_that_another_run_has_cleared_is_computed_here_but_not_for_ray(tmp_path, store, monkeypatch):
    for name in ("_run_in_processes", "_run_on_ray"):
        monkeypatch.setattr(work, name, lambda names, *_: [(name, None) for name in names])
    run = partial(run_units, NAMES, Units(), store=store, worker_setup=(work_units.opened, (str(tmp_path),)))
    assert same(run(plan=WorkPlan(work=tmp_path, jobs=2)).values, VALUES)
    refused(ModelError, partial(run, plan=WorkPlan(work=tmp_path, engine="ray")), "all workers must share")


def test_a_worker_prepares_a_run_once_and_writes_units_that_this_process_reads(store, tmp_path):
    arguments = (str(tmp_path), 0)
    for name in ("a", "b"):
        assert work._compute_in_worker(work_units.opened, arguments, store, name) is None
        assert store.load(name)["name"] == name
    assert (tmp_path / "opened").read_text() == "0\n"
    failure = work._compute_in_worker(work_units.opened, arguments, store, "failing always")
    assert failure == Failure("ZeroDivisionError: no such luck")
    assert pickle.loads(pickle.dumps(failure)) == failure  # noqa: S301
    work._prepared.clear()
