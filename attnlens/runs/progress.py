"""Report the progress of a run, and define the exception for an interrupted run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attnlens.report.report import Report

Progress = Callable[[str, int, int], None]  # function called with (stage, steps done, total steps)
AddSteps = Callable[[int], None]  # function called with the number of newly finished steps of a stage
INTERRUPTED = "the run was interrupted"  # reason for results that an interruption left unfinished


class Interrupted(KeyboardInterrupt):
    """Interruption of a run by the user; `report` contains the finished part."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def silent(_stage: str, _done: int, _total: int) -> None:
    """Show no progress."""


@contextmanager
def time_stage(timings: dict[str, float], stage: str) -> Iterator[None]:
    """Context manager: add the duration of the `with` block in seconds to `timings[stage]`, even if it fails."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timings[stage] = timings.get(stage, 0.0) + time.perf_counter() - start


def start_stage(progress: Progress, stage: str, total: int) -> AddSteps:
    """Report the start of a stage; return a function that adds finished steps and reports their sum."""
    done = 0

    def add_steps(count: int) -> None:
        nonlocal done
        done += count
        progress(stage, done, total)

    add_steps(0)
    return add_steps


@contextmanager
def bounded_stage(progress: Progress, stage: str, most: int) -> Iterator[AddSteps]:
    """Context manager: start a stage of at most `most` steps; report all steps as done at the end."""
    yield start_stage(progress, stage, most)
    progress(stage, most, most)
