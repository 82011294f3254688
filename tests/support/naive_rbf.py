"""RBF attention written out in float64, in the place of a model's own, against what `hooks.replace` gives."""

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
    """softmax(−γ·scale·‖q − k‖² + bias, over the keys allowed) v."""
    heads = call.query.shape[1]
    query, key, value = (
        part.double().repeat_interleave(heads // part.shape[1], 1) for part in (call.query, call.key, call.value)
    )
    scores = -gamma * call.scale * torch.cdist(query, key).square()
    if call.bias is not None:
        scores = scores + call.bias
    seen = call.visible()
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(torch.float64).min)
    if call.sinks is not None:
        sink = call.sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return (torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ value).transpose(1, 2).to(call.value.dtype)
    return (scores.softmax(-1) @ value).transpose(1, 2).to(call.value.dtype)


def difference(model: Any, inputs: Mapping[str, Tensor], gamma: float) -> float:
    """‖naive − replaced‖ / ‖naive‖ of the model's outputs, all sites with the RBF kernel.

    It is that of float64 where a choice inside the model (a detector's best boxes) makes much of rounding.
    """
    error = _difference(model, inputs, gamma)
    if error <= ROUNDING:
        return error
    precise = nn.Module.double(copy.deepcopy(model))
    hooks.allow_float64(precise)
    return _difference(precise, hooks.as_dtype(inputs, torch.float64), gamma)


def _difference(model: Any, inputs: Mapping[str, Tensor], gamma: float) -> float:
    sites = tuple(found.site for found in hooks.survey(model, inputs))
    swaps = dict.fromkeys(sites, hooks.Replacement(parsed(f"rbf:gamma={gamma}")))
    with torch.no_grad():
        traced = [model.get_submodule(site.path) for site in sites if site.traced]
        with hooks.answer_calls(model, lambda call: attention(call, gamma), modules=traced):
            naive = hooks.real_outputs(hooks.forward(model, inputs), inputs)
        with hooks.replace(model, sites, swaps):
            ours = hooks.real_outputs(hooks.forward(model, inputs), inputs)
    return max(_distance(a, b) for a, b in zip(naive, ours, strict=True))


def _distance(naive: Tensor, ours: Tensor) -> float:
    """‖naive − ours‖ / ‖naive‖ over the logits that the model doesn't set to the lowest number."""
    kept = naive != torch.finfo(naive.dtype).min
    change, size = (naive - ours)[kept].double().norm(), naive[kept].double().norm()
    return float(change / size.clamp_min(torch.finfo(torch.float64).tiny))
