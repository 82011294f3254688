"""Reads pairs of sentences or labelled texts: lines of columns with tabs between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attnlens.errors import TextError
from attnlens.studies.tasks.files.whole import line_numbers, read_whole


@dataclass(frozen=True, eq=False)
class TabbedLines:
    """The lines of a file, each as its columns."""

    name: str
    """The file's name without its folder."""
    sha256: str
    """Of the file as it lies there."""
    rows: list[tuple[str, ...]]
    """Of each line its columns, all of them as many and none empty, white space around them left out."""


def read_rows(path: str | Path, columns: tuple[int, ...], remedy: str) -> TabbedLines:
    """The columns of each line of a file, whose first line says how many there are: one of the numbers in `columns`.

    Raises TextError, which says `remedy`, where the file can't be read, is empty, or has lines with another number of
    columns or an empty one: how many, and the numbers of the first.
    """
    text, digest = read_whole(path, remedy)
    # no splitlines: it would cut at characters that sentences may hold
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if not text.strip():
        raise TextError(f"{path} is empty.", remedy)
    rows = [tuple(column.strip() for column in line.split("\t")) for line in lines]
    asked = len(rows[0]) if len(rows[0]) in columns else columns[0]
    bad = [number for number, row in enumerate(rows, 1) if len(row) != asked or not all(row)]
    if bad:
        raise TextError(
            f"{path}: {line_numbers(bad)} without {asked} columns with a tab between each, none of them empty.", remedy
        )
    return TabbedLines(Path(path).name, digest, rows)
