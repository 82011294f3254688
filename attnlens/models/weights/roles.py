"""Find the parameter rows that form a module's W_Q, W_K, W_V and W_O, and read a layer's tensors by role."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.errors import UnreadableError
from attnlens.maths.diagnosis import Layer
from attnlens.models.hooks import SiteCall
from attnlens.models.weights.probe import (
    DRAWS,
    TOLERANCE,
    Norms,
    Probe,
    fit_norm,
    float64_weights,
    linear,
    most_similar_rows,
    norms_inside,
    smallest,
)
from attnlens.models.weights.query_key_maps import Factors
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass(frozen=True)
class Rows:
    """The rows of a parameter that form the matrix of queries, keys or values."""

    name: str  # name of the parameter within the module
    index: Int[Tensor, "heads size"]  # indices of the rows of each head
    columns: bool  # True if the rows are columns of the parameter (Conv1D of GPT-2)

    def read(self, parameter: Tensor) -> Tensor:
        """Return the role's matrix, (heads, size, d_model); if `parameter` is a bias, its values, (heads, size)."""
        rows = parameter.T if self.columns and parameter.dim() > 1 else parameter
        return rows[self.index.to(parameter.device)]


@dataclass(frozen=True)
class Roles:
    """The parameters of a module's queries, keys and values, and the norms of its queries and keys."""

    rows: Mapping[str, Rows]  # rows of a parameter, keyed by role: query, key, value
    gains: Mapping[str, str]  # name of the norm within the module, keyed by role: query, key


def locate_roles(model: PreTrainedModel, single: SiteCall) -> Roles | None:
    """Find the rows of queries, keys and values by calling the module with random parameters; None if that fails.

    Random parameters have no equal rows, so every match is unique.
    """
    generator = torch.Generator().manual_seed(0)
    weights, parameters = float64_weights(single.module), dict(single.module.named_parameters())
    for name, parameter in parameters.items():
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.device)
        if parameter.is_floating_point():
            weights[name] = draw if parameter.dim() > 1 else torch.zeros_like(draw)
    try:
        probe = smallest(Probe(model, single, weights, single.layout))
        if probe.whole and any(math.prod(tokens) > 1 for _, *tokens, _ in probe.shapes):
            return None
        norms = norms_inside(single.module)
        units = {module: replace(norm, gain=torch.ones_like(norm.gain)) for module, norm in norms.items()}
        # the module may accept only as many sequences as in the captured call (BLOOM)
        draws = [probe.random(DRAWS, seed=8 + number) for number in range(1 if probe.batch is None else DRAWS)]
        with linear(units):
            calls = [probe(*inputs) for inputs in draws]
        candidates = {name: weights[name] for name, parameter in parameters.items() if parameter.dim() == 2}
        rows = {}
        for role, side in (("query", 0), ("key", 1), ("value", 1)):
            x = torch.cat([inputs[side] for inputs in draws])
            role_rows = _find_rows(torch.cat([getattr(call, role) for call in calls]), x, candidates)
            if role_rows is None:
                return None
            rows[role] = role_rows
        return Roles(rows, dict(_find_gains(probe, draws[0], units, calls[0])))
    except UnreadableError:
        return None


def _find_rows(vectors: Tensor, x: Tensor, candidates: Mapping[str, Tensor]) -> Rows | None:
    """Find the rows whose products with x are proportional to the `vectors` at position 0; None if there are none."""
    heads, size = vectors.shape[1], vectors.shape[-1]
    values = vectors[:, :, 0].double().flatten(1)
    tokens = x.double().flatten(0, -2)
    for name, parameter in candidates.items():
        for columns in (False, True):
            matrix = parameter.T if columns else parameter
            if matrix.shape[1] != tokens.shape[1]:
                continue
            products = tokens @ matrix.mT
            index = most_similar_rows(values, products)
            matched = products[:, index]
            factors = (values * matched).sum(0) / matched.square().sum(0)
            if float((values - factors * matched).norm()) <= TOLERANCE * float(values.norm()):
                return Rows(name, index.reshape(heads, size), columns)
    return None


def _find_gains(probe: Probe, inputs: tuple[Tensor, Tensor], units: Norms, before: Call) -> Iterator[tuple[str, str]]:
    """Yield (role, name of the norm) for each norm that scales the module's queries or keys."""
    names = {module: name for name, module in probe.target.module.named_modules()}
    for module in units:
        doubled = {other: replace(norm, gain=norm.gain * (1 + (other is module))) for other, norm in units.items()}
        with linear(doubled):
            call = probe(*inputs)
        for role in ("query", "key"):
            if not torch.allclose(getattr(call, role), getattr(before, role)):
                yield role, names[module]


def block_path(path: str) -> str:
    """Return the path of the layer that contains an attention module: the module's path up to its last number.

    A path without a number is returned unchanged. In T5, which also numbers attention and MLP within a block
    (block.0.layer.1), the path ends at the block's number.
    """
    match = re.match(r"(.*\.block\.\d+)(\.)layer\.\d+\.", path) or re.match(r"(.*\.\d+)(\.|$)", path)
    return match[1] if match else path


