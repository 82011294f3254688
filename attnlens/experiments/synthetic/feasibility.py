"""How often some W separates arbitrary tokens of random data, by size."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnlens import attsvm
from attnlens.experiments.figures import Figure, columns, share_of
from attnlens.experiments.settings import ExperimentSettings, Progress, Study, uses
from attnlens.experiments.synthetic.data import draw
from attnlens.records.experiments import Curve, Experiment

SIZES = ((5, 5), (10, 5), (5, 10))
"""(n, T)."""
PUBLISHED = {
    (5, 5): {1: 0.0, 2: 0.15, 3: 0.97, 4: 1.0},
    (10, 5): {3: 0.12, 4: 0.92, 5: 1.0},
    (5, 10): {2: 0.0, 3: 0.63, 4: 1.0},
}
PUBLISHED_TRIALS = 60
EQUAL = "in one dimension tokens of unit length are ±1, and equal ones can't be separated"
SOURCE = "Tarzanagh et al. 2023, section 3.1, by a reimplementation (60 draws)"


def feasibility(settings: ExperimentSettings, published: bool, progress: Progress) -> Experiment:
    """Share of draws for which the SVM of each input's first token (any other is as good) has a solution, by d.

    `sure_n_T` is that share at d = max(T−1, n), where theory puts it at 1 for almost all data; not at d = 1, where
    tokens of unit length are ±1 and often equal. At another n or T than the default, that size alone. The tolerance is
    three standard errors of the difference of the two shares.
    """
    s = settings
    sizes = SIZES if (s.n, s.T) == (FULL.n, FULL.T) else ((s.n, s.T),)
    shares = {(n, T): {d: _share(s, n, T, d, progress) for d in sorted({*s.d, max(T - 1, n)})} for n, T in sizes}
    known = PUBLISHED if published else {}
    rows = {
        f"n{n}_T{T}_d{d}": share_of(
            share, s.trials, f"n = {n}, T = {T}, d = {d}", known.get((n, T), {}).get(d), PUBLISHED_TRIALS
        )
        for (n, T), row in shares.items()
        for d, share in row.items()
    }
    for n, T in sizes:
        share = shares[n, T][d] if (d := max(T - 1, n)) > 1 else None
        rows[f"sure_n{n}_T{T}"] = Figure(share, label=f"sure, n = {n}, T = {T}", published=1.0 if published else None)
    return Experiment(
        name="feasibility",
        question="For which sizes does any W separate arbitrary tokens of random data?",
        settings={"sizes": [f"n={n} T={T}" for n, T in sizes]},
        source=SOURCE if published else None,
        axis="d",
        curves={
            f"n={n}, T={T}": Curve(steps=list(row), median=list(row.values()), quantity="share separable", bounded=True)
            for (n, T), row in shares.items()
        },
        **columns(rows, EQUAL),
    )


def _share(s: ExperimentSettings, n: int, T: int, d: int, progress: Progress) -> float:
    instances = draw(n, T, d, s.trials, s.seed, s.attention).instances
    there, first = 0, torch.zeros(n, dtype=torch.long)
    for trial in range(s.trials):
        problem = attsvm.selection(instances.tokens[trial], instances.queries[trial], first)
        # A verdict that the solver leaves open (None) has no proof of separability, and counts as none.
        there += attsvm.separable(problem).verdict is True
        progress(f"feasibility, n={n} T={T} d={d}", trial + 1, s.trials)
    return there / s.trials


FULL = ExperimentSettings(trials=60, n=5, T=5, d=(1, 2, 3, 4, 5))
STUDY = Study(feasibility, FULL, replace(FULL, trials=30), uses("feasibility"))
