"""Sources of texts: files, standard input, rows of datasets, or the built-in samples."""

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

OF_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Pattern of a dataset's name on the hub; a name without an owner could mean one of the library's file readers."""
USUAL = "test"
SAY_NAME = "Name an OWNER/NAME of the hub that you may see, or a folder of data files (jsonl, parquet, csv, txt)."


def text_of(asked: DatasetRows, *, most: int, offline: bool = False) -> tuple[str, str]:
    """Return a name for the rows, and the rows as lines of text, cut off after `most` characters.

    Rows are streamed, and no code of the dataset is run. Raises UsageError if `datasets` is not installed, TextError if
    the dataset, configuration, split or column does not exist or can't be read.
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
    options = {"config": asked.config, "split": split, "column": asked.column}
    name = ",".join([DATASETS + label, *(f"{key}={value}" for key, value in options.items() if value is not None)])
    return (name if len(text) < most else f"{name} (the first {most:,} characters)"), text


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the messages of datasets and huggingface_hub about retries and failures inside the context."""
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
    """Return the path of a local folder, or the name of a dataset on a reachable hub. Raises TextError for neither."""
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
    """Convert errors of the library about a dataset to TextError inside the context."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2

    try:
        yield
    # RuntimeError: the dataset is a script, which the library does not run
    except (OSError, ValueError, RuntimeError, DatasetsError, HTTPError) as error:
        message = shortened(str(error)) or type(error).__name__
        raise TextError(f"The dataset {name} can't be read: {message.rstrip('.')}.", SAY_NAME) from None


def _values(rows: Iterable[Mapping[str, Any]], asked: DatasetRows) -> Iterator[str]:
    """Yield the column's text row by row. Raises TextError if the column is missing or does not contain text."""
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
"""Names of the built-in samples: three kinds of text, because results from one kind do not hold for others."""
LARGEST_FILE = 2**30
"""Maximum size of a text in bytes."""
LONGEST, BLOCKS = 2**23, 64
"""Characters beyond which a text is replaced by blocks that are spread evenly over it, and the number of blocks."""
SAY_TEXT = "Give a plain text file in UTF-8."


@dataclass(frozen=True)
class Content:
    """A text and its name."""

    text: str
    """The text itself."""
    name: str
    """File name, `stdin`, the specification of a dataset's rows, or the name of a built-in text."""
    made: dict[object, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cache of the last cutting, keyed by its options, since a run cuts its texts several times."""


def read(path: str, *, offline: bool = False) -> Content:
    """Read a file, standard input (`-`), which can be empty, or the rows of a dataset (`datasets:NAME`).

    Raises TextError if it is not a readable text, or if `offline` and the dataset is not a local folder.
    """
    if (rows := dataset_rows(path)) is not None:
        name, text = text_of(rows, most=LONGEST, offline=offline)
        return Content(text, name)
    return Content(_decoded(_bytes_of(path), path), "stdin" if path == "-" else Path(path).name)


def read_each(paths: Sequence[str], *, offline: bool = False) -> tuple[Content, ...]:
    """Read the texts of those paths under unique names. Raises TextError if one is empty, or two are the same text."""
    each = [read(path, offline=offline) for path in paths]
    names = [content.name for content in each]
    contents = tuple(
        content if names.count(content.name) == 1 else replace(content, name=path)
        for path, content in zip(paths, each, strict=True)
    )
    for content in contents:
        if not content.text.strip():
            raise TextError(f"The text is empty: {content.name}.", "Give a text of at least a few hundred words.")
    known: dict[str, str] = {}
    for content in contents:
        if content.text in known:
            raise TextError(f"{known[content.text]} and {content.name} are the same text.", "Name each text once.")
        known[content.text] = content.name
    return contents


def sample(model: str) -> tuple[Content, ...]:
    """Return the built-in texts for a model: passages of the book that `demo` was trained on and, unless the model is
    `demo` or one of its checkpoints, documentation in modern English and Python source code.
    """
    is_demo = model == "demo" or _lies_in(model, DEMO)
    names = dict(list(SAMPLE_NAMES.items())[: 1 if is_demo else None])
    return tuple(Content(_decoded(_bytes_of(str(path)), name), name) for path, name in names.items())


def thinned(content: Content, *, spread: bool) -> Content:
    """Return the text or, if it is longer than LONGEST, its beginning or (`spread`) BLOCKS pieces spread over it."""
    length, size = len(content.text), LONGEST // BLOCKS
    if length <= LONGEST:
        return content
    if not spread:
        return replace(content, text=content.text[:LONGEST])
    starts = [index * (length - size) // (BLOCKS - 1) for index in range(BLOCKS)]
    return replace(content, text="\n".join(content.text[start : start + size] for start in starts))


def _lies_in(path: str, folder: Path) -> bool:
    """Return whether the path resolves into the folder; False if the working directory was deleted."""
    try:
        return Path(path).resolve().is_relative_to(folder)
    except (OSError, ValueError):
        return False


def _bytes_of(path: str) -> bytes:
    if path != "-":
        return read_bytes(with_home(path), TextError, SAY_TEXT, most=LARGEST_FILE)
    try:
        return read_stream(sys.stdin.buffer, "stdin", TextError, SAY_TEXT, most=LARGEST_FILE)
    except (OSError, AttributeError):  # stdin is write-only or closed
        raise TextError("stdin can't be read.", "Send it a text, as in: attnlens inspect --text - < FILE") from None


def _decoded(content: bytes, path: str) -> str:
    if b"\0" in content:
        raise TextError(f"{path} is a binary file, not a text.", SAY_TEXT)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8: the byte at {error.start} can't be decoded.", SAY_TEXT) from None
