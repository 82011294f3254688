"""Attention as an asymmetric kernel machine: kernel SVD, dual and primal (Chen et al. 2023).

All functions take plain tensors, such as (…, tokens, features), and treat leading axes as a batch. They return tensors,
or a frozen `Dual`, `Primal` or `Nystrom`. Decompositions are computed in float64.

>>> import torch
>>> from attnlens.maths import ksvd
>>> falling = torch.logspace(0, -2, 16)
>>> query, key = torch.randn(2, 4, 200, 16, generator=torch.Generator().manual_seed(0)) * falling
>>> queries, keys = ksvd.cosine_features(query), ksvd.cosine_features(key)
>>> solution = ksvd.dual(queries, keys, s=8)
>>> solution.e.shape, bool((ksvd.residual(solution, queries, keys) < 1e-12).all())
(torch.Size([4, 200, 8]), True)
>>> weights = ksvd.primal(solution, queries, keys)
>>> torch.allclose(weights.e_scores(queries), solution.e)
True

Three functions handle long sequences; no command uses the last two.

- `dual`, for a kernel with finitely many features (cosine, random features): exact, in O(tokens · features²) without
  forming K.
- `truncated`, for a dense K that fits in memory, such as attention over more than a thousand tokens: it computes only
  the s leading components.
- `nystrom`, for any kernel function if K does not fit in memory: an approximation from K's columns at a few keys and
  K's rows at a few queries. Choose s near half the number of sampled keys; the approximation is unstable if the s-th
  singular value of the sampled block is small.

>>> def kernel(query, key):
...     return (0.25 * query.double() @ key.double().mT).exp()
>>> exact = ksvd.truncated(kernel(query, key), s=8)
>>> few_queries, few_keys = ksvd.sampled_rows(query, 80), ksvd.sampled_rows(key, 80)
>>> maps = ksvd.nystrom(kernel(few_queries, few_keys), s=40)
>>> wide_queries, wide_keys = maps.query_features(kernel(query, few_keys)), maps.key_features(kernel(few_queries, key))
>>> near = ksvd.dual(wide_queries, wide_keys, s=8)
>>> bool((near.values / exact.values - 1).abs().max() < 0.1)
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
from scipy.sparse.linalg import svds

from attnlens.choices import ETA as ETA
from attnlens.choices import Convention
from attnlens.errors import UsageError
from attnlens.maths.linalg import over_heads, singular_values

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Real
    from numpy import ndarray
    from torch import Tensor

    Packed = Float[Tensor, "some rows core"]
    Queries = Float[Tensor, "*batch n features"]
    Keys = Float[Tensor, "*batch m features"]
    Sampled = Float[Tensor, "*batch sampled features"]
    PerHead = Float[Tensor, "*batch"]
    Left = Float[Tensor, "*batch n s"]
    Right = Float[Tensor, "*batch m s"]
    Factors = tuple[Float[Tensor, "*batch n inner"], Float[Tensor, "*batch m inner"]]

EPS = torch.finfo(torch.float64).eps


def cosine_features(x: Float[Tensor, "*batch n head_dim"]) -> Float[Tensor, "*batch n head_dim"]:
    """Return φ(x) = x/‖x‖ in float64: ⟨φ(q), φ(k)⟩ is the cosine kernel (Chen et al. 2023, section 4.1); φ(0) = 0."""
    return unit(x.double())


def unit(x: Float[Tensor, "*batch n head_dim"]) -> Float[Tensor, "*batch n head_dim"]:
    """Return x/‖x‖ in the dtype of x; a zero vector stays zero and has finite gradients."""
    # x is first divided by its largest entry, so that no square under- or overflows. The divisor cancels in x/‖x‖,
    # so it needs no gradient.
    largest = x.detach().abs().amax(-1, keepdim=True)
    scaled = x / torch.where(largest > 0, largest, 1.0)
    length = scaled.norm(dim=-1, keepdim=True)
    return scaled / torch.where(length > 0, length, 1.0)


def centre_rows(x: Queries) -> Queries:
    """Subtract the mean row from each row, in float64; the result is exactly 0 if rows differ only by rounding.

    If the rows are the key features of a kernel matrix K, centring turns K into K(I − 11ᵀ/n).
    """
    x = x.double()
    deviations = x - x.mean(-2, keepdim=True)
    # Strict: rounding leaves at most this norm if all rows are equal.
    differ = torch.linalg.matrix_norm(deviations) > EPS * x.shape[-2] * torch.linalg.matrix_norm(x)
    return torch.where(differ[..., None, None], deviations, 0.0)


def random_features(
    x: Float[Tensor, "*batch n head_dim"], scale: float, count: int, seed: int = 0
) -> Float[Tensor, "*batch n count"]:
    """Return positive random features φ(x) in float64, with the expected inner product E⟨φ(q), φ(k)⟩ = exp(s⟨q, k⟩).

    φ_i(x) = exp(⟨ω_i, x√s⟩ − s‖x‖²/2)/√count (Choromanski et al. 2021, Lemma 1), with Gaussian ω in orthogonal blocks;
    s is `scale`. The exponent is at most ‖ω‖²/2, about head_dim/2, so exp does not overflow for any usual head_dim.
    Raises UsageError if count < 1.
    """
    require_positive("count", count)
    x = x.double() * scale**0.5
    draws = orthogonal_draws(count, x.shape[-1], seed).to(x.device)
    exponent: Tensor = x @ draws.mT - x.square().sum(-1, keepdim=True) / 2
    return exponent.exp() / math.sqrt(count)


def sampled_rows(x: Queries, count: int) -> Sampled:
    """Return `count` evenly spaced rows of X in float64, from the first to the last; all n rows if n ≤ count.

    If count = 1, the result is the first row. In Chen et al. 2023, Eq. 6, such rows are the data-dependent projection F
    = X'. Raises UsageError if count < 1.
    """
    require_positive("count", count)
    return evenly_spaced(x.double(), min(count, x.shape[-2]))


def evenly_spaced(
    x: Queries, count: int, mask: Bool[Tensor, "*#batch n"] | None = None
) -> Float[Tensor, "*batch count features"]:
    """Return `count` evenly spaced rows from those at which the mask is true (default: from all rows).

    The indices among these n rows are ⌊i(n − 1)/(count − 1)⌋ for i = 0 … count − 1, as in the code of Chen et al., or 0
    if count = 1. Rows are repeated if n < count, and row 0 is repeated if the mask is all false.
    """
    if mask is None:
        mask = x.new_ones(x.shape[-2], dtype=torch.bool)
    order = (~mask).int().argsort(dim=-1, stable=True)
    steps = torch.arange(count, device=x.device) * (mask.sum(-1, keepdim=True) - 1).clamp_min(0)
    index = order.gather(-1, steps // max(count - 1, 1))
    return x.gather(-2, index[..., None].expand(*x.shape[:-2], count, x.shape[-1]))


def require_positive(name: str, number: int) -> None:
    """Raise UsageError if `number`, the value of the argument `name`, is less than 1."""
    if number < 1:
        raise UsageError(f"{name} must be at least 1, not {number}.", f"Pass {name}=1 or more.")


@lru_cache(maxsize=16)
def orthogonal_draws(count: int, head_dim: int, seed: int) -> Float[Tensor, "count head_dim"]:
    """Draw `count` vectors in orthogonal blocks, with uniform directions and the lengths of Gaussian vectors."""
    # The draws are cached, and gradients cannot pass through a tensor made in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        shape, float64 = (-(-count // head_dim), head_dim, head_dim), torch.float64
        frames, upper = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=float64))
        # QR is unique, and Q uniform, only if the diagonal of R is positive.
        directions = (frames * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT.reshape(-1, head_dim)
        lengths = torch.randn(directions.shape, generator=generator, dtype=float64).norm(dim=-1, keepdim=True)
        draws: Tensor = directions * lengths
        return draws[:count]


@dataclass(frozen=True)
class Dual:
    """H_e, Σ and H_r of Chen et al. 2023, Theorem 3.2: the s leading singular triplets of each head's kernel matrix K.

    A component beyond K's rank has σ = 0 and columns of zeros, because its singular vectors would be arbitrary.
    """

    left: Left  # H_e, one row per query; its non-zero columns are orthonormal
    values: Float[Tensor, "*batch s"]  # σ, descending, in the kernel's unit
    right: Right  # H_r, one row per key; its non-zero columns are orthonormal

    @property
    def rank(self) -> Int[Tensor, "*batch"]:
        """Number of non-zero components."""
        return (self.values > 0).sum(-1)

    @property
    def multipliers(self) -> Float[Tensor, "*batch s"]:
        """Λ = Σ⁻¹, with 0 where σ is 0."""
        return torch.where(self.values > 0, 1 / torch.where(self.values > 0, self.values, 1.0), 0.0)

    @property
    def e(self) -> Left:
        """e-scores of the training queries: K H_r = H_e Σ."""
        return self.left * self.values[..., None, :]

    @property
    def r(self) -> Right:
        """r-scores of the training keys: Kᵀ H_e = H_r Σ."""
        return self.right * self.values[..., None, :]

    def e_scores(self, rows: Float[Tensor, "*batch new m"]) -> Float[Tensor, "*batch new s"]:
        """Return the e-scores K(new, keys) H_r of new queries; `rows` is K(new, training keys)."""
        return rows.double() @ self.right

    def r_scores(self, columns: Float[Tensor, "*batch n new"]) -> Float[Tensor, "*batch new s"]:
        """Return the r-scores K(queries, new)ᵀ H_e of new keys; `columns` is K(training queries, new)."""
        return columns.double().mT @ self.left


def dual(query_features: Queries, key_features: Keys, s: int, projection: Sampled | None = None) -> Dual:
    """Compute the s leading singular triplets of K = Φ_q FᵀF Φ_kᵀ by QR of both factors, without forming K.

    `projection` is F; None means the identity. At most min(n, m, features, sampled) components are returned, because
    this number bounds the rank of K. σ ≤ eps · min(features, sampled) · ‖Φ_q Fᵀ‖_F ‖Φ_k Fᵀ‖_F count as 0. Raises
    UsageError if s < 1 or if an argument contains NaN or Inf.
    """
    require_positive("s", s)
    for name, value in (("query features", query_features), ("key features", key_features), ("projection", projection)):
        if value is not None:
            require_finite(name, value)
    left, right = _factors(query_features, key_features, projection)
    return _truncate(over_heads(_factored_svd, left, right), left.shape[-2], s)


def matrix_dual(matrix: Float[Tensor, "*batch n m"], s: int) -> Dual:
    """Compute the min(s, n, m) leading singular triplets of a dense K, such as an attention matrix, by a full SVD.

    σ up to eps · max(n, m) · σ₁ count as 0. Raises UsageError if s < 1 or if K contains NaN or Inf. `truncated` is
    faster for large K and small s.
    """
    require_positive("s", s)
    require_finite("kernel matrix", matrix)
    return _truncate(over_heads(_dense_svd, matrix.double()), matrix.shape[-2], s)


def require_finite(name: str, tensor: Float[Tensor, "*shape"]) -> None:
    """Raise UsageError if the tensor contains NaN or Inf."""
    if not bool(tensor.isfinite().all()):
        verb = "contain" if name.endswith("s") else "contains"
        raise UsageError(f"The {name} {verb} NaN or Inf.", "Exclude the heads whose values are not finite.")


def residual(solution: Dual, query_features: Queries, key_features: Keys, projection: Sampled | None = None) -> PerHead:
    """Return the relative residual √(‖K H_r − H_e Σ‖² + ‖Kᵀ H_e − H_r Σ‖²)/(√2 ‖σ‖) without forming K; NaN if K = 0."""
    left, right = _factors(query_features, key_features, projection)
    return _residual(solution, left @ (right.mT @ solution.right), right @ (left.mT @ solution.left))


def matrix_residual(solution: Dual, matrix: Float[Tensor, "*batch n m"]) -> PerHead:
    """Return the relative residual of a solution for a dense K, defined as in `residual`."""
    matrix = matrix.double()
    return _residual(solution, matrix @ solution.right, matrix.mT @ solution.left)


def _residual(solution: Dual, through_right: Left, through_left: Right) -> PerHead:
    squares: Tensor = (through_right - solution.e).square().sum((-2, -1))
    squares = squares + (through_left - solution.r).square().sum((-2, -1))
    return (squares / (2 * solution.values.square().sum(-1))).sqrt()


def _factors(query_features: Queries, key_features: Keys, projection: Sampled | None) -> Factors:
    """Return A and B with K = A Bᵀ. If F has more rows than columns, the R of its QR factorisation replaces F."""
    left, right = query_features.double(), key_features.double()
    if projection is None:
        return left, right
    projection = projection.double()
    if projection.shape[-2] > projection.shape[-1]:
        projection = torch.linalg.qr(projection, mode="r").R
    return left @ projection.mT, right @ projection.mT


def _factored_svd(left: Float[Tensor, "some n inner"], right: Float[Tensor, "some m inner"]) -> Packed:
    (left_basis, left_core), (right_basis, right_core) = torch.linalg.qr(left), torch.linalg.qr(right)
    u, values, vh = torch.linalg.svd(left_core @ right_core.mT, full_matrices=False)
    norms = torch.linalg.matrix_norm(left_core) * torch.linalg.matrix_norm(right_core)
    return _pack(left_basis @ u, right_basis @ vh.mT, values, EPS * left.shape[-1] * norms)


def _dense_svd(matrix: Float[Tensor, "some n m"]) -> Packed:
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    return _pack(u, vh.mT, values, EPS * max(matrix.shape[1:]) * values[:, 0])


def _pack(left: Tensor, right: Tensor, values: Float[Tensor, "some core"], border: Float[Tensor, " some"]) -> Packed:
    """Stack singular vectors, σ and the zero threshold in one tensor, because `over_heads` returns a single tensor."""
    return torch.cat([left, right, values[:, None], border[:, None, None].expand(-1, 1, values.shape[1])], 1)


def _truncate(packed: Float[Tensor, "*batch rows core"], n: int, s: int) -> Dual:
    """Unpack the first s components for n queries; set components with σ at or below the threshold to zero."""
    # Strict: a zero matrix has threshold 0, and none of its values is above it.
    above = packed[..., -2, :s] > packed[..., -1, :s]
    first = torch.where(above[..., None, :], packed[..., :-1, :s], 0.0)
    return Dual(left=first[..., :n, :], values=first[..., -1, :], right=first[..., n:-1, :])


def truncated(matrix: Float[Tensor, "*batch n m"], s: int) -> Dual:
    """Compute the s leading singular triplets of a dense K head by head, by Lanczos with a fixed start vector.

    ARPACK's restarted Lanczos method is applied to KᵀK: residuals are near 1e-15, but directions with σ below 1e-8·σ₁
    are lost. σ up to eps · max(n, m) · σ₁ count as 0.

    Use this function if s is far below min(n, m), as in `truncated(attention, s=8)` for attention over more than a
    thousand tokens. If 4s ≥ min(n, m), it computes the full SVD, which is then as fast. If K is computed from features,
    use `dual`, which is exact and faster. Raises UsageError if s < 1 or if the matrix contains NaN or Inf.
    """
    require_positive("s", s)
    n, m = matrix.shape[-2:]
    if 4 * s >= min(n, m):
        return matrix_dual(matrix, s)
    require_finite("kernel matrix", matrix)
    flat = matrix.detach().double().cpu().reshape(-1, n, m).numpy()
    packed = torch.from_numpy(np.stack([_sparse_svd(head, s) for head in flat]))
    return _truncate(packed.reshape(*matrix.shape[:-2], n + m + 2, s).to(matrix.device), n, s)


def _sparse_svd(matrix: Float[ndarray, "n m"], s: int) -> Float[ndarray, "n+m+2 s"]:
    """Return the s leading singular components of a matrix, packed as in `_pack`."""
    n, m = matrix.shape
    if not matrix.any():
        return np.zeros((n + m + 2, s))
    start = np.random.default_rng(0).standard_normal(min(n, m))
    u, values, vh = svds(matrix, k=s, v0=start, tol=0)
    order = np.argsort(-values)
    return np.vstack([u[:, order], vh[order].T, values[order], np.full(s, EPS * max(n, m) * values.max())])


@dataclass(frozen=True)
class Nystrom:
    """Feature maps with ⟨φ_q(x), φ_k(y)⟩ ≈ K(x, y) for any x and y, from a block K(x_I, y_J) of n' queries and m' keys.

    φ_q(x) = Σ^{−½}Vᵀ K(x, y_J)ᵀ and φ_k(y) = Σ^{−½}Uᵀ K(x_I, y), where W = U Σ Vᵀ is the block's truncated SVD. The
    inner products of these features are K(·, y_J) W⁺ K(x_I, ·) (the asymmetric Nyström method of Tao et al. 2023, up to
    normalisation).
    """

    through_keys: Float[Tensor, "*batch m_sampled s"]  # V Σ^{−½}; zero columns beyond the block's rank
    through_queries: Float[Tensor, "*batch n_sampled s"]  # U Σ^{−½}; zero columns beyond the block's rank

    def query_features(self, columns: Float[Tensor, "*batch n m_sampled"]) -> Left:
        """Return the features φ_q of queries from `columns`, their kernel values K(x, y_J) with the sampled keys."""
        return columns.double() @ self.through_keys

    def key_features(self, rows: Float[Tensor, "*batch n_sampled m"]) -> Right:
        """Return the features φ_k of keys from `rows`, their kernel values K(x_I, y) with the sampled queries."""
        return rows.double().mT @ self.through_queries


def nystrom(block: Float[Tensor, "*batch n_sampled m_sampled"], s: int) -> Nystrom:
    """Compute feature maps from a block W = K(x_I, y_J); `dual` of the features approximates the SVD of the whole K.

    Use this function if K does not fit in memory. Build the block from `sampled_rows` of queries and keys. Pass
    K(x, y_J) to `query_features` and K(x_I, y) to `key_features`, and both results to `dual`; the module docstring has
    an example.

    The result is exact if W has the rank of K and s is at least this rank. Otherwise, with k = n' = m' = s and W
    invertible, the error is at most σ_{k+1}(K) · ‖K(·, y_J)W⁻¹‖₂ · ‖V_J⁻¹‖₂, where V_J consists of the sampled rows of
    K's k leading right singular vectors. This bound grows as W approaches a singular matrix. σ of W up to eps ·
    max(n', m') · σ₁ count as 0. Raises UsageError if s < 1 or if W contains NaN or Inf.
    """
    solution = matrix_dual(block, s)
    half = solution.multipliers.sqrt()[..., None, :]
    return Nystrom(through_keys=solution.right * half, through_queries=solution.left * half)


@dataclass(frozen=True)
class Primal:
    """W_e, W_r and Λ of Chen et al. 2023, Eq. 6, for each head. They determine the scores of any token."""

    query_weight: Float[Tensor, "*batch sampled s"]
    """W_e = Σ_j Fφ_k(x_j) h_{r,j}ᵀ: the queries' weights are built from the keys (sampled = features if F is I)."""
    key_weight: Float[Tensor, "*batch sampled s"]
    """W_r = Σ_i Fφ_q(x_i) h_{e,i}ᵀ: the keys' weights are built from the queries."""
    multipliers: Float[Tensor, "*batch s"]  # Λ = Σ⁻¹, 0 where σ is 0: h_e = Λe and h_r = Λr
    projection: Sampled | None = None  # F; None is the identity

    def e_scores(self, query_features: Queries) -> Left:
        """Return the scores e_i = W_eᵀ F φ_q(x_i) of any queries from their features φ_q."""
        return query_features.double() @ self._apply_projection(self.query_weight)

    def r_scores(self, key_features: Keys) -> Right:
        """Return the scores r_j = W_rᵀ F φ_k(x_j) of any keys from their features φ_k."""
        return key_features.double() @ self._apply_projection(self.key_weight)

    def _apply_projection(self, weight: Float[Tensor, "*batch sampled s"]) -> Float[Tensor, "*batch features s"]:
        return weight if self.projection is None else self.projection.double().mT @ weight


