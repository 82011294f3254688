"""Rank of the nuclear solution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from attnlens import attsvm
from attnlens.experiments.figures import NORMS, Figure, Published, averaged, columns, curve
from attnlens.experiments.settings import ExperimentSettings, Progress, Study, uses
from attnlens.experiments.synthetic.data import directions, draw
from attnlens.records.experiments import Experiment

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

TIGHT = 1e-8
"""The relative gap to which the nuclear problem is solved, so that a singular value of 0 is below 1e-5·σ₁."""
SVMS: dict[str, Callable[[attsvm.Problem], attsvm.Solution]] = {
    "nuclear": partial(attsvm.solve_nuclear, tolerance=TIGHT),
    "frobenius": attsvm.solve,
}
PUBLISHED: dict[str, Published] = {
    "nuclear_least": {"published": 2.0, "bound": "at least"},
    "nuclear_most": {"published": 4.0, "bound": "at most"},
    "beyond_bound": {"published": 0.0, "bound": "at most"},
}
SOURCE = "Tarzanagh et al. 2023, Lemma 1: rank ≤ min(n, d); 2 to 4 with a tight solver (the published one reads 5 to 8)"


def rank(settings: ExperimentSettings, published: bool, progress: Progress) -> Experiment:
    """Number of σ > 1e-5·σ₁ of the nuclear and Frobenius solutions for the best tokens, by d.

    `nuclear_least` and `nuclear_most` are the least and the largest mean rank over d, `beyond_bound` is the largest
    rank − min(n, d).
    """
    s = settings
    ranks = {(d, svm): _ranks(s, d, svm, progress) for d in s.d for svm in SVMS}
    rows = {f"{svm}_d{d}": averaged(found, f"{NORMS[svm]}, d = {d}") for (d, svm), found in ranks.items()}
    means = [value for d in s.d if (value := rows[f"nuclear_d{d}"].value) is not None]
    beyond = [found[~found.isnan()] - min(s.n, d) for (d, svm), found in ranks.items() if svm == "nuclear"]
    most = max((float(row.max()) for row in beyond if len(row)), default=None)
    for name, value, label in (
        ("nuclear_least", min(means, default=None), "nuclear, least mean"),
        ("nuclear_most", max(means, default=None), "nuclear, largest mean"),
        ("beyond_bound", most, "largest rank − min(n, d)"),
    ):
        rows[name] = Figure(value, label=label, **(PUBLISHED[name] if published else {}))
    return Experiment(
        name="rank",
        question="Of which rank is the nuclear solution, and is it at most min(n, d)?",
        settings={"threshold": 1e-5, "solver_gap": TIGHT},
        source=SOURCE if published else None,
        axis="d",
        curves={svm: curve(s.d, torch.stack([ranks[d, svm] for d in s.d]), "rank", label=NORMS[svm]) for svm in SVMS},
        **columns(rows, "nothing separates the best tokens"),
    )


def _ranks(s: ExperimentSettings, d: int, svm: str, progress: Progress) -> Float[Tensor, " trials"]:
    """The rank in each trial; NaN where there is no solution."""
    drawn = draw(s.n, s.T, d, s.trials, s.seed, s.attention)
    found = directions(SVMS[svm], drawn.instances, drawn.best, partial(progress, f"rank, {svm}, d={d}"))
    there = [torch.nan if W.isnan().any() else float(attsvm.nuclear_rank(W)) for W in found]
    return torch.tensor(there, dtype=torch.float64)


FULL = ExperimentSettings(trials=50, d=(4, 6, 8, 10, 15, 20))
QUICK = replace(FULL, trials=10, d=(6, 10))
STUDY = Study(rank, FULL, QUICK, uses("rank"))
