"""Name the causes of the differences between two models: config fields, tensors, and hypotheses by layer."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnlens import records
from attnlens.maths.diagnosis import Cause, Layer, diagnose
from attnlens.maths.diagnosis.layer import SINGLE, name_parts, residuals
from attnlens.maths.diagnosis.rotations import name_rotation
from attnlens.models import weights
from attnlens.models.hooks import SiteCall
from attnlens.records import Site
from attnlens.records.comparison import UNEXPLAINED
from attnlens.runs.compare.sides import ComparedModel
from attnlens.runs.compare.significance import stored_type
from attnlens.runs.inspect.inspection import SiteFactors
from attnlens.wording import group_pairs, join_items, short

ATTENTION_FIELD = re.compile(
    r"rope|rotary|window|layer_types|scal|softcap|norm|eps|head|attn|attention|position|alibi|kv|qk|causal|group"
)
"""Part of the names of config fields that affect attention."""
OTHER_FIELD = re.compile(r"dropout|initializer|implementation|classifier|lm_head|pruned|output_|token|_name")
"""Part of the names of config fields that match ATTENTION_FIELD but don't affect attention."""


Sides = tuple[ComparedModel, ComparedModel]
Orders = Mapping[Site, Sequence[int]]
Found = tuple[int | None, Cause, list[float]]  # layer (None: outside of layers), cause, error of each head


