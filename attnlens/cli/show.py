"""Print messages and progress on stderr, handle interruptions, and end failed commands."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
import traceback
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import typer

from attnlens.cli.exit_codes import BUG, INTERRUPTED, PARTLY, STOPS, UNUSABLE, leave
from attnlens.errors import AttnlensError, ShardFinished, is_memory
from attnlens.wording import clean, shorten_line

if TYPE_CHECKING:
    from rich.console import Console

ReportProgress = Callable[[str, int, int], None]  # Report progress: (stage, steps done, total steps)
PLAIN_SECONDS = 10.0  # Interval of progress lines if no bar can be shown, in seconds
ESTIMATED, LONG = 5.0, 300.0  # Seconds after which a stage's duration is estimated, and shortest duration to announce
SHORT = 60.0  # Shortest duration to announce for a stage of `converge`, in seconds
SPACING = 0.1  # Shortest time between reports that are used to estimate a duration, in seconds
AGREEMENT = 2.0  # Largest ratio between the estimates of a duration at which the duration is announced
BOUNDED = "budget"  # Stage of `ranks` that is always announced; its total is an upper bound
COUNTS = ("trials", "iterations", "seeds", "cells", "windows", "layers", "heads")  # Options that shorten a run
GENERATE, TRAIN = ("generate",), ("train",)  # Options that set the length of a stage
STAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "parts of the run": ("sites and batches", COUNTS),
    "weights": ("sites", ("layers", "heads")),
    "tokens": ("windows", COUNTS),
    "gathered": ("groups of sites", COUNTS),
    "selection": ("sites", COUNTS),
    "checkpoints": ("checkpoints", COUNTS),
    "doctor": ("sites", COUNTS),
    "compare": ("tokens", ("windows",)),
    "attention rows": ("windows", ("windows",)),
    "rounding": ("draws", ("windows",)),
    "kernels": ("kernels", ("windows",)),
    "fit": ("windows", ("windows",)),
    "fit rank": ("windows", ("windows",)),
    "budget": ("windows in several passes", ("windows",)),
    "generate": ("models", GENERATE),
    "sweep": ("swaps", COUNTS),
    "heal": ("% of the training", TRAIN),
    "control": ("% of the training", TRAIN),
    "search": ("training runs", COUNTS),
    "train": ("training runs", COUNTS),
    "experiments": ("experiments", COUNTS),
    "converge": ("iterations", COUNTS),
    "local convergence": ("iterations", COUNTS),
    "global selection": ("iterations", COUNTS),
    "multi-token": ("iterations", COUNTS),
    "next-token": ("iterations", COUNTS),
    "nuclear SVM": ("trials", ("trials",)),
    "frobenius SVM": ("trials", ("trials",)),
    "rank": ("trials", ("trials",)),
    "feasibility": ("trials", ("trials",)),
    "binary kernel": ("fits", COUNTS),
    "decay by training": ("steps", COUNTS),
    "KSVD identities": ("cases", COUNTS),
}
"""Last or first part of a stage's name → noun for its steps (`% of …` if their unit depends on the options), and the
options that shorten the stage."""
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


_machine = False  # True while stdout must still receive JSON, even if the command fails


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
    before = {stop: signal.getsignal(stop) for stop in STOPS}
    # if the caller ignores or handles a signal, it keeps its handler
    ours = [stop for stop in STOPS if before[stop] in (interrupt, signal.default_int_handler)]
    for stop in ours:
        signal.signal(stop, leave)
    try:
        yield
    finally:
        for stop in ours:
            signal.signal(stop, before[stop])


def guard(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command: on an error, print its message (after a traceback if --debug is set) and exit with its code."""

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


_received: list[int] = []  # Signals that interrupted this run, because pydantic can replace KeyboardInterrupt


def interrupt(number: int, _frame: object) -> None:
    """Record the signal and raise KeyboardInterrupt."""
    _received.append(number)
    raise KeyboardInterrupt


RESUME = "Finished work is kept; run the same command again to continue."


def report_failure(error: BaseException) -> int:
    """Print the reason why a command failed, and return the exit code."""
    name, exit_code = type(error).__name__, UNUSABLE  # a Rust panic is a BaseException, not an Exception
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
def progress(*, shown: bool, options: Collection[str] = ()) -> Iterator[ReportProgress]:
    """Show progress, as bars on a terminal and otherwise as occasional lines, and print attnlens' warnings.

    `options` are the names of the options that the command accepts; those that shorten a long stage are suggested.
    """
    import logging  # late, like everything that only the work needs

    handler, log = logging.Handler(), logging.getLogger("attnlens")
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    plain = os.environ.get("CI", "").lower() in ("1", "true") or bool(os.environ.get("NO_COLOR"))
    try:
        if not shown:
            yield lambda _stage, _done, _total: None
        elif plain or not sys.stderr.isatty() or (terminal := console(stderr=True)).is_dumb_terminal:
            yield _announce_long(_print_lines(), options)
        else:
            with _bars(terminal) as report_progress:
                yield _announce_long(lambda stage, done, total, _: report_progress(stage, done, total), options)
    finally:
        log.removeHandler(handler)


