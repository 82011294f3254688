"""Tests that engines run every unit once, try again what failed or was lost, and say in two lines what they lack."""

import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import clusters
import engine_units as units
import pytest
from attnlens.engines import Done, completed, engine
from attnlens.engines.local_processes import LocalWorkers, threads_each
from attnlens.engines.slurm_jobs import SlurmWorkers
from clusters import paths

from attnlens.errors import AttnlensError, UsageError

LOST = "All workers were lost, again and again, and no unit ended."


def by_unit(found):
    found = list(found)
    assert len({done.unit for done in found}) == len(found)
    return {done.unit: (done.value, done.reason) for done in found}


def begun(folder):
    """How often each unit was begun."""
    return {int(path.stem): path.stat().st_size for path in Path(folder).glob("*.begun")}


def ends(pid):
    """Whether a process ends within seconds; one that nobody has waited for yet has ended too."""
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        try:
            if state.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def one():
    with engine("local", jobs=1) as workers:
        yield workers


@pytest.fixture(scope="module")
def three():
    with engine("local", jobs=3) as workers:
        yield workers


def test_units_are_yielded_as_they_end_by_as_many_processes_as_there_are_jobs(one, three):
    assert list(completed(one, units.square, range(20))) == [Done(n, n * n, None) for n in range(20)]
    assert by_unit(completed(three, units.square, range(20))) == {n: (n * n, None) for n in range(20)}
    alone = {value for value, _ in by_unit(completed(one, units.process, range(3))).values()}
    several = {value for value, _ in by_unit(completed(three, units.process, range(9))).values()}
    assert (len(alone), len(several)) == (1, 3)
    assert os.getpid() not in alone | several
    assert list(completed(one, units.square, [])) == []


def test_a_process_has_its_threads_and_its_initializer_before_its_first_unit(one, tmp_path):
    assert one.submit(units.threads, 0).result() == "1"
    with LocalWorkers(1, threads=3, initializer=partial(units.times, tmp_path, 7)) as workers:
        assert {workers.submit(units.threads, n).result() for n in range(3)} == {"3"}
    assert begun(tmp_path) == {7: 1}


def test_a_process_does_not_hear_of_an_interruption(one):
    assert one.submit(units.interrupted, 0).result() == "lived on"


def test_a_unit_that_fails_once_is_tried_again_and_with_one_attempt_is_not(three, tmp_path):
    function = partial(units.fail_once, tmp_path)
    assert by_unit(completed(three, function, range(5))) == {n: (n, None) for n in range(5)}
    assert begun(tmp_path) == {2: 2}
    (tmp_path / "2.begun").unlink()
    assert by_unit(completed(three, function, range(5), attempts=1))[2] == (None, "ValueError: at first")


def test_a_unit_that_always_fails_yields_its_reason_in_one_line_and_the_others_end(three):
    found = by_unit(completed(three, units.fail_always, range(6)))
    assert found[2] == (None, "There is no text.")
    assert found[3] == (None, "ZeroDivisionError: first line")
    assert found[4][1].startswith("What it raised can't be read here: TypeError: UnpicklableError.__init__() missing")
    assert [found[n] for n in (0, 1, 5)] == [(n, None) for n in (0, 1, 5)]


@pytest.mark.parametrize("workers", ["one", "three"])
def test_a_process_that_dies_takes_its_own_unit_alone_which_is_tried_again(workers, request, tmp_path):
    workers = request.getfixturevalue(workers)
    found = by_unit(completed(workers, partial(units.killed_once, tmp_path), range(8)))
    assert found == {n: (n, None) for n in range(8)}
    assert begun(tmp_path) == dict.fromkeys(range(8), 1) | {2: 2}


def test_a_unit_that_always_kills_its_process_is_given_up_and_the_others_end_at_their_first_attempt(three, tmp_path):
    found = by_unit(completed(three, partial(units.killed_always, tmp_path), range(8), attempts=3))
    reason = found.pop(2)[1]
    assert reason.startswith("Its process ended before it did: killed, as for want of memory, or as a script calls")
    assert found == {n: (n, None) for n in range(8) if n != 2}
    assert begun(tmp_path) == dict.fromkeys(range(8), 1) | {2: 3}


