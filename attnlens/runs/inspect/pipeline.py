"""Measure a model's attention heads from weights and real text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from attnlens.arguments import public
from attnlens.errors import TooLargeError
from attnlens.models import loading, texts
from attnlens.records import Report, Settings
from attnlens.requests import InspectRequest, reading, takes
from attnlens.runs import feeding
from attnlens.runs.in_memory import at_rest, refuse_work, wrap_model
from attnlens.runs.inspect.assembly import compute
from attnlens.runs.inspect.inspection import PreparedRun, survey
from attnlens.runs.progress import Progress, silent
from attnlens.runs.work import Compute, WorkPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOO_LARGE = "The weights were read from their files, layer by layer, because the model does not fit into memory."


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
    model: object,
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
        outcome = compute(inspection, plan, store, elsewhere)
    return outcome.report, store.clear if store is not None and outcome.complete else lambda: None


def open_in_worker(model: str | PathLike[str], request: InspectRequest) -> tuple[Mapping[str, Any], Compute]:
    """Prepare the same run in another process: return its facts, and the function that reads its units."""
    run = prepare(model, request, None, silent)
    run.loaded.model.train(False)
    inspection = survey(run)
    return inspection.facts, lambda name: inspection.read_unit(inspection.units[name])


def prepare(
    model: object, request: InspectRequest, tokenizer: PreTrainedTokenizerBase | None, progress: Progress
) -> PreparedRun:
    """Read the texts and load the model."""
    subject = wrap_model(model, tokenizer)
    load_options = feeding.load_options(request, subject)
    adapted = request.adapter is not None or (isinstance(subject, loading.Loaded) and subject.adapter is not None)
    chosen, requested = reading.choose_analyzers(
        reading.settings(request), request.analyzers, request.select, request.show, adapted=adapted
    )
    reading.refuse_unread(request, requested.source)
    named = texts.read_each(reading.files(request), offline=request.offline)
    start = time.perf_counter()
    loaded, notes = _load(subject, load_options, requested)
    timings = {"load": time.perf_counter() - start}
    feeding.refuse_text(loaded, reading.files(request), requested.length)
    requested = requested.model_copy(update={"notes": [*requested.notes, *notes]})
    settings = feeding.of_model(requested, loaded)
    contents = feeding.contents(named, loaded) if requested.source != "weights" else ()
    cut = feeding.cut_of(settings, request)
    return PreparedRun(loaded, settings, chosen, contents, cut, progress, timings, request.show)


def _load(subject: Any, load_options: dict[str, Any], settings: Settings) -> tuple[loading.Loaded, list[str]]:
    """Load the model and return notes on it; a model too large for memory is left in its files if possible."""
    if isinstance(subject, loading.Loaded):
        return subject, []
    try:
        return loading.load(subject, **load_options), []
    except TooLargeError:
        if settings.source != "weights" or load_options.get("adapter") is not None:
            raise
        return loading.load(subject, **load_options, from_files=True), [TOO_LARGE]
