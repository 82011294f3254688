"""Kernels that are inner products of finitely many features, for attention in O(tokens)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnlens.errors import TextError
from attnlens.kernels.lowrank import roots
from attnlens.kernels.spec import wide
from attnlens.registry import KernelParameter, kernel

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    Side = Float[Tensor, "batch heads tokens features"]
    Map = Float[Tensor, "heads features scores"]
    OutputMap = Float[Tensor, "heads both value_dim"]
    Offset = Float[Tensor, "heads value_dim"]

HELD_OUT = 4
"""One sequence in so many is kept back from the least squares, to choose how strong its ridge is."""
STRENGTHS = (1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Ridges that are tried, for scores of unit variance."""


@dataclass
class Moments:
    """Sums over tokens of z = [Fφ(q); Fφ(k); 1] and of the head's own output y, in float64."""

    gram: Float[Tensor, "heads size size"]
    """Σ z zᵀ."""
    cross: Float[Tensor, "heads size value_dim"]
    """Σ z yᵀ."""
    energy: Float[Tensor, " heads"]
    """Σ ‖y‖²."""
    sequences: int
    """How many."""

    def __add__(self, other: Moments) -> Moments:
        """The moments of both."""
        sums = self.gram + other.gram, self.cross + other.cross, self.energy + other.energy
        return Moments(*sums, self.sequences + other.sequences)

    @property
    def tokens(self) -> Float[Tensor, " heads"]:
        """How many tokens there were."""
        return self.gram[..., -1, -1]

    def of_scores(self, maps: Float[Tensor, "heads size columns"]) -> Moments:
        """The same sums for [e; r; 1], `maps` making them of z."""
        return Moments(maps.mT @ self.gram @ maps, maps.mT @ self.cross, self.energy, self.sequences)


class PrimalFit:
    """the scores' maps by KSVD and the output's by least squares: C_q^½ C_k^½ = UΣVᵀ, W_e = C_k^½V, W_r = C_q^½U.

    C_q = mean Fφ(q)φ(q)ᵀFᵀ and C_k over the calibration tokens: e and r are the leading left and right singular vectors
    of those tokens' K = Φ_qΦ_kᵀ (Chen et al. 2023, Thm. 3.2 and Eq. 6) times Σ, up to a factor that W_c takes up. Λ is
    (nΣ)⁻¹ with n the mean length of a sequence, so that the mean over those sequences of J is 0. W_c and b map [e; r]
    to the head's own output by ridge regression; its strength is chosen on a part of the calibration text that the
    regression does not see.
    """

    def __init__(self, scores: int, samples: int) -> None:
        """Both stay as typed."""
        self.typed: dict[str, float] = {}
        self.scores = scores
        self.seen = 0
        self.parts: list[Moments | None] = [None, None]

    def observe(
        self,
        query: Side,
        key: Side,
        kept: Bool[Tensor, "#batch #heads tokens"] | None,
        output: Float[Tensor, "batch heads tokens value_dim"],
    ) -> None:
        """Take in a batch's features, which tokens are real, and the head's own output."""
        import torch

        z = torch.cat([query, key, torch.ones_like(query[..., :1])], -1).double()
        y = output.double()
        if kept is not None:
            z, y = z.masked_fill(~kept[..., None], 0.0), y.masked_fill(~kept[..., None], 0.0)
        held = (torch.arange(self.seen, self.seen + len(z), device=z.device) % HELD_OUT) == 1
        self.seen += len(z)
        for part, chosen in enumerate((~held, held)):
            if bool(chosen.any()):
                found = _moments(z[chosen], y[chosen])
                before = self.parts[part]
                self.parts[part] = found if before is None else before + found

    def solve(self) -> dict[str, Float[Tensor, "heads ..."]]:
        """`query_map`, `key_map` (heads, features, s'), `log_multipliers` (heads, s'), `output_map` (heads, 2s',
        value_dim), `offset` (heads, value_dim) and `tokens` (heads,), the mean length of a calibration sequence.

        s' = min(s, features); scores beyond the rank of K are zero.

        Raises TextError for fewer than two sequences, and fewer tokens than scores.
        """
        import torch

        train, held = self.parts
        if train is None or held is None:
            raise TextError("primal needs two calibration sequences at least.", "Give a longer --calibration text.")
        every = train + held
        if int(every.tokens.min()) < self.scores:
            raise TextError(
                f"primal with {self.scores} scores needs as many tokens of calibration text; "
                f"there are {int(every.tokens.min())}.",
                "Give a longer --calibration text, or fewer scores.",
            )
        query_map, key_map, log_multipliers = singular_maps(every, self.scores)
        maps = _assembled(query_map, key_map)
        parts = [moments.of_scores(maps) for moments in (train, held, every)]
        errors = torch.stack([lost(parts[1], *regression(parts[0], parts[0].tokens * 0 + s)) for s in STRENGTHS])
        best = torch.tensor(STRENGTHS).to(errors)[errors.argmin(0)]
        output_map, offset = regression(parts[2], best)
        return {
            "query_map": query_map,
            "key_map": key_map,
            "log_multipliers": log_multipliers,
            "output_map": output_map,
            "offset": offset,
            "tokens": every.tokens / every.sequences,
        }


