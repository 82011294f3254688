"""How a long run tells its progress, and how it ends when the user interrupts it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attnlens.records import Report

Progress = Callable[[str, int, int], None]
"""(stage, steps done, steps in all)."""
Tell = Callable[[int], None]
"""(steps more of a stage)."""
INTERRUPTED = "the run was interrupted"
"""Why a report lacks what was not finished then."""


class Interrupted(KeyboardInterrupt):
    """The user stopped the work; `report` holds what was finished."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def silent(_stage: str, _done: int, _total: int) -> None:
    """Show no progress."""


@contextmanager
def timed(timings: dict[str, float], stage: str) -> Iterator[None]:
    """Add how long the block took to its stage's seconds, whichever way it ends."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timings[stage] = timings.get(stage, 0.0) + time.perf_counter() - start


def telling(progress: Progress, stage: str, total: int) -> Tell:
    """Tells how much of a stage is done, from how much more is; nothing at first."""
    done = 0

    def tell(more: int) -> None:
        nonlocal done
        done += more
        progress(stage, done, total)

    tell(0)
    return tell


@contextmanager
def telling_at_most(progress: Progress, stage: str, most: int) -> Iterator[Tell]:
    """The same for work that may take less than `most`: when the block has ended, all is done."""
    done = 0
    tell = telling(progress, stage, most)

    def counted(more: int) -> None:
        nonlocal done
        done += more
        tell(more)

    yield counted
    tell(max(0, most - done))
