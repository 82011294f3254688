"""Measure a model's attention heads from weights and real text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnlens.arguments import public
from attnlens.choices import ATTENTION
from attnlens.errors import FAILURES, ModelError, TextError, TooLargeError, UnreadableError
from attnlens.maths.linalg.long import LONG
from attnlens.models import hooks, loading, texts, weights
from attnlens.models.hooks import Reached
from attnlens.models.loading.deferred import unspoken
from attnlens.records import Report, Settings, Site
from attnlens.registry import Analyzer, Gathering
from attnlens.requests import InspectRequest, reading, takes
from attnlens.runs import checks, feeding
from attnlens.runs.checks import attention, no_loss, refuse_initialised
from attnlens.runs.feeding import LOSS, predicts_text
from attnlens.runs.in_memory import at_rest, held, refuse_work
from attnlens.runs.inspect.assembly import Frame, WorkUnit, assembled
from attnlens.runs.inspect.collector import Collector, UnitRecord
from attnlens.runs.inspect.reader import Reader, refuse_many_rows
from attnlens.runs.progress import Interrupted, Progress, silent, timed
from attnlens.runs.provenance import content_of
from attnlens.runs.store import Store
from attnlens.runs.work import NOTHING_KEPT, Compute, Opener, Stopped, WorkPlan, run_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


BY_HAND = "the module computes its attention by hand, which is traced on numbers: the model has to be loaded"
"""Reason why a site of a meta-device model is not read."""


def of_shapes(loaded: loading.Loaded, inputs: Mapping[str, Tensor]) -> hooks.Surveyed:
    """Survey a model on the meta device (shapes only), whose attention all runs through transformers' interface."""
    try:
        survey = hooks.surveyed(loaded.model, inputs)
    except (ModelError, *FAILURES) as error:
        first = error.problem if isinstance(error, ModelError) else loading.first_line(error)
        raise ModelError(
            f"{loaded.info.id} can't be read from its files alone, as a pass through it takes numbers ({first})",
            "Leave out --device files or spread: this architecture has to be loaded.",
        ) from error
    if any(each.site.traced for each in survey.reached):
        raise ModelError(
            f"{loaded.info.id} can't be read from its files alone: {BY_HAND}.",
            "Leave out --device files or spread: this architecture has to be loaded.",
        )
    return survey


def like(reached: Sequence[Reached], shapes: Sequence[Reached], loaded: loading.Loaded) -> list[Reached]:
    """Return the sites of the meta-device model under the names that were `reached` in the same model when it ran."""
    known = {(each.site.path, each.site.ordinal): each for each in shapes}
    wanted = [(each.site.path, each.site.ordinal) for each in reached]
    if list(known) != wanted:
        raise ModelError(
            f"{loaded.info.id} runs other attention than its shapes alone show.", "Leave out --device spread."
        )
    return [replace(known[place], site=each.site) for place, each in zip(wanted, reached, strict=True)]


ALL = "units"
"""Name of the progress over the units of all stages."""


