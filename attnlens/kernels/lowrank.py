"""The kernels `rank` (logits of low rank) and `nearest` (logits of a symmetric or positive form), and their fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from attnlens.errors import UsageError
from attnlens.kernels.pair_weights import output_weighted, own_attention, pairs_weighted
from attnlens.kernels.registry import SCORE, KernelParameter, choice, kernel, positive_part, torch
from attnlens.kernels.spec import refuse_unpaired, wide

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from attnlens.kernels.registry import Key, Matrix, Query, Tokens
    from attnlens.records import Call

    Gram = Float[Tensor, "*latents size size"]
    Map = Float[Tensor, "heads head_dim rank"]
    Part = Float[Tensor, "heads ..."] | None
    Square = Float[Tensor, "*heads size size"]
    Low = tuple[Float[Tensor, "batch heads queries rank"], Float[Tensor, "batch heads keys rank"], float]


@dataclass(frozen=True)
class Turn:
    """RoPE with a frequency and a partner for each coordinate: x_c(p) = x_c cos ω_c p + x_π(c) sin ω_c p.

    Su et al. 2021 (RoFormer), Eq. 16. In a pair that rotates by θ per position, ω is −θ for the first coordinate and θ
    for the second.
    """

    frequency: Float[Tensor, " head_dim"]  # ω; 0 for an unrotated coordinate
    partner: Int[Tensor, " head_dim"]  # π, the index of the pair's other coordinate; the same index if unrotated

    def rotate(self, x: Tokens, positions: Int[Tensor, "#batch tokens"], *, back: bool = False) -> Tokens:
        """Rotate x from position 0 to `positions` or, with `back`, from `positions` to position 0."""
        # in float64: at a position of 100,000 a float32 angle is off by up to 4e-3
        angles = positions[:, None, :, None].double() * self.frequency.double().to(x.device)
        sine = -angles.sin() if back else angles.sin()
        rotated: Tensor = x * angles.cos().to(x) + x[..., self.partner.to(x.device)] * sine.to(x)
        return rotated


def token_positions(call: Call) -> tuple[Int[Tensor, "#batch queries"], Int[Tensor, "#batch keys"]]:
    """Return the positions of queries and keys; raise UsageError for cross-attention or unknown positions."""
    positions, keys = call.places, call.key.shape[2]
    if positions is None or positions.shape[-1] != call.query.shape[2] or call.cross:
        reason = "this is cross-attention" if call.cross else "the model does not pass token positions to its attention"
        problem = f"`rank` with rotation=before cannot undo the rotation of keys: {reason}."
        raise UsageError(problem, "Leave out rotation=before.")
    # keys in a key-value cache directly precede the first query
    before = positions[..., :1] + torch.arange(min(0, positions.shape[-1] - keys), 0, device=positions.device)
    return positions, torch.cat((before.clamp_min(0), positions), -1)[..., :keys]


@dataclass
class Grams:
    """Second moments of queries and keys over the calibration text, from which the latents of key heads are computed.

    A latent is a vector from which the keys of one or several key heads are computed. For each key head, C_q = Σ_i u_i
    q_i q_iᵀ over the queries of its query heads, where u_i is the sum of q_i's weights (with a sink: 1 if q_i sees two
    keys or more). For the stacked keys of each latent, C_k = Σ_ij w_ij (k_j − k̄_i)(k_j − k̄_i)ᵀ over the queries that
    read the latent, where k̄_i = Σ_j w_ij k_j / Σ_j w_ij. For keys before the rotation, k̄ is the same for all queries,
    because softmax cancels a vector that is added to all keys only if it is added after the rotation.
    """

    groups: tuple[tuple[int, ...], ...]  # key heads of each latent, as indices among the swapped key heads
    key_of: tuple[int, ...]  # key head of each swapped query head, as an index among the swapped key heads
    turn: Turn | None = None  # rotation that is removed from queries and keys; None for latents of rotated keys
    sums: list[Tensor] = field(default_factory=list)
    """C_q, (kv_heads, head_dim, head_dim), then for each latent C_k (before the rotation Σ_j w_j k_j k_jᵀ), Σ_j w_j k_j
    and Σ_j w_j; empty before the first batch."""

    def update(self, call: Call, weight: Matrix) -> None:
        """Add the moments of a batch; `weight` contains the weight of each pair of query and key."""
        query, key = call.query.double(), call.paired_key.double()
        if self.turn is not None:
            of_queries, of_keys = token_positions(call)
            query, key = (self.turn.rotate(x, at, back=True) for x, at in ((query, of_queries), (key, of_keys)))
        elif call.sinks is None:
            # changes only rounding: otherwise, differences of keys with a large common part would lose their digits
            key = key - key.mean(-2, keepdim=True)
        whole = rows = weight.sum(-1, keepdim=True)
        if call.sinks is not None:
            # a sink acts as a key at 0 with the remaining weight; queries that see two keys or more count equally
            whole, rows = torch.ones_like(rows), (rows > 0).to(rows)
        by_head = ((query * rows).mT @ query).sum(0)
        index = torch.tensor(self.key_of, device=by_head.device)
        sums = [by_head.new_zeros(len(set(self.key_of)), *by_head.shape[1:]).index_add(0, index, by_head)]
        for group in self.groups:
            sums += self._sum_latent(group, key, weight, whole)
        self.add(sums)

    def _sum_latent(self, group: tuple[int, ...], key: Tensor, weight: Matrix, whole: Tensor) -> list[Tensor]:
        """Compute C_k (uncentred for keys before the rotation), Σ_j w_j k_j and Σ_j w_j of a group's stacked keys.

        `whole` contains the total weight of each query, including the weight of a sink.
        """
        heads = [head for head, key_head in enumerate(self.key_of) if key_head in group]
        stack = torch.cat([key[:, self.key_of.index(key_head)] for key_head in group], -1)
        by_key = weight[:, heads].sum((1, 2))[..., None]
        second = ((stack * by_key).mT @ stack).sum(0)
        if self.turn is None:
            mean = weight[:, heads] @ stack[:, None]
            scaled = mean / whole[:, heads].clamp_min(torch.finfo(mean.dtype).tiny)  # no weight: 0/tiny, not 0/0
            second = second - (scaled.mT @ mean).sum((0, 1))
        return [second, (stack * by_key).sum((0, 1)), by_key.sum()]

    def add(self, sums: Sequence[Tensor], factor: float = 1.0) -> None:
        """Add the moments `sums`, multiplied by `factor`."""
        before: Sequence[Tensor | float] = self.sums or [0.0] * len(sums)
        self.sums = [a + factor * b for a, b in zip(before, sums, strict=True)]

    def plus(self, other: Grams, *, equal: bool = False) -> Grams:
        """Return these moments plus `other`; if `equal`, `other` is first scaled to the same total weight."""
        weights = [sum(map(float, grams.sums[3::3])) for grams in (self, other)]
        both = replace(self)
        both.add(other.sums, weights[0] / max(weights[1], 1e-300) if equal else 1.0)  # not 0/0
        return both

    def solve(self) -> Latents:
        """Compute the maps A and B of every latent from C_q^½ C_k^½ = UΣVᵀ, leading directions first."""
        queries, *sums = self.sums
        size, maps = queries.shape[-1], []
        means = queries.new_zeros(len(queries), size) if self.turn is not None else None
        width = size * max(map(len, self.groups))
        for group, second, first, weight in zip(self.groups, sums[::3], sums[1::3], sums[2::3], strict=True):
            if means is not None:
                mean = first / weight.clamp_min(torch.finfo(first.dtype).tiny)  # no weight: mean 0
                second = second - torch.outer(mean, first)
                means[list(group)] = mean.view(len(group), size)
            blocks: Tensor = torch.block_diag(*queries[list(group)])  # type: ignore[no-untyped-call]
            border = 0, width - len(second), 0, width - len(second)
            maps.append([torch.nn.functional.pad(side, border) for side in directions(blocks, second)])
        query_map, key_map = (torch.stack(side) for side in zip(*maps, strict=True))
        return Latents(self.groups, self.key_of, query_map, key_map, means, self.turn)


def shared_indices(fitted: Mapping[str, Tensor]) -> dict[str, Int[Tensor, " heads"]]:
    """Return, for each parameter that query heads can share, an index per head; heads with equal indices share it.

    The result is empty if each query head has separate maps.
    """
    if "key_head" not in fitted:
        return {}
    latent = torch.unique(fitted["members"], dim=0, return_inverse=True)[1]
    key_head = torch.unique(fitted["key_head"], return_inverse=True)[1]
    return {"key_map": latent, "query_map": key_head, "offset": key_head}


@dataclass(frozen=True)
class Latents:
    """Maps of a site's queries and keys to latents (see Grams); the columns are sorted, leading directions first."""

    groups: tuple[tuple[int, ...], ...]  # key heads of each latent, as in Grams
    key_of: tuple[int, ...]  # key head of each query head, as in Grams
    query_map: Float[Tensor, "latents size size"]
    """A = C_q^{−½}UΣ^½, where C_q is block diagonal over the latent's key heads; padded with zeros to equal sizes."""
    key_map: Float[Tensor, "latents size size"]  # B = C_k^{−½}VΣ^½: z = Σ_g k_g B_g, and ⟨q, k_g⟩ becomes ⟨q A_g, z⟩
    mean: Float[Tensor, "kv_heads head_dim"] | None = None  # k̄ before the rotation; None for latents of rotated keys
    turn: Turn | None = None  # rotation applied to the reconstructed keys; None for latents of rotated keys

    @property
    def head_dim(self) -> int:
        """Number of coordinates of a key."""
        return self.query_map.shape[-1] // max(map(len, self.groups))

    @property
    def sizes(self) -> list[int]:
        """Size of each latent before it is cut: the number of coordinates of its stacked keys."""
        return [self.head_dim * len(group) for group in self.groups]

    def maps(self, ranks: Sequence[int]) -> dict[str, Tensor]:
        """Return the fitted parameters of the swapped query heads for latents that are cut to the sizes `ranks`.

        All maps are as wide as the largest cut latent; the maps of smaller latents are padded with zeros. The maps of
        an uncut latent are the identity.
        """
        width, device = max(1, *ranks), self.key_map.device
        dimensions = torch.arange(self.key_map.shape[-1], device=device) < torch.tensor(ranks, device=device)[:, None]
        whole = torch.tensor([rank >= size for rank, size in zip(ranks, self.sizes, strict=True)], device=device)
        identity = torch.eye(self.key_map.shape[-1]).to(self.key_map)
        cut = (side * dimensions[:, None] for side in (self.query_map, self.key_map))
        query_map, key_map = (torch.where(whole[:, None, None], identity, side)[..., :width] for side in cut)
        # without shared latents, each query head gets separate maps
        if self.turn is None and len(self.groups) == len(self.key_of):
            order = [self.groups.index((key_head,)) for key_head in self.key_of]
            return {"query_map": query_map[order], "key_map": key_map[order]}
        heads = [self._get_parameters(key_head, query_map, key_map) for key_head in self.key_of]
        return {name: torch.stack([head[name] for head in heads]) for name in heads[0]}

    def _get_parameters(self, key_head: int, query_map: Tensor, key_map: Tensor) -> dict[str, Tensor]:
        """Return the parameters of `share_keys` for a query head that reads this key head."""
        size, most = self.head_dim, max(map(len, self.groups))
        number, group = next((at, group) for at, group in enumerate(self.groups) if key_head in group)
        start = group.index(key_head) * size
        to_query = query_map[number, start : start + size]
        readers = [self.key_of.index(member) for member in group]
        # the last latent can be smaller than the others: its first member is then repeated, with maps of zeros
        members = readers + readers[:1] * (most - len(group))
        parameters = {"query_map": to_query, "key_map": key_map[number].view(most, size, -1)}
        for name, value in (("key_head", key_head), ("members", members)):
            parameters[name] = torch.tensor(value, device=key_map.device)
        if self.mean is not None:
            latent = self.mean[list(group)].flatten() @ key_map[number, : size * len(group)]
            parameters["offset"] = self.mean[key_head] - latent @ to_query.mT
        if self.turn is not None:
            parameters |= {"frequency": self.turn.frequency, "partner": self.turn.partner}
        return parameters


