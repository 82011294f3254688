"""Read the weights of a model's sites, or their attention to a text, into a collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlens.arguments import selection_share
from attnlens.choices import ATTENTION, SHOWN, Part
from attnlens.errors import UnreadableError, UsageError
from attnlens.maths import linalg
from attnlens.maths.statistics import gaussian_null
from attnlens.models import hooks, loading, texts, weights
from attnlens.models.hooks import Reached
from attnlens.models.hooks.survey import hiding_padding
from attnlens.models.weights import Factors
from attnlens.records import AttentionRows, Call, Null, QueryKey, Selection, Sentence, Settings, Site
from attnlens.registry import Analyzer, Gatherer, Gathering, GatheringPlace
from attnlens.runs.feeding import Guesses
from attnlens.runs.inspect.collector import Collector, finite_heads, scaled_null, sequences
from attnlens.runs.progress import Progress

if TYPE_CHECKING:
    from jaxtyping import Float


SIGNS = {"\n": "↵", "\t": "→"}
"""Symbols for tokens of white space; ␣ for a space."""


def told(selection: Selection, loaded: loading.Loaded, batches: Sequence[texts.Batch]) -> Selection:
    """Return the selection with the texts of its sequences; unchanged if the model does not read text."""
    numbers = sorted({pick.sequence for pick in selection.picks})
    sentences = [sentence_of(selection.part, loaded, batches, number) for number in numbers]
    return selection.model_copy(update={"sentences": [sentence for sentence in sentences if sentence is not None]})


def sentence_of(part: Part, loaded: loading.Loaded, batches: Sequence[texts.Batch], number: int) -> Sentence | None:
    """Return the tokens of a sequence that this part of the model reads, one word each; None if it reads no text."""
    tokenizer: Any = loaded.tokenizer
    if part in ("vision", "audio") or loaded.kind not in ("text", "seq2seq") or tokenizer is None:
        return None
    starts = [sum(batch.size for batch in batches[:index]) for index in range(len(batches))]
    index = max(place for place, start in enumerate(starts) if start <= number)
    inputs, row = batches[index].inputs, number - starts[index]

    def words(prefix: str) -> list[str]:
        ids, mask = inputs[f"{prefix}input_ids"][row], inputs.get(f"{prefix}attention_mask")
        real = (ids if mask is None else ids[mask[row].bool()]).tolist()
        decoded = [str(tokenizer.decode([id_], clean_up_tokenization_spaces=False)) for id_ in real]
        return [word.strip() or SIGNS.get(word[:1], "␣") for word in decoded]

    queries = words("decoder_" if part in ("decoder", "cross") and "decoder_input_ids" in inputs else "")
    if part != "cross":
        return Sentence(sequence=number, keys=queries)
    return Sentence(sequence=number, keys=words(""), queries=queries)


MOST_TOKENS, MOST_ROWS = 512, 40_000
"""Maximum number of tokens in a sequence, and of rows over all heads, in a report."""
MOST_WEIGHTS, LEAST = 8, 0.02
"""Maximum number of weights kept per row, and the smallest weight kept; the largest always is."""


def refuse_many_rows(reached: Sequence[Reached], heads: Sequence[int] | None) -> None:
    """Raise UsageError if the requested heads have more rows, or more tokens, than a report keeps."""
    shapes = [each.call.query.shape for each in reached]
    longest = max((max(each.call.query.shape[2], each.call.key.shape[2]) for each in reached), default=0)
    rows = sum((shape[1] if heads is None else len(heads)) * shape[2] for shape in shapes)
    if longest > MOST_TOKENS:
        raise UsageError(
            f"--show attention shows sequences of at most {MOST_TOKENS} tokens, and these have {longest}.",
            f"Add --length {MOST_TOKENS}.",
        )
    if rows > MOST_ROWS:
        raise UsageError(
            f"--show attention keeps at most {MOST_ROWS:,} rows, and these heads have {rows:,}.",
            "Choose some with --layers or --heads, or fewer tokens with --length.",
        )


def attention_rows(query_key: QueryKey, sentence: Sentence | None) -> list[AttentionRows]:
    """Return the attention rows of every head in the batch's first sequence, without padding; none if it is empty."""
    first = next((sequence for row, sequence in sequences(query_key) if row == 0), None)
    if first is None:
        return []
    attention = first.attention[0].double().cpu()
    sentence = sentence if sentence is not None and _fits(sentence, attention) else None
    weights, keys = attention.topk(min(MOST_WEIGHTS, attention.shape[-1]))
    counts = (weights >= LEAST).sum(-1).clamp(min=1)
    shown = weights.round(decimals=4)
    records = []
    for index, head in enumerate(query_key.heads):
        rows = [(row, int(count)) for row, count in enumerate(counts[index])]
        records.append(
            AttentionRows(
                site=query_key.site.name,
                layer=query_key.site.layer,
                head=head,
                kv_head=query_key.key_of[index],
                part=query_key.site.part,
                sequence=0,
                keys=[keys[index, row, :count].tolist() for row, count in rows],
                weights=[shown[index, row, :count].tolist() for row, count in rows],
                rest=[
                    round(max(0.0, float(attention[index, row].sum() - weights[index, row, :count].sum())), 4)
                    for row, count in rows
                ],
                sentence=sentence,
            )
        )
    return records


