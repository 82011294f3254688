"""The effective query and key maps of a site: what is read of its weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attnlens.records import QueryKey, Rotation, Site

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class LatentMap:
    """W_h = D U_h, as latent attention makes its keys."""

    up: Float[Tensor, "heads rank head_dim"]
    """U_h; NaN in the coordinates that are made in another way."""
    down: Float[Tensor, "d_model rank"]
    """D, one for all heads."""


@dataclass(frozen=True)
class Maps:
    """q = x W_Q + b_Q and k = y W_K + b_K without their rotation, float64."""

    query: Float[Tensor, "heads d_model head_dim"]
    key: Float[Tensor, "kv_heads d_other head_dim"]
    query_bias: Float[Tensor, "heads queries head_dim"]
    """One for all, or one for each position where the module adds positions to its inputs (DETR)."""
    key_bias: Float[Tensor, "kv_heads keys head_dim"]
    key_latent: LatentMap | None = field(default=None, kw_only=True)
    """W_K as a product, where it was found as one."""

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (batch, heads, tokens, head_dim) and keys (batch, kv_heads, tokens, head_dim) of x and y."""
        query, key = (
            _heads(part.double().flatten(1, -2), factor) + bias[:, : part[0, ..., 0].numel()]
            for part, factor, bias in ((x, self.query, self.query_bias), (y, self.key, self.key_bias))
        )
        return query, key


@dataclass(frozen=True)
class Traits:
    """What a reader must know of a site's weights, without the weights."""

    rotary: bool
    """Whether queries and keys are turned with their position."""
    qk_norm: bool
    """Whether they are normalised per token."""
    latent: bool
    """Whether one part of the keys is normalised and the other is not."""
    biased: bool
    """Whether a bias is added to queries or keys, which the form leaves out."""


@dataclass(frozen=True)
class Factors:
    """The effective query and key maps of one site: q_i = (x W_Q + b_Q) R(i), under QK-norm up to a positive scalar.

    Latent attention (MLA, DeepSeek V2) has two such scalars: with c = y W_DKV and rms its root mean square, a head's
    score is a(x) · [x M_n yᵀ / rms(c) + x M_r(j − i) yᵀ], M_n = s W_DQ g_Q W_UQ W_UKᵀ g_K W_DKVᵀ of the part without
    positions (nope) and M_r(Δ) = s W_DQ g_Q W_QR R(−Δ) W_KRᵀ of the part that turns (rope). a(x) is one factor for all
    scores of a query and drops out; rms(c) weighs one part against the other, key by key, so that the sum is no one
    bilinear form, and each part is one up to positive factors. weights.* are those of M_n; `parts` has both.
    """

    site: Site
    """Where."""
    maps: Maps
    """W_Q, W_K and the biases."""
    scale: float
    """Factor of the product."""
    rotation: Rotation | None
    """R(i), or None where queries and keys are not turned with their position."""
    groups: tuple[Int[Tensor, " some"], ...] = ()
    """The coordinates of a head that are normalised per token by one scalar, W_Q and W_K carrying the gains only: all
    under QK-norm, the nope part and what is beside it under latent attention; none without normalisation."""

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per token."""
        return bool(self.groups)

    @property
    def latent(self) -> bool:
        """Whether one part of the keys is normalised and the other is not, so that each is a form of its own."""
        return len(self.groups) > 1

    @property
    def traits(self) -> Traits:
        """What of them outlives their numbers."""
        biased = bool(self.maps.query_bias.any() or self.maps.key_bias.any())
        return Traits(self.rotation is not None, self.qk_norm, self.latent, biased)

    @property
    def route(self) -> str:
        """How the factors were read, in words."""
        kind = ", nope part of latent attention" if self.latent else ", QK-norm gains" * self.qk_norm
        return "jacobian" + kind + ", rotation" * (self.rotation is not None and not self.latent)

    @property
    def query_key(self) -> QueryKey:
        """The bilinear form M = s · W_Q W_Kᵀ of every head; biases stay out (x W_Q b_K is invisible to softmax)."""
        return self.parts[0]

    @property
    def parts(self) -> tuple[QueryKey, ...]:
        """The form; of latent attention that of the nope part and that of the rope part."""
        heads = tuple(range(self.maps.query.shape[0]))
        group = len(heads) // self.maps.key.shape[0]
        whole = QueryKey(
            query=self.maps.query,
            key=self.maps.key,
            scale=self.scale,
            source="weights",
            site=self.site,
            heads=heads,
            key_of=tuple(head // group for head in heads),
            rotation=self.rotation,
        )
        return tuple(_of_coordinates(whole, part) for part in self.groups) if self.latent else (whole,)

    @property
    def summed(self) -> QueryKey:
        """A form with the sum of the heads of `query_key`: one head, (Σ_h W_Q,h U_hᵀ) Dᵀ, where W_K,h = D U_h."""
        form, product = self.query_key, self.maps.key_latent
        if product is None or form.rotation is not None:
            return form
        up = product.up if not self.latent else _coordinates(product.up, self.groups[0])
        if not bool(up.isfinite().all()):
            return form
        query = torch.zeros_like(product.down)
        for head, place in enumerate(form.key_of):
            query.addmm_(form.query[head], up[place].mT)
        return replace(form, query=query[None], key=product.down[None], heads=(0,), key_of=(0,))

    @property
    def on_inputs(self) -> QueryKey | None:
        """M on (x, 1), the biases a last row of the factors; None where the logits are not bilinear in one input x."""
        placed = self.rotation is not None or self.maps.query_bias.shape[1] > 1
        if placed or self.qk_norm or self.site.part == "cross":
            return None
        sides = ((self.maps.query, self.maps.query_bias), (self.maps.key, self.maps.key_bias))
        query, key = (torch.cat(side, 1) for side in sides)
        return replace(self.query_key, query=query, key=key)

    def rebuilt(self, x: Tensor, y: Tensor, seen: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries and keys of these inputs; under QK-norm with the lengths of those `seen`, which W does not carry."""
        query, key = (
            self._lengthened(part if self.rotation is None else self.rotation.turned(part), given)
            for part, given in zip(self.maps(x, y), seen, strict=True)
        )
        return query, key

    def _lengthened(self, part: Tensor, seen: Tensor) -> Tensor:
        result = part.clone()
        for group in self.groups:
            result[..., group] = unit(part[..., group]) * seen[..., group].double().norm(dim=-1, keepdim=True)
        return result


def _heads(x: Tensor, factor: Tensor) -> Tensor:
    """x W of each head, (batch, heads, tokens, head_dim)."""
    found = nn.functional.linear(x, factor.mT.flatten(0, 1))  # rows of weights as they lie
    return found.reshape(*x.shape[:-1], len(factor), -1).transpose(1, 2)


def unit(rows: Tensor) -> Tensor:
    """Each row with length 1."""
    return nn.functional.normalize(rows, dim=-1)


def _of_coordinates(whole: QueryKey, kept: Int[Tensor, " some"]) -> QueryKey:
    """The form of some coordinates of each head."""
    rotation = None if whole.rotation is None else whole.rotation.of_coordinates(kept)
    return replace(whole, query=_coordinates(whole.query, kept), key=_coordinates(whole.key, kept), rotation=rotation)


def _coordinates(factor: Tensor, kept: Int[Tensor, " some"]) -> Tensor:
    """Some coordinates of each head; neighbours are a view, which costs no memory."""
    first, count = int(kept[0]), len(kept)
    if torch.equal(kept, torch.arange(first, first + count, device=kept.device)):
        return factor[..., first : first + count]
    return factor[..., kept]
