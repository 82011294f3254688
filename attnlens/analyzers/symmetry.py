"""Symmetry, directionality and definiteness of a head's query/key kernel."""

from __future__ import annotations

from functools import partial

from attnlens.analyzers.registry import MeasureInfo, Readings, analyzer, linalg
from attnlens.records import QueryKey

signed = partial(MeasureInfo, low=-1, high=1)
share = partial(MeasureInfo, low=0, high=1)
inertia = partial(
    MeasureInfo,
    low=0,
    use="Nearly always head_dim; if smaller, the head does not use all directions.",
    sized_by="head_dim",
)
WEIGHTS = (
    MeasureInfo(
        "weights.norm",
        "Frobenius norm of the bilinear form M = s·W_Q W_Kᵀ",
        "‖M‖_F = s·√tr(G_Q G_K)",
        scale=("scores hardly differ between keys", "scores differ strongly, so attention can be peaked"),
        low=0,
        self_only=False,
        grows_with_factors=True,
        use="Compare heads of one model by their norms: cosines and shares are relative and independent of scale.",
        sized_by="d_model and the weights' units",
    ),
    signed(
        "weights.symmetry",
        "symmetry of M: 1 if symmetric, −1 if antisymmetric, 0 if both parts are equally large. Under RoPE, over all "
        "distances or positions",
        "(‖S‖² − ‖A‖²)/‖M‖² = tr(CC)/tr(G_Q G_K); RoPE: Σ_Δ tr(M(Δ)M(−Δ))/Σ_Δ‖M(Δ)‖²",
        scale=(
            "if i attends to j, j avoids i (−1); at 0, the two directions are unrelated",
            "i attends to j as j attends to i",
        ),
        missing="the matrix is zero",
        headline=True,
        ends="both",
        series=8,
        use="Compare it with its null: well above the null, attention is mutual. swap-kernel "
        "--kernel symmetric measures the loss without the antisymmetric part.",
        paper="Saponati et al. 2025, symmetry score",
    ),
    signed(
        "weights.directionality",
        "dominance of a few input directions in the queries (rows, > 0) or the keys (columns, < 0); the null is wide",
        "(r − c)/(r + c), r (c) the sum of row (column) norms above mean + 2 sd; 0 if none is",
        scale=("a few input directions dominate the keys", "a few input directions dominate the queries"),
        use="Call a head directional only beyond 2 sd of its null. The sign is that of the paper, not of its code.",
        paper="Saponati et al. 2025, directionality score",
    ),
    signed(
        "weights.positivity",
        "balance of M's eigenvalues: 1 if all are positive (copying), −1 if all are negative",
        "Re Σλ/Σ|λ|, λ the eigenvalues of M",
        scale=("tokens attend to tokens unlike themselves", "tokens attend to tokens like themselves"),
        missing="every eigenvalue is zero",
        ends="both",
        use="Above its null, a token attends to tokens like itself; below it, to tokens unlike it.",
        paper="Elhage et al. 2021, copying heads, there of output-value circuits",
    ),
    signed(
        "weights.definiteness",
        "definiteness of M's symmetric part: 1 if positive semidefinite, −1 if negative semidefinite, near 0 if "
        "balanced, as in a random head",
        "Σμ/Σ|μ| = tr M/Σ|μ|, μ the eigenvalues of S = (M + Mᵀ)/2",
        scale=(
            "negative definite: tokens avoid similar tokens",
            "positive definite: a kernel in the sense of kernel methods",
        ),
        missing="the symmetric part is zero",
        headline=True,
        ends="both",
        use="Near 1, a positive definite form could replace the symmetric part; on text, see tokens.share_positive.",
    ),
    inertia("weights.inertia_positive", "number of positive eigenvalues of S = (M + Mᵀ)/2", "#{μ > eps·size·max|μ|}"),
    inertia("weights.inertia_negative", "number of negative eigenvalues of S = (M + Mᵀ)/2", "#{μ < −eps·size·max|μ|}"),
    signed(
        "weights.symmetry_by_distance",
        "symmetry of M at each distance Δ under RoPE",
        "2·tr(M(Δ)M(−Δ))/(‖M(Δ)‖² + ‖M(−Δ)‖²)",
        curve=True,
        missing="M does not depend on a distance",
        steps="distance in tokens",
        use="At distances where it is far below 1, the head treats earlier and later tokens differently.",
    ),
)

