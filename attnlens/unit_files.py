"""Keeps what is finished of a run: each unit of work is one file, named by all that determines it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol

from platformdirs import user_cache_path

from attnlens.addresses import StoreAddress, place_of
from attnlens.errors import OutputError
from attnlens.files import make_folder, with_home, write_atomically

RUN = "run.json"
"""The file in a run's folder that says what the run is, and which units it has."""
SEAL = sha256().digest_size
"""Bytes at the end of a unit's file, which prove that it is whole, and that unit's."""
FAILED = ".failed"
"""How the name of a file ends that says why a unit could not be read, behind that of the unit's own."""
CLEARED = 8
"""How often a folder is made again that others clear while a file is written there."""
OTHER_WORK = "Name another folder with --work."


def key_of(facts: Mapping[str, Any]) -> str:
    """A name for what these facts determine: their SHA-256, shortened to 32 hex digits."""
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def sealed(run: str, unit: str, content: bytes) -> bytes:
    """What a unit found, and the SHA-256 of that, of the unit's name and of its run's."""
    return content + sha256(_name(run, unit).encode() + content).digest()


def unsealed(run: str, unit: str, content: bytes, where: str) -> bytes:
    """What a unit found, from its file. Raises OutputError where the file is damaged, or that of another unit."""
    found = content[:-SEAL]
    if sealed(run, unit, found) != content:
        raise refused(where)
    return found


def refused(where: str) -> OutputError:
    """The error for a file that is no unit of work, or not the one that it should be."""
    return OutputError(
        f"{where} is damaged, another unit's, or not of this version.",
        "Run the command that read it again with --no-resume; where it came in a report, run that shard again.",
    )


def _name(run: str, unit: str) -> str:
    return key_of({"run": run, "unit": unit})


def work_root(work: str | os.PathLike[str] | None) -> str:
    """The place in which work is kept: the one that was named, or a folder in the user's cache."""
    if work is None:
        return str(cached("work"))
    place = place_of(os.fspath(work))
    return str(with_home(str(place))) if isinstance(place, Path) else str(place)


def cached(name: str) -> Path:
    """The folder of that name in the user's cache, which may not be there yet."""
    return user_cache_path("attnlens", appauthor=False) / name


class Store(Protocol):
    """Where files are written whole and read whole."""

    def make(self) -> None:
        """Make it where it is not there. Raises OutputError where it can't be made."""

    def check(self) -> None:
        """Raise OutputError now where files could not be written there later; nothing stays of that."""

    def names(self) -> list[str]:
        """The names of what lies there, folders and files; none where it is not there."""

    def inside(self, name: str) -> Store:
        """A place in it."""

    def read(self, name: str) -> bytes | None:
        """A file; None where there is none. Raises OutputError where it can't be read."""

    def write(self, name: str, content: bytes) -> None:
        """Write a file at once: others see it whole, or not. Raises OutputError where it can't be written."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and the place itself where it is then empty."""


def store_of(root: str) -> Store:
    """A folder, or what fsspec knows under an address such as `s3://bucket/folder`."""
    place = place_of(root)
    return Folder(place) if isinstance(place, Path) else Remote(replace(place, remedy=OTHER_WORK))


