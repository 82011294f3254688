"""Watch a model's attention, or replace its kernel: inside a `with`, or permanently (`install`)."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Any, TypeGuard, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from attnlens.errors import ModelError
from attnlens.kernels import OWN, Kernel
from attnlens.kernels.attention import Route, attend
from attnlens.kernels.attention.rows import split_mask
from attnlens.models.trace import NOT_FINITE, Keywords, Refused, pair_heads, remove_hooks, trace_attention
from attnlens.records import Call, Site

PIECES = ("Output", "Projection", "Structure", "Bias", "MLP", "Norm", "Residual")
"""Endings of class names that contain "Attention" although the module does not compute attention."""

Implementations = list[tuple[PreTrainedConfig, str | None]]
"""Pairs of a configuration and the name of its attention implementation."""


@contextmanager
def implementation(model: PreTrainedModel, name: str, in_place_of_eager: str | None = None) -> Iterator[None]:
    """Inside the `with`, set each attention implementation to `name`, or to `in_place_of_eager` where it was eager."""
    previous = _list_implementations(model)
    try:
        _choose(model, previous, name, in_place_of_eager or name)
        yield
    finally:
        for config, original in previous:
            # private: the public setter `_attn_implementation` would also change subconfigurations
            config._attn_implementation_internal = original


def _choose(model: PreTrainedModel, previous: Implementations, name: str, in_place_of_eager: str) -> bool:
    """Set the attention implementation of each part that uses transformers' interface; return True if any part does."""

    def can_set(part: nn.Module) -> TypeGuard[PreTrainedModel]:
        # private: transformers has no public test; its setter only logs a warning about a class without the interface
        return isinstance(part, PreTrainedModel) and part._can_set_attn_implementation()

    # the outermost model also sets the implementation of its submodels
    parts = [model] if can_set(model) else list(filter(can_set, model.modules()))
    for part in parts:
        part.set_attn_implementation(name)
    for config, original in previous:
        if original == "eager" and config._attn_implementation == name:
            config._attn_implementation_internal = in_place_of_eager
    return bool(parts)


def list_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the distinct configurations of the model and its parts."""
    # `vars`, since getattr is slow for the modules without a configuration, and every pass calls this function
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    nested = [getattr(config, name, None) for config in configs.values() for name in getattr(config, "sub_configs", {})]
    configs |= {id(config): config for config in nested}
    return [config for config in configs.values() if isinstance(config, PreTrainedConfig)]


def _list_implementations(model: PreTrainedModel) -> Implementations:
    # private: no public attribute of a configuration has the name
    configs = [config for config in list_configs(model) if hasattr(config, "_attn_implementation")]
    return [(config, config._attn_implementation) for config in configs]


def out_of_reach(
    model: PreTrainedModel, refused: Mapping[str, str] | None = None, ran: Iterable[nn.Module] | None = None
) -> ModelError:
    """Build the error for a model without readable attention.

    `refused` maps the paths of unreadable modules to reasons, and `ran` contains the modules that ran (None: unknown).
    """
    name = type(model).__name__
    remedy = "Choose another model: `attnlens list architectures` lists the supported model types."
    if refused:
        path, reason = next(iter(refused.items()))
        if reason.endswith(NOT_FINITE):
            remedy = "Check the model's weights for NaN and infinity."
        return ModelError(f"The attention of {name} can't be read: at {path}, {reason}.", remedy)
    if not any(map(is_attention, model.modules())):
        return ModelError(f"{name} has no softmax attention that attnlens can reach.", remedy)
    if ran is not None and not any(map(is_attention, ran)):
        return ModelError(f"{name} does not run attention on this input.", "Give an input that reaches its attention.")
    problem = f"{name} has its own attention code, which does not multiply values by a softmax of query–key products."
    return ModelError(problem, remedy)


def is_attention(module: nn.Module) -> bool:
    """Return True if the name of a module's class contains "Attention" and does not end in one of PIECES."""
    name = type(module).__name__
    return "Attention" in name and not name.endswith(PIECES)


