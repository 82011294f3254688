"""Structural hypotheses on the order of rows, within heads or across heads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.maths.diagnosis.layer import (
    KINDS,
    PERMUTED,
    SIDES,
    Layer,
    Step,
    are_better,
    list_names,
    match_rows,
    mean_angles,
    name_heads,
    name_unchanged,
    name_weights,
    present_roles,
    query_heads_of,
    residuals,
    sines_between,
    tensors_between,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int

INTERLEAVED = "interleaved rows"
HALVES = "half-split rows"
NAMED: dict[str, tuple[str, str | None]] = {
    INTERLEAVED: ("interleaved instead of half-split", "permute the rows of {q} from interleaved to half-split"),
    HALVES: (
        "permuted from interleaved to half-split once too often",
        "permute the rows of {q} from half-split to interleaved",
    ),
    "reversed rows": ("in reverse order within each head", "reverse the rows of {q} within each head"),
    "swapped halves": ("with the halves of each head swapped", "swap the halves of each head of {q}"),
}


def named_orders(size: int) -> dict[str, Int[Tensor, " size"]]:
    """Return orders of `size` rows, keyed by name: row i of the second layer is row order[i] of the first."""
    rows = torch.arange(size)
    orders = {"reversed rows": rows.flip(0)}
    if size % 2 == 0:
        orders |= {INTERLEAVED: rows.view(2, -1).T.flatten(), HALVES: rows.view(-1, 2).T.flatten()}
        orders["swapped halves"] = rows.roll(size // 2)
    return orders


def _candidate_orders(layer: Layer, size: int) -> dict[str, Tensor]:
    """Return orders of a head's rows, keyed by name, including orders of only the rows that RoPE rotates."""
    candidates, rotated = named_orders(size), layer.rotated_coordinates
    if rotated and len(rotated) < size:
        for name, order in named_orders(len(rotated)).items():
            rows = torch.arange(size)
            rows[rotated] = torch.tensor(rotated)[order]
            candidates[f"{name} of rotated"] = rows
    return candidates


def _reorder(layer: Layer, role: str, heads: Sequence[int], order: Tensor, second: Layer) -> dict[str, Tensor]:
    """Return the role's parts, keyed by name, with the rows of `heads` reordered.

    Biases and gains are included only if reordering brings them nearer to the second layer.
    """
    parts: dict[str, Tensor] = {}
    for kind in KINDS:
        name = f"{role}.{kind}"
        if name not in layer.parts:
            continue
        part = layer.parts[name].clone()
        part[list(heads)] = part[list(heads)][:, order]
        before, after = (residuals(each, second.parts[name], name).sum() for each in (layer.parts[name], part))
        if kind == "weight" or after < before:
            parts[name] = part
    name = f"{role}.gain"
    gain, count = layer.parts.get(name), len(layer.weight(role))
    if gain is None or gain.numel() not in (len(order), count * len(order)):
        return parts
    by_head = gain.reshape(-1, len(order)).clone()  # one row, or one per head
    if len(by_head) == count:
        by_head[list(heads)] = by_head[list(heads)][:, order]
    elif len(heads) == count:
        by_head = by_head[:, order]
    moved = by_head.reshape(gain.shape)
    if residuals(moved, second.parts[name], name) < residuals(gain, second.parts[name], name):
        parts[name] = moved
    return parts


