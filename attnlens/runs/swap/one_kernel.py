"""Run one kernel of swap-kernel: check, fit, compare, heal, sweep and save it."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from attnlens.arguments import Budget
from attnlens.choices import Route
from attnlens.errors import OutputError
from attnlens.kernels import Kernel
from attnlens.kernels.spelling import HeadShape
from attnlens.maths.statistics import Design
from attnlens.models import hooks, loading, texts
from attnlens.models.hooks import Swaps
from attnlens.models.texts.targets import Fed, meanings
from attnlens.records import (
    Control,
    Coverage,
    Pair,
    Plan,
    Report,
    Settings,
    Site,
    Skipped,
    Stage,
    Summary,
    Swap,
    SwapBody,
    Task,
)
from attnlens.requests.healing import HealOptions
from attnlens.requests.swap import SwapOptions
from attnlens.runs import checks
from attnlens.runs.checks import predictions, refuse_initialised
from attnlens.runs.differences import (
    Continued,
    Differences,
    Prompts,
    agreements,
    compare,
    own_continuation,
    placed_windows,
    windows_of,
)
from attnlens.runs.feeding import guess_notes
from attnlens.runs.outputs import FEWEST, TokenLosses, Variant, enough_memory, peak_of, run, speed, tokens_in
from attnlens.runs.progress import INTERRUPTED, Progress, Tell, telling, telling_at_most, timed
from attnlens.runs.provenance import report_of
from attnlens.runs.store import Keep, Store, keep_nothing, key_of
from attnlens.runs.swap.candidate import (
    Candidate,
    alternatives,
    healed_far_part,
    mean_state,
    shapes_of,
    swap_notes,
    window_beyond,
)
from attnlens.runs.swap.fit import MOST_FITTED, fit
from attnlens.runs.swap.healing.descent import NO_PEAK, control_of, digest_of, healed
from attnlens.runs.swap.healing.healer import changed_weights
from attnlens.runs.swap.ranks.plans import check_fits, given, planned
from attnlens.runs.swap.ranks.search import Budgeting, Choice, Sample, budget_work
from attnlens.runs.swap.saved import save_swapped
from attnlens.runs.swap.sites import Local, chosen_sites, idle_sites, leaks, locally, refuse_crossing
from attnlens.runs.swap.sweep import SweptMeasures, swept


@dataclass
class Swapping:
    """The state of a `swap_kernel` run that its kernels share."""

    loaded: loading.Loaded
    options: SwapOptions
    settings: Settings
    task: Task
    evaluated: texts.Batches  # the evaluated sequences, as cut
    fed: list[Fed]  # the evaluated sequences with their targets
    design: Design  # how the evaluated sequences were sampled
    calibrated: texts.Batches | None  # the text for fitting and healing
    samples: tuple[Sample, ...]
    """Parts of the calibration text to fit on, choose ranks by and estimate the rise on; only the first for a plan."""
    progress: Progress
    prompts: Prompts | str = "nothing is generated"  # prompts to continue greedily, or why there are none
    shared: float = 0.0  # share of the evaluated tokens that the calibration text contains too
    sites: tuple[Site, ...] = ()
    heads_of: dict[Site, int] = field(default_factory=dict)
    chosen: dict[Site, tuple[int, ...] | None] = field(default_factory=dict)
    """Swapped sites with their heads; None means all heads."""
    shapes: dict[Site, HeadShape] = field(default_factory=dict)  # determines the state size of the chosen heads
    idle: list[Skipped] = field(default_factory=list)  # attention modules that the evaluated input does not run
    identity_error: float = 0.0
    controls: dict[object, Differences] = field(default_factory=dict)
    """Measurements of the controls that several kernels can share, by `Alternative.key`."""
    agreements: dict[object, dict[str, Any]] = field(default_factory=dict)
    """Agreement of these controls' greedy continuations with the original's, by `Alternative.key`."""
    timings: dict[str, float] = field(default_factory=dict)
    measures: SweptMeasures | None = None  # computed at the first sweep of heads, reused by the others

    def survey(self) -> None:
        """Find and verify the sites and select the chosen ones; raise UsageError for a kernel undefined at one."""
        with timed(self.timings, "survey"), enough_memory(self.loaded.model, self.probe, nullcontext):
            survey = checks.surveyed(self.loaded, self.probe)
            reached = survey.sites
            self.identity_error = checks.proven_whole(self.loaded, self.probe)
            refuse_initialised(self.loaded, self.probe, predictions(self.task))
            self.sites = tuple(found.site for found in reached)
            self.heads_of = {found.site: found.call.query.shape[1] for found in reached}
            if self.options.ranks is not None:
                check_fits(self.options.ranks, reached)
            self.chosen = chosen_sites(reached, self.settings.layers, self.settings.heads, self.options.part)
            self.shapes = shapes_of(reached, self.chosen)
            self.idle = idle_sites(survey, self.settings.layers)
        for kernel in self.options.kernels:
            refuse_crossing(kernel, list(self.chosen))

    def variant(
        self, swaps: hooks.Swaps, weights: Mapping[str, Tensor] | None = None, path: Route | None = None
    ) -> Variant:
        """Return a context manager that swaps kernels and weights in; `path` defaults to the requested one."""

        @contextmanager
        def changed() -> Iterator[None]:
            replaced = hooks.replace(self.loaded.model, self.sites, swaps, path or self.options.path)
            with changed_weights(self.loaded.model, weights or {}), replaced:
                yield

        return changed

    @property
    def probe(self) -> dict[str, Tensor]:
        """The first two evaluated sequences, used for the checks."""
        return texts.first(self.fed[0].inputs, 2)

    @property
    def peak(self) -> int | None:
        """Peak memory in bytes of a pass over the first batch with the model in its current state; None if unknown."""
        return peak_of(self.loaded.model, lambda: run(self.loaded.model, self.fed[0], self.task))

    @cached_property
    def own_peak(self) -> int | None:
        """Peak memory in bytes of the original model; None if unknown."""
        return self.peak

    @cached_property
    def continuation(self) -> tuple[Continued | str, list[str]]:
        """The original model's continuation of the prompts (or why there is none), and notes about it."""
        return own_continuation(self.loaded.model, self.prompts, self.options.generate)

    def teller(self, stage: str, total: int, kernel: Kernel) -> Tell:
        """Return a progress callback for a stage of a kernel; its label includes the kernel if there are several."""
        named = f"{kernel.spelling}, {stage}" if len(self.options.kernels) > 1 else stage
        return telling(self.progress, named, total)


