"""Reads pairs, labelled texts and time series from files, within bounds and with errors that name the lines."""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import torch

from attnlens.errors import TextError
from attnlens.files import read_bytes, read_stream, with_home

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

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


REMEDY = "Give a file in the .ts format of the UEA archive, with class labels and without missing values."


@dataclass(frozen=True, eq=False)
class Recording:
    """The cases of one file."""

    name: str
    """The file's name without its folder."""
    sha256: str
    """Of the file as it lies there."""
    problem: str
    """What `@problemName` says, or the file's name."""
    classes: tuple[str, ...]
    """The labels that `@classLabel` lists; empty where it lists none."""
    cases: list[Float[Tensor, "steps channels"]]
    """Of each case its series, float64, which may differ in steps."""
    labels: list[str]
    """Of each case its label."""


def read_series(path: str | Path) -> Recording:
    """Read the cases of a `.ts` file: channels with `:` between them, numbers with `,`, and the label last.

    Raises TextError where the file can't be read, has time stamps or no labels or no cases, or where a case has missing
    values, words in place of numbers, or channels that differ in number from other cases or in steps from each other.
    """
    text, digest = read_whole(path, REMEDY)
    header: dict[str, str] = {}
    lines = iter(text.splitlines())
    for line in lines:
        word, _, value = line.strip().partition(" ")
        header[word.lower()] = value.strip()
        if word.lower() == "@data":
            break
    if "@data" not in header:
        raise TextError(f"{path} has no line @data.", REMEDY)
    if header.get("@timestamps", "").lower() == "true":
        raise TextError(f"{path} has time stamps, which are not read.", REMEDY)
    labelled, *listed = header.get("@classlabel", "").split() or ["true"]
    if labelled == "false":
        raise TextError(f"{path} has no class labels.", REMEDY)
    cases, labels = list["Tensor"](), list[str]()
    for number, line in enumerate((line for line in lines if line.strip() and not line.startswith("#")), 1):
        *channels, label = line.split(":")
        if not channels or not label.strip():
            raise TextError(f"{path}: case {number} has no class label, or no channel.", REMEDY)
        try:
            values = [[float(part.strip().replace("?", "nan")) for part in channel.split(",")] for channel in channels]
            case = torch.tensor(values, dtype=torch.float64).T
        except ValueError as error:  # a word, or channels of different lengths
            raise TextError(f"{path}: case {number}: {str(error)[:80]}.", REMEDY) from None
        if not bool(case.isfinite().all()):
            raise TextError(f"{path}: case {number} has a missing value.", "Leave it out, or fill in what is missing.")
        if cases and case.shape[1] != cases[0].shape[1]:
            raise TextError(
                f"{path}: case {number} has {case.shape[1]} channels, and those before it have {cases[0].shape[1]}.",
                "Give every case the same channels.",
            )
        cases.append(case)
        labels.append(label.strip())
    if not cases:
        raise TextError(f"{path} has no case below @data.", REMEDY)
    name = Path(path).name
    return Recording(name, digest, header.get("@problemname", name), tuple(listed), cases, labels)
