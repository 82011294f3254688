"""How are results shown and written? Product on stdout or in files, talk and progress on stderr."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from attnlens.errors import AttnlensError
from attnlens.files import check_writable, write_atomically
from attnlens.wording import clean

if TYPE_CHECKING:
    from rich.console import Console

    from attnlens.records import Report

INTERRUPTED = 130
"""Exit code of an interrupted command."""
PLAIN_SECONDS = 10.0
"""How often progress is told where nothing can be animated."""


def console(*, stderr: bool = False) -> Console:
    """Where text goes; imported late, so that `--help` loads no tables."""
    from attnlens.tables import console

    return console(stderr=stderr)


@dataclass(frozen=True)
class Outputs:
    """Where the results go."""

    json: str | None = None
    csv: Path | None = None
    png: Path | None = None
    html: Path | None = None
    markdown: Path | None = None
    all_heads: bool = False
    quiet: bool = False
    verbose: bool = False
    no_progress: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Outputs:
        """Those among a command's parameters."""
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    @property
    def moving(self) -> bool:
        """Whether progress is shown."""
        return not (self.quiet or self.no_progress)

    def check(self) -> None:
        """Find out now, and not after the work, whether every file can be written (OutputError)."""
        for path in (self.csv, self.html, self.markdown, self.json):
            if path is not None and path != "-":
                check_writable(Path(path))
        if self.png is not None:
            from attnlens import plots

            check_writable(self.png, may_be_folder=True)
            plots.is_file(self.png)

    def write(self, report: Report) -> None:
        """Write every file asked for, and tell which."""
        from attnlens import tables

        written: list[str] = []
        makers: list[tuple[Path | None, Callable[[Report], str]]] = [
            (self.csv, tables.csv),
            (self.markdown, tables.markdown),
        ]
        if self.html is not None:
            from attnlens import html

            makers.append((self.html, html.page))
        for path, make in makers:
            if path is not None:
                write_atomically(path, make(report).encode())
                written.append(str(path))
        if self.png is not None:
            from attnlens import plots

            pictures = plots.save_all(report, self.png)
            written.append(str(self.png) if len(pictures) == 1 else f"{len(pictures)} pictures to {self.png}")
        if self.json == "-":
            sys.stdout.buffer.write(report.to_json().encode())
            sys.stdout.flush()
        elif self.json is not None:
            report.write_json(self.json)
            written.append(self.json)
        if written and not self.quiet:
            console(stderr=True).print("Wrote " + ", ".join(written), soft_wrap=True, markup=False)

    def show(self, report: Report) -> None:
        """The tables, on stdout unless the JSON goes there."""
        from attnlens import tables

        if self.quiet:
            return
        shown = console(stderr=self.json == "-")
        shown.print(tables.summary(report))
        if self.all_heads:
            shown.print(tables.all_heads(report))
        if self.verbose:
            shown.print(tables.details(report))

    def show_doctor(self, report: Report) -> None:
        """The table of `doctor`."""
        from attnlens import tables

        if not self.quiet:
            console(stderr=self.json == "-").print(tables.doctor_table(report.doctor))


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn errors into two lines and exit code 2, and an interruption into 130; a traceback only with --debug."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except AttnlensError as error:
            if kwargs.get("debug"):
                raise
            said = f"Error: {clean(error.problem)}\n{clean(error.remedy)}"
            console(stderr=True).print(said, soft_wrap=True, markup=False)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            if kwargs.get("debug"):
                raise
            console(stderr=True).print("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:  # the outermost door: whatever is left is a bug of ours, and is called one
            if kwargs.get("debug"):
                raise
            talk = console(stderr=True)
            talk.print(f"Internal error: {type(error).__name__}: {clean(str(error))}", soft_wrap=True, markup=False)
            talk.print("Run it again with --debug and report what it prints.")
            raise typer.Exit(70) from error

    return run


@contextmanager
def progress(*, shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar with ETA on a terminal, else one plain line now and then; yields (stage, done, total) → None."""
    talk = console(stderr=True)
    if not shown:
        yield lambda _stage, _done, _total: None
    elif talk.is_terminal and os.environ.get("CI", "").lower() not in ("1", "true"):
        with _bars(talk) as tell:
            yield tell
    else:
        yield _plain(talk)


@contextmanager
def _bars(talk: Console) -> Iterator[Callable[[str, int, int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=talk, transient=True) as bars:

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield tell


def _plain(talk: Console) -> Callable[[str, int, int], None]:
    last = time.monotonic()

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            talk.print(f"{stage}: {done} of {total}")

    return tell
