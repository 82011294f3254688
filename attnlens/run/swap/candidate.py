"""One kernel on its way through a swap: its stages, what was measured, and its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from attnlens import hooks, texts
from attnlens.kernels import Kernel
from attnlens.records import Healing, ModelInfo, Pair, Stage, Swap
from attnlens.requests.swap import SwapOptions
from attnlens.run.outcomes.differences import Differences
from attnlens.run.swap.ranks.from_plan import origin
from attnlens.run.swap.ranks.search import Choice
from attnlens.run.swap.resources import speed
from attnlens.run.swap.sites import Local, mean_of


@dataclass
class Candidate:
    """One kernel and how far it has come."""

    kernel: Kernel
    """As asked for."""
    stages: dict[str, hooks.Swaps]
    """The swap at each stage: swapped, fitted, healed."""
    found: dict[str, Differences] = field(default_factory=dict)
    """What was measured at each stage."""
    healing: Healing | None = None
    """How it was healed."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Healed weights by name."""
    choice: Choice | None = None
    """The ranks that a budget allows."""

    @property
    def last(self) -> hooks.Swaps:
        """The swap at the last stage."""
        return list(self.stages.values())[-1]

    def record(
        self, outcomes: Mapping[str, dict[str, Any]], local: Local, gates: dict[str, Any], peaks: Pair, **facts: Any
    ) -> Swap:
        """What is told of it: its outcome by stage, its sites, the gates that it passed; `facts`: other fields."""
        last, reasons = list(outcomes.values())[-1], dict(gates["reasons"])
        found, kernel = list(self.found.values())[-1], self.kernel
        if kernel.info.form == "output":
            reasons["off_simplex"] = "there is no attention matrix"
        if peaks.after is None:
            reasons["peak_memory_bytes"] = "this platform does not tell it"
        return Swap(
            kernel=kernel.spelling if self.choice is None else kernel.info.name,
            formula=kernel.formula,
            formula_of="output" if kernel.info.form == "output" else "log k",
            parameters=dict(kernel.parameters) if self.choice is None else {},
            fitted=sorted(next(iter(self.last.values())).kernel.fitted),
            sites=local.sites,
            **gates | last | {"reasons": reasons | last["reasons"]},
            off_simplex=mean_of(site.off_simplex for site in local.sites),
            tokens_per_second=Pair(
                before=speed(found.sizes, found.own_seconds), after=speed(found.sizes, found.seconds)
            ),
            peak_memory_bytes=peaks,
            stages=[Stage(name=stage, **outcome) for stage, outcome in outcomes.items()],
            healing=self.healing,
            **facts,
        )


def swap_notes(options: SwapOptions, model: ModelInfo, shared: float, kernel: Kernel) -> list[str]:
    """What a reader must know of the options, a sentence each; `shared`: share of tokens that calibrated as well."""
    notes = [] if options.ranks is None else origin(options.ranks, model)
    if shared:
        share = f"{100 * shared:.2g} % of the evaluated tokens"
        notes.append(f"{share} stand in the calibration text too, in runs of {texts.RUN} tokens or whole lines.")
    if options.fit and kernel.info.needs_fit:
        notes.append(f"--fit changes nothing: {kernel.info.name} is fitted with it and without it.")
    if options.sweep and options.heal is not None:
        notes.append("The sweep shows the heads and layers as they are before healing.")
    return notes