def primal(solution: Dual, query_features: Queries, key_features: Keys, projection: Sampled | None = None) -> Primal:
    """Compute the primal weights W_e and W_r from the `dual` solution of the same features and projection.

    The objective J is stationary at these weights, whose e- and r-scores equal those of the dual.
    """
    through_keys = key_features.double().mT @ solution.right
    through_queries = query_features.double().mT @ solution.left
    if projection is not None:
        through_keys, through_queries = projection.double() @ through_keys, projection.double() @ through_queries
    return Primal(through_keys, through_queries, solution.multipliers, projection)


def objective(
    e: Left,
    r: Right,
    query_weight: Float[Tensor, "*#batch sampled s"],
    key_weight: Float[Tensor, "*#batch sampled s"],
    multipliers: Float[Tensor, "*#batch s"],
    convention: Convention = "paper",
) -> PerHead:
    """Return the objective J of every head under the convention "paper" (Eq. 6) or "code".

    - "paper": J = ½Σ_i e_iᵀΛe_i + ½Σ_j r_jᵀΛr_j − tr(W_eᵀW_r). J is 0 at every stationary point, where e and r
      contribute ½Σσ each. J = 0 does not prove that a point is stationary: check `residual` too.
    - "code": J = ½mean_i‖Λe_i‖² + ½mean_j‖Λr_j‖² − tr(W_eᵀW_r). J is 0 at the SVD of a square K (n = m) if Λ² = n/σ
      instead of Λ = 1/σ.

    J has the unit of the kernel, can be negative, and is differentiable in every argument. Raises UsageError for
    any other convention.
    """
    _check_convention(convention)
    trace = (query_weight * key_weight).sum((-2, -1))
    weight = (multipliers if convention == "paper" else multipliers.square())[..., None, :]
    spread_e, spread_r = ((scores.square() * weight).sum(-1) for scores in (e, r))
    if convention == "paper":
        return (spread_e.sum(-1) + spread_r.sum(-1)) / 2 - trace
    return (spread_e.mean(-1) + spread_r.mean(-1)) / 2 - trace


