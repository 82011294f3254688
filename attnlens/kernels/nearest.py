"""Kernels fitted in closed form to a head: the nearest symmetric or positive form, and Primal-Attention by KSVD."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnlens.errors import TextError, UsageError
from attnlens.kernels.lowrank import roots
from attnlens.kernels.registry import KernelParameter, kernel
from attnlens.kernels.spec import own_attention, wide
from attnlens.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.records import Call

    Square = Float[Tensor, "*heads size size"]
    Query = Float[Tensor, "batch heads queries head_dim"]
    Key = Float[Tensor, "batch heads keys head_dim"]
    Side = Float[Tensor, "batch heads tokens features"]
    Map = Float[Tensor, "heads features scores"]
    OutputMap = Float[Tensor, "heads both value_dim"]
    Offset = Float[Tensor, "heads value_dim"]
else:
    torch = LazyModule("torch")

STEPS, ENOUGH = 500, 1e-9
"""Most steps towards the nearest positive form, and the relative change below which they end."""


def own_form(like: Float[Tensor, "heads size"]) -> Float[Tensor, "heads size size"]:
    """Return N₀ = [[0, I], [0, 0]] of each head: uᵀN₀u' = ⟨q, k'⟩."""
    size = like.shape[-1] // 2
    return torch.diag(like.new_ones(size), size).expand(len(like), -1, -1)


def nearest_symmetric(
    own: Square, queries: Square, keys: Square
) -> tuple[Square, Square, Float[Tensor, "*heads size size"]]:
    """Compute P, X and weights: N = PXPᵀ is the symmetric N of least tr (N−N₀)ᵀC_q(N−N₀)C_k.

    PᵀC_kP = 1 and PᵀC_qP = diag λ, so that with X₀ = P⁻¹N₀P⁻ᵀ the error is Σ_ab λ_a (X−X₀)²_ab, and X_ab = (λ_a X₀_ab +
    λ_b X₀_ba)/(λ_a+λ_b); off the span of the tokens X is 0. If C_q = C_k = C, N = C^{−½} sym(C^½ N₀ C^½) C^{−½}. The
    weights are (λ_a+λ_b)/2: the error of another X' is that of X plus Σ weights (X'−X)².
    """
    root, inverse = roots(queries + keys)
    values, vectors = torch.linalg.eigh(inverse @ queries @ inverse)
    # shares of C_q + C_k: queries have `share` of a direction, keys the rest
    share = values.clamp(0, 1)
    basis = inverse @ vectors
    back = vectors.mT @ root @ own @ root @ vectors
    weights = share[..., :, None] * (1 - share[..., None, :])
    both = weights + weights.mT
    mean = (weights * back + weights.mT * back.mT) / both.clamp_min(torch.finfo(both.dtype).tiny)
    return basis, torch.where(both > 0, mean, (back + back.mT) / 2), both / 2


def nearest_positive(form: Square, weights: Float[Tensor, "*heads size size"]) -> Square:
    """Find the positive semidefinite X' of least Σ weights (X'−X)², by accelerated projected gradients.

    For equal weights it is [X]₊, the first step. Beck & Teboulle 2009 (FISTA); restarts of O'Donoghue & Candès 2015.
    """
    step = weights / weights.amax((-2, -1), keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    border = ENOUGH * form.norm(dim=(-2, -1))
    found = ahead = positive_part(form)
    pace = torch.ones_like(border)[..., None, None]
    for _ in range(STEPS):
        following = positive_part(ahead - step * (ahead - form))
        moved = following - found
        back = ((ahead - following) * moved).sum((-2, -1), keepdim=True) > 0  # the momentum points uphill: restart
        quicker = torch.where(back, 1.0, (1 + (1 + 4 * pace.square()).sqrt()) / 2)
        ahead = following + torch.where(back, 0.0, (pace - 1) / quicker) * moved
        found, pace = following, quicker
        if bool((moved.norm(dim=(-2, -1)) <= border).all()):
            break
    return found


def positive_part(form: Square) -> Square:
    """Compute [X]₊: X with its negative eigenvalues set to 0."""
    values, vectors = torch.linalg.eigh(form)
    found: Tensor = (vectors * values.clamp_min(0)[..., None, :]) @ vectors.mT
    return found


def factored(basis: Square, form: Square) -> tuple[Float[Tensor, "heads size rank"], Float[Tensor, "heads rank"]]:
    """Compute F and signs with F diag(signs) Fᵀ = PXPᵀ, largest |eigenvalue| first; zeros beyond a head's rank."""
    values, vectors = torch.linalg.eigh(form)
    order = values.abs().argsort(-1, descending=True)
    values = values.gather(-1, order)
    vectors = vectors.gather(-1, order[..., None, :].expand_as(vectors))
    border = torch.finfo(form.dtype).eps * form.shape[-1] * values[..., :1].abs()
    # Strict: a zero form has border 0 and keeps no direction.
    signs = values.sign() * (values.abs() > border)
    width = max(1, int(signs.abs().sum(-1).max()))
    factor = basis @ vectors * (values.abs().sqrt() * signs.abs())[..., None, :]
    return factor[..., :width].contiguous(), signs[..., :width].contiguous()


