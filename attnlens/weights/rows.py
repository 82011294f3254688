"""Finds each head's W_Q and W_K among the rows of the module's own weight matrices, without differentiating."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.weights.factors import Maps
from attnlens.weights.probe import Probe

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

DRAWS = 8
"""Random inputs: what is no multiple of a row passes for one at all of them with probability about SAME ** DRAWS."""
SAME = 1e-10
"""Largest relative difference between a coordinate and the row that it is said to be, both in float64."""
ONE = 1e-13
"""Relative rounding of a coordinate's factor: one so close to 1 is 1."""
AT_ONCE = 512
"""Coordinates that are compared with all rows at once."""


def rows_of_weights(probe: Probe) -> Maps | None:
    """W_Q and W_K where every column of theirs is a multiple of one row of a weight matrix: q_hk(x) = c θ_r · x + b.

    That is so for linear layers, fused or not, whatever their layout, with gains and scales behind them (c); it is told
    by DRAWS random inputs, and the columns are then taken from the weights, which the Jacobian costs d_model times as
    much to find. None where it is not so (latent attention), or the module takes no single tokens, or has NaN.
    """
    if probe.whole or probe.batch is not None:
        return None
    inputs = probe.random(DRAWS, seed=7)
    with torch.no_grad():
        call = probe(*(torch.cat((torch.zeros_like(x[:1]), x)) for x in inputs))
    sides, known = [], dict[int, Tensor]()
    for x, found_there in zip(inputs, (call.query, call.key), strict=True):
        bias = found_there[0, :, :1].double()
        seen = found_there[1:, :, 0].double() - bias[None, :, 0]
        known = known if x is inputs[0] else {}
        found = first_found(x.double().flatten(0, -2), seen.flatten(1), probe.weights.values(), known)
        if found is None:
            return None
        sides.append((found.reshape(*seen.shape[1:], -1).transpose(1, 2), bias))
    (query, query_bias), (key, key_bias) = sides
    return Maps(query, key, query_bias, key_bias)


def first_found(
    x: Float[Tensor, "draws d_model"],
    seen: Float[Tensor, "draws columns"],
    weights: Iterable[Tensor],
    known: dict[int, Tensor],
) -> Float[Tensor, "columns d_model"] | None:
    """The vector w of each column with seen = x · w, from the first matrix that has them all; None where none has.

    `known` are the answers of the matrices that were tried, by their place.
    """
    if not bool(seen.isfinite().all()):
        return None
    for place, rows in enumerate(oriented(list(weights), x.shape[-1])):
        if place not in known:
            known[place] = x @ rows.mT
        answers = known[place]
        places = _in_order(seen, answers)
        if places is None:
            places = nearest(seen, answers)
        factors = factors_of(seen, answers[:, places])
        if _fits(seen, factors * answers[:, places]):
            return taken_rows(rows, places, factors)
    return None


def oriented(weights: Iterable[Tensor], size: int) -> Iterator[Float[Tensor, "rows d_model"]]:
    """The matrices that such an input can be multiplied by, outputs first: linear layers', then Conv1D's."""
    known = [weight for weight in weights if type(weight) in (Tensor, torch.nn.Parameter)]
    matrices = [weight for weight in known if weight.dim() == 2 and weight.is_floating_point()]
    yield from (weight for weight in matrices if weight.shape[1] == size)
    yield from (weight.mT for weight in matrices if weight.shape[0] == size)


def _in_order(seen: Tensor, answers: Tensor) -> Tensor | None:
    """The rows in their order from the one that fits the first column on, where they are enough and fit."""
    start, count = int(nearest(seen[:, :1], answers)), seen.shape[1]
    if start + count > answers.shape[1]:
        return None
    places = torch.arange(start, start + count, device=answers.device)
    found = answers[:, places]
    return places if _fits(seen, factors_of(seen, found) * found) else None


def _fits(seen: Tensor, found: Tensor) -> bool:
    """Whether every column is what was found."""
    return bool(fitting(seen, found).all())


def fitting(seen: Tensor, found: Tensor) -> Bool[Tensor, " columns"]:
    """Which columns are what was found; what subtracting the bias rounds is of the size of all columns."""
    border = SAME * seen.norm(dim=0) + torch.finfo(seen.dtype).eps * seen.norm()
    return (seen - found).norm(dim=0) <= border


def nearest(seen: Tensor, answers: Tensor) -> Tensor:
    """The row of each column whose answers have the most similar direction, whatever their sign and length."""
    unit = torch.nn.functional.normalize(answers, dim=0)
    return torch.cat([(part.mT @ unit).abs().argmax(1) for part in torch.split(seen, AT_ONCE, dim=1)])


def factors_of(seen: Tensor, found: Tensor) -> Float[Tensor, " columns"]:
    """c of each column, by least squares."""
    factors = (seen * found).sum(0) / found.square().sum(0).clamp(min=torch.finfo(found.dtype).tiny)
    return torch.where((factors - 1).abs() < ONE, 1.0, factors)


def taken_rows(rows: Tensor, places: Tensor, factors: Tensor) -> Float[Tensor, "columns d_model"]:
    """The rows times their factors: of neighbours that are taken as they are a view, which costs no memory."""
    start, count = int(places[0]), len(places)
    ordered = torch.equal(places, torch.arange(start, start + count, device=places.device))
    taken = rows[start : start + count] if ordered else rows[places]
    return taken if bool((factors == 1).all()) else taken * factors[:, None]
