"""Runs functions in processes of this machine; one that dies takes no call with it but its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

from attnlens.engines.workers import T, Ts, WaitingThreads

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""What libraries read when they are first imported."""
ACCELERATORS = ("nvidiactl", "kfd", "dxg")
"""What Linux calls the devices of NVIDIA, of AMD, and of the Windows below it, beside which torch may not be forked."""
Initializer = Callable[[], object]
_served = False


def prepare(jobs: int) -> None:
    """Begin the process that this program's workers are forked from, which imports the library as this one does.

    For the program alone, before it imports torch: a library leaves its caller's own such process alone. Elsewhere than
    on Linux, and beside an accelerator, each worker imports all by itself.
    """
    global _served  # there is one such process, too
    if sys.platform != "linux" or any(Path("/dev", name).exists() for name in ACCELERATORS):
        return
    from multiprocessing import forkserver  # which Windows does not have

    forkserver.set_forkserver_preload(["attnlens.run"])
    before = os.environ.copy()
    os.environ.update(dict.fromkeys(THREADS, str(threads_each(jobs))))
    with _uninterrupted():
        forkserver.ensure_running()
    for name in THREADS:
        del os.environ[name]
    os.environ.update(before)
    _served = True


def threads_each(jobs: int) -> int:
    """How many threads each of so many processes has: they share the cores that this one may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = os.environ.get(THREADS[0], "")
    return max(1, (min(cores, int(allowed)) if allowed.isdecimal() else cores) // jobs)


class LocalWorkers(WaitingThreads):
    """`jobs` processes, each begun by its first call, and again after it died.

    Each has `threads` threads, by the environment that it gives libraries before they are imported, and calls
    `initializer` first. None hears of an interruption, and none outlives the process that began it.
    """

    def __init__(self, jobs: int, *, threads: int = 1, initializer: Initializer | None = None) -> None:
        super().__init__(jobs)
        self._begin = partial(_begin, threads, initializer)
        # A pool of one process each: when a process dies, its pool breaks, with all calls that the pool was given.
        self._idle: SimpleQueue[ProcessPoolExecutor | None] = SimpleQueue()
        for _ in range(jobs):
            self._idle.put(None)
        self._pools: set[ProcessPoolExecutor] = set()
        self._lock, self._stopped = Lock(), False

    def _outcome(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        pool = self._idle.get()
        try:
            with self._lock:
                if self._stopped:
                    raise BrokenExecutor("The work was ended.")
                pool = running = pool or self._pool()
                with _uninterrupted():  # the process begins here
                    future = pool.submit(function, *arguments)
            return future.result()
        except BrokenProcessPool as error:
            self._pools.discard(running)
            running.shutdown()  # gives back what its queues hold
            pool = None
            raise BrokenExecutor(_why(error)) from error
        finally:
            self._idle.put(pool)

    def _pool(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(1, get_context("forkserver" if _served else "spawn"), self._begin)
        self._pools.add(pool)
        return pool

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for pool in list(self._pools):  # those that break leave it meanwhile
                for process in list((pool._processes or {}).values()):
                    process.terminate()  # what it had finished is in its files

    def _close(self) -> None:
        for pool in list(self._pools):
            pool.shutdown()


def _why(error: BrokenProcessPool) -> str:
    if error.__cause__ is None:
        of_script = "" if _served else ", or as a script calls attnlens outside of `if __name__ == '__main__':`"
        return f"Its process ended before it did: killed, as for want of memory{of_script}."
    raised = str(error.__cause__).strip().splitlines()[-2]  # below a trace, above the closing quotes
    return f"What it raised can't be read here: {raised}"


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Inside, SIGINT is blocked, which processes begun there inherit: the one that began them decides what it ends."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(threads: int, initializer: Initializer | None) -> None:
    """What a process does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(dict.fromkeys(THREADS, str(threads)))
    if initializer is not None:
        initializer()


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)  # killed, it could end nobody itself
