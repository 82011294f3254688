"""Which attention computations does one forward pass reach, and is what attnlens recomputes what the model computes?"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.attention import attend
from attnlens.hooks.call import OWN
from attnlens.hooks.door import is_attention, opened, out_of_reach
from attnlens.records import Call, Part, Site

CROSS_INPUTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""The names under which transformers' attention modules take the other sequence of a cross-attention."""

IDENTITY_TOLERANCE = 1e-5
"""Largest relative difference between a model's outputs and those recomputed through the door."""


@dataclass(frozen=True)
class Reached:
    """A site that a forward pass reached, with what its module was called with."""

    site: Site
    """Where."""
    module: nn.Module
    """The attention module."""
    arguments: dict[str, Any]
    """The arguments of the module's call, by parameter name."""
    call: Call
    """What the module asked for."""

    @property
    def input_name(self) -> str:
        """The name of the module's input: by transformers' convention the first tensor among its arguments."""
        return next(name for name, value in self.arguments.items() if isinstance(value, Tensor))

    @property
    def other(self) -> str | None:
        """The name of the argument that carries the other sequence of a cross-attention."""
        return next((name for name in CROSS_INPUTS if self.arguments.get(name) is not None), None)


def survey(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Reached]:
    """Run one forward pass and list the sites that it reaches, in order.

    Raises ModelError where the model has no softmax attention, or computes it outside the interface.
    """
    modules = {module: name for name, module in model.named_modules()}
    arguments: dict[nn.Module, dict[str, Any]] = {}
    calls: list[tuple[nn.Module, Call, dict[str, Any]]] = []

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments[module] = by_name(module, args, kwargs)

    def answer(call: Call) -> Tensor:
        module = cast("nn.Module", call.module)
        calls.append((module, call, arguments[module]))
        return attend(call, OWN, "eager")

    hooks = [module.register_forward_pre_hook(remember, with_kwargs=True) for module in modules if is_attention(module)]
    try:
        with torch.no_grad(), opened(model, answer):
            forward(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        raise out_of_reach(model)
    total, seen, reached = Counter(modules[module] for module, _, _ in calls), Counter[str](), []
    for layer, (module, call, bound) in enumerate(calls):
        path = modules[module]
        site = Site(path, seen[path], layer, _part(call, bound), repeated=total[path] > 1)
        seen[path] += 1
        reached.append(Reached(site, module, bound, call))
    return reached


def unreached(model: PreTrainedModel, reached: list[Reached]) -> list[str]:
    """Paths of attention modules that no call came from: their attention is computed outside the interface."""
    used = {id(part) for found in reached for part in found.module.modules()}
    owners = {name for name, module in model.named_modules() if any(id(part) in used for part in module.modules())}
    innermost: list[str] = []
    for name, module in model.named_modules():
        inside = any(is_attention(child) for child in module.modules() if child is not module)
        if is_attention(module) and not inside and name not in owners and id(module) not in used:
            innermost.append(name)
    return innermost


def forward(model: PreTrainedModel, inputs: Mapping[str, Tensor], **more: Any) -> Any:
    """The model's outputs without a cache, so that every query meets every key in one call."""
    return model(**inputs, **without_cache(model), **more)


def without_cache(model: PreTrainedModel) -> dict[str, bool]:
    """The argument that keeps a model from filling a cache, where it has one."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def real_outputs(result: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The floating-point tensors of a model's output at its real tokens; nested tuples are left out.

    Padding is left out because a padded query may have no key at all, and then implementations differ rightly.
    """
    values = result.to_tuple() if hasattr(result, "to_tuple") else result
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return [at_real_tokens(tensor, inputs) for tensor in tensors]


def at_real_tokens(tensor: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """A (batch, tokens, …) tensor without its padding, (real tokens, …); any other as it is."""
    masks = [inputs[name].bool() for name in ("decoder_attention_mask", "attention_mask") if name in inputs]
    return next((tensor[mask] for mask in masks if mask.shape == tensor.shape[:2]), tensor)


def identity_error(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> float:
    """‖own − recomputed‖ / ‖own‖ over the model's outputs, own being what the untouched model computes.

    Rounding alone can exceed the tolerance in a deep or saturated model; such a model is measured again on a copy in
    float64, so that what remains is a real difference.
    """
    error = _identity_error(model, inputs)
    if error > IDENTITY_TOLERANCE and model.dtype != torch.float64:
        precise = nn.Module.double(copy.deepcopy(model))
        allow_float64(precise)
        return _identity_error(precise, as_dtype(inputs, torch.float64))
    return error


def allow_float64(model: PreTrainedModel) -> None:
    """Switch off what refuses float64 in a model of our own; in exact arithmetic the result is the same.

    These are the grouped product of a mixture of experts, and GPT-2's option to compute its attention in float32.
    """
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    for module in model.modules():
        if getattr(module, "reorder_and_upcast_attn", False):
            module.reorder_and_upcast_attn = False  # type: ignore[assignment]  # torch types every attribute a tensor


def as_dtype(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs with their floating-point tensors (pixels, audio features) in another type."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def _identity_error(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> float:
    with torch.no_grad():
        own = real_outputs(forward(model, inputs), inputs)
        with opened(model, lambda call: attend(call, OWN, "eager")):
            again = real_outputs(forward(model, inputs), inputs)
    pairs = [(a.double(), b.double()) for a, b in zip(own, again, strict=True)]
    errors = [(a - b).norm() / a.norm().clamp_min(torch.finfo(a.dtype).tiny) for a, b in pairs]
    return float(torch.stack(errors).max())  # torch's max is NaN where one of them is


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module's call under the names of its parameters."""
    positional = list(inspect.signature(module.forward).parameters)
    return dict(zip(positional, args, strict=False)) | kwargs


def _part(call: Call, arguments: dict[str, Any]) -> Part:
    """Cross-attention has another sequence; a decoder's self-attention sees nothing above the diagonal."""
    if any(arguments.get(name) is not None for name in CROSS_INPUTS) or call.query.shape[2] != call.key.shape[2]:
        return "cross"
    above = torch.ones(call.query.shape[2], call.key.shape[2], dtype=torch.bool, device=call.query.device).triu(1)
    seen = call.visible()
    causal = seen is not None and bool(above.any()) and not bool((seen & above).any())
    return "decoder" if causal else "encoder"
