"""The kernel `primal`, Primal-Attention fitted in closed form: scores by kernel SVD, outputs by ridge regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlens.errors import TextError
from attnlens.kernels.lowrank import matrix_roots
from attnlens.kernels.registry import KERNELS, PAIR, KernelParameter, kernel, torch
from attnlens.kernels.spec import Kernel

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from attnlens.records import Call

    Side = Float[Tensor, "batch heads tokens features"]
    Output = Float[Tensor, "batch heads tokens value_dim"]
    Map = Float[Tensor, "heads features scores"]
    OutputMap = Float[Tensor, "heads both value_dim"]
    Offset = Float[Tensor, "heads value_dim"]
    PerHead = Float[Tensor, " heads"]
    Real = Bool[Tensor, "#batch #heads tokens"] | None

HELD_OUT = 4  # one of this many sequences is held out from the regression, to choose its ridge strength
STRENGTHS = (1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # ridge strengths tried, for scores of unit variance


@dataclass
class Moments:
    """Second moments, summed over tokens in float64, of z = [Fφ(q); Fφ(k); 1] and the original output y of a head."""

    gram: Float[Tensor, "heads size size"]  # Σ z zᵀ
    cross: Float[Tensor, "heads size value_dim"]  # Σ z yᵀ
    energy: PerHead  # Σ ‖y‖²
    sequences: int

    @classmethod
    def of(cls, z: Float[Tensor, "batch heads tokens size"], y: Output) -> Moments:
        """Compute the sums over the tokens of a batch."""
        return cls((z.mT @ z).sum(0), (z.mT @ y).sum(0), y.square().sum((0, 2, 3)), len(z))

    def __add__(self, other: Moments) -> Moments:
        sums = self.gram + other.gram, self.cross + other.cross, self.energy + other.energy
        return Moments(*sums, self.sequences + other.sequences)

    @property
    def tokens(self) -> PerHead:
        """Number of tokens per head."""
        return self.gram[..., -1, -1]

    def of_scores(self, maps: Float[Tensor, "heads size columns"]) -> Moments:
        """Return the moments with the scores mapsᵀz = [e; r; 1] in place of z."""
        return Moments(maps.mT @ self.gram @ maps, maps.mT @ self.cross, self.energy, self.sequences)


class PrimalFit:
    """Fit of W_e = C_k^½V and W_r = C_q^½U, where C_q^½ C_k^½ = UΣVᵀ (KSVD), and of W_c and b by ridge regression.

    C_q is the mean of Fφ(q)φ(q)ᵀFᵀ over the calibration tokens, and C_k is the mean of Fφ(k)φ(k)ᵀFᵀ. Up to a factor
    that W_c absorbs, the scores e and r are Σ times the leading left and right singular vectors of K = Φ_qΦ_kᵀ (Chen et
    al. 2023, Thm. 3.2, Eq. 6). With Λ = (nΣ)⁻¹, where n is the mean length of the sequences, the mean of the KSVD
    objective J over sequences is 0. W_c and b map [e; r] to the head's output under the model's own kernel; the ridge
    strength is chosen on a held-out part of the text.
    """

    def __init__(self, scores: int, samples: int) -> None:
        self.typed: dict[str, float] = {}
        self.scores, self.samples = scores, samples
        self.seen = 0
        self.parts: list[Moments | None] = [None, None]

    def update(self, call: Call) -> None:
        """Add the features of a batch, and the heads' outputs under the model's own kernel."""
        from attnlens.kernels.attention import attend
        from attnlens.kernels.attention.sums import features

        output = attend(call, Kernel(KERNELS["exponential"])).transpose(1, 2)
        self.observe(*features(call, self.samples), output)

    def observe(self, query: Side, key: Side, real: Real, output: Output) -> None:
        """Add a batch's features and head outputs at the tokens that `real` marks (None: at all tokens)."""
        z = torch.cat([query, key, torch.ones_like(query[..., :1])], -1).double()
        y = output.double()
        if real is not None:
            z, y = (x.masked_fill(~real[..., None], 0.0) for x in (z, y))
        held_out = (torch.arange(self.seen, self.seen + len(z), device=z.device) % HELD_OUT) == 1
        self.seen += len(z)
        for part, chosen in enumerate((~held_out, held_out)):
            if bool(chosen.any()):
                moments, before = Moments.of(z[chosen], y[chosen]), self.parts[part]
                self.parts[part] = moments if before is None else before + moments

    def solve(self) -> dict[str, Float[Tensor, "heads ..."]]:
        """Return the fitted parameters; raise TextError for fewer than two sequences, or fewer tokens than scores.

        The number of scores is at most the number of features; scores beyond the rank of K are zero. The entry `tokens`
        is the mean number of tokens per sequence.
        """
        train, held_out = self.parts
        if train is None or held_out is None:
            raise TextError("`primal` needs at least two calibration sequences.", "Give a longer --calibration text.")
        both = train + held_out
        if (tokens := int(both.tokens.min())) < self.scores:
            needed = f"`primal` with {self.scores} scores needs at least {self.scores} calibration tokens"
            raise TextError(f"{needed}, but got {tokens}.", "Give a longer --calibration text, or fewer scores.")
        query_map, key_map, log_multipliers = singular_maps(both, self.scores)
        one = query_map.new_ones(1, 1)
        pairs = zip(query_map, key_map, strict=True)
        maps = torch.stack([torch.block_diag(*pair, one) for pair in pairs])  # type: ignore[no-untyped-call]
        fitting, choosing, whole = (moments.of_scores(maps) for moments in (train, held_out, both))
        errors = [squared_loss(choosing, *regression(fitting, fitting.tokens * 0 + each)) for each in STRENGTHS]
        best = torch.tensor(STRENGTHS).to(errors[0])[torch.stack(errors).argmin(0)]
        output_map, offset = regression(whole, best)
        scores = {"query_map": query_map, "key_map": key_map, "log_multipliers": log_multipliers}
        return scores | {"output_map": output_map, "offset": offset, "tokens": both.tokens / both.sequences}


