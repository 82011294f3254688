"""Tests of a Ray cluster: workers that are killed, a whole inspection there, and what is not a cluster."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import work_units
from reports import bytes_of

import attnlens
from attnlens.errors import ModelError, UsageError
from attnlens.runs import work
from attnlens.runs.inspect.inspection import Inspection
from attnlens.runs.work import Outcome, WorkPlan, run_units

INSPECTED: dict[str, Any] = {"length": 16, "windows": 12, "batch_size": 1, "analyzers": ["symmetry"]}
UNITS = 16
SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray cluster of this machine with three processors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([SUPPORT, *filter(None, sys.path)]))
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the user's folder
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
        yield made.address
        made.shutdown()


def spread(cluster: str, folder: Path, names: list[str], seed: int = 0, **more: Any) -> Outcome:
    """Compute units as tasks of the cluster."""
    plan = WorkPlan(work=folder / "work", engine="ray", address=cluster)
    plan.check()
    elsewhere = work_units.opened, (str(folder), seed)
    here = lambda _name: pytest.fail("Not here.")  # noqa: E731
    return run_units(names, here, plan, plan.store(work_units.FACTS), elsewhere=elsewhere, **more)


def test_a_worker_that_is_killed_or_a_unit_that_fails_loses_nothing(cluster, tmp_path, capfd):
    names = ["a", "b", "killed once", "failing once", "killed always", "failing always", "c"]
    found = spread(cluster, tmp_path, names)
    assert list(found.values) == ["a", "b", "killed once", "failing once", "c"]
    assert found.missing["failing always"] == "ZeroDivisionError: no such luck"
    assert found.missing["killed always"].startswith("Ray returned no result: ")
    begun = {path.stem: len(path.read_text().splitlines()) for path in tmp_path.glob("*.begun")}
    assert begun == {name: 1 if name in "abc" else 2 for name in names}
    assert capfd.readouterr().out == "", "where a report may go"
    with pytest.raises(ModelError, match=r"settings.seed is 7 here and 0 there"):
        spread(cluster, tmp_path, ["d"], seed=7)
    with pytest.raises(ModelError, match=r"The model is broken."):
        spread(cluster, tmp_path, ["refused"])
    with pytest.raises(ModelError, match=r"First failure, killed always: Ray returned no result"):
        spread(cluster, tmp_path, ["killed always"])


def test_paths_start_from_the_folder_of_who_asks_and_an_interruption_ends_the_tasks(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = WorkPlan(work="work", engine="ray", address=cluster)

    def interrupt(_name: str) -> None:
        while not (tmp_path / "long.begun").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    store, elsewhere = plan.store(work_units.FACTS), (work_units.opened, (".",))
    found = run_units(["a", "long"], lambda _: None, plan, store, elsewhere=elsewhere, tell=interrupt)
    assert found.stopped
    assert (tmp_path / "a.begun").exists()
    state = Path("/proc", (tmp_path / "long.begun").read_text().strip(), "stat")
    deadline = time.monotonic() + 20
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "The task lives on."
        time.sleep(0.05)


def descendants(of: int) -> set[int]:
    """The numbers of the processes below one."""
    parents = {}
    for state in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(state.parent.name)] = int(state.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {of}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {of}


def tasks() -> list[int]:
    """The processes of this test's cluster that are at work on a unit, as Ray names them."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if words.startswith(f"ray::{work._call_in.__name__}".encode()):  # Ray's agents are called ray::… too
            found.append(pid)
    return found


def test_a_whole_inspection_loses_a_worker_in_the_middle_and_gives_the_same_report(cluster, tmp_path, monkeypatch):
    here, folder, killed = bytes_of(attnlens.inspect("demo", **INSPECTED)), tmp_path / "work", []
    ended = threading.Event()

    def kill() -> None:
        while not ended.is_set():
            if len(list(folder.glob("*/*.safetensors"))) >= 3 and (there := tasks()):
                os.kill(there[0], signal.SIGKILL)
                killed.append(len(list(folder.glob("*/*.safetensors"))))
                return
            time.sleep(0.002)

    monkeypatch.setattr(Inspection, "read_unit", lambda *_: pytest.fail("This process read a unit."))
    thread = threading.Thread(target=kill)
    thread.start()
    try:
        report = attnlens.inspect("demo", **INSPECTED, engine="ray", address=cluster, jobs=3, work=folder)
    finally:
        ended.set()
        thread.join()
    assert bytes_of(report) == here
    assert [3 <= count < UNITS for count in killed] == [True]


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_no_cluster_at_an_address_is_said_at_once(address):
    with socket.socket() as taken:  # bound, and not listening: nobody else can
        taken.bind(("127.0.0.1", 0))
        address = address.format(taken.getsockname()[1])
        with pytest.raises(UsageError) as caught:
            WorkPlan(engine="ray", address=address).check()
    assert caught.value.problem.startswith(f"No Ray cluster answers at {address}: ")
    assert "ray start --head" in caught.value.remedy


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None], ids=["http", "closed", "silent"])
def test_what_listens_at_an_address_and_is_not_ray_is_said_within_seconds(answer, monkeypatch):
    honest = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda place, _seconds: honest(place, 0.5))
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            there, _ = server.accept()
            there.recv(100)
            if answer is not None:
                there.sendall(answer)
                there.close()
            kept.append(there)

        serving = threading.Thread(target=serve)
        serving.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"No Ray cluster answers at {address}: "):
            WorkPlan(engine="ray", address=address).check()
        serving.join()
        kept[0].close()


@pytest.mark.parametrize("address", [None, "nonsense"])
def test_a_ray_cluster_that_does_not_start_is_said_in_two_lines(address, monkeypatch, tmp_path):
    import ray

    def refuse(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nMore.")  # noqa: TRY002  # as Ray does

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UsageError) as caught:
        spread(address, tmp_path, ["a"])  # type: ignore[arg-type]
    where = "can be started on this machine" if address is None else "answers at nonsense"
    assert caught.value.problem == f"No Ray cluster {where}: Exception: The current node timed out during startup."
    assert len(str(caught.value).splitlines()) == 2