SYMMETRIC, POSITIVE, NO_KEY, NO_SKEW = range(4)  # the part of the logits that is kept
FITTED, ORACLE = 0, 1  # a form fitted to calibration text, or the parts of the evaluated text's own logits
TIES_OF = {SYMMETRIC: "skewless", POSITIVE: "mercer", NO_KEY: "keyless", NO_SKEW: "skewless"}
"""The tie that extracts each part exactly."""


class NearestFit:
    """the form N of each token's (query, key): min tr (N−N₀)ᵀC_q(N−N₀)C_k, N symmetric or positive; and the gate N₀ᵀū.

    The logits are s⟨q_i, k_j⟩ = s u_iᵀN₀u_j, u = [q; k], N₀ = [[0, I], [0, 0]]. With ū the mean of u over queries they
    are s(u_i−ū)ᵀN₀(u_j−ū), the key gate s⟨q̄, k_j⟩, and query-only terms, which softmax ignores. C_q = Σ_i
    (u_i−ū)(u_i−ū)ᵀ and C_k = Σ_ij p_ij (u_j−m_i)(u_j−m_i)ᵀ, m_i = Σ_j p_ij u_j, p the head's own attention. This is the
    variance of the logits' error under p, twice the KL to second order, if queries and keys are independent.
    """

    def __init__(self, part: int, how: int = FITTED) -> None:
        self.typed: dict[str, float] = {}
        self.part = part
        self.count: Tensor | float = 0.0
        self.total: Tensor | float = 0.0
        self.second: Tensor | float = 0.0
        """Number of queries that have a choice, Σ u and Σ uuᵀ over them, head by head."""
        self.seen: Tensor | float = 0.0
        """Σ_ij p_ij (u_j−m_i)(u_j−m_i)ᵀ."""

    def update(self, call: Call) -> None:
        """Add the pairs of a batch. Raises UsageError if the logits are not a form of a token's query and key."""
        refuse(call)
        u, weight = joined(call.query.double(), call.paired_key.double()), own_attention(call)
        rows = weight.sum(-1, keepdim=True)
        choosing = (rows > 0).to(u)
        self.count = self.count + choosing.sum((0, 2))
        self.total = self.total + (u * choosing).sum((0, 2))
        self.second = self.second + ((u * choosing).mT @ u).sum(0)
        apart = u - u.mean(-2, keepdim=True)  # the same scatter, without the rounding of a large common part
        mean = weight @ apart
        self.seen = self.seen + ((apart * weight.sum(-2)[..., None]).mT @ apart - mean.mT @ mean).sum(0)

    def solve(self) -> dict[str, Tensor]:
        """Return the fitted parameters of the swapped heads: centre ū and, except for no-key, factor, signs and gate.

        N = F diag(signs) Fᵀ, factor F (heads, 2·head_dim, r), signs ±1 (0 beyond a head's own rank).
        """
        total, count = torch.as_tensor(self.total), torch.as_tensor(self.count)
        centre = total / count.clamp_min(1)
        if self.part == NO_KEY:
            return {"centre": centre}
        second = torch.as_tensor(self.second) / count.clamp_min(1)[..., None]
        queries = second - centre[..., None] * centre[..., None, :]
        own = own_form(centre)
        basis, form, weights = nearest_symmetric(own, queries, torch.as_tensor(self.seen) / count.sum())
        if self.part == POSITIVE:
            form = nearest_positive(form, weights)
        factor, signs = factored(basis, form)
        return {"centre": centre, "factor": factor, "signs": signs, "gate": (own.mT @ centre[..., None])[..., 0]}


