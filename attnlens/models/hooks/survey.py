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

from attnlens.choices import Part
from attnlens.errors import ModelError
from attnlens.kernels import OWN
from attnlens.kernels.attention import attend
from attnlens.models.hooks.interface import configs_of, is_attention, opened, out_of_reach
from attnlens.models.loading.placement import device_of_inputs
from attnlens.models.trace import Refused, hooked
from attnlens.records import Call, Site

OF_MODALITY: dict[str, Part] = {"image": "vision", "video": "vision", "audio": "audio", "text": "text"}
"""Tower of each modality, keyed by transformers' name for the modality."""


def towers(model: PreTrainedModel) -> dict[nn.Module, Part]:
    """Return each module's tower if the model has more than one, and an empty dict if it has a single encoder.

    A module belongs to the innermost submodel around it that declares its input modalities. If that submodel reads
    several modalities, the module has no tower. The decoder of an encoder–decoder is not a tower: Whisper has one
    encoder, Florence-2 has vision and text.
    """
    found: dict[nn.Module, Part] = {}
    decoder = model.get_decoder() if model.config.is_encoder_decoder else None  # type: ignore[no-untyped-call]
    writing = set(decoder.modules()) - {model} if isinstance(decoder, nn.Module) else set()
    for inner in model.modules():  # outer modules first
        if isinstance(inner, PreTrainedModel) and inner is not model:
            part, inside = _only_modality(inner), set(inner.modules())
            found = {module: tower for module, tower in found.items() if module not in inside}
            found |= {} if part is None else dict.fromkeys(inside, part)
    found = {module: part for module, part in found.items() if module not in writing}
    return found if len(set(found.values())) > 1 else {}


def _only_modality(model: PreTrainedModel) -> Part | None:
    """Return the only modality that a model reads, or None if it reads several."""
    declared = model.input_modalities
    parts = {OF_MODALITY[one] for one in ([declared] if isinstance(declared, str) else declared) if one in OF_MODALITY}
    return parts.pop() if len(parts) == 1 else None


CROSS_INPUTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Names under which transformers' attention modules take the other sequence of a cross-attention."""

UNTRACED = "no softmax of queries times keys that sums up values was found in it"
"""Reason why a module that runs, and whose class is named attention, is not a site."""


@dataclass(frozen=True)
class Reached:
    """A site that a forward pass reached, with the arguments of its module's call."""

    site: Site
    module: nn.Module
    arguments: dict[str, Any]  # arguments of the module's call, by parameter name
    call: Call  # the attention computation that the module requested

    @property
    def input_name(self) -> str:
        """Name of the module's input: by transformers' convention its first floating-point tensor argument."""
        return next(name for name, value in self.arguments.items() if _is_numbers(value))

    @property
    def other(self) -> str | None:
        """Name of the argument with the other sequence of a cross-attention; None if there is none."""
        return _other_input(self.arguments)

    @property
    def layout(self) -> tuple[int, ...]:
        """Axes of the module's inputs in the order (batch, tokens, …, d_model); XLNet puts the tokens first."""
        given, query = self.arguments[self.input_name], self.call.query
        usual = tuple(range(given.dim()))
        for axes in (usual, (1, 0, *usual[2:]), (0, *usual[2:], 1)) if given.dim() > 2 else ():
            batch, *tokens, _ = (given.shape[axis] for axis in axes)
            if (batch, math.prod(tokens)) == (query.shape[0], query.shape[2]):
                return axes
        return usual

    def sequences(self, given: Tensor) -> Tensor:
        """Return inputs of the module as (batch, tokens, …, d_model)."""
        return as_sequences(given, self.layout)


def as_sequences(given: Tensor, layout: tuple[int, ...]) -> Tensor:
    """Return a module's inputs as (batch, tokens, …, d_model), given their `layout`; add a missing batch axis."""
    return given[None] if given.dim() == 2 else given.permute(layout)


