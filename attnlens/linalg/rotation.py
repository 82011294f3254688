"""What does a rotary position encoding do to a trace or a Gram matrix, summed over positions?

Both sums are quadratic in R. Each coordinate meets its partner alone, so both follow from the products of cos and sin
of two pairs: head_dim² of them at each position, where multiplying the matrices out would take head_dim³.
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
    """mean_i R(i)ᵀ X R(i)."""
    order = _order(rotation)
    cos, sin = _waves(rotation)
    same, mixed, both = ((a.mT @ b / len(cos)).repeat(2, 2) for a, b in ((cos, cos), (cos, sin), (sin, sin)))
    x = _ordered(matrix, order)
    rows, columns = _partnered(x, -2), _partnered(x, -1)
    mean = same * x + mixed * columns + mixed.mT * rows + both * _partnered(rows, -1)
    back = order.argsort()[: rotation.size]
    return mean[..., back[:, None], back]


def traces(
    rotation: Rotation,
    left: Float[Tensor, "*batch terms head_dim head_dim"],
    right: Float[Tensor, "*batch terms head_dim head_dim"],
) -> Float[Tensor, "*batch positions"]:
    """Σ_terms tr(X R(Δ)ᵀ Y R(Δ)) for each distance Δ = 0 … positions − 1."""
    order = _order(rotation)
    cos, sin = _waves(rotation)
    x, y = _ordered(left.mT, order), _ordered(right, order)
    rows, columns = _partnered(y, -2), _partnered(y, -1)
    with_cos = cos @ _by_pairs(x, y) + sin @ _by_pairs(x, rows)
    with_sin = cos @ _by_pairs(x, columns) + sin @ _by_pairs(x, _partnered(rows, -1))
    return (with_cos * cos + with_sin * sin).sum(-1)


def _order(rotation: Rotation) -> Int[Tensor, " even"]:
    """The coordinates in an order in which the partner is half the length away: first ones, second ones.

    Those that stand still are made pairs too; where one is left over, a coordinate of zeros is its partner.
    """
    turning = rotation.pairs.flatten()
    still = torch.ones(rotation.size + rotation.size % 2, dtype=torch.bool, device=turning.device)
    still[turning] = False
    return torch.cat((rotation.pairs, still.nonzero().reshape(-1, 2))).T.flatten()


def _waves(rotation: Rotation) -> tuple[Float[Tensor, "positions half"], Float[Tensor, "positions half"]]:
    """cos φ and sin φ of all pairs in that order, 1 and 0 where coordinates stand still."""
    angles = pad(rotation.angles, (0, -(-rotation.size // 2) - len(rotation.pairs)))
    return angles.cos(), angles.sin()


def _ordered(matrix: Tensor, order: Int[Tensor, " even"]) -> Float[Tensor, "*batch even even"]:
    missing = len(order) - matrix.shape[-1]
    return pad(matrix, (0, missing, 0, missing))[..., order[:, None], order]


def _partnered(x: Float[Tensor, "*batch even even"], axis: int) -> Float[Tensor, "*batch even even"]:
    """The partner's entries along an axis, with the sign that sin φ has in R: − in the first half, + in the second."""
    first, second = x.chunk(2, axis)
    return torch.cat((-second, first), axis)


def _by_pairs(x: Float[Tensor, "*batch terms even even"], y: Tensor) -> Float[Tensor, "*batch half half"]:
    """Σ_terms X∘Y, its four entries of each two pairs added up."""
    half = x.shape[-1] // 2
    return (x * y).sum(-3).unflatten(-1, (2, half)).unflatten(-3, (2, half)).sum((-4, -2))
