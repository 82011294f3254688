"""Records of measures, coverage and selected tokens, and functions that read and write records as JSON."""

from __future__ import annotations

import json
import math
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError
from pydantic.functional_serializers import PlainSerializer, model_serializer
from pydantic.functional_validators import model_validator

from attnlens.choices import Part, Space
from attnlens.errors import UsageError
from attnlens.files import format_value, local_path, read_bytes, write_atomically
from attnlens.wording import format_count, shorten_line

Number = Annotated[float, PlainSerializer(lambda number: float(f"{number:.9g}"), float, when_used="json")]
"""Real number, written with nine significant digits."""


def _check_count(number: int) -> int:
    if number > 2**63 - 1:
        raise ValueError("counts must be below 2^63")
    return number


Count = Annotated[int, Field(ge=0), AfterValidator(_check_count)]
Interval = tuple[Number, Number]  # Lower and upper end of a 95 % interval
Reasons = dict[str, str]  # Reason for each null or empty field of the record, by field name


class Record(BaseModel):
    """Base class of the frozen parts of a report; unknown fields, such as those of a newer attnlens, are ignored."""

    # validators are built at first use, so that a command waits only for those of the records that it reads
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, defer_build=True)

    def __repr__(self) -> str:
        """Return the fields, shortened to fit on a few lines."""
        return shorten_line(super().__repr__(), 300)

    __str__ = __repr__

    def to_json(self) -> str:
        """Return the record as JSON text with nine significant digits and without terminal control characters."""
        text = self.model_dump_json(indent=1, by_alias=True)
        return STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"

    def write_json(self, path: str | Path) -> None:
        """Write the JSON to `path` atomically. Raise OutputError if the path can't be written."""
        write_atomically(local_path(path), self.to_json().encode())


STEERING = re.compile("[\x7f-\x9f]")  # Characters that JSON allows but that control a terminal
Read = TypeVar("Read", bound=Record)


def read_record(
    kind: type[Read],
    path: str | Path,
    mismatch: str,
    remedy: str,
    convert: Callable[[Mapping[str, object]], Mapping[str, object]] | None = None,
) -> Read:
    """Read a record of class `kind` from an untrusted JSON file; `convert`, if given, upgrades a file of version 1.

    Raise UsageError if the file is missing or invalid. `mismatch` (such as `not a plan`) and `remedy` are parts of the
    error message.
    """
    content = read_bytes(local_path(path), UsageError, remedy).removeprefix(BOM_UTF8)
    try:
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            version = next((each["input"] for each in error.errors() if each["loc"] == ("schema_version",)), None)
            if version != "1" or convert is None:
                raise
            return kind.model_validate(convert(json.loads(content)))
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("schema_version",):
            problem = (
                f"{path} has schema_version {format_value(first['input'])}; this version of attnlens reads '1' and '2'."
            )
            remedy = "Create the file again with this version of attnlens, or read it with the version that wrote it."
            raise UsageError(problem, remedy) from None
        if first["loc"] == ("kind",) and isinstance(first["input"], str):
            raise UsageError(f"{path} is {mismatch}: its kind is {format_value(first['input'])}.", remedy) from None
        where = "".join(f"{part}." for part in first["loc"])
        reason = f"{where[:-1]}: {first['msg']}" if where else first["msg"]
        raise UsageError(f"{path} is {mismatch}: {reason}.", remedy) from None


class Null(Record):
    """Value expected by chance: mean and sd over heads with independent Gaussian factors of the same shape.

    For selection.*: mean and sd over random rotations, on both sides, of the head's form in the measure's space.
    """

    mean: Number
    sd: Number


class Measure(Record):
    """Value of one measure of one head, with its standard error or null, or the reason why the value is missing."""

    value: Number | None  # Mean over sequences (tokens.*), value of the weights or of all queries; None if missing
    label: str | None = None  # Name of the category if the value is a category's number; else None
    se: Number | None = None  # Standard error of the mean over sequences (over texts if there are at least five)
    se_reason: str | None = None  # Reason why the standard error is missing
    n: Count | None = None  # Number of sequences (tokens.*), matrices (weights.*) or queries (selection.*)
    null: Null | None = None  # Value expected by chance; None if the measure has no null
    base: Number | None = None  # Value without the adapter (weights.* of a model with an adapter)
    reason: str | None = None  # Reason why the value is missing

    @model_validator(mode="after")
    def _check_value_or_reason(self) -> Measure:
        if (self.value is None) == (self.reason is None):
            raise ValueError("a measure must have either a value or a reason for its absence")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: field for name, field in handler(self).items() if name == "value" or field is not None}

    @property
    def z(self) -> float | None:
        """(value − null mean) / null sd; None if the value or the null is missing, if sd is 0, or on overflow."""
        if self.value is None or self.null is None or self.null.sd == 0:
            return None
        quotient = (self.value - self.null.mean) / self.null.sd
        return quotient if math.isfinite(quotient) else None


class HeadId(Record):
    """Site and number of a head."""

    site: str  # Name of the site: module path, with #ordinal if the module is called more than once
    layer: Count  # Index of the site in execution order, from 0
    head: Count  # Number of the query head within the site, from 0
    kv_head: Count  # Number of this query head's key head within the site, from 0
    part: Part  # Part of the model: `encoder`, `decoder`, `cross`, …


