"""Byte-level byte-pair encoding, trained on the training part of a task alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from attnlens.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

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
