"""Reads a text file, compressed by gzip or not, within bounds."""

from __future__ import annotations

import gzip
import io
import zlib
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, cast

from attnlens.errors import TextError
from attnlens.files import read_bytes, read_stream, with_home

LARGEST_CONTENT = 2**30
"""Bytes of the largest file that is read, as it lies there and unpacked."""


def read_whole(path: str | Path, remedy: str) -> tuple[str, str]:
    """The text in a file, unpacked where its name ends in `.gz`, and the SHA-256 of its bytes as they lie there.

    Raises TextError, which says `remedy`, for a file that is missing, too large, broken, binary or not in UTF-8.
    """
    found = with_home(str(path))
    content = read_bytes(found, TextError, remedy, most=LARGEST_CONTENT)
    digest = sha256(content).hexdigest()
    if found.suffix == ".gz":
        content = _unpacked(content, str(path), remedy)
    if b"\0" in content:
        raise TextError(f"{path} is a binary file, not a text.", remedy)
    try:
        return content.decode("utf-8-sig"), digest
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8: the byte at {error.start} can't be decoded.", remedy) from None


def _unpacked(content: bytes, path: str, remedy: str) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            return read_stream(cast(BinaryIO, file), path, TextError, remedy, most=LARGEST_CONTENT)
    except (OSError, EOFError, zlib.error) as error:
        raise TextError(f"{path} can't be unpacked: {error}.", remedy) from None


def line_numbers(found: list[int]) -> str:
    """How many lines, and the numbers of the first of them, as a message says them."""
    first = ", ".join(map(str, found[:5])) + ("…" if len(found) > 5 else "")
    return f"{len(found)} lines (numbers {first})" if len(found) > 1 else f"line {first}"
