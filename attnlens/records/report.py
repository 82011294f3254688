"""Record of the report that a command makes, records of its parts, and the JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal, Self

from pydantic import ConfigDict, Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer, model_validator

from attnlens.choices import KINDS, Kind, Part
from attnlens.errors import UsageError
from attnlens.records.comparison import Check, Comparison, heads_with_changes
from attnlens.records.measures import AttentionRows, Count, Coverage, Head, Null, Number, Reasons, Record, Selection
from attnlens.records.plans import Plan
from attnlens.records.provenance import File, ModelInfo, Settings, Tool
from attnlens.records.studies import Experiment, StudyTable
from attnlens.records.swaps import Swap
from attnlens.wording import clean

if TYPE_CHECKING:
    import pandas
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Windows:
    """Values of every head (`inspect`), or of every stage of each kernel (`swap-kernel`), on every window."""

    windows: Sequence[tuple[str, int]]  # Name of each window's text, and the window's index in this text, from 0
    units: Sequence[Mapping[str, str | int]]  # Columns that name each head (layer, head) or stage (kernel, stage)
    values: Mapping[str, Float[Tensor, "windows units"]]  # Values by measure; NaN if missing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Windows) and all(
            row == other_row for row, other_row in zip_longest(self.rows(), other.rows())
        )

    def rows(self) -> Iterator[dict[str, str | int | float]]:
        """Yield one row per window and head (or stage), with text, window and the measures that have a value."""
        read = {name: part.tolist() for name, part in self.values.items()}
        for place, (text, number) in enumerate(self.windows):
            for column, unit in enumerate(self.units):
                numbers = {name: part[place][column] for name, part in read.items()}
                yield {
                    "text": text,
                    "window": number,
                    **unit,
                    **{name: value for name, value in numbers.items() if value == value},
                }


Severity = Literal["none", "notable", "problem"]
"""none: nothing differs from chance or from the original; notable: something differs; problem: the user must act."""


class Finding(Record):
    """Answer to one question about a report."""

    question: str  # Question in plain words: `Symmetric?`
    answer: str  # Answer in one sentence
    evidence: str = ""  # Numbers that support the answer: values with their errors, nulls or intervals
    severity: Severity = "notable"
    measures: list[str] = []  # Measures from which the answer is derived


Verdict = Literal["agrees", "partly checked", "not checked", "differs"]  # Verdict of `doctor` on a site, or on a model


class Environment(Record):
    """Versions of Python and libraries, and the platform, of the run."""

    python: str
    torch: str
    transformers: str
    platform: str


class Extreme(Record):
    """A head with one of the highest or lowest values of a measure among the model's heads (no significance test)."""

    layer: Count
    head: Count
    measure: str
    value: Number
    rank: Count  # Rank of the value, from 1, counted from the largest or from the smallest value
    of: Count  # Number of heads in the head's part of the model
    percentile: Number  # 100 · (number of heads with smaller values + ½)/number of heads
    text: str  # Rank, value and median in words: `largest tokens.share_position of 32: 0.0489, median 0.00635`


class TextSummary(Record):
    """Medians of tokens.* measures over heads, on the windows of one text."""

    name: str
    sequences: Count  # Number of the text's windows
    medians: dict[str, Number] = {}  # Median of each tokens.* measure over heads
    median_errors: dict[str, Number] = {}  # Standard errors of the medians over the text's windows
    reasons: Reasons = {}


