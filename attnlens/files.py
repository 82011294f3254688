"""How is a file written whole or not at all, and how is it told apart from another?"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from attnlens.errors import OutputError


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_writable(path: Path, *, may_be_folder: bool = False) -> None:
    """Raise OutputError now where `path`, or the folder that it names, could not be written later; leaves nothing."""
    if path.is_dir() and not may_be_folder:
        raise OutputError(f"{path} can't be written: it is a folder.", "Give the path of a file.")
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        raise OutputError(f"{path} can't be written: there is no folder {folder}.", f"Run: mkdir -p {folder}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"{path} can't be written: {error.strerror}.", "Choose a path in a folder that you can write."
        ) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to a temporary name beside `path` and rename it, so that a killed run leaves no half file.

    Raises OutputError where the folder does not exist or can't be written.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink()
            raise
    except OSError as error:
        raise OutputError(
            f"{path} can't be written: {error.strerror}.", "Choose a path in a folder that you can write."
        ) from None
