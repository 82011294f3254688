"""Probe modules with few tokens, and read their weights and norms in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from transformers import Cache, PreTrainedModel

from attnlens.errors import FAILURES, UnreadableError
from attnlens.models.hooks import SiteCall, answer_calls, as_float64
from attnlens.models.trace import remove_hooks
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Float


Function = Callable[..., object]
Keywords = Mapping[str, object] | None


class FewTokens(TorchFunctionMode):
    """Torch function mode: F.linear of a repeated token (an expanded axis) multiplies weights by it only once."""

    def __torch_function__(
        self, function: Function, _types: object, args: tuple[Tensor, ...] = (), kwargs: Keywords = None
    ) -> object:
        """Call a torch function, with the shortcut for F.linear."""
        if function is not F.linear or kwargs or type(args[0]) is not Tensor:
            return function(*args, **kwargs or {})
        x, steps = args[0], args[0].stride()
        if not any(step == 0 and size > 1 for step, size in zip(steps[:-1], x.shape[:-1], strict=True)):
            return F.linear(*args)
        distinct = x[tuple(slice(0, 1) if step == 0 else slice(None) for step in steps[:-1])]
        result = F.linear(distinct, *args[1:])
        return result.expand(*x.shape[:-1], -1).contiguous()  # contiguous, since modules may change it in place


TOLERANCE = 1e-4
"""Largest relative difference between a module and its linear model; norms and cos, sin are mostly float32."""


@dataclass(frozen=True)
class Probe:
    """A module that can be called on its own, on chosen tokens."""

    model: PreTrainedModel  # the model that contains the module
    target: SiteCall  # the module, and the arguments of its last call
    weights: Mapping[str, Tensor]  # the module's parameters and buffers in float64, which replace its own during a call
    layout: tuple[int, ...]  # axes of the inputs as (batch, tokens, …, d_model); one token does not show them
    whole: bool = False  # whether the module is given sequences of the captured length instead of one token
    batch: int | None = None  # number of sequences the module is given at once; None: any number

    def __call__(
        self, hidden: Float[Tensor, "batch tokens d_model"], other: Float[Tensor, "batch tokens d_other"]
    ) -> Call:
        """Return the attention computation that the module requests for these inputs, and compute nothing after it.

        `other` is the other sequence of cross-attention. Raises UnreadableError if the module cannot be called alone.
        """
        captured, sequences = self.target.arguments, dict[str, Tensor]()
        if captured[self.target.input_name].dim() == 2:  # without a batch axis, sequences are concatenated
            parts = [part.flatten(0, 1) for part in (hidden, other)]
        else:
            parts = [part.permute([self.layout.index(axis) for axis in range(part.dim())]) for part in (hidden, other)]
        for name, tokens in zip((self.target.input_name, self.target.other), parts, strict=True):
            if name is not None:  # the module may get the same tensor under several names (CTRL: v, k and q)
                sequences |= {alias: tokens for alias, value in captured.items() if value is captured[name]}
        try:
            call = self._request(sequences, parts)
        except UnreadableError:
            mask = captured.get("attention_mask")
            if not isinstance(mask, Tensor) or self.arguments["attention_mask"] is not None or self._is_shorter:
                raise
            # the module needs a mask (DeBERTa)
            call = self._request(sequences | {"attention_mask": mask[:1]}, parts)
        self.check(call, hidden, hidden if self.target.other is None else other)
        return call

    def _request(self, arguments: Mapping[str, Tensor], content: Sequence[Tensor]) -> Call:
        def answer(call: Call) -> Tensor:
            raise _AttentionRequested(call)

        # attention that goes through transformers' interface need not be traced
        traced = None if self.target.site.traced else ()
        with answer_calls(self.model, answer, modules=traced, content=content), FewTokens():
            try:
                functional_call(self.target.module, dict(self.weights), kwargs={**self.arguments, **arguments})
            except _AttentionRequested as request:
                call: Call = request.args[0]
                return call
            except FAILURES as error:  # a module of another library, on inputs it was not written for
                first = next(iter(str(error).splitlines()), type(error).__name__)
                raise unreadable(f"its attention module can't be called on its own ({first})") from error
        raise unreadable("its attention module computes no attention when called on its own")

    def check(self, call: Call, *sequences: Tensor) -> None:
        """Raise UnreadableError if a call does not have one query and one key per head for each token of these."""
        captured = self.target.call
        parts = ("query", call.query, captured.query), ("key", call.key, captured.key)
        for (name, part, like), tokens in zip(parts, sequences, strict=True):
            expected = tokens.shape[0], like.shape[1], tokens[0, ..., 0].numel()
            if (actual := tuple(part.shape[:3])) != expected:
                raise unreadable(f"its {name} has (batch, heads, tokens) {actual}, but its inputs have {expected}")

    @property
    def captured(self) -> tuple[Tensor, Tensor]:
        """Captured inputs, (batch, tokens, …, d_model): the first sequence and, for cross-attention, the other one."""
        target, names = self.target, (self.target.input_name, self.target.other or self.target.input_name)
        first, other = (target.sequences(target.arguments[name], self.layout) for name in names)
        return first, other

    @cached_property
    def arguments(self) -> dict[str, object]:
        """Arguments of the module's last call in float64, without a cache and without a mask made for other sequences.

        The mask determines which keys are used, not their values. With fewer tokens than the mask is for, Swin expands
        it to a shape whose memory per sequence grows with the square of the tokens.
        """
        arguments: dict[str, object] = as_float64(self.target.arguments)
        mask = arguments.get("attention_mask")
        dropped = [name for name, value in arguments.items() if isinstance(value, Cache)]
        dropped += ["attention_mask"] * (isinstance(mask, Tensor) and (len(mask) > 1 or self._is_shorter))
        return arguments | dict.fromkeys(dropped)

    @property
    def _is_shorter(self) -> bool:
        """True if the probe's sequences have fewer tokens than the captured call's."""
        return not self.whole and any(math.prod(tokens) > 1 for _, *tokens, _ in self.shapes)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes (batch, tokens, …, d_model) of the captured inputs; for cross-attention of both sequences."""
        return [tuple(part.shape) for part in self.captured[: 1 if self.target.other is None else 2]]

    @cached_property
    def odd(self) -> Call:
        """The module's call on ODD sequences."""
        return self(*self.random(ODD, seed=0))

    @cached_property
    def alike(self) -> Call:
        """The module's call on the least number of sequences, with the same token at every position."""
        try:
            return self(*self.random(1, seed=ALIKE))
        except UnreadableError:  # masks made for the number of sequences in the captured call
            return self(*self.random(self.shapes[0][0], seed=ALIKE))

    @property
    def least(self) -> int:
        """Smallest number of sequences the module accepts: 1, or that of the captured call."""
        return len(self.alike.query)

    def random(self, batch: int, seed: int, *, alike: bool = True) -> tuple[Tensor, Tensor]:
        """Return seeded standard normal inputs, `alike` at all positions or not; for self-attention one tensor."""
        generator = torch.Generator().manual_seed(seed)
        draws = []
        for _, *tokens, size in self.shapes:
            axes = tokens if self.whole else [1]
            values = torch.randn(self.batch or batch, *([1] * len(axes) if alike else axes), size, generator=generator)
            draws.append(values.to(self.captured[0].device, torch.float64).expand(-1, *axes, -1))
        return draws[0], draws[-1]


