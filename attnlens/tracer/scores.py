"""Scores on their way from a product of queries and keys to a softmax, and what stands in for the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.tracer.products import Product


@dataclass(eq=False)
class TracedScores:
    """A product of queries and keys on its way to a softmax, and what every step would give for other products.

    A step is executed on each of the stand-ins as it is on the model's own tensor. So the softmax's argument is known
    as an affine function of the product without knowing what the steps do.
    """

    product: Product
    """The product."""
    content: bool
    """Whether both sides depend on the model's inputs."""
    modules: tuple[nn.Module, ...]
    """The modules that were running, the outermost first."""
    signs: Tensor
    """(queries, keys): −1 and 1, the entries of a product that the second stand-in holds, the same for all heads."""
    moved: tuple[Tensor, Tensor] | None
    """Other queries and keys, for which the third stand-in holds the product; None where nothing is to be proven."""
    scaled_by_inputs: bool = False
    """Whether a step multiplied it by something that depends on the inputs."""


@dataclass(frozen=True)
class Standins:
    """What a tensor would be if the product were another one."""

    zero: Tensor
    """If the product were 0: what is added to it."""
    signs: Tensor
    """If the product were `TracedScores.signs`."""
    moved: Tensor | None
    """If the product were that of `TracedScores.moved`."""

    def map(self, change: Callable[[str], Any]) -> list[Any]:
        """`change` of each stand-in's name, None for one that there is not."""
        return [change("zero"), change("signs"), None if self.moved is None else change("moved")]


def begun(
    found: Product, result: Tensor, running: tuple[nn.Module, ...], *, content: bool, prove: bool
) -> tuple[TracedScores, Standins]:
    """The scores that begin with a product, and its stand-ins; with `prove`, also that of other queries and keys."""
    moved = _moved(found) if prove else None
    # signs of neighbouring keys differ, so that no query sees one sign alone where it sees several keys
    left, right = _signs(found.left), (torch.arange(found.right.shape[-2]) % 2 * 2 - 1)[:, None].to(found.right)
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


def _signs(part: Tensor) -> Tensor:
    """(rows, 1): −1 or 1 for each row of an operand, seeded."""
    generator = torch.Generator().manual_seed(part.shape[-2])
    return (torch.randint(2, (part.shape[-2], 1), generator=generator) * 2 - 1).to(part)


def _moved(found: Product) -> tuple[Tensor, Tensor]:
    """Other queries and keys of about the same size, seeded."""
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]  # two of them
        (torch.randn(part.shape, generator=generator).to(part) * part.detach().std()).to(part.dtype)
        for part in (found.left, found.right)
    )
