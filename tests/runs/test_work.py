"""Tests of runs/work and runs/store: units are kept whole, used again and shared out, and survive damage."""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import forkserver
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
from attnlens.runs.store import RUN, Store, difference, file_stem, key_of
from attnlens.runs.work import LOST, NOTHING_KEPT, Failure, Stopped, WorkPlan, run_units, try_twice

FACTS = work_units.FACTS
NAMES = ["weights of layer 0", "weights of layer 1", "tokens of batch 0"]
VALUES = {name: {"numbers": torch.arange(3.0) + at, "at": at} for at, name in enumerate(NAMES)}


@pytest.fixture
def plan(tmp_path) -> WorkPlan:
    return WorkPlan(work=tmp_path / "work")


@pytest.fixture
def store(plan) -> Store:
    found = plan.store(FACTS)
    assert found is not None
    return found


@pytest.fixture
def computed() -> list[str]:
    """The names of the units that were computed."""
    return []


@pytest.fixture
def compute(computed) -> Callable[[str], Any]:
    def compute(name: str) -> Any:
        computed.append(name)
        return VALUES[name]

    return compute


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal, down to the bits of their numbers."""
    if isinstance(first, torch.Tensor):
        bits = [part.reshape(-1).view(torch.uint8) for part in (first, second)]
        return first.dtype == second.dtype and first.shape == second.shape and torch.equal(*bits)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and (first == second or (first != first and second != second))


# --- values -----------------------------------------------------------------------------------------------------------

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)], ids=str)
def test_tensors_of_every_type_and_shape_come_back_bit_for_bit(dtype, shape, store):
    value = (torch.randn(shape) * 3).to(dtype)
    store.save("a", [value, value.mT if value.dim() > 1 else value])
    assert same(store.load("a"), [value, value.mT.contiguous() if value.dim() > 1 else value])


def test_values_come_back_as_they_were_and_tuples_as_lists(store):
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
@settings(max_examples=60, deadline=None)
def test_any_nested_value_comes_back_as_it_was(value):
    assert same(store_module._parse(store_module._serialise(value, "stamp"), "stamp"), value)


def test_a_value_shares_no_memory_with_what_was_kept_and_has_no_gradient(store):
    whole = torch.arange(6.0, requires_grad=True)
    store.save("a", [whole, whole[:2]])
    assert [part.requires_grad for part in store.load("a")] == [False, False]


# --- resume -----------------------------------------------------------------------------------------------------------


def test_a_finished_unit_is_not_computed_again_and_no_resume_computes_all(plan, store, compute, computed):
    assert same(run_units(NAMES, compute, plan, store).values, VALUES)
    assert computed == NAMES
    assert same(run_units(NAMES, lambda _: pytest.fail("It was finished."), plan, store).values, VALUES)
    store.path(NAMES[1]).unlink()
    computed.clear()
    found = run_units(NAMES, compute, plan, store)
    assert computed == [NAMES[1]]
    assert list(found.values) == NAMES, "in the order of the run"
    computed.clear()
    anew = Store(store.folder, FACTS, resume=False)
    assert same(run_units(NAMES, compute, plan, anew).values, VALUES)
    assert computed == NAMES


def test_what_is_resumed_from_is_what_lies_there(plan, store, compute):
    """A control: another number in the place of a finished unit's is found again."""
    store.save(NAMES[0], "another")
    assert run_units(NAMES, compute, plan, store).values[NAMES[0]] == "another"


def test_the_same_unit_has_the_same_bytes_and_another_name_another_file(store):
    store.save("a", VALUES)
    content = store.path("a").read_bytes()
    store.save("a", VALUES)
    assert store.path("a").read_bytes() == content
    names = ["a", "a ", "A", "a/../b", "a" * 1000, "a" * 1001, "é", "", ".", "/"]
    assert len({file_stem(name).lower() for name in names}) == len(names), "also where case is ignored"
    assert all(len(file_stem(name)) < 100 and "/" not in file_stem(name) for name in names)


