"""What is measured of a head's selection problem?"""

from __future__ import annotations

from attnlens.records import Space
from attnlens.registry import MeasureInfo

MOST_QUERIES = 64
"""How many of a head's queries are posed at most."""
SPACES: tuple[Space, ...] = ("input", "projected")

MEASURES = (
    MeasureInfo(
        "selection.decided",
        "share of the queries whose largest attention weight is at least ½",
        "share of queries with p_max ≥ ½",
        low=0,
        high=1,
        self_only=False,
        missing="no query may see a key",
        has_null=False,
        more="decides for one token far more often than the other heads",
    ),
    MeasureInfo(
        "selection.queries",
        "queries posed: the most decided ones, over all sequences",
        "|{i: p_max largest}|",
        low=0,
        high=MOST_QUERIES,
        self_only=False,
        has_null=False,
    ),
    MeasureInfo(
        "selection.least_decided",
        "largest attention weight of the least decided query that was posed",
        "min over posed queries of p_max",
        low=0,
        high=1,
        self_only=False,
        has_null=False,
    ),
    MeasureInfo(
        "selection.margin",
        "least margin of the selected tokens over the others, at unit norm, without W_fin; below 0 only for top-p",
        "min (x_α − x_t)ᵀM′z/‖ΠM′‖, Π onto span(U) ⊗ span(Z); W_fin = 0 for sets of one token",
        self_only=False,
        has_null=False,
    ),
    MeasureInfo(
        "selection.efficiency",
        "that margin over the best possible: 1 iff the head is the SVM direction on these tokens",
        "min (x_α − x_t)ᵀM′z·‖W_mm‖/‖ΠM′‖, M′ = M − W_fin",
        high=1,
        self_only=False,
        has_null=False,
    ),
    MeasureInfo(
        "selection.efficiency_q05",
        "the same where 5 % of the queries may be near-ties",
        "5 % quantile over queries of their least margin, times ‖W_mm‖",
        self_only=False,
        has_null=False,
        headline=True,
        more="keeps its selected tokens far clearer of the others than the other heads do",
    ),
    MeasureInfo(
        "selection.svm_cosine",
        "cosine between the head and the SVM that selects the same tokens",
        "⟨M′, W_mm⟩/(‖ΠM′‖‖W_mm‖), M′ = M − W_fin",
        low=-1,
        high=1,
        self_only=False,
        has_null=False,
        headline=True,
        more="is far nearer to its SVM than the other heads",
        less="is far from its SVM beside the other heads",
    ),
    MeasureInfo(
        "selection.support",
        "share of the constraints that hold the SVM up (not unique where constraints repeat each other)",
        "share of constraints with λ > 0",
        low=0,
        high=1,
        self_only=False,
        has_null=False,
    ),
    MeasureInfo(
        "selection.space",
        "where the problem is posed: on the module's inputs, or (RoPE, QK-norm, cross-attention) on queries and keys",
        "x of xᵀMz",
        self_only=False,
        labels=SPACES,
        has_null=False,
    ),
    MeasureInfo(
        "selection.margins",
        "least margin of each posed query over the best possible, ascending",
        "sorted min (x_α − x_t)ᵀM′z·‖W_mm‖/‖ΠM′‖, M′ = M − W_fin",
        curve=True,
        self_only=False,
        has_null=False,
        steps="posed query",
    ),
)
