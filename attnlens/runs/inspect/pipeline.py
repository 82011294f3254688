"""Measure a model's attention heads from weights and real text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from attnlens import requests
from attnlens.arguments import public
from attnlens.choices import ATTENTION
from attnlens.errors import FAILURES, ModelError, TextError, TooLargeError, UnreadableError
from attnlens.maths.linalg.long import LONG
from attnlens.maths.statistics import Design
from attnlens.models import hooks, loading, texts, weights
from attnlens.models.hooks import Reached
from attnlens.models.loading.deferred import unspoken
from attnlens.records import Report, Settings, Site, Skipped
from attnlens.registry import Analyzer, Gathering
from attnlens.requests import InspectRequest, reading
from attnlens.runs import checks, feeding
from attnlens.runs.checks import attention, no_loss, refuse_initialised
from attnlens.runs.feeding import LOSS, predicts_text
from attnlens.runs.in_memory import at_rest, held, refuse_work
from attnlens.runs.inspect.assembly import RunDescription, WorkUnit, assemble_report, combine_values
from attnlens.runs.inspect.attention_rows import refuse_many_rows
from attnlens.runs.inspect.results import Results, combine_units, merge_skipped, skipped_in
from attnlens.runs.inspect.units import Unit, UnitReader
from attnlens.runs.progress import Interrupted, Progress, silent, timed
from attnlens.runs.provenance import content_of
from attnlens.runs.store import Store
from attnlens.runs.work import NOTHING_KEPT, Compute, Opener, WorkPlan, run_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


BY_HAND = "the module computes its attention by hand, which is traced on numbers: the model has to be loaded"
"""Reason why a site of a meta-device model is not read."""


def survey_shapes(loaded: loading.Loaded, inputs: Mapping[str, Tensor]) -> hooks.Surveyed:
    """Survey a model on the meta device (shapes only), whose attention all runs through transformers' interface."""
    try:
        survey = hooks.surveyed(loaded.model, inputs)
    except (ModelError, *FAILURES) as error:
        first = error.problem if isinstance(error, ModelError) else loading.first_line(error)
        raise ModelError(
            f"{loaded.info.id} can't be read from its files alone, as a pass through it takes numbers ({first})",
            "Leave out --from-files or --device-map: this architecture has to be loaded.",
        ) from error
    if any(each.site.traced for each in survey.reached):
        raise ModelError(
            f"{loaded.info.id} can't be read from its files alone: {BY_HAND}.",
            "Leave out --from-files or --device-map: this architecture has to be loaded.",
        )
    return survey


def match_sites(reached: Sequence[Reached], shapes: Sequence[Reached], loaded: loading.Loaded) -> list[Reached]:
    """Return the sites of the meta-device model under the names that were `reached` in the same model when it ran."""
    known = {(each.site.path, each.site.ordinal): each for each in shapes}
    wanted = [(each.site.path, each.site.ordinal) for each in reached]
    if list(known) != wanted:
        raise ModelError(
            f"{loaded.info.id} runs other attention than its shapes alone show.", "Leave out --device-map."
        )
    return [replace(known[place], site=each.site) for place, each in zip(wanted, reached, strict=True)]


ALL = "units"
"""Name of the progress over the units of all stages."""


def report_stages(progress: Progress, units: Mapping[str, WorkUnit], batches: Sequence[int]) -> Callable[[str], None]:
    """Report progress per stage (sites whose weights are read, sequences, gatherers' passes), and over all units."""
    sizes = {name: 1 if unit.batch is None else batches[unit.batch] for name, unit in units.items()}
    totals: Counter[str] = Counter()
    for name, size in sizes.items():
        totals[units[name].stage] += size
    done: Counter[str] = Counter()
    several = len(totals) > 1

    def tell(name: str) -> None:
        if several:  # first, because plain output prints only one line
            done[ALL] += 1
            progress(ALL, done[ALL], len(units))
        stage = units[name].stage
        done[stage] += sizes[name]
        progress(stage, done[stage], totals[stage])

    for stage in list(totals)[:1]:
        progress(stage, 0, totals[stage])
    if several:
        progress(ALL, 0, len(units))
    return tell


