"""Capture a model's attention, and provide `Lens`: a model that is loaded once for several analyses."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnlens.arguments import public
from attnlens.choices import KERNEL
from attnlens.errors import UsageError
from attnlens.models import loading
from attnlens.records import QueryKey
from attnlens.report.report import Report
from attnlens.runs import checks
from attnlens.runs.compare.pipeline import compare
from attnlens.runs.feeding import at_rest, held_model, tensors
from attnlens.runs.inspect.pipeline import inspect
from attnlens.runs.swap.pipeline import swap_kernel

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@public
def capture(model: PreTrainedModel | loading.Loaded, batch: Mapping[str, object]) -> list[QueryKey]:
    """Capture softmax(scale · Q Kᵀ + bias + mask) of every site that `batch` reaches, as QueryKeys in layer order.

    `batch` maps the names of the model's inputs to tensors, as the model's tokenizer returns them with
    return_tensors="pt". Each QueryKey has the axes (batch, heads, tokens, head_dim), padding included, the name of its
    module (`site.path`) and its layer (`site.layer`); it has the property `attention` and is the input of analyzers.
    The model runs without dropout and cache and is not changed. A warning lists attention that ran but can't be read.
    Raise UsageError, ModelError if the model can't run or has no attention that can be read, and IdentityError if
    recomputing attention from the capture changes the model's outputs.
    """
    loaded = held_model(model)
    inputs = tensors(loaded.model, batch)
    with at_rest(loaded.model):
        survey = checks.survey_model(loaded, inputs)
        checks.prove_identity(loaded, inputs)
        missed = [f"{path}, because {reason}" for path, reason in survey.missed.items() if reason is not None]
    if missed:
        others = f"; and {len(missed) - 1} more" if len(missed) > 1 else ""
        warnings.warn(f"Not captured: {missed[0]}{others}.", stacklevel=3)
    return [each.call.query_key(each.site) for each in survey.sites]


class Lens:
    """A model that is loaded once for several analyses.

    `model` is a hub id, folder, file or `demo`, loaded by `load` with `load_options`; a result of `load`; or a
    transformers model in memory with its `tokenizer`. Raises the errors of `load`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | loading.Loaded | PreTrainedModel = "demo",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **load_options: Any,
    ) -> None:
        if isinstance(model, str | os.PathLike):
            model = loading.load(model, **load_options)
        self.loaded = held_model(model, tokenizer)

    def inspect(self, **options: object) -> Report:
        """Measure each head; `options` are those of `attnlens.inspect`."""
        return inspect(self.loaded, **options)

    def swap(self, kernels: str | Sequence[str] = KERNEL, **options: object) -> Report:
        """Compare the model under other kernels with the original; `options` are those of `attnlens.swap_kernel`."""
        return swap_kernel(self.loaded, kernels, **options)

    def compare(self, other: str | os.PathLike[str] | Report | Lens | loading.Loaded, **options: object) -> Report:
        """Compare the heads of `other` with those of this model; `options` are those of `attnlens.compare`."""
        return compare(self.loaded, other.loaded if isinstance(other, Lens) else other, **options)

    def capture(self, text: str | Mapping[str, Tensor]) -> list[QueryKey]:
        """Capture queries and keys of every attention computation on a text, or on a batch of the model's inputs.

        Raise UsageError for a text if the model has no tokenizer, and the errors of `attnlens.capture`.
        """
        if not isinstance(text, str):
            return capture(self.loaded, text)
        if self.loaded.tokenizer is None:
            raise UsageError("The model has no tokenizer.", "Give a batch of the model's inputs instead of a text.")
        return capture(self.loaded, self.loaded.tokenizer(text, return_tensors="pt"))
