"""Describe an inspection before its units are read, and assemble the report from their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from attnlens.maths.statistics import Design
from attnlens.models.hooks import Reached
from attnlens.records import HeadId, ModelInfo, Report, Settings, Site, Skipped, Windows
from attnlens.registry import Analyzer, Gathering
from attnlens.runs.checks import conventions
from attnlens.runs.feeding import LOSS, guess_notes
from attnlens.runs.inspect.results import Results, combine_units, merge_skipped, skipped_in
from attnlens.runs.inspect.summary import summarise
from attnlens.runs.inspect.units import TokensUnit
from attnlens.runs.progress import INTERRUPTED
from attnlens.runs.provenance import report_of
from attnlens.runs.store import versions

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
class RunDescription:
    """Everything that a report needs besides the values of the units, known before these are read."""

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

    def finished_sequences(self, values: Mapping[str, Any]) -> list[int]:
        """Return the numbers of the sequences whose batches have a value."""
        finished, start = list[int](), 0
        for batch, size in enumerate(self.batches):
            if WorkUnit("tokens", (), batch).name in values:
                finished += range(start, start + size)
            start += size
        return finished


def combine_values(
    run: RunDescription, values: Mapping[str, Any], missing: Mapping[str, str], *, interrupted: bool = False
) -> Results:
    """Combine the values of a run's units, by name, into results; `missing` units have a reason."""
    finished = run.finished_sequences(values)
    units = {name: unit for name, unit in run.units.items() if name in values}
    weights = {unit.sites[0]: values[name] for name, unit in units.items() if unit.stage == "weights"}
    tokens = [values[name] for name, unit in units.items() if unit.stage == "tokens"]
    gathered = [values[name] for name, unit in units.items() if unit.stage == "gathered"]
    skipped = [*run.skipped, *skipped_in([*weights.values(), *tokens])]
    for name, reason in missing.items():
        skipped += [Skipped(site=site.name, reason=f"{name}: {reason}") for site in run.units[name].sites]
    if interrupted:
        total = sum(run.batches)
        if len(finished) < total:
            skipped.append(Skipped(site=f"{total - len(finished)} of {total} sequences", reason=INTERRUPTED))
        for name, unit in run.units.items():
            if name not in values and unit.stage != "tokens":
                skipped += [Skipped(site=site.name, reason=INTERRUPTED) for site in unit.sites]
    design = Design.of(run.parts or [""] * sum(run.batches), run.settings.intervals)
    return combine_units(
        dict(zip(run.sites, run.key_heads, strict=True)),
        run.settings.heads,
        run.analyzers,
        design.select(finished) if run.batches else design,
        weights=weights,
        tokens=tokens if run.batches else None,
        gathered=gathered if len(finished) == sum(run.batches) else (),  # their values cover every sequence
        skipped=merge_skipped(skipped),
    )


def assemble_report(
    run: RunDescription,
    values: Mapping[str, Any],
    results: Results,
    timings: Mapping[str, float],
    *,
    interrupted: bool = False,
) -> Report:
    """Assemble the report of a run from its results. The same units give the same report."""
    finished = run.finished_sequences(values)
    notes = [] if interrupted else _loss_notes(run, values, finished)
    settings = run.settings.model_copy(update={"notes": [*run.settings.notes, *notes]})
    if len(finished) < sum(run.batches):
        settings = settings.model_copy(update={"sequences": len(finished)})
    names = [run.parts[number] for number in finished] if run.parts else []
    reads_weights = any(isinstance(each, Analyzer) and each.source == "weights" for each in run.analyzers)
    how = conventions(run.reached, results.traits) if run.weights and reads_weights else None
    return report_of(
        "inspect",
        model=run.model.model_copy(update={"conventions": how}),
        settings=settings,
        coverage=results.coverage(dict.fromkeys(each.source for each in run.analyzers)),
        heads=results.heads,
        summary=summarise(results, names, run.identity_error, settings.seed, from_files=run.from_files),
        selections=results.selections,
        attention=results.attention,
        timings=dict(timings),
    ).with_windows(_name_windows(results, settings, finished))


def _name_windows(results: Results, settings: Settings, finished: Sequence[int]) -> Windows:
    """Return the values of each head per window; for noise, each input is one window."""
    places = [(text.name, number) for text in settings.texts for number in text.windows]
    if not places and settings.noise is not None:
        places = [(settings.noise.name, number) for number in range(max(finished, default=-1) + 1)]
    heads = [{name: getattr(head, name) for name in HeadId.model_fields} for head in results.heads]
    return Windows([places[number] for number in finished if number < len(places)], heads, results.by_measure)


def _loss_notes(run: RunDescription, values: Mapping[str, Any], finished: Sequence[int]) -> list[str]:
    """Return the notes on texts with a higher loss than an even guess."""
    units: list[TokensUnit] = [
        values[name] for name, unit in run.units.items() if unit.stage == "tokens" and name in values
    ]
    units = [unit for unit in units if unit["losses"]]
    if not units or any(entry.measure == LOSS for entry in run.skipped):
        return []
    means, counts = (torch.cat(parts) for parts in zip(*(unit["losses"] for unit in units), strict=True))
    names = [run.parts[number] for number in finished] if run.parts else []
    return guess_notes(means, counts, names, units[0]["vocabulary"])
