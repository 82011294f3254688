"""Normalised gradient descent on one-layer attention for many trials at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch.nn.functional import logsigmoid

from attnlens.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    BilinearForm = Float[Tensor, "trials d d_query"]
    Weights = Float[Tensor, "trials n T"]
    Output = tuple[Float[Tensor, "trials n"], Float[Tensor, "trials n T"]]  # (f, γ_t − γ_α)
    KeyQueryPair = tuple[Float[Tensor, "trials d m"], Float[Tensor, "trials d_query m"]]
    PerTrial = Float[Tensor, " trials"]
    Parts = tuple[Tensor, ...]  # W, or K and Q
    Slope = Float[Tensor, "trials rows columns"]

Loss = Literal["logistic", "exponential", "log"]
Normaliser = Literal["form", "own"]
LARGEST = torch.finfo(torch.float64).max


class Anchored(NamedTuple):
    """The tokens of each instance as differences from its anchor token α, so that small differences keep all digits."""

    chosen: Int[Tensor, "trials n"]  # Index α
    token: Float[Tensor, "trials n d"]  # x_α
    differences: Float[Tensor, "trials n T d"]  # u_t = x_t − x_α
    pulls: Bool[Tensor, "trials n T"]
    """True if token t can affect the gradient: t is allowed and differs from α (u_t ≠ 0)."""


@dataclass(frozen=True)
class Linear:
    """Prediction head h(a) = vᵀa."""

    v: Float[Tensor, "trials d"]

    def evaluate(self, weights: Weights, anchored: Anchored) -> Output:
        """Return the output f and the score differences γ_t − γ_α, where γ_t = vᵀx_t and α is the anchor."""
        v = self.v[:, None, :, None]
        rises = (anchored.differences @ v).squeeze(-1)
        return (anchored.token[..., None, :] @ v).flatten(2).squeeze(-1) + (weights * rises).sum(-1), rises


@dataclass(frozen=True)
class Relu:
    """Prediction head h(a) = 1ᵀ relu(V a)."""

    V: Float[Tensor, "trials hidden d"]

    def evaluate(self, weights: Weights, anchored: Anchored) -> Output:
        """Return the output f and γ_t − γ_α, where γ_t = Σ_j [(V a)_j > 0] (V x_t)_j and α is the anchor."""
        mean = anchored.token + (weights[..., None, :] @ anchored.differences).squeeze(-2)
        hidden = mean @ self.V.mT
        slope = (hidden > 0).to(hidden.dtype) @ self.V
        return hidden.relu().sum(-1), (anchored.differences @ slope[..., None]).squeeze(-1)


@dataclass(frozen=True)
class Scores:
    """Linear prediction head, given by the score γ_t of each token: f = Σ_t s_t γ_t for attention weights s."""

    scores: Float[Tensor, "trials n T"]

    def evaluate(self, weights: Weights, anchored: Anchored) -> Output:
        """Return the output f and the differences γ_t − γ_α of `scores`, where α is the anchor."""
        chosen = self.scores.gather(-1, anchored.chosen[..., None])
        rises = self.scores - chosen
        return chosen.squeeze(-1) + (weights * rises).sum(-1), rises


PredictionHead: TypeAlias = Linear | Relu | Scores
"""A function h of attention's output, f = h(Σ_t s_t x_t) for weights s; the score of token t is γ_t = ∇h·x_t."""


@dataclass(frozen=True)
class Instances:
    """Several trials of n instances i, with outputs f_i = h(Σ_t s_it x_it) for weights s_i = softmax_t(x_itᵀ W z_i).

    See Tarzanagh et al. 2023, Eq. 1.
    """

    tokens: Float[Tensor, "trials n T d"]  # Tokens x
    queries: Float[Tensor, "trials n d_query"]  # Queries z
    labels: Float[Tensor, "trials n"]  # Labels Y = ±1
    head: PredictionHead  # Prediction head h
    allowed: Bool[Tensor, "trials n T"] | None = None
    """Mask of the tokens that the softmax includes, such as a causal mask; None: all tokens."""

    def anchor(self, chosen: Int[Tensor, "trials n"]) -> Anchored:
        """Return the tokens as differences from the chosen token of each instance."""
        index = chosen[..., None, None].expand(-1, -1, 1, self.tokens.shape[-1])
        token = self.tokens.gather(2, index)
        differences = self.tokens - token
        pulls = (differences != 0).any(-1)
        return Anchored(chosen, token.squeeze(2), differences, pulls if self.allowed is None else pulls & self.allowed)

    def anchor_first(self) -> Anchored:
        """Return the tokens as differences from the first allowed token of each instance."""
        first = self.labels.new_zeros(self.labels.shape) if self.allowed is None else self.allowed.byte().argmax(-1)
        return self.anchor(first.long())

    def gaps(self, W: BilinearForm, anchored: Anchored) -> tuple[Anchored, Float[Tensor, "trials n T"]]:
        """Return the tokens anchored at the highest-scoring token α, and the gaps x_tᵀWz − x_αᵀWz ≤ 0 (masked: −∞)."""
        score = (self.queries @ W.mT)[..., None]
        gaps = self._hide_masked((anchored.differences @ score).squeeze(-1))
        if (gaps > 0).any():
            anchored = self.anchor(torch.where((gaps > 0).any(-1), gaps.argmax(-1), anchored.chosen))
            # The new anchor has the largest score, so a gap above 0 is a rounding error.
            gaps = self._hide_masked((anchored.differences @ score).squeeze(-1)).clamp(max=0)
        return anchored, gaps

    def _hide_masked(self, gaps: Float[Tensor, "trials n T"]) -> Float[Tensor, "trials n T"]:
        return gaps if self.allowed is None else gaps.masked_fill(~self.allowed, -math.inf)


