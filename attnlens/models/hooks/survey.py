"""List the attention sites of a forward pass, and measure how much outputs change when attention is recomputed."""

from __future__ import annotations

import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from attnlens.choices import Part
from attnlens.errors import ModelError, is_memory
from attnlens.kernels import OWN
from attnlens.kernels.attention import attend
from attnlens.models.hooks.interface import answer_calls, implementation, is_attention, list_configs, out_of_reach
from attnlens.models.loading.placement import device_of_inputs
from attnlens.models.trace import NOT_FINITE, Keywords, Refused, call_arguments, remove_hooks, tensors, trace_attention
from attnlens.records import Call, Site
from attnlens.wording import group_pairs

PARTS_BY_MODALITY: dict[str, Part] = {"image": "vision", "video": "vision", "audio": "audio", "text": "text"}
"""Part of a model that reads each modality, keyed by transformers' name for the modality."""


def towers(model: PreTrainedModel) -> dict[nn.Module, Part]:
    """Map each module to the modality (vision, audio or text) that the innermost submodel around it reads.

    The decoder of an encoder–decoder, and submodels with several or unknown modalities, are left out. Return {} unless
    there are at least two different modalities.
    """
    by_module: dict[nn.Module, Part | None] = {}
    for inner in model.modules():  # outer modules first
        if isinstance(inner, PreTrainedModel) and inner is not model:
            declared = inner.input_modalities
            modalities = [declared] if isinstance(declared, str) else declared
            parts = {PARTS_BY_MODALITY[modality] for modality in modalities if modality in PARTS_BY_MODALITY}
            by_module |= dict.fromkeys(inner.modules(), parts.pop() if len(parts) == 1 else None)
    decoder = model.get_decoder() if model.config.is_encoder_decoder else None  # type: ignore[no-untyped-call]
    if isinstance(decoder, nn.Module):
        by_module |= dict.fromkeys(decoder.modules())
    known = {module: part for module, part in by_module.items() if part is not None}
    return known if len(set(known.values())) > 1 else {}


CROSS_INPUTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Parameters that pass the sequence from which keys are computed to transformers' cross-attention modules."""

UNTRACED = "it does not multiply values by a softmax of query–key products"
"""Reason reported if a module whose class name contains "Attention" runs but is not a site."""


