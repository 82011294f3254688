"""Collect readings by site and window, and turn them into the heads' records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from attnlens.analyzers.registry import Analyzer, Answer, Gathering, MeasureInfo, Named, Readings, measure_sources
from attnlens.maths.statistics import Design, Stream, count_and_mean, standard_error
from attnlens.models.hooks.survey import real_parts
from attnlens.models.weights import Traits
from attnlens.records import AttentionRows, Coverage, Head, Measure, Null, QueryKey, Selection, Site, Skipped

PIECE_BYTES = 32 * 2**20
"""Largest (sequences × heads × tokens × tokens) float64 matrix that is analysed at once, in bytes."""


def pieces(query_key: QueryKey) -> Iterator[tuple[list[int], QueryKey]]:
    """Yield a batch without padding, in pieces with score matrices under PIECE_BYTES each, with their sequences.

    A key that no query can see is padding, and in cross-attention so is a query that sees none. Sequences of one length
    stay together; long ones are split by heads.
    """
    for batch, queries, keys in real_parts(query_key.allowed, query_key.query.shape[0], query_key.site.part):
        unpadded = query_key.sequences(batch, queries, keys)
        one_head = 8 * unpadded.query.shape[-2] * unpadded.key.shape[-2]
        together = max(1, PIECE_BYTES // (one_head * len(unpadded.heads)))
        heads = max(1, min(len(unpadded.heads), PIECE_BYTES // one_head))
        for start in range(0, len(batch), together):
            rows = range(start, min(start + together, len(batch)))
            some = unpadded.sequences(rows, slice(None), slice(None))
            for head in range(0, len(unpadded.heads), heads):
                yield [batch[row] for row in rows], some.select(range(head, min(head + heads, len(unpadded.heads))))


def sequences(query_key: QueryKey) -> Iterator[tuple[int, QueryKey]]:
    """Yield each sequence of a batch separately and without its padding, with its number in the batch."""
    for batch, queries, keys in real_parts(query_key.allowed, query_key.query.shape[0], query_key.site.part):
        for row in batch:
            yield row, query_key.sequences([row], queries, keys)


def finite_heads(query_key: QueryKey) -> list[int]:
    """Return the indices of the heads with finite queries and keys in every sequence."""
    # a sum is finite only if all its terms are, and needs no mask of their size
    query, key = (part.sum((-1, -2), dtype=torch.float64).isfinite() for part in (query_key.query, query_key.key))
    fine = query & key[..., list(query_key.key_of)]
    return fine.reshape(-1, len(query_key.heads)).all(0).nonzero().flatten().tolist()


PAST_ONLY = "not identified: the model never compares a query with a later key"
"""Reason why causal heads lack a value that only a comparison of all pairs determines."""
TWO_DOMAINS = "queries and keys live on different tokens (cross-attention)"
ONE_WINDOW = "one window has no spread"
ALONE = "one window of a text has a value, or one text, whose spread nothing tells"


@dataclass(frozen=True)
class Draft:
    """Record of a head while its dictionaries are filled."""

    site: Site
    head: int
    kv_head: int
    measures: dict[str, Measure] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)

    @property
    def whole_curves(self) -> dict[str, list[float]]:
        """Curves without missing numbers."""
        return {name: curve for name, curve in self.curves.items() if not any(step != step for step in curve)}

    @property
    def sources(self) -> set[str]:
        """Sources that the head has a value from."""
        names = [name for name, measure in self.measures.items() if measure.value is not None]
        known = measure_sources()
        return {known.get(name) or name.partition(".")[0] for name in (*names, *self.whole_curves)}


@dataclass
class Collector:
    """Measurements of a run so far."""

    chosen_heads: Sequence[int] | None  # requested heads; None: all
    drafts: dict[tuple[Site, int], Draft] = field(default_factory=dict)  # the requested heads
    design: Design = field(default_factory=lambda: Design(()))
    """Sampling design of the sequences; empty before a text is cut."""
    windows: dict[tuple[Site, str], Tensor] = field(default_factory=dict)
    """Each scalar per sequence and head, (sequences, heads), NaN if missing."""
    sums: dict[tuple[Site, str], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Sum and number of values of each sequence's parts: a module may cut a sequence into windows (Swin)."""
    curves: dict[tuple[Site, str], Stream] = field(default_factory=dict)  # running means of curves over sequences
    skipped: list[Skipped] = field(default_factory=list)  # what could not be measured
    layer_symmetry: dict[int, float | None] = field(default_factory=dict)
    """Symmetry of the sum of the heads' matrices, by layer."""
    traits: list[Traits] = field(default_factory=list)
    """Notes for readers on the weights of each site that was read."""
    shown: list[Selection] = field(default_factory=list)  # posed problems that are to be shown
    rows: list[AttentionRows] = field(default_factory=list)  # attention rows that are to be shown
    losses: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    """Per batch: mean loss of each sequence, its number of predicted tokens, and the vocabulary size."""

    def asks(self, head: int) -> bool:
        """Return whether a head was requested."""
        return self.chosen_heads is None or head in self.chosen_heads

    def read_tokens(
        self,
        site: Site,
        query_key: QueryKey,
        analyzers: Iterable[Analyzer],
        numbers: Sequence[int],
        total: int,
        steps: int | None = None,
    ) -> None:
        """Add what analyzers read from a batch, whose rows belong to the sequences with these `numbers`."""
        for rows, group in pieces(query_key):
            parts = [numbers[row] for row in rows]
            for analyzer in analyzers:
                self.add_tokens(site, parts, group.heads, total, analyzer.function(group), steps)

    def add_tokens(
        self,
        site: Site,
        rows: Sequence[int],
        heads: Sequence[int],
        total: int,
        readings: Readings,
        steps: int | None = None,
    ) -> None:
        """Add readings of the sequences `rows` and these `heads`: (sequences, heads), or (sequences, heads, steps).

        Curves are averaged; cumulative ones of sequences of different lengths are extended to `steps`.
        """
        for name, reading in readings.items():
            if reading.dim() == 3:
                self.add_curve(site, name, *count_and_mean(_extend_curve(reading, heads, total, steps)))
            else:
                self.add_values(site, name, list(rows), list(heads), total, reading.double().cpu())

    def enter(self, site: Site, key_of: Sequence[int]) -> None:
        """Add a requested site, with the key head of each of its query heads."""
        for head, kv_head in enumerate(key_of):
            if self.asks(head):
                self.drafts[site, head] = Draft(site, head, kv_head)

    def add_weights(
        self,
        site: Site,
        heads: Sequence[int],
        analyzer: Analyzer,
        readings: Readings,
        nulls: Mapping[str, list[Null]],
        base: Readings | None = None,
    ) -> None:
        """Add readings, (heads,) or (heads, steps); `nulls` by measure; `base`: readings without the adapter."""
        for info in analyzer.measures:
            for index, head in enumerate(heads):
                draft = self.drafts.get((site, head))
                reading = readings.get(info.name)
                if draft is None or (reading is None and info.curve):
                    continue
                if info.curve and reading is not None:
                    draft.curves[info.name] = reading[index].tolist()
                else:
                    value = None if reading is None else float(reading[index])
                    null = nulls[info.name][index] if info.name in nulls else None
                    measure = _measure(info, site, value, n=1, null=null)
                    before = float(base[info.name][index]) if base is not None and info.name in base else None
                    if measure.value is not None and before is not None and before == before:
                        measure = measure.model_copy(update={"base": before})
                    draft.measures[info.name] = measure

    def add_values(
        self, site: Site, name: str, rows: Sequence[int], heads: Sequence[int], total: int, values: Tensor
    ) -> None:
        """Add one number per sequence and head; the numbers of one sequence's parts are averaged."""
        place = site, name
        empty = torch.zeros(self.design.count, total, dtype=torch.float64)
        sums, counts = self.sums.setdefault(place, (empty, empty.clone()))
        at = torch.tensor(rows)[:, None], torch.tensor(heads)
        sums.index_put_(at, values.nan_to_num(posinf=torch.inf, neginf=-torch.inf), accumulate=True)
        counts.index_put_(at, (~values.isnan()).double(), accumulate=True)
        self.windows[place] = sums / counts

    def add_curve(self, site: Site, name: str, count: Tensor, mean: Tensor) -> None:
        """Update the running mean of a curve."""
        self.curves.setdefault((site, name), Stream()).merge(count, mean)

    def add_layer(self, layer: int, symmetry: float | None) -> None:
        """Store the symmetry of a layer's summed matrix."""
        self.layer_symmetry[layer] = symmetry

    def add_shown(self, shown: Sequence[Selection], rows: Sequence[AttentionRows]) -> None:
        """Add selections and attention rows to show."""
        self.shown += shown
        self.rows += rows

    def add_traits(self, traits: Traits) -> None:
        """Add the notes for readers on a site's weights."""
        self.traits.append(traits)

    def add_losses(self, means: Tensor, counts: Tensor, vocabulary: int) -> None:
        """Add a model's losses on the sequences of a batch."""
        self.losses.append((means, counts, vocabulary))

    def add_answers(self, site: Site, gathering: Gathering, answers: Mapping[int, Answer]) -> None:
        """Add a gatherer's answers for a site's heads; a head it never saw gets a missing value with a reason."""
        for (place, head), draft in self.drafts.items():
            if place != site:
                continue
            if head in answers:
                draft.measures.update(answers[head].measures)
                draft.measures.update(self._averaged(site, head, gathering, answers[head]))
                draft.curves.update(answers[head].curves)
            elif skip := self._skip_of(site, head):
                nothing = Measure(value=None, reason=skip.reason)
                draft.measures.update({info.name: nothing for info in gathering.measures if not info.curve})

    def close_tokens(self, analyzers: Iterable[Analyzer], finished: Sequence[int]) -> None:
        """Turn the readings of the `finished` sequences, given by number, into measures and curves."""
        rows = list(finished)
        self.design = self.design.select(rows)
        self.windows = {place: values[rows] for place, values in self.windows.items()}
        infos = [info for analyzer in analyzers if analyzer.source == "tokens" for info in analyzer.measures]
        errors = {place: standard_error(values, self.design) for place, values in self.windows.items()}
        for (site, head), draft in self.drafts.items():
            for info in infos:
                if info.curve:
                    if (site, info.name) in self.curves:
                        draft.curves[info.name] = self.curves[site, info.name].mean[head].tolist()
                elif (site, info.name) in self.windows:
                    error = float(errors[site, info.name][head])
                    draft.measures[info.name] = self._mean(info, site, head, error)
                elif site.part == "cross" and info.self_only:
                    draft.measures[info.name] = _measure(info, site, None, n=0)

    def _averaged(self, site: Site, head: int, gathering: Gathering, answer: Answer) -> dict[str, Measure]:
        """Average a head's values per sequence, and store these values."""
        means = {}
        for info in gathering.measures:
            if info.name not in answer.windows:
                continue
            place, heads = (site, info.name), 1 + max(other for where, other in self.drafts if where == site)
            if place not in self.windows:
                self.windows[place] = torch.full((self.design.count, heads), torch.nan, dtype=torch.float64)
            for sequence, value in answer.windows[info.name].items():
                self.windows[place][sequence, head] = value
            error = float(standard_error(self.windows[place][:, head], self.design))
            means[info.name] = self._mean(info, site, head, error)
        return means

    def _mean(self, info: MeasureInfo, site: Site, head: int, error: float) -> Measure:
        """Return one head's mean over sequences."""
        values = self.windows[site, info.name][:, head]
        values = values[~values.isnan()]
        if not len(values):
            skip = self._skip_of(site, head)
            return Measure(value=None, reason=skip.reason) if skip else _measure(info, site, None, n=0)
        why = (ONE_WINDOW if len(values) == 1 else ALONE) if error != error else None
        return _measure(info, site, float(values.mean()), n=len(values), se=None if why else error, se_reason=why)

    def _skip_of(self, site: Site, head: int) -> Skipped | None:
        """Return the skip entry that lists this head, if any."""
        return next((skip for skip in self.skipped if skip.site == site.name and head in skip.heads), None)

    def skip(self, site: str, reason: str, heads: Sequence[int] = (), measure: str | None = None) -> None:
        """Record what is not measured and why, once; the source is omitted if the reason applies to several."""
        entry = Skipped(site=site, heads=list(heads), measure=measure, reason=reason)
        for place, before in enumerate(self.skipped):
            if before.model_copy(update={"measure": measure}) == entry:
                self.skipped[place] = entry if before.measure == measure else entry.model_copy(update={"measure": None})
                return
        self.skipped.append(entry)

    def heads(self) -> list[Head]:
        """Return the finished records, ordered by layer and head."""
        return [
            Head(
                site=draft.site.name,
                layer=draft.site.layer,
                head=draft.head,
                kv_head=draft.kv_head,
                part=draft.site.part,
                measures=draft.measures,
                curves=draft.whole_curves,
            )
            for draft in sorted(self.drafts.values(), key=lambda draft: (draft.site.layer, draft.head))
        ]

    def coverage(self, sources: Iterable[str]) -> Coverage:
        """Count the requested heads that have a value, and those of them that have none from one of the `sources`."""
        sources_by_head = {key: draft.sources for key, draft in self.drafts.items() if draft.sources}
        without = {source: sum(source not in present for present in sources_by_head.values()) for source in sources}
        return Coverage(
            sites=len({site for site, _ in self.drafts}),
            heads=len(self.drafts),
            analysed=len(sources_by_head),
            without={source: count for source, count in without.items() if count},
            skipped=self.skipped,
        )


