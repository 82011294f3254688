"""Runs functions as jobs of Slurm, by submitit: what is submitted together is one array, asked after by one thread."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import TracebackType
from typing import Any, Generic, Self

from attnlens.engines.workers import T, Ts, headline
from attnlens.errors import OutputError, UsageError
from attnlens.files import make_folder
from attnlens.unit_files import CLEARED, OTHER_WORK

PROGRAMS = ("sbatch", "srun", "sacct", "scancel")
"""Without sacct nobody would hear of a job that was lost."""
ARRAY = 1000
"""Jobs of an array, at most: what Slurm takes unless it is told to take more."""
REQUEUES = 1000
"""Times that a job that ran out of its time is queued again; its function goes on from its own files."""
PAUSE = 1.0
"""Seconds between two looks at what has ended."""
LATE = 15.0
"""Seconds that the file of a result may come after the end of its job."""


@dataclass(frozen=True)
class RequeuedCall(Generic[T]):
    """A call that Slurm queues again, as it was, where it preempts its job or the job's time is over."""

    function: Callable[..., T]
    arguments: tuple[object, ...]

    def __call__(self) -> T:
        """The function's value."""
        return self.function(*self.arguments)

    def checkpoint(self) -> Any:
        """What submitit is to queue: the same call, which finds what it has written."""
        return import_module("submitit").helpers.DelayedSubmission(self)


@dataclass
class _Running:
    """A job that was submitted, and the future of its call."""

    job: Any
    future: Future[Any]
    ended: float | None = None
    """When it was first seen ended without a result."""

    def is_settled(self) -> bool:
        """Whether the job has ended; its future says then how."""
        if not self.job.done():
            return False
        if not self.job.paths.result_pickle.exists():
            self.ended = self.ended or time.monotonic()
            if time.monotonic() - self.ended < LATE:
                return False
            self._lose(f"Its job {self.job.job_id} ended without a result: {self.job.state}.")
            return True
        try:
            error = self.job.exception()
            if error is None:
                self.future.set_result(self.job.result())
            else:
                self.future.set_exception(RuntimeError(_raised(str(error))))
        except (OSError, EOFError, ImportError, AttributeError, pickle.UnpicklingError) as unread:
            self._lose(f"The result of its job {self.job.job_id} can't be read: {headline(unread)}")
        return True

    def _lose(self, reason: str) -> None:
        self.future.set_exception(BrokenExecutor(reason))


