"""How do readings become a report? They are gathered site by site, averaged over sequences, and summed up."""

from __future__ import annotations

import platform
import resource
import statistics as stdlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import Tensor

import attnlens
from attnlens.records import (
    Coverage,
    Environment,
    Head,
    Measure,
    Null,
    Site,
    Skipped,
    Standout,
    Summary,
    Tool,
)
from attnlens.registry import Analyzer, Answer, Gathering, MeasureInfo, Readings, measure_infos, measure_sources
from attnlens.statistics import Stream, robust_z

STANDOUT_SCORE = 3.5
"""Robust z-score from which a head stands out (Iglewicz & Hoaglin 1993)."""
FEWEST_HEADS = 12
"""Heads below which none is called an outlier."""
MOST_STANDOUTS = 8
"""How many standouts a summary names."""
PAST_ONLY = "not identified: the model never compares a query with a later key"
"""Why causal heads lack what only a comparison of all pairs fixes."""
TWO_DOMAINS = "queries and keys live on different tokens (cross-attention)"


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
class Collector:
    """What has been measured so far."""

    chosen_heads: Sequence[int] | None
    """Heads asked for; None means all."""
    drafts: dict[tuple[Site, int], Draft] = field(default_factory=dict)
    """The heads asked for."""
    streams: dict[tuple[Site, str], Stream] = field(default_factory=dict)
    """Running statistics over sequences."""
    skipped: list[Skipped] = field(default_factory=list)
    """What could not be measured."""
    layer_symmetry: dict[int, float | None] = field(default_factory=dict)
    """Symmetry of the heads' summed matrix by layer."""

    def enter(self, site: Site, key_of: Sequence[int]) -> None:
        """Note a site that was asked for, with the key head of each of its query heads."""
        for head, kv_head in enumerate(key_of):
            if self.chosen_heads is None or head in self.chosen_heads:
                self.drafts[site, head] = Draft(site, head, kv_head)

    def add_weights(
        self, site: Site, heads: Sequence[int], analyzer: Analyzer, readings: Readings, nulls: Mapping[str, list[Null]]
    ) -> None:
        """Enter readings of shape (heads,) or (heads, steps); `nulls` by measure, one a head."""
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
                    draft.measures[info.name] = _measure(info, site, value, n=1, null=null)

    def add_tokens(
        self, site: Site, heads: Sequence[int], total: int, readings: Readings, steps: int | None = None
    ) -> None:
        """Stream readings of the `heads` that were computed: (sequences, heads) or (sequences, heads, steps).

        Cumulative curves of sequences of different lengths are continued to `steps`.
        """
        for name, reading in readings.items():
            if steps is not None and reading.dim() == 3 and reading.shape[2] < steps:
                # a cumulative curve that has ended stays where it is, at 1
                reading = torch.cat([reading, reading[..., -1:].expand(-1, -1, steps - reading.shape[2])], -1)
            full = reading.new_full((reading.shape[0], total, *reading.shape[2:]), torch.nan)
            full[:, list(heads)] = reading
            if (site, name) not in self.streams:
                self.streams[site, name] = Stream()
            self.streams[site, name].update(full)

    def add_answers(self, site: Site, gathering: Gathering, answers: Mapping[int, Answer]) -> None:
        """Enter what a gatherer says of a site's heads; a head that it never saw has no value, with the reason."""
        for (place, head), draft in self.drafts.items():
            if place != site:
                continue
            if head in answers:
                draft.measures.update(answers[head].measures)
                draft.curves.update(answers[head].curves)
            elif skip := self._skip_of(site, head):
                nothing = Measure(value=None, reason=skip.reason)
                draft.measures.update({info.name: nothing for info in gathering.measures if not info.curve})

    def close_tokens(self, analyzers: Iterable[Analyzer]) -> None:
        """Turn the running statistics into measures and curves."""
        infos = [info for analyzer in analyzers if analyzer.source == "tokens" for info in analyzer.measures]
        for (site, head), draft in self.drafts.items():
            for info in infos:
                stream = self.streams.get((site, info.name))
                if site.part == "cross" and info.self_only and not info.curve:
                    draft.measures[info.name] = _measure(info, site, None, n=0)
                if stream is None:
                    continue
                if info.curve:
                    draft.curves[info.name] = stream.mean[head].tolist()
                    continue
                n = int(stream.count[head])
                if n == 0 and (skip := self._skip_of(site, head)):
                    draft.measures[info.name] = Measure(value=None, reason=skip.reason)
                    continue
                value = float(stream.mean[head]) if n else None
                se = float(stream.standard_error[head]) if n > 1 else None
                draft.measures[info.name] = _measure(info, site, value, n=n, se=se)

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

    def summary(self, identity_error: float | None) -> Summary:
        """Medians over the model and over each layer, and the heads that stand out."""
        records = self.heads()
        outstanding = standouts(records, measure_infos())
        by_layer: dict[int, list[Head]] = defaultdict(list)
        for record in records:
            by_layer[record.layer].append(record)
        return Summary(
            medians=_medians(records),
            layers=[_medians(group) for group in by_layer.values()],
            layer_numbers=list(by_layer),
            layer_symmetry=[self.layer_symmetry.get(layer) for layer in by_layer] if self.layer_symmetry else [],
            standouts=outstanding[:MOST_STANDOUTS],
            standouts_in_all=len(outstanding),
            identity_error=identity_error,
        )