def _recorder(method: str) -> Callable[..., None]:
    """Build a method that records its name and arguments for replay."""
    return lambda record, *given: record.calls.append([method, _plain(given)])


class UnitRecord(Collector):
    """Recorder of one unit's results, as the plain value of the unit: a list of (method, arguments)."""

    def __init__(self, chosen_heads: Sequence[int] | None) -> None:
        super().__init__(chosen_heads)
        self.calls: list[Any] = []

    add_values = _recorder("add_values")
    add_curve = _recorder("add_curve")
    add_weights = _recorder("add_weights")
    add_layer = _recorder("add_layer")
    add_answers = _recorder("add_answers")
    add_shown = _recorder("add_shown")
    add_traits = _recorder("add_traits")
    add_losses = _recorder("add_losses")

    def skip(self, site: str, reason: str, heads: Sequence[int] = (), measure: str | None = None) -> None:
        """Record what is not measured."""
        self.calls.append(["skip", [site, reason, list(heads), measure]])


def replay(value: Any, sink: Collector, analyzers: Iterable[Named]) -> None:
    """Apply the calls that a unit recorded to `sink`, in their order."""
    named: dict[tuple[str, str], Named] = {(each.name, each.source): each for each in analyzers}
    for method, arguments in value:
        if method not in NOTED:  # the file is untrusted
            raise ValueError(f"No unit notes down {method}.")
        getattr(sink, method)(*(_restore(part, named) for part in arguments))


