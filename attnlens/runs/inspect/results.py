"""Combine the values of an inspection's units into the heads of a report, and summarise the heads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product
from typing import TYPE_CHECKING

import torch

from attnlens import records
from attnlens.analyzers.registry import Answer, MeasureInfo, measure_infos, measure_sources
from attnlens.maths.statistics import Design, Stream, median_error, null_of_median, robust_z, standard_error
from attnlens.models.weights import Traits
from attnlens.report.report import Report
from attnlens.runs import checks
from attnlens.runs.feeding import LOSS, describe_guessing
from attnlens.runs.inspect.inspection import TWO_DOMAINS, Inspection, Unit, WorkUnit, build_measure, merge_skipped
from attnlens.runs.inspect.sequences import Place, arrange_by_measure
from attnlens.runs.progress import INTERRUPTED
from attnlens.runs.provenance import assemble_report

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

ONE_WINDOW = "one window has no spread"
ALONE = "only one window or one text has a value, so the spread is unknown"


@dataclass(frozen=True)
class Results:
    """Results of an inspection, computed from the values of its finished units."""

    inspection: Inspection
    values: Mapping[str, Unit]  # values of the finished units, keyed by unit name
    missing: Mapping[str, str] = field(default_factory=dict)  # reason why a unit failed, keyed by unit name
    interrupted: bool = False  # True if the user interrupted the run

    def _units(self, stage: str) -> dict[WorkUnit, Unit]:
        """Map each finished unit of a stage to its value, in the order of the run."""
        units = self.inspection.units.items()
        return {unit: self.values[name] for name, unit in units if unit.stage == stage and name in self.values}

    @cached_property
    def finished(self) -> list[int]:
        """Indices of the sequences in finished batches."""
        starts = list(accumulate((batch.size for batch in self.inspection.batches), initial=0))
        batches = [unit.batch or 0 for unit in self._units("tokens")]
        return [number for batch in batches for number in range(starts[batch], starts[batch + 1])]

    @property
    def total(self) -> int:
        """Number of sequences, finished or not."""
        return sum(batch.size for batch in self.inspection.batches)

    @cached_property
    def design(self) -> Design:
        """Sampling design of the finished sequences."""
        names = self.inspection.window_texts or [""] * self.total
        return Design.of(names, self.inspection.settings.intervals).select(self.finished)

    @cached_property
    def window_texts(self) -> list[str]:
        """Name of the text of each finished sequence; [] for inputs that are not texts."""
        names = self.inspection.window_texts
        return [names[number] for number in self.finished if names]

    @cached_property
    def skipped(self) -> list[records.Skipped]:
        """Sites, heads, measures and sequences without a value, each with the reason."""
        skipped = list(self.inspection.skipped)
        for value in [*self._units("weights").values(), *self._units("tokens").values()]:
            skipped += value.get("skipped", ())
        units = self.inspection.units
        for name, reason in self.missing.items():
            skipped += [records.Skipped(site=site.name, reason=f"{name}: {reason}") for site in units[name].sites]
        if self.interrupted and len(self.finished) < self.total:
            unread = f"{self.total - len(self.finished)} of {self.total} sequences"
            skipped.append(records.Skipped(site=unread, reason=INTERRUPTED))
        for name, unit in units.items():
            if self.interrupted and name not in self.values and unit.stage != "tokens":
                skipped += [records.Skipped(site=site.name, reason=INTERRUPTED) for site in unit.sites]
        return merge_skipped(skipped)

    @cached_property
    def heads(self) -> list[records.Head]:
        """Requested heads, ordered by layer and head."""
        heads = [
            self._read_head(site, head)
            for site, key_heads in self.inspection.key_heads.items()
            for head in self.inspection.select_requested(range(len(key_heads)))
        ]
        return sorted(heads, key=lambda each: (each.layer, each.head))

    @cached_property
    def windows(self) -> dict[Place, Float[Tensor, "windows heads"]]:
        """Values in each finished window, keyed by (site, measure), for all heads of the site; NaN if missing."""
        widths = {site.name: len(key_heads) for site, key_heads in self.inspection.key_heads.items()}
        tables: dict[Place, Tensor] = {}

        def table(place: Place) -> Tensor:
            if place not in tables:
                tables[place] = torch.full((self.design.count, widths[place[0]]), torch.nan, dtype=torch.float64)
            return tables[place]

        start = 0
        for unit in self._units("tokens").values():
            for place, values in unit["values"].items():
                table(place)[start : start + unit["sequences"]] = values
            start += unit["sequences"]
        for (site, _), by_head in self._answers.items():
            for head, answer in by_head.items():
                for name, by_sequence in answer.windows.items():
                    for sequence, value in by_sequence.items():
                        table((site, name))[sequence, head] = value
        return tables

    @cached_property
    def by_measure(self) -> dict[str, Float[Tensor, "windows heads"]]:
        """Values in each finished window, keyed by measure, with one column per head in the order of `heads`."""
        return arrange_by_measure(self.windows, [(head.site, head.head) for head in self.heads], self.design.count)

    @cached_property
    def layer_symmetry(self) -> dict[int, float | None]:
        """Symmetry of the sum of a layer's matrices W_Q W_Kᵀ over its heads, keyed by layer number; None if unknown."""
        units = self._units("weights").items()
        return {unit.sites[0].layer: value["layer_symmetry"] for unit, value in units if "layer_symmetry" in value}

    def build_report(self) -> Report:
        """Build the report of the inspection."""
        inspection, settings = self.inspection, self.inspection.settings
        tokens, weights = self._units("tokens").values(), self._units("weights").values()
        units = [unit for unit in tokens if unit["losses"]]
        if units and not self.interrupted and all(entry.measure != LOSS for entry in inspection.skipped):
            means, counts = (torch.cat(tensors) for tensors in zip(*(unit["losses"] for unit in units), strict=True))
            worse = describe_guessing(means, counts, self.window_texts, units[0]["vocabulary"])
            settings = settings.model_copy(update={"notes": [*settings.notes, *worse]})
        if len(self.finished) < self.total:
            settings = settings.model_copy(update={"windows": len(self.finished)})
        traits = [Traits(**value["traits"]) for value in weights if "traits" in value]
        reads_weights = bool(inspection.select_analyzers("weights"))
        conventions = checks.describe_conventions(inspection.site_calls, traits) if reads_weights else None
        body = records.InspectionBody(
            selections=[each.shown for part in self._answers.values() for each in part.values() if each.shown],
            attention=[rows for unit in tokens for rows in unit["rows"]],
        )
        # values of each head per window; for noise, each input is one window
        places = [(text.name, number) for text in settings.texts for number in text.windows]
        if not places and settings.noise is not None:
            places = [(settings.noise.name, number) for number in range(self.total)]
        heads = [{name: getattr(head, name) for name in records.HeadId.model_fields} for head in self.heads]
        windows = [places[number] for number in self.finished if number < len(places)]
        return assemble_report(
            "inspect",
            "inspection",
            model=inspection.loaded.info.model_copy(
                update={
                    "conventions": conventions,
                    "layer_names": checks.layer_names(each.site for each in inspection.calls),
                }
            ),
            settings=settings,
            coverage=self._count_coverage(),
            heads=self.heads,
            summary=summarise(self),
            inspection=body,
            timings=dict(inspection.timings),
        ).with_windows(records.Windows(windows, heads, self.by_measure))

    def _count_coverage(self) -> records.Coverage:
        """Count sites and heads and, for each source, the heads whose values all come from other sources."""
        known, present = measure_sources(), list[set[str]]()
        for head in self.heads:
            names = [name for name, measure in head.measures.items() if measure.value is not None] + list(head.curves)
            present += [{known.get(name) or name.partition(".")[0] for name in names}] if names else []
        sources = dict.fromkeys(each.source for each in self.inspection.analyzers)
        without = {source: sum(source not in head_sources for head_sources in present) for source in sources}
        return records.Coverage(
            sites=len({head.site for head in self.heads}),
            heads=len(self.heads),
            analysed=len(present),
            model_sites=len(self.inspection.calls),
            model_heads=sum(len(each.call.key_heads) for each in self.inspection.calls),
            without={source: count for source, count in without.items() if count},
            skipped=self.skipped,
        )

    @cached_property
    def _reasons(self) -> dict[tuple[str, int], str]:
        return {(entry.site, head): entry.reason for entry in reversed(self.skipped) for head in entry.heads}

    @cached_property
    def _errors(self) -> dict[Place, Float[Tensor, " heads"]]:
        """Standard error of each head's mean over windows, keyed by (site, measure)."""
        return {place: standard_error(values, self.design) for place, values in self.windows.items()}

    @cached_property
    def _curves(self) -> dict[Place, Float[Tensor, "heads steps"]]:
        streams: dict[Place, Stream] = defaultdict(Stream)
        for unit in self._units("tokens").values():
            for place, pieces in unit["curves"].items():
                for count, mean in pieces:
                    streams[place].merge(count, mean)
        return {place: stream.mean for place, stream in streams.items()}

    @cached_property
    def _answers(self) -> dict[Place, dict[int, Answer]]:
        # gatherers read every sequence, so their values are omitted if some sequences are missing
        gathered = self._units("gathered") if len(self.finished) == self.total else {}
        units = [*self._units("weights").values(), *gathered.values()]
        return {place: by_head for unit in units for place, by_head in unit.get("answers", {}).items()}

    def _read_head(self, site: records.Site, head: int) -> records.Head:
        """Collect a head's measures and curves from weights, tokens and gatherers."""
        measures: dict[str, records.Measure] = {}
        curves: dict[str, list[float]] = {}
        if answer := self._answers.get((site.name, "weights"), {}).get(head):
            measures |= answer.measures
            curves |= answer.curves
        analyzers = self.inspection.select_analyzers("tokens") if self.inspection.batches else ()
        for info in (info for analyzer in analyzers for info in analyzer.measures):
            place = site.name, info.name
            if place in self._curves:
                curves[info.name] = self._curves[place][head].tolist()
            elif place in self._errors:
                measures[info.name] = self._average(info, site, head)
            elif site.part == "cross" and info.self_only and not info.curve:
                measures[info.name] = records.Measure(value=None, reason=TWO_DOMAINS)
        for gathering in self.inspection.gatherings:
            by_head = self._answers.get((site.name, gathering.name))
            if by_head is not None and (answer := by_head.get(head)):
                averages = (info for info in gathering.measures if info.name in answer.windows)
                measures |= answer.measures | {info.name: self._average(info, site, head) for info in averages}
                curves |= answer.curves
            elif by_head is not None and (site.name, head) in self._reasons:  # the gatherer never received the head
                missing = records.Measure(value=None, reason=self._reasons[site.name, head])
                measures |= {info.name: missing for info in gathering.measures if not info.curve}
        return records.Head(
            site=site.name,
            layer=site.layer,
            head=head,
            kv_head=self.inspection.key_heads[site][head],
            part=site.part,
            measures=measures,
            curves={name: curve for name, curve in curves.items() if not any(map(math.isnan, curve))},
        )

    def _average(self, info: MeasureInfo, site: records.Site, head: int) -> records.Measure:
        """Average a head's measure over windows; return mean and standard error, or the reason for a missing mean."""
        values, error = (part[site.name, info.name][..., head] for part in (self.windows, self._errors))
        values = values[~values.isnan()]
        if not len(values):
            reason = self._reasons.get((site.name, head))
            return records.Measure(value=None, reason=reason) if reason else build_measure(info, site, None, n=0)
        why = (ONE_WINDOW if len(values) == 1 else ALONE) if bool(error.isnan()) else None
        se = None if why else float(error)
        return build_measure(info, site, values.mean(), n=len(values), se=se, se_reason=why)


