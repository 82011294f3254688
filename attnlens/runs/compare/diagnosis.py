"""Name the causes of the differences between two models: config fields, tensors, and hypotheses by layer."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnlens import records
from attnlens.maths.diagnosis import Cause, Layer
from attnlens.maths.diagnosis.layer import name_parts
from attnlens.maths.diagnosis.values import LOW_RANK, ORIGIN
from attnlens.models import weights
from attnlens.models.hooks import SiteCall
from attnlens.records import Site
from attnlens.records.comparison import UNEXPLAINED
from attnlens.runs.compare.causes import compare_calls, compare_rotations, diagnose_layers, with_spacing
from attnlens.runs.compare.significance import stored_type
from attnlens.runs.inspect.inspection import Inspection, SiteFactors
from attnlens.wording import group_pairs

ATTENTION_FIELD = re.compile(
    r"rope|rotary|window|layer_types|scal|softcap|norm|eps|head|attn|attention|position|alibi|kv|qk|causal|group"
)
"""Part of the names of config fields that affect attention."""
OTHER_FIELD = re.compile(r"dropout|initializer|implementation|classifier|lm_head|pruned|output_|token|_name")
"""Part of the names of config fields that match ATTENTION_FIELD but don't affect attention."""


Sides = tuple[Inspection, Inspection]
Orders = Mapping[Site, Sequence[int]]
Found = tuple[int | None, Cause, list[float]]  # layer (None: outside of layers), cause, error of each head
Visit = Callable[[Site, tuple[SiteFactors, SiteFactors]], None]


def describe_models(
    sides: Sides, sites: Mapping[Site, Site], order: Orders, visit: Visit = lambda *_: None
) -> dict[str, Any]:
    """Return the fields of a Comparison that say what differs between two models, and why.

    `sites` maps the first model's sites to the second's, `order` the first model's heads to the second's. `visit` gets
    each site's factors. If the weights are in files, at most one layer of each model is in memory.
    """
    walk = Walk(sides, order, visit)
    walk.read(sites)
    return {
        "config": compare_configs(sides[0].loaded.model, sides[1].loaded.model),
        "tensors": walk.tensors,
        "diagnosis": _group(walk.found),
    }


def compare_configs(first: PreTrainedModel, second: PreTrainedModel) -> list[records.ConfigChange]:
    """List the config fields that affect attention and differ, those of nested configs too."""
    sides = [dict(_list_fields(model.config.to_dict())) for model in (first, second)]
    names = [name for name in dict.fromkeys([*sides[0], *sides[1]]) if _affects_attention(name)]
    changes = [(name, *(side.get(name) for side in sides)) for name in names]
    return [records.ConfigChange(field=name, first=a, second=b) for name, a, b in changes if a != b]


def _affects_attention(name: str) -> bool:
    return bool(ATTENTION_FIELD.search(name)) and not OTHER_FIELD.search(name)


def _list_fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _list_fields({str(key): part for key, part in value.items()}, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value, default=str)


@dataclass
class Walk:
    """A pass over the layers of two models, and then over the tensors outside of layers."""

    sides: Sides
    order: Orders
    visit: Visit
    found: list[Found] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)  # names of tensors that differ
    _types: list[str] = field(default_factory=list)  # number types of the first layer's largest matrices

    def read(self, sites: Mapping[Site, Site]) -> None:
        """Compare all layers and tensors."""
        by_path = group_pairs((site.path, site.layer) for site in sites)
        reached, others = ({each.site: each for each in side.reached} for side in self.sides)
        for site, other in sites.items():
            if by_path[site.path][0] != site.layer:
                continue  # a module that several layers share
            with ExitStack() as stack:
                for side, place in zip(self.sides, (site, other), strict=True):
                    stack.enter_context(present(side, weights.block_path(place.path)))
                factors = self._read_factors(0, site), self._read_factors(1, other)
                self.visit(site, factors)
                causes = [(cause, list[float]()) for cause in compare_calls(reached[site], others[other])]
                causes += [(cause, []) for cause in compare_rotations(*factors)]
                causes += self._diagnose_site((site, other), factors)
            self.found += [(layer, cause, errors) for cause, errors in causes for layer in by_path[site.path]]
        self._diagnose_rest({weights.block_path(site.path) for site in sites})

    @property
    def tensors(self) -> records.TensorChanges:
        """How the tensors of both models correspond."""
        names, others = (list_tensors(side.weights_model.model) for side in self.sides)
        stored = [side.loaded.info.quantised for side in self.sides]
        types = [kind or plain for kind, plain in zip(stored, self._types or ["", ""], strict=True)]
        return records.TensorChanges(
            total=len([name for name in names if name in others]),
            differ=[name for name in names if name in set(self.differ)],
            missing=sorted(names.keys() - others.keys()),
            extra=sorted(others.keys() - names.keys()),
            types=None if types[0] == types[1] else (types[0], types[1]),
        )

    def _read_factors(self, number: int, site: Site) -> SiteFactors:
        """Return the factors of a site of one side, from the inspection if it has read them."""
        side = self.sides[number]
        if (known := (side.factors or {}).get(site)) is not None:
            return known
        return next(factors for factors, _ in side.read_factors([site]))

    def _diagnose_site(
        self, sites: tuple[Site, Site], factors: tuple[SiteFactors, SiteFactors]
    ) -> Iterator[tuple[Cause, list[float]]]:
        """Yield the causes of one layer's difference, with the error of each head if its weights are quantised."""
        models = [side.weights_model.model for side in self.sides]
        paths = [weights.block_path(site.path) for site in sites]
        blocks = [list_tensors(model.get_submodule(path)) for model, path in zip(models, paths, strict=True)]
        differ = [name for name, part in blocks[0].items() if name in blocks[1] and not _equal(part, blocks[1][name])]
        self.differ += [f"{paths[0]}.{name}" for name in differ]
        if not self._types:
            self._types = [_type_of(block.values()) for block in blocks]
        if not differ and blocks[0].keys() == blocks[1].keys():
            return
        calls = [
            next((each for each in side.one_token if each.site == site), None)
            for side, site in zip(self.sides, sites, strict=True)
        ]
        if calls[0] is None or calls[1] is None:
            return
        roles = weights.locate_roles(models[0], calls[0])
        other_roles = roles if _alike(calls[0], calls[1]) else weights.locate_roles(models[1], calls[1])
        first = weights.read_layer(models[0], calls[0], roles, factors[0])
        second = weights.read_layer(models[1], calls[1], other_roles, factors[1])
        order = self.order.get(sites[0], ())
        moved = () if list(order) == sorted(order) else order
        yield from diagnose_layers(with_spacing(first), with_spacing(second), moved)

    def _diagnose_rest(self, blocks: set[str]) -> None:
        """Diagnose the tensors outside of layers, one at a time: embeddings, the last norm, the head."""
        models = [side.weights_model.model for side in self.sides]
        names, others = (list_tensors(model) for model in models)
        for name in names:
            if name not in others or any(f"{name}.".startswith(f"{block}.") for block in blocks):
                continue
            owner, _, own_name = name.rpartition(".")
            with ExitStack() as stack:
                for side in self.sides:
                    stack.enter_context(present(side, owner, own_name))
                first, second = (list_tensors(model.get_submodule(owner))[own_name] for model in models)
                if _equal(first, second):
                    continue
                self.differ.append(name)
                if first.is_floating_point() and second.is_floating_point():
                    layers = (with_spacing(Layer({name: part})) for part in (first, second))
                    self.found += [
                        (None, cause, errors) for cause, errors in diagnose_layers(next(layers), next(layers))
                    ]


