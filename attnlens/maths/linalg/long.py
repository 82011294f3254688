"""Matrices of long sequences in tiles of rows: leading singular values, and masks made of intervals."""

from __future__ import annotations

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

LONG = 2048**2
"""Heads with more query–key pairs are long: their matrices are read in tiles, and full spectra are not computed. At
2,048 tokens the full spectra of a head take 7 s on one core, at 8,192 tokens 64 times as much."""
TILE = 1 << 22  # numbers in one tile: 32 MB of float64; about five tiles are in memory at a time


def is_long(query_key: QueryKey) -> bool:
    """Return whether a head has more than LONG pairs of queries and keys."""
    return query_key.query.shape[-2] * query_key.key.shape[-2] > LONG


def tiles(query_key: QueryKey) -> Iterator[tuple[slice, QueryKey]]:
    """Yield consecutive queries with the keys that they may see; all queries at once if the head is not long."""
    n, m = query_key.query.shape[-2], query_key.key.shape[-2]
    if not is_long(query_key):
        yield slice(0, n), query_key
        return
    height = max(1, TILE // (m * query_key.query[..., 0, 0].numel()))
    for start in range(0, n, height):
        rows = slice(start, min(start + height, n))
        yield rows, query_key.rows(rows)


def each_head(
    query_key: QueryKey, function: Callable[[QueryKey], float | tuple[float, ...]]
) -> Float[Tensor, "*shape"]:
    """Apply `function` to every head of every sequence in turn, each as a batch of one sequence and one head."""
    lead = query_key.query.shape[:-2]
    flat = query_key
    if len(lead) == 1:  # one sequence without a batch axis
        allowed, bias = (None if mask is None else mask[None] for mask in (flat.allowed, flat.bias))
        flat = replace(
            flat, query=flat.query[None], key=flat.key[None], allowed=allowed, bias=bias, value=None, inputs=None
        )
    results = [
        function(flat.sequences([number], slice(None), slice(None)).select([head]))
        for number in range(flat.query.shape[0])
        for head in range(lead[-1])
    ]
    values = torch.tensor(results, dtype=torch.float64, device=query_key.query.device)
    return values.reshape(*lead, *values.shape[1:])


BLOCK = 64  # vectors multiplied at once
SMALL = 1024  # largest number of columns of a matrix that is decomposed as a whole
LARGEST_BASIS = 1024  # vectors of the Krylov space; ranks up to about a quarter of it can be proven
POWERS = 8  # largest power of the deflated matrix used to bound its norm
SLACK = 1.3
"""Expected ratio of the deflated matrix's norm bound to the next Ritz value; raised to the ratio that is observed."""
ROUNDING = 1e-10  # energies closer than this share of the total are a tie, and decide nothing
FACTOR = 10 ** (16 / BLOCK) * math.sqrt(2 / math.pi)
"""‖B‖ ≤ FACTOR · max_i ‖Bω_i‖ for BLOCK Gaussian ω_i, except for one draw in 10^16 (Halko et al. 2011, Lemma 4.1)."""


@dataclass(frozen=True)
class TiledMatrix:
    """An n × m matrix P, formed in tiles of rows each time it is multiplied, and A = PᵀP."""

    tiles: Callable[[], Iterable[Float[Tensor, "rows some_m"]]]
    """Rows of P in order; columns that a tile lacks are zero."""
    size: int
    """Number of columns m."""

    def gram(self, x: Float[Tensor, "m some"]) -> Float[Tensor, "m some"]:
        """Return A x."""
        product = torch.zeros_like(x)
        for rows in self.tiles():
            end = rows.shape[1]
            product[:end].addmm_(rows.mT, rows @ x[:end])
        return product

    def energy(self) -> Float[Tensor, ""]:
        """Return tr A = ‖P‖_F²."""
        total: Tensor = torch.stack([rows.square().sum() for rows in self.tiles()]).sum()
        return total


@dataclass(frozen=True)
class Ritz:
    """Ritz pairs of A, descending: Σ_{l≤k} values ≤ Σ_{l≤k} λ_l(A) (Ky Fan)."""

    values: Float[Tensor, " basis"]  # VᵀAV = diag(values)
    residuals: Float[Tensor, " basis"]  # ‖A v_i − values_i v_i‖
    basis: Float[Tensor, "m basis"]  # orthonormal columns
    turn: Float[Tensor, "basis basis"]  # V = basis · turn

    def most(self, rank: int, pairs: int, rest: float) -> float:
        """Return an upper bound on Σ_{l≤rank} λ_l(A), if A deflated by its first `pairs` vectors has a norm ≤ `rest`.

        In the basis (V_p, V⊥), A is diag(Λ, M) plus the coupling S, whose rows are residuals. Sums of the largest
        eigenvalues are subadditive, and those of the coupling are at most Σ‖s_i‖.
        """
        known = self.values[:rank].clamp(min=rest)
        known[pairs:] = rest
        return float(known.sum() + self.residuals[:pairs].sum())


def least_rank(matrix: TiledMatrix, share: float, seed: int = 0) -> float:
    """Return the least k with Σ_{l≤k} λ_l(A) ≥ share · tr A, proven from both sides; NaN if unproven, or if A = 0.

    Block Lanczos with full reorthogonalisation (Golub & Underwood 1977) gives Ritz pairs. Their sum bounds the energy
    of k vectors from below. Their residuals and the norm of the deflated A bound it from above. Powers applied to fresh
    Gaussian vectors bound that norm, except for one seed in 10^14. A with at most SMALL columns is decomposed whole.
    """
    draw = torch.Generator().manual_seed(seed)
    goal, slack = share * float(energy := matrix.energy()), SLACK
    tie = ROUNDING * float(energy)
    if matrix.size <= SMALL and energy > 0:
        whole = torch.eye(matrix.size, dtype=torch.float64, device=next(iter(matrix.tiles())).device)
        sums = torch.linalg.eigvalsh(matrix.gram(whole)).flip(0).clamp(min=0).cumsum(0)
        return math.nan if bool(((sums - goal).abs() <= tie).any()) else 1.0 + float((sums < goal).sum())
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


def _lanczos(matrix: TiledMatrix, draw: torch.Generator) -> Iterator[Ritz]:
    """Yield Ritz pairs of growing Krylov spaces of A, started from a random block."""
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
    """Return orthonormal Q orthogonal to the basis, and C with Q C = the vectors minus their part in the basis."""
    coupling = torch.eye(vectors.shape[1], dtype=vectors.dtype, device=vectors.device)
    for _ in range(3):  # a single pass leaves rounding errors, which normalising may amplify
        vectors = vectors - basis @ (basis.mT @ vectors)
        vectors, upper = torch.linalg.qr(vectors)
        coupling = upper @ coupling
    return vectors, coupling


def _norms_left(matrix: TiledMatrix, ritz: Ritz, pairs: int, draw: torch.Generator) -> Iterator[float]:
    """Yield bounds on ‖M‖, M being A deflated by its first Ritz vectors, from ‖M^j‖ ≤ FACTOR · max_i ‖M^j ω_i‖."""
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


RESIDUAL = 1e-10
"""Relative residual at which conjugate gradients stop. The explained sum of squares is then too small by less than
RESIDUAL² times the condition number of the scaled normal equations: by rounding, for any such number in float64."""
STEPS = 1000  # most steps of conjugate gradients; real masks take 6 to 20


@dataclass(frozen=True)
class IntervalMask:
    """A mask in which each query sees an interval of keys, and each key is seen by an interval of queries.

    Causal masks, windows, consecutive documents, prefixes and all pairs are such masks. Sums over what a query sees are
    then differences of running sums. So is the product of the normal equations of b_j + c_{j−i} with a vector.
    """

    keys: tuple[Int[Tensor, " n"], Int[Tensor, " n"]]
    """First key of each query, and one past its last; equal if the query sees none."""
    queries: tuple[Int[Tensor, " m"], Int[Tensor, " m"]]
    """First query of each key, and one past its last."""

    def explained(
        self, by_key: Float[Tensor, " m"], by_distance: Float[Tensor, " distances"] | None
    ) -> tuple[float, float]:
        """Return the sums of squares explained by b, and by c beyond b, of row-centred scores; NaN without convergence.

        The arguments are the scores' sums per key and per distance j − i from 1 − n on (None for cross-attention).
        """
        nothing = by_key.new_zeros(len(self.keys[0]) + len(by_key) - 1)
        pairs = torch.cat((self._counts(self.queries), self._spread(torch.ones_like(self._of_queries), self.keys)))
        scale = torch.where(pairs > 0, pairs.clamp(min=1).rsqrt(), 0.0)
        size = len(by_key)
        of_keys = _energy(lambda b: self._normal(b, nothing)[:size], by_key, scale[:size])
        if by_distance is None:
            return of_keys, math.nan
        both = _energy(lambda x: self._normal(x[:size], x[size:]), torch.cat((by_key, by_distance)), scale)
        return of_keys, both - of_keys

    @property
    def _of_queries(self) -> Float[Tensor, " n"]:
        return self._counts(self.keys)

    def _counts(self, ends: tuple[Tensor, Tensor]) -> Float[Tensor, " size"]:
        return (ends[1] - ends[0]).double()

    def _distances(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the indices j − i + n − 1 of each query's and each key's distances: first, and one past the last."""
        n = len(self.keys[0])
        query, key = (torch.arange(len(ends[0]), device=ends[0].device) for ends in (self.keys, self.queries))
        of_queries = self.keys[0] - query + n - 1, self.keys[1] - query + n - 1
        return of_queries, (key - self.queries[1] + n, key - self.queries[0] + n)

    def _normal(self, b: Float[Tensor, " m"], c: Float[Tensor, " distances"]) -> Float[Tensor, " both"]:
        """Multiply the normal equations of b and c, row constants eliminated, with (b, c)."""
        of_queries, of_keys = self._distances()
        seen = (_sum_intervals(b, self.keys) + _sum_intervals(c, of_queries)) / self._of_queries.clamp(min=1)
        keys = self._counts(self.queries) * b + _sum_intervals(c, of_keys) - _sum_intervals(seen, self.queries)
        pairs = self._spread(torch.ones_like(seen), self.keys)
        return torch.cat((keys, pairs * c + self._spread(b, self.queries) - self._spread(seen, self.keys)))

    def _spread(self, values: Float[Tensor, " size"], ends: tuple[Tensor, Tensor]) -> Float[Tensor, " distances"]:
        """Sum, over the pairs of each distance, the value of their query (if `ends` is `keys`) or of their key."""
        first, behind = self._distances()[0 if ends is self.keys else 1]
        change = values.new_zeros(len(self.keys[0]) + len(self.queries[0]))
        change.index_add_(0, first, values).index_add_(0, behind, -values)
        return change.cumsum(0)[:-1]


def interval_mask(allowed: Bool[Tensor, "n m"]) -> IntervalMask | None:
    """Return the intervals of a mask; None if the keys seen by a query, or the queries seeing a key, have a gap."""
    sides = []
    for axis in (1, 0):
        count, first = allowed.sum(axis), allowed.byte().argmax(axis)
        last = allowed.shape[axis] - 1 - allowed.flip(axis).byte().argmax(axis)
        if bool(((count > 0) & (last - first + 1 != count)).any()):
            return None
        sides.append((first, first + count))
    return IntervalMask(*sides)


def _sum_intervals(values: Float[Tensor, " size"], ends: tuple[Tensor, Tensor]) -> Float[Tensor, " some"]:
    """Sum the values from each start to just before each end."""
    running = pad(values.cumsum(0), (1, 0))
    return running[ends[1]] - running[ends[0]]


def _energy(
    normal: Callable[[Float[Tensor, " size"]], Float[Tensor, " size"]],
    right: Float[Tensor, " size"],
    scale: Float[Tensor, " size"],
) -> float:
    """Return gᵀN⁺g, g in the range of N, by conjugate gradients on N scaled to unit diagonal; NaN if unconverged."""
    goal = right * scale
    solution, remainder, direction = torch.zeros_like(goal), goal.clone(), goal.clone()
    size = start = goal @ goal
    for _ in range(STEPS):
        if size <= RESIDUAL**2 * start:
            return float(solution @ goal)
        product = normal(direction * scale) * scale
        step = size / (direction @ product)
        solution, remainder = solution + step * direction, remainder - step * product
        before, size = size, remainder @ remainder
        direction = remainder + size / before * direction
    return math.nan
