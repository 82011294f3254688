"""Describe an inspection before its units are read, and assemble the report from their results."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from attnlens.maths.statistics import Design, median_error, null_of_median, robust_z
from attnlens.models.hooks import Reached
from attnlens.records import (
    Extreme,
    Head,
    HeadId,
    InspectionBody,
    ModelInfo,
    Null,
    Report,
    Settings,
    Site,
    Skipped,
    Summary,
    TextSummary,
    Windows,
)
from attnlens.registry import Analyzer, Gathering, MeasureInfo, measure_infos
from attnlens.runs.checks import conventions
from attnlens.runs.feeding import LOSS, guess_notes
from attnlens.runs.inspect.collector import ONE_WINDOW, Collector, replay
from attnlens.runs.progress import INTERRUPTED
from attnlens.runs.provenance import report_of
from attnlens.runs.store import versions

FEWEST_HEADS = 12
"""Minimum number of heads for naming the most extreme one."""
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
"""Reason for a missing identity error of a model that is read from its files."""
Group = Sequence[int]
"""Positions of heads among the records."""


def summarised(
    collector: Collector, names: Sequence[str], identity_error: float | None, seed: int, *, from_files: bool = False
) -> Summary:
    """Compute medians over the model, each layer and each text (`names`, one per sequence), and the extreme heads."""
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
    """Compute the median of each measure over the heads that have a value; categories are left out."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, measure in record.measures.items():
            if measure.value is not None and measure.label is None:
                values[name].append(measure.value)
    return {name: _median(present) for name, present in values.items()}


def _median(values: Iterable[float]) -> float:
    return float(torch.tensor(list(values), dtype=torch.float64).nanquantile(0.5))


def by_measure(collector: Collector) -> dict[str, Tensor]:
    """Return each measure per sequence, (sequences, heads), heads in the order of the records."""
    order = sorted(collector.drafts, key=lambda key: (key[0].layer, key[1]))
    names = dict.fromkeys(name for _, name in collector.windows)
    nothing = torch.full((collector.design.count,), torch.nan, dtype=torch.float64)
    return {
        name: torch.stack(
            [
                values[:, head] if (values := collector.windows.get((site, name))) is not None else nothing
                for site, head in order
            ],
            1,
        )
        for name in names
    }


def windows_of(collector: Collector, settings: Settings, finished: Sequence[int]) -> Windows:
    """Return the values of each head per window; for noise, each input is one window."""
    places = [(text.name, number) for text in settings.texts for number in text.windows]
    if not places and settings.noise is not None:
        places = [(settings.noise.name, number) for number in range(max(finished, default=-1) + 1)]
    heads = [{name: getattr(head, name) for name in HeadId.model_fields} for head in collector.heads()]
    return Windows([places[number] for number in finished if number < len(places)], heads, by_measure(collector))


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


