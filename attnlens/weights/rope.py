"""The rotation of a module's queries and keys: the angle of each pair of coordinates by position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.errors import UnreadableError
from attnlens.hooks import Reached
from attnlens.records import Call, Rotation
from attnlens.weights.probe import Norms, Probe, float64_weights, linear, norms_inside, unreadable, without_gains

if TYPE_CHECKING:
    from jaxtyping import Bool, Complex, Float, Int

ROWS = 16
"""Queries and keys from which pairs are told: a wrong partner explains a share of about 1/ROWS, the right one all."""
POSITIONS = 32
"""How many positions are looked at to tell the pairs."""
STILL = 1e-5
"""Relative change below which a coordinate stands still: above the rounding of cos and sin in float32."""
ANGLE = 1e-3
"""Largest error of an angle, root mean square over the pairs; positions times frequencies are float32."""
EQUAL = 1e-6
"""Difference of angles below which two rotations are one: far below what any measure shows."""
SINGLE = torch.finfo(torch.float32).eps
"""Relative rounding of cos and sin in a model that is not in half precision."""
DIRECTION = "position changes more than the direction of queries and keys"


@dataclass
class Turns:
    """The rotations of a model's sites, each fitted at the first site of its class that is given those positions."""

    _fitted: dict[object, tuple[list[Tensor], dict[bool, Rotation | None]]] = field(default_factory=dict)

    def leader(self, window: Sequence[Reached], place: int) -> int:
        """The place of the first site that is turned as this one is, as far as can be told without its weights."""
        own = _kind(window[place])
        return next(other for other, reached in enumerate(window) if _kind(reached) == own)

    def knows(self, reached: Reached) -> bool:
        """Whether the leader of its kind was read."""
        return _kind(reached) in self._fitted

    def read(self, leader: Reached) -> None:
        """Note that the leader of its kind is read, though it may have no rotation that fits."""
        self._fitted.setdefault(_kind(leader), (_positions(leader), {}))

    def of(self, probe: Probe, norms: Norms, *, leading: bool) -> Rotation | None:
        """A site's rotation: its leader's where that holds here too (layers without may lie between others).

        Norms stand for a fit of directions, which is kept apart from one of queries and keys as they are.
        """
        kind = _kind(probe.reached)
        fits = self._fitted.get(kind, ([], {}))[1]
        if not leading and bool(norms) in fits and _holds(probe, norms, fits[bool(norms)]):
            return fits[bool(norms)]
        found = rotation_of(probe, norms, [])
        if leading:  # the positions are kept, so that no others take their addresses
            self._fitted.setdefault(kind, (_positions(probe.reached), {}))[1][bool(norms)] = found
        return found


def _kind(reached: Reached) -> object:
    """What sites that are turned alike have in common: class, part, and the very positions that they are given."""
    return type(reached.module), reached.site.part, *map(id, _positions(reached))


def _positions(reached: Reached) -> list[Tensor]:
    """The cos and sin that the module is given, where it is given any: they are the same objects for all layers."""
    given = reached.arguments.get("position_embeddings")
    return [part for part in given if isinstance(part, Tensor)] if isinstance(given, tuple | list) else []


def _holds(probe: Probe, norms: Norms, rotation: Rotation | None) -> bool:
    """Whether queries and keys of one and the same input turn so (layers without positions may lie between others)."""
    parts = _sides(probe.alike)
    if norms:
        parts = [nn.functional.normalize(part, dim=-1) for part in parts]
    if rotation is None:
        return not any(_moved(part) for part in parts)
    return not any(_missed(part, rotation, rounding_of(probe)) for part in parts)


