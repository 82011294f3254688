"""Attention for kernels that are functions of the score, with or without filters, by FlexAttention on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

from attnlens.kernels import registry
from attnlens.kernels.attention.rows import positions
from attnlens.kernels.registry import KeyFilter
from attnlens.kernels.spec import Kernel
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

registry.torch.__name__  # noqa: B018  # imports torch for the kernels: torch cannot compile a function that imports
LIMITS = {  # settings of torch._dynamo
    "fail_on_recompile_limit_hit": True,  # otherwise a kernel recompiled too often silently falls back to O(T²) memory
    "recompile_limit": 64,  # torch counts the compilations of all kernels and shapes of a process together
}
CONSTANTS = {  # compile a kernel's parameters as constants: a score_mod cannot use them as variables
    "specialize_float": True,
    "specialize_int": True,
}
ByIndex = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]  # (batch, head, query, key) → entry of a mask


def by_scores(call: Call, kernel: Kernel, *, compiled: bool = True) -> Float[Tensor, "batch heads queries value_dim"]:
    """Compute softmax(log k(s⟨q, k⟩) + bias, over the allowed keys) v by FlexAttention.

    FlexAttention is compiled once per spelling of the kernel; `compiled=False` runs the same arithmetic without
    compiling, for tests. Queries that see no key get 0.
    """
    query, key = kernel.apply_tie(call.query, call.paired_key)
    key = key.clone() if key is query else key  # torch cannot compile a kernel that gets the same tensor twice
    flex = cast("Callable[..., Tensor]", _compile_flex(kernel.spelling) if compiled else flex_attention)
    mod = _score_mod(call, kernel)
    change = torch._dynamo.config.patch  # private, but nothing else changes these settings for a single call
    with change(LIMITS):
        mask = _block_mask(call, kernel, compiled=compiled)
    with change(LIMITS | CONSTANTS):
        return flex(query, key, call.paired_value, score_mod=mod, block_mask=mask, scale=call.scale)


# fullgraph: parts that torch cannot compile would be computed with O(T²) memory
_compile_flex = cache(lambda spelling: torch.compile(flex_attention, fullgraph=True))
_create_compiled_mask = cache(lambda: torch.compile(create_block_mask, fullgraph=True, dynamic=True))


def _score_mod(call: Call, kernel: Kernel) -> Callable[..., Tensor]:
    """Build the function (score, batch, head, query, key) → log k + bias."""
    function, numbers, cap = kernel.info.function, dict(kernel.parameters), call.softcap
    bias = None if call.bias is None else _by_index(call, call.bias)

    def log_k(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        value = function(score if cap is None else (score / cap).tanh() * cap, **numbers)
        return value if bias is None else value + bias(batch, head, query, key)

    return log_k


def _block_mask(call: Call, kernel: Kernel, *, compiled: bool) -> BlockMask | None:
    """Combine the model's mask or causality with the kernel's filter; return None if every query sees every key."""
    conditions: list[ByIndex] = []
    if call.allowed is not None:
        conditions.append(_by_index(call, call.allowed))
    elif call.causal:
        conditions.append(lambda batch, head, query, key: query >= key)
    if kernel.filter is not None:
        conditions.append(_filter_by_index(call, kernel.filter))
    if not conditions:
        return None

    shape = (1, 1) if call.allowed is None else call.allowed.shape
    batches, heads = (size if other > 1 else None for size, other in zip(call.query.shape, shape[:2], strict=False))
    sizes = call.query.shape[2], call.key.shape[2]
    # uncompiled, the mask is built from a matrix of all pairs
    create = _create_compiled_mask() if compiled else create_block_mask
    return create(and_masks(*conditions), batches, heads, *sizes, device=call.query.device)


def _filter_by_index(call: Call, key_filter: KeyFilter) -> ByIndex:
    # computed outside `keeps_key`, because torch compiles everything inside
    keeps, numbers, where = key_filter.modifier.keeps, dict(key_filter.parameters), positions(call, key_filter)
    assert keeps is not None  # noqa: S101  # a tie is not a filter
    batch_size, queries = call.query.shape[0], call.query.shape[2]
    query_positions, first = where.query.expand(batch_size, queries), where.first[:, 0].expand(batch_size)

    def keeps_key(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        start = first[batch]
        return keeps(query_positions[batch, query] - start, key - start, **numbers)

    return keeps_key


def _by_index(call: Call, matrix: Tensor) -> ByIndex:
    """Return a function that looks up entries of a mask or bias by their indices."""
    whole = matrix.expand(*call.query.shape[:2], *matrix.shape[2:])
    return lambda batch, head, query, key: whole[batch, head, query, key]
