"""Compute the factors of each head's matrix M from its module's weights, and the rotation of its queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.errors import NotBilinearError, UnreadableError
from attnlens.models.hooks import Reached
from attnlens.models.loading.deferred import is_announced
from attnlens.models.weights.probe import (
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
    without_gains,
)
from attnlens.models.weights.rows import Factors, Maps, products_of_weights, rows_of_weights, unit
from attnlens.records import Call, QueryKey, Rotation

if TYPE_CHECKING:
    from jaxtyping import Bool, Complex, Float, Int


ROWS = 16
"""Queries and keys that determine the pairs: a wrong partner explains a share of about 1/ROWS, the right one all."""
POSITIONS = 32  # positions used to determine the pairs
STILL = 1e-5
"""Relative change up to which a coordinate counts as constant: above the rounding of cos and sin in float32."""
ANGLE = 1e-3
"""Largest root-mean-square error of an angle over the pairs; positions times frequencies are float32."""
EQUAL = 1e-6  # difference of angles below which two rotations count as equal: far too small to affect any measure
SINGLE = torch.finfo(torch.float32).eps
"""Relative rounding of cos and sin in a model that is not in half precision."""
DIRECTION = "position changes more than the direction of queries and keys"


@dataclass
class Turns:
    """The rotations of a model's sites, each fitted at the first site of its class that has those positions."""

    _fitted: dict[object, tuple[list[Tensor], dict[bool, Rotation | None]]] = field(default_factory=dict)

    def leader(self, window: Sequence[Reached], place: int) -> int:
        """Return the index of the first site of the same kind, which rotates alike as far as arguments show."""
        own = _kind(window[place])
        return next(other for other, reached in enumerate(window) if _kind(reached) == own)

    def knows(self, reached: Reached) -> bool:
        """Return whether the leader of this site's kind has been read."""
        return _kind(reached) in self._fitted

    def read(self, leader: Reached) -> None:
        """Record that the leader of a kind has been read, even if no rotation fits it."""
        self._fitted.setdefault(_kind(leader), (_positions(leader), {}))

    def of(self, probe: Probe, norms: Norms, *, leading: bool) -> Rotation | None:
        """Return a site's rotation: the leader's if it also fits here, otherwise a new fit.

        Layers without rotation may lie between others. Fits under `norms` concern directions only and are stored apart.
        """
        kind = _kind(probe.reached)
        fits = self._fitted.get(kind, ([], {}))[1]
        if not leading and bool(norms) in fits and _holds(probe, norms, fits[bool(norms)]):
            return fits[bool(norms)]
        found = rotation_of(probe, norms, [])
        if leading:  # store the positions too, so that no other tensors reuse their addresses
            self._fitted.setdefault(kind, (_positions(probe.reached), {}))[1][bool(norms)] = found
        return found


def _kind(reached: Reached) -> object:
    """Return the key shared by sites that rotate alike: class, part, and the identity of their position tensors."""
    return type(reached.module), reached.site.part, *map(id, _positions(reached))


def _positions(reached: Reached) -> list[Tensor]:
    """Return the cos and sin tensors passed to the module, if any; all layers receive the same objects."""
    given = reached.arguments.get("position_embeddings")
    return [part for part in given if isinstance(part, Tensor)] if isinstance(given, tuple | list) else []


def _holds(probe: Probe, norms: Norms, rotation: Rotation | None) -> bool:
    """Return whether queries and keys of one repeated token rotate like this (some layers may have no positions)."""
    parts = _sides(probe.alike)
    if norms:
        parts = [nn.functional.normalize(part, dim=-1) for part in parts]
    if rotation is None:
        return not any(_changes_with_position(part) for part in parts)
    return not any(_differs_from(part, rotation, rounding_of(probe)) for part in parts)


