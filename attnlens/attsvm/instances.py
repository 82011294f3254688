"""Selection instances that gradient descent trains on: tokens, queries, labels, and the head that reads the output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    BilinearForm = Float[Tensor, "trials d d_query"]
    Weights = Float[Tensor, "trials n T"]
    Read = tuple[Float[Tensor, "trials n"], Float[Tensor, "trials n T"]]
    """(f, γ_t − γ_α)."""


class Anchored(NamedTuple):
    """The tokens as seen from α, the token of the largest weight: what is far below it keeps its digits."""

    chosen: Int[Tensor, "trials n"]
    """α."""
    token: Float[Tensor, "trials n d"]
    """x_α."""
    differences: Float[Tensor, "trials n T d"]
    """u_t = x_t − x_α."""
    rest: Bool[Tensor, "trials n T"]
    """Whether t is allowed and u_t is not 0: α itself and its duplicates pull nowhere."""


@runtime_checkable
class PredictionHead(Protocol):
    """A differentiable h behind the attention, f = h(Σ_t s_t x_t); its slope gives each token a score γ_t = h'·x_t."""

    def read(self, weights: Weights, seen: Anchored) -> Read:
        """(f, γ_t − γ_α)."""


@dataclass(frozen=True)
class Linear:
    """h(a) = vᵀa."""

    v: Float[Tensor, "trials d"]

    def read(self, weights: Weights, seen: Anchored) -> Read:
        """γ_t = vᵀx_t."""
        v = self.v[:, None, :, None]
        rises = (seen.differences @ v).squeeze(-1)
        return (seen.token[..., None, :] @ v).flatten(2).squeeze(-1) + (weights * rises).sum(-1), rises


@dataclass(frozen=True)
class Relu:
    """h(a) = 1ᵀ relu(V a)."""

    V: Float[Tensor, "trials hidden d"]

    def read(self, weights: Weights, seen: Anchored) -> Read:
        """γ_t = Σ_j [(V a)_j > 0] (V x_t)_j."""
        mean = seen.token + (weights[..., None, :] @ seen.differences).squeeze(-2)
        hidden = mean @ self.V.mT
        slope = (hidden > 0).to(hidden.dtype) @ self.V
        return hidden.relu().sum(-1), (seen.differences @ slope[..., None]).squeeze(-1)


@dataclass(frozen=True)
class Scores:
    """f = Σ_t s_t γ_t: a linear head that is given by what it reads off each token."""

    scores: Float[Tensor, "trials n T"]

    def read(self, weights: Weights, seen: Anchored) -> Read:
        """(f, γ_t − γ_α)."""
        chosen = self.scores.gather(-1, seen.chosen[..., None])
        rises = self.scores - chosen
        return chosen.squeeze(-1) + (weights * rises).sum(-1), rises


@dataclass(frozen=True)
class Instances:
    """Trials of one size: f_i = h(Σ_t s_it x_it), s_i = softmax_t(x_itᵀ W z_i) (Tarzanagh et al. 2023, Eq. 1)."""

    tokens: Float[Tensor, "trials n T d"]
    """x."""
    queries: Float[Tensor, "trials n d_query"]
    """z."""
    labels: Float[Tensor, "trials n"]
    """Y = ±1."""
    head: PredictionHead
    """h."""
    allowed: Bool[Tensor, "trials n T"] | None = None
    """Which tokens take part in the softmax (a causal mask); None: all."""

    def anchored(self, chosen: Int[Tensor, "trials n"]) -> Anchored:
        """The tokens as seen from those."""
        index = chosen[..., None, None].expand(-1, -1, 1, self.tokens.shape[-1])
        token = self.tokens.gather(2, index)
        differences = self.tokens - token
        rest = (differences != 0).any(-1)
        return Anchored(chosen, token.squeeze(2), differences, rest if self.allowed is None else rest & self.allowed)

    def first(self) -> Anchored:
        """Seen from the first token that takes part."""
        if self.allowed is None:
            return self.anchored(torch.zeros(self.tokens.shape[:2], dtype=torch.long, device=self.tokens.device))
        return self.anchored(self.allowed.to(torch.uint8).argmax(-1))

    def gaps(self, W: BilinearForm, seen: Anchored) -> tuple[Anchored, Float[Tensor, "trials n T"]]:
        """(α, x_tᵀWz − x_αᵀWz ≤ 0): the anchor moves to a token with a larger score, and stays where there is none."""
        score = (self.queries @ W.mT)[..., None]
        gaps = self._masked((seen.differences @ score).squeeze(-1))
        if (gaps > 0).any():
            seen = self.anchored(torch.where((gaps > 0).any(-1), gaps.argmax(-1), seen.chosen))
            # Rounding may leave a rise of an ulp above the new anchor: 0 is the largest by its choice.
            gaps = self._masked((seen.differences @ score).squeeze(-1)).clamp(max=0)
        return seen, gaps

    def _masked(self, gaps: Float[Tensor, "trials n T"]) -> Float[Tensor, "trials n T"]:
        return gaps if self.allowed is None else gaps.masked_fill(~self.allowed, -math.inf)