def _moments(z: Float[Tensor, "batch heads tokens size"], y: Float[Tensor, "batch heads tokens value_dim"]) -> Moments:
    return Moments((z.mT @ z).sum(0), (z.mT @ y).sum(0), y.square().sum((0, 2, 3)), len(z))


def singular_maps(moments: Moments, scores: int) -> tuple[Map, Map, Float[Tensor, "heads scores"]]:
    """W_e, W_r and log Λ; columns beyond the rank of K are zero."""
    import torch

    size = (moments.gram.shape[-1] - 1) // 2
    grams = moments.gram / moments.tokens[:, None, None]
    query_root, key_root = roots(grams[..., :size, :size])[0], roots(grams[..., size:-1, size:-1])[0]
    left, values, right = torch.linalg.svd(query_root @ key_root)
    left, values, right = left[..., :scores], values[..., :scores], right.mT[..., :scores]
    # Strict: where K is zero all are.
    alive = values > torch.finfo(values.dtype).eps * size * values[..., :1]
    length = (moments.tokens / moments.sequences)[:, None]
    log_multipliers = -(length * torch.where(alive, values, 1.0)).log()
    return key_root @ right * alive[..., None, :], query_root @ left * alive[..., None, :], log_multipliers


def _assembled(query_map: Map, key_map: Map) -> Float[Tensor, "heads size columns"]:
    """The block diagonal map of [Fφ(q); Fφ(k); 1] to [e; r; 1]."""
    heads, size, scores = query_map.shape
    maps = query_map.new_zeros(heads, 2 * size + 1, 2 * scores + 1)
    maps[:, :size, :scores], maps[:, size:-1, scores:-1], maps[:, -1, -1] = query_map, key_map, 1.0
    return maps


def regression(moments: Moments, strength: Float[Tensor, " heads"]) -> tuple[OutputMap, Offset]:
    """W_c and b that minimise Σ‖y − W_cᵀz − b‖²/n + strength·‖DW_c‖², D the scores' standard deviations."""
    import torch

    count = moments.tokens[:, None, None]
    mean, own = moments.gram[:, :-1, -1:] / count, moments.cross[:, -1:] / count
    spread = moments.gram[:, :-1, :-1] / count - mean @ mean.mT
    shared = moments.cross[:, :-1] / count - mean @ own
    deviation = spread.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()[..., None]
    # A score that never changes says nothing; dividing by its rounding would.
    alive = deviation > torch.finfo(spread.dtype).eps ** 0.5 * mean.abs()
    scale = torch.where(alive, deviation, 1.0)
    values, vectors = torch.linalg.eigh(torch.where(alive & alive.mT, spread / (scale * scale.mT), 0.0))
    shrunk = (vectors.mT @ torch.where(alive, shared / scale, 0.0)) / (values.clamp_min(0.0) + strength[:, None])[
        ..., None
    ]
    output_map = torch.where(alive, vectors @ shrunk / scale, 0.0)
    return output_map, (own - mean.mT @ output_map)[:, 0]


