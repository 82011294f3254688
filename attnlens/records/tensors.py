"""Call, the inputs of one attention computation, and QueryKey, the queries and keys of every head at a site."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from attnlens.choices import Part

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor, nn


@dataclass(frozen=True)
class Call:
    """Inputs of one attention computation, softmax(log k(q, k) + bias) v, with the softmax over the allowed keys."""

    query: Float[Tensor, "batch heads queries head_dim"]  # Queries after projection, QK-norm and rotation
    key: Float[Tensor, "batch kv_heads keys head_dim"]  # Keys, not repeated under GQA
    value: Float[Tensor, "batch kv_heads keys value_dim"]  # Values, not repeated under GQA
    scale: float  # Factor of the scores, usually 1/√head_dim
    allowed: Bool[Tensor, "#batch #heads queries keys"] | None = None  # Visible keys; None: all, or 0 … i if `causal`
    causal: bool = False  # True if query i sees the keys 0 … i and `allowed` is None
    bias: Float[Tensor, "#batch #heads queries keys"] | None = None  # Terms added to the scores before the mask (T5)
    softcap: float | None = None  # Scores become softcap · tanh(score / softcap) (Gemma 2); None: they are not capped
    sinks: Float[Tensor, " heads"] | None = None  # Additional logit per head in the softmax, without a value (gpt-oss)
    dropout: float = 0.0  # Dropout probability of the attention weights; 0 if the module is not in training
    cross: bool = False  # True if queries and keys belong to different sequences (cross-attention)
    module: nn.Module | None = None  # The attention module; None outside a model
    traced: bool = False  # True if attention was traced in the module's own code
    places: Int[Tensor, "#batch queries"] | None = None  # Position of each query's token; None if not passed
    selected: tuple[int, ...] | None = None  # Key heads of the selected query heads; None: all are selected
    relative: bool = False  # True if `bias` contains products of queries or keys with positions (DeBERTa)

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def key_heads(self) -> tuple[int, ...]:
        """Number, within the module, of the key head that each query head reads."""
        return self.selected or tuple(head // self.group for head in range(self.query.shape[1]))

    @property
    def paired_key(self) -> Float[Tensor, "batch heads keys head_dim"]:
        """Keys, each repeated for its group of query heads, so that head h is paired with key head h // group."""
        return self.key if self.group == 1 else self.key.repeat_interleave(self.group, dim=1)

    @property
    def paired_value(self) -> Float[Tensor, "batch heads keys value_dim"]:
        """Values, repeated like the keys in `paired_key`."""
        return self.value if self.group == 1 else self.value.repeat_interleave(self.group, dim=1)

    def select(self, heads: Sequence[int]) -> Call:
        """Return the computation restricted to these query heads, each with a copy of its key head."""
        index = list(heads)
        key_heads = [head // self.group for head in index]
        return replace(
            self,
            query=self.query[:, index],
            key=self.key[:, key_heads],
            value=self.value[:, key_heads],
            allowed=select_heads(self.allowed, index),
            bias=select_heads(self.bias, index),
            sinks=None if self.sinks is None else self.sinks[index],
            selected=tuple(self.key_heads[head] for head in index),
        )

    def sequences(self, batch: Sequence[int], queries: Tensor | slice, keys: Tensor | slice) -> Call:
        """Return the computation restricted to these sequences, queries and keys."""
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
        """Return the mask of keys that the queries `rows` can see; None if they see all keys."""
        if self.allowed is not None:
            return self.allowed[..., rows, :]
        if not self.causal:
            return None
        import torch

        positions = torch.arange(max(self.query.shape[2], self.key.shape[2]), device=self.query.device)
        seen = positions[: self.query.shape[2]][rows, None] >= positions[: self.key.shape[2]]
        return seen[None, None]

    def query_key(self, site: Site) -> QueryKey:
        """Return the queries and keys at `site` of all sequences of the batch, including padding."""
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


Source = Literal["weights", "tokens"]


@dataclass(frozen=True)
class Site:
    """One attention computation of a model: a module and the number of its call in a forward pass."""

    path: str  # Dotted path of the attention module in the model
    ordinal: int  # Index of this call among the module's calls in a forward pass, from 0
    layer: int  # Index of the site in execution order, from 0
    part: Part  # Kind of attention: bidirectional self-attention (with the tower's name), causal, or cross-attention
    repeated: bool = False  # True if the module is called more than once in a forward pass (as in ALBERT)
    traced: bool = False  # True if attention is traced in the module's own code
    number: int | None = None  # Number of the layer within its part; None if the model has a single part

    @property
    def name(self) -> str:
        """Path, with the call's number if the module is called several times."""
        return f"{self.path}#{self.ordinal}" if self.repeated else self.path

    @property
    def layer_name(self) -> str:
        """Name of the layer for readers: `decoder.2`; in models with a single part, `2`."""
        return str(self.layer) if self.number is None else f"{self.part}.{self.number}"

    def is_among(self, layers: Collection[int | str] | None) -> bool:
        """Return True if `layers` is None (all) or contains the layer, as `decoder.2` or as 2 (layer 2 of any part)."""
        number = self.layer if self.number is None else self.number
        return layers is None or number in layers or f"{self.part}.{number}" in layers


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotations R(0) = 1, …, R(positions − 1) of RoPE: each coordinate is rotated with one partner or left unchanged.

    For sequences, R(i) R(j)ᵀ = R(i − j). In images, each position has separate angles; they are 0 for tokens without a
    position. For a pair (a, b) of coordinates, x R(i) is x_a cos φ − x_b sin φ at a and x_a sin φ + x_b cos φ at b.
    """

    pairs: Int[Tensor, "pairs 2"]  # Coordinates that are rotated together
    angles: Float[Tensor, "positions pairs"]  # Angles φ of the pairs in radians, in float64
    size: int  # Number of coordinates, head_dim
    by_distance: bool = True  # True if R(i) R(j)ᵀ = R(i−j), so that scores depend on i − j

    @property
    def transposed(self) -> Rotation:
        """The transposed rotations R(i)ᵀ, with the angles −φ."""
        return replace(self, angles=-self.angles)

    def of_coordinates(self, coordinates: Int[Tensor, " some"]) -> Rotation | None:
        """Return the rotation restricted to these coordinates, renumbered from 0; None if no pair is left."""
        import torch

        numbers = self.pairs.new_full((self.size,), -1)
        numbers[coordinates] = torch.arange(len(coordinates), device=numbers.device)
        inside = (numbers[self.pairs] >= 0).all(-1)
        if not bool(inside.any()):
            return None
        return replace(self, pairs=numbers[self.pairs[inside]], angles=self.angles[:, inside], size=len(coordinates))

    def rotate(self, x: Float[Tensor, "*batch positions head_dim"]) -> Float[Tensor, "*batch positions head_dim"]:
        """Compute x_i R(i); x may have fewer positions than the rotation."""
        first, second = self.pairs.unbind(-1)
        angles = self.angles[: x.shape[-2]]
        cos, sin = angles.cos(), angles.sin()
        result = x.clone()
        result[..., first] = x[..., first] * cos - x[..., second] * sin
        result[..., second] = x[..., first] * sin + x[..., second] * cos
        return result


@dataclass(frozen=True)
class QueryKey:
    """The factored matrix `scale · Q Kᵀ` of every head at one site.

    From weights, a row is an input dimension (Q = W_Q, K = W_K); from tokens, a row is a token of one sequence. Queries
    and keys have the same rows, except in cross-attention. Leading batch axes are allowed before `heads`; results of
    analyzers have the same batch axes.
    """

    query: Float[Tensor, "*batch heads n head_dim"]  # Queries after bias, QK-norm and rotation; or W_Q
    key: Float[Tensor, "*batch kv_heads m head_dim"]  # Keys (or W_K), one per *key* head, shared under GQA
    scale: float  # Factor that the model applies to the product (1/√head_dim, or 1 if queries are already scaled)
    source: Source
    site: Site
    heads: tuple[int, ...]  # Number of each query head within its layer, from 0
    key_of: tuple[int, ...]  # Index of each query head's key head in `key`
    rotation: Rotation | None = None  # Weights under RoPE: x at position i has the query x W_Q R(i) and key x W_K R(i)
    allowed: Bool[Tensor, "*batch #heads n m"] | None = None  # Tokens: keys that a query can see; None means all
    bias: Float[Tensor, "*batch #heads n m"] | None = None  # Tokens: terms added to the scores, as in `Call`
    softcap: float | None = None  # Tokens: bound of the scores, as in `Call`
    sinks: Float[Tensor, " heads"] | None = None  # Tokens: additional logit per head, as in `Call`
    value: Float[Tensor, "*batch kv_heads m value_dim"] | None = None  # Tokens: values, one per *key* head, if known
    inputs: Float[Tensor, "*batch n d_model"] | None = None  # Tokens: the module's inputs, if an analyzer needs them
    base: QueryKey | None = None  # Weights: the site without its adapter, if an analyzer needs it

    @cached_property
    def paired_key(self) -> Float[Tensor, "*batch heads m head_dim"]:
        """Keys, repeated so that head h is paired with its key head (h // group, never h mod kv_heads)."""
        if self.key_of == tuple(range(self.key.shape[-3])):
            return self.key
        return self.key[..., list(self.key_of), :, :]

    @property
    def paired_value(self) -> Float[Tensor, "*batch heads m value_dim"] | None:
        """Values, repeated like the keys in `paired_key`; None if unknown."""
        return None if self.value is None else self.value[..., list(self.key_of), :, :]

    @cached_property
    def content(self) -> QueryKey:
        """The QueryKey without `bias`, so that its logits are softcap(scale · q kᵀ)."""
        return self if self.bias is None else replace(self, bias=None)

    @cached_property
    def logits(self) -> Float[Tensor, "*batch heads n m"]:
        """Scores before the mask, in float64: softcap(scale · q kᵀ) + bias."""
        scores = self.query.double() @ self.paired_key.double().mT * self.scale
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        return scores if self.bias is None else scores + self.bias.double()

    @property
    def largest_logit(self) -> float:
        """Largest absolute score of any query with a key that the query can see."""
        seen = self.logits if self.allowed is None else self.logits.masked_fill(~self.allowed, 0.0)
        return float(seen.abs().max())

    @cached_property
    def attention(self) -> Float[Tensor, "*batch heads n m"]:
        """Attention matrix softmax(logits + mask), with any sinks, in float64; zeros for a query that sees no key."""
        masked = self.logits if self.allowed is None else self.logits.masked_fill(~self.allowed, -math.inf)
        if self.sinks is None:
            return masked.softmax(-1).nan_to_num(nan=0.0)
        total = masked.logsumexp(-1, keepdim=True).logaddexp(self.sinks.double()[:, None, None])
        return (masked - total).exp().nan_to_num(nan=0.0)

    @cached_property
    def shared(self) -> dict[str, Tensor]:
        """Cache of intermediate results that several analyzers need, keyed by name."""
        return {}

    @property
    def bilinear(self) -> bool:
        """True if the logits are exactly scale · q kᵀ, so that the n × n matrix need not be formed."""
        return self.softcap is None and self.bias is None

    def select(self, heads: Sequence[int]) -> QueryKey:
        """Return the QueryKey of the heads at these indices; `key_of` still refers to all keys and values."""
        index = list(heads)
        if index == list(range(len(self.heads))):
            return self  # indexing by a list copies
        return replace(
            self,
            query=self.query[..., index, :, :],
            heads=tuple(self.heads[head] for head in index),
            key_of=tuple(self.key_of[head] for head in index),
            allowed=select_heads(self.allowed, index),
            bias=select_heads(self.bias, index),
            sinks=None if self.sinks is None else self.sinks[index],
            base=None if self.base is None else self.base.select(index),
        )

    def rows(self, rows: slice) -> QueryKey:
        """Return the QueryKey of these queries and of the keys up to the last visible key (at least one key).

        Values and inputs are left out.
        """
        allowed, end = self.allowed, self.key.shape[-2]
        if allowed is not None:
            allowed = allowed[..., rows, :]
            seen = allowed.flatten(0, -2).any(0).nonzero()
            end = int(seen[-1]) + 1 if len(seen) else 1
            allowed = allowed[..., :end]
        return replace(
            self,
            query=self.query[..., rows, :],
            key=self.key[..., :end, :],
            allowed=allowed,
            bias=None if self.bias is None else self.bias[..., rows, :end],
            value=None,
            inputs=None,
        )

    def sequences(self, batch: Sequence[int], queries: Tensor | slice, keys: Tensor | slice) -> QueryKey:
        """Return the QueryKey of a batch, restricted to these sequences, queries and keys."""
        rows = list(batch)
        return replace(
            self,
            query=self.query[rows][:, :, queries],
            key=self.key[rows][:, :, keys],
            allowed=None if self.allowed is None else self.allowed[rows][:, :, queries][..., keys],
            bias=None if self.bias is None else self.bias[rows][:, :, queries][..., keys],
            value=None if self.value is None else self.value[rows][:, :, keys],
            inputs=None if self.inputs is None else self.inputs[rows][:, keys],
        )


def select_heads(matrix: Tensor | None, index: list[int]) -> Tensor | None:
    """Select the heads `index` of a mask or bias; return a matrix shared by all heads, or None, unchanged."""
    return matrix if matrix is None or matrix.shape[-3] == 1 else matrix[..., index, :, :]
