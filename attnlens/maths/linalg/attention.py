"""Attention weights (entropy, largest and first weight, spectrum) and the scores behind them (parts, definiteness)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attnlens.maths.linalg.long import TiledMatrix, is_long, least_rank, map_heads, split_tiles
from attnlens.maths.linalg.spectra import EPS, over_heads, rank_at, singular_values

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.records import QueryKey

    PerToken = Float[Tensor, " n"]
    PerHead = Float[Tensor, "*batch heads"]
    Spectra = Float[Tensor, "*batch heads least"]
    PerQuery = Float[Tensor, "*batch heads n"]
    Valid = tuple[PerQuery, Bool[Tensor, "*batch heads n"]]  # a value of each query, and True if the value counts

GLANCE = 128  # Size of the leading block that is searched for a proof of indefiniteness before the whole matrix
FACTORED = 8192
"""Most tokens for which Cholesky decides if no tile proves a kernel indefinite; it takes 1.5 GB of memory."""
POSITIVE, INDEFINITE, UNDECIDED = 1.0, 0.0, torch.nan  # values of `definite`


def entropy(query_key: QueryKey) -> PerHead:
    """Return the mean over queries of −Σ p log p / log(allowed keys), in [0, 1]; uniform weights give 1.

    A sink logit counts as one more allowed key. Queries with fewer than two allowed keys are left out; NaN if no query
    remains.
    """
    return _average_queries(query_key, _entropies)


def max_weight(query_key: QueryKey) -> PerHead:
    """Return the mean of max_j p_ij, in [0, 1], over queries that see a key; NaN if there are none."""
    return _average_queries(query_key, lambda tile: (tile.attention.amax(-1), _allowed_keys(tile) >= 1))


def first_weight(query_key: QueryKey) -> PerHead:
    """Return the mean weight of the first visible key, in [0, 1], over queries that see ≥ 2 keys; NaN if none does."""
    return _average_queries(query_key, _first_weights)


def even_weight(query_key: QueryKey) -> PerHead:
    """Return the `first_weight` of uniform attention: the mean of 1/(visible keys) over queries that see ≥ 2 keys.

    A sink logit counts as a key in the denominator.
    """
    return _average_queries(query_key, lambda tile: (1 / _choices(tile).clamp(min=1), _allowed_keys(tile) >= 2))


def attention_singular_values(query_key: QueryKey, *, without_row_sums: bool = False) -> Spectra:
    """Return σ of attention P, or σ(P(I − 11ᵀ/m)) if `without_row_sums`, descending; cached in the QueryKey.

    For long sequences, the result is one NaN per head, because the full spectrum would take too long; `attention_rank`
    needs only the leading σ.
    """
    if is_long(query_key):
        return query_key.query.new_full((*query_key.query.shape[:-2], 1), torch.nan, dtype=torch.float64)
    name = "centred_attention_singular_values" if without_row_sums else "attention_singular_values"
    if name not in query_key.shared:
        attention = query_key.attention
        query_key.shared[name] = singular_values(remove_row_sums(attention) if without_row_sums else attention)
    return query_key.shared[name]


def attention_rank(query_key: QueryKey, share: float) -> PerHead:
    """Return the least k with Σ_{l≤k} σ² ≥ share · Σσ² for the σ of attention P.

    NaN if P = 0 or, for long sequences, if `least_rank` cannot prove k.
    """
    if not is_long(query_key):
        return rank_at(attention_singular_values(query_key), share)

    def rank(head: QueryKey) -> float:
        matrix = TiledMatrix(lambda: (tile.attention[0, 0] for _, tile in split_tiles(head)), head.key.shape[-2])
        return least_rank(matrix, share)

    return map_heads(rank, query_key)


def remove_row_sums(attention: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch n m"]:
    """Return P(I − 11ᵀ/m), P minus its row means: the deviation P − 11ᵀ/m from uniform attention if rows sum to 1.

    The result is exactly 0 if its norm is within rounding error.
    """
    deviation = attention - attention.mean(-1, keepdim=True)
    border = torch.finfo(attention.dtype).eps * attention.shape[-1] * torch.linalg.matrix_norm(attention)
    # Strict: rounding leaves at most this norm if the matrix is uniform.
    return torch.where((torch.linalg.matrix_norm(deviation) > border)[..., None, None], deviation, 0.0)


def _entropies(query_key: QueryKey) -> Valid:
    attention = query_key.attention
    choices = _choices(query_key)
    spread = torch.special.entr(attention).sum(-1)
    if query_key.sinks is not None:
        spread = spread + torch.special.entr((1 - attention.sum(-1)).clamp(min=0))
    chooses = choices >= 2
    return spread / torch.where(chooses, choices, 2.0).log(), chooses


def _first_weights(query_key: QueryKey) -> Valid:
    attention = query_key.attention
    if query_key.allowed is None:
        first = attention[..., 0]
    else:
        place = query_key.allowed.byte().argmax(-1, keepdim=True)
        first = attention.gather(-1, place.expand(*attention.shape[:-1], 1))[..., 0]
    return first, _allowed_keys(query_key) >= 2


def _allowed_keys(query_key: QueryKey) -> PerQuery:
    """Return the number of keys that each query can see."""
    rows = query_key.query[..., 0]
    if query_key.allowed is None:
        return torch.full_like(rows, query_key.key.shape[-2], dtype=torch.float64)
    return query_key.allowed.sum(-1).to(rows.device, torch.float64).expand_as(rows)


def _choices(query_key: QueryKey) -> PerQuery:
    """Return the number of keys that each query can see, plus one for a sink logit."""
    return _allowed_keys(query_key) + (query_key.sinks is not None)


def _average_queries(query_key: QueryKey, compute: Callable[[QueryKey], Valid]) -> PerHead:
    """Average a quantity over the queries that `compute` marks as valid, tile by tile; NaN if there are none."""
    parts = [compute(tile) for _, tile in split_tiles(query_key)]
    values, valid = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    return torch.where(valid, values, 0.0).sum(-1) / valid.sum(-1)


@dataclass(frozen=True)
class Anatomy:
    """Shares of ‖LJ‖² = Σμ₊² + Σμ₋² + ‖JAJ‖² + n‖c‖², each in [0, 1]; NaN if LJ = 0.

    J = I − 11ᵀ/n; S and A are the symmetric and antisymmetric parts of the logits L, μ are the eigenvalues of JSJ, and
    c contains the centred column means of L. Softmax ignores query-only terms, so attention depends only on LJ.
    """

    positive: PerHead  # Σμ₊²/‖LJ‖²: positive definite part of the symmetric kernel
    negative: PerHead  # Σμ₋²/‖LJ‖²: negative part of the symmetric kernel
    skew: PerHead  # ‖JAJ‖²/‖LJ‖²: asymmetry that no factor per query or key can remove
    key: PerHead  # n‖c‖²/‖LJ‖²: salience of keys, which is the same for every query


def anatomy(query_key: QueryKey) -> Anatomy:
    """Compute the shares of `Anatomy` for self-attention heads; NaN for long sequences if scores are not bilinear."""
    # Bilinear logits are reduced to a core of size 2·head_dim by QR of the centred [Q K].
    small = query_key.bilinear and 2 * query_key.query.shape[-1] < query_key.query.shape[-2]
    if small:
        parts = over_heads(_factored_parts, query_key.query, query_key.paired_key)
    elif is_long(query_key):
        parts = query_key.query.new_full((*query_key.query.shape[:-2], 4), torch.nan, dtype=torch.float64)
    else:
        parts = over_heads(_dense_parts, query_key.logits)
    return Anatomy(*parts.unbind(-1))


def _factored_parts(query: Float[Tensor, "some n head_dim"], key: Float[Tensor, "some n head_dim"]) -> Tensor:
    query, key = query.double(), key.double()
    n, size = query.shape[-2:]
    mean = query.mean(-2, keepdim=True)
    spread = key - key.mean(-2, keepdim=True)
    upper = torch.linalg.qr(torch.cat((query - mean, spread), -1), mode="r").R
    core = upper[..., :size] @ upper[..., size:].mT
    salience = n * (mean @ spread.mT).square().sum((-2, -1))
    gram = query.mT @ query
    whole = (gram * (spread.mT @ spread)).sum((-2, -1))
    return _shares(core, salience, whole, (gram * (key.mT @ key)).sum((-2, -1)), n)


def _dense_parts(logits: Float[Tensor, "some n n"]) -> Tensor:
    centred = logits - logits.mean(-1, keepdim=True)
    salience = centred.mean(-2, keepdim=True)
    n = logits.shape[-1]
    whole, uncentred = (matrix.square().sum((-2, -1)) for matrix in (centred, logits))
    return _shares(centred - salience, n * salience.square().sum((-2, -1)), whole, uncentred, n)


def _shares(core: Tensor, salience: Tensor, whole: Tensor, uncentred: Tensor, n: int) -> Float[Tensor, "some parts"]:
    """Return the four shares of `whole` = ‖LJ‖², or NaN if ‖LJ‖ is 0 within rounding, which is relative to ‖L‖.

    `core` is JLJ or a smaller matrix with the same shares, `salience` is n‖c‖², and `uncentred` is ‖L‖².
    """
    eigenvalues = torch.linalg.eigvalsh((core + core.mT) / 2)
    positive, negative = (side.clamp(min=0).square().sum(-1) for side in (eigenvalues, -eigenvalues))
    skew = ((core - core.mT) / 2).square().sum((-2, -1))
    parts = torch.stack((positive, negative, skew, salience), -1)
    # Strict: rounding leaves at most this norm if logits depend only on the query.
    defined = whole > (torch.finfo(whole.dtype).eps * n) ** 2 * uncentred
    return torch.where(defined[..., None], parts / whole[..., None], torch.nan)


def definite(logits: Float[Tensor, "*batch heads n n"]) -> PerHead:
    """Return 1 if sym K = (K + Kᵀ)/2 is positive semidefinite up to rounding, 0 if not, NaN if undecided.

    K_ij = exp(L_ij − ρ_i + κ_i), where ρ_i and κ_i are the means of row i and column i. Softmax ignores row constants;
    with this choice of constants, all L with the same attention give the same result. Scaling sym K to unit diagonal
    prevents overflow and preserves definiteness. An entry above 1 then proves sym K indefinite by a 2 × 2 minor; if
    there is no such entry, Cholesky decides.
    """
    return over_heads(_verdicts, logits)


def definite_kernel(query_key: QueryKey) -> PerHead:
    """Apply `definite` to each head's logits of all pairs, without position bias and mask."""
    content = replace(query_key.content, allowed=None)
    return map_heads(_long_verdict, content) if is_long(content) else definite(content.logits)


