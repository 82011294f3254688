"""Singular values of a head's form M and attention P: ranks, decay, entropy."""

from __future__ import annotations

from functools import partial

from attnlens.analyzers.registry import MeasureInfo, Readings, analyzer, linalg
from attnlens.records import QueryKey

ZERO = "the matrix is zero"
# the limit is LONG in attnlens.maths.linalg.long
LONG = "more than 2,048² pairs of queries and keys, and {}: reduce --length"
WHOLE = LONG.format("not all singular values are computed")
LEADING = LONG.format("the rank exceeds about 250, the largest that is computed")
form_measure = partial(MeasureInfo, self_only=False)
form_rank = partial(form_measure, low=1, missing=ZERO, sized_by="head_dim")
WEIGHTS = (
    form_rank(
        "weights.stable_rank",
        "squared Frobenius norm of M relative to its largest squared singular value",
        "‖M‖_F²/‖M‖₂²",
        scale=("a single direction dominates M", "the norm is spread evenly over the directions"),
        use="Far below weights.effective_rank, a single direction dominates the head's norm.",
        paper="Rudelson & Vershynin 2007, numerical rank",
    ),
    form_rank(
        "weights.effective_rank",
        "effective number of directions in M, by the entropy of its singular values",
        "exp(−Σ p log p), p = σ/Σσ",
        scale=("the head uses few directions of its inputs", "the head uses most of its head_dim directions"),
        ends="both",
        series=9,
        use="Below its null, M has fewer directions than expected by chance; ranks --budget finds the rank needed.",
        paper="Roy & Vetterli 2007",
    ),
    form_rank(
        "weights.rank90",
        "rank that keeps 90 % of M's squared norm",
        "least k with Σ_{l≤k}σ² ≥ 0.9·Σσ²",
        scale=("few directions contain 90 % of M's squared norm", "most directions are needed"),
        use="A first guess for a rank; swap-kernel --kernel rank:8 measures the loss at rank 8.",
    ),
    form_measure(
        "weights.decay",
        "decay rate of M's singular values; those of random factors decay too",
        "b of the least-squares line log σ_l ≈ a − b·l",
        scale=("all singular values are alike", "the first few singular values dominate"),
        low=0,
        missing="fewer than two singular values are above rounding",
        use="Compare it with its null: above it, the spectrum decays faster than expected by chance.",
        sized_by="head_dim",
    ),
    form_measure(
        "weights.singular_values",
        "singular values of M, descending; under RoPE, those of the joint kernel on content and position, per position",
        "σ(M)",
        low=0,
        curve=True,
        matrix="M",
        use="Look for a sharp drop: the directions after it contribute little to M.",
    ),
)

