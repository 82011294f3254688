"""Hypotheses: operations on whole matrices, such as exchange, wrong split, transposition or change of basis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.maths.diagnosis.layer import (
    BETTER,
    FACTOR,
    KINDS,
    PERMUTED,
    SIDES,
    Layer,
    Parts,
    Step,
    are_better,
    has_heads,
    list_names,
    mean_angles,
    name_parts,
    name_weights,
    present_roles,
    query_heads_of,
    residuals,
    show_factor,
    sines_between,
    tensors_between,
)

if TYPE_CHECKING:
    from jaxtyping import Float


def _take_roles(
    layer: Layer, sources: Mapping[str, str], second: Layer, heads: Sequence[int] | None
) -> dict[str, Tensor]:
    """Return the parts of each role in `sources`, keyed by name, with the values of its source role.

    Biases and gains are included only if this brings them nearer to the second layer. If `heads` is given, only these
    heads get new values, and gains are left out.
    """
    parts: dict[str, Tensor] = {}
    for role, source in sources.items():
        for kind in (*KINDS, "gain") if heads is None else KINDS:
            name, old = f"{role}.{kind}", f"{source}.{kind}"
            if name in layer.parts and old in layer.parts:
                part, after = layer.parts[old], second.parts[name]
                if heads is not None:
                    part = layer.parts[name].index_copy(0, torch.tensor(heads), part[list(heads)])
                nearer = residuals(part, after, name).sum() < residuals(layer.parts[name], after, name).sum()
                if kind == "weight" or nearer:
                    parts[name] = part
    return parts


def propose_exchange(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that two or three of W_Q, W_K and W_V were exchanged in all heads, or W_Q and W_K in some heads."""
    shapes = {
        role: first.weight(role).shape
        for role in present_roles(first, second, roles=("query", "key", "value"))
        if first.weight(role).shape == second.weight(role).shape
    }
    old = {role: mean_angles(first.weight(role), second.weight(role)) for role in shapes}
    for order in list(permutations(shapes))[1:]:
        sources = {role: source for role, source in zip(shapes, order, strict=True) if role != source}
        if any(shapes[role] != shapes[source] for role, source in sources.items()):
            continue
        new = {r: mean_angles(first.weight(s), second.weight(r)) for r, s in sources.items()}
        better = torch.stack([are_better(new[role], old[role]) for role in sources]).all(0)
        whole = bool(better.all())
        if not whole and (set(sources) != {"query", "key"} or not bool(better.any())):
            continue
        heads = better.nonzero().flatten().tolist()
        parts = _take_roles(first, sources, second, None if whole else heads)
        names, biases = name_weights(sources), [f"{role}.bias" for role in sources]
        fixed_biases = [name for name in biases if name in first.parts and name not in parts]
        stays = f", but not {name_parts(fixed_biases)}" if fixed_biases else ""
        text, repair = f"{names} are exchanged{stays}", f"exchange {names}"
        if len(sources) == 3:
            places = [f"{name_weights([role])} is {name_weights([source])}" for role, source in sources.items()]
            text = f"{names} are permuted (in terms of the first model, {list_names(places)})"
            repair = "split the fused matrix in the right order"
        yield Step("exchanged", text, repair, parts, () if whole else tuple(heads))


