"""Records of `compare` (changes by head and measure) and of `check` (outcomes of rules, and baselines)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from attnlens.choices import CHANGE, Part
from attnlens.records.measures import Count, Head, HeadId, Measure, Number, Record, read_record
from attnlens.records.provenance import ModelInfo, Settings, convert_baseline
from attnlens.records.swaps import Outcome
from attnlens.wording import format_count


class Breach(Record):
    """A head, or a block of a comparison, that fails a check."""

    site: str  # Path of the attention module, or of the block
    layer: Count
    head: Count | None  # Number of the query head; None for a block
    part: Part
    value: Number | None  # Value in the report; None if missing
    base: Number | None = None  # Value in the baseline or in a second computation; None if missing
    p: Number | None = None  # Two-sided p-value of value − base; None if a standard error is missing


class Check(Record):
    """Outcome of one rule, or of a comparison with a baseline or recomputed values."""

    id: str  # Identifier that does not contain the rule's bounds: subject, aggregate, operator, filters
    rule: str  # The rule as written: `tokens.entropy: min > 0.05 @layers 0-3`
    subject: str  # Measure, one of its columns, or a field of the report
    wanted: str  # Condition: `min > 0.05`
    passed: bool
    value: Number | None = None  # Value that was compared; None if heads are compared individually
    median: Number | None = None  # Median over heads that are compared individually; else None
    base: Number | None = None  # Median over the compared heads in the baseline; None if there is no baseline
    heads: Count | None = None  # Number of heads compared; None for a field of the report
    without: Count = 0  # Number of selected heads without a value
    breaches: list[Breach] = []  # Heads or blocks that break the rule, worst first; empty if none does individually
    file: str | None = None  # File that contains the rule; None for a rule passed in the call

    @property
    def against_baseline(self) -> bool:
        """True if heads are compared with their values in a baseline."""
        return self.id.startswith("baseline: ")

    @property
    def short_rule(self) -> str:
        """The rule as written; for a comparison with a baseline, only the measure."""
        return self.subject if self.against_baseline else self.rule


def count_checks(checks: Sequence[Check]) -> str:
    """Format the number of rules, `2 rules`, or of measures if all checks compare them with a baseline."""
    return format_count(len(checks), "measure" if all(check.against_baseline for check in checks) else "rule")


class BaselineMeasure(Record):
    """Values and standard errors of one measure, in the order of the baseline's heads."""

    values: list[Number | None]  # Value per head; None if missing
    errors: list[Number | None]  # Standard error per head; None if unknown


class Baseline(Record):
    """Accepted values of all heads, with their standard errors."""

    kind: Literal["attnlens baseline"] = "attnlens baseline"  # Marker that distinguishes a baseline from a report
    schema_version: Literal["2"] = "2"
    model: ModelInfo
    settings: Settings
    heads: list[HeadId]
    measures: dict[str, BaselineMeasure]  # All scalar measures by qualified name

    @model_validator(mode="after")
    def _check_lengths(self) -> Baseline:
        for name, column in self.measures.items():
            if not len(column.values) == len(column.errors) == len(self.heads):
                raise ValueError(f"{name} must have one entry per head")
        return self


def read_baseline(path: str | Path) -> Baseline:
    """Read a baseline from a JSON file. Raise UsageError if the file is missing, is not JSON, or is not a baseline."""
    remedy = "Create a baseline with: attnlens check REPORT --baseline FILE --update-baseline"
    return read_record(Baseline, path, "not a baseline", remedy, convert_baseline)


BLOCKS = "compare.blocks"  # Subject of rules on the changes of a comparison's blocks
DISTANCE = "compare."  # Prefix of the names of measures that are distances between the two models
ON_FORMS = "W_Q and W_K of "  # First words of notes on the heads' forms M = W_Q W_Kᵀ
SMALLEST_SHARE = 0.01  # Smallest change in a measure that matters in practice, in interquartile ranges over heads
Relation = Literal["identical", "same form", "rounding", "changed"]
"""Relation of two heads' forms M = W_Q W_Kᵀ. identical: W_Q and W_K are equal; same form: M is equal, but W_Q and W_K
differ (a change of basis); rounding: M is equal up to rounding of the weights; changed: M differs."""


class MeasureChange(Record):
    """Change in one measure of one head from the first model to the second."""

    layer: Count
    head: Count  # Number of the query head in the first model
    measure: str  # Qualified name; `compare.…` are distances between both heads, 0 if the heads are equal
    before: Number | None = None  # Value in the first model; None if missing, and for distances
    after: Number | None = None  # Value in the second model; None if missing, and for distances
    delta: Number | None = None  # after − before, or the distance
    se: Number | None = None  # Standard error of delta over windows (or texts); None if no window was read
    rounding: Number | None = None  # RMS change caused by rounding of the weights alone; None if unknown
    beyond_rounding: bool | None = None  # True if rounding causes a change of this size in at most one of 1,000 heads
    p: Number | None = None  # Two-sided p-value; null hypothesis: sampling and rounding explain the change
    q: Number | None = None  # Smallest false-discovery rate at which the change is significant (Benjamini & Hochberg)
    least: Number | None = None  # Size of a change that this comparison detects with a probability of about 80 %
    smallest: Number | None = None  # Smallest change of practical size; None if it is not defined for this measure
    negligible: bool = False  # True if the 90 % interval of delta lies between −smallest and smallest
    named: bool = False  # True if the change is reported: q ≤ `Comparison.fdr`, and not negligible
    reason: str | None = None  # Reason why delta is missing