def _fits(sentence: Sentence, attention: Float[Tensor, "heads queries keys"]) -> bool:
    """Return whether rows and columns match its tokens: modules with windows, or images too, have other rows."""
    queries = sentence.keys if sentence.queries is None else sentence.queries
    return attention.shape[1:] == (len(queries), len(sentence.keys))


def form_on_inputs(factors: Factors | UnreadableError) -> QueryKey | str:
    """Return M on (x, 1), or why the logits are not bilinear in one input x."""
    if isinstance(factors, UnreadableError):
        return factors.problem
    if factors.on_inputs is not None:
        return factors.on_inputs
    if factors.site.part == "cross":
        return "queries and keys come from different inputs (cross-attention)"
    reason = "turn with their position (RoPE)" if factors.rotation is not None else "have their position added to them"
    why = "are normalised per token (QK-norm)" if factors.qk_norm else reason
    return f"the scores are not bilinear in the module's inputs: queries and keys {why}"


@dataclass
class Gathered:
    """Gatherers of a run: one for each site and each gathering analyzer."""

    gatherings: Sequence[Gathering]  # analyzers
    collector: Collector  # destination of their answers
    place: Callable[[Site, QueryKey | str], GatheringPlace]  # settings of a gatherer by site and form
    forms: dict[Site, QueryKey | str] = field(default_factory=dict)
    """M on (x, 1), or why the logits are not bilinear in the module's inputs x; filled before the first sequence."""
    shown: list[Selection] = field(default_factory=list)  # posed problems that are to be shown
    _gatherers: dict[Site, list[tuple[Gathering, Gatherer]]] = field(default_factory=dict)

    @contextmanager
    def watching(self, reached: Sequence[Reached]) -> Iterator[Callable[[Site, Call, Sequence[int]], None]]:
        """Yield a function that adds a site's call: (site, call, sequence number of each row) → None."""
        wanted = [each for each in reached if isinstance(self.forms.get(each.site), QueryKey)]
        with hooks.inputs_of(wanted) as latest:

            def visit(site: Site, call: Call, numbers: Sequence[int]) -> None:
                query_key = call.query_key(site)
                form = self.forms.get(site, "no analyzer asks for M on the module's inputs")
                if isinstance(form, QueryKey) and call.module is not None:
                    query_key = replace(query_key, inputs=latest[call.module])
                if site not in self._gatherers:
                    place = self.place(site, form)
                    self._gatherers[site] = [(gathering, gathering.begin(place)) for gathering in self.gatherings]
                for row, sequence in sequences(query_key):
                    # skip heads that were not requested
                    heads = [head for head in finite_heads(sequence) if self.collector.asks(head)]
                    for _, gatherer in self._gatherers[site] if heads else ():
                        gatherer.update(sequence.select(heads), numbers[row])

            yield visit

    def close(self, progress: Callable[[str, int, int], None]) -> None:
        """Solve every gatherer, site by site; answers so far are kept if the user interrupts."""
        for done, (site, gatherers) in enumerate(self._gatherers.items()):
            for gathering, gatherer in gatherers:
                progress(gathering.name, done, len(self._gatherers))
                answers = gatherer.solve()
                self.collector.add_answers(site, gathering, answers)
                self.shown += [answer.shown for answer in answers.values() if answer.shown is not None]
        for gathering in self.gatherings:
            progress(gathering.name, len(self._gatherers), len(self._gatherers))


BLIND = "its mask hides every token from every other and from itself"
NULL_DRAWS = 64
"""Number of random heads for each null."""


