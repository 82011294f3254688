"""Compute the named units of a run, resume after an interruption, and distribute units over processes and machines."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Event, Thread, get_ident
from traceback import clear_frames
from typing import Any, Generic, TypeVar, cast

from platformdirs import user_cache_path

from attnlens import errors
from attnlens.files import with_home
from attnlens.requests.fields import Request
from attnlens.requests.run_options import SharedRequest
from attnlens.runs.store import LOG, OTHER_WORK, Store, difference, hash_json
from attnlens.wording import clean

V = TypeVar("V")
Compute = Callable[[str], Any]  # function that computes the unit of a given name
Opener = Callable[..., tuple[Mapping[str, object], Compute]]  # function that prepares a run; returns facts and Compute
WorkerSetup = tuple[Opener, tuple[object, ...]]  # an Opener and its picklable arguments
RETRIED = (*errors.FAILURES, OSError, ImportError, MemoryError, EOFError)  # errors that a second attempt may avoid
LOST = (
    "the worker process ended twice, because it was killed (out of memory?) or because the main script calls attnlens "
    "outside of `if __name__ == '__main__':`"
)
UNSEEN = "the unit's file is missing from this process's --work folder, which all workers must share"
# environment variables with numbers of threads, which libraries read when they are imported
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
RAY_HERE = "local"  # address that makes Ray start a cluster on this machine
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # HTTP/2 (RFC 9113, 3.4)
ACCELERATORS = ("nvidiactl", "kfd", "dxg")  # devices (NVIDIA, AMD, WSL): a process that uses one must not be forked


class Stopped(KeyboardInterrupt):
    """Interruption while the unit `name` was computed; `value` is its partial result."""

    def __init__(self, name: str, value: object) -> None:
        super().__init__()
        self.name, self.value = name, value


@dataclass(frozen=True)
class Failure:
    """Reason why a unit has no value."""

    reason: str
    error: BaseException | None = None  # None if the worker could not return it


@dataclass(frozen=True)
class Outcome(Generic[V]):
    """Results of a run: values of finished units, and reasons for failed units."""

    values: dict[str, V]  # values by unit, in the order of the run
    missing: dict[str, str]  # reasons by failed unit; without the units that were not computed after an interruption
    stopped: bool  # True if the user interrupted the run


class WorkPlan(SharedRequest):
    """Options for storing a run's units and for distributing units over processes."""

    device: str = "auto"

    @classmethod
    def of(cls, request: Request) -> WorkPlan:
        """Build the plan from a request; fields that the request does not set keep their defaults."""
        return cls(**{name: value for name, value in request.explicit().items() if name in cls.model_fields})

    @property
    def uses_workers(self) -> bool:
        """True if worker processes compute the units."""
        return self.engine != "local" or self.jobs > 1

    @property
    def root(self) -> Path:
        """Folder that contains the stored runs; a `UPath`, which has the same methods, if `work` is an address."""
        if self.work is None:
            return user_cache_path("attnlens", appauthor=False) / "work"
        if "://" not in self.work:
            return with_home(self.work)
        try:
            from upath import UPath

            return cast("Path", UPath(self.work))
        except (ImportError, ValueError) as error:
            remedy = 'Give a folder, or an address such as s3://BUCKET/FOLDER (requires: pip install "attnlens[ray]").'
            raise errors.UsageError(f"--work {self.work}: {error}.", remedy) from None

    def select_units(self, names: Sequence[str]) -> Sequence[str]:
        """Return the units of this shard, or all units if there is no shard."""
        index, _, count = (self.shard or "1/1").partition("/")
        return names[int(index) - 1 :: int(count)]

    def check(self, texts: Collection[object] = ()) -> None:
        """Raise UsageError for options that conflict or are unusable, and OutputError if units can't be stored."""
        if self.address is not None and self.engine != "ray":
            raise errors.UsageError("address applies only to engine='ray'.", "Omit address, or pass engine='ray'.")
        if self.engine == "ray":
            check_cluster(self.address)
        if self.uses_workers and "-" in map(str, texts):
            raise errors.UsageError("Only one process can read a text from stdin.", "Save the text to a file.")
        if self.uses_workers and str(self.work).startswith("memory:"):
            problem = f"Other processes cannot access {self.work}, which is in this process's memory."
            raise errors.UsageError(problem, OTHER_WORK)
        if (self.work is not None or self.shard is not None or self.uses_workers) and (problem := self._unwritable()):
            raise errors.OutputError(f"Finished units cannot be stored in {self.root}: {problem}.", OTHER_WORK)

    def _unwritable(self) -> str:
        root = self.root
        try:
            root.mkdir(parents=True, exist_ok=True)
        except Exception as error:  # libraries of remote stores raise their own errors
            return getattr(error, "strerror", None) or errors.reason_of(error).rstrip(".")
        return "" if not isinstance(root, Path) or os.access(root, os.W_OK) else "Permission denied"

    def store(self, facts: Mapping[str, object]) -> Store | None:
        """Return the store of a run; None if `work` is not set and the user's cache folder can't be written."""
        if self.work is None and self._unwritable():
            return None
        return Store(self.root / hash_json(facts), facts, resume=self.resume)


