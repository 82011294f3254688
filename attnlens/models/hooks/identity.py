"""Replay a model's blocks, and measure how much its outputs change if attnlens recomputes the attention."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.errors import is_memory
from attnlens.kernels import OWN
from attnlens.kernels.attention import attend
from attnlens.models.hooks.interface import answer_calls, implementation
from attnlens.models.hooks.survey import SiteCall, as_float64, forward, real_outputs, survey
from attnlens.models.trace import call_arguments, remove_hooks, trace_attention
from attnlens.records import Call, Site


def blocks(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[tuple[str, nn.Module]]:
    """Return the path and module of each block that runs exactly once in a forward pass, in order of execution.

    Blocks are the elements of the outermost module lists. A model that calls one module repeatedly (ALBERT) has none.
    """
    in_lists: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in in_lists.values()):
            for index, block in enumerate(module):
                in_lists.setdefault(block, f"{path}.{index}")
    order: list[nn.Module] = []
    handles = [block.register_forward_hook(lambda module, _args, _output: order.append(module)) for block in in_lists]
    with remove_hooks(handles), torch.no_grad():
        forward(model, inputs)
    calls = Counter(order)
    return [(in_lists[block], block) for block in order if calls[block] == 1]


@contextmanager
def record_outputs(blocks: Sequence[tuple[str, nn.Module]]) -> Iterator[dict[str, object]]:
    """Record the output of each block in the forward pass inside the `with`, keyed by the block's path."""
    paths = {block: path for path, block in blocks}
    outputs: dict[str, object] = {}

    def record(module: nn.Module, _args: object, output: object) -> None:
        outputs[paths[module]] = output

    with remove_hooks([block.register_forward_hook(record) for block in paths]):
        yield outputs


@contextmanager
def replay_outputs(
    blocks: Sequence[tuple[str, nn.Module]], outputs: Mapping[str, object], site: Site
) -> Iterator[None]:
    """Replay the recorded outputs of the blocks that run before the block of `site`, instead of computing them.

    The result is exact if all changes are in that block or later. If no block contains the site, all are computed.
    """
    containing = [index for index, (path, _) in enumerate(blocks) if site.path.startswith(f"{path}.")]
    earlier = blocks[: containing[0]] if containing else []
    for path, block in earlier:
        block.forward = lambda *_args, _output=outputs[path], **_kwargs: _output
    try:
        yield
    finally:
        for _, block in earlier:
            del block.forward  # makes the method of the class visible again


@contextmanager
def collect_weights(model: PreTrainedModel, sites: Sequence[SiteCall], collected: dict[Site, Tensor]) -> Iterator[None]:
    """Collect in `collected` the attention weights that transformers' eager attention computes inside the `with`.

    They come from the site's softmax if its shape fits; otherwise (a sink adds a column) from the module's output.
    """
    by_call = {(target.module, target.site.ordinal): target for target in sites}
    softmaxes, calls = Counter[nn.Module](), Counter[nn.Module]()

    def collect(module: nn.Module, ordinal: int, weights: object) -> None:
        target = by_call.get((module, ordinal))
        shape = () if target is None else (*target.call.query.shape[:3], target.call.key.shape[2])
        if target is not None and isinstance(weights, Tensor) and weights.shape == shape:
            collected[target.site] = weights

    def collect_softmax(module: nn.Module, weights: Tensor) -> None:
        collect(module, softmaxes[module], weights)
        softmaxes[module] += 1

    def search_output(module: nn.Module, _args: object, output: object) -> None:
        calls[module] += 1
        for part in output if isinstance(output, tuple) and softmaxes[module] < calls[module] else ():
            collect(module, calls[module] - 1, part)  # keeps the last one: T5 returns its position bias first

    handles = [module.register_forward_hook(search_output) for module in {target.module for target in sites}]
    unused = attrgetter("value")  # the model does not use the answer
    tracer = trace_attention(model, unused, prove=True, on_weights=collect_softmax)
    with remove_hooks(handles), implementation(model, "eager"), tracer:
        yield


IDENTITY_TOLERANCE = 1e-5
"""Largest relative difference between a model's outputs and those under attention recomputed by attnlens.

float64 rebuilds of 44 architectures differ by at most 2e-6; a dropped softcap or mask moves outputs by over 0.1.
"""
PART = 2**22  # output numbers compared at once, to limit the memory of their float64 copies

Precise = Callable[[SiteCall], AbstractContextManager[tuple[PreTrainedModel, nn.Module]]]
"""Maps a site to a context in which its module, and the model the module belongs to, compute in float64."""


def identity_error(model: PreTrainedModel, inputs: Mapping[str, Tensor], precise: Precise | None = None) -> float:
    """Compute ‖original − recomputed‖ / ‖original‖ over the model's outputs.

    Rounding alone can exceed the tolerance in a deep, saturated or half-precision model. Such a model is measured site
    by site: each module computes in float64 on its inputs in the unmodified model, so that any remaining difference is
    real. The first error is returned if a module cannot run alone in float64, or if the model does not repeat its own
    outputs. `precise` provides the float64 modules; None widens the model's own, one by one.
    """
    error = difference(model, inputs, answer_calls(model, recompute))
    may_be_rounding = error > IDENTITY_TOLERANCE and model.dtype != torch.float64
    if not may_be_rounding or repeat_error(model, inputs) > IDENTITY_TOLERANCE:
        return error
    try:
        return largest_site_error(model, inputs, precise or partial(widen, model))
    except RuntimeError as failure:
        if is_memory(failure):
            raise
        return error  # a module converts some of its numbers to float32 itself