@dataclass
class Reader:
    """Reader of a surveyed model."""

    loaded: loading.Loaded
    source: loading.Loaded  # the same model, whose weights are read
    settings: Settings
    analyzers: Sequence[Analyzer | Gathering]
    show: str | None
    every: Sequence[Reached]  # all sites of the model
    first: Sequence[Reached]  # the same sites, reached by one token of text alone
    window: Sequence[Reached]  # the same sites, reached by a window of text alone
    progress: Progress
    factors: dict[Site, weights.Factors | UnreadableError] | None = None
    """Factors of each site's weights, kept if a caller needs them."""
    _turns: weights.Turns = field(default_factory=weights.Turns)
    _nulls: dict[object, tuple[object, dict[str, tuple[float, float]]]] = field(default_factory=dict)
    """Nulls by shape, with the rotation that each was drawn under: keeping it alive prevents reuse of its id."""

    def of_source(self, source: str) -> list[Analyzer]:
        """Return the analyzers that read one QueryKey of that source at a time."""
        plain = [analyzer for analyzer in self.analyzers if isinstance(analyzer, Analyzer)]
        return [analyzer for analyzer in plain if analyzer.source == source]

    def weights_of(self, site: Site, sink: Collector) -> None:
        """Compute the weights.* measures of a site, with their nulls."""
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

    def tokens_of(self, fed: texts.Batches, number: int, sites: Sequence[Site], sink: Collector) -> None:
        """Compute the tokens.* measures of one batch: each site's queries and keys are analysed, then released."""
        batch, chosen, analyzers = fed.batches[number], set(sites), self.of_source("tokens")
        start = sum(other.size for other in fed.batches[:number])

        def visit(site: Site, call: Call) -> None:
            if site not in chosen:
                return
            query_key = hiding_padding(call, batch.inputs).query_key(site)
            self._analyse_tokens(site, query_key, analyzers, sequence_numbers(len(call.query), batch, start), sink)
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

    def gathered_of(self, fed: texts.Batches, sites: Sequence[Site], sink: Collector) -> None:
        """Compute the gatherers' answers for these sites, over all sequences."""
        gatherings = [analyzer for analyzer in self.analyzers if isinstance(analyzer, Gathering)]
        gathered = Gathered(gatherings, sink, self._place)
        if any(gathering.needs_inputs for gathering in gathered.gatherings):
            for site, (factors, _) in zip(sites, self._factors(sites), strict=True):
                gathered.forms[site] = self._form(factors)
        start, batch = 0, fed.batches[0]
        with gathered.watching([each for each in self.every if each.site in sites]) as gather:

            def visit(site: Site, call: Call) -> None:
                if site in sites:
                    gather(site, hiding_padding(call, batch.inputs), sequence_numbers(len(call.query), batch, start))

            with torch.no_grad(), hooks.watch(self.loaded.model, self._sites, visit):
                for batch in fed.batches:
                    self.progress("tokens", start, self.settings.windows or 0)
                    hooks.forward(self.loaded.model, batch.inputs)
                    start += batch.size
        gathered.close(self.progress)
        sink.add_shown([told(each, self.loaded, fed.batches) for each in gathered.shown], [])

    @property
    def _sites(self) -> tuple[Site, ...]:
        return tuple(each.site for each in self.every)

    def _factors(self, sites: Sequence[Site]) -> Iterator[tuple[weights.Factors | UnreadableError, QueryKey | None]]:
        """Yield the factors of each site and its form without the adapter; None if the model has no adapter."""
        chosen = [place for place, each in enumerate(self.every) if each.site in sites]
        model, deferred = self.source.model, self.source.deferred
        present = weights.nothing_to_read if deferred is None else deferred.present
        factors = weights.factors(model, self.first, self.window, chosen=chosen, turns=self._turns, present=present)
        for place in chosen:
            # no variable here keeps the factors yielded last alive
            yield self._with_base(self.first[place], self.window[place], next(factors))

    def _with_base(
        self, first: Reached, window: Reached, factors: weights.Factors | UnreadableError
    ) -> tuple[weights.Factors | UnreadableError, QueryKey | None]:
        """Return a site's factors and its form without the adapter, which is its own form if the adapter skips it."""
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
        """Return M on the module's inputs for gatherers, in the model's own dtype, which is exact."""
        form, dtype = form_on_inputs(factors), self.loaded.model.dtype
        return replace(form, query=form.query.to(dtype), key=form.key.to(dtype)) if isinstance(form, QueryKey) else form

    def _analyse_weights(
        self, factors: weights.Factors, base: QueryKey | None, analyzers: Sequence[Analyzer], sink: Collector
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
        norms = query_key.query.norm(dim=(1, 2)) * keys  # both the null and the measure contain the scale
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
        """Return the nulls of sites with this shape, scale and rotation; each is drawn once."""
        shape = query_key.query.shape[1:], query_key.key.shape[1:], query_key.scale, id(query_key.rotation)
        if shape not in self._nulls:
            like = replace(query_key, base=None)
            null = gaussian_null(analyzers, like, draws=NULL_DRAWS, seed=self.settings.seed)
            self._nulls[shape] = query_key.rotation, null
        return self._nulls[shape][1]

    def _analyse_tokens(
        self, site: Site, query_key: QueryKey, analyzers: Sequence[Analyzer], numbers: Sequence[int], sink: Collector
    ) -> None:
        """Analyse one batch of a site, whose rows belong to the sequences with these `numbers`."""
        total = len(query_key.heads)
        finite = finite_heads(query_key)
        self._skip_nonfinite(site, [head for head in query_key.heads if head not in finite], "tokens", sink)
        if query_key.allowed is not None and not bool(query_key.allowed.any()):
            sink.skip(site.name, BLIND, query_key.heads, "tokens")
            return
        if finite and analyzers:
            steps = self.settings.length if self.settings.pack is False else None
            sink.read_tokens(site, query_key.select(finite), analyzers, numbers, total, steps)

    def _skip_nonfinite(self, site: Site, heads: Sequence[int], source: str, sink: Collector) -> None:
        if heads:
            named = [name for name in self.loaded.nonfinite if name.startswith(site.path)]
            where = f"{named[0]} holds NaN or Inf" if named else "its inputs are NaN or Inf, from a layer below"
            sink.skip(site.name, where, heads=heads, measure=source)


def sequence_numbers(rows: int, batch: texts.Batch, start: int) -> list[int]:
    """Return the sequence of each row; there are more rows if a module cuts a sequence into windows (Swin)."""
    return [start + row * batch.size // rows for row in range(rows)]
