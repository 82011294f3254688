"""One kernel on its way through a swap: its stages, what was measured, and its record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnlens import hooks, texts
from attnlens.kernels import Kernel
from attnlens.kernels.modifiers import NEAR_WEIGHT
from attnlens.kernels.state import HeadShape
from attnlens.records import Control, Healing, ModelInfo, Pair, Settings, Site, Stage, Swap
from attnlens.requests.swap import SwapOptions
from attnlens.run.outcomes.differences import Differences
from attnlens.run.perplexity import guess_notes
from attnlens.run.swap.controls.alternatives import Alternative, alternatives, mean_state, window_beyond
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
    controls: list[Alternative] = field(default_factory=list)
    """The simple alternatives to it."""
    measured: dict[object, Differences] = field(default_factory=dict)
    """What was measured of them, by their keys."""
    window: int | str = ""
    """Beyond how many keys evidence may lie, or why there is no such number."""
    state: float | None = None
    """Numbers that a swapped head keeps."""
    agreements: dict[str, dict[str, Any]] = field(default_factory=dict)
    """How long each stage's greedy continuations are the original's, as fields of an Outcome."""

    @property
    def last(self) -> hooks.Swaps:
        """The swap at the last stage."""
        return list(self.stages.values())[-1]

    @property
    def fitted(self) -> list[str]:
        """The parameters that were chosen per head from text: not those at their random start."""
        kernel = next(iter(self.last.values())).kernel
        start = set() if kernel.info.fit_reads or "healed" in self.stages else set(kernel.own_fitted)
        return sorted(set(kernel.chosen) - start)

    def weigh(self, shapes: Mapping[Site, HeadShape]) -> None:
        """Find its state, and the controls of that size."""
        self.controls, self.state = alternatives(self.last, shapes), mean_state(self.last, shapes)
        self.window = window_beyond(self.last, self.controls, shapes)

    def outcomes(self, seed: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The fields of an Outcome at each stage; `names` are those of the texts."""
        outcomes = {}
        for stage, found in self.found.items():
            outcome, agreement = found.outcome(seed, names, self.window), self.agreements.get(stage, {})
            reasons = outcome["reasons"] | agreement.get("reasons", {})
            outcomes[stage] = outcome | agreement | {"reasons": reasons}
        return outcomes

    def control_records(self, seed: int, names: Sequence[str]) -> list[Control]:
        """What was measured of its controls."""
        return [one.record(self.measured.get(one.key), seed, names, self.window) for one in self.controls]

    def record(
        self, outcomes: Mapping[str, dict[str, Any]], local: Local, gates: dict[str, Any], peaks: Pair, **facts: Any
    ) -> Swap:
        """What is told of it: its outcome by stage, its sites, the gates that it passed; `facts`: other fields."""
        last, reasons = list(outcomes.values())[-1], dict(gates["reasons"])
        found, kernel = list(self.found.values())[-1], self.kernel
        if kernel.info.form == "output":
            reasons |= {"off_simplex": "there is no attention matrix", "state": "it keeps neither keys nor values"}
        if peaks.after is None:
            reasons["peak_memory_bytes"] = "this platform does not tell it"
        return Swap(
            kernel=kernel.spelling if self.choice is None else kernel.info.name,
            formula=kernel.formula,
            formula_of="output" if kernel.info.form == "output" else "log k",
            parameters=dict(kernel.parameters) if self.choice is None else {},
            fitted=self.fitted,
            sites=local.sites,
            **gates | last | {"reasons": reasons | last["reasons"]},
            off_simplex=mean_of(site.off_simplex for site in local.sites),
            tokens_per_second=Pair(
                before=speed(found.sizes, found.own_seconds), after=speed(found.sizes, found.seconds)
            ),
            peak_memory_bytes=peaks,
            stages=[Stage(name=stage, **outcome) for stage, outcome in outcomes.items()],
            healing=self.healing,
            state=self.state,
            **facts,
        )


def guessed(found: Differences, settings: Settings, vocabulary: int | None) -> list[str]:
    """A note for each text that the original guesses worse than evenly."""
    texts_of, sampled = [text.name for text in settings.texts], found.sampled
    means, counts = torch.cat(found.before), torch.cat(found.counts)
    return guess_notes(means, counts, [texts_of[number] for number in sampled.texts], vocabulary or math.inf)


def swap_notes(options: SwapOptions, model: ModelInfo, shared: float, candidate: Candidate) -> list[str]:
    """What a reader must know of the options, a sentence each; `shared`: share of tokens that calibrated as well."""
    notes = [] if options.ranks is None else origin(options.ranks, model)
    if shared:
        share = f"{100 * shared:.2g} % of the evaluated tokens"
        notes.append(f"{share} stand in the calibration text too, in runs of {texts.RUN} tokens or whole lines.")
    notes += _unchosen(options, candidate)
    if options.sweep and options.heal is not None:
        notes.append("The sweep shows the heads and layers as they are before healing.")
    if any(control.swaps for control in candidate.controls) and options.heal is not None:
        but = ", but for the healed far part" if any(control.weights for control in candidate.controls) else ""
        notes.append(f"Controls are of the model as it is before healing{but}.")
    return notes + [f"No {one.role} control: {one.reason}." for one in candidate.controls if not one.swaps]


def _unchosen(options: SwapOptions, candidate: Candidate) -> list[str]:
    """Which parameters stand as they were before any text was read, and what --fit adds."""
    kernel, info, notes = candidate.kernel, candidate.kernel.info, []
    if options.fit and kernel.needs_fit and info.fit_reads:
        notes.append(f"--fit changes nothing: {info.name} is fitted with it and without it.")
    if options.heal is None and kernel.needs_fit and not info.fit_reads:
        notes.append(f"The maps of {info.name} are random until --heal trains them.")
    if options.heal is None and kernel.near is not None and NEAR_WEIGHT not in candidate.fitted:
        notes.append("γ, the weight of near keys, is 1 in every head; --fit chooses it.")
    return notes
