"""Running means of curves over sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Stream:
    """Mean and standard error of values that arrive in batches, entry by entry, without keeping them (Welford, Chan).

    Entries that are NaN don't count. A curve's last axis may differ in length between batches: each step is averaged
    over the values that have it.
    """

    def __init__(self) -> None:
        self.count: Tensor = torch.zeros(())
        """How many values each entry rests on."""
        self._mean: Tensor = torch.zeros(())
        self._squares: Tensor = torch.zeros(())
        self._started = False

    def update(self, values: Float[Tensor, "samples ..."]) -> None:
        """Take in some samples at once."""
        values = values.double()
        there = ~values.isnan()
        count = there.sum(0).double()
        mean = torch.where(there, values, 0.0).sum(0) / count.clamp(min=1)
        squares = torch.where(there, values - mean, 0.0).square().sum(0)
        self._join(count, mean, squares)

    def merge(self, other: Stream) -> None:
        """Take in what another stream has seen."""
        if other._started:
            self._join(other.count, other._mean, other._squares)

    @property
    def mean(self) -> Tensor:
        """The mean of each entry; NaN where there was no value."""
        return torch.where(self.count > 0, self._mean, torch.nan)

    @property
    def standard_error(self) -> Tensor:
        """sd/√n of each entry, sd unbiased; NaN where there were fewer than two values."""
        variance = self._squares / (self.count - 1).clamp(min=1)
        return torch.where(self.count > 1, (variance / self.count.clamp(min=1)).sqrt(), torch.nan)

    def _join(self, count: Tensor, mean: Tensor, squares: Tensor) -> None:
        if not self._started:
            self.count, self._mean, self._squares, self._started = count, mean, squares, True
            return
        (n, m), (mean_n, mean_m), (squares_n, squares_m) = (
            _same_length(*pair) for pair in ((self.count, count), (self._mean, mean), (self._squares, squares))
        )
        total = (n + m).clamp(min=1)
        apart = mean_m - mean_n
        self.count = n + m
        self._mean = mean_n + apart * m / total
        self._squares = squares_n + squares_m + apart.square() * n * m / total


def _same_length(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both with zeros behind their last axis up to the longer one."""
    if first.dim() == 0 or first.shape == second.shape:
        return first, second
    steps = max(first.shape[-1], second.shape[-1])
    both = (torch.nn.functional.pad(part, (0, steps - part.shape[-1])) for part in (first, second))
    return next(both), next(both)
