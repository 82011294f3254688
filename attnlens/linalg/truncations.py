"""How few features of the exponential kernel do for a head's attention: Taylor orders and ranks within an error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnlens.linalg.parallel import over_heads

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.records import QueryKey

TINY = torch.finfo(torch.float64).tiny


def taylor_order(
    query_key: QueryKey, error: float, largest: int, *, centred: bool = False
) -> Float[Tensor, "*batch heads"]:
    """The least even N ≤ `largest` at which attention with Σ_{n≤N} xⁿ/n! is within `error`; NaN where none is.

    x_ij is the head's own score, as in the kernel taylor:N, times what the model's position bias adds; `centred`: x_ij
    is all that softmax is given (score and bias), less its mean over the keys that query i sees, which the attention
    fixes. Within: the total variation ½Σ_j|p̂_ij − p_ij|, in [0, 1], in the mean over queries that see two keys or more.
    At N = 0 attention is even but for bias. NaN too where no query sees two keys.

    Float64 is enough up to N = 64: the alternating sum of x < 0 is off by e^{|x|}·1e−16 of what a row's largest weight
    is, and where that matters (|x| > 32) even the exact sum is larger than its neighbours until N > e·|x|.
    """
    score, posed = query_key.content.logits, query_key
    shift = torch.zeros_like(score[..., :1])
    if centred:
        seen = _visible(query_key)
        score, posed = query_key.logits, replace(query_key, bias=None)
        shift = score.masked_fill(~seen, 0.0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    score = score - shift
    term = total = torch.ones_like(score)
    found = torch.full_like(score[..., 0, 0], torch.nan)
    for n in range(largest + 1):
        if n > 0:
            term = term * score / n
            total = total + term
        if n % 2 == 0:
            # Even partial sums are above 0; what rounding puts below is 0.
            found = _noted(found, n, _attention(total.clamp(min=0), -shift, posed), query_key, error)
        if not bool(found.isnan().any()):
            break
    return found


def feature_rank(query_key: QueryKey, error: float) -> Float[Tensor, "*batch heads"]:
    """The least m at which attention with the leading m components of the kernel matrix is within `error`.

    K_ij = d_i exp(score_ij) of all pairs of tokens, hidden ones as well, with d_i such that rows sum to 1 (softmax
    ignores d). K_m, the m leading terms of its SVD, is m features of each query and key; the position bias multiplies
    them, the mask hides what it hides, and rows are divided by their sum. Within: as in `taylor_order`; a query whose
    sum is not above 0 has error 1. Truncation is the best of rank m for K in the squared error over all pairs, and not
    for the visible weights: m features are enough, and fewer may be. NaN where no query sees two keys, or where hidden
    scores are so much larger that rounding leaves nothing of the visible ones.
    """
    score = query_key.content.logits
    unit = -score.logsumexp(-1, keepdim=True)
    left, values, right = _decomposed((score + unit).exp())
    total = torch.zeros_like(score)
    found = torch.full_like(values[..., 0], torch.nan)
    for m in range(values.shape[-1]):
        total = total + left[..., m, None] * values[..., m, None, None] * right[..., m, None, :]
        found = _noted(found, m + 1, _attention(total, unit, query_key), query_key, error)
        if not bool(found.isnan().any()):
            break
    return found


def gaussian_like(query_key: QueryKey, seed: int = 0) -> QueryKey:
    """Independent normal queries and keys with the mean and covariance that the head's own have over the tokens."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (_normal(side.double(), generator) for side in (query_key.query, query_key.paired_key))
    return replace(query_key, query=query, key=key, key_of=tuple(range(len(query_key.heads))))


def _normal(
    side: Float[Tensor, "*batch heads n head_dim"], generator: torch.Generator
) -> Float[Tensor, "*batch heads n head_dim"]:
    """mean + G(X − mean)/√n, G standard normal and the same of every head and window of n tokens."""
    n = side.shape[-2]
    mixing = torch.randn(n, n, generator=generator, dtype=torch.float64).to(side.device)
    mean = side.mean(-2, keepdim=True)
    return mean + mixing @ (side - mean) / n**0.5


def _decomposed(matrix: Float[Tensor, "*batch n m"]) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ and Vᵀ, with U by columns."""
    n, m = matrix.shape[-2:]
    least = min(n, m)

    def joined(piece: Tensor) -> Tensor:
        left, values, right = torch.linalg.svd(piece, full_matrices=False)
        return torch.cat((left.mT, values[..., None], right), -1)

    whole = over_heads(joined, matrix)
    left, values, right = whole.split([n, 1, m], -1)
    assert values.shape[-2] == least
    return left.mT, values[..., 0], right


def _visible(query_key: QueryKey) -> Bool[Tensor, "*batch heads n m"]:
    if query_key.allowed is None:
        return torch.ones_like(query_key.logits, dtype=torch.bool)
    return query_key.allowed.expand_as(query_key.logits)


def _attention(
    kernel: Float[Tensor, "*batch heads n m"], unit: Float[Tensor, "*batch heads n 1"], query_key: QueryKey
) -> Float[Tensor, "*batch heads n m"]:
    """k_ij e^{b_ij}/(Σ_j k_ij e^{b_ij} + e^{sink}) over the keys that i sees, where the kernel holds e^unit_i · k_ij.

    NaN in rows whose sum is not above 0.
    """
    weights = kernel.masked_fill(~_visible(query_key), 0.0)
    if query_key.bias is not None:
        bias = query_key.bias.double().expand_as(kernel).masked_fill(~_visible(query_key), -torch.inf)
        most = bias.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        weights, unit = weights * (bias - most).exp(), unit - most
    total = weights.sum(-1, keepdim=True)
    if query_key.sinks is not None:
        total = total + (query_key.sinks.double()[:, None, None] + unit).exp()
    return weights / torch.where(total > 0, total, torch.nan)


def _noted(found: Tensor, step: int, attention: Tensor, query_key: QueryKey, error: float) -> Tensor:
    """`step` where nothing is found yet and that attention is within `error` of the head's own."""
    own = query_key.attention
    apart = ((attention - own).abs().sum(-1) + (attention.sum(-1) - own.sum(-1)).abs()) / 2
    chooses = _visible(query_key).sum(-1) >= 2
    mean = torch.where(chooses, apart.clamp(max=1).nan_to_num(nan=1.0), 0.0).sum(-1) / chooses.sum(-1)
    # NaN compares as false: a head without such queries has no value.
    return torch.where(found.isnan() & (mean <= error), float(step), found)
