"""Summarise the heads of a report: medians over the model, its layers and texts, and the most extreme heads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from attnlens.analyzers.registry import MeasureInfo, measure_infos
from attnlens.maths.statistics import Design, median_error, null_of_median, robust_z
from attnlens.records import Extreme, Head, Null, Summary, TextSummary
from attnlens.runs.inspect.results import ONE_WINDOW, Results

if TYPE_CHECKING:
    from torch import Tensor

FEWEST_HEADS = 12
"""Minimum number of heads for naming the most extreme one: the median and spread of fewer say little."""
MOST = 8
"""Maximum number of named heads."""
DEEP = 3
"""Number of heads at each end of a measure that can be named."""


def extremes(records: Sequence[Head], infos: Mapping[str, MeasureInfo]) -> list[Extreme]:
    """Return up to eight heads at the ends of measures, those furthest from the median in units of the spread first.

    Heads are ranked within their part (encoder, decoder, cross), one line per head. A rank is not a test: one of any
    heads is the largest. Only measures that define an end are considered. Calls of one module share its weights, so
    that weights.* count and name them once.
    """
    candidates: list[tuple[float, Extreme]] = []
    for part in dict.fromkeys(record.part for record in records):
        calls: dict[tuple[str, int], list[Head]] = defaultdict(list)
        for record in records:
            if record.part == part:
                calls[record.site.partition("#")[0], record.head].append(record)
        separate, shared = [[record] for group in calls.values() for record in group], list(calls.values())
        for info in infos.values():
            if info.ends:
                candidates += _ends(info, shared if info.name.startswith("weights.") else separate)
    best: dict[tuple[int, int], Extreme] = {}
    for _, candidate in sorted(candidates, key=lambda pair: -pair[0]):
        best.setdefault((candidate.layer, candidate.head), candidate)
    return list(best.values())[:MOST]


def _ends(info: MeasureInfo, heads: Sequence[Sequence[Head]]) -> list[tuple[float, Extreme]]:
    """Return the heads at both ends of one measure with their distance; each entry has the equal calls of a head."""
    by_head = [(calls, calls[0].measures[info.name].value) for calls in heads if info.name in calls[0].measures]
    present = sorted(((value, calls) for calls, value in by_head if value is not None), key=lambda pair: pair[0])
    if len(present) < FEWEST_HEADS:
        return []
    values = torch.tensor([value for value, _ in present], dtype=torch.float64)
    scores, median = robust_z(values).abs().tolist(), float(values.quantile(0.5))
    ended = []
    for rank in range(1, DEEP + 1):
        for place, end in ((len(present) - rank, "largest"), (rank - 1, "smallest")):
            value, calls = present[place]
            if info.ends in (end, "both") and scores[place] == scores[place] and value != median:
                ended.append((scores[place], _extreme(info, calls, value, (rank, len(present), end), median)))
    return ended


def _extreme(
    info: MeasureInfo, calls: Sequence[Head], value: float, place: tuple[int, int, str], median: float
) -> Extreme:
    rank, count, end = place
    above = count - rank if end == "largest" else rank - 1
    number = "" if rank == 1 else {2: "2nd ", 3: "3rd "}[rank]
    even = calls[0].measures.get(info.beside)
    uniform = "" if even is None or even.value is None else f", even attention {even.value:.3g}"
    shared = f" (all {len(calls)} calls)" if len(calls) > 1 else ""
    return Extreme(
        layer=calls[0].layer,
        head=calls[0].head,
        measure=info.name,
        value=value,
        rank=rank,
        of=count,
        percentile=100 * (above + 0.5) / count,
        text=f"{number}{end} {info.name} of {count}: {value:.3g}, median {median:.3g}{uniform}{shared}",
    )


NEVER_RUN = (
    "the model was not loaded and therefore not run: each site's queries and keys were compared with those of its own "
    "module, which contained only its weights"
)
"""Reason for a missing identity error of a model that is read from its files."""
Group = Sequence[int]
"""Positions of heads among the records."""


def summarise(results: Results) -> Summary:
    """Compute medians over the model, each layer and each text, and the extreme heads."""
    records, seed = results.heads, results.inspection.settings.seed
    by_layer: dict[int, list[int]] = defaultdict(list)
    for place, record in enumerate(records):
        by_layer[record.layer].append(place)
    groups: list[Group] = [range(len(records)), *by_layer.values()]
    errors = _errors(results.by_measure, results.design, groups, seed)
    nulls = [_nulls(records, group, seed) for group in groups]
    texts = _texts(results, seed)
    lone = _lone(results.design) if results.windows else {}
    return Summary(
        medians=medians(records),
        median_errors=errors[0],
        median_nulls=nulls[0],
        layers=[medians([records[place] for place in group]) for group in by_layer.values()],
        layer_errors=errors[1:],
        layer_nulls=nulls[1:],
        layer_numbers=list(by_layer),
        layer_symmetry=[results.layer_symmetry.get(layer) for layer in by_layer] if results.layer_symmetry else [],
        texts=texts,
        between_texts=_between(texts),
        extremes=extremes(records, measure_infos()),
        identity_error=results.inspection.identity_error,
        reasons=lone | ({"identity_error": NEVER_RUN} if results.inspection.from_files else {}),
    )


def medians(records: Sequence[Head]) -> dict[str, float]:
    """Compute the median of each measure over the heads that have a value; categories are left out."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, measure in record.measures.items():
            if measure.value is not None and measure.label is None:
                values[name].append(measure.value)
    return {name: _median(torch.tensor(present, dtype=torch.float64)) for name, present in values.items()}


