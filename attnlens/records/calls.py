"""A Call: queries, keys, values and all that decides one attention computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnlens.records.tensors import QueryKey, Site, of_heads

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor, nn


@dataclass(frozen=True)
class Call:
    """One attention computation, as the model asks for it: softmax(log k(q, k) + bias, over the keys allowed) v."""

    query: Float[Tensor, "batch heads queries head_dim"]
    """Queries after projection, QK-norm and rotation."""
    key: Float[Tensor, "batch kv_heads keys head_dim"]
    """Keys, not repeated under GQA."""
    value: Float[Tensor, "batch kv_heads keys value_dim"]
    """Values, not repeated under GQA."""
    scale: float
    """Factor of the product."""
    allowed: Bool[Tensor, "#batch #heads queries keys"] | None = None
    """Which keys a query may see; None means all, or those up to itself where `causal`."""
    causal: bool = False
    """Whether query i sees the keys 0 … i and `allowed` is None: nothing is written out where nothing is special."""
    bias: Float[Tensor, "#batch #heads queries keys"] | None = None
    """What the model adds to the scores (T5's position bias)."""
    softcap: float | None = None
    """Scores are bounded by softcap · tanh(score / softcap)."""
    sinks: Float[Tensor, " heads"] | None = None
    """A logit per head without a value."""
    dropout: float = 0.0
    """Dropout probability of the attention weights; 0 where the module is not in training."""
    cross: bool = False
    """Whether queries and keys belong to different sequences, so that no query has a place among the keys."""
    module: nn.Module | None = None
    """The attention module that asks; None outside a model."""
    traced: bool = False
    """Whether the module computes it by hand."""
    places: Int[Tensor, "#batch queries"] | None = None
    """The position of each query's token, where the model hands it to its attention."""
    selected: tuple[int, ...] | None = None
    """The key heads that the query heads read, where some heads were selected; None: h // group."""
    relative: bool = False
    """Whether `bias` holds products of queries or keys with positions (DeBERTa's content–position terms)."""

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def key_heads(self) -> tuple[int, ...]:
        """The key head that each query head reads, by its number in the module."""
        return self.selected or tuple(head // self.group for head in range(self.query.shape[1]))

    @property
    def paired_key(self) -> Float[Tensor, "batch heads keys head_dim"]:
        """The keys, repeated so that head h meets key head h // group."""
        return self.key if self.group == 1 else self.key.repeat_interleave(self.group, dim=1)

    @property
    def paired_value(self) -> Float[Tensor, "batch heads keys value_dim"]:
        """The values, repeated in the same way."""
        return self.value if self.group == 1 else self.value.repeat_interleave(self.group, dim=1)

    def select(self, heads: Sequence[int]) -> Call:
        """The same computation with only these query heads, each with its own key head."""
        index = list(heads)
        key_heads = [head // self.group for head in index]
        return replace(
            self,
            query=self.query[:, index],
            key=self.key[:, key_heads],
            value=self.value[:, key_heads],
            allowed=of_heads(self.allowed, index),
            bias=of_heads(self.bias, index),
            sinks=None if self.sinks is None else self.sinks[index],
            selected=tuple(self.key_heads[head] for head in index),
        )

    def sequences(self, batch: Sequence[int], queries: Tensor | slice, keys: Tensor | slice) -> Call:
        """The same computation with only these sequences, and of those only these queries and keys."""
        rows, count = list(batch), self.query.shape[0]
        allowed, bias = (
            part if part is None else part.expand(count, *part.shape[1:])[rows][:, :, queries][..., keys]
            for part in (self.visible(), self.bias)
        )
        return replace(
            self,
            query=self.query[rows][:, :, queries],
            key=self.key[rows][:, :, keys],
            value=self.value[rows][:, :, keys],
            allowed=allowed,
            bias=bias,
            places=None if self.places is None else self.places.expand(count, -1)[rows][:, queries],
        )

    def visible(self, rows: slice = slice(None)) -> Bool[Tensor, "#batch #heads rows keys"] | None:
        """Which keys the queries `rows` may see, written out; None means all."""
        if self.allowed is not None:
            return self.allowed[..., rows, :]
        if not self.causal:
            return None
        import torch

        positions = torch.arange(max(self.query.shape[2], self.key.shape[2]), device=self.query.device)
        seen = positions[: self.query.shape[2]][rows, None] >= positions[: self.key.shape[2]]
        return seen[None, None]

    def query_key(self, site: Site) -> QueryKey:
        """The factored scores of the whole batch, padding included."""
        heads, batch, seen = self.query.shape[1], self.query.shape[0], self.visible()
        return QueryKey(
            query=self.query,
            key=self.key,
            scale=self.scale,
            source="tokens",
            site=site,
            heads=tuple(range(heads)),
            key_of=tuple(head // self.group for head in range(heads)),
            allowed=None if seen is None else seen.expand(batch, *seen.shape[1:]),
            bias=None if self.bias is None else self.bias.expand(batch, *self.bias.shape[1:]),
            softcap=self.softcap,
            sinks=self.sinks,
            value=self.value,
        )
