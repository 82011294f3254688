"""Use a transformers model in memory: keep it in evaluation mode for an analysis, and capture its attention."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel

from attnlens.arguments import format_argument, public
from attnlens.errors import UsageError
from attnlens.models import hooks, loading
from attnlens.models.loading.configs import kind_of
from attnlens.records import ModelInfo, QueryKey
from attnlens.requests.fields import Request
from attnlens.requests.run_options import WorkRequest
from attnlens.runs import checks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from attnlens.models.loading import Loaded


@public
def capture(model: PreTrainedModel | Loaded, batch: Mapping[str, object]) -> list[QueryKey]:
    """Capture softmax(scale · Q Kᵀ + bias + mask) of every site that `batch` reaches, as QueryKeys in layer order.

    `batch` holds tensors under the names of the model's own inputs, as its tokenizer returns them with
    return_tensors="pt". Each QueryKey has the axes (batch, heads, tokens, head_dim), padding included, the name of its
    module (`site.path`) and its layer (`site.layer`); `attention` and the analyzers read it. The model runs without
    dropout and cache and is not changed. The capture is verified first: recomputing attention from it must not
    change the model's outputs. A warning names attention that ran but can't be read; it is missing.
    Raise UsageError; ModelError if the model can't run or has no attention that can be read; IdentityError.
    """
    loaded = held_model(model)
    inputs = tensors(loaded.model, batch)
    with at_rest(loaded.model):
        survey = checks.survey_model(loaded, inputs, made_up=False)
        checks.prove_identity(loaded, inputs)
        missed = [f"{path}, as {reason}" for path, reason in survey.missed.items() if reason is not None]
    if missed:
        others = f"; and {len(missed) - 1} more" if len(missed) > 1 else ""
        warnings.warn(f"Not captured: {missed[0]}{others}.", stacklevel=3)
    return [each.call.query_key(each.site) for each in survey.sites]


def tensors(model: PreTrainedModel, batch: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the tensors of a batch on the model's device. Raise UsageError if it is empty or has other values."""
    if not isinstance(batch, Mapping) or not batch:
        raise UsageError(
            f"batch={format_argument(batch)} contains no inputs.",
            "Pass a dict of the model's inputs, as returned by a tokenizer.",
        )
    inputs = {}
    for name, value in batch.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.is_meta:
            kind = "tensor on the meta device" if isinstance(value, Tensor) and value.is_meta else type(value).__name__
            raise UsageError(
                f"batch[{format_argument(name)}] is a {kind}, not a tensor of values under the name of an input.",
                'Pass names and tensors, e.g. tokenizer(texts, padding=True, return_tensors="pt").',
            )
        inputs[name] = value.to(loading.device_of_inputs(model))
    return inputs


def wrap_model(
    model: str | os.PathLike[str] | Loaded | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> str | os.PathLike[str] | Loaded:
    """Wrap a transformers model with its tokenizer as `load` would return it; return anything else unchanged."""
    if isinstance(model, loading.Loaded | PreTrainedModel):
        weights = model if isinstance(model, PreTrainedModel) else model.model
        if hooks.is_answered(weights):
            raise UsageError(
                f"attnlens already replaces the attention of this {type(weights).__name__} with another kernel.",
                "Leave the `with` block, close the model returned by load_swapped, or pass a model with its original "
                "attention.",
            )
    if not isinstance(model, PreTrainedModel):
        if tokenizer is not None and isinstance(model, loading.Loaded | str | os.PathLike):
            raise UsageError(
                "tokenizer= is only for transformers models in memory: a loaded model already includes its tokenizer.",
                "Omit it, or pass a transformers model in memory.",
            )
        return model
    info = ModelInfo(
        id=f"{model.name_or_path or type(model).__name__} (in memory)",
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    return loading.Loaded(model, tokenizer, "no tokenizer was given" if tokenizer is None else "", info, kind_of(model))


def held_model(model: Loaded | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Loaded:
    """Wrap a model in memory. Raise UsageError for a name or anything else."""
    loaded = wrap_model(model, tokenizer)
    if not isinstance(loaded, loading.Loaded):
        raise UsageError(
            f"{format_argument(model)} is not a model in memory.",
            "Pass a transformers model, or the result of attnlens.load.",
        )
    return loaded


@contextmanager
def at_rest(model: PreTrainedModel) -> Iterator[None]:
    """Keep the model in evaluation mode and without gradients inside the block; then restore each of its parts."""
    training = [module for module in model.modules() if module.training]
    # tensors made in inference mode have no gradient, whatever requires_grad is, and don't allow setting it again
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
    """Raise UsageError if the work of a model in memory is to be kept or distributed: no file identifies the model."""
    fields = type(request).model_fields
    for name in WorkRequest.model_fields:
        if name in fields and getattr(request, name) != fields[name].default:
            raise UsageError(
                f"The model is in memory, which other processes cannot access: {name} would be ignored.",
                "Pass its name or folder, or omit the option.",
            )
