"""Tests of a Ray cluster: workers that are lost, a whole inspection and a study there, and what is no cluster."""

import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path

import clusters
import engine_units as units
import pytest
from attnlens.engines import completed, engine, ray_cluster
from attnlens.engines.ray_cluster import RayWorkers
from attnlens.studies.pool import Pool, UnitTrainer
from reports import bytes_of
from test_engines import LOST, begun, begun_process, by_unit, ends, interrupted
from test_units import ASKED, UNITS, finished

import attnlens
from attnlens.errors import AttnlensError, ModelError, UsageError
from attnlens.run.inspect.survey import Inspection


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray cluster of this machine with three processors."""
    with clusters.ray_cluster() as address:
        yield address


def test_a_ray_cluster_of_three_workers_loses_one_in_the_middle_and_ends_every_unit(cluster, tmp_path):
    with engine("ray", jobs=3, address=cluster) as workers:
        several = {value for value, _ in by_unit(completed(workers, units.process, range(9))).values()}
        assert len(several) == 3
        found = by_unit(completed(workers, partial(units.killed_once, tmp_path), range(8)))
        assert found == {n: (n, None) for n in range(8)}
        assert begun(tmp_path) == dict.fromkeys(range(8), 1) | {2: 2}
        failed = by_unit(completed(workers, units.fail_always, range(6)))
        assert failed[2] == (None, "There is no text.")
        assert failed[3] == (None, "ZeroDivisionError: first line")
        assert failed[4][1].startswith("Ray brought no result: Failed to deserialize exception.")
        assert failed[5] == (5, None)


def test_a_ray_worker_sees_paths_from_the_folder_of_who_asks(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RayWorkers(1, cluster) as workers:
        assert workers.submit(units.folder, 0).result() == str(tmp_path)


def test_a_study_trains_on_a_ray_cluster_what_it_trains_here(cluster, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    told = []
    with RayWorkers(2, cluster) as workers:
        for folder, of in (("here", None), ("there", workers)):
            trainer = UnitTrainer(units.tasks, tmp_path / folder)
            with Pool(units.tasks(), trainer, of, 2, lambda *said: told.append(said)) as pool:
                found = pool.outcomes(units.training_units(), "search")
            told.append({unit.run.seed: (outcome.curve, outcome.scores) for unit, outcome in found.items()})
        with Pool([], UnitTrainer(list, tmp_path), workers, 1, print) as pool, pytest.raises(ModelError) as refused:
            pool.outcomes(units.training_units()[:1], "search")
    assert told[2] == told[5]
    assert told[3:5] == [("search", 1, 2), ("search", 2, 2)]
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == sorted(
        path.name for path in (tmp_path / "there").iterdir()
    )
    assert refused.value.problem == "A model of planted reversal could not be trained: KeyError: 'planted reversal'"


def test_units_that_kill_every_worker_of_a_ray_cluster_end_the_run_in_two_lines(cluster, capsys):
    with RayWorkers(2, cluster) as workers, pytest.raises(AttnlensError) as caught:
        list(completed(workers, units.kill, range(1), attempts=1))
    assert caught.value.problem.startswith(f"{LOST} The last: Ray brought no result: ")
    told = capsys.readouterr()
    assert "died" in told.err
    assert told.out == ""


def test_tasks_of_a_ray_cluster_are_ended_where_the_block_ends_by_an_exception(cluster, tmp_path):
    interrupted(RayWorkers(2, cluster), tmp_path, 1)
    assert ends(begun_process(tmp_path))


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


TASK = f"ray::{ray_cluster._called.__name__}".encode()
"""How Ray names a process that is at work on a unit."""


def tasks() -> list[int]:
    """The processes of this test's cluster that are at work on a unit."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if words.startswith(TASK):  # Ray's agents are called ray::… too, and a node ends with its agent
            found.append(pid)
    return found


def test_a_whole_inspection_loses_a_worker_in_the_middle_and_gives_the_same_bytes(cluster, tmp_path, monkeypatch):
    here, work, killed = bytes_of(attnlens.inspect("demo", **ASKED)), tmp_path / "work", []
    ended = threading.Event()

    def kill() -> None:
        while not ended.is_set():
            if len(finished(work)) >= 3 and (there := tasks()):
                os.kill(there[0], signal.SIGKILL)
                killed.append(len(finished(work)))
                return
            time.sleep(0.002)

    monkeypatch.setattr(Inspection, "read_unit", lambda *_: pytest.fail("This process read a unit."))
    thread = threading.Thread(target=kill)
    thread.start()
    try:
        report = attnlens.inspect("demo", **ASKED, engine="ray", address=cluster, jobs=3, work=work)
    finally:
        ended.set()
        thread.join()
    assert bytes_of(report) == here
    assert [3 <= count < UNITS for count in killed] == [True]


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "nonsense"])
def test_no_ray_cluster_at_an_address_is_said_at_once(address):
    with socket.socket() as taken:  # bound, and not listening: nobody else can
        taken.bind(("127.0.0.1", 0))
        address = address.format(taken.getsockname()[1])
        with pytest.raises(UsageError) as caught:
            engine("ray", jobs=1, address=address)
    assert caught.value.problem.startswith(f"No Ray cluster is at {address}: ")
    assert "ray start --head" in caught.value.remedy
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None], ids=["http", "closed", "silent"])
def test_what_listens_at_an_address_and_is_no_ray_is_said_within_seconds(answer, monkeypatch):
    monkeypatch.setattr(ray_cluster, "SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            there, _ = server.accept()
            there.recv(100)
            if answer is not None:
                there.sendall(answer)
                there.close()
            kept.append(there)

        kept: list[socket.socket] = []
        serving = threading.Thread(target=serve)
        serving.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"No Ray cluster is at {address}: ") as caught:
            engine("ray", jobs=1, address=address)
        serving.join()
        kept[0].close()
    assert len(str(caught.value).splitlines()) == 2


def test_a_ray_cluster_that_does_not_start_is_said_in_two_lines(monkeypatch):
    import ray

    def refuse(**_):
        raise Exception("The current node timed out during startup.\nMore.")  # noqa: TRY002  # as Ray does

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UsageError) as caught:
        engine("ray", jobs=1)
    assert caught.value.problem == (
        "No Ray cluster can be started on this machine: The current node timed out during startup."
    )
