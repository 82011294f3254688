"""A Baseline: what every head of a report read, as a small file that stands beside the code which it guards."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from attnlens.records.measures import HeadId, Number, Record, read_record
from attnlens.records.provenance import ModelInfo, Settings


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
