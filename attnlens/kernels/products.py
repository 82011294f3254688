"""Kernels that are functions of the score s⟨q, k⟩, of a distance, overlap or angle, or of finitely many features."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attnlens.kernels.pair_weights import centre_rows, pairs_weighted, sample_rows
from attnlens.kernels.registry import PAIR, SCORE, KernelParameter, kernel, torch
from attnlens.kernels.spec import log_magnitude, wide
from attnlens.lazy import LazyModule

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.kernels.registry import Key, Matrix, Query, Tokens
    from attnlens.records import Call

    Score = Float[Tensor, "*scores"]
    Features = Float[Tensor, "batch heads tokens features"]
    PerHead = Float[Tensor, " heads"] | None
    Weight = Float[Tensor, "heads half head_dim"]
    Origin = Float[Tensor, "heads head_dim"] | None

ksvd = LazyModule("attnlens.maths.ksvd")
SERIES = {**SCORE, "features": "finite", "fused": "row tiles; FlexAttention on a GPU from 4,096 tokens"}
SUMMED = {**PAIR, "features": "finite", "form": "features", "fused": "running sums, O(tokens)"}
PER_DECADE = 16  # number of offsets tried per factor of 10
LARGEST_NARROW_ORDER = 8  # higher orders use float64: alternating terms are up to e^{2|x|} times the sum


@kernel(
    "exponential",
    formula="s⟨q, k⟩",
    source="Vaswani et al. 2017, Eq. 1; Tsai et al. 2019, Eq. 3",
    **SCORE,
    dot=lambda query, key, scale: (query, key, scale),
    fused="SDPA",
)
def exponential(score: Score) -> Score:
    """The model's own kernel: the exponential of the scaled dot product."""
    return score


class OffsetFit:
    """Fit of each head's offset c: minimises Σ(s⟨q, k⟩ − p·log|s⟨q, k⟩ + c|)² over a grid.

    p is the degree, and the differences are centred in each row. The grid is 0 and ±p·10^{−1 … 2}, PER_DECADE values
    per factor of 10; a parabola in log|c| refines the best value.
    """

    def __init__(self, degree: int, offset: float) -> None:
        self.typed = {"offset_of_head": offset}
        self.degree = degree
        grid = [degree * 10 ** (step / PER_DECADE) for step in range(-PER_DECADE, 2 * PER_DECADE + 1)]
        self.offsets = [-c for c in reversed(grid)] + [0.0, *grid]
        self.errors = torch.zeros(())

    def update(self, call: Call) -> None:
        """Add a batch's squared error for every offset."""
        query, seen = sample_rows(call)
        score = query @ call.paired_key.double().mT * call.scale
        differences = (score - self.degree * log_magnitude(score + offset) for offset in self.offsets)
        errors = [centre_rows(difference, seen).square().sum(-1).sum((0, 2)) for difference in differences]
        self.errors = self.errors + torch.stack(errors)

    def solve(self) -> dict[str, Float[Tensor, " heads"]]:
        """Return the fitted offsets as `offset_of_head`, (heads,)."""
        errors = self.errors
        offsets, best = errors.new_tensor(self.offsets), errors.argmin(0)
        size = len(self.offsets) // 2
        # the offset 0 and the ends of each sign's grid lack a neighbour of the same sign
        inner = (best % size != 0) & (best != size - 1) & (best != size + 1)
        at = best.clamp(1, len(self.offsets) - 2)
        before, here, after = (errors.gather(0, (at + step)[None])[0] for step in (-1, 0, 1))
        # step to the vertex of the parabola; 0/tiny = 0 if all three errors are equal
        step = (before - after) / (2 * (before - 2 * here + after)).clamp_min(torch.finfo(errors.dtype).tiny)
        ratio = 10 ** (step / PER_DECADE * offsets[best].sign())
        return {"offset_of_head": torch.where(inner, offsets[best] * ratio, offsets[best])}


def _shift(score: Score, offset: float, offset_of_head: PerHead) -> Score:
    return score + (offset if offset_of_head is None else offset_of_head.to(score)[:, None, None])


def _odd_sign(value: Score) -> Score:
    """Return the sign of each entry: +1 at 0, so that a row of zeros gives uniform attention."""
    return 1.0 - 2.0 * (value < 0).to(value)


