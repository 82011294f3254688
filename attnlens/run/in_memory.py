"""Takes a transformers model that is already in memory, and lets it rest while it is looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from attnlens import hooks, models, requests
from attnlens.arguments import shown
from attnlens.errors import UsageError
from attnlens.models.configs import kind_of
from attnlens.records import ModelInfo
from attnlens.requests.work_options import WorkRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def held(model: object, tokenizer: PreTrainedTokenizerBase | None = None) -> Any:
    """A transformers model, with that tokenizer, as `load` would return it; anything else as it is.

    Raises UsageError for a tokenizer beside anything else, and for a model whose attention attnlens answers already.
    """
    if isinstance(model, models.Loaded):
        _refuse_answered(model.model)
    if not isinstance(model, PreTrainedModel):
        if tokenizer is not None and isinstance(model, models.Loaded | str | os.PathLike):
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
    return models.Loaded(model, tokenizer, "no tokenizer was given" if tokenizer is None else "", info, kind_of(model))


def _refuse_answered(model: PreTrainedModel) -> None:
    if hooks.is_answered(model):
        raise UsageError(
            f"The attention of this {type(model).__name__} is answered by attnlens already, with another kernel.",
            "Leave the `with` block, close what load_swapped returned, or give a model with attention of its own.",
        )


def held_model(model: object) -> models.Loaded:
    """The same for what has to be in memory; raises UsageError for a name or anything else."""
    found = held(model)
    if not isinstance(found, models.Loaded):
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
