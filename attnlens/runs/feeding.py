"""Convert options to settings, texts and windows for a model; wrap models and batches that are already in memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from attnlens.arguments import format_argument
from attnlens.errors import ModelError, UsageError
from attnlens.maths.statistics import Design
from attnlens.maths.statistics.design import FEWEST_TEXTS
from attnlens.models import hooks, loading, texts
from attnlens.models.hooks import SiteCall
from attnlens.models.loading import Loaded
from attnlens.models.loading.configs import kind_of
from attnlens.models.texts import Batches
from attnlens.models.texts.targets import NOTHING, feed, logits_of, of_text, task_of
from attnlens.records import ModelInfo, Settings, Text
from attnlens.requests import Feeding, InspectRequest, Loading, SpreadRequest
from attnlens.requests.fields import Request
from attnlens.requests.run_options import WorkRequest
from attnlens.runs.outputs import sequence_losses

if TYPE_CHECKING:
    from jaxtyping import Float
    from transformers import PreTrainedTokenizerBase


LOSS = "loss"  # name of the loss in a report's list of skipped measures


def predicts_text(loaded: Loaded) -> bool:
    """Return True if the model predicts the next token of a text."""
    return loaded.kind == "text" and task_of(loaded.model) == "causal"


def measure_losses(loaded: Loaded, batches: Batches, result: ModelOutput) -> tuple[list[Tensor], int]:
    """Return [mean losses, numbers of predicted tokens], each with one value per sequence, and the vocabulary size.

    Sequences without predicted tokens are omitted. Return ([], 0) if the model does not predict the next token.
    """
    fed = feed(loaded, batches, "causal", 0) if predicts_text(loaded) else []
    if not fed or fed[0].targets is None:
        return [], 0
    logits = of_text(logits_of(result), fed[0].targets, sees=True)
    parts = [  # sequence by sequence: a second copy of all logits would be large
        sequence_losses(row[targets != NOTHING].float(), targets[None])
        for row, targets in zip(logits, fed[0].targets, strict=True)
    ]
    return [torch.cat(column) for column in zip(*parts, strict=True)], logits.shape[-1]


def describe_guessing(
    means: Float[Tensor, " sequences"], counts: Float[Tensor, " sequences"], names: Sequence[str], vocabulary: float
) -> list[str]:
    """Return a note for each text on which the model's mean loss exceeds the loss of random guessing.

    `means` and `counts` are each sequence's mean loss and number of predicted tokens, `names` its text's name.
    """
    guess, notes = math.log(vocabulary), list[str]()
    for name in dict.fromkeys(names):
        rows = [row for row, text in enumerate(names) if text == name]
        loss = float((means[rows] * counts[rows]).sum() / counts[rows].sum())
        if loss > guess:
            guessing = f"worse than random guessing (ln {vocabulary} = {guess:.2f})"
            reason = "the text does not suit the model, or the model is untrained"
            notes.append(f"The model's loss on {name} is {loss:.2f} nats per token, {guessing}: {reason}.")
    return notes


def recorded_options(settings: Settings) -> dict[str, object]:
    """Return the options of `inspect` that a report records, except the text and the options of `load`."""
    names = sorted(InspectRequest.model_fields.keys() & Settings.model_fields.keys() - LOADED - {"text"})
    options = {name: getattr(settings, name) for name in names}
    options["windows"] = settings.windows_requested or settings.windows
    return {name: value for name, value in options.items() if value is not None}


LOADED = {*Loading.model_fields, *SpreadRequest.model_fields}  # names of the options of `load`


def load_options(request: Loading, model: object) -> dict[str, Any]:
    """Return the options of `load` that the request sets explicitly.

    If `model` is already loaded, raise UsageError for such options, and ModelError if weights are on the meta device.
    """
    options = {name: value for name, value in request.explicit().items() if name in LOADED}
    if not isinstance(model, Loaded):
        return options
    if model.shapes is None and any(weight.is_meta for weight in model.model.parameters()):
        raise ModelError("The model is on the meta device and has no weights.", "Load the model on the CPU or a GPU.")
    if options:
        names = ", ".join(options)
        raise UsageError(f"The model is already loaded, so {names} would be ignored.", f"Pass {names} to load().")
    return {}


def add_model_settings(settings: Settings, loaded: Loaded) -> Settings:
    """Add a model's device, dtype, notes and window length to settings; raise UsageError for an invalid length."""
    device, dtype = loading.format_devices(loaded.model), str(loaded.dtype).removeprefix("torch.")
    length = texts.window_length(loaded.model, settings.length)
    notes = [*settings.notes, *loaded.notes]
    return settings.model_copy(update={"device": device, "dtype": dtype, "length": length, "notes": notes})


