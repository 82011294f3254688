"""List the attention sites of one forward pass, with their inputs, towers and padding."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from attnlens.choices import Part
from attnlens.errors import ModelError
from attnlens.kernels import OWN
from attnlens.kernels.attention import attend
from attnlens.models.hooks.interface import answer_calls, is_attention, list_configs, out_of_reach
from attnlens.models.loading.placement import device_of_inputs
from attnlens.models.trace import Keywords, Refused, call_arguments, remove_hooks, tensors
from attnlens.records import Call, Site

OF_MODALITY: dict[str, Part] = {"image": "vision", "video": "vision", "audio": "audio", "text": "text"}
"""Tower of each modality, keyed by transformers' name for the modality."""


def towers(model: PreTrainedModel) -> dict[nn.Module, Part]:
    """Return each module's tower if the model has more than one, and an empty dict if it has a single encoder.

    A module belongs to the innermost submodel around it that declares its input modalities. If that submodel reads
    several modalities, the module has no tower. The decoder of an encoder–decoder is not a tower: Whisper has one
    encoder, Florence-2 has vision and text.
    """
    by_module: dict[nn.Module, Part] = {}
    for inner in model.modules():  # outer modules first
        if isinstance(inner, PreTrainedModel) and inner is not model:
            declared = inner.input_modalities
            modalities = [declared] if isinstance(declared, str) else declared
            parts = {OF_MODALITY[modality] for modality in modalities if modality in OF_MODALITY}
            for module in inner.modules():
                by_module.pop(module, None)
            if len(parts) == 1:
                by_module |= dict.fromkeys(inner.modules(), parts.pop())
    decoder = model.get_decoder() if model.config.is_encoder_decoder else None  # type: ignore[no-untyped-call]
    for module in decoder.modules() if isinstance(decoder, nn.Module) else ():
        by_module.pop(module, None)
    return by_module if len(set(by_module.values())) > 1 else {}


CROSS_INPUTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Names under which transformers' attention modules take the other sequence of a cross-attention."""

UNTRACED = "it has no softmax over query–key products that weights the values"
"""Reason why a module that runs, and whose class is named attention, is not a site."""


@dataclass(frozen=True)
class SiteCall:
    """A site that a forward pass reached, with the arguments of its module's call."""

    site: Site
    module: nn.Module
    arguments: Keywords  # arguments of the module's call, by parameter name
    call: Call  # the attention computation that the module requested

    @property
    def input_name(self) -> str:
        """Name of the module's input: by transformers' convention its first floating-point tensor argument."""
        return next(name for name, value in self.arguments.items() if _is_floating(value))

    @property
    def other(self) -> str | None:
        """Name of the argument with the other sequence of a cross-attention; None if there is none."""
        return _other_input(self.arguments)

    @property
    def layout(self) -> tuple[int, ...]:
        """Axes of the module's inputs in the order (batch, tokens, …, d_model); XLNet puts the tokens first."""
        hidden, query = self.arguments[self.input_name], self.call.query
        usual = tuple(range(hidden.dim()))
        for axes in (usual, (1, 0, *usual[2:]), (0, *usual[2:], 1)) if hidden.dim() > 2 else ():
            batch, *tokens, _ = (hidden.shape[axis] for axis in axes)
            if (batch, math.prod(tokens)) == (query.shape[0], query.shape[2]):
                return axes
        return usual

    def sequences(self, hidden: Tensor, layout: tuple[int, ...] | None = None) -> Tensor:
        """Return inputs of the module as (batch, tokens, …, d_model), by default with the `layout` of this call."""
        return hidden[None] if hidden.dim() == 2 else hidden.permute(layout or self.layout)


@dataclass(frozen=True)
class Survey:
    """The attention that one forward pass of a model showed."""

    model: PreTrainedModel
    sites: list[SiteCall]  # in the order of their calls
    ran: set[nn.Module]  # modules that ran
    refused: Refused  # modules whose hand-written attention cannot be read, and the reasons

    @property
    def missed(self) -> dict[str, str | None]:
        """Paths of attention modules that are not sites, with the reason; None if the module did not run."""
        named = dict(self.model.named_modules())
        parts_of_sites = {part for target in self.sites for part in target.module.modules()}
        refused = {name: self.refused[module] for name, module in named.items() if module in self.refused}
        missed: dict[str, str | None] = dict(refused)
        for name, module in named.items():
            contains_attention = any(is_attention(child) for child in module.modules() if child is not module)
            contains_site = any(part in parts_of_sites for part in module.modules())
            covered = any(f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in refused)
            if is_attention(module) and not (contains_attention or contains_site or covered):
                missed[name] = UNTRACED if module in self.ran else None
        return missed