class SlurmWorkers:
    """Jobs of Slurm, at most `jobs` of an array at a time, each with `threads` processors, `gpus` devices, `minutes`.

    `folder` must be seen by all nodes; what jobs print and return stays there where one of them was lost. Slurm's own
    variables (SBATCH_TIMELIMIT, SBATCH_PARTITION, SBATCH_ACCOUNT) stand above what the jobs' script asks for. Raises
    UsageError where submitit or Slurm's programs are missing.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        jobs: int,
        *,
        threads: int = 1,
        gpus: int = 0,
        minutes: int = 60,
        cluster: str = "slurm",
    ) -> None:
        check_programs(PROGRAMS if cluster == "slurm" else ())
        submitit: Any = import_module("submitit")
        self.jobs = jobs
        self._folder = _own_folder(Path(folder))
        self._executor = submitit.AutoExecutor(folder=self._folder, cluster=cluster, slurm_max_num_timeout=REQUEUES)
        self._executor.update_parameters(
            name="attnlens",
            timeout_min=minutes,
            cpus_per_task=threads,
            gpus_per_node=gpus or None,
            slurm_array_parallelism=jobs,
            slurm_additional_parameters={"requeue": True},
        )
        self._given: SimpleQueue[tuple[RequeuedCall[Any], Future[Any]]] = SimpleQueue()
        self._running: list[_Running] = []
        self._has_failed = False
        self._closed, self._cancelled = Event(), Event()
        self._thread = Thread(target=self._watch, name="slurm", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[*Ts], T], /, *arguments: *Ts) -> Future[T]:
        """The future of a call; what is submitted within a second or so becomes one array."""
        if self._closed.is_set():
            raise RuntimeError("These workers were shut down.")
        future: Future[T] = Future()
        self._given.put((RequeuedCall(function, arguments), future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; `cancel_futures` cancels those that no job has begun with, and `wait` waits for all."""
        if cancel_futures:
            for _, future in self._drained():
                future.cancel()
        self._closed.set()
        if wait:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._cancelled.set()
        self.shutdown(cancel_futures=kind is not None)

    def _drained(self) -> list[tuple[RequeuedCall[Any], Future[Any]]]:
        """The calls that were given since the last look."""
        found = []
        with suppress(Empty):
            while True:
                found.append(self._given.get_nowait())
        return found

    def _watch(self) -> None:
        """Submit what is given, and settle what has ended, until all is and no more will be given."""
        try:
            while not self._cancelled.is_set():
                is_last = self._closed.is_set()
                self._begin(self._drained())
                self._settle()
                if is_last and not self._running:
                    self._clear()
                    return
                time.sleep(PAUSE)
        finally:
            self._closed.set()
            for running in self._running:
                running.job.cancel(check=False)
            for future in [running.future for running in self._running] + [future for _, future in self._drained()]:
                if not future.done():
                    future.set_exception(BrokenExecutor("The work was ended."))

    def _settle(self) -> None:
        """Let go of the jobs that have ended."""
        left = []
        for running in self._running:
            if not running.is_settled():
                left.append(running)
            elif running.future.exception() is not None:
                self._has_failed = True
        self._running = left

    def _clear(self) -> None:
        """Remove what the jobs printed and returned, unless somebody wants to know why one was lost."""
        if not self._has_failed:
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):  # what others keep there
                self._folder.parent.rmdir()

    def _begin(self, given: list[tuple[RequeuedCall[Any], Future[Any]]]) -> None:
        wanted = [(call, future) for call, future in given if future.set_running_or_notify_cancel()]
        for start in range(0, len(wanted), ARRAY):
            part = wanted[start : start + ARRAY]
            try:
                jobs = self._executor.submit_array([call for call, _ in part])
            except (OSError, RuntimeError, TypeError, AttributeError, pickle.PicklingError) as error:
                self._has_failed = True
                for _, future in part:
                    future.set_exception(UsageError(f"Slurm took no jobs: {headline(error)}", "See what sbatch says."))
            else:
                self._running += [_Running(job, future) for job, (_, future) in zip(jobs, part, strict=True)]


def _own_folder(parent: Path) -> Path:
    """A new folder for the jobs of one run. Raises OutputError where it can't be made."""
    for _ in range(CLEARED):
        make_folder(parent)
        try:
            return Path(tempfile.mkdtemp(dir=parent))
        except FileNotFoundError:  # another run has ended, and removed what was empty
            continue
        except OSError as error:
            raise OutputError(f"The folder {parent} can't be written: {error.strerror}.", OTHER_WORK) from None
    raise OutputError(f"The folder {parent} is removed as soon as it is made.", OTHER_WORK)


def _raised(text: str) -> str:
    """The last line of the trace between submitit's lines of hyphens, or of the text where there are none."""
    trace = (text.split("-" * 22)[1:2] or [text])[0]
    return headline(RuntimeError(trace.strip().rpartition("\n")[2]))


def check_programs(programs: tuple[str, ...] = PROGRAMS) -> None:
    """Raise UsageError where submitit is not installed, or one of Slurm's programs is not there."""
    if find_spec("submitit") is None:
        raise UsageError("submitit is not installed.", 'Run: pip install "attnlens[slurm]"')
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        raise UsageError(f"There is no {missing[0]} on the PATH.", "Run it on a login node of a Slurm cluster.")