def propose_misplaced(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that two tensors without heads (such as gate and up) were exchanged, or that one is a copy of another."""
    names = [name for name, part in first.parts.items() if _can_be_misplaced(name, part, second)]
    old = {name: float(residuals(first.parts[name], second.parts[name], name)) for name in names}
    sources: dict[str, str] = {}
    for name in (name for name in names if old[name] > 0):
        alike = [
            other
            for other in names
            if other != name
            and first.parts[other].shape == first.parts[name].shape
            and (other in first.gains) == (name in first.gains)
        ]
        new = {other: float(residuals(first.parts[other], second.parts[name], name)) for other in alike}
        nearest = min(new, key=lambda other: new[other], default=name)
        if nearest != name and new[nearest] < old[name] / FACTOR:
            sources[name] = nearest
    parts = {name: first.parts[source] for name, source in sources.items()}
    for name, source in sources.items():
        if sources.get(source) == name:
            if name < source:
                both = name_parts([name, source])
                pair = {each: parts[each] for each in (name, source)}
                yield Step("exchanged", f"{both} are exchanged", f"exchange {both}", pair)
        else:
            text = f"{name_parts([name])} contains the values of {name_parts([source])}"
            yield Step("misplaced", text, f"copy {name_parts([name])} from the first model", {name: parts[name]})


def _can_be_misplaced(name: str, part: Tensor, second: Layer) -> bool:
    """Return True for a tensor without heads whose values vary and whose shape is the same in `second`.

    Return False for the gains of queries and keys.
    """
    is_gain_of_heads = name.partition(".")[0] in PERMUTED and name.endswith("gain")
    comparable = name in second.parts and second.parts[name].shape == part.shape
    varies = part.numel() > 1 and bool((part != part.flatten()[0]).any())
    return comparable and varies and not has_heads(name) and not is_gain_of_heads


def propose_exchanged_gains(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that the gains of the query and key norms were exchanged."""
    names = [f"{role}.gain" for role in PERMUTED]
    gains = [layer.parts.get(name) for layer in (first, second) for name in names]
    if any(gain is None or gain.shape != second.parts[names[0]].shape for gain in gains):
        return
    parts = {name: first.parts[other] for name, other in zip(names, names[::-1], strict=True)}
    old, new = (
        torch.cat([residuals(layer[name], second.parts[name], name) for name in names])
        for layer in (first.parts, parts)
    )
    if bool(are_better(new, old).all()):
        text = f"{name_parts(names)} are exchanged"
        yield Step("exchanged", text, f"exchange {name_parts(names)}", parts)


def propose_wrong_split(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that the fused matrix of q, k and v was split into thirds instead of head by head, or the reverse."""
    roles = present_roles(first, second, roles=("query", "key", "value"))
    shapes = {layer.weight(role).shape for role in roles for layer in (first, second)}
    if len(roles) < 3 or len(shapes) != 1:
        return
    for flat in (True, False):
        parts = _split_step(first, flat).parts
        pairs = [(first.weight(r), parts[f"{r}.weight"], second.weight(r)) for r in roles]
        better = torch.stack(
            [are_better(mean_angles(new, after), mean_angles(before, after)) for before, new, after in pairs]
        )
        # some heads are the same under both splits, and can differ by rounding
        unchanged = torch.stack([mean_angles(before, new) == 0 for before, new, _ in pairs])
        if bool(better.any()) and bool((better | unchanged).all()):
            yield _split_step(first, flat)


def split_wrongly(layer: Layer, *, flat: bool) -> dict[str, Tensor]:
    """Return the weights and biases of q, k and v after a wrong split of their fused matrix.

    If `flat`, the matrix is stored head by head but split into thirds; otherwise the reverse.
    """
    parts: dict[str, Tensor] = {}
    roles = ("query", "key", "value")
    for kind in KINDS:
        own = [part for role in roles if (part := layer.parts.get(f"{role}.{kind}")) is not None]
        if not own:
            continue
        # a fused bias has zeros for a bias that the model lacks (Whisper has no b_K)
        zeros = torch.zeros_like(own[0])
        three = torch.stack([layer.parts.get(f"{role}.{kind}", zeros) for role in roles])  # (3, heads, head_dim, …)
        by_head = three.transpose(0, 1)
        mixed = by_head.reshape(three.shape) if flat else three.reshape(by_head.shape).transpose(0, 1)
        parts |= {f"{role}.{kind}": mixed[place] for place, role in enumerate(roles) if f"{role}.{kind}" in layer.parts}
    return parts


def propose_transpose(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that square matrices were transposed."""
    parts: dict[str, Tensor] = {}
    for name, part in first.parts.items():
        if name not in second.parts or part.dim() < 2 or second.parts[name].shape != part.shape:
            continue
        matrix = part.flatten(0, -2)
        if matrix.shape[0] != matrix.shape[1] or torch.equal(part, second.parts[name]):
            continue
        after = second.parts[name].flatten(0, -2)
        if float(sines_between(matrix.T, after).mean()) < BETTER * float(sines_between(matrix, after).mean()):
            parts[name] = matrix.T.reshape(part.shape)
    if parts:
        verb = "is" if len(parts) == 1 else "are"
        names = name_parts([*parts])
        yield Step("transposed", f"{names} {verb} transposed", f"transpose {names}", parts)


WIDEST = 1e3  # largest condition number of a change of basis that is recognised
CLOSE = 1e-3  # largest relative difference between matrices that count as equal, such as A · A⁻¹ and the identity


def propose_basis(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that W_Q and W_K, or W_O and W_V, were multiplied by A and A⁻ᵀ in each head, keeping their product."""
    for roles in SIDES:
        if present_roles(first, second, roles=roles) == list(roles):
            yield from _change_basis(first, second, roles)


def _change_basis(first: Layer, second: Layer, roles: tuple[str, str]) -> Iterator[Step]:
    """Propose a change of basis for two roles; the first role has one head per query head."""
    sides = [(first.weight(role), second.weight(role)) for role in roles]
    heads, kv_heads, size = len(sides[0][0]), len(sides[1][0]), sides[0][0].shape[1]
    if any(before.shape != after.shape or size > before.shape[2] for before, after in sides) or heads % kv_heads:
        return
    changed = [(before != after).flatten(1).any(1) for before, after in sides]
    names = [name for name in first.parts if has_heads(name) and name.split(".")[0] in roles]
    parts = {name: first.parts[name].double().clone() for name in names}
    key_bases: dict[int, Tensor] = {}
    for key_head in range(kv_heads):
        queries = list(range(key_head * heads // kv_heads, (key_head + 1) * heads // kv_heads))
        if not bool(changed[1][key_head]) or not bool(changed[0][queries].all()):
            continue
        stacked = [part[queries].double().transpose(0, 1).flatten(1).mT for part in sides[0]]
        bases = [
            torch.linalg.lstsq(*pair).solution.mT
            for pair in (stacked, [part[key_head].double().mT for part in sides[1]])
        ]
        if not bool(torch.stack(bases).isfinite().all()) or float(torch.linalg.cond(bases[0])) > WIDEST:
            continue
        product = bases[0].mT @ bases[1]
        if float((product - torch.eye(size).to(product)).norm()) > CLOSE * size**0.5:
            continue
        for role, places, basis in ((roles[0], queries, bases[0]), (roles[1], [key_head], bases[1])):
            for name in (f"{role}.{kind}" for kind in KINDS if f"{role}.{kind}" in parts):
                part = parts[name][places]
                parts[name][places] = torch.einsum("ij,hj...->hi...", basis, part)
        key_bases[key_head] = bases[1]
    if key_bases:
        where = () if len(key_bases) == kv_heads else query_heads_of([*key_bases], first)
        build = _values_in_another_basis if roles[1] == "value" else _scores_in_another_basis
        yield build(first, parts, where, [*key_bases.values()])


def _scores_in_another_basis(layer: Layer, parts: Parts, where: tuple[int, ...], bases: Sequence[Tensor]) -> Step:
    """Build the step that changes the basis of W_Q and W_K by one matrix A per key head.

    The step is harmless if every A commutes with RoPE and no norm or other tensor acts on queries or keys.
    """
    text = "the basis of W_Q and W_K is changed within heads (to W_Q A and W_K A⁻ᵀ, with the same product M)"
    repair, harmless = None, False
    if any(f"{role}.gain" in layer.parts for role in PERMUTED) or tensors_between(layer, PERMUTED):
        text += ", but the norm of queries and keys does not commute with the change"
        repair = "undo the change of basis before the norm"
    elif not (layer.is_unrotated or all(_commutes(basis, layer) for basis in bases)):
        text += ", which changes attention under RoPE"
        repair = "undo the change of basis before the rotation"
    else:
        text, harmless = f"{text}: attention is the same", True
    return Step("different basis", text, repair, parts, where, harmless)


def _values_in_another_basis(layer: Layer, parts: Parts, where: tuple[int, ...], bases: Sequence[Tensor]) -> Step:
    """Build the step that rescales W_V and W_O or changes their basis; harmless if no tensor acts between them."""
    factors = [float(basis.diagonal().mean()) for basis in bases]
    same = max(factors) - min(factors) <= CLOSE * abs(factors[0])
    unit = [factors[0] * torch.eye(len(basis)).to(basis) for basis in bases]
    scaled = same and all(bool((a - b).norm() <= CLOSE * a.norm()) for a, b in zip(bases, unit, strict=True))
    text = "the basis of W_V and W_O is changed within heads (with the same product)"
    if scaled:
        factor = show_factor(factors[0])
        text = f"W_V is multiplied by {factor} and W_O divided by {factor}"
    if between := tensors_between(layer, ("value", "output")):
        text += f", but {name_parts(between)} does not commute with the change"
        return Step("different basis", text, "undo the change of basis of W_V and W_O", parts, where)
    return Step("different basis", f"{text}: attention's output is the same", None, parts, where, harmless=True)


def _commutes(basis: Float[Tensor, "size size"], layer: Layer) -> bool:
    """Return True if `basis` commutes with RoPE: it rotates and scales each rotated pair, mixing only unrotated rows.

    Return False if the pairs are unknown.
    """
    allowed = torch.zeros_like(basis)
    if layer.pairs is None:
        return False
    for first, second in layer.pairs:
        mean = (basis[first, first] + basis[second, second]) / 2
        turn = (basis[second, first] - basis[first, second]) / 2
        allowed[first, first] = allowed[second, second] = mean
        allowed[second, first], allowed[first, second] = turn, -turn
    still = [place for place in range(len(basis)) if place not in set(layer.rotated_coordinates)]
    for place in still:
        allowed[place, still] = basis[place, still]
    return float((basis - allowed).norm()) <= CLOSE * float(basis.norm())


def propose_always(first: Layer, second: Layer) -> Iterator[Step]:
    """Yield structural steps with which `diagnose` starts a search even if they explain nothing by themselves."""
    roles = present_roles(first, second, roles=("query", "key", "value"))
    shapes = {layer.weight(role).shape for role in roles for layer in (first, second)}
    if len(shapes) != 1 or len(roles) < 2:
        return
    gains = {"query.gain", "key.gain"} & first.parts.keys()
    for kinds in ((*KINDS, "gain"), KINDS) if gains else (KINDS,):
        pairs = [(f"{role}.{kind}", f"{other}.{kind}") for role, other in (PERMUTED, PERMUTED[::-1]) for kind in kinds]
        parts = {name: first.parts[other] for name, other in pairs if {name, other} <= first.parts.keys()}
        yield Step("exchanged", "W_Q and W_K are exchanged", "exchange W_Q and W_K", parts)
    if len(roles) == 3:
        yield from (_split_step(first, flat) for flat in (True, False))


def _split_step(layer: Layer, flat: bool) -> Step:
    """Build the step that splits the fused matrix as in `split_wrongly`."""
    wrong, right = ("in flat thirds", "head by head") if flat else ("head by head", "in flat thirds")
    text = f"the fused matrix of queries, keys and values was split {wrong} instead of {right}"
    return Step("wrong split", text, f"split the fused matrix {right}", split_wrongly(layer, flat=flat))