def survey(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[SiteCall]:
    """Return the sites of one forward pass, in order. Raises ModelError if no attention can be read."""
    return run_survey(model, inputs).sites


def run_survey(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Survey:
    """Run one forward pass and return the attention it shows. Raises ModelError if no attention can be read."""
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
            raise ModelError(f"{paths[module]} receives no tokens from this input.", "Give an input that reaches it.")
        calls.append((module, call, call_arguments(module, *running[module])))
        return attend(call, OWN, "eager")

    # Hook all modules, since it is not known which compute attention; only those running are kept.
    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in paths]
    hooks += [module.register_forward_hook(leave) for module in paths]
    with remove_hooks(hooks), torch.no_grad(), answer_calls(model, answer, prove=True) as refused:
        forward(model, inputs)
    calls = [call for call in calls if call[0] not in refused]
    if not calls:
        raise out_of_reach(model, {paths[module]: reason for module, reason in refused.items()}, ran)

    total, ordinals, tower_of = Counter(module for module, _, _ in calls), Counter[nn.Module](), towers(model)
    sites = list[SiteCall]()
    for layer, (module, call, arguments) in enumerate(calls):
        part, ordinal, repeated = _part(call, arguments), ordinals[module], total[module] > 1
        part = tower_of.get(module, part) if part == "encoder" else part
        site = Site(paths[module], ordinal, layer, part, repeated=repeated, traced=call.traced)
        ordinals[module] += 1
        sites.append(SiteCall(site, module, arguments, call))
    return Survey(model, sites, ran, refused)


def forward(model: PreTrainedModel, inputs: Mapping[str, Tensor], **more: object) -> Any:
    """Return the model's outputs without a cache, with the same random draws in every pass (ViTMAE's masks)."""
    with _deterministic(model):
        return model(**inputs, **without_cache(model), **more)


def without_cache(model: PreTrainedModel) -> dict[str, bool]:
    """Return the argument that keeps a model from filling a cache, if its `forward` has one."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


@contextmanager
def _deterministic(model: PreTrainedModel) -> Iterator[None]:
    """Switch off caches inside the `with`, and seed the random draws of a model in eval mode, only in here.

    `use_cache` is changed in all configurations, because submodels do not receive the argument.
    """
    caching = [config for config in list_configs(model) if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    device, draws = device_of_inputs(model), not model.training
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], enabled=draws):
            if draws and device.type == "cpu":
                torch.default_generator.manual_seed(0)
            elif draws:  # seeds all devices, and records the stack trace for devices that are not initialised yet
                torch.manual_seed(0)
            yield
    finally:
        for config in caching:
            config.use_cache = True


def real_outputs(result: object, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the floating-point outputs of a model at its real tokens; nested ones (backbones) if there are no others.

    Padding is left out because a padded query may see no key, and implementations may then differ.
    """
    values = result.to_tuple() if isinstance(result, ModelOutput) else cast("tuple[object, ...]", result)
    outputs = list(filter(_is_floating, values)) or list(filter(_is_floating, tensors(values)))
    return [at_real_tokens(output, inputs) for output in outputs]


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def as_float64(value: Any, device: torch.device | None = None) -> Any:
    """Convert real and complex tensors, also in tuples, lists and dictionaries, to double precision (on a device)."""
    if isinstance(value, Tensor):
        value = value if device is None else value.to(device)
        wide = torch.complex128 if value.is_complex() else torch.float64
        return value.to(wide) if value.is_complex() or value.is_floating_point() else value
    if type(value) in (tuple, list):  # not a named tuple, whose fields a module may access
        return type(value)(as_float64(part, device) for part in value)
    return {name: as_float64(part, device) for name, part in value.items()} if type(value) is dict else value


def at_real_tokens(tensor: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return a (batch, tokens, …) tensor without padding as (real tokens, …); return any other tensor unchanged."""
    mask = _padding_mask(tensor, inputs)
    if mask is None:
        return tensor
    return tensor.flatten(0, 1) if bool(mask.all()) else tensor[mask.bool()]  # flattening takes no memory


def real_tokens(tensor: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return a (batch, tokens) mask of a (batch, tokens, …) tensor: 1 at real tokens, 0 at padding."""
    mask, ones = _padding_mask(tensor, inputs), tensor.new_ones(tensor.shape[:2], dtype=torch.float32)
    return ones if mask is None else mask.to(ones)


def _padding_mask(tensor: Tensor, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return the attention mask that has the tensor's first two axes; a decoder's mask takes precedence."""
    masks = [inputs[name] for name in ("decoder_attention_mask", "attention_mask") if name in inputs]
    return next((mask for mask in masks if mask.shape == tensor.shape[:2]), None)


def _other_input(arguments: Mapping[str, object]) -> str | None:
    """Return the argument name of the other sequence: one of CROSS_INPUTS, or a `key` that is not the query."""
    query, key = arguments.get("query"), arguments.get("key")
    named = [name for name in CROSS_INPUTS if arguments.get(name) is not None]
    between = isinstance(query, Tensor) and isinstance(key, Tensor) and query is not key
    return next(iter([*named, *["key"] * between]), None)


def _part(call: Call, arguments: Mapping[str, object]) -> Part:
    """Return the part of a call: "cross" if it has another sequence, "decoder" if causal, "encoder" otherwise."""
    if _other_input(arguments) is not None or call.query.shape[2] != call.key.shape[2]:
        return "cross"
    above = torch.ones(call.query.shape[2], call.key.shape[2], dtype=torch.bool, device=call.query.device).triu(1)
    visible = call.visible()
    causal = visible is not None and bool(above.any()) and not bool((visible & above).any())
    return "decoder" if causal else "encoder"


@contextmanager
def record_inputs(sites: Iterable[SiteCall]) -> Iterator[dict[nn.Module, Tensor]]:
    """Record the latest inputs of these sites' modules inside the `with`: module → (batch, tokens, d_model)."""
    latest: dict[nn.Module, Tensor] = {}
    by_module = {target.module: target for target in sites}

    def record(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        site = by_module[module]
        latest[module] = site.sequences(call_arguments(module, args, kwargs)[site.input_name])

    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in by_module]
    with remove_hooks(hooks):
        yield latest


def hiding_padding(call: Call, inputs: Mapping[str, Tensor]) -> Call:
    """Return the same computation with all keys hidden from padded queries of a cross-attention.

    In self-attention no query sees padding; in cross-attention only a mask shows it.
    """
    mask = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
    if not call.cross or mask is None or mask.shape != call.query.shape[::2] or bool(mask.all()):
        return call
    real = mask.bool()[:, None, :, None].expand(-1, 1, -1, call.key.shape[2])
    return replace(call, allowed=real if call.allowed is None else call.allowed & real)


def iterate_unpadded(call: Call, site: Site, inputs: Mapping[str, Tensor]) -> Iterator[Call]:
    """Yield the same computation without padding: sequence by sequence, or whole if there is no padding."""
    masked = hiding_padding(call, inputs)
    for batch, queries, keys in real_parts(masked.allowed, call.query.shape[0], site.part):
        yield call if isinstance(queries, slice) else masked.sequences(batch, queries, keys)


def real_parts(
    allowed: Tensor | None, sequences: int, part: Part
) -> Iterator[tuple[list[int], Tensor | slice, Tensor | slice]]:
    """Yield the sequences of a batch with the indices of their queries and keys that are not padding.

    A key that no query may see is padding; in cross-attention so is a query that may see no key. A sequence in which no
    query sees a key is skipped.
    """
    whole = list(range(sequences)), slice(None), slice(None)
    if allowed is None:
        yield whole
        return
    keys = allowed.any(dim=-2).any(dim=-2).expand(sequences, -1)
    queries = allowed.any(dim=-1).any(dim=-2).expand(sequences, -1) if part == "cross" else keys
    if bool(keys.all()) and bool(queries.all()):
        yield whole
        return
    for sequence in keys.any(-1).nonzero().flatten().tolist():
        yield [sequence], queries[sequence].nonzero().squeeze(-1), keys[sequence].nonzero().squeeze(-1)