@dataclass(frozen=True)
class Descent:
    """Values at the recorded iterations of a descent, and its final state."""

    steps: tuple[int, ...]  # Recorded iterations; 0 is the start
    W: Float[Tensor, "steps trials d d_query"]  # Form W, or K Qᵀ
    chosen: Int[Tensor, "steps trials n"]  # α, the token with the largest weight
    largest: Float[Tensor, "steps trials n"]  # Largest softmax weight
    log_weights: Float[Tensor, "trials n T"]  # log s at the end; −∞ for tokens that are not allowed
    stationary: Bool[Tensor, " trials"]
    """True if the gradient was exactly 0 at the last step, so that the trial no longer moves."""

    @property
    def norm(self) -> Float[Tensor, "steps trials"]:
        """‖W‖_F of each trial at each recorded step."""
        norm: Tensor = torch.linalg.matrix_norm(self.W)
        return norm

    def correlation(self, direction: BilinearForm) -> Float[Tensor, "steps trials"]:
        """Return ⟨W, D⟩/(‖W‖‖D‖) for one direction D per trial; NaN if W or D is 0, or D is NaN."""
        inner = (self.W * direction).sum((-2, -1))
        cosine: Tensor = inner / (self.norm * torch.linalg.matrix_norm(direction))
        return cosine


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
    progress: Callable[[int, int], object] = lambda _done, _total: None,
) -> Descent:
    """Iterate W ← W − lr·∇_W/‖∇_W‖_F on the mean loss, from `start` (Tarzanagh et al. 2023, W-GD, normalised).

    If `start` is a pair of factors (K, Q) with W = KQᵀ, the steps are K ← K − lr·∇_W Q/c and Q ← Q − lr·∇_WᵀK/c. With
    the normaliser "form", c is ‖∇_W‖ in both steps, and ‖W‖ after t steps grows at most as (1 + lr)^(2t); with "own",
    each step is divided by its own norm, and ‖W‖ grows at most as t². `floor` is added to every norm: with 2.2e-16,
    as in the published code, a trial stops once its gradient vanishes; with 0, it follows even the tiniest gradient.
    The losses are log(1 + e^(−Yf)) ("logistic"), e^(−Yf) ("exponential") and −log(Yf) ("log"), which needs
    Yf > 0.

    `record` lists the iterations to record (0 is the start); the last iteration is always recorded. `progress` is
    called with the number of finished iterations and `iterations`. Raises UsageError for iterations < 1, lr ≤ 0, an
    unknown loss or normaliser, numbers that are not finite, mismatched shapes, a factor that is 0, and, with "form", so
    many iterations that W could overflow.
    """
    parts: Parts = (start,) if isinstance(start, torch.Tensor) else start
    _check(instances, parts, iterations, lr, loss, normaliser)
    steps = sorted({step for step in record if 0 <= step < iterations} | {iterations})
    anchored, records, stationary = instances.anchor_first(), [], torch.zeros(())
    for step in range(iterations + 1):
        W = parts[0] if len(parts) == 1 else parts[0] @ parts[1].mT
        anchored, gaps = instances.gaps(W, anchored)
        log_weights = gaps.log_softmax(-1)
        if step in steps:
            records.append((W, anchored.chosen, log_weights.amax(-1).exp()))
        if step == iterations:
            break
        D, scale = gradient(instances, anchored, log_weights, loss)
        stationary = (D == 0).flatten(1).all(-1)
        parts = _step(parts, D, lr, normaliser, floor * (-scale).exp().clamp(max=LARGEST))  # 0 · ∞ is NaN
        progress(step + 1, iterations)
    forms, chosen, largest = (torch.stack(column) for column in zip(*records, strict=True))
    return Descent(tuple(steps), forms, chosen, largest, log_weights, stationary)


