"""Definition of tasks: reading of their files, and splitting, batching and encoding of their examples."""

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
    from jaxtyping import Bool, Float
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

    Raises TextError with `remedy` if the file cannot be read or is empty, or if lines have a different number of
    columns or an empty column; the message gives their number and the first line numbers.
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

    Blocks are contiguous because neighbours are related: a verse continues the previous one, and randomly drawn
    windows would put two halves of a sentence into training and test. Only the two ends of a held-out block have
    neighbours in other parts. With one stretch, a part is empty only if `count` is below 3.
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
            f"A vocabulary of {vocabulary} is too small: bytes and special tokens alone are {least}.",
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
