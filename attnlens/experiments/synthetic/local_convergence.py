"""Convergence of descent on W to the Frobenius SVM, and on (K, Q) to the nuclear one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from attnlens import attsvm
from attnlens.attsvm.descent import Descent, descend, longest
from attnlens.attsvm.instances import Instances
from attnlens.experiments.figures import CORRELATION, NORMS, Figure, Published, averaged, columns, curve
from attnlens.experiments.settings import ExperimentSettings, Progress, Study, uses
from attnlens.experiments.synthetic.data import directions, draw, grid, starts
from attnlens.records.experiments import Curve, Experiment

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LONGER = 5
"""At the published settings W trains on for so many times the iterations, where the textbook's gradient decays."""
PUBLISHED: dict[str, Published] = {
    "W_to_frobenius": {"published": 0.991, "tolerance": 0.01},
    "W_to_nuclear": {"published": 0.858, "tolerance": 0.03},
    "KQ_to_nuclear": {"published": 0.996, "tolerance": 0.01},
    "KQ_to_frobenius": {"published": 0.851, "tolerance": 0.03},
    "W_to_frobenius_longer": {"published": 0.9998, "tolerance": 0.0001, "bound": "at least"},
}
SOURCE = "Tarzanagh et al. 2023, Fig. 4 (0.99 and 0.86); to three digits by a reimplementation on 100 seeds"
SVMS: dict[str, Callable[[attsvm.Problem], attsvm.Solution]] = {
    "frobenius": attsvm.solve,
    "nuclear": partial(attsvm.solve_nuclear, tolerance=1e-6),
}


@dataclass(frozen=True)
class DescentFigures:
    """What one parameterisation's descent came to."""

    rows: dict[str, Figure]
    curves: dict[str, Curve]
    longer: dict[str, Figure]
    """The figure of the longer training, where there is one; it stands below all others."""


def local_convergence(settings: ExperimentSettings, published: bool, progress: Progress) -> Experiment:
    """Mean over trials of ⟨W, W_svm⟩/(‖W‖‖W_svm‖), the SVM posed on the tokens that the trained model selects.

    `W_to_frobenius_longer` is the median after LONGER times the iterations.
    """
    s = settings
    drawn = draw(s.n, s.T, s.d[0], s.trials, s.seed, s.attention, s.head)
    W, factors = starts(drawn, s.m or s.d[0], s.start)
    wanted = {name: start for name, start in (("W", W), ("KQ", factors)) if s.parameterisation in ("both", name)}
    known = PUBLISHED if published else {}
    reads = [_trained(drawn.instances, start, s, known, name, progress) for name, start in wanted.items()]
    rows = {name: row for read in reads for name, row in read.rows.items()}
    longer = {name: row for read in reads for name, row in read.longer.items()}
    return Experiment(
        name="local convergence",
        question="Does descent end at the max-margin solution for the tokens that it selects?",
        settings={"m": s.m or s.d[0], "normaliser": _normaliser(s)},
        source=SOURCE if published else None,
        curves={name: found for read in reads for name, found in read.curves.items()},
        **columns(rows | longer, "no trial's selection is separable"),
    )


def _normaliser(s: ExperimentSettings) -> attsvm.Normaliser:
    """Both factors by ‖∇_W‖, as the published figures; each by its own norm where that would overflow."""
    return "form" if s.iterations <= longest(s.lr) else "own"


def _trained(
    instances: Instances,
    start: Tensor | tuple[Tensor, Tensor],
    s: ExperimentSettings,
    known: Mapping[str, Published],
    name: str,
    progress: Progress,
) -> DescentFigures:
    longer = f"{name}_to_frobenius_longer"
    last = LONGER * s.iterations if longer in known else s.iterations
    descent = descend(
        instances,
        start,
        last,
        lr=s.lr,
        loss=s.loss,
        normaliser=_normaliser(s),
        record={*grid(s.iterations), *grid(last)},
        progress=partial(progress, f"local convergence, {name}"),
    )
    at = descent.steps.index(s.iterations) + 1
    short = replace(descent, **{name: getattr(descent, name)[:at] for name in ("steps", "W", "chosen", "largest")})
    rows, curves = dict[str, Figure](), dict[str, Curve]()
    for svm in SVMS:
        read, words = _correlations(instances, short, name, svm, progress), f"{name} to {NORMS[svm]}"
        rows[f"{name}_to_{svm}"] = averaged(read[-1], words, **known.get(f"{name}_to_{svm}", {}))
        curves[f"{name} to {svm}"] = curve(short.steps, read, CORRELATION, bounded=True, label=words)
    rows[f"{name}_largest_weight"] = averaged(descent.largest[at - 1].mean(-1))
    if last == s.iterations:
        return DescentFigures(rows, curves, {})
    end, words = _correlations(instances, descent, name, "frobenius", progress), f"{name} to Frobenius, longer"
    curves[f"{name} to frobenius, longer"] = curve(descent.steps, end, CORRELATION, bounded=True, label=words)
    return DescentFigures(rows, curves, {longer: Figure(end[-1].nanmedian().item(), label=words, **known[longer])})


def _correlations(
    instances: Instances, descent: Descent, name: str, svm: str, progress: Progress
) -> Float[Tensor, "steps trials"]:
    """To the SVM of the tokens that are selected at the last step; NaN where nothing separates them."""
    tick = partial(progress, f"local convergence, {name}, {svm} SVM")
    return descent.correlation(directions(SVMS[svm], instances, descent.chosen[-1], tick))


FULL = ExperimentSettings(trials=100)
STUDY = Study(local_convergence, FULL, replace(FULL, trials=20), uses("local-convergence"))
