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
    # otherwise a kernel that is recompiled too often is computed in O(T²) memory, and nobody is told
    "fail_on_recompile_limit_hit": True,
    # torch counts all kernels and kinds of shapes of one process together
    "recompile_limit": 64,
    # a kernel's numbers belong to its formula: as variables they can't stand in a score_mod
    "specialize_float": True,
    "specialize_int": True,
}
"""How torch compiles here."""

Mod = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
"""(batch, head, query, key), all indices, → whether the query may see the key."""


def by_scores(call: Call, kernel: Kernel, *, compiled: bool = True) -> Float[Tensor, "batch heads queries value_dim"]:
    """softmax(log k(s⟨q, k⟩) + bias, over the keys allowed) v, each score changed where it is made.

    Compiled once for a spelling of the kernel; `compiled=False` is the same arithmetic without a kernel, for tests.
    Blocks of keys that no query of a block sees are not computed. Rows that may see nothing are zero.
    """
    query, key = kernel.tied(call.query, call.paired_key)
    key = key.clone() if key is query else key  # torch compiles no kernel of one tensor twice
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
    """FlexAttention for one spelling of a kernel."""
    return torch.compile(flex_attention)


def _score_mod(call: Call, kernel: Kernel) -> Callable[..., Tensor]:
    """(score, batch, head, query, key) → log k + bias."""
    log_k, numbers, cap, bias = kernel.info.function, dict(kernel.parameters), call.softcap, _indexed(call, call.bias)

    def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        capped = score if cap is None else (score / cap).tanh() * cap
        found = log_k(capped, **numbers)
        return found if bias is None else found + bias(batch, head, query, key)

    return changed


def _block_mask(call: Call, kernel: Kernel, *, compiled: bool) -> BlockMask | None:
    """Causality, the model's mask and the kernel's filter as one; None where all see all."""
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
    """A mask or bias as a function of indices."""
    if matrix is None:
        return None
    whole = matrix.expand(*call.query.shape[:2], *matrix.shape[2:])

    def at(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return whole[batch, head, query, key]

    return at
