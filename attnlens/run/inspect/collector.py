"""Gathers readings site by site, keeps each window's, and turns them into the heads' records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnlens.records import AttentionRows, Coverage, Head, Measure, Null, Selection, Site, Skipped
from attnlens.registry import Analyzer, Answer, Gathering, MeasureInfo, Readings, measure_sources
from attnlens.run.inspect.sink import Sink
from attnlens.statistics import Design, Stream, standard_error
from attnlens.weights import Traits

PAST_ONLY = "not identified: the model never compares a query with a later key"
"""Why causal heads lack what only a comparison of all pairs fixes."""
TWO_DOMAINS = "queries and keys live on different tokens (cross-attention)"
ONE_WINDOW = "one window has no spread"
ALONE = "one window of a text has a value, or one text, whose spread nothing tells"


@dataclass(frozen=True)
class Draft:
    """A head's record while its dictionaries fill up."""

    site: Site
    head: int
    kv_head: int
    measures: dict[str, Measure] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)

    @property
    def whole_curves(self) -> dict[str, list[float]]:
        """The curves without missing numbers."""
        return {name: curve for name, curve in self.curves.items() if not any(step != step for step in curve)}

    @property
    def sources(self) -> set[str]:
        """The sources of which it has a value."""
        names = [name for name, measure in self.measures.items() if measure.value is not None]
        known = measure_sources()
        return {known.get(name) or name.partition(".")[0] for name in (*names, *self.whole_curves)}

    @property
    def record(self) -> Head:
        """The finished record; curves with missing numbers are left out."""
        return Head(
            site=self.site.name,
            layer=self.site.layer,
            head=self.head,
            kv_head=self.kv_head,
            part=self.site.part,
            measures=self.measures,
            curves=self.whole_curves,
        )


