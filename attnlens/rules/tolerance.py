"""How far a head may be from what a baseline says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from attnlens.errors import UsageError
from attnlens.files import written

RELATIVE, ABSOLUTE, FDR = 0.05, 0.01, 0.05
"""Where none are named; most measures are shares, of which a hundredth is nothing that one would act on."""


@dataclass(frozen=True)
class Tolerance:
    """A head has moved where it is off by more than either bound, and by more than chance."""

    relative: float = RELATIVE
    """Of the baseline's value."""
    absolute: float = ABSOLUTE
    """In the measure's own unit."""
    fdr: float = FDR
    """The share of heads that may be named by chance, of those that are named by a p-value."""

    def __str__(self) -> str:
        return f"±{100 * self.relative:g} %, ±{self.absolute:g}"

    def __post_init__(self) -> None:
        """Raise UsageError for bounds that make no sense."""
        for name, most in (("relative", math.inf), ("absolute", math.inf), ("fdr", 1.0)):
            number: Any = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < most:
                raise UsageError(f"{name}={written(number)} is no tolerance.", "Give a number from 0 on, such as 0.05.")
