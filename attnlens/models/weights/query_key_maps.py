"""Compute W_Q and W_K of each head from the weights of attention modules, and the rotation of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.errors import NotBilinearError, UnreadableError
from attnlens.models.hooks import SiteCall
from attnlens.models.loading.deferred import is_announced
from attnlens.models.trace import tensors
from attnlens.models.weights.probe import (
    TOLERANCE,
    Maps,
    Norms,
    Present,
    Probe,
    WithoutLengths,
    float64_weights,
    linear,
    match_weights,
    norms_inside,
    smallest,
    take_coordinates,
    unreadable,
    used_weights,
)
from attnlens.records import Call, QueryKey, Rotation, Site

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    Rows = Float[Tensor, "rows positions head_dim"]  # queries or keys; each row belongs to one input and one head


@dataclass(frozen=True)
class Traits:
    """Properties of a site's queries and keys, for reports."""

    rotary: bool  # True if queries and keys are rotated by their position
    qk_norm: bool  # True if queries and keys are normalised per token
    latent: bool  # True for latent attention, in which only a part of each key is normalised
    biased: bool  # True if a bias is added to queries or keys; the bilinear form omits it


Groups = tuple[Tensor, ...]  # groups of a head's coordinates that are normalised together, by one scalar per token


@dataclass(frozen=True)
class Factors:
    """The effective query and key maps of one site: q_i = (x W_Q + b_Q) R(i), under QK-norm up to a positive scalar.

    Latent attention (MLA) has two such scalars. In DeepSeek V2's notation, with norm gains g, scale s, c = y W_DKV, its
    root mean square rms(c), and a(x) > 0, a head's score is a(x) · [x M_n yᵀ / rms(c) + x M_r(j − i) yᵀ]. The part
    without positions (nope) has M_n = s W_DQ g_Q W_UQ W_UKᵀ g_K W_DKVᵀ, and the rotated part (rope) has M_r(Δ) = s W_DQ
    g_Q W_QR R(−Δ) W_KRᵀ. Their sum is not a bilinear form, since rms(c) depends on the key, but each part is bilinear
    up to positive factors. The measures weights.* use M_n.
    """

    site: Site
    maps: Maps  # W_Q, W_K and the biases
    scale: float  # factor of the product of queries and keys
    rotation: Rotation | None  # R(i), or None if queries and keys are not rotated by their position
    groups: Groups = ()  # all coordinates of a head under QK-norm; the nope and the rope part under latent attention

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys are normalised per token."""
        return bool(self.groups)

    @property
    def latent(self) -> bool:
        """True for latent attention, which has two separate forms."""
        return len(self.groups) > 1

    @property
    def traits(self) -> Traits:
        """Properties of these factors, for reports."""
        biased = bool(self.maps.query_bias.any() or self.maps.key_bias.any())
        return Traits(self.rotation is not None, self.qk_norm, self.latent, biased)

    @property
    def route(self) -> str:
        """Description of how the factors were read."""
        kind = ", nope part of latent attention" if self.latent else ", QK-norm gains" * self.qk_norm
        return "jacobian" + kind + ", rotation" * (self.rotation is not None and not self.latent)

    @property
    def query_key(self) -> QueryKey:
        """The bilinear form M = s · W_Q W_Kᵀ of every head, without biases; in latent attention, of the nope part."""
        return self.parts[0]

    @property
    def parts(self) -> tuple[QueryKey, ...]:
        """The bilinear form M; for latent attention, the forms of the nope part and of the rope part."""
        query, key, heads = self.maps.query, self.maps.key, tuple(range(len(self.maps.query)))
        key_of = tuple(head * len(key) // len(query) for head in heads)
        whole = QueryKey(query, key, self.scale, "weights", self.site, heads, key_of, rotation=self.rotation)
        if not self.latent:
            return (whole,)
        parts = []
        for group in self.groups:
            rotation = None if self.rotation is None else self.rotation.of_coordinates(group)
            query_part, key_part = take_coordinates(query, group), take_coordinates(key, group)
            parts.append(replace(whole, query=query_part, key=key_part, rotation=rotation))
        return tuple(parts)

    @property
    def on_inputs(self) -> QueryKey | None:
        """The bilinear form M on inputs (x, 1), with biases as the last rows of W_Q and W_K.

        None in cross-attention, under rotation or QK-norm, or if the biases of queries depend on the position.
        """
        positional = self.rotation is not None or self.maps.query_bias.shape[1] > 1
        if positional or self.qk_norm or self.site.part == "cross":
            return None
        sides = ((self.maps.query, self.maps.query_bias), (self.maps.key, self.maps.key_bias))
        query, key = (torch.cat(side, 1) for side in sides)
        return replace(self.query_key, query=query, key=key)

    def rebuild(self, x: Tensor, y: Tensor, originals: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the queries of x and the keys of y; under QK-norm, scale them to the lengths of `originals`."""
        query, key = (part if self.rotation is None else self.rotation.rotate(part) for part in self.maps(x, y))
        for part, original in zip((query, key), originals, strict=True):
            for group in self.groups:
                lengths = original[..., group].double().norm(dim=-1, keepdim=True)
                part[..., group] = unit(part[..., group]) * lengths
        return query, key


