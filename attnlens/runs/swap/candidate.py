"""The state of one kernel during a run: its stages, measurements, controls and record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from attnlens.choices import ControlRole
from attnlens.errors import UsageError
from attnlens.kernels import Kernel, parsed
from attnlens.kernels.modifiers import NEAR_WEIGHT
from attnlens.kernels.spelling import FLOOR, ONE_KEY, WIDTH, HeadShape, branches, sink_window, state_numbers
from attnlens.models import hooks, texts
from attnlens.models.hooks import OWN, SiteCall
from attnlens.models.loading import Loaded
from attnlens.records import Control, Healing, ModelInfo, Site
from attnlens.requests.swap import SwapOptions
from attnlens.runs.differences import Differences
from attnlens.runs.outputs import Variant
from attnlens.runs.swap.ranks.plans import origin
from attnlens.runs.swap.ranks.search import Choice


def spelled(kernels: Iterable[Kernel]) -> str:
    """Format the kernels of all sites as one spelling, as in `sink-window:4,68`.

    If sites differ, numbers become ranges, `sink-window:4,68–80 by layer`, or `4,68–all` if some sites keep all keys.
    Different windows are joined by a slash: `window:2/sink-window:1,2 by layer`.
    """
    found = list(dict.fromkeys(kernel.spelling for kernel in kernels))
    if len(found) < 2:
        return "".join(found)
    by_name: dict[str, list[list[int]]] = {}
    for spelling in found:
        name, _, numbers = spelling.partition(":")
        if spelling != OWN.spelling:
            by_name.setdefault(name, []).append([int(number) for number in numbers.split(",")])
    names = []
    for name, rows in by_name.items():
        ranges = [[min(numbers), max(numbers)] for numbers in zip(*rows, strict=True)]
        words = [f"{low}" if low == high else f"{low}–{high}" for low, high in ranges]
        if OWN.spelling in found:  # the last number is the width of the window
            words[-1] = f"{ranges[-1][0]}–all"
        names.append(f"{name}:{','.join(words)}")
    return "/".join(names) + " by layer"


CROSSING = "queries and keys of cross-attention are of different sequences, so that no key is near"


@dataclass
class Alternative:
    """A control of one kernel."""

    role: ControlRole
    swaps: hooks.Swaps  # the kernel at each site; empty if the control does not exist
    state: float | None = None  # numbers kept per head, mean over sites
    reason: str = ""  # why the control does not exist
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # healed weights by name, of the healed control
    agreement: dict[str, Any] = field(default_factory=dict)
    """Agreement of its greedy continuations with the original's as fields of an Outcome, or why it is unknown."""

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the kernels at all sites; alternatives with equal keys are measured once."""
        # a spelling does not include fitted maps: kernels with fitted maps are compared by object identity
        found = [
            (site, id(swap.kernel) if swap.kernel.fitted else swap.kernel.spelling) for site, swap in self.swaps.items()
        ]
        return (*found, id(self.weights)) if self.weights else tuple(found)

    def refuse(self, loaded: Loaded, inputs: Mapping[str, Tensor], variant: Callable[[hooks.Swaps], Variant]) -> None:
        """Run the control once; if a site refuses its kernel, remove it and keep the reason."""
        if not self.swaps:
            return
        try:
            with torch.no_grad(), variant(self.swaps)():
                hooks.forward(loaded.model, inputs)
        except UsageError as error:
            self.swaps, self.reason = {}, error.problem.rstrip(".")

    def record(self, found: Differences | None, seed: int, names: Sequence[str], window: int | str) -> Control:
        """Build the control's record from its measurements, or from the reason if there are none."""
        if found is None:
            return Control(role=self.role, kernel=None, state=self.state, reasons={"kernel": self.reason})
        outcome = found.outcome(seed, names, window)
        reasons = outcome["reasons"] | self.agreement.get("reasons", {})
        kernel = spelled(swap.kernel for swap in self.swaps.values()) or None
        outcome |= self.agreement | {"reasons": reasons}
        return Control(role=self.role, kernel=kernel, state=self.state, **outcome)


def shapes_of(reached: Sequence[SiteCall], chosen: Mapping[Site, tuple[int, ...] | None]) -> dict[Site, HeadShape]:
    """Return the head shapes of each chosen site, at the length of the surveyed inputs."""
    shapes = {}
    for found in (found for found in reached if found.site in chosen):
        call, seen, heads = found.call, found.call.visible(), chosen[found.site]
        queries, keys = call.query.shape[2], call.key.shape[2]
        above = torch.ones(queries, keys, dtype=torch.bool, device=call.query.device).triu(1)
        shapes[found.site] = HeadShape(
            heads=call.query.shape[1] if heads is None else len(heads),
            head_dim=call.key.shape[-1],
            value_dim=call.value.shape[-1],
            tokens=keys,
            causal=seen is not None and not bool((seen & above).any()),
        )
    return shapes


def mean_state(swaps: hooks.Swaps, shapes: Mapping[Site, HeadShape]) -> float | None:
    """Return the numbers kept per swapped head, mean over sites; None for kernels without an attention matrix."""
    if any(swap.kernel.info.form == "output" for swap in swaps.values()):
        return None
    found = [(state_numbers(swap.kernel, shapes[site]), shapes[site]) for site, swap in swaps.items()]
    return fmean(shape.tokens * shape.token if state is None else state for state, shape in found)