def directions(queries: Gram, keys: Gram) -> tuple[Gram, Gram]:
    """Compute A = C_q^{−½}UΣ^½ and B = C_k^{−½}VΣ^½ from C_q^½ C_k^½ = UΣVᵀ, leading directions first.

    C_q is `queries` and C_k is `keys`. The first r columns of A and B are the maps to r dimensions, so the maps of all
    ranks are nested.
    """
    query_root, query_inverse = matrix_roots(queries)
    key_root, key_inverse = matrix_roots(keys)
    left, values, right = torch.linalg.svd(query_root @ key_root)
    half = values[..., None, :].sqrt()
    return query_inverse @ left * half, key_inverse @ right.mT * half


def matrix_roots(gram: Gram) -> tuple[Gram, Gram]:
    """Compute C^½ and its pseudo-inverse C^{−½} for Gram matrices; eigenvalues ≤ eps · size · maximum count as 0."""
    values, vectors = torch.linalg.eigh(gram)
    border = torch.finfo(gram.dtype).eps * gram.shape[-1] * values[..., -1:]
    nonzero = values > border  # strict: a zero matrix has border 0 and keeps no direction
    root = torch.where(nonzero, values, 0.0).sqrt()
    inverse = torch.where(nonzero, torch.where(nonzero, values, 1.0).rsqrt(), 0.0)
    return (vectors * root[..., None, :]) @ vectors.mT, (vectors * inverse[..., None, :]) @ vectors.mT


