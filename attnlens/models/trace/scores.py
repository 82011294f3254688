"""Trace products of queries and keys to a softmax.

Each step is repeated with stand-ins, other values of the product, to find how the scores depend on the product.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, MutableMapping
from dataclasses import dataclass, field
from string import ascii_letters
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only  # private: torch has no public map over nested arguments
from torch.utils.weak import WeakIdKeyDictionary

from attnlens.errors import UnreadableError

Arguments = tuple[Any, ...]  # positional arguments of any torch function
Keywords = dict[str, Any]  # keyword arguments of any torch function or module


class FunctionCall(NamedTuple):
    """A call of a torch function."""

    function: Callable[..., Any]
    args: Arguments
    kwargs: Keywords

    def run(self) -> Any:
        """Call the function and return its result."""
        return self.function(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Product:
    """A call whose result is an affine function of left · rightᵀ."""

    left: Tensor  # (…, rows, size): the first operand
    right: Tensor  # (…, columns, size): the second operand, with leading axes that broadcast to those of the first
    again: Callable[[Tensor, Tensor], Tensor]  # (left, right) → result of the call for these operands

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the leading axes (all but the last two) of left · rightᵀ."""
        return tuple(torch.broadcast_shapes(self.left.shape[:-2], self.right.shape[:-2]))  # type: ignore[no-untyped-call]


MATMULS = frozenset(
    {torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__, Tensor.__rmatmul__}
)
ADDING = frozenset({torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm})
FUNCTIONS = MATMULS | ADDING | {F.linear}


def operands(call: FunctionCall) -> tuple[Tensor, Tensor] | None:
    """Return the left and the right tensor that a call multiplies as matrices; None for any other call."""
    function, args, kwargs = call
    if function is torch.einsum:
        parsed = _parse_einsum(call)
        return None if parsed is None else parsed[1:]
    if function not in FUNCTIONS:
        return None
    positional = args[1:] if function in ADDING else args
    all_names = ("batch1", "mat1", "input", "self"), ("batch2", "mat2", "other", "tensor2", "weight")
    first, second = (
        positional[index] if len(positional) > index else next((kwargs[name] for name in names if name in kwargs), None)
        for index, names in enumerate(all_names)
    )
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return None
    return (second, first) if function is Tensor.__rmatmul__ else (first, second)


def as_product(call: FunctionCall, first: Tensor, second: Tensor) -> Product | None:
    """Return the Product that a call computes from these operands; None if they can't be queries and keys."""
    function, args, kwargs = call
    if function is torch.einsum or min(first.dim(), second.dim()) < 2:
        return None
    if function is F.linear:
        return Product(first, second, lambda left, right: left @ right.mT) if len(args) + len(kwargs) == 2 else None
    if function not in ADDING:
        return Product(first, second.mT, lambda left, right: left @ right.mT)
    scalars = {name: kwargs[name] for name in ("beta", "alpha") if name in kwargs}
    added = args[0] if args else kwargs["input"]
    return Product(first, second.mT, lambda left, right: function(added.to(left), left, right.mT, **scalars))


def _parse_einsum(call: FunctionCall) -> tuple[tuple[str, str, str], Tensor, Tensor] | None:
    """Return the axes (left, right, result) and the two operands of an einsum; None if its form is not supported."""
    args = call.args
    if not args or not isinstance(args[0], str):
        return None
    factors = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    equation = args[0].replace(" ", "")
    if len(factors) != 2 or "->" not in equation:
        return None
    inputs = equation.partition("->")[0].split(",")
    # number of axes that the ellipsis of each factor represents: all axes minus the letters
    counts = {factor.dim() - len(axes) + 3 for axes, factor in zip(inputs, factors, strict=True) if "..." in axes}
    if len(counts) > 1:
        return None
    unused = [letter for letter in ascii_letters if letter not in equation]
    operands, result = equation.replace("...", "".join(unused[: sum(counts)])).split("->")
    left, right = operands.split(",")
    return (left, right, result), factors[0], factors[1]


