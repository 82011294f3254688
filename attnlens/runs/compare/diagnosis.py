"""Name the causes of the differences between two models: config fields, tensors, and hypotheses by layer."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnlens import records
from attnlens.maths.diagnosis import Cause, Layer
from attnlens.maths.diagnosis.layer import name_parts, residuals
from attnlens.maths.diagnosis.norms import FOLDED
from attnlens.maths.diagnosis.search import ADDED
from attnlens.maths.diagnosis.values import LOW_RANK, ORIGIN, PRECISION, TYPES
from attnlens.models import weights
from attnlens.models.hooks import SiteCall
from attnlens.records import Site
from attnlens.runs.compare.causes import (
    Unexplained,
    add_call_properties,
    add_spacing,
    are_equal,
    build_unexplained,
    compare_calls,
    compare_rotations,
    describe_unexplained,
    diagnose_layers,
    find_norm,
    have_same_heads,
)
from attnlens.runs.compare.moves import Samples, describe_moves, find_source, sample_matrices
from attnlens.runs.compare.significance import stored_type
from attnlens.runs.inspect.inspection import Inspection, SiteFactors
from attnlens.wording import group_pairs, short

MODEL_FIELD = re.compile(
    r"rope|rotary|window|layer_types|scal|softcap|norm|eps|head|attn|attention|position|alibi|kv|qk|causal|group"
    r"|layers?$|hidden_size|d_model|n_embd|tie_word_embeddings|is_decoder"
    r"|multiplier|residual|hidden_act|activation|experts|scoring|topk"
)
"""Matches names of config fields that affect attention, hidden states, or the number and shapes of tensors."""
OTHER_FIELD = re.compile(r"dropout|initializer|implementation|classifier|lm_head|pruned|output_|token|_name")
"""Matches names that also match MODEL_FIELD, but don't affect the model's computation."""

SIZES = {
    "layers": re.compile(r"(^|[._])(num_hidden_layers|num_layers|n_layers?|(en|de)coder_layers|num_decoder_layers)$"),
    "attention heads": re.compile(r"(^|[._])(num_attention_heads|num_heads|n_heads?|(en|de)coder_attention_heads)$"),
}
"""Patterns for the config fields that set the number of layers or of query heads."""

Sides = tuple[Inspection, Inspection]
Orders = Mapping[Site, Sequence[int]]
Visit = Callable[[Site, tuple[SiteFactors, SiteFactors]], None]


def describe_models(
    sides: Sides, sites: Mapping[Site, Site], order: Orders, visit: Visit = lambda *_: None
) -> dict[str, Any]:
    """Return the fields of a Comparison that describe the differences between two models and their causes.

    `sites` maps the first model's sites to the second's; sites that only one model has are left out. `order` gives, at
    each of the first model's sites, the second model's head for each head. `visit` is called with each site and its
    factors in both models. If the weights are in files, at most one layer of each model is in memory.
    """
    walk = Walk(sides, order, visit)
    walk.read(sites)
    config = compare_configs(sides[0].loaded.model, sides[1].loaded.model)
    return {
        "config": config,
        "tensors": walk.tensors,
        "diagnosis": [*_compare_sizes(config), *_merge_causes(walk.causes)],
    }


def match_sites(sides: Sides) -> dict[Site, Site]:
    """Match sites by path and ordinal; return the second model's site for each site that both models have."""
    others = {(each.site.path, each.site.ordinal): each.site for each in sides[1].site_calls}
    places = ((each.site, (each.site.path, each.site.ordinal)) for each in sides[0].site_calls)
    return {site: others[place] for site, place in places if place in others}


def compare_configs(first: PreTrainedModel, second: PreTrainedModel) -> list[records.ConfigChange]:
    """List the config fields, also of nested configs, that differ and affect attention or hidden states."""
    sides = [dict(_list_fields(model.config.to_dict())) for model in (first, second)]
    names = [
        name
        for name in dict.fromkeys([*sides[0], *sides[1]])
        if MODEL_FIELD.search(name) and not OTHER_FIELD.search(name)
    ]
    changes = [(name, *(side.get(name) for side in sides)) for name in names]
    missing = None, "null"  # a field that is absent, and a field that is set to None, are equivalent
    return [
        records.ConfigChange(field=name, first=first, second=second)
        for name, first, second in changes
        if first != second and not (first in missing and second in missing)
    ]