LONG = "more than 2,048² pairs, and {}: reduce --length"  # the limit is LONG in attnlens.maths.linalg.long
GAPS = LONG.format("the mask has gaps or conjugate gradients did not converge")
NOTHING_SEEN = "the logits depend on the query alone, which softmax ignores"
HIDDEN = "the mask hides pairs, so the measure is not identified"
KERNEL, SCORES = "kernel_shares", "score_shares"  # names of the totals to which the shares add up
score_share = partial(share, missing=f"{NOTHING_SEEN}, or there are {GAPS}", headline=True, ends="largest")
kernel_share = partial(  # defined only for heads that see all pairs
    score_share,
    missing=f"{HIDDEN}, or {NOTHING_SEEN}, or there are {LONG.format('the logits are not bilinear')}",
    identified="all pairs",
    wholes=(KERNEL,),
)
TOKENS = (
    kernel_share(
        "tokens.share_positive",
        "share of the score variance in a positive definite kernel, for heads that see all pairs",
        "Σμ₊²/‖LJ‖², μ₊ the positive eigenvalues of JSJ",
        scale=(
            "the scores are not those of a positive definite kernel",
            "the scores form a Mercer kernel, up to factors per query and key",
        ),
        use="Near 1, kernel methods apply to the head. swap-kernel --kernel mercer measures the loss without the other "
        "parts.",
    ),
    kernel_share(
        "tokens.share_negative",
        "share of the score variance in the negative part of the symmetric kernel, for heads that see all pairs",
        "Σμ₋²/‖LJ‖², μ₋ the negative eigenvalues of JSJ",
        scale=("no part of the symmetric kernel is negative", "the negative part of the symmetric kernel dominates"),
        use="A large share can be unimportant: swap-kernel --kernel negativeless measures the loss without it.",
    ),
    kernel_share(
        "tokens.share_skew",
        "share of the score variance in asymmetry that no query or key factor removes, for heads that see all pairs",
        "‖JAJ‖²/‖LJ‖²",
        scale=(
            "attention is mutual, up to factors per query and key",
            "attention is one-way: i attends to j, but j not to i",
        ),
        use="A large share can be unimportant: swap-kernel --kernel skewless measures the loss without it.",
    ),
    share(
        "tokens.definite",
        "share of sequences with a positive semidefinite symmetrised kernel matrix, for heads that see all pairs",
        "λ_min(sym K) ≥ −n·eps·λ_max, K_ij = exp(L_ij − ρ_i + κ_i), ρ, κ row and column means; unit diagonal",
        missing=f"{HIDDEN}, or the test is undecided: the least eigenvalue is 0 within rounding, or there are more "
        "than 8,192 tokens and no 2 × 2 minor is negative",
        identified="all pairs",
        use="At 1, a positive definite kernel, with factors per query and key, gives exactly this attention. Below 1, "
        "see the shares.",
    ),
    score_share(
        "tokens.share_key",
        "share of the score variance explained by the key alone",
        "(R_a − R_ab)/R_a, R the squared residuals of L_ij ≈ a_i + b_j + c_{i−j}; all pairs: n‖c‖²/‖LJ‖²",
        scale=("the preferred key depends on the query", "all queries prefer the same keys"),
        self_only=False,
        wholes=(KERNEL, SCORES),
        use="Near 1, all queries attend to the same keys: one weight per key would suffice. In bidirectional heads, "
        "swap-kernel --kernel keyless measures the loss without this part.",
    ),
    score_share(
        "tokens.share_position",
        "share of the score variance explained by the distance in addition to the key (linear terms count for the key)",
        "(R_ab − R_abc)/R_a",
        scale=("distance does not matter", "the head is positional: the distance determines attention"),
        wholes=(SCORES,),
        use="Large in positional heads; swap-kernel --kernel window:64 measures whether a window would suffice.",
    ),
    score_share(
        "tokens.share_content",
        "share of the score variance that depends on the pair: explained neither by the key alone nor by the distance",
        "R_abc/R_a; cross-attention: R_ab/R_a",
        scale=("key and distance determine attention", "attention depends on the pair of query and key"),
        self_only=False,
        wholes=(SCORES,),
        use="If it is small, key and distance determine the scores, and a simpler head could suffice.",
    ),
    score_share(
        "tokens.share_first",
        "attention weight on the first key that a query sees",
        "mean of p_ij over queries that see two keys or more, j the first key they see",
        scale=("the first token gets little attention", "the head has a sink on the first token"),
        self_only=False,
        missing="no query sees two keys",
        beside="tokens.first_if_even",
        use="Far above tokens.first_if_even, the head has a sink: keep the first tokens (--kernel sink-window:4,64).",
    ),
    share(
        "tokens.first_if_even",
        "value of tokens.share_first under uniform attention",
        "mean of 1/(keys that the query sees) over the same queries",
        self_only=False,
        missing="no query sees two keys",
        use="The baseline for tokens.share_first; on its own, it describes only the mask.",
        sized_by="the window and the mask alone",
    ),
)


