"""Normalised gradient descent on one-layer attention, for many trials at once, and the instances it trains on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch.nn.functional import logsigmoid

from attnlens.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    BilinearForm = Float[Tensor, "trials d d_query"]
    Weights = Float[Tensor, "trials n T"]
    Read = tuple[Float[Tensor, "trials n"], Float[Tensor, "trials n T"]]
    """(f, γ_t − γ_α)."""
    KeyQueryPair = tuple[Float[Tensor, "trials d m"], Float[Tensor, "trials d_query m"]]


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


PredictionHead: TypeAlias = Linear | Relu | Scores
"""A differentiable h behind the attention, f = h(Σ_t s_t x_t); its slope gives each token a score γ_t = h'·x_t."""


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


Loss = Literal["logistic", "exponential", "log"]
Normaliser = Literal["form", "own"]
LARGEST = torch.finfo(torch.float64).max
LOSSES: tuple[Loss, ...] = ("logistic", "exponential", "log")
NORMALISERS: tuple[Normaliser, ...] = ("form", "own")


@dataclass(frozen=True)
class Descent:
    """What descent read at the chosen iterations, and where it ended."""

    steps: tuple[int, ...]
    """Iterations at which it was read; 0 is the start."""
    W: Float[Tensor, "steps trials d d_query"]
    """The form: W, or K Qᵀ."""
    chosen: Int[Tensor, "steps trials n"]
    """α: the token of the largest weight."""
    largest: Float[Tensor, "steps trials n"]
    """The largest softmax weight."""
    log_weights: Float[Tensor, "trials n T"]
    """log s at the end; −∞ where not allowed."""
    stationary: Bool[Tensor, " trials"]
    """Whether the gradient was exactly 0 at the last step, so that the trial moved no further."""

    @property
    def norm(self) -> Float[Tensor, "steps trials"]:
        """‖W‖_F."""
        norm: Tensor = torch.linalg.matrix_norm(self.W)
        return norm

    def correlation(self, direction: BilinearForm) -> Float[Tensor, "steps trials"]:
        """⟨W, D⟩/(‖W‖‖D‖) for one direction a trial; NaN where either is 0 or D is NaN."""
        inner = (self.W * direction).sum((-2, -1))
        cosine: Tensor = inner / (self.norm * torch.linalg.matrix_norm(direction))
        return cosine


def silent(_done: int, _total: int) -> None:
    """Show no progress."""


def descend(
    instances: Instances,
    start: BilinearForm | KeyQueryPair,
    iterations: int,
    *,
    lr: float = 0.1,
    loss: Loss = "logistic",
    normaliser: Normaliser = "own",
    floor: float = 0.0,
    record: Collection[int] = (),
    progress: Callable[[int, int], None] = silent,
) -> Descent:
    """W ← W − lr·∇_W/‖∇_W‖_F of the mean loss, from `start` (Tarzanagh et al. 2023, W-GD, normalised).

    Factors (K, Q), W = KQᵀ: K ← K − lr·∇_W Q/c, Q ← Q − lr·∇_WᵀK/c with c = ‖∇_W‖ (`form`: W grows as (1 + lr)^2t at
    most) or each by its own norm (`own`: as t²). `floor` is added to every norm before it divides, as published code
    adds 2.2e-16: a trial whose gradient vanishes then stops, where it otherwise goes on along what is left of it. The
    losses are log(1 + e^(−Yf)), e^(−Yf) and −log(Yf), which needs
    Yf > 0. `record` names the iterations to read (0 is the start); the last one is always read. `progress` is told the
    iterations done and in all. Raises UsageError for iterations < 1, lr ≤ 0, an unknown loss or normaliser, numbers
    that are not finite, shapes that don't fit, factors that are 0, and `form` for so long that W would overflow.
    """
    parts: tuple[Tensor, ...] = (start,) if isinstance(start, torch.Tensor) else start
    _check(instances, parts, iterations, lr, loss, normaliser)
    wanted = sorted({step for step in record if 0 <= step < iterations} | {iterations})
    seen, read, stationary = instances.first(), [], torch.zeros(())
    for step in range(iterations + 1):
        W = parts[0] if len(parts) == 1 else parts[0] @ parts[1].mT
        seen, gaps = instances.gaps(W, seen)
        log_weights = gaps.log_softmax(-1)
        if step in wanted:
            read.append((W, seen.chosen, log_weights.amax(-1).exp()))
        if step == iterations:
            break
        D, scale = gradient(instances, seen, log_weights, loss)
        stationary = (D == 0).flatten(1).all(-1)
        parts = _stepped(parts, D, lr, normaliser, floor * (-scale).exp().clamp(max=LARGEST))  # 0 · ∞ is NaN
        progress(step + 1, iterations)
    forms, chosen, largest = (torch.stack(column) for column in zip(*read, strict=True))
    return Descent(tuple(wanted), forms, chosen, largest, log_weights, stationary)


