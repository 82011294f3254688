"""Reads sites of a model, their weights or what they do with a text, and hands what it finds to a sink."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from attnlens import hooks, linalg, models, texts, weights
from attnlens.arguments import selection_share
from attnlens.choices import ATTENTION, SHOWN
from attnlens.errors import UnreadableError
from attnlens.hooks import Reached
from attnlens.hooks.padding import hiding_padding
from attnlens.records import Call, Null, QueryKey, Settings, Site
from attnlens.registry import Analyzer, Gathering, GatheringPlace
from attnlens.run.inspect.chunks import finite_heads
from attnlens.run.inspect.collector import scaled_null
from attnlens.run.inspect.reading.attended import attention_rows
from attnlens.run.inspect.reading.gathering import Gathered, form_on_inputs
from attnlens.run.inspect.reading.token_text import sentence_of, told
from attnlens.run.inspect.sink import Sink
from attnlens.run.perplexity import Guesses
from attnlens.run.progress import Progress
from attnlens.statistics import gaussian_null

BLIND = "its mask hides every token from every other and from itself"
NULL_DRAWS = 64
"""Random heads behind each null."""


@dataclass
class Reader:
    """Reads a model that was surveyed."""

    loaded: models.Loaded
    source: models.Loaded
    """The same model, from which weights are read."""
    settings: Settings
    analyzers: Sequence[Analyzer | Gathering]
    show: str | None
    every: Sequence[Reached]
    """All sites of the model."""
    first: Sequence[Reached]
    """The same as one token of text alone reaches them."""
    window: Sequence[Reached]
    """The same as a window of text alone reaches them."""
    progress: Progress
    factors: dict[Site, weights.Factors | UnreadableError] | None = None
    """What was read of each site's weights, where somebody wants to keep it."""
    _turns: weights.Turns = field(default_factory=weights.Turns)
    _nulls: dict[object, tuple[object, dict[str, tuple[float, float]]]] = field(default_factory=dict)
    """With the rotation that each was drawn under, so that no other takes its identity."""

    def of_source(self, source: str) -> list[Analyzer]:
        """The analyzers that read one QueryKey of that source at a time."""
        plain = [analyzer for analyzer in self.analyzers if isinstance(analyzer, Analyzer)]
        return [analyzer for analyzer in plain if analyzer.source == source]

    @property
    def gatherings(self) -> list[Gathering]:
        """The analyzers that pose one question over all sequences of a site."""
        return [analyzer for analyzer in self.analyzers if isinstance(analyzer, Gathering)]

    def weights_of(self, site: Site, sink: Sink) -> None:
        """The weights.* measures of a site, with their nulls."""
        analyzers = self.of_source("weights")
        factors, base = next(self._factors([site]))
        if self.factors is not None:
            self.factors[site] = factors
        if not analyzers:
            return
        if isinstance(factors, UnreadableError):
            sink.skip(site.name, factors.problem, measure="weights")
            return
        self._analyse_weights(factors, base, analyzers, sink)
        sink.add_traits(factors.traits)

    def tokens_of(self, fed: texts.Batches, number: int, sites: Sequence[Site], sink: Sink) -> None:
        """The tokens.* measures of one batch: each site's queries and keys are analysed and dropped."""
        batch, chosen, analyzers = fed.batches[number], set(sites), self.of_source("tokens")
        start = sum(other.size for other in fed.batches[:number])

        def visit(site: Site, call: Call) -> None:
            if site not in chosen:
                return
            query_key = hiding_padding(call, batch.inputs).query_key(site)
            self._analyse_tokens(site, query_key, analyzers, _numbers(call, batch, start), sink)
            if self.show == ATTENTION and number == 0:
                heads = [head for head in finite_heads(query_key) if sink.asks(head)]
                sentence = sentence_of(site.part, self.loaded, fed.batches, 0)
                sink.add_shown([], attention_rows(query_key.select(heads), sentence) if heads else [])

        guesses = Guesses.of(self.loaded, replace(fed, batches=(batch,), sequences=batch.size))
        with torch.no_grad(), hooks.watch(self.loaded.model, self._sites, visit):
            result = hooks.forward(self.loaded.model, batch.inputs)
        guesses.add(0, result)
        for means, counts in zip(guesses.means, guesses.counts, strict=True):
            sink.add_losses(means, counts, guesses.vocabulary)

    def gathered_of(self, fed: texts.Batches, sites: Sequence[Site], sink: Sink) -> None:
        """What the gatherers say of these sites, over all sequences."""
        gathered = Gathered(self.gatherings, sink, self._place)
        if gathered.needs_inputs:
            for site, (factors, _) in zip(sites, self._factors(sites), strict=True):
                gathered.forms[site] = self._form(factors)
        start, batch = 0, fed.batches[0]
        with gathered.watching([found for found in self.every if found.site in sites]) as gather:

            def visit(site: Site, call: Call) -> None:
                if site in sites:
                    gather(site, hiding_padding(call, batch.inputs), _numbers(call, batch, start))

            with torch.no_grad(), hooks.watch(self.loaded.model, self._sites, visit):
                for batch in fed.batches:
                    self.progress("tokens", start, self.settings.sequences or 0)
                    hooks.forward(self.loaded.model, batch.inputs)
                    start += batch.size
        gathered.close(self.progress)
        sink.add_shown([told(found, self.loaded, fed.batches) for found in gathered.shown], [])

    @property
    def _sites(self) -> tuple[Site, ...]:
        return tuple(found.site for found in self.every)

    def _factors(self, sites: Sequence[Site]) -> Iterator[tuple[weights.Factors | UnreadableError, QueryKey | None]]:
        """Yield the factors of each site and its form without the adapter; None if the model has no adapter."""
        chosen = [place for place, found in enumerate(self.every) if found.site in sites]
        model, deferred = self.source.model, self.source.deferred
        present = weights.nothing_to_read if deferred is None else deferred.present
        every = weights.factors(model, self.first, self.window, chosen=chosen, turns=self._turns, present=present)
        for place in chosen:
            # no variable here keeps the factors that were yielded last
            yield self._with_base(self.first[place], self.window[place], next(every))

    def _with_base(
        self, first: Reached, window: Reached, factors: weights.Factors | UnreadableError
    ) -> tuple[weights.Factors | UnreadableError, QueryKey | None]:
        """Return one site's factors and its form without the adapter: its own form if the adapter leaves it alone."""
        adapter = self.source.adapter
        if adapter is None or isinstance(factors, UnreadableError):
            return factors, None
        with adapter.removed(self.source.model, window.site.path) as differs:
            base = next(weights.factors(self.source.model, [first], [window])) if differs else None
        if isinstance(base, UnreadableError):
            return base, None
        # positions rotate both forms alike
        return factors, factors.query_key if base is None else replace(base.query_key, rotation=factors.rotation)

    def _place(self, site: Site, form: QueryKey | str) -> GatheringPlace:
        share = selection_share(self.settings.select or "argmax")
        return GatheringPlace(site, form, self.settings.seed, share, self.show == SHOWN)

    def _form(self, factors: weights.Factors | UnreadableError) -> QueryKey | str:
        """M on the module's inputs for the analyzers that gather, in the model's own type, which loses nothing."""
        form, own = form_on_inputs(factors), self.loaded.model.dtype
        return replace(form, query=form.query.to(own), key=form.key.to(own)) if isinstance(form, QueryKey) else form

    def _analyse_weights(
        self, factors: weights.Factors, base: QueryKey | None, analyzers: Sequence[Analyzer], sink: Sink
    ) -> None:
        whole = replace(factors.query_key, base=base)
        finite = finite_heads(whole)
        self._skip_nonfinite(factors.site, [head for head in whole.heads if head not in finite], "weights", sink)
        if not finite:
            return
        query_key = whole.select(finite)
        complete = len(finite) == len(whole.heads) and factors.site.part != "cross"
        sink.add_layer(factors.site.layer, linalg.layer_symmetry(factors.summed) if complete else None)
        keys = query_key.key.norm(dim=(1, 2))[list(query_key.key_of)]
        norms = query_key.query.norm(dim=(1, 2)) * keys  # the scale is in the null, as it is in what is measured
        nulls = self._null_of(query_key, analyzers)
        for analyzer in analyzers:
            scaled: dict[str, list[Null]] = {
                info.name: scaled_null(nulls[info.name], info, norms)
                for info in analyzer.measures
                if info.name in nulls
            }
            readings = analyzer.function(query_key)
            before = None
            if query_key.base is not None and not analyzer.needs_base:
                same = base is not None and base.query is whole.query
                before = readings if same else analyzer.function(query_key.base)
            sink.add_weights(factors.site, finite, analyzer, readings, scaled, before)

    def _null_of(self, query_key: QueryKey, analyzers: Sequence[Analyzer]) -> dict[str, tuple[float, float]]:
        """The nulls of sites of its shape, scale and rotation, drawn once."""
        shape = query_key.query.shape[1:], query_key.key.shape[1:], query_key.scale, id(query_key.rotation)
        if shape not in self._nulls:
            like = replace(query_key, base=None)
            null = gaussian_null(analyzers, like, draws=NULL_DRAWS, seed=self.settings.seed)
            self._nulls[shape] = query_key.rotation, null
        return self._nulls[shape][1]

    def _analyse_tokens(
        self, site: Site, query_key: QueryKey, analyzers: Sequence[Analyzer], numbers: Sequence[int], sink: Sink
    ) -> None:
        """One batch of a site, whose rows belong to the sequences with these `numbers`."""
        total = len(query_key.heads)
        finite = finite_heads(query_key)
        self._skip_nonfinite(site, [head for head in query_key.heads if head not in finite], "tokens", sink)
        if query_key.allowed is not None and not bool(query_key.allowed.any()):
            sink.skip(site.name, BLIND, query_key.heads, "tokens")
            return
        if finite and analyzers:
            steps = self.settings.tokens if self.settings.pack is False else None
            sink.read_tokens(site, query_key.select(finite), analyzers, numbers, total, steps)

    def _skip_nonfinite(self, site: Site, heads: Sequence[int], source: str, sink: Sink) -> None:
        if heads:
            named = [name for name in self.loaded.nonfinite if name.startswith(site.path)]
            where = f"{named[0]} holds NaN or Inf" if named else "its inputs are NaN or Inf, from a layer below"
            sink.skip(site.name, where, heads=heads, measure=source)


def _numbers(call: Call, batch: texts.Batch, start: int) -> list[int]:
    """The sequence of each row; there are more rows where a module cuts a sequence into windows (Swin)."""
    rows = call.query.shape[0]
    return [start + row * batch.size // rows for row in range(rows)]
