"""The bilinear form M = W_Q W_Kᵀ: symmetry, directionality, spectrum, change, means over rotations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from attnlens.maths.linalg.spectra import over_heads, root_singular_values

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from attnlens.records import QueryKey, Rotation

    PerHead = Float[Tensor, "*batch heads"]
    PerDistance = Float[Tensor, "*batch heads positions"]
    Curves = Float[Tensor, "*batch positions"]
    Grams = Float[Tensor, "*batch heads head_dim head_dim"]
    Matrices = Float[Tensor, "*batch size size"]
    Terms = Float[Tensor, "*batch terms size size"]
    Roots = Float[Tensor, "some size size"]
    Concatenated = Float[Tensor, "columns columns"]
    Factors = Float[Tensor, "*batch n head_dim"]

PANELS = 4  # Column panels of AᵀA: only 10 of 16 blocks, on and above the diagonal, are computed
ROWS = 512  # Rows of a factor multiplied at once: the rows and their products fit in the second-level cache
LARGEST_CONDITION = 1e5
"""Largest condition number at which a Cholesky root is used: its relative error is eps · condition², about 2e-6."""


def symmetry(form: Form) -> PerHead:
    """Return (‖S‖² − ‖A‖²)/‖M‖² = tr(CC)/tr(G_Q G_K) in [−1, 1]: 1 if M is symmetric, −1 if M is skew.

    S and A are the symmetric and skew parts of M (Saponati et al. 2025), C is W_KᵀW_Q, and G_Q and G_K are the Gram
    matrices of W_Q and W_K. Under rotation, the value is Σ_Δ tr(M(Δ)M(−Δ)) / Σ_Δ ‖M(Δ)‖² over all |Δ| < positions or,
    if angles are not multiples of a distance (images), over all pairs of positions. NaN for a zero matrix.
    """
    rotation = form.query_key.rotation
    if rotation is not None and not rotation.by_distance:
        return _trace_ratio(form.query_mean, form.key_mean, form.cross_mean)
    return _divide_over_distances(*form.distance_traces)


def symmetry_by_distance(form: Form) -> PerDistance:
    """Return 2 tr(M(Δ)M(−Δ)) / (‖M(Δ)‖² + ‖M(−Δ)‖²) in [−1, 1] for Δ = 0 … positions − 1.

    The value is 1 if and only if M(Δ)ᵀ = M(−Δ), and NaN if both matrices are zero.
    """
    crossed, squared = form.distance_traces
    return crossed / squared


def layer_symmetry(query_key: QueryKey) -> float | None:
    """Return the symmetry of Σ_h M_h over the heads of a site (Saponati et al. 2025, layer score), in [−1, 1].

    The sum is the product of the concatenated factors, [W_Q,1 W_Q,2 …][W_K,1 W_K,2 …]ᵀ; rotations are treated as in
    `symmetry`. `query_key` must not have batch axes. None for a zero matrix and for cross-attention.
    """
    if query_key.site.part == "cross":
        return None
    score = float(_sum_symmetry(query_key))
    return None if math.isnan(score) else score


def _sum_symmetry(query_key: QueryKey) -> Float[Tensor, ""]:
    """Return the symmetry of Σ_h M_h, or NaN for a zero matrix."""
    # Query heads with the same key head share a key factor, so their query factors can be summed first.
    kv_heads, rows, size = query_key.key.shape
    query_sums = query_key.query.new_zeros(kv_heads, size, rows, dtype=torch.float64)
    for head, key_head in enumerate(query_key.key_of):
        query_sums[key_head] += query_key.query[head].mT  # in the memory order of the weights' rows
    # Concatenated along columns, as views: the weights' rows are stored head after head.
    query, key = (factor.double().mT.flatten(0, 1).mT for factor in (query_sums.mT, query_key.key))
    rotation = query_key.rotation
    if rotation is None and 3 * query.shape[1] >= len(query):
        matrix = query @ key.mT
        return (matrix * matrix.mT).sum() / matrix.square().sum()
    # Without rotation, Gram matrices take fewer multiplications than Σ_h M_h if they are much smaller.
    query_gram, key_gram, cross = _gram_by_panels(query), _gram_by_panels(key), key.mT @ query
    if rotation is None:
        return _trace_ratio(query_gram, key_gram, cross)
    if not rotation.by_distance:
        return _trace_ratio(*(_average_blocks(rotation, gram) for gram in (query_gram, key_gram, cross)))
    return _divide_over_distances(_block_traces(rotation, cross, cross), _block_traces(rotation, query_gram, key_gram))


def directionality(form: Form) -> PerHead:
    """Return (r − c)/(r + c) in [−1, 1]; r (c) sums those norms of M's rows (columns) that exceed their mean + 2 sd.

    The sign is that of Saponati et al. 2025; the value is 0 if no norm exceeds its limit. Squared row norms are
    diag(W_Q G_K W_Qᵀ). Under rotation, they are proportional to diag(W_Q Σ_i R(i) G R(i)ᵀ W_Qᵀ), where G is the Gram
    matrix of the stacked [W_K R(j)]_j. Column norms are analogous.
    """
    query_gram, key_gram = form.query_gram, form.key_gram
    if (rotation := form.query_key.rotation) is not None:
        query_gram = average_rotations(rotation.transposed, form.query_mean)
        key_gram = average_rotations(rotation.transposed, form.key_mean)
    query, key = form.query_key.query, form.query_key.key
    rows = _sum_outstanding(over_heads(_row_norms, query, key_gram).squeeze(-2))
    if form.group is None:
        columns = _sum_outstanding(over_heads(_row_norms, form.query_key.paired_key, query_gram).squeeze(-2))
    else:  # stack the Gram matrices of the query heads that share a key head, so that each key head is read once
        grams = query_gram.reshape(*query_gram.shape[:-3], -1, form.group * query_gram.shape[-1], query_gram.shape[-1])
        columns = _sum_outstanding(over_heads(_row_norms, key, grams).flatten(-3, -2))
    none = rows + columns == 0
    return torch.where(none, 0.0, (rows - columns) / torch.where(none, 1.0, rows + columns))


def _row_norms(factor: Tensor, grams: Tensor) -> Tensor:
    """Return √diag(A G Aᵀ) of each factor A for each of its vertically stacked Gram matrices G."""
    norms = []
    for head, gram in zip(factor, grams, strict=True):
        rows = head.double().mT
        parts = []
        for part in rows.split(ROWS, 1):
            products = (gram @ part).reshape(-1, *part.shape)
            parts.append(products.mul_(part).sum(1))
        norms.append(torch.cat(parts, 1))
    # Rounding can leave the square of a zero row below zero.
    return torch.stack(norms).clamp(min=0).sqrt()


def _sum_outstanding(norms: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
    """Sum the norms strictly above mean + 2 sd (with n − 1 in the denominator), as defined by Saponati et al."""
    border = norms.mean(-1, keepdim=True) + 2 * norms.std(-1, keepdim=True)
    return torch.where(norms > border, norms, 0.0).sum(-1)


def _divide_over_distances(crossed: Curves, squared: Curves) -> Float[Tensor, "*batch"]:
    """Return Σ `crossed` / Σ `squared` over all |Δ| < positions: every distance except 0 counts twice."""
    return (2 * crossed.sum(-1) - crossed[..., 0]) / (2 * squared.sum(-1) - squared[..., 0])


def _trace_ratio(query: Matrices, key: Matrices, cross: Matrices) -> Float[Tensor, "*batch"]:
    """Return tr(CC)/tr(G_Q G_K) for C = `cross` and the Gram matrices `query` and `key`."""
    return (cross * cross.mT).sum((-2, -1)) / (query * key).sum((-2, -1))


def _average_blocks(rotation: Rotation, gram: Concatenated) -> Concatenated:
    """Average the Gram matrix of all heads' concatenated factors over rotations that are the same for each head."""
    heads = len(gram) // rotation.size
    blocks = gram.reshape(heads, rotation.size, heads, rotation.size).transpose(1, 2)
    return average_rotations(rotation, blocks).transpose(1, 2).reshape(gram.shape)


