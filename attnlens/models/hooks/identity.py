"""Replays a model's blocks, and measures how much its outputs change under recomputed attention."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.errors import is_memory
from attnlens.kernels import OWN
from attnlens.kernels.attention import attend
from attnlens.models.hooks.interface import implementation, opened
from attnlens.models.hooks.survey import Reached, by_name, forward, real_outputs, survey
from attnlens.models.trace import hooked, tracing
from attnlens.records import Call, Site


def blocks(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[tuple[str, nn.Module]]:
    """The elements of the model's outermost module lists that run once in a forward pass, in the order of execution.

    None is found in a model that calls one module again and again (ALBERT): then nothing can be left out.
    """
    listed: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in listed)
        if isinstance(module, nn.ModuleList) and not inside:
            listed += [(f"{path}.{index}", block) for index, block in enumerate(module)]
    order: list[nn.Module] = []
    handles = [block.register_forward_hook(lambda module, _args, _output: order.append(module)) for _, block in listed]
    with hooked(handles), torch.no_grad():
        forward(model, inputs)
    names, calls = {block: path for path, block in listed}, Counter(order)
    return [(names[block], block) for block in order if calls[block] == 1]


@contextmanager
def recorded(found: Sequence[tuple[str, nn.Module]]) -> Iterator[dict[str, Any]]:
    """What each block gives in the forward pass inside the `with`, by its path."""
    given: dict[str, Any] = {}

    def remember(path: str) -> Any:
        return lambda _module, _args, output: given.__setitem__(path, output)

    handles = [block.register_forward_hook(remember(path)) for path, block in found]
    with hooked(handles):
        yield given


@contextmanager
def resumed(found: Sequence[tuple[str, nn.Module]], given: Mapping[str, Any], site: Site) -> Iterator[None]:
    """Let the blocks that run before the one that holds `site` answer with what they gave, without computing.

    Exact as long as what is changed lies in that block or behind it. Where no block holds the site, all are computed.
    """
    holding = [index for index, (path, _) in enumerate(found) if site.path.startswith(f"{path}.")]
    before = found[: holding[0]] if holding else []
    for path, block in before:
        block.forward = lambda *_args, _given=given[path], **_kwargs: _given
    try:
        yield
    finally:
        for _, block in before:
            del block.forward  # the class's own method is seen again


@contextmanager
def handed_out(model: PreTrainedModel, reached: Sequence[Reached], found: dict[Site, Tensor]) -> Iterator[None]:
    """Inside, the model uses transformers' eager attention, and `found` are the weights of its softmaxes.

    Where none has the shape of a site's (a sink has a column of its own), they are what the module hands out.
    """
    shapes = {one.site: (*one.call.query.shape[:3], one.call.key.shape[2]) for one in reached}
    sites = {(site.path, site.ordinal): site for site in shapes}
    paths = {one.module: one.site.path for one in reached}
    softmaxes, calls = Counter[str](), Counter[str]()

    def shown(module: nn.Module, weights: Tensor) -> None:
        path = paths.get(module, "")
        site = sites.get((path, softmaxes[path]))
        if site is not None and weights.shape == shapes[site]:
            found[site] = weights
        softmaxes[path] += 1

    def remember(path: str) -> Any:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            site = sites[path, calls[path]]
            calls[path] += 1
            for part in output if isinstance(output, tuple) and softmaxes[path] < calls[path] else ():
                if isinstance(part, Tensor) and part.shape == shapes[site]:
                    found[site] = part  # the last of them, as T5 hands out its position bias first

        return hook

    handles = [one.module.register_forward_hook(remember(one.site.path)) for one in reached if one.site.ordinal == 0]
    unused = attrgetter("value")  # the model does not go on with the answer
    with hooked(handles), implementation(model, "eager"), tracing(model, unused, prove=True, shown=shown):
        yield


IDENTITY_TOLERANCE = 1e-5
"""Largest relative difference between a model's outputs and those under attention recomputed by attnlens."""

PART = 2**22  # numbers of outputs that are compared at once

Precise = Callable[[Reached], AbstractContextManager[tuple[PreTrainedModel, nn.Module]]]
"""A site → a context in which its module, and the model that this is part of, compute in float64."""


def identity_error(model: PreTrainedModel, inputs: Mapping[str, Tensor], precise: Precise | None = None) -> float:
    """‖own − recomputed‖ / ‖own‖ over the model's outputs, own being what the untouched model computes.

    Rounding alone can exceed the tolerance in a deep, saturated or half-precision model. Such a model is measured site
    by site: each module computes in float64 on what the model itself gives it, so that what remains is a real
    difference, and no second model is needed. The first error stands where a module can't run by itself in float64, and
    where the model does not repeat itself. `precise` says where these modules are; None: the model's own are widened,
    one after the other.
    """
    error = difference(model, inputs, opened(model, recompute))
    rounds = error > IDENTITY_TOLERANCE and model.dtype != torch.float64
    if rounds and repeat_error(model, inputs) <= IDENTITY_TOLERANCE:
        try:
            return largest_at_a_site(model, inputs, precise or partial(widened, model))
        except RuntimeError as failure:
            if is_memory(failure):
                raise
            return error  # a module turns some of its numbers into float32 itself
    return error


