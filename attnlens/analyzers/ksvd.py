"""Kernel SVD of a head's attention: singular values, residual, objective J, and alignment of the values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from attnlens.analyzers.registry import MeasureInfo, Readings, analyzer, linalg
from attnlens.lazy import LazyModule
from attnlens.records import QueryKey

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.maths import ksvd
    from attnlens.maths.ksvd import Dual
else:
    ksvd = LazyModule("attnlens.maths.ksvd")

SHARE = 0.9  # share of a kernel's squared norm in its s leading components; defines s, the rank90 of a head
NO_KERNEL = "all queries or all keys are zero"
ONE_KEY = "all queries are zero, or all keys have one direction"
NO_ATTENTION = "no query sees a key, or there are more than 2,048² pairs (not all σ are computed): reduce --length"


share = partial(MeasureInfo, low=0, high=1, self_only=False)
# The cosine kernel is not identified: adding c to every key adds s·⟨q, c⟩ to a query's scores, which softmax ignores,
# but changes every cosine. The measures of this kernel have no Gaussian null and, except for ksvd.asymmetry, have
# values for cross-attention.
cosine_measure = partial(
    MeasureInfo, low=0, self_only=False, identified="nowhere", missing=NO_KERNEL, sized_by="head_dim"
)


def _curves(matrix: str, words: str, symbol: str) -> list[MeasureInfo]:
    """Build the MeasureInfos of the cumulative shares of a matrix's singular values and of their squares."""
    of_attention = symbol.startswith("P")
    return [
        share(
            f"ksvd.{matrix}_{name}",
            f"share of the k largest {values} in the sum, for {words}{'' if of_attention else ' (not identified)'}",
            f"{formula} of {symbol}",
            curve=True,
            identified="everywhere" if of_attention else "nowhere",
            use="The earlier it approaches 1, the fewer components the matrix needs.",
        )
        for name, values, formula in (
            ("spectrum", "singular values", "(σ₁ + … + σₖ)/Σσ"),
            ("energy", "squared singular values", "(σ₁² + … + σₖ²)/Σσ²"),
        )
    ]


FIGURE = "Chen et al. 2023, Figure 1"
COSINE = "the cosine kernel of all pairs, K_ij = cos(q_i, k_j)"
ATTENTION, ATTENTION_ENERGY = _curves("attention", "the attention matrix P", "P")
TOKENS = (
    share(
        "ksvd.first_share",
        "share of P's largest singular value in the sum of all singular values",
        "σ₁/Σσ of the attention matrix P",
        scale=("many components of attention matter", "one component explains the attention"),
        missing=NO_ATTENTION,
        headline=True,
        ends="both",
        use="Near 1, attention is nearly of rank one, and Primal-Attention with few components can replace it.",
        paper=f"{FIGURE}, index 0",
    ),
    cosine_measure(
        "ksvd.rank90",
        "number of components that contain 90 % of the cosine kernel's squared norm; at most head_dim (not identified)",
        "s: least k with Σ_{l≤k}σ² ≥ 0.9·Σσ², σ of K_ij = cos(q_i, k_j)",
        low=1,
        use="A first guess for s of a primal kernel: swap-kernel --kernel primal:8 measures the loss at s = 8.",
    ),
    cosine_measure(
        "ksvd.centred_rank90",
        "number of components that contain 90 % of the squared norm of the cosine kernel minus its row means (not "
        "identified)",
        "s: least k with Σ_{l≤k}σ² ≥ 0.9·Σσ², σ of K(I − 11ᵀ/n)",
        missing=ONE_KEY,
        low=1,
        use="Use it if ksvd.rank90 is 1, because one near-constant direction then dominates all others.",
    ),
    cosine_measure(
        "ksvd.value_alignment",
        "share of the values' variance in the s leading right singular directions of the cosine kernel minus its "
        "row means, s = centred_rank90; s/(n − 1) is expected by chance for n keys (not identified)",
        "‖H_rᵀV‖²/‖V‖², V centred over tokens, H_r of K(I − 11ᵀ/n): both K and V are centred",
        missing=f"the values are unknown or all equal; {ONE_KEY}",
        high=1,
        use="Above s/(n − 1), the values align with the kernel's singular directions, as the paper assumes.",
        paper="Chen et al. 2023, where values replace the right singular vectors",
    ),
    cosine_measure(
        "ksvd.asymmetry",
        "mean angle in radians between K's s leading left and right singular spaces, s = rank90; 0 for a symmetric K "
        "(not identified)",
        "mean of arccos σ(H_eᵀH_r)",
        high=1.5707963267948968,  # π/2, rounded up
        self_only=True,
        use="At 0, a symmetric kernel SVD would suffice; at large values, the paper's asymmetric SVD is needed.",
    ),
    cosine_measure(
        "ksvd.residual",
        "relative residual of the computed kernel SVD; if above rounding, the components are wrong (not identified)",
        "√(‖KH_r − H_eΣ‖² + ‖KᵀH_e − H_rΣ‖²)/(√2‖σ‖)",
        use="A check: if it is far above rounding, the head's other ksvd measures are invalid.",
        paper="Chen et al. 2023, Theorem 3.2",
        sized_by="rounding",
    ),
    cosine_measure(
        "ksvd.objective",
        "|J|, the paper's objective at the primal solution, divided by Σσ; 0 up to rounding (not identified)",
        "|½Σe_iᵀΛe_i + ½Σr_jᵀΛr_j − tr W_eᵀW_r|/Σσ",
        use="A check: if far above rounding, the primal problem is unsolved, and other ksvd measures are invalid.",
        paper="Chen et al. 2023, Eq. 6",
        sized_by="rounding",
    ),
    replace(ATTENTION, headline=True, by_depth=True, paper=FIGURE),
    ATTENTION_ENERGY,
    *_curves("centred_attention", "P minus its row means", "P(I − 11ᵀ/n)"),
    *_curves("cosine", COSINE, "K"),
    *_curves("centred_cosine", f"{COSINE}, minus its row means", "K(I − 11ᵀ/n)"),
)


