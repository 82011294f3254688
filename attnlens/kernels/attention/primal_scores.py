"""Primal-Attention from the e- and r-scores of each token, in O(tokens · s), without an attention matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from attnlens.errors import UsageError
from attnlens.kernels.attention.sums import Reach, find_reach
from attnlens.kernels.spec import Kernel, wide
from attnlens.maths import ksvd
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.maths.ksvd import Convention

    Tokens = Float[Tensor, "batch heads tokens features"]
    Scores = Float[Tensor, "batch heads tokens scores"]
    Map = Float[Tensor, "heads features scores"]
    Real = Bool[Tensor, "#batch #heads tokens"] | None


class Features(NamedTuple):
    """Features mapped linearly to scores: e_i = W_eᵀFφ(q_i), r_j = W_rᵀFφ(k_j) (Chen et al. 2023, Eq. 6)."""

    query: Tokens  # Fφ(q), in float32 or better
    key: Tokens  # Fφ(k), with keys repeated under GQA
    real: Real = None  # which tokens are not padding; None for all


def features(call: Call, samples: int = 0) -> Features:
    """Compute cosine features of a call's queries and keys, or of their running means if the mask is causal.

    The running means are those of the published code: queries and keys are averaged over the tokens 0 … i *before* they
    are normalised (so that the divisor cancels). F is the identity if `samples` = 0; otherwise it consists of that many
    evenly spaced rows of φ(k) (the paper takes rows of the module's input, which a call does not have). Raises
    UsageError for cross-attention, a key-value cache, a mask that is neither causal nor one of padding, and samples
    under a causal mask.
    """
    keys_reached = whole_reach(call)
    real = keys_reached.real
    query, key = cosine_features(call.query, call.paired_key, real, causal=keys_reached.causal)
    if samples:
        if keys_reached.causal:
            raise UsageError(
                "samples takes rows of the whole text, but this site's mask is causal: future tokens would leak.",
                "Leave out samples: causal primal attention is data-independent.",
            )
        rows = ksvd.evenly_spaced(key, samples, real)
        query, key = query @ rows.mT, key @ rows.mT
    return Features(query, key, real)


def cosine_features(query: Tokens, key: Tokens, real: Real, *, causal: bool) -> tuple[Tokens, Tokens]:
    """Compute x/‖x‖ of queries and keys, or of their running means if `causal`, in float32 or better."""
    query, key = wide(query), wide(key)
    if causal:
        query, key = running(query, real), running(key, real)
    return ksvd.unit(query), ksvd.unit(key)


def whole_reach(call: Call) -> Reach:
    """Return whether the call is causal and which tokens are real; raise UsageError if primal scores are undefined."""
    refuse_primal(call)
    keys_reached = find_reach(call)
    if keys_reached is None:
        raise UsageError(
            "Primal attention averages over all tokens up to a query, but this site's mask is neither causal nor a "
            "mask of padded tokens alone.",
            "Leave out such layers.",
        )
    return keys_reached


def refuse_primal(call: Call) -> None:
    """Raise UsageError if e- and r-scores belong to different tokens."""
    if call.cross:
        raise UsageError(
            "Primal attention combines the e-score of a token (from its query) with its r-score (from its key); in "
            "cross-attention, queries and keys belong to two sequences.",
            "Choose --part encoder or --part decoder.",
        )
    queries, keys = call.query.shape[2], call.key.shape[2]
    if queries != keys:
        raise UsageError(
            f"Primal attention needs the queries of all tokens; here {queries} meet {keys} keys.",
            "Run without a key-value cache (use_cache=False).",
        )


def by_primal(call: Call, kernel: Kernel) -> Float[Tensor, "batch heads queries value_dim"]:
    """Compute W_c[e_i; r_i] + b for every token; values are not used (Chen et al. 2023, Eq. 6 and section 3.3)."""
    phi = features(call, int(kernel.parameters.get("samples", 0)))
    output: Tensor = kernel.info.function(phi.query, phi.key, **kernel.parameters, **kernel.fitted)
    return output.to(call.query.dtype)


def regulariser(call: Call, kernel: Kernel, convention: Convention) -> Float[Tensor, ""]:
    """Compute the term that η multiplies, for one layer under a primal kernel: see `average_layer`."""
    phi = features(call, int(kernel.parameters.get("samples", 0)))
    names = ("query_map", "key_map", "log_multipliers")
    query_map, key_map, log_multipliers = (kernel.fitted[name].to(phi.query) for name in names)
    e, r = phi.query @ query_map, phi.key @ key_map
    return average_layer(objectives(e, r, query_map, key_map, log_multipliers.exp(), phi.real, convention), convention)


def average_layer(objective: Float[Tensor, "batch heads"], convention: Convention) -> Float[Tensor, ""]:
    """Average one layer's regulariser over sequences: Σ_heads J² (paper), (mean_heads J)² (code)."""
    return ksvd.regulariser(objective[:, None], convention).mean()


def objectives(
    e: Scores,
    r: Scores,
    query_map: Map,
    key_map: Map,
    multipliers: Float[Tensor, "heads scores"],
    real: Real,
    convention: Convention,
) -> Float[Tensor, "batch heads"]:
    """Compute J of every sequence and head (ksvd.objective) over real tokens: padding enters neither sums nor means."""
    if real is not None:
        # in the code convention ksvd.objective divides by all tokens: rescale to the real ones (at least 1: a sequence
        # may be all padding)
        count = real.sum(-1).clamp_min(1) if convention == "code" else real.shape[-1]
        share = (real * (real.shape[-1] / torch.as_tensor(count).to(e)[..., None]).sqrt())[..., None]
        e, r = e * share, r * share
    return ksvd.objective(e, r, query_map, key_map, multipliers, convention)


def running(x: Tokens, real: Real = None) -> Tokens:
    """Compute row i as the mean of the kept rows among 0 … i; zero before the first kept row."""
    if real is None:
        count = torch.arange(1, x.shape[-2] + 1, device=x.device, dtype=x.dtype)[:, None]
        return x.cumsum(-2) / count
    count = real.to(x.dtype).cumsum(-1).clamp_min(1)[..., None]
    return x.masked_fill(~real[..., None], 0.0).cumsum(-2) / count
