"""Attention weights: entropy, largest and first weights, spectrum; parts and definiteness of the scores behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from attnlens.maths.linalg.long import TiledMatrix, each_head, is_long, least_rank, tiles
from attnlens.maths.linalg.spectra import over_heads, rank_at, singular_values

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.records import QueryKey


def entropy(query_key: QueryKey) -> Float[Tensor, "*batch heads"]:
    """Mean over queries of −Σ p log p / log(allowed keys), in [0, 1]: 0 one key, 1 all alike.

    Queries with fewer than two allowed keys are left out; NaN where none is left. A sink logit counts as one more
    allowed key, with the probability that it takes.
    """
    return _mean(query_key, _entropies)


def max_weight(query_key: QueryKey) -> Float[Tensor, "*batch heads"]:
    """Mean over queries of max_j p_ij, in [0, 1]; queries that may see nothing are left out, NaN where none is left."""
    return _mean(query_key, lambda tile: (tile.attention.amax(-1), _allowed_keys(tile) >= 1))


def first_weight(query_key: QueryKey) -> Float[Tensor, "*batch heads"]:
    """Mean of p_ij over queries that see two keys or more, j the first that query i sees, in [0, 1]; NaN for none."""
    return _mean(query_key, _first_weights)


def even_weight(query_key: QueryKey) -> Float[Tensor, "*batch heads"]:
    """Mean of 1/m over queries that see two keys or more, m the keys that a query sees: what `first_weight` is where
    attention is even. A sink logit counts as one more key; NaN where no query sees two.
    """
    return _mean(query_key, lambda tile: (1 / _choices(tile).clamp(min=1), _allowed_keys(tile) >= 2))


def attention_singular_values(
    query_key: QueryKey, *, without_row_sums: bool = False
) -> Float[Tensor, "*batch heads least"]:
    """σ(P) or σ(P(I − 11ᵀ/m)), descending; computed once for a QueryKey, as several analyzers ask for them.

    One NaN for a long sequence, of which not all are computed: `attention_rank` needs the leading ones alone.
    """
    if is_long(query_key):
        return query_key.query.new_full((*query_key.query.shape[:-2], 1), torch.nan, dtype=torch.float64)
    name = "centred_attention_singular_values" if without_row_sums else "attention_singular_values"
    if name not in query_key.shared:
        attention = query_key.attention
        query_key.shared[name] = singular_values(centred(attention) if without_row_sums else attention)
    return query_key.shared[name]


def attention_rank(query_key: QueryKey, share: float) -> Float[Tensor, "*batch heads"]:
    """The least k with Σ_{l≤k} σ² ≥ share · Σσ², σ of P; NaN for P = 0, and where `least_rank` proves none."""
    if not is_long(query_key):
        return rank_at(attention_singular_values(query_key), share)
    return each_head(query_key, partial(_long_rank, share=share))


def centred(attention: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch n m"]:
    """P(I − 11ᵀ/m), which is P − 11ᵀ/m where rows sum to 1: attention beyond the even one. Rounding becomes zero."""
    beyond = attention - attention.mean(-1, keepdim=True)
    border = torch.finfo(attention.dtype).eps * attention.shape[-1] * torch.linalg.matrix_norm(attention)
    # Strict: an even matrix leaves rounding of at most this norm.
    return torch.where((torch.linalg.matrix_norm(beyond) > border)[..., None, None], beyond, 0.0)


def _entropies(query_key: QueryKey) -> tuple[Float[Tensor, "*batch heads n"], Bool[Tensor, "*batch heads n"]]:
    attention = query_key.attention
    choices = _choices(query_key)
    spread = torch.special.entr(attention).sum(-1)
    if query_key.sinks is not None:
        spread = spread + torch.special.entr((1 - attention.sum(-1)).clamp(min=0))
    chooses = choices >= 2
    return spread / torch.where(chooses, choices, 2.0).log(), chooses


def _first_weights(query_key: QueryKey) -> tuple[Float[Tensor, "*batch heads n"], Bool[Tensor, "*batch heads n"]]:
    attention = query_key.attention
    if query_key.allowed is None:
        first = attention[..., 0]
    else:
        place = query_key.allowed.byte().argmax(-1, keepdim=True)
        first = attention.gather(-1, place.expand(*attention.shape[:-1], 1))[..., 0]
    return first, _allowed_keys(query_key) >= 2


def _long_rank(head: QueryKey, share: float) -> float:
    matrix = TiledMatrix(lambda: (tile.attention[0, 0] for _, tile in tiles(head)), head.key.shape[-2])
    return least_rank(matrix, share)


def _allowed_keys(query_key: QueryKey) -> Float[Tensor, "*batch heads n"]:
    """How many keys each query may see."""
    rows = query_key.query[..., 0]
    if query_key.allowed is None:
        return torch.full_like(rows, query_key.key.shape[-2], dtype=torch.float64)
    return query_key.allowed.sum(-1).to(rows.device, torch.float64).expand_as(rows)


def _choices(query_key: QueryKey) -> Float[Tensor, "*batch heads n"]:
    """Among how many keys each query's weight is spread, a sink logit counted as one."""
    return _allowed_keys(query_key) + (query_key.sinks is not None)


