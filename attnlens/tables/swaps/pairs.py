"""Which of a report's kernels belong together? A kernel and its symmetric form, as in Tsai et al. 2019, Table 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from attnlens.records import Report, Swap

SYMMETRIC = "symmetric"


@dataclass(frozen=True)
class Compared:
    """One kernel in both forms."""

    name: str
    """Its spelling without the tie."""
    asymmetric: Swap | None
    """The kernel as it is."""
    symmetric: Swap | None
    """The mean of log k and its transpose."""

    @property
    def swaps(self) -> Iterator[Swap]:
        """Those that there are."""
        return (swap for swap in (self.asymmetric, self.symmetric) if swap is not None)


def compared(report: Report) -> list[Compared]:
    """A row a kernel, in the order of the report."""
    known = {swap.kernel for swap in report.swaps}
    names: dict[str, dict[bool, Swap]] = {}
    for swap in report.swaps:
        name, tied = _without_tie(swap.kernel)
        if tied and name not in known:  # asked for in this form alone, it is a kernel of its own
            name, tied = swap.kernel, False
        names.setdefault(name, {})[tied] = swap
    return [Compared(name, forms.get(False), forms.get(True)) for name, forms in names.items()]


def _without_tie(spelling: str) -> tuple[str, bool]:
    """The kernel's own spelling, and whether it stands in its symmetric form; alone, the tie goes with exponential."""
    # The plus of 1e+06 joins nothing.
    parts = re.split(r"(?<!\d[eE])\+", spelling)
    others = [part for part in parts if part != SYMMETRIC]
    return "+".join(others) or "exponential", len(others) < len(parts)
