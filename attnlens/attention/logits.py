"""Any positive kernel as the exponential kernel of other queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlens.errors import ModelError
from attnlens.kernels.spec import Kernel

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


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
