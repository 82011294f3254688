"""Products of two tensors in one form, whichever function of torch computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor


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
    """Whether the result is left · rightᵀ and nothing beside it."""

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axes of the result."""
        return tuple(torch.broadcast_shapes(self.left.shape[:-2], self.right.shape[:-2]))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Sum:
    """A product of attention weights with what they weigh."""

    value: Tensor
    """(…, keys, value_dim), its leading axes in the order of the weights'."""
    arranged: Callable[[Tensor], Tensor]
    """(…, queries, value_dim), the axes in the order of the weights', as the call's own result has them."""


MATMULS = frozenset(
    {torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__, Tensor.__rmatmul__}
)
ADDING = frozenset({torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm})
FUNCTIONS = MATMULS | ADDING | {torch.einsum, F.linear}
"""The functions whose result is a product of two of their arguments, plus a multiple of a third."""


def operands(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The two tensors that a call multiplies as matrices; None where it is no such call."""
    if function not in FUNCTIONS:
        return None
    if function is torch.einsum:
        found = _einsum(args)
        return None if found is None else found[1:]
    first, second = _arguments(function, args, kwargs)
    return (first, second) if isinstance(first, Tensor) and isinstance(second, Tensor) else None


def product(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """The call as a product of queries with keys; None where its axes are not those of one."""
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
    """The call as Σ_j weights_ij value_j; None where it is another product."""
    if function is torch.einsum:
        return _einsum_sum(args, weights)
    first, second = _arguments(function, args, kwargs)
    if first is not weights or function in ADDING or function is F.linear or second.dim() < 2:
        return None
    return Sum(second, lambda found: found)


def _arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The two operands among the arguments, in the order of their product."""
    names = ("batch1", "mat1") if function in ADDING else ("input", "self")
    others = ("batch2", "mat2", "other", "tensor2", "weight")
    place = 1 if function in ADDING else 0
    first = args[place] if len(args) > place else next((kwargs[name] for name in names if name in kwargs), None)
    second = args[place + 1] if len(args) > place + 1 else next((kwargs[n] for n in others if n in kwargs), None)
    return (second, first) if function is Tensor.__rmatmul__ else (first, second)


def _einsum(args: tuple[Any, ...]) -> tuple[tuple[str, str, str], Tensor, Tensor] | None:
    """Axes of both operands and of the result, and the operands of torch.einsum; None where it is no such product."""
    if not args or not isinstance(args[0], str):
        return None
    given = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    equation = args[0].replace(" ", "")
    if len(given) != 2 or "->" not in equation or (spelled := _spelled(equation, given)) is None:
        return None
    inputs, result = spelled.split("->")
    left, right = inputs.split(",")
    return (left, right, result), given[0], given[1]


def _spelled(equation: str, given: Sequence[Tensor]) -> str | None:
    """The equation with letters in place of its ellipses; None where these stand for unequally many axes."""
    inputs = equation.partition("->")[0].split(",")
    counts = {part.dim() - len(axes) + 3 for axes, part in zip(inputs, given, strict=True) if "..." in axes}
    if len(counts) > 1:
        return None
    free = [letter for letter in ascii_letters if letter not in equation]
    return equation.replace("...", "".join(free[: sum(counts)]))


def _einsum_product(args: tuple[Any, ...]) -> Product | None:
    found = _einsum(args)
    if found is None:
        return None
    (left, right, result), one, other = found
    summed = [axis for axis in left if axis in right and axis not in result]
    rows, columns = _own(left, right, result), _own(right, left, result)
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
    found = _einsum(args)
    if found is None:
        return None
    (axes, others, result), one, other = found
    if other is weights:
        axes, others, other = others, axes, one
    lead, rows, summed = axes[:-2], axes[-2], axes[-1]
    size = _own(others, axes, result)
    if set(others) != {*lead, summed, size} or len(size) != 1 or set(result) != {*lead, rows, size}:
        return None
    value = other.permute([others.index(axis) for axis in f"{lead}{summed}{size}"])
    order = [f"{lead}{rows}{size}".index(axis) for axis in result]
    return Sum(value, lambda output: output.permute(order))


def _own(axes: str, other: str, result: str) -> str:
    """The axes of one operand alone that are in the result."""
    return "".join(axis for axis in axes if axis not in other and axis in result)