def singular_maps(moments: Moments, scores: int) -> tuple[Map, Map, Float[Tensor, "heads scores"]]:
    """Compute W_e, W_r and log Λ; columns of W_e and W_r beyond the rank of K are zero."""
    size = (moments.gram.shape[-1] - 1) // 2
    grams = moments.gram / moments.tokens[:, None, None]
    query_root, key_root = matrix_roots(grams[..., :size, :size])[0], matrix_roots(grams[..., size:-1, size:-1])[0]
    left, values, right = torch.linalg.svd(query_root @ key_root)
    left, values, right = left[..., :scores], values[..., :scores], right.mT[..., :scores]
    # strict: if K is zero, so are all singular values
    alive = values > torch.finfo(values.dtype).eps * size * values[..., :1]
    length = (moments.tokens / moments.sequences)[:, None]
    log_multipliers = -(length * torch.where(alive, values, 1.0)).log()
    return key_root @ right * alive[..., None, :], query_root @ left * alive[..., None, :], log_multipliers


def regression(moments: Moments, strength: PerHead) -> tuple[OutputMap, Offset]:
    """Find W_c and b that minimise Σ‖y − W_cᵀz − b‖²/tokens + strength·‖DW_c‖²; D = diag(standard deviations of z)."""
    count = moments.tokens[:, None, None]
    mean, mean_output = moments.gram[:, :-1, -1:] / count, moments.cross[:, -1:] / count
    spread = moments.gram[:, :-1, :-1] / count - mean @ mean.mT
    shared = moments.cross[:, :-1] / count - mean @ mean_output
    deviation = spread.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()[..., None]
    # Dividing a constant score by its deviation would amplify rounding, which is √eps · mean, because the deviation is
    # the root of a difference of squares.
    alive = deviation > torch.finfo(spread.dtype).eps ** 0.5 * mean.abs()
    scale = torch.where(alive, deviation, 1.0)
    values, vectors = torch.linalg.eigh(torch.where(alive & alive.mT, spread / (scale * scale.mT), 0.0))
    ridge = (values.clamp_min(0.0) + strength[:, None])[..., None]  # only rounding makes eigenvalues negative
    shrunk = (vectors.mT @ torch.where(alive, shared / scale, 0.0)) / ridge
    output_map = torch.where(alive, vectors @ shrunk / scale, 0.0)
    return output_map, (mean_output - mean.mT @ output_map)[:, 0]


def squared_loss(moments: Moments, output_map: OutputMap, offset: Offset) -> PerHead:
    """Compute Σ‖y − W_cᵀz − b‖² for every head."""
    whole = torch.cat([output_map, offset[:, None]], -2)
    quadratic = (whole * (moments.gram @ whole)).sum((-2, -1))
    return moments.energy - 2 * (whole * moments.cross).sum((-2, -1)) + quadratic


@kernel(
    "primal",
    formula="output = W_c[e; r] + b, no k(q, k); e = W_eᵀFφ(q), r = W_rᵀFφ(k), φ(x) = x/‖x‖",
    source="Chen et al. 2023, Eq. 6; closed form of attnlens",
    **PAIR | {"symmetric": False, "features": "finite", "form": "output"},
    parameters=(
        KernelParameter("scores", "number s of e-scores and of r-scores per token", int, low=1, high=65536),
        KernelParameter("samples", "rows of F, from evenly spaced tokens; 0: F = I", int, default=0, low=0, high=65536),
    ),
    fused="scores, O(tokens)",
    fit=PrimalFit,
    trainable=("query_map", "key_map", "log_multipliers", "output_map", "offset"),
    needs_fit=True,
)
def primal(
    query: Side, key: Side, *, query_map: Map, key_map: Map, output_map: OutputMap, offset: Offset, **_others: object
) -> Output:
    """Primal-Attention: outputs from KSVD scores of tokens (in causal heads, of running means), without values."""
    size = query_map.shape[-1]
    e, r = query @ query_map.to(query), key @ key_map.to(key)
    to_output = output_map.to(query)
    output: Tensor = e @ to_output[:, :size] + r @ to_output[:, size:] + offset.to(query)[:, None]
    return output
