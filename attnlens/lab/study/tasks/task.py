"""Read, split, batch and encode the examples of tasks; and classification of labelled texts or series."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Literal, TypeAlias, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from attnlens.errors import TextError, UsageError
from attnlens.files import read_bytes, read_stream, with_home

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


LARGEST_CONTENT = 2**30  # bytes of the largest file accepted, both packed and unpacked


def read_whole(path: str | Path, remedy: str) -> tuple[str, str]:
    """Read a text file, gunzipped if its name ends in `.gz`; return the text and the SHA-256 of the file's bytes.

    Raises TextError with `remedy` for a file that is missing, too large, broken, binary or not UTF-8.
    """
    location = with_home(str(path))
    content = read_bytes(location, TextError, remedy, most=LARGEST_CONTENT)
    digest = sha256(content).hexdigest()
    if location.suffix == ".gz":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = read_stream(cast(BinaryIO, file), str(path), TextError, remedy, most=LARGEST_CONTENT)
        except (OSError, EOFError, zlib.error) as error:
            raise TextError(f"{path} can't be unpacked: {error}.", remedy) from None
    if b"\0" in content:
        raise TextError(f"{path} is a binary file, not a text.", remedy)
    try:
        return content.decode("utf-8-sig"), digest
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8: the byte at {error.start} can't be decoded.", remedy) from None


@dataclass(frozen=True, eq=False)
class TabbedLines:
    """Lines of a file, split into columns."""

    name: str  # file name without its folder
    sha256: str  # SHA-256 of the file's bytes
    rows: list[tuple[str, ...]]  # columns of each line, stripped; equally many, none of them empty


def read_rows(path: str | Path, columns: tuple[int, ...], remedy: str) -> TabbedLines:
    """Read the columns of each line of a file; the first line sets their number, which must be in `columns`.

    Raises TextError with `remedy` if the file is unreadable or empty, or if a column is missing, empty or one too many.
    """
    text, digest = read_whole(path, remedy)
    # not splitlines, which would also split at characters that can occur inside sentences
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if not text.strip():
        raise TextError(f"{path} is empty.", remedy)
    rows = [tuple(column.strip() for column in line.split("\t")) for line in lines]
    width = len(rows[0]) if len(rows[0]) in columns else columns[0]
    bad = [number for number, row in enumerate(rows, 1) if len(row) != width or not all(row)]
    if bad:
        first = ", ".join(map(str, bad[:5])) + ("…" if len(bad) > 5 else "")
        count = f"{len(bad)} lines (numbers {first})" if len(bad) > 1 else f"line {first}"
        raise TextError(f"{path}: {count}: expected {width} non-empty columns separated by tabs.", remedy)
    return TabbedLines(Path(path).name, digest, rows)


TaskForm: TypeAlias = Literal["language", "translation", "classification"]
"""Kind of task: predict the next token, translate a sentence, or classify a sequence."""
Split: TypeAlias = Literal["validation", "test"]
"""Held-out part: validation for choosing settings, test for one evaluation at the end."""
NOTHING = -100
"""Target of positions without a prediction; torch's cross-entropy ignores this value."""


@dataclass(frozen=True, eq=False)
class Examples:
    """One batch of model inputs and targets."""

    inputs: Tensor  # ids (batch, tokens), int64; or a series (batch, steps, channels), float32
    mask: Tensor | None  # (batch, tokens), bool, False for padding, which is on the right; None: no padding
    targets: Tensor  # ids to predict (batch, tokens), NOTHING at positions without a target; or class numbers (batch,)
    decoder_inputs: Tensor | None = None  # ids (batch, target tokens), starting with BEGIN; None without a decoder

    def single(self, row: int) -> Examples:
        """Return one example without its padding, as a batch of one."""
        rows = slice(row, row + 1)
        inputs = self.inputs[rows, : None if self.mask is None else int(self.mask[row].sum())]
        if self.decoder_inputs is None:
            return Examples(inputs, None, self.targets[rows])
        size = int((self.targets[row] != NOTHING).sum())
        return Examples(inputs, None, self.targets[rows, :size], self.decoder_inputs[rows, :size])

    def to(self, device: torch.device | str) -> Examples:
        """Copy the batch to a device."""
        mask, decoder_inputs = (None if part is None else part.to(device) for part in (self.mask, self.decoder_inputs))
        return Examples(self.inputs.to(device), mask, self.targets.to(device), decoder_inputs)


