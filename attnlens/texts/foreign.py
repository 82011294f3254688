"""Texts that a tokenizer does not know: refused from half of a text's tokens on, told from a tenth on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attnlens.errors import TextError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOREIGN = 0.5
"""Share of unknown tokens from which a text is foreign to a model: it reads little more than that there is a word."""
TOLD = 0.1
"""Share of unknown tokens from which a reader is told."""


def unknown_shares(
    tokenizer: PreTrainedTokenizerBase | None, rows: Sequence[Sequence[int]], names: Sequence[str]
) -> dict[str, float]:
    """Share of each text's ids that are the tokenizer's unknown token; `names` says of which text each row is."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    found = defaultdict[str, list[bool]](list)
    for row, name in zip(rows, names, strict=True):
        found[name] += [unknown is not None and id_ == unknown for id_ in row]
    return {name: sum(ids) / len(ids) for name, ids in found.items()}


def foreign_notes(shares: Mapping[str, float]) -> list[str]:
    """A sentence for each text of which a tenth or more is unknown."""
    return [_sentence(name, share) for name, share in shares.items() if share >= TOLD]


def refuse_foreign(shares: Mapping[str, float]) -> None:
    """Raise TextError for the text of which most is unknown, from half of it on: readable text beside it is no help."""
    name, share = max(shares.items(), key=lambda found: found[1], default=("", 0.0))
    if share >= FOREIGN:
        raise TextError(
            _sentence(name, share), "Bring a text of its kind with --text, or go on with --allow-foreign-text."
        )


def _sentence(name: str, share: float) -> str:
    return (
        f"The tokenizer does not know {share:.0%} of the tokens of {name}: "
        "the text may be of another language or kind than the model's."
    )
