"""A Predictor: how a measure of heads goes with the harm of a kernel in each of them; a Prediction of all of them."""

from __future__ import annotations

from attnlens.records.measures import Count, Number, Record


class Predictor(Record):
    """One measure against the harm of one kernel, over heads."""

    measure: str
    """Its qualified name (`tokens.entropy`)."""
    rho: Number
    """Spearman's ρ of the measure with the harm, −1 to 1."""
    heads: Count
    """How many heads have both."""
    left_out: Count = 0
    """How many heads lack the measure, or diverged."""
    heads_ci95: tuple[Number, Number] | None = None
    """95 % interval over heads: bootstrap of heads (those of a shared module together)."""
    layers_ci95: tuple[Number, Number] | None = None
    """95 % interval over layers: bootstrap of whole layers."""
    sequences_ci95: tuple[Number, Number] | None = None
    """95 % interval over windows (or texts): the harm, and a measure of the text, read anew in each sample."""
    p_value: Number | None = None
    """Two-sided, by permutations of heads, of this measure alone."""
    p_corrected: Number | None = None
    """The same corrected for all measures looked at (maxT, Westfall & Young 1993)."""
    holds: bool = False
    """Whether p_corrected < 0.05, and the interval over layers lies on one side of 0."""
    values: list[Number | None] = []
    """The measure of each head, in the order of the sweep."""
    reasons: dict[str, str] = {}
    """Why a field of this record is null, by its name."""


class Prediction(Record):
    """What was looked at to find what predicts the harm of one kernel."""

    heads: Count
    """How many heads were looked at: all that were swept."""
    diverged: Count = 0
    """How many of them diverged, which have no harm."""
    measures: Count
    """How many measures were compared, for which p-values are corrected."""
    permutations: Count
    """Permutations of heads behind each p-value."""
    reliability: Number | None = None
    """2r/(1 + r), r Spearman's ρ over heads of the harms on two halves of the windows; at least 0."""
    ceiling: Number | None = None
    """√reliability: the ρ expected of a measure that told the harm but for the noise of the windows."""
    left_out: dict[str, str] = {}
    """Measures that were not compared, and why."""
    reasons: dict[str, str] = {}
    """Why a field of this record is null, by its name."""