def rotation_of(probe: Probe, norms: Norms, known: list[Rotation]) -> Rotation | None:
    """Fit R(i) with q_i = q_0 R(i) for a repeated token; return None if position has no effect or is added.

    The fit works pair by pair on queries and keys. Under QK-norm it omits the gains, since a gain of 0 hides its
    coordinate's rotation; that the same R rotates the model's actual queries and keys is then checked. Angles are those
    of distances (Su et al. 2021, RoFormer, Eq. 16) or of each place in an image. If an equal rotation is in `known`,
    that object is returned.
    """
    if probe.tokens < 2:
        return None
    heads = probe.reached.call.query.shape[1] + probe.reached.call.key.shape[1]
    few = probe.least
    many = few if few > 1 else -(-ROWS // heads)
    used, others = _sides(probe.alike), _parts(probe, probe.random(few, seed=6))
    if norms:  # lengths may depend on the position, e.g. with a temperature for long contexts (Beam)
        used, others = ([nn.functional.normalize(part, dim=-1) for part in side] for side in (used, others))
    if not any(_changes_with_position(part) for part in used):
        return None
    if not any(_changes_with_position(part - other) for part, other in zip(used, others, strict=True)):
        return None
    if probe.reached.site.part == "cross":
        raise unreadable("queries and keys of two sequences depend on their positions")
    with linear(without_gains(norms)):
        bare = _parts(probe, probe.random(many, seed=5))
    rounding = rounding_of(probe)
    found = fitted(bare[0], bare[1], rounding)
    if any(_differs_from(part, found, rounding) for part in used):
        raise unreadable(DIRECTION)
    if found.by_distance and rounding > SINGLE:
        found = _fit_frequencies(found)
    same = next((one for one in known if _are_equal(one, found)), None)
    if same is None:
        known.append(found)
    return same or found


def rotations(model: PreTrainedModel, window: list[Reached]) -> Iterator[Rotation | UnreadableError | None]:
    """Yield the rotation of each site, None if its keys are not rotated, or the error that makes it unreadable.

    `window` lists the sites, reached with as many positions as are wanted.
    """
    known: list[Rotation] = []
    for reached in window:
        probe = Probe(model, reached, float64_weights(reached.module), reached.layout, whole=True)
        try:
            yield rotation_of(probe, norms_inside(reached.module), known)
        except UnreadableError as error:
            yield error


def frequencies(rotation: Rotation) -> Float[Tensor, " pairs"]:
    """Return θ of φ(i) = iθ in [−π, π) for a rotation by distance, fitted by least squares over its positions."""
    return _wrap(_fit_frequencies(rotation).angles[1])


def rounding_of(probe: Probe) -> float:
    """Return the relative rounding of the dtype of the module's numbers, such as cos and sin."""
    return float(torch.finfo(probe.reached.call.query.dtype).eps)


def _parts(probe: Probe, inputs: tuple[Tensor, Tensor]) -> list[Float[Tensor, "rows positions head_dim"]]:
    """Return queries and keys of all inputs and heads, without heads that have NaN."""
    with torch.no_grad():
        return _sides(probe(*inputs))


def _sides(call: Call) -> list[Float[Tensor, "rows positions head_dim"]]:
    parts = (part.double().transpose(0, 1) for part in (call.query, call.key))
    return [part[part.isfinite().flatten(1).all(-1)].flatten(0, 1) for part in parts]


def _changes_with_position(part: Float[Tensor, "rows positions head_dim"]) -> bool:
    return bool(((part - part[:, :1]).norm(dim=-1) > STILL * part.norm(dim=-1)).any())


def fitted(
    query: Float[Tensor, "rows positions head_dim"], key: Float[Tensor, "rows positions head_dim"], rounding: float
) -> Rotation:
    """Fit the rotation of these queries and keys; each row is one input at every position.

    `rounding` is that of cos and sin. A pair's angle is arg Σ conj(w_0) w_i over queries and keys, w = x_a + i x_b, its
    least-squares fit. A pair without signal in queries or keys counts as unrotated, since it adds nothing to scores.
    Raises UnreadableError if queries and keys rotate differently, or if position does more than rotate.
    """
    pairs = _pairs(torch.cat((query, key)))
    sides = [_overlaps(part, pairs) for part in (query, key)]
    both = _signal(sides[0]) & _signal(sides[1])
    found = Rotation(pairs, (sides[0] + sides[1]).angle(), query.shape[-1])
    if _exceed_rounding((sides[0] * sides[1].conj())[:, both].angle(), rounding):
        raise unreadable("queries and keys turn differently with position")
    if any(_differs_from(part, found, rounding) for part in (query, key)):
        raise unreadable(DIRECTION)
    return replace(found, by_distance=not _exceed_rounding(_wrap(found.angles.diff(dim=0) - found.angles[1]), rounding))


def _pairs(rows: Float[Tensor, "rows positions head_dim"]) -> Int[Tensor, "pairs 2"]:
    """Find which coordinates rotate together: x_i[a] is a sum of multiples of x_0[a] and one other coordinate x_0[b].

    The part of x_i[a] not explained by x_0[a] is fully explained by the right partner and barely by a wrong one (least
    squares). A coordinate that is 0 at position 0 also has a partner, from which it takes its values.
    """
    start = rows[:, 0]
    later = rows[:, torch.linspace(1, rows.shape[1] - 1, min(rows.shape[1] - 1, POSITIONS)).long()]
    gram, across = start.mT @ start, torch.einsum("rb,rpa->pba", start, later)
    lengths = gram.diagonal()
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    own = across.diagonal(dim1=-2, dim2=-1) * inverse
    energy = later.square().sum((0, 1))
    left = energy - (own.square() * lengths).sum(0)
    turning = left > STILL**2 * energy
    new = lengths[:, None] - gram.square() * inverse
    explained = (across - gram * own[:, None]).square().sum(0) / new
    share = torch.where((new > STILL * lengths[:, None]) & turning, explained / left, 0.0)
    partners = torch.maximum(share, share.mT).argmax(0)
    both_ways = torch.stack((turning.nonzero()[:, 0], partners[turning]), -1).sort(-1).values
    pairs: Tensor = torch.unique(both_ways, dim=0)
    if len(torch.unique(pairs)) < pairs.numel():
        raise unreadable(DIRECTION)
    return pairs


def _overlaps(part: Tensor, pairs: Int[Tensor, "pairs 2"]) -> Complex[Tensor, "positions pairs"]:
    """Compute Σ conj(w_0) w_i."""
    first, second = pairs.unbind(-1)
    turning = torch.complex(part[..., first], part[..., second])
    return (turning[:, :1].conj() * turning).sum(0)


def _signal(side: Complex[Tensor, "positions pairs"]) -> Bool[Tensor, " pairs"]:
    """Return which pairs have an angle: their length at position 0 exceeds the rounding of the longest."""
    lengths = side[0].abs()
    return lengths > torch.finfo(lengths.dtype).eps * lengths.max()


def _differs_from(part: Float[Tensor, "rows positions head_dim"], rotation: Rotation, rounding: float) -> bool:
    """Return whether part[:, i] differs from part[:, 0] R(i)."""
    difference = rotation.turned(part[:, :1].expand_as(part)) - part
    return bool((difference.norm(dim=-1) > max(ANGLE, 4 * rounding) * part.norm(dim=-1)).any())


def _exceed_rounding(angles: Float[Tensor, "positions pairs"], rounding: float) -> bool:
    """Return whether angles are not 0 at some position, allowing 4 roundings: of cos and sin at two positions."""
    sizes = angles.square().sum(-1).sqrt()
    return bool((sizes > max(ANGLE, 4 * rounding) * angles.shape[-1] ** 0.5).any())


def _wrap(angles: Tensor) -> Tensor:
    """Return the angles wrapped to [−π, π)."""
    wrapped: Tensor = (angles + math.pi).remainder(2 * math.pi) - math.pi
    return wrapped


def _fit_frequencies(rotation: Rotation) -> Rotation:
    """Return the rotation with φ(i) = iθ for the least-squares θ, which removes the rounding of cos and sin."""
    first = rotation.angles[1]
    turns = (_wrap(rotation.angles.diff(dim=0) - first) + first).cumsum(0)  # without removing whole turns
    steps = torch.arange(len(rotation.angles)).to(first)
    frequencies = (steps[1:, None] * turns).sum(0) / steps.square().sum()
    return replace(rotation, angles=steps[:, None] * frequencies)


def _are_equal(one: Rotation, other: Rotation) -> bool:
    """Return whether two rotations differ only by rounding."""
    alike = torch.equal(one.pairs, other.pairs) and one.angles.shape == other.angles.shape
    alike = alike and one.by_distance == other.by_distance
    return alike and bool((_wrap(one.angles - other.angles).abs() < EQUAL).all())


Sides = tuple[Tensor, Tensor]  # queries and keys
Groups = tuple[Tensor, ...]  # coordinates of a head that are normalised together
CHUNK = 512  # probe tokens that go through a module at once


def factors(
    model: PreTrainedModel,
    first: Sequence[Reached],
    window: Sequence[Reached],
    *,
    chosen: Sequence[int] | None = None,
    turns: Turns | None = None,
    present: Present = nothing_to_read,
) -> Iterator[Factors | UnreadableError]:
    """Yield the effective W_Q, W_K of each site, or the error that makes the site unreadable.

    `first` are the sites reached by a single token (position 0), `window` the sites reached by as many positions as
    distances are wanted. The Jacobian is the map if the map is affine, which is checked at other inputs. Norms inside
    the module keep their gains and drop their positive per-token scalars; if they act on queries or keys themselves
    (QK-norm), only directions are checked. Works in float64, on a copy of one module at a time.

    `chosen` are the indices of the sites to read, None for all. A site's result does not depend on the choice: a
    rotation is fitted at the first site that has it, chosen or not, and stored in `turns`. Inside `present`, a module
    of a model that is not in memory has the weights of the given names; no others are read.
    """
    turns = Turns() if turns is None else turns
    for place in range(len(window)) if chosen is None else chosen:
        try:
            leader = turns.leader(window, place)
            if leader != place and not turns.knows(window[leader]):
                with suppress(UnreadableError):  # read only for its rotation; sites it cannot lead get their own
                    _read_site(model, first[leader], window[leader], turns, present, leading=True)
            turns.read(window[leader])
            yield _read_site(model, first[place], window[place], turns, present, leading=leader == place)
        except UnreadableError as error:
            yield error


def _read_site(
    model: PreTrainedModel, one: Reached, many: Reached, turns: Turns, present: Present, *, leading: bool
) -> Factors:
    """Return the factors of one site; the float64 copies of its weights are freed on return."""
    with present(one.module, partial(used_weights, model, one, many.layout)):
        weights = float64_weights(one.module)
        probe = alone(Probe(model, one, weights, many.layout))
        all_of = Probe(model, many, weights, many.layout, whole=True)
        window = replace(all_of, batch=all_of.shapes[0][0] if probe.batch else None)
        return _factors(probe, window, partial(turns.of, leading=leading))


def _factors(probe: Probe, window: Probe, turned_as: Callable[[Probe, Norms], Rotation | None]) -> Factors:
    window.check_captured()
    if is_announced(probe.odd.query) or is_announced(probe.odd.key):  # tensors with shapes but no numbers
        raise unreadable("its queries or keys depend on what other modules compute, so that the model has to be loaded")
    norms = norms_inside(probe.reached.module)
    # If one token is not accepted, fit the rotation first, so that each token of a sequence can be a probe.
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
    """Return the maps and the groups of coordinates normalised together; raise NotBilinearError if there are none.

    Hand-written normalisations are removed if those in modules do not explain the queries and keys.
    """
    with linear(norms):
        rows = rows_of_weights(probe)
        if rows is not None and not norms:
            return rows, ()  # the random inputs have shown this
        maps = rows or products_of_weights(probe) or _maps(probe, turned)
    sides = _first_tokens(probe, maps)
    reason = _mismatch(*sides)
    if reason is None:
        return maps, ()
    found = _find_groups(*sides) if norms else None
    if found is None:
        with linear(norms), WithoutLengths():
            maps = _maps(probe, turned)
        found = _find_groups(*_first_tokens(probe, maps))
        if found is None:
            remedy = "The tokens.* measures of this site stand; weights.* do not exist."
            raise NotBilinearError(f"{reason}, so that its scores are not bilinear in them", remedy)
    return maps, found


def _maps(probe: Probe, turned: Rotation | None) -> Maps:
    """Compute ∂q/∂x and ∂k/∂y at position 0 by forward-mode differentiation, and the biases at zero input.

    Probe i carries the tangent e_i, so that row i of W is exact, without the rounding of a difference. NaN weights of
    one head do not spread to others (in a backward pass they would: 0 · NaN enters every gradient). A probe is a token,
    rotated back to position 0 by `turned`, or a whole sequence of one token if queries and keys come from two sequences
    or if cos and sin are rounded to half precision.
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
    """Compute rows start … start + step of both Jacobians, (rows, heads, head_dim) each; fewer at the end."""
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
    """Return the maps with the biases of every position, if they differ."""
    with torch.no_grad():
        zero = window(*(torch.zeros_like(x) for x in window.random(window.least, seed=1)))
    biases = []
    for seen, bias, factor in ((zero.query, maps.query_bias, maps.query), (zero.key, maps.key_bias, maps.key)):
        found = seen[0].double()
        moved = (found - found[:, :1]).norm() > TOLERANCE * factor.norm()
        biases.append(found if moved else bias)
    return replace(maps, query_bias=biases[0], key_bias=biases[1])


def _first_tokens(probe: Probe, maps: Maps) -> tuple[Sides, Sides]:
    """Return queries and keys of the first token of eight sequences, from the module and from the maps.

    Each is (sequences, heads, head_dim), without the heads that have NaN.
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


def _find_groups(seen: Sides, expected: Sides) -> Groups | None:
    """Return groups of coordinates in which queries and keys are positive multiples of the expected ones, or None.

    The groups are all coordinates of a head, or the non-affine and the affine coordinates of keys (latent attention).
    """
    size = seen[1].shape[-1]
    all_coordinates = (torch.arange(size),)
    if _mismatch(seen, expected, all_coordinates) is None:
        return all_coordinates
    difference = (seen[1] - expected[1]).flatten(0, 1).norm(dim=0)
    affine = difference <= TOLERANCE * expected[1].flatten(0, 1).norm(dim=0)
    parts = ((~affine).nonzero().flatten().cpu(), affine.nonzero().flatten().cpu())
    # The direction of a single number is only a sign, which proves nothing.
    return parts if min(map(len, parts)) > 1 and _mismatch(seen, expected, parts) is None else None


def _mismatch(seen: Sides, expected: Sides, groups: Groups = ()) -> str | None:
    """Return why the seen values are not the expected ones, up to a positive scalar per group; None if they are."""
    kind = "no positive multiple of an affine function" if groups else "no affine function"
    for name, theirs, ours in zip(("queries", "keys"), seen, expected, strict=True):
        pairs = [(unit(theirs[..., part]), unit(ours[..., part])) for part in groups] or [(theirs, ours)]
        for one, other in pairs:
            error = float((other - one).norm() / other.norm()) if other.norm() > 0 else float(one.norm())
            if not error < TOLERANCE:
                return f"its {name} are {kind} of its inputs (relative difference {error:.1e})"
    return None


def _check_everywhere(found: Factors, window: Probe) -> None:
    """Raise UnreadableError if the factors do not reproduce queries and keys of different tokens at all positions."""
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
    """Return the site's queries and keys rebuilt as (x W_Q + b_Q) R(i) from the module's inputs x.

    Under QK-norm, the length per token, which W_Q does not contain, is taken from the captured queries and keys.
    """
    captured = found.call.query_key(found.site)
    x, y = (found.sequences(found.arguments[name]) for name in (found.input_name, found.other or found.input_name))
    query, key = factors.rebuilt(x, y, (captured.query, captured.key))
    return replace(captured, query=query, key=key)