NOTED = {name for name in vars(UnitRecord) if name == "skip" or name.startswith("add_")}
RECORDS: dict[str, Any] = {kind.__name__: kind for kind in (Null, Measure, Selection, AttentionRows)}
PLAIN: dict[str, Any] = {kind.__name__: kind for kind in (Answer, Site, Traits)}


def _plain(value: Any) -> Any:
    """Convert a value to lists and dictionaries of tensors and JSON values."""
    kind = type(value).__name__
    if kind in RECORDS:
        return {"kind": kind, "of": value.model_dump()}
    if kind in PLAIN:
        return {"kind": kind, "of": {each.name: _plain(getattr(value, each.name)) for each in fields(value)}}
    if isinstance(value, Named):
        return {"kind": "analyzer", "of": [value.name, value.source]}
    if isinstance(value, Mapping):
        return {"kind": "map", "of": {key: _plain(part) for key, part in value.items()}}
    return [_plain(part) for part in value] if isinstance(value, list | tuple | range) else value


def _restore(value: Any, named: Mapping[tuple[str, str], Named]) -> Any:
    """Restore a value from its plain form."""
    if isinstance(value, list):
        return [_restore(part, named) for part in value]
    if not isinstance(value, dict):
        return value
    kind, of = value["kind"], value["of"]
    if kind in RECORDS:
        return RECORDS[kind].model_validate(of)
    if kind == "analyzer":
        return named[of[0], of[1]]
    parts = {key: _restore(part, named) for key, part in of.items()}
    return parts if kind == "map" else PLAIN[kind](**parts)