def smallest(probe: Probe) -> Probe:
    """Return the probe with the smallest input the module accepts: a token, a sequence, or the whole captured batch.

    Raises UnreadableError if it accepts none of them.
    """
    whole = replace(probe, whole=True)
    candidates = [probe, whole, replace(whole, batch=probe.shapes[0][0])] if len(probe.shapes[0]) > 2 else [probe]
    for candidate in candidates[:-1]:
        with suppress(UnreadableError):
            _ = candidate.odd
            return candidate
    _ = candidates[-1].odd
    return candidates[-1]


Present = Callable[[nn.Module, Callable[[], Collection[str]]], AbstractContextManager[None]]
"""Maps (module, names) to a context in which the module's parameters and buffers of these names have values."""


def used_weights(model: PreTrainedModel, target: SiteCall, layout: tuple[int, ...]) -> list[str]:
    """Return the names of the parameters that the module's queries and keys depend on, and of all its buffers.

    Found by which parameters have a gradient: no values are needed, and parameters of later projections are never read.
    """
    parameters, buffers = dict(target.module.named_parameters()), dict(target.module.named_buffers())
    leaves = {name: part.detach().requires_grad_() for name, part in parameters.items() if part.is_floating_point()}
    probe = smallest(Probe(model, target, parameters | leaves | buffers, layout))
    with torch.enable_grad():
        call = probe(*probe.random(ODD, seed=0))
        outputs = [part.sum() for part in (call.query, call.key) if part.requires_grad]
    if not outputs:
        return list(buffers)
    slopes = torch.autograd.grad(outputs, list(leaves.values()), allow_unused=True)
    return [name for name, slope in zip(leaves, slopes, strict=True) if slope is not None] + list(buffers)


