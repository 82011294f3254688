"""Compute the units of an inspection: the weights of a site, a batch of tokens, or what gatherers read at a few sites.

The value of a unit is a dictionary of tensors and JSON values, which runs/store.py can write to a file and
results.py turns into the heads of a report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor

from attnlens.analyzers.registry import Analyzer, Gatherer, Gathering, GatheringPlace, MeasureInfo
from attnlens.arguments import selection_share
from attnlens.choices import ATTENTION, SHOWN
from attnlens.errors import UnreadableError
from attnlens.maths import linalg
from attnlens.maths.statistics import gaussian_null
from attnlens.models import hooks, loading, texts, weights
from attnlens.models.hooks import SiteCall
from attnlens.models.hooks.survey import hiding_padding
from attnlens.models.weights import Factors
from attnlens.records import Call, QueryKey, Settings, Site, Skipped
from attnlens.runs.feeding import Guesses
from attnlens.runs.inspect.attention_rows import add_sentences, attention_rows, sentence_of
from attnlens.runs.inspect.sequences import (
    Place,
    SequenceValues,
    finite_heads,
    sequence_numbers,
    split_batch,
    split_sequences,
)
from attnlens.runs.progress import Progress
from attnlens.runs.work import Stopped


class WeightsUnit(TypedDict, total=False):
    """Measures of one site's weights."""

    heads: list[int]  # heads with finite weights, in the order of the tensors below
    values: dict[str, Tensor]  # by measure: (heads,), or (heads, steps) for a curve
    base: dict[str, Tensor]  # by measure: (heads,), without the adapter
    nulls: dict[str, Tensor]  # by measure: (heads, 2), mean and standard deviation expected by chance
    layer_symmetry: float | None  # symmetry of the sum of the heads' matrices; left out if heads are missing
    traits: dict[str, bool]  # fields of `weights.Traits`
    skipped: list[dict[str, Any]]  # fields of each `Skipped`


class TokensUnit(TypedDict):
    """Measures of one batch of sequences."""

    sequences: int  # number of sequences
    values: dict[Place, Tensor]  # (sequences, heads), NaN if missing
    curves: dict[Place, list[list[Tensor]]]  # number of sequences and mean of each piece, both (heads, steps)
    losses: list[Tensor]  # mean loss of each sequence with predictions, and its number of predicted tokens; or empty
    vocabulary: int  # number of tokens in the model's vocabulary; 0 without losses
    rows: list[dict[str, Any]]  # fields of each `AttentionRows` to show
    skipped: list[dict[str, Any]]  # fields of each `Skipped`


class GatheredUnit(TypedDict):
    """Answers of the gatherers of a few sites over all sequences."""

    answers: dict[Place, dict[int, dict[str, Any]]]
    """By (site, analyzer): `measures`, `windows` and `curves` of the `Answer` for each head."""
    selections: list[dict[str, Any]]  # fields of each `Selection` to show


Unit = WeightsUnit | TokensUnit | GatheredUnit
SiteFactors = Factors | UnreadableError
"""Factors of a site's weights, or why they can't be read."""

SEES_NOTHING = "its mask hides all keys from every query"
NULL_DRAWS = 64
"""Number of random heads for each null: its mean is then known to 1/8 of its sd, and the sd to 9 %."""


def scale_null(null: tuple[float, float], info: MeasureInfo, norms: Tensor) -> Tensor:
    """Return each head's null, (heads, 2): as drawn from factors of unit norm, or rescaled to its own ‖W_Q‖‖W_K‖."""
    factors = norms.double().cpu() if info.grows_with_factors else torch.ones(len(norms), dtype=torch.float64)
    return torch.stack([null[0] * factors, null[1] * factors.abs()], 1)


def measure_tokens(
    site: Site,
    query_key: QueryKey,
    analyzers: Sequence[Analyzer],
    numbers: Sequence[int],
    total: int,
    values: SequenceValues,
    steps: int | None = None,
) -> None:
    """Add what analyzers return for a batch to `values`; `numbers` are the sequences that its rows belong to.

    `total` is the site's number of heads, and `steps` the length that curves are extended to.
    """
    for rows, piece in split_batch(query_key):
        sequences = [numbers[row] for row in rows]
        for analyzer in analyzers:
            values.add(site, analyzer.function(piece), sequences, piece.heads, total, steps)


