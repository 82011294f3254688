"""What a task is, how its examples are split, batched and encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from attnlens.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

TaskForm: TypeAlias = Literal["language", "translation", "classification"]
"""What a model is to do: predict the next token, write a sentence for a sentence, or name a class."""
Split: TypeAlias = Literal["validation", "test"]
"""What a model is judged on: while settings are chosen, or once at the end."""
NOTHING = -100
"""The target where nothing is to be predicted, which torch's cross-entropy leaves out."""


@dataclass(frozen=True, eq=False)
class Examples:
    """One batch: what a model reads and what it is to predict."""

    inputs: Tensor
    """Ids (batch, tokens), int64; or a series (batch, steps, channels), float32."""
    kept: Tensor | None
    """(batch, tokens), bool, False for padding, which stands on the right; None: there is none."""
    targets: Tensor
    """Ids to predict (batch, tokens), NOTHING where nothing is; or class numbers (batch,)."""
    given: Tensor | None = None
    """What the decoder of an encoder-decoder reads: ids (batch, target tokens), the first begins a sentence."""

    def single(self, row: int) -> Examples:
        """One example without its padding, as a batch of one."""
        size = None if self.kept is None else int(self.kept[row].sum())
        meant = None if self.given is None else int((self.targets[row] != NOTHING).sum())
        return Examples(
            self.inputs[row : row + 1, :size],
            None,
            self.targets[row : row + 1] if meant is None else self.targets[row : row + 1, :meant],
            None if self.given is None else self.given[row : row + 1, :meant],
        )

    def to(self, device: torch.device | str) -> Examples:
        """The same on that device."""
        kept, given = (None if part is None else part.to(device) for part in (self.kept, self.given))
        return Examples(self.inputs.to(device), kept, self.targets.to(device), given)


STRETCHES = 10
"""Stretches into which a long text is cut, each with a block of every part: the end of a book is no sample of it."""
SHARES = (0.05, 0.05)
"""Shares of validation and test."""
PARTS = ("training", "validation", "test")


def blocks(count: int, *, stretches: int = STRETCHES, shares: Sequence[float] = SHARES) -> Mapping[str, list[range]]:
    """The numbers below `count` as blocks of each part: every stretch begins with training and ends with test.

    Neighbours are kept together since they tell of each other: a verse goes on where the one before stopped, and
    windows that were drawn at random would put the two halves of a sentence into training and test. Only the two ends
    of a held-out block have neighbours in other parts. A part is empty only where `count` is below 3.
    """
    found: dict[str, list[range]] = {part: [] for part in PARTS}
    for number in range(stretches):
        start, stop = number * count // stretches, (number + 1) * count // stretches
        test = stop - max(1, round((stop - start) * shares[1]))
        validation = test - max(1, round((stop - start) * shares[0]))
        for part, block in zip(
            PARTS, (range(start, validation), range(validation, test), range(test, stop)), strict=True
        ):
            found[part].append(range(max(block.start, start), max(block.stop, start)))
    return {part: [block for block in each if block] for part, each in found.items()}


def numbers(parts: Mapping[str, list[range]]) -> dict[str, list[int]]:
    """The numbers in the blocks of each part."""
    return {part: [number for block in each for number in block] for part, each in parts.items()}


POOL = 32
"""Batches, at most, that are filled from one part of a shuffled epoch in the order of length: little is padding."""
POOLS = 4
"""Parts of an epoch, at least: sorted as a whole, an epoch would put the same examples together each time."""


def endless(
    lengths: Sequence[int], size: int, seed: int, batch: Callable[[Sequence[int]], Examples]
) -> Iterator[Examples]:
    """Batches of examples of those lengths without end, each epoch in a new order, a function of `seed` alone.

    What is left of an epoch beside full batches is left out: other examples in each epoch, since they are cut off
    before any are sorted by length.
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


def in_order(lengths: Sequence[int], size: int, batch: Callable[[Sequence[int]], Examples]) -> list[Examples]:
    """All examples once, the shortest first, in batches of `size`; the last may hold fewer."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [batch(order[start : start + size]) for start in range(0, len(order), size)]


def padded(rows: Sequence[Tensor], value: float) -> tuple[Tensor, Bool[Tensor, "batch tokens"]]:
    """The rows side by side, filled up on the right with `value`, and which places are theirs."""
    sizes = torch.tensor([len(row) for row in rows])
    whole = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
    return whole, torch.arange(int(sizes.max())) < sizes[:, None]


def spread(count: int, most: int | None) -> list[int]:
    """At most `most` of the numbers below `count`, as evenly as they go; all of them for None."""
    if most is None or count <= most:
        return list(range(count))
    return [int((number + 0.5) * count / most) for number in range(most)]


PADDING, BEGIN, END = 0, 1, 2
"""The first ids of every vocabulary of sentences."""
SPECIALS = ("<pad>", "<s>", "</s>")
"""Their names."""


def paired(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Examples:
    """The encoder reads a source and END; the decoder reads BEGIN and the target, and predicts the target and END."""
    end, begin = torch.tensor([END]), torch.tensor([BEGIN])
    inputs, kept = padded([torch.cat((source, end)) for source in sources], PADDING)
    given, _ = padded([torch.cat((begin, target)) for target in targets], PADDING)
    predicted, _ = padded([torch.cat((target, end)) for target in targets], NOTHING)
    return Examples(inputs, None if bool(kept.all()) else kept, predicted, given)


BYTES = 256


@dataclass(frozen=True, eq=False)
class BytePairs:
    """Ids for text and back without loss: any text has ids, since every byte has one (Radford et al. 2019, 2.2)."""

    tokenizer: Tokenizer
    """As the tokenizers library has it; its special tokens, if any, have the first ids."""
    specials: int
    """How many special tokens there are, which stand for no text."""

    @property
    def size(self) -> int:
        """How many ids there are: as many as asked for, or fewer where the text has no more pairs to join."""
        return int(self.tokenizer.get_vocab_size())

    @property
    def widths(self) -> Float[Tensor, " vocabulary"]:
        """How many bytes each id stands for; 0 for special tokens."""
        written = [self.tokenizer.id_to_token(number) or "" for number in range(self.size)]
        # each byte is one character of a token's name
        return torch.tensor([0 if number < self.specials else len(name) for number, name in enumerate(written)]).float()

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""
        return [found.ids for found in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out; bytes that are no UTF-8 become U+FFFD."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def byte_pairs(texts: Iterable[str], vocabulary: int, specials: Sequence[str] = ()) -> BytePairs:
    """Byte pairs of at most `vocabulary` ids from those texts; the same texts give the same ids.

    Raises UsageError where the ids do not suffice for bytes and special tokens.
    """
    least = BYTES + len(specials)
    if vocabulary < least:
        raise UsageError(
            f"A vocabulary of {vocabulary} is smaller than bytes and special tokens, which are {least}.",
            f"Ask for at least {least}.",
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