@kernel(
    "polynomial",
    formula="p·log|s⟨q, k⟩ + c|",
    source="Tsai et al. 2019, T. 2 (p = 2, c = 0); Wright & Gonzalez 2021 (quadratic)",
    **SERIES,
    parameters=(
        KernelParameter("degree", "the power p", int, default=2, low=1, high=64, even=True),
        KernelParameter("offset", "the constant c added to the score", float, default=0.0),
    ),
    sign=lambda score, degree, offset, offset_of_head=None: _odd_sign(_shift(score, offset, offset_of_head)) ** degree,
    fit=OffsetFit,
    trainable=("offset_of_head",),
)
def polynomial(score: Score, degree: int, offset: float, offset_of_head: PerHead = None) -> Score:
    """A power of the shifted score; a row of zeros gives uniform attention."""
    return degree * log_magnitude(_shift(score, offset, offset_of_head))


def _partial_exponential(score: Score, order: int) -> Score:
    """Compute Σ_{n≤N} xⁿ/n! by Horner's rule, where x is `score` and N is `order`."""
    score = score.double() if order > LARGEST_NARROW_ORDER else wide(score)
    total = score / order + 1
    for n in range(order - 1, 0, -1):
        total = total * score / n + 1
    return total


@kernel(
    "taylor",
    formula="log Σ_{n≤N} (s⟨q, k⟩)ⁿ/n!",
    source="Wright & Gonzalez 2021 (truncated feature map)",
    **SERIES,
    parameters=(KernelParameter("order", "the last power N", int, default=4, low=1, high=64, even=True),),
    sign=lambda score, order: _odd_sign(_partial_exponential(score, order)).to(wide(score)),
)
def taylor(score: Score, order: int) -> Score:
    """The exponential's truncated Taylor series; positive everywhere if the last power is even."""
    return log_magnitude(_partial_exponential(score, order)).to(wide(score))


@kernel(
    "linear",
    formula="log|s⟨q, k⟩|, with the sign of ⟨q, k⟩",
    source="Tsai et al. 2019, T. 2",
    **SUMMED | {"positive": False, "form": "score"},
    sign=_odd_sign,
    phi=lambda x, scale, side: x * scale**0.5,
)
def linear(score: Score) -> Score:
    """The dot product itself: rows sum to 1, but weights can be negative."""
    return log_magnitude(score)


@kernel(
    "hard",
    formula="β·s⟨q, k⟩ as β → ∞: all weight on the key with the largest score",
    source="Tarzanagh et al. 2023 (Att-SVM's limit)",
    **SCORE | {"features": "none"},
    hard=True,
)
def hard(score: Score) -> Score:
    """One-hot attention to the key with the largest score."""
    return score


class OriginFit:
    """Fit of each head's origin b in the distance ‖q + b − k‖: minimises Σ(s⟨q, k⟩ − log k(q, k))².

    Both terms are row-centred. Pairs are weighted half by attention, half uniformly. For a given γ, the fit is
    the regression of ½‖k‖² + (1 − 2γ)/(2γ)·⟨q, k⟩ on k, both row-centred.
    """

    def __init__(self, gamma: float) -> None:
        self.typed = {"origin": 0.0}
        self.ratio = (1 - 2 * gamma) / (2 * gamma)
        self.scatter = self.target = torch.zeros(())

    def update(self, call: Call) -> None:
        """Add a batch to the regression's normal equations, without storing the target for every pair of tokens."""
        weight, query, key = pairs_weighted(call), call.query.double(), call.paired_key.double()
        half = key.square().sum(-1, keepdim=True) / 2
        # changes only rounding: otherwise, the scatter of keys with a large common part would lose its digits
        key = key - key.mean(-2, keepdim=True)
        total = weight.sum(-1)[..., None]
        mean = weight @ key / total.clamp_min(1)  # a total below 1 is 0: the query sees fewer than two keys
        # Σ_ij w_ij (k_j − m_i)(k_j − m_i)ᵀ, where m_i is the weighted mean of the keys that query i sees
        scatter = (key * weight.sum(-2)[..., None]).mT @ key - (mean * total).mT @ mean
        by_key = weight.sum(-2)[..., None] * half + self.ratio * ((weight.mT @ query) * key).sum(-1, keepdim=True)
        by_query = weight @ half + self.ratio * (total * (query * mean).sum(-1, keepdim=True))
        self.scatter = self.scatter + scatter.sum(0)
        self.target = self.target + (key * by_key).sum((0, 2)) - (mean * by_query).sum((0, 2))

    def solve(self) -> dict[str, Float[Tensor, "heads head_dim"]]:
        """Return the fitted origins as `origin`, (heads, head_dim)."""
        # the slope is 0 in directions in which keys vary only by rounding
        rtol = torch.finfo(self.scatter.dtype).eps * self.scatter.shape[-1]
        inverse = torch.linalg.pinv(self.scatter, rtol=rtol, hermitian=True)
        return {"origin": (inverse @ self.target[..., None])[..., 0]}