class Summary(Record):
    """Summary of the model: medians over heads, the most extreme heads, and the verdict."""

    model_config = ConfigDict(populate_by_name=True)

    medians: dict[str, Number] = {}  # Median of each measure over heads
    median_errors: dict[str, Number] = {}  # Standard errors of the medians: bootstrap over windows (or texts)
    median_nulls: dict[str, Null] = {}  # Medians expected by chance for the same number of heads, by measure
    layers: list[dict[str, Number]] = []  # Medians over each layer's heads, by measure, in the order of `layer_numbers`
    layer_errors: list[dict[str, Number]] = []  # Standard errors of the medians in `layers`
    layer_nulls: list[dict[str, Null]] = []  # Medians expected by chance for each layer's number of heads
    layer_numbers: list[Count] = []  # Indices of the layers in execution order, from 0
    layer_symmetry: list[Number | None] = Field([], alias="weights.layer_symmetry")
    """Symmetry of the sum of M over each layer's heads (Saponati et al. 2025); `weights.layer_symmetry` in the JSON."""
    texts: list[TextSummary] = []
    between_texts: dict[str, Number] = {}  # Standard deviation of the texts' medians, by measure
    extremes: list[Extreme] = []  # Heads with the largest and smallest values, the furthest from the median first
    identity_error: Number | None = None  # Relative change in the model's outputs if attnlens recomputes attention
    reasons: Reasons = {}
    verdict: Verdict | None = None  # Verdict of `doctor`: `agrees` if everything was checked and nothing differs


class SiteCheck(Record):
    """Result of comparing the attention that attnlens computes at one site with the model's own (`doctor`)."""

    site: str
    part: Part
    heads: Count
    route: str  # How the site's weights were read
    tokens_error: Number | None  # ‖P − P_model‖/‖P_model‖ of attention weights P from the captured queries and keys
    weights_error: Number | None  # The same error, with queries and keys computed from weights and inputs
    reason: str | None = None  # Reason why an error is missing
    rounding: Number | None = None
    """Error of the model's own attention weights that rounding of large scores causes; None if no error needs this
    explanation."""
    passed: bool  # True if no error exceeds the tolerance, or the model's own rounding explains it
    verdict: Verdict | None = None
    """`differs` if an error exceeds the tolerance, `partly checked` if one error is missing, `not checked` if both are
    missing, else `agrees`; None in reports of version 1."""


class Sight(Record):
    """An output that depends on the wrong tokens, or that differs from the output without a cache (`doctor`)."""

    kind: Literal["sees", "misses", "differs"]
    """sees: the mask hides the token, but the output depends on it; misses: the mask shows the token, but the output
    does not depend on it; differs: the output differs from a pass without cache."""
    output: Count  # Position of the output
    token: Count | None  # Position of the token whose input was perturbed; None for `differs`
    layer: Count | None  # Sequential number of the site; None for the output of the whole model
    site: str | None
    change: Number | None  # Largest change in the output (`differs`: relative error of the output); None if not finite


class MaskCheck(Record):
    """Test of one property of the masks under one backend (`doctor`)."""

    mask: str
    verdict: Literal["agrees", "differs", "not checked"]
    error: Number | None = None
    """Relative error of the outputs against a float64 pass over each sequence on its own, without padding or cache."""
    error_judged: bool = True  # False if `error` is not judged, because the tokens' positions also change the outputs
    faults: list[Sight] = []  # The fault with the largest change at each site, in the order of the layers
    count: Count = 0  # Number of faults: pairs of output and token that are wrong
    reason: str | None = None  # Why the property was not checked, or why the test failed without a fault at a site


class SiteError(Record):
    """Relative error of a site's output under one backend."""

    site: str
    layer: Count
    error: Number | None  # None if the output is not finite


class BackendCheck(Record):
    """Comparison of the model under one attention backend with the model in float64 (`doctor`)."""

    backend: str
    verdict: Literal["agrees", "rounds", "differs", "not run"]
    """rounds: the error exceeds the tolerance, but rounding of the softmax in float32 explains it."""
    dtype: str | None = None  # Number type in which the backend ran; None if it was not run
    output_error: Number | None = None  # Relative error of the outputs that differ most
    tolerance: Number | None = None  # Largest relative error at which the verdict is `agrees`
    greedy_agreement: Number | None = None  # Share of positions with the same most likely token
    sites: list[SiteError] = []
    masks: list[MaskCheck] = []
    reason: str | None = None  # Reason why the backend was not run, or explanation of its error


class InspectionBody(Record):
    """Body of kind `inspection`: details of single heads, if requested; the measures are in the report's `heads`."""

    selections: list[Selection] = []  # Selected tokens per head (`inspect --show selection`)
    attention: list[AttentionRows] = []  # Attention on one sequence, per head (`inspect --show attention`)


