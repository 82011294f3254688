"""Messages and progress on stderr, interruption, and the end of a command that failed."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import typer

from attnlens.cli import INTERRUPTED, leave
from attnlens.errors import AttnlensError, ShardFinished, is_memory
from attnlens.wording import clean, shortened

if TYPE_CHECKING:
    from rich.console import Console

UNUSABLE = 2
"""Exit code where the words of the call or its input can't be used."""
PARTLY = 3
"""Exit code if a part could not be done, with --strict."""
BUG = 70
"""Exit code where attnlens itself went wrong."""
PLAIN_SECONDS = 10.0
"""How often progress is told where nothing can be animated."""
LONGEST_LINE = 600
"""Characters of a message's line beyond which its middle is left out; a stranger's file may fill it with megabytes."""


def console(*, stderr: bool = False) -> Console:
    """Where tables and bars go; imported late, so that what needs neither is answered without them."""
    from attnlens.report.render.terminal import console

    return console(stderr=stderr)


def say(line: str) -> None:
    """One line on stderr, with nothing in it that could steer the terminal."""
    with suppress(OSError):  # where stderr takes nothing, the exit code must do
        print(shortened(clean(line), LONGEST_LINE), file=sys.stderr, flush=True)


def complain(problem: str, remedy: str) -> None:
    """Say on stderr what is wrong and what to do, a line each."""
    say(f"Error: {problem}")
    say(remedy)


@contextmanager
def interruptible_at_once() -> Iterator[None]:
    """Inside, an interruption ends the program on the spot: imports may swallow it, or take it for a fault."""
    before = signal.getsignal(signal.SIGINT)
    if before not in (interrupt, signal.default_int_handler):  # the caller has it ignored, or handles it
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """End a command that went wrong with words and an exit code; with --debug a traceback stands above."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (typer.Exit, SystemExit):
            raise
        except ShardFinished as shard:
            for line in str(shard).splitlines():
                say(line)
            raise typer.Exit(PARTLY if shard.failed and kwargs.get("strict") else 0) from None
        except BaseException as error:
            if kwargs.get("debug"):
                traceback.print_exc()
            raise typer.Exit(told(error)) from error

    return run


_struck: list[int] = []
"""The interruptions of this run."""


def interrupt(number: int, _frame: object) -> None:
    """Raise KeyboardInterrupt, and remember it: pydantic, while it builds a class, makes an error of its own of it."""
    _struck.append(number)
    raise KeyboardInterrupt


def told(error: BaseException) -> int:
    """Say what ended a command; the exit code. A panic of a Rust library, which is no Exception, is told too."""
    if isinstance(error, AttnlensError):
        complain(error.problem, error.remedy)
        return UNUSABLE
    if isinstance(error, KeyboardInterrupt) or _struck:
        say("Interrupted.")
        return INTERRUPTED
    if is_memory(error):
        complain("Not enough memory.", "Use a smaller --batch-size, fewer --tokens or --layers, or a smaller model.")
        return UNUSABLE
    name = type(error).__name__
    if name == "PanicException":
        complain(f"A library broke down over a file of the model or over the text: {error}", "Give it sound ones.")
        return UNUSABLE
    say(f"Internal error: {name}: {error}")
    say("Run it again with --debug and report what it prints.")
    return BUG


@contextmanager
def progress(*, shown: bool, quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar with ETA on a terminal, else one plain line now and then; yields (stage, done, total) → None.

    Warnings of the library are lines on stderr, unless `quiet`.
    """
    with _warnings(shown=not quiet):
        if not shown:
            yield lambda _stage, _done, _total: None
            return
        plain = os.environ.get("CI", "").lower() in ("1", "true") or bool(os.environ.get("NO_COLOR"))
        if plain or not sys.stderr.isatty() or (talk := console(stderr=True)).is_dumb_terminal:
            yield _plain()
            return
        with _bars(talk) as tell:
            yield tell


@contextmanager
def _warnings(*, shown: bool) -> Iterator[None]:
    """Inside, what the library logs is a line on stderr, or nothing."""
    import logging  # late, as all that only the work needs

    handler = logging.Handler()
    handler.emit = lambda record: say(record.getMessage()) if shown else None  # type: ignore[method-assign]
    log = logging.getLogger("attnlens")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextmanager
def _bars(talk: Console) -> Iterator[Callable[[str, int, int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=talk, transient=True) as bars:

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total, visible=done < total)  # long series have many

        yield tell


def _plain() -> Callable[[str, int, int], None]:
    """Tells a stage's progress every few seconds, with the time left at its rate since it was last told."""
    last = time.monotonic()
    marks: dict[str, tuple[float, int]] = {}

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        then, before = marks.setdefault(stage, (now, done))
        if now - last < PLAIN_SECONDS:
            return
        last, marks[stage] = now, (now, done)
        line = f"{stage}: {done} of {total}"
        if before < done < total:
            line += f", {timedelta(seconds=round((now - then) * (total - done) / (done - before)))} left"
        say(line)

    return tell
