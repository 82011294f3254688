"""Reads hand-written attention as a Call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.attention.masks import split_mask
from attnlens.records import Call
from attnlens.tracer.lead import Lead, Tokens, lead_of
from attnlens.tracer.softmax import TracedSoftmax, affine, check_moved, unread


def traced_call(softmax: TracedSoftmax, value: Tensor, tokens: Tokens, module: nn.Module) -> tuple[Call, Lead]:
    """Queries, keys, scale, mask and bias behind a softmax whose weights sum up `value`, (…, keys, value_dim).

    `tokens` are those that `module` was called with. Raises UnreadableError where the softmax's argument is not
    factor · ⟨query, key⟩ plus something that does not depend on their product.
    """
    scores = softmax.scores()
    product, standins = scores.product, softmax.carried[scores]
    queries, keys = product.left.shape[-2], product.right.shape[-2]
    shape = (*product.lead, queries, keys)
    if tuple(softmax.logits.shape[-2:]) != shape[-2:] or softmax.logits.numel() != torch.Size(shape).numel():
        raise unread(f"its softmax has the axes {tuple(softmax.logits.shape)}, and the product in it {shape}")
    lead = lead_of(product.lead, queries, keys, tokens)

    def of_pairs(standin: Tensor) -> Tensor:
        return lead.split(standin.reshape(shape))

    zero = of_pairs(standins.zero)
    found = affine(scores.signs, zero, of_pairs(standins.signs))
    if scores.moved is not None and standins.moved is not None:
        others = [lead.split(part) for part in scores.moved]
        check_moved(others[0], others[1], found, zero, of_pairs(standins.moved))
    query, scale = lead.split(product.left), float(found.factor[0].detach())
    if bool(((found.factor - scale).abs() > 32 * torch.finfo(found.factor.dtype).eps * abs(scale)).any()):
        query, scale = query * found.factor.view(1, -1, 1, 1).to(query.dtype), 1.0
    key, value = _paired(lead.split(product.right), lead.like(value.shape[:-2]).split(value))
    wide = torch.promote_types(query.dtype, value.dtype)  # GPT-J turns its queries and keys into float32
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    call = Call(
        query=query,
        key=key,
        value=value,
        scale=scale,
        allowed=found.allowed,
        bias=found.bias,
        module=module,
        traced=True,
        relative=len(softmax.carried) > 1,
    )
    return call, lead


def fused_call(given: Mapping[str, Any], tokens: Tokens, module: nn.Module) -> tuple[Call, Lead]:
    """The arguments of torch's scaled_dot_product_attention, called by a module itself, as a Call."""
    query, key, mask, scale = given["query"], given["key"], given.get("attn_mask"), given.get("scale")
    lead = lead_of(tuple(query.shape[:-2]), query.shape[-2], key.shape[-2], tokens)
    if mask is not None:
        mask = lead.split(mask) if mask.dim() > 2 else mask[None, None]
        mask = mask.expand(-1, -1, query.shape[-2], key.shape[-2])
    allowed, bias = split_mask(mask)
    if allowed is not None and bool(allowed.all()):
        allowed = None
    key, value = _paired(*(_of_sequences(lead, part) for part in (key, given["value"])))
    call = Call(
        query=lead.split(query),
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        allowed=allowed,
        causal=bool(given.get("is_causal")),
        bias=bias,
        dropout=given.get("dropout_p") or 0.0,
        module=module,
        traced=True,
    )
    return call, lead


def _of_sequences(lead: Lead, part: Tensor) -> Tensor:
    """Keys or values as (batch, kv_heads, keys, size); under GQA they have fewer heads than the queries."""
    if part.dim() == 4 and lead.axis == 1 and part.shape[0] == lead.shape[0]:
        return part
    return lead.split(part)


def _paired(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads each."""
    if key.shape[1] == value.shape[1]:
        return key, value
    heads = max(key.shape[1], value.shape[1])
    return key.repeat_interleave(heads // key.shape[1], dim=1), value.repeat_interleave(heads // value.shape[1], dim=1)
