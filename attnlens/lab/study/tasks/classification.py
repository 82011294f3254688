"""Classification of sequences: labelled texts as byte pairs, or time series in the UEA archive's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from attnlens.errors import TextError
from attnlens.lab.study.tasks.task import PARTS, Examples, Task, blocks, byte_pairs, numbers, pad, read_rows, read_whole

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Cases:
    """Sequences of one part with their classes."""

    rows: Sequence[Tensor]  # ids (tokens,), int64, or a series (steps, channels), float32
    labels: Int[Tensor, " cases"]


@dataclass(frozen=True, eq=False)
class Labelled(Task):
    """Sequences to classify."""

    name: str  # name of the data
    classes: tuple[str, ...]  # label of each class number
    cases: Mapping[str, Cases]  # cases of each part
    files: Mapping[str, str]  # SHA-256 of each file by name; empty for built-in data
    vocabulary: int = 0  # number of ids; 0 for a series
    form: ClassVar[Literal["classification"]] = "classification"
    metric: ClassVar[Literal["accuracy"]] = "accuracy"

    @property
    def outputs(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def length(self) -> int:
        """Largest number of tokens or steps of a sequence."""
        return max(max(self.lengths(part)) for part in self.cases)

    def lengths(self, part: str) -> Sequence[int]:
        """Return the number of tokens or steps of each case of a part."""
        return [len(row) for row in self.cases[part].rows]

    def batch(self, part: str, chosen: Sequence[int]) -> Examples:
        """Build a batch of the chosen cases, padded with zeros."""
        cases = self.cases[part]
        inputs, mask = pad([cases.rows[number] for number in chosen], 0)
        return Examples(inputs, mask, cases.labels[list(chosen)])


HEADER = ("text", "label")  # columns of a header line
SHARE = 0.1  # share of validation cases of each class, and of test cases
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
        for part, chosen in numbers(blocks(len(of_class), stretches=1, share=SHARE)).items():
            parts[part] += [of_class[number] for number in chosen]
    return {part: sorted(chosen) for part, chosen in parts.items()}


REMEDY = "Give a file in the .ts format of the UEA archive, with class labels and without missing values."


@dataclass(frozen=True, eq=False)
class Recording:
    """Cases of one file."""

    name: str  # file name without its folder
    sha256: str  # of the file's bytes
    problem: str  # value of `@problemName`, or the file's name
    classes: tuple[str, ...]  # labels listed by `@classLabel`; empty if it lists none
    cases: list[Float[Tensor, "steps channels"]]  # one series per case, float64; numbers of steps can differ
    labels: list[str]  # label of each case


def read_series(path: str | Path) -> Recording:
    """Read the cases of a `.ts` file: channels separated by `:`, numbers by `,`, and the label last.

    Raises TextError if the file cannot be read or has time stamps, no labels or no cases. It is also raised if a case
    has missing or non-numeric values, channels of unequal length, or another number of channels than other cases.
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
        raise TextError(f"{path} lacks a line @data.", REMEDY)
    if header.get("@timestamps", "").lower() == "true":
        raise TextError(f"{path} has time stamps, which are not supported.", REMEDY)
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
        except ValueError as error:  # a word, or channels of unequal length
            raise TextError(f"{path}: case {number}: {str(error)[:80]}.", REMEDY) from None
        if not bool(case.isfinite().all()):
            raise TextError(f"{path}: case {number} has a missing value.", "Remove the case, or fill in the value.")
        if cases and case.shape[1] != cases[0].shape[1]:
            raise TextError(
                f"{path}: case {number} has {case.shape[1]} channels, but the cases before it have "
                f"{cases[0].shape[1]}.",
                "Give all cases the same number of channels.",
            )
        cases.append(case)
        labels.append(label.strip())
    if not cases:
        raise TextError(f"{path} has no cases below @data.", REMEDY)
    name = Path(path).name
    return Recording(name, digest, header.get("@problemname", name), tuple(listed), cases, labels)


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
