"""Experiments with published values and curves; the results of a study, and how they agree with a paper."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from attnlens.records.measures import Count, Number, Record
from attnlens.records.provenance import File

Bound = Literal["within", "at least", "at most"]


class Curve(Record):
    """A quantity against steps: the median over trials or heads, and its quartiles."""

    steps: list[Number]
    """Where it was read: iteration, training step, dimension, factor."""
    median: list[Number | None]
    """Median at each step; None if there is no value."""
    low: list[Number | None] | None = None
    """First quartile."""
    high: list[Number | None] | None = None
    """Third quartile."""
    quantity: str | None = None
    """Quantity and unit, as on the axis label: `KL, nats`; None if unknown."""
    bounded: bool = False
    """True if the quantity ends at 1 by its nature, as a share does, so that a linear axis shows it whole."""
    picture: str | None = None
    """The title, after the experiment's name, of the picture whose axes it shares with others; None: it shares those of
    the experiment's other curves, and where its quantity is not known has axes of its own."""
    label: str | None = None
    """How it is written among the lines of its picture, where that is not its name: `from zero`."""
    published: bool = False
    """True if it is what was published, which is drawn dashed."""
    null_of: str | None = None
    """The name of the curve whose null it is: mean in `median`, and one sd below and above."""


class Trajectory(Record):
    """One head's measure against the steps of its experiment."""

    layer: Count
    """The site's running number."""
    head: Count
    """The query head's number."""
    measure: str
    """Qualified name of the measure."""
    values: list[Number | None]
    """One value per step; None if missing."""
    se: list[Number | None] | None = None
    """Standard error of each."""


class Experiment(Record):
    """One experiment: what was asked, what came out, and what was published."""

    name: str
    """Short and fixed: `local convergence`."""
    question: str
    """Question that the experiment answers, in one line."""
    model: str | None = None
    """What it ran on, where that is another model than the report's: `demo`."""
    settings: dict[str, JsonValue] = {}
    """Sizes, learning rate, seeds."""
    labels: dict[str, str] = {}
    """How a figure or a setting is written, where that is not its name with blanks for underscores: `W_mm_d4` is
    `W_mm, d = 4`."""
    final: dict[str, Number | None]
    """The figures found."""
    errors: dict[str, Number] = {}
    """Standard error of a figure, where it is a mean over trials."""
    reasons: dict[str, str] = {}
    """Reason why a figure in `final` is None."""
    published: dict[str, Number] | None = None
    """The same figures as published, where they are."""
    source: str | None = None
    """Publication."""
    tolerance: dict[str, Number] | None = None
    """Allowed difference between a figure and the published one."""
    bounds: dict[str, Bound] = {}
    """Whether the published figure is met within the tolerance on both sides (where not named here), or is the least or
    most that is allowed."""
    passed: bool | None = None
    """True if every published figure is met; None if there is none."""
    axis: str = "iteration"
    """Unit of the steps of its curves."""
    curves: dict[str, Curve] = {}
    """Curves by name."""
    trajectories: list[Trajectory] = []
    """Head by head, where the steps are training checkpoints."""

    def meets(self, figure: str) -> bool | None:
        """Return whether a figure meets the published one; None if none was published, False if it has no value."""
        if self.published is None or figure not in self.published:
            return None
        value, expected = self.final.get(figure), self.published[figure]
        if value is None:
            return False
        slack = (self.tolerance or {}).get(figure, 0.0)
        bound = self.bounds.get(figure, "within")
        if bound == "at least":
            return value >= expected - slack
        if bound == "at most":
            return value <= expected + slack
        return abs(value - expected) <= slack

    def null(self, name: str) -> Curve | None:
        """Return the null of one of the curves; None if it has none."""
        return next((curve for curve in self.curves.values() if curve.null_of == name), None)

    def judge(self) -> Experiment:
        """Return the experiment with `passed` filled in."""
        verdicts = [self.meets(figure) for figure in self.published or {}]
        return self.model_copy(update={"passed": all(verdicts) if verdicts else None})


LEVEL = 0.05
"""Probability of any false decision among all pairs of a table."""


