"""The distances between corresponding heads of two models, which `compare` measures."""

from __future__ import annotations

from functools import partial

from attnlens.registry.measure_info import MeasureInfo

OWN_ROWS, ROWS, FORMS = "compare.own_kl", "compare.row_kl", "compare.form_change"
QUERY_ANGLE, KEY_ANGLE = "compare.query_angle", "compare.key_angle"
MISSING = "one of the models has no value"
distance = partial(MeasureInfo, low=0, self_only=False, has_null=False)
BETWEEN_ROWS = (
    distance(
        OWN_ROWS,
        "how far attention moves where each block of the second model takes the first one's hidden states: what of the "
        "change is the block's own",
        "KL(P ‖ P') = Σ p log(p/p'), mean over queries, of the same states; weights below 1e-12 count as 1e-12",
        missing=MISSING,
        headline=True,
        use="Read it first: a head that it names was changed itself, whatever came before it.",
    ),
    distance(
        ROWS,
        "how far attention moves as both models run: with what the blocks before it changed",
        "KL(P ‖ P') = Σ p log(p/p'), mean over queries; weights below 1e-12 count as 1e-12",
        missing=MISSING,
        headline=True,
        use="Where it names a head that compare.own_kl does not, look for the cause in the layers before.",
    ),
)
"""Between the rows of attention of the same windows."""
BETWEEN_FORMS = (
    distance(
        FORMS,
        "how far the form M moved, beside its size; under RoPE M is that of equal positions",
        "‖M' − M‖_F/‖M‖_F",
        missing="M is 0 in the first model, or can't be read in one",
        headline=True,
        use="Named without compare.own_kl, the weights moved where this text does not look: try another text.",
    ),
    distance(
        QUERY_ANGLE,
        "how far the directions that the queries read moved, in degrees; no change of basis within the head moves it",
        "largest principal angle between the column spaces of W_Q and W_Q'",
        high=90,
        missing=MISSING,
        use="Near 90 a direction that the queries read is read no longer; near 0 beside a large compare.form_change, "
        "the same directions are weighted otherwise.",
    ),
    distance(
        KEY_ANGLE,
        "how far the directions that the keys read moved, in degrees; no change of basis within the head moves it",
        "largest principal angle between the column spaces of W_K and W_K'",
        high=90,
        missing=MISSING,
        use="Near 90 a direction that the keys read is read no longer; near 0 beside a large compare.form_change, the "
        "same directions are weighted otherwise.",
    ),
)
"""Between the weights."""
DISTANCES = (*BETWEEN_ROWS, *BETWEEN_FORMS)
"""What is 0 between equal heads."""
NAMED = distance(
    "compare.named",
    "how many of the head's changes are named",
    "#{q ≤ the false-discovery rate} over all that is compared",
)
"""The count that a page and rules have beside the changes."""
