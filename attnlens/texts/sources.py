"""Where does the text come from? Files, standard input, or the sample that ships with attnlens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attnlens.errors import TextError

SAMPLE = Path(__file__).parent.parent / "demo" / "text.txt"
SAY_TEXT = "Give a plain text file in UTF-8."


class Content(NamedTuple):
    """A text and what it is called."""

    text: str
    """The text itself."""
    name: str
    """File names, `stdin`, or `built-in sample`."""


def read_text(paths: Sequence[str]) -> Content:
    """The texts of those files one after the other (`-` is standard input), or the built-in sample where none is named.

    Raises TextError for a file that is missing, unreadable, binary or not in UTF-8, and where there is nothing but
    white space in all of them.
    """
    return joined(read_each(paths))


def read_each(paths: Sequence[str]) -> tuple[Content, ...]:
    """Those texts each by itself, under names of their own; raises what `read_text` raises."""
    if not paths:
        return (Content(_decoded(_bytes_of(str(SAMPLE)), "built-in sample"), "built-in sample"),)
    names = [_name(path) for path in paths]
    found = tuple(
        Content(_decoded(_bytes_of(path), path), name if names.count(name) == 1 else path)
        for path, name in zip(paths, names, strict=True)
    )
    if not any(content.text.strip() for content in found):
        raise TextError(f"The text is empty: {', '.join(paths)}.", "Give a text of at least a few hundred words.")
    return found


def joined(contents: Sequence[Content]) -> Content:
    """One after the other; the last line of one and the first of the next stay two lines."""
    texts = [content.text for content in contents]
    ended = [text if text.endswith("\n") else f"{text}\n" for text in texts[:-1]]
    return Content("".join((*ended, texts[-1])), " + ".join(content.name for content in contents))


def _name(path: str) -> str:
    return "stdin" if path == "-" else Path(path).name


def _bytes_of(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise TextError(f"The text {path} can't be read: {error.strerror}.", SAY_TEXT) from None


def _decoded(content: bytes, path: str) -> str:
    if b"\0" in content:
        raise TextError(f"{path} is a binary file, not a text.", SAY_TEXT)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8: the byte at {error.start} can't be decoded.", SAY_TEXT) from None
