"""Records of experiments (values, curves, published values), and of studies that reproduce a paper's tables."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import JsonValue

from attnlens.records.measures import Count, Number, Reasons, Record
from attnlens.records.provenance import File

Bound = Literal["within", "at least", "at most"]
Origin = Literal["published", "reimplementation", "control"]
WIDEST = 1 / 3  # Largest tolerance, as a share of the reference, at which agreement of a figure counts as a test


class Curve(Record):
    """Values of a quantity at several steps: the median over trials or heads, with quartiles."""

    steps: list[Number]  # Iteration, training step, dimension or factor of each value
    median: list[Number | None]
    low: list[Number | None] | None = None  # First quartile at each step; None for a single trial or head
    high: list[Number | None] | None = None  # Third quartile at each step; None for a single trial or head
    quantity: str | None = None  # Quantity and unit, as on the axis label: `KL, nats`; None if unknown
    bounded: bool = False  # True for quantities of at most 1, such as shares, which are drawn on a linear axis
    picture: str | None = None
    """Title of the picture in which this curve is drawn, without the experiment's name. None: curves without a title
    share a picture if their quantity is known, and are drawn separately otherwise."""
    label: str | None = None  # Label in the legend, if it differs from the curve's name: `from zero`
    published: bool = False  # True for published values, which are drawn dashed
    null_of: str | None = None  # Curve that this null belongs to; `median`: the null's mean; `low`, `high`: mean ∓ sd


class Trajectory(Record):
    """Values of one measure of one head at the steps of the experiment."""

    layer: Count
    head: Count
    measure: str  # Qualified name
    values: list[Number | None]  # Value at each step; None if missing
    se: list[Number | None] | None = None  # Standard error at each step; None if unknown


class Experiment(Record):
    """An experiment: its question, the resulting figures (numbers), and reference values."""

    name: str
    question: str
    model: str | None = None  # Model that was used, if it is not the report's: `demo`
    settings: dict[str, JsonValue] = {}
    labels: dict[str, str] = {}  # Labels of figures and settings that differ from their names: `W_mm_d4`: `W_mm, d = 4`
    final: dict[str, Number | None]  # Resulting figures by name; None if missing
    errors: dict[str, Number] = {}  # Standard errors of the figures that are means over trials
    reasons: Reasons = {}  # Reasons why figures are None
    published: dict[str, Number] | None = None  # Reference values by figure; None if there are none
    origins: dict[str, Origin] = {}  # Origin of the reference values that are not `published` in the paper
    source: str | None = None  # Publication that contains the reference values
    tolerance: dict[str, Number] | None = None  # Largest difference from the reference value, by figure
    bounds: dict[str, Bound] = {}  # Figures whose reference is a lower or upper bound; others must be within tolerance
    passed: bool | None = None  # True if all tested figures agree with their reference; None if none was tested
    axis: str = "iteration"  # Unit of the curves' steps
    curves: dict[str, Curve] = {}
    trajectories: list[Trajectory] = []  # One per head and measure, if the steps are training checkpoints

    def meets(self, figure: str) -> bool | None:
        """Return True if a figure agrees with its reference value, False if it differs or is missing; None if untested.

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
        """Number of figures that agree with their reference value, keyed by the origin of that value."""
        return Counter(self.origins.get(figure, "published") for figure in self.published or {} if self.meets(figure))

    def null(self, name: str) -> Curve | None:
        """Return the curve that is the null of the curve `name`; None if there is none."""
        return next((curve for curve in self.curves.values() if curve.null_of == name), None)

    def judge(self) -> Experiment:
        """Return a copy with `passed` set: True if all tested figures meet their reference; None if none is tested."""
        verdicts = [met for figure in self.published or {} if (met := self.meets(figure)) is not None]
        return self.model_copy(update={"passed": all(verdicts) if verdicts else None})


LEVEL = 0.05  # Largest probability of at least one false decision among all pairs of a table


class StudyColumn(Record):
    """A column of a table: a task with its data, and the score by which cells are compared."""

    name: str
    form: Literal["language", "translation", "classification"]  # Kind of task
    metric: Literal["perplexity", "BLEU", "accuracy"]  # Measure of the paper; perplexity is compared by its logarithm
    higher_is_better: bool
    vocabulary: Count  # Number of input ids; 0 for a series
    length: Count  # Maximum number of tokens of a sequence
    files: list[File] = []
    sizes: dict[str, JsonValue]  # Layers, widths, steps and rates, which all cells of the column share
    left_out: dict[str, Count] = {}  # Number of omitted or changed examples, by part of the data or by kind of change
    repeated: Count = 0  # Number of example pairs left out of training because they are also held out
    published: str | None = None  # Data and measure of the paper's numbers; None if the paper has no numbers