def _long_verdict(head: QueryKey) -> float:
    """Apply `definite` to one head; UNDECIDED if no entry is above 1 and there are more than FACTORED tokens."""
    n = head.query.shape[-2]
    gauge, half, largest = _gauge(head)
    rounding = EPS * max(largest, n)
    # The limit is that of `_verdicts`.
    if any(float(kernel.amax()) > 1 + rounding * n for _, kernel in _kernel_tiles(head, gauge, half)):
        return INDEFINITE
    if n > FACTORED:
        return UNDECIDED
    whole = gauge.new_empty(1, n, n)
    for rows, kernel in _kernel_tiles(head, gauge, half):
        whole[0, rows] = kernel
    return float(_decide_by_cholesky(whole, gauge.new_tensor([rounding])))


def _kernel_tiles(head: QueryKey, gauge: PerToken, half: PerToken) -> Iterator[tuple[slice, Float[Tensor, "rows n"]]]:
    """Yield the `_unit_kernel` of one head over a long sequence in tiles of rows, each with its slice of rows."""
    offset = gauge - half
    for rows, tile in split_tiles(head):
        logits, transposed = tile.logits[0, 0], head.sequences([0], slice(None), rows).logits[0, 0].mT
        kernel = (logits + offset[rows, None] - half).clamp_(max=1.0).exp_()
        yield rows, kernel.add_((transposed + offset - half[rows, None]).clamp_(max=1.0).exp_()).div_(2)


