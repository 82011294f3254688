"""The kernel `nearest`: the symmetric or positive form nearest to a head's own logits, fitted in closed form."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attnlens.errors import UsageError
from attnlens.kernels.lowrank import TOGETHER, matrix_roots
from attnlens.kernels.registry import SCORE, choice, kernel, positive_part, torch
from attnlens.kernels.spec import own_attention, refuse_unpaired, wide

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.kernels.registry import Key, Query
    from attnlens.records import Call

    Rows = Float[Tensor, "heads size"] | None
    Form = Float[Tensor, "heads size rank"] | None
    Signs = Float[Tensor, "heads rank"] | None
    Square = Float[Tensor, "*heads size size"]

STEPS, ENOUGH = 500, 1e-9  # towards the nearest positive form: most steps, and the relative change that ends them


def own_form(like: Float[Tensor, "heads size"]) -> Float[Tensor, "heads size size"]:
    """Return N₀ = [[0, I], [0, 0]] of each head: uᵀN₀u' = ⟨q, k'⟩."""
    size = like.shape[-1] // 2
    return torch.diag(like.new_ones(size), size).expand(len(like), -1, -1)


def nearest_symmetric(form: Square, queries: Square, keys: Square) -> tuple[Square, Square, Square]:
    """Compute P, X and weights: N = PXPᵀ is the symmetric N of least tr (N−N₀)ᵀC_q(N−N₀)C_k, N₀ = `form`.

    PᵀC_kP = 1 and PᵀC_qP = diag λ, so that with X₀ = P⁻¹N₀P⁻ᵀ the error is Σ_ab λ_a (X−X₀)²_ab, and X_ab = (λ_a X₀_ab +
    λ_b X₀_ba)/(λ_a+λ_b); off the span of the tokens X is 0. If C_q = C_k = C, N = C^{−½} sym(C^½ N₀ C^½) C^{−½}. The
    weights are (λ_a+λ_b)/2: the error of another X' is that of X plus Σ weights (X'−X)².
    """
    root, inverse = matrix_roots(queries + keys)
    values, vectors = torch.linalg.eigh(inverse @ queries @ inverse)
    # shares of C_q + C_k: queries have `share` of a direction, keys the rest; rounding may leave [0, 1]
    share = values.clamp(0, 1)
    basis = inverse @ vectors
    back = vectors.mT @ root @ form @ root @ vectors
    weights = share[..., :, None] * (1 - share[..., None, :])
    both = weights + weights.mT
    # here and below, `tiny` turns 0/0 into 0
    mean = (weights * back + weights.mT * back.mT) / both.clamp_min(torch.finfo(both.dtype).tiny)
    # where both weights are 0, every value is as good: the plain mean
    return basis, torch.where(both > 0, mean, (back + back.mT) / 2), both / 2


def nearest_positive(form: Square, weights: Square) -> Square:
    """Find the positive semidefinite X' of least Σ weights (X'−X)², by accelerated projected gradients.

    For equal weights it is [X]₊, the first step. Beck & Teboulle 2009 (FISTA); restarts of O'Donoghue & Candès 2015.
    """
    step = weights / weights.amax((-2, -1), keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    border = ENOUGH * form.norm(dim=(-2, -1))
    nearest = ahead = positive_part(form)
    pace = torch.ones_like(border)[..., None, None]
    for _ in range(STEPS):
        following = positive_part(ahead - step * (ahead - form))
        moved = following - nearest
        back = ((ahead - following) * moved).sum((-2, -1), keepdim=True) > 0  # the momentum points uphill: restart
        quicker = torch.where(back, 1.0, (1 + (1 + 4 * pace.square()).sqrt()) / 2)
        ahead = following + torch.where(back, 0.0, (pace - 1) / quicker) * moved
        nearest, pace = following, quicker
        if bool((moved.norm(dim=(-2, -1)) <= border).all()):
            break
    return nearest


def factorise(basis: Square, form: Square) -> tuple[Float[Tensor, "heads size rank"], Float[Tensor, "heads rank"]]:
    """Compute F and signs with F diag(signs) Fᵀ = PXPᵀ, largest |eigenvalue| first; zeros beyond a head's rank."""
    values, vectors = torch.linalg.eigh(form)
    order = values.abs().argsort(-1, descending=True)
    values, vectors = values.gather(-1, order), vectors.gather(-1, order[..., None, :].expand_as(vectors))
    # eigenvalues up to eps · size · largest are rounding; strict: a zero form has border 0 and keeps no direction
    border = torch.finfo(form.dtype).eps * form.shape[-1] * values[..., :1].abs()
    signs = values.sign() * (values.abs() > border)
    width = max(1, int(signs.abs().sum(-1).max()))
    factor = basis @ vectors * (values.abs().sqrt() * signs.abs())[..., None, :]
    return factor[..., :width].contiguous(), signs[..., :width].contiguous()