class StudyRun(Record):
    """A training run of a cell, from one seed."""

    seed: Count
    scores: dict[str, Number] = {}  # Results on the test set, by measure; empty if the run did not converge
    steps: list[Count]  # Steps at which the validation loss was measured
    losses: list[Number]  # Validation loss at these steps, in nats per token or example
    seconds: Number  # Duration of training
    problem: str | None = None  # Reason why the run did not converge; None if it did


class StudyCell(Record):
    """A cell of a table: one attention variant trained on one task."""

    name: str  # Name of the row
    task: str  # Name of the column
    form: dict[str, JsonValue]  # Kernel, symmetry, positions and value function; the best form if several were searched
    rate: Number  # Learning rate
    forms: Count  # Number of forms searched at each learning rate
    searched: list[tuple[Number, Number | None]]  # Learning rate and validation loss of each trial; None: diverged
    mean: Number | None  # Mean score over runs (perplexity: exp of the mean loss); None if a run did not converge
    se: Number | None  # Standard error of `mean` over seeds (perplexity: `mean` · standard error of the mean loss)
    runs: list[StudyRun]
    parameters: Count  # Number of parameters of the model
    kernel_parameters: Count  # Number of parameters of the projections of queries, keys and positions
    tokens: Count  # Number of training tokens of a run, with repetitions; the largest number over runs
    tokens_per_second: Number  # Median over a few training steps, on one core or one GPU
    beside_sdpa: Number  # tokens_per_second, divided by that of a transformer with scaled_dot_product_attention
    heads: dict[str, Curve] = {}  # Medians over heads against the training step, in the first seed's run, by measure
    features: str = ""  # Feature dimension of the kernel per head, `∞` if it is infinite; empty if unknown
    published: Number | None = None  # Score in the paper; None if the paper has none
    published_diverged: bool = False  # True if the paper reports that training diverged

    @property
    def tested_evaluation(self) -> int:
        """Index, in the first run, of the evaluation with the least validation loss; that step's model was tested."""
        losses = self.runs[0].losses
        return min(range(len(losses)), key=losses.__getitem__, default=0)

    @property
    def problem(self) -> str | None:
        """Reason why the mean is missing; None if it exists."""
        failed = [run.problem for run in self.runs if run.problem]
        return f"{len(failed)} of {len(self.runs)} runs did not converge: {failed[0]}" if failed else None


class StudyPair(Record):
    """Comparison of two cells of a task over the same seeds."""

    task: str
    measure: str  # Compared measure: loss, BLEU or accuracy on the test set
    first: str  # Name of the first row
    second: str  # Name of the second row
    difference: Number  # Mean measure of the first cell − that of the second
    p: Number | None  # Two-sided p-value of the difference; None if runs have no spread
    p_holm: Number | None  # p corrected for all pairs of the table (Holm); None if p is None
    agrees: bool | None = None  # True if the paper ranks the two cells alike; None if its numbers are missing or equal


class StudyOrdering(Record):
    """Agreement between the order of a task's cells and the published order."""

    task: str
    measure: str
    tau: Number  # Kendall's τ_a of the measured means and the published numbers, each ranked from best to worst
    low: Number  # Lower 95 % bound: τ if all undecided pairs contradict the paper
    high: Number  # Upper 95 % bound: τ if all undecided pairs confirm the paper
    agree: Count  # Number of pairs with a significant difference (Holm, 5 %) of the same sign as in the paper
    disagree: Count  # Number of pairs with a significant difference of the opposite sign
    undecided: Count  # Number of pairs without a significant difference


class StudyTable(Record):
    """A table of a paper, reproduced by training."""

    name: str
    question: str
    source: str  # Publication and number of the table
    scale: str  # Name of the scale at which models were trained
    tasks: list[StudyColumn]
    cells: list[StudyCell]
    not_trained: list[str] = []  # Kinds of tasks that were not trained because no data was given
    pairs: list[StudyPair] = []
    orderings: list[StudyOrdering] = []  # One per task with at least two cells that are also in the paper