def stages(progress: Progress, units: Mapping[str, WorkUnit], batches: Sequence[int]) -> Callable[[str], None]:
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
    collector: Collector
    progress: Progress
    timings: dict[str, float]
    reached: list[Reached] = field(default_factory=list)
    identity_error: float | None = None
    sites: tuple[Site, ...] = ()
    tokenless: str | None = None
    fed: texts.Batches | None = None
    factors: dict[Site, weights.Factors | UnreadableError] | None = None
    """Factors of each site's weights, kept if a caller needs them."""
    show: str | None = None
    reader: Reader = field(init=False)
    complete: bool = field(default=True, init=False)  # whether every unit has a value

    def run(self, contents: Sequence[texts.Content], cut: texts.Cut) -> Report:
        """Run the survey, weights and tokens, and return the report."""
        return self.finished_from(self.framed(contents, cut))

    def framed(self, contents: Sequence[texts.Content], cut: texts.Cut) -> Frame:
        """Cut the texts and survey the model; return everything known before the first unit is read."""
        batches = self._batches(contents, cut)
        with timed(self.timings, "survey"), unspoken() if self._source.deferred is not None else nullcontext():
            self._survey(batches)
        keeps_factors = self.factors is not None
        return Frame(
            self.reached,
            content=content_of(self.loaded, self.reached, self.fed, self.analyzers),
            show=self.show,
            model=self.loaded.info,
            settings=self.settings,
            analyzers=self.analyzers,
            parts=[] if self.fed is None else list(self.fed.parts),
            batches=[batch.size for batch in batches],
            skipped=self.collector.skipped,
            identity_error=self.identity_error,
            from_files=self.loaded.deferred is not None,
            weights=keeps_factors or bool(self.reader.of_source("weights")),
        )

    def finished_from(
        self,
        frame: Frame,
        plan: WorkPlan = NOTHING_KEPT,
        store: Store | None = None,
        elsewhere: tuple[Opener, tuple[Any, ...]] | None = None,
    ) -> Report:
        """Read the units of a run, and assemble the report.

        A unit that fails is replaced by its reason. Raise Interrupted, which contains the finished part, ModelError
        if no head has a value, and what `run_units` raises.
        """
        units = list(frame.units)
        mine = units if plan.shard is None else units[plan.shard[0] - 1 :: plan.shard[1]]
        tell = stages(self.progress, {name: frame.units[name] for name in mine}, frame.batches)
        read = lambda name: self.read_unit(frame.units[name])  # noqa: E731  # one expression
        outcome = run_units(units, read, plan, store, elsewhere=elsewhere, tell=tell)
        self.complete = not outcome.missing
        report, self.collector = assembled(
            frame, outcome.values, self.timings, outcome.missing, interrupted=outcome.stopped
        )
        self.settings = report.settings
        if not any(draft.measures for draft in self.collector.drafts.values()):
            if outcome.stopped:
                raise KeyboardInterrupt
            reason = self.collector.skipped[0].reason
            raise ModelError(f"No head could be analysed: {reason}.", "Choose another model, source or layers.")
        if outcome.stopped:
            raise Interrupted(report)
        return report

    def read_unit(self, unit: WorkUnit) -> list[Any]:
        """Read one unit. Raise Stopped if the user interrupts it and its results so far are usable by themselves."""
        recording, start = UnitRecord(self.settings.heads), time.perf_counter()
        try:
            self._read(unit, recording)
        except KeyboardInterrupt:
            if unit.stage != "gathered":  # whose sites are solved one by one
                raise
            raise Stopped(unit.name, recording.calls) from None
        finally:
            self.timings[unit.stage] = self.timings.get(unit.stage, 0.0) + time.perf_counter() - start
        return recording.calls

    def _read(self, unit: WorkUnit, sink: Collector) -> None:
        if unit.stage == "weights":
            self.reader.weights_of(unit.sites[0], sink)
        elif self.fed is not None and unit.stage == "gathered":
            self.reader.gathered_of(self.fed, unit.sites, sink)
        elif self.fed is not None:
            self.reader.tokens_of(self.fed, unit.batch or 0, unit.sites, sink)

    def read(self, reached: Sequence[Reached], sites: Collection[Site], fed: texts.Batches) -> None:
        """Read some `sites` of a verified model into the collector; the batches in `fed` match the settings."""
        self.sites = tuple(each.site for each in reached)
        self._enter(reached, [each for each in reached if each.site in sites])
        for each in self.reached:
            self.reader.weights_of(each.site, self.collector)
        chosen = [each.site for each in self.reached]
        for number in range(len(fed.batches)):
            self.reader.tokens_of(fed, number, chosen, self.collector)
        self.collector.close_tokens(self.reader.of_source("tokens"), range(fed.sequences))

    def _enter(self, every: Sequence[Reached], reached: list[Reached]) -> None:
        """Enter the sites to read, and prepare the reader with all sites as text alone reaches them."""
        self.reached, seed = reached, self.settings.seed
        for each in reached:
            self.collector.enter(each.site, each.call.key_heads)
        source, there = self._source, list(every)
        if self.loaded.shapes is not None:
            there = like(every, of_shapes(source, self._sample(source)).reached, source)
        first = checks.text_alone(source, checks.of_one_token(source, there, seed), 1, seed)
        window = checks.text_alone(source, there, self.settings.length or 2, seed)
        self.reader = Reader(
            *(self.loaded, source, self.settings, self.analyzers, self.show, every, first, window, self.progress),
            self.factors,
        )

    @property
    def _source(self) -> loading.Loaded:
        """Model whose weights are read: the meta-device one if the model is spread over devices."""
        return self.loaded.shapes or self.loaded

    def _sample(self, loaded: loading.Loaded) -> dict[str, Tensor]:
        """Return random ids as long as a window."""
        return texts.placeholder(loaded, self.settings.length or 2, self.settings.seed).batches[0].inputs

    def _batches(self, contents: Sequence[texts.Content], cut: texts.Cut) -> tuple[texts.Batch, ...]:
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
            self.tokenless = error.problem
            return ()
        self.settings = feeding.fed(requested, batches, self.loaded)
        feeding.design_of(requested, batches)
        self.fed = batches
        return batches.batches

    def _survey(self, batches: Sequence[texts.Batch]) -> None:
        """Find the sites, verify that recomputed attention changes nothing, and choose the layers."""
        sample = self._sample(self.loaded)
        deferred = self.loaded.deferred is not None
        survey = of_shapes(self.loaded, sample) if deferred else checks.surveyed(self.loaded, sample)
        window_sites = survey.reached
        # one long sequence is sufficient, and its predictions alone take gigabytes
        many = any(each.call.query.shape[2] * each.call.key.shape[2] > LONG for each in window_sites)
        self._prove_identity(texts.first(batches[0].inputs, 1 if many else 2) if batches else sample)
        refuse_initialised(self._source, sample, attention)
        if batches and predicts_text(self.loaded) and (lacking := no_loss(self._source, sample, "causal")):
            self.collector.skip(*lacking, measure=LOSS)
        self.sites = tuple(each.site for each in window_sites)
        layers = self.settings.layers
        checks.check_chosen(layers, self.settings.heads, window_sites)
        self.settings = feeding.seen(self.settings, self.loaded, window_sites)
        self._enter(window_sites, [f for f in window_sites if layers is None or f.site.layer in layers])
        if self.show == ATTENTION:
            refuse_many_rows(self.reached, self.settings.heads)
        for each in self.reached if self.tokenless else ():
            self.collector.skip(each.site.name, str(self.tokenless), measure="tokens")
        for entry in checks.out_of_reach(self.loaded, survey):
            unseen = deferred and entry.reason == hooks.UNTRACED
            self.collector.skip(entry.site, BY_HAND if unseen else entry.reason)

    def _prove_identity(self, inputs: Mapping[str, Tensor]) -> None:
        """Verify that recomputed attention changes nothing; with NaN in its weights, the model can't be compared.

        A model whose weights stay in their files can't run: each of its sites is verified when it is read.
        """
        if self.loaded.deferred is not None:
            return
        self.identity_error, broken = checks.proven(self.loaded, inputs)
        if broken is not None:
            self.collector.skip(broken, f"{broken} holds NaN or Inf, so that the model's outputs prove nothing")


