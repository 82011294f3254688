"""Read hand-written attention as a Call, and answer it in place of the module's own weighted sums."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from attnlens.errors import ModelError, UnreadableError
from attnlens.kernels import OWN
from attnlens.kernels.attention import attend
from attnlens.kernels.attention.rows import split_mask
from attnlens.models.trace.scores import (
    Provenance,
    Standins,
    TracedScores,
    begun,
    operands,
    product,
    tensors,
    weighted_sum,
)
from attnlens.records import Call

TOLERANCE = 1e-4  # largest relative difference between a prediction and the result of the model's own steps


@dataclass(eq=False)
class TracedSoftmax:
    """A softmax over keys, and the products that reach it."""

    logits: Tensor  # argument of the softmax
    carried: Mapping[TracedScores, Standins]  # products in the argument, with their stand-ins
    used: bool = False  # whether its weights have already summed up values

    def scores(self) -> TracedScores:
        """Return the one product of queries and keys in the softmax's argument.

        Added terms may contain products with positions, one side of which does not depend on the inputs. Raises
        UnreadableError if several products depend on the inputs on both sides, or if none of several does.
        """
        content = [scores for scores in self.carried if scores.content]
        if len(content) > 1:
            raise unread(f"its scores are a sum of {len(content)} products of queries and keys")
        if not content and len(self.carried) > 1:
            raise unread(f"none of the {len(self.carried)} products in its scores depends on its inputs on both sides")
        found = content[0] if content else next(iter(self.carried))
        if found.scaled_by_inputs:
            raise unread("the factor of its scores depends on its inputs")
        return found


def unread(reason: str) -> UnreadableError:
    """Build the error for hand-written attention that is left to the model."""
    return UnreadableError(reason, "The other sites stand; this one is left out.")


@dataclass(frozen=True)
class Affine:
    """Scores = factor · product + bias on the allowed pairs, (batch, heads, queries, keys), up to a term per query.

    The softmax ignores such a term.
    """

    factor: Tensor  # (heads,): the factor of the product
    allowed: Tensor | None  # which keys a query may see; None for all
    bias: Tensor | None  # the term added; None if there is none


def affine(signs: Tensor, zero: Tensor, scores: Tensor) -> Affine:
    """Find the affine map that gives `zero` for a product of 0 and `scores` for the product `signs`, (queries, keys).

    Both are (batch, heads, queries, keys). Raises UnreadableError if the factor differs between pairs of a head, or is
    0.
    """
    if bool(zero.isnan().any()):
        raise unread("what is added to its scores is not a number")
    allowed, bias = split_mask(zero)
    # pairs that no product changes are masked too: by a factor of 0, or by a number so large that scores are lost in it
    seen = (scores != zero) if allowed is None else allowed & (scores != zero)
    wanted = _centre(signs.to(zero), seen)
    gain = _centre(scores - zero, seen)
    factor = (gain * wanted).sum((0, 2, 3)) / wanted.square().sum((0, 2, 3))
    if not bool((factor.isfinite() & (factor != 0)).all()):
        raise unread("its scores do not depend on its queries and keys")
    rounding = (
        32 * torch.finfo(zero.dtype).eps * torch.where(seen, zero.abs() + scores.abs(), 0.0).amax(-1, keepdim=True)
    )
    if bool(((gain - factor.view(1, -1, 1, 1) * wanted).abs() > rounding).any()):
        raise unread("the factor of its scores is not the same for all pairs of tokens")
    return Affine(factor, None if bool(seen.all()) else seen, bias)


def check_moved(query: Tensor, key: Tensor, found: Affine, zero: Tensor, scores: Tensor) -> None:
    """Raise UnreadableError if the softmax's argument is not factor · ⟨query, key⟩ + bias for these queries and keys.

    They are not the model's queries and keys, and `scores` is the result of the model's own steps on them.
    """
    seen = torch.ones_like(zero, dtype=torch.bool) if found.allowed is None else found.allowed
    product = query.to(zero) @ key.to(zero).expand(-1, query.shape[1], -1, -1).transpose(-1, -2)
    predicted = _centre(found.factor.view(1, -1, 1, 1) * product, seen)
    moved = _centre(scores.to(zero) - zero, seen)
    size = predicted.norm() + torch.where(seen, zero, 0.0).norm()
    error = float((moved - predicted).norm() / size)
    if not error <= rounding_of(query.dtype):
        raise unread(f"its scores are no multiple of ⟨query, key⟩: other ones move them otherwise ({error:.1e})")


def rounding_of(dtype: torch.dtype) -> float:
    """Return the largest relative difference explained by rounding, for results that a module computes in this type."""
    return max(TOLERANCE, 8 * torch.finfo(dtype).eps)


def _centre(scores: Tensor, seen: Tensor) -> Tensor:
    """Centre scores over the keys each query sees, with 0 elsewhere; without centring if no query sees two keys."""
    kept = torch.where(seen, scores, 0.0)
    if bool((seen.sum(-1) < 2).all()):
        return kept
    return torch.where(seen, kept - kept.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1), 0.0)


Tokens = tuple[int, ...] | None
"""Axes of a module's first input except the last: sequences and tokens; None if it has no floating-point input."""