def regulariser(objectives: Float[Tensor, "*batch layers heads"], convention: Convention = "paper") -> PerHead:
    """Return the penalty ≥ 0 computed from the objectives J; the loss contains η times this penalty.

    - "paper": Σ_layers Σ_heads J². The paper does not mention heads; each head is treated as a separate problem.
    - "code": mean_layers (mean_heads J)². A negative J of one head can cancel a positive J of another.

    Raises UsageError for any other convention.
    """
    _check_convention(convention)
    if convention == "paper":
        return objectives.square().sum((-2, -1))
    return objectives.mean(-1).square().mean(-1)


def _check_convention(convention: str) -> None:
    if convention not in get_args(Convention):
        raise UsageError(f"Unknown convention of the objective J: {convention!r}.", 'Pass "paper" or "code".')


def principal_angles(left: Left, right: Left) -> Float[Tensor, "*batch s"]:
    """Return the principal angles between the spans of two sets of orthonormal columns, ascending, in [0, π/2] radians.

    A zero column spans nothing and counts as an angle of π/2. Small angles are computed from the sines, large ones from
    the cosines, so that both are accurate to rounding (Knyazev & Argentati 2002).
    """
    overlap = left.mT @ right
    cosines = singular_values(overlap).clamp(max=1.0)  # rounding can leave a cosine above 1
    # Sines ascend like the angles, except that those of zero columns come first.
    sines = singular_values(right - left @ overlap).clamp(max=1.0).flip(-1)
    empty = (right == 0).all(-2).sum(-1, keepdim=True)
    places = (torch.arange(sines.shape[-1], device=sines.device) + empty).clamp(max=sines.shape[-1] - 1)
    # Switch at 45°, where both are equally exact: acos near 1 and asin near 1 lose half of the digits.
    return torch.where(cosines > 0.5**0.5, sines.gather(-1, places).asin(), cosines.acos())