@dataclass
class Inspection:
    """One run of `inspect`."""

    loaded: loading.Loaded
    settings: Settings
    analyzers: Sequence[Analyzer | Gathering]
    progress: Progress
    timings: dict[str, float]
    factors: dict[Site, weights.Factors | UnreadableError] | None = None
    """Factors of each site's weights, kept if a caller needs them."""
    show: str | None = None
    reached: list[Reached] = field(default_factory=list)
    """Requested sites."""
    identity_error: float | None = None
    sites: tuple[Site, ...] = ()
    """All sites of the model."""
    skipped: list[Skipped] = field(default_factory=list)
    """What the survey found but can't read."""
    no_text_reason: str | None = None
    """Reason why the model's attention to text is not read although it was requested."""
    inputs: texts.Batches | None = None
    reader: UnitReader = field(init=False)
    results: Results = field(init=False)
    complete: bool = field(default=True, init=False)
    """True if every unit has a value."""

    def run(self, contents: Sequence[texts.Content], cut: texts.Cut) -> Report:
        """Run the survey, weights and tokens, and return the report."""
        return self.compute(self.describe(contents, cut))

    def describe(self, contents: Sequence[texts.Content], cut: texts.Cut) -> RunDescription:
        """Cut the texts and survey the model; return everything known before the first unit is read."""
        batches = self._cut_batches(contents, cut)
        with timed(self.timings, "survey"), unspoken() if self._weights_model.deferred is not None else nullcontext():
            self._survey(batches)
        return RunDescription(
            self.reached,
            content=content_of(self.loaded, self.reached, self.inputs, self.analyzers),
            show=self.show,
            model=self.loaded.info,
            settings=self.settings,
            analyzers=self.analyzers,
            parts=[] if self.inputs is None else list(self.inputs.parts),
            batches=[batch.size for batch in batches],
            skipped=merge_skipped(self.skipped),
            identity_error=self.identity_error,
            from_files=self.loaded.deferred is not None,
            weights=self.factors is not None or bool(self.reader.analyzers_of("weights")),
        )

    def compute(
        self,
        run: RunDescription,
        plan: WorkPlan = NOTHING_KEPT,
        store: Store | None = None,
        elsewhere: tuple[Opener, tuple[Any, ...]] | None = None,
    ) -> Report:
        """Read the units of a run, and assemble the report.

        A unit that fails is replaced by its reason. Raise Interrupted, which contains the finished part, ModelError
        if no head has a value, and what `run_units` raises.
        """
        names = list(run.units)
        mine = names if plan.shard is None else names[plan.shard[0] - 1 :: plan.shard[1]]
        tell = report_stages(self.progress, {name: run.units[name] for name in mine}, run.batches)
        read = lambda name: self.read_unit(run.units[name])  # noqa: E731  # one expression
        outcome = run_units(names, read, plan, store, elsewhere=elsewhere, tell=tell)
        self.complete = not outcome.missing
        self.results = combine_values(run, outcome.values, outcome.missing, interrupted=outcome.stopped)
        if not any(head.measures for head in self.results.heads):
            if outcome.stopped:
                raise KeyboardInterrupt
            reason = self.results.skipped[0].reason
            raise ModelError(f"No head could be analysed: {reason}.", "Choose another model, source or layers.")
        report = assemble_report(run, outcome.values, self.results, self.timings, interrupted=outcome.stopped)
        self.settings = report.settings
        if outcome.stopped:
            raise Interrupted(report)
        return report

    def read_unit(self, unit: WorkUnit) -> Unit:
        """Read one unit. Raise Stopped if the user interrupts it and its results so far are usable by themselves."""
        with timed(self.timings, unit.stage):
            return self._read(unit)

    def _read(self, unit: WorkUnit) -> Unit:
        if unit.stage == "weights" or self.inputs is None:  # without inputs, a run has no other units
            return self.reader.read_weights(unit.sites[0])
        if unit.stage == "gathered":
            return self.reader.read_gathered(self.inputs, unit.sites, unit.name)
        return self.reader.read_tokens(self.inputs, unit.batch or 0, unit.sites)

    def read_sites(
        self, reached: Sequence[Reached], sites: Collection[Site], inputs: texts.Batches, design: Design
    ) -> Results:
        """Read some `sites` of a verified model; `design` is that of the sequences in `inputs`, cut by the settings."""
        self.sites = tuple(each.site for each in reached)
        self._choose_sites(reached, [each for each in reached if each.site in sites])
        chosen = [each.site for each in self.reached]
        weights_units = {site: self.reader.read_weights(site) for site in chosen}
        tokens_units = [self.reader.read_tokens(inputs, number, chosen) for number in range(len(inputs.batches))]
        return combine_units(
            {each.site: each.call.key_heads for each in self.reached},
            self.settings.heads,
            self.analyzers,
            design,
            weights=weights_units,
            tokens=tokens_units,
            skipped=merge_skipped(skipped_in([*weights_units.values(), *tokens_units])),
        )

    def _choose_sites(self, all_sites: Sequence[Reached], reached: list[Reached]) -> None:
        """Choose the sites to read, and prepare the reader with all sites as text alone reaches them."""
        self.reached, seed = reached, self.settings.seed
        source, sites = self._weights_model, list(all_sites)
        if self.loaded.shapes is not None:
            sites = match_sites(all_sites, survey_shapes(source, self._sample(source)).reached, source)
        self.reader = UnitReader(
            self.loaded,
            source,
            self.settings,
            self.analyzers,
            self.show,
            all_sites,
            one_token=checks.text_alone(source, checks.of_one_token(source, sites, seed), 1, seed),
            window=checks.text_alone(source, sites, self.settings.tokens or 2, seed),
            progress=self.progress,
            factors=self.factors,
        )

    def _skip(self, site: str, reason: str, measure: str | None = None) -> None:
        self.skipped.append(Skipped(site=site, measure=measure, reason=reason))

    @property
    def _weights_model(self) -> loading.Loaded:
        """Model whose weights are read: the meta-device one if the model is spread over devices."""
        return self.loaded.shapes or self.loaded

    def _sample(self, loaded: loading.Loaded) -> dict[str, Tensor]:
        """Return random ids as long as a window."""
        return texts.placeholder(loaded, self.settings.tokens or 2, self.settings.seed).batches[0].inputs

    def _cut_batches(self, contents: Sequence[texts.Content], cut: texts.Cut) -> tuple[texts.Batch, ...]:
        """Cut the texts into batches; none for weights alone, or if both sources are read and no tokenizer exists."""
        requested, self.settings = self.settings, self.settings.model_copy(update=feeding.NOTHING_FED)
        if not contents or not any(analyzer.source == "tokens" for analyzer in self.analyzers):
            return ()
        try:
            batches = texts.batches(self.loaded, contents, cut)
        except TextError as error:
            read = self.loaded.tokenizer is not None or not texts.reads_text(self.loaded) or cut.image or cut.audio
            if read or self.settings.source == "tokens":
                raise
            self.no_text_reason = error.problem
            return ()
        self.settings = feeding.fed(requested, batches, self.loaded)
        feeding.design_of(requested, batches)
        self.inputs = batches
        return batches.batches

    def _survey(self, batches: Sequence[texts.Batch]) -> None:
        """Find the sites, verify that recomputed attention changes nothing, and choose the layers."""
        sample = self._sample(self.loaded)
        deferred = self.loaded.deferred is not None
        survey = survey_shapes(self.loaded, sample) if deferred else checks.surveyed(self.loaded, sample)
        window_sites = survey.reached
        # one long sequence is sufficient, and its predictions alone take gigabytes
        many = any(each.call.query.shape[2] * each.call.key.shape[2] > LONG for each in window_sites)
        self._prove_identity(texts.first(batches[0].inputs, 1 if many else 2) if batches else sample)
        refuse_initialised(self._weights_model, sample, attention)
        if batches and predicts_text(self.loaded) and (lacking := no_loss(self._weights_model, sample, "causal")):
            self._skip(*lacking, measure=LOSS)
        self.sites = tuple(each.site for each in window_sites)
        layers = self.settings.layers
        checks.check_chosen(layers, self.settings.heads, window_sites)
        self.settings = feeding.seen(self.settings, self.loaded, window_sites)
        self._choose_sites(window_sites, [f for f in window_sites if layers is None or f.site.layer in layers])
        if self.show == ATTENTION:
            refuse_many_rows(self.reached, self.settings.heads)
        for each in self.reached if self.no_text_reason else ():
            self._skip(each.site.name, str(self.no_text_reason), measure="tokens")
        for entry in checks.out_of_reach(self.loaded, survey):
            unseen = deferred and entry.reason == hooks.UNTRACED
            self._skip(entry.site, BY_HAND if unseen else entry.reason)

    def _prove_identity(self, inputs: Mapping[str, Tensor]) -> None:
        """Verify that recomputed attention changes nothing; with NaN in its weights, the model can't be compared.

        A model whose weights stay in their files can't run: each of its sites is verified when it is read.
        """
        if self.loaded.deferred is not None:
            return
        self.identity_error, broken = checks.proven(self.loaded, inputs)
        if broken is not None:
            self._skip(broken, f"{broken} holds NaN or Inf, so that the model's outputs prove nothing")


