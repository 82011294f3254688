"""The kernel `rank`: best logits of a given rank, in closed form from calibration text, and latents of key heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from attnlens.errors import UsageError
from attnlens.kernels.registry import KernelParameter, kernel
from attnlens.kernels.spec import output_weighted, pairs_weighted, wide
from attnlens.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor

    from attnlens.records import Call

    Tokens = Float[Tensor, "batch heads tokens head_dim"]
    Gram = Float[Tensor, "*latents size size"]
    Weight = Float[Tensor, "batch heads queries keys"]

    Query = Float[Tensor, "batch heads queries head_dim"]
    Key = Float[Tensor, "batch heads keys head_dim"]
    Map = Float[Tensor, "heads head_dim rank"]
    Low = tuple[Float[Tensor, "batch heads queries rank"], Float[Tensor, "batch heads keys rank"], float]
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class Turn:
    """RoPE as one frequency and one partner of each coordinate: x_c(p) = x_c cos ω_c p + x_π(c) sin ω_c p.

    Su et al. 2021 (RoFormer), Eq. 16. In a pair that rotates by θ, the first coordinate has ω = −θ, the second θ.
    """

    frequency: Float[Tensor, " head_dim"]  # ω; 0 for an unrotated coordinate
    partner: Int[Tensor, " head_dim"]  # π, the coordinate that each rotates with; itself if unrotated

    def turned(self, x: Tokens, places: Int[Tensor, "#batch tokens"], *, back: bool = False) -> Tokens:
        """Rotate x from position 0 to its positions, or `back` to position 0."""
        angles = places[:, None, :, None].double() * self.frequency.double().to(x.device)
        sine = -angles.sin() if back else angles.sin()
        found: Tensor = x * angles.cos().to(x) + x[..., self.partner.to(x.device)] * sine.to(x)
        return found


def shared_keys(
    call: Call,
    query_map: Float[Tensor, "heads head_dim size"],
    key_map: Float[Tensor, "heads members head_dim size"],
    members: Int[Tensor, "heads members"],
    offset: Float[Tensor, "heads head_dim"] | None = None,
    frequency: Float[Tensor, "heads head_dim"] | None = None,
    partner: Int[Tensor, "heads head_dim"] | None = None,
) -> Call:
    """Return the call whose exponential kernel is the latents': ⟨q A, z⟩, or ⟨q, k̂⟩ with k̂ = R(j)(z Aᵀ + offset).

    z = Σ_m k_m B_m over the latent's `members`, each identified by a query head that reads it. If the latent is of keys
    before the rotation (`frequency` is given), the keys are reconstructed from it and rotated to their positions.
    """
    query, key = wide(call.query), wide(call.paired_key)
    turn = Turn(frequency[0], partner[0]) if frequency is not None and partner is not None else None
    if turn is not None:
        key = turn.turned(key, placed(call)[1], back=True)
    rows = members.tolist()
    distinct = [row for number, row in enumerate(rows) if row not in rows[:number]]
    leaders, which = [rows.index(row) for row in distinct], [distinct.index(row) for row in rows]
    stacked = key[:, distinct]
    latent = torch.einsum("bugnd,ugdw->bunw", stacked, key_map[leaders].to(key))[:, which]
    if turn is None or offset is None:
        query, key = query @ query_map.to(query), latent
    else:
        key = turn.turned(latent @ query_map.to(latent).mT + offset.to(latent)[:, None], placed(call)[1])
    return replace(call, query=query.to(call.query), key=key.to(call.query), value=call.paired_value)


def placed(call: Call) -> tuple[Int[Tensor, "#batch queries"], Int[Tensor, "#batch keys"]]:
    """Return the positions of queries and keys; with a key-value cache, keys before the first query are consecutive.

    Raises UsageError if the model does not pass positions to its attention.
    """
    own = call.places
    if own is None or own.shape[-1] != call.query.shape[2] or call.cross:
        raise UsageError(
            "The model does not tell its attention the positions of the tokens, which keys are turned back by.",
            "Leave out rotation=before.",
        )
    more = call.key.shape[2] - own.shape[-1]
    if more <= 0:
        return own, own[..., : call.key.shape[2]]
    before = own[..., :1] + torch.arange(-more, 0, device=own.device)
    return own, torch.cat((before.clamp_min(0), own), -1)


@dataclass
class Grams:
    """Second moments of queries and keys over the calibration text, for latents shared by key heads.

    C_q = Σ_i u_i q_i q_iᵀ of each key head, u_i the sum of its weights, and C_k = Σ_ij w_ij (k_j − k̄_i)(k_j − k̄_i)ᵀ
    of the stacked keys of a latent, k̄_i = Σ_j w_ij k_j / Σ_j w_ij, summed over the query heads that read them. Before
    the rotation one mean serves all queries, since softmax ignores a row's common part only after the rotation.
    """

    groups: tuple[tuple[int, ...], ...]
    """Key heads of each latent, as indices among those swapped."""
    key_of: tuple[int, ...]
    """Key head of each swapped query head, as index among those swapped."""
    turn: Turn | None = None
    """Rotation by which keys are first brought back to position 0; None if they are used as they are."""
    queries: Tensor = field(default_factory=lambda: torch.zeros(()))
    """C_q, (kv_heads, head_dim, head_dim)."""
    keys: list[Tensor] = field(default_factory=list)
    """C_k of each latent, (size, size); before the rotation Σ_j w_j k_j k_jᵀ."""
    sums: list[Tensor] = field(default_factory=list)
    """Σ_j w_j k_j of each latent, before the rotation."""
    totals: list[Tensor] = field(default_factory=list)
    """Σ_j w_j of each latent."""

    def update(self, call: Call, weight: Weight) -> None:
        """Add the pairs of a batch, each with its weight."""
        query, key = call.query.double(), call.paired_key.double()
        if self.turn is not None:
            places = placed(call)
            query, key = (self.turn.turned(x, at, back=True) for x, at in zip((query, key), places, strict=True))
        elif call.sinks is None:
            # affects only rounding, in which keys with a large common part would lose their differences
            key = key - key.mean(-2, keepdim=True)
        rows = weight.sum(-1, keepdim=True)
        # a sink is one more outcome: each query that has a choice counts equally
        rows = rows if call.sinks is None else (rows > 0).to(rows)
        each = ((query * rows).mT @ query).sum(0)
        self.queries = self.queries + self._summed(each)
        found = [self._of_latent(group, key, weight, rows, sinks=call.sinks is not None) for group in self.groups]
        for store, parts in zip((self.keys, self.sums, self.totals), zip(*found, strict=True), strict=True):
            store[:] = [a + b for a, b in zip(store, parts, strict=True)] if store else list(parts)

    def _summed(self, each: Tensor) -> Tensor:
        """Sum over the query heads of each key head."""
        places = torch.tensor(self.key_of, device=each.device)
        return each.new_zeros(len(set(self.key_of)), *each.shape[1:]).index_add(0, places, each)

    def _of_latent(
        self, group: tuple[int, ...], key: Tensor, weight: Weight, rows: Tensor, *, sinks: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute C_k, Σ w k and Σ w of one latent."""
        heads = [head for head, own in enumerate(self.key_of) if own in group]
        stack = torch.cat([key[:, self.key_of.index(own)] for own in group], -1)
        by_key = weight[:, heads].sum((1, 2))[..., None]
        second = ((stack * by_key).mT @ stack).sum(0)
        if self.turn is None:
            mean = weight[:, heads] @ stack[:, None]
            # with a sink, the rest of 1 is the weight of a key at 0; else a row's weights are the whole
            whole = 1.0 if sinks else rows[:, heads].clamp_min(torch.finfo(mean.dtype).tiny)
            second = second - ((mean / whole).mT @ mean).sum((0, 1))
        return second, (stack * by_key).sum((0, 1)), by_key.sum()

    def as_heavy_as(self, other: Grams) -> Grams:
        """Return the same moments, with weights scaled to the sum of the other's."""
        factor = sum(map(float, other.totals)) / max(sum(map(float, self.totals)), 1e-300)  # avoids division by 0
        keys, sums, totals = ([factor * one for one in parts] for parts in (self.keys, self.sums, self.totals))
        return replace(self, queries=factor * self.queries, keys=keys, sums=sums, totals=totals)

    def plus(self, other: Grams) -> Grams:
        """Return the moments of both texts together."""
        keys, sums, totals = (
            [a + b for a, b in zip(mine, theirs, strict=True)]
            for mine, theirs in ((self.keys, other.keys), (self.sums, other.sums), (self.totals, other.totals))
        )
        return replace(self, queries=self.queries + other.queries, keys=keys, sums=sums, totals=totals)

    def latents(self) -> Latents:
        """Compute the directions of every latent, the leading ones first: A and B of C_q^½ C_k^½ = UΣVᵀ."""
        from torch.nn.functional import pad

        size, maps = self.queries.shape[-1], []
        means = self.queries.new_zeros(len(self.queries), size) if self.turn is not None else None
        wide_ = size * max(map(len, self.groups))
        for group, keys, sums, total in zip(self.groups, self.keys, self.sums, self.totals, strict=True):
            if means is not None:
                mean = sums / total.clamp_min(torch.finfo(sums.dtype).tiny)
                keys = keys - torch.outer(mean, sums)
                means[list(group)] = mean.view(len(group), size)
            blocks: Tensor = torch.block_diag(*self.queries[list(group)])  # type: ignore[no-untyped-call]
            both = directions(blocks, keys)
            maps.append([pad(one, (0, wide_ - one.shape[-1], 0, wide_ - one.shape[-2])) for one in both])
        query_map, key_map = (torch.stack(side) for side in zip(*maps, strict=True))
        return Latents(self.groups, self.key_of, query_map, key_map, means, self.turn)


