"""Measures a model's attention heads on weights and real text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from attnlens import models, requests, texts
from attnlens.arguments import public
from attnlens.errors import TooLargeError
from attnlens.records import Report, Settings
from attnlens.requests import InspectRequest, reading
from attnlens.run import feeding
from attnlens.run.in_memory import at_rest, held, refuse_work
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.survey import Inspection
from attnlens.runs.progress import Progress, silent
from attnlens.runs.work import Compute, WorkPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOO_LARGE = "The weights were read from their files, layer by layer, as the model does not fit into memory here."


@public
def inspect(
    model: str | PathLike[str] | models.Loaded | PreTrainedModel = "demo",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
    **more: Unpack[InspectRequest],
) -> Report:
    """Per-head symmetry, definiteness and spectrum of a model, from its weights and from real text.

    `model` is a hub id, folder, file, `demo`, what `load` gave, or a transformers model in memory with its `tokenizer`
    (without one its weights alone are read), which stays as it is. `more` are the options of `InspectRequest`: the
    text, how its windows are sampled, what intervals are over, and those of `load`. Measures are float64; tokens.*
    carry standard errors, weights.* a null. `select` and `show` are the analyzer selection's: `top-p:0.9` takes as
    selected what holds that share of the weight. Raises ModelError, TextError, UsageError, IdentityError, and
    Interrupted, which carries what was finished.
    """
    report, written = inspected(model, tokenizer, progress, more)
    written()
    return report


def inspected(
    model: object, tokenizer: PreTrainedTokenizerBase | None, progress: Progress, more: Mapping[str, Any]
) -> tuple[Report, Callable[[], None]]:
    """The report, and what removes the finished units once it is written; they stay if a unit failed."""
    given = requests.checked(InspectRequest, more)
    plan, named = WorkPlan.of(given), isinstance(model, str | PathLike)
    if named:
        plan.check(given["text"])
    else:
        refuse_work(given, InspectRequest)
    inspection, contents, cut = prepared(model, tokenizer, progress, more)
    with at_rest(inspection.loaded.model):
        frame = inspection.framed(contents, cut)
        store = plan.store(frame.facts) if named else None
        # whether the model fits into memory is decided here, once for all processes
        elsewhere = opened, (model, {**given, "from_files": frame.from_files})
        report = inspection.finished_from(frame, plan, store, elsewhere)
    return report, store.clear if store is not None and inspection.complete else lambda: None


def opened(model: str | PathLike[str], given: Mapping[str, Any]) -> tuple[Mapping[str, Any], Compute]:
    """Prepare the same run in another process: its facts, and what reads its units."""
    inspection, contents, cut = prepared(model, None, silent, given)
    inspection.loaded.model.train(False)
    frame = inspection.framed(contents, cut)
    return frame.facts, lambda name: inspection.read_unit(frame.units[name])


def prepared(
    model: object, tokenizer: PreTrainedTokenizerBase | None, progress: Progress, more: Mapping[str, Any]
) -> tuple[Inspection, Sequence[texts.Content], texts.Cut]:
    """The run that was asked for, with its model loaded; its texts, and how they are to be cut."""
    given = requests.checked(InspectRequest, more)
    subject = held(model, tokenizer)
    loading = feeding.loading_of(more, subject)
    adapted = given["adapter"] is not None or (isinstance(subject, models.Loaded) and subject.adapter is not None)
    chosen, asked = reading.chosen(
        reading.settings(given), given["analyzers"], given["select"], given["show"], adapted=adapted
    )
    reading.refuse_unread(given, asked.source)
    named = texts.read_each(reading.files(given), offline=given["offline"])
    start = time.perf_counter()
    loaded, notes = _loaded(subject, loading, asked)
    timings = {"load": time.perf_counter() - start}
    feeding.refuse_text(loaded, reading.files(given), asked.tokens)
    asked = asked.model_copy(update={"notes": [*asked.notes, *notes]})
    settings, told = feeding.of_model(asked, loaded), (Collector(asked.heads), progress, timings)
    contents = feeding.contents(named, loaded) if asked.source != "weights" else ()
    inspection = Inspection(loaded, settings, chosen, *told, show=given["show"])
    return inspection, contents, feeding.cut_of(settings, given)


def _loaded(subject: Any, loading: models.Loading, asked: Settings) -> tuple[models.Loaded, list[str]]:
    """The model, and what a reader must know of how it was loaded: one too large for memory is left in its files."""
    if isinstance(subject, models.Loaded):
        return subject, []
    try:
        return models.load(subject, **loading), []
    except TooLargeError:
        if asked.source != "weights" or loading.get("adapter") is not None:
            raise
        return models.load(subject, **loading, from_files=True), [TOO_LARGE]
