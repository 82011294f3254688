"""Sums heads up: medians over the model, its layers and each text, with their own errors and nulls."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from attnlens.records import Extreme, Head, HeadId, Null, Settings, Summary, TextSummary, Windows
from attnlens.registry import MeasureInfo, measure_infos
from attnlens.run.inspect.collector import ONE_WINDOW, Collector
from attnlens.statistics import Design, median_error, null_of_median, robust_z

FEWEST_HEADS = 12
"""Heads below which being the largest of them says nothing."""
MOST = 8
"""How many heads are named."""
DEEP = 3
"""How many at each end of a measure can be named."""


def extremes(records: Sequence[Head], infos: Mapping[str, MeasureInfo]) -> list[Extreme]:
    """Up to eight heads at the ends of the measures, the furthest from the median in units of the spread first.

    Heads are ranked within their part (encoder, decoder, cross), one line a head. A rank is no test: of any heads one
    is the largest. Only measures that name an end are looked at. Calls of one
    module share its weights, so that weights.* count and name them once.
    """
    candidates: list[tuple[float, Extreme]] = []
    for part in dict.fromkeys(record.part for record in records):
        calls: dict[tuple[str, int], list[Head]] = defaultdict(list)
        for record in records:
            if record.part == part:
                calls[record.site.partition("#")[0], record.head].append(record)
        every, shared = [[record] for group in calls.values() for record in group], list(calls.values())
        for info in infos.values():
            if info.ends:
                candidates += _ends(info, shared if info.name.startswith("weights.") else every)
    best: dict[tuple[int, int], Extreme] = {}
    for _, candidate in sorted(candidates, key=lambda pair: -pair[0]):
        best.setdefault((candidate.layer, candidate.head), candidate)
    return list(best.values())[:MOST]


def _ends(info: MeasureInfo, heads: Sequence[Sequence[Head]]) -> list[tuple[float, Extreme]]:
    """The heads at both ends of one measure with their distance; a head is the records of its calls, which read the
    same.
    """
    found = [(calls, calls[0].measures[info.name].value) for calls in heads if info.name in calls[0].measures]
    present = sorted(((value, calls) for calls, value in found if value is not None), key=lambda pair: pair[0])
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
    beside = "" if even is None or even.value is None else f", even attention {even.value:.3g}"
    shared = f" (all {len(calls)} calls)" if len(calls) > 1 else ""
    return Extreme(
        layer=calls[0].layer,
        head=calls[0].head,
        measure=info.name,
        value=value,
        rank=rank,
        of=count,
        percentile=100 * (above + 0.5) / count,
        text=f"{number}{end} {info.name} of {count}: {value:.3g}, median {median:.3g}{beside}{shared}",
    )


NEVER_RUN = (
    "the model was never loaded, and so not run: each site's queries and keys were compared with those of its own "
    "module, which had its weights alone"
)
"""Why there is no error of identity of a model that is read from its files."""
Group = Sequence[int]
"""Heads by their place among the records."""


def summarised(
    collector: Collector, names: Sequence[str], identity_error: float | None, seed: int, *, from_files: bool = False
) -> Summary:
    """Medians over the model, each layer and each text (`names`, one a sequence), and the most extreme heads."""
    records = collector.heads()
    by_layer: dict[int, list[int]] = defaultdict(list)
    for place, record in enumerate(records):
        by_layer[record.layer].append(place)
    groups: list[Group] = [range(len(records)), *by_layer.values()]
    windows = by_measure(collector)
    errors = _errors(windows, collector.design, groups, seed)
    nulls = [_nulls(records, group, seed) for group in groups]
    texts = _texts(collector, names, seed)
    return Summary(
        medians=medians(records),
        median_errors=errors[0],
        median_nulls=nulls[0],
        layers=[medians([records[place] for place in group]) for group in by_layer.values()],
        layer_errors=errors[1:],
        layer_nulls=nulls[1:],
        layer_numbers=list(by_layer),
        layer_symmetry=[collector.layer_symmetry.get(layer) for layer in by_layer] if collector.layer_symmetry else [],
        texts=texts,
        between_texts=_between(texts),
        extremes=extremes(records, measure_infos()),
        identity_error=identity_error,
        reasons=(_lone(collector.design) if windows else {}) | ({"identity_error": NEVER_RUN} if from_files else {}),
    )


def medians(records: Sequence[Head]) -> dict[str, float]:
    """Median over the heads that have a value, measure by measure; categories have none."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, measure in record.measures.items():
            if measure.value is not None and measure.label is None:
                values[name].append(measure.value)
    return {name: _median(present) for name, present in values.items()}


