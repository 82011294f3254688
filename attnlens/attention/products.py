"""Kernels that are products of vectors: through torch's scaled_dot_product_attention, or as logits of one softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from attnlens.errors import ModelError
from attnlens.kernels.spec import Kernel
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped
    from torch import Tensor


def by_products(call: Call, kernel: Kernel) -> Float[Tensor, "batch heads queries value_dim"]:
    """softmax(s'⟨q', k'⟩ + bias, over the keys allowed) v with the kernel's own q', k' and s'; rows that may see
    nothing are zero.

    Nothing of size queries × keys is made but the mask that the model itself hands over, or its sum with the bias.
    """
    assert kernel.info.dot is not None  # noqa: S101  # route has seen to it
    query, key = kernel.tied(call.query, call.paired_key)
    value = call.paired_value
    query, key, scale = kernel.info.dot(query, key, call.scale, **kernel.parameters, **kernel.fitted)
    query, key = query.to(value.dtype), key.to(value.dtype)
    mask = _mask(call)
    if mask is None and call.causal:
        # with equal numbers of queries and keys torch takes its fast kernel; the keys cropped are seen by none
        key, value = key[..., : query.shape[-2], :], value[..., : query.shape[-2], :]
    # torch's fast kernels want one head_dim for all three, on a GPU a multiple of 8; zeros change no product
    width = max(query.shape[-1], value.shape[-1])
    width += -width % 8 if query.is_cuda else 0
    query, key, padded = (_of_width(x, width) for x in (query, key, value))
    causal = mask is None and call.causal
    found = scaled_dot_product_attention(query, key, padded, attn_mask=mask, is_causal=causal, scale=scale)
    return found[..., : value.shape[-1]]


def _of_width(x: Tensor, width: int) -> Tensor:
    """The vectors with zeros up to that width; themselves where they have it, since `pad` copies even those."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _mask(call: Call) -> Shaped[Tensor, "#batch #heads queries keys"] | None:
    """What SDPA takes as a mask: booleans, or the bias with −∞ where nothing is seen."""
    if call.bias is None:
        return call.allowed
    seen = call.visible()
    bias = call.bias.to(call.query.dtype)
    return bias if seen is None else bias.masked_fill(~seen, -torch.inf)


def as_exponential(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch heads keys head_dim"],
    scale: float,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, float]:
    """q', k' and s' with s'⟨q'_i, k'_j⟩ = log k(q_i, k_j), up to what a row's softmax ignores.

    Of the same head_dim, or one more, where the kernel is one of products (exponential, rbf, cosine); else q' is log k
    itself and k' the identity. Raises ModelError for a kernel that can be negative, whose attention is no softmax.
    """
    if kernel.signed:
        raise ModelError(
            f"Attention by the kernel {kernel.spelling} can be negative: it is no softmax, and has no logits to read.",
            "Choose a model with a positive kernel.",
        )
    if kernel.tie is None and kernel.info.dot is not None:
        found: tuple[Tensor, Tensor, float] = kernel.info.dot(query, key, scale, **kernel.parameters)
        return found
    logits = kernel.log(query, key, scale)
    identity = torch.eye(key.shape[2], dtype=logits.dtype, device=logits.device)
    return logits, identity.expand(*key.shape[:2], -1, -1), 1.0
