"""Track products of queries and keys to a softmax, with stand-ins that show what each step does to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True)
class Product:
    """One call of a function whose result is affine in left · rightᵀ, the product over their last axis."""

    left: Tensor
    """(…, rows, size): the first operand."""
    right: Tensor
    """(…, columns, size): the second operand; its leading axes are those of the first, or 1, or missing."""
    again: Callable[[Tensor, Tensor], Tensor]
    """The call's result, (…, rows, columns), for other operands of the same shapes."""
    plain: bool
    """Whether the result is exactly left · rightᵀ."""

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the result."""
        return tuple(torch.broadcast_shapes(self.left.shape[:-2], self.right.shape[:-2]))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Sum:
    """A product of attention weights with values."""

    value: Tensor
    """(…, keys, value_dim), its leading axes in the order of the weights' axes."""
    arranged: Callable[[Tensor], Tensor]
    """Maps (…, queries, value_dim), with axes in the order of the weights', to the layout of the call's own result."""


MATMULS = frozenset(
    {torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__, Tensor.__rmatmul__}
)
ADDING = frozenset({torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm})
FUNCTIONS = MATMULS | ADDING | {torch.einsum, F.linear}
"""Functions whose result is a product of two arguments, plus possibly a multiple of a third."""


def operands(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the two tensors that a call multiplies as matrices; None for any other call."""
    if function not in FUNCTIONS:
        return None
    if function is torch.einsum:
        found = _parse_einsum(args)
        return None if found is None else found[1:]
    first, second = _arguments(function, args, kwargs)
    return (first, second) if isinstance(first, Tensor) and isinstance(second, Tensor) else None


def product(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Return the call as a product of queries with keys; None if its axes do not fit one."""
    if function is torch.einsum:
        return _einsum_product(args)
    first, second = _arguments(function, args, kwargs)
    if min(first.dim(), second.dim()) < 2:
        return None
    if function is F.linear:
        return Product(first, second, lambda left, right: F.linear(left, right), plain=len(args) + len(kwargs) == 2)

    def again(left: Tensor, right: Tensor) -> Tensor:
        if function not in ADDING:
            return left @ right.transpose(-1, -2)
        factors = {name: kwargs[name] for name in ("beta", "alpha") if name in kwargs}
        added = args[0] if args else kwargs["input"]
        found: Tensor = function(added.to(left), left, right.transpose(-1, -2), **factors)
        return found

    return Product(first, second.transpose(-1, -2), again, plain=function not in ADDING)


def weighted_sum(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: Tensor) -> Sum | None:
    """Return the call as Σ_j weights_ij value_j; None if it is another product."""
    if function is torch.einsum:
        return _einsum_sum(args, weights)
    first, second = _arguments(function, args, kwargs)
    if first is not weights or function in ADDING or function is F.linear or second.dim() < 2:
        return None
    return Sum(second, lambda found: found)


def _arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the two operands among the arguments, in the order of their product."""
    names = ("batch1", "mat1") if function in ADDING else ("input", "self")
    others = ("batch2", "mat2", "other", "tensor2", "weight")
    place = 1 if function in ADDING else 0
    first = args[place] if len(args) > place else next((kwargs[name] for name in names if name in kwargs), None)
    second = args[place + 1] if len(args) > place + 1 else next((kwargs[n] for n in others if n in kwargs), None)
    return (second, first) if function is Tensor.__rmatmul__ else (first, second)


def _parse_einsum(args: tuple[Any, ...]) -> tuple[tuple[str, str, str], Tensor, Tensor] | None:
    """Return the axes of both operands and of the result, and the operands of torch.einsum; None for any other form."""
    if not args or not isinstance(args[0], str):
        return None
    given = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    equation = args[0].replace(" ", "")
    if len(given) != 2 or "->" not in equation or (spelled := _expand_ellipses(equation, given)) is None:
        return None
    inputs, result = spelled.split("->")
    left, right = inputs.split(",")
    return (left, right, result), given[0], given[1]


def _expand_ellipses(equation: str, given: Sequence[Tensor]) -> str | None:
    """Replace the ellipses of the equation with letters; return None if they stand for different numbers of axes."""
    inputs = equation.partition("->")[0].split(",")
    counts = {part.dim() - len(axes) + 3 for axes, part in zip(inputs, given, strict=True) if "..." in axes}
    if len(counts) > 1:
        return None
    free = [letter for letter in ascii_letters if letter not in equation]
    return equation.replace("...", "".join(free[: sum(counts)]))


def _einsum_product(args: tuple[Any, ...]) -> Product | None:
    found = _parse_einsum(args)
    if found is None:
        return None
    (left, right, result), one, other = found
    summed = [axis for axis in left if axis in right and axis not in result]
    rows, columns = _free_axes(left, right, result), _free_axes(right, left, result)
    if len(summed) != 1 or len(rows) != 1 or len(columns) != 1 or result[-2:] != rows + columns:
        return None
    lead = result[:-2]
    if set(left) != {*lead, rows, *summed} or set(right) != {*lead, columns, *summed}:
        return None

    def again(queries: Tensor, keys: Tensor) -> Tensor:
        return torch.einsum(f"{lead}{rows}{summed[0]},{lead}{columns}{summed[0]}->{result}", queries, keys)

    queries, keys = (
        part.permute([axes.index(axis) for axis in f"{lead}{own}{summed[0]}"])
        for part, axes, own in ((one, left, rows), (other, right, columns))
    )
    return Product(queries, keys, again, plain=True)


def _einsum_sum(args: tuple[Any, ...], weights: Tensor) -> Sum | None:
    found = _parse_einsum(args)
    if found is None:
        return None
    (axes, others, result), one, other = found
    if other is weights:
        axes, others, other = others, axes, one
    lead, rows, summed = axes[:-2], axes[-2], axes[-1]
    size = _free_axes(others, axes, result)
    if set(others) != {*lead, summed, size} or len(size) != 1 or set(result) != {*lead, rows, size}:
        return None
    value = other.permute([others.index(axis) for axis in f"{lead}{summed}{size}"])
    order = [f"{lead}{rows}{size}".index(axis) for axis in result]
    return Sum(value, lambda output: output.permute(order))


def _free_axes(axes: str, other: str, result: str) -> str:
    """Return the axes that only one operand has and that are in the result."""
    return "".join(axis for axis in axes if axis not in other and axis in result)


@dataclass(eq=False)
class TracedScores:
    """A product of queries and keys on its way to a softmax, with the results that each step gives for other products.

    Every step runs on each of the stand-ins as on the model's own tensor. So the softmax's argument is known as an
    affine function of the product, although the steps themselves are not interpreted.
    """

    product: Product
    """The product."""
    content: bool
    """Whether both sides depend on the model's inputs."""
    modules: tuple[nn.Module, ...]
    """The modules running at the product, outermost first."""
    signs: Tensor
    """(queries, keys): −1 and 1, the entries of the product in the second stand-in, equal for all heads."""
    moved: tuple[Tensor, Tensor] | None
    """Other queries and keys, whose product is in the third stand-in; None if nothing is to be proven."""
    scaled_by_inputs: bool = False
    """Whether a step multiplied the product by a tensor that depends on the inputs."""


@dataclass(frozen=True)
class Standins:
    """The values a tensor would have for other products."""

    zero: Tensor  # for a product of 0: the terms added to it
    signs: Tensor  # for the product `TracedScores.signs`
    moved: Tensor | None  # for the product of `TracedScores.moved`

    def map(self, change: Callable[[str], Any]) -> list[Any]:
        """Return `change` of each stand-in's name, None for a missing one."""
        return [change("zero"), change("signs"), None if self.moved is None else change("moved")]


def begun(
    found: Product, result: Tensor, running: tuple[nn.Module, ...], *, content: bool, prove: bool
) -> tuple[TracedScores, Standins]:
    """Start scores from a product, with its stand-ins; with `prove`, also that of other queries and keys."""
    moved = _random_operands(found) if prove else None
    # neighbouring keys have different signs, so that a query that sees several keys sees both signs
    left, right = _random_signs(found.left), (torch.arange(found.right.shape[-2]) % 2 * 2 - 1)[:, None].to(found.right)
    scores = TracedScores(found, content, running, left @ right.T, moved)
    wide = torch.promote_types(result.dtype, torch.float32)
    if found.plain:
        zero = torch.zeros_like(result, dtype=wide)
        signs = zero + scores.signs.to(wide)
    else:
        nothing = [torch.zeros_like(part, dtype=wide) for part in (found.left, found.right)]
        zero = found.again(*nothing)
        for part, column in zip(nothing, (left, right), strict=True):
            part[..., :1] = column
        signs = found.again(*nothing)
    return scores, Standins(zero, signs, None if moved is None else found.again(*moved))


def _random_signs(part: Tensor) -> Tensor:
    """Return (rows, 1): a seeded −1 or 1 for each row of an operand."""
    generator = torch.Generator().manual_seed(part.shape[-2])
    return (torch.randint(2, (part.shape[-2], 1), generator=generator) * 2 - 1).to(part)


def _random_operands(found: Product) -> tuple[Tensor, Tensor]:
    """Return other queries and keys of about the same size, seeded."""
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]  # two elements
        (torch.randn(part.shape, generator=generator).to(part) * part.detach().std()).to(part.dtype)
        for part in (found.left, found.right)
    )


