"""One kernel on its way through a swap: its stages, what was measured, its controls and its record."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from attnlens import hooks, texts
from attnlens.choices import Route
from attnlens.kernels import Kernel
from attnlens.kernels.modifiers import NEAR_WEIGHT
from attnlens.kernels.spelling import HeadShape
from attnlens.models import Loaded
from attnlens.records import Control, Healing, ModelInfo, Pair, Settings, Site, Stage, Swap
from attnlens.requests.swap import SwapOptions
from attnlens.run.feeding import guess_notes
from attnlens.run.outcomes.differences import Differences, Variant
from attnlens.run.swap.controls import Alternative, alternatives, healed_far_part, mean_state, window_beyond
from attnlens.run.swap.ranks.plans import origin
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
    kernel, info = candidate.kernel, candidate.kernel.info
    if options.fit and kernel.needs_fit and info.fit_reads:
        notes.append(f"--fit changes nothing: {info.name} is fitted with it and without it.")
    if options.heal is None and kernel.needs_fit and not info.fit_reads:
        notes.append(f"The maps of {info.name} are random until --heal trains them.")
    if options.heal is None and kernel.near is not None and NEAR_WEIGHT not in candidate.fitted:
        notes.append("γ, the weight of near keys, is 1 in every head; --fit chooses it.")
    if options.sweep and options.heal is not None:
        notes.append("The sweep shows the heads and layers as they are before healing.")
    if any(control.swaps for control in candidate.controls) and options.heal is not None:
        but = ", but for the healed far part" if any(control.weights for control in candidate.controls) else ""
        notes.append(f"Controls are of the model as it is before healing{but}.")
    return notes + [f"No {one.role} control: {one.reason}." for one in candidate.controls if not one.swaps]


EXACT: Route = "auto"
"""How controls are computed, whatever is asked for: a path that is asked for is the kernel's, and all are exact."""

Value = TypeVar("Value")
Weights = Mapping[str, Tensor] | None
"""Healed weights by name, where there are any."""


class Changing(Protocol):
    """Makes a variant of swaps, and of weights beside them."""

    def __call__(self, swaps: hooks.Swaps, weights: Weights = None, path: Route | None = None) -> Variant:
        """The model with these kernels in place, and with these weights; by that path, or the one asked for."""


def prepare(
    candidate: Candidate,
    shapes: Mapping[Site, HeadShape],
    loaded: Loaded,
    inputs: Mapping[str, Tensor],
    changing: Changing,
    *,
    controls: bool,
) -> None:
    """Find a candidate's state and controls, and leave those out that a site refuses on these inputs."""
    every = alternatives(candidate.last, shapes)
    candidate.state = mean_state(candidate.last, shapes)
    candidate.window = window_beyond(candidate.last, every, shapes)
    candidate.controls = every if controls else []
    for control in candidate.controls:
        control.refuse(loaded, inputs, partial(changing, path=EXACT))


def variants(candidate: Candidate, changing: Changing, known: Container[object]) -> dict[object, Variant]:
    """The candidate at every stage, and every control by its key, without those that are `known`."""
    found: dict[object, Variant] = {
        stage: changing(swaps, candidate.weights if stage == "healed" else None)
        for stage, swaps in candidate.stages.items()
    }
    controls = [one for one in candidate.controls if one.swaps and one.key not in known]
    return found | {one.key: changing(one.swaps, one.weights, path=EXACT) for one in controls}


def healed(candidate: Candidate, changing: Changing, shapes: Mapping[Site, HeadShape]) -> dict[object, Variant]:
    """The candidate as it was healed and, as one more control, a hybrid's far part; without `shapes` no control."""
    far = healed_far_part(candidate.last, candidate.weights, shapes) if shapes else None
    candidate.controls += [] if far is None else [far]
    found: dict[object, Variant] = {"healed": changing(candidate.last, candidate.weights)}
    return found if far is None else found | {far.key: changing(far.swaps, far.weights, path=EXACT)}


def keep_healed(candidate: Candidate, found: Mapping[object, Differences]) -> None:
    """Give the candidate what was measured of it, and of its far part, after healing."""
    candidate.found["healed"] = found["healed"]
    candidate.measured |= {one.key: found[one.key] for one in candidate.controls if one.weights}


def keep_differences(candidate: Candidate, found: Mapping[object, Differences]) -> None:
    """Give the candidate what was measured of its stages and controls."""
    candidate.found |= {stage: found[stage] for stage in candidate.stages}
    candidate.measured = {one.key: found[one.key] for one in candidate.controls if one.swaps}


def keep_agreements(candidate: Candidate, found: Mapping[object, dict[str, Any]]) -> None:
    """Give the candidate the agreements of its stages and controls."""
    candidate.agreements = {stage: found[stage] for stage in candidate.stages}
    for control in candidate.controls:
        control.agreement = found[control.key] if control.swaps else {}


def common(candidate: Candidate, found: Mapping[object, Value]) -> dict[object, Value]:
    """What was found of the controls that another kernel may have, too: not of those with parameters of their own."""
    own = [one for one in candidate.controls if one.weights or any(swap.kernel.fitted for swap in one.swaps.values())]
    return {one.key: found[one.key] for one in candidate.controls if one not in own and one.key in found}