TOO_LARGE = "The weights were read from their files, layer by layer, as the model does not fit into memory here."


@public
def inspect(
    model: str | PathLike[str] | loading.Loaded | PreTrainedModel = "demo",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
    **more: Unpack[InspectRequest],
) -> Report:
    """Measure symmetry, definiteness and spectrum per head of a model, from its weights and from real text.

    `model` is a hub id, folder, file, `demo`, a result of `load`, or a transformers model in memory with its
    `tokenizer` (without one, only its weights are read), which is not changed. `more` are the options of
    `InspectRequest`: text, sampling of its windows, population of intervals, and those of `load`. Measures are float64;
    tokens.* have standard errors, weights.* a null. `select` and `show` belong to the analyzer selection: `top-p:0.9`
    selects the tokens that hold this share of the weight. Raise ModelError, TextError, UsageError, IdentityError, and
    Interrupted, which contains the finished part.
    """
    report, written = inspected(model, tokenizer, progress, more)
    written()
    return report


def inspected(
    model: object, tokenizer: PreTrainedTokenizerBase | None, progress: Progress, more: Mapping[str, Any]
) -> tuple[Report, Callable[[], None]]:
    """Return the report, and a function that removes the finished units once it is written, unless a unit failed."""
    options = requests.checked(InspectRequest, more)
    plan, named = WorkPlan.of(options), isinstance(model, str | PathLike)
    if named:
        plan.check(options["text"])
    else:
        refuse_work(options, InspectRequest)
    inspection, contents, cut = prepared(model, tokenizer, progress, more)
    with at_rest(inspection.loaded.model):
        run = inspection.describe(contents, cut)
        store = plan.store(run.facts) if named else None
        # whether the model fits into memory is decided here, once for all processes
        elsewhere = opened, (model, {**options, "from_files": run.from_files})
        report = inspection.compute(run, plan, store, elsewhere)
    return report, store.clear if store is not None and inspection.complete else lambda: None


