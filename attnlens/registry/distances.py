"""The distances between corresponding heads of two models, which `compare` measures."""

from __future__ import annotations

from attnlens.registry.measure_info import MeasureInfo

OWN_ROWS, ROWS, FORMS = "compare.own_kl", "compare.row_kl", "compare.form_change"
QUERY_ANGLE, KEY_ANGLE = "compare.query_angle", "compare.key_angle"
MISSING = "one of the models has no value"
DISTANCES = (
    MeasureInfo(
        OWN_ROWS,
        "how far attention moves where each block of the second model takes the first one's hidden states: what of the "
        "change is the block's own",
        "KL(P ‖ P') = Σ p log(p/p'), mean over queries, of the same states; weights below 1e-12 count as 1e-12",
        low=0,
        missing=MISSING,
        headline=True,
    ),
    MeasureInfo(
        ROWS,
        "how far attention moves as both models run: with what the blocks before it changed",
        "KL(P ‖ P') = Σ p log(p/p'), mean over queries; weights below 1e-12 count as 1e-12",
        low=0,
        missing=MISSING,
        headline=True,
    ),
    MeasureInfo(
        FORMS,
        "how far the form M moved, beside its size; under RoPE M is that of equal positions",
        "‖M' − M‖_F/‖M‖_F",
        low=0,
        missing="M is 0 in the first model, or can't be read in one",
        headline=True,
    ),
    MeasureInfo(
        QUERY_ANGLE,
        "how far the directions that the queries read moved, in degrees; no change of basis within the head moves it",
        "largest principal angle between the column spaces of W_Q and W_Q'",
        low=0,
        high=90,
        missing=MISSING,
    ),
    MeasureInfo(
        KEY_ANGLE,
        "how far the directions that the keys read moved, in degrees; no change of basis within the head moves it",
        "largest principal angle between the column spaces of W_K and W_K'",
        low=0,
        high=90,
        missing=MISSING,
    ),
)
"""What is 0 between equal heads."""
CHANGE = "change."
"""Before a measure's name where its change stands in its place."""