def recompute(call: Call) -> Tensor:
    """The model's own attention, from its queries and keys: (batch, queries, heads, value_dim)."""
    return attend(call, OWN, "eager")


def largest_at_a_site(model: PreTrainedModel, inputs: Mapping[str, Tensor], precise: Precise) -> float:
    """The largest error of a site's module on its own inputs, in one pass of the untouched model."""
    waiting: dict[nn.Module, list[Reached]] = defaultdict(list)
    for found in survey(model, inputs):
        waiting[found.module].append(found)
    errors: list[Tensor] = []

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        if pending := waiting[module]:
            waiting[module] = []  # what it is asked for here is not the model's own pass
            errors.append(_site_error(pending[0], by_name(module, args, kwargs), inputs, precise))
            waiting[module] = pending[1:]

    hooks = [module.register_forward_hook(check, with_kwargs=True) for module in list(waiting)]
    with hooked(hooks), torch.no_grad():
        forward(model, inputs)
    return float(torch.stack(errors).max())


def _site_error(found: Reached, given: Mapping[str, Any], inputs: Mapping[str, Tensor], precise: Precise) -> Tensor:
    """‖own − recomputed‖ / ‖own‖ of one module in float64.

    What it attends over is what the model `given` it; masks and positions are those that it has under each attention.
    Raises RuntimeError where the module by itself asks for no attention, so that nothing was recomputed.
    """
    answered: list[None] = []

    def answer(call: Call) -> Tensor:
        answered.append(None)
        return recompute(call)

    names = [name for name in (found.input_name, found.other) if name is not None]
    with precise(found) as (model, module):
        taken, others, mask = (_in_float64(part, module) for part in (given, found.arguments, inputs))
        own = module(**taken)
        sequences = {name: taken[name] for name in names}
        traced = [module] if found.site.traced else []
        with opened(model, answer, modules=traced, content=list(sequences.values())):
            again = module(**others | sequences)
    if not answered:
        raise RuntimeError(f"{found.site.path} asks for no attention by itself")
    first, second = (real_outputs(one if isinstance(one, tuple) else (one,), mask)[0] for one in (own, again))
    return _relative(first, second)


@contextmanager
def widened(model: PreTrainedModel, found: Reached) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Inside, the site's module computes in float64; its own numbers come back at the end."""
    module = found.module
    kept = [(part, part.data) for part in (*module.parameters(), *module.buffers()) if part.is_floating_point()]
    upcasting = [part for part in module.modules() if getattr(part, "reorder_and_upcast_attn", False)]
    try:
        for part, data in kept:
            part.data = data.double()
        for one in upcasting:
            one.reorder_and_upcast_attn = False  # type: ignore[assignment]  # torch types every attribute a tensor
        yield model, module
    finally:
        for part, data in kept:
            part.data = data
        for one in upcasting:
            one.reorder_and_upcast_attn = True  # type: ignore[assignment]


def _in_float64(given: Any, module: nn.Module) -> Any:
    """The arguments of a module on its own device, numbers as float64."""
    if isinstance(given, Tensor):
        there = given.to(next(module.parameters()).device)
        return there.double() if there.is_floating_point() else there
    if isinstance(given, tuple | list):
        return tuple(_in_float64(one, module) for one in given)
    return {name: _in_float64(one, module) for name, one in given.items()} if isinstance(given, Mapping) else given


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


def difference(model: PreTrainedModel, inputs: Mapping[str, Tensor], change: AbstractContextManager[object]) -> float:
    """‖own − changed‖ / ‖own‖ of the output that changes most inside `change`."""
    with torch.no_grad():
        own = real_outputs(forward(model, inputs), inputs)
        with change:
            again = real_outputs(forward(model, inputs), inputs)
    pairs = zip(own, again, strict=True)
    return float(torch.stack([_relative(a, b) for a, b in pairs]).max())  # torch's max is NaN where one of them is


def _relative(own: Tensor, again: Tensor) -> Tensor:
    """‖own − again‖ / ‖own‖ in float64, a part at a time, as predictions of long texts are large.

    Numbers that are infinite in both are the same (Grounding DINO's hidden words).
    """
    change = size = torch.zeros((), dtype=torch.float64, device=own.device)
    for a, b in zip(*(torch.split(part.flatten(), PART) for part in (own, again)), strict=True):
        first, second = a.double(), b.double()
        change = change.hypot(torch.where(first == second, 0.0, first - second).norm())
        size = size.hypot(first.masked_fill(first.isinf(), 0.0).norm())
    return torch.div(change, size.clamp_min(torch.finfo(torch.float64).tiny))
