"""Finds each head's W_Q and W_K as products of two of the module's matrices (latent attention), undifferentiated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from attnlens.weights.factors import LatentMap, Maps
from attnlens.weights.probe import Probe
from attnlens.weights.rows import DRAWS, FoundColumns, Given, asked, composed, pieces_of


def products_of_weights(probe: Probe) -> Maps | None:
    """W_Q and W_K where q_hk(x) = c υ · z + b, υ a row of one matrix, and z_r = c_r θ_r · x + a_r, θ_r rows of another.

    That is so where a linear layer, a norm without its lengths and a second linear layer follow each other; some
    columns may be rows of one matrix alone. Both steps are told as `rows_of_weights` tells its rows, by the same random
    inputs: z is what the module itself hands to its second layer, so that c_r has the gains, and None is given where z
    is not linear in x or queries and keys are not linear in z.
    """
    if probe.whole or probe.batch is not None:
        return None
    inputs = probe.random(DRAWS, seed=7)
    with _inner_inputs(probe.reached.module) as inner:
        found = asked(probe, inputs)
    sides, weights = [], list(probe.weights.values())
    for x, (seen, _) in zip(inputs, found, strict=True):
        outer = Given(x.double().flatten(0, -2))
        pieces = pieces_of(seen.flatten(1), [outer, *_latents(outer, inner, weights)], weights, {})
        if pieces is None:
            return None
        sides.append((pieces, seen.shape[1:]))
    query, key = (composed(*side) for side in sides)
    return Maps(query, key, *(bias for _, bias in found), key_latent=_product(*sides[1]))


@contextmanager
def _inner_inputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, the list takes in what those parts of the module are called with that have a matrix."""
    noted: list[Tensor] = []

    def note(_part: nn.Module, given: tuple[object, ...]) -> None:
        noted.extend(part for part in given[:1] if isinstance(part, Tensor))

    parts = (part for part in module.modules() if any(one.dim() == 2 for one in part.parameters(recurse=False)))
    hooks = [part.register_forward_pre_hook(note) for part in parts]
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


def _latents(outer: Given, inner: Sequence[Tensor], weights: Sequence[Tensor]) -> Iterator[Given]:
    """Those of the inner inputs, without what they are at zero, that are multiples of rows of weights times x."""
    for given in inner:
        z = given.double().flatten(1)
        if len(z) == len(outer.seen) + 1 and z.shape[1] == given.shape[-1]:  # one for each token
            seen = z[1:] - z[:1]
            pieces = pieces_of(seen, [outer], weights, {})
            if pieces is not None:
                yield Given(seen, composed(pieces, torch.Size((1, z.shape[1])))[0].mT)


def _product(pieces: Sequence[FoundColumns], shape: torch.Size) -> LatentMap | None:
    """The largest piece that is a product."""
    products = [(piece, piece.down) for piece in pieces if piece.down is not None]
    if not products:
        return None
    piece, down = max(products, key=lambda product: len(product[0].columns))
    up = piece.up.new_full((shape.numel(), piece.up.shape[1]), torch.nan)
    up[piece.columns] = piece.up
    return LatentMap(up.reshape(*shape, -1).mT, down.mT)
