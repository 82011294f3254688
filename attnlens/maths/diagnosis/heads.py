"""Hypotheses: operations on whole heads, such as a different order, or averaged, repeated or tiled key heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from attnlens.maths.diagnosis.layer import (
    BETTER,
    KINDS,
    ROLES,
    Layer,
    Parts,
    Step,
    are_better,
    has_heads,
    key_heads_of,
    match_rows,
    mean_angles,
    name_heads,
    name_parts,
    name_unchanged,
    name_weights,
    present_roles,
    residuals,
    sines_between,
)


def _match_heads(first: Tensor, second: Tensor) -> list[int] | None:
    """Return, for each head of `second`, the index of the matching head of `first`.

    Return None if no head moved, or if the match of a moved head is not clear.
    """
    partners = match_rows(first.flatten(1), second.flatten(1))
    moved = partners != torch.arange(len(partners))
    if not bool(moved.any()):
        return None
    new, old = (sines_between(part[moved], second[moved]) for part in (first[partners], first))
    return partners.tolist() if bool(are_better(new, old).all()) else None


def _move_heads(first: Layer, second: Layer, orders: Mapping[str, Sequence[int]]) -> tuple[Parts, list[str]]:
    """Return the reordered parts of `first`, keyed by name, and the names of parts that could be reordered but are not.

    A weight is reordered if the order of its role is not the identity; any other tensor with an axis of heads, only if
    this brings it nearer to the second layer.
    """
    moved_roles = [role for role, order in orders.items() if list(order) != sorted(order)]
    parts = {f"{role}.weight": first.weight(role)[list(orders[role])] for role in moved_roles}
    stayed = []
    for name, part in first.parts.items():
        if name not in second.parts or (has_heads(name) and name.endswith(".weight")):
            continue
        moved = [each for each in _list_reorderings(first, name, orders) if not torch.equal(each, part)]
        nearest = min((part, *moved), key=lambda each: float(residuals(each, second.parts[name], name).sum()))
        if nearest is not part:
            parts[name] = nearest
        elif moved:
            stayed.append(name)
    return parts, stayed


def _list_reorderings(layer: Layer, name: str, orders: Mapping[str, Sequence[int]]) -> Iterator[Tensor]:
    """Yield a part with its heads in each order that it could have in the second layer.

    A weight or bias can have only the order of its role. Any other part that is not `headless` is reordered along each
    axis with one entry per head coordinate or, except for gains, per head: by the order of its role if it is a gain
    with such an order, otherwise by each role's order in turn.
    """
    role, _, kind = name.partition(".")
    part = layer.parts[name]
    sizes = {layer.weight(each).shape[1] for each in orders}
    if has_heads(name):
        if role in orders:
            yield part[list(orders[role])]
        return
    if name in layer.headless:
        return
    is_gain = role in ROLES and kind == "gain"
    used = [orders[role]] if is_gain and role in orders else list(orders.values())
    for order in used:
        for size in sizes if is_gain else {1, *sizes}:
            places = (torch.tensor(list(order))[:, None] * size + torch.arange(size)).flatten()
            for axis in [axis for axis, length in enumerate(part.shape) if length == len(places)]:
                yield part.index_select(axis, places.to(part.device))


def _reorder_together(first: Layer, second: Layer, orders: Mapping[str, Sequence[int]]) -> Step:
    """Build the step that reorders the heads of all matrices, harmless if all other tensors with heads moved too."""
    parts, stayed = _move_heads(first, second, orders)
    names = name_parts([name for name in parts if name.endswith(".weight") and has_heads(name)])
    text = f"the heads are in a different order, the same in {names}"
    if not stayed:
        return Step("reordered heads", f"{text}: attention is the same", None, parts, (), harmless=True)
    repair = f"reorder {name_parts(stayed)} like the heads"
    return Step("heads out of order", text + name_unchanged(stayed), repair, parts)


def follow_order(first: Layer, second: Layer, order: Sequence[int]) -> Step:
    """Build the step that moves query head h to order[h], together with its key head, value head and output."""
    orders = {}
    for role in present_roles(first):
        count = len(first.weight(role))
        heads = range(0, len(order), len(order) // count)
        orders[role] = torch.tensor([order[head] * count // len(order) for head in heads]).argsort().tolist()
    return _reorder_together(first, second, orders)


def propose_head_order(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that heads were reordered; the step is harmless if the order is the same in all tensors with heads."""
    roles = [r for r in present_roles(first, second) if first.weight(r).shape == second.weight(r).shape]
    orders = {role: _match_heads(first.weight(role), second.weight(role)) for role in roles}
    moved = {role: order for role, order in orders.items() if order is not None}
    if not moved:
        return
    full = {role: moved.get(role) or list(range(len(first.weight(role)))) for role in roles}
    heads, kv_heads, groups = len(first.weight("query")), len(first.weight("key")), key_heads_of(first)

    def moves_with_queries(role: str) -> bool:
        """Return True if the heads of this role moved with the query heads."""
        query = full["query"]
        if role == "output":
            return full[role] == query
        return all(full[role][groups[head]] == groups[query[head]] for head in range(heads))

    together = "query" in full and all(moves_with_queries(role) for role in roles if role != "query")
    if together and set(roles) == set(ROLES):
        yield _reorder_together(first, second, full)
        return
    parts, stayed = _move_heads(first, second, moved)
    names = name_weights(moved)
    changed = {head for role in moved for head in _moved_heads(full[role], groups, role)}
    where = name_heads(changed, first)
    tiled = torch.arange(heads).view(kv_heads, -1).T.flatten().tolist() if heads % kv_heads == 0 else None
    back = torch.arange(heads).view(-1, kv_heads).T.flatten().tolist() if heads % kv_heads == 0 else None
    if set(moved) <= {"query", "output"} and 1 < kv_heads < heads and moved.get("query") in (tiled, back):
        text = f"the heads of {names} are grouped as if key heads were tiled (h mod {kv_heads}), not repeated"
        repair = f"reorder the heads of {names} for repeated key heads (h // {heads // kv_heads})"
        yield Step("tiled key heads", text, repair, parts, where)
        return
    others = [f"{role}.weight" for role in roles if role not in moved]
    stayed = [name for name in stayed if name.split(".")[0] in moved]
    text = f"the heads of {names} are in a different order"
    if stayed:
        text += name_unchanged([*stayed, *others])
    elif others:
        text += f", but not those of {name_parts(others)}"
    yield Step("heads out of order", text, f"reorder the heads of {names} as in the first model", parts, where)


