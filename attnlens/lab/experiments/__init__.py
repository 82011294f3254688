"""The papers' synthetic experiments on token selection, one per file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from attnlens.lab.experiments.settings import Progress, Study, setting_of, silent
from attnlens.lab.experiments.synthetic.tokens import FEASIBILITY, GLOBAL_SELECTION, LOCAL_CONVERGENCE, RANK, golden
from attnlens.lab.experiments.synthetic.weights import MULTI_TOKEN, NEXT_TOKEN
from attnlens.maths.linalg.spectra import one_thread
from attnlens.records.studies import Experiment

EXPERIMENTS: dict[str, Study] = {
    "local-convergence": LOCAL_CONVERGENCE,
    "global-selection": GLOBAL_SELECTION,
    "feasibility": FEASIBILITY,
    "rank": RANK,
    "multi-token": MULTI_TOKEN,
    "next-token": NEXT_TOKEN,
}
"""Name on the command line → experiment."""


def run_experiments(
    chosen: Iterable[str], *, quick: bool, overrides: Mapping[str, Any], progress: Progress = silent
) -> list[Experiment]:
    """Run the chosen experiments and judge them against published values.

    `overrides` are options of requests.SyntheticRequest, including the seed. Each experiment applies and records the
    ones it uses. It is compared with nothing if one of them changes its question.
    """
    overrides = {setting_of(name): value for name, value in overrides.items()}
    with one_thread():
        return [EXPERIMENTS[name].run(overrides, quick, progress) for name in chosen]
