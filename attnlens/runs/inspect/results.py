"""Combine the values of units into the records of the heads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from attnlens.analyzers.registry import Analyzer, Gathering, MeasureInfo, measure_sources
from attnlens.maths.statistics import Design, Stream, standard_error
from attnlens.models.weights import Traits
from attnlens.records import AttentionRows, Coverage, Head, Measure, Null, Selection, Site, Skipped
from attnlens.runs.inspect.sequences import Place, arrange_by_measure
from attnlens.runs.inspect.units import GatheredUnit, TokensUnit, WeightsUnit

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

PAST_ONLY = "not identified: the model never compares a query with a later key"
"""Reason why causal heads lack a value that only a comparison of all pairs determines."""
TWO_DOMAINS = "queries and keys belong to different tokens (cross-attention)"
ONE_WINDOW = "one window has no spread"
ALONE = "only one window or one text has a value, so its spread is unknown"


@dataclass(frozen=True)
class Results:
    """Results of a run, combined from its units."""

    heads: list[Head]
    """Requested heads, ordered by layer and head."""
    windows: dict[Place, Float[Tensor, "windows heads"]]
    """Values per window by site and measure, for all heads of the site; NaN if missing."""
    design: Design
    """Sampling design of the windows."""
    skipped: list[Skipped]
    """What could not be measured, and why."""
    layer_symmetry: dict[int, float | None]
    """Symmetry of the sum of the heads' matrices, by layer."""
    traits: list[Traits]
    """Notes for readers on the weights of each site that was read."""
    selections: list[Selection]
    """Posed problems to show."""
    attention: list[AttentionRows]
    """Attention rows to show."""

    @cached_property
    def by_measure(self) -> dict[str, Float[Tensor, "windows heads"]]:
        """Values per window by measure, with one column per head, in the order of `heads`."""
        return arrange_by_measure(self.windows, [(head.site, head.head) for head in self.heads], self.design.count)

    def coverage(self, sources: Iterable[str]) -> Coverage:
        """Count the requested heads that have a value, and those of them that have none from one of the `sources`."""
        known, sources_by_head = measure_sources(), list[set[str]]()
        for head in self.heads:
            names = [name for name, measure in head.measures.items() if measure.value is not None] + list(head.curves)
            if names:
                sources_by_head.append({known.get(name) or name.partition(".")[0] for name in names})
        without = {source: sum(source not in present for present in sources_by_head) for source in sources}
        return Coverage(
            sites=len({head.site for head in self.heads}),
            heads=len(self.heads),
            analysed=len(sources_by_head),
            without={source: count for source, count in without.items() if count},
            skipped=self.skipped,
        )


def merge_skipped(entries: Iterable[Skipped]) -> list[Skipped]:
    """Return the entries without duplicates; the measure is omitted if the reason applies to several."""
    merged: list[Skipped] = []
    for entry in entries:
        for index, earlier in enumerate(merged):
            if earlier.model_copy(update={"measure": entry.measure}) == entry:
                several = earlier.measure != entry.measure
                merged[index] = entry.model_copy(update={"measure": None}) if several else entry
                break
        else:
            merged.append(entry)
    return merged


def skipped_in(units: Iterable[WeightsUnit | TokensUnit]) -> list[Skipped]:
    """Return what these units could not measure."""
    return [Skipped.model_validate(entry) for unit in units for entry in unit.get("skipped", ())]


