"""Kernels that are inner products of finitely many features, for attention in O(tokens)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attnlens.kernels.spec import wide
from attnlens.registry import KernelParameter, kernel

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    Tokens = Float[Tensor, "batch heads tokens head_dim"]

RELU_FLOOR = 1e-3
"""What Performer's code adds to every feature (kernel_epsilon), without which a row of attention can be 0/0."""

LARGEST_EXPONENT = 40.0
"""Bound of ⟨ω, x√s⟩ − s‖x‖²/2. It takes 40/‖x√s‖ + ‖x√s‖/2 ≥ √80 standard deviations of ω to get there."""

SUMMED: dict[str, Any] = {
    "positive": True,
    "symmetric": True,
    "features": "finite",
    "form": "features",
    "fused": "running sums, O(tokens)",
}


@kernel(
    "elu",
    formula="log⟨φ(q), φ(k)⟩, φ(x) = elu(x√s) + 1",
    source="Katharopoulos et al. 2020, Eq. 7 (s = 1)",
    **SUMMED,
)
def elu(x: Tokens, scale: float, side: str) -> Tokens:
    """Linear attention with positive features: x + 1 above 0, eˣ below."""
    x = wide(x) * scale**0.5
    # elu(x) + 1 would lose eˣ below 1e-7.
    positive: Tensor = x.relu()
    return positive + x.clamp_max(0.0).exp()


@kernel(
    "relu",
    formula="log⟨φ(q), φ(k)⟩, φ(x) = max(x√s, 0) + 0.001",
    source="Choromanski et al. 2021 (Performer-ReLU, with its code's floor)",
    **SUMMED,
)
def relu(x: Tokens, scale: float, side: str) -> Tokens:
    """Linear attention with rectified features."""
    positive: Tensor = (wide(x) * scale**0.5).relu()
    return positive + RELU_FLOOR


@kernel(
    "random-features",
    formula="log⟨φ(q), φ(k)⟩, φ_i(x) = exp(⟨ω_i, x√s⟩ − s‖x‖²/2)/√m; its mean over ω is exp(s⟨q, k⟩)",
    source="Choromanski et al. 2021 (Performer), Lemma 1, orthogonal draws",
    **SUMMED,
    parameters=(
        KernelParameter("count", "how many features m", int, default=256, low=1, high=65536),
        KernelParameter("seed", "which draw of ω", int, default=0, low=0, high=2**63 - 1),
    ),
)
def random_features(
    x: Tokens, scale: float, side: str, count: int, seed: int
) -> Float[Tensor, "batch heads tokens features"]:
    """An unbiased estimate of the exponential kernel by positive random features, the same for all heads.

    Each token's features depend on it alone, so that no later token changes an earlier one's; the exponent is bounded
    instead of shifted by a maximum over tokens. In float32 k is lost below e^{−71}, as where s‖x‖² passes about 130:
    attention is even there.
    """
    from attnlens.ksvd.features import orthogonal_draws

    x = wide(x) * scale**0.5
    exponent: Tensor = x @ orthogonal_draws(count, x.shape[-1], seed).to(x).mT - x.square().sum(-1, keepdim=True) / 2
    bounded: Tensor = exponent.clamp_max(LARGEST_EXPONENT)
    return bounded.exp() / math.sqrt(count)


@kernel(
    "uniform",
    formula="0",
    source="the floor of every comparison",
    **SUMMED,
    reads=False,
)
def uniform(x: Tokens, scale: float, side: str) -> Float[Tensor, "batch heads tokens 1"]:
    """Every visible key alike, φ = 1: attention is the mean of the values, whatever queries and keys say."""
    return wide(x).new_ones(*x.shape[:-1], 1)
