"""How many features of the exponential kernel a head's attention needs on real text: Taylor orders and ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from attnlens.analyzers.registry import MeasureInfo, Readings, analyzer, linalg
from attnlens.records import QueryKey

ERROR = 0.1  # ε: largest mean total variation, in [0, 1], between the two attentions of a query
LARGEST = 64  # last order that the kernel taylor:N accepts
WITHIN = f"within {ERROR} of its own, in total variation"
CHOICE = "no query sees two keys"
BEYOND = f"no order up to {LARGEST} is within {ERROR} in any window, or {CHOICE}"
WRIGHT = "Wright & Gonzalez 2021 (infinite feature dimension)"
GAUSSIAN = "normal queries and keys with the head's own mean and covariance"
KERNEL = "p̂_ij ∝ e^{b_ij} Σ_{n≤N} x_ijⁿ/n!"
ORDER = f"least even N ≤ {LARGEST} with mean_i ½Σ_j|p̂_ij − p_ij| ≤ {ERROR}, {KERNEL}"
RANK = f"least m found with mean_i ½Σ_j|p̂_ij − p_ij| ≤ {ERROR}, p̂_ij = K_ij/Σ_j K_ij at visible pairs, K of rank m"
DRAWN = "q_i, k_j drawn"
CENTRED = f"{ORDER.replace('e^{b_ij} ', '')}, x_ij = all of i's logits less their mean over visible j"
PLAIN = f"{ORDER}, x_ij = s⟨q_i, k_j⟩"
feature_count = partial(MeasureInfo, low=1, missing=CHOICE, self_only=False, paper=WRIGHT)
taylor_order = partial(MeasureInfo, low=0, high=LARGEST, missing=BEYOND, self_only=False, paper=WRIGHT)


def _by_chance(info: MeasureInfo) -> MeasureInfo:
    """Build the MeasureInfo of a measure's null: drawn queries and keys give it, so attention does not determine it."""
    return replace(
        info,
        name=f"{info.name}_by_chance",
        meaning=f"{info.name} of {GAUSSIAN} over a window (not identified)",
        formula=f"{info.formula}, {DRAWN}",
        headline=False,
        ends="",
        identified="nowhere",
        use=f"The null of {info.name}: a head above it needs more than its queries' and keys' covariance explains.",
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
        f"order at which the exponential series gives attention {WITHIN}; 0: uniform suffices (not identified)",
        PLAIN,
        identified="nowhere",
        use="If 4, swap-kernel --kernel taylor:4 nearly preserves the head; compare models by features.centred_order.",
    ),
    taylor_order(
        "features.centred_order",
        f"order of the truncated series for attention {WITHIN}, if scores are first centred over the visible keys",
        CENTRED,
        ends="both",
        use="If small, a polynomial of that degree in the centred scores could replace the exponential.",
    ),
)
MEASURES = tuple(info for measure in HEAD_MEASURES for info in (measure, _by_chance(measure)))


@analyzer("features", source="tokens", measures=MEASURES, by_default=False)
def of_tokens(query_key: QueryKey) -> Readings:
    """How many features, and which Taylor order, does a head's kernel need to reproduce its attention?

    p_ij are the attention weights of a window, s⟨q_i, k_j⟩ the scores, b_ij the model's position bias. The mean is
    over queries that see two keys or more. Wright's truncated feature map truncates the series of the uncentred scores.
    Adding c to every key adds s⟨q, c⟩ to a query's scores; softmax ignores this term and the series does not, so only
    the centred order is identified. The rank is that of any kernel that gives the visible weights, with free values at
    hidden pairs. Windows in which no order suffices are left out of the mean, which is then too small; n counts the
    others. The values by chance use one draw of normal queries and keys for all windows.
    """
    readings: Readings = {}
    for suffix, queries_keys in (("", query_key), ("_by_chance", linalg.gaussian_like(query_key))):
        readings[f"features.rank{suffix}"] = linalg.feature_rank(queries_keys, ERROR)
        readings[f"features.taylor_order{suffix}"] = linalg.taylor_order(queries_keys, ERROR, LARGEST)
        readings[f"features.centred_order{suffix}"] = linalg.taylor_order(queries_keys, ERROR, LARGEST, centred=True)
    return readings
