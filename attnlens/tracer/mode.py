"""Answers attention that modules compute by hand, in the place of their own weighted sums."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnlens.attention import attend
from attnlens.errors import ModelError, UnreadableError
from attnlens.kernels import OWN
from attnlens.records import Call
from attnlens.tracer.call import Lead, Tokens, TracedSoftmax, fused_call, rounding_of, traced_call, unread
from attnlens.tracer.scores import Provenance, begun, operands, product, tensors, weighted_sum

SOFTMAXES = frozenset({torch.softmax, F.softmax, Tensor.softmax})
FUSED = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""The arguments of torch's fused attention, in their order."""

Refused = dict[nn.Module, str]
"""Attention that was found and can't be read: the module that computes it → why."""


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
    """Inside the block `answer` takes the place of each weighted sum of hand-written attention in `model`.

    Only that of `modules` is looked at, None being all. `content` are the tensors that carry what the model is about;
    None stands for what it is called with, but masks and positions. With `prove` the model goes on with its own sums,
    and each is held against what follows from the traced queries, keys and values; so is the softmax's argument for
    other queries and keys. What doesn't agree is refused, and left to the model; of `modules`, which were read before,
    it is a ModelError. `shown` is given the attention weights that the model itself computes, (batch, heads, queries,
    keys), and the module whose they are.
    """
    tracer = _Tracer(answer, None if modules is None else set(modules), prove=prove)
    tracer.shown = shown
    hooks = [part.register_forward_pre_hook(tracer.entered(content), with_kwargs=True) for part in model.modules()]
    hooks += [part.register_forward_hook(tracer.left, always_call=True) for part in model.modules()]
    try:
        with tracer:
            yield tracer.refused
    finally:
        for hook in hooks:
            hook.remove()


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
        """The hook for a module that begins: at the outermost one the inputs are noted."""

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with torch._C.DisableTorchFunction():
                if not self.running:
                    held = (*module.parameters(), *module.buffers())
                    self.constants = {tensor.untyped_storage().data_ptr() for tensor in held}
                    begun = _content(module, args, kwargs) if content is None else content
                    self.known.inputs.update(dict.fromkeys(begun, True))
                first = next((tensor for tensor in tensors((args, kwargs)) if tensor.is_floating_point()), None)
                self.running.append((module, None if first is None else tuple(first.shape[:-1])))

        return enter

    def left(self, module: nn.Module, *_: Any) -> None:
        """The hook for a module that ends."""
        self.running.pop()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.multi_head_attention_forward:
            with self:  # its steps are traced as those of any other module
                return _plain_multi_head(*args, **kwargs)
        if not self._looked_at():
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

    def _looked_at(self) -> bool:
        return self.modules is None or any(module in self.modules for module, _ in self.running)

    def _product(self, function: Any, args: Any, kwargs: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
        """A product, which is the beginning of scores unless one side is a weight of the model."""
        # a weight that waits on disk lies elsewhere in every pass, and is a parameter still
        constant = any(
            isinstance(part, nn.Parameter) or part.untyped_storage().data_ptr() in self.constants for part in pair
        )
        if constant and function is torch.einsum:  # it may mix heads
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
        # without scores it chooses among something else than keys: experts, classes
        if dim in (-1, logits.dim() - 1) and (carried := self.known.scores.get(logits)):
            self.known.weights[result] = TracedSoftmax(logits, carried)
        return result

    def _sum(self, function: Any, args: Any, kwargs: Any, weights: Tensor) -> Tensor:
        """A product of attention weights with what they weigh: here a site is known, and answered."""
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
        return self._site(shared, read, own, weights.dtype, found.arranged if found is not None else _same)

    def _fused(self, args: Any, kwargs: Any) -> Tensor:
        """Attention by torch's own function, called by the module itself."""
        given = dict(zip(FUSED, args, strict=False)) | kwargs

        def read(module: nn.Module, tokens: Tokens) -> tuple[Call, Lead]:
            call, lead = fused_call(given, tokens, module)
            if self.shown is not None:
                self.shown(module, _fused_weights(lead, given))
            return call, lead

        own = partial(F.scaled_dot_product_attention, **given)
        return self._site(self.running, read, own, given["value"].dtype, _same)

    def _site(
        self,
        owners: list[tuple[nn.Module, Tokens]],
        read: Callable[[nn.Module, Tokens], tuple[Call, Lead]],
        own: Callable[[], Tensor],
        dtype: torch.dtype,
        arranged: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The result of one site, of that type, whose `own` is the model's; the innermost of its modules owns it."""
        owner = owners[-1][0] if owners else None
        if owner is None or owner in self.refused or (self.modules is not None and owner not in self.modules):
            result = own()
        else:
            result = self._answered(*owners[-1], read, own, arranged).to(dtype)
        self.known.inputs[result] = True
        return result

    def _answered(
        self,
        owner: nn.Module,
        tokens: Tokens,
        read: Callable[[nn.Module, Tokens], tuple[Call, Lead]],
        own: Callable[[], Tensor],
        arranged: Callable[[Tensor], Tensor],
    ) -> Tensor:
        try:
            call, lead = read(owner, tokens)
            sighted = arranged(lead.back(_sighted(call)))
            if not self.prove:
                answered = arranged(lead.back(self.answer(call)))
                # what a query that sees no key is given differs from model to model
                return answered if bool(sighted.all()) else torch.where(sighted, answered, own())
            result = own()
            _check(arranged(lead.back(attend(call, OWN, "eager"))), result, sighted)
        except UnreadableError as refusal:
            if self.modules is not None:  # it was read before, and nobody would know
                raise ModelError(
                    f"A {type(owner).__name__} can't be read on these inputs: {refusal.problem}.",
                    "Give inputs of the same kind as those that its sites were found on.",
                ) from None
            self.refused[owner] = refusal.problem
            return own()
        self.answer(call)
        return result


def _fused_weights(lead: Lead, given: dict[str, Any]) -> Tensor:
    """The attention weights of torch's own function: its output for the identity matrix as values."""
    key = given["key"]
    unit = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)
    return lead.split(F.scaled_dot_product_attention(**{**given, "value": unit}))


def _same(output: Tensor) -> Tensor:
    return output


def _sighted(call: Call) -> Tensor:
    """(batch, queries, heads, 1): which queries see any key."""
    batch, heads, queries, _ = call.query.shape
    seen = call.visible()
    some = torch.ones(1, 1, queries, dtype=torch.bool, device=call.query.device) if seen is None else seen.any(-1)
    return some.expand(batch, heads, queries).transpose(1, 2)[..., None]


def _check(found: Tensor, own: Tensor, sighted: Tensor) -> None:
    """Raise UnreadableError where the output from what was traced is not the module's own."""
    seen, expected = (torch.where(sighted, part, 0.0).double() for part in (found, own))
    error = float((seen - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float64).tiny))
    if not error <= rounding_of(own.dtype):
        raise unread(f"its output is not that of softmax(scores) on its values (relative difference {error:.1e})")


def _content(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors in a module's arguments that carry what it is about: not its masks, nor positions."""
    names = list(inspect.signature(module.forward).parameters)
    given = dict(zip(names, args, strict=False)) | kwargs
    return [tensor for name, value in given.items() if not _aside(name) for tensor in tensors(value)]


def _aside(name: str) -> bool:
    return "mask" in name or "position" in name


_plain_multi_head = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    vars(F) | {"has_torch_function": lambda _arguments: False},  # else it would ask the mode again, and again
    argdefs=F.multi_head_attention_forward.__defaults__,
)
"""torch's multi_head_attention_forward, which does not hand itself over to a mode."""
_plain_multi_head.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__
