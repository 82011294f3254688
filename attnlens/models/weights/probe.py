"""Call attention modules on a few tokens, and find W_Q and W_K in a weight matrix or in a product of two."""

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
    from jaxtyping import Bool, Float, Int


Function = Callable[..., object]
Keywords = Mapping[str, object] | None


class FewTokens(TorchFunctionMode):
    """Torch function mode in which F.linear computes a repeated token (an expanded axis) only once."""

    def __torch_function__(
        self, function: Function, _types: object, args: tuple[Tensor, ...] = (), kwargs: Keywords = None
    ) -> object:
        """Call a torch function; in F.linear, compute repeated tokens only once."""
        if function is not F.linear or kwargs or type(args[0]) is not Tensor:
            return function(*args, **kwargs or {})
        x, steps = args[0], args[0].stride()
        if not any(step == 0 and size > 1 for step, size in zip(steps[:-1], x.shape[:-1], strict=True)):
            return F.linear(*args)
        distinct = x[tuple(slice(0, 1) if step == 0 else slice(None) for step in steps[:-1])]
        result = F.linear(distinct, *args[1:])
        return result.expand(*x.shape[:-1], -1).contiguous()  # contiguous, since modules may change it in place


TOLERANCE = 1e-4  # largest relative difference between a module and its affine maps: norms, cos and sin are float32


@dataclass(frozen=True)
class Probe:
    """A module that is called outside of its model, on chosen tokens."""

    model: PreTrainedModel  # the model that contains the module
    target: SiteCall  # the module, and the arguments of a captured call
    weights: Mapping[str, Tensor]  # float64 parameters and buffers, which replace the module's own during a call
    layout: tuple[int, ...]  # `SiteCall.layout` of a call with several tokens, since one token does not determine it
    whole: bool = False  # True if inputs are sequences of the captured length; False if they are single tokens
    batch: int | None = None  # number of sequences that an input must have; None: any number

    def __call__(
        self, hidden: Float[Tensor, "batch tokens d_model"], other: Float[Tensor, "batch tokens d_other"]
    ) -> Call:
        """Return the attention call that the module makes for these inputs; in cross-attention, keys come from `other`.

        Raises UnreadableError if the module cannot be called outside of its model, or if `check` fails.
        """
        captured, sequences, parts = self.target.arguments, dict[str, Tensor](), [hidden, other]
        if captured[self.target.input_name].dim() == 2:  # without a batch axis, sequences are concatenated
            parts = [part.flatten(0, 1) for part in parts]
        else:
            parts = [part.permute([self.layout.index(axis) for axis in range(part.dim())]) for part in parts]
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

        traced = None if self.target.site.traced else ()  # transformers' interface needs no tracing
        with answer_calls(self.model, answer, modules=traced, content=content), FewTokens():
            try:
                functional_call(self.target.module, dict(self.weights), kwargs={**self.arguments, **arguments})
            except _AttentionRequested as request:
                call: Call = request.args[0]
                return call
            except FAILURES as error:  # a module of another library can fail on inputs for which it was not written
                first = next(iter(str(error).splitlines()), type(error).__name__)
                raise unreadable(f"its attention module can't be called on its own ({first})") from error
        raise unreadable("its attention module computes no attention when called on its own")

    def check(self, call: Call, *sequences: Tensor) -> None:
        """Raise UnreadableError unless each head has one query per token and one key per token.

        `sequences` contains the input for queries and the input for keys, whose tokens are counted.
        """
        for name, tokens in zip(("query", "key"), sequences, strict=True):
            heads = getattr(self.target.call, name).shape[1]
            expected = tokens.shape[0], heads, tokens[0, ..., 0].numel()
            if (actual := tuple(getattr(call, name).shape[:3])) != expected:
                raise unreadable(f"its {name} has (batch, heads, tokens) {actual}, but should have {expected}")

    @cached_property
    def arguments(self) -> dict[str, object]:
        """Arguments of the captured call in float64; a cache, or a mask that does not fit the probe, becomes None."""
        arguments: dict[str, object] = as_float64(self.target.arguments)
        mask = arguments.get("attention_mask")
        dropped = [name for name, value in arguments.items() if isinstance(value, Cache)]
        dropped += ["attention_mask"] * (isinstance(mask, Tensor) and (len(mask) > 1 or self._is_shorter))
        return arguments | dict.fromkeys(dropped)

    @property
    def _is_shorter(self) -> bool:
        return not self.whole and any(math.prod(tokens) > 1 for _, *tokens, _ in self.shapes)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes (batch, tokens, …, d_model) of the captured input, or of both inputs in cross-attention."""
        return [tuple(part.shape) for part in self.target.inputs(self.layout)[: 1 if self.target.other is None else 2]]

    @cached_property
    def odd(self) -> Call:
        """The attention call that the module makes for a batch of ODD sequences."""
        return self(*self.random(ODD, seed=0))

    @cached_property
    def alike(self) -> Call:
        """The call for one sequence of a repeated token or, if that fails, for the captured number of sequences."""
        try:
            return self(*self.random(1, seed=ALIKE))
        except UnreadableError:  # the module's masks may be made for the captured number of sequences
            return self(*self.random(self.shapes[0][0], seed=ALIKE))

    @property
    def least(self) -> int:
        """Number of sequences in `alike`: 1 or, if the module does not accept 1, the number in the captured call."""
        return len(self.alike.query)

    def random(self, batch: int, seed: int, *, alike: bool = True) -> tuple[Tensor, Tensor]:
        """Return random normal inputs for queries and for keys; with `alike`, each sequence repeats a single token."""
        generator = torch.Generator().manual_seed(seed)
        draws = []
        for _, *tokens, size in self.shapes:
            axes = tokens if self.whole else [1]
            values = torch.randn(self.batch or batch, *([1] * len(axes) if alike else axes), size, generator=generator)
            draws.append(values.to(self.target.inputs(self.layout)[0].device, torch.float64).expand(-1, *axes, -1))
        return draws[0], draws[-1]


def smallest(probe: Probe) -> Probe:
    """Return the probe with the smallest inputs that its module accepts: one token, a sequence, or the captured batch.

    Raises UnreadableError if the module accepts none of these.
    """
    if len(probe.shapes[0]) > 2:
        whole = replace(probe, whole=True)
        for candidate in (probe, whole):
            with suppress(UnreadableError):
                _ = candidate.odd
                return candidate
        probe = replace(whole, batch=probe.shapes[0][0])
    _ = probe.odd
    return probe


Present = Callable[[nn.Module, Callable[[], Collection[str]]], AbstractContextManager[None]]
"""Function of (module, function that returns tensor names); in the context that it returns, these have values."""


def used_weights(model: PreTrainedModel, target: SiteCall, layout: tuple[int, ...]) -> list[str]:
    """Return the names of all buffers, and of the parameters on which the module's queries and keys depend."""
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
ODD = 7  # number of sequences tried first: a power of two could by accident fit a module made for another number