TOGETHER = "Compute the attention of all heads together with attnlens.kernels.attention.attend."
ALL = 65536  # more key heads than any site has: all of them share one latent
AFTER, BEFORE = 0, 1  # values of `rotation`: latents of keys after, or before, the rotation
ATTENTION, OUTPUT = 0, 1  # values of `metric`: weights of the pairs of queries and keys


class MapsFit:
    """Fit of the maps to r dimensions, A = C_q^{−½}U_rΣ_r^½ and B = C_k^{−½}V_rΣ_r^½, where C_q^½ C_k^½ = UΣVᵀ.

    C_q and C_k are those of `Grams` with the weights of `pairs_weighted`: half the head's own attention, half uniform
    over the visible keys. With the metric OUTPUT, these moments count half, and the moments with the weights of
    `output_weighted` count half. If queries and keys are independent, the logits are the best of rank r in the
    least-squares sense, up to terms that softmax ignores. A sink acts as a key at 0 with the remaining weight, because
    no map changes the logit of a sink. Query heads that read the same key head share maps; `group` key heads share a
    latent of r numbers per key head.
    """

    def __init__(self, rank: int, group: int = 1, rotation: int = AFTER, metric: int = ATTENTION) -> None:
        self.typed: dict[str, float] = {}
        self.rank, self.group = rank, group
        self.before, self.by_output = rotation == BEFORE, metric == OUTPUT
        self.turn: Turn | None = None  # the rotation; callers must set it if `rotation` is BEFORE
        self.output: Float[Tensor, "heads value_dim value_dim"] | None = None
        """G = E[g gᵀ], where g is the gradient of the loss with respect to a head's output; callers must set G if the
        metric is OUTPUT."""
        self.grams: Grams | None = None
        self.outputs: Grams | None = None  # moments weighted by the pairs' effect on the output

    def update(self, call: Call, by_attention: Matrix | None = None) -> None:
        """Add the moments of a batch; `by_attention` is `pairs_weighted(call)`, if already computed."""
        numbers = sorted(set(call.key_heads))
        indices = tuple(range(len(numbers)))  # if `group` does not divide their count, the last latent is smaller
        groups = tuple(indices[start : start + self.group] for start in range(0, len(indices), self.group))
        blank = partial(Grams, groups, tuple(map(numbers.index, call.key_heads)), self.turn if self.before else None)
        self.grams = self.grams or blank()
        self.grams.update(call, pairs_weighted(call) if by_attention is None else by_attention)
        if self.by_output:
            assert self.output is not None  # noqa: S101  # callers that fit by the output have set it
            self.outputs = self.outputs or blank()
            self.outputs.update(call, output_weighted(call, self.output))

    def plus(self, other: MapsFit) -> MapsFit:
        """Return a fit to the combined calibration texts of this fit and `other`."""
        both = copy(self)
        both.grams = self.grams.plus(other.grams) if self.grams and other.grams else None
        both.outputs = self.outputs.plus(other.outputs) if self.outputs and other.outputs else None
        return both

    def latents(self) -> Latents:
        """Compute the latents' maps; with the metric OUTPUT, the moments `grams` and `outputs` count half each."""
        assert self.grams is not None  # noqa: S101  # a fit has seen some text
        return (self.grams if self.outputs is None else self.grams.plus(self.outputs, equal=True)).solve()

    def solve(self) -> dict[str, Tensor]:
        """Return the parameters of the swapped heads; the maps are identities if r is at least head_dim."""
        latents = self.latents()
        return latents.maps([min(self.rank, latents.head_dim) * len(group) for group in latents.groups])


