"""Matrices of long sequences, computed in tiles of rows: leading singular values, and sums over interval masks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from attnlens.records import QueryKey

    Vector = Float[Tensor, " size"]
    Vectors = Float[Tensor, "m some"]
    Distances = Float[Tensor, " distances"]
    Ends = tuple[Int[Tensor, " ends"], Int[Tensor, " ends"]]

LONG = 2048**2
"""Sequences with more query–key pairs than this are called long. Their matrices are computed in tiles, without full
spectra, which take 7 s per head on one core at 2,048 tokens and 64 times as long at 8,192."""
TILE = 1 << 22  # Numbers in one tile: 32 MB of float64. About five tiles are in memory at a time.
BLOCK = 64  # Vectors per product; they are multiplied together, because each product recomputes all tiles
SMALL = 1024  # Largest number of columns of a matrix that is decomposed as a whole
LARGEST_BASIS = 1024  # Most vectors of the Krylov space; ranks up to about a quarter of it can be proven
POWERS = 8  # Largest power of the deflated matrix that bounds its norm: higher powers give tighter bounds
SLACK = 1.3  # First guess of the ratio of the bound on the deflated norm to the next Ritz value
ROUNDING = 1e-10  # Energies that differ by less than this share of the total prove nothing: rounding can be the cause
FACTOR = 10 ** (16 / BLOCK) * math.sqrt(2 / math.pi)
"""‖B‖ ≤ FACTOR · max_i ‖Bω_i‖ for BLOCK Gaussian ω_i, except with probability 1e-16 (Halko et al. 2011, Lemma 4.1)."""
RESIDUAL = 1e-10
"""Relative residual at which conjugate gradients stop. The explained sum of squares then has a relative error below
RESIDUAL² times the condition number of the scaled equations, which is less than rounding."""
STEPS = 1000  # Most steps of conjugate gradients; real masks take 6 to 20


def is_long(query_key: QueryKey) -> bool:
    """Return True if each head has more than LONG pairs of queries and keys."""
    return query_key.query.shape[-2] * query_key.key.shape[-2] > LONG


def split_tiles(query_key: QueryKey) -> Iterator[tuple[slice, QueryKey]]:
    """Yield each block of queries as a slice and a QueryKey of these queries; one block unless `is_long`.

    Keys after the last key that the block can see are left out.
    """
    n, m = query_key.query.shape[-2], query_key.key.shape[-2]
    if not is_long(query_key):
        yield slice(0, n), query_key
        return
    height = max(1, TILE // (m * query_key.query[..., 0, 0].numel()))
    for start in range(0, n, height):
        rows = slice(start, min(start + height, n))
        yield rows, query_key.rows(rows)


def map_heads(compute: Callable[[QueryKey], float | tuple[float, ...]], query_key: QueryKey) -> Float[Tensor, "*shape"]:
    """Apply `compute` to every head of every sequence, passed as a QueryKey of one sequence and one head."""
    lead, batch = query_key.query.shape[:-2], query_key
    if len(lead) == 1:  # one sequence without a batch axis
        query, key = batch.query[None], batch.key[None]
        allowed, bias = (None if mask is None else mask[None] for mask in (batch.allowed, batch.bias))
        batch = replace(batch, query=query, key=key, allowed=allowed, bias=bias, value=None, inputs=None)
    heads = itertools.product(range(batch.query.shape[0]), range(lead[-1]))
    single_heads = (batch.sequences([number], slice(None), slice(None)).select([head]) for number, head in heads)
    values = torch.tensor([*map(compute, single_heads)], dtype=torch.float64, device=query_key.query.device)
    return values.reshape(*lead, *values.shape[1:])


@dataclass(frozen=True)
class TiledMatrix:
    """An n × m matrix P, given as tiles of rows that are recomputed for each product; A is PᵀP."""

    tiles: Callable[[], Iterable[Float[Tensor, "rows some_m"]]]  # Rows of P in order; columns that a tile lacks are 0
    size: int  # Number of columns m

    def multiply_gram(self, x: Vectors) -> Vectors:
        """Return A x = PᵀP x."""
        product = torch.zeros_like(x)
        for rows in self.tiles():
            end = rows.shape[1]
            product[:end].addmm_(rows.mT, rows @ x[:end])
        return product

    def energy(self) -> Float[Tensor, ""]:
        """Return tr A = ‖P‖_F²."""
        return torch.stack([rows.square().sum() for rows in self.tiles()]).sum()


@dataclass(frozen=True)
class Ritz:
    """Ritz pairs of A = PᵀP, descending: Σ_{l≤k} values ≤ Σ_{l≤k} λ_l(A) (Ky Fan)."""

    values: Float[Tensor, " basis"]  # VᵀAV = diag(values)
    residuals: Float[Tensor, " basis"]  # ‖A v_i − values_i v_i‖
    basis: Float[Tensor, "m basis"]  # orthonormal columns
    turn: Float[Tensor, "basis basis"]  # V = basis · turn

    def bound_energy(self, rank: int, pairs: int, norm: float) -> float:
        """Return an upper bound on Σ_{l≤rank} λ_l(A) if A deflated by its first `pairs` Ritz vectors has norm ≤ `norm`.

        In the basis of these Ritz vectors and their complement, A is diag(Λ, M) plus the coupling S, whose rows s_i are
        residuals. The sum of the largest eigenvalues is subadditive, and that of the coupling is at most Σ‖s_i‖.
        """
        bounds = self.values[:rank].clamp(min=norm)
        bounds[pairs:] = norm
        return float(bounds.sum() + self.residuals[:pairs].sum())


def least_rank(matrix: TiledMatrix, share: float, seed: int = 0) -> float:
    """Return the least k with Σ_{l≤k} λ_l(A) ≥ share · tr A for A = PᵀP, proven from both sides; NaN if unproven.

    The Ritz values of block Lanczos with full reorthogonalisation (Golub & Underwood 1977) bound Σ_{l≤k} λ_l from
    below; their residuals and the norm of the deflated A bound it from above. That norm is bounded by powers of the
    deflated A applied to Gaussian vectors; the bound fails for one seed in 10^14. If A has at most SMALL columns, it is
    decomposed as a whole. NaN if A = 0.
    """
    generator = torch.Generator().manual_seed(seed)
    energy = float(matrix.energy())
    if not energy > 0:
        return math.nan
    goal, tie, slack = share * energy, ROUNDING * energy, SLACK
    if matrix.size <= SMALL:
        identity = torch.eye(matrix.size, dtype=torch.float64, device=next(iter(matrix.tiles())).device)
        sums = torch.linalg.eigvalsh(matrix.multiply_gram(identity)).flip(0).clamp(min=0).cumsum(0)
        return math.nan if bool(((sums - goal).abs() <= tie).any()) else 1.0 + float((sums < goal).sum())
    for ritz in _lanczos(matrix, generator):
        rank = 1 + int((ritz.values.cumsum(0) < goal + tie).sum())
        if rank >= len(ritz.values):
            continue
        if rank == 1:
            return 1.0
        # Half of the gap between rank − 1 Ritz values and the goal is used for residuals, half for the deflated norm.
        spare = (goal - float(ritz.values[: rank - 1].sum())) / 2
        pairs = min(int((ritz.residuals.cumsum(0) < spare).sum()), len(ritz.values) - 1)
        next_value = float(ritz.values[pairs])
        # Bounding the norm needs products with the matrix, so it is done only if the expected bound proves the rank.
        if ritz.bound_energy(rank - 1, pairs, slack * next_value) < goal - tie:
            for norm in _bound_deflated_norm(matrix, ritz, pairs, generator):
                if ritz.bound_energy(rank - 1, pairs, norm) < goal - tie:
                    return float(rank)
            slack = max(slack, norm / next_value) if next_value else slack
    return math.nan


def _lanczos(matrix: TiledMatrix, generator: torch.Generator) -> Iterator[Ritz]:
    """Yield the Ritz pairs of Krylov spaces of A, started from a random block and extended by a block each time."""
    largest = min(LARGEST_BASIS, matrix.size - BLOCK)
    block, _ = torch.linalg.qr(_draw_block(matrix, generator))
    basis, projected = block[:, :0], block.new_zeros(largest, largest)
    while (end := basis.shape[1] + BLOCK) <= largest:
        product = matrix.multiply_gram(block)
        basis = torch.cat((basis, block), 1)
        projected[:end, end - BLOCK : end] = basis.mT @ product
        block, coupling = _orthonormalise(product, basis)
        values, turn = torch.linalg.eigh(projected[:end, :end], UPLO="U")
        values, turn = values.flip(0).clamp(min=0), turn.flip(1)
        yield Ritz(values, (coupling @ turn[-BLOCK:]).norm(dim=0), basis, turn)


def _orthonormalise(vectors: Vectors, basis: Float[Tensor, "m basis"]) -> tuple[Vectors, Float[Tensor, "some some"]]:
    """Return Q and C: Q has orthonormal columns, and Q C is the part of the vectors orthogonal to the basis."""
    coupling = torch.eye(vectors.shape[1], dtype=vectors.dtype, device=vectors.device)
    for _ in range(3):  # a single pass leaves rounding errors, which normalising a small remainder amplifies
        vectors = vectors - basis @ (basis.mT @ vectors)
        vectors, upper = torch.linalg.qr(vectors)
        coupling = upper @ coupling
    return vectors, coupling


def _bound_deflated_norm(matrix: TiledMatrix, ritz: Ritz, pairs: int, generator: torch.Generator) -> Iterator[float]:
    """Yield bounds on the norm of M, which is A deflated by its first `pairs` Ritz vectors.

    The bounds follow from ‖M^j‖ ≤ FACTOR · max_i ‖M^j ω_i‖ for Gaussian ω_i, with the probability stated at FACTOR.
    """
    leading = ritz.basis @ ritz.turn[:, :pairs]
    vectors, log_bound = _draw_block(matrix, generator), math.log(FACTOR)
    vectors = vectors - leading @ (leading.mT @ vectors)
    for power in range(1, POWERS + 1):
        vectors = matrix.multiply_gram(vectors)
        vectors = vectors - leading @ (leading.mT @ vectors)
        largest = float(vectors.norm(dim=0).amax())
        log_bound += math.log(largest) if largest > 0 else -math.inf
        yield math.exp(log_bound / power)
        vectors = vectors / (largest or 1.0)  # without this, powers would overflow


def _draw_block(matrix: TiledMatrix, generator: torch.Generator) -> Vectors:
    """Draw BLOCK Gaussian vectors of length m on the device of the matrix."""
    device = next(iter(matrix.tiles())).device
    return torch.randn(matrix.size, BLOCK, dtype=torch.float64, generator=generator).to(device)


@dataclass(frozen=True)
class IntervalMask:
    """A mask in which each query sees an interval of keys, and each key is seen by an interval of queries.

    Examples are causal masks, windows, consecutive documents, prefixes, and masks that hide nothing. Sums over visible
    pairs are then differences of running sums.
    """

    keys: tuple[Int[Tensor, " n"], Int[Tensor, " n"]]
    """Index of each query's first key, and of its last key plus 1; both are equal if the query sees no key."""
    queries: tuple[Int[Tensor, " m"], Int[Tensor, " m"]]  # Index of each key's first query, and of its last plus 1

    def explained_squares(self, by_key: Float[Tensor, " m"], by_distance: Distances | None) -> tuple[float, float]:
        """For row-centred scores L, return how much of ‖L‖² key terms b explain, and distance terms c in addition.

        The arguments are L's sums per key and per distance j − i ≥ 1 − n (None for cross-attention, for which
        the second result is NaN). The results are NaN if conjugate gradients do not converge.
        """
        n, size = len(self.keys[0]), len(by_key)
        query, key = (torch.arange(count, device=by_key.device) for count in (n, size))
        # Indices j − i + n − 1 of each query's and each key's distances: the first, and the last plus 1.
        of_queries = self.keys[0] - query + n - 1, self.keys[1] - query + n - 1
        of_keys = key - self.queries[1] + n, key - self.queries[0] + n
        key_counts, query_counts = ((past_last - first).double() for first, past_last in (self.keys, self.queries))

        def sum_by_distance(values: Vector, ends: Ends) -> Distances:
            change = values.new_zeros(n + size)
            change.index_add_(0, ends[0], values).index_add_(0, ends[1], -values)
            return change.cumsum(0)[:-1]

        distance_counts = sum_by_distance(torch.ones_like(key_counts), of_queries)

        def multiply(b: Tensor, c: Tensor) -> Tensor:
            """Multiply (b, c) by the matrix of the normal equations, from which row constants are eliminated."""
            row_means = (_sum_intervals(b, self.keys) + _sum_intervals(c, of_queries)) / key_counts.clamp(min=1)
            keys = query_counts * b + _sum_intervals(c, of_keys) - _sum_intervals(row_means, self.queries)
            distances = distance_counts * c + sum_by_distance(b, of_keys) - sum_by_distance(row_means, of_queries)
            return torch.cat((keys, distances))

        pairs, zeros = torch.cat((query_counts, distance_counts)), torch.zeros_like(distance_counts)
        scale = torch.where(pairs > 0, pairs.clamp(min=1).rsqrt(), 0.0)
        by_keys = _solve_energy(lambda b: multiply(b, zeros)[:size], by_key, scale[:size])
        if by_distance is None:
            return by_keys, math.nan
        both = _solve_energy(lambda x: multiply(x[:size], x[size:]), torch.cat((by_key, by_distance)), scale)
        return by_keys, both - by_keys


