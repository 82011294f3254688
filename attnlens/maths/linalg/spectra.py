"""Singular values, ranks, the number of features that attention needs, optimal rank reductions, the thread pool."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import torch
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.records import QueryKey

    Matrix = Float[Tensor, "n m"]
    Matrices = Float[Tensor, "*batch heads n m"]
    Weights = Float[Tensor, "*batch n m"]
    Directions = Float[Tensor, "m rank"]
    PerHead = Float[Tensor, "*batch heads"]

EPS = torch.finfo(torch.float64).eps
STEPS = 20  # Number of Newton steps and of subspace iterations; 60 would find up to a sixth fewer features on `demo`
RIDGE = 1e-9  # Added per query to Newton's equations for key scores b, which are singular: b + constant fits as well
BOUND = 3.0  # Bound on each entry of a Newton step: if a weight is 1, b is unbounded and Newton's steps diverge
PIECE = 1 << 18  # Most numbers per call of a worker: 2 MB of float64 fit in the second-level cache
Step = tuple[int, int]  # index of a key head over all sites, and its next smaller rank
Item = TypeVar("Item")
Result = TypeVar("Result")


def taylor_order(query_key: QueryKey, error: float, largest: int, *, centred: bool = False) -> PerHead:
    """Return the least even N ≤ `largest` for which Σ_{n≤N} xⁿ/n! gives the head's attention within `error`.

    x_ij is the head's score, as in the kernel taylor:N, and e^{position bias} multiplies the series. If `centred`, x_ij
    is the softmax input (score and bias) minus its mean over the keys that query i sees; attention determines this
    difference. The error is ½Σ_j|p̂_ij − p_ij|, averaged over queries that see two keys or more. The result is NaN if
    no N suffices or no query sees two keys.

    Float64 suffices up to N = 64: rounding of the alternating sum for x < 0 is noticeable only if |x| > 32, and even
    the exact sums of such a row are then far from attention.
    """
    score, weighting, visible = query_key.content.logits, query_key, _visible_pairs(query_key)
    shift = torch.zeros_like(score[..., :1])
    if centred:
        score, weighting = query_key.logits, replace(query_key, bias=None)
        shift = score.masked_fill(~visible, 0.0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
    score = score - shift
    term = total = torch.ones_like(score)
    order = torch.full_like(score[..., 0, 0], torch.nan)
    for n in range(largest + 1):
        if n > 0:
            term = term * score / n
            total = total + term
        if n % 2 == 0:
            # Even partial sums are positive; negative values are rounding and set to 0.
            approximation = _normalise_kernel(total.clamp(min=0), -shift, weighting)
            distance = _total_variation(approximation, query_key.attention, visible.sum(-1))
            # NaN compares as false: a head whose queries see fewer than two keys has no value.
            order = torch.where(order.isnan() & (distance <= error), float(n), order)
        if not bool(order.isnan().any()):
            break
    return order


def feature_rank(query_key: QueryKey, error: float) -> PerHead:
    """Return a sufficient number m of features: the rank of a K whose K_ij/Σ_j K_ij is within `error` of attention.

    Sums and errors are over the visible pairs. K can have any values at hidden pairs, because zeros there would give
    every causal head full rank. A query whose sum is not positive has error 1, and a sink keeps its weight.

    For m = 1, attention depends only on the key and is fitted by likelihood. For m > 1, K is fitted to attention at
    visible pairs and to its previous values at hidden pairs (hard imputation, Mazumder et al. 2010), by STEPS steps of
    subspace iteration from the fit for m = 1. Bisection finds m, which is an upper bound on the least rank; the least
    rank under a mask has no closed form. NaN if no query sees two keys.
    """

    def ranks(attention: Tensor, visible: Tensor) -> Tensor:
        return attention.new_tensor([_bisect_rank(*head, error) for head in zip(attention, visible, strict=True)])

    return over_heads(ranks, query_key.attention, _visible_pairs(query_key).double())


def _bisect_rank(attention: Matrix, visible: Matrix, error: float) -> float:
    """Return the least rank at which a fit to one head succeeds, by bisection; NaN if no query sees two keys.

    If no fit succeeds, the result is min(n, m).
    """
    if not bool((visible.sum(-1) >= 2).any()):
        return torch.nan
    by_key = _fit_by_key(attention, visible)
    if _kernel_error(by_key, attention, visible) <= error:
        return 1.0
    start = torch.where(visible > 0, attention, by_key)
    directions = torch.linalg.svd(start, full_matrices=False).Vh.mT
    low, high = 1, min(attention.shape)
    while high - low > 1:
        middle = (low + high) // 2
        fits = _can_fit(attention, visible, start, directions[:, :middle], error)
        low, high = (low, middle) if fits else (middle, high)
    return float(high)


def _fit_by_key(attention: Matrix, visible: Matrix) -> Matrix:
    """Fit attention by a score b_j per key: return e^{b_j}/Σ_l e^{b_l}, l visible to query i, times i's total weight.

    The quotient is capped at 1 for keys hidden from query i. Newton's method finds the b that maximises the likelihood
    Σ_ij p_ij log p̂_ij, which is concave in b.
    """
    hidden, totals = visible == 0, attention.sum(-1, keepdim=True)
    scores = attention.new_zeros(attention.shape[-1])
    ridge = RIDGE * len(attention) * torch.eye(len(scores), dtype=scores.dtype, device=scores.device)
    for _ in range(STEPS):
        share = scores.expand_as(attention).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(nan=0.0)
        curvature = (totals * share).sum(0).diag() - share.mT @ (totals * share)
        step = torch.linalg.solve(curvature + ridge, (attention - totals * share).sum(0))
        scores = scores + step.clamp(-BOUND, BOUND)
    total = scores.expand_as(attention).masked_fill(hidden, -torch.inf).logsumexp(-1, keepdim=True)
    # A value above 1 at a hidden pair exceeds any attention weight and would dominate the fit.
    return totals * (scores - total).clamp(max=0).exp()


def _can_fit(attention: Matrix, visible: Matrix, start: Matrix, directions: Directions, error: float) -> bool:
    """Return True if subspace iteration finds a matrix of the rank of `directions` within `error` of attention."""
    filled = start
    for _ in range(STEPS):
        basis = torch.linalg.qr(filled @ directions).Q
        directions = filled.mT @ basis
        low_rank = basis @ directions.mT
        if _kernel_error(low_rank, attention, visible) <= error:
            return True
        filled = torch.where(visible > 0, attention, low_rank)
    return False


def _kernel_error(kernel: Matrix, attention: Matrix, visible: Matrix) -> float:
    """Return the mean total variation distance between attention and the normalised kernel; a sink keeps its weight."""
    weights = kernel * visible
    total = weights.sum(-1, keepdim=True) + (1 - attention.sum(-1, keepdim=True)).clamp(min=0)
    return float(_total_variation(weights / torch.where(total > 0, total, torch.nan), attention, visible.sum(-1)))


def gaussian_like(query_key: QueryKey, seed: int = 0) -> QueryKey:
    """Draw normal queries and keys with the means and covariances of each head's queries and keys.

    The draws are independent between tokens, and between queries and keys, but not between heads.
    """
    generator, draws = torch.Generator().manual_seed(seed), []
    for side in (query_key.query.double(), query_key.paired_key.double()):
        # mean + G(X − mean)/√n, with one standard normal G for all heads and windows of n tokens
        n, mean = side.shape[-2], side.mean(-2, keepdim=True)
        mixing = torch.randn(n, n, generator=generator, dtype=torch.float64).to(side.device)
        draws.append(mean + mixing @ (side - mean) / n**0.5)
    key_of = tuple(range(len(query_key.heads)))
    return replace(query_key, query=draws[0], key=draws[1], key_of=key_of, value=None)


def _visible_pairs(query_key: QueryKey) -> Bool[Tensor, "*batch heads n m"]:
    if query_key.allowed is None:
        return torch.ones_like(query_key.logits, dtype=torch.bool)
    return query_key.allowed.expand_as(query_key.logits)


def _normalise_kernel(kernel: Matrices, unit: Float[Tensor, "*batch heads n 1"], query_key: QueryKey) -> Matrices:
    """Return k_ij e^{b_ij}/(Σ_j k_ij e^{b_ij} + e^{sink}) over the keys j that query i sees.

    `kernel` contains e^{unit_i} · k_ij. Rows whose sum is not positive are NaN.
    """
    hidden = ~_visible_pairs(query_key)
    weights = kernel.masked_fill(hidden, 0.0)
    if query_key.bias is not None:
        bias = query_key.bias.double().expand_as(kernel).masked_fill(hidden, -torch.inf)
        largest = bias.amax(-1, keepdim=True).nan_to_num(neginf=0.0)  # divided out, so that no weight overflows
        weights, unit = weights * (bias - largest).exp(), unit - largest
    total = weights.sum(-1, keepdim=True)
    if query_key.sinks is not None:
        total = total + (query_key.sinks.double()[:, None, None] + unit).exp()
    return weights / torch.where(total > 0, total, torch.nan)


def _total_variation(approximation: Weights, attention: Weights, keys: Tensor) -> Float[Tensor, "*batch"]:
    """Average the total variation distance of two attention matrices over queries with ≥ 2 keys; NaN if there are none.

    A sink's weight counts as that of a key. The distance of a NaN row is 1.
    """
    distance = (approximation - attention).abs().sum(-1) + (approximation.sum(-1) - attention.sum(-1)).abs()
    chooses = keys >= 2
    return torch.where(chooses, (distance / 2).clamp(max=1).nan_to_num(nan=1.0), 0.0).sum(-1) / chooses.sum(-1)


def nested_steps(costs: Float[Tensor, "kv_heads ranks"]) -> list[Step]:
    """Return the steps that reduce the ranks of key heads from full to 0, cheapest per direction first.

    `costs` contains the cost ≥ 0 of each rank of each key head: 0 at full rank, infinite beyond head_dim. Each head
    follows the lower convex hull of its costs, along which the cost per removed direction never falls. Therefore, after
    each step, no other ranks with the same sum are cheaper (Fox 1966).
    """
    steps: list[tuple[float, int, int]] = []
    for head, row in enumerate(costs.tolist()):
        cost = [c for c in row if math.isfinite(c)]
        hull: list[int] = []  # ranks on the lower convex hull, ascending
        for rank in range(len(cost)):
            while len(hull) > 1:
                first, middle = hull[-2:]
                if (cost[middle] - cost[first]) * (rank - first) < (cost[rank] - cost[first]) * (middle - first):
                    break  # the middle lies strictly below the line from the first to this rank
                hull.pop()
            hull.append(rank)
        for low, high in reversed(list(pairwise(hull))):
            steps.append(((cost[low] - cost[high]) / (high - low), head, low))
    return [(head, rank) for _, head, rank in sorted(steps, key=lambda step: step[0])]


def over_heads(function: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
    """Apply `function` to stacks of matrices (*lead, a, b), split along `lead`, in a pool of threads.

    `function` takes (m, a, b) tensors and returns one (m, …) tensor; the result is (*lead, …). Each tensor contains at
    most PIECE numbers, unless a single matrix is larger. There are as many workers as torch has threads, each with one
    BLAS thread, because two threads on one small matrix mostly wait for each other. Tensors on an accelerator are not
    split.
    """
    lead = stacks[0].shape[:-2]
    flat = [stack.reshape(-1, *stack.shape[-2:]) for stack in stacks]
    if flat[0].is_cpu and len(flat[0]) > 0:
        workers, gradients = torch.get_num_threads(), torch.is_grad_enabled()
        largest = max(stack[0].numel() for stack in flat)
        step = max(1, min(PIECE // max(largest, 1), -(-len(flat[0]) // workers)))
        pieces = zip(*(torch.split(stack, step) for stack in flat), strict=True)

        def run(piece: tuple[Tensor, ...]) -> Tensor:
            # The grad mode is thread-local, and workers start with torch's default.
            with torch.set_grad_enabled(gradients):
                return function(*piece)

        # The calling thread is equivalent to a pool of one.
        result = torch.cat([*map(run, pieces)] if workers == 1 else _run_in_pool(run, pieces))
    else:
        result = function(*flat)
    return result.reshape(*lead, *result.shape[1:])


def map_in_pool(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Apply `function` to every item in the thread pool of `over_heads`; return the results in the items' order.

    BLAS uses one thread in the whole process during this call, because numpy's BLAS has no setting per thread.
    """
    with threadpool_limits(1, user_api="blas"):
        return _run_in_pool(function, items)