def _median(values: Tensor) -> float:
    return float(values.nanquantile(0.5))


def _errors(
    windows: Mapping[str, Tensor], design: Design, groups: Sequence[Group], seed: int
) -> list[dict[str, float]]:
    """Compute the standard error of each group's median per measure; errors that can't be estimated are left out."""
    by_group: list[dict[str, float]] = [{} for _ in groups]
    for name, values in windows.items():
        for errors, error in zip(by_group, median_error(values, design, groups, seed=seed), strict=True):
            if math.isfinite(error):
                errors[name] = error
    return by_group


def _lone(design: Design) -> dict[str, str]:
    """Return the reason why medians over windows lack errors: there is only one window; empty if they have them."""
    return {"median_errors": ONE_WINDOW} if design.freedom < 1 else {}


def _nulls(records: Sequence[Head], group: Group, seed: int) -> dict[str, Null]:
    """Compute the median of as many heads expected by chance, per measure."""
    each: dict[str, list[Null]] = defaultdict(list)
    for place in group:
        for name, measure in records[place].measures.items():
            if measure.value is not None and measure.null is not None:
                each[name].append(measure.null)
    by_name = {}
    for name, nulls in each.items():
        means, sds = (torch.tensor([getattr(null, part) for null in nulls]) for part in ("mean", "sd"))
        mean, sd = null_of_median(means, sds, seed)
        by_name[name] = Null(mean=mean, sd=sd)
    return by_name


def _texts(results: Results, seed: int) -> list[TextSummary]:
    """Compute the medians of each text's own windows; empty for a single text."""
    distinct = list(dict.fromkeys(results.window_texts))
    summaries: list[TextSummary] = []
    if len(distinct) < 2 or not results.by_measure:
        return summaries
    for text in distinct:
        rows = [place for place, name in enumerate(results.window_texts) if name == text]
        values = {name: part[rows] for name, part in results.by_measure.items()}
        middles = {name: _median(part.nanmean(0)) for name, part in values.items()}
        design = Design.plain(len(rows))
        (errors,) = _errors(values, design, [range(len(results.heads))], seed)
        summaries.append(
            TextSummary(
                name=text,
                sequences=len(rows),
                medians={name: middle for name, middle in middles.items() if math.isfinite(middle)},
                median_errors=errors,
                reasons=_lone(design),
            )
        )
    return summaries


def _between(texts: Sequence[TextSummary]) -> dict[str, float]:
    """Compute the standard deviation between the texts' medians."""
    each: dict[str, list[float]] = defaultdict(list)
    for text in texts:
        for name, median in text.medians.items():
            each[name].append(median)
    return {
        name: float(torch.tensor(present, dtype=torch.float64).std())
        for name, present in each.items()
        if len(present) > 1
    }