ALIKE = 4  # seed of the tokens that are repeated at every position
ODD = 7  # number of sequences tried first; a power of two might fit by accident an input made for another number


class _AttentionRequested(BaseException):  # not an Exception, which a module might catch
    """Raised with the call when a module requests an attention computation, to stop it there."""


def float64_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of one module without gradients, the floating-point ones in float64."""
    return {name: as_float64(part.detach()) for name, part in (*module.named_parameters(), *module.named_buffers())}


def unreadable(reason: str) -> UnreadableError:
    """Build the error for a site whose weights cannot be read."""
    return UnreadableError(reason, "The tokens.* measures of this site are valid; weights.* can't be computed.")


@dataclass(frozen=True)
class Norm:
    """A normalisation that is linear up to a positive scalar per token: x → g∘x, or g∘(x − mean)."""

    gain: Tensor  # g in float64, one gain per coordinate or one for all; gains may be 0 (Gemma: 1 + w, w = −1)
    centred: bool  # whether the mean is subtracted


Norms = Mapping[nn.Module, Norm]

ANY_WIDTH = (8,)  # shape of the test input for a norm without weights that does not declare its own shape


def norms_inside(module: nn.Module) -> Norms:
    """Find the normalisations inside an attention module that are positive multiples of a linear map.

    These are RMSNorm, g∘x/rms(x), and LayerNorm without bias, g∘(x − mean)/sd; the affine check refuses a site with
    others.
    """
    norms: dict[nn.Module, Norm] = {}
    for part in module.modules():
        if "Norm" in type(part).__name__ and next(part.children(), None) is None:
            with suppress(*FAILURES):  # it takes several tensors (Zaya), or images (LeViT)
                norm = _fit_norm(part)
                if norm is not None:
                    norms[part] = norm
    return norms


def _fit_norm(module: nn.Module) -> Norm | None:
    weights, weight = float64_weights(module), next(module.parameters(), None)
    shape = getattr(module, "normalized_shape", ANY_WIDTH) if weight is None else weight.shape
    ones = torch.ones(shape, dtype=torch.float64, device=None if weight is None else weight.device)
    x = torch.randn(ones.shape, generator=torch.Generator().manual_seed(0)).to(ones)
    signs = ones.clone()
    signs[..., 1::2] = -1
    for centred, unit in ((False, ones), (True, signs)):
        y = x - x.mean(-1, keepdim=True) if centred else x
        gain = functional_call(module, weights, (unit,)) / unit  # rms(unit) = 1, and the mean of alternating signs is 0
        expected = gain * y / y.square().mean(-1, keepdim=True).sqrt()
        # Not strict: if all gains are 0, the norm's output and both sides are 0.
        if bool((functional_call(module, weights, (x,)) - expected).norm() <= TOLERANCE * expected.norm()):
            # A norm without weights has one gain for all coordinates, whatever their number.
            return Norm(gain if weight is not None else gain.flatten()[0], centred)
    return None


@contextmanager
def linear(norms: Norms) -> Iterator[None]:
    """Disable the per-token scaling of these norms inside the `with`; gain and centring remain."""

    def answer(module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        norm, x = norms[module], inputs[0]
        return norm.gain * (x - x.mean(-1, keepdim=True) if norm.centred else x)

    hooks = [module.register_forward_hook(answer) for module in norms]
    with remove_hooks(hooks):
        yield


LENGTHS = frozenset(
    {torch.rsqrt, Tensor.rsqrt, torch.sqrt, Tensor.sqrt, torch.norm, Tensor.norm, torch.linalg.norm}
    | {torch.linalg.vector_norm}
)
"""Functions that compute the lengths in hand-written normalisations."""


class WithoutLengths(TorchFunctionMode):
    """Torch function mode that drops hand-written lengths: x/‖x‖ and x · rsqrt(mean x²) become x."""

    def __torch_function__(
        self, function: Function, _types: object, args: tuple[object, ...] = (), kwargs: Keywords = None
    ) -> object:
        """Call a torch function, with the lengths of tokens replaced by 1."""
        if function is F.normalize and args:
            return args[0]
        result = function(*args, **kwargs or {})
        # Lengths of tokens have axes; the root of a constant, such as head_dim, belongs to the scale and is kept.
        if function in LENGTHS and isinstance(result, Tensor) and result.dim():
            return torch.ones_like(result)
        return result