def _run_in_pool(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    workers = torch.get_num_threads()
    with one_thread():  # restores torch's default for later threads, because workers change the default
        return list(_pool(workers).map(function, items))


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Return the process's pool of `workers` threads, which is cached because starting threads takes time."""
    return ThreadPoolExecutor(workers, initializer=_one_thread)


def _one_thread() -> None:
    torch.get_num_threads()  # the first call loads the initial value, which would otherwise override the next line
    torch.set_num_threads(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager: limit torch to one thread.

    On small matrices, several threads mostly wait for each other, and results depend on their number.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process inherits the pool without its threads


def singular_values(matrix: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch least"]:
    """Return the min(n, m) singular values of dense matrices, descending."""
    return over_heads(torch.linalg.svdvals, matrix)


def product_singular_values(
    left: Float[Tensor, "*batch n head_dim"], right: Float[Tensor, "*batch m head_dim"]
) -> Float[Tensor, "*batch least"]:
    """Return the min(n, m, head_dim) σ of A Bᵀ, descending, by QR of both factors without forming the product."""

    def decompose(left: Tensor, right: Tensor) -> Tensor:
        return root_singular_values(*(torch.linalg.qr(factor.double(), mode="r").R for factor in (left, right)))

    return over_heads(decompose, left, right)


def root_singular_values(left_root: Tensor, right_root: Tensor) -> Tensor:
    """Return σ of A Bᵀ from roots R and S of the Gram matrices, RᵀR = AᵀA and SᵀS = BᵀB."""
    values: Tensor = torch.linalg.svdvals(left_root @ right_root.mT)
    return values


def stable_rank(values: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch"]:
    """Return ‖M‖_F² / ‖M‖₂² ≥ 1 from descending singular values; (4, 2, 1, 1) gives 1.375. NaN for a zero matrix."""
    return (values / values[..., :1]).square().sum(-1)


def effective_rank(values: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch"]:
    """Return exp(−Σ p log p) ≥ 1, p = σ/Σσ (Roy & Vetterli 2007); (4, 2, 1, 1) gives 3.36359. NaN for a zero matrix."""
    shares = values / values.sum(-1, keepdim=True)
    entropies: Tensor = torch.special.entr(shares).sum(-1)
    return entropies.exp()


def rank_at(values: Float[Tensor, "*batch steps"], share: float) -> Float[Tensor, "*batch"]:
    """Return the least k ≥ 1 with Σ_{l≤k} σ² ≥ share · Σσ², for descending singular values; NaN for a zero matrix."""
    energy = values.square().cumsum(-1) / values.square().sum(-1, keepdim=True)
    # Strict, and with a limit lowered by rounding: k values that reach the share exactly suffice.
    short = energy < share - EPS * values.shape[-1]
    return torch.where(energy[..., -1].isnan(), torch.nan, 1 + short.sum(-1).to(values))


def cumulative(values: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch steps"]:
    """Return Σ_{l≤k} v_l / Σ v_l for k = 1 … steps, rising to 1; NaN if all values are zero."""
    return values.cumsum(-1) / values.sum(-1, keepdim=True)


def decay_rate(values: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch"]:
    """Fit log σ_l ≈ a − b·l to descending values by least squares, and return b ≥ 0; NaN for fewer than two values.

    Values up to eps · steps · largest count as rounding and are left out. Random factors also have b > 0.
    """
    # Strict: a zero matrix keeps no value.
    above = values > EPS * values.shape[-1] * values[..., :1]
    count = above.sum(-1, keepdim=True)
    index = torch.arange(1, values.shape[-1] + 1, dtype=values.dtype, device=values.device)
    centred = (index - (count + 1) / 2) * above  # values descend, so those above come first
    slope = (centred * torch.where(above, values, 1.0).log()).sum(-1) / centred.square().sum(-1)
    return torch.where(count[..., 0] >= 2, (-slope).clamp(min=0), torch.nan)
