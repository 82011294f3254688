"""Singular values and what is read of them, head by head in a pool of threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import torch
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")

PIECE = 1 << 18
"""Numbers in one worker's piece: 2 MB of float64 stay in the second-level cache."""


def over_heads(function: Callable[..., Tensor], *stacks: Tensor, workers: int | None = None) -> Tensor:
    """`function` of stacks of matrices (*lead, a, b), cut along `lead` and run by a pool of threads.

    `function` takes (m, a, b) tensors and returns one (m, …) tensor; the result is (*lead, …). Each worker has a single
    BLAS thread, because two of them on one small matrix mostly wait for each other. `workers` defaults to torch's own
    number of threads. Tensors on an accelerator go to `function` as they are.
    """
    lead = stacks[0].shape[:-2]
    flat = [stack.reshape(-1, *stack.shape[-2:]) for stack in stacks]
    if flat[0].is_cpu and len(flat[0]) > 0:
        result = torch.cat(_in_pool(function, flat, workers or torch.get_num_threads()))
    else:
        result = function(*flat)
    return result.reshape(*lead, *result.shape[1:])


def in_pool(function: Callable[[Item], Result], items: Sequence[Item], workers: int | None = None) -> list[Result]:
    """`function` of every item, in their order, by the same pool of threads with a single BLAS thread each.

    numpy's BLAS, which knows no thread's own setting, is held to one thread as long as the pool works.
    """
    threads = torch.get_num_threads()
    try:
        with threadpool_limits(1, user_api="blas"):
            return list(_pool(workers or threads).map(function, items))
    finally:
        torch.set_num_threads(threads)


def _in_pool(function: Callable[..., Tensor], stacks: list[Tensor], workers: int) -> list[Tensor]:
    largest = max(stack[0].numel() for stack in stacks)
    step = max(1, min(PIECE // max(largest, 1), -(-len(stacks[0]) // workers)))
    pieces = zip(*(torch.split(stack, step) for stack in stacks), strict=True)
    threads = torch.get_num_threads()
    gradients = torch.is_grad_enabled()

    def run(piece: tuple[Tensor, ...]) -> Tensor:
        # Whether gradients are recorded is a thread's own setting, and the workers start with torch's default.
        with torch.set_grad_enabled(gradients):
            return function(*piece)

    if threads == workers == 1:  # this thread is what the pool's only one would be
        return [*map(run, pieces)]
    try:
        return list(_pool(workers).map(run, pieces))
    finally:
        # set_num_threads is each thread's own, but it is also the start value of threads that begin later.
        torch.set_num_threads(threads)


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """One pool for the life of the process: token measures call it thousands of times."""
    return ThreadPoolExecutor(workers, initializer=_one_thread)


def _one_thread() -> None:
    torch.get_num_threads()  # a thread takes the start value at its first use, and would take it after the next line
    torch.set_num_threads(1)


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has the pool, but not its threads


EPS = torch.finfo(torch.float64).eps


def singular_values(matrix: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch least"]:
    """σ of dense matrices, descending, min(n, m) of them."""
    return over_heads(torch.linalg.svdvals, matrix)


def product_singular_values(
    left: Float[Tensor, "*batch n head_dim"], right: Float[Tensor, "*batch m head_dim"]
) -> Float[Tensor, "*batch least"]:
    """σ of A Bᵀ, descending, without forming it: QR of both factors, then their core; min(n, m, head_dim) of them."""
    return over_heads(_product_core, left, right)


def _product_core(left: Tensor, right: Tensor) -> Tensor:
    upper = (torch.linalg.qr(factor.double(), mode="r").R for factor in (left, right))
    values: Tensor = torch.linalg.svdvals(next(upper) @ next(upper).mT)
    return values


def stable_rank(values: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch"]:
    """‖M‖_F² / ‖M‖₂² ≥ 1 of singular values in descending order; σ = (4, 2, 1, 1) has 1.375. NaN for a zero matrix."""
    return (values / values[..., :1]).square().sum(-1)


def effective_rank(values: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch"]:
    """exp(−Σ p log p) ≥ 1, p = σ/Σσ (Roy & Vetterli 2007); σ = (4, 2, 1, 1) has 3.36359. NaN for a zero matrix."""
    shares = values / values.sum(-1, keepdim=True)
    entropies: Tensor = torch.special.entr(shares).sum(-1)
    return entropies.exp()


def rank_at(values: Float[Tensor, "*batch steps"], share: float) -> Float[Tensor, "*batch"]:
    """The least k with Σ_{l≤k} σ² ≥ share · Σσ², ≥ 1, of singular values in descending order. NaN for a zero matrix."""
    energy = values.square().cumsum(-1) / values.square().sum(-1, keepdim=True)
    # Strict, and below by rounding: k values that reach the share exactly are enough.
    short = energy < share - EPS * values.shape[-1]
    return torch.where(energy[..., -1].isnan(), torch.nan, 1 + short.sum(-1).to(values))


def cumulative(values: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch steps"]:
    """Σ_{l≤k} v_l / Σ v_l for k = 1 … steps, rising to 1. NaN where all are zero."""
    return values.cumsum(-1) / values.sum(-1, keepdim=True)


def decay_rate(values: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch"]:
    """b ≥ 0 of the least-squares line log σ_l ≈ a − b·l through descending values; NaN for fewer than two.

    Values up to eps · steps · largest are rounding and take no part. Sorted values of random factors fall too: the rate
    says something beside their rate alone.
    """
    # Strict: a zero matrix keeps no value.
    kept = values > EPS * values.shape[-1] * values[..., :1]
    count = kept.sum(-1, keepdim=True)
    index = torch.arange(1, values.shape[-1] + 1, dtype=values.dtype, device=values.device)
    centred = (index - (count + 1) / 2) * kept  # descending: those kept are the first
    slope = (centred * torch.where(kept, values, 1.0).log()).sum(-1) / centred.square().sum(-1)
    return torch.where(count[..., 0] >= 2, (-slope).clamp(min=0), torch.nan)
