"""Where the texts come from: files, standard input, datasets, or the samples that ship with attnlens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnlens.arguments import dataset_rows
from attnlens.errors import TextError
from attnlens.files import read_bytes, read_stream, with_home
from attnlens.texts import corpora

DEMO = Path(__file__).parent.parent / "demo"
SAMPLES = Path(__file__).parent.parent / "samples"
SAMPLE_NAMES = {
    DEMO / "text.txt": "King James passages",
    SAMPLES / "documentation.txt": "attnlens documentation",
    SAMPLES / "source.txt": "attnlens source code",
}
"""The built-in samples: three kinds of text, because one text is not text."""
LARGEST_FILE = 2**30
"""Bytes of the largest text that is read."""
LONGEST, BLOCKS = 2**23, 64
"""Characters of a text beyond which windows are cut from so many blocks, spread evenly over it."""
SAY_TEXT = "Give a plain text file in UTF-8."


@dataclass(frozen=True)
class Content:
    """A text and what it is called."""

    text: str
    """The text itself."""
    name: str
    """File name, `stdin`, the rows of a dataset as they are asked for, or what a built-in text is."""
    made: dict[object, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What this text was cut into last: a run cuts its texts several times."""


def read(path: str, *, offline: bool = False) -> Content:
    """That file, standard input (`-`), which may be empty, or the rows of a dataset (`datasets:NAME`).

    Raises TextError where it is no text that can be read; `offline`: where the hub would be asked.
    """
    if (asked := dataset_rows(path)) is not None:
        name, text = corpora.text_of(asked, most=LONGEST, offline=offline)
        return Content(text, name)
    return Content(_decoded(_bytes_of(path), path), _name(path))


def read_each(paths: Sequence[str], *, offline: bool = False) -> tuple[Content, ...]:
    """The texts of those files, as `read` has them, under names of their own; none where no file is named.

    Raises TextError for a file that is missing, unreadable, binary or not in UTF-8, and where one holds nothing but
    white space, or the same as another: read twice, a text is no sample of two.
    """
    each = [read(path, offline=offline) for path in paths]
    names = [content.name for content in each]
    found = tuple(
        content if names.count(content.name) == 1 else replace(content, name=path)
        for path, content in zip(paths, each, strict=True)
    )
    for content in found:
        if not content.text.strip():
            raise TextError(f"The text is empty: {content.name}.", "Give a text of at least a few hundred words.")
    named: dict[str, str] = {}
    for content in found:
        if content.text in named:
            raise TextError(f"{named[content.text]} and {content.name} are the same text.", "Name each text once.")
        named[content.text] = content.name
    return found


def sample(model: str) -> tuple[Content, ...]:
    """The built-in texts for a model of that name: for `demo` and its checkpoints passages of the book that it was
    trained on; for any other model those passages, documentation in modern English, and Python source code.
    """
    own = model == "demo" or _lies_in(model, DEMO)
    names = dict(list(SAMPLE_NAMES.items())[: 1 if own else None])
    return tuple(Content(_decoded(_bytes_of(str(path)), name), name) for path, name in names.items())


def thinned(content: Content, *, spread: bool) -> Content:
    """The text, or where it is longer than LONGEST its beginning, or BLOCKS pieces spread evenly over it."""
    length, size = len(content.text), LONGEST // BLOCKS
    if length <= LONGEST:
        return content
    if not spread:
        return replace(content, text=content.text[:LONGEST])
    starts = [index * (length - size) // (BLOCKS - 1) for index in range(BLOCKS)]
    return replace(content, text="\n".join(content.text[start : start + size] for start in starts))


def _lies_in(path: str, folder: Path) -> bool:
    """Whether the path leads into the folder; False where the current folder, from which it starts, is gone."""
    try:
        return Path(path).resolve().is_relative_to(folder)
    except (OSError, ValueError):
        return False


def _name(path: str) -> str:
    return "stdin" if path == "-" else Path(path).name


def _bytes_of(path: str) -> bytes:
    if path != "-":
        return read_bytes(with_home(path), TextError, SAY_TEXT, most=LARGEST_FILE)
    try:
        return read_stream(sys.stdin.buffer, "stdin", TextError, SAY_TEXT, most=LARGEST_FILE)
    except (OSError, AttributeError):  # opened for writing, or closed
        raise TextError("stdin can't be read.", "Send it a text, as in: attnlens inspect --text - < FILE") from None


def _decoded(content: bytes, path: str) -> str:
    if b"\0" in content:
        raise TextError(f"{path} is a binary file, not a text.", SAY_TEXT)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8: the byte at {error.start} can't be decoded.", SAY_TEXT) from None
