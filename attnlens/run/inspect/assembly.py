"""What is known of an inspection before its units are read, and the report put together from what they found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from attnlens.hooks import Reached
from attnlens.models import Loaded
from attnlens.records import ModelInfo, Report, Settings, Site, Skipped
from attnlens.registry import Analyzer, Gathering
from attnlens.run.checks import SeenAttention, conventions
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.sink import replay
from attnlens.run.inspect.summary import summarised, windows_of
from attnlens.run.outcomes.outputs import sequence_losses
from attnlens.run.provenance import report_of, versions
from attnlens.runs.progress import INTERRUPTED
from attnlens.statistics import Design
from attnlens.texts import Batches
from attnlens.texts.targets import NOTHING, feed, logits_of, of_text, task_of

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass
class Guesses:
    """The loss of a causal language model on each sequence that it reads; of any other model nothing."""

    targets: list[Tensor]
    """The next tokens of each batch; empty for any other model."""
    means: list[Tensor] = field(default_factory=list)
    """Mean loss of each sequence read so far."""
    counts: list[Tensor] = field(default_factory=list)
    """How many tokens of it are predicted."""
    vocabulary: int = 0
    """Among how many tokens it guesses."""

    @classmethod
    def of(cls, loaded: Loaded, batches: Batches) -> Guesses:
        """None made so far."""
        causal = loaded.kind == "text" and task_of(loaded.model) == "causal"
        fed = feed(loaded, batches, "causal", 0) if causal else []
        return cls([one.targets for one in fed if one.targets is not None])

    def add(self, number: int, result: Any) -> None:
        """Take in the outputs of batch `number`, sequence by sequence: a second copy of all logits would be large."""
        if not self.targets:
            return
        every = self.targets[number]
        for logits, targets in zip(of_text(logits_of(result), every, sees=True), every, strict=True):
            mean, count = sequence_losses(logits[targets != NOTHING].float(), targets[None])
            self.vocabulary = logits.shape[-1]
            self.means.append(mean)
            self.counts.append(count)

    def notes(self, names: Sequence[str]) -> list[str]:
        """A sentence for each text that is guessed worse than evenly; `names` are those of the sequences."""
        if not self.means:
            return []
        return guess_notes(torch.cat(self.means), torch.cat(self.counts), names, self.vocabulary)


def guess_notes(
    means: Float[Tensor, " sequences"], counts: Float[Tensor, " sequences"], names: Sequence[str], vocabulary: float
) -> list[str]:
    """The same of any losses: those of texts whose mean over tokens is above ln(vocabulary)."""
    even, told = math.log(vocabulary), []
    for name in dict.fromkeys(names):
        own = [place for place, of in enumerate(names) if of == name]
        loss = float((means[own] * counts[own]).sum() / counts[own].sum())
        if loss > even:
            told.append(
                f"The model's loss on {name} is {loss:.2f} nats per token, worse than an even guess (ln {vocabulary} = "
                f"{even:.2f}): the text is foreign to the model, or the model is not trained."
            )
    return told


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
    if not collector.losses:
        return []
    means = torch.cat([mean for mean, _, _ in collector.losses])
    counts = torch.cat([count for _, count, _ in collector.losses])
    names = [frame.parts[number] for number in finished] if frame.parts else []
    return guess_notes(means, counts, names, collector.losses[0][2])