def read_layer(
    model: PreTrainedModel,
    site: SiteCall,
    roles: Roles | None,
    factors: object = None,
    *,
    others: Collection[str] = (),
    rest: bool = True,
    norm: str | None = None,
) -> Layer:
    """Return the tensors of the layer that contains a site, keyed by role in attention, or by name if they have none.

    `factors` is the site's Factors, which contain its rotation, or any other object if the factors could not be read.
    `others` contains the module paths of the block's other attention sites and of their norms, whose tensors are left
    out. If `rest` is False, only the tensors of the site's own module and of the norm at the path `norm` are returned.
    """
    block, module = model.get_submodule(block_path(site.site.path)), site.module
    parts, offsets = {}, dict(norm_offsets(block))
    inside, *outside = (_prefix_in_block(path) for path in (site.site.path, *others))
    own = (inside,) if norm is None else (inside, _prefix_in_block(norm))
    parameters = {
        name: part.detach()
        for name, part in block.named_parameters()
        if not name.startswith(tuple(outside)) and (rest or name.startswith(own))
    }
    rows_by_role, norms = ({}, {}) if roles is None else (roles.rows, roles.gains)
    used: dict[str, set[int]] = {}  # rows with a role, by tensor name; empty if all rows have the role
    for role, rows in rows_by_role.items():
        for kind in ("weight", "bias"):
            name = inside + (rows.name if kind == "weight" else _name_bias(rows.name))
            if name in parameters and (kind == "weight" or name != inside + rows.name):
                parts[f"{role}.{kind}"] = rows.read(parameters[name])
                used.setdefault(name, set()).update(rows.index.flatten().tolist())
    added: dict[str, float] = {}  # number that the norm of each gain adds to its weight
    for role, norm in norms.items():
        name, gain = f"{inside}{norm}.weight", f"{role}.gain"
        added[gain] = offsets.get(name, 0.0)
        if name in parameters:
            parts[gain] = add_offset(parameters[name], added[gain])
            used[name] = set()
        else:  # a norm without weights
            parts[gain] = torch.ones(parts[f"{role}.weight"].shape[1])
    output = None if roles is None else _find_output(block, module, roles, parameters)
    if roles is not None and output is not None:
        name, columns = output
        weight = parameters[name].T if columns else parameters[name]
        parts["output.weight"] = weight.T.reshape(-1, roles.rows["value"].index.shape[1], weight.shape[0])
        used[name] = set()
    parts |= _read_others(parameters, used, offsets, -1 if any(rows.columns for rows in rows_by_role.values()) else 0)
    added |= {name: offsets[name] for name in parameters.keys() & offsets.keys() - used.keys()}
    pairs: list[tuple[int, int]] | None = None
    if isinstance(factors, Factors):
        pairs = [] if factors.rotation is None else [(a, b) for a, b in factors.rotation.pairs.tolist()]
    headless = {name for name in parts if name in parameters and not name.startswith(inside)}
    headless |= {_name_bias(output[0])} if output is not None else set()
    maps = [path for path, module in block.named_modules() if type(module).__name__ == "Conv1D"]
    return Layer(
        parts,
        frozenset(added),
        pairs,
        headless=frozenset(headless & parts.keys()),
        offsets={name: offset for name, offset in added.items() if offset},
        inputs_first=frozenset(parts.keys() & {f"{path}.weight" for path in maps}),
    )


def _read_others(
    parameters: Mapping[str, Tensor], used: Mapping[str, set[int]], offsets: Mapping[str, float], axis: int
) -> dict[str, Tensor]:
    """Return the tensors without a role, and the remaining rows, along `axis`, of tensors that are `used` in part.

    Weights of norms are returned as gains.
    """
    parts = {}
    for name, part in parameters.items():
        if name not in used:
            parts[name] = add_offset(part, offsets.get(name, 0.0))
        elif left := [row for row in range(part.shape[axis]) if used[name] and row not in used[name]]:
            parts[f"{name} (other rows)"] = part.index_select(axis, torch.tensor(left, device=part.device))
    return parts


def add_offset(weight: Tensor, offset: float) -> Tensor:
    """Return a norm's gain: weight + offset, in float64 to avoid rounding; `weight` itself if `offset` is 0."""
    return weight.double() + offset if offset else weight


def _prefix_in_block(path: str) -> str:
    """Return the prefix, within the block, of the names of a module's tensors."""
    prefix = path.removeprefix(block_path(path)).lstrip(".")
    return f"{prefix}." if prefix else ""


def _name_bias(name: str) -> str:
    return re.sub(r"weight$", "bias", name)


def norm_offsets(block: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the name of each norm's weight w, and the number that the norm adds to w (1 for a gain of 1 + w)."""
    for path, module in block.named_modules():
        weight = getattr(module, "weight", None)
        if "Norm" in type(module).__name__ and isinstance(weight, Tensor) and weight.dim() == 1:
            try:
                with torch.no_grad():
                    norm = fit_norm(module)
            except (RuntimeError, ValueError):  # BatchNorm and GroupNorm need inputs with more axes
                norm = None
            offset = 0.0 if norm is None else float((norm.gain - weight.detach().double()).mean().round())
            yield f"{path}.weight" if path else "weight", offset


def _find_output(block: nn.Module, module: nn.Module, roles: Roles, names: Collection[str]) -> tuple[str, bool] | None:
    """Return the name of W_O in the block, and True if its rows are inputs; None if no tensor of `names` can be W_O.

    W_O is the first matrix of the right shape without another role. The module's own matrices are searched first, then
    the block's other matrices, starting with the longest path in common with the module.
    """
    taken = {module.get_parameter(rows.name) for rows in roles.rows.values()}
    width = roles.rows["query"].index.shape[0] * roles.rows["value"].index.shape[1]
    columns = roles.rows["value"].columns
    parts = {name: part for name, part in block.named_parameters() if name in names}
    own = set(module.parameters())
    path = next((path for path, each in block.named_modules() if each is module), "").split(".")

    def rank(name: str) -> tuple[bool, int]:
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name.split("."), path, strict=False)))
        return parts[name] not in own, -shared

    for name in sorted(parts, key=rank):
        part = parts[name]
        if part.dim() == 2 and part not in taken and part.shape[0 if columns else 1] == width:
            return name, columns
    return None
