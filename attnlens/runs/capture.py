"""Capture the attention of a model that is in memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from transformers import PreTrainedModel

from attnlens.arguments import public
from attnlens.models import loading
from attnlens.records import QueryKey
from attnlens.runs import checks
from attnlens.runs.feeding import convert_batch, evaluation_mode, require_model


@public
def capture(model: PreTrainedModel | loading.Loaded, batch: Mapping[str, object]) -> list[QueryKey]:
    """Capture softmax(scale · Q Kᵀ + bias + mask) of every site that runs on `batch`, as QueryKeys in layer order.

    `batch` maps the names of the model's inputs to tensors, as the model's tokenizer returns them with
    return_tensors="pt". Queries and keys have the shape (batch, heads, tokens, head_dim) and include padding. In each
    QueryKey, `site.path` is the path of the module, `site.layer` its layer, and `attention` contains the attention
    probabilities; analyzers accept a QueryKey as input. The model runs without dropout or cache and is not changed.
    A warning reports attention that ran but can't be read.
    Raise UsageError if an argument is invalid, ModelError if the model can't run or has no attention that can be read,
    and IdentityError if recomputing attention from the capture changes the model's outputs.
    """
    loaded = require_model(model)
    inputs = convert_batch(loaded.model, batch)
    with evaluation_mode(loaded.model):
        survey = checks.survey_model(loaded, inputs)
        checks.prove_identity(loaded, inputs)
        missed = [f"{path}, because {reason}" for path, reason in survey.missed.items() if reason is not None]
    if missed:
        others = f"; and {len(missed) - 1} more" if len(missed) > 1 else ""
        warnings.warn(f"Not captured: {missed[0]}{others}.", stacklevel=3)
    return [each.call.query_key(each.site) for each in survey.sites]
