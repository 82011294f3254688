"""Measures by how much a model's outputs change when its own attention is recomputed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.attention import attend
from attnlens.errors import is_memory
from attnlens.hooks.interface import opened
from attnlens.hooks.survey import forward, real_outputs
from attnlens.kernels import OWN

IDENTITY_TOLERANCE = 1e-5
"""Largest relative difference between a model's outputs and those under attention recomputed by attnlens."""


def identity_error(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> float:
    """‖own − recomputed‖ / ‖own‖ over the model's outputs, own being what the untouched model computes.

    Rounding alone can exceed the tolerance in a deep or saturated model; such a model is measured again on a copy in
    float64, so that what remains is a real difference; but one that can't run in float64.
    """
    error = _identity_error(model, inputs)
    if error > IDENTITY_TOLERANCE and model.dtype != torch.float64:
        precise = nn.Module.double(copy.deepcopy(model))
        allow_float64(precise)
        try:
            return _identity_error(precise, as_dtype(inputs, torch.float64))
        except RuntimeError as failure:
            if is_memory(failure):
                raise
            return error  # it turns some of its numbers into float32 itself
    return error


def allow_float64(model: PreTrainedModel) -> None:
    """Switch off what refuses float64 in a model of our own; in exact arithmetic the result is the same.

    These are the grouped product of a mixture of experts, and GPT-2's option to compute its attention in float32.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
            module.set_experts_implementation("eager")
        if getattr(module, "reorder_and_upcast_attn", False):
            module.reorder_and_upcast_attn = False  # type: ignore[assignment]  # torch types every attribute a tensor


def as_dtype(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs with their floating-point tensors (pixels, audio features) in another type."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def repeat_error(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> float:
    """The same of the untouched model's outputs in two passes: 0 but for a model that is random itself."""
    return difference(model, inputs, nullcontext())


def _identity_error(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> float:
    return difference(model, inputs, opened(model, lambda call: attend(call, OWN, "eager")))


def difference(model: PreTrainedModel, inputs: Mapping[str, Tensor], change: AbstractContextManager[object]) -> float:
    """‖own − changed‖ / ‖own‖ of the output that changes most inside `change`."""
    with torch.no_grad():
        own = real_outputs(forward(model, inputs), inputs)
        with change:
            again = real_outputs(forward(model, inputs), inputs)
    pairs = [(a.double(), b.double()) for a, b in zip(own, again, strict=True)]
    return float(torch.stack([_relative(a, b) for a, b in pairs]).max())  # torch's max is NaN where one of them is


def _relative(own: Tensor, again: Tensor) -> Tensor:
    """‖own − again‖ / ‖own‖; numbers that are infinite in both are the same (Grounding DINO's hidden words)."""
    change, size = torch.where(own == again, 0.0, own - again).norm(), own.masked_fill(own.isinf(), 0.0).norm()
    return torch.div(change, size.clamp_min(torch.finfo(own.dtype).tiny))
