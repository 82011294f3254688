"""Measures of a causal head's scores extended to pairs that the model never compares; run only on request."""

from __future__ import annotations

from attnlens.analyzers.registry import MeasureInfo, Readings, analyzer, linalg
from attnlens.records import QueryKey


def _share(name: str, meaning: str, formula: str) -> MeasureInfo:
    return MeasureInfo(
        f"extended.share_{name}",
        f"share of the bilinear form extended to pairs that the model never compares that {meaning} (not identified)",
        f"{formula}, L of all pairs",
        low=0,
        high=1,
        missing="the scores of all pairs depend on the query alone",
        identified="nowhere",
        wholes=("kernel_shares",),
        use="It describes these queries and keys, not the model's attention: do not compare models by it.",
    )


TOKENS = (
    _share("positive", "is a positive definite kernel", "Σμ₊²/‖LJ‖², μ₊ the positive eigenvalues of JSJ"),
    _share(
        "negative", "is the negative part of the symmetric kernel", "Σμ₋²/‖LJ‖², μ₋ the negative eigenvalues of JSJ"
    ),
    _share("skew", "is asymmetric and cannot be removed by a gate", "‖JAJ‖²/‖LJ‖²"),
    _share("key", "depends on the key alone", "n‖c‖²/‖LJ‖², c the centred column means of L"),
)


@analyzer("extended", source="tokens", measures=TOKENS, by_default=False)
def of_tokens(query_key: QueryKey) -> Readings:
    """Which kernel are a head's scores if extended to pairs that the model never compares? Not identified.

    L contains s⟨q_i, k_j⟩ of all pairs of a window's tokens, including masked ones; J = I − 11ᵀ/n removes row
    means, and S and A are the symmetric and skew part of L.
    """
    if query_key.site.part == "cross":
        return {}
    parts = linalg.anatomy(query_key.content)
    return {f"extended.share_{part}": getattr(parts, part) for part in ("positive", "negative", "skew", "key")}
