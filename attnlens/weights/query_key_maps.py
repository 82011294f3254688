"""W_Q and W_K of each head, whatever the layout, from the Jacobian of the captured queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.errors import NotBilinearError, UnreadableError
from attnlens.hooks import Reached
from attnlens.records import QueryKey, Rotation, Site
from attnlens.weights.norms import linear, norms_inside
from attnlens.weights.probe import TOLERANCE, Probe, alone, float64_weights
from attnlens.weights.rope import rotation_of

if TYPE_CHECKING:
    from jaxtyping import Float

CHUNK = 512
"""How many probe tokens go through a module at once."""


@dataclass(frozen=True)
class Maps:
    """q = x W_Q + b_Q and k = y W_K + b_K at position 0, float64."""

    query: Float[Tensor, "heads d_model head_dim"]
    key: Float[Tensor, "kv_heads d_other head_dim"]
    query_bias: Float[Tensor, "heads head_dim"]
    key_bias: Float[Tensor, "kv_heads head_dim"]

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of the first tokens of x and y: (batch, heads, head_dim) and (batch, kv_heads, head_dim)."""
        first, other = (part.double().flatten(1, -2)[:, 0] for part in (x, y))
        query = torch.einsum("bd,hdk->bhk", first, self.query) + self.query_bias
        return query, torch.einsum("bd,hdk->bhk", other, self.key) + self.key_bias


