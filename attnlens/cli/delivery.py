"""Writes data first, then tables, then pictures; what fails costs itself alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from attnlens.cli import INTERRUPTED
from attnlens.cli.outputs import DATA, STDOUT, Outputs, product
from attnlens.cli.show import complain, console, say
from attnlens.errors import AttnlensError, OutputError
from attnlens.files import make_folder, write_atomically

if TYPE_CHECKING:
    from attnlens.records import Report
    from attnlens.sections.section import Document


def deliver(outputs: Outputs, report: Report, *, interrupted: bool = False, saved: Sequence[str] = ()) -> None:
    """Write the data, show the tables, draw the pictures, and tell which files there are.

    What fails is told when the rest is done: raised as an AttnlensError, or as Exit where the reader of stdout left.
    `interrupted`: the report is what was finished, so that the end is Exit with the code of an interruption; `saved` is
    told as written too.
    """
    from attnlens import export  # late, because it loads the records
    from attnlens.sections import documents

    failures = Failures()
    written = [*saved]
    older = ""
    report = _naming_windows(outputs, report)
    try:
        write_data(outputs, report, export.WRITERS, failures, written)
        with failures.kept():
            show(outputs, report, partial(documents.summary, all_heads=outputs.all_heads, verbose=outputs.verbose))
        if outputs.png is not None:
            made = _draw(report, target := Path(outputs.png), failures)
            written += [f"{len(made)} pictures to {target}"] if len(made) > 1 else map(str, made)
            if target.is_dir() and (count := len({*target.glob("*.png")} - {*made})):
                older = f"{target} holds {count} older picture{'s' * (count != 1)} that this run did not write."
        if outputs.html is not None:
            with failures.kept():
                page = _drawn(outputs.html, lambda: export.WRITERS["html"](report).encode())
                write_atomically(Path(outputs.html), page)
                written.append(outputs.html)
    finally:
        if written and not outputs.quiet:
            say(f"Wrote {', '.join(written)}")
            if older:
                say(older)
    failures.end(interrupted=interrupted)


def write_data(
    outputs: Outputs,
    report: Report,
    writers: Mapping[str, Callable[[Report], str]],
    failures: Failures,
    written: list[str],
) -> None:
    """Write each file of data that is asked for, and note which there are."""
    for option, path in outputs.files(*DATA).items():
        with failures.kept():
            write_atomically(path, writers[option](report).encode())
            written.append(str(path))


def _naming_windows(outputs: Outputs, report: Report) -> Report:
    """The report with the file of its windows, where that is written beside it."""
    files = outputs.files("json", "windows_csv")
    if len(files) < 2 or len({os.path.realpath(file.parent) for file in files.values()}) > 1:
        return report
    from attnlens.export import WRITERS
    from attnlens.records import File

    content = WRITERS["windows_csv"](report).encode()
    found = File(name=files["windows_csv"].name, sha256=sha256(content).hexdigest())
    return report.model_copy(update={"windows_file": found})


class Failures:
    """What failed while there was more to do."""

    def __init__(self) -> None:
        self.errors: list[AttnlensError] = []
        self.exits: list[typer.Exit] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, a failure ends the block and nothing else."""
        try:
            yield
        except AttnlensError as error:
            self.errors.append(error)
        except typer.Exit as stop:
            self.exits.append(stop)

    def end(self, *, interrupted: bool) -> None:
        """Tell them, and raise the last, or Exit of the interruption."""
        for error in self.errors if interrupted else self.errors[:-1]:
            complain(error.problem, error.remedy)
        if interrupted:
            say("Interrupted.")
            raise typer.Exit(INTERRUPTED)
        for last in (self.errors or self.exits)[-1:]:
            raise last


def show(outputs: Outputs, report: Report, summary: Callable[[Report], Document]) -> None:
    """Print JSON where stdout is to have it, and the summary."""
    from attnlens.render import terminal

    with product():
        if outputs.json == STDOUT:
            sys.stdout.buffer.write(report.to_json().encode())
        if not outputs.quiet:
            console(stderr=outputs.json == STDOUT).print(terminal.document(summary(report)))


def _draw(report: Report, target: Path, failures: Failures) -> list[Path]:
    """Draw and write each picture; which files were made."""
    from attnlens import export

    made: list[Path] = []
    with failures.kept():
        for path, draw in export.drawings(report, target).items():
            with failures.kept():
                content = _drawn(path, draw)
                new = not path.parent.exists()
                make_folder(path.parent)
                try:
                    write_atomically(path, content)
                except OutputError:
                    if new:
                        with suppress(OSError):
                            path.parent.rmdir()
                    raise
                made.append(path)
    return made


def _drawn(path: Path | str, draw: Callable[[], bytes]) -> bytes:
    """A picture's file. Whatever goes wrong in drawing it costs that picture alone, hence the broad except."""
    try:
        return draw()
    except AttnlensError:
        raise
    except Exception as error:
        raise OutputError(
            f"{path} can't be drawn: {type(error).__name__}: {error}.",
            "The other results are written; run it again with --debug and report what it prints.",
        ) from error
