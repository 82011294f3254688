"""Measure a model's attention heads from weights and real text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING

import torch

from attnlens.arguments import public
from attnlens.errors import ModelError, TooLargeError
from attnlens.models import loading, texts
from attnlens.models.hooks import SiteCall
from attnlens.records import InspectionBody, Report, Site
from attnlens.requests import InspectRequest, reading, takes
from attnlens.runs import feeding
from attnlens.runs.checks import conventions
from attnlens.runs.in_memory import at_rest, refuse_work, wrap_model
from attnlens.runs.inspect.inspection import Inspection, PreparedRun, WorkUnit
from attnlens.runs.inspect.results import Results
from attnlens.runs.inspect.summary import summarise
from attnlens.runs.inspect.survey import inspect_sites, survey
from attnlens.runs.progress import Interrupted, Progress, silent
from attnlens.runs.provenance import report_of
from attnlens.runs.store import Store
from attnlens.runs.work import NOTHING_KEPT, Compute, Elsewhere, WorkPlan, run_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOO_LARGE = "The weights were read from their files, layer by layer, because the model does not fit into memory."
ALL = "units"
"""Name of the progress over the units of all stages."""


@public
@takes(InspectRequest)
def inspect(
    model: str | PathLike[str] | loading.Loaded | PreTrainedModel = "demo",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
    request: InspectRequest,
) -> Report:
    """Measure symmetry, definiteness and spectrum per head of a model, from its weights and from real text.

    `model` is a hub id, folder, file, `demo`, a result of `load`, or a transformers model in memory with its
    `tokenizer` (without one, only its weights are read), which is not changed. Measures are float64;
    tokens.* have standard errors, weights.* a null. `select` and `show` belong to the analyzer selection: `top-p:0.9`
    selects the tokens that hold this share of the weight. Raise ModelError, TextError, UsageError, IdentityError, and
    Interrupted, which contains the finished part.
    """
    report, clear_work = run_inspect(model, request, tokenizer, progress)
    clear_work()
    return report


def run_inspect(
    model: str | PathLike[str] | loading.Loaded | PreTrainedModel,
    request: InspectRequest,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
) -> tuple[Report, Callable[[], None]]:
    """Return the report, and a function that removes the finished units once it is written, unless a unit failed."""
    plan, named = WorkPlan.of(request), isinstance(model, str | PathLike)
    if named:
        plan.check(request.text)
    else:
        refuse_work(request)
    run = prepare(model, request, tokenizer, progress)
    with at_rest(run.loaded.model):
        inspection = survey(run)
        store = plan.store(inspection.facts) if named else None
        # whether the model fits into memory is decided here, once for all processes
        elsewhere = open_in_worker, (model, request.with_options(from_files=inspection.from_files))
        report, results = compute(inspection, plan, store, elsewhere)
    return report, store.clear if store is not None and not results.missing else lambda: None


def open_in_worker(model: str | PathLike[str], request: InspectRequest) -> tuple[Mapping[str, object], Compute]:
    """Prepare the same run in another process: return its facts, and the function that reads its units."""
    run = prepare(model, request)
    run.loaded.model.train(False)
    inspection = survey(run)
    return inspection.facts, inspection.read_unit


def prepare(
    model: str | PathLike[str] | loading.Loaded | PreTrainedModel,
    request: InspectRequest,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
) -> PreparedRun:
    """Read the texts and load the model; one too large for memory is left in its files if possible."""
    subject = wrap_model(model, tokenizer)
    load_options = feeding.load_options(request, subject)
    adapted = request.adapter is not None or (isinstance(subject, loading.Loaded) and subject.adapter is not None)
    analyzers, settings = reading.choose_analyzers(
        reading.settings(request), request.analyzers, request.select, request.show, adapted=adapted
    )
    reading.refuse_unread(request, settings.source)
    named = texts.read_each(reading.files(request), offline=request.offline)
    start = time.perf_counter()
    try:
        loaded = subject if isinstance(subject, loading.Loaded) else loading.load(subject, **load_options)
    except TooLargeError:
        if settings.source != "weights" or request.adapter is not None or isinstance(subject, loading.Loaded):
            raise
        loaded = loading.load(subject, **load_options | {"from_files": True})
        settings = settings.model_copy(update={"notes": [*settings.notes, TOO_LARGE]})
    timings = {"load": time.perf_counter() - start}
    feeding.refuse_text(loaded, reading.files(request), settings.length)
    settings = feeding.of_model(settings, loaded)
    contents = feeding.contents(named, loaded) if settings.source != "weights" else ()
    cut = feeding.cut_of(settings, request)
    return PreparedRun(loaded, settings, analyzers, contents, cut, progress, timings, request.show)


def compute(
    inspection: Inspection,
    plan: WorkPlan = NOTHING_KEPT,
    store: Store | None = None,
    elsewhere: Elsewhere | None = None,
) -> tuple[Report, Results]:
    """Read the units of an inspection; return the report, and the results that it is made from.

    A unit that fails is replaced by its reason. Raise Interrupted, which contains the finished part, ModelError if no
    head has a value, and what `run_units` raises.
    """
    units = plan.select_units(list(inspection.units))
    sizes = [batch.size for batch in inspection.batches]
    outcome = run_units(
        list(inspection.units),
        inspection.read_unit,
        plan,
        store,
        elsewhere=elsewhere,
        tell=report_stages(inspection.progress, {name: inspection.units[name] for name in units}, sizes),
    )
    results = Results(inspection, outcome.values, outcome.missing, outcome.stopped)
    if not any(head.measures for head in results.heads):
        if outcome.stopped:
            raise KeyboardInterrupt
        reason = results.skipped[0].reason
        raise ModelError(f"No head could be analysed: {reason}.", "Choose another model, source or layers.")
    report = _build_report(results)
    if outcome.stopped:
        raise Interrupted(report)
    return report, results


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
    run: PreparedRun, all_sites: Sequence[SiteCall], sites: Collection[Site], inputs: texts.Batches
) -> Results:
    """Measure some `sites` of a verified model in this process; `inputs` are cut already."""
    reached = [each for each in all_sites if each.site in sites]
    inspection = inspect_sites(run, all_sites, reached, inputs)
    return Results(inspection, {name: inspection.read_unit(name) for name in inspection.units})


def _build_report(results: Results) -> Report:
    """Build the report of a run from its results."""
    inspection, settings = results.inspection, results.inspection.settings
    if not results.interrupted:
        settings = settings.model_copy(update={"notes": [*settings.notes, *_loss_notes(results)]})
    if len(results.finished) < results.total:
        settings = settings.model_copy(update={"windows": len(results.finished)})
    how = conventions(inspection.reached, results.traits) if inspection.analyzers_of("weights") else None
    return report_of(
        "inspect",
        "inspection",
        model=inspection.loaded.info.model_copy(update={"conventions": how}),
        settings=settings,
        coverage=results.count_coverage(),
        heads=results.heads,
        summary=summarise(results),
        inspection=InspectionBody(selections=results.selections, attention=results.attention),
        timings=dict(inspection.timings),
    ).with_windows(results.name_windows())


def _loss_notes(results: Results) -> list[str]:
    """Return notes on texts with a higher loss than an even guess."""
    units = [unit for unit in results.tokens if unit["losses"]]
    if not units or any(entry.measure == feeding.LOSS for entry in results.inspection.skipped):
        return []
    means, counts = (torch.cat(tensors) for tensors in zip(*(unit["losses"] for unit in units), strict=True))
    return feeding.guess_notes(means, counts, results.window_texts, units[0]["vocabulary"])