class StudyColumn(Record):
    """One column: what the cells were trained on and by which measure they are compared."""

    name: str
    """Name."""
    form: Literal["language", "translation", "classification"]
    """Next tokens, a sentence for a sentence, or a class."""
    metric: Literal["perplexity", "BLEU", "accuracy"]
    """What the paper measures: perplexity is compared by its logarithm, the loss."""
    higher_is_better: bool
    """True if higher is better."""
    vocabulary: Count
    """Ids of its inputs; 0 for a series."""
    length: Count
    """Most tokens of a sequence."""
    files: list[File] = []
    """The files read; none for what is built in."""
    sizes: dict[str, JsonValue]
    """Layers, widths, steps, rates: the same for all its cells."""
    left_out: dict[str, Count] = {}
    """How many examples are not as the files have them, by part or by what was done to them."""
    repeated: Count = 0
    """Pairs left out of training because they are held out too."""
    published: str | None = None
    """Data and measure of the paper's numbers; None if it has none."""


class StudyRun(Record):
    """One training run of a cell, from one seed."""

    seed: Count
    """Seed of weights, order and dropout."""
    scores: dict[str, Number] = {}
    """Results on the test set; empty if it did not converge."""
    steps: list[Count]
    """Steps at which the validation loss was measured."""
    losses: list[Number]
    """Validation loss there, in nats."""
    seconds: Number
    """Duration of the training steps."""
    problem: str | None = None
    """Reason why it did not converge; None if it did."""


class StudyCell(Record):
    """One way to attend on one task."""

    name: str
    """The row."""
    task: str
    """The column."""
    form: dict[str, JsonValue]
    """Kernel, symmetry, positions, value function; if several were searched, the chosen one."""
    rate: Number
    """The learning rate that the search chose."""
    forms: Count
    """How many forms the search had to choose from, at each learning rate."""
    searched: list[tuple[Number, Number | None]]
    """(learning rate, validation loss) of the search; None if a run did not converge."""
    mean: Number | None
    """Of the task's measure over the runs; of perplexity, the exponential of the mean loss. None if a run did not
    converge."""
    se: Number | None
    """The mean's standard error over seeds; of perplexity, perplexity times that of the loss."""
    runs: list[StudyRun]
    """One a seed."""
    parameters: Count
    """Of the model."""
    kernel_parameters: Count
    """Of them, in projections of queries, keys and positions."""
    tokens: Count
    """That each run was trained on."""
    tokens_per_second: Number
    """The median over a few training steps, on one core or one GPU."""
    beside_sdpa: Number
    """tokens_per_second over that of a standard transformer (exponential kernel, Eq. 4) whose attention is torch's
    scaled_dot_product_attention, step by step in the same loop."""
    heads: dict[str, Curve] = {}
    """Medians over heads against the training step, of the first seed's run, by measure."""
    features: str = ""
    """Feature dimension of its kernel, one head's: `∞` where it is infinite; empty if nothing is known of it."""
    published: Number | None = None
    """Value reported by the paper."""
    published_diverged: bool = False
    """True if the paper reports that it did not converge."""

    @property
    def tested_look(self) -> int:
        """Index of the look with the least validation loss in the first seed's run; its weights were tested."""
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
    """The column."""
    measure: str
    """By which they are compared: loss, BLEU or accuracy on the test set."""
    first: str
    """A row."""
    second: str
    """Another."""
    difference: Number
    """First − second."""
    p: Number | None
    """Two-sided, of no difference; None if runs have no spread."""
    p_holm: Number | None
    """Corrected for all pairs of the table (Holm)."""
    agrees: bool | None = None
    """True if the better of the two is the same as in the paper; None if the paper has no numbers or equal ones."""


class StudyOrdering(Record):
    """How the order of a task's cells agrees with the published one."""

    task: str
    """The column."""
    measure: str
    """By which ours are ordered."""
    tau: Number
    """Kendall's τ_a of our means and the published numbers, better first in both."""
    low: Number
    """Lower end of its 95 % interval: every undecided pair against the paper."""
    high: Number
    """Upper end: every undecided pair as published."""
    agree: Count
    """Pairs that are decided here (Holm, 5 %), as in the paper."""
    disagree: Count
    """Pairs that are decided here, the other way."""
    undecided: Count
    """Pairs that this number of seeds cannot distinguish."""


class StudyTable(Record):
    """One table of a paper, trained again."""

    name: str
    """As on the command line."""
    question: str
    """Question."""
    source: str
    """Publication."""
    scale: str
    """tiny, small or paper."""
    tasks: list[StudyColumn]
    """The columns."""
    cells: list[StudyCell]
    """Column by column, row by row."""
    not_trained: list[str] = []
    """Forms of task that the table has and no data was given for."""
    pairs: list[StudyPair] = []
    """Of cells that converged."""
    orderings: list[StudyOrdering] = []
    """Of tasks with two cells or more that the paper has too."""
