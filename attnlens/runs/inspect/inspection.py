"""Describe a model with its attention sites, list the independent units of its inspection, and compute each unit.

A unit covers the weights of a site, a batch of tokens, or all sequences at a few sites (for gatherers, the analyzers
that read all sequences). runs/store.py stores the values of units, which results.py combines into heads of a report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from attnlens.analyzers.registry import NULL_DRAWS, Analyzer, Answer, Gatherer, Gathering, GatheringPlace, MeasureInfo
from attnlens.arguments import selection_share
from attnlens.choices import ATTENTION, SHOWN
from attnlens.errors import UnreadableError
from attnlens.maths import linalg
from attnlens.maths.statistics import gaussian_null
from attnlens.models import hooks, loading, texts, weights
from attnlens.models.hooks import SiteCall
from attnlens.models.hooks.survey import hide_padding
from attnlens.models.weights import Factors
from attnlens.records import AttentionRows, Call, Measure, Null, QueryKey, Settings, Site, Skipped
from attnlens.runs.feeding import measure_losses
from attnlens.runs.inspect import sequences
from attnlens.runs.inspect.sequences import Place
from attnlens.runs.progress import Progress, silent, time_stage
from attnlens.runs.provenance import hash_content
from attnlens.runs.store import versions
from attnlens.runs.work import Stopped


class Unit(TypedDict, total=False):
    """Value of a work unit. Units of weights and of gatherers have `answers`; units of tokens have `values`."""

    answers: dict[Place, dict[int, Answer]]  # by (site, "weights" or name of a gatherer), then by head
    layer_symmetry: float | None  # symmetry of Σ W_Q W_Kᵀ over heads; None if heads are missing, or in cross-attention
    traits: dict[str, bool]  # fields of `weights.Traits`
    sequences: int  # number of sequences of a batch
    values: dict[Place, Tensor]  # by (site, measure): (sequences, heads), NaN if missing
    curves: dict[Place, list[list[Tensor]]]  # number of sequences and mean of each piece, both (heads, steps)
    losses: list[Tensor]  # mean loss and number of predicted tokens of each sequence with predictions; or []
    vocabulary: int  # number of tokens in the model's vocabulary; 0 without losses
    rows: list[AttentionRows]  # attention rows for --show attention
    skipped: list[Skipped]


SiteFactors = Factors | UnreadableError  # factors of a site's weights, or why they can't be read

TWO_DOMAINS = "queries and keys belong to different tokens (cross-attention)"
GATHERED_TOGETHER = 4  # sites that gatherers read in one pass: more sites need more memory, fewer more passes


def scale_null(null: tuple[float, float], info: MeasureInfo, norms: Tensor) -> Tensor:
    """Return each head's null mean and sd, (heads, 2), scaled by `norms` if the measure grows with W_Q and W_K."""
    factors = norms.double().cpu() if info.grows_with_factors else torch.ones(len(norms), dtype=torch.float64)
    return torch.stack([null[0] * factors, null[1] * factors.abs()], 1)


def build_measure(
    info: MeasureInfo, site: Site, value: Tensor | None, *, n: int, base: Tensor | None = None, **fields: Any
) -> Measure:
    """Build a measure with its value, or with the reason if the value is missing, NaN or undefined."""
    if site.part == "cross" and info.self_only:
        return Measure(value=None, reason=TWO_DOMAINS)
    if value is None or bool(value.isnan()):
        unidentified = info.identified == "all pairs" and site.part == "decoder"  # in causal heads
        reason = "a causal head never scores a query against a later key" if unidentified else info.missing
        return Measure(value=None, reason=reason)
    if base is not None and not bool(base.isnan()):
        fields["base"] = float(base)
    label = info.labels[round(float(value))] if info.labels else None
    return Measure(value=float(value), label=label, n=n, **fields)


def merge_skipped(entries: Iterable[Skipped]) -> list[Skipped]:
    """Merge entries with the same site, heads and reason; omit the measure if the entries' measures differ."""
    merged: dict[tuple[object, ...], Skipped] = {}
    for entry in entries:
        place = entry.site, tuple(entry.heads), entry.reason
        several = place in merged and merged[place].measure != entry.measure
        merged[place] = entry.model_copy(update={"measure": None}) if several else entry
    return list(merged.values())


