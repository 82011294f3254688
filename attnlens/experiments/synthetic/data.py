"""Random and golden instances of the synthetic experiments."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch

from attnlens import attsvm
from attnlens.attsvm.descent import Instances, Linear, PredictionHead, Relu
from attnlens.experiments.settings import NORMS, Figure, Progress, columns, silent
from attnlens.records.studies import Experiment

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


TOLERANCE = 1e-6
TIGHT = 1e-9
"""The relative gap to which both problems are solved, so that the tolerance is met with room."""
SOURCE = "Tarzanagh et al. 2023 and Max-margin token selection; solved with cvxpy and Clarabel"
PROMPTS: dict[str, tuple[list[list[list[float]]], list[int], float]] = {
    "prompt_a": ([[[-0.1, 1.0], [1.0, 0.0], [0.0, 0.0]]], [0], 0.5 / 1.01),
    "prompt_b": ([[[-0.1, 1.0], [1.0, 0.0], [0.0, 0.0]]], [1], 0.5),
    "prompt_c": ([[[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, -1.0]], [[0.0, 0.0], [0.5, 1.0]]], [1, 1, 1], 17 / 18),
}
"""Name → tokens, chosen, ½‖p‖²."""
PROMPT_D = 0.3131888
WRITTEN = {**NORMS, "half_square": "½‖p‖²", "rank": "rank"}
"""How each figure is written."""
LOCAL = {0: (2.9073738904096262, 4.348790123214846), 1: (2.6601569143692747, 4.6354791607992585)}
"""Seed → Frobenius and nuclear norm of the local-convergence instance, for its best tokens."""


def golden(progress: Progress = silent) -> Experiment:
    """½‖p‖² of the p-version, ‖W‖_F and ‖W‖_* of the instances, and the rank of the nuclear solution: to 1e-6."""
    rows: dict[str, Figure] = {}
    posed = instances()
    for done, (name, (problem, known)) in enumerate(posed.items()):
        rows |= _solved(name, problem, known)
        progress("golden instances", done + 1, len(posed))
    return Experiment(
        name="golden instances",
        question="Are the golden instances solved as they were by a general convex solver?",
        settings={"instances": len(posed), "solver_gap": TIGHT},
        source=SOURCE,
        **columns(rows, "the solver found no solution"),
    ).judged()


def instances() -> dict[str, tuple[attsvm.Problem, dict[str, float]]]:
    """Name → the problem and its known figures: half_square, frobenius, nuclear, rank."""
    posed = {
        name: (attsvm.prompt(torch.tensor(tokens).double(), torch.tensor(chosen)), {"half_square": known})
        for name, (tokens, chosen, known) in PROMPTS.items()
    }
    posed["prompt_d"] = (_prompt_d(), {"half_square": PROMPT_D})
    for name, one in shipped().items():
        tokens, queries = (torch.tensor(one[part], dtype=torch.float64) for part in ("X", "Z"))
        posed[name] = (attsvm.selection(tokens, queries, torch.tensor(one["chosen"])), one["known"])
    for seed, (frobenius, nuclear) in LOCAL.items():
        drawn = draw(6, 8, 10, 1, seed)
        problem = attsvm.selection(drawn.instances.tokens[0], drawn.instances.queries[0], drawn.best[0])
        posed[f"local_{seed}"] = (problem, {"frobenius": frobenius, "nuclear": nuclear})
    return posed


@cache
def shipped() -> dict[str, Any]:
    """The instances that are kept as data: tokens X, queries Z, head v, labels Y, chosen tokens, known figures."""
    text = files("attnlens.experiments.synthetic").joinpath("golden.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _prompt_d() -> attsvm.Problem:
    """Three inputs of seven tokens around (1, 0), (−1, 1) and (−½, −½), with a score of 1 or ½; the first is chosen."""
    n, T, d = 3, 7, 3
    tokens = torch.randn(n, T, d, generator=torch.Generator().manual_seed(0)) * 0.2
    tokens[:, 0] += torch.tensor([1.0, 0.0, 0.0])
    tokens[:, 1 : (T + 1) // 2] += torch.tensor([-1.0, 1.0, 0.0])
    tokens[:, -(T - 1) // 2 :] += torch.tensor([-0.5, -0.5, 0.0])
    tokens[:, 0, -1], tokens[:, 1:, -1] = 1.0, 0.5
    return attsvm.prompt(tokens.double(), torch.zeros(n, dtype=torch.long))


def _solved(name: str, problem: attsvm.Problem, known: dict[str, float]) -> dict[str, Figure]:
    frobenius = attsvm.solve(problem)
    norm = frobenius.norm
    figures: dict[str, float | None] = {"frobenius": norm, "half_square": None if norm is None else norm**2 / 2}
    if "nuclear" in known:
        nuclear = attsvm.solve_nuclear(problem, tolerance=TIGHT)
        figures["nuclear"] = nuclear.norm
        figures["rank"] = None if nuclear.W is None else attsvm.nuclear_rank(nuclear.W)
    return {
        f"{name}_{what}": Figure(
            figures[what], label=f"{name.replace('_', ' ')} {WRITTEN[what]}", published=value, tolerance=TOLERANCE
        )
        for what, value in known.items()
    }
