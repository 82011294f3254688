"""Reruns the papers' small experiments: ours, published, tolerance, pass or fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attnlens import requests
from attnlens.arguments import public, switch
from attnlens.experiments import EXPERIMENTS, golden, one_thread, run_experiments
from attnlens.experiments.binary_kernel import binary_kernel
from attnlens.experiments.trained import depth_decay, ksvd_identities, primal_decay
from attnlens.records import Experiment, Report, Skipped
from attnlens.run.training.synthetic import WIDTH, finished
from attnlens.runs.progress import Progress, silent

Row = Callable[[bool, int, Progress], list[Experiment]]
"""(quick, seed, progress) → what was found."""


def synthetic_row(name: str, quick: bool, seed: int, progress: Progress) -> list[Experiment]:
    """One synthetic experiment of Att-SVM at the published sizes."""
    return run_experiments([name], quick=quick, overrides={"seed": seed}, progress=progress)


def binary_row(quick: bool, seed: int, progress: Progress) -> list[Experiment]:
    """Two networks that learn a planted indefinite kernel; quick takes fewer points and steps."""
    with one_thread():
        return binary_kernel(quick, seed, progress)


def training_row(quick: bool, seed: int, progress: Progress) -> list[Experiment]:
    """Training with and without Primal-Attention, over a minute, which quick leaves out; without a verdict."""
    if quick:
        return []
    with one_thread():
        return [primal_decay(seed, progress)]


ROWS: list[Row] = [
    lambda _quick, _seed, _progress: [golden()],  # takes no time, so that quick changes nothing
    *(partial(synthetic_row, name) for name in EXPERIMENTS),
    binary_row,
    lambda _quick, seed, progress: [ksvd_identities(seed, progress)],  # nor does it here
    lambda quick, _seed, progress: [depth_decay(quick, progress)],  # no verdict: Figure 1 is about another model
    training_row,
]
"""What is verified, in this order; a further claim is a further function."""

LEFT_OUT = Skipped(site="decay by training", reason="training takes longer than quick may")
"""What a quick report says is missing."""


@public
def verify(*, quick: bool = False, seed: int = 0, progress: Progress = silent) -> Report:
    """Every row of the papers' small experiments, judged; `passed` of each experiment says how it went.

    `quick` takes fewer trials, and tolerances that are as much wider, and trains no model. Raises UsageError for a seed
    that is none, and Interrupted with the rows that are finished.
    """
    requests.whole("seed", seed, 0)
    switch("quick", quick)
    report = finished("verify", [partial(row, quick, seed, progress) for row in ROWS], seed, WIDTH)
    left_out = report.coverage.model_copy(update={"skipped": [LEFT_OUT] if quick else []})
    return report.model_copy(update={"coverage": left_out})