def test_a_unit_that_is_not_complete_is_computed_again_with_what_is_kept_of_its_parts(plan, store):
    whole: list[bool] = []

    def compute(name: str) -> Any:
        store.inside(name).compute("part", lambda: whole.append(True) or 1)
        return {"complete": len(compute.__dict__) > 0}

    usable = lambda value: value["complete"]  # noqa: E731
    for complete in (False, True):
        compute.__dict__.update({"x": 1} if complete else {})
        found = run_units(["a"], compute, plan, store, usable=usable)
        assert found.values == {"a": {"complete": complete}}
    assert whole == [True], "the part was computed once"
    assert not store.inside("a").folder.exists()
    run_units(["a"], lambda _: pytest.fail("It is complete."), plan, store, usable=usable)


# --- files that are not the unit's ------------------------------------------------------------------------------------


def truncated(content: bytes) -> bytes:
    return content[:-1]


def flipped(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


def stamped(value: Any, store: Store) -> bytes:
    """A file as anybody could write it, with a hash that fits."""
    text = json.dumps([store._stamp(NAMES[1]), value]) if not isinstance(value, str) else value
    return save({}, {"attnlens": f"{store_module._digest(text, {})} {text}"})


DAMAGE: dict[str, Callable[[bytes, Store], bytes]] = {
    "cut off": lambda content, _: truncated(content),
    "cut off in its header": lambda content, _: content[:50],
    "empty": lambda *_: b"",
    "one byte in its numbers": lambda content, _: flipped(content),
    "one byte in its JSON": lambda content, _: content.replace(b"numbers", b"mumbers"),
    "foreign": lambda *_: b"my notes",
    "another program's": lambda *_: save({"a": torch.ones(2)}),
    "a pickle": lambda *_: pickle.dumps(print),
    "another unit's": lambda _, store: store.path(NAMES[0]).read_bytes(),
    "another run's": lambda _, store: store_module._serialise(VALUES[NAMES[1]], f"{key_of('other')} {NAMES[1]}"),
    "another version's": lambda *_: save({}, {"attnlens": "{}"}),
    "no metadata": lambda *_: b"\2\0\0\0\0\0\0\0{}",
    "deeply nested": lambda _, store: stamped("[" * 100_000 + "]" * 100_000, store),
    "a list": lambda _, store: stamped("[]", store),
    "a tensor that is missing": lambda _, store: stamped({"tensor": "7"}, store),
    "pairs that are not": lambda _, store: stamped({"pairs": [1]}, store),
    "a key that cannot be one": lambda _, store: stamped({"pairs": [[{"pairs": []}, 1]]}, store),
    "a record that is none": lambda _, store: stamped({"record": "json_schema", "fields": {"pairs": []}}, store),
    "a record of other values": lambda _, store: stamped({"record": "Measure", "fields": {"pairs": []}}, store),
    "an unknown object": lambda _, store: stamped({"eval": "1"}, store),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_the_units_is_named_set_aside_and_computed_again(
    damage, plan, store, compute, computed, caplog
):
    run_units(NAMES, compute, plan, store)
    path = store.path(NAMES[1])
    content = path.read_bytes()
    harmed = DAMAGE[damage](content, store)
    path.write_bytes(harmed)
    computed.clear()
    assert same(run_units(NAMES, compute, plan, store).values, VALUES)
    assert computed == [NAMES[1]]
    assert path.read_bytes() == content
    aside = path.with_name(path.name + ".damaged")
    assert aside.read_bytes() == harmed, "nothing is lost"
    [line] = caplog.messages
    assert line == f"{path} is damaged or not the unit {NAMES[1]}: it is kept as {aside.name} and computed again."
    store.clear()
    assert [one.name for one in store.folder.iterdir()] == [aside.name]


def test_every_flipped_byte_of_a_file_is_noticed(store):
    store.save("a", VALUES)
    content = store.path("a").read_bytes()
    for place in range(0, len(content), 7):
        harmed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        with pytest.raises(ValueError, match=r".*"):
            store_module._parse(harmed, store._stamp("a"))
    assert same(store_module._parse(content, store._stamp("a")), VALUES), "a control"


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_folder_or_a_pipe_under_a_units_name_is_set_aside_and_stays(kind, plan, store, compute, computed, caplog):
    path = store.path(NAMES[1])
    if kind == "folder":
        path.mkdir(parents=True)
        (path / "model.safetensors").write_text("mine")
    else:
        path.parent.mkdir(parents=True)
        os.mkfifo(path)
    assert same(run_units(NAMES, compute, plan, store).values, VALUES)
    assert computed == NAMES
    assert "is damaged or not the unit" in caplog.text
    store.clear()
    [aside] = store.folder.iterdir()
    assert kind == "pipe" or (aside / "model.safetensors").read_text() == "mine"


def test_what_can_not_be_set_aside_is_named_and_the_run_goes_on(plan, store, compute, caplog):
    path = store.path(NAMES[1])
    for place in (path, path.with_name(path.name + ".damaged")):
        place.mkdir(parents=True)
        (place / "file").touch()
    assert same(run_units(NAMES, compute, plan, store).values, VALUES)
    assert "it cannot be renamed" in caplog.messages[0]
    assert f"{NAMES[1]} is not kept." in caplog.messages[1]
    assert (path / "file").exists()


def test_files_of_others_stay_when_a_run_is_cleared(plan, store, compute):
    run_units(NAMES, compute, plan, store)
    store.inside(NAMES[0]).save("part", 1)
    mine = [store.folder / name for name in ("notes.txt", "model.safetensors", "backup/x-12.safetensors")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    store.clear()
    assert sorted(path for path in store.folder.rglob("*") if path.is_file()) == sorted(mine)
    store.clear()
    Store(plan.root / "nowhere", {}).clear()


# --- other runs -------------------------------------------------------------------------------------------------------


def test_a_place_that_can_not_be_listed_is_no_obstacle(plan, store, compute, monkeypatch):
    def closed(_folder, _pattern):
        raise PermissionError(13, "no permission to list")

    monkeypatch.setattr(Path, "glob", closed)
    assert set(run_units(NAMES, compute, plan, store).values) == set(NAMES)


def test_a_run_of_other_facts_has_another_key_and_is_reported_by_the_first_difference(plan, store, compute, caplog):
    run_units(NAMES, compute, plan, store)
    other = plan.store(FACTS | {"settings": {"seed": 1}})
    assert other is not None
    assert other.folder != store.folder
    assert other.load(NAMES[0]) is None
    run_units(NAMES[:1], compute, plan, other)
    assert caplog.messages == [
        f"{store.folder} contains 3 finished units of a different run: settings.seed is 1 here and 0 there."
    ]
    caplog.clear()
    run_units(NAMES[:1], compute, NOTHING_KEPT, other)
    assert not caplog.messages, "of the user's cache nothing is said"


@pytest.mark.parametrize("content", ["{", "[]", "3", "[" * 100_000, "\0", "{}", '{"command": "other"}'])
def test_a_run_json_of_anybody_does_no_harm(content, plan, store, compute, caplog):
    (plan.root / "other").mkdir(parents=True)
    (plan.root / "other" / RUN).write_text(content)
    (plan.root / "file").touch()
    assert same(run_units(NAMES, compute, plan, store).values, VALUES)
    assert not caplog.messages


def test_the_first_difference_is_named_with_both_values():
    assert difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}) is None
    assert difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}], "c": 1}) == "a.1.b is 2 here and 3 there"
    assert difference({"a": [1]}, {"a": [1, 2]}) == "a is [1] here and [1, 2] there"
    assert difference({}, {"c": "x" * 1000}) == f"c is None here and {'x' * 30} … {'x' * 30} there"