def _mean(
    query_key: QueryKey, of_queries: Callable[[QueryKey], tuple[Float[Tensor, "*batch n"], Bool[Tensor, "*batch n"]]]
) -> Float[Tensor, "*batch"]:
    """The mean of what is read of each query, over those where it counts; a tile of them at a time."""
    parts = [of_queries(tile) for _, tile in tiles(query_key)]
    values, where = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    return torch.where(where, values, 0.0).sum(-1) / where.sum(-1)


@dataclass(frozen=True)
class Anatomy:
    """‖LJ‖² = Σμ₊² + Σμ₋² + ‖JAJ‖² + n‖c‖², as shares of the whole, each in [0, 1]; NaN where LJ = 0.

    J = I − 11ᵀ/n; S and A the symmetric and skew parts of the logits L, μ the eigenvalues of JSJ, c the centred column
    means of L. Softmax ignores what depends on the query alone, so it sees only LJ.
    """

    positive: Float[Tensor, "*batch heads"]  # Σμ₊²/‖LJ‖²: a positive definite kernel
    negative: Float[Tensor, "*batch heads"]  # Σμ₋²/‖LJ‖²: the negative part of the symmetric kernel
    skew: Float[Tensor, "*batch heads"]  # ‖JAJ‖²/‖LJ‖²: asymmetry that no gate on queries or keys removes
    key: Float[Tensor, "*batch heads"]  # n‖c‖²/‖LJ‖²: key salience, the same for every query


def anatomy(query_key: QueryKey) -> Anatomy:
    """The four shares of every head on one sequence, for self-attention.

    Bilinear logits with 2·head_dim < n are reduced to a core of that size by QR of the centred [Q K]; others are taken
    apart as n × n matrices, and have no shares where they are long.
    """
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
    seen = logits - logits.mean(-1, keepdim=True)
    salience = seen.mean(-2, keepdim=True)
    n = logits.shape[-1]
    whole, uncentred = (matrix.square().sum((-2, -1)) for matrix in (seen, logits))
    return _shares(seen - salience, n * salience.square().sum((-2, -1)), whole, uncentred, n)


def _shares(core: Tensor, salience: Tensor, whole: Tensor, uncentred: Tensor, n: int) -> Float[Tensor, "some parts"]:
    """The parts over the whole, `core` being JLJ or a matrix that shares its invariants."""
    eigenvalues = torch.linalg.eigvalsh((core + core.mT) / 2)
    positive, negative = (side.clamp(min=0).square().sum(-1) for side in (eigenvalues, -eigenvalues))
    skew = ((core - core.mT) / 2).square().sum((-2, -1))
    parts = torch.stack((positive, negative, skew, salience), -1)
    # Strict: logits that depend on the query alone leave rounding of at most this norm.
    seen = whole > (torch.finfo(whole.dtype).eps * n) ** 2 * uncentred
    return torch.where(seen[..., None], parts / whole[..., None], torch.nan)


EPS = torch.finfo(torch.float64).eps
GLANCE = 128  # tokens of the leading block that is searched for a witness before the whole matrix is
FACTORED = 8192
"""Tokens of the largest long kernel that is formed and factored whole, where no tile has a witness: three matrices of
0.5 GB."""
POSITIVE, INDEFINITE, UNDECIDED = 1.0, 0.0, torch.nan


def definite(logits: Float[Tensor, "*batch heads n n"]) -> Float[Tensor, "*batch heads"]:
    """1 where sym K = (K + Kᵀ)/2 is positive semidefinite up to rounding, 0 if not, NaN undecided.

    K_ij = exp(L_ij − ρ_i + κ_i), ρ_i the mean of row i and κ_i that of column i: softmax leaves row constants open, and
    this choice of them reads the same for all (of a symmetric L it is L itself). Scaled to unit diagonal, a congruence,
    so that nothing overflows and the verdict stays. Any entry above 1 then proves it indefinite by its 2 × 2 minor, in
    a leading block as in the whole; what no entry decides, Cholesky does.
    """
    return over_heads(_verdicts, logits)


def definite_kernel(query_key: QueryKey) -> Float[Tensor, "*batch heads"]:
    """`definite` of the head's own logits of all pairs, without a position bias or a mask.

    Long ones are searched for a witness in tiles.
    """
    content = replace(query_key.content, allowed=None)
    return each_head(content, _long_verdict) if is_long(content) else definite(content.logits)