NOTHING_KEPT = WorkPlan()  # default plan: a run in this process


def run_units(
    names: Sequence[str],
    compute: Callable[[str], V],
    plan: WorkPlan,
    store: Store | None,
    *,
    worker_setup: WorkerSetup | None = None,
    report_unit: Callable[[str], None] = lambda _name: None,
    usable: Callable[[V], bool] = lambda _value: True,
) -> Outcome[V]:
    """Compute the units of a run that are not stored yet, and return the results of all units.

    If a unit fails twice, the reason is recorded, and a warning is logged. `worker_setup` prepares the same run in a
    worker process. `report_unit` is called with the name of each unit that finishes or fails. `usable` returns True if
    a stored value is complete. Raise ShardFinished at the end of a shard, any AttnlensError of a unit, and the first
    error if no unit could be computed.
    """
    if store is not None and plan.work is not None:
        store.begin()
        store.report_others()
    values, failures, stopped = dict[str, V](), dict[str, Failure](), False
    try:
        for name, value in _compute_units(plan.select_units(names), compute, plan, store, worker_setup, usable):
            if not isinstance(value, Failure):
                values[name] = value
            elif isinstance(value.error, errors.AttnlensError):
                raise value.error
            else:
                failures[name] = value
                LOG.warning("%s failed: %s", clean(name), clean(value.reason))
            report_unit(name)
    except KeyboardInterrupt as stop:
        stopped = True
        if isinstance(stop, Stopped):
            values[stop.name] = cast("V", stop.value)
    missing = {name: failures[name].reason for name in names if name in failures}
    if plan.shard is not None and store is not None and not stopped:
        remaining = [name for name in names if name not in values and store.load(name) is None]
        raise errors.ShardFinished(len(names) - len(remaining), len(names), remaining, missing)
    if failures and not values and not stopped:
        name, reason = next(iter(missing.items()))
        problem = f"No unit could be computed. {name} failed first: {reason}."
        remedy = "Remove the cause of this failure; if memory ran out, use fewer --jobs."
        raise failures[name].error or errors.ModelError(problem, remedy)
    return Outcome({name: values[name] for name in names if name in values}, missing, stopped)


def _compute_units(
    names: Sequence[str],
    compute: Callable[[str], V],
    plan: WorkPlan,
    store: Store | None,
    worker_setup: WorkerSetup | None,
    usable: Callable[[V], bool],
) -> Iterator[tuple[str, V | Failure]]:
    """Yield each unit's name with its value or Failure, in the order of completion."""
    if store is None:
        yield from ((name, try_twice(compute, name)) for name in names)
        return

    def compute_and_keep(name: str) -> V:
        value = compute(name)
        (store.keep if plan.shard is None else store.save)(name, value)  # a shard's only results are these files
        return clear_parts(name, value)

    def clear_parts(name: str, value: V) -> V:
        if usable(value):
            store.inside(name).clear()
        return value

    waiting = []
    for name in names:  # load each unit as late as possible: another run that shares the folder may have finished it
        value: V | None = store.load(name) if store.resume else None
        if value is not None and usable(value):
            yield name, value
        elif plan.uses_workers and worker_setup is not None:
            waiting.append(name)
        else:
            yield name, try_twice(compute_and_keep, name)
    if not waiting or worker_setup is None:
        return
    engine = _run_in_processes if plan.engine == "local" else _run_on_ray
    for name, failure in engine(waiting, partial(_compute_in_worker, *worker_setup, store), plan):
        if failure is not None:
            yield name, failure
        elif (value := store.load(name)) is not None:
            yield name, clear_parts(name, value)
        elif plan.engine == "local":  # another run has written its report, and cleared the folder
            yield name, try_twice(compute, name)
        else:
            yield name, Failure(UNSEEN)