def _measure(
    info: MeasureInfo, site: Site, value: float | None, n: int, se: float | None = None, null: Null | None = None
) -> Measure:
    if site.part == "cross" and info.self_only:
        return Measure(value=None, reason=TWO_DOMAINS)
    if value is None or value != value:
        hidden = info.identified == "all pairs" and site.part == "decoder"
        return Measure(value=None, reason=PAST_ONLY if hidden else info.missing)
    label = info.labels[round(value)] if info.labels else None
    return Measure(value=value, label=label, se=se, n=n, null=null)


def _medians(records: Sequence[Head]) -> dict[str, float]:
    """Median over the heads that have a value, measure by measure; categories have none."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, measure in record.measures.items():
            if measure.value is not None and measure.label is None:
                values[name].append(measure.value)
    return {name: stdlib.median(present) for name, present in values.items()}


def standouts(records: Sequence[Head], infos: Mapping[str, MeasureInfo]) -> list[Standout]:
    """The heads that differ most from the others of their part (encoder, decoder, cross), at most one line a head.

    Only measures that say in words what a large or a small value means are candidates. Calls of one module share its
    weights, so that weights.* count and name them once.
    """
    candidates: list[Standout] = []
    for part in dict.fromkeys(record.part for record in records):
        calls: dict[tuple[str, int], list[Head]] = defaultdict(list)
        for record in records:
            if record.part == part:
                calls[record.site.partition("#")[0], record.head].append(record)
        every, shared = [[record] for group in calls.values() for record in group], list(calls.values())
        for info in infos.values():
            if info.more or info.less:
                candidates += _standouts_in(info, shared if info.name.startswith("weights.") else every)
    best: dict[tuple[int, int], Standout] = {}
    for candidate in sorted(candidates, key=lambda standout: -abs(standout.score)):
        best.setdefault((candidate.layer, candidate.head), candidate)
    return list(best.values())


def _standouts_in(info: MeasureInfo, heads: Sequence[Sequence[Head]]) -> list[Standout]:
    """Those among the heads that stand out in one measure; a head is the records of its calls, which read the same."""
    found = [(calls, calls[0].measures[info.name].value) for calls in heads if info.name in calls[0].measures]
    present = [(calls, value) for calls, value in found if value is not None]
    if len(present) < FEWEST_HEADS:
        return []
    values = torch.tensor([value for _, value in present], dtype=torch.float64)
    standing, median = [], float(values.quantile(0.5))
    bounded = info.low is not None and info.high is not None
    least = 0.05 * (info.high - info.low) if bounded else 0.1 * abs(median)  # type: ignore[operator]
    for (calls, value), score in zip(present, robust_z(values).tolist(), strict=True):
        words = info.more if score > 0 else info.less
        if abs(score) >= STANDOUT_SCORE and abs(value - median) >= least and words:
            text = f"{words}: {info.name} {value:.3g}, median {median:.3g}"
            text += f" (all {len(calls)} calls)" if len(calls) > 1 else ""
            first = calls[0]
            standing.append(Standout(layer=first.layer, head=first.head, measure=info.name, score=score, text=text))
    return standing


def scaled_null(null: tuple[float, float], info: MeasureInfo, norms: Tensor) -> list[Null]:
    """The null of each head: as drawn from factors of unit norm, or rescaled to the head's own ‖s·W_Q‖‖W_K‖."""
    factors = norms.tolist() if info.grows_with_factors else [1.0] * len(norms)
    return [Null(mean=null[0] * factor, sd=null[1] * abs(factor)) for factor in factors]


def environment() -> Environment:
    """Versions and platform of this process."""
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        platform=platform.platform(),
    )


def tool() -> Tool:
    """What writes the report."""
    return Tool(version=attnlens.__version__)


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes.

    Linux's own high-water mark where there is one: getrusage's also counts the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