def _low_rank_dot(query: Query, key: Key, scale: float, *, query_map: Map, key_map: Tensor, **more: object) -> Low:
    """Return qA, kB and the scale; raise UsageError if heads share a latent or latents precede the rotation."""
    if "members" in more:
        problem = "The q and k of one head do not suffice: heads of this kernel share a latent or need token positions."
        raise UsageError(problem, TOGETHER)
    low_query, low_key = wide(query) @ query_map.to(wide(query)), wide(key) @ key_map.to(wide(key))
    return low_query.to(query), low_key.to(key), scale


def share_keys(
    call: Call,
    *,
    query_map: Float[Tensor, "heads head_dim size"],
    key_map: Tensor,
    members: Int[Tensor, "heads members"] | None = None,
    offset: Float[Tensor, "heads head_dim"] | None = None,
    frequency: Float[Tensor, "heads head_dim"] | None = None,
    partner: Int[Tensor, "heads head_dim"] | None = None,
    **_parameters: object,
) -> Call | None:
    """Return a call for the exponential kernel with keys computed from latents z; None if `members` is None.

    z = Σ_m k_m B_m over the key heads m of the latent; `members` identifies each key head by a query head that reads
    it. `key_map` is B, (heads, members, head_dim, size). The scores are ⟨q A, z⟩ or, if `frequency` is given, those of
    the rebuilt and rotated keys: ⟨q, R(j)(z Aᵀ + offset)⟩. In this case, raises the errors of `token_positions`.
    """
    if members is None:
        return None
    query, key = wide(call.query), wide(call.paired_key)
    turn = Turn(frequency[0], partner[0]) if frequency is not None and partner is not None else None
    if turn is not None:
        key = turn.rotate(key, token_positions(call)[1], back=True)
    rows = [tuple(row) for row in members.tolist()]
    distinct = list(dict.fromkeys(rows))  # each latent is computed once, with the map of the first head that reads it
    maps, which = key_map[[rows.index(row) for row in distinct]], [distinct.index(row) for row in rows]
    latent = torch.einsum("bugnd,ugdw->bunw", key[:, distinct], maps.to(key))[:, which]
    if turn is None or offset is None:
        query, key = query @ query_map.to(query), latent
    else:
        key = turn.rotate(latent @ query_map.to(latent).mT + offset.to(latent)[:, None], token_positions(call)[1])
    return replace(call, query=query.to(call.query), key=key.to(call.query), value=call.paired_value)


