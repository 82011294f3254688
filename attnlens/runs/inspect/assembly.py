"""Compute the units of an inspection, and assemble its report from their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnlens.errors import ModelError
from attnlens.maths.statistics import Design
from attnlens.models import texts
from attnlens.models.hooks import SiteCall
from attnlens.records import HeadId, InspectionBody, Report, Settings, Site, Skipped, Windows
from attnlens.runs.checks import conventions
from attnlens.runs.feeding import LOSS, guess_notes
from attnlens.runs.inspect.inspection import Inspection, PreparedRun, WorkUnit, make_reader
from attnlens.runs.inspect.results import Results, combine_units, merge_skipped, skipped_in
from attnlens.runs.inspect.summary import summarise
from attnlens.runs.inspect.units import TokensUnit
from attnlens.runs.progress import INTERRUPTED, Interrupted, Progress
from attnlens.runs.provenance import report_of
from attnlens.runs.store import Store
from attnlens.runs.work import NOTHING_KEPT, Opener, WorkPlan, run_units

ALL = "units"
"""Name of the progress over the units of all stages."""


@dataclass(frozen=True)
class Inspected:
    """Results of an inspection."""

    report: Report
    results: Results
    complete: bool
    """True if every unit has a value."""


def compute(
    inspection: Inspection,
    plan: WorkPlan = NOTHING_KEPT,
    store: Store | None = None,
    elsewhere: tuple[Opener, tuple[Any, ...]] | None = None,
) -> Inspected:
    """Read the units of an inspection, and assemble the report.

    A unit that fails is replaced by its reason. Raise Interrupted, which contains the finished part, ModelError if no
    head has a value, and what `run_units` raises.
    """
    units = inspection.units
    names = list(units)
    mine = names if plan.shard is None else names[plan.shard[0] - 1 :: plan.shard[1]]
    sizes = [batch.size for batch in inspection.batches]
    outcome = run_units(
        names,
        lambda name: inspection.read_unit(units[name]),
        plan,
        store,
        elsewhere=elsewhere,
        tell=report_stages(inspection.reader.progress, {name: units[name] for name in mine}, sizes),
    )
    results = _combine_values(inspection, outcome.values, outcome.missing, interrupted=outcome.stopped)
    if not any(head.measures for head in results.heads):
        if outcome.stopped:
            raise KeyboardInterrupt
        reason = results.skipped[0].reason
        raise ModelError(f"No head could be analysed: {reason}.", "Choose another model, source or layers.")
    report = _assemble_report(inspection, outcome.values, results, interrupted=outcome.stopped)
    if outcome.stopped:
        raise Interrupted(report)
    return Inspected(report, results, complete=not outcome.missing)


def report_stages(progress: Progress, units: Mapping[str, WorkUnit], batches: Sequence[int]) -> Callable[[str], None]:
    """Report progress per stage (sites whose weights are read, sequences, gatherers' passes), and over all units."""
    sizes = {name: 1 if unit.batch is None else batches[unit.batch] for name, unit in units.items()}
    totals: Counter[str] = Counter()
    for name, size in sizes.items():
        totals[units[name].stage] += size
    done: Counter[str] = Counter()
    several = len(totals) > 1

    def tell(name: str) -> None:
        if several:  # first, because plain output prints only one line
            done[ALL] += 1
            progress(ALL, done[ALL], len(units))
        stage = units[name].stage
        done[stage] += sizes[name]
        progress(stage, done[stage], totals[stage])

    for stage in list(totals)[:1]:
        progress(stage, 0, totals[stage])
    if several:
        progress(ALL, 0, len(units))
    return tell


def read_sites(
    run: PreparedRun, all_sites: Sequence[SiteCall], sites: Collection[Site], inputs: texts.Batches, design: Design
) -> Results:
    """Measure some `sites` of a verified model in this process; `inputs` are cut already, with this sampling design."""
    reader = make_reader(run, all_sites)
    key_heads = {each.site: each.call.key_heads for each in all_sites if each.site in sites}
    weights = {site: reader.read_weights(site) for site in key_heads}
    tokens = [reader.read_tokens(inputs, number, list(key_heads)) for number in range(len(inputs.batches))]
    skipped = merge_skipped(skipped_in([*weights.values(), *tokens]))
    heads, analyzers = run.settings.heads, run.analyzers
    return combine_units(key_heads, heads, analyzers, design, weights=weights, tokens=tokens, skipped=skipped)


def _finished_sequences(inspection: Inspection, values: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the sequences whose batches have a value."""
    finished, start = list[int](), 0
    for number, batch in enumerate(inspection.batches):
        if WorkUnit("tokens", (), number).name in values:
            finished += range(start, start + batch.size)
        start += batch.size
    return finished


def _combine_values(
    inspection: Inspection, values: Mapping[str, Any], missing: Mapping[str, str], *, interrupted: bool
) -> Results:
    """Combine the values of the units, by name, into results; `missing` units have a reason."""
    units = {name: unit for name, unit in inspection.units.items() if name in values}
    weights = {unit.sites[0]: values[name] for name, unit in units.items() if unit.stage == "weights"}
    tokens = [values[name] for name, unit in units.items() if unit.stage == "tokens"]
    gathered = [values[name] for name, unit in units.items() if unit.stage == "gathered"]
    finished, total = _finished_sequences(inspection, values), sum(batch.size for batch in inspection.batches)
    skipped = [*inspection.skipped, *skipped_in([*weights.values(), *tokens])]
    for name, reason in missing.items():
        skipped += [Skipped(site=site.name, reason=f"{name}: {reason}") for site in inspection.units[name].sites]
    if interrupted and len(finished) < total:
        skipped.append(Skipped(site=f"{total - len(finished)} of {total} sequences", reason=INTERRUPTED))
    for name, unit in inspection.units.items():
        if interrupted and name not in values and unit.stage != "tokens":
            skipped += [Skipped(site=site.name, reason=INTERRUPTED) for site in unit.sites]
    design = Design.of(inspection.window_texts or [""] * total, inspection.settings.intervals)
    return combine_units(
        inspection.key_heads,
        inspection.settings.heads,
        inspection.reader.analyzers,
        design.select(finished),
        weights=weights,
        tokens=tokens if inspection.batches else None,
        gathered=gathered if len(finished) == total else (),  # their values cover every sequence
        skipped=merge_skipped(skipped),
    )


def _assemble_report(
    inspection: Inspection, values: Mapping[str, Any], results: Results, *, interrupted: bool
) -> Report:
    """Assemble the report of a run from its results. The same units give the same report."""
    finished, analyzers = _finished_sequences(inspection, values), inspection.reader.analyzers
    parts = inspection.window_texts
    names = [parts[number] for number in finished] if parts else []
    settings = inspection.settings
    if not interrupted:
        settings = settings.model_copy(update={"notes": [*settings.notes, *_loss_notes(inspection, values, names)]})
    if len(finished) < sum(batch.size for batch in inspection.batches):
        settings = settings.model_copy(update={"windows": len(finished)})
    reads_weights = bool(inspection.reader.analyzers_of("weights"))
    how = conventions(inspection.reached, results.traits) if reads_weights else None
    return report_of(
        "inspect",
        "inspection",
        model=inspection.loaded.info.model_copy(update={"conventions": how}),
        settings=settings,
        coverage=results.coverage(dict.fromkeys(each.source for each in analyzers)),
        heads=results.heads,
        summary=summarise(results, names, inspection.identity_error, settings.seed, from_files=inspection.from_files),
        inspection=InspectionBody(selections=results.selections, attention=results.attention),
        timings=dict(inspection.timings),
    ).with_windows(_name_windows(results, settings, finished))


def _name_windows(results: Results, settings: Settings, finished: Sequence[int]) -> Windows:
    """Return the values of each head per window; for noise, each input is one window."""
    places = [(text.name, number) for text in settings.texts for number in text.windows]
    if not places and settings.noise is not None:
        places = [(settings.noise.name, number) for number in range(max(finished, default=-1) + 1)]
    heads = [{name: getattr(head, name) for name in HeadId.model_fields} for head in results.heads]
    return Windows([places[number] for number in finished if number < len(places)], heads, results.by_measure)


def _loss_notes(inspection: Inspection, values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return notes on texts with a higher loss than an even guess; `names` has the text of each finished sequence."""
    tokens = [name for name, unit in inspection.units.items() if unit.stage == "tokens" and name in values]
    units: list[TokensUnit] = [values[name] for name in tokens if values[name]["losses"]]
    if not units or any(entry.measure == LOSS for entry in inspection.skipped):
        return []
    means, counts = (torch.cat(tensors) for tensors in zip(*(unit["losses"] for unit in units), strict=True))
    return guess_notes(means, counts, names, units[0]["vocabulary"])
