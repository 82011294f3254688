"""Where the texts come from: files, standard input, rows of datasets, or the built-in samples."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging import CRITICAL
from pathlib import Path
from typing import Any

from attnlens.arguments import DATASETS, DatasetRows, dataset_rows
from attnlens.errors import TextError, UsageError
from attnlens.files import read_bytes, read_stream, shortened, with_home
from attnlens.models.loading.hub import reachable
from attnlens.models.texts import sources as corpora

OF_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""What the name of a dataset of the hub looks like; one without an owner might be one of the library's readers."""
USUAL = "test"
SAY_NAME = "Name an OWNER/NAME of the hub that you may see, or a folder of data files (jsonl, parquet, csv, txt)."


def text_of(asked: DatasetRows, *, most: int, offline: bool = False) -> tuple[str, str]:
    """What the rows are called, and the rows themselves, a line each: as many as make `most` characters.

    Rows are streamed, and no code of the dataset is run. Raises UsageError where the library is not installed,
    TextError where there is no such dataset, configuration, split or column, or it can't be had.
    """
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"{DATASETS}{asked.name} is read by datasets, which is not installed.",
            'Run: pip install "attnlens[datasets]", or name a text file.',
        ) from None
    place = _place(asked.name, offline=offline)
    with quiet(), _refusing(asked.name):
        parts = datasets.load_dataset(place, asked.config, streaming=True)
        if (split := asked.split or USUAL) not in parts:
            raise TextError(
                f"The dataset {asked.name} has no split {split!r}; it has {', '.join(parts)}.",
                f"Name one, as in {DATASETS}{asked.name},split={next(iter(parts))}",
            )
        text = _joined(_values(parts[split], asked), most)
    label = Path(place).name if Path(place).is_absolute() else asked.name
    told = {"config": asked.config, "split": split, "column": asked.column}
    name = ",".join([DATASETS + label, *(f"{key}={value}" for key, value in told.items() if value is not None)])
    return (name if len(text) < most else f"{name} (the first {most:,} characters)"), text


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, neither datasets nor the hub's client tells of each try and failure."""
    from datasets.utils import logging
    from huggingface_hub.utils import logging as of_hub

    said_before = {module: module.get_verbosity() for module in (logging, of_hub)}
    for module in said_before:
        module.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        for module, level in said_before.items():
            module.set_verbosity(level)


def _place(name: str, *, offline: bool) -> str:
    """The path of a folder, or a name of the hub that can be asked. Raises TextError where it is neither."""
    from huggingface_hub import constants, is_offline_mode

    folder = with_home(name)
    if folder.is_dir():
        return str(folder.resolve())
    if not OF_HUB.fullmatch(name):
        raise TextError(f"{name} is neither a folder here nor a name of the hub.", SAY_NAME)
    if offline or (not is_offline_mode() and not reachable(constants.ENDPOINT)):
        why, do = ("--offline is given", "Leave it out") if offline else ("the hub can't be reached", "Go online")
        raise TextError(f"{name} is no folder here, and {why}.", f"{do}, or name a folder of data files.")
    return name


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Inside, what the library says of a dataset becomes a TextError."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of whichever library the hub's is

    try:
        yield
    # RuntimeError: of a dataset that is a script, which the library does not run
    except (OSError, ValueError, RuntimeError, DatasetsError, HTTPError) as error:
        said = shortened(str(error)) or type(error).__name__
        raise TextError(f"The dataset {name} can't be read: {said.rstrip('.')}.", SAY_NAME) from None


def _values(rows: Iterable[Mapping[str, Any]], asked: DatasetRows) -> Iterator[str]:
    """The column's text, row by row. Raises TextError where there is no such column, or no text in it."""
    for number, row in enumerate(rows, 1):
        if asked.column not in row:
            raise TextError(
                f"The dataset {asked.name} has no column {asked.column!r}; it has {', '.join(row)}.",
                f"Name one that holds text, as in {DATASETS}{asked.name},column={next(iter(row))}",
            )
        if not isinstance(value := row[asked.column], str):
            raise TextError(
                f"Row {number} of {asked.name} has no text in {asked.column!r}, but {type(value).__name__}.",
                "Name a column that holds text, by column=.",
            )
        yield value


def _joined(values: Iterable[str], most: int) -> str:
    lines, length = [], 0
    for value in values:
        lines.append(value.rstrip("\n") + "\n")
        length += len(lines[-1])
        if length >= most:
            break
    return "".join(lines)[:most]


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
    return Content(_decoded(_bytes_of(path), path), "stdin" if path == "-" else Path(path).name)


def read_each(paths: Sequence[str], *, offline: bool = False) -> tuple[Content, ...]:
    """The texts of those files, as `read` has them, under names of their own; none where no file is named."""
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