def read_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, more: Keywords
) -> Call:
    """Convert the arguments of transformers' attention function to a Call; raise ModelError if they are unsupported."""
    scaling, is_causal, name = more.get("scaling"), more.get("is_causal"), type(module).__name__
    if more.get("sinks") is not None:
        problem = f"{name} has a separate sink for every query, which attnlens does not support yet."
        raise ModelError(problem, "Choose another model; one sink per head is supported.")
    if isinstance(scaling, complex):  # a setting in config.json is negative, and the model took its square root
        raise ModelError(f"{name} scales its scores by a complex number, {scaling:.3g}.", "Correct config.json.")
    key, value = pair_heads(key, value)
    if mask is not None:  # a mask can have one row for all queries (LightGlue)
        mask = mask[..., : key.shape[2]].expand(*mask.shape[:-2], query.shape[2], -1)
    allowed, added = split_mask(mask)
    bias = more.get("position_bias")
    if bias is not None and added is not None:
        bias = bias + added
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    causal = mask is None and query.shape[2] > 1 and bool(is_causal)  # the rule of transformers' SDPA function
    places, softcap, sinks = (more.get(name) for name in ("position_ids", "softcap", "s_aux"))
    places = places if isinstance(places, Tensor) and places.shape[1:] == query.shape[2:3] else None
    dropout = (more.get("dropout") or 0.0) if module.training else 0.0
    terms = allowed, causal, added if bias is None else bias, softcap, sinks, dropout
    call = Call(query, key, value, scale, *terms, module=module, places=places)
    # In sparse models, an indexer chooses the keys of each query, by indices of keys or of blocks (MiniMax-M3).
    indices, blocks = more.get("indices"), more.get("block_indices")
    if indices is None and blocks is None:
        return call
    chosen = query.new_zeros(query.shape[0], 1, query.shape[2], key.shape[2], dtype=torch.bool)
    if indices is not None:
        chosen = chosen.scatter(-1, indices.long()[:, None], True)
    else:
        indexer = cast("Any", module).indexer
        chosen = indexer.build_block_mask(blocks, ~chosen, key.shape[2], query.dtype, query.device, None) == 0
    visible = call.visible()
    return dataclasses.replace(call, allowed=chosen if visible is None else chosen & visible, causal=False)


NAMES = "attnlens_"  # prefix of the attention functions that attnlens registers with transformers
_name_numbers = count()
_answered_models: WeakSet[nn.Module] = WeakSet()
"""Models whose attention is being replaced; a configuration does not show this if all attention is hand-written."""


@contextmanager
def answer_calls(
    model: PreTrainedModel,
    answer: Callable[[Call], Tensor],
    *,
    modules: Collection[nn.Module] | None = None,
    content: Collection[Tensor] | None = None,
    prove: bool = False,
) -> Iterator[Refused]:
    """Compute all attention of `model` with `answer` inside the `with`; yield {unreadable module: reason}.

    Hand-written attention is traced in `modules` (None: in all). See `trace_attention` for `content` and `prove`.
    """
    names = _register(f"{NAMES}{next(_name_numbers)}", answer)
    trace: AbstractContextManager[Refused] = nullcontext({})
    if modules is None or modules:
        trace = trace_attention(model, answer, modules=modules, content=content, prove=prove)
    outermost = model not in _answered_models
    _answered_models.add(model)
    try:
        with implementation(model, *names), trace as refused:
            yield refused
    finally:
        if outermost:
            _answered_models.discard(model)
        for name in names:  # private: transformers has no function to unregister
            del AttentionInterface._global_mapping[name]
            del AttentionMaskInterface._global_mapping[name]


def install(model: PreTrainedModel, name: str, answer: Callable[[Call], Tensor]) -> None:
    """Permanently compute a model's attention with `answer`, registered as `name`.

    Raises ModelError if no part of the model uses transformers' attention interface.
    """
    if not _choose(model, _list_implementations(model), *_register(name, answer)):
        raise out_of_reach(model)


def _register(name: str, answer: Callable[[Call], Tensor]) -> tuple[str, str]:
    """Register `answer` with transformers; return its names, one to replace SDPA and one to replace eager attention."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, None]:
        # private: the public `DisableTorchFunctionSubclass` does not disable modes, but the answer must not be traced
        with torch._C.DisableTorchFunction():
            output = answer(read_call(module, query, key, value, attention_mask, more))
            # transformers' own functions return contiguous tensors, and some modules rely on it
            return output.contiguous(), None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)  # without it, transformers silently passes None as the mask
    # eager functions do not add a causal mask
    AttentionInterface.register(f"{name}_eager", lambda *args, **more: attention(*args, **more | {"is_causal": False}))
    AttentionMaskInterface.register(f"{name}_eager", eager_mask)
    return name, f"{name}_eager"


@dataclass(frozen=True)
class CallCounter:
    """Number of calls to each attention module while attention is watched or replaced."""

    calls: Counter[str] = field(default_factory=Counter)  # keyed by the module's path


@dataclass(frozen=True)
class Replacement:
    """The kernel that replaces the model's own kernel at a site, and the heads that use the new kernel."""

    kernel: Kernel  # new kernel; parameters fitted to single heads are in the order of `heads`
    heads: tuple[int, ...] | None = None  # query heads; None for all


