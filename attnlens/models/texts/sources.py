"""Sources of texts: files, standard input, rows of datasets, or the built-in samples."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from attnlens.arguments import DATASETS, DatasetRows, dataset_rows
from attnlens.errors import TextError, UsageError
from attnlens.files import read_bytes, read_stream, shorten_text, with_home
from attnlens.models.loading.locate import DEMO, reachable

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Pattern of a dataset's name on the hub; a name without an owner could mean one of the library's file readers."""
SAY_NAME = "Give OWNER/NAME of an accessible dataset on the hub, or a folder of data files (jsonl, parquet, csv, txt)."


def read_rows(rows: DatasetRows, *, most: int, offline: bool = False) -> Content:
    """Read the rows of a dataset as lines of text, cut off after `most` characters.

    Rows are streamed, and no code of the dataset is run. Raises UsageError if `datasets` is not installed, TextError if
    the dataset, configuration, split or column can't be read.
    """
    try:
        import datasets
    except ImportError:
        problem = f"{DATASETS}{rows.name} needs the package datasets, which is not installed."
        raise UsageError(problem, 'Run: pip install "attnlens[datasets]", or name a text file.') from None
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2

    place = _find_dataset(rows.name, offline=offline)
    split, text = rows.split or "test", ""
    try:
        with quiet():
            parts = datasets.load_dataset(place, rows.config, streaming=True)
            if split not in parts:
                raise TextError(
                    f"The dataset {rows.name} has no split {split!r}; it has {', '.join(parts)}.",
                    f"Name one, e.g. {DATASETS}{rows.name},split={next(iter(parts))}",
                )
            for value in _values(parts[split], rows):
                text += value.rstrip("\n") + "\n"
                if len(text) >= most:
                    break
    # RuntimeError: the dataset is a script, which the library does not run
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, HTTPError) as error:
        message = shorten_text(str(error)) or type(error).__name__
        raise TextError(f"The dataset {rows.name} can't be read: {message.rstrip('.')}.", SAY_NAME) from None
    label = Path(place).name if Path(place).is_absolute() else rows.name
    options = {"config": rows.config, "split": split, "column": rows.column}
    name = ",".join([DATASETS + label, *(f"{key}={value}" for key, value in options.items() if value is not None)])
    return Content(text[:most], name if len(text) < most else f"{name} (the first {most:,} characters)")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence log messages inside the context, such as those of datasets about retries and failures."""
    previous = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(previous)


def _find_dataset(name: str, *, offline: bool) -> str:
    """Return the path of a local folder, or the name of a dataset on a reachable hub. Raises TextError for neither."""
    from huggingface_hub import constants, is_offline_mode

    folder = with_home(name)
    if folder.is_dir():
        return str(folder.resolve())
    if not HUB_NAME.fullmatch(name):
        raise TextError(f"{name} is neither a local folder nor the name of a dataset on the hub.", SAY_NAME)
    if offline or (not is_offline_mode() and not reachable(constants.ENDPOINT)):
        why, remedy = ("--offline is set", "Leave it out") if offline else ("the hub can't be reached", "Go online")
        raise TextError(f"{name} is not a local folder, and {why}.", f"{remedy}, or name a folder of data files.")
    return name


def _values(table: Iterable[Mapping[str, object]], rows: DatasetRows) -> Iterator[str]:
    """Yield the column's text row by row. Raises TextError if the column is missing or does not contain text."""
    for number, row in enumerate(table, 1):
        if rows.column not in row:
            raise TextError(
                f"The dataset {rows.name} has no column {rows.column!r}; it has {', '.join(row)}.",
                f"Name a column of texts, e.g. {DATASETS}{rows.name},column={next(iter(row))}",
            )
        if not isinstance(value := row[rows.column], str):
            content = f"a value of type {type(value).__name__}"
            problem = f"Row {number} of {rows.name} has {content} in {rows.column!r}, not a text."
            raise TextError(problem, "Name a column of texts with column=.")
        yield value


