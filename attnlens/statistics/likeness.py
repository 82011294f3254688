"""Linear CKA of two models' hidden states, summed over batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


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
