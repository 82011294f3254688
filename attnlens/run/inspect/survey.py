"""Measures a model's attention heads: weights and real text go through the analyzers, head by head."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attnlens import hooks, linalg, models, texts, weights
from attnlens.arguments import selection_share
from attnlens.choices import ATTENTION, SHOWN
from attnlens.errors import ModelError, TextError, UnreadableError
from attnlens.hooks import Reached
from attnlens.hooks.padding import hiding_padding
from attnlens.records import AttentionRows, Call, Conventions, Null, QueryKey, Report, Settings, Site
from attnlens.registry import Analyzer, Gathering, GatheringPlace
from attnlens.run import checks, feeding
from attnlens.run.checks import conventions
from attnlens.run.initialised import attention, refuse_initialised
from attnlens.run.inspect.adapted import with_base
from attnlens.run.inspect.attended import attention_rows, refuse_many_rows
from attnlens.run.inspect.chunks import finite_heads
from attnlens.run.inspect.collector import Collector, scaled_null
from attnlens.run.inspect.gathering import Gathered, form_on_inputs
from attnlens.run.inspect.summary import summarised, windows_of
from attnlens.run.inspect.token_text import sentence_of, told
from attnlens.run.perplexity import Guesses
from attnlens.run.progress import Interrupted, Progress, timed
from attnlens.run.provenance import report_of
from attnlens.statistics import gaussian_null

BLIND = "its mask hides every token from every other and from itself"
NULL_DRAWS = 64
"""Random heads behind each null."""


@dataclass
class Inspection:
    """One run of `inspect`."""

    loaded: models.Loaded
    settings: Settings
    analyzers: Sequence[Analyzer | Gathering]
    collector: Collector
    progress: Progress
    timings: dict[str, float]
    reached: list[Reached] = field(default_factory=list)
    conventions: Conventions | None = None
    identity_error: float | None = None
    sites: tuple[Site, ...] = ()
    tokenless: str | None = None
    fed: texts.Batches | None = None
    finished: int = 0
    factors: dict[Site, weights.Factors | UnreadableError] | None = None
    """What was read of each site's weights, where somebody wants to keep it."""
    show: str | None = None
    rows: list[AttentionRows] = field(default_factory=list)
    gathered: Gathered = field(init=False)

    def __post_init__(self) -> None:
        gatherings = [analyzer for analyzer in self.analyzers if isinstance(analyzer, Gathering)]
        self.gathered = Gathered(gatherings, self.collector, self._place)

    def _place(self, site: Site, form: QueryKey | str) -> GatheringPlace:
        return GatheringPlace(
            site, form, self.settings.seed, selection_share(self.settings.select or "argmax"), self.show == SHOWN
        )

    def run(self, contents: Sequence[texts.Content], cut: texts.Cut) -> Report:
        """Survey, weights, tokens, report."""
        batches = self._batches(contents, cut)
        with timed(self.timings, "survey"):
            first = self._survey(batches)
        try:
            if self._of_source("weights") or self.factors is not None or (batches and self.gathered.needs_inputs):
                with timed(self.timings, "weights"):
                    self._read_weights(first)
            if batches:
                with timed(self.timings, "tokens"):
                    self._read_tokens(batches)
                with timed(self.timings, "gathered"):
                    self.gathered.close(self.progress)
                self.gathered.shown = [told(found, self.loaded, batches) for found in self.gathered.shown]
        except KeyboardInterrupt:
            for found in self.reached:
                self.collector.skip(found.site.name, "the run was interrupted")
            if batches:
                self.settings = self.settings.model_copy(update={"sequences": self.finished})
            raise Interrupted(self._report()) from None
        if not any(draft.measures for draft in self.collector.drafts.values()):
            reason = self.collector.skipped[0].reason
            raise ModelError(f"No head could be analysed: {reason}.", "Choose another model, source or layers.")
        return self._report()

    def read(self, reached: Sequence[Reached], sites: Collection[Site], batches: Sequence[texts.Batch]) -> None:
        """Collect what is read of some `sites` of a model that was proven; `batches` are those of the settings."""
        self.sites = tuple(found.site for found in reached)
        first = self._enter(reached, [found for found in reached if found.site in sites])
        self._read_weights([found for found in first if found.site in sites])
        self._read_tokens(batches)

    def _enter(self, every: Sequence[Reached], reached: list[Reached]) -> list[Reached]:
        """Note the sites that are read; returns `every` site as one token of text alone reaches it."""
        self.reached, seed = reached, self.settings.seed
        for found in reached:
            self.collector.enter(found.site, [h // found.call.group for h in range(found.call.query.shape[1])])
        return checks.text_alone(self.loaded, checks.of_one_token(self.loaded, list(every), seed), 1, seed)

    def _of_source(self, source: str) -> list[Analyzer]:
        """The analyzers that read one QueryKey of that source at a time."""
        plain = [analyzer for analyzer in self.analyzers if isinstance(analyzer, Analyzer)]
        return [analyzer for analyzer in plain if analyzer.source == source]

    def _batches(self, contents: Sequence[texts.Content], cut: texts.Cut) -> tuple[texts.Batch, ...]:
        """What is fed as batches; none for weights alone, nor for both sources where a text has no tokenizer."""
        asked, self.settings = self.settings, self.settings.model_copy(update=feeding.NOTHING_FED)
        if not contents or not any(analyzer.source == "tokens" for analyzer in self.analyzers):
            return ()
        try:
            found = texts.batches(self.loaded, contents, cut)
        except TextError as error:
            read = self.loaded.tokenizer is not None or not texts.reads_text(self.loaded) or cut.image or cut.audio
            if read or self.settings.source == "tokens":
                raise
            self.tokenless = error.problem
            return ()
        self.settings = feeding.fed(asked, found, self.loaded)
        self.collector.design = feeding.design_of(asked, found)
        self.fed = found
        return found.batches

    def _survey(self, batches: Sequence[texts.Batch]) -> list[Reached]:
        """Find the sites, prove that watching changes nothing, and choose the layers; returns the one-token survey."""
        sample = texts.placeholder(self.loaded, self.settings.tokens or 2, self.settings.seed).batches[0].inputs
        window_sites = checks.sites(self.loaded, sample)
        probe = texts.first(batches[0].inputs, 2) if batches else sample
        self._prove_identity(probe)
        refuse_initialised(self.loaded, sample, attention)
        self.sites = tuple(found.site for found in window_sites)
        layers = self.settings.layers
        checks.check_chosen(layers, self.settings.heads, window_sites)
        first = self._enter(window_sites, [f for f in window_sites if layers is None or f.site.layer in layers])
        if self.show == ATTENTION:
            refuse_many_rows(self.reached, self.settings.heads)
        for found in self.reached if self.tokenless else ():
            self.collector.skip(found.site.name, str(self.tokenless), measure="tokens")
        for entry in checks.out_of_reach(self.loaded, sample, window_sites):
            self.collector.skip(entry.site, entry.reason)
        self.settings = feeding.seen(self.settings, self.loaded, window_sites)
        return [found for found in first if layers is None or found.site.layer in layers]

    def _prove_identity(self, inputs: Mapping[str, Tensor]) -> None:
        """Watching must change nothing; a model with NaN in its weights can't be compared and is left to the heads."""
        self.identity_error, broken = checks.proven(self.loaded, inputs)
        if broken is not None:
            self.collector.skip(broken, f"{broken} holds NaN or Inf, so that the model's outputs prove nothing")

    def _read_weights(self, first: list[Reached]) -> None:
        """The weights.* measures of every site, with their nulls."""
        analyzers = self._of_source("weights")
        nulls: dict[object, dict[str, tuple[float, float]]] = {}
        read: list[weights.Factors] = []
        alone = checks.text_alone(self.loaded, self.reached, self.settings.tokens or 2, self.settings.seed)
        for done, (factors, base) in enumerate(with_base(self.loaded, first, alone)):
            self.progress("weights", done, len(self.reached))
            self._keep_form(self.reached[done].site, factors)
            if self.factors is not None:
                self.factors[self.reached[done].site] = factors
            if isinstance(factors, UnreadableError):
                if analyzers:
                    self.collector.skip(self.reached[done].site.name, factors.problem, measure="weights")
                continue
            if analyzers:
                read.append(factors)
                self._analyse_weights(factors, base, analyzers, nulls)
        self.progress("weights", len(self.reached), len(self.reached))
        if analyzers:
            self.conventions = conventions(self.reached, read)

    def _keep_form(self, site: Site, factors: weights.Factors | UnreadableError) -> None:
        """M on the module's inputs for the analyzers that gather, in the model's own type, which loses nothing."""
        if not self.gathered.needs_inputs:
            return
        form = form_on_inputs(factors)
        if isinstance(form, QueryKey):
            own = self.loaded.model.dtype
            form = replace(form, query=form.query.to(own), key=form.key.to(own))
        self.gathered.forms[site] = form

    def _analyse_weights(
        self,
        factors: weights.Factors,
        base: QueryKey | None,
        analyzers: Sequence[Analyzer],
        nulls: dict[object, dict[str, tuple[float, float]]],
    ) -> None:
        whole = replace(factors.query_key, base=base)
        finite = finite_heads(whole)
        self._skip_nonfinite(factors.site, [head for head in whole.heads if head not in finite], "weights")
        if not finite:
            return
        query_key = whole.select(finite)
        complete = len(finite) == len(whole.heads) and factors.site.part != "cross"
        self.collector.layer_symmetry[factors.site.layer] = linalg.layer_symmetry(whole) if complete else None
        norms = whole.scale * query_key.query.norm(dim=(1, 2)) * query_key.paired_key.norm(dim=(1, 2))
        shape = (tuple(whole.query.shape[1:]), tuple(whole.key.shape[1:]), id(whole.rotation))
        if shape not in nulls:
            nulls[shape] = gaussian_null(
                analyzers, replace(query_key, base=None), draws=NULL_DRAWS, seed=self.settings.seed
            )
        for analyzer in analyzers:
            scaled: dict[str, list[Null]] = {
                info.name: scaled_null(nulls[shape][info.name], info, norms)
                for info in analyzer.measures
                if info.name in nulls[shape]
            }
            readings = analyzer.function(query_key)
            before = None
            if query_key.base is not None and not analyzer.needs_base:
                same = base is not None and base.query is whole.query
                before = readings if same else analyzer.function(query_key.base)
            self.collector.add_weights(factors.site, finite, analyzer, readings, scaled, before)

    def _skip_nonfinite(self, site: Site, heads: Sequence[int], source: str) -> None:
        if heads:
            named = [name for name in models.nonfinite_tensors(self.loaded.model) if name.startswith(site.path)]
            where = f"{named[0]} holds NaN or Inf" if named else "its inputs are NaN or Inf, from a layer below"
            self.collector.skip(site.name, where, heads=heads, measure=source)

    def _read_tokens(self, batches: Sequence[texts.Batch]) -> None:
        """The tokens.* measures: one forward a batch; each site's queries and keys are analysed and dropped."""
        analyzers = self._of_source("tokens")
        chosen = {found.site for found in self.reached}
        total = self.settings.sequences or 0
        guesses = Guesses.of(self.loaded, self.fed) if self.fed is not None else Guesses([])
        with self.gathered.watching(self.reached) as gather:

            def visit(site: Site, call: Call) -> None:
                if site in chosen:
                    rows = call.query.shape[0]  # more than sequences where a module cuts each into windows (Swin)
                    numbers = [self.finished + row * batch.size // rows for row in range(rows)]
                    call = hiding_padding(call, batch.inputs)
                    self._analyse_tokens(site, call.query_key(site), analyzers, numbers)
                    gather(site, call, numbers)
                    if self.show == ATTENTION and numbers[0] == 0:
                        self._keep_rows(site, call.query_key(site), batches)

            try:
                with torch.no_grad(), hooks.watch(self.loaded.model, self.sites, visit):
                    for number, batch in enumerate(batches):
                        self.progress("tokens", self.finished, total)
                        guesses.add(number, hooks.forward(self.loaded.model, batch.inputs))
                        self.finished += batch.size
                self.progress("tokens", total, total)
                told = guesses.notes(self.fed.parts if self.fed is not None else ())
                self.settings = self.settings.model_copy(update={"notes": [*self.settings.notes, *told]})
            finally:
                self.collector.close_tokens(analyzers, self.finished)

    def _analyse_tokens(
        self, site: Site, query_key: QueryKey, analyzers: Sequence[Analyzer], numbers: Sequence[int]
    ) -> None:
        """One batch of a site, whose rows belong to the sequences with these `numbers`."""
        total = len(query_key.heads)
        finite = finite_heads(query_key)
        self._skip_nonfinite(site, [head for head in query_key.heads if head not in finite], "tokens")
        if query_key.allowed is not None and not bool(query_key.allowed.any()):
            self.collector.skip(site.name, BLIND, query_key.heads, "tokens")
            return
        if finite and analyzers:
            steps = self.settings.tokens if self.settings.pack is False else None
            self.collector.read_tokens(site, query_key.select(finite), analyzers, numbers, total, steps)

    def _keep_rows(self, site: Site, query_key: QueryKey, batches: Sequence[texts.Batch]) -> None:
        """The attention rows of the first sequence, for the heads that were asked for."""
        heads = [head for head in finite_heads(query_key) if (site, head) in self.collector.drafts]
        sentence = sentence_of(site.part, self.loaded, batches, 0)
        self.rows += attention_rows(query_key.select(heads), sentence) if heads else []

    def _report(self) -> Report:
        info = self.loaded.info.model_copy(update={"conventions": self.conventions})
        return report_of(
            "inspect",
            model=info,
            settings=self.settings,
            coverage=self.collector.coverage(dict.fromkeys(analyzer.source for analyzer in self.analyzers)),
            heads=self.collector.heads(),
            summary=summarised(self.collector, self._names, self.identity_error, self.settings.seed),
            selections=self.gathered.shown,
            attention=self.rows,
            timings=self.timings,
        ).with_windows(windows_of(self.collector, self.settings))

    @property
    def _names(self) -> tuple[str, ...]:
        """The text of every sequence that was finished."""
        return () if self.fed is None else self.fed.parts[: self.collector.design.count]
