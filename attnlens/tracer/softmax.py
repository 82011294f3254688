"""The attention computation behind a softmax, from the scores that reach it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlens.attention.masks import split_mask
from attnlens.errors import UnreadableError
from attnlens.tracer.scores import Standins, TracedScores

TOLERANCE = 1e-4
"""Largest relative difference between what was predicted and what the model's own steps give."""


@dataclass(eq=False)
class TracedSoftmax:
    """A softmax over keys, and the products that reach it."""

    logits: Tensor
    """Its argument."""
    carried: Mapping[TracedScores, Standins]
    """The products in it."""
    used: bool = False
    """Whether its weights have summed up values."""

    def scores(self) -> TracedScores:
        """The one product of queries and keys in it.

        What is added may hold products with positions, one side of which does not depend on the inputs. Raises
        UnreadableError where there are several that do, or where it is not known which it is.
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
    """The error for hand-written attention that is left to the model."""
    return UnreadableError(reason, "The other sites stand; this one is left out.")


@dataclass(frozen=True)
class Affine:
    """Scores = factor · product + bias on the allowed pairs, (batch, heads, queries, keys), but for a term per query.

    The softmax does not see such a term.
    """

    factor: Tensor
    """(heads,): what multiplies the product."""
    allowed: Tensor | None
    """Which keys a query may see; None means all."""
    bias: Tensor | None
    """What is added; None where nothing is."""


def affine(signs: Tensor, zero: Tensor, scores: Tensor) -> Affine:
    """The affine map that gives `zero` for a product of 0 and `scores` for the product `signs`, (queries, keys).

    Both are (batch, heads, queries, keys). Raises UnreadableError where the factor is not the same for all pairs of a
    head, or is 0.
    """
    if bool(zero.isnan().any()):
        raise unread("what is added to its scores is not a number")
    allowed, bias = split_mask(zero)
    # what no product moves is masked too: by a factor of 0, or by a number beside which all others are lost
    seen = (scores != zero) if allowed is None else allowed & (scores != zero)
    wanted = _centred(signs.to(zero), seen)
    gain = _centred(scores - zero, seen)
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
    """Raise UnreadableError where the softmax's argument is not factor · ⟨query, key⟩ + bias for these.

    They are other queries and keys than the model's, and `scores` what its own steps make of them.
    """
    seen = torch.ones_like(zero, dtype=torch.bool) if found.allowed is None else found.allowed
    product = query.to(zero) @ key.to(zero).expand(-1, query.shape[1], -1, -1).transpose(-1, -2)
    predicted = _centred(found.factor.view(1, -1, 1, 1) * product, seen)
    moved = _centred(scores.to(zero) - zero, seen)
    size = predicted.norm() + torch.where(seen, zero, 0.0).norm()
    error = float((moved - predicted).norm() / size)
    if not error <= rounding_of(query.dtype):
        raise unread(f"its scores are no multiple of ⟨query, key⟩: other ones move them otherwise ({error:.1e})")


def rounding_of(dtype: torch.dtype) -> float:
    """The largest relative difference that is no misreading, of what a module computes in that type."""
    return max(TOLERANCE, 8 * torch.finfo(dtype).eps)


def _centred(scores: Tensor, seen: Tensor) -> Tensor:
    """Scores without their mean over the keys that a query sees, and 0 elsewhere; as they are if all see one."""
    kept = torch.where(seen, scores, 0.0)
    if bool((seen.sum(-1) < 2).all()):
        return kept
    return torch.where(seen, kept - kept.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1), 0.0)
