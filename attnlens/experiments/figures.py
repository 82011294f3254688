"""Rows of figures, from which an Experiment is made, and its curves over trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, Unpack

from attnlens.records.experiments import Bound, Curve

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

CORRELATION = "correlation"
NORMS = {"frobenius": "Frobenius", "nuclear": "nuclear"}
"""How the norms are written."""


class Published(TypedDict, total=False):
    """What a figure is judged by; empty where nothing was published."""

    published: float | None
    tolerance: float | None
    """How far the figure may be from it; None: not at all."""
    bound: Bound


@dataclass(frozen=True)
class Figure:
    """A row of an experiment's table."""

    value: float | None
    error: float | None = None
    """The standard error, where the value is a mean over trials."""
    label: str | None = None
    """How the figure is written, where that is not its name with blanks for underscores."""
    published: float | None = None
    tolerance: float | None = None
    bound: Bound = "within"


class Columns(TypedDict):
    """The fields of an Experiment that its rows fill."""

    final: dict[str, float | None]
    errors: dict[str, float]
    reasons: dict[str, str]
    published: dict[str, float] | None
    tolerance: dict[str, float] | None
    bounds: dict[str, Bound]
    labels: dict[str, str]


def columns(rows: Mapping[str, Figure], missing: str = "", labels: Mapping[str, str] | None = None) -> Columns:
    """The rows as fields of an Experiment; `missing`: why rows have no value; `labels`: how settings are written."""
    return {
        "final": {name: row.value for name, row in rows.items()},
        "errors": {name: row.error for name, row in rows.items() if row.error is not None},
        "reasons": {name: missing for name, row in rows.items() if row.value is None},
        "published": {name: row.published for name, row in rows.items() if row.published is not None} or None,
        "tolerance": {name: row.tolerance for name, row in rows.items() if row.tolerance is not None} or None,
        "bounds": {name: row.bound for name, row in rows.items() if row.bound != "within"},
        "labels": {name: row.label for name, row in rows.items() if row.label is not None} | dict(labels or {}),
    }


def averaged(values: Float[Tensor, " trials"], label: str | None = None, **known: Unpack[Published]) -> Figure:
    """The mean over the trials that have a value, None where none has, ± its standard error from two values on."""
    there = values[~values.isnan()]
    mean = float(there.mean()) if len(there) else None
    error = float(there.std() / len(there) ** 0.5) if len(there) > 1 else None
    return Figure(mean, error, label, **known)


def share_of(share: float, trials: int, label: str, published: float | None, theirs: int) -> Figure:
    """A share of our trials. May be 3 √(p(1 − p)(1/n + 1/n')) from the published p, at least one trial from 0 and 1."""
    error = math.sqrt(share * (1 - share) / trials)
    if published is None:
        return Figure(share, error, label)
    p = min(max(published, 1 / trials), 1 - 1 / trials)
    return Figure(share, error, label, published, 3 * math.sqrt(p * (1 - p) * (1 / trials + 1 / theirs)))


class Shown(TypedDict, total=False):
    """How a curve is drawn, as in records.Curve."""

    bounded: bool
    picture: str | None
    label: str | None


def curve(
    steps: Sequence[float], values: Float[Tensor, "steps trials"], quantity: str, **shown: Unpack[Shown]
) -> Curve:
    """Median and quartiles over the trials that have a value."""
    low, median, high = (
        [None if row.isnan().all() else row.nanquantile(share).item() for row in values] for share in (0.25, 0.5, 0.75)
    )
    return Curve(steps=list(steps), median=median, low=low, high=high, quantity=quantity, **shown)