@dataclass(frozen=True)
class WorkUnit:
    """Part of an inspection that is computed independently of the other parts."""

    stage: Literal["weights", "tokens", "gathered"]  # source of its values
    sites: tuple[Site, ...]  # sites that are read
    batch: int | None = None  # index of the batch that is read; None for weights, and if all batches are read
    size: int = 1  # steps of progress: the number of sequences of the batch, or 1

    @property
    def name(self) -> str:
        """Readable name, unique within the run."""
        if self.stage == "tokens":
            return f"tokens of batch {self.batch}"
        first, last = self.sites[0].layer_name, self.sites[-1].layer_name
        layers = first if len(self.sites) == 1 else f"{first}–{last}"
        return f"{self.stage} of layer{'s' * (len(self.sites) > 1)} {layers}"


@dataclass(frozen=True)
class PreparedRun:
    """A loaded model with the texts, analyzers and settings of a run."""

    loaded: loading.Loaded
    settings: Settings
    analyzers: Sequence[Analyzer | Gathering]
    contents: Sequence[texts.Content] = ()  # texts to read
    cut: texts.Cut = field(default_factory=texts.Cut)  # how the texts are cut into sequences
    progress: Progress = silent
    timings: dict[str, float] = field(default_factory=dict)  # seconds per stage so far
    show: str | None = None  # value of --show

    @property
    def weights_model(self) -> loading.Loaded:
        """Model from which weights are read: `loaded.shapes`, which reads files, if it exists; otherwise `loaded`."""
        return self.loaded.shapes or self.loaded

    def select_analyzers(self, source: str) -> list[Analyzer]:
        """Return the analyzers that read `source` (`weights` or `tokens`), except gatherers."""
        return [each for each in self.analyzers if isinstance(each, Analyzer) and each.source == source]

    @property
    def gatherings(self) -> list[Gathering]:
        """Analyzers that collect values over all sequences."""
        return [analyzer for analyzer in self.analyzers if isinstance(analyzer, Gathering)]


