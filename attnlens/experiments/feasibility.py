"""How often some W separates arbitrary tokens of random data, by size."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnlens import attsvm
from attnlens.experiments.data import draw
from attnlens.experiments.global_selection import spread
from attnlens.experiments.options import Progress, Settings, Study
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


def feasibility(settings: Settings, published: bool, progress: Progress) -> Experiment:
    """Share of draws for which the SVM of each input's first token (any other is as good) has a solution, by d.

    `sure_n_T` is that share at d = max(T−1, n), where theory puts it at 1 for almost all data; not at d = 1, where
    tokens of unit length are ±1 and often equal. At another n or T than the default, that size alone. The tolerance is
    three standard errors of the difference of the two shares.
    """
    s = settings
    sizes = SIZES if (s.n, s.T) == (FULL.n, FULL.T) else ((s.n, s.T),)
    shares = {(n, T): {d: _share(s, n, T, d, progress) for d in sorted({*s.d, max(T - 1, n)})} for n, T in sizes}
    flat = {f"n{n}_T{T}_d{d}": share for (n, T), row in shares.items() for d, share in row.items()}
    sure = {f"sure_n{n}_T{T}": shares[n, T][d] if (d := max(T - 1, n)) > 1 else None for n, T in sizes}
    known = {f"n{n}_T{T}_d{d}": share for (n, T), row in PUBLISHED.items() for d, share in row.items()}
    known = {name: share for name, share in known.items() if name in flat} if published else {}
    theory = dict.fromkeys(sure, 1.0) if published else {}
    return Experiment(
        name="feasibility",
        question="For which sizes does any W separate arbitrary tokens of random data?",
        settings={"sizes": [f"n={n} T={T}" for n, T in sizes]},
        final=flat | sure,
        reasons={name: EQUAL for name, share in sure.items() if share is None},
        errors={name: (share * (1 - share) / s.trials) ** 0.5 for name, share in flat.items()},
        published=known | theory or None,
        tolerance={name: spread(share, s.trials, PUBLISHED_TRIALS) for name, share in known.items()} or None,
        source=SOURCE if known else None,
        axis="d",
        curves={f"n={n}, T={T}": Curve(steps=list(row), median=list(row.values())) for (n, T), row in shares.items()},
    )


def _share(s: Settings, n: int, T: int, d: int, progress: Progress) -> float:
    instances = draw(n, T, d, s.trials, s.seed, s.attention).instances
    there, first = 0, torch.zeros(n, dtype=torch.long)
    for trial in range(s.trials):
        problem = attsvm.selection(instances.tokens[trial], instances.queries[trial], first)
        # A verdict that the solver leaves open (None) has no proof of separability, and counts as none.
        there += attsvm.separable(problem).verdict is True
        progress(f"feasibility, n={n} T={T} d={d}", trial + 1, s.trials)
    return there / s.trials


FULL = Settings(trials=60, n=5, T=5, d=(1, 2, 3, 4, 5))
STUDY = Study(feasibility, FULL, replace(FULL, trials=30), frozenset({"trials", "seed", "n", "T", "d", "attention"}))