def multiply_einsum(call: FunctionCall, weights: Container[Tensor]) -> Tensor | None:
    """Compute an einsum of queries and keys, or of attention weights and values, as a matrix product; else None."""
    parsed = _parse_einsum(call)
    if parsed is None:
        return None
    (left, right, result), first, second = parsed
    if second in weights:
        left, right, first, second = right, left, second, first
    lead = left[:-2] if first in weights else result[:-2]
    rows, columns = ("".join(axis for axis in result if axis in axes and axis not in lead) for axes in (left, right))
    summed = "".join(axis for axis in left if axis in right and axis not in result)
    queries, keys, scores = lead + rows + summed, lead + summed + columns, lead + rows + columns
    in_order = left == queries if first in weights else result == scores
    same_axes = all(set(old) == set(new) for old, new in ((left, queries), (right, keys), (result, scores)))
    if not (len(rows) == len(columns) == len(summed) == 1 and in_order and same_axes):
        return None
    product = _permute(first, left, queries) @ _permute(second, right, keys)
    return _permute(product, scores, result)


def _permute(tensor: Tensor, axes: str, order: str) -> Tensor:
    return tensor.permute([axes.index(axis) for axis in order])


@dataclass(eq=False)
class TracedScores:
    """A product of queries and keys that is traced to a softmax, with the values that define its stand-ins."""

    product: Product
    content: bool  # True if both factors depend on the model's inputs
    modules: tuple[nn.Module, ...]  # the modules that are running when the product is computed, outermost first
    signs: Tensor  # (queries, keys): −1 and 1, the values of the product in the second stand-in, equal in all heads
    moved: tuple[Tensor, ...]  # the random queries and keys of the third stand-in; empty if there are two stand-ins
    scaled_by_inputs: bool = False  # True if a step multiplied the product by a tensor that depends on the inputs


Standins = tuple[Tensor, ...]
"""A tensor's values if the traced product is 0, is `signs` and, with `prove`, is the product of the two in `moved`."""


def start_scores(
    product: Product, result: Tensor, running: tuple[nn.Module, ...], *, content: bool, prove: bool
) -> tuple[TracedScores, Standins]:
    """Start to trace a product; return its TracedScores and two stand-ins (other values), or three with `prove`."""
    wide = torch.promote_types(result.dtype, torch.float32)  # in half precision, adding a mask would round scores away
    operands, generator = (product.left, product.right), torch.Generator().manual_seed(0)
    moved = tuple(
        (torch.randn(part.shape, generator=generator).to(part) * _finite_deviation(part)).to(part.dtype)
        for part in operands * prove
    )
    # neighbouring keys have different signs, so that a query that sees several keys sees both signs
    queries, keys = product.left.shape[-2], product.right.shape[-2]
    random_signs = torch.randint(2, (queries, 1), generator=torch.Generator().manual_seed(queries)) * 2 - 1
    columns = random_signs.to(product.left), (torch.arange(keys) % 2 * 2 - 1)[:, None].to(product.right)
    left, right = (torch.zeros_like(part, dtype=wide) for part in operands)
    zero = product.again(left, right)
    left[..., :1], right[..., :1] = columns
    standins = (zero, product.again(left, right), *([product.again(*moved)] if moved else []))
    return TracedScores(product, content, running, columns[0] @ columns[1].T, moved), standins


def _finite_deviation(part: Tensor) -> Tensor:
    """Return the standard deviation of the finite values; 1 if there are fewer than two finite values."""
    finite = part.detach()[part.isfinite()]
    return finite.std() if finite.numel() > 1 else part.new_ones(())


NOT_FINITE = "not finite, so that they can't be checked"
"""End of the reason reported for attention that computes NaN or infinity."""


def unreadable(reason: str) -> UnreadableError:
    """Build the error for hand-written attention that cannot be read."""
    return UnreadableError(reason, "The other sites are analysed; this one is left out.")


@dataclass(eq=False)
class TracedSoftmax:
    """A softmax over keys, with the traced products in its argument."""

    logits: Tensor  # argument of the softmax
    carried: Mapping[TracedScores, Standins]  # products in the argument, with their stand-ins
    used: bool = False  # True if its attention weights were already applied to values

    def scores(self) -> TracedScores:
        """Return the traced product of queries and keys in the softmax's argument.

        Products with a factor that does not depend on the inputs, such as a position table, are ignored unless all
        products have such a factor. Raises UnreadableError if several products remain, or if the product is scaled by
        a number that depends on the inputs.
        """
        content = [scores for scores in self.carried if scores.content]
        products = content or list(self.carried)
        if len(products) > 1:
            reason = "" if content else "; none has two factors that depend on its inputs"
            raise unreadable(f"its scores are a sum of {len(products)} products of queries and keys{reason}")
        if products[0].scaled_by_inputs:
            raise unreadable("its scores are multiplied by a factor that depends on its inputs")
        return products[0]


