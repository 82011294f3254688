"""The facts about a measure that tables, pictures and nulls need; those of the distances that `compare` measures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

NOT_IDENTIFIED = "Not identified: other queries and keys with the same attention read otherwise."


@dataclass(frozen=True)
class MeasureInfo:
    """What a measure is called, what it means, and when it does not exist."""

    name: str
    """Qualified by source: `weights.symmetry`."""
    meaning: str
    """One line in plain words."""
    formula: str
    """The formula, in the notation of the docstrings."""
    low: float | None = None
    """Least possible value."""
    high: float | None = None
    """Largest possible value."""
    curve: bool = False
    """Whether it is a curve (one number a step) and not a scalar."""
    self_only: bool = True
    """Whether queries and keys must live on the same domain, so that cross-attention has no value."""
    labels: tuple[str, ...] = ()
    """Names of the categories 0, 1, … where the value is a category."""
    missing: str = "not a number"
    """Why there is no value where the analyzer returns NaN."""
    grows_with_factors: bool = False
    """Whether it is proportional to ‖Q‖‖K‖ (its null is then rescaled to the head's own norms)."""
    has_null: bool = True
    """Whether independent Gaussian factors are a null for it (weights.* scalars only)."""
    null: Literal["factors", "rotations"] = "factors"
    """What its null draws, where it has one: those factors, or random rotations of the head's own M."""
    steps: str = "index"
    """What a curve's steps count, as its picture's axis says it: index, distance in tokens."""
    headline: bool = False
    """Whether it stands first in tables and on the overview."""
    identified: Literal["everywhere", "all pairs", "nowhere"] = "everywhere"
    """For which heads the attention fixes it: all; those that see all pairs (others have no value); none (it reads
    queries and keys, and others with the same attention read otherwise)."""
    wholes: tuple[str, ...] = ()
    """The wholes of which it is a part: measures of one source that name the same whole sum to 1 in every head."""
    by_depth: bool = False
    """Whether a curve is to be seen in the first, middle and last third of the layers, side by side."""
    ends: Literal["", "largest", "both"] = ""
    """Which of its ends are worth a place among the most extreme heads; empty where neither is."""
    beside: str = ""
    """The measure that says what even attention would read, for one whose size says little without it."""
    matrix: str = ""
    """Which matrix it is of, where others of its name are of others: `M`."""
    series: int = 0
    """Its place, from 1 on, among the measures that a series of checkpoints is about; 0: it stands behind them."""
    space: str = ""
    """Where the question is posed, in a word, if an analyzer poses it in several spaces: their numbers are answers to
    different questions, and stand apart from each other in tables and pictures."""
    use: str = ""
    """What to do with the answer, in a sentence or two."""
    paper: str = ""
    """Where it was published, with the equation or figure; empty where nowhere."""

    sized_by: str = ""
    """What its size goes with beside what it measures (`head_dim`): heads of models that differ in it can't be compared
    by it. Empty where nothing does; the window's length, with which all tokens.* go, is not named."""

    @property
    def caution(self) -> str:
        """What to know where the attention does not fix it; empty where it does."""
        if self.identified == "all pairs":
            return "Identified for heads that see all pairs; others have no value."
        return "" if self.identified == "everywhere" else NOT_IDENTIFIED


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