class KernelFacts(BaseModel):
    """The part of one kernel's result that goes into the report."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    swap: Swap
    plan: Plan | None
    window: int | str
    """Window in keys beyond which losses are reported for this kernel, or why there is none."""
    notes: list[str]
    """Notes for the settings of the report."""


@dataclass(frozen=True)
class KernelReading:
    """The result of one kernel."""

    facts: KernelFacts
    losses: dict[str, TokenLosses]  # losses per predicted token, by stage or by the number of a control
    windows: dict[str, Tensor]  # values per window, by measure; one column per stage

    @property
    def value(self) -> dict[str, Any]:
        """The reading as a unit of work's value, which can be stored."""
        losses = {owner: [losses.before[0], losses.after[0], losses.back[0]] for owner, losses in self.losses.items()}
        return {"facts": self.facts.model_dump(), "losses": losses, "windows": self.windows}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> KernelReading:
        """Build a reading from a unit of work's value."""
        losses = {owner: TokenLosses(*([part] for part in parts)) for owner, parts in value["losses"].items()}
        return cls(KernelFacts.model_validate(value["facts"]), losses, value["windows"])


def swap_report(
    session: Swapping, values: Mapping[str, Any], missing: Mapping[str, str], timings: Mapping[str, float]
) -> Report:
    """Build the report from the values of finished kernels; `missing` explains why others lack one."""
    done = {name: KernelReading.of(value) for name, value in values.items()}
    spellings = [kernel.spelling for kernel in session.options.kernels]
    late = [
        Skipped(site=f"kernel {name}", reason=missing.get(name, INTERRUPTED)) for name in spellings if name not in done
    ]
    readings, settings = list(done.values()), session.settings
    parts = session.evaluated.parts or ("",) * session.evaluated.sequences
    design = Design.of(parts, settings.intervals)
    # use the widest window with enough tokens for all kernels, so that their losses are over the same tokens
    first = next((losses for reading in readings for losses in reading.losses.values()), TokenLosses())
    windows = [reading.facts.window for reading in readings]
    widest = max((one for one in windows if isinstance(one, int) and first.count(one) >= FEWEST), default=None)
    swaps = [_with_window(one, widest or one.facts.window, design, settings.seed) for one in readings]
    units = [{"kernel": name, "stage": stage.name} for name, one in done.items() for stage in one.facts.swap.stages]
    columns = {name: torch.cat([one.windows[name] for one in readings], 1) for name in readings[0].windows}
    notes = dict.fromkeys(chain.from_iterable(reading.facts.notes for reading in readings))
    settings = settings.model_copy(update={"notes": [*settings.notes, *notes]})
    heads = sum(session.heads_of[site] if chosen is None else len(chosen) for site, chosen in session.chosen.items())
    body = SwapBody(**dict(swaps[0]), others=swaps[1:], plan=readings[0].facts.plan)
    return report_of(
        "swap-kernel",
        "swap",
        model=session.loaded.info,
        settings=settings,
        coverage=Coverage(sites=len(session.chosen), heads=heads, analysed=heads, skipped=[*session.idle, *late]),
        summary=Summary(identity_error=session.identity_error),
        swap=body,
        timings=dict(timings),
    ).with_windows(placed_windows(columns, units, settings))


