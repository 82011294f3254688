"""Tests of units on a Ray cluster: killed workers, a whole inspection, and addresses without a cluster."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock, call

import pytest
import torch
import work_units
from hostile import refused
from reports import bytes_of

import attnlens
from attnlens.errors import ModelError, UsageError
from attnlens.runs import work
from attnlens.runs.inspect.inspection import Inspection
from attnlens.runs.work import Outcome, WorkPlan, run_units

INSPECTED: dict[str, Any] = {"length": 16, "windows": 12, "batch_size": 1, "analyzers": ["symmetry"]}
UNITS = 16


@pytest.fixture(scope="module")
def cluster():
    """Start a Ray cluster with three processors on this machine; return its address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the user's folder
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
        yield made.address
        made.shutdown()


def spread(cluster: str | None, folder: Path, names: list[str], seed: int = 0, **more: Any) -> Outcome:
    """Compute units as tasks of the cluster."""
    plan = WorkPlan(work=folder / "work", engine="ray", address=cluster, jobs=3)
    plan.check()
    worker_setup = work_units.opened, (str(folder), seed)
    here = lambda _name: pytest.fail("Not here.")  # noqa: E731
    return run_units(names, here, plan, plan.store(work_units.FACTS), worker_setup=worker_setup, **more)


def fake_ray() -> Mock:
    """Build a fake of the parts of Ray that attnlens uses, which computes in this process."""

    def get(task: tuple[Any, ...]) -> Any:
        function, *arguments = task
        if arguments[-1] == "lost":
            raise ConnectionError("the node died.\nMore.")
        return function(*arguments)

    ray = Mock(exceptions=SimpleNamespace(RayError=ConnectionError), get=get)
    ray.is_initialized = lambda: False
    ray.remote.return_value = lambda function: SimpleNamespace(remote=lambda *arguments: (function, *arguments))
    ray.wait = lambda pending, num_returns: (pending[:num_returns], pending[num_returns:])
    return ray