@pytest.mark.parametrize(("count", "yielded"), [(1, 1), (30, 0)])
def test_workers_that_always_die_end_the_run_in_two_lines(one, count, yielded):
    found = []
    with pytest.raises(AttnlensError) as caught:
        found.extend(completed(one, units.kill, range(count)))
    assert caught.value.problem.startswith(f"{LOST} The last: Its process ended")
    assert caught.value.remedy.startswith("Finished units are kept; run the same command again")
    assert len(str(caught.value).splitlines()) == 2
    assert len(found) == yielded
    assert one.submit(units.square, 3).result() == 9


def test_a_unit_whose_workers_are_always_lost_is_missing_alone_where_others_ended_before(one):
    [done] = completed(one, units.kill, range(1), others=True)
    assert done.reason.startswith("Its process ended before it did")


def test_processes_share_the_cores_that_are_allowed(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_each(jobs) for jobs in (1, 3, 8, 9)] == [8, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert [threads_each(jobs) for jobs in (1, 2, 8)] == [4, 2, 1]


def interrupted(workers, folder, count):
    """The futures of units that sleep for a minute, after an interruption of a block in which the first began."""
    with suppress(KeyboardInterrupt), workers:
        futures = [workers.submit(units.sleep, folder, n) for n in range(count)]
        begun_process(folder)
        raise KeyboardInterrupt
    return futures


def begun_process(folder):
    """The process of the first unit, once it sleeps."""
    for _ in range(1000):
        if any(found := [path.read_text() for path in Path(folder).glob("*.pid")]):
            return int(next(filter(None, found)))
        time.sleep(0.02)
    raise AssertionError("No unit began.")


def test_processes_are_ended_and_waiting_units_dropped_where_the_block_ends_by_an_exception(tmp_path):
    began = time.monotonic()
    futures = interrupted(LocalWorkers(3), tmp_path, 5)
    assert time.monotonic() - began < 30
    assert all(isinstance(future.exception(), BrokenExecutor) for future in futures[:3])
    assert [future.cancelled() for future in futures] == [False] * 3 + [True] * 2
    assert ends(begun_process(tmp_path))


DRIVER = """
    import sys
    import engine_units
    from attnlens.engines import engine

    if __name__ == "__main__":
        with engine("local", jobs=1) as workers:
            workers.submit(engine_units.sleep, sys.argv[1], 0).result()
"""


PREPARED = """
    import os
    import sys
    from attnlens.engines import engine, local_processes

    if __name__ == "__main__":
        before = dict(os.environ)
        local_processes.prepare(jobs=2)
        assert dict(os.environ) == before and "torch" not in sys.modules
        import engine_units
        with engine("local", jobs=2, threads=1) as workers:
            print([workers.submit(engine_units.inherited, n).result() for n in range(2)])
            print(type(workers.submit(engine_units.kill, 0).exception()).__name__)
            print(workers.submit(engine_units.square, 3).result())
            if len(sys.argv) > 1:
                workers.submit(engine_units.sleep, sys.argv[1], 0).result()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked on Linux alone")
def test_processes_of_the_program_are_forked_from_one_that_has_imported_it(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(PREPARED))
    environment = os.environ | {"PYTHONPATH": paths()}
    told = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == ["[('1', 1, True), ('1', 1, True)]", "BrokenExecutor", "9"]


@pytest.mark.parametrize("program", [DRIVER, PREPARED])
def test_a_process_does_not_outlive_a_driver_that_is_killed(program, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(program))
    with subprocess.Popen([sys.executable, script, tmp_path], env=os.environ | {"PYTHONPATH": paths()}) as driver:
        pid = begun_process(tmp_path)
        assert Path(f"/proc/{pid}").exists()
        driver.kill()
    assert ends(pid)


# --- Slurm ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def importing(monkeypatch):
    """Jobs are programs of their own, and import the units as these tests do."""
    clusters.importing(monkeypatch)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The folder of a Slurm of this machine."""
    return clusters.slurm(tmp_path, monkeypatch)


def test_submitit_runs_units_on_this_machine_and_tries_again_what_failed_or_was_lost(importing, tmp_path):
    with SlurmWorkers(tmp_path / "jobs", 2, cluster="local") as workers:
        found = by_unit(completed(workers, partial(units.killed_once, tmp_path), range(1, 4)))
        assert found == {n: (n, None) for n in range(1, 4)}
        failed = by_unit(completed(workers, units.fail_always, (2, 4), attempts=1))
    assert list((tmp_path / "jobs").rglob("*_log.err")), "what a job that failed printed stays"
    assert begun(tmp_path) == {1: 1, 2: 2, 3: 1}
    assert failed[2] == (None, "There is no text.")
    assert failed[4][1].endswith("UnpicklableError: ab")


@pytest.mark.parametrize("minutes", [60, 1], ids=["preempted", "out of time"])
def test_slurm_runs_units_as_one_array_and_queues_again_those_that_it_ends(minutes, slurm, tmp_path):
    with SlurmWorkers(tmp_path / "jobs", 2, minutes=minutes) as workers:
        found = by_unit(completed(workers, partial(units.preempted_once, tmp_path), range(4), attempts=1))
        assert found == {n: (n, None) for n in range(4)}
        assert begun(tmp_path) == {0: 1, 1: 1, 2: 2, 3: 1}
        [script] = slurm.glob("*.sh")
        assert {"#SBATCH --array=0-3%2", "#SBATCH --requeue"} <= set(script.read_text().splitlines())
        assert workers.submit(units.square, 3).result() == 9


@pytest.mark.parametrize("limit", [None, "4:00:00"], ids=["ours", "the user's"])
def test_slurms_own_variables_say_how_long_a_job_may_take(limit, slurm, tmp_path, monkeypatch):
    """They stand above a script's lines, and below options of sbatch, of which there are none: the fake takes none."""
    if limit is not None:
        monkeypatch.setenv("SBATCH_TIMELIMIT", limit)
    with engine("slurm", jobs=1, folder=tmp_path / "jobs") as workers:
        assert workers.submit(units.square, 3).result() == 9
    assert not (tmp_path / "jobs").exists(), "where none failed nothing stays"
    [found] = slurm.glob("*.limit")
    assert found.read_text() == (limit or "60")
    [script] = slurm.glob("*.sh")
    asked = {
        line.split("=")[0].removeprefix("#SBATCH --") for line in script.read_text().splitlines() if "#SBATCH" in line
    }
    assert "time" in asked
    assert not {"partition", "account", "qos", "mem", "mem-per-cpu"} & asked, "which are the user's to say"


def test_a_job_of_slurm_that_is_lost_is_tried_again(slurm, tmp_path):
    with engine("slurm", jobs=2, folder=tmp_path / "jobs") as workers:
        found = by_unit(completed(workers, partial(units.killed_once, tmp_path), (1, 2)))
    assert found == {1: (1, None), 2: (2, None)}
    assert begun(tmp_path) == {1: 1, 2: 2}
    assert len(list(slurm.glob("*.sh"))) == 2


def test_jobs_of_slurm_are_cancelled_where_the_block_ends_by_an_exception(slurm, tmp_path):
    futures = interrupted(engine("slurm", jobs=2, folder=tmp_path / "jobs"), tmp_path, 3)
    assert all(isinstance(future.exception(), BrokenExecutor) for future in futures)
    assert Counter(path.read_text() for path in slurm.glob("*.state")) == {"CANCELLED": 3}
    assert all(ends(int(path.read_text())) for path in tmp_path.glob("*.pid"))


def test_what_sbatch_refuses_ends_the_run(slurm, tmp_path):
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'error: invalid partition' >&2\nexit 1\n")
    with engine("slurm", jobs=2, folder=tmp_path / "jobs") as workers, pytest.raises(UsageError) as caught:
        list(completed(workers, units.square, range(3)))
    assert "invalid partition" in caught.value.problem


# --- what is missing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "package", "said"), [("ray", "ray", "Ray"), ("slurm", "submitit", "submitit")])
def test_an_engine_whose_package_is_missing_names_its_extra(name, package, said, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError) as caught:
        engine(name, jobs=1, folder=tmp_path)
    assert str(caught.value) == f'{said} is not installed.\nRun: pip install "attnlens[{name}]"'


def test_slurm_without_its_programs_its_folder_and_engines_without_an_address_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="There is no sbatch on the PATH"):
        engine("slurm", jobs=1, folder=tmp_path)
    with pytest.raises(UsageError, match="need a folder"):
        engine("slurm", jobs=1)
    with pytest.raises(UsageError, match="The engine local has no address"):
        engine("local", jobs=1, address="127.0.0.1:6379")
    with pytest.raises(UsageError, match="There is no engine dask"):
        engine("dask", jobs=1)