class _AttentionRequested(BaseException):  # not an Exception, which a module might catch
    """Exception that ends a module's call when it requests attention; its argument is the attention Call."""


def float64_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers, keyed by name, detached, with floating-point values in float64."""
    return {name: as_float64(part.detach()) for name, part in (*module.named_parameters(), *module.named_buffers())}


def unreadable(reason: str) -> UnreadableError:
    """Build the error for a site whose weights cannot be read."""
    return UnreadableError(
        reason, "Use this site's tokens.* measures, which are valid; its weights.* measures can't be computed."
    )


@dataclass(frozen=True)
class Norm:
    """A normalisation that is linear up to a positive scalar per token: x → g∘x, or g∘(x − mean)."""

    gain: Tensor  # g in float64, one gain per coordinate or one for all; gains can be 0 (Gemma: 1 + w, w = −1)
    centred: bool  # True if the mean is subtracted


Norms = Mapping[nn.Module, Norm]
ANY_WIDTH = (8,)  # shape of the test input for a norm that has neither weights nor a declared shape


def norms_inside(module: nn.Module) -> Norms:
    """Return the norms in a module that act as an RMSNorm or as a LayerNorm without bias; leave out all others."""
    norms: dict[nn.Module, Norm] = {}
    for part in module.modules():
        if "Norm" in type(part).__name__ and next(part.children(), None) is None:
            with suppress(*FAILURES):  # raised by norms of several tensors (Zaya), or of images (LeViT)
                norm = fit_norm(part)
                if norm is not None:
                    norms[part] = norm
    return norms


def fit_norm(module: nn.Module) -> Norm | None:
    """Return the norm that a module computes (an RMSNorm, or a LayerNorm without bias); None for other modules."""
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
        # Not strict: if all gains are 0, both sides are 0.
        if bool((functional_call(module, weights, (x,)) - expected).norm() <= TOLERANCE * expected.norm()):
            # A norm without weights can have any number of coordinates, so it has a single gain.
            return Norm(gain if weight is not None else gain.flatten()[0], centred)
    return None


@contextmanager
def linear(norms: Norms) -> Iterator[None]:
    """Disable the per-token scaling of these norms inside the `with`, but keep their gain and centring."""

    def answer(module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        norm, x = norms[module], inputs[0]
        return norm.gain * (x - x.mean(-1, keepdim=True) if norm.centred else x)

    with remove_hooks([module.register_forward_hook(answer) for module in norms]):
        yield


LENGTHS = {"rsqrt", "sqrt", "norm", "linalg_norm", "linalg_vector_norm"}  # functions that compute vector lengths


class WithoutLengths(TorchFunctionMode):
    """Torch function mode that replaces vector lengths by 1, so that x/‖x‖ and x · rsqrt(mean x²) become x."""

    def __torch_function__(
        self, function: Function, _types: object, args: tuple[object, ...] = (), kwargs: Keywords = None
    ) -> object:
        if function is F.normalize and args:
            return args[0]
        result = function(*args, **kwargs or {})
        # Lengths of tokens have axes; a root without axes, such as that of head_dim, belongs to the scale.
        if isinstance(result, Tensor) and result.dim() and getattr(function, "__name__", "") in LENGTHS:
            return torch.ones_like(result)
        return result


@dataclass(frozen=True)
class Maps:
    """The maps q = x W_Q + b_Q and k = y W_K + b_K, before any rotation, in float64."""

    query: Float[Tensor, "heads d_model head_dim"]
    key: Float[Tensor, "kv_heads d_other head_dim"]
    query_bias: Float[Tensor, "heads queries head_dim"]
    """One bias for all positions, or one per position if the module adds positions to its inputs (DETR)."""
    key_bias: Float[Tensor, "kv_heads keys head_dim"]

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Map x to queries, (batch, heads, tokens, head_dim), and y to keys, (batch, kv_heads, tokens, head_dim)."""
        vectors = []
        for inputs, factor, bias in ((x, self.query, self.query_bias), (y, self.key, self.key_bias)):
            tokens = inputs.double().flatten(1, -2)
            products = nn.functional.linear(tokens, factor.mT.flatten(0, 1))  # rows of weights in their memory order
            by_head = products.reshape(*tokens.shape[:-1], len(factor), -1).transpose(1, 2)
            vectors.append(by_head + bias[:, : tokens.shape[1]])
        return vectors[0], vectors[1]


