"""Median and quartiles of a curve over heads, for each part of the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnlens.choices import Part
from attnlens.registry import MeasureInfo
from attnlens.shapes import Shapes

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Band:
    """Median and quartiles of one curve over the heads of one part; every step rests on the same heads."""

    part: Part
    """encoder, decoder or cross."""
    quartiles: Float[np.ndarray, "3 steps"]
    """Lower quartile, median, upper quartile."""
    counted: int
    """The heads whose lines are long enough, and which it rests on."""
    heads: int
    """All heads of the part that have the curve."""

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return int(self.quartiles.shape[1])


def bands(shapes: Shapes, name: str) -> list[Band]:
    """A band for every part that has the curve: parts see different inputs, so their quartiles are not mixed."""
    groups: dict[Part, list[Float[np.ndarray, " steps"]]] = {}
    for row, curve in sorted(shapes.curves[name], key=lambda found: found[0]):
        groups.setdefault(shapes.parts[row], []).append(curve)
    return [_band(part, curves) for part, curves in groups.items()]


def long_enough(curves: list[Float[np.ndarray, " steps"]]) -> Float[np.ndarray, "heads steps"]:
    """The curves that are at least as long as most are (the longer ones of two that tie), cut to that length."""
    lengths = Counter(map(len, curves))
    steps = max(lengths, key=lambda length: (lengths[length], length))
    return np.stack([curve[:steps] for curve in curves if len(curve) >= steps])


def first_step(info: MeasureInfo) -> int:
    """The number of a curve's first step: an index k counts from 1, as in the formulas, a distance from 0."""
    return 1 if info.steps == "index" else 0


def _band(part: Part, curves: list[Float[np.ndarray, " steps"]]) -> Band:
    counted = long_enough(curves)
    return Band(part, np.percentile(counted, [25, 50, 75], axis=0), len(counted), len(curves))
