"""Report the progress of a long run, and its finished part if the user interrupts it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attnlens.report.report import Report

Progress = Callable[[str, int, int], None]  # function called with (stage, steps done, total steps)
Tell = Callable[[int], None]  # function called with the number of further steps done in a stage
INTERRUPTED = "the run was interrupted"  # reason for results that were not finished at an interruption


class Interrupted(KeyboardInterrupt):
    """Interruption of the work by the user; `report` contains the finished part."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def silent(_stage: str, _done: int, _total: int) -> None:
    """Show no progress."""


@contextmanager
def time_stage(timings: dict[str, float], stage: str) -> Iterator[None]:
    """Context manager: add the duration of the block in seconds to `timings[stage]`, even if the block fails."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timings[stage] = timings.get(stage, 0.0) + time.perf_counter() - start


def start_stage(progress: Progress, stage: str, total: int) -> Tell:
    """Report that a stage starts; return a function that adds newly finished steps and reports the sum so far."""
    done = 0

    def tell(more: int) -> None:
        nonlocal done
        done += more
        progress(stage, done, total)

    tell(0)
    return tell


@contextmanager
def bounded_stage(progress: Progress, stage: str, most: int) -> Iterator[Tell]:
    """Context manager: start a stage that may need fewer than `most` steps; report it as complete at the end."""
    yield start_stage(progress, stage, most)
    progress(stage, most, most)