@dataclass(frozen=True)
class SiteCall:
    """A site reached by a forward pass, with the call of the site's module."""

    site: Site
    module: nn.Module
    arguments: Keywords  # arguments of the module's call, keyed by parameter name
    call: Call  # the attention computation that the module requested

    @property
    def input_name(self) -> str:
        """Name of the module's input: by transformers' convention its first floating-point tensor argument."""
        return next(name for name, value in self.arguments.items() if _is_floating(value))

    @property
    def other(self) -> str | None:
        """Name of the argument from which cross-attention computes its keys; None in self-attention."""
        return _other_input(self.arguments)

    @property
    def layout(self) -> tuple[int, ...]:
        """Permutation of the inputs' axes that gives (batch, tokens, …, d_model); the identity if none fits."""
        hidden, query = self.arguments[self.input_name], self.call.query
        usual = tuple(range(hidden.dim()))
        for axes in (usual, (1, 0, *usual[2:]), (0, *usual[2:], 1)) if hidden.dim() > 2 else ():
            batch, *tokens, _ = (hidden.shape[axis] for axis in axes)
            if (batch, math.prod(tokens)) == (query.shape[0], query.shape[2]):
                return axes
        return usual

    def sequences(self, hidden: Tensor, layout: tuple[int, ...] | None = None) -> Tensor:
        """Permute an input by `layout` (or `self.layout`) to (batch, tokens, …, d_model); add a missing batch axis."""
        return hidden[None] if hidden.dim() == 2 else hidden.permute(layout or self.layout)

    def inputs(self, layout: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Return the inputs for queries and keys, with axes as in `sequences`; in self-attention, the two are equal."""
        names = self.input_name, self.other or self.input_name
        return self.sequences(self.arguments[names[0]], layout), self.sequences(self.arguments[names[1]], layout)


@dataclass(frozen=True)
class Survey:
    """The attention found in one forward pass of a model."""

    model: PreTrainedModel
    sites: list[SiteCall]  # in the order of their calls
    ran: set[nn.Module]  # modules that ran
    refused: Refused  # modules whose hand-written attention cannot be read, and the reasons

    @property
    def missed(self) -> dict[str, str | None]:
        """Reason why an attention module is not a site, keyed by its path; None for a module that did not run."""
        named = dict(self.model.named_modules())
        parts_of_sites = {part for target in self.sites for part in target.module.modules()}
        refused = {name: self.refused[module] for name, module in named.items() if module in self.refused}
        missed: dict[str, str | None] = dict(refused)
        for name, module in named.items():
            if not is_attention(module):
                continue
            covered = any(f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in refused)
            parts = list(module.modules())
            innermost = not any(map(is_attention, parts[1:]))
            if innermost and not covered and parts_of_sites.isdisjoint(parts):
                missed[name] = UNTRACED if module in self.ran else None
        return missed


def survey(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[SiteCall]:
    """Return the sites of one forward pass in order of execution; raise ModelError if no attention can be read."""
    return run_survey(model, inputs).sites


def run_survey(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Survey:
    """Run a forward pass and return the attention found; raise ModelError if none can be read.

    If any attention is not finite, and parameters contain NaN or infinity, run a second pass with 0 in their place.
    """
    paths = {module: path for path, module in model.named_modules()}
    running: dict[nn.Module, tuple[tuple[object, ...], dict[str, object]]] = {}  # module → arguments
    ran = set[nn.Module]()
    calls = list[tuple[nn.Module, Call, Keywords]]()

    def enter(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        running[module] = args, kwargs
        ran.add(module)

    def leave(module: nn.Module, *_: object) -> None:
        running.pop(module, None)

    def answer(call: Call) -> Tensor:
        module = cast("nn.Module", call.module)
        if not min(call.query.shape[2], call.key.shape[2]):
            problem = f"{paths[module]} receives no tokens from this input."
            raise ModelError(problem, "Give an input that has tokens for this module.")
        calls.append((module, call, call_arguments(module, *running[module])))
        return recompute(call)

    # hook all modules, since it is not known which compute attention
    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in paths]
    hooks += [module.register_forward_hook(leave) for module in paths]
    with remove_hooks(hooks), torch.no_grad(), answer_calls(model, answer, prove=True) as refused:
        forward(model, inputs)
    if any(reason.endswith(NOT_FINITE) for reason in refused.values()):
        with finite_weights(model) as replaced:
            if replaced:  # NaN in one layer makes all later states NaN, but says nothing about later attention
                return run_survey(model, inputs)
    calls = [call for call in calls if call[0] not in refused]
    if not calls:
        raise out_of_reach(model, {paths[module]: reason for module, reason in refused.items()}, ran)

    total, ordinals, tower_of = Counter(module for module, _, _ in calls), Counter[nn.Module](), towers(model)
    sites = list[Site]()
    for layer, (module, call, arguments) in enumerate(calls):
        part, ordinal, repeated = _part(call, arguments), ordinals[module], total[module] > 1
        part = tower_of.get(module, part) if part == "encoder" else part
        sites.append(Site(paths[module], ordinal, layer, part, repeated=repeated, traced=call.traced))
        ordinals[module] += 1
    called = [
        SiteCall(site, module, arguments, call)
        for site, (module, call, arguments) in zip(number_within_parts(sites), calls, strict=True)
    ]
    return Survey(model, called, ran, refused)


@contextmanager
def finite_weights(model: PreTrainedModel) -> Iterator[bool]:
    """Inside the `with`, set the model's NaN and infinite parameters to 0; yield True if there are any."""
    replaced = [
        (weight.data, places, weight.data[places])
        for weight in model.parameters()
        if weight.is_floating_point() and not weight.is_meta and bool((places := ~weight.data.isfinite()).any())
    ]
    try:
        for data, places, _ in replaced:
            data[places] = 0
        yield bool(replaced)
    finally:
        for data, places, before in replaced:
            data[places] = before


def number_within_parts(sites: Sequence[Site]) -> list[Site]:
    """Return the sites, with layers numbered within each part (encoder, decoder …) if there are several parts."""
    by_part = group_pairs((site.part, site) for site in sites)
    if len(by_part) == 1:
        return list(sites)
    numbers = {
        site: number for part in by_part.values() for site, number in zip(part, _find_layer_numbers(part), strict=True)
    }
    return [replace(site, number=numbers[site]) for site in sites]


def _find_layer_numbers(sites: Sequence[Site]) -> Sequence[int]:
    """Return the layer number in each site's path or, if these numbers are ambiguous, each site's index."""
    indices = [tuple(int(name) for name in site.path.split(".") if name.isdecimal()) for site in sites]
    if len({len(index) for index in indices}) > 1:
        return range(len(sites))
    columns = list(zip(*indices, strict=True))
    varying = [column for column in columns if len(set(column)) > 1] or columns  # with a single layer, no column varies
    unique = len(varying) == 1 and len(set(varying[0])) == len(sites)
    return varying[0] if unique else range(len(sites))


def forward(model: PreTrainedModel, inputs: Mapping[str, Tensor], **more: object) -> Any:
    """Run the model without a cache; return its outputs. In eval mode, every pass uses the same random numbers."""
    # set in all configurations, because submodels do not receive the argument `use_cache`
    caching = [config for config in list_configs(model) if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    device, draws = device_of_inputs(model), not model.training
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], enabled=draws):
            if draws and device.type == "cpu":
                torch.default_generator.manual_seed(0)
            elif draws:  # slower: seeds all devices, and records a stack trace for uninitialised ones
                torch.manual_seed(0)
            return model(**inputs, **without_cache(model), **more)
    finally:
        for config in caching:
            config.use_cache = True