TOO_LARGE = "The weights were read from their files, layer by layer, as the model does not fit into memory here."


@public
@takes(InspectRequest)
def inspect(
    model: str | PathLike[str] | loading.Loaded | PreTrainedModel = "demo",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
    request: InspectRequest,
) -> Report:
    """Measure symmetry, definiteness and spectrum per head of a model, from its weights and from real text.

    `model` is a hub id, folder, file, `demo`, a result of `load`, or a transformers model in memory with its
    `tokenizer` (without one, only its weights are read), which is not changed. Measures are float64;
    tokens.* have standard errors, weights.* a null. `select` and `show` belong to the analyzer selection: `top-p:0.9`
    selects the tokens that hold this share of the weight. Raise ModelError, TextError, UsageError, IdentityError, and
    Interrupted, which contains the finished part.
    """
    report, clear_work = run_inspect(model, request, tokenizer, progress)
    clear_work()
    return report


def run_inspect(
    model: object,
    request: InspectRequest,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
) -> tuple[Report, Callable[[], None]]:
    """Return the report, and a function that removes the finished units once it is written, unless a unit failed."""
    plan, named = WorkPlan.of(request), isinstance(model, str | PathLike)
    if named:
        plan.check(request.text)
    else:
        refuse_work(request)
    inspection, contents, cut = prepared(model, request, tokenizer, progress)
    with at_rest(inspection.loaded.model):
        frame = inspection.framed(contents, cut)
        store = plan.store(frame.facts) if named else None
        # whether the model fits into memory is decided here, once for all processes
        elsewhere = opened, (model, request.changed(from_files=frame.from_files))
        report = inspection.finished_from(frame, plan, store, elsewhere)
    return report, store.clear if store is not None and inspection.complete else lambda: None


def opened(model: str | PathLike[str], request: InspectRequest) -> tuple[Mapping[str, Any], Compute]:
    """Prepare the same run in another process: return its facts, and the function that reads its units."""
    inspection, contents, cut = prepared(model, request, None, silent)
    inspection.loaded.model.train(False)
    frame = inspection.framed(contents, cut)
    return frame.facts, lambda name: inspection.read_unit(frame.units[name])


def prepared(
    model: object, request: InspectRequest, tokenizer: PreTrainedTokenizerBase | None, progress: Progress
) -> tuple[Inspection, Sequence[texts.Content], texts.Cut]:
    """Prepare the requested run with its model loaded; return it, its texts, and how they are cut."""
    subject = held(model, tokenizer)
    load_options = feeding.load_options(request, subject)
    adapted = request.adapter is not None or (isinstance(subject, loading.Loaded) and subject.adapter is not None)
    chosen, requested = reading.chosen(
        reading.settings(request), request.analyzers, request.select, request.show, adapted=adapted
    )
    reading.refuse_unread(request, requested.source)
    named = texts.read_each(reading.files(request), offline=request.offline)
    start = time.perf_counter()
    loaded, notes = _load(subject, load_options, requested)
    timings = {"load": time.perf_counter() - start}
    feeding.refuse_text(loaded, reading.files(request), requested.length)
    requested = requested.model_copy(update={"notes": [*requested.notes, *notes]})
    settings, parts = feeding.of_model(requested, loaded), (Collector(requested.heads), progress, timings)
    contents = feeding.contents(named, loaded) if requested.source != "weights" else ()
    inspection = Inspection(loaded, settings, chosen, *parts, show=request.show)
    return inspection, contents, feeding.cut_of(settings, request)


def _load(subject: Any, load_options: dict[str, Any], asked: Settings) -> tuple[loading.Loaded, list[str]]:
    """Load the model and return notes on it; a model too large for memory is left in its files if possible."""
    if isinstance(subject, loading.Loaded):
        return subject, []
    try:
        return loading.load(subject, **load_options), []
    except TooLargeError:
        if asked.source != "weights" or load_options.get("adapter") is not None:
            raise
        return loading.load(subject, **load_options, from_files=True), [TOO_LARGE]