def _key_term(key: Key, origin: Origin) -> Float[Tensor, "batch heads keys"]:
    """Compute ⟨b, k⟩ − ½‖k‖² for each key k, where b is the `origin` (None: 0)."""
    key = wide(key)
    term = -key.square().sum(-1) / 2
    return term if origin is None else term + (key * origin.to(key)[:, None]).sum(-1)


def _rbf_dot(
    query: Query, key: Key, scale: float, gamma: float, origin: Origin = None
) -> tuple[Float[Tensor, "batch heads queries wider"], Float[Tensor, "batch heads keys wider"], float]:
    """Return [q, 1], [k, ⟨b, k⟩ − ½‖k‖²] and 2γs, whose product is log k + γs‖q + b‖².

    In half precision, a further column contains the rounding error of the key term.
    """
    term = _key_term(key, origin)[..., None]
    parts = [term.to(key)]
    if term.dtype != key.dtype:
        parts.append((term - parts[0]).to(key))  # bf16 stores only 8 bits of ‖k‖²/2
    ones = query.new_ones(*query.shape[:-1], len(parts))
    return torch.cat((query, ones), -1), torch.cat((key, *parts), -1), 2 * gamma * scale


@kernel(
    "rbf",
    formula="−γ·s‖q + b − k‖², b = 0 unless fitted",
    source="Tsai et al. 2019, T. 2 (γ = 1); Wright & Gonzalez 2021",
    **PAIR,
    parameters=(KernelParameter("gamma", "the inverse width γ", float, default=0.5, above=0.0),),
    dot=_rbf_dot,
    fused="SDPA with one more head dimension, two in half precision",
    equal_lengths="the exponential kernel with a scale of 2γs",
    fit=OriginFit,
    trainable=("origin",),
)
def rbf(query: Query, key: Key, scale: float, gamma: float, origin: Origin = None) -> Matrix:
    """The Gaussian kernel; for γ = ½, attention differs from the exponential kernel's only by key factors e^{−s‖k‖²/2}.

    The fitted `origin` b changes the softmax of a row only by the key term 2γs⟨b, k⟩. The query term −γs‖q + b‖²
    matters only if log k is averaged with its transpose or compared with a sink.
    """
    query = wide(query)
    shifted = query if origin is None else query + origin.to(query)[:, None]
    length = shifted.square().sum(-1)[..., None] / 2
    return 2 * gamma * scale * (query @ wide(key).mT - length + _key_term(key, origin)[..., None, :])


@kernel(
    "laplacian",
    formula="−γ·s‖q − k‖₁",
    source="Rahimi & Recht 2007",
    **PAIR,
    parameters=(KernelParameter("gamma", "the inverse width γ", float, default=1.0, above=0.0),),
)
def laplacian(query: Query, key: Key, scale: float, gamma: float) -> Matrix:
    """The exponential of the negative city-block distance."""
    return -gamma * scale * _distance(query, key, 1)


@kernel(
    "intersection", formula="s·Σ_l min(q_l, k_l)", source="Wright & Gonzalez 2021 (EI, with the model's scale)", **PAIR
)
def intersection(query: Query, key: Key, scale: float) -> Matrix:
    """The exponential intersection kernel: Σ min(q, k) = −½‖q − k‖₁ + ½Σq + ½Σk."""
    sums = wide(query).sum(-1)[..., :, None] + wide(key).sum(-1)[..., None, :]
    return scale / 2 * (sums - _distance(query, key, 1))


