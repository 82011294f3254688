"""How far a head may be from what a baseline says."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from attnlens.errors import UsageError
from attnlens.files import written
from attnlens.registry import MeasureInfo

RELATIVE, FDR = 0.05, 0.05
"""Where none are named."""


@dataclass(frozen=True)
class Tolerance:
    """A head has moved where it is off by more than either bound, and by more than chance."""

    relative: float = RELATIVE
    """Of the baseline's value."""
    absolute: float | None = None
    """In the measure's own unit; None: `relative` of the measure's range, where it has one."""
    fdr: float = FDR
    """The share of heads that may be named by chance, of those that are named by a p-value."""

    def __str__(self) -> str:
        return f"±{100 * self.relative:g} %" + (f", ±{self.absolute:g}" if self.absolute else "")

    def of(self, info: MeasureInfo) -> Tolerance:
        """The same for one measure: between −1 and 1, 5 % are 0.1, so that what is near 0 may move as what is not."""
        bounded = info.low is not None and info.high is not None
        width = info.high - info.low if bounded else 0.0  # type: ignore[operator]  # neither is None
        return self if self.absolute is not None else replace(self, absolute=self.relative * width)

    def __post_init__(self) -> None:
        """Raise UsageError for bounds that make no sense."""
        for name, most in (("relative", math.inf), ("absolute", math.inf), ("fdr", 1.0)):
            number: Any = getattr(self, name)
            if name == "absolute" and number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < most:
                raise UsageError(f"{name}={written(number)} is no tolerance.", "Give a number from 0 on, such as 0.05.")