@dataclass(frozen=True, kw_only=True)
class Inspection(PreparedRun):
    """A model with its attention sites and inputs, and the units of work that measure them."""

    calls: Sequence[SiteCall]  # calls of all sites of the model
    one_token: Sequence[SiteCall]  # calls of the same sites of `weights_model` on one token without media
    window: Sequence[SiteCall]  # calls of the same sites of `weights_model` on a window of text without media
    site_calls: Sequence[SiteCall]  # calls of the requested sites
    inputs: texts.Batches | None = None  # batches that the model reads; None for weights alone
    skipped: Sequence[Skipped] = ()  # attention that can't be read, and measures that can't be computed
    identity_error: float | None = None  # relative change in outputs under recomputed attention; None if unknown
    factors: dict[Site, SiteFactors] | None = None  # factors of each site's weights; None if not stored
    _turns: weights.Turns = field(default_factory=weights.Turns)
    _nulls: dict[object, tuple[object, dict[str, tuple[float, float]]]] = field(default_factory=dict)
    """Null distributions keyed by shape, scale and id of the rotation, which is stored so that its id is not reused."""

    @property
    def batches(self) -> tuple[texts.Batch, ...]:
        """Batches that the model reads; empty for weights alone."""
        return () if self.inputs is None else self.inputs.batches

    @property
    def window_texts(self) -> list[str]:
        """Name of the text of each sequence; [] for inputs that are not texts."""
        return [] if self.inputs is None else list(self.inputs.parts)

    @property
    def all_sites(self) -> tuple[Site, ...]:
        """All sites of the model."""
        return tuple(each.site for each in self.calls)

    @cached_property
    def key_heads(self) -> dict[Site, list[int]]:
        """Index of each query head's key head, keyed by requested site."""
        return {each.site: list(each.call.key_heads) for each in self.site_calls}

    @property
    def reads_weights(self) -> bool:
        """True if weights are measured, or if their factors are stored."""
        return self.factors is not None or bool(self.select_analyzers("weights"))

    @cached_property
    def facts(self) -> Mapping[str, object]:
        """Facts that determine the results of the units."""
        return {
            "command": "inspect",
            "versions": versions(),
            "model": self.loaded.info.model_dump(mode="json", exclude={"id"}),  # a moved folder contains the same model
            "from_files": self.loaded.deferred is not None,
            # notes and options do not determine numbers
            "settings": self.settings.model_dump(mode="json", exclude={"notes", "options"}),
            "show": self.show,
            "weights": self.reads_weights,
            "analyzers": [[each.name, each.source] for each in self.analyzers],
            "sites": [asdict(site) for site in self.key_heads],
            "key_heads": list(self.key_heads.values()),
            "parts": self.window_texts,
            "batches": [batch.size for batch in self.batches],
            "content": hash_content(self.loaded, self.site_calls, self.inputs, self.analyzers),
        }

    @cached_property
    def units(self) -> dict[str, WorkUnit]:
        """Units of the run, keyed by name, in the order in which they enter the report."""
        sites = tuple(self.key_heads)
        units = [WorkUnit("weights", (site,)) for site in sites if self.reads_weights]
        units += [WorkUnit("tokens", sites, number, batch.size) for number, batch in enumerate(self.batches)]
        if self.batches and self.gatherings:
            blocks = range(0, len(sites), GATHERED_TOGETHER)
            units += [WorkUnit("gathered", sites[start : start + GATHERED_TOGETHER]) for start in blocks]
        return {unit.name: unit for unit in units}

    def read_unit(self, name: str) -> Unit:
        """Compute one unit. Raise Stopped if the user interrupts it and the results so far can be used."""
        with time_stage(self.timings, self.units[name].stage):
            return self._compute_unit(self.units[name])

    def _compute_unit(self, unit: WorkUnit) -> Unit:
        if unit.stage == "weights" or self.inputs is None:  # without inputs, a run has no other units
            return self._read_weights(unit.sites[0])
        if unit.batch is None:
            return self._read_gathered(self.inputs, unit)
        return self._read_tokens(self.inputs, unit.batch)

    def _read_weights(self, site: Site) -> Unit:
        """Compute the weights.* measures of a site, with their nulls; {} if no analyzer reads weights."""
        factors, base = next(self.read_factors([site]))
        if self.factors is not None:
            self.factors[site] = factors
        if not self.select_analyzers("weights"):
            return {}
        if isinstance(factors, UnreadableError):
            return {"skipped": [Skipped(site=site.name, measure="weights", reason=factors.problem)]}
        whole = replace(factors.query_key, base=base)
        finite = sequences.finite_heads(whole)
        answers = {head: Answer({}) for head in finite}
        unit: Unit = {
            "answers": {(site.name, "weights"): answers},
            "traits": asdict(factors.traits),
            "skipped": self._skip_nonfinite(site, whole, finite, "weights"),
        }
        if not finite:
            return unit
        complete = len(finite) == len(whole.heads) and site.part != "cross"
        unit["layer_symmetry"] = linalg.layer_symmetry(factors.query_key) if complete else None
        query_key = whole.select(finite)
        keys = query_key.key.norm(dim=(1, 2))[list(query_key.key_of)]
        norms = query_key.query.norm(dim=(1, 2)) * keys  # both the null and the measure contain the scale
        nulls = self._draw_nulls(query_key)
        for analyzer in self.select_analyzers("weights"):
            readings, bases = {name: part.cpu() for name, part in analyzer.read(query_key).items()}, {}
            if query_key.base is not None and not analyzer.needs_base:
                unchanged = base is not None and base.query is whole.query
                bases = readings if unchanged else analyzer.read(query_key.base)
            for info in analyzer.measures:
                null = scale_null(nulls[info.name], info, norms).tolist() if info.name in nulls else None
                for index, answer in enumerate(answers.values()):
                    value, other = (part[info.name][index] if info.name in part else None for part in (readings, bases))
                    if not info.curve:
                        chance = None if null is None else Null(mean=null[index][0], sd=null[index][1])
                        measure = build_measure(info, site, value, n=1, null=chance, base=other)
                        answer.measures[info.name] = measure
                    elif value is not None:
                        answer.curves[info.name] = value.tolist()
        return unit

    def _read_tokens(self, inputs: texts.Batches, number: int) -> Unit:
        """Compute the tokens.* measures of a batch; release each site's queries and keys after their analysis."""
        batch, analyzers = inputs.batches[number], self.select_analyzers("tokens")
        # lines differ in length, and so do their curves
        values = sequences.SequenceValues(batch.size, self.settings.length if self.settings.pack is False else None)
        rows, skipped = list[AttentionRows](), list[Skipped]()

        def visit(site: Site, call: Call) -> None:
            if site not in self.key_heads:
                return
            query_key = hide_padding(call, batch.inputs).query_key(site)
            finite = sequences.finite_heads(query_key)
            skipped.extend(self._skip_nonfinite(site, query_key, finite, "tokens"))
            if query_key.allowed is not None and not bool(query_key.allowed.any()):
                heads, reason = list(query_key.heads), "the mask hides all keys from every query"
                skipped.append(Skipped(site=site.name, heads=heads, measure="tokens", reason=reason))
            elif finite:
                numbers = sequences.sequence_numbers(len(call.query), batch, 0)
                values.measure(query_key.select(finite), analyzers, numbers, call.query.shape[1])
            if self.show == ATTENTION and number == 0:
                sentence = sequences.decode_sentence(site.part, self.loaded, inputs.batches, 0)
                heads = self.select_requested(finite)
                rows.extend(sequences.attention_rows(query_key.select(heads), sentence) if heads else [])

        with torch.no_grad(), hooks.watch(self.loaded.model, self.all_sites, visit):
            result = hooks.forward(self.loaded.model, batch.inputs)
        alone = replace(inputs, batches=(batch,), sequences=batch.size)
        losses, vocabulary = measure_losses(self.loaded, alone, result)
        measured: Unit = {"sequences": batch.size, "values": values.means, "curves": values.curves}
        return {**measured, "losses": losses, "vocabulary": vocabulary, "rows": rows, "skipped": skipped}

    def _read_gathered(self, inputs: texts.Batches, work: WorkUnit) -> Unit:
        """Compute the gatherers' answers for a unit's sites over all sequences. Raise Stopped if interrupted."""
        answers: dict[Place, dict[int, Answer]] = {}
        try:
            gatherers = self._gather(inputs, work.sites)
            for done, site in enumerate(gatherers):
                for gathering, gatherer in zip(self.gatherings, gatherers[site], strict=True):
                    self.progress(gathering.name, done, len(gatherers))
                    answers[site.name, gathering.name] = {
                        head: replace(answer, shown=sequences.add_sentences(answer.shown, self.loaded, inputs.batches))
                        for head, answer in gatherer.solve().items()
                    }
            for gathering in self.gatherings:
                self.progress(gathering.name, len(gatherers), len(gatherers))
        except KeyboardInterrupt:
            raise Stopped(work.name, {"answers": answers}) from None
        return {"answers": answers}

    def _gather(self, inputs: texts.Batches, sites: Sequence[Site]) -> dict[Site, list[Gatherer]]:
        """Run the model on all batches; return each site's gatherers after they have received all sequences."""
        gatherers: dict[Site, list[Gatherer]] = {}
        forms: dict[Site, QueryKey | str] = {}
        if any(gathering.needs_inputs for gathering in self.gatherings):
            for site, (factors, _) in zip(sites, self.read_factors(sites), strict=True):
                forms[site] = self._form_on_inputs(factors)
        bilinear = [each for each in self.calls if each.site in sites and isinstance(forms.get(each.site), QueryKey)]

        def visit(site: Site, call: Call, batch: texts.Batch, start: int) -> None:
            if site not in sites:
                return
            query_key = hide_padding(call, batch.inputs).query_key(site)
            form = forms.get(site, "no analyzer needs M on the module's inputs")
            if isinstance(form, QueryKey) and call.module is not None:
                query_key = replace(query_key, inputs=module_inputs[call.module])
            if site not in gatherers:
                share = selection_share(self.settings.select or "argmax")
                place = GatheringPlace(site, form, self.settings.seed, share, self.show == SHOWN)
                gatherers[site] = [gathering.begin(place) for gathering in self.gatherings]
            numbers = sequences.sequence_numbers(len(call.query), batch, start)
            for row, sequence in sequences.split_sequences(query_key):
                if heads := self.select_requested(sequences.finite_heads(sequence)):
                    for gatherer in gatherers[site]:
                        gatherer.update(sequence.select(heads), numbers[row])

        start = 0
        with hooks.record_inputs(bilinear) as module_inputs:
            for batch in inputs.batches:
                self.progress("tokens", start, self.settings.windows or 0)
                visit_batch = partial(visit, batch=batch, start=start)
                with torch.no_grad(), hooks.watch(self.loaded.model, self.all_sites, visit_batch):
                    hooks.forward(self.loaded.model, batch.inputs, **hooks.without_logits(self.loaded.model))
                start += batch.size
        return gatherers

    def select_requested(self, heads: Iterable[int]) -> list[int]:
        """Return those of `heads` that were requested: all of them without --heads."""
        return [head for head in heads if self.settings.heads is None or head in self.settings.heads]

    def read_factors(self, sites: Sequence[Site]) -> Iterator[tuple[SiteFactors, QueryKey | None]]:
        """Yield the pairs of `_add_base`: each site's factors, and the site's bilinear form without the adapter."""
        chosen = [index for index, each in enumerate(self.calls) if each.site in sites]
        model, deferred = self.weights_model.model, self.weights_model.deferred
        present = None if deferred is None else deferred.present
        factors = weights.factors(model, self.one_token, self.window, chosen=chosen, turns=self._turns, present=present)
        for index in chosen:
            # no local variable, which would keep the factors of the previous site in memory
            yield self._add_base(index, next(factors))

    def _add_base(self, index: int, factors: SiteFactors) -> tuple[SiteFactors, QueryKey | None]:
        """Return a site's factors, and the site's bilinear form in the base model, without the adapter.

        The form is None if there is no adapter. If the weights can't be read, return the error and None.
        """
        adapter, model = self.weights_model.adapter, self.weights_model.model
        if adapter is None or isinstance(factors, UnreadableError):
            return factors, None
        with adapter.remove_adapter(model, factors.site.path) as differs:
            base = next(weights.factors(model, [self.one_token[index]], [self.window[index]])) if differs else None
        if isinstance(base, UnreadableError):
            return base, None
        # positions rotate both forms alike
        return factors, factors.query_key if base is None else replace(base.query_key, rotation=factors.rotation)

    def _form_on_inputs(self, factors: SiteFactors) -> QueryKey | str:
        """Return the scores' bilinear form on inputs (x, 1) in the model's dtype, or the reason if there is none."""
        if isinstance(factors, UnreadableError):
            return factors.problem
        if (form := factors.on_inputs) is not None:
            dtype = self.loaded.model.dtype
            return replace(form, query=form.query.to(dtype), key=form.key.to(dtype))
        if factors.site.part == "cross":
            return "queries and keys come from different inputs (cross-attention)"
        added = factors.rotation is None
        position = "have their position added to them" if added else "are rotated by position (RoPE)"
        reason = "are normalised per token (QK-norm)" if factors.qk_norm else position
        return f"the scores are not bilinear in the module's inputs: queries and keys {reason}"

    def _draw_nulls(self, query_key: QueryKey) -> dict[str, tuple[float, float]]:
        """Return each measure's null (mean, sd) for the shape, scale and rotation of `query_key`, drawn only once."""
        shape = query_key.query.shape[1:], query_key.key.shape[1:], query_key.scale, id(query_key.rotation)
        if shape not in self._nulls:
            layout, draws = replace(query_key, base=None), NULL_DRAWS["factors"]
            null = gaussian_null(self.select_analyzers("weights"), layout, draws=draws, seed=self.settings.seed)
            self._nulls[shape] = query_key.rotation, null
        return self._nulls[shape][1]

    def _skip_nonfinite(self, site: Site, query_key: QueryKey, finite: Sequence[int], source: str) -> list[Skipped]:
        heads = [head for head in query_key.heads if head not in finite]
        if not heads:
            return []
        weight = next((name for name in self.loaded.nonfinite if name.startswith(site.path)), None)
        reason = f"{weight} contains NaN or Inf" if weight else "the inputs are NaN or Inf because of an earlier layer"
        return [Skipped(site=site.name, heads=heads, measure=source, reason=reason)]