SYMMETRIC, POSITIVE, NO_KEY, NO_SKEW = range(4)  # the part of the logits that is kept
FITTED, ORACLE = 0, 1  # a form fitted to calibration text, or the parts of the evaluated text's own logits
TIES_OF = ("skewless", "mercer", "keyless", "skewless")  # the tie that extracts each part exactly


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
        # number of queries that have a choice, Σ u and Σ uuᵀ over them, and Σ_ij p_ij (u_j−m_i)(u_j−m_i)ᵀ, head by head
        self.count = self.total = self.second = self.seen = torch.zeros(())

    def update(self, call: Call) -> None:
        """Add the pairs of a batch. Raises UsageError if the logits are not a form of a token's query and key."""
        _refuse(call)
        u, weight = torch.cat((call.query.double(), call.paired_key.double()), -1), own_attention(call)
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
        count = self.count.clamp_min(1)  # a head without any choice: a form of zeros
        centre = self.total / count
        if self.part == NO_KEY:
            return {"centre": centre}
        queries = self.second / count[..., None] - centre[..., None] * centre[..., None, :]
        start = own_form(centre)
        basis, form, weights = nearest_symmetric(start, queries, self.seen / self.count.sum())
        if self.part == POSITIVE:
            form = nearest_positive(form, weights)
        factor, signs = factorise(basis, form)
        return {"centre": centre, "factor": factor, "signs": signs, "gate": (start.mT @ centre[..., None])[..., 0]}


def _refuse(call: Call) -> None:
    """Raise UsageError if queries and keys are of different tokens, or if query-only terms of logits matter."""
    refuse_unpaired("nearest", call.query.shape[-2], call.key.shape[-2], cross=call.cross)
    if call.softcap is not None or call.sinks is not None:
        what = "caps its scores (softcap)" if call.softcap is not None else "has attention sinks"
        problem = f"nearest omits terms that depend on the query alone, but they matter in this model: it {what}."
        raise UsageError(problem, "Choose another kernel for this model.")


def nearest_call(
    call: Call, *, part: int, how: int, centre: Rows = None, factor: Form = None, signs: Signs = None, gate: Rows = None
) -> Call:
    """Return the call whose exponential kernel is s(x_iᵀ diag(signs) x_j + g_i + g_j), x = Fᵀ(u−ū), g = ⟨gate, u−ū⟩.

    Under no-skew g_i is omitted, which softmax ignores; under no-key it is s⟨q_i−q̄, k_j⟩.
    """
    if centre is None:
        raise UsageError("nearest must be fitted before it can be used.", "Add calibration text.")
    _refuse(call)
    if factor is None or signs is None or gate is None:
        query = wide(call.query)
        return replace(call, query=(query - centre[:, None, : query.shape[-1]].to(query)).to(call.query))
    u = torch.cat((wide(call.query), wide(call.paired_key)), -1)
    u = u - centre[:, None].to(u)
    x, g = u @ factor.to(u), (u * gate[:, None].to(u)).sum(-1, keepdim=True)
    ones = torch.ones_like(g)
    queries, keys = [x * signs[:, None].to(x), ones], [x, g]
    if part != NO_SKEW:
        queries, keys = [*queries, g], [*keys, ones]
    query, key = (torch.cat(side, -1).to(call.query) for side in (queries, keys))
    return replace(call, query=query, key=key, value=call.paired_value)


def alone(query: Query, key: Key, scale: float, *, how: int, **_more: object) -> tuple[Query, Key, float]:
    """Return queries and keys unchanged for the oracle's tie; raise UsageError for the form, which mixes both."""
    if how == ORACLE:
        return query, key, scale
    raise UsageError("nearest needs query and key of both tokens: a query and a key alone have no score.", TOGETHER)


@kernel(
    "nearest",
    formula="s(u_i−ū)ᵀN(u_j−ū) + gates, u = [q; k], N nearest to N₀, u_iᵀN₀u_j = ⟨q_i, k_j⟩",
    source="Schoenberg 1938; Wright & Gonzalez 2021; closed form of attnlens",
    **SCORE | {"symmetric": False},
    parameters=(
        choice(
            "part",
            "part of the logits to keep: symmetric, positive definite (Mercer), all but the key gate or the skew part",
            ("symmetric", "positive", "no-key", "no-skew"),
        ),
        choice(
            "how",
            "fitted: a model with a form from calibration text; oracle: an analysis that splits the evaluated text's "
            "own logits (bidirectional heads)",
            ("fitted", "oracle"),
            default=FITTED,
        ),
    ),
    dot=alone,
    prepare=nearest_call,
    fused="SDPA on [Fᵀu, gate]",
    fit=NearestFit,
    needs_fit=True,
    trainable=("factor", "gate"),
    caution="nearest needs query and key of every token, so the model must run without a key-value cache; "
    "symmetric and no-skew give the same attention because softmax cancels a gate on queries.",
    oracle=lambda part, how: TIES_OF[part] if how == ORACLE else None,
)
def nearest(score: Float[Tensor, "*scores"], **_form: object) -> Float[Tensor, "*scores"]:
    """Exponential kernel of the logits' symmetric or Mercer part, or of all but the key gate or antisymmetric part."""
    return score
