"""Traces and Gram matrices under a rotary position encoding, summed over positions.

Both sums are quadratic in R. A pair of coordinates meets no other in R, so they follow from products of cos and sin of
two pairs: of the order of head_dim² at each position, where multiplying the matrices out would take head_dim³.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from attnlens.records import Rotation


def averaged(
    rotation: Rotation, matrix: Float[Tensor, "*batch head_dim head_dim"]
) -> Float[Tensor, "*batch head_dim head_dim"]:
    """mean_i R(i)ᵀ X R(i).

    With w = x_a + i x_b for a pair, and v for another, each 2 × 2 block is a form Re(P w̄ v + Q w v); turning both pairs
    multiplies P by e^{i(φ_w − φ_v)} and Q by e^{−i(φ_w + φ_v)}, whose means are taken once for all matrices.
    """
    order, angles = _order(rotation), _angles(rotation)
    waves = torch.polar(torch.ones_like(angles), angles)
    first, mixed, back_mixed, second = _blocks(matrix, order)
    against = torch.complex(first + second, back_mixed - mixed) * (waves.T @ waves.conj() / (2 * len(angles)))
    along = torch.complex(first - second, -mixed - back_mixed) * (waves.T @ waves / (2 * len(angles))).conj()
    total, difference = against + along, against - along
    upper = torch.cat((total.real, -total.imag), -1)
    mean = torch.cat((upper, torch.cat((difference.imag, difference.real), -1)), -2)
    return _taken(mean, order.argsort()[: rotation.size])


def traces(
    rotation: Rotation,
    left: Float[Tensor, "*batch terms head_dim head_dim"],
    right: Float[Tensor, "*batch terms head_dim head_dim"],
) -> Float[Tensor, "*batch positions"]:
    """Σ_terms tr(X R(Δ)ᵀ Y R(Δ)), the mean of Δ and −Δ, for each distance Δ = 0 … positions − 1.

    In that mean the products of a cos with a sin cancel.
    """
    order, angles = _order(rotation), _angles(rotation)
    a, b, c, d = _blocks(left.mT, order)
    first, mixed, back_mixed, second = _blocks(right, order)
    cosines = (a * first + b * mixed + c * back_mixed + d * second).sum(-3)
    sines = (a * second - b * back_mixed - c * mixed + d * first).sum(-3)
    cos, sin = angles.cos(), angles.sin()
    return (cos @ cosines * cos + sin @ sines * sin).sum(-1)


def _order(rotation: Rotation) -> Int[Tensor, " even"]:
    """The coordinates in an order in which the partner is half the length away: first ones, then second ones.

    Those that stand still are made pairs too; where one is left over, a coordinate of zeros is its partner.
    """
    turning = rotation.pairs.flatten()
    still = torch.ones(rotation.size + rotation.size % 2, dtype=torch.bool, device=turning.device)
    still[turning] = False
    return torch.cat((rotation.pairs, still.nonzero().reshape(-1, 2))).T.flatten()


def _angles(rotation: Rotation) -> Float[Tensor, "positions half"]:
    """The angles of all pairs in that order, 0 where coordinates stand still."""
    return pad(rotation.angles, (0, -(-rotation.size // 2) - len(rotation.pairs)))


def _blocks(matrix: Float[Tensor, "*batch head_dim head_dim"], order: Int[Tensor, " even"]) -> list[Tensor]:
    """The quarters of a matrix in that order: entries of the first of one pair with the first of another, and so on."""
    missing = len(order) - matrix.shape[-1]
    ordered = _taken(pad(matrix, (0, missing, 0, missing)) if missing else matrix, order)
    return [block for rows in ordered.chunk(2, -2) for block in rows.chunk(2, -1)]


def _taken(matrix: Float[Tensor, "*batch size size"], order: Int[Tensor, " some"]) -> Float[Tensor, "*batch some some"]:
    """Rows and columns of a matrix in this order; itself where that is their own (halves turned, as in Llama)."""
    if torch.equal(order, torch.arange(matrix.shape[-1], device=order.device)):
        return matrix
    return matrix[..., order[:, None], order]
