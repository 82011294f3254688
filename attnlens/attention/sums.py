"""Kernels with finitely many features, by running sums in O(tokens) time and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from attnlens.kernels.spec import Kernel, least
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    Tokens = Float[Tensor, "batch heads tokens head_dim"]
    Query = Float[Tensor, "batch heads queries head_dim"]
    Key = Float[Tensor, "batch heads keys head_dim"]
    Value = Float[Tensor, "batch heads keys value_dim"]
    Sums = Float[Tensor, "batch heads queries value_dim"]

CHUNK = 64
"""Tokens that meet each other one by one before they enter the sum."""


@dataclass(frozen=True)
class Reach:
    """Which keys enter whose sum."""

    causal: bool
    """Whether query i sums over the keys 0 … i, or every query over all."""
    kept: Bool[Tensor, "#batch #heads keys"] | None = None
    """Which keys are no padding; None means all."""


def by_sums(call: Call, kernel: Kernel) -> Float[Tensor, "batch heads queries value_dim"]:
    """φ(q_i) Σ_j φ(k_j) v_jᵀ / φ(q_i) Σ_j φ(k_j) over the keys allowed (Katharopoulos et al. 2020, Eq. 5, 9 and 10).

    Sums in float32 or better, with `least` added to every φ(q_i)φ(k_j) as in Kernel.log, so that a query whose features
    underflow attends evenly to the keys allowed; with signed features one does whose sums are all zero. A query that
    may see nothing gets zero, and one whose signed denominators cancel to zero no finite number.
    """
    found = reach(call)
    assert found is not None  # noqa: S101  # route has seen to it
    exact = torch.promote_types(call.query.dtype, torch.float32)
    query, key = (x.to(exact) for x in kernel.tied(call.query, call.paired_key))
    # a last column of ones sums the denominators along with the values
    value = pad(call.paired_value.to(exact), (0, 1), value=1.0)

    def side(x: Tokens, which: str, rows: slice) -> Float[Tensor, "batch heads rows features"]:
        phi = kernel.phi(x[..., rows, :], call.scale, which)
        if which == "query" or found.kept is None:
            return phi
        return phi.masked_fill(~found.kept[..., rows, None], 0.0)

    sums = (_causal if found.causal else _everything)(query, key, value, side)
    even = _even(value, found)
    # added to a signed sum that cancels, the least number would hide it
    sums = torch.where((sums == 0).all(-1, keepdim=True), even, sums) if kernel.signed else sums + least(exact) * even
    blind = even[..., -1:] == 0
    return (sums[..., :-1] / sums[..., -1:].masked_fill(blind, 1.0)).to(call.query.dtype)


def _even(
    value: Float[Tensor, "batch heads keys value_dim"], found: Reach
) -> Float[Tensor, "batch heads rows value_dim"]:
    """Row i: Σ_j v_j over the keys allowed; one row for all where all see the same."""
    if found.kept is not None:
        value = value.masked_fill(~found.kept[..., None], 0.0)
    return value.cumsum(-2) if found.causal else value.sum(-2, keepdim=True)


Side = Callable[["Tensor", str, slice], "Tensor"]
"""(vectors, "query" or "key", rows) → φ of those rows, zero for padding."""


def _causal(query: Query, key: Key, value: Value, side: Side) -> Sums:
    """Row i: φ(q_i) Σ_{j ≤ i} φ(k_j) v_jᵀ; within a chunk by products, before it by the sum."""
    total, found = None, []
    for start in range(0, query.shape[-2], CHUNK):
        rows = slice(start, start + CHUNK)
        phi_q, phi_k, v = side(query, "query", rows), side(key, "key", rows), value[..., rows, :]
        near = (phi_q @ phi_k.mT).tril() @ v
        found.append(near if total is None else near + phi_q @ total)
        total = phi_k.mT @ v if total is None else total + phi_k.mT @ v
    return torch.cat(found, dim=-2)


def _everything(query: Query, key: Key, value: Value, side: Side) -> Sums:
    """Row i: φ(q_i) Σ_j φ(k_j) v_jᵀ, from the side on which fewer numbers are needed."""
    queries = [slice(start, start + CHUNK) for start in range(0, query.shape[-2], CHUNK)]
    keys = [slice(start, start + CHUNK) for start in range(0, key.shape[-2], CHUNK)]
    if len(queries) == 1:
        phi_q = side(query, "query", queries[0])
        return sum((phi_q @ side(key, "key", rows).mT) @ value[..., rows, :] for rows in keys)  # type: ignore[return-value]
    total = sum(side(key, "key", rows).mT @ value[..., rows, :] for rows in keys)
    return torch.cat([side(query, "query", rows) @ total for rows in queries], dim=-2)


def reach(call: Call) -> Reach | None:
    """The keys that each query sums over, where the mask is causal, hides padded keys, both, or nothing; else None."""
    seen = call.allowed
    queries, keys = call.query.shape[2], call.key.shape[2]
    if seen is None:
        return Reach(call.causal) if queries == keys or not call.causal else None
    kept = seen[..., -1, :]
    if bool((seen == kept[..., None, :]).all()):
        return Reach(causal=False, kept=kept)
    places = torch.arange(keys, device=seen.device)
    for start in range(0, queries, CHUNK):
        rows = seen[..., start : start + CHUNK, :]
        before = places[start : start + CHUNK, None] >= places
        if queries != keys or not bool((rows == kept[..., None, :] & before).all()):
            return None
    return Reach(causal=True, kept=kept)