def _gauge(head: QueryKey) -> tuple[PerToken, PerToken, float]:
    """Return κ − ρ, half the diagonal of L + (κ − ρ)1ᵀ, and the largest |L_ij| of one head over a long sequence.

    L contains the logits; κ and ρ are the means of its columns and rows.
    """
    means, diagonal, largest = [], [], 0.0
    columns = torch.zeros(head.query.shape[-2], dtype=torch.float64, device=head.query.device)
    for rows, tile in split_tiles(head):
        logits = tile.logits[0, 0]
        means.append(logits.mean(-1))
        columns += logits.sum(0)
        diagonal.append(logits.diagonal(rows.start))
        largest = max(largest, float(logits.abs().amax()))
    gauge = columns / len(columns) - torch.cat(means)
    return gauge, (torch.cat(diagonal) + gauge) / 2, largest


def _verdicts(logits: Float[Tensor, "some n n"]) -> Float[Tensor, " some"]:
    """Return the result of `definite` for each head: search for an entry above 1; if there is none, use Cholesky."""
    verdicts = logits.new_full(logits.shape[:1], UNDECIDED)
    n = logits.shape[-1]
    gauge = logits.mean(-2) - logits.mean(-1)
    low, high = logits.flatten(1).aminmax(dim=-1)
    rounding = EPS * torch.maximum(-low, high).clamp(min=n)  # relative rounding of a sum over K
    for size in sorted({min(n, GLANCE), n}):  # search a block before the whole matrix
        undecided = verdicts.isnan().nonzero()[:, 0]
        kernel = _unit_kernel(logits[undecided, :size, :size] + gauge[undecided, :size, None])
        # The 2 × 2 minor of an entry above 1 has the eigenvalue 1 − entry < 0. Rounding is relative to the largest
        # eigenvalue, which is at most the trace n if the matrix is semidefinite.
        has_witness = kernel.flatten(1).amax(-1) > 1 + rounding[undecided] * size
        verdicts[undecided[has_witness]] = INDEFINITE
    verdicts[undecided[~has_witness]] = _decide_by_cholesky(kernel[~has_witness], rounding[undecided[~has_witness]])
    return verdicts