DRAWS = 8  # number of random inputs; a coordinate matches an unrelated row with a probability of about SAME ** DRAWS
SAME = 1e-10  # largest relative difference between a coordinate and its matched row: far above rounding in float64
ONE = 1e-13  # relative rounding of a coordinate's factor: a factor this close to 1 is set to 1
AT_ONCE = 512  # number of coordinates that are compared with all rows, or multiplied out, at once

Multiplicand = tuple[Tensor, Tensor | None]
"""A vector z = x Dᵀ that a matrix can multiply: its values at random inputs, (draws, rank), and D (None: z = x)."""
Match = tuple[Tensor, Tensor, Tensor | None]
"""Columns w found in one weight matrix: indices, vectors u, (columns, rank), and D; w = Dᵀu, or w = u if D is None."""


def match_columns(
    vectors: Tensor, multiplicands: Sequence[Multiplicand], weights: Sequence[Tensor]
) -> list[Match] | None:
    """Express each column of `vectors`, (draws, columns), as a multiple of a weight row's product with a multiplicand.

    Return matches that together contain all columns, or None if any column has no match.
    """
    if not bool(vectors.isfinite().all()):
        return None
    candidates = [
        (multiplicand, rows)
        for multiplicand in multiplicands
        for rows in (*weights, *(weight.mT for weight in weights))  # Conv1D layers store their weights transposed
        if rows.shape[1] == multiplicand[0].shape[1]
    ]
    pieces, remaining = [], torch.arange(vectors.shape[1], device=vectors.device)
    while len(remaining):
        matches = (_match_rows(vectors[:, remaining], remaining, *candidate) for candidate in candidates)
        piece = next((match for match in matches if match is not None), None)
        if piece is None:
            return None
        pieces.append(piece)
        remaining = remaining[~torch.isin(remaining, piece[0])]
    return pieces


def match_weights(probe: Probe) -> Maps | None:
    """Find W_Q and W_K if each of their columns is a multiple of a row in a weight matrix or in a product of two.

    The first case is a linear layer with rows θ_r, where coordinate k of head h is q_hk(x) = c θ_r · x + b with
    constants b and c. The second case is two linear layers with a normalisation between them whose scaling per token is
    disabled: q_hk(x) = c υ · z + b, where υ is a row of the second layer and z_r = c_r θ_r · x + a_r. Both cases are
    tested on DRAWS random inputs, because the Jacobian would take d_model times as long. Return None in other cases, if
    any value is NaN or infinite, or if the module does not accept a single token.
    """
    if probe.whole or probe.batch is not None:
        return None
    inputs = probe.random(DRAWS, seed=7)
    with _record_inner_inputs(probe.target.module) as inner:
        call = probe(*(torch.cat((torch.zeros_like(x[:1]), x)) for x in inputs))
    # tensor subclasses are excluded, because their rows can be quantised
    plain = [weight for weight in probe.weights.values() if type(weight) in (Tensor, nn.Parameter)]
    weights = [weight for weight in plain if weight.dim() == 2 and weight.is_floating_point()]
    maps, biases = [], []
    for x, part in zip(inputs, (call.query, call.key), strict=True):
        values = part[:, :, 0].double()
        vectors, outer = values[1:] - values[:1], (x.double().flatten(0, -2), None)
        pieces = match_columns(vectors.flatten(1), [outer], weights)
        if pieces is None:
            latents = _find_latents(outer, inner, weights)
            pieces = match_columns(vectors.flatten(1), [outer, *latents], weights)
        if pieces is None:
            return None
        maps.append(compose_map(pieces, vectors.shape[1:]))
        biases.append(values[0, :, None])
    return Maps(*maps, *biases)


