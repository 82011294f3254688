"""What are each head's W_Q and W_K, whatever the layout? The Jacobian of the captured queries and keys tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.errors import NotBilinearError
from attnlens.hooks import Reached
from attnlens.records import QueryKey, Rotation, Site
from attnlens.weights.norms import linear, norms_inside
from attnlens.weights.probe import TOLERANCE, Probe, float64_weights, not_bilinear
from attnlens.weights.turning import rotation_of

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
        query = torch.einsum("bd,hdk->bhk", x.double()[:, 0], self.query) + self.query_bias
        return query, torch.einsum("bd,hdk->bhk", y.double()[:, 0], self.key) + self.key_bias


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


def factors(
    model: PreTrainedModel, first: list[Reached], window: list[Reached]
) -> Iterator[Factors | NotBilinearError]:
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
            yield _factors(Probe(model, one, weights), Probe(model, many, weights), known)
        except NotBilinearError as error:
            yield error


def _factors(probe: Probe, window: Probe, known: list[Rotation]) -> Factors:
    norms = norms_inside(probe.reached.module)
    with linear(norms):
        maps = _maps(probe)
    reason = _mismatch(probe, maps)
    qk_norm = reason is not None and bool(norms)
    if qk_norm:
        reason = _mismatch(probe, maps, up_to_scale=True)
    if reason is not None:
        raise not_bilinear(reason)
    rotation = rotation_of(window, norms if qk_norm else {}, known)
    return Factors(window.reached.site, maps, probe.reached.call.scale, rotation, qk_norm)


def _maps(probe: Probe) -> Maps:
    """∂q/∂x and ∂k/∂y at position 0 by forward-mode differentiation, and what is left at zero input.

    Probe i carries the tangent e_i, so that row i of W comes out exactly, without a difference that rounds; a head
    whose weights are NaN spoils no other (as it would in a backward pass, where 0 · NaN enters every gradient).
    """
    base = probe.random(1, seed=1)
    with torch.no_grad():
        zero = probe(*(torch.zeros_like(x) for x in base))
    rows = [_tangents(probe, base, start) for start in range(0, max(x.shape[-1] for x in base), CHUNK)]
    jacobians = [torch.cat(parts).transpose(0, 1) for parts in zip(*rows, strict=True)]
    return Maps(*(part.double() for part in (*jacobians, zero.query[0, :, 0], zero.key[0, :, 0])))


def _tangents(probe: Probe, base: tuple[Tensor, Tensor], start: int) -> tuple[Tensor, Tensor]:
    """Rows start … start + CHUNK of the two Jacobians, (rows, heads, head_dim) each; fewer where the width ends."""
    with torch.no_grad(), forward_ad.dual_level():
        duals = []
        for x in base:
            tangents = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)[start : start + CHUNK, None]
            duals.append(forward_ad.make_dual(x.repeat(len(tangents), 1, 1), tangents))  # type: ignore[no-untyped-call]
        hidden, other = duals if probe.reached.other is not None else (duals[0], duals[0])
        call = probe(hidden, other)
        query, key = (forward_ad.unpack_dual(part).tangent for part in (call.query, call.key))  # type: ignore[no-untyped-call]
        return query[:, :, 0], key[:, :, 0]


def _mismatch(probe: Probe, maps: Maps, *, up_to_scale: bool = False) -> str | None:
    """Why the maps are not what the module computes at other inputs, or None where they are; NaN heads are left out."""
    inputs = probe.random(8, seed=2)
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
