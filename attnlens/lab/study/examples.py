"""A task's examples: split into training, validation and test, encoded as byte pairs, and batched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from attnlens.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

TaskForm: TypeAlias = Literal["language", "translation", "classification"]
"""Kind of task: predict the next token, translate a sentence, or classify a sequence."""
Split: TypeAlias = Literal["validation", "test"]
"""Held-out part: validation for choosing settings, test for one evaluation at the end."""
PARTS = ("training", "validation", "test")
NOTHING = -100  # target of positions without a prediction; torch's cross-entropy ignores this value
PADDING, BEGIN, END = 0, 1, 2  # first ids of every vocabulary of sentences
SPECIALS = ("<pad>", "<s>", "</s>")  # names of PADDING, BEGIN and END


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


class Cases(NamedTuple):
    """Examples of one part of a task, neither batched nor padded; a tensor has one row per example."""

    inputs: Sequence[Tensor] | Tensor  # of each example: ids (tokens,), int64, or a series (steps, channels), float32
    targets: Sequence[Tensor] | Tensor  # of each example: ids to predict (tokens,), or a class number ()


@dataclass(frozen=True, eq=False, kw_only=True)
class StudyTask:
    """Examples for training (`training`, a function of the seed only) and for evaluation (`held_out`)."""

    name: str  # names of its texts or files
    form: TaskForm
    cases: Mapping[str, Cases]  # of each part; sentences are without BEGIN and END
    length: int  # largest number of tokens of a sequence; for translation, of a side with END
    vocabulary: int  # number of ids; 0 for a series
    classes: int = 0  # number of classes; 0 if ids are predicted
    channels: int = 0  # numbers per step of a series; 0 for ids
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of each file by name; empty for built-in data
    tokenizer: Tokenizer | None = None  # encoding of texts, trained on the training part only; None without one
    left_out: Mapping[str, int] = field(default_factory=dict)  # examples that differ from the file, by part or reason
    repeated: int = 0  # number of examples removed from training because they are also held out

    def training(self, size: int, seed: int) -> Iterator[Examples]:
        """Yield shuffled batches without end; examples of similar length share a batch."""
        return (self.batch("training", chosen) for chosen in endless(self.lengths("training"), size, seed))

    def held_out(self, split: Split, size: int) -> Sequence[Examples]:
        """Return the examples of a part once, shortest first, in batches of `size`; the last batch can be smaller."""
        lengths = self.lengths(split)
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        return [self.batch(split, order[start : start + size]) for start in range(0, len(order), size)]

    def lengths(self, part: str) -> list[int]:
        """Return the number of input and target tokens of each example of a part; all windows of a text have one."""
        inputs, targets = self.cases[part]
        if self.form == "language":
            return [2 * self.length] * len(inputs)
        return [len(source) + target.numel() for source, target in zip(inputs, targets, strict=True)]

    def batch(self, part: str, chosen: Sequence[int]) -> Examples:
        """Build a batch of the chosen examples of a part."""
        inputs, targets = ([side[number] for number in chosen] for side in self.cases[part])
        if self.form == "translation":
            return pair_sentences(inputs, targets)
        return Examples(*pad(inputs, PADDING), torch.stack(targets))

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text without special ones; without a tokenizer, to their numbers."""
        if self.tokenizer is None:
            return " ".join(str(number) for number in ids if number >= len(SPECIALS))
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))  # bytes that are not UTF-8: U+FFFD


def pair_sentences(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Examples:
    """Build a batch: encoder input source + END, decoder input BEGIN + target, decoder output target + END."""
    end, begin = torch.tensor([END]), torch.tensor([BEGIN])
    inputs, mask = pad([torch.cat((source, end)) for source in sources], PADDING)
    decoder_inputs, _ = pad([torch.cat((begin, target)) for target in targets], PADDING)
    outputs, _ = pad([torch.cat((target, end)) for target in targets], NOTHING)
    return Examples(inputs, mask, outputs, decoder_inputs)


def pad(rows: Sequence[Tensor], value: float) -> tuple[Tensor, Bool[Tensor, "batch tokens"] | None]:
    """Pad the rows on the right with `value` into one tensor; return it with its `Examples.mask`."""
    sizes = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(sizes.max())) < sizes[:, None]
    batch = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
    return batch, None if bool(mask.all()) else mask


POOL = 32  # maximum number of batches per pool of a shuffled epoch; a pool is sorted by length, which saves padding
POOLS = 4  # minimum number of pools per epoch; sorting a whole epoch would batch the same examples together each time


def endless(lengths: Sequence[int], size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of numbers of examples of the given lengths without end, in a new order each epoch.

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
                yield parts[number]


STRETCHES = 10
"""Stretches into which a long text is cut. Each has a block of every part: the end of a book is not representative."""
SHARE = 0.05  # share of validation examples, and of test examples


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


def numbers(parts: Mapping[str, Iterable[range]]) -> dict[str, list[int]]:
    """List the numbers in the blocks of each part."""
    return {part: list(chain.from_iterable(each)) for part, each in parts.items()}


def space_evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, as evenly spaced as possible."""
    if count <= most:
        return list(range(count))
    return [int((number + 0.5) * count / most) for number in range(most)]


BYTES = 256


def train_byte_pairs(texts: Iterable[str], vocabulary: int, specials: Sequence[str] = ()) -> Tokenizer:
    """Train byte pairs with at most `vocabulary` ids on the texts; deterministic. `specials` have the first ids.

    Every byte has an id, so any text can be encoded without loss (Radford et al. 2019, 2.2). Raises UsageError if
    `vocabulary` is too small for all bytes and special tokens.
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
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    """Encode texts as ids, without special tokens."""
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
