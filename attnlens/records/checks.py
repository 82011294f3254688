"""A Check: how one rule came out on one report; a Baseline: what every head of one read, to hold others against."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from attnlens.choices import Part
from attnlens.records.measures import Count, HeadId, Number, Record, read_record
from attnlens.records.provenance import ModelInfo, Settings


class Breach(Record):
    """One head that breaks a rule."""

    site: str
    """The site's name."""
    layer: Count
    """The site's running number."""
    head: Count
    """The query head's number."""
    part: Part
    """encoder, decoder, cross or a tower's name."""
    value: Number | None
    """What it reads; None where it has no value any more."""
    base: Number | None = None
    """What the baseline says, or a second computation read."""
    p: Number | None = None
    """Two-sided p of a difference as large by chance; None where the value has no standard error."""


class Check(Record):
    """How one rule came out."""

    id: str
    """What stays the same when the rule's numbers are changed: subject, aggregate, operator, filters."""
    rule: str
    """The rule as it is written: `tokens.entropy: min > 0.05 @layers 0-3`."""
    subject: str
    """What is looked at: a measure, one of its columns, or a field of the report."""
    wanted: str
    """What must hold: `min > 0.05`."""
    passed: bool
    """Whether it holds."""
    value: Number | None = None
    """What was compared; None where heads are compared one by one, and not together."""
    heads: Count | None = None
    """Over how many heads; None for a field of the report."""
    without: Count = 0
    """How many heads that the rule names have no value, and are left out."""
    breaches: list[Breach] = []
    """The heads that break it, the worst first; empty where it holds or is about all heads together."""
    file: str | None = None
    """The file in which the rule stands; None for one that was given in the call."""


class BaselineMeasure(Record):
    """One measure of all heads, in the order of the baseline's heads."""

    values: list[Number | None]
    """Its values; None where a head has none."""
    errors: list[Number | None]
    """Their standard errors."""


class Baseline(Record):
    """What every head read when it was accepted: values and standard errors, without curves, nulls and times."""

    kind: Literal["attnlens baseline"] = "attnlens baseline"
    """What tells it from a report."""
    schema_version: Literal["1"] = "1"
    """Version of this layout."""
    model: ModelInfo
    """Which model, with the hashes of its files."""
    settings: Settings
    """What was asked for, and what was fed."""
    heads: list[HeadId]
    """Head by head, in the report's order."""
    measures: dict[str, BaselineMeasure]
    """Every scalar by qualified name."""

    @model_validator(mode="after")
    def _as_long_as_heads(self) -> Baseline:
        for name, column in self.measures.items():
            if not len(column.values) == len(column.errors) == len(self.heads):
                raise ValueError(f"{name} is not as long as the heads")
        return self


def read_baseline(path: str | Path) -> Baseline:
    """Read a baseline. Raises UsageError where the file is missing, is not JSON, or is no baseline."""
    return read_record(
        Baseline, path, "not a baseline", "Make one with: attnlens check REPORT --baseline FILE --update-baseline"
    )