@contextmanager
def _record_inner_inputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Inside the `with`, append to the yielded list the input of each submodule that has a weight matrix."""
    inputs: list[Tensor] = []

    def record(_part: nn.Module, args: tuple[object, ...]) -> None:
        inputs.extend(part for part in args[:1] if isinstance(part, Tensor))

    parts = (part for part in module.modules() if any(weight.dim() == 2 for weight in part.parameters(recurse=False)))
    with remove_hooks([part.register_forward_pre_hook(record) for part in parts]):
        yield inputs


def _find_latents(outer: Multiplicand, inner: Sequence[Tensor], weights: Sequence[Tensor]) -> Iterator[Multiplicand]:
    """Yield, as multiplicands, the inner inputs z with z_r = c_r θ_r · x + a_r for all r (see `match_weights`)."""
    for inputs in inner:
        z = inputs.double().flatten(1)
        if len(z) == len(outer[0]) + 1 and z.shape[1] == inputs.shape[-1]:  # one vector per token
            values = z[1:] - z[:1]
            pieces = match_columns(values, [outer], weights)
            if pieces is not None:
                yield values, compose_map(pieces, torch.Size((1, z.shape[1])))[0].mT


def compose_map(pieces: Sequence[Match], shape: torch.Size) -> Float[Tensor, "heads d_model head_dim"]:
    """Assemble W of each head from matched columns; return a view if one match without D contains all columns."""
    _, whole, down = pieces[0]
    if len(pieces) > 1 or down is not None:
        whole = whole.new_empty(shape.numel(), (whole if down is None else down).shape[1])
        for *piece, down in pieces:
            for columns, up in zip(*(torch.split(part, AT_ONCE) for part in piece), strict=True):
                whole[columns] = up if down is None else up @ down
    return whole.reshape(*shape, -1).transpose(1, 2)


def _match_rows(vectors: Tensor, columns: Tensor, multiplicand: Multiplicand, rows: Tensor) -> Match | None:
    """Match each column to the row with the most similar products; return the columns proportional to these products.

    Return None if the first column is not proportional to the products of its row.
    """
    values, down = multiplicand
    products = values @ rows.mT
    if not bool(_fit_factors(vectors[:, :1], products[:, most_similar_rows(vectors[:, :1], products)])[1]):
        return None
    indices = most_similar_rows(vectors, products)
    factors, fits = _fit_factors(vectors, products[:, indices])
    up, factors = take_coordinates(rows.mT, indices[fits]).mT, factors[fits]
    return columns[fits], up if bool((factors == 1).all()) else up * factors[:, None], down


def most_similar_rows(vectors: Tensor, products: Tensor) -> Int[Tensor, " columns"]:
    """Return, for each column, the index of the row whose products have the direction nearest to it, up to sign."""
    directions = nn.functional.normalize(products, dim=0)
    return torch.cat([(part.mT @ directions).abs_().argmax(1) for part in torch.split(vectors, AT_ONCE, dim=1)])


def _fit_factors(vectors: Tensor, products: Tensor) -> tuple[Float[Tensor, " columns"], Bool[Tensor, " columns"]]:
    """Return each column's least-squares factor c, and True if the column is c times its product up to rounding."""
    # clamped so that a row of zeros gives 0, not NaN
    factors = (vectors * products).sum(0) / products.square().sum(0).clamp(min=torch.finfo(products.dtype).tiny)
    factors = torch.where((factors - 1).abs() < ONE, 1.0, factors)
    # the second term is the rounding from subtracting the bias, which is relative to all columns
    border = SAME * vectors.norm(dim=0) + torch.finfo(vectors.dtype).eps * vectors.norm()
    return factors, (vectors - factors * products).norm(dim=0) <= border


def take_coordinates(factor: Tensor, chosen: Int[Tensor, " some"]) -> Tensor:
    """Return the `chosen` coordinates of each head, as a view if they are consecutive, else as a copy."""
    first, count = int(chosen[0]), len(chosen)
    if torch.equal(chosen, torch.arange(first, first + count, device=chosen.device)):
        return factor[..., first : first + count]
    return factor[..., chosen]