def alternatives(swaps: hooks.Swaps, shapes: Mapping[Site, HeadShape]) -> list[Alternative]:
    """Build the controls of a kernel before healing, without those equal to the kernel or to the model's own."""
    controls = [
        _sink_window_control(swaps, shapes),
        _map_kernels("one key", swaps, shapes, lambda _: parsed(ONE_KEY)),
        _map_kernels("floor", swaps, shapes, lambda _: parsed(FLOOR)),
    ]
    if all(swap.kernel.filter or swap.kernel.near for swap in swaps.values()):
        controls.append(_map_kernels("filter alone", swaps, shapes, lambda kernel: branches(kernel)[0]))
        controls.append(_map_kernels("without filter", swaps, shapes, lambda kernel: branches(kernel)[1]))
    kernel_key = Alternative("without filter", swaps).key
    own = Alternative("without filter", {site: hooks.Replacement(OWN, swap.heads) for site, swap in swaps.items()}).key
    return [one for one in controls if not one.swaps or one.key not in (kernel_key, own)]


def healed_far_part(
    swaps: hooks.Swaps, weights: Mapping[str, Tensor], shapes: Mapping[Site, HeadShape]
) -> Alternative | None:
    """Build the control that applies a hybrid's healed far part to all keys; None if the kernel is not a hybrid."""
    if not all(swap.kernel.near for swap in swaps.values()):
        return None
    found = _map_kernels("far part, healed", swaps, shapes, lambda kernel: branches(kernel)[1])
    found.weights = weights
    return found


def window_beyond(swaps: hooks.Swaps, found: Sequence[Alternative], shapes: Mapping[Site, HeadShape]) -> int | str:
    """Return the width of the kernel's window, else of its sink-window control's, else 64; or why there is none."""
    control = next((one for one in found if one.role == "same size"), None)
    for some in (swaps, {} if control is None else control.swaps):
        filters = [one for swap in some.values() if (one := swap.kernel.filter or swap.kernel.near)]
        widths = [one.parameters["width"] for one in filters if "width" in one.parameters]
        if widths:
            return max(widths)
    if any(site.part == "cross" for site in swaps):
        return CROSSING
    tokens = max(shapes[site].tokens for site in swaps)
    return WIDTH if tokens > WIDTH else f"the sequences have {tokens} tokens, and no key is beyond a window of {WIDTH}"


def _sink_window_control(swaps: hooks.Swaps, shapes: Mapping[Site, HeadShape]) -> Alternative:
    """Build the control whose sink-window keeps as many numbers as the kernel at each site, or give the reason."""
    if any(site.part == "cross" for site in swaps):
        return Alternative("same size", {}, reason=CROSSING)
    found: dict[Site, hooks.Replacement] = {}
    for site, swap in swaps.items():
        state, token = state_numbers(swap.kernel, shapes[site]), shapes[site].token
        if state is not None and state < token:
            why = f"a state of {state:,.0f} numbers holds no key and its value, which are {token}"
            return Alternative("same size", {}, mean_state(swaps, shapes), why)
        kernel = sink_window(state, shapes[site])
        found[site] = hooks.Replacement(kernel or OWN, swap.heads)
    if all(swap.kernel.filter is None for swap in found.values()):
        site = next(iter(swaps))
        shape = shapes[site]
        state = state_numbers(swaps[site].kernel, shape)
        what = "a window of 64 with 4 first tokens" if state is None else f"a state of {state:,.0f} numbers"
        why = f"{what} holds all {shape.tokens} keys: it is the model itself"
        return Alternative("same size", {}, mean_state(swaps, shapes), why)
    return Alternative("same size", found, mean_state(found, shapes))


def _map_kernels(
    role: ControlRole, swaps: hooks.Swaps, shapes: Mapping[Site, HeadShape], of: Callable[[Kernel], Kernel]
) -> Alternative:
    """Build the control whose kernel at each site is `of` applied to the swapped kernel."""
    found = {site: hooks.Replacement(of(swap.kernel), swap.heads) for site, swap in swaps.items()}
    return Alternative(role, found, mean_state(found, shapes))


@dataclass
class Candidate:
    """One kernel with its stages and results so far."""

    kernel: Kernel
    stages: dict[str, hooks.Swaps]  # the swap at each stage: swapped, fitted, healed
    found: dict[str, Differences] = field(default_factory=dict)  # measurements by stage
    healing: Healing | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)  # healed weights by name
    choice: Choice | None = None  # ranks that meet the budget, or those of a plan
    controls: list[Alternative] = field(default_factory=list)  # its controls
    measured: dict[object, Differences] = field(default_factory=dict)  # measurements of the controls, by their keys
    window: int | str = ""  # keys beyond which losses are reported, or why there is no number
    state: float | None = None  # numbers kept per swapped head
    agreements: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Agreement of greedy continuations with the original's by stage, as fields of an Outcome."""

    @property
    def last(self) -> hooks.Swaps:
        """The swap at the last stage."""
        return list(self.stages.values())[-1]

    @property
    def fitted(self) -> list[str]:
        """Names of the parameters chosen per head from text, without those still at their random initialisation."""
        kernel = next(iter(self.last.values())).kernel
        start = set() if kernel.info.fit_reads or "healed" in self.stages else set(kernel.own_fitted)
        return sorted(set(kernel.chosen) - start)


def swap_notes(options: SwapOptions, model: ModelInfo, shared: float, candidate: Candidate) -> list[str]:
    """Return notes about the options; `shared`: share of evaluated tokens that the calibration text contains too."""
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
