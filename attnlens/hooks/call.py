"""What does a model ask of one attention computation, and how is it answered with a given kernel?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnlens.records import QueryKey, Site

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Kernel = Callable[[Tensor, Tensor, float], Tensor]
"""(query, key, scale) → log k(q, k), all (batch, heads, tokens, ·)."""


@dataclass(frozen=True)
class Call:
    """One attention computation, as the model asks for it."""

    module: nn.Module
    """The attention module."""
    query: Float[Tensor, "batch heads queries head_dim"]
    """Queries after projection, QK-norm and rotation."""
    key: Float[Tensor, "batch kv_heads keys head_dim"]
    """Keys, not repeated under GQA."""
    value: Float[Tensor, "batch kv_heads keys value_dim"]
    """Values, not repeated under GQA."""
    scale: float
    """Factor of the product."""
    mask: Float[Tensor, "#batch #heads queries keys"] | None
    """What the model adds to the scores: 0, the type's least number, or a bias in between."""
    bias: Float[Tensor, "#batch #heads queries keys"] | None = None
    """A position bias that the model hands over beside the mask."""
    softcap: float | None = None
    """Scores are bounded by softcap · tanh(score / softcap)."""
    sinks: Float[Tensor, " heads"] | None = None
    """A logit per head without a value."""
    dropout: float = 0.0
    """Dropout probability of the attention weights."""

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def allowed(self) -> Bool[Tensor, "*batch #heads queries keys"] | None:
        """Which keys a query may see; None means all."""
        if self.mask is None:
            return None
        seen = self.mask > torch.finfo(self.mask.dtype).min / 2
        return seen.expand(self.query.shape[0], *seen.shape[1:])

    def query_key(self, site: Site) -> QueryKey:
        """The factored scores of the whole batch, padding included."""
        heads, allowed = self.query.shape[1], self.allowed
        added = self.bias
        if self.mask is not None and allowed is not None:
            in_mask = self.mask.masked_fill(~allowed[: self.mask.shape[0]], 0.0)
            if in_mask.any():
                added = in_mask if added is None else added + in_mask
        return QueryKey(
            query=self.query,
            key=self.key,
            scale=self.scale,
            source="tokens",
            site=site,
            heads=tuple(range(heads)),
            key_of=tuple(head // self.group for head in range(heads)),
            allowed=allowed,
            bias=None if added is None else added.expand(self.query.shape[0], *added.shape[1:]),
            softcap=self.softcap,
            sinks=self.sinks,
        )


def exponential(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """log k(q, k) = s⟨q, k⟩ (Vaswani et al. 2017; Tsai et al. 2019, Eq. 3): the models' own kernel."""
    return query @ key.mT * scale


def attend(call: Call, kernel: Kernel) -> Float[Tensor, "batch queries heads value_dim"]:
    """softmax(log k(q, k) + bias + mask) v with the model's own softcap and sinks; softmax in float32 or better."""
    log_k = kernel(call.query, call.key.repeat_interleave(call.group, dim=1), call.scale)
    if call.softcap is not None:
        log_k = (log_k / call.softcap).tanh() * call.softcap
    for added in (call.bias, call.mask):
        log_k = log_k if added is None else log_k + added
    if call.sinks is not None:
        column = call.sinks.view(1, -1, 1, 1).expand(*log_k.shape[:3], 1)
        log_k = torch.cat([log_k, column.to(log_k.dtype)], dim=-1)
    exact = torch.float64 if log_k.dtype == torch.float64 else torch.float32
    weights = log_k.softmax(-1, dtype=exact).to(call.query.dtype)[..., : call.key.shape[-2]]
    weights = nn.functional.dropout(weights, call.dropout, training=call.module.training)
    return (weights @ call.value.repeat_interleave(call.group, dim=1)).transpose(1, 2)


def read_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, more: dict[str, Any]
) -> Call:
    """The arguments of transformers' attention functions in one vocabulary."""
    scaling = more.get("scaling")
    if mask is None and _causal_without_mask(module, query, more.get("is_causal")):
        allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
        mask = torch.zeros((), dtype=query.dtype).where(allowed, torch.finfo(query.dtype).min)
    elif mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros((), dtype=query.dtype).where(mask, torch.finfo(query.dtype).min)
    if mask is not None:
        mask = mask[..., : key.shape[2]]
    return Call(
        module=module,
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        mask=mask,
        bias=more.get("position_bias"),
        softcap=more.get("softcap"),
        sinks=more.get("s_aux"),
        dropout=more.get("dropout") or 0.0,
    )


def _causal_without_mask(module: nn.Module, query: Tensor, is_causal: bool | None) -> bool:
    """transformers' own rule for a missing mask (its SDPA function)."""
    return query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