unit = partial(nn.functional.normalize, dim=-1)
ROWS = 16  # inputs for finding rotating pairs: a wrong partner explains about 1/ROWS of the change in a coordinate
POSITIONS = 32  # positions for finding rotating pairs
STILL = 1e-5  # largest relative change in a value that counts as constant: above the float32 rounding of cos and sin
ANGLE = 1e-3  # largest root-mean-square error of the pairs' angles: position · frequency is computed in float32
SINGLE = torch.finfo(torch.float32).eps  # relative rounding of cos and sin in a model that is not in half precision
DIRECTION = "positions do more than rotate queries and keys"


@dataclass
class Turns:
    """Rotations of a model's sites, fitted at the first site of each kind (the leader).

    Later sites of the same kind use the leader's rotation if it fits; otherwise a rotation is fitted to the site.
    """

    fitted: dict[object, tuple[list[Tensor], dict[bool, Rotation | None]]] = field(default_factory=dict)
    """Keyed by kind of site: the leader's position tensors (kept so that no other tensors get their ids) and rotations.
    The rotation at key True was fitted to directions only, because norms scale queries and keys."""

    def add_kind(self, leader: SiteCall) -> bool:
        """Add this site's kind; return False if it is already known."""
        is_new = _kind(leader) not in self.fitted
        self.fitted.setdefault(_kind(leader), (_positions(leader), {}))
        return is_new

    def of(self, probe: Probe, norms: Norms, *, leading: bool) -> Rotation | None:
        """Return the leader's rotation if it also fits this site; else return the result of `find_rotation`."""
        _, fits = self.fitted[_kind(probe.target)]
        if not leading and bool(norms) in fits and _fits(probe, norms, fits[bool(norms)]):
            return fits[bool(norms)]
        rotation = find_rotation(probe, norms)
        if leading:
            fits[bool(norms)] = rotation
        return rotation


def _kind(target: SiteCall) -> tuple[object, ...]:
    """Return the kind of a site: its module's class, its part, and the ids of its position tensors."""
    return type(target.module), target.site.part, *map(id, _positions(target))


def _positions(target: SiteCall) -> list[Tensor]:
    embeddings = target.arguments.get("position_embeddings")  # cos and sin, the same objects for all layers
    return tensors(embeddings) if isinstance(embeddings, tuple | list) else []


def _fits(probe: Probe, norms: Norms, rotation: Rotation | None) -> bool:
    """Return True if the position changes a token's queries and keys by `rotation` (None: not at all)."""
    parts = [unit(part) if norms else part for part in _read_sides(probe.alike)]
    if rotation is None:
        return not any(map(_changes_with_position, parts))
    return not any(_differs_from(part, rotation, query_rounding(probe)) for part in parts)


