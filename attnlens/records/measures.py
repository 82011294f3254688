"""A Measure: a value with its standard error or null, or the reason why there is none."""

from __future__ import annotations

import math
import re
from codecs import BOM_UTF8
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_serializer,
    model_validator,
)

from attnlens.choices import Part
from attnlens.errors import UsageError
from attnlens.files import local_path, read_bytes, written


def _nine_digits(number: float) -> float:
    return float(f"{number:.9g}")


Number = Annotated[float, PlainSerializer(_nine_digits, when_used="json")]


def _countable(number: int) -> int:
    if number > 2**63 - 1:
        raise ValueError("no count is beyond 2^63")
    return number


Count = Annotated[int, Field(ge=0), AfterValidator(_countable)]


class Record(BaseModel):
    """A frozen noun of the report; fields that a newer attnlens added are ignored when reading."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def to_json(self) -> str:
        """The record as JSON text; numbers carry nine significant digits, no character steers a terminal."""
        text = self.model_dump_json(indent=1, by_alias=True)
        return STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


STEERING = re.compile("[\x7f-\x9f]")
"""Characters that JSON may hold and a terminal may obey."""
Read = TypeVar("Read", bound=Record)


def read_record(kind: type[Read], path: str | Path, otherwise: str, remedy: str) -> Read:
    """The record in a JSON file, checked field by field: it may come from a stranger.

    Raises UsageError, which says `remedy`, where the file is missing, is not JSON, or is `otherwise`
    (`not a report`).
    """
    content = read_bytes(local_path(path), UsageError, remedy)
    try:
        return kind.model_validate_json(content.removeprefix(BOM_UTF8))
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("schema_version",):
            found, known = written(first["input"]), first["ctx"]["expected"]
            raise UsageError(
                f"{path} has schema_version {found}, and this attnlens reads {known}.",
                "Make it anew with this attnlens, or read it with the one that made it.",
            ) from None
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"{path} is {otherwise}: {where}: {first['msg']}.", remedy) from None


class Null(Record):
    """What a measure reads by chance alone: independent Gaussian factors of the same shape; selection.*: the head's own
    form in the measure's space, turned by random rotations on both sides.
    """

    mean: Number
    """Mean of the measure under the null."""
    sd: Number
    """Standard deviation of the measure under the null."""


class Measure(Record):
    """One number about one head: its value with error bar or null, or the reason why there is none."""

    value: Number | None
    """The mean over sequences (tokens.*) or the number itself (weights.*)."""
    label: str | None = None
    """The name of a category, where the value is a category's number."""
    se: Number | None = None
    """Standard error of the mean over sequences (from five texts on, over texts)."""
    se_reason: str | None = None
    """Why there is no standard error of a value that should have one."""
    n: Count | None = None
    """How many sequences (tokens.*), matrices (weights.*) or posed queries (selection.*) the value rests on."""
    null: Null | None = None
    """The same measure under the null model."""
    base: Number | None = None
    """What it reads without the adapter (weights.* of a model with one)."""
    reason: str | None = None
    """Why there is no value."""

    @model_validator(mode="after")
    def _value_or_reason(self) -> Measure:
        if (self.value is None) == (self.reason is None):
            raise ValueError("a measure has either a value or the reason why it has none")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_nulls(self, handler: Any) -> dict[str, Any]:
        return {name: field for name, field in handler(self).items() if name == "value" or field is not None}

    @property
    def z(self) -> float | None:
        """(value − null mean) / null sd, or None where either is missing or the quotient is beyond all numbers."""
        if self.value is None or self.null is None or self.null.sd == 0:
            return None
        found = (self.value - self.null.mean) / self.null.sd
        return found if math.isfinite(found) else None


class HeadId(Record):
    """Which head of which site."""

    site: str
    """The site's name: module path, with #ordinal where the module is called more than once."""
    layer: Count
    """The site's running number."""
    head: Count
    """The query head's number."""
    kv_head: Count
    """The number of the key head that it uses."""
    part: Part
    """encoder, decoder or cross."""


class Head(HeadId):
    """All that was measured of one head."""

    measures: dict[str, Measure] = {}
    """Scalars by qualified name (`weights.symmetry`)."""
    curves: dict[str, list[Number]] = {}
    """Curves by qualified name, one number a step."""