def describe_models(sides: Sides, sites: Mapping[Site, Site], order: Orders) -> dict[str, Any]:
    """Return the fields of a Comparison that say what differs between two models, and why."""
    return {
        "config": compare_configs(sides[0].loaded.model, sides[1].loaded.model),
        "tensors": compare_tensors(*sides),
        "diagnosis": find_causes(sides, sites, order),
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


def compare_tensors(first: ComparedModel, second: ComparedModel) -> records.TensorChanges:
    """List the tensors that differ, and those that only one model has."""
    sides = [_list_tensors(side.loaded.model) for side in (first, second)]
    common = [name for name in sides[0] if name in sides[1]]
    types = tuple(_describe_type(side) for side in (first, second))
    return records.TensorChanges(
        total=len(common),
        differ=[name for name in common if not _equal(sides[0][name], sides[1][name])],
        missing=sorted(sides[0].keys() - sides[1].keys()),
        extra=sorted(sides[1].keys() - sides[0].keys()),
        types=None if types[0] == types[1] else (types[0], types[1]),
    )


def _list_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters by name (tied ones once) and the buffers that are saved with the model."""
    saved = model.state_dict()
    parameters = {name: part.detach() for name, part in model.named_parameters()}
    return parameters | {name: part for name, part in model.named_buffers() if name in saved}


def _describe_type(side: ComparedModel) -> str:
    """Return the quantisation of a model, or the coarsest type that represents its largest weight."""
    if side.loaded.info.quantised is not None:
        return side.loaded.info.quantised
    largest = max(side.loaded.model.parameters(), key=Tensor.numel)
    return str(stored_type(largest.data)).removeprefix("torch.")


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second.to(first.device, first.dtype))


def find_causes(sides: Sides, sites: Mapping[Site, Site], order: Orders) -> list[records.DiagnosedCause]:
    """Diagnose every layer that differs, and the tensors outside of layers.

    `sites` maps the first model's sites to the second's, `order` the first model's heads to the second's.
    """
    found: list[Found] = []
    by_path = group_pairs((site.path, site.layer) for site in sites)
    factors = [_read_factors(side, side_sites) for side, side_sites in zip(sides, (sites, sites.values()), strict=True)]
    calls, others = ({each.site: each for each in side.one_token} for side in sides)
    windows, other_windows = ({each.site: each for each in side.reached} for side in sides)
    for site, other in sites.items():
        layers = by_path[site.path]
        if layers[0] != site.layer:
            continue  # a module that several layers share
        causes = [(cause, list[float]()) for cause in _compare_calls(windows[site], other_windows[other])]
        site_factors = factors[0].get(site), factors[1].get(other)
        causes += [(cause, []) for cause in _compare_rotations(*site_factors)]
        models = sides[0].weights_model.model, sides[1].weights_model.model
        if site in calls and other in others:
            causes += _diagnose_site(models, (calls[site], others[other]), site_factors, order.get(site, ()))
        found += [(layer, cause, errors) for cause, errors in causes for layer in layers]
    blocks = {weights.block_path(site.path) for site in sites}
    found += [(None, cause, errors) for cause, errors in _diagnose_rest(sides, blocks)]
    return _group(found)


def _read_factors(side: ComparedModel, sites: Iterable[Site]) -> dict[Site, SiteFactors | None]:
    """Return the factors of each site, from the inspection if it has read them."""
    known = {site: side.factors_of(site) for site in sites}
    chosen = [index for index, each in enumerate(side.calls) if each.site in known and known[each.site] is None]
    read = weights.factors(side.weights_model.model, side.one_token, side.window, chosen=chosen)
    return known | {side.calls[index].site: factors for index, factors in zip(chosen, read, strict=True)}


def _compare_rotations(first: SiteFactors | None, second: SiteFactors | None) -> Iterator[Cause]:
    """Yield how the rotation by position differs, if both are known."""
    if not isinstance(first, weights.Factors) or not isinstance(second, weights.Factors):
        return
    before, after = first.rotation, second.rotation
    if before is None or after is None:
        if before is not after:
            with_rope = "second" if before is None else "first"
            text = f"only the {with_rope} model rotates queries and keys (RoPE)"
            yield Cause("another rotation", text, "copy the first model's position settings", (), 0.0, ())
    elif before.by_distance and after.by_distance:
        text_of_change = name_rotation(weights.frequencies(before), weights.frequencies(after))
        if text_of_change is not None:
            yield Cause("another rotation", text_of_change, "copy the first model's RoPE settings", (), 0.0, ())


def _diagnose_site(
    models: tuple[PreTrainedModel, PreTrainedModel],
    calls: tuple[SiteCall, SiteCall],
    factors: tuple[SiteFactors | None, SiteFactors | None],
    order: Sequence[int],
) -> list[tuple[Cause, list[float]]]:
    """Diagnose one layer; return the causes, with the error of each head if its weights are quantised."""
    pairs = zip(models, calls, strict=True)
    blocks = [dict(model.get_submodule(weights.block_path(call.site.path)).named_parameters()) for model, call in pairs]
    if blocks[0].keys() == blocks[1].keys() and all(_equal(part, blocks[1][name]) for name, part in blocks[0].items()):
        return []
    roles = weights.locate_roles(models[0], calls[0])
    other_roles = roles if _alike(*calls) else weights.locate_roles(models[1], calls[1])
    first = weights.read_layer(models[0], calls[0], roles, factors[0])
    second = weights.read_layer(models[1], calls[1], other_roles, factors[1])
    moved = () if list(order) == sorted(order) else order
    return [*diagnose_layers(with_spacing(first), with_spacing(second), moved)]


def diagnose_layers(first: Layer, second: Layer, order: Sequence[int] = ()) -> Iterator[tuple[Cause, list[float]]]:
    """Yield the causes of the difference between two layers, and what is left unexplained."""
    first, second = with_missing(first, second)
    diagnosis = diagnose(first, second, order)
    for cause in diagnosis.causes:
        errors: list[float] = []
        if cause.hypothesis.startswith("quantised") and "query.weight" in cause.parts:
            sides = [
                (residuals(first.parts[name], second.parts[name], name)) for name in ("query.weight", "key.weight")
            ]
            errors = torch.maximum(sides[0], sides[1].repeat_interleave(len(sides[0]) // len(sides[1]))).tolist()
        yield cause, errors
    if diagnosis.unexplained:
        closest, residual = diagnosis.closest or ("", diagnosis.change)
        near = f"closest: {closest}, residual {short(residual)}" if closest else "no hypothesis is near"
        words = f"{name_parts(diagnosis.unexplained)} changed by {short(diagnosis.change)}, not explained ({near})"
        shapes = [name for name in diagnosis.unexplained if first.parts[name].shape != second.parts[name].shape]
        words += f"; other shapes: {join_items(shapes, 3)}" if shapes else ""
        yield Cause(UNEXPLAINED, words, None, diagnosis.unexplained_heads, residual, tuple(diagnosis.unexplained)), []


def _alike(first: SiteCall, second: SiteCall) -> bool:
    """Return True if both modules are of one class, with parameters of the same shapes."""
    shapes = ({name: part.shape for name, part in each.module.named_parameters()} for each in (first, second))
    return type(first.module) is type(second.module) and next(shapes) == next(shapes)


def with_spacing(layer: Layer) -> Layer:
    """Return the layer with the relative spacing of each part's stored number type."""
    spacing = {name: torch.finfo(stored_type(part)).eps for name, part in layer.parts.items()}
    return replace(layer, spacing={name: max(value, SINGLE) for name, value in spacing.items()})


def with_missing(first: Layer, second: Layer) -> tuple[Layer, Layer]:
    """Return both layers with zeros for biases, and ones for gains, that only one of them has."""
    sides = []
    for side, other in ((first, second), (second, first)):
        gains = side.gains | other.gains
        absent = {
            name: torch.ones_like(part) if name in gains else torch.zeros_like(part)
            for name, part in other.parts.items()
            if name not in side.parts and (name in gains or name.endswith("bias"))
        }
        sides.append(replace(side.with_parts(absent), gains=gains))
    return sides[0], sides[1]


def _compare_calls(first: SiteCall, second: SiteCall) -> Iterator[Cause]:
    """Yield the differences of scale, softcap and mask."""
    before, after = first.call, second.call
    if abs(after.scale - before.scale) > 1e-6 * abs(before.scale):
        ratio = after.scale / before.scale
        text = f"scores are scaled by {after.scale:.4g} instead of {before.scale:.4g} (× {ratio:.4g})"
        yield Cause(
            "another scale", text, "copy the first model's scale (query_pre_attn_scalar, head_dim)", (), 0.0, ()
        )
    if before.softcap != after.softcap:
        caps = ["none" if call.softcap is None else f"{call.softcap:g}" for call in (before, after)]
        text = f"the softcap of scores is {caps[1]} instead of {caps[0]}"
        yield Cause("another softcap", text, "copy the first model's softcap", (), 0.0, ())
    masks = [call.visible() for call in (before, after)]
    if before.query.shape[2:3] + before.key.shape[2:3] == after.query.shape[2:3] + after.key.shape[2:3]:
        keys = before.key.shape[2]
        seen = [float(keys) if mask is None else float(mask.sum(-1).double().mean()) for mask in masks]
        if seen[0] != seen[1]:
            text = f"a query sees {seen[1]:.3g} keys on average instead of {seen[0]:.3g} (of {keys})"
            yield Cause("another mask", text, "copy the first model's window and mask settings", (), 0.0, ())


def _diagnose_rest(models: Sides, blocks: set[str]) -> Iterator[tuple[Cause, list[float]]]:
    """Diagnose the tensors outside of layers: embeddings, the last norm, the head."""
    sides = [_list_tensors(side.loaded.model) for side in models]
    names = [name for name in sides[0] if name in sides[1] and not _is_inside(name, blocks)]
    names = [name for name in names if not _equal(sides[0][name], sides[1][name])]
    floating = [name for name in names if sides[0][name].is_floating_point()]
    if floating:
        yield from diagnose_layers(*(with_spacing(Layer({name: side[name] for name in floating})) for side in sides))


def _is_inside(name: str, blocks: set[str]) -> bool:
    path = name
    while path:
        if path in blocks:
            return True
        path = path.rpartition(".")[0]
    return False


def _group(found: list[Found]) -> list[records.DiagnosedCause]:
    """Merge equal causes of several layers."""
    groups: dict[tuple[object, ...], list[Found]] = defaultdict(list)
    for entry in found:
        cause = entry[1]
        whole = cause.hypothesis.startswith("round")
        groups[cause.hypothesis, cause.heads, "" if whole or cause.hypothesis == UNEXPLAINED else cause.text].append(
            entry
        )
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
                text=cause.text
                if len(entries) == 1 or not cause.hypothesis.startswith("round")
                else _describe_rounding(cause.hypothesis),
                tensors=list(dict.fromkeys(name for _, each, _ in entries for name in each.parts)),
                harmless=cause.harmless,
                head_errors=[float(max(errors)) for errors in zip(*(entry[2] for entry in entries), strict=False)],
            )
        )
    return merged


def _describe_rounding(hypothesis: str) -> str:
    return "weights are equal up to rounding" if hypothesis == "rounding" else f"weights are {hypothesis}"