STEPS_END = frozenset(  # Functions whose results contain neither scores nor attention weights
    {"layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm", "embedding", "conv1d", "conv2d", "conv3d"}
    | {"log_softmax", "max", "amax", "logsumexp"}
)
MULTIPLYING = frozenset(  # Functions that multiply or divide a tensor by another; torch names `/=` `__idiv__`
    {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "div", "div_", "__truediv__", "__idiv__", "divide"}
    | {"true_divide", "pow", "pow_", "addcmul", "addcmul_", "addcdiv", "addcdiv_"}
)


@dataclass
class Provenance:
    """Origins of the tensors in one forward pass; the tensors are weakly referenced."""

    scores: MutableMapping[Tensor, dict[TracedScores, Standins]] = field(default_factory=WeakIdKeyDictionary)
    """Stand-ins of each tensor, keyed by the traced products on which the tensor depends."""
    inputs: MutableMapping[Tensor, bool] = field(default_factory=WeakIdKeyDictionary)
    """Tensors that depend on the model's inputs other than masks and positions."""
    weights: MutableMapping[Tensor, TracedSoftmax] = field(default_factory=WeakIdKeyDictionary)
    """The softmax that computed the attention weights in a tensor, keyed by tensor."""

    def run(self, call: FunctionCall) -> Any:
        """Run the call, record the origins of its result, and return the result."""
        arguments, name = tensors((call.args, call.kwargs)), getattr(call.function, "__name__", "")
        # `max` of two tensors is elementwise, so that its result still contains scores
        ends = name in STEPS_END and not (name == "max" and len(arguments) == 2)
        carried = dict.fromkeys(scores for tensor in arguments for scores in self.scores.get(tensor, ()))
        steps = {} if ends else {scores: self._step(scores, call, name, arguments) for scores in carried}
        result = call.run()
        target = call.args[0] if call.function is Tensor.__setitem__ else result
        for scores, standins in steps.items():
            for tensor, values in zip(tensors(target), standins, strict=False):
                if tensor.is_floating_point():
                    self.scores[tensor] = {**self.scores.get(tensor, {}), scores: values}
        shape_alone = name.endswith("_like") or name.startswith("new_")  # `zeros_like`, `new_ones`
        dependent = any(tensor in self.inputs for tensor in arguments) and not shape_alone
        softmax = next((self.weights[tensor] for tensor in arguments if tensor in self.weights), None)
        for tensor in tensors(target):
            if dependent and tensor.dtype != torch.bool:
                self.inputs[tensor] = True
            if softmax is not None and not ends:
                self.weights[tensor] = softmax
        return result

    def _step(self, scores: TracedScores, call: FunctionCall, name: str, arguments: list[Tensor]) -> list[Standins]:
        """Run a call on the stand-ins of `scores`; return stand-ins for each result tensor, or [] if the call fails."""
        others = [tensor for tensor in arguments if scores not in self.scores.get(tensor, ())]
        if name in MULTIPLYING and any(tensor in self.inputs for tensor in others):
            scores.scaled_by_inputs = True
        # functions with these names change their first argument: `add_`, `__iadd__`, `__setitem__`
        in_place = name.startswith(("__i", "__setitem")) or (name[-1:] == "_" and name[-2:] != "__")

        def run(number: int) -> list[Tensor]:
            def substitute(tensor: Tensor) -> Tensor:
                if scores in (known := self.scores.get(tensor, {})):
                    return known[scores][number]
                # copy the target of an in-place step, since only the model's own call must change it
                return tensor.clone() if in_place and tensor is arguments[0] else tensor

            args, kwargs = tree_map_only(Tensor, substitute, (call.args, call.kwargs))
            result = call.function(*args, **kwargs)
            return tensors(args[0] if call.function is Tensor.__setitem__ else result)

        known = next(self.scores[tensor][scores] for tensor in arguments if scores in self.scores.get(tensor, ()))
        try:
            return list(zip(*map(run, range(len(known))), strict=True))
        except RuntimeError:  # from a function of another library that does not support this dtype
            return []


SCALARS = frozenset({bool, int, float, str, type(None), torch.dtype, slice})


def tensors(value: object) -> list[Tensor]:
    """Return all tensors in a possibly nested value, in order."""
    if isinstance(value, Tensor):
        return [value]
    # torch's `tree_leaves` is slow for the usual arguments
    if type(value) in SCALARS:
        return []
    if type(value) is dict:
        value = [*value.values()]
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return [tensor for part in value for tensor in tensors(part)]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
