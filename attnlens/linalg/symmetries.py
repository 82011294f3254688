"""Symmetry and directionality of s · W_Q W_Kᵀ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attnlens.linalg.forms import Form, averaged, traces
from attnlens.linalg.spectra import over_heads

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.records import QueryKey, Rotation

PANELS = 4
"""In how many panels a symmetric product is multiplied out: 5/8 of the whole."""
ROWS = 512
"""Rows of a factor that are multiplied at once: with their products they stay in the second-level cache."""


def symmetry(form: Form) -> Float[Tensor, "*batch heads"]:
    """(‖S‖² − ‖A‖²)/‖M‖² = tr(CC)/tr(G_Q G_K) in [−1, 1]: 1 symmetric, −1 skew (Saponati et al. 2025).

    Under rotation Σ_Δ tr(M(Δ)M(−Δ)) / Σ_Δ ‖M(Δ)‖² over all |Δ| < positions; where its angles are no multiples of a
    distance (images), of the joint kernel on (content, position), every pair of positions once. NaN for a zero matrix.
    """
    if not (form.rotation is None or form.rotation.by_distance):
        return _of_grams(form.query_mean, form.key_mean, form.cross_mean)
    return _over_distances(*form.distance_traces)


def symmetry_by_distance(form: Form) -> Float[Tensor, "*batch heads positions"]:
    """2 tr(M(Δ)M(−Δ)) / (‖M(Δ)‖² + ‖M(−Δ)‖²) in [−1, 1] for Δ = 0 … positions − 1; 1 iff M(Δ)ᵀ = M(−Δ)."""
    crossed, squared = form.distance_traces
    return crossed / squared


def layer_symmetry(query_key: QueryKey) -> float | None:
    """The symmetry of Σ_h M_h, the heads of a site summed (Saponati et al. 2025, their layer score), in [−1, 1].

    The sum is that of the concatenated factors, [W_Q,1 W_Q,2 …][W_K,1 W_K,2 …]ᵀ, each query head with its own key head;
    under rotation with the distances of `symmetry`. For a QueryKey without batch axes. None for a zero matrix, and in
    cross-attention.
    """
    if query_key.site.part == "cross":
        return None
    score = float(_summed_symmetry(query_key))
    return None if math.isnan(score) else score


def _summed_symmetry(query_key: QueryKey) -> Float[Tensor, ""]:
    # Query heads that share a key head share its factor, so their own factors may be summed first.
    kv_heads, rows, size = query_key.key.shape
    summed = query_key.query.new_zeros(kv_heads, size, rows, dtype=torch.float64)
    for head, key_head in enumerate(query_key.key_of):
        summed[key_head] += query_key.query[head].mT  # as rows of weights lie in memory
    query, key = _beside(summed.mT), _beside(query_key.key)
    if query_key.rotation is None:
        if 3 * query.shape[1] < len(query):  # three Gram matrices take fewer products than the matrix
            return _of_grams(_gram(query), _gram(key), key.mT @ query)
        matrix = query @ key.mT
        return (matrix * matrix.mT).sum() / matrix.square().sum()
    rotation = query_key.rotation
    query_gram, key_gram, cross = _gram(query), _gram(key), key.mT @ query
    if not rotation.by_distance:
        return _of_grams(*(_blocks_averaged(rotation, gram) for gram in (query_gram, key_gram, cross)))
    return _over_distances(_block_traces(rotation, cross, cross), _block_traces(rotation, query_gram, key_gram))


def directionality(form: Form) -> Float[Tensor, "*batch heads"]:
    """(r − c)/(r + c) in [−1, 1]; r (c) sums the norms of M's rows (columns) above mean + 2 sd (Saponati et al. 2025).

    The published sign; 0 where no row and no column stands out. Row norms² are diag(W_Q G_K W_Qᵀ). Under rotation a
    row's norm is pooled over positions: diag(W_Q Σ_i R(i) G_K R(i)ᵀ W_Qᵀ), G_K the Gram matrix of the stacked keys.
    """
    query_gram, key_gram = form.query_gram, form.key_gram
    if form.rotation is not None:
        query_gram, key_gram = (averaged(form.rotation.transposed, mean) for mean in (form.query_mean, form.key_mean))
    query, key = form.query_key.query, form.query_key.key
    rows = _outstanding(over_heads(_row_norms, query, key_gram).squeeze(-2))
    if form.group is None:
        columns = _outstanding(over_heads(_row_norms, form.query_key.paired_key, query_gram).squeeze(-2))
    else:
        below = query_gram.reshape(*query_gram.shape[:-3], -1, form.group * query_gram.shape[-1], query_gram.shape[-1])
        columns = _outstanding(over_heads(_row_norms, key, below).flatten(-3, -2))
    none = rows + columns == 0
    return torch.where(none, 0.0, (rows - columns) / torch.where(none, 1.0, rows + columns))


def _row_norms(factor: Tensor, grams: Tensor) -> Tensor:
    """Row norms of a factor under several Gram matrices, one below the other; a part of the rows at a time."""
    found = []
    for one, gram in zip(factor, grams, strict=True):
        rows = one.double().mT
        parts = []
        for part in rows.split(ROWS, 1):
            products = (gram @ part).reshape(-1, *part.shape)
            parts.append(products.mul_(part).sum(1))
        found.append(torch.cat(parts, 1))
    # Rounding may leave a zero row's square below zero.
    return torch.stack(found).clamp(min=0).sqrt()


def _outstanding(norms: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
    """The sum of the norms that exceed mean + 2 sd (unbiased), strictly, as Saponati et al. define it."""
    border = norms.mean(-1, keepdim=True) + 2 * norms.std(-1, keepdim=True)
    return torch.where(norms > border, norms, 0.0).sum(-1)


def _over_distances(
    crossed: Float[Tensor, "*batch positions"], squared: Float[Tensor, "*batch positions"]
) -> Float[Tensor, "*batch"]:
    """Σ_Δ of the one over Σ_Δ of the other over all |Δ| < positions: every distance but 0 counts twice."""
    return (2 * crossed.sum(-1) - crossed[..., 0]) / (2 * squared.sum(-1) - squared[..., 0])


def _of_grams(
    query: Float[Tensor, "*batch size size"],
    key: Float[Tensor, "*batch size size"],
    cross: Float[Tensor, "*batch size size"],
) -> Float[Tensor, "*batch"]:
    """tr(CC)/tr(G_Q G_K)."""
    return (cross * cross.mT).sum((-2, -1)) / (query * key).sum((-2, -1))


def _blocks_averaged(rotation: Rotation, gram: Float[Tensor, "columns columns"]) -> Float[Tensor, "columns columns"]:
    """The Gram matrix of the stacked factors of all heads, each head turned alike."""
    heads = len(gram) // rotation.size
    blocks = gram.reshape(heads, rotation.size, heads, rotation.size).transpose(1, 2)
    return averaged(rotation, blocks).transpose(1, 2).reshape(gram.shape)


def _beside(factor: Float[Tensor, "heads d_model head_dim"]) -> Float[Tensor, "d_model columns"]:
    """The heads' factors side by side."""
    return factor.double().mT.flatten(0, 1).mT  # a view of rows of weights, which lie one head after the other


def _gram(factor: Float[Tensor, "d_model columns"]) -> Float[Tensor, "columns columns"]:
    """AᵀA, the half above the diagonal blocks multiplied out and mirrored."""
    gram, size = factor.new_empty(factor.shape[1], factor.shape[1]), max(1, -(-factor.shape[1] // PANELS))
    for start in range(0, len(gram), size):
        rows = slice(start, start + size)
        gram[rows, start:] = factor[:, rows].mT @ factor[:, start:]
        gram[start + size :, rows] = gram[rows, start + size :].mT
    return gram


def _block_traces(
    rotation: Rotation, left: Float[Tensor, "columns columns"], right: Float[Tensor, "columns columns"]
) -> Float[Tensor, " positions"]:
    """Σ_{g,h} tr(X_gh R(Δ)ᵀ Y_hg R(Δ)), the mean of Δ and −Δ, over the head_dim blocks of both.

    One row of blocks at a time for memory.
    """
    size = rotation.size
    heads = len(left) // size
    x, y = (gram.reshape(heads, size, heads, size) for gram in (left, right))
    rows = [traces(rotation, x[row].transpose(0, 1), y[:, :, row]) for row in range(heads)]
    return torch.stack(rows).sum(0)
