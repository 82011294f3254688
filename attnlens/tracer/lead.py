"""Which of the leading axes of hand-written attention are sequences, and which are heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from attnlens.tracer.softmax import unread

Tokens = tuple[int, ...] | None
"""The axes of a module's first input but the last: sequences and tokens; None where it has no input of numbers."""


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


def lead_of(shape: tuple[int, ...], queries: int, keys: int, tokens: Tokens) -> Lead:
    """The axes of scores of so many queries and keys, in a module that was called with these tokens.

    There are as many heads as there are queries for each token; or keys, where a module pools its queries. Four axes
    are (sequences, heads, queries, keys), as everywhere in transformers. Raises UnreadableError where an axis could
    be another one.
    """
    total, count = math.prod(shape), math.prod(tokens or (0,))
    counts = [total * each // count for each in (queries, keys) if count and total * each % count == 0]
    if len(shape) == 1:
        if not counts or total * queries % (count or 1) or not counts[0] or shape[0] % counts[0]:
            raise unread(f"its heads can't be told from its sequences: queries have the axes {(*shape, queries)}")
        return Lead(shape, 1, counts[0])
    # The first axis of a lone sequence: its tokens can't be counted where channels come before them (SqueezeBERT).
    lone = {0} if tokens and tokens[0] == shape[0] == 1 else set[int]()
    fitting = [axis for axis, size in enumerate(shape) if size in counts and axis not in lone]
    if 1 in fitting or (len(shape) == 2 and not fitting):
        return Lead(shape, 1, shape[1])
    if len(fitting) != 1 or len(shape) == 2:
        raise unread(f"its heads can't be told from its windows: queries have the axes {(*shape, queries)}")
    return Lead(shape, fitting[0], shape[fitting[0]])