def test_units_are_tasks_of_ray_whose_failures_have_reasons(tmp_path, monkeypatch):
    def interrupt(name: str) -> None:
        if name == "failing always":
            raise KeyboardInterrupt

    ray = fake_ray()
    print_to_stdstream = ray._private.worker.print_to_stdstream
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(work, "find_spec", lambda _: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    outcome = spread(None, tmp_path, ["a", "lost", "failing once", "failing always"])
    assert list(outcome.values) == ["a", "failing once"]
    lost = "Ray returned no result: ConnectionError: the node died."
    assert outcome.missing == {"lost": lost, "failing always": "ZeroDivisionError: no such luck"}
    logging = {"log_to_driver": False, "logging_level": ANY}
    task = {"num_cpus": 1, "num_gpus": int(torch.cuda.is_available()), "max_retries": 1, "retry_exceptions": False}
    assert ray.method_calls == [
        *(call.init(address="local", num_cpus=3, include_dashboard=False, **logging), call.remote(**task)),
        call.shutdown(),
    ]
    ray._private.worker.print_to_stdstream({"lines": ["x"], "is_err": False})
    print_to_stdstream.assert_called_once_with({"lines": ["x"], "is_err": True})  # not on stdout, where a report may go
    ray.reset_mock()
    assert spread("host", tmp_path, ["failing always", "b"], report_unit=interrupt).stopped
    assert ray.method_calls == [
        *(call.init(address="host", **logging), call.remote(**task)),
        *(call.cancel((ANY, str(tmp_path), ANY, "b"), force=True), call.shutdown()),
    ]
    work._prepared.clear()


@pytest.mark.full
def test_a_worker_that_is_killed_or_a_unit_that_fails_loses_nothing(cluster, tmp_path, capfd):
    names = ["a", "b", "killed once", "failing once", "killed always", "failing always", "c"]
    outcome = spread(cluster, tmp_path, names)
    assert list(outcome.values) == ["a", "b", "killed once", "failing once", "c"]
    assert outcome.missing["failing always"] == "ZeroDivisionError: no such luck"
    assert outcome.missing["killed always"].startswith("Ray returned no result: ")
    assert work_units.times(tmp_path) == {name: 1 if name in "abc" else 2 for name in names}
    assert capfd.readouterr().out == "", "where a report may go"
    for units, seed, problem in (
        (["d"], 7, "settings.seed is 7 instead of 0"),
        (["refused"], 0, "The model is broken."),
        (["killed always"], 0, "killed always failed first: Ray returned no result"),
    ):
        with pytest.raises(ModelError, match=problem):
            spread(cluster, tmp_path, units, seed=seed)


@pytest.mark.full
def test_paths_start_from_the_callers_folder_and_an_interruption_ends_the_tasks(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = WorkPlan(work="work", engine="ray", address=cluster)

    def interrupt(_name: str) -> None:
        while not (tmp_path / "long.begun").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    store, worker_setup = plan.store(work_units.FACTS), (work_units.opened, (".",))
    assert run_units(
        ["a", "long"], lambda _: None, plan, store, worker_setup=worker_setup, report_unit=interrupt
    ).stopped
    assert (tmp_path / "a.begun").exists()
    state = Path("/proc", (tmp_path / "long.begun").read_text().strip(), "stat")
    deadline = time.monotonic() + 20
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "The task lives on."
        time.sleep(0.05)


def tasks() -> list[int]:
    """Return the ids of the descendant processes that compute a unit."""
    parents, words = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words[int(folder.name)] = (folder / "cmdline").read_bytes()
        except OSError:
            continue
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    name = f"ray::{work._call_in_folder.__name__}".encode()  # Ray's agents are called ray::… too
    return [pid for pid in below if words.get(pid, b"").startswith(name)]


@pytest.mark.full
def test_a_whole_inspection_loses_a_worker_in_the_middle_and_gives_the_same_report(cluster, tmp_path, monkeypatch):
    here, folder, killed = bytes_of(attnlens.inspect("demo", **INSPECTED)), tmp_path / "work", []
    ended = threading.Event()

    def kill() -> None:
        while not ended.is_set():
            if len(list(folder.glob("*/*.safetensors"))) >= 3 and (running := tasks()):
                os.kill(running[0], signal.SIGKILL)
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


def test_addresses_where_no_cluster_answers_are_refused_within_seconds(monkeypatch):
    for scheme in ("", "ray://"):
        with socket.socket() as taken:  # bound, and not listening: nobody else can
            taken.bind(("127.0.0.1", 0))
            address = f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
            plan = WorkPlan(engine="ray", address=address)
            refused(UsageError, plan.check, f"No Ray cluster answers at {address}: ", "ray start --head")
    honest = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda place, _seconds: honest(place, 0.5))
    connections: list[socket.socket] = []

    def serve(server: socket.socket, answer: bytes | None) -> None:
        connections.append(server.accept()[0])
        connections[-1].recv(100)
        if answer is not None:
            connections[-1].sendall(answer)
            connections[-1].close()

    settings = b"\0\0\0\4\0\0\0\0\0"
    for answer in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None, settings):
        with socket.create_server(("127.0.0.1", 0)) as server:
            serving = threading.Thread(target=serve, args=(server, answer))
            serving.start()
            address = f"127.0.0.1:{server.getsockname()[1]}"
            plan = WorkPlan(engine="ray", address=address)
            if answer == settings:
                plan.check()  # the control
            else:
                refused(UsageError, plan.check, f"No Ray cluster answers at {address}: ")
            serving.join()
            connections[-1].close()


def test_a_cluster_that_does_not_start_is_refused_in_two_lines(monkeypatch, tmp_path):
    import ray

    problem = "The current node timed out during startup."
    monkeypatch.setattr(ray, "init", Mock(side_effect=Exception(f"{problem}\nMore.")))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for address, where in ((None, "can be started on this machine"), ("nonsense", "answers at nonsense")):
        error = refused(UsageError, lambda address=address: spread(address, tmp_path, ["a"]))
        assert error.problem == f"No Ray cluster {where}: Exception: {problem}"