def recompute(call: Call) -> Tensor:
    """Compute the model's own attention from its queries and keys: (batch, queries, heads, value_dim)."""
    return attend(call, OWN, "eager")


def largest_site_error(model: PreTrainedModel, inputs: Mapping[str, Tensor], precise: Precise) -> float:
    """Return the largest error of any site's module on its own inputs, measured in one pass of the unmodified model."""
    waiting: dict[nn.Module, list[SiteCall]] = defaultdict(list)
    for target in survey(model, inputs):
        waiting[target.module].append(target)
    errors: list[Tensor] = []

    def check(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], _output: object) -> None:
        if pending := waiting[module]:
            waiting[module] = []  # calls made during the check are not part of the model's own pass
            errors.append(_site_error(pending[0], call_arguments(module, args, kwargs), inputs, precise))
            waiting[module] = pending[1:]

    hooks = [module.register_forward_hook(check, with_kwargs=True) for module in list(waiting)]
    with remove_hooks(hooks), torch.no_grad():
        forward(model, inputs)
    return float(torch.stack(errors).max())


def _site_error(
    target: SiteCall, arguments: Mapping[str, object], inputs: Mapping[str, Tensor], precise: Precise
) -> Tensor:
    """Compute ‖original − recomputed‖ / ‖original‖ of one module in float64, on its inputs in the unmodified model.

    The masks and positions are those of each implementation. Raises RuntimeError if the module computes no attention
    when run alone, so that nothing was recomputed.
    """
    calls: list[Call] = []

    def answer(call: Call) -> Tensor:
        calls.append(call)
        return recompute(call)

    with precise(target) as (model, module):
        device = next(module.parameters()).device
        original, others, masks = (as_float64(part, device) for part in (arguments, target.arguments, dict(inputs)))
        sequences = {name: original[name] for name in (target.input_name, target.other) if name is not None}
        outputs = [module(**original)]
        traced = [module] if target.site.traced else []
        with answer_calls(model, answer, modules=traced, content=list(sequences.values())):
            outputs.append(module(**others | sequences))
    if not calls:
        raise RuntimeError(f"{target.site.path} computes no attention when called on its own")
    first, second = (real_outputs(output if isinstance(output, tuple) else (output,), masks)[0] for output in outputs)
    return _relative_difference(first, second)


@contextmanager
def widen(model: PreTrainedModel, target: SiteCall) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Let the site's module compute in float64 inside the `with`, and restore its original numbers at the end."""
    module = target.module
    originals = {part: part.data for part in (*module.parameters(), *module.buffers()) if part.is_floating_point()}
    upcasting = _stop_upcasting(module)
    try:
        for part in originals:
            part.data = part.data.double()
        yield model, module
    finally:
        for part, data in originals.items():
            part.data = data
        for inner in upcasting:
            inner.reorder_and_upcast_attn = True  # type: ignore[assignment]


def _stop_upcasting(module: nn.Module) -> list[nn.Module]:
    """Change and return the parts that were set to compute their attention in float32 whatever their dtype (GPT-2)."""
    upcasting = [part for part in module.modules() if getattr(part, "reorder_and_upcast_attn", False)]
    for part in upcasting:
        part.reorder_and_upcast_attn = False  # type: ignore[assignment]  # torch types every attribute a tensor
    return upcasting


def allow_float64(model: PreTrainedModel) -> None:
    """Switch off what refuses float64 in a model loaded by attnlens: grouped experts, and GPT-2's float32 attention."""
    for module in model.modules():
        # private: transformers offers no public test of whether a model has such experts
        if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
            module.set_experts_implementation("eager")
    _stop_upcasting(model)


def as_dtype(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert the floating-point tensors among the inputs (pixels, audio features) to `dtype`."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def repeat_error(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> float:
    """Return the relative difference between two passes of the unmodified model: 0 unless the model is random."""
    return difference(model, inputs, nullcontext())


def difference(model: PreTrainedModel, inputs: Mapping[str, Tensor], change: AbstractContextManager[object]) -> float:
    """Compute ‖original − changed‖ / ‖original‖ of the output that changes most inside `change`."""
    with torch.no_grad():
        original = real_outputs(forward(model, inputs), inputs)
        with change:
            changed = real_outputs(forward(model, inputs), inputs)
    pairs = zip(original, changed, strict=True)
    return float(torch.stack([_relative_difference(*pair) for pair in pairs]).max())  # max is NaN if one is


def _relative_difference(original: Tensor, changed: Tensor) -> Tensor:
    """Compute ‖original − changed‖ / ‖original‖ in float64, in parts, since predictions for long texts are large.

    Numbers that are infinite in both tensors count as equal (Grounding DINO's hidden words).
    """
    change = size = torch.zeros((), dtype=torch.float64, device=original.device)
    for a, b in zip(*(torch.split(part.flatten(), PART) for part in (original, changed)), strict=True):
        first, second = a.double(), b.double()
        change = change.hypot(torch.where(first == second, 0.0, first - second).norm())
        size = size.hypot(first.masked_fill(first.isinf(), 0.0).norm())
    return torch.div(change, size.clamp_min(torch.finfo(torch.float64).tiny))