def joined(query: Query, key: Key) -> Float[Tensor, "batch heads tokens size"]:
    """Return u = [q; k] of each token and query head."""
    return torch.cat((query, key), -1)


def refuse(call: Call) -> None:
    """Raise UsageError if queries and keys are of different tokens, or if query-only terms of logits matter."""
    if call.cross or call.query.shape[-2] != call.key.shape[-2]:
        raise UsageError(
            f"nearest needs the query and the key of each token; this site has {call.query.shape[-2]} queries and "
            f"{call.key.shape[-2]} keys, of {'two sequences' if call.cross else 'a key-value cache'}.",
            "Leave out cross-attention with --part, and run without a key-value cache.",
        )
    if call.softcap is not None or call.sinks is not None:
        what = "caps its scores (softcap)" if call.softcap is not None else "has attention sinks"
        raise UsageError(
            f"nearest leaves query-only terms out, and this model {what}, which sees them.",
            "Choose another kernel for this model.",
        )


def nearest_call(
    call: Call,
    *,
    part: int,
    how: int,
    centre: Float[Tensor, "heads size"] | None = None,
    factor: Float[Tensor, "heads size rank"] | None = None,
    signs: Float[Tensor, "heads rank"] | None = None,
    gate: Float[Tensor, "heads size"] | None = None,
) -> Call:
    """Return the call whose exponential kernel is s(x_iᵀ diag(signs) x_j + g_i + g_j), x = Fᵀ(u−ū), g = ⟨gate, u−ū⟩.

    Under no-skew g_i is omitted, which softmax ignores; under no-key it is s⟨q_i−q̄, k_j⟩.
    """
    if centre is None:
        raise UsageError("nearest is nothing before it is fitted to a head.", "Add some calibration text.")
    refuse(call)
    if factor is None or signs is None or gate is None:
        query = wide(call.query)
        middle = centre[:, None, : query.shape[-1]].to(query)
        return replace(call, query=(query - middle).to(call.query))
    u = joined(wide(call.query), wide(call.paired_key))
    u = u - centre[:, None].to(u)
    x, g = u @ factor.to(u), (u * gate[:, None].to(u)).sum(-1, keepdim=True)
    one = torch.ones_like(g)
    queries, keys = [x * signs[:, None].to(x), one], [x, g]
    if part != NO_SKEW:
        queries, keys = [*queries, g], [*keys, one]
    query, key = (torch.cat(side, -1).to(call.query) for side in (queries, keys))
    return replace(call, query=query, key=key, value=call.paired_value)


def alone(query: Query, key: Key, scale: float, *, how: int, **_more: object) -> tuple[Query, Key, float]:
    """Return queries and keys unchanged for the oracle's tie; raise UsageError for the form, which mixes both."""
    if how == ORACLE:
        return query, key, scale
    raise UsageError(
        "The nearest form reads both query and key of each token: it has no scores of queries and keys alone.",
        "Compute attention of the whole call with attnlens.kernels.attention.attend.",
    )


def tie_of(part: float, how: float) -> str | None:
    """Return the tie that extracts this part of the evaluated text's own logits; None for the fitted form."""
    return TIES_OF[int(part)] if how == ORACLE else None


