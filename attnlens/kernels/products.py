"""Kernels of the score s⟨q, k⟩ alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlens.kernels.spec import log_magnitude, some_rows, squared_error, wide
from attnlens.registry import KernelParameter, kernel

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.records import Call

    Score = Float[Tensor, "*scores"]

A_DECADE = 16
"""Offsets tried from c to 10c."""

LARGEST_NARROW_ORDER = 8
"""Order above which the alternating sum, whose terms are e^{2|x|} times their sum, wants float64."""


@kernel(
    "exponential",
    formula="s⟨q, k⟩",
    source="Vaswani et al. 2017, Eq. 1; Tsai et al. 2019, Eq. 3",
    positive=True,
    symmetric=True,
    features="infinite",
    form="score",
    dot=lambda query, key, scale: (query, key, scale),
    fused="SDPA",
)
def exponential(score: Score) -> Score:
    """The model's own kernel: the exponential of the scaled product."""
    return score


class OffsetFit:
    """the offset c of each head: least squares of s⟨q, k⟩ − p·log|s⟨q, k⟩ + c|, row-centred, on a grid of both signs.

    The grid is 0 and ±p·10^{−1 … 2}, sixteen to a decade, its best value refined by a parabola in log|c|. The degree p
    stays as typed, so that no c makes (x + c)^p the exponential: that takes p = c → ∞.
    """

    def __init__(self, degree: int, offset: float) -> None:
        """`offset` is what the fit replaces."""
        import torch

        self.typed = {"offset_of_head": offset}
        self.degree = degree
        grid = [degree * 10 ** (step / A_DECADE) for step in range(-A_DECADE, 2 * A_DECADE + 1)]
        self.offsets = [-c for c in reversed(grid)] + [0.0, *grid]
        self.errors = torch.zeros(())

    def update(self, call: Call) -> None:
        """Add every offset's squared error on this batch."""
        import torch

        query, seen = some_rows(call)
        score = query @ call.paired_key.double().mT * call.scale
        batch = [
            squared_error(score - self.degree * log_magnitude(score + offset), seen).sum((0, 2))
            for offset in self.offsets
        ]
        self.errors = self.errors + torch.stack(batch)

    def solve(self) -> dict[str, Float[Tensor, " heads"]]:
        """`offset_of_head`."""
        import torch

        errors = self.errors
        offsets = errors.new_tensor(self.offsets)
        best = errors.argmin(0)
        # 0 and the ends of each sign's grid have no neighbours on both sides.
        size = len(self.offsets) // 2
        inner = (best % size != 0) & (best != size - 1) & (best != size + 1)
        at = best.clamp(1, len(self.offsets) - 2)
        before, here, after = (errors.gather(0, (at + step)[None])[0] for step in (-1, 0, 1))
        step = (before - after) / (2 * (before - 2 * here + after)).clamp_min(torch.finfo(errors.dtype).tiny)
        ratio = 10 ** (step / A_DECADE * offsets[best].sign())
        return {"offset_of_head": torch.where(inner, offsets[best] * ratio, offsets[best])}


def _shifted(score: Score, offset: float, offset_of_head: Float[Tensor, " heads"] | None) -> Score:
    return score + (offset if offset_of_head is None else offset_of_head.to(score)[:, None, None])


def _odd_sign(value: Score) -> Score:
    """The sign, + at 0, where the magnitude is bounded from below: a row of zeros stays uniform."""
    return 1.0 - 2.0 * (value < 0).to(value)


def _polynomial_sign(
    score: Score, degree: int, offset: float, offset_of_head: Float[Tensor, " heads"] | None = None
) -> Score:
    return _odd_sign(_shifted(score, offset, offset_of_head)) ** degree


@kernel(
    "polynomial",
    formula="p·log|s⟨q, k⟩ + c|",
    source="Tsai et al. 2019, T. 2 (p = 2, c = 0); Wright & Gonzalez 2021 (quadratic)",
    positive=True,
    symmetric=True,
    features="finite",
    form="score",
    parameters=(
        KernelParameter("degree", "the power p", int, default=2, low=1, high=64, even=True),
        KernelParameter("offset", "the constant c beside the score", float, default=0.0),
    ),
    sign=_polynomial_sign,
    fused="FlexAttention; row tiles on a CPU",
    fit=OffsetFit,
    trainable=("offset_of_head",),
)
def polynomial(
    score: Score, degree: int, offset: float, offset_of_head: Float[Tensor, " heads"] | None = None
) -> Score:
    """A power of the score; a row of zeros is uniform."""
    return degree * log_magnitude(_shifted(score, offset, offset_of_head))


def _partial_exponential(score: Score, order: int) -> Score:
    """Σ_{n≤N} xⁿ/n!, by Horner's rule from the last term."""
    score = score.double() if order > LARGEST_NARROW_ORDER else wide(score)
    total = score / order + 1
    for n in range(order - 1, 0, -1):
        total = total * score / n + 1
    return total


@kernel(
    "taylor",
    formula="log Σ_{n≤N} (s⟨q, k⟩)ⁿ/n!",
    source="Wright & Gonzalez 2021 (truncated feature map)",
    positive=True,
    symmetric=True,
    features="finite",
    form="score",
    parameters=(KernelParameter("order", "the last power N", int, default=4, low=1, high=64, even=True),),
    sign=lambda score, order: _odd_sign(_partial_exponential(score, order)).to(wide(score)),
    fused="FlexAttention; row tiles on a CPU",
)
def taylor(score: Score, order: int) -> Score:
    """The exponential's series, cut off; positive everywhere where the last power is even."""
    return log_magnitude(_partial_exponential(score, order)).to(wide(score))


@kernel(
    "linear",
    formula="log|s⟨q, k⟩|, with the sign of ⟨q, k⟩",
    source="Tsai et al. 2019, T. 2",
    positive=False,
    symmetric=True,
    features="finite",
    form="score",
    sign=_odd_sign,
    phi=lambda x, scale, side: x * scale**0.5,
    fused="running sums, O(tokens)",
)
def linear(score: Score) -> Score:
    """The product itself: rows sum to 1 but leave the simplex."""
    return log_magnitude(score)


@kernel(
    "hard",
    formula="β·s⟨q, k⟩ as β → ∞: all weight on the largest score",
    source="Tarzanagh et al. 2023 (Att-SVM's limit)",
    positive=True,
    symmetric=True,
    features="none",
    form="score",
    hard=True,
)
def hard(score: Score) -> Score:
    """One-hot attention to the key of the largest score."""
    return score