def build_cut(settings: Settings, request: Feeding) -> texts.Cut:
    """Build the parameters for cutting texts into sequences."""
    return texts.Cut(
        tokens=settings.length,
        sequences=settings.windows or 1,
        batch_size=request.batch_size,
        pack=settings.pack is not False,
        placement=settings.placement or "spread",
        seed=settings.seed,
        pairs=request.pairs is not None,
        image=request.image,
        audio=request.audio,
        allow_foreign=request.allow_foreign_text,
    )


def build_design(requested: Settings, inputs: texts.Batches) -> Design:
    """Return the sampling design of the sequences. Raise UsageError if intervals over too few texts are requested."""
    names = inputs.parts or ("",) * inputs.sequences
    count = len(set(names))
    if requested.intervals == "texts" and count < FEWEST_TEXTS:
        more = "--windows" if count + len(inputs.left_out) >= FEWEST_TEXTS else "the number of texts"
        problem = f"Intervals over texts need at least {FEWEST_TEXTS} texts, but the sequences come from only {count}."
        raise UsageError(problem, f"Increase {more}, or omit intervals='texts'.")
    return Design.of(names, requested.intervals)


def describe_input(requested: Settings, inputs: texts.Batches, loaded: Loaded) -> Settings:
    """Return the settings with a description of the input: texts, windows and intervals, or noise."""
    text, windows = Text.of(inputs.texts), {"windows": inputs.sequences}
    if inputs.tokens:
        update = {
            "text": text,
            "texts": list(inputs.texts),
            "windows_requested": requested.windows if inputs.sequences < (requested.windows or 0) else None,
            "intervals": build_design(requested, inputs).over,
            "notes": [*requested.notes, *_window_notes(requested, inputs, loaded)],
        }
        return requested.model_copy(update=windows | update)
    update = {"pack": None, "placement": None, "intervals": None, "notes": [*requested.notes, *inputs.notes]}
    named = {"noise": text} if inputs.made_up else {"text": text, "texts": list(inputs.texts), "length": None}
    return requested.model_copy(update=windows | update | named)


def _window_notes(requested: Settings, inputs: texts.Batches, loaded: Loaded) -> Iterator[str]:
    """Yield the report's notes on windows and texts."""
    yield from inputs.notes
    yield from texts.foreign_notes(inputs.unknown)
    noun = "lines" if requested.pack is False else "windows"
    if inputs.left_out:
        left_out, count = ", ".join(inputs.left_out), len(set(inputs.parts)) + len(inputs.left_out)
        yield f"Left out: {left_out}, because there are only {inputs.sequences} {noun} for {count} texts."
    if requested.placement == "first":
        yield f"The {noun} are the first of each text, so standard errors do not cover the rest of the texts."
    repeated = texts.repeated_share(loaded.tokenizer, inputs.ids)
    if repeated > texts.MOST_SHARED:
        runs = f"{repeated:.0%} of the tokens are in runs of {texts.RUN} tokens that occur in several {noun}"
        yield f"{runs}, so standard errors are too small."


def record_length(settings: Settings, loaded: Loaded, site_calls: Sequence[SiteCall]) -> Settings:
    """Return the settings with, for noise input, the largest number of queries at any site as `length`."""
    if texts.reads_text(loaded) or settings.noise is None:
        return settings
    return settings.model_copy(update={"length": max(each.call.query.shape[2] for each in site_calls)})