def _moved_heads(order: Sequence[int], groups: Sequence[int], role: str) -> set[int]:
    """Return the query heads that use a head of this role whose position changed."""
    moved = {place for place, head in enumerate(order) if place != head}
    if role in ("query", "output"):
        return moved
    return {head for head, group in enumerate(groups) if group in moved}


def propose_averaged_keys(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that key heads (and value heads) were averaged in groups, repeated or tiled."""
    present = present_roles(first, second, roles=("key", "value"))
    counts = {first.weight(role).shape[0] for role in present}
    others = {second.weight(role).shape[0] for role in present}
    if len(counts) != 1 or len(others) != 1:
        return
    (count,), (other,) = counts, others
    if other == count:
        weights = {role: f"{role}.weight" for role in present}
        present = [role for role, name in weights.items() if not torch.equal(first.parts[name], second.parts[name])]
        if not present:
            return
    if other > count and other % count == 0:
        yield from _repeat_heads(first, second, present, other // count)
        return
    for group in [size for size in range(2, count + 1) if count % size == 0]:
        group_count = count // group
        if other not in (group_count, count):
            continue
        parts, fits = {}, []
        for role in present:
            for name in (f"{role}.{kind}" for kind in KINDS if f"{role}.{kind}" in first.parts):
                part = first.parts[name]
                mean = part.double().view(group_count, group, *part.shape[1:]).mean(1)
                parts[name] = mean if other == group_count else mean.repeat_interleave(group, 0)
            after = second.weight(role)
            fits.append(mean_angles(parts[f"{role}.weight"], after))
        if float(torch.cat(fits).max()) < BETTER / 2:
            names = name_weights(present)
            text = f"{count} key heads were averaged in groups of {group} ({names})"
            yield Step("averaged key heads", text, None, parts)


def _repeat_heads(first: Layer, second: Layer, roles: Sequence[str], times: int) -> Iterator[Step]:
    """Propose that each key head was repeated `times` times in a row, or that all key heads were tiled."""
    names = name_weights(roles)
    old = {name: first.parts[name] for role in roles for kind in KINDS if (name := f"{role}.{kind}") in first.parts}
    for tiled in (False, True):
        parts = {
            name: torch.cat([part] * times) if tiled else part.repeat_interleave(times, 0) for name, part in old.items()
        }
        fits = [mean_angles(parts[f"{role}.weight"], second.weight(role)) for role in roles]
        if float(torch.cat(fits).max()) >= BETTER / 2:
            continue
        if tiled:
            text = f"the key heads of {names} are tiled {times} times; each must be repeated {times} times in a row"
            yield Step("tiled key heads", text, "repeat each key head (repeat_interleave)", parts)
        else:
            text = f"each key head of {names} is repeated {times} times"
            yield Step("repeated key heads", text, None, parts, (), harmless=True)
