"""How does a command talk on stderr while it works, and how does it end where something goes wrong?"""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import typer

from attnlens.errors import AttnlensError
from attnlens.wording import clean

if TYPE_CHECKING:
    from rich.console import Console

UNUSABLE = 2
"""Exit code where the words of the call or its input can't be used."""
BUG = 70
"""Exit code where attnlens itself went wrong."""
INTERRUPTED = 130
"""Exit code of an interrupted command."""
PLAIN_SECONDS = 10.0
"""How often progress is told where nothing can be animated."""


def console(*, stderr: bool = False) -> Console:
    """Where text goes; imported late, so that `--help` loads no tables."""
    from attnlens.tables import console

    return console(stderr=stderr)


def complain(problem: str, remedy: str) -> None:
    """Say on stderr what is wrong and what to do, a line each."""
    with suppress(OSError):  # where stderr takes nothing, the exit code must do
        console(stderr=True).print(f"Error: {clean(problem)}\n{clean(remedy)}", soft_wrap=True, markup=False)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn errors into two lines and exit code 2, an interruption into 130; with --debug a traceback stands above."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except (Exception, KeyboardInterrupt) as error:  # the outermost door: nothing else turns bugs into words
            if kwargs.get("debug"):
                traceback.print_exc()
            raise typer.Exit(_told(error)) from error

    return run


def _told(error: BaseException) -> int:
    """Say what ended a command; the exit code."""
    if isinstance(error, AttnlensError):
        complain(error.problem, error.remedy)
        return UNUSABLE
    if isinstance(error, KeyboardInterrupt):
        console(stderr=True).print("Interrupted.")
        return INTERRUPTED
    talk = console(stderr=True)
    talk.print(f"Internal error: {type(error).__name__}: {clean(str(error))}", soft_wrap=True, markup=False)
    talk.print("Run it again with --debug and report what it prints.")
    return BUG


@contextmanager
def progress(*, shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar with ETA on a terminal, else one plain line now and then; yields (stage, done, total) → None."""
    talk = console(stderr=True)
    if not shown:
        yield lambda _stage, _done, _total: None
    elif _may_move(talk):
        with _bars(talk) as tell:
            yield tell
    else:
        yield _plain(talk)


def _may_move(talk: Console) -> bool:
    """Whether stderr is a terminal that can draw over a line, and neither CI nor NO_COLOR asks for plain lines."""
    unmoving = os.environ.get("CI", "").lower() in ("1", "true") or bool(os.environ.get("NO_COLOR"))
    return sys.stderr.isatty() and not talk.is_dumb_terminal and not unmoving


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


def _plain(talk: Console) -> Callable[[str, int, int], None]:
    last = time.monotonic()

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            talk.print(f"{stage}: {done} of {total}")

    return tell
