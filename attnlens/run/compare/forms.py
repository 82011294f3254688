"""Compares the forms M = s W_Q W_Kᵀ of corresponding heads, which head corresponds to which among them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from scipy.optimize import linear_sum_assignment

from attnlens import linalg
from attnlens.records import QueryKey
from attnlens.registry.distances import FORMS, KEY_ANGLE, QUERY_ANGLE
from attnlens.run.inspect.sink import finite_heads

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

FORM_DISTANCES = (FORMS, QUERY_ANGLE, KEY_ANGLE)
"""What is measured of them."""
ALIKE = 0.5
"""Heads are taken for reordered where each form moved by less than this share of what it differs in its own place."""


@dataclass(frozen=True)
class Placed:
    """Which head of the second model each head of the first one is compared with, at one site."""

    order: tuple[int, ...]
    """The second model's head for each of the first one's."""

    @property
    def moved(self) -> list[int]:
        """Heads that stand elsewhere in the second model."""
        return [head for head, other in enumerate(self.order) if head != other]


def place(first: QueryKey, second: QueryKey) -> Placed:
    """The order in which the second model's heads are the first one's, by the distances between forms.

    Another order than their own is taken where every head that it moves is far more like its partner than like the head
    in its own place.
    """
    distances = distances_between(first, second)
    if not bool(distances.isfinite().all()):
        return Placed(tuple(range(len(distances))))
    _, order = linear_sum_assignment(distances.numpy())
    own = distances.diagonal()
    best = distances[torch.arange(len(order)), torch.from_numpy(order)]
    moved = torch.from_numpy(order) != torch.arange(len(order))
    if bool((best[moved] < ALIKE * own[moved]).all()) and bool((best[moved] < ALIKE).all()):
        return Placed(tuple(order.tolist()))
    return Placed(tuple(range(len(order))))


def distances_between(first: QueryKey, second: QueryKey) -> Float[Tensor, "heads others"]:
    """‖M'_g − M_h‖_F/max(‖M_h‖_F, ‖M'_g‖_F) at equal positions, from the factors' Gram matrices; 0 between zeros."""
    squares = torch.stack([_inner(one, one).diagonal() for one in (first, second)])
    cross = _inner(first, second)
    size = torch.maximum(squares[0][:, None], squares[1])
    apart = (squares[0][:, None] + squares[1] - 2 * cross).clamp(min=0)
    return torch.where(size == 0, 0.0, apart / size).sqrt().cpu()


def _inner(one: QueryKey, other: QueryKey) -> Float[Tensor, "heads others"]:
    """⟨M_h, M'_g⟩_F = s s' tr(W_Qᵀ W_Q' · W_K'ᵀ W_K)."""
    mine, others = ((each.query.double(), each.paired_key.double()) for each in (one, other))
    rows = [((query.mT @ others[0]) * (key.mT @ others[1])).sum((-2, -1)) for query, key in zip(*mine, strict=True)]
    return one.scale * other.scale * torch.stack(rows)


def distances(first: QueryKey, second: QueryKey) -> dict[str, Float[Tensor, " heads"]]:
    """The distances of corresponding heads' forms; NaN where both M are 0, and where a factor is not finite.

    Where M alone is 0, all of M' is new and the change is 1.
    """
    fine = sorted(set(finite_heads(first)) & set(finite_heads(second)))
    found = {name: torch.full((len(first.heads),), torch.nan, dtype=torch.float64) for name in FORM_DISTANCES}
    if not fine:
        return found
    first, second = first.select(fine), second.select(fine)
    moved = replace(second, query=second.query * (second.scale / first.scale), scale=first.scale)
    change, _ = linalg.change(moved, first)
    angles = linalg.largest_angle(first.query, second.query), _key_angles(first, second)
    for name, values in zip(FORM_DISTANCES, (change.masked_fill(change.isinf(), 1.0), *angles), strict=True):
        found[name][fine] = values.double().cpu()
    return found


def _key_angles(first: QueryKey, second: QueryKey) -> Float[Tensor, " heads"]:
    """Between the keys of corresponding query heads; once for each key head where both models pair them alike."""
    if first.key_of != second.key_of:
        return linalg.largest_angle(first.paired_key, second.paired_key)
    read = sorted(set(first.key_of))
    angles = linalg.largest_angle(first.key[read], second.key[read])
    return angles[[read.index(number) for number in first.key_of]]


def in_order(second: QueryKey, placed: Placed) -> QueryKey:
    """The second model's heads in the order of the first one's, each with a key head of its own."""
    return replace(second.select(placed.order), heads=tuple(range(len(placed.order))))