def without_cache(model: PreTrainedModel) -> dict[str, bool]:
    """Return the keyword argument that turns off the cache; return {} if the model's `forward` has no such argument."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def without_logits(model: PreTrainedModel) -> dict[str, int]:
    """Return the keyword argument that limits logits to the last position; {} if `forward` has no such argument."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def real_outputs(result: object, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the floating-point outputs without padding: top-level tensors or, if there are none, nested tensors."""
    values = result.to_tuple() if isinstance(result, ModelOutput) else cast("tuple[object, ...]", result)
    outputs = list(filter(_is_floating, values)) or list(filter(_is_floating, tensors(values)))
    return [at_real_tokens(output, inputs) for output in outputs]


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def as_float64(value: Any, device: torch.device | None = None) -> Any:
    """Convert floating-point and complex tensors in a nested value to double precision; move tensors to `device`."""
    if isinstance(value, Tensor):
        value = value if device is None else value.to(device)
        wide = torch.complex128 if value.is_complex() else torch.float64
        return value.to(wide) if value.is_complex() or value.is_floating_point() else value
    if type(value) in (tuple, list):  # not a named tuple, whose fields a module may access
        return type(value)(as_float64(part, device) for part in value)
    return {name: as_float64(part, device) for name, part in value.items()} if type(value) is dict else value


