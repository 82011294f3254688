"""How a text becomes sequences of token ids: windows of the running text, or its lines."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlens.errors import TextError, UsageError
from attnlens.models.configs import foreign, text_config
from attnlens.texts.sources import Content

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DRAWN = ("dropout", "alpha")
"""What makes a tokenizer cut words at random, where it is set: BPE-dropout, and sampling from a unigram model."""
LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions")


@dataclass(frozen=True)
class WindowedText:
    """A running text's ids in windows, each cut when it is asked for: of thousands a few are fed."""

    ids: Sequence[int]
    """Of the whole text."""
    room: int
    """How many of them a window takes."""
    before: Sequence[int]
    """Special tokens at each window's beginning."""
    after: Sequence[int]
    """Special tokens at each window's end."""

    def __len__(self) -> int:
        return len(self.ids) // self.room

    def __getitem__(self, number: int) -> tuple[list[int], list[int]]:
        """The window's ids, and no token types."""
        start = number * self.room
        return [*self.before, *self.ids[start : start + self.room], *self.after], []


def windows(tokenizer: PreTrainedTokenizerBase, content: Content, *, tokens: int) -> WindowedText:
    """All windows of the running text, one behind the other, each of `tokens` ids with the special tokens.

    Raises TextError where there is not even one window, UsageError where the special tokens leave no room.
    """
    before, after = special_tokens(tokenizer, content, tokens)
    room = tokens - len(before) - len(after)
    ids = _ids(tokenizer, content, content.text, None)
    if len(ids) < room:
        raise TextError(
            f"The text ({content.name}) has {len(ids)} tokens, and one window takes {room}.",
            "Give a longer text, or fewer --tokens.",
        )
    return WindowedText(array("i", ids), room, before, after)


def lines(tokenizer: PreTrainedTokenizerBase, content: Content, *, tokens: int) -> list[list[int]]:
    """All non-empty lines, each with the tokenizer's special tokens, truncated to `tokens` ids.

    A line of fewer than two tokens has no pair to look at and is left out. Raises TextError where no line is left,
    UsageError where the special tokens leave no room.
    """
    special_tokens(tokenizer, content, tokens)
    written = [line.removesuffix("\r") for line in content.text.split("\n") if line.strip()]
    with _told(content), _repeatable(tokenizer):
        every: list[list[int]] = tokenizer(written, truncation=True, max_length=tokens)["input_ids"]
    found = [ids for ids in every if len(ids) >= 2]
    if not found:
        raise TextError(f"No line of the text ({content.name}) has two tokens.", "Give a text with longer lines.")
    return found


def pairs(tokenizer: PreTrainedTokenizerBase, content: Content, *, tokens: int) -> list[tuple[list[int], list[int]]]:
    """Ids and token types of every line of two texts, joined and truncated to `tokens` ids by the tokenizer.

    Raises TextError for a line that does not hold two texts with one tab between them.
    """
    found = []
    for number, line in enumerate(content.text.split("\n"), 1):
        if not line.strip():
            continue
        one, tab, other = line.removesuffix("\r").partition("\t")
        if not tab or "\t" in other or not one.strip() or not other.strip():
            raise TextError(
                f"Line {number} of {content.name} is no pair: it needs two texts and one tab between them.",
                "Write one pair a line: FIRST<tab>SECOND.",
            )
        with _told(content), _repeatable(tokenizer):
            made = tokenizer(one, other, truncation=True, max_length=tokens, return_token_type_ids=True)
        ids: list[int] = made["input_ids"]
        found.append((ids, list(made.get("token_type_ids", [0] * len(ids)))))
    return found


def special_tokens(tokenizer: PreTrainedTokenizerBase, content: Content, tokens: int) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a sequence, read off the beginning of the text.

    Raises UsageError where they leave no room in `tokens`.
    """
    sample = content.text.strip()[:40]
    bare, whole = _ids(tokenizer, content, sample, None), _ids(tokenizer, content, sample, 10**6)
    starts = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
    if not sample:
        raise TextError(f"The text has nothing left ({content.name}).", "Give a longer or another text.")
    if not bare or not starts:
        raise TextError(f"The tokenizer makes no tokens of the text ({content.name}).", "Give another text.")
    before, after = whole[: starts[0]], whole[starts[0] + len(bare) :]
    if tokens <= len(before) + len(after):
        raise UsageError(
            f"{tokens} tokens leave no room for text beside {len(before) + len(after)} special tokens.",
            "Give more --tokens.",
        )
    return before, after


def window_length(model: PreTrainedModel, tokens: int | None) -> int:
    """`tokens`, or where it is None the lesser of 128 and what the model's positions allow.

    Raises UsageError for fewer than two tokens, and for more than the model has positions.
    """
    limit = position_limit(model)
    if limit is not None and limit < 2:
        raise UsageError(f"The model reads {limit} token, which has no pair to look at.", "Use --source weights.")
    if tokens is None:
        return 128 if limit is None else min(128, limit)
    if tokens < 2:
        raise UsageError(f"A window of {tokens} tokens has no pair to look at.", "Give at least --tokens 2.")
    if limit is not None and tokens > limit:
        raise UsageError(f"The model reads at most {limit} tokens, not {tokens}.", f"Give at most --tokens {limit}.")
    return tokens


def position_limit(model: PreTrainedModel) -> int | None:
    """How many tokens the model has positions for; None where positions are relative without an end (T5)."""
    from torch.nn import Embedding

    config = text_config(model.config)
    if hasattr(config, "relative_attention_num_buckets"):
        return None
    limits = [limit for name in LIMITS if isinstance(limit := getattr(config, name, None), int) and limit > 0]
    for path, module in model.named_modules():
        # RoBERTa counts positions from padding_idx + 1 on
        if path.endswith("position_embeddings") and isinstance(module, Embedding) and module.padding_idx is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return min(limits, default=None)


def _ids(tokenizer: PreTrainedTokenizerBase, content: Content, text: str, longest: int | None) -> list[int]:
    """Ids of a part of the content without special tokens (None), or with them and truncated to `longest`."""
    with _told(content), _repeatable(tokenizer):
        if longest is None:
            found = tokenizer(text, add_special_tokens=False, verbose=False)
        else:
            found = tokenizer(text, truncation=True, max_length=longest)
        ids: list[int] = found["input_ids"]
    return ids


@contextmanager
def _repeatable(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Inside, a text is cut in the same way each time: cuts at random are for training."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    drawn = {name: share for name in DRAWN if (share := getattr(model, name, None)) is not None}
    try:
        for name in drawn:
            setattr(model, name, None)
        yield
    finally:
        for name, share in drawn.items():
            setattr(model, name, share)


def _told(content: Content) -> AbstractContextManager[None]:
    """Turns what a tokenizer raises over that text into a TextError."""
    return foreign(
        f"The tokenizer fails on the text ({content.name})",
        "Put its own tokenizer files beside the model, or use --source weights.",
        TextError,
    )
