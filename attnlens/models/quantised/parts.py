"""What a coded weight is made of, and the shape that its files say it has."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Parts = Mapping[str, Tensor]
"""End of a tensor's name → the tensor; the codes under the empty end."""
PartShapes = Mapping[str, tuple[int, ...]]
"""The shapes of the same."""


class CodesError(Exception):
    """Why codes can't be decoded; callers say of which tensor."""


def sizes(found: object) -> tuple[int, ...]:
    """A shape that a file says; raises CodesError for anything else."""
    if not (isinstance(found, list) and found and all(isinstance(size, int) and size > 0 for size in found)):
        raise CodesError("nothing says which shape it has")
    return tuple(found)
