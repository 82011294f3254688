"""Analyzers that run only on request: effect of an adapter, scores of masked pairs, number of kernel features."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from attnlens.analyzers.registry import MeasureInfo, Readings, analyzer, linalg
from attnlens.records import QueryKey

NO_ADAPTER = "the model has no adapter, or M is zero without the adapter"
adapter_measure = partial(MeasureInfo, low=0, self_only=False, missing=NO_ADAPTER, has_null=False)
ADAPTER = (
    adapter_measure(
        "adapter.change",
        "relative change in M due to the adapter; under RoPE, M at equal positions",
        "‖M' − M‖_F/‖M‖_F, M of the base and M' with the adapter",
        headline=True,
        ends="largest",
        use="Fine-tuning changed the heads with the largest values most; near 0, the adapter leaves a head unchanged.",
    ),
    adapter_measure(
        "adapter.change_rank",
        "rank of the change in M due to the adapter; at most 2r if queries and keys are adapted",
        "number of σ(M' − M) above eps·n·max(‖M‖_F, ‖M' − M‖_F)",
        use="Below 2r, the adapter does not use its full rank r.",
    ),
)


@analyzer("adaptation", source="weights", measures=ADAPTER, by_default=False, needs_base=True)
def compare_with_base(query_key: QueryKey) -> Readings:
    """How much did an adapter change a head's bilinear form, and in how many directions?

    M = s·W_Q W_Kᵀ is the form of the base model, M' the form with the adapter (LoRA of rank r) merged; σ are singular
    values.
    """
    if query_key.base is None:
        nothing = query_key.query.new_full(query_key.query.shape[:-2], float("nan")).double()
        return {info.name: nothing for info in ADAPTER}
    size, rank = linalg.change(query_key, query_key.base)
    return {"adapter.change": size, "adapter.change_rank": rank}


SHARES = {  # Meaning and formula of the shares of a bilinear form, by part
    "positive": ("in a positive definite kernel", "Σμ₊²/‖LJ‖², μ₊ the positive eigenvalues of JSJ"),
    "negative": ("in the negative part of the symmetric kernel", "Σμ₋²/‖LJ‖², μ₋ the negative eigenvalues of JSJ"),
    "skew": ("in asymmetry that no factor per query or key removes", "‖JAJ‖²/‖LJ‖²"),
    "key": ("explained by the key alone", "n‖c‖²/‖LJ‖², c the centred column means of L"),
}
EXTENDED = tuple(
    MeasureInfo(
        f"extended.share_{part}",
        f"share of the score variance {meaning}, over all pairs, including hidden pairs (not identified)",
        f"{formula}, L of all pairs",
        low=0,
        high=1,
        missing="the scores of all pairs depend on the query alone",
        identified="nowhere",
        wholes=("kernel_shares",),
        use="The share describes these queries and keys, not the model's attention: do not compare models by it.",
    )
    for part, (meaning, formula) in SHARES.items()
)


@analyzer("extended", source="tokens", measures=EXTENDED, by_default=False)
def split_all_pairs(query_key: QueryKey) -> Readings:
    """Which kernel do a head's scores form if extended to pairs that the model never compares? (Not identified.)

    L contains s⟨q_i, k_j⟩ for all pairs of a window's tokens, including masked pairs; J = I − 11ᵀ/n removes row means,
    and S and A are the symmetric and skew parts of L.
    """
    if query_key.site.part == "cross":
        return {}
    parts = linalg.anatomy(query_key.content)
    return {f"extended.share_{part}": getattr(parts, part) for part in SHARES}


ERROR = 0.1  # largest mean total variation, in [0, 1], between a query's exact and approximate attention
LARGEST = 64  # largest order that the kernel taylor:N accepts
WITHIN = f"within {ERROR} of the head's in total variation"
CHOICE = "no query sees two keys"
BEYOND = f"no order up to {LARGEST} comes within {ERROR} of attention in any window, or {CHOICE}"
WRIGHT = "Wright & Gonzalez 2021 (infinite feature dimension)"
KERNEL = "p̂_ij ∝ e^{b_ij} Σ_{n≤N} x_ijⁿ/n!"
ORDER = f"least even N ≤ {LARGEST} with mean_i ½Σ_j|p̂_ij − p_ij| ≤ {ERROR}, {KERNEL}"
RANK = f"least m found with mean_i ½Σ_j|p̂_ij − p_ij| ≤ {ERROR}, p̂_ij = K_ij/Σ_j K_ij at visible pairs, K of rank m"
CENTRED = f"{ORDER.replace('e^{b_ij} ', '')}, x_ij = logit of i and j minus its mean over visible j"
feature_count = partial(MeasureInfo, low=1, missing=CHOICE, self_only=False, paper=WRIGHT)
taylor_order = partial(MeasureInfo, low=0, high=LARGEST, missing=BEYOND, self_only=False, paper=WRIGHT)


def _by_chance(info: MeasureInfo) -> MeasureInfo:
    """Build the MeasureInfo of the null of a measure: its value for random queries and keys."""
    return replace(
        info,
        name=f"{info.name}_by_chance",
        meaning=f"{info.name} of normal queries and keys with the head's own mean and covariance over a window "
        "(not identified)",
        formula=f"{info.formula}, q_i, k_j drawn",
        headline=False,
        ends="",
        identified="nowhere",
        use=f"The null of {info.name}: the covariance of queries and keys does not explain higher values.",
    )


HEAD_MEASURES = (
    feature_count(
        "features.rank",
        f"features per query and key that suffice for attention {WITHIN}; 1: attention depends on the key alone",
        RANK,
        headline=True,
        ends="both",
        use="An upper bound, which grows with --length. Below features.rank_by_chance, a few features may suffice: "
        "swap-kernel --kernel random-features:64 measures the loss.",
    ),
    taylor_order(
        "features.taylor_order",
        f"order at which the exponential series gives attention {WITHIN}; 0: uniform attention (not identified)",
        f"{ORDER}, x_ij = s⟨q_i, k_j⟩",
        identified="nowhere",
        use="At 4, swap-kernel --kernel taylor:4 nearly preserves the head. Compare models by features.centred_order.",
    ),
    taylor_order(
        "features.centred_order",
        f"order of the truncated series for attention {WITHIN}, if scores are first centred over the visible keys",
        CENTRED,
        ends="both",
        use="If it is small, a polynomial of this degree in the centred scores could replace the exponential.",
    ),
)
FEATURES = tuple(info for measure in HEAD_MEASURES for info in (measure, _by_chance(measure)))


@analyzer("features", source="tokens", measures=FEATURES, by_default=False)
def count_features(query_key: QueryKey) -> Readings:
    """How many features, and which Taylor order, does a head's kernel need to reproduce its attention?

    p_ij are the attention weights of a window, s⟨q_i, k_j⟩ are the scores, and b_ij is the model's position bias.
    mean_i is over queries that see two keys or more. The Taylor order is that of Wright & Gonzalez, whose series uses
    the uncentred scores. Adding c to every key adds s⟨q, c⟩ to a query's scores; softmax ignores this term and the
    series does not, so only the centred order is identified. The rank is the smallest found among kernels that
    approximate the visible weights, whatever their values at masked pairs. Windows in which no order suffices are left
    out of the mean over windows, which is then too small; n is the number of remaining windows. The `_by_chance` values
    use one draw of normal queries and keys for all windows.
    """
    readings: Readings = {}
    for suffix, queries_keys in (("", query_key), ("_by_chance", linalg.gaussian_like(query_key))):
        readings[f"features.rank{suffix}"] = linalg.feature_rank(queries_keys, ERROR)
        readings[f"features.taylor_order{suffix}"] = linalg.taylor_order(queries_keys, ERROR, LARGEST)
        readings[f"features.centred_order{suffix}"] = linalg.taylor_order(queries_keys, ERROR, LARGEST, centred=True)
    return readings
