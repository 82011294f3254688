"""Lists the attention sites of one forward pass, with their inputs, towers and padding."""

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
"""The tower of a modality, by transformers' own word for it."""


def towers(model: PreTrainedModel) -> dict[nn.Module, Part]:
    """Each attention module's tower, where the model has more than one; nothing where one encoder is all there is.

    A module belongs to the innermost model around it that says what it reads; where that reads several modalities it
    is none's. A decoder is no tower of an encoder–decoder: Whisper has an encoder, and Florence-2 vision and text.
    """
    found: dict[nn.Module, Part] = {}
    decoder = model.get_decoder() if model.config.is_encoder_decoder else None  # type: ignore[no-untyped-call]
    writing = set(decoder.modules()) - {model} if isinstance(decoder, nn.Module) else set()
    for inner in model.modules():  # from the outside in
        if isinstance(inner, PreTrainedModel) and inner is not model:
            part, inside = _reads(inner), set(inner.modules())
            found = {module: tower for module, tower in found.items() if module not in inside}
            found |= {} if part is None else dict.fromkeys(inside, part)
    found = {module: part for module, part in found.items() if module not in writing}
    return found if len(set(found.values())) > 1 else {}


def _reads(model: PreTrainedModel) -> Part | None:
    """The only modality that a model reads; None where it reads several."""
    said = model.input_modalities
    parts = {OF_MODALITY[one] for one in ([said] if isinstance(said, str) else said) if one in OF_MODALITY}
    return parts.pop() if len(parts) == 1 else None


CROSS_INPUTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""The names under which transformers' attention modules take the other sequence of a cross-attention."""

UNTRACED = "no softmax of queries times keys that sums up values was found in it"
"""Why a module that runs, and calls itself attention, is no site."""


@dataclass(frozen=True)
class Reached:
    """A site that a forward pass reached, with what its module was called with."""

    site: Site
    module: nn.Module
    arguments: dict[str, Any]  # the arguments of the module's call, by parameter name
    call: Call  # what the module asked for

    @property
    def input_name(self) -> str:
        """The name of the module's input: by transformers' convention the first tensor of numbers that it is given."""
        return next(name for name, value in self.arguments.items() if _is_numbers(value))

    @property
    def other(self) -> str | None:
        """The name of the argument that carries the other sequence of a cross-attention."""
        return _other(self.arguments)

    @property
    def layout(self) -> tuple[int, ...]:
        """The axes of its inputs in the order (batch, tokens, …, d_model); XLNet has the tokens first."""
        given, query = self.arguments[self.input_name], self.call.query
        usual = tuple(range(given.dim()))
        for axes in (usual, (1, 0, *usual[2:]), (0, *usual[2:], 1)) if given.dim() > 2 else ():
            batch, *tokens, _ = (given.shape[axis] for axis in axes)
            if (batch, math.prod(tokens)) == (query.shape[0], query.shape[2]):
                return axes
        return usual

    def sequences(self, given: Tensor) -> Tensor:
        """Inputs of the module as (batch, tokens, …, d_model)."""
        return as_sequences(given, self.layout)


def as_sequences(given: Tensor, layout: tuple[int, ...]) -> Tensor:
    """A module's inputs as (batch, tokens, …, d_model), where their axes have this layout or there is no batch."""
    return given[None] if given.dim() == 2 else given.permute(layout)


@dataclass(frozen=True)
class Surveyed:
    """What one forward pass showed of a model's attention."""

    model: PreTrainedModel
    reached: list[Reached]  # the sites, in the order of their calls
    ran: set[nn.Module]  # the modules that ran
    refused: Refused  # those whose hand-written attention can't be read, and why

    @property
    def missed(self) -> dict[str, str | None]:
        """Paths of attention modules that are not among the sites, and why; None where one does not run."""
        used = {id(part) for found in self.reached for part in found.module.modules()}
        every = dict(self.model.named_modules())
        owners = {name for name, module in every.items() if any(id(part) in used for part in module.modules())}
        found = {name: self.refused[module] for name, module in every.items() if module in self.refused}
        missed: dict[str, str | None] = dict(found)
        for name, module in every.items():
            inside = any(is_attention(child) for child in module.modules() if child is not module)
            told = any(f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in found)
            if is_attention(module) and not (inside or told or name in owners or id(module) in used):
                missed[name] = UNTRACED if module in self.ran else None
        return missed


