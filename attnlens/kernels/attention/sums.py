"""Fused attention: SDPA for scalar products, running sums for feature maps, hybrids, and Primal-Attention."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from attnlens.errors import ModelError, UsageError
from attnlens.kernels.attention.rows import near_scores
from attnlens.kernels.spec import Kernel, refuse_unpaired, smallest_kernel, wide
from attnlens.maths import ksvd
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from attnlens.kernels.registry import Key, Query, Tokens
    from attnlens.maths.ksvd import Convention

    Value = Float[Tensor, "batch heads keys value_dim"]
    Sums = Float[Tensor, "batch heads queries value_dim"]
    Features = Float[Tensor, "batch heads tokens features"]
    Scores = Float[Tensor, "batch heads tokens scores"]
    Map = Float[Tensor, "heads features scores"]
    Multipliers = Float[Tensor, "heads scores"]
    # True for tokens that are not padding; None: no token is padding
    Real = Bool[Tensor, "#batch #heads tokens"] | None


def by_products(call: Call, kernel: Kernel) -> Sums:
    """Compute softmax(s'⟨q', k'⟩ + bias, over the allowed keys) v by SDPA with the kernel's q', k', s'.

    Queries that see no key get 0. The only tensor of size queries × keys is the model's mask, or mask plus bias.
    """
    assert kernel.info.dot is not None  # noqa: S101  # guaranteed by route
    query, key = kernel.apply_tie(call.query, call.paired_key)
    value = call.paired_value
    query, key, scale = kernel.info.dot(query, key, call.scale, **kernel.parameters, **kernel.fitted)
    query, key = query.to(value.dtype), key.to(value.dtype)
    mask: Tensor | None = call.allowed
    if call.bias is not None:
        seen, mask = call.visible(), call.bias.to(call.query.dtype)
        mask = mask if seen is None else mask.masked_fill(~seen, -torch.inf)
    causal = mask is None and call.causal
    if causal:
        # with equal numbers of queries and keys torch uses its fast kernel; no query sees the keys cropped here
        key, value = key[..., : query.shape[-2], :], value[..., : query.shape[-2], :]
    # torch's fast kernels need the same head_dim for all three, on a GPU a multiple of 8; zeros change no product
    width = max(query.shape[-1], value.shape[-1])
    width += -width % 8 if query.is_cuda else 0
    # `pad` copies even a tensor that has that width
    query, key, padded = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    output = scaled_dot_product_attention(query, key, padded, attn_mask=mask, is_causal=causal, scale=scale)
    return output[..., : value.shape[-1]]


def as_exponential(query: Query, key: Key, scale: float, kernel: Kernel) -> tuple[Tensor, Tensor, float]:
    """Return q', k' and s' with s'⟨q'_i, k'_j⟩ = log k(q_i, k_j), up to terms that a row's softmax ignores.

    If the kernel has a tie or log k is not a scalar product, q' is log k itself and k' the identity. Raises ModelError
    for a signed kernel.
    """
    if kernel.signed:
        problem = f"Attention with the kernel {kernel.spelling} can be negative, so it is not a softmax."
        raise ModelError(problem, "Choose a model with a positive kernel.")
    if kernel.tie is None and kernel.info.dot is not None:
        return kernel.info.dot(query, key, scale, **kernel.parameters)
    logits = kernel.log(query, key, scale)
    identity = torch.eye(key.shape[2], dtype=logits.dtype, device=logits.device)
    return logits, identity.expand(*key.shape[:2], -1, -1), 1.0


CHUNK = 64  # tokens in a chunk: pairs within a chunk are computed one by one, other chunks enter by a running sum
CHUNK_ON_GPU = 512  # on a GPU 4 to 6 times as fast as 64, since fewer operations are started


class Reach(NamedTuple):
    """The keys that each query sums over."""

    causal: bool  # True if query i sums over the keys 0 … i; False if every query sums over all keys
    real: Real = None  # True for keys that are not padding; None: no key is padding


def by_sums(call: Call, kernel: Kernel) -> Sums:
    """Compute φ(q_i) Σ_j φ(k_j) v_jᵀ / φ(q_i) Σ_j φ(k_j) over the allowed keys (Katharopoulos et al. 2020, Eq. 5–10).

    The sums are in float32 or better. `smallest_kernel` is added to φ(q_i)φ(k_j), so that queries whose features
    underflow attend uniformly; for a signed kernel, queries whose sums are all zero attend uniformly. The output is
    zero for a query that sees no key, and not finite if a signed denominator is zero.
    """
    keys_reached = find_reach(call)
    assert keys_reached is not None  # noqa: S101  # guaranteed by route
    causal, real = keys_reached
    exact = torch.promote_types(call.query.dtype, torch.float32)
    query, key = (x.to(exact) for x in kernel.apply_tie(call.query, call.paired_key))
    # a last column of ones sums the denominators along with the values
    value = pad(call.paired_value.to(exact), (0, 1), value=1.0)

    def side(x: Tokens, which: str, rows: slice) -> Float[Tensor, "batch heads rows features"]:
        phi = kernel.phi(x[..., rows, :], call.scale, which)
        return phi if which == "query" or real is None else phi.masked_fill(~real[..., rows, None], 0.0)

    sums = (_causal if causal else _bidirectional)(query, key, value, side)
    # the sums for uniform attention: Σ_j v_j over the allowed keys, and the number of these keys
    uniform = value if real is None else value.masked_fill(~real[..., None], 0.0)
    uniform = uniform.cumsum(-2) if causal else uniform.sum(-2, keepdim=True)
    if kernel.signed:  # adding `smallest_kernel` would hide that a signed sum cancels
        sums = torch.where((sums == 0).all(-1, keepdim=True), uniform, sums)
    else:
        sums = sums + smallest_kernel(exact) * uniform
    blind = uniform[..., -1:] == 0
    return (sums[..., :-1] / sums[..., -1:].masked_fill(blind, 1.0)).to(call.query.dtype)


Side = Callable[[Tensor, str, slice], Tensor]  # (vectors, "query" or "key", rows) → φ(vectors[rows]), 0 for padding


def _chunk_size(x: Tensor) -> int:
    return CHUNK_ON_GPU if x.is_cuda else CHUNK


def _causal(query: Query, key: Key, value: Value, side: Side) -> Sums:
    """Compute φ(q_i) Σ_{j ≤ i} φ(k_j) v_jᵀ for all i, with a running sum over chunks of tokens."""
    total, chunks, size = None, [], _chunk_size(query)
    for start in range(0, query.shape[-2], size):
        rows = slice(start, start + size)
        phi_q, phi_k, v = side(query, "query", rows), side(key, "key", rows), value[..., rows, :]
        near = (phi_q @ phi_k.mT).tril() @ v
        chunks.append(near if total is None else near + phi_q @ total)
        total = phi_k.mT @ v if total is None else total + phi_k.mT @ v
    return torch.cat(chunks, dim=-2)


def _bidirectional(query: Query, key: Key, value: Value, side: Side) -> Sums:
    """Compute φ(q_i) Σ_j φ(k_j) v_jᵀ for all i."""
    size = _chunk_size(query)
    queries, keys = ([slice(start, start + size) for start in range(0, x.shape[-2], size)] for x in (query, key))
    if len(queries) == 1:
        phi_q = side(query, "query", queries[0])
        return sum((phi_q @ side(key, "key", rows).mT) @ value[..., rows, :] for rows in keys)  # type: ignore[return-value]
    total = sum(side(key, "key", rows).mT @ value[..., rows, :] for rows in keys)
    return torch.cat([side(query, "query", rows) @ total for rows in queries], dim=-2)


def find_reach(call: Call) -> Reach | None:
    """Return the keys that each query sums over.

    Return None if the mask hides anything but padding and later keys, or if attention is causal but queries and keys
    differ in number.
    """
    seen = call.allowed
    queries, keys = call.query.shape[2], call.key.shape[2]
    if seen is None:
        return Reach(call.causal) if queries == keys or not call.causal else None
    real = seen[..., -1, :]
    if bool((seen == real[..., None, :]).all()):
        return Reach(causal=False, real=real)
    places = torch.arange(keys, device=seen.device)
    for start in range(0, queries, CHUNK):
        rows = seen[..., start : start + CHUNK, :]
        before = places[start : start + CHUNK, None] >= places
        if queries != keys or not bool((rows == real[..., None, :] & before).all()):
            return None
    return Reach(causal=True, real=real)


def by_hybrid(call: Call, kernel: Kernel) -> Sums:
    """Compute Σ_j w_ij v_j / Σ_j w_ij; w_ij is γ·exp(s_ij − max_near s_ij) for near keys and φ(q_i)φ(k_j) for others.

    γ is the weight of near keys. The result is exact and takes O(T·(w + chunk + features)) memory: each chunk of
    queries is multiplied with the first tokens (sinks) and with the chunks of keys in its window; other keys enter as
    Σ_j φ(k_j) v_jᵀ. The sums are in float32 or better, and `smallest_kernel` is added to every φ(q_i)φ(k_j). The output
    is zero for a query that sees no key.
    """
    keys_reached, near_keys = find_reach(call), kernel.near
    assert keys_reached is not None  # noqa: S101  # guaranteed by route
    assert near_keys is not None  # noqa: S101  # guaranteed by route
    tokens, sinks = call.query.shape[2], near_keys.parameters.get("sinks", 0)
    distance = near_keys.parameters["width"] - 1
    key, (causal, real) = call.paired_key, keys_reached
    phi_q, phi_k, value = _far_features(call, kernel, real, sinks)
    starts, places = range(0, tokens, CHUNK), torch.arange(tokens, device=key.device)

    def sum_pairs(rows: slice, columns: Int[Tensor, " columns"]) -> Tensor:
        near = near_keys.keeps(places[rows], columns)
        far = ~near
        if causal:
            seen = places[rows, None] >= columns
            near, far = near & seen, far & seen
        near = near[None, None] if real is None else near & real[..., None, columns]
        scores, _ = near_scores(call, kernel, key, near, rows, columns)
        # masked before exp, because a large hidden score would overflow and have a gradient of NaN
        within = scores.masked_fill(~near, -torch.inf).exp()
        beyond = (phi_q[..., rows, :] @ phi_k[..., columns, :].mT).masked_fill(~far, 0.0)
        return (within + beyond) @ value[..., columns, :]

    sums = [phi_k[..., s : s + CHUNK, :].mT @ value[..., s : s + CHUNK, :] for s in starts]
    nothing = torch.zeros_like(sums[0])
    before = list(accumulate(sums, initial=nothing))
    after = None if causal else list(accumulate(reversed(sums), initial=nothing))[::-1]
    chunks = []
    for number, start in enumerate(starts):
        rows = slice(start, min(start + CHUNK, tokens))
        # the chunks first … last − 1 contain all keys that are near to a query of these rows
        first = max(0, start - distance) // CHUNK
        last = number + 1 if after is None else min(len(sums), (rows.stop + distance - 1) // CHUNK + 1)
        far = before[first] if after is None else before[first] + after[last]
        start, stop = first * CHUNK, min(last * CHUNK, tokens)
        columns = torch.cat((places[: min(sinks, start)], places[start:stop], places[stop:sinks]))
        chunks.append(sum_pairs(rows, columns) + phi_q[..., rows, :] @ far)
    weighted = torch.cat(chunks, dim=-2)
    total = weighted[..., -1:]
    return (weighted[..., :-1] / total.masked_fill(total == 0, 1.0)).to(call.query.dtype)


def _far_features(call: Call, kernel: Kernel, real: Tensor | None, sinks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return φ(q), φ(k) and the values for the sums over far keys; φ(k) is zero at padding and sinks.

    An extra feature adds `smallest_kernel` to each product; an extra value of 1 sums the denominator.
    """
    exact = torch.promote_types(call.query.dtype, torch.float32)
    query, key = (x.to(exact) for x in (call.query, call.paired_key))
    query = pad(kernel.phi(query, call.scale, "query"), (0, 1), value=smallest_kernel(exact))
    key = pad(kernel.phi(key, call.scale, "key"), (0, 1), value=1.0)
    key = key if real is None else key.masked_fill(~real[..., None], 0.0)
    key = pad(key[..., sinks:, :], (0, 0, min(sinks, key.shape[-2]), 0))
    return query, key, pad(call.paired_value.to(exact), (0, 1), value=1.0)


def features(call: Call, samples: int = 0) -> tuple[Features, Features, Real]:
    """Compute Fφ(q) and Fφ(k) in float32 or better, and the mask of tokens that are not padding (None: all).

    φ normalises queries and keys or, under a causal mask, their means over tokens 0 … i. F is the identity or, if
    `samples` > 0, that many evenly spaced rows of φ(k) (in the paper, of the input). Raises UsageError for
    cross-attention, a key-value cache, masks other than causal and padding masks, and samples under a causal mask.
    """
    causal, real = whole_reach(call)
    return *cosine_features(call.query, call.paired_key, real, causal=causal, samples=samples), real


def cosine_features(
    query: Tokens, key: Tokens, real: Real, *, causal: bool, samples: int = 0, rows: Tokens | None = None
) -> tuple[Features, Features]:
    """Normalise queries and keys to x/‖x‖; if `causal`, normalise their running means instead.

    If `samples` is not 0, the results are projected onto `samples` evenly spaced rows of `rows` (default: of the
    normalised keys). Raises UsageError if `samples` and `causal` are combined.
    """
    query, key = (ksvd.unit(running_means(wide(x), real) if causal else wide(x)) for x in (query, key))
    if samples and causal:
        problem = "`samples` takes rows of the whole text, so future tokens would leak through the causal mask."
        raise UsageError(problem, "Leave out `samples`, or choose bidirectional sites.")
    if samples:
        chosen = ksvd.evenly_spaced(key if rows is None else wide(rows), samples, real)
        query, key = query @ chosen.mT, key @ chosen.mT
    return query, key


def whole_reach(call: Call) -> Reach:
    """Return the keys that each query sums over; raise UsageError if primal scores are undefined for this call."""
    refuse_unpaired("primal", call.query.shape[2], call.key.shape[2], cross=call.cross)
    if (keys_reached := find_reach(call)) is None:
        problem = "Primal attention averages over tokens, but this site's mask is neither causal nor a padding mask."
        raise UsageError(problem, "Leave out such layers with --layers.")
    return keys_reached


def by_primal(call: Call, kernel: Kernel) -> Sums:
    """Compute W_c[e_i; r_i] + b from the scores e_i and r_i of every token i (Chen et al. 2023, Eq. 6, section 3.3)."""
    query, key, _ = features(call, int(kernel.parameters.get("samples", 0)))
    output: Tensor = kernel.info.function(query, key, **kernel.parameters, **kernel.fitted)
    return output.to(call.query.dtype)


def regulariser(call: Call, kernel: Kernel, convention: Convention) -> Float[Tensor, ""]:
    """Compute one primal layer's regulariser, averaged over sequences; its weight in the loss is η."""
    query, key, real = features(call, int(kernel.parameters.get("samples", 0)))
    names = ("query_map", "key_map", "log_multipliers")
    query_map, key_map, log_multipliers = (kernel.fitted[name].to(query) for name in names)
    scores = query @ query_map, key @ key_map
    objective = objectives(*scores, query_map, key_map, log_multipliers.exp(), real, convention)
    return ksvd.regulariser(objective[:, None], convention).mean()


def objectives(
    e: Scores, r: Scores, query_map: Map, key_map: Map, multipliers: Multipliers, real: Real, convention: Convention
) -> Float[Tensor, "batch heads"]:
    """Compute the objective J (ksvd.objective) of every sequence and head over the tokens that are not padding."""
    if real is not None:
        # under "code", ksvd.objective divides by the number of all tokens: rescale to the number of real ones
        count = real.sum(-1).clamp_min(1) if convention == "code" else real.shape[-1]
        share = (real * (real.shape[-1] / torch.as_tensor(count).to(e)[..., None]).sqrt())[..., None]
        e, r = e * share, r * share
    return ksvd.objective(e, r, query_map, key_map, multipliers, convention)


def running_means(x: Tokens, real: Real = None) -> Tokens:
    """Return running means: row i is the mean of the rows 0 … i that are not padding, or zero if there are none."""
    if real is None:
        return x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1, device=x.device, dtype=x.dtype)[:, None]
    count = real.to(x.dtype).cumsum(-1).clamp_min(1)[..., None]
    return x.masked_fill(~real[..., None], 0.0).cumsum(-2) / count
