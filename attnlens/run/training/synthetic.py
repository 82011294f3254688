"""Runs the synthetic experiments of Att-SVM on convergence to the max-margin solution."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Unpack

from attnlens import requests
from attnlens.arguments import public
from attnlens.experiments import run_experiments
from attnlens.records import Coverage, Experiment, ModelInfo, Report, Settings
from attnlens.requests.experiments import SizesRequest, checked_synthetic
from attnlens.run.provenance import report_of
from attnlens.runs.progress import Interrupted, Progress, silent

WIDTH = 10
"""d of the paper's experiments."""


@public
def converge_synthetic(
    experiments: requests.Words = (),
    *,
    quick: bool = False,
    progress: Progress = silent,
    **more: Unpack[SizesRequest],
) -> Report:
    """The experiments of Tarzanagh et al. 2023 on f(X, z) = h(Xᵀ softmax(XWz)), with what was published beside them.

    `experiments` are their names (none: all), `more` the other options of `SyntheticRequest`. An experiment has
    no verdict where one of them changes what is asked. Another seed does not, and neither do other trials, as long
    as there are at least as many as `verify --quick` takes. Raises UsageError for values that make no sense,
    Interrupted with the experiments that are finished.
    """
    asked = checked_synthetic({**more, "experiments": experiments})
    chosen = asked.pop("experiments")

    def row(name: str) -> Callable[[], list[Experiment]]:
        return lambda: run_experiments([name], quick=quick, overrides=asked, progress=progress)

    return finished("converge", [row(name) for name in chosen], asked["seed"], asked.get("d") or WIDTH)


def finished(command: str, rows: Sequence[Callable[[], list[Experiment]]], seed: int, width: int) -> Report:
    """The report of experiments that are run one by one and timed; raises Interrupted with those that are done."""
    done: list[Experiment] = []
    timings: dict[str, float] = {}
    try:
        for row in rows:
            start = time.perf_counter()
            found = row()
            done += found
            share = (time.perf_counter() - start) / max(1, len(found))
            timings |= {experiment.name: share for experiment in found}
    except KeyboardInterrupt:
        if not done:
            raise KeyboardInterrupt from None
        raise Interrupted(_report(command, done, timings, seed, width)) from None
    return _report(command, done, timings, seed, width)


def _report(command: str, done: list[Experiment], timings: dict[str, float], seed: int, width: int) -> Report:
    return report_of(
        command,
        model=one_layer(width),
        settings=Settings(seed=seed, dtype="float64"),
        coverage=Coverage(sites=0, heads=0, analysed=0),
        experiments=done,
        timings=timings,
    )


def one_layer(width: int) -> ModelInfo:
    """What stands for a model where none was pretrained: one attention layer of d² numbers."""
    return ModelInfo(
        id="one-layer attention (synthetic)", architecture="f(X, z) = h(Xᵀ softmax(XWz))", parameters=width**2
    )