def at_real_tokens(tensor: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Remove padding from (batch, tokens, …) and return (real tokens, …); if no mask fits, return the tensor itself."""
    mask = _padding_mask(tensor, inputs)
    if mask is None:
        return tensor
    return tensor.flatten(0, 1) if bool(mask.all()) else tensor[mask.bool()]  # flattening takes no memory


def real_tokens(tensor: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return a float32 mask, (batch, tokens), for a tensor (batch, tokens, …): 0 at padding, otherwise 1."""
    mask, ones = _padding_mask(tensor, inputs), tensor.new_ones(tensor.shape[:2], dtype=torch.float32)
    return ones if mask is None else mask.to(ones)


def _padding_mask(tensor: Tensor, inputs: Mapping[str, Tensor]) -> Tensor | None:
    masks = [inputs[name] for name in ("decoder_attention_mask", "attention_mask") if name in inputs]
    return next((mask for mask in masks if mask.shape == tensor.shape[:2]), None)


def _other_input(arguments: Mapping[str, object]) -> str | None:
    """Return the name of the argument from which cross-attention computes its keys; None in self-attention."""
    query, key = arguments.get("query"), arguments.get("key")
    named = [name for name in CROSS_INPUTS if arguments.get(name) is not None]
    between = isinstance(query, Tensor) and isinstance(key, Tensor) and query is not key
    return next(iter([*named, *["key"] * between]), None)


def _part(call: Call, arguments: Mapping[str, object]) -> Part:
    if _other_input(arguments) is not None or call.query.shape[2] != call.key.shape[2]:
        return "cross"
    above = torch.ones(call.query.shape[2], call.key.shape[2], dtype=torch.bool, device=call.query.device).triu(1)
    visible = call.visible()
    causal = visible is not None and bool(above.any()) and not bool((visible & above).any())
    return "decoder" if causal else "encoder"


@contextmanager
def record_inputs(sites: Iterable[SiteCall]) -> Iterator[dict[nn.Module, Tensor]]:
    """Inside the `with`, record each site's latest input, (batch, tokens, …, d_model); yield {module: input}."""
    latest: dict[nn.Module, Tensor] = {}
    by_module = {target.module: target for target in sites}

    def record(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        site = by_module[module]
        latest[module] = site.sequences(call_arguments(module, args, kwargs)[site.input_name])

    with remove_hooks([module.register_forward_pre_hook(record, with_kwargs=True) for module in by_module]):
        yield latest


def hide_padding(call: Call, inputs: Mapping[str, Tensor]) -> Call:
    """Return a cross-attention call with all keys hidden from queries at padding, and any other call unchanged."""
    mask = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
    if not call.cross or mask is None or mask.shape != call.query.shape[::2] or bool(mask.all()):
        return call
    real = mask.bool()[:, None, :, None].expand(-1, 1, -1, call.key.shape[2])
    return replace(call, allowed=real if call.allowed is None else call.allowed & real)


def iterate_unpadded(call: Call, site: Site, inputs: Mapping[str, Tensor]) -> Iterator[Call]:
    """Yield one call per sequence, without padding; if no token is padding, yield only `call`, for the whole batch."""
    masked = hide_padding(call, inputs)
    for batch, queries, keys in real_parts(masked.allowed, call.query.shape[0], site.part):
        yield call if isinstance(queries, slice) else masked.sequences(batch, queries, keys)


def real_parts(
    allowed: Tensor | None, sequences: int, part: Part
) -> Iterator[tuple[list[int], Tensor | slice, Tensor | slice]]:
    """Yield ([index of a sequence], indices of queries, indices of keys) for each sequence, without padding.

    Keys that no query sees are padding. In cross-attention, queries that see no key are padding; in self-attention,
    queries have the same padding as keys. Sequences that are all padding are skipped. A batch without padding is
    yielded as one item.
    """
    keys = queries = torch.ones(1, 1, dtype=torch.bool)
    if allowed is not None:
        keys = allowed.any(dim=-2).any(dim=-2).expand(sequences, -1)
        queries = allowed.any(dim=-1).any(dim=-2).expand(sequences, -1) if part == "cross" else keys
    if bool(keys.all()) and bool(queries.all()):
        yield list(range(sequences)), slice(None), slice(None)
        return
    for sequence in keys.any(-1).nonzero().flatten().tolist():
        yield [sequence], queries[sequence].nonzero().squeeze(-1), keys[sequence].nonzero().squeeze(-1)


def blocks(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of each element of an outermost ModuleList that runs exactly once, in execution order."""
    in_lists: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in in_lists.values()):
            for index, block in enumerate(module):
                in_lists.setdefault(block, f"{path}.{index}")
    order: list[nn.Module] = []
    handles = [block.register_forward_hook(lambda module, _args, _output: order.append(module)) for block in in_lists]
    with remove_hooks(handles), torch.no_grad():
        forward(model, inputs, **without_logits(model))
    return [(in_lists[block], block) for block, calls in Counter(order).items() if calls == 1]


@contextmanager
def record_outputs(blocks: Sequence[tuple[str, nn.Module]]) -> Iterator[dict[str, object]]:
    """Inside the `with`, record the latest output of each block; yield the outputs, keyed by path."""
    paths = {block: path for path, block in blocks}
    outputs: dict[str, object] = {}

    def record(module: nn.Module, _args: object, output: object) -> None:
        outputs[paths[module]] = output

    with remove_hooks([block.register_forward_hook(record) for block in paths]):
        yield outputs


def place_of(site: Site, blocks: Sequence[tuple[str, nn.Module]]) -> int | None:
    """Return the index of the block that contains `site`, or None if no block does."""
    return next((index for index, (path, _) in enumerate(blocks) if site.path.startswith(f"{path}.")), None)


@contextmanager
def replay_outputs(blocks: Sequence[tuple[str, nn.Module]], outputs: Mapping[str, object]) -> Iterator[None]:
    """Inside the `with`, make `blocks` return their recorded outputs instead of running."""
    for path, block in blocks:
        block.forward = lambda *_args, _output=outputs[path], **_kwargs: _output
    try:
        yield
    finally:
        for _, block in blocks:
            del block.forward  # makes the method of the class visible again


@contextmanager
def collect_weights(model: PreTrainedModel, sites: Sequence[SiteCall], collected: dict[Site, Tensor]) -> Iterator[None]:
    """Store in `collected` the attention weights that transformers' eager attention computes inside the `with`.

    Weights are read from the site's softmax or, if a sink adds a column to the softmax, from the module's output.
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
            # the last part of the right shape counts, because T5 returns its position bias before its weights
            collect(module, calls[module] - 1, part)

    handles = [module.register_forward_hook(search_output) for module in {target.module for target in sites}]
    # with `prove` the model does not use the answer
    tracer = trace_attention(model, attrgetter("value"), prove=True, on_weights=collect_softmax)
    with remove_hooks(handles), implementation(model, "eager"), tracer:
        yield


IDENTITY_TOLERANCE = 1e-5
"""Largest relative difference allowed between a model's outputs and those with recomputed attention. In float64
the difference is at most 2e-6 for 44 architectures, and over 0.1 if a softcap or a mask is omitted."""
PART = 2**22  # numbers compared at once, to limit the memory of their float64 copies

Precise = Callable[[SiteCall], AbstractContextManager[tuple[PreTrainedModel, nn.Module]]]
"""Function that takes a site, and returns a context that yields the model and the site's module in float64."""


def identity_error(model: PreTrainedModel, inputs: Mapping[str, Tensor], precise: Precise | None = None) -> float:
    """Return ‖original − recomputed‖ / ‖original‖ for the output that changes most when attnlens recomputes attention.

    Rounding alone can exceed IDENTITY_TOLERANCE in a deep, saturated or half-precision model. If the error exceeds it,
    the largest error over sites is returned instead, for which each module computes in float64 on its inputs in the
    unmodified model. This step is skipped if the model is already in float64, if a module cannot compute in float64, or
    if two passes of the unmodified model differ by more than the tolerance. `precise` provides the float64 modules; if
    it is None, the model's own modules are converted one by one.
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
    """Compute attention for this call with the model's own kernel; return (batch, queries, heads, value_dim)."""
    return attend(call, OWN, "eager")


def largest_site_error(model: PreTrainedModel, inputs: Mapping[str, Tensor], precise: Precise) -> float:
    """Return the largest error over sites (see `_site_error`), on their inputs in one pass of the unmodified model."""
    waiting = defaultdict[nn.Module, list[SiteCall]](list)
    for target in survey(model, inputs):
        waiting[target.module].append(target)
    errors: list[Tensor] = []

    def check(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], _output: object) -> None:
        if pending := waiting[module]:
            waiting[module] = []  # ignore the calls of this check, which are not part of the model's pass
            errors.append(_site_error(pending[0], call_arguments(module, args, kwargs), inputs, precise))
            waiting[module] = pending[1:]

    hooks = [module.register_forward_hook(check, with_kwargs=True) for module in list(waiting)]
    with remove_hooks(hooks), torch.no_grad():
        forward(model, inputs)
    return float(torch.stack(errors).max())


def _site_error(target: SiteCall, arguments: Keywords, inputs: Mapping[str, Tensor], precise: Precise) -> Tensor:
    """Compute ‖original − recomputed‖ / ‖original‖ for a module's output, in float64.

    Raises RuntimeError if the module computes no attention when called on its own, or can't compute in float64.
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
    """Convert the site's module to float64 inside the `with`; restore its original values at the end."""
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
    """Turn off forced float32 attention (GPT-2's `reorder_and_upcast_attn`); return the changed modules."""
    upcasting = [part for part in module.modules() if getattr(part, "reorder_and_upcast_attn", False)]
    for part in upcasting:
        part.reorder_and_upcast_attn = False  # type: ignore[assignment]  # torch types every attribute a tensor
    return upcasting


def allow_float64(model: PreTrainedModel) -> None:
    """Turn off the batched computation of experts and GPT-2's forced float32 attention: neither supports float64."""
    for module in model.modules():
        # private: transformers has no public test for such experts
        if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
            module.set_experts_implementation("eager")
    _stop_upcasting(model)


def as_dtype(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert floating-point inputs (pixels, audio features) to `dtype`."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def repeat_error(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> float:
    """Return the relative difference between two passes of the unmodified model; it is 0 for a deterministic model."""
    return difference(model, inputs, nullcontext())


def difference(model: PreTrainedModel, inputs: Mapping[str, Tensor], change: AbstractContextManager[object]) -> float:
    """Compute ‖original − changed‖ / ‖original‖ for the output that changes most inside the context `change`."""
    with torch.no_grad():
        original = real_outputs(forward(model, inputs), inputs)
        with change:
            changed = real_outputs(forward(model, inputs), inputs)
    pairs = zip(original, changed, strict=True)
    return float(torch.stack([_relative_difference(*pair) for pair in pairs]).max())  # NaN if a difference is NaN


def _relative_difference(original: Tensor, changed: Tensor) -> Tensor:
    """Compute ‖original − changed‖ / ‖original‖ in float64, chunk by chunk; equal infinities count as no change."""
    change = size = torch.zeros((), dtype=torch.float64, device=original.device)
    for a, b in zip(*(torch.split(part.flatten(), PART) for part in (original, changed)), strict=True):
        first, second = a.double(), b.double()
        change = change.hypot(torch.where(first == second, 0.0, first - second).norm())
        size = size.hypot(first.masked_fill(first.isinf(), 0.0).norm())
    return torch.div(change, size.clamp_min(torch.finfo(torch.float64).tiny))