def survey(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Reached]:
    """The sites that one forward pass reaches, in order. Raises what `surveyed` raises."""
    return surveyed(model, inputs).reached


def surveyed(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Surveyed:
    """Run one forward pass, and tell what attention it shows.

    Raises ModelError where the model has no softmax attention that can be read.
    """
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

    # All modules, as which of them will ask for attention is not known before; only those that run are kept.
    hooks = [module.register_forward_pre_hook(entered, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(lambda module, *_: running.pop(module, None) and None) for module in modules]
    with hooked(hooks), torch.no_grad(), opened(model, answer, prove=True) as refused:
        forward(model, inputs)
    calls = [found for found in calls if found[0] not in refused]
    if not calls:
        raise out_of_reach(model, {modules[module]: reason for module, reason in refused.items()}, ran)
    return Surveyed(model, _numbered(model, modules, calls), ran, refused)


def _numbered(
    model: PreTrainedModel, modules: Mapping[nn.Module, str], calls: list[tuple[nn.Module, Call, dict[str, Any]]]
) -> list[Reached]:
    """The calls of a pass as sites, numbered in their order, and each module's own calls too."""
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
    """The model's outputs without a cache, so that every query meets every key in one call.

    A model that draws random numbers (ViTMAE's masks) draws the same ones in every pass.
    """
    with _uncached(model), _same_draws(model):
        return model(**inputs, **without_cache(model), **more)


def without_cache(model: PreTrainedModel) -> dict[str, bool]:
    """The argument that keeps a model from filling a cache, where it names it."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


@contextmanager
def _uncached(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block no configuration asks for a cache: the models inside a model are not told by argument."""
    asking = [config for config in configs_of(model) if getattr(config, "use_cache", False)]
    for config in asking:
        config.use_cache = False
    try:
        yield
    finally:
        for config in asking:
            config.use_cache = True


@contextmanager
def _same_draws(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block a model that is not in training draws from one seed; what is drawn outside is not touched."""
    if model.training:
        yield
        return
    device = device_of_inputs(model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if device.type == "cpu":
            torch.default_generator.manual_seed(0)
        else:  # this seeds all devices, and writes the stack down for those that nothing ran on yet
            torch.manual_seed(0)
        yield


def real_outputs(result: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of numbers in a model's output at its real tokens; nested ones where there are no others (backbones).

    Padding is left out because a padded query may have no key at all, and then implementations differ rightly.
    """
    values = result.to_tuple() if hasattr(result, "to_tuple") else result
    tensors = [value for value in values if _is_numbers(value)] or list(_nested(values))
    return [at_real_tokens(tensor, inputs) for tensor in tensors]


def _nested(values: Any) -> Iterator[Tensor]:
    for value in values:
        if _is_numbers(value):
            yield value
        elif isinstance(value, tuple | list):
            yield from _nested(value)


def _is_numbers(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def at_real_tokens(tensor: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """A (batch, tokens, …) tensor without its padding, (real tokens, …); any other as it is."""
    masks = [inputs[name].bool() for name in ("decoder_attention_mask", "attention_mask") if name in inputs]
    for mask in masks:
        if mask.shape == tensor.shape[:2]:
            return tensor.flatten(0, 1) if bool(mask.all()) else tensor[mask]  # the first takes no memory
    return tensor


def real_tokens(tensor: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """1 at the real tokens of a (batch, tokens, …) tensor, 0 at its padding, (batch, tokens)."""
    masks = [inputs[name] for name in ("decoder_attention_mask", "attention_mask") if name in inputs]
    whole = tensor.new_ones(tensor.shape[:2], dtype=torch.float32)
    return next((mask.to(whole) for mask in masks if mask.shape == tensor.shape[:2]), whole)


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module's call under the names of its parameters."""
    positional = list(inspect.signature(module.forward).parameters)
    return dict(zip(positional, args, strict=False)) | kwargs


def _other(arguments: dict[str, Any]) -> str | None:
    """The argument with another sequence: by transformers' names, or keys that are not the queries (a pooling head)."""
    query, key = arguments.get("query"), arguments.get("key")
    named = [name for name in CROSS_INPUTS if arguments.get(name) is not None]
    between = isinstance(query, Tensor) and isinstance(key, Tensor) and query is not key
    return next(iter([*named, *["key"] * between]), None)


def _part(call: Call, arguments: dict[str, Any]) -> Part:
    """Cross-attention has another sequence; a decoder's self-attention sees nothing above the diagonal."""
    if _other(arguments) is not None or call.query.shape[2] != call.key.shape[2]:
        return "cross"
    above = torch.ones(call.query.shape[2], call.key.shape[2], dtype=torch.bool, device=call.query.device).triu(1)
    seen = call.visible()
    causal = seen is not None and bool(above.any()) and not bool((seen & above).any())
    return "decoder" if causal else "encoder"


@contextmanager
def inputs_of(reached: Iterable[Reached]) -> Iterator[dict[nn.Module, Tensor]]:
    """Inside the block, module → the inputs (batch, tokens, d_model) of its latest call, for these sites' modules."""
    latest: dict[nn.Module, Tensor] = {}
    known = {found.module: found for found in reached}

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        latest[module] = known[module].sequences(by_name(module, args, kwargs)[known[module].input_name])

    hooks = [module.register_forward_pre_hook(remember, with_kwargs=True) for module in known]
    with hooked(hooks):
        yield latest


def hiding_padding(call: Call, inputs: Mapping[str, Tensor]) -> Call:
    """The same computation, in which queries of padding see nothing.

    In self-attention they are the tokens that nobody sees; in cross-attention only the mask among the inputs tells.
    """
    mask = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
    if not call.cross or mask is None or mask.shape != call.query.shape[::2] or bool(mask.all()):
        return call
    real = mask.bool()[:, None, :, None].expand(-1, 1, -1, call.key.shape[2])
    return replace(call, allowed=real if call.allowed is None else call.allowed & real)


def unpadded(call: Call, site: Site, inputs: Mapping[str, Tensor]) -> Iterator[Call]:
    """The same computation without padding: sequence by sequence, or whole where there is none."""
    hiding = hiding_padding(call, inputs)
    for batch, queries, keys in real_parts(hiding.allowed, call.query.shape[0], site.part):
        yield call if isinstance(queries, slice) else hiding.sequences(batch, queries, keys)


def real_parts(
    allowed: Tensor | None, sequences: int, part: Part
) -> Iterator[tuple[list[int], Tensor | slice, Tensor | slice]]:
    """Sequences of a batch with the queries and keys that are no padding; one in which no query sees a key is left out.

    A key that no query may see is padding, and in cross-attention a query that may see none.
    """
    every = list(range(sequences)), slice(None), slice(None)
    if allowed is None:
        yield every
        return
    keys = allowed.any(dim=-2).any(dim=-2).expand(sequences, -1)
    queries = allowed.any(dim=-1).any(dim=-2).expand(sequences, -1) if part == "cross" else keys
    if bool(keys.all()) and bool(queries.all()):
        yield every
        return
    for sequence in keys.any(-1).nonzero().flatten().tolist():
        yield [sequence], queries[sequence].nonzero().squeeze(-1), keys[sequence].nonzero().squeeze(-1)
