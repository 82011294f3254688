"""Takes a transformers model that is in memory, lets it rest while it is looked at, captures its attention."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from attnlens import requests
from attnlens.arguments import public, shown
from attnlens.errors import UsageError
from attnlens.models import hooks, loading
from attnlens.models.loading.configs import kind_of
from attnlens.records import ModelInfo, QueryKey
from attnlens.requests.run_options import WorkRequest
from attnlens.runs import checks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from attnlens.models.loading import Loaded


@public
def capture(model: PreTrainedModel | Loaded, batch: Mapping[str, Any]) -> list[QueryKey]:
    """softmax(scale · Q Kᵀ + bias + mask) of every site that `batch` reaches, as its QueryKey, in the order of layers.

    `batch` holds tensors under the names of the model's own inputs, as its tokenizer gives them with
    return_tensors="pt". Each QueryKey has the axes (batch, heads, tokens, head_dim), padding included, the name of its
    module (`site.path`) and its layer (`site.layer`); `attention` and the analyzers read it. The model runs without
    dropout and cache and stays as it is. What is captured is proven first: recomputing attention from it must not
    change the model's outputs. A warning names attention that ran and can't be read, which is missing.
    Raises UsageError, ModelError where the model can't run or has no attention within reach, IdentityError.
    """
    loaded = held_model(model)
    inputs = tensors(loaded.model, batch)
    with at_rest(loaded.model):
        survey = checks.surveyed(loaded, inputs, made_up=False)
        checks.proven(loaded, inputs)
        outside = [f"{path}, as {why}" for path, why in survey.missed.items() if why is not None]
    if outside:
        more = f"; and {len(outside) - 1} more" if len(outside) > 1 else ""
        warnings.warn(f"Not captured: {outside[0]}{more}.", stacklevel=3)
    return [found.call.query_key(found.site) for found in survey.reached]


def tensors(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a batch on the model's device. Raises UsageError where it holds anything else, or nothing."""
    if not isinstance(batch, Mapping) or not batch:
        raise UsageError(
            f"batch={shown(batch)} holds no inputs.", "Give the model's inputs by name, as a tokenizer returns them."
        )
    for name, value in batch.items():
        if not isinstance(name, str):
            raise UsageError(f"batch has {shown(name)} in the place of a name.", "Give the model's inputs by name.")
        if not isinstance(value, Tensor):
            raise UsageError(
                f"batch[{name!r}] is a {type(value).__name__} and no tensor.",
                'Give tensors, as in tokenizer(texts, padding=True, return_tensors="pt").',
            )
        if value.is_meta:
            raise UsageError(f"batch[{name!r}] is on the meta device, where it has no values.", "Give it with values.")
    return {name: value.to(loading.device_of_inputs(model)) for name, value in batch.items()}


def held(model: object, tokenizer: PreTrainedTokenizerBase | None = None) -> Any:
    """A transformers model, with that tokenizer, as `load` would return it; anything else as it is."""
    if isinstance(model, loading.Loaded):
        _refuse_answered(model.model)
    if not isinstance(model, PreTrainedModel):
        if tokenizer is not None and isinstance(model, loading.Loaded | str | os.PathLike):
            raise UsageError(
                "A tokenizer is given beside a model that is loaded with its own.",
                "Leave it out, or give a transformers model that is in memory.",
            )
        return model
    _refuse_answered(model)
    info = ModelInfo(
        id=f"{model.name_or_path or type(model).__name__} (in memory)",
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    return loading.Loaded(model, tokenizer, "no tokenizer was given" if tokenizer is None else "", info, kind_of(model))


def _refuse_answered(model: PreTrainedModel) -> None:
    if hooks.is_answered(model):
        raise UsageError(
            f"The attention of this {type(model).__name__} is answered by attnlens already, with another kernel.",
            "Leave the `with` block, close what load_swapped returned, or give a model with attention of its own.",
        )


def held_model(model: object) -> loading.Loaded:
    """The same for what has to be in memory; raises UsageError for a name or anything else."""
    found = held(model)
    if not isinstance(found, loading.Loaded):
        raise UsageError(
            f"{shown(model)} is no model in memory.", "Give a transformers model, or what attnlens.load returned."
        )
    return found


@contextmanager
def at_rest(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block the model is in evaluation mode and without gradients; each of its parts is as before after it.

    Its weights, their gradients and the state of the random numbers stay untouched.
    """
    training = [module for module in model.modules() if module.training]
    # what was made in inference mode has no gradient, whatever it says, and can't be told so again
    learning = [
        parameter for parameter in model.parameters() if parameter.requires_grad and not parameter.is_inference()
    ]
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


def refuse_work(given: Mapping[str, Any], request: Any) -> None:
    """Raise UsageError for a model in memory whose work is to be kept or read elsewhere: no file says which it is."""
    every = requests.options(request)
    asked = [name for name in requests.options(WorkRequest) if name in every and given[name] != every[name].default]
    if asked:
        raise UsageError(
            f"The model is in memory, where no other process finds it, so that {asked[0]} would be ignored.",
            "Give its name or folder, or leave the option out.",
        )