def present(side: Inspection, path: str, name: str | None = None) -> AbstractContextManager[None]:
    """Return a context in which a module's tensors (or the one called `name`) are in memory."""
    deferred = side.weights_model.deferred
    if deferred is None:
        return nullcontext()
    module = side.weights_model.model.get_submodule(path)
    return deferred.present(module, lambda: [name] if name else list(list_tensors(module)))


def list_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name (tied ones once) and the buffers that are saved with the model."""
    saved = module.state_dict()
    parameters = {name: part.detach() for name, part in module.named_parameters()}
    return parameters | {name: part for name, part in module.named_buffers() if name in saved}


def _type_of(tensors: Iterable[Tensor]) -> str:
    """Return the coarsest type that represents the largest tensor."""
    return str(stored_type(max(tensors, key=Tensor.numel))).removeprefix("torch.")


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second.to(first.device, first.dtype))


def _alike(first: SiteCall, second: SiteCall) -> bool:
    """Return True if both modules are of one class, with parameters of the same shapes."""
    shapes = ({name: part.shape for name, part in each.module.named_parameters()} for each in (first, second))
    return type(first.module) is type(second.module) and next(shapes) == next(shapes)


def _group(found: list[Found]) -> list[records.DiagnosedCause]:
    """Merge equal causes of several layers."""
    groups: dict[tuple[object, ...], list[Found]] = defaultdict(list)
    for entry in found:
        cause = entry[1]
        whole, update = "round" in cause.hypothesis, cause.hypothesis.endswith(LOW_RANK)
        inside = whole or entry[0] is not None
        text = "" if whole or update or cause.hypothesis == UNEXPLAINED else cause.text
        groups[LOW_RANK if update else cause.hypothesis, cause.heads, inside, text].append(entry)
    merged = []
    for entries in groups.values():
        cause = max((entry[1] for entry in entries), key=lambda cause: cause.residual)
        merged.append(
            records.DiagnosedCause(
                hypothesis=cause.hypothesis,
                layers=sorted({layer for layer, *_ in entries if layer is not None}),
                heads=list(cause.heads),
                residual=cause.residual,
                repair=cause.repair,
                text=_describe([each for _, each, _ in entries], cause),
                tensors=list(dict.fromkeys(name for _, each, _ in entries for name in each.parts)),
                harmless=cause.harmless,
                head_errors=[float(max(errors)) for errors in zip(*(entry[2] for entry in entries), strict=False)],
            )
        )
    return sorted(merged, key=lambda cause: (cause.harmless, "round" in cause.hypothesis))


def _describe(causes: Sequence[Cause], typical: Cause) -> str:
    """Return one text for equal causes of several layers, whose tensors and ranks can differ."""
    if len({cause.text for cause in causes}) == 1:
        return typical.text
    if typical.hypothesis.endswith(LOW_RANK):
        ranks = sorted(int(cause.hypothesis.split()[1]) for cause in causes)
        span = str(ranks[0]) if ranks[0] == ranks[-1] else f"{ranks[0]} to {ranks[-1]}"
        names = name_parts(list(dict.fromkeys(name for cause in causes for name in cause.parts)))
        return f"{names} are changed by updates of rank {span} {ORIGIN}"
    if "round" not in typical.hypothesis:
        return typical.text
    if typical.hypothesis == "rounding":
        return "weights are equal up to rounding"
    if typical.hypothesis.startswith("first "):
        return f"weights are more precise: the first model's are {typical.hypothesis.removeprefix('first ')}"
    return f"weights are {typical.hypothesis}"