def copies(fitted: Mapping[str, Tensor]) -> dict[str, Int[Tensor, " heads"]]:
    """Return, by parameter name, which query heads hold copies of one map (equal numbers); empty if no maps are shared.

    B is shared by all readers of a latent, A and the offset by those of a key head.
    """
    if "key_head" not in fitted:
        return {}
    latent = torch.unique(fitted["members"], dim=0, return_inverse=True)[1]
    own = torch.unique(fitted["key_head"], return_inverse=True)[1]
    return {"key_map": latent, "query_map": own, "offset": own}


def latents_of(call: Call, group: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the key heads of each latent, and the key head of each query head, as indices among those of the call.

    If `group` does not divide their number, the last latent is smaller.
    """
    numbers = sorted(set(call.key_heads))
    key_of = tuple(numbers.index(number) for number in call.key_heads)
    all_heads = tuple(range(len(numbers)))
    return tuple(all_heads[start : start + group] for start in range(0, len(all_heads), group)), key_of


@dataclass(frozen=True)
class Latents:
    """The directions of one site's latents, the leading ones first; query heads of one key head share them.

    Otherwise each query head would need a key of its own, and a cached token would grow instead of shrink.
    """

    groups: tuple[tuple[int, ...], ...]
    """Key heads of each latent, as indices among those swapped."""
    key_of: tuple[int, ...]
    """Key head of each swapped query head, as index among those swapped."""
    query_map: Float[Tensor, "latents size size"]
    """A = C_q^{−½}UΣ^½, C_q the block diagonal of those of the latent's key heads; zeros beyond a smaller latent."""
    key_map: Float[Tensor, "latents size size"]
    """B = C_k^{−½}VΣ^½: z = Σ_g k_g B_g, and ⟨q, k_g⟩ becomes ⟨q A_g, z⟩."""
    mean: Float[Tensor, "kv_heads head_dim"] | None = None
    """k̄ before the rotation; None for latents of rotated keys."""
    turn: Turn | None = None
    """Rotation applied to the reconstructed keys; None for latents of rotated keys."""

    @property
    def head_dim(self) -> int:
        """Coordinates of a key."""
        return self.query_map.shape[-1] // max(map(len, self.groups))

    @property
    def sizes(self) -> list[int]:
        """Size of each latent before it is cut: the numbers of its keys."""
        return [self.head_dim * len(group) for group in self.groups]

    def maps(self, ranks: Sequence[int]) -> dict[str, Tensor]:
        """Return the fitted parameters of the swapped query heads if each latent keeps that many numbers.

        They are as wide as the largest latent, with zeros beyond a smaller one; the identity if a latent keeps all.
        """
        width, device = max(1, *ranks), self.key_map.device
        kept = torch.arange(self.key_map.shape[-1], device=device) < torch.tensor(ranks, device=device)[:, None]
        whole = torch.tensor([rank >= size for rank, size in zip(ranks, self.sizes, strict=True)], device=device)
        same = torch.eye(self.key_map.shape[-1]).to(self.key_map)
        cut = [
            torch.where(whole[:, None, None], same, side * kept[:, None])[..., :width]
            for side in (self.query_map, self.key_map)
        ]
        # one map per query head if no other reads its latent: no sharing has to be preserved
        if self.turn is None and len(self.groups) == len(self.key_of):
            order = [self.groups.index((own,)) for own in self.key_of]
            return dict(zip(("query_map", "key_map"), (side[order] for side in cut), strict=True))
        return self._shared(*cut)

    def _shared(self, query_map: Tensor, key_map: Tensor) -> dict[str, Tensor]:
        """Return the parameters of `shared_keys`, head by head."""
        size, most = self.head_dim, max(map(len, self.groups))
        names = "query_map", "key_map", "members", "key_head", "offset"
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        for own in self.key_of:
            number = next(at for at, group in enumerate(self.groups) if own in group)
            group = self.groups[number]
            slot = slice(group.index(own) * size, (group.index(own) + 1) * size)
            found["query_map"].append(query_map[number, slot])
            found["key_map"].append(key_map[number].view(most, size, -1))
            firsts = [self.key_of.index(one) for one in group]
            found["key_head"].append(torch.tensor(own, device=key_map.device))
            found["members"].append(torch.tensor(firsts + firsts[:1] * (most - len(group)), device=key_map.device))
            if self.mean is not None:
                latent = self.mean[list(group)].flatten() @ key_map[number, : size * len(group)]
                found["offset"].append(self.mean[own] - latent @ query_map[number, slot].mT)
        fitted = {name: torch.stack(parts) for name, parts in found.items() if parts}
        if self.turn is not None:
            for name in ("frequency", "partner"):
                part: Tensor = getattr(self.turn, name)
                fitted[name] = part.expand(len(self.key_of), -1).clone()
        return fitted


def directions(
    queries: Float[Tensor, "*latents size size"], keys: Float[Tensor, "*latents size size"]
) -> tuple[Float[Tensor, "*latents size size"], Float[Tensor, "*latents size size"]]:
    """Compute A = C_q^{−½}UΣ^½ and B = C_k^{−½}VΣ^½ of C_q^½ C_k^½ = UΣVᵀ, the leading directions first.

    The first r columns of both are the best maps of rank r, so that the logits of all ranks are nested.
    """
    query_root, query_inverse = roots(queries)
    key_root, key_inverse = roots(keys)
    left, values, right = torch.linalg.svd(query_root @ key_root)
    half = values[..., None, :].sqrt()
    return query_inverse @ left * half, key_inverse @ right.mT * half


def roots(gram: Gram) -> tuple[Gram, Gram]:
    """Compute C^½ and the pseudo-inverse C^{−½} of Gram matrices; eigenvalues up to eps · size · largest count as 0."""
    values, vectors = torch.linalg.eigh(gram)
    border = torch.finfo(gram.dtype).eps * gram.shape[-1] * values[..., -1:]
    # Strict: a zero matrix has border 0 and keeps no direction.
    kept = values > border
    root = torch.where(kept, values, 0.0).sqrt()
    inverse = torch.where(kept, torch.where(kept, values, 1.0).rsqrt(), 0.0)
    return (vectors * root[..., None, :]) @ vectors.mT, (vectors * inverse[..., None, :]) @ vectors.mT


ALL = 65536
"""More key heads than any site has: all of them share one latent."""
AFTER, BEFORE = 0, 1
"""Values of `rotation`: latents of keys after, or before, the rotation."""
ATTENTION, OUTPUT = 0, 1
"""Values of `metric`: weights of the pairs of queries and keys."""


class MapsFit:
    """the maps of queries and keys to r dimensions: C_q^½ C_k^½ = UΣVᵀ, A = C_q^{−½}U_rΣ_r^½, B = C_k^{−½}V_rΣ_r^½.

    C_q = Σ_i q_i q_iᵀ and C_k = Σ_ij w_ij (k_j − k̄_i)(k_j − k̄_i)ᵀ, w half the head's own attention, half uniform over
    the keys seen, k̄_i = Σ_j w_ij k_j: the least-squares best logits of rank r, up to terms that softmax ignores (such
    as ⟨q, k̄⟩), if queries and keys are independent. A sink is one more outcome, whose logit no map changes: it acts as
    a key at 0 with the rest of the weight. Query heads of one key head share its maps; `group` key heads share one
    latent, with r numbers for each of them.
    """

    def __init__(self, rank: int, group: int = 1, rotation: int = AFTER, metric: int = ATTENTION) -> None:
        self.typed: dict[str, float] = {}
        self.rank, self.group = rank, group
        self.before, self.by_output = rotation == BEFORE, metric == OUTPUT
        self.turn: Turn | None = None
        """The rotation; callers that fit keys before it must set it."""
        self.output: Float[Tensor, "heads value_dim value_dim"] | None = None
        """G = E[g gᵀ] of the gradient g of each head's output; callers that fit by the output must set it."""
        self.grams: Grams | None = None
        self.outputs: Grams | None = None
        """The same moments, with pairs weighted by their effect on the output."""

    def update(self, call: Call, by_attention: Weight | None = None) -> None:
        """Add this batch's C_q and C_k; `by_attention` is its `pairs_weighted`, if already computed."""
        blank = partial(Grams, *latents_of(call, self.group), turn=self.turn if self.before else None)
        self.grams = self.grams or blank()
        self.grams.update(call, pairs_weighted(call) if by_attention is None else by_attention)
        if self.by_output:
            assert self.output is not None  # noqa: S101  # callers that fit by the output have set it
            self.outputs = self.outputs or blank()
            self.outputs.update(call, output_weighted(call, self.output))

    def plus(self, other: MapsFit) -> MapsFit:
        """Return the fit to both texts."""
        found = copy(self)
        found.grams = _join(self.grams, other.grams)
        found.outputs = _join(self.outputs, other.outputs)
        return found

    def latents(self) -> Latents:
        """Return the directions; with the output metric half of the weight is the attention's, half the output's."""
        assert self.grams is not None  # noqa: S101  # a fit has seen some text
        return (self.grams if self.outputs is None else self.grams.plus(self.outputs.as_heavy_as(self.grams))).latents()

    def solve(self) -> dict[str, Tensor]:
        """Return the parameters of the swapped heads, r at most head_dim; the identity if nothing is cut."""
        latents = self.latents()
        return latents.maps([min(self.rank, latents.head_dim) * len(group) for group in latents.groups])


def _join(one: Grams | None, other: Grams | None) -> Grams | None:
    return one if other is None or one is None else one.plus(other)


def _low_rank_dot(query: Query, key: Key, scale: float, *, query_map: Map, key_map: Tensor, **more: object) -> Low:
    if "members" in more:
        raise UsageError(
            "The keys of this rank kernel share a latent: it has no scores of one head alone.",
            "Compute attention of the whole call with attnlens.kernels.attention.attend.",
        )
    low_query, low_key = wide(query) @ query_map.to(wide(query)), wide(key) @ key_map.to(wide(key))
    return low_query.to(query), low_key.to(key), scale


def _shared(call: Call, *, members: Tensor | None = None, **maps: Any) -> Call | None:
    """Return the call of latents shared by key heads or of keys before the rotation; None for a head's own latents."""
    names = ("query_map", "key_map", "offset", "frequency", "partner")
    return None if members is None else shared_keys(call, members=members, **{n: maps[n] for n in names if n in maps})


@kernel(
    "rank",
    formula="s⟨qA, kB⟩, A and B of r columns, from UΣVᵀ = C_q^½ C_k^½; of G key heads k is their stacked keys, and "
    "A and B have r·G columns; before the rotation R the keys are made again: s⟨q, R(kBAᵀ + c)⟩",
    source="Chen et al. 2023 (Primal-Attention's claim); closed form of attnlens",
    positive=True,
    symmetric=False,
    features="infinite",
    form="score",
    parameters=(
        KernelParameter("rank", "how many dimensions r are kept of head_dim", int, low=1, high=65536),
        KernelParameter(
            "group",
            "how many key heads G share one latent of r·G numbers, or all",
            int,
            default=1,
            low=1,
            high=ALL,
            words=(("all", ALL),),
            told=False,
        ),
        KernelParameter(
            "rotation",
            "whether latents are of keys after their rotation or before it",
            int,
            default=AFTER,
            words=(("after", AFTER), ("before", BEFORE)),
            told=False,
        ),
        KernelParameter(
            "metric",
            "pairs weighted by attention, or half by what they do to predictions, a²(v − ō)ᵀG(v − ō)",
            int,
            default=ATTENTION,
            words=(("attention", ATTENTION), ("output", OUTPUT)),
            told=False,
        ),
    ),
    dot=_low_rank_dot,
    prepare=_shared,
    fused="SDPA with a smaller head_dim",
    fit=MapsFit,
    needs_fit=True,
    trainable=("query_map", "key_map", "offset"),
)
def low_rank(score: Float[Tensor, "*scores"], **_maps: object) -> Float[Tensor, "*scores"]:
    """The exponential kernel of the best logits of rank r; with r ≥ head_dim the model's own."""
    return score