def mean_angle(left: Left, right: Left, sizes: Real[Tensor, "*batch"]) -> PerHead:
    """Return the mean principal angle in radians between the spans of the first `sizes` columns of both bases.

    The angle is 0 for equal spans, as for a symmetric K, π/2 for orthogonal spans, and NaN if `sizes` is 0. The spans
    are not unique if `sizes` cuts through a group of equal singular values.
    """
    first = torch.arange(left.shape[-1], device=left.device) < sizes[..., None]
    angles = principal_angles(*(torch.where(first[..., None, :], part, 0.0) for part in (left, right)))
    return torch.where(first, angles, 0.0).sum(-1) / first.sum(-1)


def share_inside(values: Float[Tensor, "*batch n value_dim"], basis: Left, sizes: Real[Tensor, "*batch"]) -> PerHead:
    """Return ‖H_rᵀ V‖²/‖V‖² in [0, 1], the share of the values' variance in the span of H_r.

    V contains the values centred over tokens, and H_r the first `sizes` columns of `basis`. Independent normal values
    have an expected share of sizes/(n − 1) if H_r is orthogonal to the vector of ones, as the right singular vectors of
    K(I − 11ᵀ/n) are; otherwise the expected share is smaller, down to (sizes − 1)/(n − 1). The share is NaN if all
    values are equal.
    """
    centred = centre_rows(values)
    first = torch.arange(basis.shape[-1], device=basis.device) < sizes[..., None]
    inside = ((basis.mT @ centred).square().sum(-1) * first).sum(-1)
    return inside / centred.square().sum((-2, -1))
