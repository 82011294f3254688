"""Reads and writes objects behind addresses such as `s3://bucket/name`, by the packages of fsspec that know them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnlens.errors import OutputError

BETWEEN = "://"
"""What an address has between its protocol and its place."""
OF_THIS_MACHINE = ("file://", "local://")
StoreCall = Callable[[Any, str], Any]
"""(file system of fsspec, path in it) → answer; arguments go by position, since stores name them differently."""
PROBE = ".attnlens.writable"
"""How the name ends of an empty object that is written to find out whether one can be."""


@dataclass(frozen=True)
class StoreAddress:
    """A place behind an address; its stores replace objects whole."""

    url: str
    remedy: str = "Give a path, or an address that you can write."
    """What to do where it can't be used."""

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> StoreAddress:
        return replace(self, url=self.url + "/" * (not self.url.endswith("/")) + name)

    def make(self) -> None:
        """Make it a folder, where the store has folders. Raises OutputError where that can't be done."""
        self._written(lambda system, path: system.makedirs(path, exist_ok=True))

    def write(self, content: bytes) -> None:
        """Put an object, which such stores do at once. Raises OutputError where that can't be done."""
        self._written(lambda system, path: system.pipe_file(path, content))

    def check(self, *, is_folder: bool) -> None:
        """Raise OutputError now where an object (in it, for a folder) could not be put later."""
        if is_folder:
            self.make()
        probe = "/" * is_folder + PROBE
        self._written(lambda system, path: system.pipe_file(path + probe, b""))
        with suppress(OutputError, FileNotFoundError):  # who may write may not be let remove; another run removed it
            self.asked(lambda system, path: system.rm_file(path + probe))

    def asked(self, call: StoreCall) -> Any:
        """What the store answers. Raises FileNotFoundError as it is, and OutputError for every other refusal."""
        system, path = self._opened()
        try:
            return call(system, path.rstrip("/"))
        except FileNotFoundError:
            raise
        except Exception as error:
            if not is_refusal(error):
                raise
            raise self._refusal(error) from None

    def _written(self, call: StoreCall) -> None:
        try:
            self.asked(call)
        except FileNotFoundError as error:
            raise self._refusal(error) from None

    def _opened(self) -> tuple[Any, str]:
        import fsspec

        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise OutputError(f"{self.url} can't be opened: {error}.", "Install the package that it names.") from None
        except Exception as error:
            if not (is_refusal(error) or isinstance(error, TypeError)):  # an address that lacks a part, as its host
                raise
            raise self._refusal(error) from None
        return found

    def _refusal(self, error: Exception) -> OutputError:
        said = " ".join(str(getattr(error, "strerror", None) or error).split())[:300].rstrip(".")
        return OutputError(f"{self.url} can't be used: {said or type(error).__name__}.", self.remedy)


def is_refusal(error: Exception) -> bool:
    """Whether a store refuses by it: as file systems do, or by a class of its own package, as botocore's are.

    What else Python itself raises (TypeError, AttributeError, …) is a mistake in a program.
    """
    of_python = type(error).__module__.partition(".")[0] in sys.stdlib_module_names
    return not of_python or isinstance(error, OSError | ValueError | NotImplementedError)


def place_of(name: str | Path) -> Path | StoreAddress:
    """What a name means: an address where it holds `://`, unless it is one of this machine; else a path."""
    written = str(name)
    if BETWEEN not in written:
        return Path(name)
    if not written.startswith(OF_THIS_MACHINE):
        return StoreAddress(written)
    from fsspec.implementations.local import LocalFileSystem

    return Path(LocalFileSystem._strip_protocol(written))
