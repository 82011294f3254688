"""An Experiment: figures with errors, published values, verdict and curves."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from attnlens.records.measures import Count, Number, Record

Bound = Literal["within", "at least", "at most"]


class Curve(Record):
    """A quantity against steps: the median over trials or heads, and its quartiles."""

    steps: list[Number]
    """Where it was read: iteration, training step, dimension, factor."""
    median: list[Number | None]
    """Median at each step; None where there is no value."""
    low: list[Number | None] | None = None
    """First quartile."""
    high: list[Number | None] | None = None
    """Third quartile."""
    quantity: str | None = None
    """What it shows, with its unit, as it stands beside the axis: `KL, nats`; None where that is not known."""
    bounded: bool = False
    """Whether the quantity ends at 1 by its nature, as a share does, so that a linear axis shows it whole."""
    picture: str | None = None
    """The title, after the experiment's name, of the picture whose axes it shares with others; None: it shares those of
    the experiment's other curves, and where its quantity is not known has axes of its own."""
    label: str | None = None
    """How it is written among the lines of its picture, where that is not its name: `from zero`."""
    published: bool = False
    """Whether it is what was published, which is drawn dashed."""
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
    """One a step; None where there is no value."""
    se: list[Number | None] | None = None
    """Standard error of each."""


class Experiment(Record):
    """One experiment: what was asked, what came out, and what was published."""

    name: str
    """Short and fixed: `local convergence`."""
    question: str
    """What it asks, in one line."""
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
    """Why a figure of `final` is None."""
    published: dict[str, Number] | None = None
    """The same figures as published, where they are."""
    source: str | None = None
    """Where they were published."""
    tolerance: dict[str, Number] | None = None
    """How far a figure may be from the published one."""
    bounds: dict[str, Bound] = {}
    """Whether the published figure is met within the tolerance on both sides (where not named here), or is the least or
    most that is allowed."""
    passed: bool | None = None
    """Whether every published figure is met; None where there is none."""
    axis: str = "iteration"
    """What the steps of its curves count."""
    curves: dict[str, Curve] = {}
    """Curves by name."""
    trajectories: list[Trajectory] = []
    """Head by head, where the steps are training checkpoints."""

    def meets(self, figure: str) -> bool | None:
        """Whether one figure meets the published one; None where nothing was published, False where it has no value."""
        if self.published is None or figure not in self.published:
            return None
        found, expected = self.final.get(figure), self.published[figure]
        if found is None:
            return False
        slack = (self.tolerance or {}).get(figure, 0.0)
        bound = self.bounds.get(figure, "within")
        if bound == "at least":
            return found >= expected - slack
        if bound == "at most":
            return found <= expected + slack
        return abs(found - expected) <= slack

    def null(self, name: str) -> Curve | None:
        """The null of one of the curves; None where it has none."""
        return next((curve for curve in self.curves.values() if curve.null_of == name), None)

    def judged(self) -> Experiment:
        """The same experiment with `passed` filled in."""
        verdicts = [self.meets(figure) for figure in self.published or {}]
        return self.model_copy(update={"passed": all(verdicts) if verdicts else None})