class HeadChange(HeadId):
    """A head of the first model, and the head of the second model with which it is compared."""

    partner: Count  # Number of the head at the same site of the second model with which this head is compared
    relation: Relation | None = None  # Relation between both heads' forms; None if it can't be computed
    reason: str | None = None  # Reason why the relation is missing


class BlockChange(Record):
    """Change in one block's output if both models receive the first model's hidden states."""

    path: str  # Dotted path of the block's module
    layers: list[Count]  # Indices of the block's sites
    change: Number | None  # ‖o' − o‖/‖o‖ of the output o, mean over windows; None if not finite
    rounding: Number | None = None  # Change that rounding of the weights alone causes; None if unknown
    p: Number | None = None  # p-value; null hypothesis: rounding explains the change
    q: Number | None = None  # Smallest false-discovery rate at which the change is significant
    smallest: Number | None = None  # Smallest change of practical size; None in reports of older versions
    negligible: bool = False  # True if the 90 % interval of the change lies below smallest
    named: bool = False  # True if the change is reported: q ≤ `Comparison.fdr`, and not negligible


class Spread(Record):
    """Distribution of a measure over the heads of one model."""

    heads: Count  # Number of heads
    quartiles: tuple[Number, Number, Number]  # First quartile, median, third quartile
    median_se: Number | None = None  # Standard error of the median over windows; None for weights.*


class Shift(Record):
    """Distributions of a measure over the heads of two models whose heads do not correspond."""

    measure: str
    before: Spread
    after: Spread


class ConfigChange(Record):
    """A configuration field that affects attention or hidden states, and differs between the models."""

    field: str  # Dotted name: `rope_parameters.rope_theta`
    first: str | None  # Value in the first model, as JSON; None if the field is missing
    second: str | None  # Value in the second model, as JSON; None if the field is missing


class TensorChanges(Record):
    """Names of the tensors that differ between the models or are missing from one of them."""

    total: Count  # Number of tensors that both models have
    differ: list[str] = []  # Tensors with different values
    missing: list[str] = []  # Tensors of the first model that the second lacks
    extra: list[str] = []  # Tensors of the second model that the first lacks
    types: tuple[str, str] | None = None
    """Each model's quantisation or, if none, the coarsest number type that represents its weights; None if equal."""

    @property
    def identical(self) -> bool:
        """True if both models have the same tensors with the same values."""
        return not (self.differ or self.missing or self.extra)


UNEXPLAINED = "not explained"  # Name for differences that no hypothesis explains


class DiagnosedCause(Record):
    """A hypothesis that explains how layers of the second model differ from those of the first."""

    hypothesis: str  # Short name, or UNEXPLAINED
    layers: list[Count]  # Numbers of the layers; empty for tensors outside of layers
    heads: list[Count] = []  # Query heads that differ; empty for all
    residual: Number  # Largest ‖B − T(A)‖/max(‖T(A)‖, ‖B‖) of a tensor, with the hypothesis T (UNEXPLAINED: identity)
    repair: str | None = None  # How to undo the difference, as an imperative; None if there is nothing to undo
    text: str  # How the second model's tensors differ, as a clause
    tensors: list[str] = []  # Tensors explained, by role (`query.weight`) or by name within the layer
    harmless: bool = False  # True if the attention is unchanged
    head_errors: list[Number] = []  # The larger of W_Q's and W_K's relative errors, by head; empty unless quantised


class Comparison(Record):
    """Differences between two models; the report's `heads` are those of the second model."""

    base: ModelInfo  # The first model
    paired: bool  # True if changes are paired by window; if False, errors assume two independent samples
    fdr: Number  # Requested false-discovery rate
    tests: Count = 0  # Number of rows with a p-value
    named: Count = 0  # Number of rows whose change is reported
    heads: list[HeadChange] = []
    rows: list[MeasureChange] = []
    blocks: list[BlockChange] = []  # Changes in blocks that run once per forward pass and exist in both models
    shifts: list[Shift] = []
    outcome: Outcome | None = None
    notes: list[str] = []  # Findings about the models as a whole, one sentence each
    config: list[ConfigChange] = []  # Fields that affect attention or hidden states and differ
    tensors: TensorChanges | None = None  # Differing tensors; None if a report was compared instead of a model
    diagnosis: list[DiagnosedCause] = []  # Causes of the differences, by layers


def heads_with_changes(comparison: Comparison, heads: Sequence[Head]) -> list[Head]:
    """Return the first model's heads with the changes (`change.…`) and their partners' values as measures."""
    changes: dict[tuple[int, int], dict[str, Measure]] = defaultdict(dict)
    for row in comparison.rows:
        name = row.measure if row.measure.startswith(DISTANCE) else f"{CHANGE}{row.measure}"
        reason = None if row.delta is not None else row.reason or "neither model has a value"
        changes[row.layer, row.head][name] = Measure(value=row.delta, se=row.se, reason=reason)
    named = Counter((row.layer, row.head) for row in comparison.rows if row.named)
    for layer_and_head, measures in changes.items():
        measures[f"{DISTANCE}named"] = Measure(value=named[layer_and_head])
    by_head = {(head.layer, head.head): head for head in heads}
    return [
        Head(
            **head.model_dump(include=set(HeadId.model_fields)),
            measures=changes[head.layer, head.head] | by_head[head.layer, head.partner].measures,
            curves=by_head[head.layer, head.partner].curves,
        )
        for head in comparison.heads
    ]