STRETCHES = 10
"""Stretches into which a long text is cut. Each has a block of every part: the end of a book is not representative."""
SHARE = 0.05
"""Share of validation examples, and of test examples."""
PARTS = ("training", "validation", "test")


def blocks(count: int, *, stretches: int = STRETCHES, share: float = SHARE) -> dict[str, list[range]]:
    """Split the numbers below `count` into blocks per part; every stretch begins with training and ends with test.

    Blocks are contiguous because neighbours are related: a verse continues the previous one, and randomly drawn windows
    would put two halves of a sentence into training and test.
    """
    parts: dict[str, list[range]] = {part: [] for part in PARTS}
    for number in range(stretches):
        start, stop = number * count // stretches, (number + 1) * count // stretches
        size = max(1, round((stop - start) * share))
        test = max(start, stop - size)
        edges = start, max(start, test - size), test, stop
        for part, (first, last) in zip(PARTS, pairwise(edges), strict=True):
            parts[part] += [range(first, last)] if first < last else []
    return parts


def numbers(parts: Mapping[str, list[range]]) -> dict[str, list[int]]:
    """List the numbers in the blocks of each part."""
    return {part: [number for block in each for number in block] for part, each in parts.items()}


POOL = 32
"""Maximum number of batches per pool of a shuffled epoch; a pool is sorted by length, which saves padding."""
POOLS = 4
"""Minimum number of pools per epoch; sorting a whole epoch would batch the same examples together each time."""


