"""Captures queries and keys of every attention computation in one forward pass of a model in memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnlens import models
from attnlens.arguments import public, shown
from attnlens.errors import UsageError
from attnlens.records import QueryKey
from attnlens.run import checks
from attnlens.run.in_memory import at_rest, held_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from attnlens.models import Loaded


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
    return {name: value.to(models.device_of_inputs(model)) for name, value in batch.items()}