FEWEST_HEADS = 12  # minimum number of heads for a median and spread against which a head can be called extreme
MOST = 8  # maximum number of extreme heads in a report
DEEP = 3  # maximum number of extreme heads at each end of a measure's values


def find_extremes(heads: Sequence[records.Head], infos: Mapping[str, MeasureInfo]) -> list[records.Extreme]:
    """Return up to MOST heads, each with its most extreme measure, by decreasing |robust z-score|.

    Values are compared among heads of the same part (encoder, decoder, cross). If a module is called several times, its
    heads are listed once for weights.*, because all calls share the weights.
    """
    candidates: list[tuple[float, records.Extreme]] = []
    for part in dict.fromkeys(record.part for record in heads):
        calls: dict[tuple[str, int], list[records.Head]] = defaultdict(list)
        for record in heads:
            if record.part == part:
                calls[record.site.partition("#")[0], record.head].append(record)
        separate, shared = [[record] for group in calls.values() for record in group], list(calls.values())
        for info in infos.values():
            if info.ends:
                candidates += _find_ends(info, shared if info.name.startswith("weights.") else separate)
    best: dict[tuple[int, int], records.Extreme] = {}
    for _, candidate in sorted(candidates, key=lambda pair: -pair[0]):
        best.setdefault((candidate.layer, candidate.head), candidate)
    return list(best.values())[:MOST]