def try_twice(compute: Callable[[str], V], name: str) -> V | Failure:
    """Compute a unit; return its value or a Failure. Retry once, except after a Usage-, Text- or OutputError."""
    for _ in range(2):
        try:
            return compute(name)
        except errors.AttnlensError as error:
            failure = Failure(error.problem, error)
            if isinstance(error, errors.UsageError | errors.TextError | errors.OutputError):
                break
        except RETRIED as error:
            clear_frames(error.__traceback__)  # the frames would keep the unit's memory alive
            failure = Failure(errors.reason_of(error), error)
    return failure


_prepared: list[tuple[WorkerSetup, Mapping[str, object], Compute]] = []  # this worker's prepared run


def _compute_in_worker(opener: Opener, arguments: tuple[object, ...], store: Store, name: str) -> Failure | None:
    """Compute a unit in a worker process and write its file. Return a picklable Failure, or None on success."""

    def compute(name: str) -> None:
        if not _prepared or _prepared[0][0] != (opener, arguments):
            _prepared[:] = [((opener, arguments), *opener(*arguments))]
        _, facts, make = _prepared[0]
        if hash_json(facts) != hash_json(store.facts):
            problem = f"A worker's inputs differ from those of the run: {difference(facts, store.facts)}."
            raise errors.ModelError(problem, "Give all workers the same files, texts and versions.")
        store.save(name, make(name))

    failure = try_twice(compute, name)
    return failure if failure is None or isinstance(failure.error, errors.AttnlensError) else Failure(failure.reason)


_server_started = False


def start_server(jobs: int, module: str) -> None:
    """Start the process from which workers are forked, if `jobs` > 1 on Linux without accelerators.

    Call this function before importing torch.
    """
    global _server_started
    if jobs < 2 or sys.platform != "linux" or any(Path("/dev", name).exists() for name in ACCELERATORS):
        return
    from multiprocessing import forkserver  # Windows lacks it

    forkserver.set_forkserver_preload([module])
    before = os.environ.copy()
    os.environ.update(dict.fromkeys(THREADS, "1"))
    with _interruptions_blocked():
        forkserver.ensure_running()
    for name in THREADS:
        del os.environ[name]
    os.environ.update(before)
    _server_started = True


Work = Callable[[str], Failure | None]  # function that computes a unit in another process


def _run_in_processes(names: Sequence[str], function: Work, plan: WorkPlan) -> Iterator[tuple[str, Failure | None]]:
    """Compute units in `plan.jobs` pools of one process each; yield each unit's name and its Failure or None."""
    # one process per pool, so that a killed process loses only one unit
    pools: dict[int, ProcessPoolExecutor] = {}  # by thread
    ending = Event()
    context = get_context("forkserver" if _server_started else "spawn")

    def call(name: str) -> Failure | None:
        for _ in range(2):
            if ending.is_set():
                break
            pool = pools.get(get_ident()) or ProcessPoolExecutor(1, context, _begin_worker)
            pools[get_ident()] = pool
            try:
                # a new process inherits the blocked signal: only this process reacts to an interruption
                with _interruptions_blocked():
                    future = pool.submit(function, name)
                if ending.is_set():  # the process may have started after `end` ran for the other pools
                    end(pool)
                return future.result()
            except BrokenExecutor:
                pools.pop(get_ident()).shutdown()
        return Failure(LOST)

    def end(pool: ProcessPoolExecutor) -> None:
        for process in list((pool._processes or {}).values()):  # ProcessPoolExecutor offers no public way to end them
            process.terminate()  # finished units are already stored

    try:
        with ThreadPoolExecutor(plan.jobs) as threads:
            futures = {threads.submit(call, name): name for name in names}
            lost, any_finished = 0, False
            try:
                for future in as_completed(futures):
                    result = future.result()
                    if result == Failure(LOST):
                        lost += 1
                    else:
                        any_finished = True
                    if lost > plan.jobs and not any_finished:  # the cause seems to affect every unit
                        remedy = "Use fewer --jobs; in a script, call attnlens under `if __name__ == '__main__':`."
                        raise errors.AttnlensError(f"All workers were lost: {LOST}.", remedy)  # noqa: TRY301
                    yield futures[future], result
            except BaseException:
                ending.set()
                threads.shutdown(wait=False, cancel_futures=True)
                for pool in list(pools.values()):
                    end(pool)
                raise
    finally:  # also after a failure: the program may exit without cleaning up, which would leak semaphores
        for pool in pools.values():
            pool.shutdown()


