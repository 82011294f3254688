"""How often descent from zero selects the best token of every input, by dimension."""

from __future__ import annotations

from dataclasses import replace

from attnlens.attsvm.descent import descend
from attnlens.experiments.figures import columns, share_of
from attnlens.experiments.settings import ExperimentSettings, Progress, Study, uses
from attnlens.experiments.synthetic.data import chunks, draw, starts
from attnlens.records.experiments import Curve, Experiment

PUBLISHED = {2: 0.12, 3: 0.28, 4: 0.35, 6: 0.49, 8: 0.62, 10: 0.67, 15: 0.85, 20: 0.82, 30: 0.91, 50: 0.96, 100: 0.955}
PUBLISHED_TRIALS = 200
SOURCE = "Tarzanagh et al. 2023, section 3, by a reimplementation (200 runs)"


def global_selection(settings: ExperimentSettings, published: bool, progress: Progress) -> Experiment:
    """Share of trials whose α_i is argmax_t Y_i γ_it for every input i, by d.

    The tolerance is three standard errors of the difference of the two shares.
    """
    shares = {d: _share(settings, d, place, progress) for place, d in enumerate(settings.d)}
    known = PUBLISHED if published else {}
    rows = {
        f"d{d}": share_of(share, settings.trials, f"d = {d}", known.get(d), PUBLISHED_TRIALS)
        for d, share in shares.items()
    }
    curve = Curve(steps=list(shares), median=list(shares.values()), quantity="share of trials", bounded=True)
    return Experiment(
        name="global selection",
        question="How often does descent from zero select the best token of every input?",
        source=SOURCE if published else None,
        axis="d",
        curves={"all best tokens selected": curve},
        **columns(rows),
    )


def _share(s: ExperimentSettings, d: int, place: int, progress: Progress) -> float:
    hits, done = 0, 0
    for trials, seed in chunks(s.trials, s.seed):
        drawn = draw(s.n, s.T, d, trials, seed, s.attention)
        first = done

        def tick(step: int, _steps: int, first: int = first, trials: int = trials) -> None:
            part = (first + trials * step / s.iterations) / s.trials
            progress("global selection", round(1000 * (place + part)), 1000 * len(s.d))

        W, _ = starts(drawn, 1, s.start)
        descent = descend(drawn.instances, W, s.iterations, lr=s.lr, loss=s.loss, progress=tick)
        hits += int((descent.chosen[-1] == drawn.best).all(-1).sum())
        done += trials
    return hits / s.trials


FULL = ExperimentSettings(trials=200, d=(2, 4, 10, 30, 50), start="zero")
QUICK = replace(FULL, trials=50, d=(2, 4, 10))
STUDY = Study(global_selection, FULL, QUICK, uses("global-selection"))