@kernel(
    "rank",
    formula="s⟨qA, kB⟩, A and B of r columns, from UΣVᵀ = C_q^½ C_k^½; for G key heads k stacks their keys, and A and "
    "B have r·G columns; before the rotation R keys are rebuilt: s⟨q, R(kBAᵀ + c)⟩",
    source="Chen et al. 2023 (Primal-Attention's claim); closed form of attnlens",
    **SCORE | {"symmetric": False},
    parameters=(
        KernelParameter("rank", "dimensions r kept per key head", int, low=1, high=65536),
        KernelParameter(
            "group",
            "number of key heads G that share one latent of r·G numbers, or all",
            int,
            default=1,
            low=1,
            high=ALL,
            words=(("all", ALL),),
            shown_at_default=False,
        ),
        choice("rotation", "compress keys after or before the rotation (RoPE)", ("after", "before"), default=AFTER),
        choice(
            "metric",
            "weights of pairs in the fit: attention; or attention and the effect on predictions, a²(v − ō)ᵀG(v − ō)",
            ("attention", "output"),
            default=ATTENTION,
        ),
    ),
    dot=_low_rank_dot,
    prepare=share_keys,
    fused="SDPA with a smaller head_dim",
    fit=MapsFit,
    needs_fit=True,
    trainable=("query_map", "key_map", "offset"),
)
def low_rank(score: Float[Tensor, "*scores"], **_maps: object) -> Float[Tensor, "*scores"]:
    """The exponential of the best rank-r approximation of the logits; for r ≥ head_dim, the model's own kernel."""
    return score


