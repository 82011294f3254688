"""One run of swap-kernel: a swap is proven, fitted, measured, swept, healed and saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from attnlens import hooks, models, texts
from attnlens.arguments import Budget
from attnlens.choices import Route
from attnlens.errors import OutputError
from attnlens.kernels import Kernel
from attnlens.kernels.state import HeadShape
from attnlens.records import Coverage, Pair, Plan, Report, Settings, Site, Skipped, Summary, Swap, Task
from attnlens.requests.healing import HealOptions
from attnlens.requests.swap import SwapOptions
from attnlens.run import checks
from attnlens.run.initialised import predictions, refuse_initialised
from attnlens.run.outcomes.agreement import Prompts, agreements
from attnlens.run.outcomes.differences import Differences, Variant, compare
from attnlens.run.outcomes.outputs import run, tokens_in
from attnlens.run.outcomes.windows import windows_of
from attnlens.run.progress import Progress, Tell, telling, telling_at_most, timed
from attnlens.run.provenance import report_of
from attnlens.run.swap.candidate import Candidate, guessed, swap_notes
from attnlens.run.swap.chosen import chosen_sites, idle_sites, refuse_crossing
from attnlens.run.swap.controls import measuring
from attnlens.run.swap.controls.alternatives import shapes_of
from attnlens.run.swap.fit import MOST_FITTED, fit, passes
from attnlens.run.swap.gates import leaks
from attnlens.run.swap.healing import Procedure, changed_weights, control_of
from attnlens.run.swap.predictors.sweeping import Sweeping, Windowed
from attnlens.run.swap.ranks.calibration import Sample
from attnlens.run.swap.ranks.from_plan import check_fits, given
from attnlens.run.swap.ranks.savings import planned
from attnlens.run.swap.ranks.search import Budgeting, Choice, budget_work
from attnlens.run.swap.resources import enough_memory, peak_of
from attnlens.run.swap.saved import save_swapped
from attnlens.run.swap.sites import Local, locally
from attnlens.statistics import Design
from attnlens.texts.targets import Fed, meanings

UNSWEPT = "The sweep was interrupted before it was finished."


@dataclass
class Swapping:
    """One run of `swap_kernel`."""

    loaded: models.Loaded
    options: SwapOptions
    settings: Settings
    task: Task
    evaluated: texts.Batches
    """What is evaluated on, as it was cut."""
    fed: list[Fed]
    """The same with what is to be predicted."""
    design: Design
    """How the evaluated sequences were sampled."""
    calibrated: texts.Batches | None
    """What kernels are fitted on, and weights healed."""
    samples: tuple[Sample, ...]
    """What a budget fits on, chooses by and promises from; the first of them where its ranks are given."""
    progress: Progress
    prompts: Prompts | str = "nothing is generated"
    """What is continued greedily, or why nothing is."""
    shared: float = 0.0
    """Share of the evaluated tokens that stand in the calibration text too."""
    sites: tuple[Site, ...] = ()
    heads_of: dict[Site, int] = field(default_factory=dict)
    chosen: dict[Site, tuple[int, ...] | None] = field(default_factory=dict)
    """Where the kernel is swapped, and in which heads; None means all."""
    shapes: dict[Site, HeadShape] = field(default_factory=dict)
    """What the state of the chosen heads depends on."""
    idle: list[Skipped] = field(default_factory=list)
    """Attention that the evaluated input does not run."""
    identity_error: float = 0.0
    own_peak: int | None = None
    interrupted: bool = False
    unsaved: OutputError | None = None
    """Why the changed model could not be saved."""
    plan: Plan | None = None
    found: dict[tuple[str, str], Differences] = field(default_factory=dict)
    """What was measured, by kernel and stage."""
    timings: dict[str, float] = field(default_factory=dict)

    def run(self) -> list[Swap]:
        """Gates, then every kernel: fit, comparison, sweep, healing."""
        with timed(self.timings, "survey"), enough_memory(self.loaded.model, self._probe, nullcontext):
            self._survey()
        candidates = [Candidate(kernel, {"swapped": self._swaps(kernel)}) for kernel in self._kernels()]
        inputs = self.fed[0].inputs
        with enough_memory(self.loaded.model, inputs, self._variant(candidates[0].last)):
            self.own_peak = peak_of(self.loaded.model, self._pass)
            return self._through(candidates)

    def _through(self, candidates: list[Candidate]) -> list[Swap]:
        with timed(self.timings, "fit"):
            for candidate in candidates:
                self._fit(candidate)
        gates = [
            leaks(self.loaded, self.sites, self._probe, self._variant(c.last), self.settings.seed) for c in candidates
        ]
        with timed(self.timings, "compare"):
            self._compare(candidates)
        if self.options.heal is not None and self.calibrated is not None:
            with timed(self.timings, "heal"):
                self._heal(candidates[0], self.calibrated, self.options.heal)
        if self.options.generate:
            with timed(self.timings, "generate"):
                self._generate(candidates)
        if (choice := candidates[0].choice) is not None and self.options.limit is not None:
            with timed(self.timings, "plan"):
                work = self.loaded, choice, self.options.limit, self.settings, self.fed[0].inputs
                self.plan = planned(*work, candidates[0].found, self.samples)
        with timed(self.timings, "sites"):
            one = texts.first(self._probe, 1)  # whatever the batch size
            local = [locally(self.loaded, self.sites, c.last, one, self.options.path) for c in candidates]
        swaps = [self._record(*parts) for parts in zip(candidates, gates, local, strict=True)]
        if self.options.sweep and not self.interrupted:
            with timed(self.timings, "sweep"):
                swaps = self._all_swept(swaps, candidates)
        if self.options.save is not None:
            with changed_weights(self.loaded.model, candidates[0].weights):
                try:
                    save_swapped(self.options.save, self.loaded, self.sites, candidates[0].last)
                except OutputError as error:  # raised when the report is made
                    self.unsaved = error
        return swaps

    def _survey(self) -> None:
        """Find the sites, prove that recomputing attention changes nothing, choose the sites."""
        survey = checks.surveyed(self.loaded, self._probe)
        reached = survey.reached
        self.identity_error = checks.proven_whole(self.loaded, self._probe)
        refuse_initialised(self.loaded, self._probe, predictions(self.task))
        self.sites = tuple(found.site for found in reached)
        self.heads_of = {found.site: found.call.query.shape[1] for found in reached}
        if self.options.ranks is not None:
            check_fits(self.options.ranks, reached)
        self.chosen = chosen_sites(reached, self.settings.layers, self.settings.heads, self.options.part)
        self.shapes = shapes_of(reached, self.chosen)
        self.idle = idle_sites(survey, self.settings.layers)

    def _kernels(self) -> list[Kernel]:
        """Those asked for; raises UsageError for one that has no meaning in a chosen cross-attention."""
        for kernel in self.options.kernels:
            refuse_crossing(kernel, list(self.chosen))
        return self.options.kernels

    def _swaps(self, kernel: Kernel) -> hooks.Swaps:
        return {site: hooks.Replacement(kernel, heads) for site, heads in self.chosen.items()}

    def _variant(self, swaps: hooks.Swaps, weights: measuring.Weights = None, path: Route | None = None) -> Variant:
        @contextmanager
        def changed() -> Iterator[None]:
            replaced = hooks.replace(self.loaded.model, self.sites, swaps, path or self.options.path)
            with changed_weights(self.loaded.model, weights or {}), replaced:
                yield

        return changed

    def _fit(self, candidate: Candidate) -> None:
        """A kernel that is nothing before a fit begins with it; for the others it is a stage."""
        kernel, needed = candidate.kernel, candidate.kernel.needs_fit
        if self.options.limit is not None:
            candidate.choice = self._chosen(candidate.last, self.options.limit)
            candidate.stages["swapped"] = candidate.choice.swaps
            return
        source = self.calibrated if kernel.fit_reads else self.evaluated.first()  # of which the shapes are read
        if source is None or not kernel.fits or not (needed or self.options.fit):
            return
        text = source.some(MOST_FITTED)
        how = self._teller(f"fit {kernel.info.name}", text.sequences * passes(kernel)), self.task, self.settings.seed
        candidate.stages["swapped" if needed else "fitted"] = fit(self.loaded, self.sites, candidate.last, text, *how)

    def _chosen(self, swaps: hooks.Swaps, limit: Budget) -> Choice:
        """The ranks of the plan given, or those found within the limit."""
        named, how = self.options.form_named, (self.task, self.options.path, self.settings.seed)
        search = partial(Budgeting, self.loaded, self.sites, swaps, *how, form_named=named)
        if self.options.ranks is not None:
            (fitting,) = self.samples
            tell = self._teller("fit rank", fitting.batches.sequences)
            return given(search(tell), fitting, self.options.ranks)
        fitting, choosing, promising = self.samples
        work = budget_work(fitting, choosing, promising, form_named=named)
        with telling_at_most(self.progress, "budget", work) as tell:
            return search(tell).choose(fitting, choosing, promising, limit)

    def _compare(self, candidates: list[Candidate]) -> None:
        """Every candidate as far as it has come, and its controls."""
        measuring.prepare(
            candidates, self.shapes, self.loaded, self._probe, self._variant, controls=self.options.controls
        )
        every = measuring.variants(candidates, self._variant)
        tell = self._teller("compare", len(every) * sum(map(tokens_in, self.fed)))
        found = compare(self.loaded.model, self.fed, every, self.task, tell, self.design)
        measuring.keep_differences(candidates, found)
        if self.task in ("causal", "masked"):
            one = next(iter(candidates[0].found.values()))
            self._note(guessed(one, self.settings, texts.vocabulary(self.loaded.model)))

    def _generate(self, candidates: list[Candidate]) -> None:
        """For how long greedy continuations are the original's, of every stage and control."""
        every = measuring.variants(candidates, partial(self._variant, path=measuring.EXACT))
        tell = self._teller("generate", len(every) + 1)
        found, notes = agreements(self.loaded.model, self.prompts, self.options.generate, every, tell)
        measuring.keep_agreements(candidates, found)
        self._note(notes)

    def _note(self, notes: list[str]) -> None:
        self.settings = self.settings.model_copy(update={"notes": [*self.settings.notes, *notes]})

    def _heal(self, candidate: Candidate, calibrated: texts.Batches, asked: HealOptions) -> None:
        model, seed = self.loaded.model, self.settings.seed
        work = calibrated, self.fed, seed, self._teller
        procedure = Procedure(self.loaded, self.sites, candidate.last, self.task, self.options, asked, *work)
        with enough_memory(model, calibrated.batches[0].inputs, None):
            healing, healer = procedure.run()
            control = None if healer.interrupted else procedure.run_control()
        self.interrupted = healer.interrupted or (control is not None and control[1].interrupted)
        candidate.weights, candidate.stages["healed"] = healer.values(), healer.healed_swaps()
        variants = measuring.healed(candidate, self._variant, self.shapes if self.options.controls else {})
        if control is not None:
            variants["control"] = self._variant(control[1].healed_swaps(), control[1].values())
        tell = self._teller("compare", len(variants) * sum(map(tokens_in, self.fed)))
        found = compare(model, self.fed, variants, self.task, tell, self.design)
        measuring.keep_healed(candidate, found)
        if control is not None:
            record = control_of(control[0], found["control"], found["healed"], seed)
            reasons = healing.reasons if record else {**healing.reasons, "control": "a model diverged"}
            healing = healing.model_copy(update={"control": record, "reasons": reasons})
        candidate.healing = healing

    def _record(self, candidate: Candidate, gates: dict[str, Any], local: Local) -> Swap:
        names = [text.name for text in self.settings.texts]
        outcomes = candidate.outcomes(self.settings.seed, names)
        self.found |= {(candidate.kernel.spelling, stage): found for stage, found in candidate.found.items()}
        with self._variant(candidate.last, candidate.weights)():
            peak = peak_of(self.loaded.model, self._pass)
        notes = swap_notes(self.options, self.loaded.info, self.shared, candidate)
        return candidate.record(
            outcomes,
            local,
            gates,
            Pair(before=self.own_peak, after=peak),
            task=self.task,
            noise=self.fed[0].noise,
            identity_error=self.identity_error,
            controls=candidate.control_records(self.settings.seed, names),
            notes=[*meanings(self.task, noise=self.fed[0].noise), *local.notes(candidate.kernel), *notes],
        )

    def _all_swept(self, swaps: list[Swap], candidates: list[Candidate]) -> list[Swap]:
        """The same records, swept; where the user ends that early, the others say that they are not."""
        found: list[Swap] = []
        over = Windowed(self.evaluated, self.fed, self.design)
        work = Sweeping(self.loaded, self.options, self.settings, self.task, over, self.sites, self.heads_of)
        try:
            for swap, candidate in zip(swaps, candidates, strict=True):
                # of the stage before healing
                stages = [swaps for stage, swaps in candidate.stages.items() if stage != "healed"]
                found.append(work.swept(swap, stages[-1], self._teller, self.timings))
        except KeyboardInterrupt:
            self.interrupted = True
            left = swaps[len(found) :]
            found += [swap.model_copy(update={"notes": [*swap.notes, UNSWEPT]}) for swap in left]
        return found

    def report(self, swaps: list[Swap]) -> Report:
        """The report of `swap-kernel`."""
        heads = sum(len(site.heads) for site in swaps[0].sites)
        return report_of(
            "swap-kernel",
            model=self.loaded.info,
            settings=self.settings,
            coverage=Coverage(sites=len(self.chosen), heads=heads, analysed=heads, skipped=self.idle),
            summary=Summary(identity_error=self.identity_error),
            swap=swaps[0],
            more_swaps=swaps[1:],
            plan=self.plan,
            timings=self.timings,
        ).with_windows(windows_of(self.found, self.settings))

    @property
    def _probe(self) -> dict[str, Tensor]:
        """Two of the sequences, by which the model is proven."""
        return texts.first(self.fed[0].inputs, 2)

    def _pass(self) -> None:
        run(self.loaded.model, self.fed[0], self.task)

    def _teller(self, stage: str, total: int) -> Tell:
        return telling(self.progress, stage, total)
