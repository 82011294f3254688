"""Controls of a kernel: simple alternatives that are measured on the same windows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from attnlens.choices import ControlRole
from attnlens.errors import UsageError
from attnlens.kernels import Kernel, parsed
from attnlens.kernels.spelling import FLOOR, ONE_KEY, WIDTH, HeadShape, branches, sink_window, state_numbers
from attnlens.models import hooks
from attnlens.models.hooks import OWN, SiteCall
from attnlens.models.loading import Loaded
from attnlens.records import Agreement, Control, Outcome, Site
from attnlens.runs.outputs import Variant

CROSSING = "queries and keys of cross-attention are of different sequences, so that no key is near"


@dataclass
class ControlSwap:
    """A control of one kernel."""

    role: ControlRole
    swaps: hooks.Swaps  # the kernel at each site; empty if the control does not exist
    state: float | None = None  # numbers kept per head, mean over sites
    reason: str = ""  # why the control does not exist
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # healed weights by name, of the healed control

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the kernels at all sites; controls with equal keys are measured once."""
        # a spelling does not include fitted maps: kernels with fitted maps are compared by object identity
        kernels = [
            (site, id(swap.kernel) if swap.kernel.fitted else swap.kernel.spelling) for site, swap in self.swaps.items()
        ]
        return (*kernels, id(self.weights)) if self.weights else tuple(kernels)

    def refuse(self, loaded: Loaded, inputs: Mapping[str, Tensor], variant: Callable[[hooks.Swaps], Variant]) -> None:
        """Run the control once; if a site refuses its kernel, remove it and keep the reason."""
        if not self.swaps:
            return
        try:
            with torch.no_grad(), variant(self.swaps)():
                hooks.forward(loaded.model, inputs)
        except UsageError as error:
            self.swaps, self.reason = {}, error.problem.rstrip(".")

    def record(self, outcome: Outcome | None) -> Control:
        """Build the control's record from its measurements, or from the reason if there are none."""
        kernel = format_spellings(swap.kernel for swap in self.swaps.values()) or None
        fields = {"reasons": {"kernel": self.reason}} if outcome is None else dict(outcome)
        return Control(role=self.role, kernel=kernel, state=self.state, **fields)


def with_agreement(outcome: Outcome, agreement: Agreement | str | None) -> Outcome:
    """Add the agreement of greedy continuations, or why it is unknown; None if nothing was generated."""
    if isinstance(agreement, str):
        return outcome.model_copy(update={"reasons": outcome.reasons | {"agreement": agreement}})
    return outcome.model_copy(update={"agreement": agreement})


def format_spellings(kernels: Iterable[Kernel]) -> str:
    """Format the kernels of all sites as one spelling, as in `sink-window:4,68`.

    If sites differ, numbers become ranges, `sink-window:4,68–80 by layer`, or `4,68–all` if some sites keep all keys.
    Different windows are joined by a slash: `window:2/sink-window:1,2 by layer`.
    """
    spellings = list(dict.fromkeys(kernel.spelling for kernel in kernels))
    if len(spellings) < 2:
        return "".join(spellings)
    by_name, names = defaultdict[str, list[list[int]]](list), []
    for spelling in spellings:
        name, _, numbers = spelling.partition(":")
        if spelling != OWN.spelling:
            by_name[name].append([int(number) for number in numbers.split(",")])
    for name, rows in by_name.items():
        ranges = [[min(numbers), max(numbers)] for numbers in zip(*rows, strict=True)]
        words = [f"{low}" if low == high else f"{low}–{high}" for low, high in ranges]
        if OWN.spelling in spellings:  # the last number is the width of the window
            words[-1] = f"{ranges[-1][0]}–all"
        names.append(f"{name}:{','.join(words)}")
    return "/".join(names) + " by layer"


def head_shapes(reached: Sequence[SiteCall], chosen: Mapping[Site, tuple[int, ...] | None]) -> dict[Site, HeadShape]:
    """Return the head shapes of each chosen site, at the length of the surveyed inputs."""
    shapes = {}
    for site, call in ((each.site, each.call) for each in reached if each.site in chosen):
        visible, heads = call.visible(), chosen[site]
        shapes[site] = HeadShape(
            heads=call.query.shape[1] if heads is None else len(heads),
            head_dim=call.key.shape[-1],
            value_dim=call.value.shape[-1],
            tokens=call.key.shape[2],
            causal=visible is not None and not bool(visible.triu(1).any()),
        )
    return shapes


