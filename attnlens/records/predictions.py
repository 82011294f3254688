"""A Predictor: how a measure of heads goes with the harm of a kernel in each of them; a Prediction of all of them."""

from __future__ import annotations

from attnlens.choices import Part
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


class Unswept(Record):
    """A head that `--sweep predicted` left out."""

    layer: Count
    """The site's running number."""
    head: Count
    """The query head."""
    part: Part
    """encoder, decoder or cross."""
    reason: str
    """Why it was not swept."""


class SweepOrder(Record):
    """How `--sweep predicted` went."""

    drawn: Count
    """How many heads were drawn at random and swept first."""
    measure: str | None = None
    """The measure that ordered the others; None where none stood."""
    rho: Number | None = None
    """Its Spearman's ρ with the harm over the heads drawn."""
    p_corrected: Number | None = None
    """Its permutation p over them, corrected for all measures; None where no measure has one."""
    most: Count
    """How many of the most harmful heads the sweep is after."""
    expected: Number | None = None
    """Expected number of them among the heads not swept, when it stopped; at most 0.05."""
    rule: str
    """By which rule it stopped, or why it did not."""
    not_swept: list[Unswept] = []
    """The heads that were not swept, those of the largest predicted harm first."""


class Prediction(Record):
    """What was looked at to find what predicts the harm of one kernel."""

    heads: Count
    """How many heads were looked at: all that were swept, or those drawn at random where the sweep stopped early."""
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
    order: SweepOrder | None = None
    """How the sweep was ordered, where a measure was to order it."""
    reasons: dict[str, str] = {}
    """Why a field of this record is null, by its name."""