class Head(HeadId):
    """Measures and curves of one head."""

    measures: dict[str, Measure] = {}  # Scalars by qualified name (`weights.symmetry`)
    curves: dict[str, list[Number]] = {}  # Values of each curve, such as a spectrum, by qualified name

    def cells(self) -> dict[str, str | int | float | None]:
        """Return a table row: layer, head, each measure with .se, .z and .base if known, part, key head and site."""
        row: dict[str, str | int | float | None] = {"layer": self.layer, "head": self.head}
        for name, measure in self.measures.items():
            row[name] = measure.value if measure.label is None else measure.label
            parts = {"se": measure.se, "z": measure.z, "base": measure.base}
            row |= {f"{name}.{part}": value for part, value in parts.items() if value is not None}
        return row | {"part": self.part, "kv_head": self.kv_head, "site": self.site}


OPENERS = ("A", "An", "Its", "No", "None", "The", "There", "This")  # First words of a sentence that are not names


def _clause(sentence: str) -> str:
    """Convert a sentence to a clause: drop the final period, and lower-case the first word if it is in OPENERS."""
    first, blank, remainder = sentence.strip().rstrip(".").partition(" ")
    return (first.lower() if first in OPENERS else first) + blank + remainder


class Skipped(Record):
    """A part of the model that was not analysed, with the reason."""

    site: str  # Name of the site, or path of the module
    heads: list[Count] = []  # Numbers of the heads; empty means all
    measure: str | None = None  # Measure or source; None means all
    reason: Annotated[str, AfterValidator(_clause)]  # Reason, as a clause that follows `because`


class Coverage(Record):
    """Counts of requested and analysed heads, and the parts that were skipped."""

    sites: Count  # Number of requested sites
    heads: Count  # Number of requested heads
    analysed: Count  # Number of heads with at least one value
    model_sites: Count | None = None  # Number of sites of the whole model, requested or not; None if unknown
    model_heads: Count | None = None  # Number of heads of the whole model, requested or not; None if unknown
    without: dict[str, Count] = {}  # Number of analysed heads without a value from a requested source, by source
    skipped: list[Skipped] = []

    @property
    def complete(self) -> bool:
        """True if everything that was requested was measured."""
        return self.analysed == self.heads and not self.without and not self.skipped

    @property
    def sentence(self) -> str:
        """Summary: `COMPLETE: 72 of 72 heads`, or `PARTIAL: 60 of 72 heads, without tokens.*, because …`."""
        count = f"{self.analysed} of {format_count(self.heads, 'head')}"
        if self.complete:
            return f"COMPLETE: {count}"
        lacking = sorted(self.skipped, key=lambda skip: skip.measure not in self.without)  # missing sources come first
        reasons = list(dict.fromkeys(skip.reason for skip in lacking)) or ["this input does not reach all heads"]
        others = f" (and {format_count(len(reasons) - 1, 'more reason')})" if len(reasons) > 1 else ""
        return f"PARTIAL: {count}{self._lacking}, because {reasons[0]}{others}"

    @property
    def _lacking(self) -> str:
        """Text about missing values: the sources without values or, if all heads were analysed, the skipped sites."""
        lacking = [
            f"{'' if count == self.analysed else f'{count} of them '}without {source}.*"
            for source, count in self.without.items()
        ]
        if not lacking and self.analysed == self.heads and self.skipped:
            more = len({skip.site for skip in self.skipped}) - 1
            lacking = [f"without {self.skipped[0].site}" + (f" and {more} more" if more else "")]
        return "".join(f", {words}" for words in lacking)


class Pick(Record):
    """One query of a selection problem, and the tokens that the head selects for this query."""

    sequence: Count  # Index of the sequence among the inputs, from 0
    query: Count  # Position of the query among its sequence's tokens
    selected: list[Count]  # Positions of the selected tokens: one, or those with the requested share of weight
    support: list[Count]  # Positions of the support tokens, whose constraints are active in the SVM (λ > 0)
    weight: Number  # p_max, the largest attention weight
    margin: Number  # Smallest margin of the query / best margin 1/‖W_mm‖ of the SVM W_mm; ≥ 1 if the head equals it


class Sentence(Record):
    """Tokens of a sequence, to which the positions in picks or attention rows refer."""

    sequence: Count  # Index of the sequence among the inputs, from 0
    keys: list[str]  # Tokens of the keys
    queries: list[str] | None = None  # Tokens of the queries if they differ (cross-attention); else None


class Selection(HeadId):
    """A head's selection problem and its solution."""

    space: Space  # Space in which the problem is posed: the module's inputs, or queries and keys
    picks: list[Pick]
    best: Number  # 1/‖W_mm‖_F of the SVM W_mm: the largest minimum margin of any form of unit norm
    null_margins: list[list[Number]] = []  # Per random head: margins of queries / best possible margin, ascending
    sentences: list[Sentence] = []


class AttentionRows(HeadId):
    """Largest attention weights of each query of one sequence."""

    sequence: Count  # Index of the sequence among the inputs, from 0
    keys: list[list[Count]]  # For each query, the positions of the keys with the largest weights, largest first
    weights: list[list[Number]]  # For each query, the weights of the keys in `keys`
    rest: list[Number]  # For each query, the sum of all other weights
    sentence: Sentence | None = None  # The tokens; None if the model reads no text, or queries or keys are not tokens

    @model_validator(mode="after")
    def _check_sizes(self) -> AttentionRows:
        if not len(self.keys) == len(self.weights) == len(self.rest):
            raise ValueError("keys, weights and rest have different numbers of queries")
        if any(len(places) != len(row) for places, row in zip(self.keys, self.weights, strict=True)):
            raise ValueError("a query has different numbers of keys and weights")
        if self.sentence is not None:
            queries = self.sentence.keys if self.sentence.queries is None else self.sentence.queries
            beyond = any(place >= len(self.sentence.keys) for places in self.keys for place in places)
            if beyond or len(queries) != len(self.keys):
                raise ValueError("the sentence's tokens do not match the rows")
        return self
