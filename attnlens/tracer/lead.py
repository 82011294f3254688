"""Which of the leading axes of hand-written attention are sequences, and which are heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from attnlens.tracer.softmax import unread


@dataclass(frozen=True)
class Lead:
    """The leading axes of queries, keys and scores; heads are one of them, or the inner part of the only one."""

    shape: tuple[int, ...]
    """Their sizes."""
    axis: int
    """The axis of the heads, where the only one counts as (sequences, heads)."""
    heads: int
    """How many heads there are."""

    @property
    def _whole(self) -> tuple[int, ...]:
        """The axes, heads apart."""
        return (self.shape[0] // self.heads, self.heads) if len(self.shape) == 1 else self.shape

    def like(self, shape: tuple[int, ...]) -> Lead:
        """The same axes, merged or told apart as those of another tensor are."""
        if self.axis != 1 or {len(shape), len(self.shape)} != {1, 2}:
            return self
        return Lead((math.prod(self._whole),) if len(shape) == 1 else self._whole, 1, self.heads)

    def split(self, tensor: Tensor) -> Tensor:
        """(leading axes, a, b) as (batch, heads, a, b); heads stay 1 where one serves all."""
        last = tensor.shape[-2:]
        if len(self.shape) == 1:
            return tensor.expand(*self.shape, *last).reshape(*self._whole, *last)
        tensor = tensor[(None,) * (len(self.shape) + 2 - tensor.dim())]
        one = tensor.shape[self.axis]
        wanted = [one if axis == self.axis else size for axis, size in enumerate(self.shape)]
        return tensor.expand(*wanted, *last).movedim(self.axis, -3).reshape(-1, one, *last)

    def back(self, output: Tensor) -> Tensor:
        """(batch, queries, heads, value_dim), in the order of the axes: (…, queries, value_dim)."""
        others = [size for axis, size in enumerate(self._whole) if axis != self.axis]
        found = output.transpose(1, 2).reshape(*others, self.heads, *output.shape[1::2])
        return found.movedim(-3, self.axis).reshape(*self.shape, *found.shape[-2:])


def lead_of(shape: tuple[int, ...], queries: int, tokens: int | None) -> Lead:
    """The axes of scores with so many queries, in a module that was called with so many tokens.

    There are as many heads as there are queries for each token. Where this is not so (a module that makes fewer queries
    than it has tokens), four axes are (sequences, heads, queries, keys). Raises UnreadableError where neither tells.
    """
    total = math.prod(shape) * queries
    heads = total // tokens if tokens and total % tokens == 0 else 0
    if len(shape) == 1:
        if not heads or shape[0] % heads:
            raise unread(f"its heads can't be told from its sequences: queries have the axes {(*shape, queries)}")
        return Lead(shape, 1, heads)
    fitting = [axis for axis, size in enumerate(shape) if size == heads]
    if len(shape) == 2 and (not fitting or 1 in fitting):
        return Lead(shape, 1, shape[1])
    if not fitting or (len(fitting) > 1 and 1 not in fitting):
        raise unread(f"its heads can't be told from its windows: queries have the axes {(*shape, queries)}")
    axis = 1 if 1 in fitting else fitting[0]
    return Lead(shape, axis, shape[axis])
