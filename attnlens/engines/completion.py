"""Runs a function on every unit, again where it failed, and yields what came of each as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from attnlens.engines.workers import Workers, headline
from attnlens.errors import FAILURES, AttnlensError

Unit = TypeVar("Unit")
Value = TypeVar("Value")
NAMED = (AttnlensError, *FAILURES, OSError, ImportError, MemoryError, EOFError)
"""What a unit raises becomes its reason where it is raised; what else is, as the engine brings it."""
LOSSES = 2
"""Times all workers can be lost, as often as a unit is tried, without a unit that ends."""


@dataclass(frozen=True)
class Done(Generic[Unit, Value]):
    """What came of a unit."""

    unit: Unit
    value: Value | None
    """What the function returned; None where it failed."""
    reason: str | None
    """One line: why it failed at the last attempt. None where it did not."""


def completed(
    workers: Workers, function: Callable[[Unit], Value], units: Iterable[Unit], *, attempts: int = 2
) -> Iterator[Done[Unit, Value]]:
    """Each unit as it is done; one whose function raised, or whose worker was lost, is tried `attempts` times in all.

    The function is to write files itself and return little. Raises AttnlensError where workers are lost again and again
    and no unit ends, and what the engine raises where it can't run any.
    """
    finished: SimpleQueue[Future[tuple[Value | None, str | None]]] = SimpleQueue()
    left: dict[Future[tuple[Value | None, str | None]], tuple[Unit, int]] = {}

    def submit(unit: Unit, attempt: int) -> None:
        future = workers.submit(_attempted, function, unit)
        left[future] = unit, attempt
        future.add_done_callback(finished.put)

    for unit in units:
        submit(unit, 1)
    most, lost, ended = LOSSES * attempts * workers.jobs, 0, not left
    try:
        while left:
            future = finished.get()
            unit, attempt = left.pop(future)
            is_lost, value, reason = _outcome(future)
            lost, ended = (lost + 1, ended) if is_lost else (0, True)
            if lost > most:
                raise _all_lost(reason)
            if reason is not None and attempt < attempts:
                submit(unit, attempt + 1)
            else:
                yield Done(unit, value, reason)
    finally:
        for future in left:
            future.cancel()
    if not ended:
        raise _all_lost(reason)


def _attempted(function: Callable[[Unit], Value], unit: Unit) -> tuple[Value | None, str | None]:
    """In a worker: value and reason, as exceptions can't all be pickled, and clusters bring them back as traces."""
    try:
        return function(unit), None
    except NAMED as error:
        return None, _reason(error)


def _outcome(future: Future[tuple[Value | None, str | None]]) -> tuple[bool, Value | None, str | None]:
    """Whether the worker was lost, the value, and the reason. Raises what the engine itself says is wrong."""
    error = future.exception()
    if error is None:
        return False, *future.result()
    if isinstance(error, AttnlensError):
        raise error
    return isinstance(error, BrokenExecutor), None, _reason(error)


def _reason(error: BaseException) -> str:
    """The first line of what an exception says, after its name where that is not one of ours."""
    if isinstance(error, AttnlensError):
        return error.problem
    said, name = headline(error), type(error).__name__
    return said if isinstance(error, BrokenExecutor) or said == name else f"{name}: {said}"


def _all_lost(reason: str | None) -> AttnlensError:
    return AttnlensError(
        f"All workers were lost, again and again, and no unit ended. The last: {reason}",
        "Finished units are kept; run the same command again, with fewer --jobs where memory was short.",
    )