class Pace:
    """Record of a stage's progress over time, used to estimate the time left."""

    def __init__(self) -> None:
        self.reports: list[tuple[float, int]] = []  # (seconds, steps done): before the first step, after it, and later

    def add(self, done: int) -> None:
        """Record the number of steps done. Until it rises, keep only the latest record: some stages report 0 early."""
        now = time.monotonic()
        if not self.reports or done <= self.reports[0][1]:
            self.reports = [(now, done)]
        elif len(self.reports) == 1 or (done > self.reports[-1][1] and now - self.reports[-1][0] >= SPACING):
            self.reports.append((now, done))

    def forecast(self, remaining: int) -> list[float]:
        """Estimate the seconds left in three ways: from the pace so far, and from the pace in each half of the time.

        The first step is left out, because it may include one-off costs. Return [] if fewer than two later reports
        exist, or if the estimates differ by more than a factor of AGREEMENT.
        """
        later = self.reports[1:]
        if len(later) < 3:
            return []
        middle = bisect_left(later, ((later[0][0] + later[-1][0]) / 2, 0), 1, len(later) - 2)
        first, half, last = later[0], later[middle], later[-1]
        spans = ((first, last), (first, half), (half, last))
        seconds = [remaining * (end[0] - start[0]) / (end[1] - start[1]) for start, end in spans]
        return seconds if max(seconds) <= AGREEMENT * min(seconds) else []


def _announce_long(show: Callable[[str, int, int, Pace], None], options: Collection[str]) -> ReportProgress:
    """Return a progress function that calls `show`, and announces, once, a stage that takes longer than LONG seconds.

    The limit is SHORT for stages counted in iterations or trials. A stage is announced after ESTIMATED seconds at the
    earliest, and only if its steps take similar times. The stage BOUNDED is always announced. `options` are the names
    of the options that the running command accepts.
    """
    paces: defaultdict[str, Pace] = defaultdict(Pace)
    announced: set[str] = set()

    def report_progress(stage: str, done: int, total: int) -> None:
        pace = paces[stage]
        pace.add(done)
        duration = time.monotonic() - pace.reports[0][0]
        if stage not in announced and done < total and duration >= ESTIMATED:
            seconds = pace.forecast(total - done)
            least = SHORT if _find_stage(stage)[0] in ("iterations", "trials") else LONG
            if seconds and (stage == BOUNDED or min(seconds) > least):
                announced.add(stage)
                say(f"{stage}: {_format_time_left(stage, seconds)} in this stage.{_remedy(stage, options)}")
        show(stage, done, total, pace)

    return report_progress


def _format_time_left(stage: str, seconds: Sequence[float], *, exact: bool = False) -> str:
    """Format a forecast: `about 6 minutes left`, or `0:05:48 left` if `exact`.

    For the stage BOUNDED, which can end early, use the longest estimate.
    """
    number = max(seconds) if stage == BOUNDED else seconds[0]
    if exact:
        return f"{timedelta(seconds=round(number))} left"
    return f"about {f'{number / 60:.0f} minutes' if number >= 120 else f'{number:.0f} seconds'} left"


def _find_stage(stage: str) -> tuple[str, tuple[str, ...]]:
    """Look up a stage in STAGES by the last or, failing that, the first part of its name.

    The other part names a kernel, a checkpoint or a setting: `linear, generate`, `rank, d=4`.
    """
    parts = stage.split(", ")
    return next((STAGES[part] for part in (parts[-1], parts[0]) if part in STAGES), ("steps", COUNTS))


def _remedy(stage: str, options: Collection[str]) -> str:
    """Return a sentence that names the options that shorten a stage; empty if the command has none of them."""
    _, shortening = _find_stage(stage)
    names = [f"--{name}" for name in shortening if name in options]
    if not names:
        return ""
    if shortening in (GENERATE, TRAIN):
        return f" A smaller {names[0]} makes it shorter."
    listed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    cost = ", but the chosen ranks can be larger" if stage == "budget" else ""
    return f" Fewer {listed} make it shorter{cost}."


@contextmanager
def _bars(terminal: Console) -> Iterator[ReportProgress]:
    """Yield a function that shows the progress of each stage as a bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[counted]}"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=terminal, transient=True) as bars:

        def report_progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                counted, _ = _find_stage(stage)
                tasks[stage] = bars.add_task(stage, total=total, counted="" if counted.startswith("%") else counted)
            bars.update(tasks[stage], completed=done, total=total, visible=done < total)  # long series have many stages

        yield report_progress


def _print_lines() -> Callable[[str, int, int, Pace], None]:
    """Return a function that prints a stage's progress, at most every ten seconds, with the time left if known."""
    last = time.monotonic()

    def show(stage: str, done: int, total: int, pace: Pace) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < PLAIN_SECONDS:
            return
        last = now
        noun, _ = _find_stage(stage)
        count = f"{100 * done / max(1, total):.0f} {noun}" if noun.startswith("%") else f"{done} of {total} {noun}"
        left = pace.forecast(total - done) if done < total else []
        say(f"{stage}: {count}" + (f", {_format_time_left(stage, left, exact=True)}" if left else ""))

    return show
