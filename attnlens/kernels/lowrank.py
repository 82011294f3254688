"""Best logits of a given rank, by a closed form on calibration text."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from attnlens.errors import UsageError
from attnlens.kernels.fitting import output_weighted, pairs_weighted
from attnlens.kernels.latents import Grams, Latents, Turn, latents_of, shared_keys
from attnlens.kernels.spec import wide
from attnlens.registry import KernelParameter, kernel

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.records import Call

    Query = Float[Tensor, "batch heads queries head_dim"]
    Key = Float[Tensor, "batch heads keys head_dim"]
    Map = Float[Tensor, "heads head_dim rank"]
    Weight = Float[Tensor, "batch heads queries keys"]
    Low = tuple[Float[Tensor, "batch heads queries rank"], Float[Tensor, "batch heads keys rank"], float]

ALL = 65536
"""More key heads than any site has: all of them share one latent."""
AFTER, BEFORE = 0, 1
"""Whether latents are of rotated keys, or of keys before the rotation."""
ATTENTION, OUTPUT = 0, 1
"""What pairs of queries and keys are weighted by."""


class MapsFit:
    """the maps of queries and keys to r dimensions: C_q^½ C_k^½ = UΣVᵀ, A = C_q^{−½}U_rΣ_r^½, B = C_k^{−½}V_rΣ_r^½.

    C_q = Σ_i q_i q_iᵀ and C_k = Σ_ij w_ij (k_j − k̄_i)(k_j − k̄_i)ᵀ, w half the head's own attention, half even over
    the keys seen, k̄_i = Σ_j w_ij k_j: the least-squares best logits of rank r up to what softmax ignores (⟨q, k̄⟩
    among it), where queries and keys are independent. A sink is one more outcome, whose logit no map changes: as a key
    at 0, with the weight that is left of 1. Query heads of one key head share its maps; `group` key heads share one
    latent of r numbers for each of them.
    """

    def __init__(self, rank: int, group: int = 1, rotation: int = AFTER, metric: int = ATTENTION) -> None:
        """All stay as typed."""
        self.typed: dict[str, float] = {}
        self.rank, self.group = rank, group
        self.before, self.by_output = rotation == BEFORE, metric == OUTPUT
        self.turn: Turn | None = None
        """The rotation, which whoever fits keys before it must give."""
        self.output: Float[Tensor, "heads value_dim value_dim"] | None = None
        """G = E[g gᵀ] of the gradient g of each head's output, which whoever fits by the output must give."""
        self.grams: Grams | None = None
        self.outputs: Grams | None = None
        """The same moments, pairs weighted by what they do to the output."""

    def update(self, call: Call, by_attention: Weight | None = None) -> None:
        """Add this batch's C_q and C_k; `by_attention` are its `pairs_weighted`, where they are known."""
        blank = partial(Grams, *latents_of(call, self.group), turn=self.turn if self.before else None)
        self.grams = self.grams or blank()
        self.grams.update(call, pairs_weighted(call) if by_attention is None else by_attention)
        if self.by_output:
            assert self.output is not None  # noqa: S101  # whoever fits by the output has given it
            self.outputs = self.outputs or blank()
            self.outputs.update(call, output_weighted(call, self.output))

    def plus(self, other: MapsFit) -> MapsFit:
        """The fit to both texts."""
        found = copy(self)
        found.grams = _joined(self.grams, other.grams)
        found.outputs = _joined(self.outputs, other.outputs)
        return found

    def latents(self) -> Latents:
        """The directions; by the output metric half of the weight is the attention's, half the output's."""
        assert self.grams is not None  # noqa: S101  # a fit has seen some text
        return (self.grams if self.outputs is None else self.grams.plus(self.outputs.as_heavy_as(self.grams))).latents()

    def solve(self) -> dict[str, Tensor]:
        """The parameters of the swapped heads, r at most head_dim; the identity where nothing is cut."""
        latents = self.latents()
        return latents.maps([min(self.rank, latents.head_dim) * len(group) for group in latents.groups])


def _joined(one: Grams | None, other: Grams | None) -> Grams | None:
    return one if other is None or one is None else one.plus(other)


def _low(query: Query, key: Key, scale: float, *, query_map: Map, key_map: Tensor, **more: object) -> Low:
    if "members" in more:
        raise UsageError(
            "The keys of this rank kernel share a latent: it has no scores of one head alone.",
            "Compute attention of the whole call with attnlens.attention.attend.",
        )
    low_query, low_key = wide(query) @ query_map.to(wide(query)), wide(key) @ key_map.to(wide(key))
    return low_query.to(query), low_key.to(key), scale


def _shared(call: Call, *, members: Tensor | None = None, **maps: Any) -> Call | None:
    """The call of latents that key heads share, or that are of keys before the rotation; None for those of a head."""
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
    dot=_low,
    prepare=_shared,
    fused="SDPA with a smaller head_dim",
    fit=MapsFit,
    needs_fit=True,
    trainable=("query_map", "key_map", "offset"),
)
def low_rank(score: Float[Tensor, "*scores"], **_maps: object) -> Float[Tensor, "*scores"]:
    """The exponential kernel of the best logits of rank r; with r ≥ head_dim the model's own."""
    return score