def _find_ends(info: MeasureInfo, heads: Sequence[Sequence[records.Head]]) -> list[tuple[float, records.Extreme]]:
    """Return (|robust z-score|, record) for a measure's extreme heads; `heads` lists the calls of each head.

    Return [] if fewer than FEWEST_HEADS heads have a value.
    """
    by_head = [(calls[0].measures[info.name].value, calls) for calls in heads if info.name in calls[0].measures]
    present = sorted(((value, calls) for value, calls in by_head if value is not None), key=lambda pair: pair[0])
    if len(present) < FEWEST_HEADS:
        return []
    values = torch.tensor([value for value, _ in present], dtype=torch.float64)
    scores, median = robust_z(values).abs().tolist(), float(values.quantile(0.5))
    candidates, count = [], len(present)
    for rank, end in product(range(1, DEEP + 1), ("largest", "smallest")):
        above = count - rank if end == "largest" else rank - 1
        value, calls = present[above]
        if info.ends not in (end, "both") or math.isnan(scores[above]) or value == median:
            continue
        even = calls[0].measures.get(info.beside)
        uniform = "" if even is None or even.value is None else f", even attention {even.value:.3g}"
        shared = f" (all {len(calls)} calls)" if len(calls) > 1 else ""
        number = ("", "2nd ", "3rd ")[rank - 1]
        extreme = records.Extreme(
            layer=calls[0].layer,
            head=calls[0].head,
            measure=info.name,
            value=value,
            rank=rank,
            of=count,
            percentile=100 * (above + 0.5) / count,
            text=f"{number}{end} {info.name} of {count}: {value:.3g}, median {median:.3g}{uniform}{shared}",
        )
        candidates.append((scores[above], extreme))
    return candidates


