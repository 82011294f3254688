"""Compare a model's outputs under `hooks.replace` with those under RBF attention written out in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.kernels import parsed
from attnlens.models import hooks
from attnlens.records import Call

ROUNDING = 1e-5
"""Largest difference of outputs that is float32's rounding."""


def attention(call: Call, gamma: float) -> Tensor:
    """Compute softmax(−γ·scale·‖q − k‖² + bias) v over the visible keys."""
    heads, visible = call.query.shape[1], call.visible()
    query, key, value = (
        part.double().repeat_interleave(heads // part.shape[1], 1) for part in (call.query, call.key, call.value)
    )
    scores = -gamma * call.scale * torch.cdist(query, key).square() + (0 if call.bias is None else call.bias)
    if visible is not None:
        scores = scores.masked_fill(~visible, torch.finfo(torch.float64).min)
    if call.sinks is not None:
        sink = call.sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores, value = torch.cat([scores, sink], -1), torch.nn.functional.pad(value, (0, 0, 0, 1))
    return (scores.softmax(-1) @ value).transpose(1, 2).to(call.value.dtype)


def difference(model: Any, inputs: Mapping[str, Tensor], gamma: float) -> float:
    """Compute ‖naive − replaced‖ / ‖naive‖ of the model's outputs with the RBF kernel at all sites.

    If it exceeds ROUNDING, the model runs again in float64: a choice (a detector's best boxes) can amplify rounding.
    """
    error = _difference(model, inputs, gamma)
    if error <= ROUNDING:
        return error
    precise = nn.Module.double(copy.deepcopy(model))
    hooks.allow_float64(precise)
    return _difference(precise, hooks.as_dtype(inputs, torch.float64), gamma)


def _difference(model: Any, inputs: Mapping[str, Tensor], gamma: float) -> float:
    sites = tuple(reached.site for reached in hooks.survey(model, inputs))
    swaps = dict.fromkeys(sites, hooks.Replacement(parsed(f"rbf:gamma={gamma}")))
    traced = [model.get_submodule(site.path) for site in sites if site.traced]
    with torch.no_grad():
        with hooks.answer_calls(model, lambda call: attention(call, gamma), modules=traced):
            naive = hooks.real_outputs(hooks.forward(model, inputs), inputs)
        with hooks.replace(model, sites, swaps):
            ours = hooks.real_outputs(hooks.forward(model, inputs), inputs)
    return max(_distance(a, b) for a, b in zip(naive, ours, strict=True))


def _distance(naive: Tensor, ours: Tensor) -> float:
    """Compute ‖naive − ours‖ / ‖naive‖ over the logits that the model doesn't set to the lowest number."""
    finite = naive != torch.finfo(naive.dtype).min
    change, size = (naive - ours)[finite].double().norm(), naive[finite].double().norm()
    return float(change / size.clamp_min(torch.finfo(torch.float64).tiny))