STEPS_END = frozenset(
    {F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.rms_norm, F.embedding}
    | {torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d, F.log_softmax, torch.log_softmax}
    | {torch.layer_norm, torch.group_norm, torch.batch_norm, Tensor.log_softmax}
    | {torch.max, torch.amax, Tensor.max, Tensor.amax, torch.logsumexp, Tensor.logsumexp}
)
"""Functions after which a tensor no longer contains scores or weights of a head; a row's maximum does not either."""
LARGER = frozenset({torch.max, Tensor.max})
"""Functions that return the maximum of one tensor, or the elementwise maximum of two."""
MULTIPLYING = frozenset(
    {torch.mul, torch.multiply, torch.div, torch.divide, torch.true_divide, torch.pow, torch.addcmul, torch.addcdiv}
    | {getattr(Tensor, name) for name in ("pow", "pow_", "addcmul", "addcmul_", "addcdiv", "addcdiv_", "__pow__")}
    | {getattr(Tensor, name) for name in ("mul", "mul_", "div", "div_", "__mul__", "__rmul__", "__imul__")}
    | {getattr(Tensor, name) for name in ("multiply", "divide", "true_divide", "__truediv__", "__itruediv__")}
)
"""Functions that multiply a tensor by another one."""


@dataclass
class Provenance:
    """Facts about the tensors of one forward pass; tensors are held by weak references."""

    scores: MutableMapping[Tensor, dict[TracedScores, Standins]] = field(default_factory=WeakIdKeyDictionary)
    """Tensor → its values for other products, by product."""
    inputs: MutableMapping[Tensor, bool] = field(default_factory=WeakIdKeyDictionary)
    """Tensors that depend on the model's inputs other than masks and positions."""
    weights: MutableMapping[Tensor, Any] = field(default_factory=WeakIdKeyDictionary)
    """Tensor → the softmax whose weights it contains."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, and record the facts about its result."""
        given = list(tensors((args, kwargs)))
        carried: dict[TracedScores, None] = {}
        ends = _ends_scores(function, given)
        if not ends:
            for tensor in given:
                carried.update(dict.fromkeys(self.scores.get(tensor, ())))
        steps = {scores: self._step(scores, function, args, kwargs, given) for scores in carried}
        result = function(*args, **kwargs)
        target = args[0] if function is Tensor.__setitem__ else result
        for scores, standins in steps.items():
            self._record_standins(scores, standins, target)
        name = getattr(function, "__name__", "")
        shape_alone = name.endswith("_like") or name.startswith("new_")  # `zeros_like`, `new_ones`
        dependent = any(tensor in self.inputs for tensor in given) and not shape_alone
        weighing = next((self.weights[tensor] for tensor in given if tensor in self.weights), None)
        for tensor in tensors(target):
            if dependent and tensor.dtype != torch.bool:
                self.inputs[tensor] = True
            if weighing is not None and not ends:
                self.weights[tensor] = weighing
        return result

    def _step(
        self, scores: TracedScores, function: Any, args: Any, kwargs: Any, given: list[Tensor]
    ) -> list[Any] | None:
        """Return the function's results on the three stand-ins; None if it fails on them."""
        others = [tensor for tensor in given if scores not in self.scores.get(tensor, ())]
        if function in MULTIPLYING and any(tensor in self.inputs for tensor in others):
            scores.scaled_by_inputs = True

        def substituted(name: str) -> Any:
            def other(value: Any) -> Any:
                known = self.scores.get(value, {}).get(scores) if isinstance(value, Tensor) else None
                if known is not None:
                    return getattr(known, name)
                # copy the target of an in-place step, which the model itself must change only once
                return value.clone() if isinstance(value, Tensor) and in_place and value is given[0] else value

            new_args, new_kwargs = tree_map(other, (args, kwargs))
            found = function(*new_args, **new_kwargs)
            return new_args[0] if function is Tensor.__setitem__ else found

        in_place = _is_in_place(function)
        known = next(self.scores[tensor][scores] for tensor in given if scores in self.scores.get(tensor, ()))
        try:
            return known.map(substituted)
        except RuntimeError:  # a function of another library, on numbers of a type it was not made for
            return None

    def _record_standins(self, scores: TracedScores, steps: list[Any] | None, target: Any) -> None:
        """Record the stand-ins of every tensor of a result."""
        if steps is None:
            return
        parts = [list(tensors(step)) for step in steps]
        for index, tensor in enumerate(tensors(target)):
            if tensor.is_floating_point():
                found = Standins(parts[0][index], parts[1][index], parts[2][index] if parts[2] else None)
                self.scores[tensor] = {**self.scores.get(tensor, {}), scores: found}


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)


def _ends_scores(function: Any, given: Sequence[Tensor]) -> bool:
    """Return whether scores end at the function; the elementwise maximum of two tensors is a step like others."""
    return function in STEPS_END and not (function in LARGER and len(given) == 2)


def _is_in_place(function: Any) -> bool:
    """Return whether a function of torch changes its first argument in place: `add_`, `__iadd__`, `__setitem__`."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