def find_rotation(probe: Probe, norms: Norms) -> Rotation | None:
    """Fit the rotation R(i) in q_i = q_0 R(i) for one token at all positions i (Su et al. 2021, RoFormer, Eq. 16).

    Return None if positions have no effect or only add a vector, or if there is a single position. Under QK-norm, R is
    fitted without the gains, because a gain of 0 hides the rotation of its coordinate, and then checked with the gains.
    Raises UnreadableError if positions have any other effect or, in cross-attention, rotate queries or keys.
    """
    if math.prod(probe.shapes[0][1:-1]) < 2:
        return None
    heads = probe.target.call.query.shape[1] + probe.target.call.key.shape[1]
    rows = probe.least if probe.least > 1 else -(-ROWS // heads)
    parts, others = _read_sides(probe.alike), _read_sides(probe(*probe.random(probe.least, seed=6)))
    if norms:  # lengths may depend on the position, e.g. with a temperature for long contexts (Beam)
        parts, others = ([unit(part) for part in side] for side in (parts, others))
    changes = [part - other for part, other in zip(parts, others, strict=True)]
    if not all(any(map(_changes_with_position, sides)) for sides in (parts, changes)):
        return None
    if probe.target.site.part == "cross":
        raise unreadable("in cross-attention, queries and keys depend on their positions")
    with linear({module: replace(norm, gain=torch.ones_like(norm.gain)) for module, norm in norms.items()}):
        query, key = _read_sides(probe(*probe.random(rows, seed=5)))
    rounding = query_rounding(probe)
    rotation = fit_rotation(query, key, rounding)
    if any(_differs_from(part, rotation, rounding) for part in parts):
        raise unreadable(DIRECTION)
    return _fit_frequencies(rotation) if rotation.by_distance and rounding > SINGLE else rotation


def rotations(model: PreTrainedModel, window: list[SiteCall]) -> Iterator[Rotation | UnreadableError | None]:
    """Yield, per site, its rotation, None if positions do not rotate queries and keys, or the error if none fits.

    `window` contains the sites' calls with as many positions as the rotations must cover.
    """
    turns = Turns()
    for target in window:
        probe = Probe(model, target, float64_weights(target.module), target.layout, whole=True)
        try:
            yield turns.of(probe, norms_inside(target.module), leading=turns.add_kind(target))
        except UnreadableError as error:
            yield error


def frequencies(rotation: Rotation) -> Float[Tensor, " pairs"]:
    """Return the least-squares frequencies θ, in [−π, π), of a rotation by distance, whose angles are φ(i) = iθ."""
    return _wrap(_fit_frequencies(rotation).angles[1])


def query_rounding(probe: Probe) -> float:
    """Return the relative rounding error of the type in which the module computes queries."""
    return float(torch.finfo(probe.target.call.query.dtype).eps)


def _read_sides(call: Call) -> list[Rows]:
    """Return the queries and the keys of all inputs and heads; leave out heads with values that are not finite."""
    parts = (part.double().transpose(0, 1) for part in (call.query, call.key))
    return [part[part.isfinite().flatten(1).all(-1)].flatten(0, 1) for part in parts]


def _changes_with_position(part: Rows) -> bool:
    return bool(((part - part[:, :1]).norm(dim=-1) > STILL * part.norm(dim=-1)).any())


def fit_rotation(query: Rows, key: Rows, rounding: float) -> Rotation:
    """Fit the rotation of these queries and keys; each row contains one input at all positions.

    `rounding` is the relative rounding of cos and sin. The least-squares angle of the pair (a, b) at position i is
    arg Σ conj(w_0) w_i, summed over queries and keys x, where w = x[a] + √−1 · x[b]. Pairs that are 0 in queries or in
    keys are not compared, since they add nothing to scores. Raises UnreadableError if queries and keys rotate
    differently, or if positions do more than rotate them.
    """
    pairs = _find_pairs(torch.cat((query, key)))
    (of_queries, have_query), (of_keys, have_key) = (_overlaps(part, pairs) for part in (query, key))
    rotation = Rotation(pairs, (of_queries + of_keys).angle(), query.shape[-1])
    if _exceed_rounding((of_queries * of_keys.conj())[:, have_query & have_key].angle(), rounding):
        raise unreadable("queries and keys rotate differently with position")
    if any(_differs_from(part, rotation, rounding) for part in (query, key)):
        raise unreadable(DIRECTION)
    unequal_steps = _wrap(rotation.angles.diff(dim=0) - rotation.angles[1])
    return replace(rotation, by_distance=not _exceed_rounding(unequal_steps, rounding))


def _find_pairs(rows: Rows) -> Int[Tensor, "pairs 2"]:
    """Find the pairs (a, b) of coordinates that rotate together: x_i[a] is a linear combination of x_0[a] and x_0[b].

    In a least-squares fit, the right partner b explains the whole residual of x_i[a] given x_0[a]; other coordinates
    explain little of it. Raises UnreadableError if the pairs overlap.
    """
    start = rows[:, 0]
    later = rows[:, torch.linspace(1, rows.shape[1] - 1, min(rows.shape[1] - 1, POSITIONS)).long()]
    gram, across = start.mT @ start, torch.einsum("rb,rpa->pba", start, later)
    lengths = gram.diagonal()
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    slope = across.diagonal(dim1=-2, dim2=-1) * inverse
    energy = later.square().sum((0, 1))
    unexplained = energy - (slope.square() * lengths).sum(0)
    turning = unexplained > STILL**2 * energy
    new = lengths[:, None] - gram.square() * inverse  # squared length of x_0[b] after x_0[a] is projected out
    explained = (across - gram * slope[:, None]).square().sum(0) / new
    # strict: `new` is rounding if x_0[b] is nearly a multiple of x_0[a]
    share = torch.where((new > STILL * lengths[:, None]) & turning, explained / unexplained, 0.0)
    partners = torch.maximum(share, share.mT).argmax(0)
    both_ways = torch.stack((turning.nonzero()[:, 0], partners[turning]), -1).sort(-1).values
    pairs: Tensor = torch.unique(both_ways, dim=0)
    if len(torch.unique(pairs)) < pairs.numel():
        raise unreadable(DIRECTION)
    return pairs


def _overlaps(part: Rows, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ conj(w_0) w_i (see `fit_rotation`), (positions, pairs), and a mask of pairs that are not rounding."""
    turning = torch.complex(part[..., pairs[:, 0]], part[..., pairs[:, 1]])
    overlaps = (turning[:, :1].conj() * turning).sum(0)
    lengths = overlaps[0].abs()
    return overlaps, lengths > torch.finfo(lengths.dtype).eps * lengths.max()


def _differs_from(part: Rows, rotation: Rotation, rounding: float) -> bool:
    """Return True if part[:, i] differs from part[:, 0] R(i) by more than rounding explains."""
    difference = rotation.rotate(part[:, :1].expand_as(part)) - part
    return bool((difference.norm(dim=-1) > max(ANGLE, 4 * rounding) * part.norm(dim=-1)).any())


def _exceed_rounding(angles: Float[Tensor, "positions pairs"], rounding: float) -> bool:
    """Return True if, at some position, the root-mean-square angle over pairs exceeds ANGLE and 4 · `rounding`."""
    sizes = angles.square().sum(-1).sqrt()
    return bool((sizes > max(ANGLE, 4 * rounding) * angles.shape[-1] ** 0.5).any())


def _wrap(angles: Tensor) -> Tensor:
    """Return the angles wrapped to [−π, π)."""
    wrapped: Tensor = (angles + math.pi).remainder(2 * math.pi) - math.pi
    return wrapped


def _fit_frequencies(rotation: Rotation) -> Rotation:
    """Return the rotation with angles φ(i) = iθ for the least-squares θ, which removes the rounding of cos and sin."""
    first = rotation.angles[1]
    turns = (_wrap(rotation.angles.diff(dim=0) - first) + first).cumsum(0)  # not wrapped to [−π, π)
    steps = torch.arange(len(rotation.angles)).to(first)
    frequencies = (steps[1:, None] * turns).sum(0) / steps.square().sum()
    return replace(rotation, angles=steps[:, None] * frequencies)


Sides = Sequence[tuple[Tensor, Tensor]]  # (actual queries, expected queries), (actual keys, expected keys)
CHUNK = 512  # probe tokens that go through a module at once


def factors(
    model: PreTrainedModel,
    first: Sequence[SiteCall],
    window: Sequence[SiteCall],
    *,
    chosen: Sequence[int] | None = None,
    turns: Turns | None = None,
    present: Present | None = None,
) -> Iterator[Factors | UnreadableError]:
    """Yield the Factors (effective W_Q and W_K) of each chosen site, or the error that makes the site unreadable.

    `first` contains the sites' calls with a single token (position 0), and `window` their calls with as many positions
    as the rotations must cover. Random inputs test whether the maps are affine. Norms inside the module are applied
    with their gains, but without the positive scalar per token; under QK-norm, only directions are checked. All
    computations are in float64, on the weights of one module at a time. `chosen` contains the indices of the sites to
    read (None: all). Rotations are fitted at the first site of each kind, even if that site is not chosen, and stored
    in `turns`. `present` loads the weights of a model that is not in memory.
    """
    turns = Turns() if turns is None else turns
    kinds = [_kind(target) for target in window]
    for index in range(len(window)) if chosen is None else chosen:
        leader = kinds.index(kinds[index])
        is_new = turns.add_kind(window[leader])
        try:
            if is_new and leader != index:
                with suppress(UnreadableError):  # the leader is read only for its rotation
                    _read_site(model, first[leader], window[leader], turns, present, leading=True)
            yield _read_site(model, first[index], window[index], turns, present, leading=leader == index)
        except UnreadableError as error:
            yield error


def _read_site(
    model: PreTrainedModel, single: SiteCall, many: SiteCall, turns: Turns, present: Present | None, *, leading: bool
) -> Factors:
    names = partial(used_weights, model, single, many.layout)
    with nullcontext() if present is None else present(single.module, names):
        weights = float64_weights(single.module)
        probe = smallest(Probe(model, single, weights, many.layout))
        window = Probe(model, many, weights, many.layout, whole=True)
        if probe.batch:
            window = replace(window, batch=window.shapes[0][0])
        window.check(many.call, *many.inputs())
        if is_announced(probe.odd.query) or is_announced(probe.odd.key):  # tensors with shapes but no numbers
            raise unreadable("its queries or keys depend on the output of other modules, so the model must be loaded")
        norms = norms_inside(single.module)
        # if the module does not accept a single token, tokens of a sequence are rotated back to position 0
        rotation = turns.of(window, {}, leading=leading) if probe.whole else None
        maps, groups = _find_maps(probe, norms, rotation)
        rotation = turns.of(window, norms if groups else {}, leading=leading)
        if rotation is None:
            with linear(norms):
                maps = _with_positions(maps, window)
        result = Factors(many.site, maps, single.call.scale, rotation, groups)
        _check_everywhere(result, window)
        return result


def _find_maps(probe: Probe, norms: Norms, rotation: Rotation | None) -> tuple[Maps, Groups]:
    """Return the maps, and the groups of normalised coordinates, if any; raise NotBilinearError if no maps fit."""
    with linear(norms):
        maps = match_weights(probe)
        if maps is not None and not norms:
            return maps, ()  # the match was already tested on random inputs
        maps = maps or _differentiate(probe, rotation)
    sides = _first_tokens(probe, maps)
    reason = _mismatch(sides)
    if reason is None:
        return maps, ()
    if norms and (groups := _find_groups(sides)) is not None:
        return maps, groups
    with linear(norms), WithoutLengths():
        maps = _differentiate(probe, rotation)
    if (groups := _find_groups(_first_tokens(probe, maps))) is not None:
        return maps, groups
    remedy = "Use this site's tokens.* measures, which are valid; its weights.* measures are undefined."
    raise NotBilinearError(f"{reason}, so the scores are not bilinear in the module's inputs", remedy)


def _differentiate(probe: Probe, rotation: Rotation | None) -> Maps:
    """Compute ∂q/∂x and ∂k/∂y at position 0 by forward-mode differentiation, and the biases at zero input.

    The tangent of token i is the unit vector e_i, so that row i of each map is exact. NaN weights of one head do not
    spread to other heads, as they would through 0 · NaN in a backward pass. The tokens form sequences; `rotation`
    rotates their queries and keys back to position 0. If queries and keys come from two sequences, or if cos and sin
    have half precision, each token is instead repeated in a sequence of its own.
    """
    alike = probe.target.site.part == "cross" or (rotation is not None and query_rounding(probe) > SINGLE)
    base = probe.random(1, seed=1)
    zero = probe(*(torch.zeros_like(x) for x in base))
    tokens = [x[0, ..., 0].numel() for x in base]
    lengths = [1 if alike else count for count in tokens]  # probes per sequence
    step = min(lengths) * (probe.batch or max(1, CHUNK // max(tokens)))
    jacobians = list[Tensor](), list[Tensor]()
    for start in range(0, max(x.shape[-1] for x in base), step):
        counts = [max(0, min(step, x.shape[-1] - start)) for x in base]
        with forward_ad.dual_level():
            duals = []
            for x, count, length in zip(base, counts, lengths, strict=True):
                tangents = x.new_zeros(probe.batch or -(-count // length), *x.shape[1:])
                units = x.new_zeros(count, x.shape[-1])
                units.diagonal(start).fill_(1)
                if alike:
                    tangents[:count] = units.view(count, *[1] * (x.dim() - 2), -1)
                else:
                    tangents.view(-1, x.shape[-1])[:count] = units
                duals.append(forward_ad.make_dual(x[:1].expand_as(tangents).contiguous(), tangents))  # type: ignore[no-untyped-call]
            call = probe(duals[0], duals[0] if probe.target.other is None else duals[1])
            slopes = [forward_ad.unpack_dual(part).tangent for part in (call.query, call.key)]  # type: ignore[no-untyped-call]
        for name, part, count, jacobian in zip(("queries", "keys"), slopes, counts, jacobians, strict=True):
            if part is None:
                raise unreadable(f"its {name} do not depend on its first input")
            if rotation is not None and not alike:
                part = rotation.transposed.rotate(part.double())
            jacobian.append(part[:, :, : 1 if alike else None].transpose(1, 2).flatten(0, 1)[:count])
    query, key = (torch.cat(jacobian).transpose(0, 1).double() for jacobian in jacobians)
    return Maps(query, key, zero.query[0, :, :1].double(), zero.key[0, :, :1].double())


def _with_positions(maps: Maps, window: Probe) -> Maps:
    """Return the maps, but with one bias per position for queries or keys whose bias depends on the position."""
    zero = window(*(torch.zeros_like(x) for x in window.random(window.least, seed=1)))
    biases = {"query_bias": zero.query[0].double(), "key_bias": zero.key[0].double()}
    for (name, bias), factor in zip(biases.items(), (maps.query, maps.key), strict=True):
        if (bias - bias[:, :1]).norm() > TOLERANCE * factor.norm():
            maps = replace(maps, **{name: bias})
    return maps


def _first_tokens(probe: Probe, maps: Maps) -> Sides:
    """Return the probe's and the maps' queries and keys for the first tokens of 8 sequences; omit non-finite heads."""
    inputs = probe.random(8, seed=2, alike=False)
    call, sides = probe(*inputs), []
    for part, expected in zip((call.query, call.key), maps(*inputs), strict=True):
        fine = expected[:, :, 0].isfinite().all(-1).all(0)
        sides.append((part[:, fine, 0].double(), expected[:, fine, 0]))
    return sides


def _find_groups(sides: Sides) -> Groups | None:
    """Find one or two groups of coordinates in which actual vectors are positive multiples of expected vectors.

    Return None if there are no such groups.
    """
    actual, expected = (part.flatten(0, 1) for part in sides[1])
    all_coordinates = (torch.arange(actual.shape[-1]),)
    if _mismatch(sides, all_coordinates) is None:
        return all_coordinates
    affine = (actual - expected).norm(dim=0) <= TOLERANCE * expected.norm(dim=0)
    parts = ((~affine).nonzero().flatten().cpu(), affine.nonzero().flatten().cpu())
    # A group needs two coordinates, because the direction of a single number is only a sign.
    return parts if min(map(len, parts)) > 1 and _mismatch(sides, parts) is None else None


def _mismatch(sides: Sides, groups: Groups = ()) -> str | None:
    """Describe how actual and expected values differ, up to a positive scalar per group; return None if they agree."""
    kind = "a positive multiple of an affine function" if groups else "an affine function"
    for name, side in zip(("queries", "keys"), sides, strict=True):
        for actual, expected in [tuple(unit(part[..., group]) for part in side) for group in groups] or [side]:
            size = expected.norm()
            error = float((expected - actual).norm() / size if size > 0 else actual.norm())
            if not error < TOLERANCE:  # `not <` also catches NaN
                return f"its {name} are not {kind} of its inputs (relative difference {error:.1e})"
    return None


def _check_everywhere(factors: Factors, window: Probe) -> None:
    """Raise UnreadableError unless the factors reproduce queries and keys of different tokens at all positions."""
    inputs = window.random(window.least, seed=3, alike=False)
    call = window(*inputs)
    rebuilt = factors.rebuild(*inputs, (call.query, call.key))
    border = TOLERANCE if factors.rotation is None else max(ANGLE, 4 * query_rounding(window))
    for name, part, expected in zip(("queries", "keys"), (call.query, call.key), rebuilt, strict=True):
        fine = expected.isfinite().all(-1).all(-1).all(0)
        error = (part[:, fine].double() - expected[:, fine]).norm()
        if not error <= border * expected[:, fine].norm():  # not strict: both are 0 if no head is finite
            raise unreadable(f"its {name} depend on more than the token at their position")


def rebuild(target: SiteCall, factors: Factors) -> QueryKey:
    """Return the captured QueryKey with queries and keys rebuilt from the site's inputs; see `Factors.rebuild`."""
    captured = target.call.query_key(target.site)
    query, key = factors.rebuild(*target.inputs(), (captured.query, captured.key))
    return replace(captured, query=query, key=key)
