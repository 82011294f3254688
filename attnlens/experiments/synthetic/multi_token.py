"""Convergence to W_fin + R · W_mm of the generalised SVM, where several tokens keep their weight."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from pydantic import JsonValue

from attnlens import attsvm
from attnlens.attsvm.descent import Descent, descend
from attnlens.attsvm.instances import Instances
from attnlens.errors import UnposedError
from attnlens.experiments.figures import Figure, averaged, columns, curve
from attnlens.experiments.settings import ExperimentSettings, Progress, Study, uses
from attnlens.experiments.synthetic.data import chunks, draw, starts
from attnlens.records.experiments import Curve, Experiment

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

GONE, KEPT = 1e-6, 1e-3
"""A token is let go of below the one and kept above the other; an instance with a weight between them is undecided."""
DIRECTIONS = {"svm_equivalent": "SVM equivalent", "W_mm": "W_mm", "single_token": "single token"}
"""How each direction is written."""
FLOOR = 2.2e-16
"""What the published code adds to ‖∇‖: training stops where it vanishes. Without it, it goes on along what is left: the
inputs whose ReLUs are not all off, which then decide alone, and 1 − correlation ends at 0.08 where d = 4."""
PUBLISHED = {
    "svm_equivalent_d4": 0.034,
    "svm_equivalent_d6": 0.017,
    "svm_equivalent_d8": 0.011,
    "svm_equivalent_d10": 0.0056,
    "W_mm_d4": 0.07,
    "W_mm_d6": 0.043,
    "W_mm_d8": 0.015,
    "W_mm_d10": 0.0087,
}
READING = 0.3
"""How far a figure read off a logarithmic axis may be off, of itself, beside three standard errors of ours."""
SOURCE = "Tarzanagh et al. 2023, section 5, read off a logarithmic figure: means over 500 accepted runs"


def multi_token(settings: ExperimentSettings, published: bool, progress: Progress) -> Experiment:
    """Mean of 1 − correlation of W to W_fin + R·W_mm, to W_mm, and to the single-token SVM, by d.

    Kept instances have a label −1, no weight in (GONE, KEPT], some ≤ GONE, and both SVMs.
    """
    s = settings
    found = {d: _size(s, d, place, progress) for place, d in enumerate(s.d)}
    known = PUBLISHED if published else {}
    rows = {
        f"{name}_d{d}": _figure(kept[:, column], f"{DIRECTIONS[name]}, d = {d}", known.get(f"{name}_d{d}"))
        for d, kept in found.items()
        for column, name in enumerate(DIRECTIONS)
    }
    shares: dict[str, JsonValue] = {f"accepted_d{d}": len(kept) / s.trials for d, kept in found.items()}
    return Experiment(
        name="multi-token",
        question="Where several tokens keep their weight, does descent end at W_fin + R·W_mm of the generalised SVM?",
        settings={"gone": GONE, "kept": KEPT, "floor": FLOOR, "hidden_units": "d", **shares},
        source=SOURCE if published else None,
        axis="d",
        curves={
            name.replace("_", " "): _by_d(found, column, label)
            for column, (name, label) in enumerate(DIRECTIONS.items())
        },
        **columns(rows, "no instance passes the filter", {f"accepted_d{d}": f"accepted, d = {d}" for d in found}),
    )


def _figure(values: Float[Tensor, " kept"], label: str, published: float | None) -> Figure:
    found = averaged(values, label)
    if published is None:
        return found
    return replace(found, published=published, tolerance=READING * published + 3 * (found.error or 0.0))


def _size(s: ExperimentSettings, d: int, place: int, progress: Progress) -> Float[Tensor, "kept 3"]:
    """1 − correlation to each of DIRECTIONS, of the instances that are kept."""
    rows: list[list[float]] = []
    done = 0
    for trials, seed in chunks(s.trials, s.seed, 250):
        drawn = draw(s.n, s.T, d, trials, seed, s.attention, s.head)

        def tick(step: int, _steps: int, first: int = done, trials: int = trials) -> None:
            part = (first + trials * step / s.iterations) / s.trials
            progress("multi-token", round(1000 * (place + part)), 1000 * len(s.d))

        W, _ = starts(drawn, 1, s.start)
        descent = descend(drawn.instances, W, s.iterations, lr=s.lr, loss=s.loss, floor=FLOOR, progress=tick)
        weights = descent.log_weights.exp()
        for trial in decided(drawn.instances, weights).nonzero().flatten().tolist():
            if (row := compared(drawn.instances, descent, trial)) is not None:
                rows.append(row)
        done += trials
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, len(DIRECTIONS))


def decided(instances: Instances, weights: Float[Tensor, "trials n T"]) -> Bool[Tensor, " trials"]:
    """The published filter: a label −1, no weight between GONE and KEPT, and some token let go of."""
    between = ((weights > GONE) & (weights <= KEPT)).flatten(1).any(-1)
    return (instances.labels < 0).any(-1) & ~between & (weights <= GONE).flatten(1).any(-1)


def compared(instances: Instances, descent: Descent, trial: int) -> list[float] | None:
    """1 − correlation of the trained W to each of DIRECTIONS; None where one of the SVMs has no solution."""
    tokens, queries, W = instances.tokens[trial], instances.queries[trial], descent.W[-1, trial]
    weights = descent.log_weights[trial].exp()
    several = attsvm.solve(attsvm.selection_sets(tokens, queries, weights > KEPT)).W
    single = attsvm.solve(attsvm.selection(tokens, queries, descent.chosen[-1, trial])).W
    finite = _finite(tokens, queries, weights, W)
    if several is None or single is None or finite is None:
        return None
    R = float(((W - finite) * several).sum() / several.square().sum())
    return [1 - _correlation(W, direction) for direction in (finite + R * several, several, single)]


def _finite(tokens: Tensor, queries: Tensor, weights: Tensor, W: Tensor) -> Tensor | None:
    """W_fin; 0 where every input keeps one token, None where the log-ratios contradict each other."""
    try:
        return attsvm.solve(attsvm.finite_part(tokens, queries, weights, weights > KEPT)).W
    except UnposedError:
        return torch.zeros_like(W)


def _correlation(W: Tensor, direction: Tensor) -> float:
    return float((W * direction).sum() / (W.norm() * direction.norm()))


def _by_d(found: dict[int, Float[Tensor, "kept 3"]], column: int, label: str) -> Curve:
    """Each size has kept its own number of instances: the shorter columns end in NaN."""
    columns = [rows[:, column] for rows in found.values()]
    most = max(1, *(len(column) for column in columns))
    padded = [torch.nn.functional.pad(column, (0, most - len(column)), value=torch.nan) for column in columns]
    return curve(list(found), torch.stack(padded), "1 − correlation", label=label)


FULL = ExperimentSettings(trials=1000, n=3, T=4, d=(4, 6, 8, 10), head="relu", iterations=2001)
QUICK = replace(FULL, trials=150, d=(4, 6))
STUDY = Study(multi_token, FULL, QUICK, uses("multi-token"))
