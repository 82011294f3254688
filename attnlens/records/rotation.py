"""A Rotation: pairs of coordinates and their angle at each position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """R(0) … R(positions − 1), R(0) = 1; a coordinate turns with one partner or stands still (RoPE).

    Of a sequence R(i) R(j)ᵀ = R(i−j); of an image each place has angles of its own, and tokens without a place have 0.
    x R(i) has x_a cos φ − x_b sin φ at the first coordinate a of a pair, and x_a sin φ + x_b cos φ at its second b.
    """

    pairs: Int[Tensor, "pairs 2"]
    """The coordinates that turn together."""
    angles: Float[Tensor, "positions pairs"]
    """φ, by which they turn, in float64."""
    size: int
    """head_dim."""
    by_distance: bool = True
    """Whether R(i) R(j)ᵀ = R(i−j), so that scores depend on i − j."""

    @property
    def transposed(self) -> Rotation:
        """R(i)ᵀ = R(−i) in the place of R(i)."""
        return replace(self, angles=-self.angles)

    def of_coordinates(self, kept: Int[Tensor, " some"]) -> Rotation | None:
        """The rotation of these coordinates alone, renumbered; None where none of their pairs is whole."""
        import torch

        numbers = self.pairs.new_full((self.size,), -1)
        numbers[kept] = torch.arange(len(kept), device=numbers.device)
        inside = (numbers[self.pairs] >= 0).all(-1)
        if not bool(inside.any()):
            return None
        return replace(self, pairs=numbers[self.pairs[inside]], angles=self.angles[:, inside], size=len(kept))

    def turned(self, x: Float[Tensor, "*batch positions head_dim"]) -> Float[Tensor, "*batch positions head_dim"]:
        """x_i R(i), of the first positions where x has fewer."""
        first, second = self.pairs.unbind(-1)
        angles = self.angles[: x.shape[-2]]
        cos, sin = angles.cos(), angles.sin()
        result = x.clone()
        result[..., first] = x[..., first] * cos - x[..., second] * sin
        result[..., second] = x[..., first] * sin + x[..., second] * cos
        return result
