"""Classification of multivariate time series from files in the UEA archive's format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attnlens.errors import TextError
from attnlens.studies.tasks.classification import Cases, Labelled
from attnlens.studies.tasks.files import REMEDY, Recording, read_series

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

EVERY = 5
"""Of each class of the training file every fifth case is validation."""


def series(train: str | Path, test: str | Path) -> Labelled:
    """Classification of the series in two `.ts` files, the second of which is the test set.

    Validation is every fifth case of each class of the first file, whatever the seed. Each channel has mean 0 and
    standard deviation 1 over the steps of the training part; a constant one is only centred. Raises TextError for a
    file that can't be read, one class alone, a class with a single case, a label of the test set that training does not
    have, and files of unlike channels.
    """
    first, second = read_series(train), read_series(test)
    _check_channels(first, second)
    classes = _classes(first, second)
    held = _validation(first.labels)
    fitted = [case for number, case in enumerate(first.cases) if number not in held]
    steps = torch.cat(fitted)
    spread = steps.std(0, correction=0)
    mean, scale = steps.mean(0), torch.where(spread > 0, spread, torch.ones_like(spread))

    def cases(recording: Recording, chosen: Iterable[int]) -> Cases:
        found = list(chosen)
        rows: list[Float[Tensor, "steps channels"]] = [
            ((recording.cases[number] - mean) / scale).float() for number in found
        ]
        return Cases(rows, torch.tensor([classes.index(recording.labels[number]) for number in found]))

    return Labelled(
        name=first.problem,
        classes=classes,
        cases={
            "training": cases(first, (number for number in range(len(first.cases)) if number not in held)),
            "validation": cases(first, held),
            "test": cases(second, range(len(second.cases))),
        },
        files=_digests((first, train), (second, test)),
        channels=first.cases[0].shape[1],
    )


def _digests(*read: tuple[Recording, str | Path]) -> dict[str, str]:
    """SHA-256 of each file by its name; by its path where both have one name. TextError where both are one file."""
    (first, _), (second, _) = read
    if first.sha256 == second.sha256:
        raise TextError(f"{first.name} is given to train on and to test on.", "Give two files.")
    return {found.name if first.name != second.name else str(path): found.sha256 for found, path in read}


def _check_channels(first: Recording, second: Recording) -> None:
    counts = [found.cases[0].shape[1] for found in (first, second)]
    if counts[0] != counts[1]:
        raise TextError(
            f"{first.name} has {counts[0]} channels and {second.name} has {counts[1]}.",
            "Give the training and the test file of one problem.",
        )


def _classes(first: Recording, second: Recording) -> tuple[str, ...]:
    """The labels of the training file, in the order in which its header lists them, others after these by name."""
    found = set(first.labels)
    if len(found) < 2:
        raise TextError(f"{first.name} has one label only: {first.labels[0]}.", "Give a file with two classes or more.")
    single = sorted(label for label in found if first.labels.count(label) < 2)
    if single:
        raise TextError(f"{first.name} has one case only with label {single[0]}.", "Give each class two cases or more.")
    strange = sorted(set(second.labels) - found)
    if strange:
        raise TextError(f"{second.name} has the label {strange[0]}, which {first.name} does not have.", REMEDY)
    listed = [label for label in first.classes if label in found]
    return (*listed, *sorted(found - set(listed)))


def _validation(labels: Sequence[str]) -> list[int]:
    """The last of every five cases of a class; of a class of fewer than five its last case."""
    held = []
    for label in sorted(set(labels)):
        own = [number for number, found in enumerate(labels) if found == label]
        held += own[EVERY - 1 :: EVERY] or own[-1:]
    return sorted(held)
