"""Reruns the papers' small experiments: ours, published, tolerance, pass or fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from attnlens import requests
from attnlens.arguments import public, switch
from attnlens.experiments import EXPERIMENTS, golden, one_thread, run_experiments
from attnlens.experiments.depth_decay import depth_decay
from attnlens.experiments.ksvd_identities import ksvd_identities
from attnlens.experiments.primal_decay import primal_decay
from attnlens.records import Experiment, Report, Skipped
from attnlens.run.progress import Progress, silent
from attnlens.run.training.synthetic import WIDTH, finished


@dataclass(frozen=True)
class Wanted:
    """How a row is to be run."""

    quick: bool
    """Whether with fewer trials and wider tolerances."""
    seed: int
    progress: Progress


Row = Callable[[Wanted], list[Experiment]]


def golden_row(_wanted: Wanted) -> list[Experiment]:
    """Instances with known solutions; they take no time, so that quick changes nothing."""
    return [golden()]


def att_svm_row(wanted: Wanted, name: str) -> list[Experiment]:
    """One synthetic experiment of Att-SVM at the published sizes."""
    return run_experiments([name], quick=wanted.quick, overrides={"seed": wanted.seed}, progress=wanted.progress)


def identities_row(wanted: Wanted) -> list[Experiment]:
    """The identities of the kernel SVD; they take no time, so that quick changes nothing."""
    return [ksvd_identities(wanted.seed, wanted.progress)]


def depth_row(wanted: Wanted) -> list[Experiment]:
    """The spectra of a trained model's layers; without a verdict, as Figure 1 is about another model."""
    return [depth_decay(wanted.quick, wanted.progress)]


def training_row(wanted: Wanted) -> list[Experiment]:
    """Training with and without Primal-Attention, over a minute, which quick leaves out; without a verdict too."""
    if wanted.quick:
        return []
    with one_thread():
        return [primal_decay(wanted.seed, wanted.progress)]


ROWS: list[Row] = [
    golden_row,
    *(partial(att_svm_row, name=name) for name in EXPERIMENTS),
    identities_row,
    depth_row,
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
    wanted = Wanted(quick, seed, progress)
    report = finished("verify", [partial(row, wanted) for row in ROWS], seed, WIDTH)
    left_out = report.coverage.model_copy(update={"skipped": [LEFT_OUT] if quick else []})
    return report.model_copy(update={"coverage": left_out})
