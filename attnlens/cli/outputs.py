"""Checks before the work that every output can be written and replaces no input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import typer

from attnlens.cli.input_files import Inputs
from attnlens.errors import OutputError, UsageError
from attnlens.files import check_writable, local_path

READER_LEFT = 141
"""Exit code where the reader of stdout closes it early, as `head` does; the same as of a program that signals end."""
DATA, PICTURES = ("json", "csv", "windows_csv", "markdown", "plan", "junit"), ("png", "html")
STDOUT = "-"


@contextmanager
def product() -> Iterator[None]:
    """Inside, stdout is written. Raises OutputError where it takes no more, Exit where its reader has left."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # what is left in the buffer would fail once more when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(READER_LEFT) from None
        raise OutputError(
            f"stdout can't be written: {error.strerror}.", "Send it to a file or a program that can take it."
        ) from None


@dataclass(frozen=True)
class Outputs:
    """Which files are written, and what is shown."""

    json: str | None = None
    csv: str | None = None
    windows_csv: str | None = None
    png: str | None = None
    html: str | None = None
    markdown: str | None = None
    plan: str | None = None
    junit: str | None = None
    save: str | None = None
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

    def files(self, *options: str) -> dict[str, Path]:
        """Those of these options that name a file and not stdout, with their paths."""
        named = {option: getattr(self, option) for option in options}
        return {
            option: local_path(name, typed(option))
            for option, name in named.items()
            if name is not None and (option, name) != ("json", STDOUT)
        }

    def check(self, inputs: Inputs) -> None:
        """Find out now, and not after the work, whether every file can be written, and that none is an input.

        Raises UsageError for a path that names no file, for two options that name one file and for an output that would
        replace an input, OutputError for a file that can't be written or drawn.
        """
        for option in (*DATA, *PICTURES):
            _check_name(option, getattr(self, option))
        for option, path in self.files(*DATA, *PICTURES).items():
            check_writable(path, may_be_folder=option == "png")
        self._check_distinct(inputs)
        if self.png is not None or self.html is not None:
            import logging  # late: few commands draw

            logging.getLogger("matplotlib").setLevel(logging.ERROR)  # which tells where it keeps its cache
        if self.png is not None:
            _check_picture(Path(self.png))

    def _check_distinct(self, inputs: Inputs) -> None:
        names = {os.path.realpath(os.devnull): ""}
        for option, path in self.files(*DATA, *PICTURES, "save").items():
            other = names.setdefault(os.path.realpath(path), option)
            if other not in ("", option):
                raise UsageError(
                    f"{typed(other)} and {typed(option)} name the same file, {path}.", "Give each its own file."
                )
            replaced = path.glob("*.png") if option == "png" and path.is_dir() else [path]
            for file in replaced:
                if what := inputs.description(file):
                    raise UsageError(f"{typed(option)} would replace {file}, {what}.", "Write it somewhere else.")


def typed(option: str) -> str:
    """The option as it is typed."""
    return f"--{option.replace('_', '-')}"


def _check_name(option: str, name: str | None) -> None:
    """Raise UsageError where that can't be the path of a file (of a folder, for pictures)."""
    if name is None or (option, name) == ("json", STDOUT):
        return
    if not name.strip() or "\0" in name or (option != "png" and name.endswith(("/", os.sep))):
        raise UsageError(f"{typed(option)} names no file.", f"Give a path after {typed(option)}, or leave it out.")
    if name.startswith("--"):
        raise UsageError(f"{typed(option)} is followed by {name}, an option.", f"Give a path after {typed(option)}.")
    if name == STDOUT:
        raise UsageError(f"{typed(option)} does not write to stdout; --json does.", "Give a path, as /dev/stdout is.")


def _check_picture(target: Path) -> None:
    """Raise OutputError where the target is a file already, and its name ends in no kind of picture."""
    from attnlens.render.pictures import is_file

    if not is_file(target) and target.exists() and not target.is_dir():
        raise OutputError(
            f"{target} is there, and neither a folder nor a picture.", "End it in .png, .svg or .pdf, or name a folder."
        )
