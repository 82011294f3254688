"""Puts examples into batches: shuffled without end for training, in a fixed order for judging."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

    from attnlens.studies.tasks.task import Examples

POOL = 32
"""Batches, at most, that are filled from one part of a shuffled epoch in the order of length: little is padding."""
POOLS = 4
"""Parts of an epoch, at least: sorted as a whole, an epoch would put the same examples together each time."""


def endless(
    lengths: Sequence[int], size: int, seed: int, batch: Callable[[Sequence[int]], Examples]
) -> Iterator[Examples]:
    """Batches of examples of those lengths without end, each epoch in a new order, a function of `seed` alone.

    What is left of an epoch beside full batches is left out: other examples in each epoch, since they are cut off
    before any are sorted by length.
    """
    draws = torch.Generator().manual_seed(seed)
    while True:
        order: list[int] = torch.randperm(len(lengths), generator=draws).tolist()
        whole = order[: max(len(order) // size * size, min(size, len(order)))]
        most = size * min(max(len(whole) // size // POOLS, 1), POOL)
        for start in range(0, len(whole), most):
            pool = sorted(whole[start : start + most], key=lengths.__getitem__)
            parts = [pool[at : at + size] for at in range(0, len(pool), size)]
            for number in torch.randperm(len(parts), generator=draws).tolist():
                yield batch(parts[number])


def in_order(lengths: Sequence[int], size: int, batch: Callable[[Sequence[int]], Examples]) -> list[Examples]:
    """All examples once, the shortest first, in batches of `size`; the last may hold fewer."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [batch(order[start : start + size]) for start in range(0, len(order), size)]


def padded(rows: Sequence[Tensor], value: float) -> tuple[Tensor, Bool[Tensor, "batch tokens"]]:
    """The rows side by side, filled up on the right with `value`, and which places are theirs."""
    sizes = torch.tensor([len(row) for row in rows])
    whole = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
    return whole, torch.arange(int(sizes.max())) < sizes[:, None]


def spread(count: int, most: int | None) -> list[int]:
    """At most `most` of the numbers below `count`, as evenly as they go; all of them for None."""
    if most is None or count <= most:
        return list(range(count))
    return [int((number + 0.5) * count / most) for number in range(most)]
