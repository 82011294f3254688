"""Computes units of work in several processes, one thread each, and keeps what is finished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from attnlens.errors import ModelError
from attnlens.studies.tasks import StudyTask
from attnlens.studies.units import RunOutcome, TrainingUnit, computed

Tell = Callable[[str, int, int], None]
MakeTasks = Callable[[], Sequence[StudyTask]]
"""Makes the tasks in another process: their tensors, one a sentence, are too many to be handed over."""
_here: dict[str, Any] = {}
"""In a worker: the tasks and the folder."""


class Pool:
    """Inside `with`: units become outcomes; at its end, or when interrupted, its processes are ended.

    One job is done in this process, with the threads that it has; several have one thread each, so that the outcome of
    a unit does not depend on how many there are.
    """

    def __init__(
        self, tasks: Sequence[StudyTask], make: MakeTasks, folder: Path, jobs: int, total: int, tell: Tell
    ) -> None:
        self.tasks, self.folder, self.total, self.tell, self.done = _named(tasks), folder, total, tell, 0
        self.threads = torch.get_num_threads()
        self.executor = ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (make, folder)) if jobs > 1 else None

    def __enter__(self) -> Pool:
        torch.set_num_threads(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        torch.set_num_threads(self.threads)
        if self.executor is None:
            return
        if kind is not None:
            for process in list((self.executor._processes or {}).values()):
                process.terminate()  # what it had finished is in its files
        self.executor.shutdown(cancel_futures=True)

    def outcomes(self, units: Sequence[TrainingUnit], stage: str) -> dict[TrainingUnit, RunOutcome]:
        """Each unit's outcome. Raises ModelError where a process ended before its unit did."""
        every = list(dict.fromkeys(units))
        if self.executor is None:
            return {unit: self._told(stage, computed(unit, self.tasks[unit.task], self.folder)) for unit in every}
        with _uninterrupted():  # processes begin here, and are never to hear of an interruption
            futures = {self.executor.submit(_compute, unit): unit for unit in every}
        found = {}
        try:
            for future in as_completed(futures):
                found[futures[future]] = self._told(stage, future.result())
        except BrokenProcessPool:
            raise ModelError(
                "A training process ended before its work: for want of memory, or as a script calls attnlens.study "
                "outside of `if __name__ == '__main__':`.",
                "Run it again with one job (--jobs 1): what is finished is kept.",
            ) from None
        return found

    def _told(self, stage: str, outcome: RunOutcome) -> RunOutcome:
        self.done += 1
        self.tell(stage, self.done, self.total)
        return outcome


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Inside, SIGINT is ignored, which processes begun there inherit: the one that began them decides what it ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def _begin(make: MakeTasks, folder: Path) -> None:
    """What a process does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _here.update(tasks=_named(make()), folder=folder)


def _named(tasks: Sequence[StudyTask]) -> Mapping[str, StudyTask]:
    return {task.name: task for task in tasks}


def _compute(unit: TrainingUnit) -> RunOutcome:
    return computed(unit, _here["tasks"][unit.task], _here["folder"])
