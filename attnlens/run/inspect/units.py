"""The units of work of an inspection: what each reads, and what names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attnlens.records import Site

GATHERED_TOGETHER = 4
"""Sites over which gatherers look in one pass through the texts: a pass for each would cost as many, and one for all
would hold the tokens of all."""


@dataclass(frozen=True)
class WorkUnit:
    """A part of an inspection that is read by itself, whatever else is."""

    stage: Literal["weights", "tokens", "gathered"]
    """What it reads."""
    sites: tuple[Site, ...]
    """Of which sites."""
    batch: int | None = None
    """Of which batch; None where it reads weights, or all batches."""

    @property
    def name(self) -> str:
        """What tells it from the others of its run, and people what it is."""
        if self.stage == "tokens":
            return f"tokens of batch {self.batch}"
        layers = f"{self.sites[0].layer}" if len(self.sites) == 1 else f"{self.sites[0].layer}–{self.sites[-1].layer}"
        return f"{self.stage} of layer{'s' * (len(self.sites) > 1)} {layers}"


def units_of(sites: Sequence[Site], batches: int, *, weights: bool, gathering: bool) -> list[WorkUnit]:
    """All units of a run, in the order in which a report takes them in."""
    found = [WorkUnit("weights", (site,)) for site in sites if weights]
    found += [WorkUnit("tokens", tuple(sites), batch) for batch in range(batches)]
    if gathering and batches:
        blocks = range(0, len(sites), GATHERED_TOGETHER)
        found += [WorkUnit("gathered", tuple(sites[start : start + GATHERED_TOGETHER])) for start in blocks]
    return found
