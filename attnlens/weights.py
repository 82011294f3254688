"""What are each head's W_Q and W_K, whatever the layout? The Jacobian of the captured queries and keys tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.errors import NotBilinearError
from attnlens.hooks import Reached, opened
from attnlens.records import Call, QueryKey, Site

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
    rotation: Float[Tensor, "positions head_dim head_dim"] | None
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


@dataclass(frozen=True)
class Probe:
    """A module that is called on its own, on tokens of our choice."""

    model: PreTrainedModel
    """The model around it."""
    reached: Reached
    """The module, and the arguments it was last called with."""

    def __call__(
        self, hidden: Float[Tensor, "batch tokens d_model"], other: Float[Tensor, "batch tokens d_other"]
    ) -> Call:
        """What the module asks for on these inputs (`other`: the other sequence, used by cross-attention alone).

        Raises NotBilinearError where the module can't be called alone.
        """
        asked: list[Call] = []

        def answer(call: Call) -> Tensor:
            asked.append(call)
            batch, heads, queries = call.query.shape[:3]
            return call.value.new_zeros(batch, queries, heads, call.value.shape[-1])

        arguments: dict[str, Any] = {**self.reached.arguments, self.reached.input_name: hidden}
        if self.reached.other is not None:
            arguments[self.reached.other] = other
        with opened(self.model, answer):
            try:
                self.reached.module(**arguments)
            except (
                RuntimeError,
                TypeError,
                ValueError,
                IndexError,
            ) as error:  # somebody's module on inputs it never met
                first = str(error).splitlines()[0]
                raise _not_bilinear(f"its attention module can't be called on its own ({first})") from error
        return asked[0]

    def random(self, batch: int, tokens: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Seeded standard normal inputs, each the same at every position; one and the same for self-attention."""
        generator = torch.Generator().manual_seed(seed)
        likes: list[Tensor] = [
            self.reached.arguments[name] for name in (self.reached.input_name, self.reached.other) if name
        ]
        draws = [torch.randn(batch, 1, like.shape[-1], generator=generator).to(like) for like in likes]
        return draws[0].repeat(1, tokens, 1), draws[-1].repeat(1, tokens, 1)


def factors(
    model: PreTrainedModel, first: list[Reached], window: list[Reached]
) -> Iterator[Factors | NotBilinearError]:
    """The effective W_Q, W_K of every site in turn, or the error that says why a site has none.

    `first` are the sites as reached by a single token (position 0), `window` as reached by as many positions as
    distances are wanted. The Jacobian is the map if the map is affine, which is checked at other inputs. Under QK-norm
    it is not; then the norms' gains are kept, their positive per-token scalars dropped, and the directions checked.
    """
    rotations: list[Tensor] = []
    for one, many in zip(first, window, strict=True):
        try:
            yield _factors(Probe(model, one), Probe(model, many), rotations)
        except NotBilinearError as error:
            yield error


def _factors(probe: Probe, window: Probe, rotations: list[Tensor]) -> Factors:
    maps = _maps(probe)
    reason, qk_norm = _mismatch(probe, maps), False
    if reason is not None and (gains := _gains(probe.reached.module)):
        with _linear_norms(gains):
            maps = _maps(probe)
        reason, qk_norm = _mismatch(probe, maps, up_to_scale=True), True
    if reason is not None:
        raise _not_bilinear(reason)
    return Factors(window.reached.site, maps, probe.reached.call.scale, _rotation(window, rotations), qk_norm)


def _maps(probe: Probe) -> Maps:
    """∂q/∂x and ∂k/∂y at position 0 by forward-mode differentiation, and what is left at zero input.

    Probe i carries the tangent e_i, so that row i of W comes out exactly, without a difference that rounds; a head
    whose weights are NaN spoils no other (as it would in a backward pass, where 0 · NaN enters every gradient).
    """
    base = probe.random(1, seed=1)
    with torch.no_grad():
        zero = probe(*(torch.zeros_like(x) for x in base))
    rows = [_tangents(probe, base, start) for start in range(0, max(x.shape[-1] for x in base), CHUNK)]
    jacobians = [torch.cat(parts).double().transpose(0, 1) for parts in zip(*rows, strict=True)]
    return Maps(jacobians[0], jacobians[1], zero.query[0, :, 0].double(), zero.key[0, :, 0].double())


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
        if not error < _tolerance(seen.dtype):
            kind = "no positive multiple of an affine function" if up_to_scale else "no affine function"
            return f"its {name} are {kind} of its inputs (relative difference {error:.1e})"
    return None


def _tolerance(dtype: torch.dtype) -> float:
    """Rounding of a sum over d_model products; a map of another form misses by orders of magnitude more."""
    return 1e-4 if dtype in (torch.float32, torch.float64) else 0.05