def _texts(collector: Collector, names: Sequence[str], seed: int) -> list[TextSummary]:
    """Compute the medians of each text's own windows; empty for a single text."""
    distinct = list(dict.fromkeys(names))
    windows = by_measure(collector) if len(distinct) > 1 else {}
    summaries = []
    for text in distinct if windows else []:
        rows = [place for place, name in enumerate(names) if name == text]
        values = {name: part[rows] for name, part in windows.items()}
        heads: list[Group] = [range(next(iter(values.values())).shape[1])]
        design = Design.plain(len(rows))
        (errors,) = _errors(values, design, heads, seed)
        summaries.append(
            TextSummary(
                name=text,
                sequences=len(rows),
                medians={
                    name: middle
                    for name, part in values.items()
                    if math.isfinite(middle := _median(part.nanmean(0).tolist()))
                },
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


GATHERED_TOGETHER = 4
"""Sites that gatherers read in one pass through the texts: a pass per site would be slow, and one pass for all sites
would keep the tokens of all."""


@dataclass(frozen=True)
class WorkUnit:
    """Part of an inspection that is read independently of the others."""

    stage: Literal["weights", "tokens", "gathered"]  # what it reads
    sites: tuple[Site, ...]  # its sites
    batch: int | None = None  # its batch; None if it reads weights, or all batches

    @property
    def name(self) -> str:
        """Name that is unique within the run and readable."""
        if self.stage == "tokens":
            return f"tokens of batch {self.batch}"
        layers = f"{self.sites[0].layer}" if len(self.sites) == 1 else f"{self.sites[0].layer}–{self.sites[-1].layer}"
        return f"{self.stage} of layer{'s' * (len(self.sites) > 1)} {layers}"


@dataclass(frozen=True)
class Frame:
    """Everything that a report needs besides the results of the units, known before these are read."""

    reached: Sequence[Reached]  # the requested sites
    content: str
    """Hash of what else determines the results: the model's config, all inputs, the analyzers' code."""
    show: str | None  # what to show
    model: ModelInfo
    settings: Settings
    analyzers: Sequence[Analyzer | Gathering]
    parts: list[str]  # the text of every sequence
    batches: list[int]  # number of sequences per batch
    skipped: list[Skipped]  # what the survey found but can't read
    identity_error: float | None
    from_files: bool  # whether the model was never loaded, and so never run
    weights: bool  # whether weights are read

    @property
    def sites(self) -> list[Site]:
        """Requested sites."""
        return [each.site for each in self.reached]

    @property
    def key_heads(self) -> list[list[int]]:
        """Key head of each query head, per site."""
        return [list(each.call.key_heads) for each in self.reached]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts that determine the results of the units."""
        return {
            "command": "inspect",
            "versions": versions(),
            "model": self.model.model_dump(mode="json", exclude={"id"}),  # a moved folder holds the same model
            "from_files": self.from_files,
            "settings": self.settings.model_dump(mode="json", exclude={"notes"}),  # notes don't affect numbers
            "show": self.show,
            "weights": self.weights,
            "analyzers": [[each.name, each.source] for each in self.analyzers],
            "sites": [asdict(site) for site in self.sites],
            "key_heads": self.key_heads,
            "parts": self.parts,
            "batches": self.batches,
            "content": self.content,
        }

    @cached_property
    def units(self) -> dict[str, WorkUnit]:
        """Units of the run by name, in the order in which they enter the report."""
        sites = self.sites
        units = [WorkUnit("weights", (site,)) for site in sites if self.weights]
        units += [WorkUnit("tokens", tuple(sites), batch) for batch in range(len(self.batches))]
        if self.batches and any(isinstance(each, Gathering) for each in self.analyzers):
            blocks = range(0, len(sites), GATHERED_TOGETHER)
            units += [WorkUnit("gathered", tuple(sites[start : start + GATHERED_TOGETHER])) for start in blocks]
        return {unit.name: unit for unit in units}


def assembled(
    frame: Frame,
    values: Mapping[str, Any],
    timings: Mapping[str, float],
    missing: Mapping[str, str],
    *,
    interrupted: bool = False,
) -> tuple[Report, Collector]:
    """Assemble the report of a run from the values of its units; return it with the collector.

    `missing` units have a reason. The same units give the same report, regardless of reader and order.
    """
    read_from = [f"tokens of batch {batch}" in values for batch in range(len(frame.batches))]
    read_sequences = [read for read, size in zip(read_from, frame.batches, strict=True) for _ in range(size)]
    finished = [number for number, read in enumerate(read_sequences) if read]
    design = Design.of(frame.parts or [""] * sum(frame.batches), frame.settings.intervals)
    collector = Collector(frame.settings.heads, design=design)
    for site, groups in zip(frame.sites, frame.key_heads, strict=True):
        collector.enter(site, groups)
    for each in frame.skipped:
        collector.skip(each.site, each.reason, each.heads, each.measure)
    settings = _replay_units(frame, values, collector, finished, noted=not interrupted)
    for name, reason in missing.items():
        for site in frame.units[name].sites:
            collector.skip(site.name, f"{name}: {reason}")
    if interrupted:
        if len(finished) < len(read_sequences):
            collector.skip(f"{len(read_sequences) - len(finished)} of {len(read_sequences)} sequences", INTERRUPTED)
        unfinished = [unit for name, unit in frame.units.items() if name not in values and unit.stage != "tokens"]
        for path in dict.fromkeys(site.name for unit in unfinished for site in unit.sites):
            collector.skip(path, INTERRUPTED)
    names = [frame.parts[number] for number in finished] if frame.parts else []
    read = frame.weights and any(isinstance(each, Analyzer) and each.source == "weights" for each in frame.analyzers)
    how = conventions(frame.reached, collector.traits) if read else None
    report = report_of(
        "inspect",
        "inspection",
        model=frame.model.model_copy(update={"conventions": how}),
        settings=settings,
        coverage=collector.coverage(dict.fromkeys(each.source for each in frame.analyzers)),
        heads=collector.heads(),
        summary=summarised(collector, names, frame.identity_error, settings.seed, from_files=frame.from_files),
        inspection=InspectionBody(selections=collector.shown, attention=collector.rows),
        timings=dict(timings),
    ).with_windows(windows_of(collector, settings, finished))
    return report, collector


def _replay_units(
    frame: Frame, values: Mapping[str, Any], collector: Collector, finished: Sequence[int], *, noted: bool
) -> Settings:
    """Replay all units in their order; return the settings with the number of sequences read, and notes."""
    for name, unit in frame.units.items():
        if unit.stage != "gathered":
            replay(values.get(name, ()), collector, frame.analyzers)
    if not frame.batches:
        return frame.settings
    collector.close_tokens([each for each in frame.analyzers if isinstance(each, Analyzer)], finished)
    whole = len(finished) == sum(frame.batches)
    for name, unit in frame.units.items():
        if unit.stage == "gathered" and whole:  # gathered values cover every sequence
            replay(values.get(name, ()), collector, frame.analyzers)
    notes = _notes(frame, collector, finished) if noted else []
    update: dict[str, Any] = {"notes": [*frame.settings.notes, *notes]}
    return frame.settings.model_copy(update=update if whole else update | {"windows": len(finished)})


def _notes(frame: Frame, collector: Collector, finished: Sequence[int]) -> list[str]:
    """Return the notes on texts with a higher loss than an even guess."""
    if not collector.losses or any(skip.measure == LOSS for skip in frame.skipped):
        return []
    means = torch.cat([mean for mean, _, _ in collector.losses])
    counts = torch.cat([count for _, count, _ in collector.losses])
    names = [frame.parts[number] for number in finished] if frame.parts else []
    return guess_notes(means, counts, names, collector.losses[0][2])
