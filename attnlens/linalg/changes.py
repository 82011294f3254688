"""What becomes of a factored matrix when its factors change: size and rank of the difference, angles of the factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlens.linalg.forms import factor_root
from attnlens.linalg.spectra import over_heads
from attnlens.records import QueryKey

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def change(query_key: QueryKey, base: QueryKey) -> tuple[Float[Tensor, "*batch heads"], Float[Tensor, "*batch heads"]]:
    """‖ΔM‖_F / ‖M‖_F and rank ΔM, for M = s W_Q W_Kᵀ of `base` and ΔM = s (W_Q' W_K'ᵀ − W_Q W_Kᵀ).

    Under RoPE M is that of equal positions. The rank counts the σ of ΔM above eps · n · ‖M‖_F (or ‖ΔM‖_F, where that is
    more), which is what rounding of W_Q' − W_Q and W_K' − W_K can make; eps is float32's, in which models compute the
    cos and sin of their rotations. NaN where M = 0.
    """
    values = _difference_singular_values(query_key, base)
    # ‖M‖_F = s·√tr(G_Q G_K) at equal positions
    query, key = base.query.double(), base.paired_key.double()
    squared = ((query.mT @ query) * (key.mT @ key)).sum((-2, -1))
    norm = squared.clamp(min=0).sqrt() * abs(base.scale)
    size = values.square().sum(-1).sqrt()
    most = max(query_key.query.shape[-2], query_key.key.shape[-2])
    border = torch.finfo(torch.float32).eps * most * torch.maximum(norm, size)
    # Strict: where nothing changed there is nothing above the border, and where M and ΔM are 0 it is 0.
    rank = (values > border[..., None]).sum(-1).to(values)
    return size / norm, rank.masked_fill(norm == 0, torch.nan)


def _difference_singular_values(query_key: QueryKey, base: QueryKey) -> Float[Tensor, "*batch heads twice"]:
    """σ(ΔM), descending, of ΔM = s [ΔW_Q W_Q] [W_K' ΔW_K]ᵀ.

    Written so, each block is as large as the difference, and rounding is relative to it and not to M.
    """
    query, key = query_key.query.double(), query_key.paired_key.double()
    before, key_before = base.query.double(), base.paired_key.double()
    left = over_heads(_balanced_root, query - before, before, key, key - key_before)
    right = over_heads(_balanced_root, key, key - key_before, query - before, before)
    values: Tensor = over_heads(_product_singular_values, left, right)
    return values * abs(query_key.scale)


def _balanced_root(first: Tensor, second: Tensor, first_partner: Tensor, second_partner: Tensor) -> Tensor:
    """R of [a·first b·second] by QR; a and b make each block as long as its partner, and leave the product as it is."""
    scaled = [part * _ratio(partner, part) for part, partner in ((first, first_partner), (second, second_partner))]
    return factor_root(torch.cat(scaled, -1))


def _ratio(partner: Tensor, part: Tensor) -> Tensor:
    """√(‖partner‖/‖part‖), or 0 where either is 0 and so is their product."""
    lengths = torch.linalg.matrix_norm(partner, keepdim=True), torch.linalg.matrix_norm(part, keepdim=True)
    return torch.where(lengths[1] > 0, lengths[0] / lengths[1], 0.0).sqrt()


def _product_singular_values(left: Tensor, right: Tensor) -> Tensor:
    values: Tensor = torch.linalg.svdvals(left @ right.mT)
    return values


def largest_angle(
    one: Float[Tensor, "*batch n head_dim"], other: Float[Tensor, "*batch n head_dim"]
) -> Float[Tensor, "*batch"]:
    """The largest principal angle between two column spaces, in degrees; [0, 90].

    asin ‖(I − U Uᵀ)V‖₂ for orthonormal bases U and V, exact for small angles (Björck & Golub 1973). Directions whose
    singular value is within rounding, eps · n · σ₁, don't count; 90 where the ranks differ, NaN where both are 0.
    """
    return over_heads(_angles, one.double(), other.double())


def _angles(one: Tensor, other: Tensor) -> Tensor:
    return torch.stack([_angle(*pair) for pair in zip(one, other, strict=True)])


def _angle(one: Tensor, other: Tensor) -> Tensor:
    first, second = _basis(one), _basis(other)
    if first.shape != second.shape:
        return one.new_tensor(90.0)
    if not first.shape[1]:
        return one.new_tensor(torch.nan)
    sine: Tensor = torch.linalg.matrix_norm(second - first @ (first.mT @ second), ord=2)
    return sine.clamp(max=1).asin().rad2deg()


def _basis(factor: Tensor) -> Tensor:
    """Orthonormal columns that span the factor's."""
    left, values, _ = torch.linalg.svd(factor, full_matrices=False)
    # Strict: a factor of zeros has no direction.
    kept: Tensor = left[:, values > torch.finfo(values.dtype).eps * max(factor.shape) * values[0]]
    return kept