def compute_rank90(query_key: QueryKey) -> Readings:
    """Compute only `ksvd.rank90`."""
    queries, keys = (ksvd.cosine_features(side) for side in (query_key.query, query_key.paired_key))
    return {"ksvd.rank90": linalg.rank_at(ksvd.dual(queries, keys, s=keys.shape[-1]).values, SHARE)}


@analyzer("ksvd", source="tokens", measures=TOKENS, by_default=False, brief=("ksvd.rank90", compute_rank90))
def measure_tokens(query_key: QueryKey) -> Readings:
    """How close is a head's attention to a low-rank kernel SVD (Chen et al. 2023)?

    P contains a window's attention weights, and K the cosines of all its queries and keys, as in the paper: K is a
    model of attention, not attention itself. The SVD is K = H_e Σ H_rᵀ; W_e, W_r and Λ are the primal weights and
    multipliers; e_i and r_j are projections of queries and keys. K(I − 11ᵀ/n) is K minus its row means.
    """
    attention = linalg.attention_singular_values(query_key)
    beyond = linalg.attention_singular_values(query_key, without_row_sums=True)
    queries, keys = (ksvd.cosine_features(side) for side in (query_key.query, query_key.paired_key))
    solution = ksvd.dual(queries, keys, s=keys.shape[-1])
    centred = ksvd.dual(queries, ksvd.centre_rows(keys), s=keys.shape[-1])
    rank = linalg.rank_at(solution.values, SHARE)
    asymmetry = rank * float("nan")  # missing
    if query_key.site.part != "cross":  # both singular spaces must be of the same tokens
        asymmetry = ksvd.mean_angle(solution.left, solution.right, rank.nan_to_num(0.0))
    primal = ksvd.primal(solution, queries, keys)
    e, r = primal.e_scores(queries), primal.r_scores(keys)
    objective = ksvd.objective(e, r, primal.query_weight, primal.key_weight, primal.multipliers)
    return {
        "ksvd.first_share": attention[..., 0] / attention.sum(-1),
        "ksvd.rank90": rank,
        **_alignment(query_key, centred),
        "ksvd.asymmetry": asymmetry,
        "ksvd.residual": ksvd.residual(solution, queries, keys),
        "ksvd.objective": objective.abs() / solution.values.sum(-1),
        **_cumulative_curves("attention", attention),
        **_cumulative_curves("centred_attention", beyond),
        **_cumulative_curves("cosine", solution.values),
        **_cumulative_curves("centred_cosine", centred.values),
    }


def _alignment(query_key: QueryKey, centred: Dual) -> Readings:
    """Compute the rank90 s of K(I − 11ᵀ/n), and the share of the values' variance in its s leading right directions.

    The share is NaN if the values are unknown or s is NaN. K and V are both centred over keys. Otherwise, K's leading
    singular vector could be nearly constant, and so nearly orthogonal to the centred values.
    """
    rank = linalg.rank_at(centred.values, SHARE)
    value, share = query_key.paired_value, rank * float("nan")
    if value is not None:
        share = ksvd.share_inside(value, centred.right, rank.nan_to_num(0.0)).where(rank.isfinite(), share)
    return {"ksvd.centred_rank90": rank, "ksvd.value_alignment": share}


def _cumulative_curves(matrix: str, values: Float[Tensor, "*batch heads steps"]) -> Readings:
    powers = {"spectrum": values, "energy": values.square()}
    return {f"ksvd.{matrix}_{name}": linalg.cumulative(part) for name, part in powers.items()}