def test_two_runs_share_a_folder_and_one_may_clear_it_in_the_middle_of_the_other(plan, store, compute, computed):
    for moment in range(len(NAMES)):
        computed.clear()

        def also(name: str, moment: int = moment) -> None:
            if name == NAMES[moment]:
                assert same(run_units(NAMES, compute, plan, store).values, VALUES)
                store.clear()
                assert not store.folder.exists()

        assert same(run_units(NAMES, compute, plan, store, tell=also).values, VALUES)
        store.clear()
        assert not store.folder.exists()


def test_a_folder_that_is_removed_while_a_file_is_written_is_made_again(store, monkeypatch):
    honest, tries = store_module.write_atomically, []

    def write(path: Path, content: bytes) -> None:
        tries.append(path)
        if len(tries) == 1:
            path.parent.rmdir()
        honest(path, content)

    monkeypatch.setattr(store_module, "write_atomically", write)
    store.save("a", 1)
    assert store.load("a") == 1
    assert len(tries) == 3, "twice, and the description of the run"


# --- where nothing can be kept ----------------------------------------------------------------------------------------


def full(path: Path, _content: bytes) -> None:
    raise OutputError(f"{path} can't be written: No space left on device.", "Make room.")


def test_a_full_disk_is_named_and_the_run_goes_on_but_a_shard_ends(plan, store, compute, computed, monkeypatch, caplog):
    run_units(NAMES[:1], compute, plan, store)
    monkeypatch.setattr(store_module, "write_atomically", full)
    assert same(run_units(NAMES, compute, plan, store).values, VALUES)
    assert [message.split(" is not kept")[0] for message in caplog.messages] == NAMES[1:]
    assert "No space left on device" in caplog.messages[0]
    shard = WorkPlan(work=plan.work, shard="1/1")
    computed.clear()
    refused(OutputError, lambda: run_units(NAMES, compute, shard, store), "No space left on device")
    assert computed == NAMES[1:2], "it was not tried again, and what was finished stays"
    assert same(store.load(NAMES[0]), VALUES[NAMES[0]])