Swaps = Mapping[Site, Replacement]  # maps each swapped site to its replacement


def watch(
    model: PreTrainedModel,
    sites: tuple[Site, ...],
    visit: Callable[[Site, Call], None],
    answered: Callable[[Site, Tensor], None] | None = None,
) -> AbstractContextManager[CallCounter]:
    """Inside the `with`, pass each attention computation to `visit`, and its output to `answered`.

    `sites` are all sites of the model. The attention is recomputed with the model's own kernel.
    """
    swaps = dict.fromkeys(sites, Replacement(OWN))
    return replace(model, sites, swaps, every_site=False, visit=visit, answered=answered)


@contextmanager
def replace(
    model: PreTrainedModel,
    sites: tuple[Site, ...],
    swaps: Swaps,
    path: Route = "auto",
    *,
    every_site: bool = True,
    visit: Callable[[Site, Call], None] | None = None,
    answered: Callable[[Site, Tensor], None] | None = None,
) -> Iterator[CallCounter]:
    """Inside the `with`, use the new kernels at the sites of `swaps`, and the model's own kernel at all other sites.

    `sites` are all sites of the model; if any other module runs attention, ModelError is raised. `path` chooses the
    algorithm for the new kernels. `visit` gets each attention computation at the sites of `swaps`, and `answered` gets
    its output, (batch, queries, heads, value_dim). Raises UsageError if a new kernel does not support its site. With
    `every_site`, raises ModelError at the end of the `with` if a site of `swaps` was never reached.
    """
    by_path = defaultdict[str, list[Site]](list)
    for site in sorted(sites, key=attrgetter("ordinal")):
        by_path[site.path].append(site)
    paths = {module: path for path, module in model.named_modules()}
    counter = CallCounter()
    calls = counter.calls  # the number of a module's earlier calls identifies the site

    def begin_pass(*_: object) -> None:
        # if an exception ended the last pass, round its counts up to a whole pass
        for path in calls:
            calls[path] += -calls[path] % len(by_path[path])

    def answer(call: Call) -> Tensor:
        place = paths[cast("nn.Module", call.module)]
        if place not in by_path:
            problem = f"{place} runs on this input, but did not run on the input used to find the sites."
            raise ModelError(problem, "Give an input of the same kind as the one used to find the sites.")
        site = by_path[place][calls[place] % len(by_path[place])]
        calls[place] += 1
        call = dataclasses.replace(call, cross=site.part == "cross")
        if site not in swaps:
            return attend(call, OWN)
        if visit is not None:
            visit(site, call)
        output = attend_swapped(call, swaps[site], path)
        if answered is not None:
            answered(site, output)
        return output

    traced = [model.get_submodule(site.path) for site in sites if site.traced]
    with remove_hooks([model.register_forward_pre_hook(begin_pass)]), answer_calls(model, answer, modules=traced):
        yield counter
    missed = [site.name for site in swaps if not calls[site.path]]
    if missed and every_site:
        problem = (
            f"The forward pass never reached {len(missed)} of {len(swaps)} swapped sites, for example {missed[0]}."
        )
        raise ModelError(problem, "Run a forward pass that uses these layers, or leave them out with --layers.")


def attend_swapped(call: Call, swap: Replacement, path: Route = "auto") -> Tensor:
    """Compute the output, (batch, queries, heads, value_dim), of a call with the kernel replaced as in `swap`."""
    total = call.query.shape[1]
    if swap.heads is None or swap.heads == tuple(range(total)):
        return attend(call, swap.kernel, path)
    others = [head for head in range(total) if head not in swap.heads]
    parts = attend(call.select(others), OWN), attend(call.select(swap.heads), swap.kernel, path)
    order = torch.tensor([*others, *swap.heads], device=call.query.device).argsort()
    return torch.cat(parts, dim=2)[:, :, order]


def is_answered(model: PreTrainedModel) -> bool:
    """Return True if attnlens currently replaces the model's attention, in a `with` block or permanently."""
    return model in _answered_models or any((name or "").startswith(NAMES) for _, name in _list_implementations(model))