@dataclass(frozen=True)
class Lead:
    """The leading axes of queries, keys and scores; heads are one of them, or the inner part of the only one."""

    shape: tuple[int, ...]
    axis: int  # axis of the heads, where a single axis counts as (sequences, heads)
    heads: int

    @property
    def _whole(self) -> tuple[int, ...]:
        """The axes, with heads as an axis of their own."""
        return (self.shape[0] // self.heads, self.heads) if len(self.shape) == 1 else self.shape

    def like(self, shape: tuple[int, ...]) -> Lead:
        """Return the same axes, merged or separated like those of another tensor."""
        if self.axis != 1 or {len(shape), len(self.shape)} != {1, 2}:
            return self
        return Lead((math.prod(self._whole),) if len(shape) == 1 else self._whole, 1, self.heads)

    def split(self, tensor: Tensor) -> Tensor:
        """Reshape (leading axes, a, b) to (batch, heads, a, b); heads stay 1 if one entry serves all of them."""
        last = tensor.shape[-2:]
        if len(self.shape) == 1:
            return tensor.expand(*self.shape, *last).reshape(*self._whole, *last)
        tensor = tensor[(None,) * (len(self.shape) + 2 - tensor.dim())]
        one = tensor.shape[self.axis]
        wanted = [one if axis == self.axis else size for axis, size in enumerate(self.shape)]
        return tensor.expand(*wanted, *last).movedim(self.axis, -3).reshape(-1, one, *last)

    def back(self, output: Tensor) -> Tensor:
        """Reshape (batch, queries, heads, value_dim) to (…, queries, value_dim), with the original order of axes."""
        others = [size for axis, size in enumerate(self._whole) if axis != self.axis]
        found = output.transpose(1, 2).reshape(*others, self.heads, *output.shape[1::2])
        return found.movedim(-3, self.axis).reshape(*self.shape, *found.shape[-2:])


def lead_of(shape: tuple[int, ...], queries: int, keys: int, tokens: Tokens) -> Lead:
    """Determine the axes of scores with these numbers of queries and keys, in a module called with these tokens.

    There are as many heads as queries per token, or as keys per token if a module pools its queries. Four axes are
    (sequences, heads, queries, keys), as everywhere in transformers. Raises UnreadableError if the axis of the heads is
    ambiguous.
    """
    total, count = math.prod(shape), math.prod(tokens or (0,))
    counts = [total * each // count for each in (queries, keys) if count and total * each % count == 0]
    if len(shape) == 1:
        if not counts or total * queries % (count or 1) or not counts[0] or shape[0] % counts[0]:
            raise unread(f"its heads can't be told from its sequences: queries have the axes {(*shape, queries)}")
        return Lead(shape, 1, counts[0])
    # Exclude the first axis of a lone sequence: tokens cannot be counted if channels come before them (SqueezeBERT).
    lone = {0} if tokens and tokens[0] == shape[0] == 1 else set[int]()
    fitting = [axis for axis, size in enumerate(shape) if size in counts and axis not in lone]
    if 1 in fitting or (len(shape) == 2 and not fitting):
        return Lead(shape, 1, shape[1])
    if len(fitting) != 1 or len(shape) == 2:
        raise unread(f"its heads can't be told from its windows: queries have the axes {(*shape, queries)}")
    return Lead(shape, fitting[0], shape[fitting[0]])


def traced_call(softmax: TracedSoftmax, value: Tensor, tokens: Tokens, module: nn.Module) -> tuple[Call, Lead]:
    """Return queries, keys, scale, mask and bias of a softmax whose weights sum up `value`, (…, keys, value_dim).

    `tokens` are those that `module` was called with. Raises UnreadableError if the softmax's argument is not factor ·
    ⟨query, key⟩ plus a term that does not depend on their product.
    """
    scores = softmax.scores()
    product, standins = scores.product, softmax.carried[scores]
    queries, keys = product.left.shape[-2], product.right.shape[-2]
    shape = (*product.lead, queries, keys)
    if tuple(softmax.logits.shape[-2:]) != shape[-2:] or softmax.logits.numel() != torch.Size(shape).numel():
        raise unread(f"its softmax has the axes {tuple(softmax.logits.shape)}, and the product in it {shape}")
    lead = lead_of(product.lead, queries, keys, tokens)

    def of_pairs(standin: Tensor) -> Tensor:
        return lead.split(standin.reshape(shape))

    zero = of_pairs(standins.zero)
    found = affine(scores.signs, zero, of_pairs(standins.signs))
    if scores.moved is not None and standins.moved is not None:
        others = [lead.split(part) for part in scores.moved]
        check_moved(others[0], others[1], found, zero, of_pairs(standins.moved))
    query, scale = lead.split(product.left), float(found.factor[0].detach())
    if bool(((found.factor - scale).abs() > 32 * torch.finfo(found.factor.dtype).eps * abs(scale)).any()):
        query, scale = query * found.factor.view(1, -1, 1, 1).to(query.dtype), 1.0
    key, value = _pair_heads(lead.split(product.right), lead.like(value.shape[:-2]).split(value))
    wide = torch.promote_types(query.dtype, value.dtype)  # GPT-J converts its queries and keys to float32
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    call = Call(
        query=query,
        key=key,
        value=value,
        scale=scale,
        allowed=found.allowed,
        bias=found.bias,
        module=module,
        traced=True,
        relative=len(softmax.carried) > 1,
    )
    return call, lead


def fused_call(given: Mapping[str, Any], tokens: Tokens, module: nn.Module) -> tuple[Call, Lead]:
    """Convert the arguments of torch's scaled_dot_product_attention, called by a module itself, to a Call."""
    query, key, mask, scale = given["query"], given["key"], given.get("attn_mask"), given.get("scale")
    lead = lead_of(tuple(query.shape[:-2]), query.shape[-2], key.shape[-2], tokens)
    if mask is not None:
        mask = lead.split(mask) if mask.dim() > 2 else mask[None, None]
        mask = mask.expand(-1, -1, query.shape[-2], key.shape[-2])
    allowed, bias = split_mask(mask)
    if allowed is not None and bool(allowed.all()):
        allowed = None
    key, value = _pair_heads(*(_of_sequences(lead, part) for part in (key, given["value"])))
    call = Call(
        query=lead.split(query),
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        allowed=allowed,
        causal=bool(given.get("is_causal")),
        bias=bias,
        dropout=given.get("dropout_p") or 0.0,
        module=module,
        traced=True,
    )
    return call, lead


def _of_sequences(lead: Lead, part: Tensor) -> Tensor:
    """Return keys or values as (batch, kv_heads, keys, size); under GQA they have fewer heads than the queries."""
    if part.dim() == 4 and lead.axis == 1 and part.shape[0] == lead.shape[0]:
        return part
    return lead.split(part)


def _pair_heads(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the heads of keys or of values, so that both have equally many."""
    if key.shape[1] == value.shape[1]:
        return key, value
    heads = max(key.shape[1], value.shape[1])
    return key.repeat_interleave(heads // key.shape[1], dim=1), value.repeat_interleave(heads // value.shape[1], dim=1)


SOFTMAXES = frozenset({torch.softmax, F.softmax, Tensor.softmax})
FUSED = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Parameters of torch's fused attention, in order."""

Refused = dict[nn.Module, str]
"""Unreadable attention that was found: maps the module that computes it to the reason."""


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove these hooks at the end of the `with`."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def tracing(
    model: nn.Module,
    answer: Callable[[Call], Tensor],
    *,
    modules: Collection[nn.Module] | None = None,
    content: Collection[Tensor] | None = None,
    prove: bool = False,
    shown: Callable[[nn.Module, Tensor], None] | None = None,
) -> Iterator[Refused]:
    """Let `answer` replace each weighted sum of hand-written attention in `model` inside the `with`.

    Only `modules` are traced, all if None. `content` are the tensors that carry the model's content; None stands for
    the model's inputs except masks and positions. With `prove` the model continues with its own sums, and each is
    compared with the one computed from the traced queries, keys and values; the softmax's argument is also compared for
    other queries and keys. Attention that does not agree is refused and left to the model; in a module of `modules`,
    which was read before, it raises a ModelError. `shown` is called with the module and the attention weights that the
    model itself computes, (batch, heads, queries, keys).
    """
    tracer = _Tracer(answer, None if modules is None else set(modules), prove=prove)
    tracer.shown = shown
    hooks = [part.register_forward_pre_hook(tracer.entered(content), with_kwargs=True) for part in model.modules()]
    hooks += [part.register_forward_hook(tracer.left, always_call=True) for part in model.modules()]
    with hooked(hooks), tracer:
        yield tracer.refused


class _Tracer(TorchFunctionMode):
    def __init__(self, answer: Callable[[Call], Tensor], modules: set[nn.Module] | None, *, prove: bool) -> None:
        super().__init__()
        self.answer, self.modules, self.prove = answer, modules, prove
        self.shown: Callable[[nn.Module, Tensor], None] | None = None
        self.refused: Refused = {}
        self.known = Provenance()
        self.running: list[tuple[nn.Module, Tokens]] = []
        self.constants: set[int] = set()

    def entered(self, content: Collection[Tensor] | None) -> Callable[..., None]:
        """Build the hook that runs when a module starts; for the outermost module it records the inputs."""

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with torch._C.DisableTorchFunction():
                if not self.running:
                    state = (*module.parameters(), *module.buffers())
                    self.constants = {tensor.untyped_storage().data_ptr() for tensor in state}
                    begun = _content(module, args, kwargs) if content is None else content
                    self.known.inputs.update(dict.fromkeys(begun, True))
                first = next((tensor for tensor in tensors((args, kwargs)) if tensor.is_floating_point()), None)
                self.running.append((module, None if first is None else tuple(first.shape[:-1])))

        return enter

    def left(self, module: nn.Module, *_: Any) -> None:
        """Remove the module that ends from the running modules (hook)."""
        self.running.pop()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.multi_head_attention_forward:
            with self:  # its steps are traced like those of any other module
                return _plain_multi_head(*args, **kwargs)
        if self.modules is not None and not any(module in self.modules for module, _ in self.running):
            return self.known.call(function, args, kwargs)
        if function is F.scaled_dot_product_attention:
            return self._fused(args, kwargs)
        if function in SOFTMAXES:
            return self._softmax(function, args, kwargs)
        pair = operands(function, args, kwargs)
        if pair is None:
            return self.known.call(function, args, kwargs)
        weighing = next((part for part in pair if part in self.known.weights), None)
        if weighing is not None:
            return self._sum(function, args, kwargs, weighing)
        return self._product(function, args, kwargs, pair)

    def _product(self, function: Any, args: Any, kwargs: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
        """Compute a product; it starts new scores unless one side is a weight of the model."""
        # a weight offloaded to disk has a different address in every pass, but is still a Parameter
        constant = any(
            isinstance(part, nn.Parameter) or part.untyped_storage().data_ptr() in self.constants for part in pair
        )
        if constant and function is torch.einsum:  # the einsum may mix heads
            return self.known.call(function, args, kwargs)  # type: ignore[no-any-return]  # a product is a tensor
        result: Tensor = function(*args, **kwargs)
        dependent = [part in self.known.inputs for part in pair]
        if any(dependent):
            self.known.inputs[result] = True
        if constant:
            return result
        found = product(function, args, kwargs)
        if found is not None and result.is_floating_point():
            running = tuple(module for module, _ in self.running)
            scores, standins = begun(found, result, running, content=all(dependent), prove=self.prove)
            self.known.scores[result] = {scores: standins}
        return result

    def _softmax(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        result: Tensor = function(*args, **kwargs)
        logits = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if logits in self.known.inputs:
            self.known.inputs[result] = True
        # without scores, the softmax is not over keys but over experts or classes
        if dim in (-1, logits.dim() - 1) and (carried := self.known.scores.get(logits)):
            self.known.weights[result] = TracedSoftmax(logits, carried)
        return result

    def _sum(self, function: Any, args: Any, kwargs: Any, weights: Tensor) -> Tensor:
        """Compute a product of attention weights with values: here a site is complete, and is answered."""
        softmax = self.known.weights[weights]
        scores = next(iter(softmax.carried))
        shared = [pair for pair, module in zip(self.running, scores.modules, strict=False) if pair[0] is module]
        found = weighted_sum(function, args, kwargs, weights)

        def read(module: nn.Module, tokens: Tokens) -> tuple[Call, Lead]:
            if found is None or softmax.used:
                raise unread("its attention weights do not sum up values once and for all")
            softmax.used = True
            call, lead = traced_call(softmax, found.value, tokens, module)
            of_sum = lead.like(weights.shape[:-2])
            if self.shown is not None:
                self.shown(module, of_sum.split(weights))
            return call, of_sum

        own = partial(function, *args, **kwargs)
        return self._site(shared, read, own, weights.dtype, found.arranged if found is not None else _identity)

    def _fused(self, args: Any, kwargs: Any) -> Tensor:
        """Answer attention that the module itself computes with torch's fused function."""
        given = dict(zip(FUSED, args, strict=False)) | kwargs

        def read(module: nn.Module, tokens: Tokens) -> tuple[Call, Lead]:
            call, lead = fused_call(given, tokens, module)
            if self.shown is not None:
                # the weights are the output for the identity matrix as values
                key = given["key"]
                unit = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)
                self.shown(module, lead.split(F.scaled_dot_product_attention(**{**given, "value": unit})))
            return call, lead

        own = partial(F.scaled_dot_product_attention, **given)
        return self._site(self.running, read, own, given["value"].dtype, _identity)

    def _site(
        self,
        owners: list[tuple[nn.Module, Tokens]],
        read: Callable[[nn.Module, Tokens], tuple[Call, Lead]],
        own: Callable[[], Tensor],
        dtype: torch.dtype,
        arranged: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Compute the result of one site in `dtype`: the answer, or the model's `own`; the last of `owners` owns it."""
        owner = owners[-1][0] if owners else None
        if owner is None or owner in self.refused or (self.modules is not None and owner not in self.modules):
            result = own()
        else:
            result = self._answer_site(*owners[-1], read, own, arranged).to(dtype)
        self.known.inputs[result] = True
        return result

    def _answer_site(
        self,
        owner: nn.Module,
        tokens: Tokens,
        read: Callable[[nn.Module, Tokens], tuple[Call, Lead]],
        own: Callable[[], Tensor],
        arranged: Callable[[Tensor], Tensor],
    ) -> Tensor:
        try:
            call, lead = read(owner, tokens)
            sighted = arranged(lead.back(_sees_any_key(call)))
            if not self.prove:
                answered = arranged(lead.back(self.answer(call)))
                # models differ in what they return for a query that sees no key
                return answered if bool(sighted.all()) else torch.where(sighted, answered, own())
            result = own()
            _check_output(arranged(lead.back(attend(call, OWN, "eager"))), result, sighted)
        except UnreadableError as refusal:
            if self.modules is not None:  # it was read before: leaving it to the model now would go unnoticed
                raise ModelError(
                    f"A {type(owner).__name__} can't be read on these inputs: {refusal.problem}.",
                    "Give inputs of the same kind as those that its sites were found on.",
                ) from None
            self.refused[owner] = refusal.problem
            return own()
        self.answer(call)
        return result


def _identity(output: Tensor) -> Tensor:
    return output


def _sees_any_key(call: Call) -> Tensor:
    """Return which queries see any key, (batch, queries, heads, 1)."""
    batch, heads, queries, _ = call.query.shape
    seen = call.visible()
    some = torch.ones(1, 1, queries, dtype=torch.bool, device=call.query.device) if seen is None else seen.any(-1)
    return some.expand(batch, heads, queries).transpose(1, 2)[..., None]


def _check_output(found: Tensor, own: Tensor, sighted: Tensor) -> None:
    """Raise UnreadableError if the output computed from the traced attention is not the module's own."""
    seen, expected = (torch.where(sighted, part, 0.0).double() for part in (found, own))
    error = float((seen - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float64).tiny))
    if not error <= rounding_of(own.dtype):
        raise unread(f"its output is not that of softmax(scores) on its values (relative difference {error:.1e})")


def _content(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among a module's arguments that carry content: not its masks, nor positions."""
    names = list(inspect.signature(module.forward).parameters)
    given = dict(zip(names, args, strict=False)) | kwargs
    return [
        tensor
        for name, value in given.items()
        if not ("mask" in name or "position" in name)
        for tensor in tensors(value)
    ]


_plain_multi_head = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    vars(F) | {"has_torch_function": lambda _arguments: False},  # otherwise it would call the mode again, without end
    argdefs=F.multi_head_attention_forward.__defaults__,
)
"""torch's multi_head_attention_forward, without its dispatch to function modes."""
_plain_multi_head.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__