def _median(values: Iterable[float]) -> float:
    return float(torch.tensor(list(values), dtype=torch.float64).nanquantile(0.5))


def by_measure(collector: Collector) -> dict[str, Tensor]:
    """Each measure of each sequence, (sequences, heads), heads in the order of the records."""
    order = sorted(collector.drafts, key=lambda key: (key[0].layer, key[1]))
    names = dict.fromkeys(name for _, name in collector.windows)
    nothing = torch.full((collector.design.count,), torch.nan, dtype=torch.float64)
    return {
        name: torch.stack(
            [
                found[:, head] if (found := collector.windows.get((site, name))) is not None else nothing
                for site, head in order
            ],
            1,
        )
        for name in names
    }


def windows_of(collector: Collector, settings: Settings, finished: Sequence[int]) -> Windows:
    """What each window read of each head; noise has one window an input."""
    placed = [(text.name, number) for text in settings.texts for number in text.windows]
    if not placed and settings.noise is not None:
        placed = [(settings.noise.name, number) for number in range(max(finished, default=-1) + 1)]
    heads = [{name: getattr(head, name) for name in HeadId.model_fields} for head in collector.heads()]
    return Windows([placed[number] for number in finished if number < len(placed)], heads, by_measure(collector))


def _errors(
    windows: Mapping[str, Tensor], design: Design, groups: Sequence[Group], seed: int
) -> list[dict[str, float]]:
    """The standard error of each group's median, measure by measure; those that nothing tells are left out."""
    found: list[dict[str, float]] = [{} for _ in groups]
    for name, values in windows.items():
        for errors, error in zip(found, median_error(values, design, groups, seed=seed), strict=True):
            if math.isfinite(error):
                errors[name] = error
    return found


def _lone(design: Design) -> dict[str, str]:
    """Why medians of what windows read have no errors, where one window was all."""
    return {"median_errors": ONE_WINDOW} if design.freedom < 1 else {}


def _nulls(records: Sequence[Head], group: Group, seed: int) -> dict[str, Null]:
    """What the median of so many heads reads by chance."""
    each: dict[str, list[Null]] = defaultdict(list)
    for place in group:
        for name, measure in records[place].measures.items():
            if measure.value is not None and measure.null is not None:
                each[name].append(measure.null)
    found = {}
    for name, nulls in each.items():
        means, sds = (torch.tensor([getattr(null, part) for null in nulls]) for part in ("mean", "sd"))
        mean, sd = null_of_median(means, sds, seed)
        found[name] = Null(mean=mean, sd=sd)
    return found


def _texts(collector: Collector, names: Sequence[str], seed: int) -> list[TextSummary]:
    """The medians of each text's own windows, where there are several texts."""
    every = list(dict.fromkeys(names))
    windows = by_measure(collector) if len(every) > 1 else {}
    found = []
    for text in every if windows else []:
        own = [place for place, name in enumerate(names) if name == text]
        values = {name: part[own] for name, part in windows.items()}
        heads: list[Group] = [range(next(iter(values.values())).shape[1])]
        design = Design.plain(len(own))
        (errors,) = _errors(values, design, heads, seed)
        found.append(
            TextSummary(
                name=text,
                sequences=len(own),
                medians={
                    name: middle
                    for name, part in values.items()
                    if math.isfinite(middle := _median(part.nanmean(0).tolist()))
                },
                median_errors=errors,
                reasons=_lone(design),
            )
        )
    return found


def _between(texts: Sequence[TextSummary]) -> dict[str, float]:
    """The standard deviation between the texts' medians."""
    each: dict[str, list[float]] = defaultdict(list)
    for text in texts:
        for name, median in text.medians.items():
            each[name].append(median)
    return {
        name: float(torch.tensor(present, dtype=torch.float64).std())
        for name, present in each.items()
        if len(present) > 1
    }
