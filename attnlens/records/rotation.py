"""A Rotation: pairs of coordinates and their angle at each position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """R(0) … R(positions − 1), R(i) R(j)ᵀ = R(i−j); a coordinate turns with one partner or stands still (RoPE).

    x R(i) has x_a cos φ − x_b sin φ at the first coordinate a of a pair, and x_a sin φ + x_b cos φ at its second b.
    """

    pairs: Int[Tensor, "pairs 2"]
    """The coordinates that turn together."""
    angles: Float[Tensor, "positions pairs"]
    """φ, by which they turn, in float64."""
    size: int
    """head_dim."""

    @property
    def transposed(self) -> Rotation:
        """R(i)ᵀ = R(−i) in the place of R(i)."""
        return replace(self, angles=-self.angles)

    def turned(self, x: Float[Tensor, "*batch positions head_dim"]) -> Float[Tensor, "*batch positions head_dim"]:
        """x_i R(i), of the first positions where x has fewer."""
        first, second = self.pairs.unbind(-1)
        angles = self.angles[: x.shape[-2]]
        cos, sin = angles.cos(), angles.sin()
        result = x.clone()
        result[..., first] = x[..., first] * cos - x[..., second] * sin
        result[..., second] = x[..., first] * sin + x[..., second] * cos
        return result
