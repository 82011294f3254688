"""Records of experiments (values, curves, published values), and of studies that reproduce a paper's tables."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import JsonValue

from attnlens.records.measures import Count, Number, Reasons, Record
from attnlens.records.provenance import File

Bound = Literal["within", "at least", "at most"]
Origin = Literal["published", "reimplementation", "control"]
WIDEST = 1 / 3  # Largest tolerance, as a share of the reference value, with which a figure counts as tested


class Curve(Record):
    """Values of a quantity at several steps: the median over trials or heads, with quartiles."""

    steps: list[Number]  # Iteration, training step, dimension or factor of each value
    median: list[Number | None]
    low: list[Number | None] | None = None  # Lower quartiles; None if the curve has no quartiles
    high: list[Number | None] | None = None  # Upper quartiles; None if the curve has no quartiles
    quantity: str | None = None  # Quantity and unit, as on the axis label: `KL, nats`; None if unknown
    bounded: bool = False  # True for quantities of at most 1, such as shares, which are drawn on a linear axis
    picture: str | None = None
    """Title (after the experiment's name) of the picture in which this curve shares axes with others. None: the axes of
    the other curves, or separate axes if the quantity is unknown."""
    label: str | None = None  # Label in the legend, if it differs from the curve's name: `from zero`
    published: bool = False  # True for published values, which are drawn dashed
    null_of: str | None = None  # Curve for which this curve is the null: mean (`median`) ± 1 sd (`low`, `high`)


class Trajectory(Record):
    """Values of one head's measure at the steps of an experiment."""

    layer: Count
    head: Count
    measure: str
    values: list[Number | None]
    se: list[Number | None] | None = None


class Experiment(Record):
    """One experiment: question, results and published values."""

    name: str
    question: str
    model: str | None = None  # Model that was used, if it is not the report's: `demo`
    settings: dict[str, JsonValue] = {}
    labels: dict[str, str] = {}  # Labels of figures and settings that differ from their names: `W_mm_d4`: `W_mm, d = 4`
    final: dict[str, Number | None]
    errors: dict[str, Number] = {}  # Standard errors of the figures that are means over trials
    reasons: Reasons = {}  # Reasons for the figures that are None
    published: dict[str, Number] | None = None  # Reference values of the same figures, whose origin is in `origins`
    origins: dict[str, Origin] = {}  # Origin of the reference values that the paper does not state
    source: str | None = None  # Origin of the reference values, in words
    tolerance: dict[str, Number] | None = None  # Largest accepted distance of each figure from its reference value
    bounds: dict[str, Bound] = {}  # Figures with a lower or upper bound; the others must be within tolerance
    passed: bool | None = None  # True if all tested figures agree with their reference; None if none was tested
    axis: str = "iteration"  # Unit of the steps of its curves
    curves: dict[str, Curve] = {}
    trajectories: list[Trajectory] = []  # One per head and measure, if the steps are training checkpoints

    def meets(self, figure: str) -> bool | None:
        """Return True if a figure agrees with its reference value, else False; None if it is not tested.

        A figure is not tested if it has no reference value, or if it lies within a tolerance that is too wide (WIDEST)
        to show agreement.
        """
        if self.published is None or figure not in self.published:
            return None
        value, expected = self.final.get(figure), self.published[figure]
        if value is None:
            return False
        slack, bound = (self.tolerance or {}).get(figure, 0.0), self.bounds.get(figure, "within")
        inside = (bound == "at least" or value <= expected + slack) and (
            bound == "at most" or value >= expected - slack
        )
        return None if inside and expected and slack > WIDEST * abs(expected) else inside

    @property
    def untested(self) -> list[str]:
        """Names of the figures that lie within a tolerance too wide to show agreement."""
        return [figure for figure in self.published or {} if self.meets(figure) is None]

    @property
    def agreeing(self) -> Counter[Origin]:
        """Number of figures that agree with their reference value, by its origin."""
        return Counter(self.origins.get(figure, "published") for figure in self.published or {} if self.meets(figure))

    def null(self, name: str) -> Curve | None:
        """Return the curve that is the null of the curve `name`; None if there is none."""
        return next((curve for curve in self.curves.values() if curve.null_of == name), None)

    def judge(self) -> Experiment:
        """Return a copy of the experiment with `passed` set."""
        verdicts = [met for figure in self.published or {} if (met := self.meets(figure)) is not None]
        return self.model_copy(update={"passed": all(verdicts) if verdicts else None})


LEVEL = 0.05  # Probability of any false decision among all pairs of a table


class StudyColumn(Record):
    """One column of a table: the training data of its cells, and the score by which they are compared."""

    name: str
    form: Literal["language", "translation", "classification"]
    metric: Literal["perplexity", "BLEU", "accuracy"]  # The paper's measure; perplexity is compared by its logarithm
    higher_is_better: bool
    vocabulary: Count  # Number of input ids; 0 for a series
    length: Count  # Maximum number of tokens of a sequence
    files: list[File] = []
    sizes: dict[str, JsonValue]  # Layers, widths, steps and rates, which all its cells share
    left_out: dict[str, Count] = {}  # Number of omitted or changed examples, by part or by the change
    repeated: Count = 0  # Number of pairs left out of training because they are also in the held-out data
    published: str | None = None  # Data and measure of the paper's numbers; None if the paper has none


class StudyRun(Record):
    """One training run of a cell, from one seed."""

    seed: Count
    scores: dict[str, Number] = {}  # Results on the test set; empty if it did not converge
    steps: list[Count]  # Steps at which the validation loss was measured
    losses: list[Number]
    seconds: Number
    problem: str | None = None  # Reason why it did not converge; None if it did


class StudyCell(Record):
    """One attention variant trained on one task."""

    name: str
    task: str
    form: dict[str, JsonValue]  # Kernel, symmetry, positions, value function; if several were searched, the chosen one
    rate: Number
    forms: Count  # Number of forms searched at each learning rate
    searched: list[tuple[Number, Number | None]]  # (learning rate, validation loss) of the search; None: diverged
    mean: Number | None  # Mean score over runs (perplexity: exp of the mean loss); None if a run did not converge
    se: Number | None  # Standard error of the mean over seeds; for perplexity, perplexity times that of the loss
    runs: list[StudyRun]
    parameters: Count  # Number of parameters of the model
    kernel_parameters: Count  # Number of parameters of its projections of queries, keys and positions
    tokens: Count  # Number of training tokens of the run with the most
    tokens_per_second: Number  # Median over a few training steps, on one core or one GPU
    beside_sdpa: Number  # tokens_per_second / that of a transformer with torch's scaled_dot_product_attention
    heads: dict[str, Curve] = {}  # Medians over heads against the training step, of the first seed's run, by measure
    features: str = ""  # Feature dimension of its kernel per head, `∞` if it is infinite; empty if unknown
    published: Number | None = None  # The paper's value; None if the paper has none
    published_diverged: bool = False  # True if the paper reports that training did not converge

    @property
    def tested_evaluation(self) -> int:
        """Index of the least validation loss in the first run's `losses`; the weights of that step were tested."""
        losses = self.runs[0].losses
        return min(range(len(losses)), key=losses.__getitem__, default=0)

    @property
    def problem(self) -> str | None:
        """Reason why the cell has no mean; None if it has one."""
        failed = [run.problem for run in self.runs if run.problem]
        return f"{len(failed)} of {len(self.runs)} runs did not converge: {failed[0]}" if failed else None


class StudyPair(Record):
    """Two cells of a task, compared over the same seeds."""

    task: str
    measure: str  # Compared measure: loss, BLEU or accuracy on the test set
    first: str  # Name of the first cell
    second: str  # Name of the second cell
    difference: Number  # Mean of the first cell − mean of the second
    p: Number | None  # Two-sided p of no difference; None if runs have no spread
    p_holm: Number | None  # p corrected for all pairs of the table (Holm)
    agrees: bool | None = (
        None  # True if the paper ranks the cells in the same order; None if its numbers are missing or equal
    )


class StudyOrdering(Record):
    """Agreement between the order of a task's cells and the published order."""

    task: str
    measure: str
    tau: Number  # Kendall's τ_a of our means and the published numbers, better first in both
    low: Number  # Lower 95 % bound of τ: all undecided pairs contradict the paper
    high: Number  # Upper 95 % bound of τ: all undecided pairs confirm the paper
    agree: Count
    disagree: Count
    undecided: Count
    """Numbers of pairs with a significant difference (Holm, 5 %) as in the paper, with the opposite one, or neither."""


class StudyTable(Record):
    """One table of a paper, reproduced by training."""

    name: str
    question: str
    source: str
    scale: str
    tasks: list[StudyColumn]
    cells: list[StudyCell]
    not_trained: list[str] = []
    pairs: list[StudyPair] = []
    orderings: list[StudyOrdering] = []  # One per task with at least two cells that are also in the paper