@dataclass
class Collector(Sink):
    """What has been measured so far."""

    chosen_heads: Sequence[int] | None
    """Heads asked for; None means all."""
    drafts: dict[tuple[Site, int], Draft] = field(default_factory=dict)
    """The heads asked for."""
    design: Design = field(default_factory=lambda: Design(()))
    """How the sequences were sampled; none before a text is cut."""
    windows: dict[tuple[Site, str], Tensor] = field(default_factory=dict)
    """Each scalar of each sequence and head, (sequences, heads), NaN where there is none."""
    sums: dict[tuple[Site, str], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Sum and number of what each sequence's parts read: a module may cut a sequence into windows of its own (Swin)."""
    curves: dict[tuple[Site, str], Stream] = field(default_factory=dict)
    """Running means of curves over sequences."""
    skipped: list[Skipped] = field(default_factory=list)
    """What could not be measured."""
    layer_symmetry: dict[int, float | None] = field(default_factory=dict)
    """Symmetry of the heads' summed matrix by layer."""
    traits: list[Traits] = field(default_factory=list)
    """What a reader must know of the weights of each site that was read."""
    shown: list[Selection] = field(default_factory=list)
    """The problems that were posed, where they are to be shown."""
    rows: list[AttentionRows] = field(default_factory=list)
    """Rows of attention that are to be shown."""
    losses: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    """Of each batch the mean loss of each sequence, over how many tokens, and the size of the vocabulary."""

    def enter(self, site: Site, key_of: Sequence[int]) -> None:
        """Note a site that was asked for, with the key head of each of its query heads."""
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
        """Enter readings of shape (heads,) or (heads, steps); `nulls` by measure; `base`: those without adapter."""
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
                    found = _measure(info, site, value, n=1, null=null)
                    before = float(base[info.name][index]) if base is not None and info.name in base else None
                    if found.value is not None and before is not None and before == before:
                        found = found.model_copy(update={"base": before})
                    draft.measures[info.name] = found

    def add_values(
        self, site: Site, name: str, rows: Sequence[int], heads: Sequence[int], total: int, values: Tensor
    ) -> None:
        """Keep one number of each of these sequences and heads; those of one sequence's parts are averaged."""
        place = site, name
        empty = torch.zeros(self.design.count, total, dtype=torch.float64)
        sums, counts = self.sums.setdefault(place, (empty, empty.clone()))
        at = torch.tensor(rows)[:, None], torch.tensor(heads)
        sums.index_put_(at, values.nan_to_num(posinf=torch.inf, neginf=-torch.inf), accumulate=True)
        counts.index_put_(at, (~values.isnan()).double(), accumulate=True)
        self.windows[place] = sums / counts

    def add_curve(self, site: Site, name: str, count: Tensor, mean: Tensor) -> None:
        """Keep the running mean of a curve."""
        self.curves.setdefault((site, name), Stream()).merge(count, mean)

    def add_layer(self, layer: int, symmetry: float | None) -> None:
        """Keep the symmetry of a layer's summed matrix."""
        self.layer_symmetry[layer] = symmetry

    def add_shown(self, shown: Sequence[Selection], rows: Sequence[AttentionRows]) -> None:
        """Keep what is to be shown."""
        self.shown += shown
        self.rows += rows

    def add_traits(self, traits: Traits) -> None:
        """Keep what a reader must know of a site's weights."""
        self.traits.append(traits)

    def add_losses(self, means: Tensor, counts: Tensor, vocabulary: int) -> None:
        """Keep a model's losses on the sequences of a batch."""
        self.losses.append((means, counts, vocabulary))

    def add_answers(self, site: Site, gathering: Gathering, answers: Mapping[int, Answer]) -> None:
        """Enter what a gatherer says of a site's heads; a head that it never saw has no value, with the reason."""
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
        """Turn what the `finished` sequences, by number, read into measures and curves."""
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
        """The means over sequences of what each of them read of this head, which are kept."""
        found = {}
        for info in gathering.measures:
            if info.name not in answer.windows:
                continue
            place, heads = (site, info.name), 1 + max(other for where, other in self.drafts if where == site)
            if place not in self.windows:
                self.windows[place] = torch.full((self.design.count, heads), torch.nan, dtype=torch.float64)
            for sequence, value in answer.windows[info.name].items():
                self.windows[place][sequence, head] = value
            error = float(standard_error(self.windows[place][:, head], self.design))
            found[info.name] = self._mean(info, site, head, error)
        return found

    def _mean(self, info: MeasureInfo, site: Site, head: int, error: float) -> Measure:
        """One head's mean over sequences."""
        values = self.windows[site, info.name][:, head]
        values = values[~values.isnan()]
        if not len(values):
            skip = self._skip_of(site, head)
            return Measure(value=None, reason=skip.reason) if skip else _measure(info, site, None, n=0)
        why = (ONE_WINDOW if len(values) == 1 else ALONE) if error != error else None
        return _measure(info, site, float(values.mean()), n=len(values), se=None if why else error, se_reason=why)

    def _skip_of(self, site: Site, head: int) -> Skipped | None:
        """The entry that names this head, if there is one."""
        return next((skip for skip in self.skipped if skip.site == site.name and head in skip.heads), None)

    def skip(self, site: str, reason: str, heads: Sequence[int] = (), measure: str | None = None) -> None:
        """Note what is not measured, and why; the same thing once, and without a source where it holds for several."""
        entry = Skipped(site=site, heads=list(heads), measure=measure, reason=reason)
        for place, before in enumerate(self.skipped):
            if before.model_copy(update={"measure": measure}) == entry:
                self.skipped[place] = entry if before.measure == measure else entry.model_copy(update={"measure": None})
                return
        self.skipped.append(entry)

    def heads(self) -> list[Head]:
        """The finished records in the order of layer and head."""
        return [
            draft.record for draft in sorted(self.drafts.values(), key=lambda draft: (draft.site.layer, draft.head))
        ]

    def coverage(self, sources: Iterable[str]) -> Coverage:
        """How many of the heads asked for have a value, and how many of those have none from one of the `sources`."""
        found = {key: draft.sources for key, draft in self.drafts.items() if draft.sources}
        without = {source: sum(source not in present for present in found.values()) for source in sources}
        return Coverage(
            sites=len({site for site, _ in self.drafts}),
            heads=len(self.drafts),
            analysed=len(found),
            without={source: count for source, count in without.items() if count},
            skipped=self.skipped,
        )


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
    """The null of each head: as drawn from factors of unit norm, or rescaled to the head's own ‖W_Q‖‖W_K‖."""
    factors = norms.tolist() if info.grows_with_factors else [1.0] * len(norms)
    return [Null(mean=null[0] * factor, sd=null[1] * abs(factor)) for factor in factors]
