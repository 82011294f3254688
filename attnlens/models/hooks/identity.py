"""Replay a model's blocks, and measure how much its outputs change if attnlens recomputes the attention."""

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
    """Return the path and module of each block that runs exactly once in a forward pass, in order of execution.

    Blocks are the elements of the outermost module lists. A model that calls one module repeatedly (ALBERT) has none.
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
    """Record the output of each block in the forward pass inside the `with`, keyed by the block's path."""
    given: dict[str, Any] = {}

    def remember(path: str) -> Any:
        return lambda _module, _args, output: given.__setitem__(path, output)

    handles = [block.register_forward_hook(remember(path)) for path, block in found]
    with hooked(handles):
        yield given


@contextmanager
def resumed(found: Sequence[tuple[str, nn.Module]], given: Mapping[str, Any], site: Site) -> Iterator[None]:
    """Replay the recorded outputs of the blocks that run before the block of `site`, instead of computing them.

    The result is exact if all changes are in that block or later. If no block contains the site, all are computed.
    """
    holding = [index for index, (path, _) in enumerate(found) if site.path.startswith(f"{path}.")]
    before = found[: holding[0]] if holding else []
    for path, block in before:
        block.forward = lambda *_args, _given=given[path], **_kwargs: _given
    try:
        yield
    finally:
        for _, block in before:
            del block.forward  # makes the method of the class visible again


@contextmanager
def handed_out(model: PreTrainedModel, reached: Sequence[Reached], found: dict[Site, Tensor]) -> Iterator[None]:
    """Collect in `found` the attention weights that transformers' eager attention computes inside the `with`.

    They come from the site's softmax if its shape fits; otherwise (a sink adds a column) from the module's output.
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
                    found[site] = part  # the last one: T5 returns its position bias first

        return hook

    handles = [one.module.register_forward_hook(remember(one.site.path)) for one in reached if one.site.ordinal == 0]
    unused = attrgetter("value")  # the model does not use the answer
    with hooked(handles), implementation(model, "eager"), tracing(model, unused, prove=True, shown=shown):
        yield


IDENTITY_TOLERANCE = 1e-5
"""Largest relative difference between a model's outputs and those under attention recomputed by attnlens."""

PART = 2**22  # output numbers compared at once

Precise = Callable[[Reached], AbstractContextManager[tuple[PreTrainedModel, nn.Module]]]
"""Maps a site to a context in which its module, and the model the module belongs to, compute in float64."""


def identity_error(model: PreTrainedModel, inputs: Mapping[str, Tensor], precise: Precise | None = None) -> float:
    """Compute ‖original − recomputed‖ / ‖original‖ over the model's outputs.

    Rounding alone can exceed the tolerance in a deep, saturated or half-precision model. Such a model is measured site
    by site: each module computes in float64 on its inputs in the unmodified model, so that any remaining difference is
    real. The first error is returned if a module cannot run alone in float64, or if the model does not repeat its own
    outputs. `precise` provides the float64 modules; None widens the model's own, one by one.
    """
    error = difference(model, inputs, opened(model, recompute))
    rounds = error > IDENTITY_TOLERANCE and model.dtype != torch.float64
    if rounds and repeat_error(model, inputs) <= IDENTITY_TOLERANCE:
        try:
            return largest_at_a_site(model, inputs, precise or partial(widened, model))
        except RuntimeError as failure:
            if is_memory(failure):
                raise
            return error  # a module converts some of its numbers to float32 itself
    return error


def recompute(call: Call) -> Tensor:
    """Compute the model's own attention from its queries and keys: (batch, queries, heads, value_dim)."""
    return attend(call, OWN, "eager")


def largest_at_a_site(model: PreTrainedModel, inputs: Mapping[str, Tensor], precise: Precise) -> float:
    """Return the largest error of any site's module on its own inputs, measured in one pass of the unmodified model."""
    waiting: dict[nn.Module, list[Reached]] = defaultdict(list)
    for found in survey(model, inputs):
        waiting[found.module].append(found)
    errors: list[Tensor] = []

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        if pending := waiting[module]:
            waiting[module] = []  # calls made during the check are not part of the model's own pass
            errors.append(_site_error(pending[0], by_name(module, args, kwargs), inputs, precise))
            waiting[module] = pending[1:]

    hooks = [module.register_forward_hook(check, with_kwargs=True) for module in list(waiting)]
    with hooked(hooks), torch.no_grad():
        forward(model, inputs)
    return float(torch.stack(errors).max())


def _site_error(found: Reached, given: Mapping[str, Any], inputs: Mapping[str, Tensor], precise: Precise) -> Tensor:
    """Compute ‖original − recomputed‖ / ‖original‖ of one module in float64.

    The module runs on its inputs in the unmodified model (`given`), with the masks and positions of each
    implementation. Raises RuntimeError if it computes no attention when run alone, so that nothing was recomputed.
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
    return _relative_difference(first, second)


@contextmanager
def widened(model: PreTrainedModel, found: Reached) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Let the site's module compute in float64 inside the `with`, and restore its original numbers at the end."""
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
    """Move the arguments of a module to its device and convert floating-point tensors to float64."""
    if isinstance(given, Tensor):
        there = given.to(next(module.parameters()).device)
        return there.double() if there.is_floating_point() else there
    if isinstance(given, tuple | list):
        return tuple(_in_float64(one, module) for one in given)
    return {name: _in_float64(one, module) for name, one in given.items()} if isinstance(given, Mapping) else given


def allow_float64(model: PreTrainedModel) -> None:
    """Switch off the features that refuse float64, in a model that attnlens loaded.

    They are the grouped product of experts and GPT-2's attention in float32. In exact arithmetic nothing changes.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
            module.set_experts_implementation("eager")
        if getattr(module, "reorder_and_upcast_attn", False):
            module.reorder_and_upcast_attn = False  # type: ignore[assignment]  # torch types every attribute a tensor


def as_dtype(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert the floating-point tensors among the inputs (pixels, audio features) to `dtype`."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def repeat_error(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> float:
    """Return the relative difference between two passes of the unmodified model: 0 unless the model is random."""
    return difference(model, inputs, nullcontext())


def difference(model: PreTrainedModel, inputs: Mapping[str, Tensor], change: AbstractContextManager[object]) -> float:
    """Compute ‖original − changed‖ / ‖original‖ of the output that changes most inside `change`."""
    with torch.no_grad():
        own = real_outputs(forward(model, inputs), inputs)
        with change:
            again = real_outputs(forward(model, inputs), inputs)
    pairs = zip(own, again, strict=True)
    return float(torch.stack([_relative_difference(a, b) for a, b in pairs]).max())  # max is NaN if one is


def _relative_difference(own: Tensor, again: Tensor) -> Tensor:
    """Compute ‖own − again‖ / ‖own‖ in float64, in parts, since predictions for long texts are large.

    Numbers that are infinite in both tensors count as equal (Grounding DINO's hidden words).
    """
    change = size = torch.zeros((), dtype=torch.float64, device=own.device)
    for a, b in zip(*(torch.split(part.flatten(), PART) for part in (own, again)), strict=True):
        first, second = a.double(), b.double()
        change = change.hypot(torch.where(first == second, 0.0, first - second).norm())
        size = size.hypot(first.masked_fill(first.isinf(), 0.0).norm())
    return torch.div(change, size.clamp_min(torch.finfo(torch.float64).tiny))
