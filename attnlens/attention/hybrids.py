"""Hybrid attention: the model's own kernel within a window, a kernel of features beyond it, one denominator."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from attnlens.attention.sums import CHUNK, Reach, reach
from attnlens.kernels.modifiers import NEAR_WEIGHT
from attnlens.kernels.spec import Kernel, least, score, wide
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    Key = Float[Tensor, "batch heads keys head_dim"]


def near_scores(
    call: Call,
    kernel: Kernel,
    key: Key,
    near: Bool[Tensor, "#batch #heads rows columns"],
    rows: slice,
    columns: slice | Int[Tensor, " columns"],
) -> tuple[Float[Tensor, "batch heads rows columns"], Float[Tensor, "batch heads rows 1"]]:
    """s_ij − max_near s_ij + log γ, and that maximum, 0 where no key is near; s the model's own scores, bias included.

    (Zhang et al. 2024, LoLCATs; keys are paired with their query heads.)
    """
    own = score(wide(call.query[..., rows, :]), wide(key[..., columns, :]), call.scale, call.softcap)
    own = own if call.bias is None else own + call.bias[..., rows, columns]
    largest = own.masked_fill(~near, -torch.inf).amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weight = kernel.fitted.get(NEAR_WEIGHT)
    shifted = own - largest
    return shifted if weight is None else shifted + weight.to(shifted)[:, None, None], largest


@dataclass(frozen=True)
class FarFeatures:
    """What the far part is made of."""

    query: Float[Tensor, "batch heads tokens features"]
    """φ(q), and the least number."""
    key: Float[Tensor, "batch heads tokens features"]
    """φ(k), and 1; 0 for padding, and for the first tokens where these are near to all."""
    value: Float[Tensor, "batch heads tokens wider"]
    """Values, and 1, which sums the denominators."""


def by_hybrid(call: Call, kernel: Kernel) -> Float[Tensor, "batch heads queries value_dim"]:
    """Σ_j w_ij v_j / Σ_j w_ij, w_ij = γ·exp(s_ij − max_near s_ij) of near keys and φ(q_i)φ(k_j) of the others.

    Exact, in O(T·(w + chunk + features)) memory: a chunk of queries meets the chunks that its window touches one by
    one, first tokens that are near to all too, and the sum Σ_j φ(k_j) v_jᵀ of the others. In float32 or better, with
    `least` added to every φ(q_i)φ(k_j) as in Kernel.log. A query that may see nothing gets zero.
    """
    found = reach(call)
    assert found is not None  # noqa: S101  # route has seen to both
    assert kernel.near is not None  # noqa: S101
    tokens, distance = call.query.shape[2], kernel.near.parameters["width"] - 1
    sinks = kernel.near.parameters.get("sinks", 0)
    sides, key = _sides(call, kernel, found, sinks), call.paired_key
    starts, places = range(0, tokens, CHUNK), torch.arange(tokens, device=key.device)
    sums = [sides.key[..., s : s + CHUNK, :].mT @ sides.value[..., s : s + CHUNK, :] for s in starts]
    nothing = torch.zeros_like(sums[0])
    before = list(accumulate(sums, initial=nothing))
    after = None if found.causal else list(accumulate(reversed(sums), initial=nothing))[::-1]
    rows_found = []
    for number, start in enumerate(starts):
        rows = slice(start, min(start + CHUNK, tokens))
        first = max(0, start - distance) // CHUNK
        last = number + 1 if after is None else min(len(sums), (rows.stop + distance - 1) // CHUNK + 1)
        far = before[first] if after is None else before[first] + after[last]
        start, stop = first * CHUNK, min(last * CHUNK, tokens)
        columns = torch.cat((places[: min(sinks, start)], places[start:stop], places[stop:sinks]))
        met = _met(call, kernel, key, sides, found, rows, columns)
        rows_found.append(met + sides.query[..., rows, :] @ far)
    every = torch.cat(rows_found, dim=-2)
    total = every[..., -1:]
    return (every[..., :-1] / total.masked_fill(total == 0, 1.0)).to(call.query.dtype)


def _sides(call: Call, kernel: Kernel, found: Reach, sinks: int) -> FarFeatures:
    exact = torch.promote_types(call.query.dtype, torch.float32)
    query, key = (
        kernel.phi(x.to(exact), call.scale, side) for x, side in ((call.query, "query"), (call.paired_key, "key"))
    )
    query, key = pad(query, (0, 1), value=least(exact)), pad(key, (0, 1), value=1.0)
    key = key if found.kept is None else key.masked_fill(~found.kept[..., None], 0.0)
    key = pad(key[..., sinks:, :], (0, 0, min(sinks, key.shape[-2]), 0))
    return FarFeatures(query, key, pad(call.paired_value.to(exact), (0, 1), value=1.0))


def _met(
    call: Call,
    kernel: Kernel,
    key: Key,
    sides: FarFeatures,
    found: Reach,
    rows: slice,
    columns: Int[Tensor, " columns"],
) -> Float[Tensor, "batch heads rows wider"]:
    """Σ w_ij v_j over the keys `columns`, near ones and others."""
    assert kernel.near is not None  # noqa: S101  # by_hybrid has seen to it
    i, j = torch.arange(rows.start, rows.stop, device=key.device), columns
    near = kernel.near.keeps(i, j)
    far = ~near
    if found.causal:
        near, far = near & (i[:, None] >= j), far & (i[:, None] >= j)
    near = near[None, None] if found.kept is None else near & found.kept[..., None, columns]
    own, _ = near_scores(call, kernel, key, near, rows, columns)
    # masked before exp: a score above those seen would overflow, and give NaN for a gradient
    within = own.masked_fill(~near, -torch.inf).exp()
    beyond = (sides.query[..., rows, :] @ sides.key[..., columns, :].mT).masked_fill(~far, 0.0)
    return (within + beyond) @ sides.value[..., columns, :]
