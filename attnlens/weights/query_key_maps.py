"""Factors of each head's matrix M, from the weights of its module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from transformers import PreTrainedModel

from attnlens.errors import NotBilinearError, UnreadableError
from attnlens.hooks import Reached
from attnlens.models.deferred import is_announced
from attnlens.records import QueryKey, Rotation
from attnlens.weights.probe import (
    TOLERANCE,
    FewTokens,
    Norms,
    Present,
    Probe,
    WithoutLengths,
    alone,
    float64_weights,
    linear,
    norms_inside,
    nothing_to_read,
    unreadable,
    used_weights,
)
from attnlens.weights.rope import ANGLE, SINGLE, Turns, rounding_of
from attnlens.weights.rows import Factors, Maps, products_of_weights, rows_of_weights, unit

Sides = tuple[Tensor, Tensor]
"""Queries and keys."""
Groups = tuple[Tensor, ...]
"""Coordinates of a head that are normalised together."""
CHUNK = 512
"""How many probe tokens go through a module at once."""


def factors(
    model: PreTrainedModel,
    first: Sequence[Reached],
    window: Sequence[Reached],
    *,
    chosen: Sequence[int] | None = None,
    turns: Turns | None = None,
    present: Present = nothing_to_read,
) -> Iterator[Factors | UnreadableError]:
    """The effective W_Q, W_K of every site in turn, or the error that says why a site has none.

    `first` are the sites as reached by a single token (position 0), `window` as reached by as many positions as
    distances are wanted. The Jacobian is the map if the map is affine, which is checked at other inputs. Norms inside
    the module keep their gains and drop their positive per-token scalars; where they stand in the way of queries or
    keys (QK-norm) the directions are checked. All in float64, from a copy of one module at a time.

    `chosen` are the places of the sites that are read, all if None; what is read of a site does not depend on which
    others are: a rotation is fitted at the first site that has it, whether chosen or not, and kept in `turns`. Inside
    `present` a module of a model that is not in memory has the weights of those names, which is all that is read of it.
    """
    turns = Turns() if turns is None else turns
    for place in range(len(window)) if chosen is None else chosen:
        try:
            leader = turns.leader(window, place)
            if leader != place and not turns.knows(window[leader]):
                with suppress(UnreadableError):  # read for its rotation alone; sites that it can't lead have their own
                    _of_site(model, first[leader], window[leader], turns, present, leading=True)
            turns.read(window[leader])
            yield _of_site(model, first[place], window[place], turns, present, leading=leader == place)
        except UnreadableError as error:
            yield error


def _of_site(
    model: PreTrainedModel, one: Reached, many: Reached, turns: Turns, present: Present, *, leading: bool
) -> Factors:
    """The factors of one site, whose copies in float64 end with the call."""
    with present(one.module, partial(used_weights, model, one, many.layout)):
        weights = float64_weights(one.module)
        probe = alone(Probe(model, one, weights, many.layout))
        all_of = Probe(model, many, weights, many.layout, whole=True)
        window = replace(all_of, batch=all_of.shapes[0][0] if probe.batch else None)
        return _factors(probe, window, partial(turns.of, leading=leading))


def _factors(probe: Probe, window: Probe, turned_as: Callable[[Probe, Norms], Rotation | None]) -> Factors:
    window.check_captured()
    if is_announced(probe.odd.query) or is_announced(probe.odd.key):  # shapes without numbers
        raise unreadable("its queries or keys depend on what other modules compute, so that the model has to be loaded")
    norms = norms_inside(probe.reached.module)
    # Where one token is not taken, position is looked at first, so that each token of a sequence can be a probe.
    turned = turned_as(window, {}) if probe.whole else None
    maps, groups = _checked_maps(probe, norms, turned)
    rotation = turned_as(window, norms if groups else {})
    if rotation is None:
        with linear(norms):
            maps = _with_positions(maps, window)
    found = Factors(window.reached.site, maps, probe.reached.call.scale, rotation, groups)
    _check_everywhere(found, window)
    return found


def _checked_maps(probe: Probe, norms: Norms, turned: Rotation | None) -> tuple[Maps, Groups]:
    """The maps, and the groups of coordinates that are normalised together; raises NotBilinearError where it is not so.

    Normalisations that are no modules are taken out where the others don't explain queries and keys.
    """
    with linear(norms):
        rows = rows_of_weights(probe)
        if rows is not None and not norms:
            return rows, ()  # which random inputs have shown
        maps = rows or products_of_weights(probe) or _maps(probe, turned)
    sides = _first_tokens(probe, maps)
    reason = _mismatch(*sides)
    if reason is None:
        return maps, ()
    found = _normalised(*sides) if norms else None
    if found is None:
        with linear(norms), WithoutLengths():
            maps = _maps(probe, turned)
        found = _normalised(*_first_tokens(probe, maps))
        if found is None:
            remedy = "The tokens.* measures of this site stand; weights.* do not exist."
            raise NotBilinearError(f"{reason}, so that its scores are not bilinear in them", remedy)
    return maps, found


def _maps(probe: Probe, turned: Rotation | None) -> Maps:
    """∂q/∂x and ∂k/∂y at position 0 by forward-mode differentiation, and what is left at zero input.

    Probe i carries the tangent e_i, so that row i of W comes out exactly, without a difference that rounds; a head
    whose weights are NaN spoils no other (as it would in a backward pass, where 0 · NaN enters every gradient). A probe
    is a token, `turned` back to position 0, or a whole sequence of one token where queries and keys come from two, and
    where cos and sin are rounded in half precision.
    """
    alike = probe.reached.site.part == "cross" or (turned is not None and rounding_of(probe) > SINGLE)
    base = probe.random(1, seed=1)
    with torch.no_grad():
        zero = probe(*(torch.zeros_like(x) for x in base))
    tokens = max(x[0, ..., 0].numel() for x in base)
    rows = probe.batch or max(1, CHUNK // tokens)
    step = rows if alike else rows * min(x[0, ..., 0].numel() for x in base)
    parts = [
        _tangents(probe, base, start, step, None if alike else turned, alike)
        for start in range(0, max(x.shape[-1] for x in base), step)
    ]
    jacobians = [torch.cat(part).transpose(0, 1) for part in zip(*parts, strict=True)]
    return Maps(*(part.double() for part in (*jacobians, zero.query[0, :, :1], zero.key[0, :, :1])))


def _tangents(
    probe: Probe, base: tuple[Tensor, Tensor], start: int, step: int, turned: Rotation | None, alike: bool
) -> tuple[Tensor, Tensor]:
    """Rows start … start + step of the two Jacobians, (rows, heads, head_dim) each; fewer where the width ends."""
    counts = [max(0, min(step, x.shape[-1] - start)) for x in base]
    with torch.no_grad(), forward_ad.dual_level():
        duals = []
        for x, count in zip(base, counts, strict=True):
            tokens = 1 if alike else x[0, ..., 0].numel()
            tangents = x.new_zeros(probe.batch or -(-count // tokens), *x.shape[1:])
            units = x.new_zeros(count, x.shape[-1])
            units.diagonal(start).fill_(1)
            if alike:
                tangents[:count] = units.view(count, *[1] * (x.dim() - 2), -1)
            else:
                tangents.view(-1, x.shape[-1])[:count] = units
            duals.append(forward_ad.make_dual(x[:1].expand_as(tangents).contiguous(), tangents))  # type: ignore[no-untyped-call]
        hidden, other = duals if probe.reached.other is not None else (duals[0], duals[0])
        call = probe(hidden, other)
        found = [forward_ad.unpack_dual(part).tangent for part in (call.query, call.key)]  # type: ignore[no-untyped-call]
    for name, part in zip(("queries", "keys"), found, strict=True):
        if part is None:
            raise unreadable(f"its {name} do not depend on its first input")
    if turned is not None:
        found = [turned.transposed.turned(part.double()) for part in found]
    query, key = (part[:, :, : 1 if alike else None].transpose(1, 2).flatten(0, 1) for part in found)
    return query[: counts[0]], key[: counts[1]]


def _with_positions(maps: Maps, window: Probe) -> Maps:
    """The maps with the biases of every position, where they are not all the same."""
    with torch.no_grad():
        zero = window(*(torch.zeros_like(x) for x in window.random(window.least, seed=1)))
    biases = []
    for seen, bias, factor in ((zero.query, maps.query_bias, maps.query), (zero.key, maps.key_bias, maps.key)):
        found = seen[0].double()
        moved = (found - found[:, :1]).norm() > TOLERANCE * factor.norm()
        biases.append(found if moved else bias)
    return replace(maps, query_bias=biases[0], key_bias=biases[1])


def _first_tokens(probe: Probe, maps: Maps) -> tuple[Sides, Sides]:
    """Queries and keys of the first token of eight sequences: those of the module and those of the maps.

    (sequences, heads, head_dim) each, without the heads that have NaN.
    """
    inputs = probe.random(8, seed=2, alike=False)
    with torch.no_grad():
        call = probe(*inputs)
    seen, expected = [], []
    for theirs, ours in zip((call.query, call.key), maps(*inputs), strict=True):
        fine = ours[:, :, 0].isfinite().all(-1).all(0)
        seen.append(theirs[:, fine, 0].double())
        expected.append(ours[:, fine, 0])
    return (seen[0], seen[1]), (expected[0], expected[1])


def _normalised(seen: Sides, expected: Sides) -> Groups | None:
    """The groups of coordinates in which queries and keys are positive multiples of the expected ones; None: none are.

    All coordinates of a head, or those of the keys that are no affine function and those that are (latent attention).
    """
    size = seen[1].shape[-1]
    every = (torch.arange(size),)
    if _mismatch(seen, expected, every) is None:
        return every
    difference = (seen[1] - expected[1]).flatten(0, 1).norm(dim=0)
    affine = difference <= TOLERANCE * expected[1].flatten(0, 1).norm(dim=0)
    parts = ((~affine).nonzero().flatten().cpu(), affine.nonzero().flatten().cpu())
    # The direction of a single number says next to nothing.
    return parts if min(map(len, parts)) > 1 and _mismatch(seen, expected, parts) is None else None


def _mismatch(seen: Sides, expected: Sides, groups: Groups = ()) -> str | None:
    """Why those expected are not those seen, up to a positive scalar in each group, or None where they are."""
    kind = "no positive multiple of an affine function" if groups else "no affine function"
    for name, theirs, ours in zip(("queries", "keys"), seen, expected, strict=True):
        pairs = [(unit(theirs[..., part]), unit(ours[..., part])) for part in groups] or [(theirs, ours)]
        for one, other in pairs:
            error = float((other - one).norm() / other.norm()) if other.norm() > 0 else float(one.norm())
            if not error < TOLERANCE:
                return f"its {name} are {kind} of its inputs (relative difference {error:.1e})"
    return None


def _check_everywhere(found: Factors, window: Probe) -> None:
    """Raise UnreadableError where queries and keys of unlike tokens at all positions are not what the factors say."""
    mixtures = window.mixed(window.least, seed=3)
    inputs = mixtures[0].tokens, mixtures[1].tokens
    with torch.no_grad(), FewTokens(mixtures):
        call = window(*inputs)
        rebuilt = found.rebuilt(*inputs, (call.query, call.key))
    border = TOLERANCE if found.rotation is None else max(ANGLE, 4 * rounding_of(window))
    for name, seen, expected in zip(("queries", "keys"), (call.query, call.key), rebuilt, strict=True):
        fine = expected.isfinite().all(-1).all(-1).all(0)
        error = (seen[:, fine].double() - expected[:, fine]).norm()
        if not error <= border * expected[:, fine].norm():
            raise unreadable(f"its {name} depend on more than their own token and its position")


def rebuilt(found: Reached, factors: Factors) -> QueryKey:
    """The site's queries and keys rebuilt as (x W_Q + b_Q) R(i) from the module's inputs x.

    Under QK-norm the per-token length, which W_Q does not carry, is taken from the captured queries and keys.
    """
    captured = found.call.query_key(found.site)
    x, y = (found.sequences(found.arguments[name]) for name in (found.input_name, found.other or found.input_name))
    query, key = factors.rebuilt(x, y, (captured.query, captured.key))
    return replace(captured, query=query, key=key)