def _with_window(reading: KernelReading, window: int | str, design: Design, seed: int) -> Swap:
    """Return the kernel's record with the losses beyond `window` instead of those beyond the kernel's own window."""
    swap = reading.facts.swap
    if window == reading.facts.window or not isinstance(window, int):
        return swap

    def placed(outcome: Stage | Control, owner: str) -> Stage | Control:
        if owner not in reading.losses or outcome.loss is None:
            return outcome
        found = reading.losses[owner].beyond(window, design, seed)
        reasons = {name: reason for name, reason in outcome.reasons.items() if name != "beyond_window"}
        why = {"beyond_window": found} if isinstance(found, str) else {}
        return outcome.model_copy(update={"beyond_window": None if why else found, "reasons": reasons | why})

    stages = [placed(stage, stage.name) for stage in swap.stages]
    controls = [placed(one, str(number)) for number, one in enumerate(swap.controls)]
    last = stages[-1]
    why = {name: reason for name, reason in last.reasons.items() if name == "beyond_window"}
    reasons = {name: reason for name, reason in swap.reasons.items() if name != "beyond_window"} | why
    update = {"stages": stages, "controls": controls, "beyond_window": last.beyond_window, "reasons": reasons}
    return swap.model_copy(update=update)


EXACT: Route = "auto"
"""Path of the controls. The `path` option applies to the kernel alone; all paths are exact."""
UNSWEPT = "The sweep was interrupted before it was finished."


class KernelInterrupted(KeyboardInterrupt):
    """Interruption by the user of a kernel's healing or sweep; `reading` holds the results so far."""

    def __init__(self, reading: KernelReading) -> None:
        super().__init__()
        self.reading = reading