def mean_state(swaps: hooks.Swaps, shapes: Mapping[Site, HeadShape]) -> float | None:
    """Return the numbers kept per swapped head, mean over sites; None for kernels without an attention matrix."""
    if any(swap.kernel.info.form == "output" for swap in swaps.values()):
        return None
    states = [(state_numbers(swap.kernel, shapes[site]), shapes[site]) for site, swap in swaps.items()]
    return fmean(shape.tokens * shape.token if state is None else state for state, shape in states)


def build_controls(swaps: hooks.Swaps, shapes: Mapping[Site, HeadShape]) -> list[ControlSwap]:
    """Build the controls of a kernel before healing, without those equal to the kernel or to the model's own."""
    controls = [
        _same_size(swaps, shapes),
        _map_kernels("one key", swaps, shapes, lambda _: parsed(ONE_KEY)),
        _map_kernels("floor", swaps, shapes, lambda _: parsed(FLOOR)),
    ]
    if all(swap.kernel.filter or swap.kernel.near for swap in swaps.values()):
        controls.append(_map_kernels("filter alone", swaps, shapes, lambda kernel: branches(kernel)[0]))
        controls.append(_map_kernels("without filter", swaps, shapes, lambda kernel: branches(kernel)[1]))
    original = {site: hooks.Replacement(OWN, swap.heads) for site, swap in swaps.items()}
    keys = [ControlSwap("floor", equal).key for equal in (swaps, original)]
    return [control for control in controls if not control.swaps or control.key not in keys]


def healed_far_part(
    swaps: hooks.Swaps, weights: Mapping[str, Tensor], shapes: Mapping[Site, HeadShape]
) -> ControlSwap | None:
    """Build the control that applies a hybrid's healed far part to all keys; None if the kernel is not a hybrid."""
    if not all(swap.kernel.near for swap in swaps.values()):
        return None
    control = _map_kernels("far part, healed", swaps, shapes, lambda kernel: branches(kernel)[1])
    control.weights = weights
    return control


def choose_window(swaps: hooks.Swaps, controls: Sequence[ControlSwap], shapes: Mapping[Site, HeadShape]) -> int | str:
    """Return the width of the kernel's window, else of its sink-window control's, else 64; or why there is none."""
    control = next((control for control in controls if control.role == "same size"), None)
    for kernels in (swaps, {} if control is None else control.swaps):
        filters = [swap.kernel.filter or swap.kernel.near for swap in kernels.values()]
        widths = [each.parameters["width"] for each in filters if each and "width" in each.parameters]
        if widths:
            return max(widths)
    if any(site.part == "cross" for site in swaps):
        return CROSSING
    tokens = max(shapes[site].tokens for site in swaps)
    return WIDTH if tokens > WIDTH else f"the sequences have {tokens} tokens, and no key is beyond a window of {WIDTH}"


def _same_size(swaps: hooks.Swaps, shapes: Mapping[Site, HeadShape]) -> ControlSwap:
    """Build the control whose sink-window keeps as many numbers as the kernel at each site, or give the reason."""
    if any(site.part == "cross" for site in swaps):
        return ControlSwap("same size", {}, reason=CROSSING)
    windows: dict[Site, hooks.Replacement] = {}
    for site, swap in swaps.items():
        state, token = state_numbers(swap.kernel, shapes[site]), shapes[site].token
        if state is not None and state < token:
            why = f"a state of {state:,.0f} numbers is too small for a key and its value, which are {token}"
            return ControlSwap("same size", {}, mean_state(swaps, shapes), why)
        windows[site] = hooks.Replacement(sink_window(state, shapes[site]) or OWN, swap.heads)
    if all(swap.kernel.filter is None for swap in windows.values()):
        site = next(iter(swaps))
        state = state_numbers(swaps[site].kernel, shapes[site])
        what = "a window of 64 with 4 first tokens" if state is None else f"a state of {state:,.0f} numbers"
        why = f"{what} can store all {shapes[site].tokens} keys: the control is the model itself"
        return ControlSwap("same size", {}, mean_state(swaps, shapes), why)
    return ControlSwap("same size", windows, mean_state(windows, shapes))


def _map_kernels(
    role: ControlRole, swaps: hooks.Swaps, shapes: Mapping[Site, HeadShape], change: Callable[[Kernel], Kernel]
) -> ControlSwap:
    """Build the control whose kernel at each site is `change` applied to the swapped kernel."""
    changed = {site: hooks.Replacement(change(swap.kernel), swap.heads) for site, swap in swaps.items()}
    return ControlSwap(role, changed, mean_state(changed, shapes))