@dataclass(frozen=True)
class Folder:
    """A folder of this machine, or one that several share."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def make(self) -> None:
        """Make it where it is not there."""
        make_folder(self.path)

    def check(self) -> None:
        """Raise OutputError where it, or the nearest folder above it that is there, can't be written."""
        try:
            nearest = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
            with TemporaryFile(dir=nearest):
                pass
        except OSError as error:
            raise OutputError(f"The folder {self.path} can't be written: {error.strerror}.", OTHER_WORK) from None

    def names(self) -> list[str]:
        """The names of what lies there."""
        try:
            return sorted(entry.name for entry in self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise OutputError(f"{self.path} can't be read: {error.strerror}.", OTHER_WORK) from None

    def inside(self, name: str) -> Folder:
        """A folder in it."""
        return Folder(self.path / name)

    def read(self, name: str) -> bytes | None:
        """A file, whole."""
        try:
            found = self.path / name
            if found.exists() and not found.is_file():
                raise OutputError(f"{found} is no file.", OTHER_WORK)
            return found.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise OutputError(f"{self.path / name} can't be read: {error.strerror}.", OTHER_WORK) from None

    def write(self, name: str, content: bytes) -> None:
        """Write a file under another name, and rename it; a folder that another run has cleared is made again."""
        for left in reversed(range(CLEARED)):
            self.make()
            try:
                write_atomically(self.path / name, content)
            except OutputError:
                if self.path.exists() or not left:
                    raise
            else:
                return

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; what another process removed is gone already."""
        for name in names:
            with suppress(OSError):  # another process removed it, or it is not ours
                (self.path / name).unlink()
        try:
            self.path.rmdir()
        except OSError:  # other files lie there, or it was removed
            return


@dataclass(frozen=True)
class Remote:
    """A place behind an address."""

    address: StoreAddress

    def __str__(self) -> str:
        return str(self.address)

    def make(self) -> None:
        """Make it where it is not there."""
        self.address.make()

    def check(self) -> None:
        """Raise OutputError where no object can be put there."""
        self.address.check(is_folder=True)

    def names(self) -> list[str]:
        """The names of what lies there."""
        try:
            found = self.address.asked(lambda system, path: system.ls(path, detail=False))
        except FileNotFoundError:
            return []
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def inside(self, name: str) -> Remote:
        """A place in it."""
        return Remote(self.address / name)

    def read(self, name: str) -> bytes | None:
        """A file, whole."""
        try:
            return bytes((self.address / name).asked(lambda system, path: system.cat_file(path)))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object, which such stores do at once."""
        (self.address / name).write(content)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; what another process removed is gone already."""
        for name in names:
            with suppress(FileNotFoundError):
                (self.address / name).asked(lambda system, path: system.rm_file(path))


@dataclass(frozen=True)
class UnitFiles:
    """The files of one run. Whoever computes a unit writes its file, and the same unit has the same bytes.

    Any number of processes and machines may work there; none of them needs to know of the others.
    """

    root: Store
    """The place that was asked for."""
    run: str
    """What names the run."""
    suffix: str
    """How the names of the units' files end."""
    description: str = RUN
    """The file that says what the run is."""

    @property
    def store(self) -> Store:
        """Where the run's files lie."""
        return self.root.inside(self.run)

    def name(self, unit: str) -> str:
        """The name of a unit's file."""
        return _name(self.run, unit) + self.suffix

    def describe(self, content: bytes, readable: Callable[[bytes], bool] = bool) -> None:
        """Write what the run is, where no other process did so in a form that is `readable`.

        Raises OutputError where it can't be written.
        """
        self.store.make()
        before = self.store.read(self.description)
        if before is None or not readable(before):
            self.store.write(self.description, content)

    def where(self, unit: str, end: str = "") -> str:
        """The whole name of a unit's file, which may have an `end`, and which unit it is."""
        return f"{self.store}/{self.name(unit)}{end} ({unit})"

    def file(self, unit: str) -> bytes | None:
        """A unit's file; None where it is not finished. Raises OutputError where it can't be read."""
        return self.store.read(self.name(unit))

    def read(self, unit: str) -> bytes | None:
        """What a unit found; None where it is not finished. Raises OutputError where its file is damaged."""
        content = self.file(unit)
        return None if content is None else unsealed(self.run, unit, content, self.where(unit))

    def write(self, unit: str, content: bytes) -> None:
        """Keep what a unit found. Raises OutputError where it can't be written."""
        self.store.write(self.name(unit), sealed(self.run, unit, content))

    def fail(self, unit: str, reason: str) -> None:
        """Note why a unit could not be read. Raises OutputError where it can't be written."""
        self.store.write(self.name(unit) + FAILED, sealed(self.run, unit, reason.encode()))

    def failure(self, unit: str) -> str | None:
        """Why a unit could not be read at its last try; None where it could. Raises OutputError for a damaged file."""
        content = self.store.read(self.name(unit) + FAILED)
        return None if content is None else unsealed(self.run, unit, content, self.where(unit, FAILED)).decode()

    def files_of(self, units: Iterable[str]) -> list[str]:
        """The names of the files that there may be of a run, the one by which others know it first."""
        names = [self.name(unit) for unit in units]
        return [self.description, *names, *(name + FAILED for name in names)]

    def clear(self, units: Iterable[str]) -> None:
        """Remove the files of a run whose report is written."""
        there = {*self.store.names()}
        self.store.remove([name for name in self.files_of(units) if name in there])
        self.root.remove([])