def propose_wrong_head_count(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that rows of W_Q or W_K were permuted as for a wrong number of heads: 1, or that of the other matrix."""
    present = present_roles(first, second, roles=PERMUTED)
    counts = {role: first.weight(role).shape[0] for role in present}
    for role in present:
        before, after = first.weight(role), second.weight(role)
        rows = before.flatten(0, 1)
        for count in {*counts.values(), 1} - {counts[role]}:
            if before.shape != after.shape or len(rows) % (2 * count):
                continue
            for name in (INTERLEAVED, HALVES):
                order = named_orders(len(rows) // count)[name]
                flat = torch.cat([order + start for start in range(0, len(rows), len(order))])
                predicted = rows[flat].reshape(before.shape)
                if not bool(are_better(mean_angles(predicted, after), mean_angles(before, after)).all()):
                    continue
                parts = {f"{role}.weight": predicted}
                if f"{role}.bias" in first.parts:
                    bias = first.parts[f"{role}.bias"]
                    parts[f"{role}.bias"] = bias.flatten()[flat].reshape(bias.shape)
                symbol = name_weights([role])
                wrong = "a single head" if count == 1 else f"{count} heads"
                kind = "interleaved" if name == INTERLEAVED else "half-split"
                text = f"the rows of {symbol} were permuted ({kind}) as for {wrong}"
                text += f", but {symbol} has {counts[role]}"
                repair = f"permute the rows of {symbol} for {counts[role]} heads"
                yield Step(f"{name} of {count} heads", text, repair, parts)


def propose_row_order(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that rows of W_Q, W_K, W_V or W_O were interleaved, reversed or otherwise permuted within heads."""
    for roles in SIDES:
        yield from _permuted_rows(first, second, roles)


def _permuted_rows(first: Layer, second: Layer, roles: tuple[str, str]) -> Iterator[Step]:
    """Propose one step for each kind of reordering found within the heads of two roles."""
    orders_by_kind: dict[str, dict[str, dict[int, Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for role in present_roles(first, second, roles=roles):
        before, after = first.weight(role), second.weight(role)
        if before.shape != after.shape:
            continue
        old, orders = mean_angles(before, after), _candidate_orders(first, before.shape[1])
        new = {name: mean_angles(before[:, order], after) for name, order in orders.items()}
        for head in (old > 0).nonzero().flatten().tolist():
            name = min(new, key=lambda name: float(new[name][head]))
            if bool(are_better(new[name], old)[head]):
                orders_by_kind[name][role][head] = orders[name]
                continue
            order = match_rows(before[head], after[head])
            fits = mean_angles(before[head : head + 1, order], after[head : head + 1])
            if bool(are_better(fits, old[head : head + 1])):
                orders_by_kind["permuted rows"][role][head] = order
    for name, by_role in orders_by_kind.items():
        yield _row_step(name, by_role, first, second, roles)


def _row_step(
    name: str, by_role: dict[str, dict[int, Tensor]], first: Layer, second: Layer, roles: tuple[str, str]
) -> Step:
    """Build the step that reorders rows within heads.

    The step is harmless if both roles have the same orders, no tensor that acts on the rows keeps its old order and,
    for W_Q and W_K, the layer has no RoPE.
    """
    parts: dict[str, Tensor] = {}
    concerned = set[int]()
    for role, orders in by_role.items():
        current = first
        for order in {tuple(order.tolist()) for order in orders.values()}:
            heads = [head for head, each in orders.items() if tuple(each.tolist()) == order]
            parts |= _reorder(current, role, heads, torch.tensor(order), second)
            current = first.with_parts(parts)
        concerned |= set(orders) if role == roles[0] else set(query_heads_of([*orders], first))
    names = name_weights(by_role)
    subjects = [f"{'columns' if role == 'output' else 'rows'} of {name_weights([role])}" for role in by_role]
    subject = list_names(subjects) if roles != PERMUTED else f"rows of {names}"
    kind, _, scope = name.partition(" of ")
    words, repair = NAMED.get(kind, ("in a different order within each head", None))
    where = name_heads(concerned, first)
    if where:  # the repair must not be applied to the other heads
        which = "this head" if len(concerned) == 1 else "each of these heads"
        words, repair = words.replace("each head", which), repair and repair.replace("each head", which)
    scope = " (of the coordinates that RoPE rotates)" if scope else ""
    stays = [part for role in by_role for part in (f"{role}.bias", f"{role}.gain") if _stays(part, parts, first)]
    stays += [part for part in tensors_between(first, roles) if _stays(part, parts, first)]
    harmless = (roles != PERMUTED or first.is_unrotated) and not stays and _same_orders(by_role, first, roles)
    text = f"the {subject} are {words}{scope}{name_unchanged(stays)}"
    if harmless:
        result = "attention" if roles == PERMUTED else "attention's output"
        text += f", the same in both: {result} is the same"
    repair = None if harmless else (repair or "write the rows of {q} in the first model's order").format(q=names)
    return Step(kind, text, repair, parts, where, harmless)


SAMPLE = 64  # number of rows that are compared before all rows are matched


def propose_rows_across_heads(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that the rows of W_Q, W_K or both were permuted across heads."""
    orders: dict[str, Tensor] = {}
    for role in present_roles(first, second, roles=PERMUTED):
        before, after = first.weight(role), second.weight(role)
        order = _match_across_heads(before, after) if before.shape == after.shape else None
        if order is not None:
            sources = order.view(before.shape[:2]) // before.shape[1]  # heads from which each head's rows come
            if bool((sources != sources[:, :1]).any()):
                orders[role] = order
    if not orders:
        return
    parts: dict[str, Tensor] = {}
    concerned, stays = set[int](), list[str]()
    for role, order in orders.items():
        count, size = first.weight(role).shape[:2]
        for name in (f"{role}.weight", f"{role}.bias", f"{role}.gain"):
            part = first.parts.get(name)
            if part is None or part.numel() % len(order):
                continue  # a gain that all heads share stays in place
            moved = part.reshape(len(order), -1)[order].reshape(part.shape)
            old, new = (float(residuals(each, second.parts[name], name).sum()) for each in (part, moved))
            if name.endswith("weight") or new < old:
                parts[name] = moved
            elif _stays(name, parts, first):
                stays.append(name)
        changed = (order != torch.arange(len(order))).view(count, size).any(1).nonzero().flatten().tolist()
        concerned |= set(changed if role == "query" else query_heads_of(changed, first))
    names = name_weights(orders)
    text = f"the rows of {names} are in a different order across heads{name_unchanged(stays)}"
    repair = f"write the rows of {names} in the first model's order"
    yield Step("rows across heads", text, repair, parts, name_heads(concerned, first))


def _match_across_heads(
    first: Float[Tensor, "heads size width"], second: Float[Tensor, "heads size width"]
) -> Tensor | None:
    """Return, for each row of `second`, the index of the matching row of `first` in any head.

    Return None unless this order makes every changed head clearly more similar.
    """
    before, after = (part.flatten(0, 1) for part in (first, second))
    order = torch.arange(len(before))
    moved = (before != after).any(1).nonzero().flatten()
    if len(moved) < 2:
        return None
    chosen = moved[:: -(-len(moved) // SAMPLE)]
    units = [torch.nn.functional.normalize(part.double(), dim=1) for part in (after[chosen], before[moved])]
    nearest = moved[(units[0] @ units[1].mT).argmax(1)]
    old, new = (sines_between(before[places], after[chosen]) for places in (chosen, nearest))
    if not bool(are_better(new, old).any()):
        return None
    order[moved.cpu()] = moved.cpu()[match_rows(before[moved], after[moved])]
    old, new = (mean_angles(part.view(first.shape), second) for part in (before, before[order]))
    return order if bool(are_better(new, old)[old > 0].all()) else None


def _stays(name: str, parts: dict[str, Tensor], layer: Layer) -> bool:
    """Return True if the layer has a part `name` that was not reordered although its values are not all equal."""
    part = layer.parts.get(name)
    return part is not None and name not in parts and bool((part != part.flatten()[0]).any())


def _same_orders(by_role: dict[str, dict[int, Tensor]], layer: Layer, roles: tuple[str, str]) -> bool:
    """Return True if the rows of both roles have the same order in every head."""
    if set(by_role) != set(roles):
        return False
    heads, kv_heads = (len(layer.weight(role)) for role in roles)
    queries, keys = (by_role[role] for role in roles)
    identity = torch.arange(layer.weight(roles[0]).shape[1])
    return all(
        torch.equal(queries.get(head, identity), keys.get(head * kv_heads // heads, identity)) for head in range(heads)
    )
