"""What every engine offers, in the shape of concurrent.futures, and engines of which a thread waits for each worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Workers(Protocol):
    """Run functions elsewhere. A future of a worker that was lost raises BrokenExecutor, and others may still run.

    At the end of `with` all that was submitted has ended; at its end by an exception what runs is ended, and what waits
    is cancelled.
    """

    @property
    def jobs(self) -> int:
        """How many functions run at once, at most."""
        ...

    def submit(self, function: Callable[[*Ts], T], /, *arguments: *Ts) -> Future[T]:
        """The future of a call; its function and arguments are pickled."""
        ...

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and end the workers after those that there are."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class WaitingThreads(ABC):
    """Workers that a thread each waits for, so that the loss of one fails its own call alone."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._threads = ThreadPoolExecutor(jobs, "engine")

    def submit(self, function: Callable[[*Ts], T], /, *arguments: *Ts) -> Future[T]:
        """The future of a call; its function and arguments are pickled."""
        return self._threads.submit(lambda: self._outcome(function, *arguments))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; with `wait`, return when those that there are have ended, and their workers."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
        if wait:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._stop()
        self.shutdown()

    @abstractmethod
    def _outcome(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """The value of a call, in one of the threads. Raises BrokenExecutor where its worker was lost."""

    @abstractmethod
    def _stop(self) -> None:
        """End all workers, whatever they do, and start no more."""

    @abstractmethod
    def _close(self) -> None:
        """Give back what idle workers hold."""


def headline(error: BaseException) -> str:
    """The first line that an exception says, or its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