def _extend_curve(reading: Tensor, heads: Sequence[int], total: int, steps: int | None) -> Tensor:
    """Expand a curve to all heads, NaN for missing ones; a shorter curve is extended by its last value."""
    if steps is not None and reading.shape[2] < steps:
        reading = torch.cat([reading, reading[..., -1:].expand(-1, -1, steps - reading.shape[2])], -1)
    full = reading.new_full((reading.shape[0], total, reading.shape[2]), torch.nan)
    full[:, list(heads)] = reading
    return full


def _measure(
    info: MeasureInfo,
    site: Site,
    value: float | None,
    n: int,
    se: float | None = None,
    null: Null | None = None,
    se_reason: str | None = None,
) -> Measure:
    if site.part == "cross" and info.self_only:
        return Measure(value=None, reason=TWO_DOMAINS)
    if value is None or value != value:
        hidden = info.identified == "all pairs" and site.part == "decoder"
        return Measure(value=None, reason=PAST_ONLY if hidden else info.missing)
    label = info.labels[round(value)] if info.labels else None
    return Measure(value=value, label=label, se=se, se_reason=se_reason, n=n, null=null)


def scaled_null(null: tuple[float, float], info: MeasureInfo, norms: Tensor) -> list[Null]:
    """Return the null of each head: as drawn from factors of unit norm, or rescaled to the head's own ‖W_Q‖‖W_K‖."""
    factors = norms.tolist() if info.grows_with_factors else [1.0] * len(norms)
    return [Null(mean=null[0] * factor, sd=null[1] * abs(factor)) for factor in factors]