@dataclass(frozen=True)
class Surveyed:
    """The attention that one forward pass of a model showed."""

    model: PreTrainedModel
    reached: list[Reached]  # sites in the order of their calls
    ran: set[nn.Module]  # modules that ran
    refused: Refused  # modules whose hand-written attention cannot be read, and the reasons

    @property
    def missed(self) -> dict[str, str | None]:
        """Paths of attention modules that are not sites, with the reason; None if the module did not run."""
        used = {id(part) for found in self.reached for part in found.module.modules()}
        named = dict(self.model.named_modules())
        owners = {name for name, module in named.items() if any(id(part) in used for part in module.modules())}
        found = {name: self.refused[module] for name, module in named.items() if module in self.refused}
        missed: dict[str, str | None] = dict(found)
        for name, module in named.items():
            inside = any(is_attention(child) for child in module.modules() if child is not module)
            covered = any(f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in found)
            if is_attention(module) and not (inside or covered or name in owners or id(module) in used):
                missed[name] = UNTRACED if module in self.ran else None
        return missed


def survey(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Reached]:
    """Return the sites that one forward pass reaches, in order. Raises what `surveyed` raises."""
    return surveyed(model, inputs).reached


def surveyed(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Surveyed:
    """Run one forward pass and return the attention it shows. Raises ModelError if no attention can be read."""
    modules = {module: name for name, module in model.named_modules()}
    running: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    ran = set[nn.Module]()
    calls: list[tuple[nn.Module, Call, dict[str, Any]]] = []

    def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running[module] = args, kwargs
        ran.add(module)

    def answer(call: Call) -> Tensor:
        module = cast("nn.Module", call.module)
        if not min(call.query.shape[2], call.key.shape[2]):
            raise ModelError(
                f"{modules[module]} gets no token of this input.", "Give one in which the model finds any."
            )
        calls.append((module, call, by_name(module, *running[module])))
        return attend(call, OWN, "eager")

    # Hook all modules, since it is not known which compute attention; only those running are kept.
    hooks = [module.register_forward_pre_hook(entered, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(lambda module, *_: running.pop(module, None) and None) for module in modules]
    with hooked(hooks), torch.no_grad(), opened(model, answer, prove=True) as refused:
        forward(model, inputs)
    calls = [found for found in calls if found[0] not in refused]
    if not calls:
        raise out_of_reach(model, {modules[module]: reason for module, reason in refused.items()}, ran)
    return Surveyed(model, _number_sites(model, modules, calls), ran, refused)


def _number_sites(
    model: PreTrainedModel, modules: Mapping[nn.Module, str], calls: list[tuple[nn.Module, Call, dict[str, Any]]]
) -> list[Reached]:
    """Convert the calls of a pass to sites, numbered over the pass and within each module."""
    total, seen, reached = Counter(modules[module] for module, _, _ in calls), Counter[str](), []
    tower = towers(model)
    for layer, (module, call, bound) in enumerate(calls):
        path = modules[module]
        part = _part(call, bound)
        part = tower.get(module, part) if part == "encoder" else part
        site = Site(path, seen[path], layer, part, repeated=total[path] > 1, traced=call.traced)
        seen[path] += 1
        reached.append(Reached(site, module, bound, call))
    return reached


def forward(model: PreTrainedModel, inputs: Mapping[str, Tensor], **more: Any) -> Any:
    """Return the model's outputs without a cache, so that every query meets every key in one call.

    A model that draws random numbers (ViTMAE's masks) draws the same numbers in every pass.
    """
    with _disable_cache(model), _fix_seed(model):
        return model(**inputs, **without_cache(model), **more)


def without_cache(model: PreTrainedModel) -> dict[str, bool]:
    """Return the argument that keeps a model from filling a cache, if its `forward` has one."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


@contextmanager
def _disable_cache(model: PreTrainedModel) -> Iterator[None]:
    """Switch off `use_cache` in all configurations inside the `with`: submodels do not receive the argument."""
    asking = [config for config in configs_of(model) if getattr(config, "use_cache", False)]
    for config in asking:
        config.use_cache = False
    try:
        yield
    finally:
        for config in asking:
            config.use_cache = True


@contextmanager
def _fix_seed(model: PreTrainedModel) -> Iterator[None]:
    """Seed the random draws of a model in eval mode inside the `with`; generators outside are unaffected."""
    if model.training:
        yield
        return
    device = device_of_inputs(model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if device.type == "cpu":
            torch.default_generator.manual_seed(0)
        else:  # this seeds all devices, and records the stack trace for devices that are not initialised yet
            torch.manual_seed(0)
        yield


def real_outputs(result: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the floating-point outputs of a model at its real tokens; nested ones only if there are no others.

    Backbones have only nested ones. Padding is left out because a padded query may see no key, and implementations may
    then differ.
    """
    values = result.to_tuple() if hasattr(result, "to_tuple") else result
    tensors = [value for value in values if _is_numbers(value)] or list(_nested_tensors(values))
    return [at_real_tokens(tensor, inputs) for tensor in tensors]


def _nested_tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if _is_numbers(value):
            yield value
        elif isinstance(value, tuple | list):
            yield from _nested_tensors(value)


def _is_numbers(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def at_real_tokens(tensor: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return a (batch, tokens, …) tensor without padding as (real tokens, …); return any other tensor unchanged."""
    masks = [inputs[name].bool() for name in ("decoder_attention_mask", "attention_mask") if name in inputs]
    for mask in masks:
        if mask.shape == tensor.shape[:2]:
            return tensor.flatten(0, 1) if bool(mask.all()) else tensor[mask]  # flattening takes no memory
    return tensor


def real_tokens(tensor: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return a (batch, tokens) mask of a (batch, tokens, …) tensor: 1 at real tokens, 0 at padding."""
    masks = [inputs[name] for name in ("decoder_attention_mask", "attention_mask") if name in inputs]
    whole = tensor.new_ones(tensor.shape[:2], dtype=torch.float32)
    return next((mask.to(whole) for mask in masks if mask.shape == tensor.shape[:2]), whole)


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module's call, keyed by parameter name."""
    positional = list(inspect.signature(module.forward).parameters)
    return dict(zip(positional, args, strict=False)) | kwargs


def _other_input(arguments: dict[str, Any]) -> str | None:
    """Return the argument name of the other sequence: one of CROSS_INPUTS, or a `key` that is not the query."""
    query, key = arguments.get("query"), arguments.get("key")
    named = [name for name in CROSS_INPUTS if arguments.get(name) is not None]
    between = isinstance(query, Tensor) and isinstance(key, Tensor) and query is not key
    return next(iter([*named, *["key"] * between]), None)


def _part(call: Call, arguments: dict[str, Any]) -> Part:
    """Return the part of a call: "cross" if it has another sequence, "decoder" if causal, "encoder" otherwise."""
    if _other_input(arguments) is not None or call.query.shape[2] != call.key.shape[2]:
        return "cross"
    above = torch.ones(call.query.shape[2], call.key.shape[2], dtype=torch.bool, device=call.query.device).triu(1)
    seen = call.visible()
    causal = seen is not None and bool(above.any()) and not bool((seen & above).any())
    return "decoder" if causal else "encoder"


@contextmanager
def inputs_of(reached: Iterable[Reached]) -> Iterator[dict[nn.Module, Tensor]]:
    """Record the latest inputs of these sites' modules inside the `with`: module → (batch, tokens, d_model)."""
    latest: dict[nn.Module, Tensor] = {}
    known = {found.module: found for found in reached}

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        latest[module] = known[module].sequences(by_name(module, args, kwargs)[known[module].input_name])

    hooks = [module.register_forward_pre_hook(remember, with_kwargs=True) for module in known]
    with hooked(hooks):
        yield latest


def hiding_padding(call: Call, inputs: Mapping[str, Tensor]) -> Call:
    """Return the same computation with all keys hidden from padded queries of a cross-attention.

    In self-attention, padding is the tokens that no query sees. In cross-attention only a mask shows it.
    """
    mask = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
    if not call.cross or mask is None or mask.shape != call.query.shape[::2] or bool(mask.all()):
        return call
    real = mask.bool()[:, None, :, None].expand(-1, 1, -1, call.key.shape[2])
    return replace(call, allowed=real if call.allowed is None else call.allowed & real)


def unpadded(call: Call, site: Site, inputs: Mapping[str, Tensor]) -> Iterator[Call]:
    """Yield the same computation without padding: sequence by sequence, or whole if there is no padding."""
    hiding = hiding_padding(call, inputs)
    for batch, queries, keys in real_parts(hiding.allowed, call.query.shape[0], site.part):
        yield call if isinstance(queries, slice) else hiding.sequences(batch, queries, keys)


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
