"""One kernel of a run of swap-kernel: it is proven, fitted, measured, healed, swept and saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from attnlens import texts
from attnlens.arguments import Budget
from attnlens.errors import OutputError
from attnlens.hooks import Swaps
from attnlens.records import Pair, Plan, Swap
from attnlens.requests.healing import HealOptions
from attnlens.run.outcomes.agreement import agreements
from attnlens.run.outcomes.differences import compare, windows_of
from attnlens.run.outcomes.outputs import tokens_in
from attnlens.run.swap import candidate as candidates
from attnlens.run.swap.candidate import Candidate, guessed, swap_notes
from attnlens.run.swap.fit import MOST_FITTED, fit, passes
from attnlens.run.swap.gates import leaks
from attnlens.run.swap.healing import Procedure, changed_weights, control_of, digest_of
from attnlens.run.swap.ranks.plans import given, planned
from attnlens.run.swap.ranks.search import Budgeting, Choice, budget_work
from attnlens.run.swap.readings import KernelFacts, KernelReading, losses_of
from attnlens.run.swap.resources import enough_memory
from attnlens.run.swap.saved import save_swapped
from attnlens.run.swap.session import Swapping
from attnlens.run.swap.sites import Local, locally
from attnlens.runs.progress import Tell, telling_at_most, timed
from attnlens.runs.work import Keep, Store, keep_nothing, key_of
from attnlens.texts.targets import meanings

UNSWEPT = "The sweep was interrupted before it was finished."


class KernelInterrupted(KeyboardInterrupt):
    """The user ended the healing or the sweep of a kernel; `reading` holds what was found of it."""

    def __init__(self, reading: KernelReading) -> None:
        super().__init__()
        self.reading = reading


@dataclass
class KernelRun:
    """A kernel on its way through a run."""

    session: Swapping
    candidate: Candidate
    parts: Store | None = None
    """Where parts of what takes long are kept."""
    notes: list[str] = field(default_factory=list)
    plan: Plan | None = None
    interrupted: bool = False
    unsaved: OutputError | None = None
    """Why the changed model could not be saved."""

    def read(self) -> KernelReading:
        """Gates, fit, comparison, healing, sweep. Raises KernelInterrupted where the user ended one of the last two."""
        session, candidate = self.session, self.candidate
        with enough_memory(session.loaded.model, session.fed[0].inputs, session.variant(candidate.last)):
            _ = session.own_peak  # before anything takes memory that is not given back
            swap = self._through()
        windows = windows_of({(candidate.kernel.spelling, s): d for s, d in candidate.found.items()}, session.settings)
        facts = KernelFacts(swap=swap, plan=self.plan, window=candidate.window, notes=self.notes)
        reading = KernelReading(facts, losses_of(candidate), dict(windows.values))
        if self.interrupted:
            raise KernelInterrupted(reading)
        return reading

    def _through(self) -> Swap:
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
                self.plan = self._planned(candidate.choice, session.options.limit)
        with timed(timings, "sites"):
            one = texts.first(session.probe, 1)  # whatever the batch size
            local = locally(session.loaded, session.sites, candidate.last, one, session.options.path)
        swap = self._record(gates, local)
        if session.options.sweep and not self.interrupted:
            with timed(timings, "sweep"):
                swap = self._swept(swap)
        if session.options.save is not None:
            self._save(session.options.save)
        return swap

    @property
    def _keep(self) -> Keep:
        return keep_nothing if self.parts is None else self.parts.compute

    def _fit(self) -> None:
        """A kernel that is nothing before a fit begins with it; for the others it is a stage."""
        session, candidate = self.session, self.candidate
        kernel, needed = candidate.kernel, candidate.kernel.needs_fit
        if session.options.limit is not None:
            candidate.choice = self._chosen(candidate.last, session.options.limit)
            candidate.stages["swapped"] = candidate.choice.swaps
            return
        source = session.calibrated if kernel.fit_reads else session.evaluated.first()  # of which the shapes are read
        if source is None or not kernel.fits or not (needed or session.options.fit):
            return
        text = source.some(MOST_FITTED)
        how = self._teller("fit", text.sequences * passes(kernel)), session.task, self._seed
        stage = "swapped" if needed else "fitted"
        candidate.stages[stage] = fit(session.loaded, session.sites, candidate.last, text, *how)

    def _chosen(self, swaps: Swaps, limit: Budget) -> Choice:
        """The ranks of the plan given, or those found within the limit."""
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
        """The candidate as far as it has come, and its controls."""
        session, candidate = self.session, self.candidate
        shown = session.shapes, session.loaded, session.probe, session.variant
        candidates.prepare(candidate, *shown, controls=session.options.controls)
        every = candidates.variants(candidate, session.variant, session.controls)
        tell = self._teller("compare", len(every) * sum(map(tokens_in, session.fed)))
        found = compare(session.loaded.model, session.fed, every, session.task, tell, session.design)
        session.controls |= candidates.common(candidate, found)
        candidates.keep_differences(candidate, session.controls | found)
        if session.task in ("causal", "masked"):
            one = next(iter(candidate.found.values()))
            self.notes += guessed(one, session.settings, texts.vocabulary(session.loaded.model))

    def _heal(self, calibrated: texts.Batches, asked: HealOptions) -> None:
        session, candidate, model = self.session, self.candidate, self.session.loaded.model
        work = calibrated, session.fed, self._seed, self._teller, self.parts
        procedure = Procedure(
            session.loaded, session.sites, candidate.last, session.task, session.options, asked, *work
        )
        with enough_memory(model, calibrated.batches[0].inputs, None):
            healing, healer = procedure.run()
            control = None if healer.interrupted else procedure.run_control()
        self.interrupted = healer.interrupted or (control is not None and control[1].interrupted)
        candidate.weights, candidate.stages["healed"] = healer.values(), healer.healed_swaps()
        variants = candidates.healed(candidate, session.variant, session.shapes if session.options.controls else {})
        if control is not None:
            variants["control"] = session.variant(control[1].healed_swaps(), control[1].values())
        tell = self._teller("compare", len(variants) * sum(map(tokens_in, session.fed)))
        found = compare(model, session.fed, variants, session.task, tell, session.design)
        candidates.keep_healed(candidate, found)
        if control is not None:
            record = control_of(control[0], found["control"], found["healed"], self._seed)
            reasons = healing.reasons if record else {**healing.reasons, "control": "a model diverged"}
            healing = healing.model_copy(update={"control": record, "reasons": reasons})
        candidate.healing = healing

    def _generate(self) -> None:
        """For how long greedy continuations are the original's, of every stage and control."""
        session, candidate = self.session, self.candidate
        exact = partial(session.variant, path=candidates.EXACT)
        every = candidates.variants(candidate, exact, session.agreements)
        tell = self._teller("generate", len(every) + 1)
        own, notes = session.continuation
        tell(1)
        found = agreements(session.loaded.model, own, every, tell)
        session.agreements |= candidates.common(candidate, found)
        candidates.keep_agreements(candidate, session.agreements | found)
        self.notes += notes

    def _planned(self, choice: Choice, limit: Budget) -> Plan:
        session = self.session
        settings = session.settings.model_copy(update={"notes": [*session.settings.notes, *self.notes]})
        work = session.loaded, choice, limit, settings, session.fed[0].inputs
        return planned(*work, self.candidate.found, session.samples)

    def _record(self, gates: dict[str, Any], local: Local) -> Swap:
        session, candidate = self.session, self.candidate
        names, noise = [text.name for text in session.settings.texts], session.fed[0].noise
        with session.variant(candidate.last, candidate.weights)():
            peak = session.peak
        notes = swap_notes(session.options, session.loaded.info, session.shared, candidate)
        return candidate.record(
            candidate.outcomes(self._seed, names),
            local,
            gates,
            Pair(before=session.own_peak, after=peak),
            task=session.task,
            noise=noise,
            identity_error=session.identity_error,
            controls=candidate.control_records(self._seed, names),
            notes=[*meanings(session.task, noise=noise), *local.notes(candidate.kernel), *notes],
        )

    def _swept(self, swap: Swap) -> Swap:
        """The same record with the effects of heads or layers alone; where the user ends that early, without."""
        # of the stage before healing
        last = [swaps for stage, swaps in self.candidate.stages.items() if stage != "healed"][-1]
        fitted = key_of({site.name: digest_of(dict(one.kernel.fitted)) for site, one in last.items()})

        def keep(name: str, make: Callable[[], Any]) -> Any:
            return self._keep(f"{name}, parameters {fitted}", make)  # another machine's fit may be another

        try:
            return self.session.sweeping.swept(swap, last, self._teller, self.session.timings, keep)
        except KeyboardInterrupt:
            self.interrupted = True
            return swap.model_copy(update={"notes": [*swap.notes, UNSWEPT]})

    def _save(self, folder: Path) -> None:
        session, candidate = self.session, self.candidate
        with changed_weights(session.loaded.model, candidate.weights):
            try:
                save_swapped(folder, session.loaded, session.sites, candidate.last)
            except OutputError as error:  # raised when the report is made
                self.unsaved = error

    @property
    def _seed(self) -> int:
        return self.session.settings.seed

    def _teller(self, stage: str, total: int) -> Tell:
        return self.session.teller(stage, total, self.candidate.kernel)
