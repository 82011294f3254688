"""The most extreme heads of a model: ranked, never tested."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from attnlens.records import Extreme, Head
from attnlens.registry import MeasureInfo
from attnlens.statistics import robust_z

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