@analyzer("symmetry", source="weights", measures=WEIGHTS)
def measure_weights(query_key: QueryKey) -> Readings:
    """Is the bilinear form of a head symmetric, positive and directional?

    M = s·W_Q W_Kᵀ = S + A with S symmetric and A skew, where s is the scale; C = W_Kᵀ W_Q, G_Q = W_Qᵀ W_Q and G_K =
    W_Kᵀ W_K. Biases are left out, and grouped queries use the keys of their group. Under RoPE, M(Δ) depends on the
    distance Δ, and all measures except symmetry are computed from the joint kernel on content and position over the
    window. Cross-attention has only a norm, because its queries and keys come from two domains.
    """
    form = linalg.Form(query_key)
    if query_key.site.part == "cross":
        return {"weights.norm": form.norm}
    positive, negative = form.inertia
    readings = {
        "weights.norm": form.norm,
        "weights.symmetry": linalg.symmetry(form),
        "weights.directionality": linalg.directionality(form),
        "weights.positivity": form.positivity,
        "weights.definiteness": form.definiteness,
        "weights.inertia_positive": positive,
        "weights.inertia_negative": negative,
    }
    if query_key.rotation is not None and query_key.rotation.by_distance:
        readings["weights.symmetry_by_distance"] = linalg.symmetry_by_distance(form)
    return readings


@analyzer("symmetry", source="tokens", measures=TOKENS)
def measure_tokens(query_key: QueryKey) -> Readings:
    """What do a head's scores depend on, and what share of their variance forms a positive definite kernel?

    L contains the scores of a window's tokens before position bias, mask and softmax; p_ij are the attention weights.
    Softmax ignores query-only terms, so all shares of the score variance use L minus its row means. If all pairs are
    visible, this difference is LJ with J = I − 11ᵀ/n, and L = S + A with S symmetric and A skew. If a mask hides pairs,
    least-squares fits use the visible pairs. R_a, R_ab and R_abc are the squared residuals of the fits with the terms
    in the subscript.
    """
    shares = linalg.visible_shares(query_key.content)
    readings = {
        "tokens.share_key": shares.key,
        "tokens.share_position": shares.position,
        "tokens.share_content": shares.content,
        "tokens.share_first": linalg.first_weight(query_key),
        "tokens.first_if_even": linalg.even_weight(query_key),
    }
    if query_key.site.part == "cross":
        return {name: reading for name, reading in readings.items() if name != "tokens.share_position"}
    return _measure_all_pairs(query_key) | readings


def _measure_all_pairs(query_key: QueryKey) -> Readings:
    """Compute the measures that are defined only for heads whose mask hides no pair; NaN for other heads."""
    names = ("tokens.share_positive", "tokens.share_negative", "tokens.share_skew", "tokens.definite")
    compared = linalg.compares_all(query_key)
    nothing = query_key.query.new_full(compared.shape, float("nan")).double()
    if not compared.any():
        return dict.fromkeys(names, nothing)
    parts, definite = linalg.anatomy(query_key.content), linalg.definite_kernel(query_key)
    readings = (parts.positive, parts.negative, parts.skew, definite)
    return {name: reading.where(compared, nothing) for name, reading in zip(names, readings, strict=True)}