def refuse_text(loaded: Loaded, text: Sequence[str], tokens: int | None) -> None:
    """Raise UsageError if a text, or a length in tokens, is given for a model that does not read text."""
    if texts.reads_text(loaded) or (not text and tokens is None):
        return
    inputs = {"pixels": "pixels", "audio": "sound"}.get(loaded.kind, " and ".join(texts.required_inputs(loaded.model)))
    problem = f"{loaded.info.id} takes {inputs} but no text, so --text, --calibration and --length would be ignored."
    raise UsageError(problem, "Leave out --text, --calibration and --length.")


def convert_batch(model: PreTrainedModel, batch: Mapping[str, object]) -> dict[str, Tensor]:
    """Move a batch to the model's device. Raise UsageError unless the batch maps names to tensors with values."""
    remedy = 'Pass the output of a tokenizer, e.g. tokenizer(texts, padding=True, return_tensors="pt").'
    if not isinstance(batch, Mapping) or not batch:
        raise UsageError(f"batch={format_argument(batch)} contains no inputs.", remedy)
    inputs = {}
    for name, value in batch.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.is_meta:
            kind = "Tensor on the meta device" if isinstance(value, Tensor) and value.is_meta else type(value).__name__
            problem = (
                f"batch[{format_argument(name)}] has type {kind}; a batch maps input names to tensors with values."
            )
            raise UsageError(problem, remedy)
        inputs[name] = value.to(loading.device_of_inputs(model))
    return inputs


def wrap_model(
    model: str | os.PathLike[str] | Loaded | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> str | os.PathLike[str] | Loaded:
    """Wrap a transformers model and its tokenizer as a Loaded; return names and loaded models unchanged.

    Raise UsageError if another kernel already replaces the model's attention, or if a tokenizer is passed with a name
    or a loaded model.
    """
    if isinstance(model, Loaded | PreTrainedModel):
        weights = model if isinstance(model, PreTrainedModel) else model.model
        if hooks.is_answered(weights):
            problem = f"attnlens already replaces the attention of this {type(weights).__name__} with another kernel."
            raise UsageError(problem, "Leave the `with` block, or close the model returned by load_swapped.")
    if not isinstance(model, PreTrainedModel):
        if tokenizer is not None and isinstance(model, Loaded | str | os.PathLike):
            raise UsageError(
                "tokenizer= is only for transformers models in memory.", "Omit tokenizer=, or pass a model object."
            )
        return model
    info = ModelInfo(
        id=f"{model.name_or_path or type(model).__name__} (in memory)",
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    return Loaded(model, tokenizer, "no tokenizer was given" if tokenizer is None else "", info, kind_of(model))


def require_model(model: Loaded | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Loaded:
    """Wrap a model in memory. Raise UsageError for anything else, such as a model's name."""
    loaded = wrap_model(model, tokenizer)
    if not isinstance(loaded, Loaded):
        remedy = "Pass a transformers model, or the result of attnlens.load."
        raise UsageError(f"{format_argument(model)} is not a model in memory.", remedy)
    return loaded


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: put the model in evaluation mode without gradients; restore both settings at the end."""
    training = [module for module in model.modules() if module.training]
    # tensors created in inference mode never have a gradient, and don't allow setting requires_grad
    learning = [each for each in model.parameters() if each.requires_grad and not each.is_inference()]
    try:
        model.train(False)
        for parameter in learning:
            parameter.requires_grad_(False)
        yield
    finally:
        for module in training:
            module.training = True
        for parameter in learning:
            parameter.requires_grad_(True)


def refuse_work(request: Request) -> None:
    """Raise UsageError for options that store or distribute work, which a model in memory does not support."""
    fields = type(request).model_fields
    for name in WorkRequest.model_fields:
        if name in fields and getattr(request, name) != fields[name].default:
            raise UsageError(
                f"`{name}` is unavailable for a model in memory.", f"Omit `{name}`, or pass a model's name."
            )