@kernel(
    "nearest",
    formula="s(u_i−ū)ᵀN(u_j−ū) + gates, u = [q; k], N nearest to N₀, u_iᵀN₀u_j = ⟨q_i, k_j⟩",
    source="Schoenberg 1938; Wright & Gonzalez 2021; closed form of attnlens",
    positive=True,
    symmetric=False,
    features="infinite",
    form="score",
    parameters=(
        KernelParameter(
            "part",
            "what the kernel keeps: its symmetric part, the positive definite part of that (a Mercer kernel), all but "
            "the key gate, all but the skew part",
            int,
            words=(("symmetric", SYMMETRIC), ("positive", POSITIVE), ("no-key", NO_KEY), ("no-skew", NO_SKEW)),
        ),
        KernelParameter(
            "how",
            "a form fitted to calibration text, a model; or the evaluated text's own logits taken apart, an "
            "analysis (bidirectional heads)",
            int,
            default=FITTED,
            words=(("fitted", FITTED), ("oracle", ORACLE)),
            told=False,
        ),
    ),
    dot=alone,
    prepare=nearest_call,
    fused="SDPA on [Fᵀu, gate]",
    fit=NearestFit,
    needs_fit=True,
    trainable=("factor", "gate"),
    caution="nearest reads query and key of each token together, so that it runs without a key-value cache; under "
    "softmax symmetric and no-skew are the same attention, as a gate on queries cancels.",
    oracle=tie_of,
)
def nearest(score: Float[Tensor, "*scores"], **_form: object) -> Float[Tensor, "*scores"]:
    """The exponential kernel with chosen parts of its logits alone: symmetric, Mercer, or without its key gate."""
    return score