def opened(model: str | PathLike[str], given: Mapping[str, Any]) -> tuple[Mapping[str, Any], Compute]:
    """Prepare the same run in another process: return its facts, and the function that reads its units."""
    inspection, contents, cut = prepared(model, None, silent, given)
    inspection.loaded.model.train(False)
    run = inspection.describe(contents, cut)
    return run.facts, lambda name: inspection.read_unit(run.units[name])


def prepared(
    model: object, tokenizer: PreTrainedTokenizerBase | None, progress: Progress, more: Mapping[str, Any]
) -> tuple[Inspection, Sequence[texts.Content], texts.Cut]:
    """Prepare the requested run with its model loaded; return it, its texts, and how they are cut."""
    options = requests.checked(InspectRequest, more)
    subject = held(model, tokenizer)
    load_options = feeding.loading_of(more, subject)
    adapted = options["adapter"] is not None or (isinstance(subject, loading.Loaded) and subject.adapter is not None)
    chosen, requested = reading.chosen(
        reading.settings(options), options["analyzers"], options["select"], options["show"], adapted=adapted
    )
    reading.refuse_unread(options, requested.source)
    named = texts.read_each(reading.files(options), offline=options["offline"])
    start = time.perf_counter()
    loaded, notes = _load(subject, load_options, requested)
    timings = {"load": time.perf_counter() - start}
    feeding.refuse_text(loaded, reading.files(options), requested.tokens)
    requested = requested.model_copy(update={"notes": [*requested.notes, *notes]})
    settings = feeding.of_model(requested, loaded)
    contents = feeding.contents(named, loaded) if requested.source != "weights" else ()
    inspection = Inspection(loaded, settings, chosen, progress, timings, show=options["show"])
    return inspection, contents, feeding.cut_of(settings, options)


def _load(subject: Any, load_options: loading.Loading, asked: Settings) -> tuple[loading.Loaded, list[str]]:
    """Load the model and return notes on it; a model too large for memory is left in its files if possible."""
    if isinstance(subject, loading.Loaded):
        return subject, []
    try:
        return loading.load(subject, **load_options), []
    except TooLargeError:
        if asked.source != "weights" or load_options.get("adapter") is not None:
            raise
        return loading.load(subject, **load_options, from_files=True), [TOO_LARGE]