@dataclass(frozen=True)
class Factors:
    """The effective query and key maps of one site: q_i = (x W_Q + b_Q) R(i), under QK-norm up to a positive scalar."""

    site: Site
    """Where."""
    maps: Maps
    """W_Q, W_K and the biases."""
    scale: float
    """Factor of the product."""
    rotation: Rotation | None
    """R(i), or None where queries and keys don't depend on their position."""
    qk_norm: bool
    """Whether queries and keys are normalised per token; W_Q and W_K then carry the gains only."""

    @property
    def route(self) -> str:
        """How the factors were read, in words."""
        return "jacobian" + ", QK-norm gains" * self.qk_norm + ", rotation" * (self.rotation is not None)

    @property
    def query_key(self) -> QueryKey:
        """The bilinear form M = s · W_Q W_Kᵀ of every head; biases stay out (x W_Q b_K is invisible to softmax)."""
        heads = tuple(range(self.maps.query.shape[0]))
        group = len(heads) // self.maps.key.shape[0]
        return QueryKey(
            query=self.maps.query,
            key=self.maps.key,
            scale=self.scale,
            source="weights",
            site=self.site,
            heads=heads,
            key_of=tuple(head // group for head in heads),
            rotation=self.rotation,
        )

    @property
    def on_inputs(self) -> QueryKey | None:
        """M on (x, 1), the biases a last row of the factors; None where the logits are not bilinear in one input x."""
        if self.rotation is not None or self.qk_norm or self.site.part == "cross":
            return None
        sides = ((self.maps.query, self.maps.query_bias), (self.maps.key, self.maps.key_bias))
        query, key = (torch.cat([factor, bias[:, None]], 1) for factor, bias in sides)
        return replace(self.query_key, query=query, key=key)


def factors(model: PreTrainedModel, first: list[Reached], window: list[Reached]) -> Iterator[Factors | UnreadableError]:
    """The effective W_Q, W_K of every site in turn, or the error that says why a site has none.

    `first` are the sites as reached by a single token (position 0), `window` as reached by as many positions as
    distances are wanted. The Jacobian is the map if the map is affine, which is checked at other inputs. Norms inside
    the module keep their gains and drop their positive per-token scalars; where they stand in the way of queries or
    keys (QK-norm) the directions are checked. All in float64, from a copy of one module at a time.
    """
    known: list[Rotation] = []
    for one, many in zip(first, window, strict=True):
        weights = float64_weights(one.module)
        try:
            probe, all_of = alone(Probe(model, one, weights)), Probe(model, many, weights, whole=True)
            yield _factors(probe, replace(all_of, batch=all_of.shapes[0][0] if probe.batch else None), known)
        except UnreadableError as error:
            yield error


def _factors(probe: Probe, window: Probe, known: list[Rotation]) -> Factors:
    window.check_captured()
    norms = norms_inside(probe.reached.module)
    # Where one token is not taken, position is looked at first: without it, each token of a sequence can be a probe.
    turned = rotation_of(window, {}, known) is not None if probe.whole else False
    with linear(norms):
        maps = _maps(probe, alike=turned or probe.reached.site.part == "cross")
    reason = _mismatch(probe, maps)
    qk_norm = reason is not None and bool(norms)
    if qk_norm:
        reason = _mismatch(probe, maps, up_to_scale=True)
    if reason is not None:
        remedy = "The tokens.* measures of this site stand; weights.* do not exist."
        raise NotBilinearError(f"{reason}, so that its scores are not bilinear in them", remedy)
    rotation = rotation_of(window, norms if qk_norm else {}, known)
    return Factors(window.reached.site, maps, probe.reached.call.scale, rotation, qk_norm)


def _maps(probe: Probe, *, alike: bool) -> Maps:
    """∂q/∂x and ∂k/∂y at position 0 by forward-mode differentiation, and what is left at zero input.

    Probe i carries the tangent e_i, so that row i of W comes out exactly, without a difference that rounds; a head
    whose weights are NaN spoils no other (as it would in a backward pass, where 0 · NaN enters every gradient). A probe
    is a token or, with `alike`, a whole sequence of one token.
    """
    base = probe.random(1, seed=1)
    with torch.no_grad():
        zero = probe(*(torch.zeros_like(x) for x in base))
    tokens = max(x[0, ..., 0].numel() for x in base)
    rows = probe.batch or max(1, CHUNK // tokens)
    step = rows if alike else rows * min(x[0, ..., 0].numel() for x in base)
    parts = [_tangents(probe, base, start, step, alike) for start in range(0, max(x.shape[-1] for x in base), step)]
    jacobians = [torch.cat(part).transpose(0, 1) for part in zip(*parts, strict=True)]
    return Maps(*(part.double() for part in (*jacobians, zero.query[0, :, 0], zero.key[0, :, 0])))


def _tangents(probe: Probe, base: tuple[Tensor, Tensor], start: int, step: int, alike: bool) -> tuple[Tensor, Tensor]:
    """Rows start … start + step of the two Jacobians, (rows, heads, head_dim) each; fewer where the width ends."""
    counts = [max(0, min(step, x.shape[-1] - start)) for x in base]
    with torch.no_grad(), forward_ad.dual_level():
        duals = []
        for x, count in zip(base, counts, strict=True):
            tokens = 1 if alike else x[0, ..., 0].numel()
            tangents = x.new_zeros(probe.batch or -(-count // tokens), *x.shape[1:])
            units = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)[start : start + count]
            if alike:
                tangents[:count] = units.view(count, *[1] * (x.dim() - 2), -1)
            else:
                tangents.view(-1, x.shape[-1])[:count] = units
            duals.append(forward_ad.make_dual(x[:1].expand_as(tangents).contiguous(), tangents))  # type: ignore[no-untyped-call]
        hidden, other = duals if probe.reached.other is not None else (duals[0], duals[0])
        call = probe(hidden, other)
        found = [forward_ad.unpack_dual(part).tangent for part in (call.query, call.key)]  # type: ignore[no-untyped-call]
    query, key = (part[:, :, : 1 if alike else None].transpose(1, 2).flatten(0, 1) for part in found)
    return query[: counts[0]], key[: counts[1]]


def _mismatch(probe: Probe, maps: Maps, *, up_to_scale: bool = False) -> str | None:
    """Why the maps are not what the module computes at other inputs, or None where they are; NaN heads are left out."""
    inputs = probe.random(8, seed=2, alike=False)
    with torch.no_grad():
        call = probe(*inputs)
    for name, seen, expected in zip(("queries", "keys"), (call.query, call.key), maps(*inputs), strict=True):
        fine = expected.isfinite().all(-1).all(0)
        ours, theirs = expected[:, fine], seen[:, fine, 0].double()
        if up_to_scale:
            ours, theirs = (nn.functional.normalize(side, dim=-1) for side in (ours, theirs))
        error = float((ours - theirs).norm() / ours.norm()) if ours.norm() > 0 else float(theirs.norm())
        if not error < TOLERANCE:
            kind = "no positive multiple of an affine function" if up_to_scale else "no affine function"
            return f"its {name} are {kind} of its inputs (relative difference {error:.1e})"
    return None