STEPS, ENOUGH = 500, 1e-9  # limits of the search for the nearest positive form: number of steps, relative change


def score_form(like: Float[Tensor, "heads size"]) -> Float[Tensor, "heads size size"]:
    """Return N₀ = [[0, I], [0, 0]] for each head, so that uᵀN₀u' = ⟨q, k'⟩ for u = [q; k] and u' = [q'; k']."""
    size = like.shape[-1] // 2
    return torch.diag(like.new_ones(size), size).expand(len(like), -1, -1)


def nearest_symmetric(form: Square, queries: Square, keys: Square) -> tuple[Square, Square, Square]:
    """Compute P, X and weights such that N = PXPᵀ is the symmetric N with the least tr (N−N₀)ᵀC_q(N−N₀)C_k.

    N₀ is `form`, C_q is `queries`, C_k is `keys`. Since PᵀC_qP = diag λ and PᵀC_kP = I − diag λ, the error is
    Σ_ab w_ab (X−X₀)²_ab, where w_ab = λ_a(1−λ_b) and X₀ = P⁻¹N₀P⁻ᵀ. X_ab = (w_ab X₀_ab + w_ba X₀_ba)/(w_ab+w_ba)
    minimises this error. X is 0 outside the span of the tokens. If C_q = C_k = C, N = C^{−½} sym(C^½ N₀ C^½) C^{−½}.
    The returned weights are (w_ab+w_ba)/2: the error of any other symmetric X' is that of X plus Σ weights (X'−X)².
    """
    root, inverse = matrix_roots(queries + keys)
    values, vectors = torch.linalg.eigh(inverse @ queries @ inverse)
    # share of C_q in C_q + C_k in each direction; rounding can move it outside [0, 1]
    share = values.clamp(0, 1)
    basis = inverse @ vectors
    back = vectors.mT @ root @ form @ root @ vectors
    weights = share[..., :, None] * (1 - share[..., None, :])
    both = weights + weights.mT
    # here and below, `tiny` turns 0/0 into 0
    mean = (weights * back + weights.mT * back.mT) / both.clamp_min(torch.finfo(both.dtype).tiny)
    # if both weights are 0, the error does not depend on X
    return basis, torch.where(both > 0, mean, (back + back.mT) / 2), both / 2


