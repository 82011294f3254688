"""Checks before the work that every input can be read, and every output written without replacing an input."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import typer

from attnlens.arguments import MODEL_FILES, dataset_rows
from attnlens.errors import OutputError, TextError, UsageError
from attnlens.files import OPEN_FILES, check_writable, local_path, refuse_other_kinds, with_home

READER_LEFT = 141
"""Exit code if the reader of stdout closes it early, as `head` does: that of a program ended by SIGPIPE."""
DATA, PICTURES = ("json", "csv", "windows_csv", "markdown", "plan", "junit"), ("png", "html")
"""Options that name a file to write."""
STDIN = STDOUT = "-"
HUB = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(@[^\\]+)?")
"""What the name of a model of the hub looks like; one that ends like a file, or is a folder here, is none."""
TEXTS = ("text", "calibration", "prompts")
"""Options that may name rows of a dataset in the place of a file."""
SAY_TEXT = "Give a plain text file in UTF-8."


@dataclass
class Inputs:
    """The files that a command reads, and the folders of its models."""

    files: dict[str, str] = field(default_factory=dict)
    """Description of each input file, keyed by its resolved path."""
    folders: dict[Path, str] = field(default_factory=dict)
    """Description of each folder of a model or a dataset, keyed by its resolved path."""

    @classmethod
    def of(cls, given: Mapping[str, Any], models: Sequence[str]) -> Inputs:
        """Those of a command's parameters, and of these models.

        Raises TextError for a text that is not there, ModelError for a model that is not where its name says (the hub
        is not asked), UsageError for a plan that can't be read.
        """
        found = cls()
        lone = {name: [given[name]] for name in ("prompts", "pairs", "labelled") if given.get(name) is not None}
        several = {name: given.get(name) or () for name in ("text", "calibration", "series")}
        for option, named in (lone | several).items():
            for path in map(Path, named):
                asked = dataset_rows(str(path)) if option in TEXTS else None
                if asked is not None:
                    folder = Path(os.path.realpath(os.path.expanduser(asked.name)))  # noqa: PTH111  # never raises
                    found.folders[folder] = f"a file of the dataset which --{option} reads"
                elif str(path) != STDIN:
                    found._add(_readable(path), f"which --{option} reads")
        if given.get("ranks") is not None:
            from attnlens.records import read_plan

            plan = Path(given["ranks"])
            if not plan.is_fifo():  # which can be read once, by the run
                read_plan(plan)
            found._add(plan, "which --ranks reads")
        if models:
            from attnlens.models.hub import check_endpoint

            check_endpoint()
        for name in models:
            found._add_model(name, given)
        return found

    @classmethod
    def of_report(cls, *paths: str) -> Inputs:
        """Those of a command which reads reports."""
        return cls({os.path.realpath(path): "the report" for path in paths})

    def description(self, output: Path) -> str:
        """Return the description of the input that `output` would replace; empty if there is none."""
        real = Path(os.path.realpath(output))
        inside = (what for folder, what in self.folders.items() if real.is_relative_to(folder))
        return self.files.get(str(real)) or (next(inside, "") if real.is_file() else "")

    def _add(self, path: Path, what: str) -> None:
        self.files[os.path.realpath(path)] = what

    def _add_model(self, name: str, given: Mapping[str, Any]) -> None:
        """The files of a model on this machine: of its folder all, wherever links lead; a bare file."""
        path = os.path.expanduser(name)  # noqa: PTH111  # here and below os.path, which never raises, whatever the name
        on_hub = HUB.fullmatch(name) and not name.endswith(MODEL_FILES) and name != "demo"
        if on_hub and not os.path.exists(path) and not given["offline"]:  # noqa: PTH110
            return
        from attnlens.models.locate import find

        revision = given.get("revision") if len(given.get("models") or ()) < 2 else None
        place = find(name, revision, offline=given["offline"], allow_pickle=given["allow_pickle"])
        what = f"a file of the model {name}"
        if place.form == "gguf" and not os.path.isdir(path):  # noqa: PTH112
            self._add(place.folder / place.file, what)
            return
        self.folders[Path(os.path.realpath(place.folder))] = what
        for file in place.folder.iterdir():
            self._add(file, what)


def check_place() -> None:
    """Raise UsageError where the current folder was removed: no path starts there, and torch's MKL ends the process."""
    try:
        os.getcwd()  # noqa: PTH109  # as pathlib does
    except OSError as error:
        raise UsageError(f"The current folder can't be read: {error.strerror}.", "Go to another one: cd") from None


def _readable(path: Path) -> Path:
    """Return the path of a text. Raises TextError if it can't be read."""
    found = with_home(str(path))
    try:
        kind = found.stat()
    except (OSError, ValueError) as error:
        raise TextError(f"The text {path} can't be read: {getattr(error, 'strerror', error)}.", SAY_TEXT) from None
    if not os.access(found, os.R_OK):
        raise TextError(f"The text {path} can't be read: Permission denied.", SAY_TEXT)
    if not str(path).startswith(OPEN_FILES):
        refuse_other_kinds(kind, f"The text {path}", TextError, SAY_TEXT)
    return found


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
            option: local_path(name, option_name(option))
            for option, name in named.items()
            if name is not None and (option, name) != ("json", STDOUT)
        }

    def check(self, inputs: Inputs) -> None:
        """Check before the work that every file can be written or drawn, and that none is an input.

        Raises UsageError for a path that names no file, for two options that name the same file and for an output that
        would replace an input, OutputError for a file that can't be written or drawn.
        """
        for option in (*DATA, *PICTURES):
            _check_name(option, getattr(self, option))
        names = {os.path.realpath(os.devnull): ""}
        for option, path in self.files(*DATA, *PICTURES, "save").items():
            if option != "save":  # which the run checks
                check_writable(path, may_be_folder=option == "png")
            other = names.setdefault(os.path.realpath(path), option)
            if other not in ("", option):
                raise UsageError(
                    f"{option_name(other)} and {option_name(option)} name the same file, {path}.",
                    "Give each its own file.",
                )
            replaced = path.glob("*.png") if option == "png" and path.is_dir() else [path]
            for file in replaced:
                if what := inputs.description(file):
                    raise UsageError(f"{option_name(option)} would replace {file}, {what}.", "Write it somewhere else.")
        if self.png is not None or self.html is not None:
            import logging  # late: few commands draw

            logging.getLogger("matplotlib").setLevel(logging.ERROR)  # which tells where it keeps its cache
        if self.png is not None:
            from attnlens.render.pictures import is_file

            if not is_file(target := Path(self.png)) and target.exists() and not target.is_dir():
                raise OutputError(
                    f"{target} is there, and neither a folder nor a picture.",
                    "End it in .png, .svg or .pdf, or name a folder.",
                )


def option_name(option: str) -> str:
    """Return the option as it is typed: `--windows-csv`."""
    return f"--{option.replace('_', '-')}"


def _check_name(option: str, name: str | None) -> None:
    """Raise UsageError if that can't be the path of a file (of a folder, for pictures)."""
    typed = option_name(option)
    if name is None or (option, name) == ("json", STDOUT):
        return
    if not name.strip() or "\0" in name or (option != "png" and name.endswith(("/", os.sep))):
        raise UsageError(f"{typed} names no file.", f"Give a path after {typed}, or leave it out.")
    if name.startswith("--"):
        raise UsageError(f"{typed} is followed by {name}, an option.", f"Give a path after {typed}.")
    if name == STDOUT:
        raise UsageError(f"{typed} does not write to stdout; --json does.", "Give a path, as /dev/stdout is.")
