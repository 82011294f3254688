"""Running means of curves, and linear CKA of hidden states, summed over batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Stream:
    """Mean of values that arrive in batches, entry by entry, without keeping them (Welford, Chan).

    Entries that are NaN don't count. A curve's last axis may differ in length between batches: each step is averaged
    over the values that have it.
    """

    def __init__(self) -> None:
        self.count: Tensor = torch.zeros(())
        """How many values each entry rests on."""
        self._mean: Tensor = torch.zeros(())
        self._started = False

    def update(self, values: Float[Tensor, "samples ..."]) -> None:
        """Take in some samples at once."""
        self.merge(*summed(values))

    def merge(self, count: Float[Tensor, "*shape"], mean: Float[Tensor, "*shape"]) -> None:
        """Take in samples of which so many numbers and their mean are known, entry by entry."""
        if not self._started:
            self.count, self._mean, self._started = count, mean, True
            return
        (n, m), (before, new) = (_same_length(*pair) for pair in ((self.count, count), (self._mean, mean)))
        self.count = n + m
        self._mean = before + (new - before) * m / self.count.clamp(min=1)

    @property
    def mean(self) -> Tensor:
        """The mean of each entry; NaN where there was no value."""
        return torch.where(self.count > 0, self._mean, torch.nan)


def summed(values: Float[Tensor, "samples ..."]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """How many of the samples have a number, and their mean (0 where none has), entry by entry."""
    values = values.double()
    there = ~values.isnan()
    count = there.sum(0).double()
    return count, torch.where(there, values, 0.0).sum(0) / count.clamp(min=1)


def _same_length(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both with zeros behind their last axis up to the longer one."""
    if first.dim() == 0 or first.shape == second.shape:
        return first, second
    steps = max(first.shape[-1], second.shape[-1])
    both = (torch.nn.functional.pad(part, (0, steps - part.shape[-1])) for part in (first, second))
    return next(both), next(both)


class Likeness:
    """Linear CKA ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖) of centred X, Y (Kornblith et al. 2019, Eq. 4), summed over batches."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._products = [torch.zeros(width, width, dtype=torch.float64, device=device) for _ in range(3)]
        self._sums = [torch.zeros(width, dtype=torch.float64, device=device) for _ in range(2)]
        self._count = 0

    def add(self, x: Float[Tensor, "tokens d_model"], y: Float[Tensor, "tokens d_model"]) -> None:
        """Take in the same tokens' states in both models."""
        for product, left, right in zip(self._products, (x, x, y), (y, x, y), strict=True):
            product += left.mT @ right
        for total, part in zip(self._sums, (x, y), strict=True):
            total += part.sum(0)
        self._count += len(x)

    @property
    def value(self) -> float | None:
        """In [0, 1]; 1 where the one is a rotation and scaling of the other; None where one's states are all alike."""
        x, y = self._sums
        pairs = ((x, y), (x, x), (y, y))
        cross, own, new = (
            float((product - torch.outer(left, right) / self._count).norm())
            for product, (left, right) in zip(self._products, pairs, strict=True)
        )
        return cross**2 / (own * new) if own * new > 0 else None
