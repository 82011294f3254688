"""Runs LAPACK on many small matrices: one BLAS thread each, in a pool over the leading axes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import torch
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
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