def combine_units(
    sites: Mapping[Site, Sequence[int]],
    chosen_heads: Sequence[int] | None,
    analyzers: Sequence[Analyzer | Gathering],
    design: Design,
    *,
    weights: Mapping[Site, WeightsUnit],
    tokens: Sequence[TokensUnit] | None,
    gathered: Sequence[GatheredUnit] = (),
    skipped: Sequence[Skipped] = (),
) -> Results:
    """Combine the values of units into the records of the heads. The same units give the same results.

    `sites` lists the key head of each query head, by site; `chosen_heads` None means all. `tokens` are the units of the
    finished batches, None if no input was read, and `design` is that of their sequences. `gathered` units cover all
    sequences. `skipped` is everything that could not be measured.
    """
    requested = {
        site: [head for head in range(len(key_heads)) if chosen_heads is None or head in chosen_heads]
        for site, key_heads in sites.items()
    }
    answers = {place: by_head for unit in gathered for place, by_head in unit["answers"].items()}
    token_windows = _join_windows(tokens or (), design.count)
    values = _RunValues(
        analyzers=analyzers,
        design=design,
        reasons={(entry.site, head): entry.reason for entry in reversed(skipped) for head in entry.heads},
        weights=weights,
        has_tokens=tokens is not None,
        windows=token_windows | _gathered_windows(analyzers, answers, requested, design.count),
        errors={place: standard_error(table, design) for place, table in token_windows.items()},
        curves=_average_curves(tokens or ()),
        answers=answers,
    )
    records = []
    for site, heads in requested.items():
        for head in heads:
            parts = values.of_weights(site, head), values.of_tokens(site, head), values.of_gatherers(site, head)
            measures = {name: measure for part, _ in parts for name, measure in part.items()}
            curves = {name: curve for _, part in parts for name, curve in part.items()}
            records.append(
                Head(
                    site=site.name,
                    layer=site.layer,
                    head=head,
                    kv_head=sites[site][head],
                    part=site.part,
                    measures=measures,
                    curves={name: curve for name, curve in curves.items() if not any(map(math.isnan, curve))},
                )
            )
    return Results(
        heads=sorted(records, key=lambda record: (record.layer, record.head)),
        windows=values.windows,
        design=design,
        skipped=list(skipped),
        layer_symmetry={
            site.layer: unit["layer_symmetry"] for site, unit in weights.items() if "layer_symmetry" in unit
        },
        traits=[Traits(**unit["traits"]) for unit in weights.values() if "traits" in unit],
        selections=[Selection.model_validate(each) for unit in gathered for each in unit["selections"]],
        attention=[AttentionRows.model_validate(each) for unit in tokens or () for each in unit["rows"]],
    )


def _join_windows(units: Sequence[TokensUnit], count: int) -> dict[Place, Tensor]:
    """Return the values of all `count` windows; NaN for batches without a value."""
    windows: dict[Place, Tensor] = {}
    start = 0
    for unit in units:
        for place, values in unit["values"].items():
            if place not in windows:
                windows[place] = torch.full((count, values.shape[1]), torch.nan, dtype=torch.float64)
            windows[place][start : start + unit["sequences"]] = values
        start += unit["sequences"]
    return windows


def _average_curves(units: Sequence[TokensUnit]) -> dict[Place, Float[Tensor, "heads steps"]]:
    """Return the mean curves over all sequences."""
    streams: dict[Place, Stream] = defaultdict(Stream)
    for unit in units:
        for place, pieces in unit["curves"].items():
            for count, mean in pieces:
                streams[place].merge(count, mean)
    return {place: stream.mean for place, stream in streams.items()}


def _gathered_windows(
    analyzers: Sequence[Analyzer | Gathering],
    answers: Mapping[Place, Mapping[int, Mapping[str, Any]]],
    requested: Mapping[Site, Sequence[int]],
    count: int,
) -> dict[Place, Tensor]:
    """Return the gatherers' values per window, (windows, heads); NaN for heads without an answer."""
    windows: dict[Place, Tensor] = {}
    for gathering in (each for each in analyzers if isinstance(each, Gathering)):
        for site, heads in requested.items():
            by_head = answers.get((site.name, gathering.name), {})
            for head, info in product(heads, gathering.measures):
                if head in by_head and info.name in by_head[head]["windows"]:
                    empty = torch.full((count, 1 + max(heads)), torch.nan, dtype=torch.float64)
                    table = windows.setdefault((site.name, info.name), empty)
                    for sequence, value in by_head[head]["windows"][info.name].items():
                        table[sequence, head] = value
    return windows


Measures = dict[str, Measure]
Curves = dict[str, list[float]]


