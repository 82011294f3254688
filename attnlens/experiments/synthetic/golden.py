"""Solves the golden instances, whose answers come from a general convex solver."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from attnlens import attsvm
from attnlens.experiments.figures import NORMS, Figure, columns
from attnlens.experiments.settings import Progress, silent
from attnlens.experiments.synthetic.data import draw
from attnlens.records.experiments import Experiment

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
            figures[what],
            label=f"{name.replace('_', ' ')} {WRITTEN[what]}",
            published=value,
            tolerance=TOLERANCE,
        )
        for what, value in known.items()
    }