def test_a_file_that_can_not_be_read_is_named(plan, store, monkeypatch):
    store.save(NAMES[0], 1)

    def closed(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", closed)
    refused(OutputError, lambda: store.load(NAMES[0]), store.path(NAMES[0]).name, "Permission denied", "--work")


def test_a_place_that_can_not_be_written_is_refused_before_the_work_and_the_users_cache_is_done_without(
    tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    for place in ("file", "file/inside"):
        refused(OutputError, WorkPlan(work=tmp_path / place).check, place, "--work")
    WorkPlan(work=tmp_path / "new").check()
    monkeypatch.setattr(os, "access", lambda *_: False)
    refused(OutputError, WorkPlan(work=tmp_path / "new").check, "Permission denied", "--work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    WorkPlan().check()
    assert WorkPlan().store(FACTS) is None
    for needed in (WorkPlan(shard="1/2"), WorkPlan(jobs=2)):
        refused(OutputError, needed.check, "Permission denied")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = WorkPlan().store(FACTS)
    assert found is not None
    assert found.folder.parent == tmp_path / "attnlens" / "work"


def test_a_plan_that_contradicts_itself_is_refused(tmp_path, monkeypatch):
    refused(UsageError, WorkPlan(address="127.0.0.1:1").check, "address applies only to engine='ray'", "Omit address")
    refused(UsageError, partial(WorkPlan(work=tmp_path, jobs=2).check, ["a.txt", "-"]), "stdin")
    refused(UsageError, WorkPlan(work="memory://units", jobs=2).check, "memory", "--work")
    refused(UsageError, WorkPlan(work=tmp_path, engine="ray", address="127.0.0.1:9").check, "No Ray cluster answers")
    monkeypatch.setattr(work, "find_spec", lambda _: None)
    error = refused(UsageError, WorkPlan(work=tmp_path, engine="ray").check, "Ray is not installed.")
    assert error.remedy == 'Run: pip install "attnlens[ray]"'
    assert WorkPlan.of(InspectRequest(work="x", shard="2/3", length=3)) == WorkPlan(work="x", shard="2/3")
    assert WorkPlan.of(InspectRequest()) == NOTHING_KEPT


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory():
    import fsspec

    system = fsspec.filesystem("memory")
    yield system
    if system.exists("/units"):
        system.rm("/units", recursive=True)


def test_units_are_kept_at_an_address_as_in_a_folder(memory, compute, computed, caplog):
    plan = WorkPlan(work="memory://units/work")
    plan.check()
    store = plan.store(FACTS)
    assert store is not None
    with pytest.raises(ShardFinished):
        run_units(NAMES, compute, WorkPlan(work=plan.work, shard="1/2"), store)
    assert computed == NAMES[::2]
    run_units(NAMES, compute, plan, store)
    assert computed == [*NAMES[::2], NAMES[1]]
    store.inside(NAMES[0]).save("part", 1)
    path = f"/units/work/{store.folder.name}/{file_stem(NAMES[1])}.safetensors"
    memory.pipe_file(path, memory.cat_file(path)[:-1])
    computed.clear()
    assert same(run_units(NAMES, compute, plan, store).values, VALUES)
    assert computed == NAMES[1:2]
    assert f"it is kept as {file_stem(NAMES[1])}.safetensors.damaged" in caplog.text
    other = plan.store(FACTS | {"settings": {"seed": 1}})
    run_units(NAMES[:1], compute, plan, other)
    assert "settings.seed is 1 here and 0 there" in caplog.text
    store.clear()
    assert [name for name in memory.find("/units") if store.folder.name in name] == [f"{path}.damaged"]


def test_an_address_that_cannot_be_used_is_refused_in_two_lines(monkeypatch):
    refused(UsageError, WorkPlan(work="nonsense://a/b").check, "nonsense", "--work")
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Closed(MemoryFileSystem):  # type: ignore[misc]
        """A store without credentials, as botocore refuses them: no OSError."""

        protocol = "memory"

        def info(self, *_: object, **__: object) -> None:
            raise LookupError("Unable to locate credentials")

        mkdir = makedirs = exists = info

    monkeypatch.setattr(fsspec.filesystem("memory"), "__class__", Closed)
    refused(OutputError, WorkPlan(work="memory://closed/b").check, "Unable to locate credentials", "--work")


# --- failures ---------------------------------------------------------------------------------------------------------


def failing(errors: dict[str, list[BaseException]]) -> Callable[[str], Any]:
    """Units that raise these, one at each try, until none is left."""

    def compute(name: str) -> Any:
        if errors.get(name):
            raise errors[name].pop(0)
        return VALUES[name]

    return compute


ONCE = {
    "a bug": ValueError("x"),
    "memory": MemoryError(),
    "a disk": OSError(5, "Input/output error"),
    "a hub": ModelError("The hub is away.", "Try later."),
}


@pytest.mark.parametrize("error", ONCE.values(), ids=ONCE)
def test_a_unit_that_fails_once_is_tried_again(error, plan, store):
    found = run_units(NAMES, failing({NAMES[1]: [error]}), plan, store)
    assert same(found.values, VALUES)
    assert found.missing == {}


def test_a_unit_that_fails_twice_is_missing_with_its_reason_and_is_computed_by_the_next_run(plan, store, caplog):
    left = {NAMES[1]: [ZeroDivisionError("no such luck\nat all")] * 3}
    heard: list[str] = []
    found = run_units(NAMES, failing(left), plan, store, tell=heard.append)
    assert found.missing == {NAMES[1]: "ZeroDivisionError: no such luck"}
    assert list(found.values) == [NAMES[0], NAMES[2]]
    assert not found.stopped
    assert heard == NAMES
    assert caplog.messages == [f"{NAMES[1]} failed: ZeroDivisionError: no such luck"]
    assert len(left[NAMES[1]]) == 1, "it was tried twice"
    assert same(run_units(NAMES, failing({}), plan, store).values, VALUES)


@pytest.mark.parametrize(("kind", "times"), [(ModelError, 2), (UsageError, 1), (TextError, 1), (OutputError, 1)])
def test_an_error_of_attnlens_ends_the_run_and_what_the_user_must_change_is_not_tried_again(kind, times, plan, store):
    left: list[BaseException] = [kind("It is broken.", "Mend it.")] * 2
    refused(kind, lambda: run_units(NAMES, failing({NAMES[1]: left}), plan, store), "It is broken.", "Mend it.")
    assert len(left) == 2 - times
    assert store.load(NAMES[0]) is not None, "what is finished stays"


def test_if_every_unit_fails_the_first_error_is_raised(plan, store):
    errors = {name: [ZeroDivisionError(name)] * 2 for name in NAMES}
    with pytest.raises(ZeroDivisionError, match=NAMES[0]):
        run_units(NAMES, failing(errors), plan, store)


def test_what_no_second_try_can_change_is_not_caught(plan, store):
    for error in (SystemExit(3), GeneratorExit()):
        with pytest.raises(type(error)):
            run_units(NAMES, failing({NAMES[1]: [error]}), plan, store)


def test_an_error_that_is_kept_holds_nothing_that_its_unit_took():
    class Large:
        """Stands for a tensor."""

    seen = []

    def fails(_: str) -> None:
        large = Large()
        seen.append(weakref.ref(large))
        raise ValueError("x")

    done = try_twice(fails, "a")
    gc.collect()
    assert isinstance(done.error, ValueError)
    assert [found() for found in seen] == [None, None]


def test_an_interruption_keeps_what_is_finished_and_the_next_run_resumes(plan, store, compute, computed):
    found = run_units(NAMES, failing({NAMES[1]: [KeyboardInterrupt()]}), plan, store)
    assert found.stopped
    assert list(found.values) == NAMES[:1]
    assert found.missing == {}
    assert same(run_units(NAMES, compute, plan, store).values, VALUES)
    assert computed == NAMES[1:]


def test_an_interrupted_unit_hands_over_what_it_had_found_which_is_not_kept(plan, store, compute, computed):
    found = run_units(NAMES, failing({NAMES[1]: [Stopped(NAMES[1], "half")]}), plan, store)
    assert found.stopped
    assert found.values[NAMES[1]] == "half"
    run_units(NAMES, compute, plan, store)
    assert computed == NAMES[1:]


# --- shards -----------------------------------------------------------------------------------------------------------


def test_shards_in_any_order_and_then_the_same_run_without_one_compute_each_unit_once(plan, store, compute, computed):
    said = []
    for index in (3, 1):
        with pytest.raises(ShardFinished) as caught:
            run_units(NAMES, compute, WorkPlan(work=plan.work, shard=f"{index}/3"), store)
        said.append(str(caught.value))
    assert computed == [NAMES[2], NAMES[0]]
    assert said == [
        f"1 of 3 units are finished; {NAMES[0]} and 1 more remain. The report is written after the last one.",
        f"2 of 3 units are finished; {NAMES[1]} remains. The report is written after the last one.",
    ]
    assert (caught.value.finished, caught.value.total, list(caught.value.remaining)) == (2, 3, [NAMES[1]])
    assert same(run_units(NAMES, compute, plan, store).values, VALUES)
    assert computed == [NAMES[2], NAMES[0], NAMES[1]]


def test_a_shard_of_which_a_unit_failed_says_so_and_what_remains(plan, store, compute):
    broken = failing({NAMES[1]: [ValueError("odd")] * 2})
    with pytest.raises(ShardFinished) as caught:
        run_units(NAMES, broken, WorkPlan(work=plan.work, shard="1/1"), store)
    assert caught.value.failed == {NAMES[1]: "ValueError: odd"}
    assert (
        str(caught.value) == f"2 of 3 units are finished; {NAMES[1]} remains. The report is written after the last one."
    )
    with pytest.raises(ShardFinished) as caught:
        run_units(NAMES, compute, WorkPlan(work=plan.work, shard="4/4"), store)
    assert caught.value.finished == 2, "a shard without a unit computes none"
    with pytest.raises(
        ShardFinished, match=r"All 3 units are finished: run the command without --shard to write the report."
    ):
        run_units(NAMES, compute, WorkPlan(work=plan.work, shard="1/1"), store)


def test_an_interrupted_shard_is_interrupted(plan, store):
    shard = WorkPlan(work=plan.work, shard="1/1")
    assert run_units(NAMES, failing({NAMES[1]: [KeyboardInterrupt()]}), shard, store).stopped


# --- other processes --------------------------------------------------------------------------------------------------


@pytest.fixture
def spread(tmp_path):
    """Runs units in two processes, each of which may count on nothing that is imported here."""
    store = WorkPlan(work=tmp_path / "work").store(FACTS)

    def run(names: list[str], seed: int = 0, jobs: int = 2, **more: Any) -> work.Outcome:
        plan = WorkPlan(work=tmp_path / "work", jobs=jobs)
        elsewhere = work_units.opened, (str(tmp_path), seed)
        with forkserver.workers():
            return run_units(names, lambda _: pytest.fail("Not here."), plan, store, elsewhere=elsewhere, **more)

    return run


def times(folder: Path) -> dict[str, int]:
    """How often each unit was begun."""
    return {path.stem: len(path.read_text().splitlines()) for path in folder.glob("*.begun")}


def test_processes_compute_what_is_not_finished_and_one_that_is_killed_takes_its_own_unit_alone(spread, tmp_path):
    names = ["a", "b", "killed once", "failing once", "killed always", "failing always", "interrupted", "c"]
    found = spread(names)
    assert list(found.values) == ["a", "b", "killed once", "failing once", "interrupted", "c"]
    assert found.missing == {"killed always": LOST, "failing always": "ZeroDivisionError: no such luck"}
    twice = dict.fromkeys(("killed once", "failing once", "killed always", "failing always"), 2)
    assert times(tmp_path) == dict.fromkeys(names, 1) | twice
    assert {value["threads"] for value in found.values.values()} == {"1"}
    assert os.getpid() not in {value["process"] for value in found.values.values()}
    assert spread(["c", "d", "a"]).values.keys() == {"c", "d", "a"}
    assert times(tmp_path) == dict.fromkeys([*names, "d"], 1) | twice


def test_workers_that_always_die_end_the_run_in_two_lines(spread):
    refused(AttnlensError, lambda: spread([f"killed always {n}" for n in range(9)]), "All workers were lost")
    refused(ModelError, lambda: spread(["killed always"]), "First failure, killed always: the worker process")


def test_an_error_of_attnlens_in_a_worker_ends_the_run_with_both_its_lines(spread):
    refused(ModelError, lambda: spread(["a", "refused"]), "The model is broken.", "Mend it.")


def test_a_worker_that_finds_other_facts_is_refused_by_the_first_difference(spread):
    refused(ModelError, lambda: spread(["a"], seed=7), "settings.seed is 7 here and 0 there", "the same files")


def test_an_interruption_ends_the_processes_at_once_and_begins_no_other(spread, tmp_path):
    def interrupt(_name: str) -> None:
        while sum(times(tmp_path).values()) < 3:
            time.sleep(0.01)
        raise KeyboardInterrupt

    began = time.monotonic()
    assert spread(["a", "long 1", "long 2", "b"], tell=interrupt).stopped
    assert time.monotonic() - began < 40, "units of a minute were not awaited"
    assert times(tmp_path) == {"a": 1, "long 1": 1, "long 2": 1}


def test_a_run_that_clears_what_a_worker_has_written_costs_no_unit(tmp_path, store, compute, monkeypatch):
    monkeypatch.setattr(work, "_in_processes", lambda names, *_: [(name, None) for name in names])
    plan = WorkPlan(work=tmp_path, jobs=2)
    elsewhere = work_units.opened, (str(tmp_path),)
    assert same(run_units(NAMES, compute, plan, store, elsewhere=elsewhere).values, VALUES)
    monkeypatch.setattr(work, "_on_ray", lambda names, *_: [(name, None) for name in names])
    plan = WorkPlan(work=tmp_path, engine="ray")
    refused(ModelError, lambda: run_units(NAMES, compute, plan, store, elsewhere=elsewhere), "all workers must share")


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