def lost(moments: Moments, output_map: OutputMap, offset: Offset) -> Float[Tensor, " heads"]:
    """Σ‖y − W_cᵀz − b‖² of every head."""
    import torch

    whole = torch.cat([output_map, offset[:, None]], -2)
    quadratic = (whole * (moments.gram @ whole)).sum((-2, -1))
    return moments.energy - 2 * (whole * moments.cross).sum((-2, -1)) + quadratic


@kernel(
    "primal",
    formula="output = W_c[e; r] + b, no k(q, k); e = W_eᵀFφ(q), r = W_rᵀFφ(k), φ(x) = x/‖x‖",
    source="Chen et al. 2023, Eq. 6; closed form of attnlens",
    positive=True,
    symmetric=False,
    features="finite",
    form="output",
    parameters=(
        KernelParameter("scores", "how many scores s of each kind a token has", int, low=1, high=65536),
        KernelParameter("samples", "rows of F, evenly spaced tokens; 0: F = I", int, default=0, low=0, high=65536),
    ),
    fused="scores, O(tokens)",
    fit=PrimalFit,
    trainable=("query_map", "key_map", "log_multipliers", "output_map", "offset"),
    needs_fit=True,
)
def primal(
    query: Side,
    key: Side,
    scores: int,
    samples: int,
    query_map: Map,
    key_map: Map,
    log_multipliers: Float[Tensor, "heads scores"],
    output_map: OutputMap,
    offset: Offset,
    tokens: Float[Tensor, " heads"],
) -> Float[Tensor, "batch heads tokens value_dim"]:
    """Primal-Attention from KSVD scores, which reads no values and no other token (but running means where causal)."""
    kept = query_map.shape[-1]
    e, r = query @ query_map.to(query), key @ key_map.to(key)
    to_output = output_map.to(query)
    output: Tensor = e @ to_output[:, :kept] + r @ to_output[:, kept:] + offset.to(query)[:, None]
    return output


if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.records import Call

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


class LearnedStart:
    """the maps W of queries and keys: at first rows of random orthogonal directions with the lengths of Gaussian rows.

    Before training, then, φ(q)φ(k) is nearly positive random features of ±ω (Choromanski et al. 2021, Lemma 1): Σ_l
    e^{⟨ω_l, x⟩} is about e^{‖x‖²/2} times their number, and softmax divides by it. Nothing is read but the shapes.
    """

    def __init__(self, count: int) -> None:
        """`count` stays as typed."""
        self.typed: dict[str, float] = {}
        self.count = count
        self.weight: Tensor | None = None

    def update(self, call: Call) -> None:
        """Take in the shapes of a batch."""
        from attnlens.ksvd.features import orthogonal_draws

        heads, head_dim = call.query.shape[1], call.query.shape[-1]
        weight = orthogonal_draws(self.count // 2, head_dim, 0).to(call.query.device)
        self.weight = weight.expand(heads, -1, -1)

    def solve(self) -> dict[str, Float[Tensor, "heads half head_dim"]]:
        """`query_weight` and `key_weight`, equal at first."""
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

    The features of each sign sum to 1, so that k lies between 0 and 2. --heal trains the maps by attention transfer.
    """
    import torch

    x = wide(x) * scale**0.5
    weight = query_weight if side == "query" else key_weight
    projected = x @ weight.to(x).mT
    return torch.cat((projected.softmax(-1), (-projected).softmax(-1)), -1)
