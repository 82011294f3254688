"""Convert hand-written attention of a running model to Calls, and replace its results."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

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
    MATMULS,
    NOT_FINITE,
    Arguments,
    FunctionCall,
    Keywords,
    Provenance,
    TracedSoftmax,
    as_product,
    multiply_einsum,
    operands,
    start_scores,
    tensors,
    unreadable,
)
from attnlens.records import Call

TOLERANCE = 1e-4  # relative: above the float32 rounding of a long sum, far below the effect of a wrong query or mask
ROUNDINGS = 32  # two values that were computed from the same number in a few steps can differ by this many roundings


def fit_affine(signs: Tensor, zero: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Fit scores = factor · ⟨query, key⟩ + bias, up to a term per query; return factor, visible pairs and bias.

    `zero` contains the scores if all products ⟨query, key⟩ are 0, and `scores` contains the scores if the products are
    `signs`, (queries, keys). The factor has the shape (heads,). Raises UnreadableError if `zero` contains NaN, or if
    the factor is 0, is not finite or differs within a head.
    """
    if bool(zero.isnan().any()):
        raise unreadable("NaN is added to its scores")
    allowed, bias = split_mask(zero)
    # a factor of 0, or a bias so large that rounding removes the product, also masks a pair
    visible = (scores != zero) if allowed is None else allowed & (scores != zero)
    products = _centre(signs.to(zero), visible)
    gain = _centre(scores - zero, visible)
    factor = (gain * products).sum((0, 2, 3)) / products.square().sum((0, 2, 3))
    if not bool((factor.isfinite() & (factor != 0)).all()):
        raise unreadable("its scores do not depend on its queries and keys")
    size = torch.where(visible, zero.abs() + scores.abs(), 0.0).amax(-1, keepdim=True)
    rounding = ROUNDINGS * torch.finfo(zero.dtype).eps * size
    if bool(((gain - factor.view(1, -1, 1, 1) * products).abs() > rounding).any()):
        raise unreadable("the factor of its scores is not the same for all pairs of tokens")
    return factor, visible, bias


def check_random_scores(
    query: Tensor, key: Tensor, factor: Tensor, visible: Tensor, zero: Tensor, scores: Tensor
) -> None:
    """Raise UnreadableError unless `scores` − `zero` is factor · ⟨query, key⟩, up to rounding and a term per query."""
    product = query.to(zero) @ key.to(zero).expand(-1, query.shape[1], -1, -1).transpose(-1, -2)
    predicted = _centre(factor.view(1, -1, 1, 1) * product, visible)
    moved = _centre(scores.to(zero) - zero, visible)
    size = predicted.norm() + torch.where(visible, zero, 0.0).norm()
    error = float((moved - predicted).norm() / size)
    if math.isnan(error):
        raise unreadable(f"its scores are {NOT_FINITE}")
    if error > rounding_limit(query.dtype):
        problem = "its scores are not a multiple of ⟨query, key⟩: for random queries and keys"
        raise unreadable(f"{problem} the relative difference is {error:.1e}")


def rounding_limit(dtype: torch.dtype) -> float:
    """Return the largest relative difference between two results of type `dtype` that rounding can explain."""
    return max(TOLERANCE, 8 * torch.finfo(dtype).eps)  # 8 roundings: a few steps in half precision


def _centre(scores: Tensor, visible: Tensor) -> Tensor:
    """Set masked scores to 0 and, if any query sees two or more keys, subtract each query's mean over visible keys."""
    masked = torch.where(visible, scores, 0.0)
    if bool((visible.sum(-1) < 2).all()):
        return masked
    mean = masked.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(visible, masked - mean, 0.0)


Tokens = tuple[int, ...] | None
"""Shape of a module's first floating-point input without its last axis; None if the module has no such input."""


