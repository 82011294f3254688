"""Puts a report together from what its units of work found, without the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from attnlens import registry
from attnlens.errors import UsageError
from attnlens.hooks import Reached
from attnlens.records import ModelInfo, Report, Settings, ShardPart, Site, Skipped
from attnlens.run.checks import SeenAttention, conventions
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.sink import Handed, replay
from attnlens.run.inspect.summary import summarised, windows_of
from attnlens.run.inspect.units import WorkUnit, units_of
from attnlens.run.perplexity import LOSS, guess_notes
from attnlens.run.progress import INTERRUPTED
from attnlens.run.provenance import report_of
from attnlens.statistics import Design
from attnlens.unit_files import key_of as hashed


class Frame(BaseModel):
    """What is known of an inspection before its units are read: all that a report needs beside them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: dict[str, str]
    """Of the program, torch and transformers."""
    content: str
    """A hash of what else determines the readings: the model's config, all that is fed, the analyzers' own code."""
    show: str | None
    """What is to be shown."""
    model: ModelInfo
    settings: Settings
    analyzers: list[tuple[str, str]]
    """Name and source of each."""
    sites: list[dict[str, Any]]
    """The sites that were asked for."""
    key_heads: list[list[int]]
    """The key head of each of their query heads."""
    parts: list[str]
    """The text of every sequence."""
    batches: list[int]
    """How many sequences each batch has."""
    skipped: list[Skipped]
    """What the survey found that is not read."""
    identity_error: float | None
    from_files: bool
    """Whether the model was never loaded, so that it was not run either."""
    weights: bool
    """Whether weights are read."""
    seen: SeenAttention
    """What the survey saw of the model's attention."""

    @classmethod
    def of(cls, reached: Sequence[Reached], **found: Any) -> Frame:
        """The frame of a run over these sites."""
        groups = [[h // one.call.group for h in range(one.call.query.shape[1])] for one in reached]
        return cls(
            sites=[asdict(one.site) for one in reached], key_heads=groups, seen=SeenAttention.of(reached), **found
        )

    @property
    def key(self) -> str:
        """What names the run: a hash of all that determines what its units find."""
        facts = self.model_dump(mode="json", exclude={"identity_error", "skipped", "seen"})
        facts["model"].pop("id")  # a folder that was moved holds the same model
        facts["settings"].pop("notes")  # they say how the run came about
        return hashed(facts)

    @property
    def sound(self) -> bool:
        """Whether its sites are sites, and each sequence has its text: one that is read from a file may lie."""
        names = {one.name for one in fields(Site)}
        sequences = sum(self.batches)
        return (
            all(names == site.keys() for site in self.sites)
            and len(self.sites) == len(self.key_heads)
            and min(self.batches, default=1) > 0
            and (len(self.parts) or sequences) == sequences
        )

    @property
    def chosen(self) -> list[Site]:
        """The sites that were asked for."""
        return [Site(**site) for site in self.sites]

    @property
    def units(self) -> list[WorkUnit]:
        """The units of the run, in the order in which the report takes them in."""
        gathering = any(isinstance(one, registry.Gathering) for one in self.used)
        return units_of(self.chosen, len(self.batches), weights=self.weights, gathering=gathering)

    @property
    def used(self) -> list[registry.Analyzer | registry.Gathering]:
        """The analyzers."""
        known = {(one.name, one.source): one for one in registry.every_analyzer()}
        if lost := [name for name, source in self.analyzers if (name, source) not in known]:
            raise UsageError(f"The analyzer {lost[0]} is not installed here.", "Install the package that offers it.")
        return [known[name, source] for name, source in self.analyzers if (name, source) in known]  # type: ignore[index]


def collector_of(frame: Frame) -> Collector:
    """A collector that has taken in nothing yet but the sites, and what the survey skipped."""
    design = Design.of(frame.parts or [""] * sum(frame.batches), frame.settings.intervals)
    collector = Collector(frame.settings.heads, design=design)
    for site, groups in zip(frame.chosen, frame.key_heads, strict=True):
        collector.enter(site, groups)
    for one in frame.skipped:
        collector.skip(one.site, one.reason, one.heads, one.measure)
    return collector


def assembled(
    frame: Frame,
    found: Mapping[WorkUnit, Sequence[Handed]],
    timings: Mapping[str, float],
    *,
    analyzers: Sequence[registry.Analyzer | registry.Gathering] | None = None,
    missing: Mapping[WorkUnit, str] | None = None,
    interrupted: bool = False,
    part: ShardPart | None = None,
) -> tuple[Report, Collector]:
    """The report of a run whose units found this, and the collector that took it in.

    `missing` units have a reason. The same units give the same report, whoever read them and in whatever order.
    `analyzers` stand for those of the frame where they are no registered ones.
    """
    used, finished = frame.used if analyzers is None else list(analyzers), _finished(frame, found)
    collector = collector_of(frame)
    settings = _taken_in(frame, found, collector, used, finished, told=not interrupted)
    for unit, reason in (missing or {}).items():
        for site in unit.sites:
            collector.skip(site.name, f"{unit.name}: {reason}")
    for site in frame.chosen if interrupted else ():
        collector.skip(site.name, INTERRUPTED)
    names = [frame.parts[number] for number in finished] if frame.parts else []
    read = any(isinstance(one, registry.Analyzer) and one.source == "weights" for one in used)
    how = conventions(frame.seen, collector.traits) if read and frame.weights else None
    report = report_of(
        "inspect",
        model=frame.model.model_copy(update={"conventions": how}),
        settings=settings,
        coverage=collector.coverage(dict.fromkeys(one.source for one in used)),
        heads=collector.heads(),
        summary=summarised(collector, names, frame.identity_error, settings.seed, from_files=frame.from_files),
        selections=collector.shown,
        attention=collector.rows,
        timings=dict(timings),
        part=part,
    ).with_windows(windows_of(collector, settings, finished))
    return report, collector


def _taken_in(
    frame: Frame,
    found: Mapping[WorkUnit, Sequence[Handed]],
    collector: Collector,
    used: Sequence[registry.Analyzer | registry.Gathering],
    finished: Sequence[int],
    *,
    told: bool,
) -> Settings:
    """Hand all units to the collector, in their order; returns the settings with how much was read, and notes on it."""
    for unit in frame.units:
        if unit.stage != "gathered":
            replay(found.get(unit, ()), collector)
    if not frame.batches:
        return frame.settings
    collector.close_tokens([one for one in used if isinstance(one, registry.Analyzer)], finished)
    whole = len(finished) == sum(frame.batches)
    for unit in frame.units:
        if unit.stage == "gathered" and whole:  # what is gathered has a value of every sequence
            replay(found.get(unit, ()), collector)
    notes = _notes(frame, collector, finished) if told else []
    update: dict[str, Any] = {"notes": [*frame.settings.notes, *notes]}
    return frame.settings.model_copy(update=update if whole else update | {"sequences": len(finished)})


def _finished(frame: Frame, found: Mapping[WorkUnit, object]) -> list[int]:
    """The numbers of the sequences whose batches were read."""
    numbers: list[int] = []
    start = 0
    done = {unit.batch for unit in found if unit.stage == "tokens"}
    for batch, size in enumerate(frame.batches):
        numbers += range(start, start + size) if batch in done else []
        start += size
    return numbers


def _notes(frame: Frame, collector: Collector, finished: Sequence[int]) -> list[str]:
    """The sentences on texts that the model guesses worse than evenly."""
    if not collector.losses or any(skip.measure == LOSS for skip in frame.skipped):
        return []
    means = torch.cat([mean for mean, _, _ in collector.losses])
    counts = torch.cat([count for _, count, _ in collector.losses])
    names = [frame.parts[number] for number in finished] if frame.parts else []
    return guess_notes(means, counts, names, collector.losses[0][2])