def find_intervals(allowed: Bool[Tensor, "n m"]) -> IntervalMask | None:
    """Return the intervals of a mask; None if the keys that a query sees, or the queries that see a key, have a gap."""
    sides = []
    for axis in (1, 0):
        count, first = allowed.sum(axis), allowed.byte().argmax(axis)
        last = allowed.shape[axis] - 1 - allowed.flip(axis).byte().argmax(axis)
        if bool(((count > 0) & (last - first + 1 != count)).any()):
            return None
        sides.append((first, first + count))
    return IntervalMask(*sides)


def _sum_intervals(values: Vector, ends: Ends) -> Float[Tensor, " ends"]:
    """Sum the values from each start to just before each end."""
    running = pad(values.cumsum(0), (1, 0))
    return running[ends[1]] - running[ends[0]]


def _solve_energy(multiply: Callable[[Vector], Vector], right: Vector, scale: Vector) -> float:
    """Return gᵀN⁺g for g = `right` in the range of N; NaN if the iteration does not converge.

    `multiply` computes products with N; conjugate gradients are applied to N scaled to unit diagonal by `scale`.
    """
    goal = right * scale
    solution, remainder, direction = torch.zeros_like(goal), goal.clone(), goal.clone()
    squared = start = goal @ goal
    for _ in range(STEPS):
        if squared <= RESIDUAL**2 * start:
            return float(solution @ goal)
        product = multiply(direction * scale) * scale
        step = squared / (direction @ product)
        solution, remainder = solution + step * direction, remainder - step * product
        before, squared = squared, remainder @ remainder
        direction = remainder + squared / before * direction
    return math.nan