def _compare_sizes(config: Sequence[records.ConfigChange]) -> Iterator[records.DiagnosedCause]:
    """Yield a cause if both configs state a number of layers, or of query heads, and these numbers differ."""
    for change in config:
        name = next((name for name, fields in SIZES.items() if fields.search(change.field)), None)
        if name is not None and change.first is not None and change.second is not None:
            unit = name.removesuffix("s") if change.second == "1" else name
            text = f"the second model has {change.second} {unit} instead of {change.first} ({change.field})"
            # no setting can supply layers that one of the models lacks
            repair = None if name == "layers" else f"set {change.field} to {change.first}"
            hypothesis = f"different number of {name}"
            yield records.DiagnosedCause(hypothesis=hypothesis, layers=[], residual=0.0, repair=repair, text=text)


def _list_fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _list_fields({str(key): part for key, part in value.items()}, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value, default=str)


@dataclass(frozen=True)
class FoundCause:
    """A cause of a difference, with the layer in which it was found."""

    layer: int | None  # None outside layers
    cause: Cause
    site: Site | None = None  # site of the first model; None outside layers
    whole: bool = False  # True if the cause is a rounding of all matrices of the layer


@dataclass
class Walk:
    """Search for the causes of differences between two models: first in their layers, then in all other tensors."""

    sides: Sides
    order: Orders
    visit: Visit
    causes: list[FoundCause] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)  # names of tensors that differ
    samples: tuple[Samples, Samples] = field(default_factory=lambda: ({}, {}))  # values of both models' matrices
    _types: list[str] = field(default_factory=list)  # stored type of each model's largest tensor in the first layer

    def read(self, sites: Mapping[Site, Site]) -> None:
        """Compare all layers, then all other tensors; add causes to `causes` and names of tensors to `differ`."""
        by_path = group_pairs((site.path, other.layer) for site, other in sites.items())
        in_block = group_pairs((weights.block_path(path), path) for path in by_path)
        site_calls, others = ({each.site: each for each in side.site_calls} for side in self.sides)
        for site, other in sites.items():
            if by_path[site.path][0] != other.layer:
                continue  # several layers share this module, which was compared at the first of them
            path, pair = weights.block_path(site.path), (site_calls[site], others[other])
            with self._read_blocks((site, other)) as (blocks, factors):
                self.visit(site, factors)
                causes = [*compare_calls(*pair)]
                if have_same_heads(*pair):
                    causes += compare_rotations(*factors)
                causes += self._diagnose_site(pair, blocks, factors, in_block[path])
                for samples, block in zip(self.samples, blocks, strict=True):
                    samples[path] = sample_matrices(block)
                self.causes += [
                    FoundCause(layer, cause, site, _rounds_all_matrices(cause, len(causes), blocks))
                    for cause in causes
                    for layer in by_path[site.path]
                ]
        self._find_moved(sites, in_block)
        self._diagnose_rest({weights.block_path(site.path) for site in sites})

    @property
    def tensors(self) -> records.TensorChanges:
        """Record of the common, differing, missing and additional tensors, and of the stored types if they differ."""
        names, others = self._stored_names()
        stored = [side.loaded.info.quantised for side in self.sides]
        types = [kind or plain for kind, plain in zip(stored, self._types or ["", ""], strict=True)]
        return records.TensorChanges(
            total=len([name for name in names if name in others]),
            differ=[name for name in names if name in set(self.differ)],
            missing=sorted(names.keys() - others.keys()),
            extra=sorted(others.keys() - names.keys()),
            types=None if types[0] == types[1] else (types[0], types[1]),
        )

    @contextmanager
    def _read_blocks(
        self, sites: tuple[Site, Site]
    ) -> Iterator[tuple[list[dict[str, Tensor]], tuple[SiteFactors, SiteFactors]]]:
        """Context manager: load both sites' blocks into memory; yield the blocks' tensors and the sites' factors."""
        paths = [weights.block_path(site.path) for site in sites]
        with tensors_in_memory(self.sides[0], paths[0]), tensors_in_memory(self.sides[1], paths[1]):
            factors = [
                (side.factors or {}).get(site) or next(side.read_factors([site]))[0]
                for side, site in zip(self.sides, sites, strict=True)
            ]
            models = [side.weights_model.model for side in self.sides]
            blocks = [list_tensors(model.get_submodule(path)) for model, path in zip(models, paths, strict=True)]
            yield blocks, (factors[0], factors[1])

    def _diagnose_site(
        self,
        site_calls: tuple[SiteCall, SiteCall],
        blocks: Sequence[Mapping[str, Tensor]],
        factors: tuple[SiteFactors, SiteFactors],
        in_block: Sequence[str],
    ) -> Iterator[Cause]:
        """Yield the causes of the differences at one site; add the names of differing tensors to `differ`.

        `blocks` are the tensors of both blocks, and `in_block` the paths of the attention modules in the first block.
        The tensors of an attention module and of the norm before it are diagnosed at the module's site, all other
        tensors of a block at the block's first site.
        """
        sites = site_calls[0].site, site_calls[1].site
        path = weights.block_path(sites[0].path)
        differ = [
            name for name, part in blocks[0].items() if name in blocks[1] and not are_equal(part, blocks[1][name])
        ]
        self.differ += [f"{path}.{name}" for name in differ]
        if not self._types:
            largest = [max(block.values(), key=Tensor.numel) for block in blocks]
            self._types = [str(stored_type(matrix)).removeprefix("torch.") for matrix in largest]
        if not differ and blocks[0].keys() == blocks[1].keys():
            return
        layers = self._read_layers(sites, factors, in_block)
        if layers is None:
            return
        layers = add_call_properties(layers, site_calls)
        order = self.order.get(sites[0], ())
        moved = () if list(order) == sorted(order) else order
        yield from diagnose_layers(add_spacing(layers[0]), add_spacing(layers[1]), moved)

    def _read_layers(
        self, sites: tuple[Site, Site], factors: tuple[SiteFactors, SiteFactors], in_block: Sequence[str]
    ) -> tuple[Layer, Layer] | None:
        """Return both models' tensors to diagnose at `sites`; None if a site does not run on a single token."""
        models = [side.weights_model.model for side in self.sides]
        paths = [weights.block_path(site.path) for site in sites]
        calls = [
            next((each for each in side.one_token if each.site == site), None)
            for side, site in zip(self.sides, sites, strict=True)
        ]
        if calls[0] is None or calls[1] is None:
            return None
        roles = weights.locate_roles(models[0], calls[0])
        other_roles = roles if _have_same_parameters(calls[0], calls[1]) else weights.locate_roles(models[1], calls[1])
        if not have_same_heads(calls[0], calls[1]):
            roles = other_roles = None  # then tensors are compared by name: no head has a counterpart
        rest, norms = in_block[0] == sites[0].path, self._find_norms(in_block)
        others = [path for path in in_block if path != sites[0].path]
        others += [norm for path, norm in norms.items() if path in others]
        norm = norms.get(sites[0].path)
        others_second = [f"{paths[1]}{path.removeprefix(paths[0])}" for path in others]
        norm_second = None if norm is None else f"{paths[1]}{norm.removeprefix(paths[0])}"
        first = weights.read_layer(models[0], calls[0], roles, factors[0], others=others, rest=rest, norm=norm)
        second = weights.read_layer(
            models[1], calls[1], other_roles, factors[1], others=others_second, rest=rest, norm=norm_second
        )
        return first, second

    def _find_norms(self, in_block: Sequence[str]) -> dict[str, str]:
        """Map each attention module of a block, except the block's first module, to the norm whose output it reads.

        Modules and norms are given as paths; modules that read no norm are left out. Return {} if the block's first
        module reads no norm: the outputs of norms are then the residual stream (BART).
        """
        site_calls = {each.site.path: each for each in self.sides[0].site_calls}
        if len(in_block) == 1 or in_block[0] not in site_calls:
            return {}
        whole = weights.read_layer(self.sides[0].weights_model.model, site_calls[in_block[0]], None)
        names = {path: find_norm(whole, site_calls[path]) for path in in_block if path in site_calls}
        if names.pop(in_block[0]) is None:
            return {}
        block = weights.block_path(in_block[0])
        return {path: f"{block}.{name.removesuffix('.weight')}" for path, name in names.items() if name is not None}

    def _find_moved(self, sites: Mapping[Site, Site], in_block: Mapping[str, Sequence[str]]) -> None:
        """Find unexplained tensors from a different layer of the first model, and diagnose their other changes."""
        moves = dict[Site, tuple[Site, list[str]]]()
        for entry in [each for each in self.causes if isinstance(each.cause, Unexplained)]:
            site, names = entry.site, set(entry.cause.parts)
            source = None if site is None else find_source(site, [*sites], self.samples)
            if site is None or source is None:
                continue
            pair = source, sites[site]
            with self._read_blocks(pair) as (blocks, factors):
                layers = self._read_layers(pair, factors, in_block[weights.block_path(source.path)])
                if layers is None or not layers[0].parts.keys() >= names:
                    continue
                others = {name: part for name, part in layers[1].parts.items() if name not in names}
                first, second = (add_spacing(layer) for layer in (layers[0].with_parts(others), layers[1]))
                causes = [*diagnose_layers(first, second)]
                changes = [
                    replace(entry, cause=cause, whole=_rounds_all_matrices(cause, len(causes), blocks))
                    for cause in causes
                ]
            left = {name for cause in causes if isinstance(cause, Unexplained) for name in cause.parts}
            if left != names:
                self.causes.remove(entry)
                self.causes += changes
                moves[site] = source, [name for name in entry.cause.parts if name not in left]
        self.causes += [FoundCause(site.layer, cause, site=site) for site, cause in describe_moves(moves, [*sites])]

    def _diagnose_rest(self, blocks: set[str]) -> None:
        """Diagnose the tensors outside layers: the output matrix and the norms together, all others individually."""
        names, others = self._stored_names()
        left = [
            name for name in names if name in others and not any(f"{name}.".startswith(f"{block}.") for block in blocks)
        ]
        model = self.sides[0].weights_model.model
        norms = [name for name in left if "Norm" in type(model.get_submodule(name.rpartition(".")[0])).__name__]
        last = [*norms, *(name for name in left if name == _output_name(model))]
        for group in [*([name] for name in left if name not in last), last]:
            with ExitStack() as stack:
                pairs = {
                    name: [
                        _read_tensor(side, name, source, stack)
                        for side, source in zip(self.sides, (names[name], others[name]), strict=True)
                    ]
                    for name in group
                }
                self._diagnose_group(pairs, {name: (names[name], others[name]) for name in group})
        outside = [entry for entry in self.causes if entry.layer is None]
        if any(isinstance(entry.cause, Unexplained) for entry in outside):
            for entry in [each for each in outside if each.cause.hypothesis in ADDED]:
                self.causes.remove(entry)
                self.causes.append(replace(entry, cause=build_unexplained(entry.cause.parts, 1.0)))

    def _diagnose_group(self, pairs: dict[str, list[Layer]], sources: Mapping[str, tuple[str, str]]) -> None:
        """Diagnose tensors outside layers together; `sources` maps names to the names in both models' files."""
        differ = [name for name, sides in pairs.items() if not are_equal(*(side.parts[name] for side in sides))]
        self.differ += differ
        pairs = {
            name: sides for name, sides in pairs.items() if all(side.parts[name].is_floating_point() for side in sides)
        }
        tied = [name for name in pairs if name in differ and sources[name][0] != sources[name][1]]
        causes = [*_diagnose_together(pairs)] if {*differ} & pairs.keys() else []
        if tied and not any(cause.hypothesis == FOLDED for cause in causes):
            causes = [*_diagnose_together({name: sides for name, sides in pairs.items() if name not in tied})]
            for name in tied:
                first, second = (side.parts[name] for side in pairs[name])
                self.causes.append(FoundCause(None, _compare_tied(name, sources[name], first, second)))
        self.causes += [FoundCause(None, cause, whole=cause.hypothesis in PRECISION) for cause in causes]

    def _stored_names(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return, for each model, a map from tensor names to the names under which the values are stored.

        The two names differ only for an output matrix that is tied to the embedding in one of the models.
        """
        models = [side.weights_model.model for side in self.sides]
        first, second = ({name: name for name in list_tensors(model)} for model in models)
        outputs = [_tied_output(model) for model in models]
        for (name, source), names, others in ((outputs[0], first, second), (outputs[1], second, first)):
            if others.get(name) == name:
                names.setdefault(name, source)
        return first, second


def _diagnose_together(pairs: Mapping[str, Sequence[Layer]]) -> Iterator[Cause]:
    """Diagnose several tensors together, and yield the causes; `pairs` contains each tensor's two layers."""
    if not pairs:
        return
    sides = []
    for each in zip(*pairs.values(), strict=True):
        parts = {name: part for layer in each for name, part in layer.parts.items()}
        gains = frozenset(name for layer in each for name in layer.gains)
        offsets = {name: offset for layer in each for name, offset in layer.offsets.items()}
        sides.append(add_spacing(Layer(parts, gains, offsets=offsets)))
    yield from diagnose_layers(sides[0], sides[1])


def _output_name(model: PreTrainedModel) -> str:
    """Return the name of the output matrix; an empty name if there is none."""
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    path = next((path for path, module in model.named_modules() if module is output and output is not None), "")
    return f"{path}.weight" if path else ""


def _tied_output(model: PreTrainedModel) -> tuple[str, str]:
    """Return the names of the output matrix and of the embedding that it is tied to; empty names if it is not tied."""
    matrix = getattr(model.get_output_embeddings(), "weight", None)  # type: ignore[no-untyped-call]
    name = _output_name(model)
    source = next((name for name, part in model.named_parameters() if part is matrix), "")
    return ("", "") if source in ("", name) else (name, source)


def _read_tensor(side: Inspection, name: str, source: str, stack: ExitStack) -> Layer:
    """Return a Layer with one tensor, in memory until `stack` closes; a norm's gain includes its offset (as in 1 + g).

    The tensor `name` is stored as `source`.
    """
    owner, _, own_name = source.rpartition(".")
    module = side.weights_model.model.get_submodule(owner)
    is_norm = "Norm" in type(module).__name__
    stack.enter_context(tensors_in_memory(side, owner, None if is_norm else own_name))
    part = list_tensors(module)[own_name]
    offsets = dict(weights.norm_offsets(module)) if is_norm else {}
    if own_name not in offsets:
        return Layer({name: part})
    offset = offsets[own_name]
    gain = weights.add_offset(part, offset)
    return Layer({name: gain}, frozenset({name}), offsets={name: offset} if offset else {})


def _compare_tied(name: str, sources: tuple[str, str], first: Tensor, second: Tensor) -> Cause:
    """Build the cause for an output matrix that only one of the models ties to its embedding."""
    change = float(residuals(first, second, name).max())
    if sources[0] == name:
        text = f"the output matrix is the embedding {sources[1]}; in the first model, it is the separate matrix {name}"
        repair = f"set tie_word_embeddings to false, and copy {name} from the first model"
        hypothesis = "output matrix tied"
    else:
        text = f"the output matrix {name} is a separate matrix; in the first model, it is the embedding"
        repair = f"set tie_word_embeddings to true, or copy {sources[0]} of the first model to {name}"
        hypothesis = "output matrix not tied"
    return Cause(hypothesis, f"{text} (changed by {short(change)})", repair, (), change, (name,))


def tensors_in_memory(side: Inspection, path: str, name: str | None = None) -> AbstractContextManager[None]:
    """Return a context in which a module's tensors (or only the tensor `name`) are in memory."""
    deferred = side.weights_model.deferred
    if deferred is None:
        return nullcontext()
    module = side.weights_model.model.get_submodule(path)
    return deferred.present(module, lambda: [name] if name else list(list_tensors(module)))


def list_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters (tied ones once) and saved buffers, keyed by name."""
    saved = module.state_dict()
    parameters = {name: part.detach() for name, part in module.named_parameters()}
    return parameters | {name: part for name, part in module.named_buffers() if name in saved}


def _rounds_all_matrices(cause: Cause, count: int, blocks: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return True if a cause is rounding of all matrices in its layer, in which `count` causes were found."""
    if cause.hypothesis == "rounding":
        return count == 1
    which, _, name = cause.hypothesis.rpartition("rounded to ")
    if name not in TYPES:
        return False
    rounded = blocks[0 if which else 1].values()
    return all(
        torch.equal(part, part.to(TYPES[name]).to(part.dtype))
        for part in rounded
        if part.is_floating_point() and part.dim() > 1
    )


def _have_same_parameters(first: SiteCall, second: SiteCall) -> bool:
    """Return True if both sites' modules have the same class, and parameters with the same names and shapes."""
    shapes, others = ({name: p.shape for name, p in each.module.named_parameters()} for each in (first, second))
    return type(first.module) is type(second.module) and shapes == others


def _merge_causes(causes: Sequence[FoundCause]) -> list[records.DiagnosedCause]:
    """Merge causes with the same hypothesis, heads and text; outside layers, tensor names in the texts can differ.

    Unexplained causes inside layers are merged if they concern the same tensors. Low-rank updates of any rank (inside
    or outside layers), unexplained causes outside layers, and roundings of whole layers are always merged.
    """
    groups: dict[tuple[object, ...], list[FoundCause]] = defaultdict(list)
    for entry in causes:
        cause, inside = entry.cause, entry.layer is not None
        name, key = cause.hypothesis, (inside, cause.text)
        if cause.hypothesis.endswith(LOW_RANK):
            name, key = LOW_RANK, (inside, "")
        elif entry.whole:
            key = True, ""
        elif isinstance(cause, Unexplained):
            key = inside, name_parts(cause.parts) if inside else ""
        elif not inside:
            key = False, _without_names(cause)
        groups[name, cause.heads, *key].append(entry)
    merged = []
    for entries in groups.values():
        cause = max((entry.cause for entry in entries), key=lambda cause: cause.residual)
        merged.append(
            records.DiagnosedCause(
                hypothesis=cause.hypothesis,
                layers=sorted({entry.layer for entry in entries if entry.layer is not None}),
                heads=list(cause.heads),
                residual=cause.residual,
                repair=cause.repair,
                text=_describe(entries, cause),
                tensors=_list_parts(entries),
                harmless=cause.harmless,
                head_errors=[
                    max(errors) for errors in zip(*(each.cause.head_errors for each in entries), strict=False)
                ],
            )
        )
    return sorted(merged, key=lambda cause: (cause.harmless, cause.hypothesis in PRECISION))


def _without_names(cause: Cause) -> str:
    """Return a cause's text with a leading `NAMES is` replaced by `are`; unchanged if it starts differently."""
    before, verb, rest = cause.text.partition(f"{name_parts(cause.parts)} is ")
    return f"are {rest}" if verb and not before else cause.text


def _list_parts(entries: Iterable[FoundCause]) -> list[str]:
    """Return the names of the causes' parts, without duplicates."""
    return list(dict.fromkeys(name for entry in entries for name in entry.cause.parts))


def _describe(entries: Sequence[FoundCause], typical: Cause) -> str:
    """Format one text for merged causes, which can have different tensors and ranks."""
    causes = [entry.cause for entry in entries]
    if len({cause.text for cause in causes}) == 1:
        return typical.text
    names = _list_parts(entries)
    if typical.hypothesis.endswith(LOW_RANK):
        ranks = sorted(int(cause.hypothesis.split()[1]) for cause in causes)
        span = str(ranks[0]) if ranks[0] == ranks[-1] else f"{ranks[0]} to {ranks[-1]}"
        return f"{name_parts(names)} are changed by updates of rank {span} {ORIGIN}"
    unexplained = [cause for cause in causes if isinstance(cause, Unexplained)]
    if unexplained:
        largest = max(unexplained, key=lambda cause: cause.change)
        reshaped = list(dict.fromkeys(name for cause in unexplained for name in cause.reshaped))
        return describe_unexplained(names, largest.change, largest.near, reshaped)
    if all(entry.layer is None for entry in entries) and (verb := _without_names(typical)) != typical.text:
        return f"{name_parts(names)} {verb}"
    if typical.hypothesis == "rounding":
        text = "weights are equal up to rounding"
    elif typical.hypothesis.startswith("first "):
        text = f"weights are more precise: the first model's are {typical.hypothesis.removeprefix('first ')}"
    else:
        text = f"weights are {typical.hypothesis}"
    outside = _list_parts(entry for entry in entries if entry.layer is None)
    if len(outside) == len(names):
        return f"{name_parts(names)} {text.removeprefix('weights ')}"
    return f"{text}, also {name_parts(outside)} outside the layers" if outside else text
