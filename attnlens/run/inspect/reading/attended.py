"""Attention rows that are to be shown: of one sequence the largest weights of each query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnlens.errors import UsageError
from attnlens.hooks import Reached
from attnlens.records import AttentionRows, QueryKey, Sentence
from attnlens.run.inspect.chunks import sequences

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

MOST_TOKENS, MOST_ROWS = 512, 40_000
"""Tokens of the sequence, and rows of all heads together, that a report keeps."""
MOST_WEIGHTS, LEAST = 8, 0.02
"""How many weights of a row are kept, and from which size on; the largest always is."""


def refuse_many_rows(reached: Sequence[Reached], heads: Sequence[int] | None) -> None:
    """Raise UsageError where the heads asked for have more rows, or more tokens, than a report keeps."""
    shapes = [found.call.query.shape for found in reached]
    longest = max((max(found.call.query.shape[2], found.call.key.shape[2]) for found in reached), default=0)
    rows = sum((shape[1] if heads is None else len(heads)) * shape[2] for shape in shapes)
    if longest > MOST_TOKENS:
        raise UsageError(
            f"--show attention shows sequences of at most {MOST_TOKENS} tokens, and these have {longest}.",
            f"Add --tokens {MOST_TOKENS}.",
        )
    if rows > MOST_ROWS:
        raise UsageError(
            f"--show attention keeps at most {MOST_ROWS:,} rows, and these heads have {rows:,}.",
            "Choose some with --layers or --heads, or fewer tokens with --tokens.",
        )


def attention_rows(query_key: QueryKey, sentence: Sentence | None) -> list[AttentionRows]:
    """The rows of every head in the first sequence of the batch, without its padding; none where it holds nothing."""
    first = next((one for row, one in sequences(query_key) if row == 0), None)
    if first is None:
        return []
    attention = first.attention[0].double().cpu()
    sentence = sentence if sentence is not None and _fits(sentence, attention) else None
    weights, keys = attention.topk(min(MOST_WEIGHTS, attention.shape[-1]))
    counts = (weights >= LEAST).sum(-1).clamp(min=1)
    shown = weights.round(decimals=4)
    found = []
    for index, head in enumerate(query_key.heads):
        kept = [(row, int(count)) for row, count in enumerate(counts[index])]
        found.append(
            AttentionRows(
                site=query_key.site.name,
                layer=query_key.site.layer,
                head=head,
                kv_head=query_key.key_of[index],
                part=query_key.site.part,
                sequence=0,
                keys=[keys[index, row, :count].tolist() for row, count in kept],
                weights=[shown[index, row, :count].tolist() for row, count in kept],
                rest=[_rest(attention[index, row], weights[index, row, :count]) for row, count in kept],
                sentence=sentence,
            )
        )
    return found


def _fits(sentence: Sentence, attention: Float[Tensor, "heads queries keys"]) -> bool:
    """Whether rows and columns are its tokens: modules that attend within windows, or to images too, have others."""
    queries = sentence.keys if sentence.queries is None else sentence.queries
    return attention.shape[1:] == (len(queries), len(sentence.keys))


def _rest(row: Tensor, kept: Tensor) -> float:
    """The sum of a row's other weights."""
    return round(max(0.0, float(row.sum() - kept.sum())), 4)
