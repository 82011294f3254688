"""Combine the values of an inspection's units into the heads of a report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import torch

from attnlens.analyzers.registry import MeasureInfo, measure_sources
from attnlens.maths.statistics import Design, Stream, standard_error
from attnlens.models.weights import Traits
from attnlens.records import AttentionRows, Coverage, Head, HeadId, Measure, Null, Selection, Site, Skipped, Windows
from attnlens.runs.inspect.inspection import (
    GatheredUnit,
    HeadAnswer,
    Inspection,
    TokensUnit,
    Unit,
    WeightsUnit,
    merge_skipped,
)
from attnlens.runs.inspect.sequences import Place, arrange_by_measure
from attnlens.runs.progress import INTERRUPTED

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

PAST_ONLY = "not identified: the model never compares a query with a later key"
"""Reason why causal heads lack a value that only a comparison of all pairs determines."""
TWO_DOMAINS = "queries and keys belong to different tokens (cross-attention)"
ONE_WINDOW = "one window has no spread"
ALONE = "only one window or one text has a value, so its spread is unknown"
NamedValue = tuple[str, Measure | list[float]]
"""Name and value of a scalar, or of a curve."""


@dataclass(frozen=True)
class Results:
    """Results of an inspection, derived from the values of its units. The same values give the same results."""

    inspection: Inspection
    values: Mapping[str, Unit]
    """Values of the finished units by name."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Reasons of the units that failed."""
    interrupted: bool = False
    """True if the user interrupted the run."""

    def _units(self, stage: str) -> list[Any]:
        """Return the values of the finished units of a stage, in the order of the run."""
        units = self.inspection.units.items()
        return [self.values[name] for name, unit in units if unit.stage == stage and name in self.values]

    @cached_property
    def _weights(self) -> dict[Site, WeightsUnit]:
        units = self.inspection.units
        sites = [units[name].sites[0] for name in units if name in self.values and units[name].stage == "weights"]
        return dict(zip(sites, self._units("weights"), strict=True))

    @cached_property
    def tokens(self) -> list[TokensUnit]:
        """Values of the finished batches."""
        return self._units("tokens")

    @cached_property
    def finished(self) -> list[int]:
        """Numbers of the sequences whose batches have a value."""
        finished, start = list[int](), 0
        names = [name for name, unit in self.inspection.units.items() if unit.stage == "tokens"]
        for name, batch in zip(names, self.inspection.batches, strict=True):
            finished += range(start, start + batch.size) if name in self.values else ()
            start += batch.size
        return finished

    @property
    def total(self) -> int:
        """Number of sequences, finished or not."""
        return sum(batch.size for batch in self.inspection.batches)

    @cached_property
    def window_texts(self) -> list[str]:
        """Name of the text of each finished sequence; empty for inputs that are not texts."""
        names = self.inspection.window_texts
        return [names[number] for number in self.finished] if names else []

    @cached_property
    def _gathered(self) -> list[GatheredUnit]:
        # their values cover every sequence
        return self._units("gathered") if len(self.finished) == self.total else []

    @cached_property
    def design(self) -> Design:
        """Sampling design of the finished sequences."""
        names = self.inspection.window_texts or [""] * self.total
        return Design.of(names, self.inspection.settings.intervals).select(self.finished)

    @cached_property
    def skipped(self) -> list[Skipped]:
        """What could not be measured, and why."""
        skipped = list(self.inspection.skipped)
        for unit in [*self._weights.values(), *self.tokens]:
            skipped += [Skipped.model_validate(entry) for entry in unit.get("skipped", ())]
        units = self.inspection.units
        for name, reason in self.missing.items():
            skipped += [Skipped(site=site.name, reason=f"{name}: {reason}") for site in units[name].sites]
        if self.interrupted and len(self.finished) < self.total:
            unread = f"{self.total - len(self.finished)} of {self.total} sequences"
            skipped.append(Skipped(site=unread, reason=INTERRUPTED))
        for name, work_unit in units.items():
            if self.interrupted and name not in self.values and work_unit.stage != "tokens":
                skipped += [Skipped(site=site.name, reason=INTERRUPTED) for site in work_unit.sites]
        return merge_skipped(skipped)

    @cached_property
    def heads(self) -> list[Head]:
        """Requested heads, ordered by layer and head."""
        records = []
        for site, heads in self._requested.items():
            for head in heads:
                pairs = self._read_weights(site, head), self._read_tokens(site, head), self._read_answers(site, head)
                values = dict(chain(*pairs))
                curves = {name: value for name, value in values.items() if isinstance(value, list)}
                records.append(
                    Head(
                        site=site.name,
                        layer=site.layer,
                        head=head,
                        kv_head=self.inspection.key_heads[site][head],
                        part=site.part,
                        measures={name: value for name, value in values.items() if isinstance(value, Measure)},
                        curves={name: curve for name, curve in curves.items() if not any(map(math.isnan, curve))},
                    )
                )
        return sorted(records, key=lambda record: (record.layer, record.head))

    @cached_property
    def windows(self) -> dict[Place, Float[Tensor, "windows heads"]]:
        """Values per window by site and measure, for all heads of the site; NaN if missing."""
        return self._token_windows | self._gathered_windows()

    @cached_property
    def by_measure(self) -> dict[str, Float[Tensor, "windows heads"]]:
        """Values per window by measure, with one column per head, in the order of `heads`."""
        return arrange_by_measure(self.windows, [(head.site, head.head) for head in self.heads], self.design.count)

    def name_windows(self) -> Windows:
        """Return the values of each head per window; for noise, each input is one window."""
        settings = self.inspection.settings
        places = [(text.name, number) for text in settings.texts for number in text.windows]
        if not places and settings.noise is not None:
            places = [(settings.noise.name, number) for number in range(self.total)]
        heads = [{name: getattr(head, name) for name in HeadId.model_fields} for head in self.heads]
        return Windows([places[number] for number in self.finished if number < len(places)], heads, self.by_measure)

    @cached_property
    def layer_symmetry(self) -> dict[int, float | None]:
        """Symmetry of the sum of the heads' matrices, by layer."""
        units = self._weights.items()
        return {site.layer: unit["layer_symmetry"] for site, unit in units if "layer_symmetry" in unit}

    @property
    def traits(self) -> list[Traits]:
        """Notes for readers on the weights of each site that was read."""
        return [Traits(**unit["traits"]) for unit in self._weights.values() if "traits" in unit]

    @property
    def selections(self) -> list[Selection]:
        """Posed problems to show."""
        return [Selection.model_validate(fields) for unit in self._gathered for fields in unit["selections"]]

    @property
    def attention(self) -> list[AttentionRows]:
        """Attention rows to show."""
        return [AttentionRows.model_validate(fields) for unit in self.tokens for fields in unit["rows"]]

    def count_coverage(self) -> Coverage:
        """Count the requested heads that have a value, and those of them that have none from one of the sources."""
        known, sources_by_head = measure_sources(), list[set[str]]()
        for head in self.heads:
            names = [name for name, measure in head.measures.items() if measure.value is not None] + list(head.curves)
            if names:
                sources_by_head.append({known.get(name) or name.partition(".")[0] for name in names})
        sources = dict.fromkeys(each.source for each in self.inspection.analyzers)
        without = {source: sum(source not in present for present in sources_by_head) for source in sources}
        return Coverage(
            sites=len({head.site for head in self.heads}),
            heads=len(self.heads),
            analysed=len(sources_by_head),
            without={source: count for source, count in without.items() if count},
            skipped=self.skipped,
        )

    @cached_property
    def _requested(self) -> dict[Site, list[int]]:
        chosen = self.inspection.settings.heads
        return {
            site: [head for head in range(len(key_heads)) if chosen is None or head in chosen]
            for site, key_heads in self.inspection.key_heads.items()
        }

    @cached_property
    def _reasons(self) -> dict[tuple[str, int], str]:
        """Reasons for missing heads, by site and head."""
        return {(entry.site, head): entry.reason for entry in reversed(self.skipped) for head in entry.heads}

    @cached_property
    def _token_windows(self) -> dict[Place, Tensor]:
        """Values of token measures; NaN for batches that lack them."""
        windows: dict[Place, Tensor] = {}
        start = 0
        for unit in self.tokens:
            for place, values in unit["values"].items():
                if place not in windows:
                    windows[place] = torch.full((self.design.count, values.shape[1]), torch.nan, dtype=torch.float64)
                windows[place][start : start + unit["sequences"]] = values
            start += unit["sequences"]
        return windows

    @cached_property
    def _errors(self) -> dict[Place, Float[Tensor, " heads"]]:
        """Standard errors of the means of token measures."""
        return {place: standard_error(table, self.design) for place, table in self._token_windows.items()}

    @cached_property
    def _curves(self) -> dict[Place, Float[Tensor, "heads steps"]]:
        """Mean curves over all sequences."""
        streams: dict[Place, Stream] = defaultdict(Stream)
        for unit in self.tokens:
            for place, pieces in unit["curves"].items():
                for count, mean in pieces:
                    streams[place].merge(count, mean)
        return {place: stream.mean for place, stream in streams.items()}

    @cached_property
    def _answers(self) -> dict[Place, dict[int, HeadAnswer]]:
        return {place: by_head for unit in self._gathered for place, by_head in unit["answers"].items()}

    def _gathered_windows(self) -> dict[Place, Tensor]:
        """Return the gatherers' values per window; NaN for heads without an answer."""
        windows: dict[Place, Tensor] = {}
        for gathering, (site, heads) in product(self.inspection.gatherings, self._requested.items()):
            by_head = self._answers.get((site.name, gathering.name), {})
            for head, info in product(heads, gathering.measures):
                if head in by_head and info.name in by_head[head]["windows"]:
                    empty = torch.full((self.design.count, 1 + max(heads)), torch.nan, dtype=torch.float64)
                    table = windows.setdefault((site.name, info.name), empty)
                    for sequence, value in by_head[head]["windows"][info.name].items():
                        table[sequence, head] = value
        return windows

    def _infos(self, source: str) -> list[MeasureInfo]:
        return [info for analyzer in self.inspection.analyzers_of(source) for info in analyzer.measures]

    def _read_weights(self, site: Site, head: int) -> Iterator[NamedValue]:
        """Yield what analyzers measure in a head's weights; nothing if they are not finite."""
        unit = self._weights.get(site, {})
        if head not in unit.get("heads", ()):
            return
        index = unit["heads"].index(head)
        for info in self._infos("weights"):
            values, null, base = unit["values"].get(info.name), None, unit["base"].get(info.name)
            if info.curve:
                if values is not None:
                    yield info.name, values[index].tolist()
                continue
            if info.name in unit["nulls"]:
                mean, sd = unit["nulls"][info.name][index].tolist()
                null = Null(mean=mean, sd=sd)
            measure = _measure(info, site, None if values is None else float(values[index]), n=1, null=null)
            if base is not None and measure.value is not None and not math.isnan(base[index]):
                measure = measure.model_copy(update={"base": float(base[index])})
            yield info.name, measure

    def _read_tokens(self, site: Site, head: int) -> Iterator[NamedValue]:
        """Yield what analyzers measure in a head's attention to the input, averaged over windows."""
        for info in self._infos("tokens") if self.inspection.batches else ():
            place = site.name, info.name
            if place in self._curves:
                yield info.name, self._curves[place][head].tolist()
            elif place in self._token_windows:
                yield info.name, self._average(info, site, head, self._errors[place][head])
            elif site.part == "cross" and info.self_only and not info.curve:
                yield info.name, Measure(value=None, reason=TWO_DOMAINS)

    def _read_answers(self, site: Site, head: int) -> Iterator[NamedValue]:
        """Yield the gatherers' answers for a head; a head that they never saw has a reason."""
        for gathering in self.inspection.gatherings:
            by_head = self._answers.get((site.name, gathering.name))
            if by_head is not None and head in by_head:
                answer = by_head[head]
                yield from ((name, Measure.model_validate(fields)) for name, fields in answer["measures"].items())
                for info in gathering.measures:
                    if info.name in answer["windows"]:
                        error = standard_error(self.windows[site.name, info.name][:, head], self.design)
                        yield info.name, self._average(info, site, head, error)
                yield from answer["curves"].items()
            elif by_head is not None and (site.name, head) in self._reasons:
                missing = Measure(value=None, reason=self._reasons[site.name, head])
                yield from ((info.name, missing) for info in gathering.measures if not info.curve)

    def _average(self, info: MeasureInfo, site: Site, head: int, error: Tensor) -> Measure:
        """Return a head's mean over windows with its standard error, or why there is none."""
        values = self.windows[site.name, info.name][:, head]
        values = values[~values.isnan()]
        if not len(values):
            reason = self._reasons.get((site.name, head))
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
