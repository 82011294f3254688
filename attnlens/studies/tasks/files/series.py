"""Reads multivariate time series in the `.ts` format of the UEA archive (Bagnall et al. 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attnlens.errors import TextError
from attnlens.studies.tasks.files.whole import read_whole

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

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
    """The cases of a `.ts` file: channels with `:` between them, numbers with `,`, and the label last.

    Raises TextError where the file can't be read, has time stamps or no labels or no cases, or where a case has missing
    values, words in place of numbers, or channels that differ in number from other cases or in steps from each other.
    """
    text, digest = read_whole(path, REMEDY)
    header, lines = _parted(text.splitlines(), path)
    _check_header(header, path)
    cases, labels = list["Tensor"](), list[str]()
    for number, line in enumerate(lines, 1):
        *channels, label = line.split(":")
        case = _case(channels, f"{path}: case {number}")
        if not label.strip():
            raise TextError(f"{path}: case {number} has no class label.", REMEDY)
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
    listed = header.get("classlabel", "").split()[1:]
    return Recording(name, digest, header.get("problemname", name), tuple(listed), cases, labels)


def _parted(lines: list[str], path: str | Path) -> tuple[dict[str, str], list[str]]:
    """What the lines with @ say, by their first word in small letters, and the lines below @data."""
    header: dict[str, str] = {}
    for number, line in enumerate(lines):
        word, _, value = line.strip().partition(" ")
        if word.lower() == "@data":
            return header, [below for below in lines[number + 1 :] if below.strip() and not below.startswith("#")]
        if word.startswith("@"):
            header[word[1:].lower()] = value.strip()
    raise TextError(f"{path} has no line @data.", REMEDY)


def _check_header(header: dict[str, str], path: str | Path) -> None:
    """Raise TextError for kinds of series that are not read."""
    if header.get("timestamps", "false").lower() == "true":
        raise TextError(f"{path} has time stamps, which are not read.", REMEDY)
    if header.get("classlabel", "true").split()[:1] == ["false"]:
        raise TextError(f"{path} has no class labels.", REMEDY)


def _case(channels: list[str], where: str) -> Float[Tensor, "steps channels"]:
    """The series of one case. Raises TextError where a channel has no numbers, or not as many as the first."""
    if not channels:
        raise TextError(f"{where} has a label and no channel, or no label.", REMEDY)
    numbers = [[_number(value.strip(), where) for value in channel.split(",")] for channel in channels]
    steps = [len(channel) for channel in numbers]
    if len(set(steps)) > 1:
        raise TextError(
            f"{where} has channels of {min(steps)} to {max(steps)} steps.", "Give all channels of a case as many steps."
        )
    return torch.tensor(numbers, dtype=torch.float64).T


def _number(written: str, where: str) -> float:
    try:
        value = float("nan" if written == "?" else written)
    except ValueError:
        raise TextError(f"{where} has {written[:40]!r} in the place of a number.", REMEDY) from None
    if not math.isfinite(value):
        raise TextError(f"{where} has a missing value ({written}).", "Leave the case out, or fill in what is missing.")
    return value
