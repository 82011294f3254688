"""Random instances and starts of the synthetic experiments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnlens import attsvm
from attnlens.attsvm.instances import Instances, Linear, PredictionHead, Relu

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True)
class Drawn:
    """Random instances of one size, and what is still to be drawn for them."""

    instances: Instances
    generators: list[torch.Generator]
    """One a trial, behind its data."""

    @property
    def best(self) -> Int[Tensor, "trials n"]:
        """argmax_t Y·γ_t of a linear head."""
        instances = self.instances
        _, rises = instances.head.read(torch.ones(instances.tokens.shape[:3]).double(), instances.first())
        return (instances.labels[..., None] * rises).argmax(-1)


def draw(n: int, T: int, d: int, trials: int, seed: int, attention: str = "cross", head: str = "linear") -> Drawn:
    """Rows of X and Z and the head on the unit sphere, Y = ±1; drawn in float32 in the order head, Y, X, Z.

    Trial i has its own torch.Generator(seed + i). Self-attention: z_i = x_i1. The ReLU head has d hidden units,
    ‖V‖_F = 1 (Tarzanagh et al. 2023, section 4).
    """
    generators = [torch.Generator().manual_seed(seed + trial) for trial in range(trials)]
    parts = [_one(n, T, d, head, generator) for generator in generators]
    read, labels, tokens, queries = (torch.stack(column).double() for column in zip(*parts, strict=True))
    made: PredictionHead = Linear(read) if head == "linear" else Relu(read)
    z = queries if attention == "cross" else tokens[:, :, 0]
    return Drawn(Instances(tokens, z, labels, made), generators)


def chunks(trials: int, seed: int, size: int = 50) -> list[tuple[int, int]]:
    """(trials, first seed) of pieces that stay in the processor's cache."""
    return [(min(size, trials - first), seed + first) for first in range(0, trials, size)]


def _one(n: int, T: int, d: int, head: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    read = torch.randn(d, generator=generator) if head == "linear" else torch.randn(d, d, generator=generator)
    labels = torch.randn(n, generator=generator).sign()
    tokens = torch.randn(n, T, d, generator=generator)
    queries = torch.randn(n, d, generator=generator)
    unit = (part / part.norm(dim=-1, keepdim=True) for part in (tokens, queries))
    return read / read.norm(), labels, *unit


def starts(
    drawn: Drawn, m: int, start: str
) -> tuple[Float[Tensor, "trials d d"], tuple[Float[Tensor, "trials d m"], Float[Tensor, "trials d m"]]]:
    """(W, (K, Q)): zeros, or uniform in ±1/√d, as torch's linear layers begin; K and Q never begin at 0."""
    d = drawn.instances.tokens.shape[-1]

    def uniform(columns: int) -> Tensor:
        rows = [torch.rand(d, columns, generator=generator) for generator in drawn.generators]
        return (2 * torch.stack(rows).double() - 1) / math.sqrt(d)

    W, K, Q = uniform(d), uniform(m), uniform(m)
    return (torch.zeros_like(W) if start == "zero" else W), (K, Q)


def directions(
    solve: Callable[[attsvm.Problem], attsvm.Solution],
    instances: Instances,
    chosen: Int[Tensor, "trials n"],
    tick: Callable[[int, int], None],
) -> Float[Tensor, "trials d d_query"]:
    """The SVM solution of each trial for the tokens that it has selected; NaN where nothing separates them."""
    d, d_query = instances.tokens.shape[-1], instances.queries.shape[-1]
    found = torch.full((len(chosen), d, d_query), torch.nan, dtype=torch.float64)
    for trial, tokens in enumerate(instances.tokens):
        W = solve(attsvm.selection(tokens, instances.queries[trial], chosen[trial])).W
        if W is not None:
            found[trial] = W
        tick(trial + 1, len(chosen))
    return found


def grid(iterations: int) -> list[int]:
    """1, 2, 3, 5, 10, 20, 30, 50, … up to the last iteration."""
    steps = {factor * 10**power for power in range(len(str(iterations))) for factor in (1, 2, 3, 5)}
    return sorted({step for step in steps if step < iterations} | {iterations})