attention_rank = partial(form_measure, low=1)
attention_share = partial(form_measure, low=0, high=1)
share_in_largest = partial(
    attention_share,
    curve=True,
    matrix="P",
    use="The earlier it approaches 1, the lower the rank that suffices; the first value is ksvd.first_share.",
    paper="Chen et al. 2023, Figure 1",
)
UNIFORM = "attention is uniform, so its centred matrix is zero"
TOKENS = (
    attention_share(
        "tokens.entropy",
        "normalised entropy of attention: 0 for one key, 1 if uniform over the allowed keys (a sink counts as a key)",
        "mean over queries of −Σ p log p/log(allowed keys)",
        scale=("each query attends to a single key", "each query attends to all keys evenly"),
        missing="no query sees two keys",
        headline=True,
        ends="both",
        series=10,
        use="Near 0, a head selects one key; near 1, it averages all. If many heads fall to 0, attention collapses.",
    ),
    attention_share(
        "tokens.max_weight",
        "largest attention weight of a query, on average",
        "mean over queries of max_j p_ij",
        scale=("no key stands out", "one key gets almost all the weight of each query"),
        missing="no query sees a key",
        use="If it is large, inspect --analyzer selection shows the selected tokens.",
    ),
    attention_rank(
        "tokens.effective_rank",
        "effective number of directions in the attention matrix P, by the entropy of its singular values",
        "exp(−Σ p log p), p = σ(P)/Σσ(P)",
        scale=("all queries attend alike", "every query attends differently"),
        missing=f"{ZERO}, or has {WHOLE}",
        headline=True,
        ends="both",
        series=9,
        use="Near 1, all queries attend alike; tokens.centred_effective_rank excludes uniform attention.",
        paper="Roy & Vetterli 2007",
    ),
    attention_rank(
        "tokens.rank90",
        "rank that keeps 90 % of P's squared norm",
        "least k with Σ_{l≤k}σ² ≥ 0.9·Σσ²",
        scale=("a few patterns of attention explain all queries", "low-rank attention would lose much"),
        missing=f"{ZERO}, or has {LEADING}",
        use="If it is small relative to the window, low-rank attention could replace the head; it grows with --length.",
    ),
    attention_rank(
        "tokens.centred_effective_rank",
        "effective rank of P after centring, which removes uniform attention",
        "effective rank of P(I − 11ᵀ/n) = P − 11ᵀ/n",
        missing=f"{UNIFORM}, or there are {WHOLE}",
        use="Compare it with tokens.effective_rank, which is near 1 if uniform attention dominates.",
    ),
    attention_rank(
        "tokens.logit_rank90",
        "rank that keeps 90 % of the squared norm of the logits minus their row means",
        "least k with Σ_{l≤k}σ² ≥ 0.9·Σσ², σ of the visible logits minus their row means; masked logits are 0",
        scale=("a few dimensions of queries and keys give the same scores", "all dimensions are needed"),
        missing=f"the logits depend on the query alone, which softmax ignores, or have {LEADING}",
        use="Below head_dim, queries and keys of fewer dimensions would give nearly the same scores.",
        sized_by="head_dim",
    ),
    share_in_largest("tokens.singular_values", "share of P's k largest singular values in the sum", "(σ₁ + … + σₖ)/Σσ"),
    share_in_largest(
        "tokens.singular_values_energy",
        "share of P's k largest squared singular values in the sum",
        "(σ₁² + … + σₖ²)/Σσ²",
        use="It first reaches 0.9 at k = tokens.rank90.",
        paper="",
    ),
)


@analyzer("spectrum", source="weights", measures=WEIGHTS)
def measure_weights(query_key: QueryKey) -> Readings:
    """How fast do the singular values of a head's bilinear form decay?

    σ are the singular values of M = s·W_Q W_Kᵀ, where s is the scale and biases are left out; at most head_dim of them
    are not 0. Under RoPE, σ are the singular values of the joint kernel on content and position over the window.
    """
    values = linalg.Form(query_key).singular_values
    return {
        "weights.stable_rank": linalg.stable_rank(values),
        "weights.effective_rank": linalg.effective_rank(values),
        "weights.rank90": linalg.rank_at(values, 0.9),
        "weights.decay": linalg.decay_rate(values),
        "weights.singular_values": values,
    }


@analyzer("spectrum", source="tokens", measures=TOKENS)
def measure_tokens(query_key: QueryKey) -> Readings:
    """How spread out is a head's attention, and what is its rank?

    P contains the attention weights p_ij of a window, one row per query; padding is left out. The window's length
    bounds every rank, so compare ranks only at equal lengths.
    """
    values = linalg.attention_singular_values(query_key)
    beyond = linalg.attention_singular_values(query_key, without_row_sums=True)
    return {
        "tokens.entropy": linalg.entropy(query_key),
        "tokens.max_weight": linalg.max_weight(query_key),
        "tokens.effective_rank": linalg.effective_rank(values),
        "tokens.rank90": linalg.attention_rank(query_key, 0.9),
        "tokens.centred_effective_rank": linalg.effective_rank(beyond),
        "tokens.logit_rank90": linalg.visible_rank(query_key, 0.9),
        "tokens.singular_values": linalg.cumulative(values),
        "tokens.singular_values_energy": linalg.cumulative(values.square()),
    }
