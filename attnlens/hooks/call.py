"""How are the arguments of transformers' attention functions read as a Call?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnlens.kernels import Kernel, kernels
from attnlens.records import Call

OWN = Kernel(kernels()["exponential"])
"""The models' own kernel."""


def read_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, more: dict[str, Any]
) -> Call:
    """The arguments of transformers' attention functions in one vocabulary."""
    scaling = more.get("scaling")
    allowed, added = _split(None if mask is None else mask[..., : key.shape[2]])
    bias = more.get("position_bias")
    if bias is not None and added is not None:
        bias = bias + added
    return Call(
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        allowed=allowed,
        causal=mask is None and _causal_without_mask(module, query, more.get("is_causal")),
        bias=added if bias is None else bias,
        softcap=more.get("softcap"),
        sinks=more.get("s_aux"),
        dropout=(more.get("dropout") or 0.0) if module.training else 0.0,
        module=module,
    )


def _split(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Which keys are allowed, and what a mask of numbers adds beside 0 and the type's least number."""
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    allowed = mask > torch.finfo(mask.dtype).min / 2
    added = mask.masked_fill(~allowed, 0.0)
    return allowed, added if bool(added.any()) else None


def _causal_without_mask(module: nn.Module, query: Tensor, is_causal: bool | None) -> bool:
    """transformers' own rule for a missing mask (its SDPA function)."""
    return query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
