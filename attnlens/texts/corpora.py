"""Reads rows of a dataset, of the hub or of a folder, as one text, and only as far as a text is used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import Any

from attnlens.arguments import DATASETS, DatasetRows
from attnlens.errors import TextError, UsageError
from attnlens.files import shortened, with_home
from attnlens.models.hub import reachable

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
        split = _split(asked, list(parts))
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


def _split(asked: DatasetRows, there: list[str]) -> str:
    if (wanted := asked.split or USUAL) not in there:
        raise TextError(
            f"The dataset {asked.name} has no split {wanted!r}; it has {', '.join(there)}.",
            f"Name one, as in {DATASETS}{asked.name},split={there[0]}",
        )
    return wanted


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