def gradient(
    instances: Instances, seen: Anchored, log_weights: Float[Tensor, "trials n T"], loss: Loss
) -> tuple[BilinearForm, Float[Tensor, " trials"]]:
    """(D, c) with ∇ = D·e^c, the gradient of the mean loss: ∇ = (1/n) Σ_i ℓ'_i Σ_{t≠α} s_it (γ_it − γ̄_i) u_it z_iᵀ.

    The textbook's Σ_t s_t (γ_t − f) x_t holds the same terms and α's own, which cancels them all: it has no digit left
    once 1 − s_α < 1e-16. Logarithms keep the direction where every s_t underflows, and D's coefficients are ≤ 1.
    """
    output, rises = instances.head.read(log_weights.exp(), seen)
    margin = instances.labels * output
    # γ_t − γ̄ from differences to γ_α alone, so that it is exact to its last digit where s_α rounds to 1.
    apart = rises - (log_weights.exp() * rises).sum(-1, keepdim=True)
    # log |ℓ'(Yf)|: of logistic, σ(−Yf); of exponential, e^(−Yf); of log, 1/(Yf)
    slope = logsigmoid(-margin) if loss == "logistic" else -margin if loss == "exponential" else -margin.log()
    logs = log_weights + slope[..., None] + apart.abs().log()
    logs = logs.masked_fill(~seen.rest, -math.inf)
    top = logs.flatten(1).amax(-1)
    scale = torch.where(top.isfinite(), top, 0.0)
    # Off α ℓ'_i s_it (γ_it − γ̄_i)/n; the largest of a trial is 1, or 0 where nothing pulls.
    pull = -instances.labels[..., None] * apart.sign() * (logs - scale[:, None, None]).exp()
    along = (pull[..., None, :] @ seen.differences).squeeze(-2)
    return along.mT @ instances.queries, scale - math.log(instances.labels.shape[1])


def _stepped(
    parts: Sequence[Tensor], D: BilinearForm, lr: float, normaliser: Normaliser, floor: Float[Tensor, " trials"]
) -> tuple[Tensor, ...]:
    """W, or each factor, a step down: D for W; D Q for K and Dᵀ K for Q. The floor is in D's units."""
    if len(parts) == 1:
        return (parts[0] - lr * unit(D, floor),)
    K, Q = parts
    if normaliser == "form":
        D = unit(D, floor)
        return K - lr * D @ Q, Q - lr * D.mT @ K
    return K - lr * unit(D @ Q, floor), Q - lr * unit(D.mT @ K, floor)


def unit(
    slope: Float[Tensor, "trials rows columns"], floor: Float[Tensor, " trials"]
) -> Float[Tensor, "trials rows columns"]:
    """slope/(‖slope‖ + floor), by the largest entry first, so that no square underflows; 0 stays 0."""
    largest = slope.abs().amax((-2, -1), keepdim=True)
    safe = torch.where(largest > 0, largest, 1.0)
    scaled = slope / safe
    norm = torch.linalg.matrix_norm(scaled, keepdim=True) + floor[:, None, None] / safe
    return scaled / torch.where(largest > 0, norm, 1.0)


def _check(
    instances: Instances, parts: Sequence[Tensor], iterations: int, lr: float, loss: str, normaliser: str
) -> None:
    if iterations < 1:
        raise UsageError(f"iterations={iterations} trains nothing.", "Give at least 1.")
    if not (math.isfinite(lr) and lr > 0):
        raise UsageError(f"lr={lr} is no step downhill.", "Give a number above 0, such as 0.1.")
    if loss not in LOSSES:
        raise UsageError(f"There is no loss {loss!r}.", f"There are: {', '.join(LOSSES)}.")
    if normaliser not in NORMALISERS:
        raise UsageError(f"There is no normaliser {normaliser!r}.", f"There are: {', '.join(NORMALISERS)}.")
    for name, tensor in [("tokens", instances.tokens), ("queries", instances.queries), *(("start", p) for p in parts)]:
        if not tensor.isfinite().all():
            raise UsageError(f"The {name} hold NaN or Inf.", "Give finite numbers.")
    trials, d, d_query = len(instances.tokens), instances.tokens.shape[-1], instances.queries.shape[-1]
    wanted = [(trials, d, d_query)]
    if len(parts) == 2:
        m = parts[0].shape[-1]
        wanted = [(trials, d, m), (trials, d_query, m)]
        if any((part == 0).all() for part in parts):
            raise UsageError("K = 0 or Q = 0 is where training never leaves.", "Start from random factors.")
    shapes = [tuple(part.shape) for part in parts]
    if shapes != wanted:
        raise UsageError(f"The start has the shapes {shapes}.", f"These instances need {wanted}.")
    if len(parts) == 2 and normaliser == "form" and iterations > longest(lr):
        raise UsageError(
            f"K and Q could grow beyond float64 in {iterations} iterations with lr={lr}.",
            f"Choose normaliser=own, or at most {longest(lr)} iterations.",
        )


def longest(lr: float) -> int:
    """For how many iterations (1 + lr)^2t ≤ 1e250: W stays within float64, whatever the gradients."""
    return int(250 * math.log(10) / (2 * math.log1p(lr)))