def _unit_kernel(logits: Float[Tensor, "some n n"]) -> Float[Tensor, "some n n"]:
    """Return sym K scaled to unit diagonal, for K_ij = exp(logits_ij).

    Exponents are clamped to 1 to prevent overflow; entries with a clamped exponent are at least e/2, still above 1.
    """
    diagonal = logits.diagonal(dim1=-2, dim2=-1) / 2
    kernel = (logits - diagonal[..., None] - diagonal[..., None, :]).clamp_(max=1.0).exp_()
    return (kernel + kernel.mT).div_(2)


def _decide_by_cholesky(kernel: Float[Tensor, "some n n"], rounding: Float[Tensor, " some"]) -> Float[Tensor, " some"]:
    """Return POSITIVE if K + tol·I has a Cholesky factor, INDEFINITE if K + 4 tol·I has none; tol = rounding · ‖K‖_∞.

    The factorisation rounds by less than tol: success implies λ_min > −2 tol, and failure with 4 tol implies λ_min < −3
    tol. In all other cases, λ_min is 0 within rounding, and the result is UNDECIDED.
    """
    tolerance = rounding * kernel.sum(-1).amax(-1)
    positive = _has_cholesky(kernel, tolerance)
    verdicts = torch.where(positive, POSITIVE, UNDECIDED).to(kernel)
    nearly = _has_cholesky(kernel[~positive], 4 * tolerance[~positive])
    verdicts[~positive] = torch.where(nearly, UNDECIDED, INDEFINITE).to(kernel)
    return verdicts


def _has_cholesky(kernel: Float[Tensor, "some n n"], shift: Float[Tensor, " some"]) -> Bool[Tensor, " some"]:
    shifted = kernel.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
    failed: Tensor = torch.linalg.cholesky_ex(shifted).info
    return failed == 0
