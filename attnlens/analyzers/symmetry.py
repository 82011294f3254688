"""Is the head's kernel symmetric, is it positive definite, and if not, how far from it?"""

from __future__ import annotations

from attnlens.records import QueryKey
from attnlens.registry import MeasureInfo, Readings, analyzer

WEIGHTS = (
    MeasureInfo(
        "weights.norm",
        "size of the bilinear form M = s·W_Q W_Kᵀ",
        "‖M‖_F = s·√tr(G_Q G_K)",
        low=0,
        self_only=False,
        grows_with_factors=True,
    ),
    MeasureInfo(
        "weights.symmetry",
        "how symmetric M is: 1 symmetric, 0 as much skew, −1 skew; under RoPE over all distances",
        "(‖S‖² − ‖A‖²)/‖M‖² = tr(CC)/tr(G_Q G_K); RoPE: Σ_Δ tr(M(Δ)M(−Δ))/Σ_Δ‖M(Δ)‖²",
        low=-1,
        high=1,
        missing="the matrix is zero",
        headline=True,
        more="far more symmetric than the other heads",
        less="far more skew than the other heads",
    ),
    MeasureInfo(
        "weights.directionality",
        "whether a few query directions (rows, > 0) or key directions (columns, < 0) stand out; its null is wide",
        "(r − c)/(r + c), r (c) the sum of row (column) norms above mean + 2 sd; 0 if none is",
        low=-1,
        high=1,
    ),
    MeasureInfo(
        "weights.positivity",
        "whether M's eigenvalues are positive: 1 copying, −1 avoiding",
        "Re Σλ/Σ|λ|, λ the eigenvalues of M",
        low=-1,
        high=1,
        missing="every eigenvalue is zero",
        more="far more positive eigenvalues than the other heads",
        less="far more negative eigenvalues than the other heads",
    ),
    MeasureInfo(
        "weights.definiteness",
        "whether the symmetric part is positive semidefinite: 1 iff it is, −1 iff negative",
        "Σμ/Σ|μ| = tr M/Σ|μ|, μ the eigenvalues of S = (M + Mᵀ)/2",
        low=-1,
        high=1,
        missing="the symmetric part is zero",
        headline=True,
        more="far nearer to positive definite than the other heads",
        less="far nearer to negative definite than the other heads",
    ),
    MeasureInfo(
        "weights.inertia_positive", "positive eigenvalues of the symmetric part", "#{μ > eps·size·max|μ|}", low=0
    ),
    MeasureInfo(
        "weights.inertia_negative", "negative eigenvalues of the symmetric part", "#{μ < −eps·size·max|μ|}", low=0
    ),
    MeasureInfo(
        "weights.symmetry_by_distance",
        "symmetry of M at each distance Δ under RoPE",
        "2·tr(M(Δ)M(−Δ))/(‖M(Δ)‖² + ‖M(−Δ)‖²)",
        low=-1,
        high=1,
        curve=True,
        missing="positions are not a rotation",
        steps="distance in tokens",
    ),
)

NOTHING_SEEN = "the logits depend on the query alone, which softmax ignores"
TOKENS = (
    MeasureInfo(
        "tokens.share_positive",
        "share of what softmax sees that is a positive definite kernel",
        "Σμ₊²/‖LJ‖², μ the eigenvalues of JSJ",
        low=0,
        high=1,
        missing=NOTHING_SEEN,
        has_null=False,
        headline=True,
        more="far more of its scores is a positive definite kernel",
    ),
    MeasureInfo(
        "tokens.share_negative",
        "share that is symmetric but indefinite",
        "Σμ₋²/‖LJ‖², μ the eigenvalues of JSJ",
        low=0,
        high=1,
        missing=NOTHING_SEEN,
        has_null=False,
        headline=True,
        more="far more of its scores is symmetric but indefinite",
    ),
    MeasureInfo(
        "tokens.share_skew",
        "share that is asymmetric and that no query or key gate removes",
        "‖JAJ‖²/‖LJ‖²",
        low=0,
        high=1,
        missing=NOTHING_SEEN,
        has_null=False,
        headline=True,
        more="far more of its scores is asymmetric",
    ),
    MeasureInfo(
        "tokens.share_key",
        "share that is key salience, the same for every query (attention sinks)",
        "n‖c‖²/‖LJ‖², c the centred column means of L",
        low=0,
        high=1,
        missing=NOTHING_SEEN,
        has_null=False,
        headline=True,
        more="it looks at keys whatever the query far more than the other heads",
    ),
    MeasureInfo(
        "tokens.definite",
        "share of sequences whose symmetrised kernel matrix is positive semidefinite",
        "λ_min(sym K) ≥ −n·eps·λ_max, K_ij = exp(L_ij) scaled to unit diagonal",
        low=0,
        high=1,
        missing="undecided: the least eigenvalue is within rounding of the border",
        has_null=False,
    ),
)


@analyzer("symmetry", source="weights", measures=WEIGHTS)
def of_weights(query_key: QueryKey) -> Readings:
    """Is the bilinear form of a head symmetric and positive, and which way does it point?"""
    from attnlens import linalg

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
    if query_key.rotation is not None:
        readings["weights.symmetry_by_distance"] = linalg.symmetry_by_distance(form)
    return readings


@analyzer("symmetry", source="tokens", measures=TOKENS)
def of_tokens(query_key: QueryKey) -> Readings:
    """Which share of a head's logits is a positive definite kernel, and is its exponential one?"""
    from attnlens import linalg

    if query_key.site.part == "cross":
        return {}
    parts = linalg.anatomy(query_key)
    return {
        "tokens.share_positive": parts.positive,
        "tokens.share_negative": parts.negative,
        "tokens.share_skew": parts.skew,
        "tokens.share_key": parts.key,
        "tokens.definite": linalg.definite(query_key.logits),
    }
