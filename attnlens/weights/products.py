"""Finds each head's W_Q and W_K as products of two of the module's matrices (latent attention), without differentiating."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnlens.weights.factors import Maps, Product
from attnlens.weights.probe import Probe
from attnlens.weights.rows import DRAWS, factors_of, first_found, fitting, nearest, oriented, taken_rows


class _Latent(NamedTuple):
    """What lies between two linear layers: z = x Dᵀ + a."""

    seen: Tensor
    """z − a of the random inputs, (draws, rank)."""
    down: Tensor
    """D, (rank, d_model)."""


class _Piece(NamedTuple):
    """Columns of W that are w = uᵀD, or u where there is no D."""

    columns: Tensor
    up: Tensor
    """(columns, rank)."""
    down: Tensor | None


def products_of_weights(probe: Probe) -> Maps | None:
    """W_Q and W_K where q_hk(x) = c υ_s · z + b with υ_s a row of one matrix, z_r = c_r θ_r · x + a_r with θ_r of another.

    So it is where a linear layer, a norm without its lengths and a second linear layer follow each other, some columns
    being rows of one matrix alone. Both steps are told as `rows_of_weights` tells rows, by the same random inputs: z is
    what the module itself hands to its second layer, so that c_r has the gain, and what is not linear between them is
    refused. None where it is not so.
    """
    if probe.whole or probe.batch is not None:
        return None
    inputs = probe.random(DRAWS, seed=7)
    with torch.no_grad(), _inner_inputs(probe.reached.module) as inner:
        call = probe(*(torch.cat((torch.zeros_like(x[:1]), x)) for x in inputs))
    weights, sides = list(probe.weights.values()), []
    for x, found_there in zip(inputs, (call.query, call.key), strict=True):
        bias = found_there[0, :, :1].double()
        seen = found_there[1:, :, 0].double() - bias[None, :, 0]
        rows = x.double().flatten(0, -2)
        pieces = _pieces(rows, seen.flatten(1), weights, list(_latents(rows, inner, weights)))
        if pieces is None:
            return None
        sides.append((pieces, seen.shape[1:], bias))
    (query, _, query_bias), (key, shape, key_bias) = sides
    found = [_composed(pieces, shape).transpose(1, 2) for pieces, shape, _ in sides]
    return Maps(*found, query_bias, key_bias, _product(key, shape))


@contextmanager
def _inner_inputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, the list takes in what every part of the module that has a matrix is called with."""
    noted: list[Tensor] = []

    def note(_part: nn.Module, given: tuple[object, ...]) -> None:
        noted.extend(part for part in given[:1] if isinstance(part, Tensor))

    parts = [part for part in module.modules() if any(one.dim() == 2 for one in part.parameters(recurse=False))]
    hooks = [part.register_forward_pre_hook(note) for part in parts]
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


def _latents(x: Tensor, inner: Sequence[Tensor], weights: Sequence[Tensor]) -> Iterator[_Latent]:
    """Those of the inner inputs that are rows of weights times x, one a token."""
    for given in inner:
        z = given.double().flatten(1)
        if len(z) == len(x) + 1 and z.shape[1] == given.shape[-1]:
            seen = z[1:] - z[0]
            down = first_found(x, seen, weights, {})
            if down is not None:
                yield _Latent(seen, down)


def _pieces(x: Tensor, seen: Tensor, weights: Sequence[Tensor], latents: Sequence[_Latent]) -> list[_Piece] | None:
    """All columns of `seen`, each with the first matrix that has it; None where some column is in none."""
    if not bool(seen.isfinite().all()):
        return None
    pieces, left = [], torch.arange(seen.shape[1], device=seen.device)
    while len(left):
        for below, rows in _candidates(x, weights, latents):
            answers = (x if below is None else below.seen) @ rows.mT
            if bool(_multiples(seen[:, left[:1]], answers)[2].all()):
                break
        else:
            return None
        places, factors, fits = _multiples(seen[:, left], answers)
        up = taken_rows(rows, places[fits], factors[fits])
        pieces.append(_Piece(left[fits], up, None if below is None else below.down))
        left = left[~fits]
    return pieces


def _candidates(
    x: Tensor, weights: Sequence[Tensor], latents: Sequence[_Latent]
) -> Iterator[tuple[_Latent | None, Tensor]]:
    """The matrices that may be a column's last, with what they multiply; None: the input x."""
    yield from ((None, rows) for rows in oriented(weights, x.shape[1]))
    for latent in latents:
        yield from ((latent, rows) for rows in oriented(weights, latent.seen.shape[1]))


def _multiples(seen: Tensor, answers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The row most like each column, its factor, and whether it is that column."""
    places = nearest(seen, answers)
    found = answers[:, places]
    factors = factors_of(seen, found)
    return places, factors, fitting(seen, factors * found)


def _composed(pieces: Sequence[_Piece], shape: torch.Size) -> Tensor:
    """W of each head, (heads, head_dim, d_model)."""
    width = next(part.shape[1] for piece in pieces for part in (piece.up if piece.down is None else piece.down,))
    whole = pieces[0].up.new_empty(shape.numel(), width)
    for piece in pieces:
        whole[piece.columns] = piece.up if piece.down is None else piece.up @ piece.down
    return whole.reshape(*shape, -1)


def _product(pieces: Sequence[_Piece], shape: torch.Size) -> Product | None:
    """The largest of the pieces that are products."""
    products = [piece for piece in pieces if piece.down is not None]
    if not products:
        return None
    largest = max(products, key=lambda piece: len(piece.columns))
    up = largest.up.new_full((shape.numel(), largest.up.shape[1]), torch.nan)
    up[largest.columns] = largest.up
    assert largest.down is not None
    return Product(up.reshape(*shape, -1).mT, largest.down.mT)
