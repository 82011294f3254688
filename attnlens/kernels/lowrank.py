"""Best logits of a given rank, by a closed form on calibration text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlens.kernels.fitting import pairs_weighted
from attnlens.kernels.spec import wide
from attnlens.registry import KernelParameter, kernel

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.records import Call

    Query = Float[Tensor, "batch heads queries head_dim"]
    Key = Float[Tensor, "batch heads keys head_dim"]
    Map = Float[Tensor, "heads head_dim rank"]
    Low = tuple[Float[Tensor, "batch heads queries rank"], Float[Tensor, "batch heads keys rank"], float]
    Gram = Float[Tensor, "heads size size"]


class MapsFit:
    """the maps of queries and keys to r dimensions: C_q^½ C_k^½ = UΣVᵀ, A = C_q^{−½}U_rΣ_r^½, B = C_k^{−½}V_rΣ_r^½.

    C_q = Σ_i q_i q_iᵀ and C_k = Σ_ij w_ij (k_j − k̄_i)(k_j − k̄_i)ᵀ, w half the head's own attention, half even over
    the keys seen, k̄_i = Σ_j w_ij k_j: the least-squares best logits of rank r up to what softmax ignores (⟨q, k̄⟩
    among it), where queries and keys are independent. A sink is one more outcome, whose logit no map changes: as a key
    at 0, with the weight that is left of 1.
    """

    def __init__(self, rank: int) -> None:
        """`rank` stays as typed."""
        import torch

        self.typed: dict[str, float] = {}
        self.rank = rank
        self.queries = self.keys = torch.zeros(())

    def update(self, call: Call) -> None:
        """Add this batch's C_q and C_k."""
        weight, query, key = pairs_weighted(call), call.query.double(), call.paired_key.double()
        if call.sinks is None:
            # changes nothing but rounding, in which keys with a large common part would lose their differences
            key = key - key.mean(-2, keepdim=True)
        chooses, mean = weight.sum(-1, keepdim=True) > 0, weight @ key
        self.queries = self.queries + ((query * chooses).mT @ query).sum(0)
        self.keys = self.keys + ((key * weight.sum(-2)[..., None]).mT @ key - mean.mT @ mean).sum(0)

    def solve(self) -> dict[str, Map]:
        """`query_map` and `key_map`, the rank at most head_dim; the identity where nothing is cut."""
        import torch

        if self.rank >= self.queries.shape[-1]:
            whole = torch.eye(self.queries.shape[-1]).to(self.queries).expand_as(self.queries)
            return {"query_map": whole, "key_map": whole}
        query_map, key_map = directions(self.queries, self.keys)
        return {"query_map": query_map[..., : self.rank], "key_map": key_map[..., : self.rank]}


def directions(
    queries: Float[Tensor, "heads head_dim head_dim"], keys: Float[Tensor, "heads head_dim head_dim"]
) -> tuple[Float[Tensor, "heads head_dim head_dim"], Float[Tensor, "heads head_dim head_dim"]]:
    """A = C_q^{−½}UΣ^½ and B = C_k^{−½}VΣ^½ of C_q^½ C_k^½ = UΣVᵀ, the leading directions first.

    The first r columns of both are the best maps of rank r, so that the logits of all ranks are nested.
    """
    import torch

    query_root, query_inverse = roots(queries)
    key_root, key_inverse = roots(keys)
    left, values, right = torch.linalg.svd(query_root @ key_root)
    half = values[..., None, :].sqrt()
    return query_inverse @ left * half, key_inverse @ right.mT * half


def roots(gram: Gram) -> tuple[Gram, Gram]:
    """C^½ and the pseudo-inverse C^{−½} of Gram matrices; eigenvalues up to eps · size · largest count as zero."""
    import torch

    values, vectors = torch.linalg.eigh(gram)
    border = torch.finfo(gram.dtype).eps * gram.shape[-1] * values[..., -1:]
    # Strict: a zero matrix has border 0 and keeps nothing.
    kept = values > border
    root = torch.where(kept, values, 0.0).sqrt()
    inverse = torch.where(kept, torch.where(kept, values, 1.0).rsqrt(), 0.0)
    return (vectors * root[..., None, :]) @ vectors.mT, (vectors * inverse[..., None, :]) @ vectors.mT


def _low(query: Query, key: Key, scale: float, rank: int, query_map: Map, key_map: Map) -> Low:
    low_query, low_key = wide(query) @ query_map.to(wide(query)), wide(key) @ key_map.to(wide(key))
    return low_query.to(query), low_key.to(key), scale


@kernel(
    "rank",
    formula="s⟨qA, kB⟩, A and B of r columns, from UΣVᵀ = C_q^½ C_k^½",
    source="Chen et al. 2023 (Primal-Attention's claim); closed form of attnlens",
    positive=True,
    symmetric=False,
    features="infinite",
    form="score",
    parameters=(KernelParameter("rank", "how many dimensions r are kept of head_dim", int, low=1, high=65536),),
    dot=_low,
    fused="SDPA with a smaller head_dim",
    fit=MapsFit,
    needs_fit=True,
    trainable=("query_map", "key_map"),
)
def low_rank(score: Float[Tensor, "*scores"], **_maps: object) -> Float[Tensor, "*scores"]:
    """The exponential kernel of the best logits of rank r; with r ≥ head_dim the model's own."""
    return score
