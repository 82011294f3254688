"""Print messages and progress on stderr, handle interruptions, and end failed commands."""

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
from typing import TYPE_CHECKING

import typer

from attnlens.cli.exit_codes import BUG, INTERRUPTED, PARTLY, UNUSABLE, leave
from attnlens.errors import AttnlensError, ShardFinished, is_memory
from attnlens.wording import clean, shorten_line

if TYPE_CHECKING:
    from rich.console import Console

ReportProgress = Callable[[str, int, int], None]  # Report progress: (stage, steps done, total steps)
PLAIN_SECONDS = 10.0  # Interval of progress lines if no bar can be shown, in seconds
ESTIMATED, LONG = 5.0, 300.0  # Seconds of a stage after which its duration is estimated; duration that is announced
FORECAST = "budget"  # Stage whose duration is always announced, after SAMPLED seconds: the search of `ranks`
SAMPLED = 2.0
LONGEST_LINE = 600  # Maximum length of a message line, which may quote an untrusted file


def console(*, stderr: bool = False) -> Console:
    """Return the console for tables and bars; rich is imported late, because some commands do not need it."""
    from attnlens.report.render.terminal import console

    return console(stderr=stderr)


def say(line: str) -> None:
    """Print one line on stderr, without characters that control the terminal."""
    with suppress(OSError):  # if stderr can't be written, only the exit code remains
        print(shorten_line(clean(line), LONGEST_LINE), file=sys.stderr, flush=True)


def complain(problem: str, remedy: str) -> None:
    """Print problem and remedy on stderr, one line each."""
    say(f"Error: {problem}")
    say(remedy)


_machine = False  # True while stdout must receive JSON, also if the command fails


def expect_json(expected: bool) -> None:
    """Record whether stdout must still receive JSON: True when `--json -` starts, False once the JSON is written."""
    global _machine  # one command line per process
    _machine = expected


def write_json_error(code: str, problem: str, remedy: str) -> None:
    """Write an error as JSON on stdout if stdout still has to receive JSON (`--json -`)."""
    if _machine:
        import json

        error = {"code": code, "problem": clean(problem), "remedy": clean(remedy)}
        with suppress(OSError):
            print(json.dumps({"error": error}), flush=True)
        expect_json(False)


@contextmanager
def interruptible_at_once() -> Iterator[None]:
    """Exit at once on an interruption inside the block, because imports may swallow KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    if before not in (interrupt, signal.default_int_handler):  # the caller ignores or handles it
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def guard(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command: on an error, print a message (after a traceback if --debug is set) and exit with its code."""

    @functools.wraps(command)
    def run(*args: object, **options: object) -> None:
        try:
            command(*args, **options)
        except (typer.Exit, SystemExit):
            raise
        except ShardFinished as shard:
            for line in str(shard).splitlines():
                say(line)
            raise typer.Exit(PARTLY if shard.failed and options.get("strict") else 0) from None
        except BaseException as error:
            if options.get("debug"):
                traceback.print_exc()
            raise typer.Exit(report_failure(error)) from error

    return run


_received: list[int] = []  # Signals that interrupted this run


def interrupt(number: int, _frame: object) -> None:
    """Record the signal, and raise KeyboardInterrupt, which pydantic can replace by another error."""
    _received.append(number)
    raise KeyboardInterrupt


RESUME = "Finished work is kept; run the same command again to continue."


def report_failure(error: BaseException) -> int:
    """Print why a command failed and return the exit code; `error` may be a Rust panic, which is not an Exception."""
    name, exit_code = type(error).__name__, UNUSABLE
    if isinstance(error, AttnlensError):
        code, problem, remedy = error.code, error.problem, error.remedy
    elif isinstance(error, KeyboardInterrupt) or _received:
        say(f"Interrupted. {RESUME}")
        write_json_error("interrupted", "Interrupted.", RESUME)
        return INTERRUPTED
    elif is_memory(error):
        code, problem = "memory", "Not enough memory."
        remedy = "Use a smaller --batch-size or --length, fewer --layers, or a smaller model."
    elif name == "PanicException":
        code, problem = "library", f"A library crashed on a file of the model or on the text: {error}"
        remedy = "Check that these files are complete, for example by downloading them again."
    else:
        code, problem, exit_code = "internal", f"attnlens failed with {name}: {error}", BUG
        remedy = "Run the command again with --debug and report the output."
    complain(problem, remedy)
    write_json_error(code, problem, remedy)
    return exit_code


@contextmanager
def progress(*, shown: bool) -> Iterator[ReportProgress]:
    """Show progress, as bars on a terminal and otherwise as occasional lines, and print attnlens' warnings."""
    import logging  # late, like everything that only the work needs

    handler, log = logging.Handler(), logging.getLogger("attnlens")
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    plain = os.environ.get("CI", "").lower() in ("1", "true") or bool(os.environ.get("NO_COLOR"))
    try:
        if not shown:
            yield lambda _stage, _done, _total: None
        elif plain or not sys.stderr.isatty() or (terminal := console(stderr=True)).is_dumb_terminal:
            yield _announce_long(_plain())
        else:
            with _bars(terminal) as tell:
                yield _announce_long(tell)
    finally:
        log.removeHandler(handler)


def _announce_long(tell: ReportProgress) -> ReportProgress:
    """Let a progress function announce, once per stage, that the stage will take longer than LONG seconds.

    The estimate is made after ESTIMATED seconds of the stage, from the steps done by then.
    """
    starts: dict[str, tuple[float, int]] = {}
    announced: set[str] = set()

    def sampled(stage: str) -> float:
        return SAMPLED if stage == FORECAST else ESTIMATED

    def extended(stage: str, done: int, total: int) -> None:
        begin, first = starts.setdefault(stage, (time.monotonic(), done))
        elapsed = time.monotonic() - begin
        if stage not in announced and elapsed >= sampled(stage) and first < done < total:
            announced.add(stage)
            remaining = elapsed * (total - done) / (done - first)
            if stage == FORECAST:
                say(_forecast(stage, remaining, f"{done - first} of {total - first}"))
            elif remaining > LONG:
                minutes = round(remaining / 60)
                say(f"{stage}: about {minutes} minutes left. Fewer --windows, --layers or --heads make it shorter.")
        tell(stage, done, total)

    return extended


def _forecast(stage: str, seconds: float, sample: str) -> str:
    """Format how long a stage will take, within half of the estimate from its first steps."""
    size, unit = (60, "minutes") if seconds >= 120 else (1, "seconds")
    middle, low, high = (f"{share * seconds / size:.0f}" for share in (1, 0.5, 1.5))
    return (
        f"{stage}: about {middle} {unit} ({low} to {high}), estimated from {sample} steps. Fewer --windows shorten it."
    )


@contextmanager
def _bars(terminal: Console) -> Iterator[ReportProgress]:
    """Yield a function that shows the progress of each stage as a bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=terminal, transient=True) as bars:

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total, visible=done < total)  # long series have many stages

        yield tell


def _plain() -> ReportProgress:
    """Return a function that prints a stage's progress every ten seconds, with the time left at its mean rate."""
    last = time.monotonic()
    starts: dict[str, tuple[float, int]] = {}

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        then, before = starts.setdefault(stage, (now, done))
        if now - last < PLAIN_SECONDS:
            return
        last = now
        line = f"{stage}: {done} of {total}"
        if before < done < total:
            line += f", {timedelta(seconds=round((now - then) * (total - done) / (done - before)))} left"
        say(line)

    return tell