def gradient(
    instances: Instances, anchored: Anchored, log_weights: Weights, loss: Loss
) -> tuple[BilinearForm, PerTrial]:
    """Return (D, c) with D·e^c = ∇ = (1/n) Σ_i ℓ'_i Σ_{t≠α} s_it (γ_it − γ̄_i) u_it z_iᵀ, the mean loss's gradient.

    Here u_it = x_it − x_iα, and γ̄_i is the mean of γ_it weighted by s_it. In the textbook formula Σ_t s_t (γ_t −
    f) x_t, the term t = α nearly cancels all others: no digits remain if 1 − s_α < 1e-16. Logarithms keep the direction
    accurate even if all s_t underflow. The coefficients of u_it z_iᵀ in D are at most 1 in absolute value.
    """
    output, rises = instances.head.evaluate(log_weights.exp(), anchored)
    margin = instances.labels * output
    # Computed from differences to γ_α, γ_t − γ̄ is exact even if s_α rounds to 1.
    deviations = rises - (log_weights.exp() * rises).sum(-1, keepdim=True)
    # log |ℓ'(Yf)|, where |ℓ'| is σ(−Yf) for logistic, e^(−Yf) for exponential, and 1/(Yf) for log
    slope = logsigmoid(-margin) if loss == "logistic" else -margin if loss == "exponential" else -margin.log()
    logs = log_weights + slope[..., None] + deviations.abs().log()
    logs = logs.masked_fill(~anchored.pulls, -math.inf)
    largest = logs.flatten(1).amax(-1)
    scale = torch.where(largest.isfinite(), largest, 0.0)
    # ℓ'_i s_it (γ_it − γ̄_i)/n for t ≠ α, scaled so that the largest of a trial is 1, or 0 if its gradient is 0.
    pull = -instances.labels[..., None] * deviations.sign() * (logs - scale[:, None, None]).exp()
    by_query = (pull[..., None, :] @ anchored.differences).squeeze(-2)
    return by_query.mT @ instances.queries, scale - math.log(instances.labels.shape[1])


def _step(parts: Parts, D: BilinearForm, lr: float, normaliser: Normaliser, floor: PerTrial) -> Parts:
    """Return W − lr·D/‖D‖, or K − lr·DQ/c and Q − lr·DᵀK/c, with c as in `descend`; `floor` is in the units of D."""
    if len(parts) == 1:
        return (parts[0] - lr * unit(D, floor),)
    K, Q = parts
    if normaliser == "form":
        D = unit(D, floor)
        return K - lr * D @ Q, Q - lr * D.mT @ K
    return K - lr * unit(D @ Q, floor), Q - lr * unit(D.mT @ K, floor)


def unit(slope: Slope, floor: PerTrial) -> Slope:
    """Return slope/(‖slope‖ + floor); a zero slope stays 0. Entries are scaled so that squares cannot underflow."""
    largest = slope.abs().amax((-2, -1), keepdim=True)
    safe = torch.where(largest > 0, largest, 1.0)
    scaled = slope / safe
    norm = torch.linalg.matrix_norm(scaled, keepdim=True) + floor[:, None, None] / safe
    return scaled / torch.where(largest > 0, norm, 1.0)


def _check(instances: Instances, parts: Parts, iterations: int, lr: float, loss: str, normaliser: str) -> None:
    if not (iterations >= 1 and math.isfinite(lr) and lr > 0):
        raise UsageError(
            f"iterations ({iterations}) and lr ({lr}) must be positive and finite.", "Pass finite numbers above 0."
        )
    for option, value, type_ in (("loss", loss, Loss), ("normaliser", normaliser, Normaliser)):
        if value not in get_args(type_):
            raise UsageError(f"Unknown {option} {value!r}.", f"Choose from: {', '.join(get_args(type_))}.")
    for name, tensor in [("tokens", instances.tokens), ("queries", instances.queries), *(("start", p) for p in parts)]:
        if not tensor.isfinite().all():
            raise UsageError(f"`{name}` contains NaN or Inf.", "Pass finite numbers.")
    trials, widths = len(instances.tokens), (instances.tokens.shape[-1], instances.queries.shape[-1])
    needed = [(trials, *widths)] if len(parts) == 1 else [(trials, width, parts[0].shape[-1]) for width in widths]
    shapes = [tuple(part.shape) for part in parts]
    if shapes != needed:
        raise UsageError(f"`start` has tensors of shapes {shapes}, not {needed}.", "Pass tensors of these shapes.")
    if len(parts) == 1:
        return
    if any((part == 0).all() for part in parts):
        raise UsageError("K or Q is 0, so the gradient of the other factor is 0.", "Pass nonzero K and Q.")
    if normaliser == "form" and iterations > most_iterations(lr):
        raise UsageError(
            f"K and Q could overflow float64 within {iterations} iterations with lr={lr}.",
            f'Pass normaliser="own", or at most {most_iterations(lr)} iterations.',
        )


def most_iterations(lr: float) -> int:
    """Return the largest t with (1 + lr)^(2t) ≤ 1e250, so that W cannot overflow float64 within t iterations."""
    return int(250 * math.log(10) / (2 * math.log1p(lr)))
