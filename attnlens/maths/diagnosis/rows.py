"""Structural hypotheses: rows, heads, roles and matrices in another order, averaged keys, or another basis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attnlens.maths.diagnosis.layer import ROLES, Layer, Parts, has_heads, list_names, name_parts, residuals, turn_from
from attnlens.maths.diagnosis.steps import Step, show_factor, structural

if TYPE_CHECKING:
    from jaxtyping import Float, Int

BETTER = 0.5
"""A structural hypothesis is considered if it at least halves the angle between rows of A and B."""
KINDS = ("weight", "bias")
PERMUTED = ("query", "key")
SIDES = (PERMUTED, ("output", "value"))  # pairs of roles with a product in each head; the first has the query heads


def _present(*layers: Layer, roles: Sequence[str] = ROLES, kind: str = "weight") -> list[str]:
    """Return the roles of which all layers have this kind of part."""
    return [role for role in roles if all(f"{role}.{kind}" in layer.parts for layer in layers)]


def _is_better(new: Float[Tensor, " heads"], old: Float[Tensor, " heads"]) -> Tensor:
    """Return which heads are closer to their prediction than to the first model's head, by a factor."""
    return (new < BETTER * old) & (old > 0)


def _angles(first: Tensor, second: Tensor) -> Float[Tensor, " heads"]:
    """Compute the mean sine of the angles between the rows of each head."""
    return turn_from(first.flatten(0, 1), second.flatten(0, 1)).view(first.shape[:2]).mean(1)


