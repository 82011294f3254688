"""Norms inside an attention module, their gains, and calls of the module without the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from attnlens.errors import FAILURES
from attnlens.weights.probe import TOLERANCE, float64_weights


@dataclass(frozen=True)
class Norm:
    """A normalisation that is a linear map up to a positive scalar per token: x → g∘x, or g∘(x − mean)."""

    gain: Tensor
    """g in float64, of the coordinates' shape or one number for all; entries may be 0 (Gemma: 1 + w, w = −1)."""
    centred: bool
    """Whether the mean is removed."""


Norms = Mapping[nn.Module, Norm]

ANY_WIDTH = (8,)
"""On how many coordinates a norm without weights is tried, where it does not say how many it takes."""


def norms_inside(module: nn.Module) -> Norms:
    """The normalisations inside an attention module.

    RMSNorm is g∘x/rms(x), LayerNorm without bias g∘(x − mean)/sd; both are positive multiples of a linear map. A norm
    that is neither is left out, and the affine check then refuses the site.
    """
    found = {}
    for part in module.modules():
        plain = "Norm" in type(part).__name__ and next(part.children(), None) is None
        if plain:
            norm = _read(part)
            if norm is not None:
                found[part] = norm
    return found


@torch.no_grad()
def _read(module: nn.Module) -> Norm | None:
    weight = next(module.parameters(), None)
    shape = getattr(module, "normalized_shape", ANY_WIDTH) if weight is None else weight.shape
    ones = torch.ones(shape, dtype=torch.float64, device=None if weight is None else weight.device)
    try:
        norm = _linear_norm(module, ones)
    except FAILURES:  # it takes more than one tensor (Zaya), or images (LeViT)
        return None
    # A norm without weights has one gain for all coordinates, of whatever number.
    return norm if weight is not None or norm is None else replace(norm, gain=norm.gain.flatten()[0])


def _linear_norm(module: nn.Module, ones: Tensor) -> Norm | None:
    weights = float64_weights(module)
    x = torch.randn(ones.shape, generator=torch.Generator().manual_seed(0)).to(ones)
    signs = ones.clone()
    signs[..., 1::2] = -1
    for centred, unit in ((False, ones), (True, signs)):
        y = x - x.mean(-1, keepdim=True) if centred else x
        gain = functional_call(module, weights, (unit,)) / unit  # rms(unit) = 1, and the mean of alternating signs is 0
        expected = gain * y / y.square().mean(-1, keepdim=True).sqrt()
        # Not strict: gains that are all 0 make a norm whose every output is 0.
        if bool((functional_call(module, weights, (x,)) - expected).norm() <= TOLERANCE * expected.norm()):
            return Norm(gain, centred)
    return None


def without_gains(norms: Norms) -> Norms:
    """The same norms with gain 1, so that a coordinate whose gain is 0 shows what becomes of it behind the norm."""
    return {module: replace(norm, gain=torch.ones_like(norm.gain)) for module, norm in norms.items()}


@contextmanager
def linear(norms: Norms) -> Iterator[None]:
    """Inside, each of these norms keeps its gain (and centring) and drops the positive scalar per token."""

    def answer(module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        norm, x = norms[module], inputs[0]
        return norm.gain * (x - x.mean(-1, keepdim=True) if norm.centred else x)

    hooks = [module.register_forward_hook(answer) for module in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


LENGTHS = frozenset(
    {torch.rsqrt, Tensor.rsqrt, torch.sqrt, Tensor.sqrt, torch.norm, Tensor.norm, torch.linalg.norm}
    | {torch.linalg.vector_norm}
)
"""What normalisations that are no modules multiply or divide by."""


class WithoutLengths(TorchFunctionMode):
    """Inside, x/‖x‖ and x · rsqrt(mean x²), written by hand, are x: the positive scalar per token is dropped."""

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        if function is F.normalize and args:
            return args[0]
        result = function(*args, **kwargs or {})
        # Those of tokens have axes; the root of a constant, as of head_dim, is part of the scale.
        return torch.ones_like(result) if function in LENGTHS and result.dim() else result
