"""Measures a model's attention heads on weights and real text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from attnlens import models, requests, texts
from attnlens.arguments import public
from attnlens.records import Report
from attnlens.requests import InspectRequest, reading
from attnlens.run import feeding
from attnlens.run.in_memory import at_rest, held
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.survey import Inspection
from attnlens.run.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    inspection, contents, cut = prepared(model, tokenizer, progress, more)
    with at_rest(inspection.loaded.model):
        return inspection.run(contents, cut)


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
    named = texts.read_each(reading.files(given))
    start = time.perf_counter()
    loaded = subject if isinstance(subject, models.Loaded) else models.load(subject, **loading)
    timings = {"load": time.perf_counter() - start}
    feeding.refuse_text(loaded, reading.files(given), asked.tokens)
    settings, told = feeding.of_model(asked, loaded), (Collector(asked.heads), progress, timings)
    contents = feeding.contents(named, loaded) if asked.source != "weights" else ()
    inspection = Inspection(loaded, settings, chosen, *told, show=given["show"])
    return inspection, contents, feeding.cut_of(settings, given)
