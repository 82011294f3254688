"""Kernels of the score, and filters, through compiled FlexAttention on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from attnlens.kernels.attention.rows import positions
from attnlens.kernels.spec import Kernel
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

COMPILATION = {
    # otherwise a kernel recompiled too often silently falls back to O(T²) memory
    "fail_on_recompile_limit_hit": True,
    # torch counts all kernels and kinds of shapes of a process together
    "recompile_limit": 64,
    # a kernel's parameters belong to its formula: a score_mod cannot use them as variables
    "specialize_float": True,
    "specialize_int": True,
}
"""torch compilation settings for these kernels."""

Mod = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
"""Maps indices (batch, head, query, key) to whether the query may see the key."""


def by_scores(call: Call, kernel: Kernel, *, compiled: bool = True) -> Float[Tensor, "batch heads queries value_dim"]:
    """Compute softmax(log k(s⟨q, k⟩) + bias, over the allowed keys) v, transforming each score where it is computed.

    Compiled once per spelling of the kernel; `compiled=False` runs the same arithmetic uncompiled, for tests. Blocks of
    keys that no query of a block sees are skipped. Rows that may see nothing are zero.
    """
    query, key = kernel.tied(call.query, call.paired_key)
    key = key.clone() if key is query else key  # torch cannot compile a kernel that gets the same tensor twice
    of = _compiled(kernel.spelling) if compiled else flex_attention
    with torch._dynamo.config.patch(COMPILATION):
        found = of(
            query,
            key,
            call.paired_value,
            score_mod=_score_mod(call, kernel),
            block_mask=_block_mask(call, kernel, compiled=compiled),
            scale=call.scale,
        )
    return cast(torch.Tensor, found)


@cache
def _compiled(spelling: str) -> Any:
    """Compile FlexAttention for one spelling of a kernel."""
    return torch.compile(flex_attention)


def _score_mod(call: Call, kernel: Kernel) -> Callable[..., Tensor]:
    """Build the function (score, batch, head, query, key) → log k + bias."""
    log_k, numbers, cap, bias = kernel.info.function, dict(kernel.parameters), call.softcap, _indexed(call, call.bias)

    def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        capped = score if cap is None else (score / cap).tanh() * cap
        found = log_k(capped, **numbers)
        return found if bias is None else found + bias(batch, head, query, key)

    return changed


def _block_mask(call: Call, kernel: Kernel, *, compiled: bool) -> BlockMask | None:
    """Combine causality, the model's mask and the kernel's filter; return None if every query sees every key."""
    mods = [*_causal(call), *_allowed(call), *_kept(call, kernel)]
    if not mods:
        return None

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = mods[0](batch, head, query, key)
        for mod in mods[1:]:
            found = found & mod(batch, head, query, key)
        return found

    batches = call.query.shape[0] if call.allowed is not None and call.allowed.shape[0] > 1 else None
    heads = call.query.shape[1] if call.allowed is not None and call.allowed.shape[1] > 1 else None
    sizes = call.query.shape[2], call.key.shape[2]
    return create_block_mask(seen, batches, heads, *sizes, device=call.query.device, _compile=compiled)


def _causal(call: Call) -> list[Mod]:
    return [lambda batch, head, query, key: query >= key] if call.causal and call.allowed is None else []


def _allowed(call: Call) -> list[Mod]:
    found = _indexed(call, call.allowed)
    return [] if found is None else [found]


def _kept(call: Call, kernel: Kernel) -> list[Mod]:
    found = kernel.filter
    if found is None or found.modifier.keeps is None:
        return []
    keeps, numbers, where = found.modifier.keeps, dict(found.parameters), positions(call, found)
    batch_size, queries = call.query.shape[0], call.query.shape[2]
    own, first = where.own.expand(batch_size, queries), where.first[:, 0].expand(batch_size)

    def kept(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        start = first[batch]
        return keeps(own[batch, query] - start, key - start, **numbers)

    return [kept]


def _indexed(call: Call, matrix: Tensor | None) -> Mod | None:
    """Return a mask or bias as a function of indices."""
    if matrix is None:
        return None
    whole = matrix.expand(*call.query.shape[:2], *matrix.shape[2:])

    def at(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return whole[batch, head, query, key]

    return at
