"""Classification of sequences: labelled texts as byte pairs, or time series in the UEA archive's format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from attnlens.errors import TextError
from attnlens.lab.study.tasks.task import (
    PARTS,
    REMEDY,
    BytePairs,
    Examples,
    Recording,
    Split,
    blocks,
    byte_pairs,
    endless,
    in_order,
    numbers,
    pad,
    read_rows,
    read_series,
)

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Cases:
    """Sequences of one part with their classes."""

    rows: Sequence[Tensor]  # ids (tokens,), int64, or a series (steps, channels), float32
    labels: Int[Tensor, " cases"]

    def batch(self, chosen: Sequence[int]) -> Examples:
        """Build a batch of the chosen cases, padded with zeros."""
        inputs, mask = pad([self.rows[number] for number in chosen], 0)
        return Examples(inputs, mask, self.labels[list(chosen)])


@dataclass(frozen=True, eq=False)
class Labelled:
    """Sequences to classify."""

    name: str  # name of the data
    classes: tuple[str, ...]  # label of each class number
    cases: Mapping[str, Cases]  # cases of each part
    files: Mapping[str, str]  # SHA-256 of each file by name; empty for built-in data
    vocabulary: int = 0  # number of ids; 0 for a series
    channels: int = 0  # numbers per step; 0 for ids
    pairs: BytePairs | None = None  # encoding of texts, trained on the training part only; None for a series
    left_out: Mapping[str, int] = field(default_factory=dict)  # number of cases that differ from the file, by reason
    form: ClassVar[Literal["classification"]] = "classification"
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    @property
    def outputs(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def length(self) -> int:
        """Largest number of tokens or steps of a sequence."""
        return max(len(row) for part in self.cases.values() for row in part.rows)

    def training(self, size: int, seed: int) -> Iterator[Examples]:
        """Yield shuffled batches without end; cases of similar length share a batch."""
        part = self.cases["training"]
        return endless([len(row) for row in part.rows], size, seed, part.batch)

    def held_out(self, split: Split, size: int) -> Sequence[Examples]:
        """Return the cases of a part in batches, shortest first."""
        part = self.cases[split]
        return in_order([len(row) for row in part.rows], size, part.batch)


HEADER = ("text", "label")  # columns of a header line
SHARES = (0.1, 0.1)  # validation and test shares of each class
TEXT_REMEDY = "Give a UTF-8 file with one text and its label per line, separated by a tab."


def load_labelled(path: str | Path, *, length: int = 128, vocabulary: int = 1024) -> Labelled:
    """Read a classification task from lines `text TAB label`, gzipped or not; a header `text TAB label` is skipped.

    A repeated text is left out, whatever its label, so that no text is in two parts. The cases of each class are split
    in file order into contiguous blocks: 80 % training, 10 % validation, 10 % test. Texts longer than `length` tokens
    are cut. Raises TextError for lines with empty or missing columns, a single label, and a label with fewer than
    three texts; UsageError for a vocabulary below 256.
    """
    lines = read_rows(path, (2,), TEXT_REMEDY)
    rows = lines.rows[1:] if tuple(word.lower() for word in lines.rows[0]) == HEADER else lines.rows
    label_of: dict[str, str] = {}
    for text, label in rows:
        label_of.setdefault(text, label)
    texts = list(label_of.items())
    classes = sorted(set(label_of.values()))
    parts = _split_by_class(str(path), texts, classes)
    code = byte_pairs((texts[number][0] for number in parts["training"]), vocabulary)
    ids = code.ids([text for text, _ in texts])
    cases = {
        part: Cases(
            [torch.tensor(ids[number][:length], dtype=torch.int64) for number in chosen],
            torch.tensor([classes.index(texts[number][1]) for number in chosen]),
        )
        for part, chosen in parts.items()
    }
    return Labelled(
        name=lines.name,
        classes=tuple(classes),
        cases=cases,
        files={lines.name: lines.sha256},
        vocabulary=code.size,
        pairs=code,
        left_out={"repeated": len(rows) - len(texts), "cut": sum(len(row) > length for row in ids)},
    )


def _split_by_class(path: str, texts: list[tuple[str, str]], classes: list[str]) -> dict[str, list[int]]:
    """Split the texts into parts; return the text numbers of each part in file order."""
    if len(classes) < 2:
        only = f"a single label: {classes[0]}" if classes else "no text below its header"
        raise TextError(f"{path} has {only}.", "Give texts with at least two labels.")
    parts: dict[str, list[int]] = {part: [] for part in PARTS}
    for name in classes:
        of_class = [number for number, (_, label) in enumerate(texts) if label == name]
        if len(of_class) < len(PARTS):
            raise TextError(
                f"{path} has {len(of_class)} text(s) with label {name}, too few for training and evaluation.",
                "Give at least ten texts per label.",
            )
        for part, chosen in numbers(blocks(len(of_class), stretches=1, shares=SHARES)).items():
            parts[part] += [of_class[number] for number in chosen]
    return {part: sorted(chosen) for part, chosen in parts.items()}


EVERY = 5  # every fifth case of each class of the training file is used for validation


def series(train: str | Path, test: str | Path) -> Labelled:
    """Read a classification task from two `.ts` files of series; the second is the test set.

    Validation is every fifth case of each class of the first file, whatever the seed. Each channel is scaled to mean 0
    and standard deviation 1 over the steps of the training part; a constant channel is only centred. Raises TextError
    for a file that cannot be read, a single class, a class with one case, a test label that is missing in training, and
    files with different numbers of channels.
    """
    first, second = read_series(train), read_series(test)
    counts = [recording.cases[0].shape[1] for recording in (first, second)]
    if counts[0] != counts[1]:
        raise TextError(
            f"{first.name} has {counts[0]} channels and {second.name} has {counts[1]}.",
            "Give the training and the test file of the same problem.",
        )
    classes = _list_labels(first, second)
    if first.sha256 == second.sha256:
        raise TextError(f"{first.name} is used for both training and testing.", "Give two files.")
    validation: list[int] = []
    for label in classes:
        of_label = [number for number, other in enumerate(first.labels) if other == label]
        validation += of_label[EVERY - 1 :: EVERY] or of_label[-1:]  # the last case if there are fewer than EVERY
    training = [number for number in range(len(first.cases)) if number not in validation]
    steps = torch.cat([first.cases[number] for number in training])
    deviation = steps.std(0, correction=0)
    mean, scale = steps.mean(0), torch.where(deviation > 0, deviation, torch.ones_like(deviation))

    def cases(recording: Recording, chosen: Sequence[int]) -> Cases:
        rows = [((recording.cases[number] - mean) / scale).float() for number in chosen]
        return Cases(rows, torch.tensor([classes.index(recording.labels[number]) for number in chosen]))

    names = (first.name, second.name) if first.name != second.name else (str(train), str(test))
    return Labelled(
        name=first.problem,
        classes=classes,
        cases={
            "training": cases(first, training),
            "validation": cases(first, sorted(validation)),
            "test": cases(second, range(len(second.cases))),
        },
        files=dict(zip(names, (first.sha256, second.sha256), strict=True)),
        channels=first.cases[0].shape[1],
    )


def _list_labels(first: Recording, second: Recording) -> tuple[str, ...]:
    """Return the training labels: first those of the header in its order, then the others sorted by name."""
    labels = set(first.labels)
    if len(labels) < 2:
        raise TextError(f"{first.name} has a single label: {first.labels[0]}.", "Give at least two classes.")
    single = sorted(label for label in labels if first.labels.count(label) < 2)
    if single:
        raise TextError(f"{first.name} has a single case with label {single[0]}.", "Give at least two cases per class.")
    unknown = sorted(set(second.labels) - labels)
    if unknown:
        raise TextError(f"{second.name} has the label {unknown[0]}, which is missing in {first.name}.", REMEDY)
    listed = [label for label in first.classes if label in labels]
    return (*listed, *sorted(labels - set(listed)))
