"""Where do the results go? Every file is found fit before the work, made whole before the first is written."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from attnlens.cli.show import console
from attnlens.errors import OutputError, UsageError
from attnlens.files import check_writable, identity, make_folder, write_atomically

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attnlens.records import Report

READER_LEFT = 141
"""Exit code where the reader of stdout closes it early, as `head` does; the same as of a program that signals end."""
FILE_OPTIONS = ("json", "csv", "windows_csv", "png", "html", "markdown", "plan")
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

    @property
    def _files(self) -> dict[str, Path]:
        """The files asked for, by option; those that are stdout are left out."""
        named = {option: getattr(self, option) for option in FILE_OPTIONS}
        return {
            option: Path(name)
            for option, name in named.items()
            if name is not None and (option, name) != ("json", STDOUT)
        }

    def check(self) -> None:
        """Find out now, and not after the work, whether every file can be written.

        Raises UsageError for an empty path and for two options that name one file, OutputError for a file that can't
        be written or drawn.
        """
        for option in FILE_OPTIONS:
            name = getattr(self, option)
            if name is not None and (not name.strip() or "\0" in name):
                raise UsageError(
                    f"{_typed(option)} names no file.", f"Give a path after {_typed(option)}, or leave it out."
                )
        for option, path in self._files.items():
            check_writable(path, may_be_folder=option == "png")
        self._check_distinct()
        if self.png is not None:
            _check_picture(Path(self.png))

    def _check_distinct(self) -> None:
        names: dict[object, str] = {identity(Path(os.devnull)): ""}
        for option, path in self._files.items():
            other = names.setdefault(identity(path), option)
            if other not in ("", option):
                raise UsageError(
                    f"{_typed(other)} and {_typed(option)} name the same file, {path}.", "Give each its own file."
                )

    def deliver(self, report: Report) -> None:
        """Write every file asked for, show the tables, and tell which files there are.

        Files come first: they are whole even where nobody reads the tables to their end.
        """
        contents = self._contents(report)
        for path in contents:
            make_folder(path.parent)
        for path, content in contents.items():
            write_atomically(path, content)
        with product():
            if self.json == STDOUT:
                sys.stdout.buffer.write(report.to_json().encode())
            if not self.quiet:
                for table in self._tables(report):
                    console(stderr=self.json == STDOUT).print(table)
        if contents and not self.quiet:
            console(stderr=True).print(f"Wrote {self._told(len(contents))}", soft_wrap=True, markup=False)
            if older := self._older(contents):
                console(stderr=True).print(older, soft_wrap=True, markup=False)

    def _contents(self, report: Report) -> dict[Path, bytes]:
        """What will stand in every file; nothing is written yet."""
        return {
            path: content
            for option, target in self._files.items()
            for path, content in _made(option, report, target).items()
        }

    def _told(self, count: int) -> str:
        """`a.json, 12 pictures to folder`, where `count` files were written in all."""
        pictures = count - len(self._files) + 1
        return ", ".join(
            f"{pictures} pictures to {path}" if option == "png" and pictures > 1 else str(path)
            for option, path in self._files.items()
        )

    def _older(self, contents: Mapping[Path, bytes]) -> str:
        """How many pictures of other runs stay in the folder that got this one's; empty where none do."""
        folder = Path(self.png) if self.png is not None else None
        if folder is None or not folder.is_dir():
            return ""
        count = sum(path not in contents for path in folder.glob("*.png"))
        several = "older picture" + "s" * (count != 1)
        return f"{folder} holds {count} {several} that this run did not write." if count else ""

    def _tables(self, report: Report) -> Iterator[RenderableType]:
        from attnlens import tables

        if report.command == "doctor":
            yield tables.doctor_table(report.doctor)
            return
        yield tables.summary(report)
        if report.selections:
            yield tables.selections(report)
        if self.all_heads:
            yield tables.all_heads(report)
        if self.verbose:
            yield tables.details(report)


def _typed(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _check_picture(target: Path) -> None:
    """Raise OutputError where the target is a file already, and its name ends in no kind of picture."""
    from attnlens import plots

    if not plots.is_file(target) and target.exists() and not target.is_dir():
        raise OutputError(
            f"{target} is there, and neither a folder nor a picture.", "End it in .png, .svg or .pdf, or name a folder."
        )


def _made(option: str, report: Report, target: Path) -> dict[Path, bytes]:
    if option == "png":
        return _pictures(report, target)
    return {target: _page(option, report).encode()}


def _page(option: str, report: Report) -> str:
    from attnlens import tables

    if option == "html":
        from attnlens import html  # late, because it loads matplotlib

        return html.page(report)
    makers: dict[str, Callable[[Report], str]] = {
        "json": lambda report: report.to_json(),
        "csv": tables.csv,
        "windows_csv": tables.windows_csv,
        "markdown": tables.markdown,
        "plan": _plan,
    }
    return makers[option](report)


def _plan(report: Report) -> str:
    """The plan of a budget alone; --plan is refused where there is none."""
    assert report.plan is not None  # noqa: S101
    return report.plan.to_json()


def _pictures(report: Report, target: Path) -> dict[Path, bytes]:
    """The overview for the target, or every picture for the folder that it names, drawn in a temporary folder."""
    from attnlens import plots

    with tempfile.TemporaryDirectory() as folder:
        if plots.is_file(target):
            (drawn,) = plots.save_all(report, Path(folder) / f"overview{target.suffix}")
            return {target: drawn.read_bytes()}
        return {target / drawn.name: drawn.read_bytes() for drawn in plots.save_all(report, Path(folder))}