@kernel(
    "l2",
    formula="log(σ·s‖q − k‖), σ = 1: any other σ cancels",
    source="Wright & Gonzalez 2021",
    **PAIR | {"features": "none"},
)
def l2(query: Query, key: Key, scale: float) -> Matrix:
    """The distance itself: attends to dissimilar keys; a row of zeros gives uniform attention."""
    return log_magnitude(scale * _distance(query, key, 2))


def _distance(query: Query, key: Key, norm: int) -> Matrix:
    """Compute the `norm`-norm of every q − k without the cancellation of ‖q‖² + ‖k‖² − 2⟨q, k⟩."""
    return torch.cdist(wide(query), wide(key), norm, compute_mode="donot_use_mm_for_euclid_dist")


class BetaFit:
    """Fit of each head's β: the slope of s⟨q, k⟩ on cos(q, k), both row-centred, or 0 if the slope is negative."""

    def __init__(self, beta: float) -> None:
        self.typed = {"beta_of_head": beta}
        self.product = self.square = torch.zeros(())

    def update(self, call: Call) -> None:
        """Add a batch's sums of logit · cosine and of cosine², both row-centred."""
        (query, seen), key = sample_rows(call), call.paired_key.double()
        logits = centre_rows(query @ key.mT * call.scale, seen)
        cosine = centre_rows(ksvd.unit(wide(query)) @ ksvd.unit(wide(key)).mT, seen)
        self.product = self.product + (logits * cosine).sum((0, 2, 3))
        self.square = self.square + cosine.square().sum((0, 2, 3))

    def solve(self) -> dict[str, Float[Tensor, " heads"]]:
        """Return the fitted β as `beta_of_head`, (heads,)."""
        tiny = torch.finfo(self.square.dtype).tiny  # a head whose cosines do not vary has β = 0, not 0/0
        return {"beta_of_head": (self.product / self.square.clamp_min(tiny)).clamp_min(0.0)}


def _cosine_dot(
    query: Query, key: Key, scale: float, beta: float, beta_of_head: PerHead = None
) -> tuple[Query, Key, float]:
    unit = ksvd.unit(wide(query))
    if beta_of_head is not None:
        unit, beta = unit * beta_of_head.to(unit)[:, None, None], 1.0
    return unit.to(query), ksvd.unit(wide(key)).to(key), beta


@kernel(
    "cosine",
    formula="β·cos(q, k)",
    source="Henry et al. 2020 (query-key normalisation)",
    **PAIR,
    # With ‖q‖ = ‖k‖ = √head_dim (entries of unit variance), s⟨q, k⟩ is √head_dim·cos: 8 for the usual 64.
    parameters=(KernelParameter("beta", "the inverse temperature β", float, default=8.0, above=0.0),),
    dot=_cosine_dot,
    fused="SDPA on normalised queries and keys",
    fit=BetaFit,
    trainable=("beta_of_head",),
)
def cosine(query: Query, key: Key, scale: float, beta: float, beta_of_head: PerHead = None) -> Matrix:
    """The exponential of β·cos(q, k): independent of the lengths of q and k and of the model's scale."""
    query, key, factor = _cosine_dot(wide(query), wide(key), scale, beta, beta_of_head)
    return factor * (query @ key.mT)


RELU_FLOOR = 1e-3  # added to every feature as in Performer's code (kernel_epsilon), so that no row of attention is 0/0
LARGEST_EXPONENT = 40.0  # bound of the exponent; to exceed it, ω must deviate by 40/‖x√s‖ + ‖x√s‖/2 ≥ √80 sds


@kernel(
    "elu", formula="log⟨φ(q), φ(k)⟩, φ(x) = elu(x√s) + 1", source="Katharopoulos et al. 2020, Eq. 7 (s = 1)", **SUMMED
)
def elu(x: Tokens, scale: float, side: str) -> Tokens:
    """Linear attention with positive features: x + 1 above 0, eˣ below."""
    x = wide(x) * scale**0.5
    return torch.relu(x) + x.clamp_max(0.0).exp()  # elu(x) + 1 would round eˣ below 1e-7 to 0


