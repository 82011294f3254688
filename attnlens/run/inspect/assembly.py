"""What is known of an inspection before its units are read, and the report put together from what they found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from attnlens.hooks import Reached
from attnlens.records import ModelInfo, Report, Settings, Site, Skipped
from attnlens.registry import Analyzer, Gathering
from attnlens.run.checks import SeenAttention, conventions
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.sink import replay
from attnlens.run.inspect.summary import summarised, windows_of
from attnlens.run.perplexity import LOSS, guess_notes
from attnlens.run.provenance import report_of, versions
from attnlens.runs.progress import INTERRUPTED
from attnlens.statistics import Design

if TYPE_CHECKING:
    pass


GATHERED_TOGETHER = 4
"""Sites over which gatherers look in one pass through the texts: a pass for each would cost as many, and one for all
would hold the tokens of all."""


@dataclass(frozen=True)
class WorkUnit:
    """A part of an inspection that is read by itself, whatever else is."""

    stage: Literal["weights", "tokens", "gathered"]
    """What it reads."""
    sites: tuple[Site, ...]
    """Of which sites."""
    batch: int | None = None
    """Of which batch; None if it reads weights, or all batches."""

    @property
    def name(self) -> str:
        """What tells it from the others of its run, and people what it is."""
        if self.stage == "tokens":
            return f"tokens of batch {self.batch}"
        layers = f"{self.sites[0].layer}" if len(self.sites) == 1 else f"{self.sites[0].layer}–{self.sites[-1].layer}"
        return f"{self.stage} of layer{'s' * (len(self.sites) > 1)} {layers}"


@dataclass(frozen=True)
class Frame:
    """What is known of an inspection before its units are read: all that a report needs beside them."""

    reached: Sequence[Reached]
    """The sites that were asked for."""
    content: str
    """A hash of what else determines the readings: the model's config, all that is fed, the analyzers' own code."""
    show: str | None
    """What is to be shown."""
    model: ModelInfo
    settings: Settings
    analyzers: Sequence[Analyzer | Gathering]
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

    @property
    def sites(self) -> list[Site]:
        """The sites that were asked for."""
        return [one.site for one in self.reached]

    @property
    def key_heads(self) -> list[list[int]]:
        """The key head of each of their query heads."""
        return [[head // one.call.group for head in range(one.call.query.shape[1])] for one in self.reached]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """All that determines what the units find."""
        return {
            "command": "inspect",
            "versions": versions(),
            "model": self.model.model_dump(mode="json", exclude={"id"}),  # a folder that was moved holds the same model
            "from_files": self.from_files,
            "settings": self.settings.model_dump(mode="json", exclude={"notes"}),  # which say how the run came about
            "show": self.show,
            "weights": self.weights,
            "analyzers": [[one.name, one.source] for one in self.analyzers],
            "sites": [asdict(site) for site in self.sites],
            "key_heads": self.key_heads,
            "parts": self.parts,
            "batches": self.batches,
            "content": self.content,
        }

    @cached_property
    def units(self) -> dict[str, WorkUnit]:
        """The units of the run by name, in the order in which the report takes them in."""
        sites = self.sites
        units = [WorkUnit("weights", (site,)) for site in sites if self.weights]
        units += [WorkUnit("tokens", tuple(sites), batch) for batch in range(len(self.batches))]
        if self.batches and any(isinstance(one, Gathering) for one in self.analyzers):
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
    """Return the report of a run whose units found these values, and the collector that took them in.

    `missing` units have a reason. The same units give the same report, whoever read them and in whatever order.
    """
    finished = _finished(frame, values)
    design = Design.of(frame.parts or [""] * sum(frame.batches), frame.settings.intervals)
    collector = Collector(frame.settings.heads, design=design)
    for site, groups in zip(frame.sites, frame.key_heads, strict=True):
        collector.enter(site, groups)
    for one in frame.skipped:
        collector.skip(one.site, one.reason, one.heads, one.measure)
    settings = _taken_in(frame, values, collector, finished, noted=not interrupted)
    for name, reason in missing.items():
        for site in frame.units[name].sites:
            collector.skip(site.name, f"{name}: {reason}")
    for site in frame.sites if interrupted else ():
        collector.skip(site.name, INTERRUPTED)
    names = [frame.parts[number] for number in finished] if frame.parts else []
    read = frame.weights and any(isinstance(one, Analyzer) and one.source == "weights" for one in frame.analyzers)
    how = conventions(SeenAttention.of(frame.reached), collector.traits) if read else None
    report = report_of(
        "inspect",
        model=frame.model.model_copy(update={"conventions": how}),
        settings=settings,
        coverage=collector.coverage(dict.fromkeys(one.source for one in frame.analyzers)),
        heads=collector.heads(),
        summary=summarised(collector, names, frame.identity_error, settings.seed, from_files=frame.from_files),
        selections=collector.shown,
        attention=collector.rows,
        timings=dict(timings),
    ).with_windows(windows_of(collector, settings, finished))
    return report, collector


def _taken_in(
    frame: Frame, values: Mapping[str, Any], collector: Collector, finished: Sequence[int], *, noted: bool
) -> Settings:
    """Hand all units to the collector, in their order; returns the settings with how much was read, and notes on it."""
    for name, unit in frame.units.items():
        if unit.stage != "gathered":
            replay(values.get(name, ()), collector, frame.analyzers)
    if not frame.batches:
        return frame.settings
    collector.close_tokens([one for one in frame.analyzers if isinstance(one, Analyzer)], finished)
    whole = len(finished) == sum(frame.batches)
    for name, unit in frame.units.items():
        if unit.stage == "gathered" and whole:  # what is gathered has a value of every sequence
            replay(values.get(name, ()), collector, frame.analyzers)
    notes = _notes(frame, collector, finished) if noted else []
    update: dict[str, Any] = {"notes": [*frame.settings.notes, *notes]}
    return frame.settings.model_copy(update=update if whole else update | {"sequences": len(finished)})


def _finished(frame: Frame, values: Mapping[str, object]) -> list[int]:
    """Return the numbers of the sequences whose batches were read."""
    numbers: list[int] = []
    start = 0
    for batch, size in enumerate(frame.batches):
        numbers += range(start, start + size) if f"tokens of batch {batch}" in values else []
        start += size
    return numbers


def _notes(frame: Frame, collector: Collector, finished: Sequence[int]) -> list[str]:
    """Return the sentences on texts that the model guesses worse than evenly."""
    if not collector.losses or any(skip.measure == LOSS for skip in frame.skipped):
        return []
    means = torch.cat([mean for mean, _, _ in collector.losses])
    counts = torch.cat([count for _, count, _ in collector.losses])
    names = [frame.parts[number] for number in finished] if frame.parts else []
    return guess_notes(means, counts, names, collector.losses[0][2])
