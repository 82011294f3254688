"""Kernels that are inner products of finitely many features, for attention in O(tokens)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attnlens.kernels.registry import KernelParameter, kernel
from attnlens.kernels.spec import wide
from attnlens.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.records import Call

    Tokens = Float[Tensor, "batch heads tokens head_dim"]
else:
    torch = LazyModule("torch")

RELU_FLOOR = 1e-3
"""Constant that Performer's code adds to every feature (kernel_epsilon), so that no row of attention is 0/0."""

LARGEST_EXPONENT = 40.0
"""Bound of ⟨ω, x√s⟩ − s‖x‖²/2. Reaching it takes 40/‖x√s‖ + ‖x√s‖/2 ≥ √80 standard deviations of ω."""

SUMMED: dict[str, Any] = {
    "positive": True,
    "symmetric": True,
    "features": "finite",
    "form": "features",
    "fused": "running sums, O(tokens)",
}


@kernel(
    "elu", formula="log⟨φ(q), φ(k)⟩, φ(x) = elu(x√s) + 1", source="Katharopoulos et al. 2020, Eq. 7 (s = 1)", **SUMMED
)
def elu(x: Tokens, scale: float, side: str) -> Tokens:
    """Linear attention with positive features: x + 1 above 0, eˣ below."""
    x = wide(x) * scale**0.5
    # elu(x) + 1 would round eˣ below 1e-7 to 0
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
    from attnlens.maths.ksvd.dual import orthogonal_draws

    x = wide(x) * scale**0.5
    exponent: Tensor = x @ orthogonal_draws(count, x.shape[-1], seed).to(x).mT - x.square().sum(-1, keepdim=True) / 2
    bounded: Tensor = exponent.clamp_max(LARGEST_EXPONENT)
    return bounded.exp() / math.sqrt(count)


@kernel("uniform", formula="0", source="the floor of every comparison", **SUMMED, reads=False)
def uniform(x: Tokens, scale: float, side: str) -> Float[Tensor, "batch heads tokens 1"]:
    """All visible keys are weighted equally, φ = 1: attention is the mean of the values, for any queries and keys."""
    return wide(x).new_ones(*x.shape[:-1], 1)


class LearnedStart:
    """the maps W of queries and keys: at first rows of random orthogonal directions with the lengths of Gaussian rows.

    Before training, φ(q)φ(k) is therefore close to positive random features of ±ω (Choromanski et al. 2021, Lemma 1):
    Σ_l e^{⟨ω_l, x⟩} is about e^{‖x‖²/2} times their number, and softmax divides by it. Only shapes are read.
    """

    def __init__(self, count: int) -> None:
        self.typed: dict[str, float] = {}
        self.count = count
        self.weight: Tensor | None = None

    def update(self, call: Call) -> None:
        """Record the shapes of a batch."""
        from attnlens.maths.ksvd.dual import orthogonal_draws

        heads, head_dim = call.query.shape[1], call.query.shape[-1]
        weight = orthogonal_draws(self.count // 2, head_dim, 0).to(call.query.device)
        self.weight = weight.expand(heads, -1, -1)

    def solve(self) -> dict[str, Float[Tensor, "heads half head_dim"]]:
        """Return `query_weight` and `key_weight`, (heads, half, head_dim), initially equal."""
        assert self.weight is not None  # noqa: S101  # a fit has seen some text
        return {"query_weight": self.weight.clone(), "key_weight": self.weight.clone()}


@kernel(
    "learned-features",
    formula="log⟨φ_q(q), φ_k(k)⟩, φ(x) = [softmax(Wx√s), softmax(−Wx√s)], W of m/2 rows",
    source="Zhang et al. 2024 (Hedgehog), the form with a softmax over features, as in LoLCATs",
    **{**SUMMED, "symmetric": False},
    parameters=(KernelParameter("count", "how many features m", int, default=64, low=2, high=65536, multiple_of=2),),
    fit=LearnedStart,
    fit_reads=False,
    trainable=("query_weight", "key_weight"),
    needs_fit=True,
)
def learned_features(
    x: Tokens,
    scale: float,
    side: str,
    count: int,
    query_weight: Float[Tensor, "heads half head_dim"],
    key_weight: Float[Tensor, "heads half head_dim"],
) -> Float[Tensor, "batch heads tokens features"]:
    """Linear attention with learned positive features: maps of queries and of keys, each head its own.

    The features of each sign sum to 1, so that k lies between 0 and 2. `heal` trains the maps by attention transfer.
    """
    x = wide(x) * scale**0.5
    weight = query_weight if side == "query" else key_weight
    projected = x @ weight.to(x).mT
    return torch.cat((projected.softmax(-1), (-projected).softmax(-1)), -1)
