"""Least rank that holds a share of a long matrix's squared size, from leading eigenvalues of its TiledMatrix matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

BLOCK = 64
"""Vectors that are multiplied at once."""
SMALL = 1024
"""Columns of a matrix that is decomposed as a whole."""
LARGEST_BASIS = 1024
"""Vectors of the Krylov space; a rank is proven up to about a quarter of it."""
POWERS = 8
"""Powers of what is left, at most, by which its norm is bounded."""
SLACK = 1.3
"""How far above the next Ritz value that bound is expected; what it turned out to be, once it was computed."""
ROUNDING = 1e-10
"""Two energies nearer than this share of the whole are a tie, and decide nothing."""
FACTOR = 10 ** (16 / BLOCK) * math.sqrt(2 / math.pi)
"""‖B‖ ≤ FACTOR · max_i ‖Bω_i‖ for BLOCK Gaussian ω_i but for one draw in 10^16 (Halko et al. 2011, Lemma 4.1)."""


@dataclass(frozen=True)
class TiledMatrix:
    """An n × m matrix P that is formed in tiles of rows each time it is multiplied, and A = PᵀP."""

    tiles: Callable[[], Iterable[Float[Tensor, "rows some_m"]]]
    """The rows of P in order; columns that a tile lacks are zero."""
    size: int
    """m."""

    def gram(self, x: Float[Tensor, "m some"]) -> Float[Tensor, "m some"]:
        """A x."""
        product = torch.zeros_like(x)
        for rows in self.tiles():
            end = rows.shape[1]
            product[:end].addmm_(rows.mT, rows @ x[:end])
        return product

    def energy(self) -> Float[Tensor, ""]:
        """tr A = ‖P‖_F²."""
        total: Tensor = torch.stack([rows.square().sum() for rows in self.tiles()]).sum()
        return total


@dataclass(frozen=True)
class Ritz:
    """Ritz pairs of A, descending: Σ_{l≤k} values ≤ Σ_{l≤k} λ_l(A) (Ky Fan)."""

    values: Float[Tensor, " basis"]
    """VᵀAV = diag(values)."""
    residuals: Float[Tensor, " basis"]
    """‖A v_i − values_i v_i‖."""
    basis: Float[Tensor, "m basis"]
    """Orthonormal vectors that `turn` turns into V."""
    turn: Float[Tensor, "basis basis"]
    """V = basis · turn."""

    def most(self, rank: int, pairs: int, rest: float) -> float:
        """A bound on Σ_{l≤rank} λ_l(A), where A without its first `pairs` vectors has at most the norm `rest`.

        In the basis (V_p, V⊥) A is diag(Λ, M) beside the coupling S, whose rows are residuals; sums of the largest
        eigenvalues are subadditive, and those of the coupling are at most Σ‖s_i‖.
        """
        known = self.values[:rank].clamp(min=rest)
        known[pairs:] = rest
        return float(known.sum() + self.residuals[:pairs].sum())


def least_rank(matrix: TiledMatrix, share: float, seed: int = 0) -> float:
    """The least k with Σ_{l≤k} λ_l(A) ≥ share · tr A, proven from both sides; NaN where it isn't, or A = 0.

    Block Lanczos with full reorthogonalisation (Golub & Underwood 1977) gives Ritz pairs. Their sum bounds the energy
    of k vectors from below. From above it is bounded by their residuals and the norm of what is left of A, which
    powers on fresh Gaussian vectors bound; that fails for one seed in 10^14. A of few columns is decomposed as a whole.
    """
    draw = torch.Generator().manual_seed(seed)
    goal, slack = share * float(energy := matrix.energy()), SLACK
    tie = ROUNDING * float(energy)
    if matrix.size <= SMALL:
        return _whole_rank(matrix, goal, tie) if energy > 0 else math.nan
    for ritz in _lanczos(matrix, draw) if energy > 0 else ():
        rank = 1 + int((ritz.values.cumsum(0) < goal + tie).sum())
        if rank >= len(ritz.values):
            continue
        if rank == 1:
            return 1.0
        spare = (goal - float(ritz.values[: rank - 1].sum())) / 2
        pairs = min(int((ritz.residuals.cumsum(0) < spare).sum()), len(ritz.values) - 1)
        following = float(ritz.values[pairs])
        if ritz.most(rank - 1, pairs, slack * following) < goal - tie:
            for rest in _norms_left(matrix, ritz, pairs, draw):
                if ritz.most(rank - 1, pairs, rest) < goal - tie:
                    return float(rank)
            slack = max(slack, rest / following) if following else slack
    return math.nan


def _whole_rank(matrix: TiledMatrix, goal: float, tie: float) -> float:
    """The least k with Σ_{l≤k} λ_l(A) ≥ goal, from all eigenvalues; NaN where a sum is within `tie` of it."""
    whole = torch.eye(matrix.size, dtype=torch.float64, device=next(iter(matrix.tiles())).device)
    sums = torch.linalg.eigvalsh(matrix.gram(whole)).flip(0).clamp(min=0).cumsum(0)
    return math.nan if bool(((sums - goal).abs() <= tie).any()) else 1.0 + float((sums < goal).sum())


def _lanczos(matrix: TiledMatrix, draw: torch.Generator) -> Iterator[Ritz]:
    """Ritz pairs of growing Krylov spaces of A on a random block."""
    largest = min(LARGEST_BASIS, matrix.size - BLOCK)
    block, _ = torch.linalg.qr(_gaussian(matrix, draw))
    basis, projected = block[:, :0], block.new_zeros(largest, largest)
    while (end := basis.shape[1] + BLOCK) <= largest:
        product = matrix.gram(block)
        basis = torch.cat((basis, block), 1)
        projected[:end, end - BLOCK : end] = basis.mT @ product
        block, coupling = _orthonormal(product, basis)
        values, turn = torch.linalg.eigh(projected[:end, :end], UPLO="U")
        values, turn = values.flip(0).clamp(min=0), turn.flip(1)
        yield Ritz(values, (coupling @ turn[-BLOCK:]).norm(dim=0), basis, turn)


def _orthonormal(
    vectors: Float[Tensor, "m some"], basis: Float[Tensor, "m basis"]
) -> tuple[Float[Tensor, "m some"], Float[Tensor, "some some"]]:
    """An orthonormal Q orthogonal to the basis and a C with Q C = the vectors less their part in the basis."""
    coupling = torch.eye(vectors.shape[1], dtype=vectors.dtype, device=vectors.device)
    for _ in range(3):  # once leaves rounding of the vectors, which normalising may blow up
        vectors = vectors - basis @ (basis.mT @ vectors)
        vectors, upper = torch.linalg.qr(vectors)
        coupling = upper @ coupling
    return vectors, coupling


def _norms_left(matrix: TiledMatrix, ritz: Ritz, pairs: int, draw: torch.Generator) -> Iterator[float]:
    """Bounds on ‖M‖, M being A without its first Ritz vectors, from ‖M^j‖ ≤ FACTOR · max_i ‖M^j ω_i‖."""
    leading = ritz.basis @ ritz.turn[:, :pairs]
    vectors, grown = _gaussian(matrix, draw), math.log(FACTOR)
    vectors = vectors - leading @ (leading.mT @ vectors)
    for power in range(1, POWERS + 1):
        vectors = matrix.gram(vectors)
        vectors = vectors - leading @ (leading.mT @ vectors)
        size = float(vectors.norm(dim=0).amax())
        grown += math.log(size) if size > 0 else -math.inf
        yield math.exp(grown / power)
        vectors = vectors / (size or 1.0)


def _gaussian(matrix: TiledMatrix, draw: torch.Generator) -> Float[Tensor, "m some"]:
    device = next(iter(matrix.tiles())).device
    return torch.randn(matrix.size, BLOCK, dtype=torch.float64, generator=draw).to(device)