@kernel(
    "relu",
    formula="log⟨φ(q), φ(k)⟩, φ(x) = max(x√s, 0) + 0.001",
    source="Choromanski et al. 2021 (Performer-ReLU, with its code's floor)",
    **SUMMED,
)
def relu(x: Tokens, scale: float, side: str) -> Tokens:
    """Linear attention with rectified features."""
    return torch.relu(wide(x) * scale**0.5) + RELU_FLOOR


@kernel(
    "random-features",
    formula="log⟨φ(q), φ(k)⟩, φ_i(x) = exp(⟨ω_i, x√s⟩ − s‖x‖²/2)/√m; its mean over ω is exp(s⟨q, k⟩)",
    source="Choromanski et al. 2021 (Performer), Lemma 1, orthogonal draws",
    **SUMMED,
    parameters=(
        KernelParameter("count", "number of features m", int, default=256, low=1, high=65536),
        KernelParameter("seed", "seed of the random ω", int, default=0, low=0, high=2**63 - 1),
    ),
)
def random_features(x: Tokens, scale: float, side: str, count: int, seed: int) -> Features:
    """Estimate of the exponential kernel by positive random features, unbiased up to clipping; all heads share ω.

    The exponent is clipped at a constant, because a shift by the maximum over tokens would depend on later tokens. In
    float32, k underflows below e^{−71} (s‖x‖² above about 130), and attention becomes uniform.
    """
    x = wide(x) * scale**0.5
    draws: Tensor = ksvd.orthogonal_draws(count, x.shape[-1], seed).to(x)
    exponent = x @ draws.mT - x.square().sum(-1, keepdim=True) / 2
    return exponent.clamp_max(LARGEST_EXPONENT).exp() / math.sqrt(count)


@kernel("uniform", formula="0", source="baseline of every comparison", **SUMMED, reads=False)
def uniform(x: Tokens, scale: float, side: str) -> Float[Tensor, "batch heads tokens 1"]:
    """Equal weights for all visible keys (φ = 1): the output is the mean of their values."""
    return wide(x).new_ones(*x.shape[:-1], 1)


class LearnedStart:
    """Initial maps W of queries and keys: random orthogonal rows with the lengths of Gaussian vectors.

    With these maps, ⟨φ(q), φ(k)⟩ is close to the product of positive random features of ±ω (Choromanski et al. 2021,
    Lemma 1).
    """

    def __init__(self, count: int) -> None:
        self.typed: dict[str, float] = {}
        self.count = count
        self.weight = torch.zeros(())

    def update(self, call: Call) -> None:
        """Draw the initial maps for a batch's number of heads and head_dim."""
        weight = ksvd.orthogonal_draws(self.count // 2, call.query.shape[-1], 0).to(call.query.device)
        self.weight = weight.expand(call.query.shape[1], -1, -1)

    def solve(self) -> dict[str, Weight]:
        """Return `query_weight` and `key_weight`, (heads, half, head_dim), initially equal."""
        return {"query_weight": self.weight.clone(), "key_weight": self.weight.clone()}


@kernel(
    "learned-features",
    formula="log⟨φ_q(q), φ_k(k)⟩, φ(x) = [softmax(Wx√s), softmax(−Wx√s)], W of m/2 rows",
    source="Zhang et al. 2024 (Hedgehog), the form with a softmax over features, as in LoLCATs",
    **{**SUMMED, "symmetric": False},
    parameters=(KernelParameter("count", "number of features m", int, default=64, low=2, high=65536, multiple_of=2),),
    fit=LearnedStart,
    fit_reads=False,
    trainable=("query_weight", "key_weight"),
    needs_fit=True,
)
def learned_features(
    x: Tokens, scale: float, side: str, count: int, query_weight: Weight, key_weight: Weight
) -> Features:
    """Linear attention with learned positive features: each head has a map of queries and a map of keys.

    The features of each sign sum to 1, so that k lies between 0 and 2. `heal` trains the maps by attention transfer.
    """
    x = wide(x) * scale**0.5
    projected = x @ (query_weight if side == "query" else key_weight).to(x).mT
    return torch.cat((projected.softmax(-1), (-projected).softmax(-1)), -1)