HELD_OUT = 4  # one sequence in this many is held out from the least squares, to choose the strength of its ridge
STRENGTHS = (1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # ridge strengths tried, for scores of unit variance


@dataclass
class Moments:
    """Sums over tokens of z = [Fφ(q); Fφ(k); 1] and of the head's own output y, in float64."""

    gram: Float[Tensor, "heads size size"]  # Σ z zᵀ
    cross: Float[Tensor, "heads size value_dim"]  # Σ z yᵀ
    energy: Float[Tensor, " heads"]  # Σ ‖y‖²
    sequences: int

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both."""
        sums = self.gram + other.gram, self.cross + other.cross, self.energy + other.energy
        return Moments(*sums, self.sequences + other.sequences)

    @property
    def tokens(self) -> Float[Tensor, " heads"]:
        """Number of tokens, by head."""
        return self.gram[..., -1, -1]

    def of_scores(self, maps: Float[Tensor, "heads size columns"]) -> Moments:
        """Return the same sums for [e; r; 1], the image of z under `maps`."""
        return Moments(maps.mT @ self.gram @ maps, maps.mT @ self.cross, self.energy, self.sequences)


class PrimalFit:
    """the scores' maps by KSVD and the output's by least squares: C_q^½ C_k^½ = UΣVᵀ, W_e = C_k^½V, W_r = C_q^½U.

    C_q = mean Fφ(q)φ(q)ᵀFᵀ and C_k over the calibration tokens: e and r are the leading left and right singular vectors
    of those tokens' K = Φ_qΦ_kᵀ (Chen et al. 2023, Thm. 3.2 and Eq. 6) times Σ, up to a factor that W_c absorbs. Λ is
    (nΣ)⁻¹ with n the mean length of a sequence, so that the mean of J over those sequences is 0. W_c and b map [e; r]
    to the head's own output by ridge regression; the ridge's strength is chosen on a held-out part of the calibration
    text.
    """

    def __init__(self, scores: int, samples: int) -> None:
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
        """Add a batch's features and the head's own output, restricted to the tokens that `kept` marks as real."""
        z = torch.cat([query, key, torch.ones_like(query[..., :1])], -1).double()
        y = output.double()
        if kept is not None:
            z, y = z.masked_fill(~kept[..., None], 0.0), y.masked_fill(~kept[..., None], 0.0)
        held_out = (torch.arange(self.seen, self.seen + len(z), device=z.device) % HELD_OUT) == 1
        self.seen += len(z)
        for part, chosen in enumerate((~held_out, held_out)):
            if bool(chosen.any()):
                found = _moments(z[chosen], y[chosen])
                before = self.parts[part]
                self.parts[part] = found if before is None else before + found

    def solve(self) -> dict[str, Float[Tensor, "heads ..."]]:
        """Return the fitted parameters.

        They are `query_map`, `key_map` (heads, features, s'), `log_multipliers` (heads, s'), `output_map` (heads, 2s',
        value_dim), `offset` (heads, value_dim) and `tokens` (heads,), the mean length of a calibration sequence; s' =
        min(s, features), and scores beyond the rank of K are zero. Raises TextError for fewer than two sequences, and
        for fewer tokens than scores.
        """
        train, held_out = self.parts
        if train is None or held_out is None:
            raise TextError("primal needs two calibration sequences at least.", "Give a longer --calibration text.")
        both = train + held_out
        if int(both.tokens.min()) < self.scores:
            raise TextError(
                f"primal with {self.scores} scores needs as many tokens of calibration text; "
                f"there are {int(both.tokens.min())}.",
                "Give a longer --calibration text, or fewer scores.",
            )
        query_map, key_map, log_multipliers = singular_maps(both, self.scores)
        maps = _assembled(query_map, key_map)
        parts = [moments.of_scores(maps) for moments in (train, held_out, both)]
        errors = torch.stack([lost(parts[1], *regression(parts[0], parts[0].tokens * 0 + s)) for s in STRENGTHS])
        best = torch.tensor(STRENGTHS).to(errors)[errors.argmin(0)]
        output_map, offset = regression(parts[2], best)
        return {
            "query_map": query_map,
            "key_map": key_map,
            "log_multipliers": log_multipliers,
            "output_map": output_map,
            "offset": offset,
            "tokens": both.tokens / both.sequences,
        }


def _moments(z: Float[Tensor, "batch heads tokens size"], y: Float[Tensor, "batch heads tokens value_dim"]) -> Moments:
    return Moments((z.mT @ z).sum(0), (z.mT @ y).sum(0), y.square().sum((0, 2, 3)), len(z))


def singular_maps(moments: Moments, scores: int) -> tuple[Map, Map, Float[Tensor, "heads scores"]]:
    """Compute W_e, W_r and log Λ; columns beyond the rank of K are zero."""
    size = (moments.gram.shape[-1] - 1) // 2
    grams = moments.gram / moments.tokens[:, None, None]
    query_root, key_root = roots(grams[..., :size, :size])[0], roots(grams[..., size:-1, size:-1])[0]
    left, values, right = torch.linalg.svd(query_root @ key_root)
    left, values, right = left[..., :scores], values[..., :scores], right.mT[..., :scores]
    # Strict: if K is zero, so are all singular values.
    alive = values > torch.finfo(values.dtype).eps * size * values[..., :1]
    length = (moments.tokens / moments.sequences)[:, None]
    log_multipliers = -(length * torch.where(alive, values, 1.0)).log()
    return key_root @ right * alive[..., None, :], query_root @ left * alive[..., None, :], log_multipliers


def _assembled(query_map: Map, key_map: Map) -> Float[Tensor, "heads size columns"]:
    """Build the block diagonal map from [Fφ(q); Fφ(k); 1] to [e; r; 1]."""
    heads, size, scores = query_map.shape
    maps = query_map.new_zeros(heads, 2 * size + 1, 2 * scores + 1)
    maps[:, :size, :scores], maps[:, size:-1, scores:-1], maps[:, -1, -1] = query_map, key_map, 1.0
    return maps


def regression(moments: Moments, strength: Float[Tensor, " heads"]) -> tuple[OutputMap, Offset]:
    """Find W_c and b that minimise Σ‖y − W_cᵀz − b‖²/n + strength·‖DW_c‖², D the scores' standard deviations."""
    count = moments.tokens[:, None, None]
    mean, own = moments.gram[:, :-1, -1:] / count, moments.cross[:, -1:] / count
    spread = moments.gram[:, :-1, :-1] / count - mean @ mean.mT
    shared = moments.cross[:, :-1] / count - mean @ own
    deviation = spread.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()[..., None]
    # A constant score carries no information; dividing by its deviation would amplify rounding.
    alive = deviation > torch.finfo(spread.dtype).eps ** 0.5 * mean.abs()
    scale = torch.where(alive, deviation, 1.0)
    values, vectors = torch.linalg.eigh(torch.where(alive & alive.mT, spread / (scale * scale.mT), 0.0))
    shrunk = (vectors.mT @ torch.where(alive, shared / scale, 0.0)) / (values.clamp_min(0.0) + strength[:, None])[
        ..., None
    ]
    output_map = torch.where(alive, vectors @ shrunk / scale, 0.0)
    return output_map, (own - mean.mT @ output_map)[:, 0]


def lost(moments: Moments, output_map: OutputMap, offset: Offset) -> Float[Tensor, " heads"]:
    """Compute Σ‖y − W_cᵀz − b‖² of every head."""
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