def _gram_by_panels(factor: Float[Tensor, "d_model columns"]) -> Concatenated:
    """Return AᵀA, computing only the blocks on and above the diagonal and mirroring them."""
    gram, size = factor.new_empty(factor.shape[1], factor.shape[1]), max(1, -(-factor.shape[1] // PANELS))
    for start in range(0, len(gram), size):
        rows = slice(start, start + size)
        gram[rows, start:] = factor[:, rows].mT @ factor[:, start:]
        gram[start + size :, rows] = gram[rows, start + size :].mT
    return gram


def _block_traces(rotation: Rotation, left: Concatenated, right: Concatenated) -> Float[Tensor, " positions"]:
    """Return Σ_{g,h} tr(X_gh R(Δ)ᵀ Y_hg R(Δ)), averaged over ±Δ, for each Δ; X and Y are `left` and `right`."""
    size = rotation.size
    heads = len(left) // size
    x, y = (gram.reshape(heads, size, heads, size) for gram in (left, right))
    # One row of blocks at a time, to save memory.
    rows = [rotation_traces(rotation, x[row].transpose(0, 1), y[:, :, row]) for row in range(heads)]
    return torch.stack(rows).sum(0)


def cholesky_root(gram: Roots) -> tuple[Roots, Bool[Tensor, " some"]]:
    """Return R with RᵀR = G by Cholesky (0 if G is ill-conditioned), and a mask of the well-conditioned G."""
    # G is first scaled to unit diagonal.
    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    lower, failed = torch.linalg.cholesky_ex(gram / lengths[..., None] / lengths[..., None, :])
    least = lower.diagonal(dim1=-2, dim2=-1).amin(-1)
    # √size / min diag(R) estimates the condition number. A zero column makes NaN, which compares as false.
    good = (failed == 0) & (least * LARGEST_CONDITION > gram.shape[-1] ** 0.5)
    return torch.where(good[:, None, None], lower.mT * lengths[..., None, :], 0.0), good


def factor_root(factor: Float[Tensor, "some n size"]) -> Roots:
    """Return R of the QR factorisation A = U R, padded with rows of zeros if A has fewer rows than columns."""
    upper: Tensor = torch.linalg.qr(factor.double(), mode="r").R
    return pad(upper, (0, 0, 0, upper.shape[-1] - upper.shape[-2]))


def eigenvalue_root(gram: Roots) -> Roots:
    """Return R with RᵀR = G from the eigendecomposition of G; eigenvalues up to eps · size · largest count as zero.

    Use this root for an ill-conditioned Gram matrix whose factor is too long for QR. Singular values below √eps · σ₁
    (1e-8 · σ₁) are then rounding errors.
    """
    values, vectors = torch.linalg.eigh(gram)
    border = torch.finfo(gram.dtype).eps * gram.shape[-1] * values[..., -1:]
    # Strict: a zero matrix has border 0, and none of its values counts.
    root: Tensor = torch.where(values > border, values, 0.0).sqrt()[..., None] * vectors.mT
    return root


# The functions below sum over positions in about head_dim² operations per position instead of head_dim³: the sums are
# quadratic in the rotation R, which does not mix pairs of coordinates, so products of cos and sin of two pairs suffice.
def average_rotations(rotation: Rotation, matrix: Matrices) -> Matrices:
    """Return mean_i R(i)ᵀ X R(i) over all positions i, where X is `matrix`.

    With w = x_a + i x_b for one pair and v for another, each 2 × 2 block is a form Re(P w̄ v + Q w v). Rotating both
    pairs multiplies P by e^{i(φ_w − φ_v)} and Q by e^{−i(φ_w + φ_v)}, whose means are computed once for all matrices.
    """
    order, angles = _order(rotation), _angles(rotation)
    waves = torch.polar(torch.ones_like(angles), angles)
    first, mixed, back_mixed, second = _blocks(matrix, order)
    difference_part = torch.complex(first + second, back_mixed - mixed) * (waves.T @ waves.conj() / (2 * len(angles)))
    sum_part = torch.complex(first - second, -mixed - back_mixed) * (waves.T @ waves / (2 * len(angles))).conj()
    total, difference = difference_part + sum_part, difference_part - sum_part
    upper = torch.cat((total.real, -total.imag), -1)
    mean = torch.cat((upper, torch.cat((difference.imag, difference.real), -1)), -2)
    return _index(mean, order.argsort()[: rotation.size])


def rotation_traces(rotation: Rotation, left: Terms, right: Terms) -> Curves:
    """Return Σ_terms tr(X R(Δ)ᵀ Y R(Δ)), averaged over ±Δ, for each distance Δ = 0 … positions − 1.

    X and Y are terms of `left` and `right`. In the mean over ±Δ, products of a cos with a sin cancel.
    """
    order, angles = _order(rotation), _angles(rotation)
    a, b, c, d = _blocks(left.mT, order)
    first, mixed, back_mixed, second = _blocks(right, order)
    cosines = (a * first + b * mixed + c * back_mixed + d * second).sum(-3)
    sines = (a * second - b * back_mixed - c * mixed + d * first).sum(-3)
    cos, sin = angles.cos(), angles.sin()
    return (cos @ cosines * cos + sin @ sines * sin).sum(-1)


def _order(rotation: Rotation) -> Int[Tensor, " even"]:
    """Return an order of a head's coordinates: the first members of all pairs, then the second members of these pairs.

    Unrotated coordinates are paired too; if their number is odd, a coordinate of zeros completes the last pair.
    """
    rotated = rotation.pairs.flatten()
    unrotated = torch.ones(rotation.size + rotation.size % 2, dtype=torch.bool, device=rotated.device)
    unrotated[rotated] = False
    return torch.cat((rotation.pairs, unrotated.nonzero().reshape(-1, 2))).T.flatten()


def _angles(rotation: Rotation) -> Float[Tensor, "positions half"]:
    """Return the angles of all pairs in the order of `_order`; 0 for unrotated coordinates."""
    return pad(rotation.angles, (0, -(-rotation.size // 2) - len(rotation.pairs)))


def _blocks(matrix: Matrices, order: Int[Tensor, " even"]) -> list[Tensor]:
    """Return the quarters of a matrix after reordering: first × first members of pairs, first × second, and so on."""
    missing = len(order) - matrix.shape[-1]
    ordered = _index(pad(matrix, (0, missing, 0, missing)) if missing else matrix, order)
    return [block for rows in ordered.chunk(2, -2) for block in rows.chunk(2, -1)]


def _index(matrix: Matrices, order: Int[Tensor, " some"]) -> Float[Tensor, "*batch some some"]:
    """Reorder the rows and columns of a matrix; return the matrix itself if the order is the identity (as in Llama)."""
    if torch.equal(order, torch.arange(matrix.shape[-1], device=order.device)):
        return matrix
    return matrix[..., order[:, None], order]


@dataclass(frozen=True)
class Form:
    """The bilinear form M = s · W_Q W_Kᵀ of every head, in float64, computed from its factors without forming M.

    Under rotation, the norm, eigenvalues and singular values are those of the joint kernel on (content, position).
    Block (i, j) of this kernel is s · W_Q R(i−j) W_Kᵀ, divided by the number of positions for comparability with a
    single matrix. The joint kernel has the factors [W_Q R(i)]_i and [W_K R(j)]_j, whose Gram matrices are averages of
    rotated Gram matrices.
    """

    query_key: QueryKey

    @property
    def query_gram(self) -> Grams:
        """G_Q = W_QᵀW_Q."""
        return self._compute_once("query_gram", lambda: _gram(self.query_key.query))

    @property
    def key_gram(self) -> Grams:
        """G_K = W_KᵀW_K of each head's key head, computed once per key head."""
        key_of = list(self.query_key.key_of)
        return self._compute_once("key_gram", lambda: _gram(self.query_key.key)[..., key_of, :, :])

    @cached_property
    def cross(self) -> Grams:
        """C = W_KᵀW_Q of each head with its key head, for self-attention."""
        query = self.query_key.query.double()
        if self.group is None:
            return over_heads(_inner, self.query_key.paired_key.double(), query)
        *lead, heads, rows, size = query.shape
        # The query heads of a key head are concatenated, so that each key head needs a single product.
        grouped = query.mT.reshape(*lead, heads // self.group, self.group * size, rows).mT
        crossed = over_heads(_inner, self.query_key.key.double(), grouped)
        return crossed.reshape(*crossed.shape[:-1], self.group, size).movedim(-2, -3).flatten(-4, -3)

    @property
    def group(self) -> int | None:
        """Number of consecutive query heads per key head; None if it is not constant (as in a subset of heads)."""
        key_of, kv_heads = self.query_key.key_of, self.query_key.key.shape[-3]
        group = len(key_of) // kv_heads
        return group if group and key_of == tuple(head // group for head in range(group * kv_heads)) else None

    @property
    def query_mean(self) -> Grams:
        """Gram matrix of the stacked [W_Q R(i)]_i, divided by the number of positions; G_Q without rotation."""
        return self._compute_once("query_mean", lambda: self._average(self.query_gram))

    @property
    def key_mean(self) -> Grams:
        """Gram matrix of the stacked [W_K R(i)]_i, divided by the number of positions; G_K without rotation."""
        return self._compute_once("key_mean", lambda: self._average(self.key_gram))

    @cached_property
    def cross_mean(self) -> Grams:
        """C averaged over rotations, for self-attention; C without rotation."""
        return self._average(self.cross)

    @cached_property
    def distance_traces(self) -> tuple[PerDistance, PerDistance]:
        """tr(M(Δ)M(−Δ)) and (‖M(Δ)‖² + ‖M(−Δ)‖²)/2, divided by s², for Δ = 0 … positions − 1; M(Δ) = s·W_Q R(−Δ) W_Kᵀ.

        Without rotation there is one position: tr(CC) and tr(G_Q G_K).
        """
        query, key, cross, rotation = self.query_gram, self.key_gram, self.cross, self.query_key.rotation
        if rotation is None:
            return (cross * cross.mT).sum((-2, -1))[..., None], (query * key).sum((-2, -1))[..., None]
        query, key, cross = (gram.unsqueeze(-3) for gram in (query, key, cross))
        return rotation_traces(rotation, cross, cross), rotation_traces(rotation, query, key)

    @property
    def norm(self) -> PerHead:
        """‖M‖_F = |s|·√tr(G_Q G_K), where G_Q is `query_mean` and G_K is `key_mean`."""
        squared = (self.query_mean * self.key_mean).sum((-2, -1))
        return abs(self.query_key.scale) * squared.clamp(min=0).sqrt()

    @property
    def singular_values(self) -> Float[Tensor, "*batch heads head_dim"]:
        """σ(M) = |s|·σ(R_Q R_Kᵀ), descending, for roots R of the Gram matrices G; σ that are always 0 are omitted."""
        query, key = (self.query_mean, self.query_key.query), (self.key_mean, self.query_key.paired_key)
        return self._decompose_roots(root_singular_values, query, key) * abs(self.query_key.scale)

    @cached_property
    def symmetric_eigenvalues(self) -> Float[Tensor, "*batch heads twice"]:
        """μ, the eigenvalues of S = (M + Mᵀ)/2, ascending; eigenvalues that are always zero are omitted.

        With [W_Q W_K] = U [R_Q R_K], UᵀU = I, μ are those of s·(R_Q R_Kᵀ + R_K R_Qᵀ)/2, of size 2·head_dim.
        """
        cross = self.cross_mean
        joint = torch.cat((torch.cat((self.query_mean, cross.mT), -1), torch.cat((cross, self.key_mean), -1)), -2)
        factors = self.query_key.query, self.query_key.paired_key
        return self._decompose_roots(_symmetric_eigenvalues, (joint, *factors)) * self.query_key.scale

    @property
    def definiteness(self) -> PerHead:
        """Σμ / Σ|μ| in [−1, 1]: 1 if S is positive semidefinite; NaN if S = 0."""
        return self.symmetric_eigenvalues.sum(-1) / self.symmetric_eigenvalues.abs().sum(-1)

    @property
    def inertia(self) -> tuple[PerHead, PerHead]:
        """Numbers of positive and of negative μ beyond eps · size · max|μ|, each at most head_dim."""
        eigenvalues = self.symmetric_eigenvalues
        border = torch.finfo(eigenvalues.dtype).eps * eigenvalues.shape[-1] * eigenvalues.abs().amax(-1, keepdim=True)
        # Strict on both sides: an eigenvalue at the border is zero up to rounding, as are those of a zero matrix.
        return (eigenvalues > border).sum(-1).to(eigenvalues), (eigenvalues < -border).sum(-1).to(eigenvalues)

    @property
    def positivity(self) -> PerHead:
        """Re Σλ / Σ|λ| in [−1, 1] for the eigenvalues λ of C (Elhage et al. 2021).

        The non-zero λ are the non-zero eigenvalues of M/s. NaN if all λ are 0.
        """
        eigenvalues = over_heads(torch.linalg.eigvals, self.cross_mean)
        return eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)

    def _compute_once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Compute a value on first use and cache it in the QueryKey, for all analyzers."""
        shared = self.query_key.shared
        if name not in shared:
            shared[name] = compute()
        return shared[name]

    def _average(self, gram: Tensor) -> Tensor:
        return gram if self.query_key.rotation is None else average_rotations(self.query_key.rotation, gram)

    def _decompose_roots(self, decompose: Callable[..., Tensor], *matrices: tuple[Tensor, ...]) -> Tensor:
        """Return `decompose(R₁, R₂, …)`, with one root R of each Gram matrix G, where RᵀR = G.

        Each of `matrices` contains G and the factors whose concatenated columns have the Gram matrix G. R is computed
        by Cholesky if G is well-conditioned, else by QR of the concatenated factors. Under rotation, these factors are
        too long for QR; the eigendecomposition of G then replaces QR.
        """

        def decompose_cholesky(*grams: Tensor) -> Tensor:
            roots, good = zip(*(cholesky_root(gram) for gram in grams), strict=True)
            return torch.where(torch.stack(good).all(0)[:, None], decompose(*roots), torch.nan)

        values = over_heads(decompose_cholesky, *(gram for gram, *_ in matrices))
        bad = values[..., 0].isnan()
        if bad.any() and self.query_key.rotation is None:
            factors = (torch.cat([factor[bad] for factor in parts], -1) for _, *parts in matrices)
            values[bad] = over_heads(decompose, *(over_heads(factor_root, factor) for factor in factors))
        elif bad.any():
            values[bad] = over_heads(decompose, *(over_heads(eigenvalue_root, gram[bad]) for gram, *_ in matrices))
        return values


def _gram(factor: Tensor) -> Tensor:
    return over_heads(_inner, factor.double(), factor.double())


def _inner(left: Tensor, right: Tensor) -> Tensor:
    return left.mT @ right


def _symmetric_eigenvalues(joint_root: Tensor) -> Tensor:
    """Return the eigenvalues of S/s from the root of the Gram matrix of [W_Q W_K]."""
    left, right = joint_root.chunk(2, -1)
    core = left @ right.mT
    values: Tensor = torch.linalg.eigvalsh((core + core.mT) / 2)
    return values


def change(query_key: QueryKey, base: QueryKey) -> tuple[PerHead, PerHead]:
    """Return ‖ΔM‖_F / ‖M‖_F and rank ΔM, for M = s W_Q W_Kᵀ of `base` and ΔM = s (W_Q' W_K'ᵀ − W_Q W_Kᵀ).

    Under RoPE, M is the form at equal positions. The rank is the number of σ of ΔM above the largest effect of
    rounding, eps · n · max(‖M‖_F, ‖ΔM‖_F), where M has n rows and eps is that of float32, in which models compute cos
    and sin of rotations. If M = 0, the rank is NaN; the ratio is then infinite, or NaN if ΔM is also 0.
    """
    values = over_heads(root_singular_values, *_change_roots(query_key, base)) * abs(query_key.scale)
    norm, difference = _norm_at_equal_positions(base), values.square().sum(-1).sqrt()
    rows = max(query_key.query.shape[-2], query_key.key.shape[-2])
    border = torch.finfo(torch.float32).eps * rows * torch.maximum(norm, difference)
    # Strict: if nothing changed, no σ is above the border; if M and ΔM are 0, the border is 0.
    rank = (values > border[..., None]).sum(-1).to(values)
    return difference / norm, rank.masked_fill(norm == 0, torch.nan)


def relative_change(query_key: QueryKey, base: QueryKey) -> PerHead:
    """Return ‖ΔM‖_F / ‖M‖_F, defined as in `change`, without computing singular values."""
    left, right = _change_roots(query_key, base)
    difference: Tensor = torch.linalg.matrix_norm(left @ right.mT) * abs(query_key.scale)
    return difference / _norm_at_equal_positions(base)


def _norm_at_equal_positions(query_key: QueryKey) -> PerHead:
    """Return ‖M‖_F = |s|·√tr(G_Q G_K), without rotation."""
    squared = (_gram(query_key.query) * _gram(query_key.paired_key)).sum((-2, -1))
    return squared.clamp(min=0).sqrt() * abs(query_key.scale)  # rounding can leave the square of 0 below 0


def _change_roots(query_key: QueryKey, base: QueryKey) -> tuple[Roots, Roots]:
    """Return roots R_L, R_R of the factors of ΔM = s [ΔW_Q W_Q] [W_K' ΔW_K]ᵀ: ΔM has the σ and the norm of s R_L R_Rᵀ.

    Each product of two blocks is as small as ΔM, so rounding errors are relative to ΔM.
    """
    query, key = base.query.double(), base.paired_key.double()
    query_after, key_after = query_key.query.double(), query_key.paired_key.double()
    left = over_heads(_balanced_root, query_after - query, query, key_after, key_after - key)
    right = over_heads(_balanced_root, key_after, key_after - key, query_after - query, query)
    return left, right


def _balanced_root(first: Tensor, second: Tensor, first_partner: Tensor, second_partner: Tensor) -> Tensor:
    """Return R of [a·first b·second] by QR; a and b equalise the norms of each block and its partner."""
    scaled = []
    for part, partner in ((first, first_partner), (second, second_partner)):
        norm, partner_norm = (torch.linalg.matrix_norm(side, keepdim=True) for side in (part, partner))
        scaled.append(part * torch.where(norm > 0, partner_norm / norm, 0.0).sqrt())
    return factor_root(torch.cat(scaled, -1))


def largest_angle(first: Factors, second: Factors) -> Float[Tensor, "*batch"]:
    """Return the largest principal angle between two column spaces, in degrees, in [0, 90].

    For orthonormal bases U and V, the angle is asin ‖(I − U Uᵀ)V‖₂, accurate even if it is small (Björck & Golub
    1973). Directions with σ ≤ eps · n · σ₁ do not count. The angle is 90 if the ranks differ, and NaN if both are 0.
    """
    return over_heads(_largest_angles, first.double(), second.double())


def _largest_angles(first: Tensor, second: Tensor) -> Tensor:
    angles = []
    for factors in zip(first, second, strict=True):
        U, V = (_column_basis(factor) for factor in factors)
        if U.shape != V.shape:
            angles.append(first.new_tensor(90.0))
        elif not U.shape[1]:
            angles.append(first.new_tensor(torch.nan))
        else:
            outside = V - U @ (U.mT @ V)
            # The largest eigenvalue of a Gram matrix is accurate, unlike the small ones; rounding can leave it
            # outside [0, 1].
            sine: Tensor = torch.linalg.eigvalsh(outside.mT @ outside)[-1].clamp(0, 1).sqrt()
            angles.append(sine.asin().rad2deg())
    return torch.stack(angles)


def _column_basis(factor: Tensor) -> Tensor:
    """Return orthonormal columns that span the column space of the factor."""
    basis: Tensor
    basis, root = torch.linalg.qr(factor)
    if not bool(_significant(torch.linalg.svdvals(root), factor).all()):  # QR would add rounding errors
        left, values, _ = torch.linalg.svd(factor, full_matrices=False)
        basis = left[:, _significant(values, factor)]
    return basis


def _significant(values: Tensor, factor: Tensor) -> Tensor:
    """Return True for singular values of the factor that are above rounding."""
    least = torch.finfo(values.dtype).eps * max(factor.shape) * values[0]
    return values > least  # strict: a zero factor spans nothing