@dataclass
class KernelRun:
    """The run of one kernel."""

    session: Swapping
    candidate: Candidate
    parts: Store | None = None  # stores parts of long computations
    notes: list[str] = field(default_factory=list)
    plan: Plan | None = None
    interrupted: bool = False
    unsaved: OutputError | None = None  # why the changed model could not be saved

    def read(self) -> KernelReading:
        """Fit, check, compare, heal and sweep the kernel; raise KernelInterrupted if the user ends healing or sweep."""
        session, candidate = self.session, self.candidate
        with enough_memory(session.loaded.model, session.fed[0].inputs, session.variant(candidate.last)):
            _ = session.own_peak  # measured first, before anything keeps memory allocated
            swap = self._run_stages()
        windows = windows_of({(candidate.kernel.spelling, s): d for s, d in candidate.found.items()}, session.settings)
        controls = {str(n): candidate.measured[one.key] for n, one in enumerate(candidate.controls) if one.swaps}
        measured = {**candidate.found, **controls}
        losses = {name: one.by_token.joined() for name, one in measured.items() if one.by_token.before}
        facts = KernelFacts(swap=swap, plan=self.plan, window=candidate.window, notes=self.notes)
        reading = KernelReading(facts, losses, dict(windows.values))
        if self.interrupted:
            raise KernelInterrupted(reading)
        return reading

    def _run_stages(self) -> Swap:
        session, candidate, timings = self.session, self.candidate, self.session.timings
        with timed(timings, "fit"):
            self._fit()
        gates = leaks(session.loaded, session.sites, session.probe, session.variant(candidate.last), self._seed)
        with timed(timings, "compare"):
            self._compare()
        if session.options.heal is not None and session.calibrated is not None:
            with timed(timings, "heal"):
                self._heal(session.calibrated, session.options.heal)
        if session.options.generate:
            with timed(timings, "generate"):
                self._generate()
        if candidate.choice is not None and session.options.limit is not None:
            with timed(timings, "plan"):
                settings = session.settings.model_copy(update={"notes": [*session.settings.notes, *self.notes]})
                of = session.loaded, candidate.choice, session.options.limit, settings, session.fed[0].inputs
                self.plan = planned(*of, candidate.found, session.samples)
        with timed(timings, "sites"):
            one = texts.first(session.probe, 1)  # one sequence, so that the result does not depend on the batch size
            local = locally(session.loaded, session.sites, candidate.last, one, session.options.path)
        swap = self._record(gates, local)
        if session.options.sweep and not self.interrupted:
            with timed(timings, "sweep"):
                swap = self._swept(swap)
        if session.options.save is not None:
            with changed_weights(session.loaded.model, candidate.weights):
                try:
                    save_swapped(session.options.save, session.loaded, session.sites, candidate.last)
                except OutputError as error:  # raised once the report is complete
                    self.unsaved = error
        return swap

    @property
    def _keep(self) -> Keep:
        return keep_nothing if self.parts is None else self.parts.compute

    def _fit(self) -> None:
        """Search ranks within the budget, or fit the kernel: as stage `swapped` if it needs a fit, else as `fitted`."""
        session, candidate = self.session, self.candidate
        kernel, needed = candidate.kernel, candidate.kernel.needs_fit
        if session.options.limit is not None:
            candidate.choice = self._choose_ranks(candidate.last, session.options.limit)
            candidate.stages["swapped"] = candidate.choice.swaps
            return
        source = session.calibrated if kernel.fit_reads else session.evaluated.first()  # else only shapes are read
        if source is None or not kernel.fits or not (needed or session.options.fit):
            return
        text, reads = source.some(MOST_FITTED), 1 if needed or kernel.near is not None else 2
        how = self._teller("fit", text.sequences * reads), session.task, self._seed
        stage = "swapped" if needed else "fitted"
        candidate.stages[stage] = fit(session.loaded, session.sites, candidate.last, text, *how)

    def _choose_ranks(self, swaps: Swaps, limit: Budget) -> Choice:
        """Return the ranks of the given plan, or search those within the limit."""
        session = self.session
        named, how = session.options.form_named, (session.task, session.options.path, self._seed)
        search = partial(Budgeting, session.loaded, session.sites, swaps, *how, form_named=named, keep=self._keep)
        if session.options.ranks is not None:
            (fitting,) = session.samples
            tell = self._teller("fit rank", fitting.batches.sequences)
            return given(search(tell), fitting, session.options.ranks)
        fitting, choosing, promising = session.samples
        work = budget_work(fitting, choosing, promising, form_named=named)
        with telling_at_most(session.progress, "budget", work) as tell:
            return search(tell).choose(fitting, choosing, promising, limit)

    def _compare(self) -> None:
        """Measure the stages of the candidate so far, and its controls."""
        session, candidate = self.session, self.candidate
        controls = alternatives(candidate.last, session.shapes)
        candidate.state = mean_state(candidate.last, session.shapes)
        candidate.window = window_beyond(candidate.last, controls, session.shapes)
        candidate.controls = controls if session.options.controls else []
        for control in candidate.controls:
            control.refuse(session.loaded, session.probe, partial(session.variant, path=EXACT))
        found = self._compare_variants(self._variants(session.controls))
        session.controls |= self._common(found)
        results = session.controls | found
        candidate.found |= {stage: results[stage] for stage in candidate.stages}
        candidate.measured = {one.key: results[one.key] for one in candidate.controls if one.swaps}
        if session.task in ("causal", "masked"):
            one = next(iter(candidate.found.values()))
            names = [session.settings.texts[number].name for number in one.sampled.texts]
            vocabulary = texts.vocabulary(session.loaded.model) or math.inf
            self.notes += guess_notes(torch.cat(one.before), torch.cat(one.counts), names, vocabulary)

    def _variants(self, known: Container[object], path: Route | None = None) -> dict[object, Variant]:
        """Return a variant per stage, computed with `path`, and per control whose key is not in `known`."""
        candidate, variant = self.candidate, self.session.variant
        found: dict[object, Variant] = {
            stage: variant(swaps, candidate.weights if stage == "healed" else None, path)
            for stage, swaps in candidate.stages.items()
        }
        controls = [one for one in candidate.controls if one.swaps and one.key not in known]
        return found | {one.key: variant(one.swaps, one.weights, EXACT) for one in controls}

    def _common(self, found: Mapping[object, Any]) -> dict[object, Any]:
        """Select the results of controls without fitted parameters or healed weights: other kernels can share them."""
        return {
            one.key: found[one.key]
            for one in self.candidate.controls
            if one.key in found and not (one.weights or any(swap.kernel.fitted for swap in one.swaps.values()))
        }

    def _compare_variants(self, variants: Mapping[object, Variant]) -> dict[object, Differences]:
        session = self.session
        tell = self._teller("compare", len(variants) * sum(map(tokens_in, session.fed)))
        return compare(session.loaded.model, session.fed, variants, session.task, tell, session.design)

    def _heal(self, calibrated: texts.Batches, asked: HealOptions) -> None:
        session, candidate, model = self.session, self.candidate, self.session.loaded.model
        work = session, candidate.last, asked, calibrated, self._teller, self.parts
        with enough_memory(model, calibrated.batches[0].inputs, None):
            healing, healer = healed(*work)
            control = healed(*work, control=True) if asked.control and not healer.interrupted else None
        self.interrupted = healer.interrupted or (control is not None and control[1].interrupted)
        candidate.weights, candidate.stages["healed"] = healer.values(), healer.healed_swaps()
        variants: dict[object, Variant] = {"healed": session.variant(candidate.last, candidate.weights)}
        far = healed_far_part(candidate.last, candidate.weights, session.shapes) if session.options.controls else None
        if far is not None:
            candidate.controls.append(far)
            variants[far.key] = session.variant(far.swaps, far.weights, EXACT)
        if control is not None:
            variants["control"] = session.variant(control[1].healed_swaps(), control[1].values())
        found = self._compare_variants(variants)
        candidate.found["healed"] = found["healed"]
        if far is not None:
            candidate.measured[far.key] = found[far.key]
        if control is not None:
            record = control_of(control[0], found["control"], found["healed"], self._seed)
            reasons = healing.reasons if record else {**healing.reasons, "control": "a model diverged"}
            healing = healing.model_copy(update={"control": record, "reasons": reasons})
        candidate.healing = healing

    def _generate(self) -> None:
        """Measure how long the greedy continuations of each stage and control agree with the original's."""
        session, candidate = self.session, self.candidate
        variants = self._variants(session.agreements, EXACT)
        tell = self._teller("generate", len(variants) + 1)
        own, notes = session.continuation
        tell(1)
        found = agreements(session.loaded.model, own, variants, tell)
        session.agreements |= self._common(found)
        results = session.agreements | found
        candidate.agreements = {stage: results[stage] for stage in candidate.stages}
        for control in candidate.controls:
            control.agreement = results[control.key] if control.swaps else {}
        self.notes += notes

    def _record(self, gates: dict[str, Any], local: Local) -> Swap:
        session, candidate, kernel = self.session, self.candidate, self.candidate.kernel
        names, noise = [text.name for text in session.settings.texts], session.fed[0].noise
        with session.variant(candidate.last, candidate.weights)():
            peak = session.peak
        outcomes = {}
        for stage, found in candidate.found.items():
            outcome, agreement = found.outcome(self._seed, names, candidate.window), candidate.agreements.get(stage, {})
            reasons = outcome["reasons"] | agreement.get("reasons", {})
            outcomes[stage] = outcome | agreement | {"reasons": reasons}
        last, reasons, of_output = list(outcomes.values())[-1], dict(gates["reasons"]), kernel.info.form == "output"
        shares = [site.off_simplex for site in local.sites if site.off_simplex is not None]
        if of_output:
            reasons |= {"off_simplex": "there is no attention matrix", "state": "it keeps neither keys nor values"}
        if peak is None:
            reasons["peak_memory_bytes"] = NO_PEAK
        notes = swap_notes(session.options, session.loaded.info, session.shared, candidate)
        return Swap(
            kernel=kernel.spelling if candidate.choice is None else kernel.info.name,
            formula=kernel.formula,
            formula_of="output" if of_output else "log k",
            parameters=dict(kernel.parameters) if candidate.choice is None else {},
            fitted=candidate.fitted,
            sites=local.sites,
            **gates | last | {"reasons": reasons | last["reasons"]},
            off_simplex=sum(shares) / len(shares) if shares else None,
            tokens_per_second=Pair(
                before=speed(found.sizes, found.own_seconds), after=speed(found.sizes, found.seconds)
            ),
            peak_memory_bytes=Pair(before=session.own_peak, after=peak),
            stages=[Stage(name=stage, **fields) for stage, fields in outcomes.items()],
            healing=candidate.healing,
            state=candidate.state,
            task=session.task,
            noise=noise,
            identity_error=session.identity_error,
            controls=[
                one.record(candidate.measured.get(one.key), self._seed, names, candidate.window)
                for one in candidate.controls
            ],
            notes=[*meanings(session.task, noise=noise), *local.notes(kernel), *notes],
        )

    def _swept(self, swap: Swap) -> Swap:
        """Return the record with the effect of each head or layer alone; without effects if the user interrupts."""
        # the stage before healing
        last = [swaps for stage, swaps in self.candidate.stages.items() if stage != "healed"][-1]
        fitted = key_of({site.name: digest_of(dict(one.kernel.fitted)) for site, one in last.items()})

        def keep(name: str, make: Callable[[], Any]) -> Any:
            return self._keep(f"{name}, parameters {fitted}", make)  # a fit can differ on another machine

        try:
            return swept(self.session, swap, last, self._teller, keep)
        except KeyboardInterrupt:
            self.interrupted = True
            return swap.model_copy(update={"notes": [*swap.notes, UNSWEPT]})

    @property
    def _seed(self) -> int:
        return self.session.settings.seed

    def _teller(self, stage: str, total: int) -> Tell:
        return self.session.teller(stage, total, self.candidate.kernel)