def endless(
    lengths: Sequence[int], size: int, seed: int, batch: Callable[[Sequence[int]], Examples]
) -> Iterator[Examples]:
    """Yield batches of examples of the given lengths without end, in a new order each epoch; depends only on `seed`.

    Examples beyond the last full batch are dropped before sorting by length, so different ones in each epoch.
    """
    draws = torch.Generator().manual_seed(seed)
    while True:
        order: list[int] = torch.randperm(len(lengths), generator=draws).tolist()
        whole = order[: max(len(order) // size * size, min(size, len(order)))]
        most = size * min(max(len(whole) // size // POOLS, 1), POOL)
        for start in range(0, len(whole), most):
            pool = sorted(whole[start : start + most], key=lengths.__getitem__)
            parts = [pool[at : at + size] for at in range(0, len(pool), size)]
            for number in torch.randperm(len(parts), generator=draws).tolist():
                yield batch(parts[number])


def pad(rows: Sequence[Tensor], value: float) -> tuple[Tensor, Bool[Tensor, "batch tokens"] | None]:
    """Pad the rows on the right with `value` into one tensor; return it with its `Examples.mask`."""
    sizes = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(sizes.max())) < sizes[:, None]
    batch = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
    return batch, None if bool(mask.all()) else mask


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """Batches of a task: a subclass gives the length of each example of a part, and builds batches of them."""

    metric: ClassVar[Literal["perplexity", "BLEU", "accuracy"]]  # key of `score` by which models are compared
    higher_is_better: ClassVar[bool] = True
    channels: int = 0  # numbers per step of a series; 0 for ids
    pairs: BytePairs | None = None  # encoding of texts, trained on the training part only; None without one
    left_out: Mapping[str, int] = field(default_factory=dict)  # examples that differ from the file, by part or reason
    repeated: int = 0  # number of examples removed from training because they are also held out

    def training(self, size: int, seed: int) -> Iterator[Examples]:
        """Yield shuffled batches without end; examples of similar length share a batch."""
        return endless(self.lengths("training"), size, seed, partial(self.batch, "training"))

    def held_out(self, split: Split, size: int) -> Sequence[Examples]:
        """Return the examples of a part once, shortest first, in batches of `size`; the last batch can be smaller."""
        lengths = self.lengths(split)
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        return [self.batch(split, order[start : start + size]) for start in range(0, len(order), size)]

    def lengths(self, part: str) -> Sequence[int]:
        """Return the number of tokens or steps of each example of a part."""
        raise NotImplementedError

    def batch(self, part: str, chosen: Sequence[int]) -> Examples:
        """Build a batch of the chosen examples of a part."""
        raise NotImplementedError


def space_evenly(count: int, most: int | None) -> list[int]:
    """Return at most `most` of the numbers below `count`, as evenly spaced as possible; all if None."""
    if most is None or count <= most:
        return list(range(count))
    return [int((number + 0.5) * count / most) for number in range(most)]


PADDING, BEGIN, END = 0, 1, 2
"""First ids of every vocabulary of sentences."""
SPECIALS = ("<pad>", "<s>", "</s>")
"""Names of PADDING, BEGIN and END."""


def pair_sentences(pairs: Sequence[tuple[Tensor, Tensor]]) -> Examples:
    """Build a batch: encoder input source + END, decoder input BEGIN + target, decoder output target + END."""
    end, begin = torch.tensor([END]), torch.tensor([BEGIN])
    inputs, mask = pad([torch.cat((source, end)) for source, _ in pairs], PADDING)
    decoder_inputs, _ = pad([torch.cat((begin, target)) for _, target in pairs], PADDING)
    outputs, _ = pad([torch.cat((target, end)) for _, target in pairs], NOTHING)
    return Examples(inputs, mask, outputs, decoder_inputs)


BYTES = 256


@dataclass(frozen=True, eq=False)
class BytePairs:
    """Lossless encoding of text as ids; every byte has an id, so any text can be encoded (Radford et al. 2019, 2.2)."""

    tokenizer: Tokenizer  # special tokens, if any, have the first ids
    specials: int  # number of special tokens, which encode no text

    @property
    def size(self) -> int:
        """Number of ids: as requested, or fewer if the text has no more pairs to merge."""
        return int(self.tokenizer.get_vocab_size())

    @property
    def widths(self) -> Float[Tensor, " vocabulary"]:
        """Number of bytes each id encodes; 0 for special tokens."""
        names = [self.tokenizer.id_to_token(number) or "" for number in range(self.size)]
        # a byte-level token name has one character per byte
        return torch.tensor([0 if number < self.specials else len(name) for number, name in enumerate(names)]).float()

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts as ids, without special tokens."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def text(self, ids: Sequence[int]) -> str:
        """Decode ids, skipping special tokens; bytes that are not UTF-8 become U+FFFD."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def byte_pairs(texts: Iterable[str], vocabulary: int, specials: Sequence[str] = ()) -> BytePairs:
    """Train byte pairs with at most `vocabulary` ids on the texts; deterministic.

    Raises UsageError if `vocabulary` is too small for all bytes and special tokens.
    """
    least = BYTES + len(specials)
    if vocabulary < least:
        raise UsageError(
            f"A vocabulary of {vocabulary} is too small: bytes and special tokens alone take {least} entries.",
            f"Choose at least {least}.",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return BytePairs(tokenizer, len(specials))


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
CLASS_SHARE = 0.1  # share of validation cases of each class, and of test cases
TEXT_REMEDY = "Give a UTF-8 file with one text and its label per line, separated by a tab."


def load_labelled(path: str | Path, *, length: int = 128, vocabulary: int = 1024) -> Labelled:
    """Read a classification task from lines `text TAB label`, gzipped or not; a header `text TAB label` is skipped.

    Repeated texts are omitted even if their labels differ, so no text is in two parts; texts longer than `length`
    tokens are cut. The cases of each class are split in file order into 80 % training, 10 % validation and 10 % test.
    Raises TextError for data that cannot be used, UsageError for a vocabulary below 256.
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
        for part, chosen in numbers(blocks(len(of_class), stretches=1, share=CLASS_SHARE)).items():
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

    Raises TextError for time stamps, missing labels or values, and channels of unequal length or number.
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
        raise TextError(f"{path} lacks an @data line.", REMEDY)
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
    for files that cannot be read or do not belong together.
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