@dataclass(frozen=True)
class Lead:
    """Leading axes (all but the last two) of queries, keys and scores; heads may share the batch axis."""

    shape: tuple[int, ...]  # sizes of the leading axes
    axis: int  # axis of the heads; 1 if a single axis merges batch and heads
    heads: int  # number of heads

    @property
    def _whole(self) -> tuple[int, ...]:
        """Sizes of the leading axes, with a single axis split into (batch, heads)."""
        return (self.shape[0] // self.heads, self.heads) if len(self.shape) == 1 else self.shape

    def like(self, shape: tuple[int, ...]) -> Lead:
        """Return this Lead, with batch and heads merged or split to fit a tensor with the leading axes `shape`."""
        if self.axis != 1 or {len(shape), len(self.shape)} != {1, 2}:
            return self
        return Lead((math.prod(self._whole),) if len(shape) == 1 else self._whole, 1, self.heads)

    def split(self, tensor: Tensor) -> Tensor:
        """Reshape (leading axes, a, b) to (batch, heads, a, b), or to (batch, 1, a, b) if heads share the tensor."""
        last = tensor.shape[-2:]
        if len(self.shape) == 1:
            return tensor.expand(*self.shape, *last).reshape(*self._whole, *last)
        tensor = tensor[(None,) * (len(self.shape) + 2 - tensor.dim())]
        heads = tensor.shape[self.axis]
        sizes = [heads if axis == self.axis else size for axis, size in enumerate(self.shape)]
        return tensor.expand(*sizes, *last).movedim(self.axis, -3).reshape(-1, heads, *last)

    def back(self, output: Tensor) -> Tensor:
        """Reshape (batch, queries, heads, value_dim) to (leading axes, queries, value_dim)."""
        others = [size for axis, size in enumerate(self._whole) if axis != self.axis]
        separated = output.transpose(1, 2).reshape(*others, self.heads, *output.shape[1::2])
        return separated.movedim(-3, self.axis).reshape(*self.shape, *separated.shape[-2:])


def find_lead(shape: tuple[int, ...], queries: int, keys: int, tokens: Tokens) -> Lead:
    """Find the axis of the heads among the leading axes `shape` of scores; raise UnreadableError if it is ambiguous.

    The number of heads is the number of queries per token or, if the module pools its queries, of keys per token.
    """
    total, count, axes = math.prod(shape), math.prod(tokens or (0,)), f"queries have leading axes {(*shape, queries)}"
    counts = [total * rows // count for rows in (queries, keys) if count and total * rows % count == 0]
    if len(shape) == 1:
        if not counts or total * queries % (count or 1) or not counts[0] or shape[0] % counts[0]:
            raise unreadable(f"its heads can't be distinguished from its sequences: {axes}")
        return Lead(shape, 1, counts[0])
    # exclude an axis of one sequence: channels that precede tokens are counted as tokens (SqueezeBERT)
    lone = {0} if tokens and tokens[0] == shape[0] == 1 else set[int]()
    fitting = [axis for axis, size in enumerate(shape) if size in counts and axis not in lone]
    if 1 in fitting or (len(shape) == 2 and not fitting):
        return Lead(shape, 1, shape[1])
    if len(fitting) != 1 or len(shape) == 2:
        raise unreadable(f"its heads can't be distinguished from its windows: {axes}")
    return Lead(shape, fitting[0], shape[fitting[0]])


def traced_call(softmax: TracedSoftmax, value: Tensor, tokens: Tokens, module: nn.Module) -> tuple[Call, Lead]:
    """Return the Call and Lead of a softmax in `module` whose weights multiply `value`, (…, keys, value_dim).

    Raises UnreadableError unless the scores are factor · ⟨query, key⟩ plus a term that does not depend on this product.
    """
    scores = softmax.scores()
    product = scores.product
    queries, keys = product.left.shape[-2], product.right.shape[-2]
    shape = (*product.lead, queries, keys)
    if tuple(softmax.logits.shape[-2:]) != shape[-2:] or softmax.logits.numel() != torch.Size(shape).numel():
        shapes = f"the shape {tuple(softmax.logits.shape)}, but its product of queries and keys has {shape}"
        raise unreadable(f"its softmax has {shapes}")
    lead = find_lead(product.lead, queries, keys, tokens)
    zero, signs, *moved = (lead.split(standin.reshape(shape)) for standin in softmax.carried[scores])
    factor, visible, bias = fit_affine(scores.signs, zero, signs)
    if moved:
        moved_query, moved_key = map(lead.split, scores.moved)
        check_random_scores(moved_query, moved_key, factor, visible, zero, *moved)
    query, scale = lead.split(product.left), float(factor[0].detach())
    # a Call has one scale: different factors of heads become part of the queries
    if bool(((factor - scale).abs() > ROUNDINGS * torch.finfo(factor.dtype).eps * abs(scale)).any()):
        query, scale = query * factor.view(1, -1, 1, 1).to(query.dtype), 1.0
    key, value = pair_heads(lead.split(product.right), lead.like(value.shape[:-2]).split(value))
    wide = torch.promote_types(query.dtype, value.dtype)  # GPT-J converts its queries and keys to float32
    vectors, relative = (query.to(wide), key.to(wide), value.to(wide)), len(softmax.carried) > 1
    allowed = None if bool(visible.all()) else visible
    return Call(*vectors, scale, allowed, bias=bias, module=module, traced=True, relative=relative), lead


def fused_call(arguments: Keywords, tokens: Tokens, module: nn.Module) -> tuple[Call, Lead]:
    """Convert a module's arguments of torch's scaled_dot_product_attention to a Call; also return its Lead."""
    query, key, mask, scale = arguments["query"], arguments["key"], arguments.get("attn_mask"), arguments.get("scale")
    lead = find_lead(tuple(query.shape[:-2]), query.shape[-2], key.shape[-2], tokens)
    if mask is not None:
        mask = lead.split(mask) if mask.dim() > 2 else mask[None, None]
        mask = mask.expand(-1, -1, query.shape[-2], key.shape[-2])
    allowed, bias = split_mask(mask)
    if allowed is not None and bool(allowed.all()):
        allowed = None
    # under GQA, keys and values have fewer heads than the queries, and thus other leading axes
    with_batch = [
        part if part.dim() == 4 and lead.axis == 1 and part.shape[0] == lead.shape[0] else lead.split(part)
        for part in (key, arguments["value"])
    ]
    key, value = pair_heads(*with_batch)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    causal, dropout = bool(arguments.get("is_causal")), arguments.get("dropout_p") or 0.0
    options: Keywords = {"bias": bias, "dropout": dropout, "module": module, "traced": True}
    return Call(lead.split(query), key, value, scale, allowed, causal, **options), lead


def pair_heads(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the heads of the keys or of the values so that both have the same number of heads."""
    if key.shape[1] == value.shape[1]:
        return key, value
    heads = max(key.shape[1], value.shape[1])
    return key.repeat_interleave(heads // key.shape[1], dim=1), value.repeat_interleave(heads // value.shape[1], dim=1)


SOFTMAXES = frozenset({torch.softmax, F.softmax, Tensor.softmax})
FUSED = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # parameters of torch's fused attention

Refused = dict[nn.Module, str]  # reason why a module's attention is unreadable, keyed by module
RunningModule = tuple[nn.Module, Tokens]  # a module that is running, and the shape of its input (see Tokens)
SiteReader = Callable[[nn.Module, Tokens], tuple[Call, Lead]]


@contextmanager
def remove_hooks(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove these hooks at the end of the `with`."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def trace_attention(
    model: nn.Module,
    answer: Callable[[Call], Tensor],
    *,
    modules: Collection[nn.Module] | None = None,
    content: Collection[Tensor] | None = None,
    prove: bool = False,
    on_weights: Callable[[nn.Module, Tensor], None] | None = None,
) -> Iterator[Refused]:
    """Inside the `with`, replace each weighted sum of hand-written attention in `model` with the result of `answer`.

    `modules` contains modules whose attention was readable in an earlier pass: only these are traced, and ModelError is
    raised if the attention of any of them is now unreadable. If `modules` is None, all modules are traced, the model
    computes unreadable attention itself, and the yielded dict maps each such module to the reason. `content` contains
    the tensors on which queries and keys depend, by default the model's inputs except masks and positions.
    With `prove`, the model uses its own results, and attention whose recomputed result differs is also unreadable.
    `on_weights` is called with each module and its attention weights, (batch, heads, queries, keys).
    """
    tracer = _Tracer(answer, None if modules is None else set(modules), content, prove, on_weights)
    parts = list(model.modules())
    hooks = [part.register_forward_pre_hook(tracer.enter, with_kwargs=True) for part in parts]
    hooks += [part.register_forward_hook(tracer.leave, always_call=True) for part in parts]
    with remove_hooks(hooks), tracer:
        yield tracer.refused


@dataclass(eq=False)
class _Tracer(TorchFunctionMode):
    answer: Callable[[Call], Tensor]
    modules: set[nn.Module] | None
    content: Collection[Tensor] | None
    prove: bool
    on_weights: Callable[[nn.Module, Tensor], None] | None
    refused: Refused = field(default_factory=dict)
    known: Provenance = field(default_factory=Provenance)
    running: list[RunningModule] = field(default_factory=list)  # outermost first
    constants: set[int] = field(default_factory=set)  # addresses of the parameters and buffers

    def enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Add a module to the running modules (forward pre-hook); record the inputs of the outermost module."""
        with torch._C.DisableTorchFunction():  # private: the public class does not disable modes, such as this tracer
            if not self.running:
                state = (*module.parameters(), *module.buffers())
                self.constants = {tensor.untyped_storage().data_ptr() for tensor in state}
                arguments = call_arguments(module, args, kwargs).items()
                content = [value for name, value in arguments if "mask" not in name and "position" not in name]
                self.known.inputs.update(dict.fromkeys(tensors(self.content or content), True))
            first = next((tensor for tensor in tensors((args, kwargs)) if tensor.is_floating_point()), None)
            self.running.append((module, None if first is None else tuple(first.shape[:-1])))

    def leave(self, *_: object) -> None:
        """Remove the innermost module, which has ended, from the running modules (forward hook)."""
        self.running.pop()

    def __torch_function__(
        self, function: Callable[..., object], _types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        call = FunctionCall(function, args, kwargs or {})
        if function is F.multi_head_attention_forward:
            with self:  # trace the steps of this function
                return _plain_multi_head(*args, **call.kwargs)
        if self.modules is not None and not any(module in self.modules for module, _ in self.running):
            return self.known.run(call)
        if function in SOFTMAXES:
            return self._trace_softmax(call)
        if function is F.scaled_dot_product_attention:
            result = self._answer_fused(call)
        else:
            pair = operands(call)
            if pair is None:
                return self.known.run(call)
            # a weight offloaded to disk has a different address in every pass, but is still a Parameter
            constant = any(
                isinstance(part, nn.Parameter) or part.untyped_storage().data_ptr() in self.constants for part in pair
            )
            weights = next((part for part in pair if part in self.known.weights), None)
            if constant and weights is None and function is torch.einsum:  # the einsum can mix heads
                return self.known.run(call)
            if function is torch.einsum and not constant:
                with self:
                    product = multiply_einsum(call, self.known.weights)
                if product is not None:
                    return product
            if weights is None:
                return self._trace_product(call, pair, constant=constant)
            is_sum = call.function in MATMULS and pair[0] is weights and pair[1].dim() > 1
            result = self._answer_sum(call, weights, pair[1] if is_sum else None)
        self.known.inputs[result] = True
        return result

    def _trace_product(self, call: FunctionCall, pair: tuple[Tensor, Tensor], *, constant: bool) -> Tensor:
        """Compute a product, and trace it as scores unless a factor is a parameter or a buffer (`constant`)."""
        result: Tensor = call.run()
        dependent = [part in self.known.inputs for part in pair]
        if any(dependent):
            self.known.inputs[result] = True
        product = None if constant else as_product(call, *pair)
        if product is not None and result.is_floating_point():
            running = tuple(module for module, _ in self.running)
            scores, standins = start_scores(product, result, running, content=all(dependent), prove=self.prove)
            self.known.scores[result] = {scores: standins}
        return result

    def _trace_softmax(self, call: FunctionCall) -> Tensor:
        result: Tensor = call.run()
        args, kwargs = call.args, call.kwargs
        logits = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if logits in self.known.inputs:
            self.known.inputs[result] = True
        # a softmax without traced scores is over experts or classes, not over keys
        if dim in (-1, logits.dim() - 1) and (carried := self.known.scores.get(logits)):
            self.known.weights[result] = TracedSoftmax(logits, carried)
        return result

    def _answer_sum(self, call: FunctionCall, weights: Tensor, values: Tensor | None) -> Tensor:
        """Return the result of `answer` for `weights` · `values`. For any other use of `weights`, `values` is None."""
        softmax = self.known.weights[weights]
        scores = next(iter(softmax.carried))
        shared = [pair for pair, module in zip(self.running, scores.modules, strict=False) if pair[0] is module]

        def read(module: nn.Module, tokens: Tokens) -> tuple[Call, Lead]:
            if values is None or softmax.used:
                raise unreadable("its attention weights are not applied to the values in a single product")
            softmax.used = True
            attention, lead = traced_call(softmax, values, tokens, module)
            lead = lead.like(weights.shape[:-2])
            if self.on_weights is not None:
                self.on_weights(module, lead.split(weights))
            return attention, lead

        return self._answer_site(shared, read, call.run, weights.dtype)

    def _answer_fused(self, call: FunctionCall) -> Tensor:
        """Return the result of `answer` for a module's call of torch's scaled_dot_product_attention."""
        arguments = dict(zip(FUSED, call.args, strict=False)) | call.kwargs

        def read(module: nn.Module, tokens: Tokens) -> tuple[Call, Lead]:
            attention, lead = fused_call(arguments, tokens, module)
            if self.on_weights is not None:
                key = arguments["key"]  # if the values are the identity matrix, the output is the weights
                unit = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)
                self.on_weights(module, lead.split(F.scaled_dot_product_attention(**{**arguments, "value": unit})))
            return attention, lead

        return self._answer_site(self.running, read, call.run, arguments["value"].dtype)

    def _answer_site(
        self, owners: list[RunningModule], read: SiteReader, original: Callable[[], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Return the result of `answer` for the innermost module of `owners`.

        Return `original()` if `prove`, if `owners` is empty, or if the module's attention is unreadable or not traced.
        Raises ModelError if the module is in `modules` and its attention is unreadable.
        """
        owner, tokens = owners[-1] if owners else (None, None)
        if owner is None or owner in self.refused or (self.modules is not None and owner not in self.modules):
            return original()

        try:
            call, lead = read(owner, tokens)
            visible = call.visible()
            sees = call.query.new_ones(1, dtype=torch.bool) if visible is None else visible.any(-1)
            sees_keys = lead.back(sees.expand(*call.query.shape[:3]).transpose(1, 2)[..., None])
            if not self.prove:
                answer = lead.back(self.answer(call)).to(dtype)
                # for a query that sees no key, models return different values
                return answer if bool(sees_keys.all()) else torch.where(sees_keys, answer, original())
            result = original()
            checked = result.isfinite() & sees_keys  # heads with NaN do not prevent the check of other heads
            if not bool(checked.any()):
                raise unreadable(f"its outputs are {NOT_FINITE}")
            outputs = lead.back(attend(call, OWN, "eager")), result
            actual, expected = (part[checked].double() for part in outputs)
            error = float((actual - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float64).tiny))
            if not error <= rounding_limit(result.dtype):  # `not <=` also refuses NaN
                raise unreadable(f"its output differs from softmax(scores) · values (relative difference {error:.1e})")
        except UnreadableError as refusal:
            if self.modules is not None:  # otherwise a site to be replaced would silently keep the model's attention
                problem = f"{type(owner).__name__} can't be traced on these inputs: {refusal.problem}."
                raise ModelError(problem, "Give inputs of the same kind as in the first forward pass.") from None
            self.refused[owner] = refusal.problem
            return original()
        self.answer(call)
        return result


def call_arguments(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Keywords:
    """Return the arguments of a module's call, keyed by parameter name."""
    positional = list(inspect.signature(module.forward).parameters)
    return dict(zip(positional, args, strict=False)) | kwargs


_plain_multi_head = types.FunctionType(  # a copy of torch's function that does not dispatch to function modes
    F.multi_head_attention_forward.__code__,
    vars(F) | {"has_torch_function": lambda _arguments: False},  # prevents an infinite recursion
    argdefs=F.multi_head_attention_forward.__defaults__,
)
_plain_multi_head.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__