SAMPLES = Path(__file__).parent.parent / "samples"
SAMPLE_NAMES = {
    DEMO / "text.txt": "King James passages",
    SAMPLES / "documentation.txt": "attnlens documentation",
    SAMPLES / "source.txt": "attnlens source code",
}
"""Names of the built-in samples: three kinds of text, because results from one kind do not hold for others."""
LARGEST_FILE = 2**30  # maximum size of a text in bytes
LONGEST, BLOCKS = 2**23, 64
"""Characters beyond which a text is replaced by blocks that are spread evenly over it, and the number of blocks."""
SAY_TEXT = "Give a plain text file in UTF-8."


class Row(NamedTuple):
    """One sequence of a text."""

    ids: Sequence[int]
    types: Sequence[int] = ()  # token types, which number the texts of a pair; empty if it is not a pair
    text: str = ""  # name of the text


@dataclass(frozen=True)
class Content:
    """A text and its name."""

    text: str
    name: str  # file name, `stdin`, the specification of a dataset's rows, or the name of a built-in text
    cuttings: dict[object, list[Row]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cache of the last cutting, keyed by its options, since a run cuts its texts several times."""


def read(path: str, *, offline: bool = False) -> Content:
    """Read a file, standard input (`-`), which can be empty, or the rows of a dataset (`datasets:NAME`).

    Raises TextError if it is not a readable text, or if `offline` and the dataset is not a local folder.
    """
    if (rows := dataset_rows(path)) is not None:
        return read_rows(rows, most=LONGEST, offline=offline)
    return Content(_read_text(path, path), "stdin" if path == "-" else Path(path).name)


def read_each(paths: Sequence[str], *, offline: bool = False) -> tuple[Content, ...]:
    """Read texts under unique names. Raises TextError if a text is empty, or if two texts have the same content."""
    contents = [read(path, offline=offline) for path in paths]
    names, known = [content.name for content in contents], dict[str, str]()
    for index, (path, name) in enumerate(zip(paths, names, strict=True)):
        if names.count(name) > 1:
            contents[index] = replace(contents[index], name=path)
        text, name = contents[index].text, contents[index].name
        if not text.strip():
            raise TextError(f"The text is empty: {name}.", "Give a text of at least a few hundred words.")
        if text in known:
            raise TextError(f"{known[text]} and {name} have the same content.", "Give each text only once.")
        known[text] = name
    return tuple(contents)


def sample(model: str) -> tuple[Content, ...]:
    """Return the built-in texts for a model: passages of the book that `demo` was trained on and, unless the model is
    `demo` or one of its checkpoints, documentation in modern English and Python source code.
    """
    try:
        is_demo = model == "demo" or Path(model).resolve().is_relative_to(DEMO)
    except (OSError, ValueError):  # the working directory was deleted, or the name can't be a path
        is_demo = False
    names = list(SAMPLE_NAMES.items())[: 1 if is_demo else None]
    return tuple(Content(_read_text(str(path), name), name) for path, name in names)


def thin_text(content: Content, *, spread: bool) -> Content:
    """Return the text or, if it is longer than LONGEST, its beginning or (`spread`) BLOCKS pieces spread over it."""
    length, size = len(content.text), LONGEST // BLOCKS
    if length <= LONGEST:
        return content
    if not spread:
        return replace(content, text=content.text[:LONGEST])
    starts = [index * (length - size) // (BLOCKS - 1) for index in range(BLOCKS)]
    return replace(content, text="\n".join(content.text[start : start + size] for start in starts))


def _read_text(path: str, name: str) -> str:
    """Read a file, or standard input (`-`). Raises TextError, with `name`, unless it is text in UTF-8."""
    if path != "-":
        content = read_bytes(with_home(path), TextError, SAY_TEXT, most=LARGEST_FILE)
    else:
        try:
            content = read_stream(sys.stdin.buffer, "stdin", TextError, SAY_TEXT, most=LARGEST_FILE)
        except (OSError, AttributeError):  # stdin is write-only or closed
            raise TextError("stdin can't be read.", "Redirect a text to it: attnlens inspect --text - < FILE") from None
    if b"\0" in content:
        raise TextError(f"{name} is a binary file, not a text.", SAY_TEXT)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(f"{name} is not UTF-8: the byte at {error.start} can't be decoded.", SAY_TEXT) from None
