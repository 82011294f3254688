"""Run one kernel, and simple alternatives as controls: check, fit, compare, train, sweep and save it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor

from attnlens.choices import ControlRole, Route
from attnlens.errors import OutputError, UsageError
from attnlens.kernels import OWN, Kernel, parsed
from attnlens.kernels.modifiers import NEAR_WEIGHT
from attnlens.kernels.spelling import FLOOR, ONE_KEY, WIDTH, HeadShape, branches, sink_window, state_numbers
from attnlens.models import hooks, texts
from attnlens.models.loading import Loaded
from attnlens.models.texts.targets import meanings
from attnlens.records import Agreement, Control, Healing, Outcome, Pair, Plan, Site, Stage, Swap
from attnlens.runs.differences import Differences, agreement, compare, windows_of
from attnlens.runs.feeding import guess_notes
from attnlens.runs.outputs import Variant, enough_memory, speed, tokens_in
from attnlens.runs.progress import Tell, time_stage
from attnlens.runs.store import Keep, Store, keep_nothing, key_of
from attnlens.runs.swap.fit import MOST_FITTED, fit
from attnlens.runs.swap.saved import save_swapped
from attnlens.runs.swap.session import SwapSession, changed_weights, digest_of
from attnlens.runs.swap.sites import Local, leaks, locally
from attnlens.runs.swap.sweep import sweep_units
from attnlens.runs.work import Stopped

EXACT: Route = "auto"  # path of the controls. The `path` option applies to the kernel alone; all paths are exact
NO_PEAK = "this platform does not report it"
Result = TypeVar("Result")


@dataclass
class KernelRun:
    """The run of one kernel: its stages and measurements so far."""

    session: SwapSession
    kernel: Kernel
    stages: dict[str, hooks.Swaps]  # the swap at each stage: swapped, fitted, healed
    store: Store | None = None  # stores parts of long computations
    measured: dict[str, Differences] = field(default_factory=dict)  # measurements by stage
    agreements: dict[object, Agreement | str] = field(default_factory=dict)
    """Agreement of greedy continuations with the original's by stage and `ControlSwap.key`, or why it is unknown."""
    controls: list[ControlSwap] = field(default_factory=list)
    measured_controls: dict[object, Differences] = field(default_factory=dict)  # by `ControlSwap.key`
    window: int | str = ""  # keys beyond which losses are reported, or why there is no number
    state: float | None = None  # numbers kept per swapped head
    healing: Healing | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)  # healed weights by name
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    unsaved: OutputError | None = None  # why the changed model could not be saved

    def run(self) -> dict[str, object]:
        """Fit, check, compare, heal and sweep the kernel; return the value that `KernelResult` reads.

        Raises Stopped with the measurements so far if the user ends healing or sweep.
        """
        session = self.session
        with enough_memory(session.loaded.model, session.fed[0].inputs, session.variant(self.last)):
            _ = session.own_peak  # measured first, before anything keeps memory allocated
            swap, plan = self._run_stages()
        controls = {
            str(number): self.measured_controls[control.key]
            for number, control in enumerate(self.controls)
            if control.swaps
        }
        losses = {name: d.by_token.join() for name, d in (self.measured | controls).items() if d.by_token.before}
        value: dict[str, object] = {
            "swap": swap.model_dump(),
            "plan": None if plan is None else plan.model_dump(),
            "window": self.window,
            "notes": self.notes,  # for the settings of the report
            "losses": {name: [each.before[0], each.after[0], each.back[0]] for name, each in losses.items()},
            "windows": windows_of(list(self.measured.values())),  # one column per stage
        }
        if self.interrupted:
            raise Stopped(self.kernel.spelling, value)
        return value

    def _run_stages(self) -> tuple[Swap, Plan | None]:
        session, timings, plan = self.session, self.session.timings, None
        with time_stage(timings, "fit"):
            self._fit()
        errors = leaks(session.loaded, session.sites, session.probe, session.variant(self.last), session.seed)
        with time_stage(timings, "compare"):
            self._compare()
        if session.training is not None and session.calibrated is not None:
            with time_stage(timings, "heal"):
                session.training.train(self, session.calibrated)
        if session.options.generate:
            with time_stage(timings, "generate"):
                self._generate()
        if session.ranks is not None:
            with time_stage(timings, "plan"):
                plan = session.ranks.plan(self)
        with time_stage(timings, "sites"):
            # one sequence, so that the result does not depend on the batch size
            inputs = texts.first(session.probe, 1)
            local = locally(session.loaded, session.sites, self.last, inputs, session.options.path)
        swap = self._record(errors, local)
        if session.options.sweep:
            with time_stage(timings, "sweep"):
                swap = self._sweep(swap)
        if session.options.save is not None:
            with changed_weights(session.loaded.model, self.weights):
                try:
                    save_swapped(session.options.save, session.loaded, session.sites, self.last)
                except OutputError as error:  # raised once the report is complete
                    self.unsaved = error
        return swap, plan

    @property
    def last(self) -> hooks.Swaps:
        """The swap at the last stage."""
        return list(self.stages.values())[-1]

    @property
    def keep(self) -> Keep:
        """Function that stores parts of long computations."""
        return keep_nothing if self.store is None else self.store.compute

    def teller(self, stage: str, total: int) -> Tell:
        """Return a progress callback for a stage of this kernel."""
        return self.session.teller(stage, total, self.kernel)

    def _fit(self) -> None:
        """Choose ranks, or fit the kernel: as stage `swapped` if the kernel needs it, else as stage `fitted`."""
        session, kernel = self.session, self.kernel
        if session.ranks is not None:
            self.stages["swapped"] = session.ranks.choose(self)
            return
        source = session.calibrated if kernel.fit_reads else session.evaluated.some(1)  # else only shapes are read
        if source is None or not kernel.fits or not (kernel.needs_fit or session.options.fit):
            return
        text, passes = source.some(MOST_FITTED), 1 if kernel.needs_fit or kernel.near is not None else 2
        tell = self.teller("fit", text.sequences * passes)
        stage = "swapped" if kernel.needs_fit else "fitted"
        self.stages[stage] = fit(session.loaded, session.sites, self.last, text, tell, session.task, session.seed)

    def _compare(self) -> None:
        """Measure the stages so far, and the controls."""
        session = self.session
        controls = build_controls(self.last, session.shapes)
        self.state = mean_state(self.last, session.shapes)
        self.window = choose_window(self.last, controls, session.shapes)
        self.controls = controls if session.options.controls else []
        for control in self.controls:
            control.refuse(session.loaded, session.probe, partial(session.variant, path=EXACT))
        results = session.controls | self.compare_variants(self._variants(session.controls))
        self._share(results, session.controls)
        self.measured |= {stage: results[stage] for stage in self.stages}
        self.measured_controls = {control.key: results[control.key] for control in self.controls if control.swaps}
        if session.task in ("causal", "masked"):
            first = next(iter(self.measured.values()))
            names = [session.settings.texts[number].name for number in first.sampled.texts]
            vocabulary = texts.vocabulary(session.loaded.model) or math.inf
            self.notes += guess_notes(torch.cat(first.before), torch.cat(first.counts), names, vocabulary)

    def _variants(self, known: Mapping[object, object], path: Route | None = None) -> dict[object, Variant]:
        """Return a variant per stage, computed with `path`, and per control whose key is not in `known`."""
        variant = self.session.variant
        stages: dict[object, Variant] = {
            stage: variant(swaps, self.weights if stage == "healed" else None, path)
            for stage, swaps in self.stages.items()
        }
        controls = [control for control in self.controls if control.swaps and control.key not in known]
        return stages | {control.key: variant(control.swaps, control.weights, EXACT) for control in controls}

    def _share(self, results: Mapping[object, Result], shared: dict[object, Result]) -> None:
        """Share the results of controls without fitted parameters or healed weights with the other kernels."""
        for control in self.controls:
            fitted = any(swap.kernel.fitted for swap in control.swaps.values())
            if control.key in results and not (control.weights or fitted):
                shared[control.key] = results[control.key]

    def compare_variants(self, variants: Mapping[object, Variant]) -> dict[object, Differences]:
        """Measure changed models on the evaluated text."""
        session = self.session
        tell = self.teller("compare", len(variants) * sum(map(tokens_in, session.fed)))
        return compare(session.loaded.model, session.fed, variants, session.task, tell, session.design)

    def _generate(self) -> None:
        """Measure how long the greedy continuations of each stage and control agree with the original's."""
        session = self.session
        variants = self._variants(session.agreements, EXACT)
        tell = self.teller("generate", len(variants) + 1)
        original, notes = session.continuation
        tell(1)
        self.agreements |= session.agreements
        for key, variant in variants.items():
            self.agreements[key] = agreement(session.loaded.model, original, variant)
            tell(1)
        self._share(self.agreements, session.agreements)
        self.notes += notes

    def _record(self, errors: Mapping[str, float | str], local: Local) -> Swap:
        session, kernel = self.session, self.kernel
        names, noise = [text.name for text in session.settings.texts], session.fed[0].noise

        def outcome(differences: Differences, key: object) -> Outcome:
            return with_agreement(differences.outcome(session.seed, names, self.window), self.agreements.get(key))

        with session.variant(self.last, self.weights)():
            peak = session.peak
        outcomes = {stage: dict(outcome(differences, stage)) for stage, differences in self.measured.items()}
        last, of_output = list(self.measured.values())[-1], kernel.info.form == "output"
        fields = list(outcomes.values())[-1] | {name: None if isinstance(e, str) else e for name, e in errors.items()}
        reasons = {name: error for name, error in errors.items() if isinstance(error, str)}
        shares = [site.off_simplex for site in local.sites if site.off_simplex is not None]
        if of_output:
            reasons |= {"off_simplex": "there is no attention matrix", "state": "it caches neither keys nor values"}
        if peak is None:
            reasons["peak_memory_bytes"] = NO_PEAK
        notes = [*meanings(session.task, noise=noise), *local.notes(kernel)]
        notes += [] if session.ranks is None else session.ranks.notes(session.loaded.info)
        measured = [(control, self.measured_controls.get(control.key)) for control in self.controls]
        return Swap(
            kernel=kernel.spelling if session.ranks is None else kernel.info.name,
            formula=kernel.formula,
            formula_of="output" if of_output else "log k",
            parameters=dict(kernel.parameters) if session.ranks is None else {},
            fitted=self.fitted,
            sites=local.sites,
            **fields | {"reasons": reasons | fields["reasons"]},
            off_simplex=sum(shares) / len(shares) if shares else None,
            tokens_per_second=Pair(before=speed(last.sizes, last.own_seconds), after=speed(last.sizes, last.seconds)),
            peak_memory_bytes=Pair(before=session.own_peak, after=peak),
            stages=[Stage(name=stage, **fields) for stage, fields in outcomes.items()],
            healing=self.healing,
            state=self.state,
            task=session.task,
            noise=noise,
            identity_error=session.identity_error,
            controls=[
                control.record(None if differences is None else outcome(differences, control.key))
                for control, differences in measured
            ],
            notes=notes + self._option_notes(),
        )

    @property
    def fitted(self) -> list[str]:
        """Names of the parameters chosen per head from text, without those still at their random initialisation."""
        kernel = next(iter(self.last.values())).kernel
        start = set() if kernel.info.fit_reads or "healed" in self.stages else set(kernel.own_fitted)
        return sorted(set(kernel.chosen) - start)

    def _option_notes(self) -> list[str]:
        """Return notes on options that had side effects or no effect."""
        notes, healed = [], "healed" in self.stages
        kernel, info = self.kernel, self.kernel.info
        if self.session.shared:
            share = f"{100 * self.session.shared:.2g} % of the evaluated tokens"
            notes.append(
                f"{share} also occur in the calibration text, in runs of {texts.RUN} tokens or as whole lines."
            )
        if self.session.options.fit and kernel.needs_fit and info.fit_reads:
            notes.append(f"--fit changes nothing: {info.name} is always fitted.")
        if not healed and kernel.needs_fit and not info.fit_reads:
            notes.append(f"The maps of {info.name} are random until `attnlens heal` trains them.")
        if not healed and kernel.near is not None and NEAR_WEIGHT not in self.fitted:
            notes.append("γ, the weight of near keys, is 1 in every head; --fit estimates it.")
        if healed and any(control.swaps for control in self.controls):
            but = ", except for the healed far part" if any(control.weights for control in self.controls) else ""
            notes.append(f"Controls are measured on the model before healing{but}.")
        missing = [control for control in self.controls if not control.swaps]
        return notes + [f"No {control.role} control: {control.reason}." for control in missing]

    def _sweep(self, swap: Swap) -> Swap:
        """Measure the effect of each head or layer individually; the record lacks effects if the user interrupts."""
        fitted = key_of({site.name: digest_of(dict(each.kernel.fitted)) for site, each in self.last.items()})

        def keep(name: str, make: Callable[[], Result]) -> Result:
            return self.keep(f"{name}, parameters {fitted}", make)  # a fit can differ on another machine

        try:
            return sweep_units(self.session, swap, self.last, self.teller, keep)
        except KeyboardInterrupt:
            self.interrupted = True
            return swap.model_copy(update={"notes": [*swap.notes, "The sweep was interrupted."]})


CROSSING = "queries and keys of cross-attention belong to different sequences, so distances between them are undefined"


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