class SwapBody(Swap):
    """Body of kind `swap`: the effect of the first kernel, the swaps of all other kernels, and the plan of ranks."""

    others: list[Swap] = []
    plan: Plan | None = None  # Ranks chosen within a budget (`ranks --budget`), or read from a plan (`--ranks`)


class Report(Record):
    """Results of one command: common fields, and a body in the field that `kind` names.

    The JSON contains no fields for bodies of other kinds; in Python, these fields are empty.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"properties": {"kind": {"const": kind}}, "required": ["kind", kind]} for kind in KINDS]
        }
    )

    schema_version: Literal["2"] = "2"
    kind: Kind  # Kind of the report, which is the name of the field that contains the body
    tool: Tool
    command: str
    model: ModelInfo
    settings: Settings
    environment: Environment
    coverage: Coverage
    heads: list[Head] = []
    summary: Summary = Summary()
    findings: list[Finding] = []  # Answers to questions, derived from the measures
    checks: list[Check] = []
    inspection: InspectionBody = InspectionBody()
    swap: SwapBody | None = None
    comparison: Comparison | None = None
    doctor: list[SiteCheck] = []
    backends: list[BackendCheck] | None = None  # Attention backends and masks; only in reports of kind `doctor`
    experiments: list[Experiment] = []
    studies: list[StudyTable] = []
    windows_file: File | None = None  # File of --windows-csv, in the folder of the report
    timings: dict[str, Number] = {}  # Seconds by stage
    peak_memory_bytes: Count = 0  # Largest resident memory of the process, in bytes
    _windows: Windows | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _check_body(self) -> Self:
        for kind in KINDS:
            body = getattr(self, kind)
            if kind == self.kind and body is None:
                raise ValueError(f"a report of kind {kind} needs the field {kind}")
            if kind != self.kind and body not in (None, [], InspectionBody()):
                raise ValueError(f"a report of kind {self.kind} must not have the field {kind}")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_other_bodies(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        others = {kind for kind in KINDS if kind != self.kind} | ({"backends"} if self.backends is None else set())
        return {name: field for name, field in handler(self).items() if name not in others}

    def __repr__(self) -> str:
        return clean(f"<Report {self.command} {self.model.id}: {self.coverage.sentence}>")

    __str__ = __repr__

    def __iter__(self) -> Iterator[Head]:  # type: ignore[override]  # pydantic's records iterate over fields
        return iter(self.heads)

    @property
    def windows(self) -> Windows | None:
        """Values of every window, which `--windows-csv` writes and the JSON omits; None if unknown."""
        return self._windows

    def with_windows(self, windows: Windows) -> Self:
        """Attach the values of every window to this report, and return the report."""
        self._windows = windows
        return self

    @property
    def swaps(self) -> list[Swap]:
        """Swaps of all kernels, in the order requested; empty if the report is not of kind `swap`."""
        return [self.swap, *self.swap.others] if self.swap is not None else []

    @property
    def plan(self) -> Plan | None:
        """Plan of ranks; None if the report lacks a plan or is not of kind `swap`."""
        return self.swap.plan if self.swap is not None else None

    def with_changes(self) -> Self:
        """Return a comparison's report with changes added to the heads' measures, and any other report unchanged."""
        if self.comparison is None or not self.comparison.rows:
            return self
        return self.model_copy(update={"heads": heads_with_changes(self.comparison, self.heads)})

    def measure_names(self) -> list[str]:
        """Return the names of the scalar measures that any head has, in the order of first appearance."""
        return list(dict.fromkeys(name for head in self.heads for name in head.measures))

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table with one row per head: layer, head, each measure with .se, .z and .base, part, key head, site.

        Raise UsageError if pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            problem = "Tables need pandas, which is not installed."
            remedy = "Run: pip install pandas. Or write a CSV file without pandas: report.save('heads.csv')."
            raise UsageError(problem, remedy) from None
        return pandas.DataFrame([head.cells() for head in self.heads])


def json_schema() -> str:
    """Return the JSON Schema of the report."""
    return json.dumps(Report.model_json_schema(), indent=1) + "\n"