def rotation_of(probe: Probe, norms: Norms, known: list[Rotation]) -> Rotation | None:
    """R(i) with q_i = q_0 R(i) for one and the same input, or None where position makes no difference or is added.

    Fitted pair by pair from queries and keys, those of a module with QK-norm without its gains: a gain of 0 hides what
    its coordinate does. That the same R turns queries and keys as the model has them, gains and all, is checked;
    its angles are those of distances (Su et al. 2021, RoFormer, Eq. 16) or of each place of an image. One that is
    `known` is returned as the same object.
    """
    if probe.tokens < 2:
        return None
    heads = probe.reached.call.query.shape[1] + probe.reached.call.key.shape[1]
    few = probe.least
    many = few if few > 1 else -(-ROWS // heads)
    used, others = _sides(probe.alike), _parts(probe, probe.random(few, seed=6))
    if norms:  # lengths may depend on the position, as under a temperature of long contexts (Beam)
        used, others = ([nn.functional.normalize(part, dim=-1) for part in side] for side in (used, others))
    if not any(_moved(part) for part in used):
        return None
    if not any(_moved(part - other) for part, other in zip(used, others, strict=True)):
        return None
    if probe.reached.site.part == "cross":
        raise unreadable("queries and keys of two sequences depend on their positions")
    with linear(without_gains(norms)):
        bare = _parts(probe, probe.random(many, seed=5))
    rounding = rounding_of(probe)
    found = fitted(bare[0], bare[1], rounding)
    if any(_missed(part, found, rounding) for part in used):
        raise unreadable(DIRECTION)
    if found.by_distance and rounding > SINGLE:
        found = _steady(found)
    same = next((one for one in known if _same(one, found)), None)
    if same is None:
        known.append(found)
    return same or found


def rotations(model: PreTrainedModel, window: list[Reached]) -> Iterator[Rotation | UnreadableError | None]:
    """The rotation of every site in turn, None where its keys are not rotated, or the error that says why it is unread.

    `window` are the sites as reached by as many positions as are wanted.
    """
    known: list[Rotation] = []
    for reached in window:
        probe = Probe(model, reached, float64_weights(reached.module), reached.layout, whole=True)
        try:
            yield rotation_of(probe, norms_inside(reached.module), known)
        except UnreadableError as error:
            yield error


def frequencies(rotation: Rotation) -> Float[Tensor, " pairs"]:
    """θ of φ(i) = iθ, for a rotation of distances, by least squares over its positions; in [−π, π)."""
    return _wrapped(_steady(rotation).angles[1])


def rounding_of(probe: Probe) -> float:
    """The relative rounding of the module's own numbers, such as cos and sin."""
    return float(torch.finfo(probe.reached.call.query.dtype).eps)


def _parts(probe: Probe, inputs: tuple[Tensor, Tensor]) -> list[Float[Tensor, "rows positions head_dim"]]:
    """Queries and keys of all inputs and heads; heads with NaN are left out."""
    with torch.no_grad():
        return _sides(probe(*inputs))


def _sides(call: Call) -> list[Float[Tensor, "rows positions head_dim"]]:
    parts = (part.double().transpose(0, 1) for part in (call.query, call.key))
    return [part[part.isfinite().flatten(1).all(-1)].flatten(0, 1) for part in parts]


def _moved(part: Float[Tensor, "rows positions head_dim"]) -> bool:
    return bool(((part - part[:, :1]).norm(dim=-1) > STILL * part.norm(dim=-1)).any())


def fitted(
    query: Float[Tensor, "rows positions head_dim"], key: Float[Tensor, "rows positions head_dim"], rounding: float
) -> Rotation:
    """The rotation of these queries and keys, each row one input at every position; cos and sin have that `rounding`.

    The angle of a pair is arg Σ conj(w_0) w_i over queries and keys, w = x_a + i x_b, its least-squares fit. A pair
    without signal in either has none, and stands still: it adds nothing to any score. Raises UnreadableError where
    queries and keys turn differently, and where position does more than turn.
    """
    pairs = _pairs(torch.cat((query, key)))
    sides = [_overlaps(part, pairs) for part in (query, key)]
    both = _signal(sides[0]) & _signal(sides[1])
    found = Rotation(pairs, (sides[0] + sides[1]).angle(), query.shape[-1])
    if _large((sides[0] * sides[1].conj())[:, both].angle(), rounding):
        raise unreadable("queries and keys turn differently with position")
    if any(_missed(part, found, rounding) for part in (query, key)):
        raise unreadable(DIRECTION)
    return replace(found, by_distance=not _large(_wrapped(found.angles.diff(dim=0) - found.angles[1]), rounding))


def _pairs(rows: Float[Tensor, "rows positions head_dim"]) -> Int[Tensor, "pairs 2"]:
    """Which coordinates turn together: x_i[a] is a sum of x_0[a] and of one other coordinate x_0[b].

    Of what x_0[a] leaves of x_i[a], the right partner explains all, and a wrong one little (least squares). A turning
    coordinate that is 0 at position 0 has a partner all the same, from which it takes its values.
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
    """Σ conj(w_0) w_i."""
    first, second = pairs.unbind(-1)
    turning = torch.complex(part[..., first], part[..., second])
    return (turning[:, :1].conj() * turning).sum(0)


def _signal(side: Complex[Tensor, "positions pairs"]) -> Bool[Tensor, " pairs"]:
    """Which pairs have an angle: their length at position 0 is above rounding beside the longest."""
    lengths = side[0].abs()
    return lengths > torch.finfo(lengths.dtype).eps * lengths.max()


def _missed(part: Float[Tensor, "rows positions head_dim"], rotation: Rotation, rounding: float) -> bool:
    """Whether part[:, i] is anything but part[:, 0] R(i)."""
    difference = rotation.turned(part[:, :1].expand_as(part)) - part
    return bool((difference.norm(dim=-1) > max(ANGLE, 4 * rounding) * part.norm(dim=-1)).any())


def _large(angles: Float[Tensor, "positions pairs"], rounding: float) -> bool:
    """Whether angles that should be 0 are not, at some position; 4 roundings: of cos and sin, at two positions."""
    sizes = angles.square().sum(-1).sqrt()
    return bool((sizes > max(ANGLE, 4 * rounding) * angles.shape[-1] ** 0.5).any())


def _wrapped(angles: Tensor) -> Tensor:
    """The same angles in [−π, π)."""
    wrapped: Tensor = (angles + math.pi).remainder(2 * math.pi) - math.pi
    return wrapped


def _steady(rotation: Rotation) -> Rotation:
    """φ(i) = iθ for the least-squares θ: of angles from rounding cos and sin, which is what they were made from."""
    first = rotation.angles[1]
    turns = (_wrapped(rotation.angles.diff(dim=0) - first) + first).cumsum(0)  # whole turns are not taken off
    steps = torch.arange(len(rotation.angles)).to(first)
    frequencies = (steps[1:, None] * turns).sum(0) / steps.square().sum()
    return replace(rotation, angles=steps[:, None] * frequencies)


def _same(one: Rotation, other: Rotation) -> bool:
    """Whether two rotations differ by rounding alone."""
    alike = torch.equal(one.pairs, other.pairs) and one.angles.shape == other.angles.shape
    alike = alike and one.by_distance == other.by_distance
    return alike and bool((_wrapped(one.angles - other.angles).abs() < EQUAL).all())