def _long_verdict(head: QueryKey) -> float:
    """The verdict on one long head; undecided where it has no witness and more than FACTORED tokens."""
    n = head.query.shape[-2]
    gauge, half, largest = _gauge(head)
    rounding = EPS * max(largest, n)
    # Strict: as in `_witness`.
    if any(float(kernel.amax()) > 1 + rounding * n for _, kernel in _kernel_tiles(head, gauge, half)):
        return INDEFINITE
    if n > FACTORED:
        return UNDECIDED
    whole = gauge.new_empty(1, n, n)
    for rows, kernel in _kernel_tiles(head, gauge, half):
        whole[0, rows] = kernel
    return float(_by_cholesky(whole, gauge.new_tensor([rounding])))


def _kernel_tiles(
    head: QueryKey, gauge: Float[Tensor, " n"], half: Float[Tensor, " n"]
) -> Iterator[tuple[slice, Float[Tensor, "rows n"]]]:
    """The rows of `_unit_kernel` of one long head."""
    own = gauge - half
    for rows, tile in tiles(head):
        down, across = tile.logits[0, 0], head.sequences([0], slice(None), rows).logits[0, 0].mT
        kernel = (down + own[rows, None] - half).clamp_(max=1.0).exp_()
        yield rows, kernel.add_((across + own - half[rows, None]).clamp_(max=1.0).exp_()).div_(2)


def _gauge(head: QueryKey) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], float]:
    """κ − ρ, half of the diagonal of L with it, and the largest |L|, of one long head."""
    means, diagonal, largest = [], [], 0.0
    columns = torch.zeros(head.query.shape[-2], dtype=torch.float64, device=head.query.device)
    for rows, tile in tiles(head):
        logits = tile.logits[0, 0]
        means.append(logits.mean(-1))
        columns += logits.sum(0)
        diagonal.append(logits.diagonal(rows.start))
        largest = max(largest, float(logits.abs().amax()))
    gauge = columns / len(columns) - torch.cat(means)
    return gauge, (torch.cat(diagonal) + gauge) / 2, largest


def _verdicts(logits: Float[Tensor, "some n n"]) -> Float[Tensor, " some"]:
    verdicts = logits.new_full(logits.shape[:1], UNDECIDED)
    n = logits.shape[-1]
    gauge = logits.mean(-2) - logits.mean(-1)
    low, high = logits.flatten(1).aminmax(dim=-1)
    rounding = EPS * torch.maximum(-low, high).clamp(min=n)  # of a sum over K, relative
    for size in sorted({min(n, GLANCE), n}):
        open_ = verdicts.isnan().nonzero()[:, 0]
        kernel = _unit_kernel(logits[open_, :size, :size] + gauge[open_, :size, None])
        witnessed = _witness(kernel, rounding[open_])
        verdicts[open_[witnessed]] = INDEFINITE
    verdicts[open_[~witnessed]] = _by_cholesky(kernel[~witnessed], rounding[open_[~witnessed]])
    return verdicts


def _unit_kernel(logits: Float[Tensor, "some n n"]) -> Float[Tensor, "some n n"]:
    """sym K scaled to unit diagonal, K_ij = exp of these.

    Exponents are cut off at 1: such an entry is above e/2 > 1 either way, and so a witness.
    """
    diagonal = logits.diagonal(dim1=-2, dim2=-1) / 2
    kernel = (logits - diagonal[..., None] - diagonal[..., None, :]).clamp_(max=1.0).exp_()
    return (kernel + kernel.mT).div_(2)


def _witness(kernel: Float[Tensor, "some n n"], rounding: Float[Tensor, " some"]) -> Bool[Tensor, " some"]:
    """Whether an entry exceeds 1, so that a 2 × 2 minor has the eigenvalue 1 − entry < 0."""
    # Strict, and beyond rounding times n, the trace, which bounds the largest eigenvalue of a semidefinite matrix.
    return kernel.flatten(1).amax(-1) > 1 + rounding * kernel.shape[-1]


def _by_cholesky(kernel: Float[Tensor, "some n n"], rounding: Float[Tensor, " some"]) -> Float[Tensor, " some"]:
    """Positive where K + tol has a Cholesky factor, indefinite where not even K + 4 tol has; tol = rounding · ‖K‖_∞.

    The factorisation's own rounding is below tol, so success means λ_min > −2 tol, failure at 4 tol λ_min < −3 tol.
    Between the two the matrix is as near to the border as its rounding, and no verdict is given.
    """
    tolerance = rounding * kernel.sum(-1).amax(-1)
    positive = _factors(kernel, tolerance)
    verdicts = torch.where(positive, POSITIVE, UNDECIDED).to(kernel)
    rest = ~positive
    verdicts[rest] = torch.where(_factors(kernel[rest], 4 * tolerance[rest]), UNDECIDED, INDEFINITE).to(kernel)
    return verdicts


def _factors(kernel: Float[Tensor, "some n n"], shift: Float[Tensor, " some"]) -> Bool[Tensor, " some"]:
    """Whether K + shift · I has a Cholesky factor."""
    shifted = kernel.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
    failed: Tensor = torch.linalg.cholesky_ex(shifted).info
    return failed == 0