def _rotation(probe: Probe, known: list[Tensor]) -> Tensor | None:
    """R(i) with q_i = q_0 R(i) for one and the same input, or None where position makes no difference.

    Solved by least squares over heads and random inputs; that R is orthogonal, the same for queries and keys, and
    depends on distances only, R(i) R(j)ᵀ = R(i−j), is checked (Su et al. 2021, RoFormer, Eq. 16). Sites mostly share
    a rotation: one that is `known` and fits is taken, a new one is entered there.
    """
    positions = probe.reached.arguments[probe.reached.input_name].shape[1]
    if positions < 2 or probe.reached.site.part == "cross":
        return None
    with torch.no_grad():
        call = probe(*probe.random(2, positions, seed=4))
        parts = [part.double() for part in (call.query, call.key)]
        still = torch.eye(call.query.shape[-1]).to(parts[0])
        if all(_turned_by(part, still) for part in parts):
            return None
        for rotation in known:
            if all(_turned_by(part, rotation) for part in parts):
                return rotation
        batch = -(-2 * call.query.shape[-1] // call.key.shape[1])
        call = probe(*probe.random(batch, positions, seed=5))
    known.append(_checked_rotation(*(_turns(part.double()) for part in (call.query, call.key))))
    return known[-1]


def _turned_by(part: Float[Tensor, "batch heads positions head_dim"], rotation: Tensor) -> bool:
    """Whether part[:, :, i] = part[:, :, 0] R(i), to the rounding of cos and sin; NaN heads are left out."""
    difference = (part[:, :, :1, None] @ rotation).squeeze(-2) - part
    return not bool((difference.norm(dim=-1) > 1e-4 * part.norm(dim=-1)).any())


def _turns(part: Float[Tensor, "batch heads positions head_dim"]) -> Float[Tensor, "positions head_dim head_dim"]:
    """The least-squares R(i) in part[:, :, 0] R(i) = part[:, :, i], from the heads without NaN."""
    rows = part.permute(2, 0, 1, 3).flatten(1, 2)
    rows = rows[:, rows.isfinite().all(-1).all(0)]
    inverse: Tensor = torch.linalg.pinv(rows[0])
    return inverse @ rows


def _checked_rotation(query: Tensor, key: Tensor) -> Tensor:
    """R, if it is a rotation that depends on distances only; checked to 1e-3, far above the rounding of cos and sin."""
    unit = torch.eye(query.shape[-1]).to(query)
    differences = {
        "queries and keys turn differently with position": query - key,
        "position changes more than the direction of queries and keys": query @ query.mT - unit,
        "scores depend on more than the distance of two positions": query[1:] @ query[:-1].mT - query[1],
    }
    for reason, difference in differences.items():
        if bool((difference.norm(dim=(1, 2)) > 1e-3 * unit.norm()).any()):
            raise _not_bilinear(reason)
    return _paired(query)


def _paired(rotation: Float[Tensor, "positions head_dim head_dim"]) -> Float[Tensor, "positions head_dim head_dim"]:
    """The rotation with exact zeros where RoPE has zeros: a coordinate turns with one partner, and with no other.

    Least squares leaves rounding there, which costs the sums over distances their sparsity. A partner is the
    coordinate with the largest entry, if that exceeds rounding; a rotation of another form is returned as it is.
    """
    unit = torch.eye(rotation.shape[-1], dtype=torch.bool, device=rotation.device)
    reach = rotation.abs().amax(0).masked_fill(unit, 0)
    partner = (reach == reach.amax(-1, keepdim=True)) & (reach > 1e-5)
    kept = rotation * (unit | partner | partner.mT)
    return kept if bool((rotation - kept).abs().max() < 1e-4) else rotation


def _gains(module: nn.Module) -> dict[nn.Module, tuple[Tensor, bool]]:
    """The normalisations inside an attention module: gain g, and whether the mean is removed.

    RMSNorm is g∘x/rms(x), LayerNorm without bias g∘(x − mean)/sd; both are positive multiples of a linear map. A norm
    that is neither is left as it is, and the affine check then refuses the site.
    """
    found = {}
    for part in module.modules():
        if "Norm" in type(part).__name__ and (size := _size(part)) is not None:
            gain = _gain(part, size)
            if gain is not None:
                found[part] = gain
    return found


def _size(norm: nn.Module) -> tuple[int, ...] | None:
    weight = next(norm.parameters(), None)
    return None if weight is None else tuple(weight.shape)


@torch.no_grad()
def _gain(norm: nn.Module, size: tuple[int, ...]) -> tuple[Tensor, bool] | None:
    weight = next(norm.parameters())
    x = torch.randn(*size, generator=torch.Generator().manual_seed(0)).to(weight)
    signs = torch.ones(size).to(weight)
    signs[..., 1::2] = -1
    for centred, ones in ((False, torch.ones(size).to(weight)), (True, signs)):
        y = x - x.mean(-1, keepdim=True) if centred else x
        gain = norm(ones) / ones  # rms(ones) = 1, and the mean of alternating signs is 0
        expected = gain * y / y.square().mean(-1, keepdim=True).sqrt()
        if bool((norm(x) - expected).norm() < _tolerance(weight.dtype) * expected.norm()):
            return gain, centred
    return None


@contextmanager
def _linear_norms(gains: Mapping[nn.Module, tuple[Tensor, bool]]) -> Iterator[None]:
    """Inside, each of these norms keeps its gain (and centring) and drops the positive scalar per token."""

    def linear(module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        gain, centred = gains[module]
        x = inputs[0] - inputs[0].mean(-1, keepdim=True) if centred else inputs[0]
        return gain * x

    hooks = [module.register_forward_hook(linear) for module in gains]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _not_bilinear(reason: str) -> NotBilinearError:
    return NotBilinearError(
        f"not bilinear: {reason}", "The tokens.* measures of this site stand; weights.* do not exist."
    )
