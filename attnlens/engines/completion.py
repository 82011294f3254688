"""Runs a function on every unit, again where it failed, and yields what came of each as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from traceback import clear_frames
from typing import Generic, TypeVar

from attnlens.engines.workers import Workers, headline
from attnlens.errors import FAILURES, AttnlensError, TextError, UsageError

Unit = TypeVar("Unit")
Value = TypeVar("Value")
NAMED = (AttnlensError, *FAILURES, OSError, ImportError, MemoryError, EOFError)
"""What a unit raises becomes its reason where it is raised; an engine brings back what else is in its own words."""
ATTEMPTS = 2
"""Times that a unit is tried."""
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
    error: BaseException | None = None
    """What it raised; of other processes the errors of attnlens alone, as not every exception can be pickled."""


def tried(function: Callable[[Unit], Value], unit: Unit, *, attempts: int = ATTEMPTS) -> Done[Unit, Value]:
    """What comes of a unit in this process, where it is tried as often as an engine tries it.

    Not where words or a text are refused, which they would be again.
    """
    for _ in range(attempts - 1):
        try:
            return Done(unit, function(unit), None)
        except (UsageError, TextError) as error:
            return Done(unit, None, _reason(error), error)
        except NAMED:  # what it held of memory is free when it is tried again
            continue
    return _attempted(function, unit)


def completed(
    workers: Workers,
    function: Callable[[Unit], Value],
    units: Iterable[Unit],
    *,
    attempts: int = ATTEMPTS,
    others: bool = False,
) -> Iterator[Done[Unit, Value]]:
    """Each unit as it is done; one whose function raised, or whose worker was lost, is tried `attempts` times in all.

    The function is to write files itself and return little. Raises AttnlensError where workers are lost again and again
    and no unit ends, nor `others` of the run did before, and what the engine raises where it can't run any.
    """
    finished: SimpleQueue[Future[Done[Unit, Value]]] = SimpleQueue()
    left: dict[Future[Done[Unit, Value]], tuple[Unit, int]] = {}

    def submit(unit: Unit, attempt: int) -> None:
        future = workers.submit(_elsewhere, function, unit)
        left[future] = unit, attempt
        future.add_done_callback(finished.put)

    for unit in units:
        submit(unit, 1)
    most, lost, ended = LOSSES * attempts * workers.jobs, 0, others or not left
    try:
        while left:
            unit, attempt = left.pop(future := finished.get())
            is_lost, done = _outcome(future, unit)
            lost, ended = (lost + 1, ended) if is_lost else (0, True)
            if lost > most:
                raise _all_lost(done.reason)
            if done.reason is not None and attempt < attempts:
                submit(unit, attempt + 1)
            else:
                yield done
    finally:
        for future in left:
            future.cancel()
    if not ended:
        raise _all_lost(done.reason)


def _attempted(function: Callable[[Unit], Value], unit: Unit) -> Done[Unit, Value]:
    try:
        return Done(unit, function(unit), None)
    except NAMED as error:
        clear_frames(error.__traceback__)  # which would hold what the unit read as long as its error is kept
        return Done(unit, None, _reason(error), error)


def _elsewhere(function: Callable[[Unit], Value], unit: Unit) -> Done[Unit, Value]:
    """In a worker: what can be pickled, and is not brought back as a trace by a cluster."""
    done = _attempted(function, unit)
    return done if isinstance(done.error, AttnlensError) else replace(done, error=None)


def _outcome(future: Future[Done[Unit, Value]], unit: Unit) -> tuple[bool, Done[Unit, Value]]:
    """Whether the worker was lost, and what came of the unit. Raises what the engine itself says is wrong."""
    error = future.exception()
    if error is None:
        return False, future.result()
    if isinstance(error, AttnlensError):
        raise error
    return isinstance(error, BrokenExecutor), Done(unit, None, _reason(error))


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