@dataclass(frozen=True)
class _RunValues:
    """Values of all units of a run, joined over batches."""

    analyzers: Sequence[Analyzer | Gathering]
    design: Design
    reasons: Mapping[tuple[str, int], str]  # reasons for missing heads, by site and head
    weights: Mapping[Site, WeightsUnit]
    has_tokens: bool
    windows: dict[Place, Float[Tensor, "windows heads"]]
    errors: dict[Place, Float[Tensor, " heads"]]  # standard errors of the means of token measures
    curves: dict[Place, Float[Tensor, "heads steps"]]
    answers: Mapping[Place, Mapping[int, Mapping[str, Any]]]  # by site and analyzer, and by head

    def of_weights(self, site: Site, head: int) -> tuple[Measures, Curves]:
        """Return what analyzers measure in a head's weights; nothing if they are not finite."""
        unit = self.weights.get(site, {})
        if head not in unit.get("heads", ()):
            return {}, {}
        index = unit["heads"].index(head)
        measures, curves = {}, {}
        for info in self._infos("weights"):
            values = unit["values"].get(info.name)
            if info.curve:
                if values is not None:
                    curves[info.name] = values[index].tolist()
                continue
            null = None
            if info.name in unit["nulls"]:
                mean, sd = unit["nulls"][info.name][index].tolist()
                null = Null(mean=mean, sd=sd)
            base = float(unit["base"][info.name][index]) if info.name in unit["base"] else math.nan
            measure = _measure(info, site, None if values is None else float(values[index]), n=1, null=null)
            if measure.value is not None and not math.isnan(base):
                measure = measure.model_copy(update={"base": base})
            measures[info.name] = measure
        return measures, curves

    def of_tokens(self, site: Site, head: int) -> tuple[Measures, Curves]:
        """Return what analyzers measure in a head's attention to the input, averaged over windows."""
        measures, curves = {}, {}
        for info in self._infos("tokens") if self.has_tokens else ():
            place = site.name, info.name
            if info.curve:
                if place in self.curves:
                    curves[info.name] = self.curves[place][head].tolist()
            elif place in self.windows:
                measures[info.name] = self._average(info, site, head, self.errors[place][head])
            elif site.part == "cross" and info.self_only:
                measures[info.name] = Measure(value=None, reason=TWO_DOMAINS)
        return measures, curves

    def of_gatherers(self, site: Site, head: int) -> tuple[Measures, Curves]:
        """Return the gatherers' answers for a head; a head that they never saw has a reason."""
        measures, curves = dict[str, Measure](), dict[str, list[float]]()
        for gathering in (each for each in self.analyzers if isinstance(each, Gathering)):
            by_head = self.answers.get((site.name, gathering.name))
            if by_head is not None and head in by_head:
                answer = by_head[head]
                measures |= {name: Measure.model_validate(fields) for name, fields in answer["measures"].items()}
                for info in gathering.measures:
                    if info.name in answer["windows"]:
                        error = standard_error(self.windows[site.name, info.name][:, head], self.design)
                        measures[info.name] = self._average(info, site, head, error)
                curves |= answer["curves"]
            elif by_head is not None and (site.name, head) in self.reasons:
                missing = Measure(value=None, reason=self.reasons[site.name, head])
                measures |= {info.name: missing for info in gathering.measures if not info.curve}
        return measures, curves

    def _infos(self, source: str) -> list[MeasureInfo]:
        plain = [each for each in self.analyzers if isinstance(each, Analyzer) and each.source == source]
        return [info for analyzer in plain for info in analyzer.measures]

    def _average(self, info: MeasureInfo, site: Site, head: int, error: Tensor) -> Measure:
        """Return a head's mean over windows with its standard error, or why there is none."""
        values = self.windows[site.name, info.name][:, head]
        values = values[~values.isnan()]
        if not len(values):
            reason = self.reasons.get((site.name, head))
            return Measure(value=None, reason=reason) if reason else _measure(info, site, None, n=0)
        why = (ONE_WINDOW if len(values) == 1 else ALONE) if bool(error.isnan()) else None
        se = None if why else float(error)
        return _measure(info, site, float(values.mean()), n=len(values), se=se, se_reason=why)


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
    if value is None or math.isnan(value):
        hidden = info.identified == "all pairs" and site.part == "decoder"
        return Measure(value=None, reason=PAST_ONLY if hidden else info.missing)
    label = info.labels[round(value)] if info.labels else None
    return Measure(value=value, label=label, se=se, se_reason=se_reason, n=n, null=null)