def _query_heads(key_heads: Sequence[int], layer: Layer) -> tuple[int, ...]:
    """Return the query heads that read these key heads."""
    heads, kv_heads = len(layer.parts["query.weight"]), len(layer.parts["key.weight"])
    return tuple(head for head in range(heads) if head * kv_heads // heads in key_heads)


# --- rows of a head -------------------------------------------------------------------------------------------------

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
    """Return the orders of `size` rows with a name: row i of B is row order[i] of A."""
    rows = torch.arange(size)
    orders = {"reversed rows": rows.flip(0)}
    if size % 2 == 0:
        orders |= {INTERLEAVED: rows.view(2, -1).T.flatten(), HALVES: rows.view(-1, 2).T.flatten()}
        orders["swapped halves"] = rows.roll(size // 2)
    return orders


def _candidate_orders(layer: Layer, size: int) -> dict[str, Tensor]:
    """Return the named orders of all rows of a head, and of those that RoPE rotates."""
    candidates, rotated = named_orders(size), layer.rotated
    if rotated and len(rotated) < size:
        for name, order in named_orders(len(rotated)).items():
            rows = torch.arange(size)
            rows[rotated] = torch.tensor(rotated)[order]
            candidates[f"{name} of rotated"] = rows
    return candidates


def _reorder(layer: Layer, role: str, heads: Sequence[int], order: Tensor, second: Layer) -> dict[str, Tensor]:
    """Return the role's parts with the rows of these heads reordered; a bias or gain only if that brings it nearer."""
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
    gain, count = layer.parts.get(name), len(layer.parts[f"{role}.weight"])
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


def _match_rows(first: Float[Tensor, "rows width"], second: Float[Tensor, "rows width"]) -> Tensor:
    """Return, for each row of B, the row of A with the most similar direction, each row of A once."""
    units = [torch.nn.functional.normalize(part.double(), dim=1) for part in (second, first)]
    similar = units[0] @ units[1].mT
    return torch.from_numpy(linear_sum_assignment(-similar.cpu().numpy())[1])


@structural
def wrong_head_count(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that the rows of W_K (or W_Q) were permuted for the number of heads of the other."""
    present = _present(first, second, roles=PERMUTED)
    counts = {role: first.parts[f"{role}.weight"].shape[0] for role in present}
    for role in present:
        before, after = first.parts[f"{role}.weight"], second.parts[f"{role}.weight"]
        rows = before.flatten(0, 1)
        for count in {*counts.values(), 1} - {counts[role]}:
            if before.shape != after.shape or len(rows) % (2 * count):
                continue
            for name in (INTERLEAVED, HALVES):
                order = named_orders(len(rows) // count)[name]
                flat = torch.cat([order + start for start in range(0, len(rows), len(order))])
                predicted = rows[flat].reshape(before.shape)
                if not bool(_is_better(_angles(predicted, after), _angles(before, after)).all()):
                    continue
                parts = {f"{role}.weight": predicted}
                if f"{role}.bias" in first.parts:
                    bias = first.parts[f"{role}.bias"]
                    parts[f"{role}.bias"] = bias.flatten()[flat].reshape(bias.shape)
                symbol = name_parts([f"{role}.weight"])
                text = (
                    f"the rows of {symbol} were permuted ({NAMED[name][0].split(' instead')[0]}) as for {count} heads"
                )
                text += f", but it has {counts[role]}"
                yield Step(f"{name} of {count} heads", text, f"permute {symbol} with {counts[role]} heads", parts)


@structural
def permuted_rows(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose another order of W_Q's or W_K's rows within heads (interleaved, …, or any), or of W_V's and W_O's."""
    for roles in SIDES:
        yield from _permuted_rows(first, second, roles)


def _permuted_rows(first: Layer, second: Layer, roles: tuple[str, str]) -> Iterator[Step]:
    found: dict[str, dict[str, dict[int, Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for role in _present(first, second, roles=roles):
        before, after = first.parts[f"{role}.weight"], second.parts[f"{role}.weight"]
        if before.shape != after.shape:
            continue
        old, orders = _angles(before, after), _candidate_orders(first, before.shape[1])
        new = {name: _angles(before[:, order], after) for name, order in orders.items()}
        for head in (old > 0).nonzero().flatten().tolist():
            name = min(new, key=lambda name: float(new[name][head]))
            if bool(_is_better(new[name], old)[head]):
                found[name][role][head] = orders[name]
                continue
            order = _match_rows(before[head], after[head])
            fits = _angles(before[head : head + 1, order], after[head : head + 1])
            if bool(_is_better(fits, old[head : head + 1])):
                found["permuted rows"][role][head] = order
    for name, by_role in found.items():
        yield _row_step(name, by_role, first, second, roles)


def _row_step(
    name: str, by_role: dict[str, dict[int, Tensor]], first: Layer, second: Layer, roles: tuple[str, str]
) -> Step:
    parts: dict[str, Tensor] = {}
    concerned = set[int]()
    for role, orders in by_role.items():
        current = first
        for order in {tuple(order.tolist()) for order in orders.values()}:
            heads = [head for head, each in orders.items() if tuple(each.tolist()) == order]
            parts |= _reorder(current, role, heads, torch.tensor(order), second)
            current = first.with_parts(parts)
        concerned |= set(orders) if role == roles[0] else set(_query_heads([*orders], first))
    names = name_parts([f"{role}.weight" for role in by_role])
    subjects = [f"{'columns' if role == 'output' else 'rows'} of {name_parts([f'{role}.weight'])}" for role in by_role]
    subject = list_names(subjects) if roles != PERMUTED else f"rows of {names}"
    kind, _, scope = name.partition(" of ")
    words, repair = NAMED.get(kind, ("in another order within heads", None))
    scope = " (of the coordinates that RoPE rotates)" if scope else ""
    stays = [part for role in by_role for part in (f"{role}.bias", f"{role}.gain") if _stays(part, parts, first)]
    stays += [part for part in _others_between(first, roles) if _stays(part, parts, first)]
    harmless = (roles != PERMUTED or first.unrotated) and not stays and _same_orders(by_role, first, roles)
    text = f"the {subject} are {words}{scope}"
    text += f", but {name_parts(stays)} as before" if stays else ""
    if harmless:
        text += ", alike: attention is the same" if roles == PERMUTED else ", alike: attention's output is the same"
    whole = len(concerned) == len(first.parts["query.weight"])
    repair = None if harmless else (repair or "write the rows of {q} in the first model's order").format(q=names)
    return Step(kind, text, repair, parts, () if whole else tuple(sorted(concerned)), harmless)


def _stays(name: str, parts: dict[str, Tensor], layer: Layer) -> bool:
    """Return True if a bias or gain that differs between rows was not reordered."""
    part = layer.parts.get(name)
    return part is not None and name not in parts and bool((part != part.flatten()[0]).any())


def _same_orders(by_role: dict[str, dict[int, Tensor]], layer: Layer, roles: tuple[str, str]) -> bool:
    """Return True if the rows of both roles are reordered alike in every head."""
    if set(by_role) != set(roles):
        return False
    heads, kv_heads = (len(layer.parts[f"{role}.weight"]) for role in roles)
    queries, keys = (by_role[role] for role in roles)
    identity = torch.arange(layer.parts[f"{roles[0]}.weight"].shape[1])
    return all(
        torch.equal(queries.get(head, identity), keys.get(head * kv_heads // heads, identity)) for head in range(heads)
    )


# --- heads ----------------------------------------------------------------------------------------------------------


def _match_heads(first: Tensor, second: Tensor) -> list[int] | None:
    """Return the head of A that each head of B is, if heads moved and the match is clear."""
    units = [torch.nn.functional.normalize(part.double().flatten(1), dim=1) for part in (second, first)]
    cosines = units[0] @ units[1].mT
    sines = (1 - cosines.square()).clamp(min=0).sqrt()
    partners = torch.from_numpy(linear_sum_assignment(-cosines.cpu().numpy())[1])
    numbers = torch.arange(len(partners))
    moved = partners != numbers
    if not bool(moved.any()):
        return None
    clear = _is_better(sines[numbers, partners][moved], sines[numbers, numbers][moved])
    return partners.tolist() if bool(clear.all()) else None


def _move_heads(first: Layer, second: Layer, orders: Mapping[str, Sequence[int]]) -> tuple[Parts, list[str]]:
    """Return the parts with their heads in these orders by role, and the names of those that did not move too.

    Biases, gains over all heads, and other tensors with an axis of heads move only if that brings them nearer to B.
    """
    parts: dict[str, Tensor] = {}
    stayed = []
    for role, order in orders.items():
        if list(order) != sorted(order):
            parts[f"{role}.weight"] = first.parts[f"{role}.weight"][list(order)]
    for name, part in first.parts.items():
        if name not in second.parts or (has_heads(name) and name.endswith(".weight")):
            continue
        moved = [each for each in _by_head(first, name, orders) if not torch.equal(each, part)]
        nearest = min((part, *moved), key=lambda each: float(residuals(each, second.parts[name], name).sum()))
        if nearest is not part:
            parts[name] = nearest
        elif moved:
            stayed.append(name)
    return parts, stayed


def _by_head(layer: Layer, name: str, orders: Mapping[str, Sequence[int]]) -> Iterator[Tensor]:
    """Yield a bias, gain or other tensor with its heads in the order of its role; of any role if it has none."""
    role, _, kind = name.partition(".")
    part = layer.parts[name]
    sizes = {layer.parts[f"{each}.weight"].shape[1] for each in orders}
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


def _reordered_alike(first: Layer, second: Layer, orders: Mapping[str, Sequence[int]]) -> Step:
    """Return the step of heads that moved in all matrices: harmless if all other tensors of heads moved too."""
    parts, stayed = _move_heads(first, second, orders)
    names = name_parts([name for name in parts if name.endswith(".weight") and has_heads(name)])
    text = f"the heads are in another order, alike in {names}"
    if not stayed:
        return Step("reordered heads", f"{text}: attention is the same", None, parts, (), harmless=True)
    left = name_parts(stayed)
    return Step("heads out of order", f"{text}, but {left} as before", f"reorder {left} as the heads", parts)


def follow_order(first: Layer, second: Layer, order: Sequence[int]) -> Step:
    """Return the step that moves query head h to order[h], with its key head, values and output."""
    orders = {}
    for role in _present(first):
        count = len(first.parts[f"{role}.weight"])
        heads = range(0, len(order), len(order) // count)
        orders[role] = torch.tensor([order[head] * count // len(order) for head in heads]).argsort().tolist()
    return _reordered_alike(first, second, orders)


@structural
def reordered_heads(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose another order of heads: alike in q, k, v and o (harmless), or not (damage)."""
    roles = [
        r for r in _present(first, second) if first.parts[f"{r}.weight"].shape == second.parts[f"{r}.weight"].shape
    ]
    orders = {role: _match_heads(first.parts[f"{role}.weight"], second.parts[f"{role}.weight"]) for role in roles}
    moved = {role: order for role, order in orders.items() if order is not None}
    if not moved:
        return
    full = {role: moved.get(role) or list(range(len(first.parts[f"{role}.weight"]))) for role in roles}
    heads, kv_heads = len(first.parts["query.weight"]), len(first.parts["key.weight"])
    groups = [head * kv_heads // heads for head in range(heads)]

    def follow(role: str) -> bool:
        """Return True if this role's heads are ordered as the query heads are."""
        query = full["query"]
        if role == "output":
            return full[role] == query
        return all(full[role][groups[head]] == groups[query[head]] for head in range(heads))

    together = "query" in full and all(follow(role) for role in roles if role != "query")
    if together and set(roles) == set(ROLES):
        yield _reordered_alike(first, second, full)
        return
    parts, stayed = _move_heads(first, second, moved)
    names = name_parts([f"{role}.weight" for role in moved])
    changed = {head for role in moved for head in _moved_heads(full[role], groups, role)}
    where = () if len(changed) == heads else tuple(sorted(changed))
    tiled = torch.arange(heads).view(kv_heads, -1).T.flatten().tolist() if heads % kv_heads == 0 else None
    back = torch.arange(heads).view(-1, kv_heads).T.flatten().tolist() if heads % kv_heads == 0 else None
    if set(moved) <= {"query", "output"} and 1 < kv_heads < heads and moved.get("query") in (tiled, back):
        text = f"the heads of {names} are grouped as if key heads were tiled (h mod {kv_heads}), not repeated"
        repair = f"put the heads of {names} into the order of repeated key heads (h // {heads // kv_heads})"
        yield Step("tiled key heads", text, repair, parts, where)
        return
    others = [f"{role}.weight" for role in roles if role not in moved]
    stayed = [name for name in stayed if name.split(".")[0] in moved]
    text = f"the heads of {names} are in another order"
    if stayed:
        text += f", but {name_parts([*stayed, *others])} as before"
    elif others:
        text += f", but not those of {name_parts(others)}"
    yield Step("heads out of order", text, f"reorder the heads of {names} as in the first model", parts, where)


def _moved_heads(order: Sequence[int], groups: Sequence[int], role: str) -> set[int]:
    """Return the query heads that a moved head of this role belongs to."""
    moved = {place for place, head in enumerate(order) if place != head}
    if role in ("query", "output"):
        return moved
    return {head for head, group in enumerate(groups) if group in moved}


@structural
def averaged_keys(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that key heads (and value heads) were averaged in groups, repeated or tiled."""
    present = _present(first, second, roles=("key", "value"))
    counts = {first.parts[f"{role}.weight"].shape[0] for role in present}
    others = {second.parts[f"{role}.weight"].shape[0] for role in present}
    if len(counts) != 1 or len(others) != 1:
        return
    (count,), (other,) = counts, others
    if other == count:
        weights = {role: f"{role}.weight" for role in present}
        present = [role for role, name in weights.items() if not torch.equal(first.parts[name], second.parts[name])]
        if not present:
            return
    if other > count and other % count == 0:
        yield from _repeated(first, second, present, other // count)
        return
    for group in [size for size in range(2, count + 1) if count % size == 0]:
        kept = count // group
        if other not in (kept, count):
            continue
        parts, fits = {}, []
        for role in present:
            for name in (f"{role}.{kind}" for kind in KINDS if f"{role}.{kind}" in first.parts):
                part = first.parts[name]
                mean = part.double().view(kept, group, *part.shape[1:]).mean(1)
                parts[name] = mean if other == kept else mean.repeat_interleave(group, 0)
            after = second.parts[f"{role}.weight"]
            fits.append(_angles(parts[f"{role}.weight"], after))
        if float(torch.cat(fits).max()) < BETTER / 2:
            names = name_parts([f"{role}.weight" for role in present])
            text = f"{count} key heads were averaged in groups of {group} ({names})"
            yield Step("averaged key heads", text, None, parts)


def _repeated(first: Layer, second: Layer, roles: Sequence[str], times: int) -> Iterator[Step]:
    names = name_parts([f"{role}.weight" for role in roles])
    for tiled in (False, True):
        parts = {}
        for name in (f"{role}.{kind}" for role in roles for kind in KINDS):
            if name in first.parts:
                part = first.parts[name]
                parts[name] = torch.cat([part] * times) if tiled else part.repeat_interleave(times, 0)
        fits = [_angles(parts[f"{role}.weight"], second.parts[f"{role}.weight"]) for role in roles]
        if float(torch.cat(fits).max()) < BETTER / 2:
            if tiled:
                text = f"the key heads of {names} are tiled {times} times; each must be repeated {times} times in a row"
                yield Step("tiled key heads", text, "repeat each key head (repeat_interleave)", parts)
            else:
                yield Step(
                    "repeated key heads", f"each key head of {names} is repeated {times} times", None, parts, (), True
                )


# --- whole matrices -------------------------------------------------------------------------------------------------


def _renamed(layer: Layer, sources: Mapping[str, str], second: Layer, heads: Sequence[int] | None) -> dict[str, Tensor]:
    """Return each role's parts, taken from the role that `sources` maps it to; biases and gains only if nearer then.

    `heads`: the heads that are taken from there (None: all, with the gains).
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


@structural
def exchanged(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that W_Q, W_K and W_V are exchanged, in all heads or (W_Q and W_K) in some."""
    roles = _present(first, second, roles=("query", "key", "value"))
    shapes = {first.parts[f"{role}.weight"].shape for role in roles}
    if len(shapes) != 1 or len(roles) < 2:
        return
    old = {role: _angles(first.parts[f"{role}.weight"], second.parts[f"{role}.weight"]) for role in roles}
    for order in list(permutations(roles))[1:]:
        sources = {role: source for role, source in zip(roles, order, strict=True) if role != source}
        new = {r: _angles(first.parts[f"{s}.weight"], second.parts[f"{r}.weight"]) for r, s in sources.items()}
        better = torch.stack([_is_better(new[role], old[role]) for role in sources]).all(0)
        whole = bool(better.all())
        if not whole and (set(sources) != {"query", "key"} or not bool(better.any())):
            continue
        heads = better.nonzero().flatten().tolist()
        parts = _renamed(first, sources, second, None if whole else heads)
        names = name_parts([f"{role}.weight" for role in sources])
        kept = [f"{role}.bias" for role in sources if f"{role}.bias" in first.parts and f"{role}.bias" not in parts]
        stays = f", but not {name_parts(kept)}" if kept else ""
        text, repair = f"{names} are exchanged{stays}", f"exchange {names}"
        if len(sources) == 3:
            places = [
                f"{name_parts([f'{role}.weight'])} holds {name_parts([f'{sources[role]}.weight'])}" for role in sources
            ]
            text, repair = (
                f"{names} are in another order ({list_names(places)})",
                "split the fused matrix in the right order",
            )
        yield Step("exchanged", text, repair, parts, () if whole else tuple(heads))


@structural
def exchanged_gains(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that the gains of the norms of queries and keys are exchanged."""
    names = ["query.gain", "key.gain"]
    gains = [layer.parts.get(name) for layer in (first, second) for name in names]
    if any(gain is None or gain.shape != second.parts[names[0]].shape for gain in gains):
        return
    parts = {name: first.parts[other] for name, other in zip(names, names[::-1], strict=True)}
    old, new = (
        torch.cat([residuals(layer[name], second.parts[name], name) for name in names])
        for layer in (first.parts, parts)
    )
    if bool(_is_better(new, old).all()):
        text = f"{name_parts(names)} are exchanged"
        yield Step("exchanged", text, f"exchange {name_parts(names)}", parts)


@structural
def wrong_split(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that a fused matrix was split into flat thirds instead of head by head, or the reverse."""
    roles = _present(first, second, roles=("query", "key", "value"))
    shapes = {layer.parts[f"{role}.weight"].shape for role in roles for layer in (first, second)}
    if len(roles) < 3 or len(shapes) != 1:
        return
    for flat in (True, False):
        parts = _split_step(first, flat).parts
        pairs = [(first.parts[f"{r}.weight"], parts[f"{r}.weight"], second.parts[f"{r}.weight"]) for r in roles]
        better = torch.stack([_is_better(_angles(new, after), _angles(before, after)) for before, new, after in pairs])
        unchanged = torch.stack([_angles(before, after) == 0 for before, _, after in pairs])
        if bool(better.any()) and bool((better | unchanged).all()):
            yield _split_step(first, flat)


def split_wrongly(layer: Layer, *, flat: bool) -> dict[str, Tensor]:
    """Return q, k and v of a fused matrix stored head by head but split in flat thirds (`flat`), or the reverse."""
    parts: dict[str, Tensor] = {}
    roles = ("query", "key", "value")
    for kind in KINDS:
        if not all(f"{role}.{kind}" in layer.parts for role in roles):
            continue
        three = torch.stack([layer.parts[f"{role}.{kind}"] for role in roles])  # (3, heads, head_dim, …)
        by_head = three.transpose(0, 1)
        mixed = by_head.reshape(three.shape) if flat else three.reshape(by_head.shape).transpose(0, 1)
        parts |= {f"{role}.{kind}": mixed[place] for place, role in enumerate(roles)}
    return parts


@structural
def transposed(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose transposed square matrices."""
    parts: dict[str, Tensor] = {}
    for name, part in first.parts.items():
        if name not in second.parts or part.dim() < 2 or second.parts[name].shape != part.shape:
            continue
        matrix = part.flatten(0, -2)
        if matrix.shape[0] != matrix.shape[1] or torch.equal(part, second.parts[name]):
            continue
        after = second.parts[name].flatten(0, -2)
        if float(turn_from(matrix.T, after).mean()) < BETTER * float(turn_from(matrix, after).mean()):
            parts[name] = matrix.T.reshape(part.shape)
    if parts:
        verb = "is" if len(parts) == 1 else "are"
        yield Step(
            "transposed", f"{name_parts([*parts])} {verb} transposed", f"transpose {name_parts([*parts])}", parts
        )


WIDEST = 1e3  # largest condition of a change of basis that is recognised
CLOSE = 1e-3  # largest relative error of A · A⁻¹


@structural
def another_basis(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that W_Q was multiplied by A within heads and W_K by A⁻ᵀ, or W_O and W_V: their product is the same."""
    for roles in SIDES:
        if _present(first, second, roles=roles) == list(roles):
            yield from _change_basis(first, second, roles)


def _change_basis(first: Layer, second: Layer, roles: tuple[str, str]) -> Iterator[Step]:
    """Propose another basis of these two roles, of which the first has the query heads."""
    sides = [(first.parts[f"{role}.weight"], second.parts[f"{role}.weight"]) for role in roles]
    heads, kv_heads, size = len(sides[0][0]), len(sides[1][0]), sides[0][0].shape[1]
    if any(before.shape != after.shape or size > before.shape[2] for before, after in sides) or heads % kv_heads:
        return
    changed = [(before != after).flatten(1).any(1) for before, after in sides]
    parts = {
        name: part.double().clone()
        for name, part in first.parts.items()
        if has_heads(name) and name.split(".")[0] in roles
    }
    found: dict[int, Tensor] = {}
    for key_head in range(kv_heads):
        queries = list(range(key_head * heads // kv_heads, (key_head + 1) * heads // kv_heads))
        if not bool(changed[1][key_head]) or not bool(changed[0][queries].all()):
            continue
        query, other = (part[queries].double().transpose(0, 1).flatten(1) for part in sides[0])
        key, other_key = (part[key_head].double() for part in sides[1])
        bases = [
            torch.linalg.lstsq(before.mT, after.mT).solution.mT for before, after in ((query, other), (key, other_key))
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
        found[key_head] = bases[1]
    if found:
        where = () if len(found) == kv_heads else _query_heads([*found], first)
        build = _values_in_another_basis if roles[1] == "value" else _scores_in_another_basis
        yield build(first, parts, where, [*found.values()])


def _scores_in_another_basis(layer: Layer, parts: Parts, where: tuple[int, ...], bases: Sequence[Tensor]) -> Step:
    """Return the step of W_Q and W_K in another basis: harmless if neither a norm nor the rotation comes between."""
    text = "W_Q and W_K are in another basis within heads (W_Q A and W_K A⁻ᵀ, the same product M)"
    repair = None
    harmless = False
    if any(f"{role}.gain" in layer.parts for role in PERMUTED) or _others_between(layer, PERMUTED):
        text += ", but the norm of queries and keys does not commute with it"
        repair = "undo the change of basis before the norm"
    elif not (layer.unrotated or all(_commutes(basis, layer) for basis in bases)):
        text += ", which changes attention under RoPE"
        repair = "undo the change of basis before the rotation"
    else:
        text, harmless = f"{text}: attention is the same", True
    return Step("another basis", text, repair, parts, where, harmless)


def _values_in_another_basis(layer: Layer, parts: Parts, where: tuple[int, ...], bases: Sequence[Tensor]) -> Step:
    """Return the step of W_V and W_O in another basis, such as a factor: harmless if nothing comes between."""
    factors = [float(basis.diagonal().mean()) for basis in bases]
    same = max(factors) - min(factors) <= CLOSE * abs(factors[0])
    unit = [factors[0] * torch.eye(len(basis)).to(basis) for basis in bases]
    scaled = same and all(bool((a - b).norm() <= CLOSE * a.norm()) for a, b in zip(bases, unit, strict=True))
    text = "W_V and W_O are in another basis within heads (the same product)"
    if scaled:
        text = f"W_V is multiplied by {show_factor(factors[0])} and W_O divided by it"
    if between := _others_between(layer, ("value", "output")):
        text += f", but {name_parts(between)} does not commute with it"
        return Step("another basis", text, "undo the change of basis of W_V and W_O", parts, where)
    return Step("another basis", f"{text}: attention's output is the same", None, parts, where, harmless=True)


def _others_between(layer: Layer, roles: Sequence[str]) -> list[str]:
    """Return the tensors by coordinate of a head, other than gains, that can act between both projections."""
    shapes = [layer.parts[f"{role}.weight"].shape for role in roles]
    sizes = {size for heads, size, _ in shapes for size in (size, heads * size)}
    gains = [f"{role}.gain" for role in ROLES]
    return [name for name in layer.parts_along(*sizes) if name not in gains]


def _commutes(basis: Float[Tensor, "size size"], layer: Layer) -> bool:
    """Return True if a change of basis acts on each rotated pair as a rotation and a factor."""
    allowed = torch.zeros_like(basis)
    if layer.pairs is None:
        return False
    for first, second in layer.pairs:
        mean = (basis[first, first] + basis[second, second]) / 2
        turn = (basis[second, first] - basis[first, second]) / 2
        allowed[first, first] = allowed[second, second] = mean
        allowed[second, first], allowed[first, second] = turn, -turn
    still = [place for place in range(len(basis)) if place not in set(layer.rotated)]
    for place in still:
        allowed[place, still] = basis[place, still]
    return float((basis - allowed).norm()) <= CLOSE * float(basis.norm())


def unconditional(first: Layer, second: Layer) -> Iterator[Step]:
    """Yield structural steps that are tried before others, whether or not they bring the layer nearer by themselves."""
    roles = _present(first, second, roles=("query", "key", "value"))
    shapes = {layer.parts[f"{role}.weight"].shape for role in roles for layer in (first, second)}
    if len(shapes) != 1 or len(roles) < 2:
        return
    kinds = (*KINDS, "gain")
    gains = {"query.gain", "key.gain"} & first.parts.keys()
    for exchanged_kinds in (kinds, KINDS) if gains else (KINDS,):
        parts = {
            f"{role}.{kind}": first.parts[f"{other}.{kind}"]
            for role, other in (("query", "key"), ("key", "query"))
            for kind in exchanged_kinds
            if f"{other}.{kind}" in first.parts and f"{role}.{kind}" in first.parts
        }
        yield Step("exchanged", "W_Q and W_K are exchanged", "exchange W_Q and W_K", parts)
    if len(roles) == 3:
        yield from (_split_step(first, flat) for flat in (True, False))


def _split_step(layer: Layer, flat: bool) -> Step:
    wrong, right = ("in flat thirds", "head by head") if flat else ("head by head", "in flat thirds")
    text = f"the fused matrix of queries, keys and values was split {wrong} instead of {right}"
    return Step("wrong split", text, f"split the fused matrix {right}", split_wrongly(layer, flat=flat))