@contextmanager
def _interruptions_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker() -> None:
    """Initialise a worker process: use one thread, ignore SIGINT, and exit when the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(dict.fromkeys(THREADS, "1"))
    if (torch := sys.modules.get("torch")) is not None:  # imported by the main script already
        torch.set_num_threads(1)

    def end_with_parent() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    Thread(target=end_with_parent, daemon=True).start()


def check_cluster(address: str | None) -> None:
    """Raise UsageError if Ray is missing or no cluster answers (Ray itself would exit after two minutes)."""
    if find_spec("ray") is None:
        raise errors.UsageError("Ray is not installed.", 'Run: pip install "attnlens[ray]"')
    place = address or os.environ.get("RAY_ADDRESS") or RAY_HERE
    host, _, port = place.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        with socket.create_connection((host, int(port)), 5) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                connection.sendall(GREETING)
                if connection.recv(9)[3:4] != b"\x04":  # the type of a SETTINGS frame
                    raise OSError("the server at this address is not a Ray server")  # noqa: TRY301
    except OSError as error:
        raise _build_cluster_error(place, error) from error


def _run_on_ray(names: Sequence[str], function: Work, plan: WorkPlan) -> Iterator[tuple[str, Failure | None]]:
    """Compute units on a Ray cluster (by default, on this machine); yield each unit's name and its Failure or None."""
    import torch

    ray: Any = import_module("ray")
    started = not ray.is_initialized()
    if started:
        _start_ray(ray, plan)
    gpus = int(plan.device.startswith("cuda") or (plan.device == "auto" and torch.cuda.is_available()))
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=1, retry_exceptions=False)(_call_in_folder)
    pending = {task.remote(str(Path.cwd()), function, name): name for name in names}
    try:
        while pending:
            (done,), _ = ray.wait(list(pending), num_returns=1)
            name = pending.pop(done)
            try:
                yield name, ray.get(done)
            except ray.exceptions.RayError as error:
                yield name, Failure(f"Ray returned no result: {errors.reason_of(error)}")
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)
        if started:
            ray.shutdown()


def _start_ray(ray: Any, plan: WorkPlan) -> None:
    address = plan.address or os.environ.get("RAY_ADDRESS") or RAY_HERE
    options = {}
    if address == RAY_HERE:
        options = {"num_cpus": plan.jobs, "include_dashboard": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    stop = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **options)
    except Exception as error:  # Ray raises plain Exception if its programs do not start
        raise _build_cluster_error(address, error) from error
    # in the main thread, Ray has replaced the handler by its own; None: not set in Python
    if stop is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)
    worker = ray._private.worker  # prints lost workers to stdout, which may contain a report; no setting redirects this
    if printed := getattr(worker, "print_to_stdstream", None):
        worker.print_to_stdstream = lambda data, **named: printed(data | {"is_err": True}, **named)


def _call_in_folder(folder: str, function: Work, name: str) -> Failure | None:
    """Change to `folder`, so that relative paths are valid in a Ray worker, and call the function."""
    with suppress(OSError):  # on a node without that folder, the function itself reports missing files
        os.chdir(folder)
    return function(name)


def _build_cluster_error(address: str, error: Exception) -> errors.UsageError:
    where = "can be started on this machine" if address == RAY_HERE else f"answers at {address}"
    return errors.UsageError(
        f"No Ray cluster {where}: {errors.reason_of(error).rstrip('.')}.",
        "Run `ray start --head` and set RAY_ADDRESS to its HOST:PORT, or unset RAY_ADDRESS to run Ray on this machine.",
    )