@dataclass
class UnitReader:
    """Reader of the units of a surveyed model."""

    loaded: loading.Loaded
    weights_model: loading.Loaded
    """The same model, whose weights are read: on the meta device if the model is spread over devices."""
    settings: Settings
    analyzers: Sequence[Analyzer | Gathering]
    show: str | None
    all_sites: Sequence[SiteCall]
    """All sites of the model."""
    one_token: Sequence[SiteCall]
    """The same sites, reached by one token of text alone."""
    window: Sequence[SiteCall]
    """The same sites, reached by a window of text alone."""
    progress: Progress
    factors: dict[Site, SiteFactors] | None = None
    """Factors of each site's weights, kept if a caller needs them."""
    _turns: weights.Turns = field(default_factory=weights.Turns)
    _nulls: dict[object, tuple[object, dict[str, tuple[float, float]]]] = field(default_factory=dict)
    """Nulls by shape, with the rotation that each was drawn under: keeping it alive prevents reuse of its id."""

    def analyzers_of(self, source: str) -> list[Analyzer]:
        """Return the analyzers that read one QueryKey of that source at a time."""
        plain = [analyzer for analyzer in self.analyzers if isinstance(analyzer, Analyzer)]
        return [analyzer for analyzer in plain if analyzer.source == source]

    @property
    def reads_weights(self) -> bool:
        """True if the weights are measured, or their factors kept."""
        return self.factors is not None or bool(self.analyzers_of("weights"))

    def read_weights(self, site: Site) -> WeightsUnit:
        """Compute the weights.* measures of a site, with their nulls."""
        factors, base = next(self._read_factors([site]))
        if self.factors is not None:
            self.factors[site] = factors
        if not self.analyzers_of("weights"):
            return {}
        if isinstance(factors, UnreadableError):
            return {"skipped": [Skipped(site=site.name, measure="weights", reason=factors.problem).model_dump()]}
        unit = self._measure_weights(factors, base)
        unit["traits"] = asdict(factors.traits)
        return unit

    def read_tokens(self, inputs: texts.Batches, number: int, sites: Sequence[Site]) -> TokensUnit:
        """Compute the tokens.* measures of batch `number`: each site's queries and keys are analysed, then released."""
        batch, chosen, analyzers = inputs.batches[number], set(sites), self.analyzers_of("tokens")
        # lines differ in length, and so do their curves
        steps = self.settings.length if self.settings.pack is False else None
        values = SequenceValues(batch.size)
        rows: list[dict[str, Any]] = []
        skipped: list[Skipped] = []

        def visit(site: Site, call: Call) -> None:
            if site not in chosen:
                return
            query_key = hiding_padding(call, batch.inputs).query_key(site)
            finite = finite_heads(query_key)
            skipped.extend(self._skip_nonfinite(site, query_key, finite, "tokens"))
            if query_key.allowed is not None and not bool(query_key.allowed.any()):
                heads = list(query_key.heads)
                skipped.append(Skipped(site=site.name, heads=heads, measure="tokens", reason=SEES_NOTHING))
            elif finite:
                numbers = sequence_numbers(len(call.query), batch, 0)
                measure_tokens(site, query_key.select(finite), analyzers, numbers, call.query.shape[1], values, steps)
            if self.show == ATTENTION and number == 0:
                sentence = sentence_of(site.part, self.loaded, inputs.batches, 0)
                heads = [head for head in finite if self._is_requested(head)]
                shown = attention_rows(query_key.select(heads), sentence) if heads else []
                rows.extend(each.model_dump() for each in shown)

        guesses = Guesses.of(self.loaded, replace(inputs, batches=(batch,), sequences=batch.size))
        with torch.no_grad(), hooks.watch(self.loaded.model, self.sites, visit):
            result = hooks.forward(self.loaded.model, batch.inputs)
        guesses.add(0, result)
        return {
            "sequences": batch.size,
            "values": values.means,
            "curves": values.curves,
            "losses": [torch.cat(guesses.means), torch.cat(guesses.counts)] if guesses.means else [],
            "vocabulary": guesses.vocabulary,
            "rows": rows,
            "skipped": [entry.model_dump() for entry in skipped],
        }

    def read_gathered(self, inputs: texts.Batches, sites: Sequence[Site], name: str) -> GatheredUnit:
        """Compute the gatherers' answers for these sites, over all sequences.

        Raise Stopped with the answers so far if the user interrupts the unit, called `name`.
        """
        gatherings = [analyzer for analyzer in self.analyzers if isinstance(analyzer, Gathering)]
        gatherers: dict[Site, list[tuple[Gathering, Gatherer]]] = {}
        answers: dict[Place, dict[int, dict[str, Any]]] = {}
        selections = []
        try:
            self._gather(inputs, sites, gatherings, gatherers)
            for done, (site, pairs) in enumerate(gatherers.items()):
                for gathering, gatherer in pairs:
                    self.progress(gathering.name, done, len(gatherers))
                    solved = gatherer.solve()
                    answers[site.name, gathering.name] = {
                        head: {
                            "measures": {name: measure.model_dump() for name, measure in answer.measures.items()},
                            "windows": answer.windows,
                            "curves": answer.curves,
                        }
                        for head, answer in solved.items()
                    }
                    selections += [answer.shown for answer in solved.values() if answer.shown is not None]
            for gathering in gatherings:
                self.progress(gathering.name, len(gatherers), len(gatherers))
        except KeyboardInterrupt:
            raise Stopped(name, {"answers": answers, "selections": []}) from None
        shown = [add_sentences(each, self.loaded, inputs.batches).model_dump() for each in selections]
        return {"answers": answers, "selections": shown}

    def _gather(
        self,
        inputs: texts.Batches,
        sites: Sequence[Site],
        gatherings: Sequence[Gathering],
        gatherers: dict[Site, list[tuple[Gathering, Gatherer]]],
    ) -> None:
        """Run the model on all batches, and pass every sequence of these sites to their gatherers."""
        forms: dict[Site, QueryKey | str] = {}
        if any(gathering.needs_inputs for gathering in gatherings):
            for site, (factors, _) in zip(sites, self._read_factors(sites), strict=True):
                forms[site] = self._form_on_inputs(factors)
        bilinear = [
            each for each in self.all_sites if each.site in sites and isinstance(forms.get(each.site), QueryKey)
        ]

        def visit(site: Site, call: Call, batch: texts.Batch, start: int) -> None:
            if site not in sites:
                return
            query_key = hiding_padding(call, batch.inputs).query_key(site)
            form = forms.get(site, "no analyzer needs M on the module's inputs")
            if isinstance(form, QueryKey) and call.module is not None:
                query_key = replace(query_key, inputs=module_inputs[call.module])
            if site not in gatherers:
                share = selection_share(self.settings.select or "argmax")
                place = GatheringPlace(site, form, self.settings.seed, share, self.show == SHOWN)
                gatherers[site] = [(gathering, gathering.begin(place)) for gathering in gatherings]
            numbers = sequence_numbers(len(call.query), batch, start)
            for row, sequence in split_sequences(query_key):
                if heads := [head for head in finite_heads(sequence) if self._is_requested(head)]:
                    for _, gatherer in gatherers[site]:
                        gatherer.update(sequence.select(heads), numbers[row])

        start = 0
        with hooks.record_inputs(bilinear) as module_inputs:
            for batch in inputs.batches:
                self.progress("tokens", start, self.settings.windows or 0)
                visit_batch = partial(visit, batch=batch, start=start)
                with torch.no_grad(), hooks.watch(self.loaded.model, self.sites, visit_batch):
                    hooks.forward(self.loaded.model, batch.inputs)
                start += batch.size

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites of the model."""
        return tuple(each.site for each in self.all_sites)

    def _is_requested(self, head: int) -> bool:
        return self.settings.heads is None or head in self.settings.heads

    def _read_factors(self, sites: Sequence[Site]) -> Iterator[tuple[SiteFactors, QueryKey | None]]:
        """Yield the factors of each site and its form without the adapter; None if the model has no adapter."""
        chosen = [index for index, each in enumerate(self.all_sites) if each.site in sites]
        model, deferred = self.weights_model.model, self.weights_model.deferred
        present = None if deferred is None else deferred.present
        factors = weights.factors(model, self.one_token, self.window, chosen=chosen, turns=self._turns, present=present)
        for index in chosen:
            # no variable here keeps the factors yielded last alive
            yield self._add_base(self.one_token[index], self.window[index], next(factors))

    def _add_base(
        self, one_token: SiteCall, window: SiteCall, factors: SiteFactors
    ) -> tuple[SiteFactors, QueryKey | None]:
        """Return a site's factors and its form without the adapter, which is its own form if the adapter skips it."""
        adapter = self.weights_model.adapter
        if adapter is None or isinstance(factors, UnreadableError):
            return factors, None
        with adapter.remove_adapter(self.weights_model.model, window.site.path) as differs:
            base = next(weights.factors(self.weights_model.model, [one_token], [window])) if differs else None
        if isinstance(base, UnreadableError):
            return base, None
        # positions rotate both forms alike
        return factors, factors.query_key if base is None else replace(base.query_key, rotation=factors.rotation)

    def _form_on_inputs(self, factors: SiteFactors) -> QueryKey | str:
        """Return M on (x, 1) in the model's own dtype, which is exact; or why it is not bilinear in one input x."""
        if isinstance(factors, UnreadableError):
            return factors.problem
        if (form := factors.on_inputs) is not None:
            dtype = self.loaded.model.dtype
            return replace(form, query=form.query.to(dtype), key=form.key.to(dtype))
        if factors.site.part == "cross":
            return "queries and keys come from different inputs (cross-attention)"
        if factors.qk_norm:
            reason = "are normalised per token (QK-norm)"
        else:
            reason = (
                "have their position added to them" if factors.rotation is None else "turn with their position (RoPE)"
            )
        return f"the scores are not bilinear in the module's inputs: queries and keys {reason}"

    def _measure_weights(self, factors: Factors, base: QueryKey | None) -> WeightsUnit:
        """Compute the measures of the heads with finite weights."""
        whole = replace(factors.query_key, base=base)
        finite = finite_heads(whole)
        skipped = self._skip_nonfinite(factors.site, whole, finite, "weights")
        unit: WeightsUnit = {"heads": finite, "skipped": [entry.model_dump() for entry in skipped]}
        if not finite:
            return unit
        complete = len(finite) == len(whole.heads) and factors.site.part != "cross"
        unit["layer_symmetry"] = linalg.layer_symmetry(factors.summed) if complete else None
        query_key = whole.select(finite)
        keys = query_key.key.norm(dim=(1, 2))[list(query_key.key_of)]
        norms = query_key.query.norm(dim=(1, 2)) * keys  # both the null and the measure contain the scale
        nulls = self._draw_nulls(query_key)
        unit["values"], unit["base"], unit["nulls"] = {}, {}, {}
        for analyzer in self.analyzers_of("weights"):
            infos = [info for info in analyzer.measures if info.name in nulls]
            unit["nulls"] |= {info.name: scale_null(nulls[info.name], info, norms) for info in infos}
            readings = analyzer.function(query_key)
            unit["values"] |= readings
            if query_key.base is not None and not analyzer.needs_base:
                unchanged = base is not None and base.query is whole.query
                unit["base"] |= readings if unchanged else analyzer.function(query_key.base)
        return unit

    def _draw_nulls(self, query_key: QueryKey) -> dict[str, tuple[float, float]]:
        """Return the nulls of sites with this shape, scale and rotation; each is drawn once."""
        shape = query_key.query.shape[1:], query_key.key.shape[1:], query_key.scale, id(query_key.rotation)
        if shape not in self._nulls:
            layout = replace(query_key, base=None)
            null = gaussian_null(self.analyzers_of("weights"), layout, draws=NULL_DRAWS, seed=self.settings.seed)
            self._nulls[shape] = query_key.rotation, null
        return self._nulls[shape][1]

    def _skip_nonfinite(self, site: Site, query_key: QueryKey, finite: Sequence[int], source: str) -> list[Skipped]:
        heads = [head for head in query_key.heads if head not in finite]
        if not heads:
            return []
        named = [name for name in self.loaded.nonfinite if name.startswith(site.path)]
        reason = f"{named[0]} contains NaN or Inf" if named else "its inputs are NaN or Inf, caused by an earlier layer"
        return [Skipped(site=site.name, heads=heads, measure=source, reason=reason)]