def nearest_positive(form: Square, weights: Square) -> Square:
    """Find the positive semidefinite X' that minimises Σ weights (X'−X)², where X is `form`; equal weights give [X]₊.

    The method is FISTA (Beck & Teboulle 2009) with the restarts of O'Donoghue & Candès (2015).
    """
    step = weights / weights.amax((-2, -1), keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    border = ENOUGH * form.norm(dim=(-2, -1))
    nearest = ahead = positive_part(form)
    pace = torch.ones_like(border)[..., None, None]
    for _ in range(STEPS):
        following = positive_part(ahead - step * (ahead - form))
        moved = following - nearest
        back = ((ahead - following) * moved).sum((-2, -1), keepdim=True) > 0  # momentum points uphill: restart
        quicker = torch.where(back, 1.0, (1 + (1 + 4 * pace.square()).sqrt()) / 2)
        ahead = following + torch.where(back, 0.0, (pace - 1) / quicker) * moved
        nearest, pace = following, quicker
        if bool((moved.norm(dim=(-2, -1)) <= border).all()):
            break
    return nearest


def factorise(basis: Square, form: Square) -> tuple[Float[Tensor, "heads size rank"], Float[Tensor, "heads rank"]]:
    """Compute F and signs with F diag(signs) Fᵀ = PXPᵀ, where P is `basis` and X is `form`.

    Columns are sorted by the magnitude of the eigenvalues of X, largest first; columns beyond a head's rank are 0.
    """
    values, vectors = torch.linalg.eigh(form)
    order = values.abs().argsort(-1, descending=True)
    values, vectors = values.gather(-1, order), vectors.gather(-1, order[..., None, :].expand_as(vectors))
    # eigenvalues up to `border` are rounding; the comparison is strict because the border of a zero form is 0
    border = torch.finfo(form.dtype).eps * form.shape[-1] * values[..., :1].abs()
    signs = values.sign() * (values.abs() > border)
    width = max(1, int(signs.abs().sum(-1).max()))
    factor = basis @ vectors * (values.abs().sqrt() * signs.abs())[..., None, :]
    return factor[..., :width].contiguous(), signs[..., :width].contiguous()


SYMMETRIC, POSITIVE, NO_KEY, NO_SKEW = range(4)  # values of `part`: the part of the logits that is kept
FITTED, ORACLE = 0, 1  # values of `how`: form fitted to calibration text, part of the evaluated text's own logits
TIES_OF = ("skewless", "mercer", "keyless", "skewless")  # the tie that extracts each part of a text's own logits


class NearestFit:
    """Fit of the symmetric or positive form N that minimises tr (N−N₀)ᵀC_q(N−N₀)C_k, and of the key gate N₀ᵀū.

    The logits are s⟨q_i, k_j⟩ = s u_iᵀN₀u_j, where u = [q; k] and N₀ = [[0, I], [0, 0]]. If ū is the mean of u over
    queries, the logits are the sum of s(u_i−ū)ᵀN₀(u_j−ū), the key gate s⟨q̄, k_j⟩, and query-only terms, which softmax
    ignores. C_q ∝ Σ_i (u_i−ū)(u_i−ū)ᵀ and C_k ∝ Σ_ij p_ij (u_j−m_i)(u_j−m_i)ᵀ, where m_i = Σ_j p_ij u_j and p is the
    head's own attention. If queries and keys are independent, the trace is proportional to the variance of the logits'
    error under p, and therefore, to second order, to the KL divergence. The part `no-key` needs only ū.
    """

    def __init__(self, part: int, how: int = FITTED) -> None:
        self.typed: dict[str, float] = {}
        self.part = part
        # per head: number of queries that see two keys or more, their Σ u and Σ uuᵀ, and Σ p_ij (u_j−m_i)(u_j−m_i)ᵀ
        self.count = self.total = self.second = self.seen = torch.zeros(())

    def update(self, call: Call) -> None:
        """Add the moments of a batch; raise UsageError for cross-attention, a key-value cache, a softcap or sinks."""
        _refuse_unsupported(call)
        u, weight = torch.cat((call.query.double(), call.paired_key.double()), -1), own_attention(call)
        rows = weight.sum(-1, keepdim=True)
        choosing = (rows > 0).to(u)
        self.count = self.count + choosing.sum((0, 2))
        self.total = self.total + (u * choosing).sum((0, 2))
        self.second = self.second + ((u * choosing).mT @ u).sum(0)
        apart = u - u.mean(-2, keepdim=True)  # changes only rounding; see `Grams.update`
        mean = weight @ apart
        self.seen = self.seen + ((apart * weight.sum(-2)[..., None]).mT @ apart - mean.mT @ mean).sum(0)

    def solve(self) -> dict[str, Tensor]:
        """Return the swapped heads' parameters: centre ū and, unless the part is `no-key`, also factor, signs and gate.

        N = F diag(signs) Fᵀ, where `factor` is F, (heads, 2·head_dim, r), and `signs` are ±1 (0 beyond the rank of a
        head).
        """
        count = self.count.clamp_min(1)  # 0/1, not 0/0, in a head whose queries see one key
        centre = self.total / count
        if self.part == NO_KEY:
            return {"centre": centre}
        queries = self.second / count[..., None] - centre[..., None] * centre[..., None, :]
        start = score_form(centre)
        basis, form, weights = nearest_symmetric(start, queries, self.seen / self.count.sum())
        if self.part == POSITIVE:
            form = nearest_positive(form, weights)
        factor, signs = factorise(basis, form)
        return {"centre": centre, "factor": factor, "signs": signs, "gate": (start.mT @ centre[..., None])[..., 0]}


def _refuse_unsupported(call: Call) -> None:
    """Raise UsageError if queries and keys belong to different tokens, or if query-only terms of the logits matter."""
    refuse_unpaired("nearest", call.query.shape[-2], call.key.shape[-2], cross=call.cross)
    if call.softcap is not None or call.sinks is not None:
        what = "caps its scores (softcap)" if call.softcap is not None else "has attention sinks"
        problem = f"`nearest` omits terms that depend only on the query, but they matter: an attention layer {what}."
        raise UsageError(problem, "Choose another kernel for this model.")


def nearest_call(
    call: Call, *, part: int, how: int, centre: Part = None, factor: Part = None, signs: Part = None, gate: Part = None
) -> Call:
    """Return a call with scores s(x_iᵀ diag(signs) x_j + g_i + g_j), where x = Fᵀ(u−ū) and g = ⟨gate, u−ū⟩.

    For the part `no-skew`, g_i is omitted, because softmax ignores g_i; for `no-key`, the scores are s⟨q_i−q̄, k_j⟩.
    Raises UsageError if nothing is fitted, and in the cases of `NearestFit.update`.
    """
    if centre is None:
        raise UsageError("Kernel `nearest` must be fitted before use.", "Fit the kernel with attnlens.swap_kernel.")
    _refuse_unsupported(call)
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


def _nearest_dot(query: Query, key: Key, scale: float, *, how: int, **_more: object) -> tuple[Query, Key, float]:
    """Return the arguments unchanged if `how` is ORACLE; raise UsageError for a fitted form, which mixes q and k."""
    if how == ORACLE:
        return query, key, scale
    problem = "`nearest` needs the query and key of both tokens for each score, but got one query and one key."
    raise UsageError(problem, TOGETHER)


@kernel(
    "nearest",
    formula="s(u_i−ū)ᵀN(u_j−ū) + gates, u = [q; k], N nearest to N₀, u_iᵀN₀u_j = ⟨q_i, k_j⟩",
    source="Schoenberg 1938; Wright & Gonzalez 2021; closed form of attnlens",
    **SCORE | {"symmetric": False},
    parameters=(
        choice(
            "part",
            "kept part of the logits: symmetric, positive definite (Mercer), or all but the key gate or the skew part",
            ("symmetric", "positive", "no-key", "no-skew"),
        ),
        choice(
            "how",
            "fitted: fit a form to calibration text; oracle: keep the part of the evaluated text's own logits, for "
            "analysis only (bidirectional heads)",
            ("fitted", "oracle"),
            default=FITTED,
        ),
    ),
    dot=_nearest_dot,
    prepare=nearest_call,
    fused="SDPA on [Fᵀu, gate]",
    fit=NearestFit,
    needs_fit=True,
    trainable=("factor", "gate"),
    caution="nearest needs the query and the key of every token, so the model must run without a key-value cache; "
    "the parts `symmetric` and `no-skew` give the same attention, because softmax cancels a gate on queries.",
    oracle=lambda part, how: TIES_OF[part] if how == ORACLE else None,
)
def nearest(score: Float[Tensor, "*scores"], **_form: object) -> Float[Tensor, "*scores"]:
    """Exponential kernel of the logits' symmetric or Mercer part, or of the logits without key gate or skew part."""
    return score
