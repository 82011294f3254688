"""Att-SVM measures: how close a head's token selection is to its max-margin SVM."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from attnlens.analyzers.registry import Gatherer, GatheringPlace, MeasureInfo, gathering
from attnlens.choices import WHERE_POSED, Space

MOST_QUERIES = 64  # most queries posed per head
SPACES: tuple[Space, ...] = ("input", "projected")
"""On the module's inputs x and z with the head's M, or on k and q (after rotation) with s·I: not comparable."""
WORDS: dict[Space, dict[str, str]] = {
    "input": {"where": WHERE_POSED["input"], "x": "x", "z": "z", "M": "M"},
    "projected": {"where": WHERE_POSED["projected"], "x": "k", "z": "q", "M": "s·I"},
}
"""Replacements for the names in braces in OF_SPACE."""
PAPER = "Tarzanagh et al. 2023"
selection_measure = partial(MeasureInfo, self_only=False, has_null=False)
DECIDED = selection_measure(
    "selection.decided",
    "share of the queries whose largest attention weight is at least ½",
    "share of queries with p_max ≥ ½",
    low=0,
    high=1,
    missing="no query may see a key",
    ends="largest",
    series=1,
    use="Read it first: where few queries are decided, an SVM of selections tells little of the head.",
)
POSED = (
    selection_measure(
        "selection.queries",
        "queries posed: the most decided ones, over all sequences",
        "|{i: p_max largest}|",
        sized_by="how many windows were read",
        low=0,
        high=MOST_QUERIES,
        use="How much the head's other selection numbers stand on; compare heads of about equal numbers.",
    ),
    selection_measure(
        "selection.least_decided",
        "largest attention weight of the least decided query that was posed",
        "min over posed queries of p_max",
        sized_by="how many windows were read",
        low=0,
        high=1,
        use="Below ½, some of the choices that the SVM is held to were hardly made.",
    ),
)
"""Measures of what was posed, which is chosen once for all spaces."""
OF_SPACE = (
    selection_measure(
        "margin",
        "least margin {where} of the selected tokens over the others, at unit norm, without W_fin; below 0 only for "
        "top-p",
        "min ({x}_α − {x}_t)ᵀM′{z}/‖ΠM′‖, M′ = {M} − W_fin, Π onto span(U) ⊗ span(Z); W_fin = 0 for sets of one token",
        use="In units of the tokens' own norms: compare it with its null, and across heads take the efficiency.",
        paper=f"{PAPER}, Eq. Att-SVM",
    ),
    selection_measure(
        "efficiency",
        "that margin over the best possible {where}: 1 iff the head is the SVM direction on these tokens",
        "min ({x}_α − {x}_t)ᵀM′{z}·‖W_mm‖/‖ΠM′‖, M′ = {M} − W_fin",
        high=1,
        series=4,
        use="One near-tie can bring it to 0: read selection.efficiency_q05 beside it.",
    ),
    selection_measure(
        "efficiency_q05",
        "efficiency {where} where 5 % of the queries may be near-ties",
        "5 % quantile over queries of their least margin, times ‖W_mm‖",
        headline=True,
        ends="largest",
        series=3,
        use="Beyond its null, the head keeps its choices further from the others than chance would.",
    ),
    selection_measure(
        "svm_cosine",
        "cosine between the head and the SVM that selects the same tokens, {where}",
        "⟨M′, W_mm⟩/(‖ΠM′‖‖W_mm‖), M′ = {M} − W_fin",
        low=-1,
        high=1,
        headline=True,
        ends="both",
        series=2,
        use="Read it against its null of the same space alone: beyond it, the head points to its SVM more than the "
        "same head turned at random. Where training goes, converge --checkpoints follows.",
        paper=f"{PAPER}, Eq. Att-SVM",
    ),
    selection_measure(
        "support",
        "share of the constraints {where} that hold the SVM up (not unique where constraints repeat each other)",
        "share of constraints with λ > 0",
        low=0,
        high=1,
        use="Small: few tokens hold the solution; --show selection marks them in the text.",
    ),
    selection_measure(
        "margins",
        "least margin {where} of each posed query over the best possible, ascending",
        "sorted min ({x}_α − {x}_t)ᵀM′{z}·‖W_mm‖/‖ΠM′‖, M′ = {M} − W_fin",
        curve=True,
        steps="posed query; one may exceed 1",
        use="A curve that starts near 0 and soon rises has few near-ties; a flat one near 1 is an SVM's.",
    ),
)
"""Measures of a head by the SVM of one space."""


def qualify_name(what: str, space: Space) -> str:
    """Return the name of a measure in one space: `selection.margin`, `selection.projected_margin`."""
    return f"selection.{'projected_' if space == 'projected' else ''}{what}"


def _in_space(info: MeasureInfo, space: Space) -> MeasureInfo:
    words = WORDS[space]
    texts = {name: getattr(info, name).format(**words) for name in ("meaning", "formula")}
    behind = sum(other.series > 0 for other in OF_SPACE) * SPACES.index(space)
    series = info.series and info.series + behind
    renamed = replace(info, name=qualify_name(info.name, space), space=space, null="rotations", series=series, **texts)
    return replace(renamed, sized_by="d_model and the queries that were posed")


MEASURES = (DECIDED, *POSED, *(_in_space(info, space) for space in SPACES for info in OF_SPACE))


@gathering("selection", source="tokens", measures=MEASURES, by_default=False, needs_inputs=True)
def selector(place: GatheringPlace) -> Gatherer:
    """Does a head select tokens as its max-margin SVM does, and with what margin?

    Margins and cosine are those of M′ = M − W_fin; W_fin, the least form with M's own score differences inside the
    selected sets, is 0 if sets contain one token. M scores what it selects above the rest, so that margins are then
    above 0; for sets of several tokens (`top-p`) margins can be negative.

    Where the logits are bilinear in the module's inputs, the problem is posed on these and, under names with
    `projected_`, on queries and keys with W = s·I; elsewhere (RoPE, QK-norm, cross-attention) on queries and keys
    alone. Each space has its own null, and its numbers are compared within it only.
    """
    from attnlens.analyzers.selection.gatherer import Selector

    return Selector(place)