NEVER_RUN = "the model was read from its files and not run; each site was checked against its own module instead"


def summarise(results: Results) -> records.Summary:
    """Compute each measure's median over all heads, over each layer's heads and for each text; find extreme heads."""
    heads, seed = results.heads, results.inspection.settings.seed
    by_layer: dict[int, list[int]] = defaultdict(list)
    for place, record in enumerate(heads):
        by_layer[record.layer].append(place)
    groups = [range(len(heads)), *by_layer.values()]
    middles = [_summarise_heads([heads[place] for place in group], seed) for group in groups]
    errors = _errors(results.by_measure, results.design, groups, seed)
    texts = _summarise_texts(results, seed)
    by_text: dict[str, list[float]] = defaultdict(list)
    for name, median in (pair for text in texts for pair in text.medians.items()):
        by_text[name].append(median)
    several = [(name, medians) for name, medians in by_text.items() if len(medians) > 1]
    lone = {"median_errors": ONE_WINDOW} if results.windows and results.design.freedom < 1 else {}
    return records.Summary(
        medians=middles[0][0],
        median_errors=errors[0],
        median_nulls=middles[0][1],
        layers=[medians for medians, _ in middles[1:]],
        layer_errors=errors[1:],
        layer_nulls=[nulls for _, nulls in middles[1:]],
        layer_numbers=list(by_layer),
        layer_symmetry=[results.layer_symmetry.get(layer) for layer in by_layer] if results.layer_symmetry else [],
        texts=texts,
        between_texts={name: float(torch.tensor(medians, dtype=torch.float64).std()) for name, medians in several},
        extremes=find_extremes(heads, measure_infos()),
        identity_error=results.inspection.identity_error,
        reasons=lone | ({"identity_error": NEVER_RUN} if results.inspection.loaded.deferred is not None else {}),
    )


def _summarise_heads(heads: Sequence[records.Head], seed: int) -> tuple[dict[str, float], dict[str, records.Null]]:
    """Return each measure's median over heads (except categories) and the median's null, keyed by measure."""
    by_name: dict[str, list[records.Measure]] = defaultdict(list)
    for record in heads:
        for name, measure in record.measures.items():
            if measure.value is not None:
                by_name[name].append(measure)
    medians, nulls = {}, {}
    for name, measures in by_name.items():
        if values := [measure.value for measure in measures if measure.label is None]:
            medians[name] = float(torch.tensor(values, dtype=torch.float64).nanquantile(0.5))
        if chance := [measure.null for measure in measures if measure.null is not None]:
            means, sds = torch.tensor([null.mean for null in chance]), torch.tensor([null.sd for null in chance])
            mean, sd = null_of_median(means, sds, seed)
            nulls[name] = records.Null(mean=mean, sd=sd)
    return medians, nulls


def _errors(
    windows: Mapping[str, Tensor], design: Design, groups: Sequence[Sequence[int]], seed: int
) -> list[dict[str, float]]:
    """Return, for each group of heads, the known standard errors of the measures' medians."""
    by_group: list[dict[str, float]] = [{} for _ in groups]
    for name, values in windows.items():
        for errors, error in zip(by_group, median_error(values, design, groups, seed=seed), strict=True):
            if math.isfinite(error):
                errors[name] = error
    return by_group


def _summarise_texts(results: Results, seed: int) -> list[records.TextSummary]:
    """Return for each text the medians over heads of each measure's mean over windows; [] for a single text."""
    distinct, summaries = list(dict.fromkeys(results.window_texts)), list[records.TextSummary]()
    for text in distinct if len(distinct) > 1 and results.by_measure else ():
        rows = [place for place, name in enumerate(results.window_texts) if name == text]
        values = {name: part[rows] for name, part in results.by_measure.items()}
        middles = {name: float(part.nanmean(0).nanquantile(0.5)) for name, part in values.items()}
        design = Design.plain(len(rows))
        (errors,) = _errors(values, design, [range(len(results.heads))], seed)
        summaries.append(
            records.TextSummary(
                name=text,
                sequences=len(rows),
                medians={name: middle for name, middle in middles.items() if math.isfinite(middle)},
                median_errors=errors,
                reasons={"median_errors": ONE_WINDOW} if design.freedom < 1 else {},
            )
        )
    return summaries
