"""The papers' synthetic experiments on token selection, one a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from attnlens.errors import UsageError
from attnlens.experiments.options import Progress, Study, checked, silent
from attnlens.experiments.synthetic import (
    feasibility,
    global_selection,
    local_convergence,
    multi_token,
    next_token,
    rank,
)
from attnlens.experiments.synthetic.golden import golden
from attnlens.records.experiments import Experiment
from attnlens.registry import checked_name

EXPERIMENTS: dict[str, Study] = {
    "local-convergence": local_convergence.STUDY,
    "global-selection": global_selection.STUDY,
    "feasibility": feasibility.STUDY,
    "rank": rank.STUDY,
    "multi-token": multi_token.STUDY,
    "next-token": next_token.STUDY,
}
"""Name on the command line → experiment."""

__all__ = ["EXPERIMENTS", "golden", "names", "refuse_ignored", "run_experiments"]


def names() -> tuple[str, ...]:
    """The experiments, in the order in which they run."""
    return tuple(EXPERIMENTS)


def run_experiments(
    wanted: Iterable[str] = (),
    *,
    quick: bool = False,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> list[Experiment]:
    """Those experiments (all, where none is named), judged against what was published.

    `overrides` are the other fields of options.Settings (n, T, d, m, lr, loss, head, …). An experiment takes those
    that it uses, names them, and is compared with nothing where one of them changes what is asked.
    Raises UsageError for an unknown experiment and for a setting that makes no sense.
    """
    chosen = [checked_name("experiment", name, EXPERIMENTS) for name in wanted] or list(EXPERIMENTS)
    wishes = checked({"seed": seed, **(overrides or {})})
    with one_thread():
        return [EXPERIMENTS[name].run(wishes, quick, progress) for name in chosen]


def refuse_ignored(wanted: Iterable[str], overrides: Mapping[str, Any]) -> None:
    """Raise UsageError for a setting that none of those experiments uses."""
    chosen = list(wanted) or list(EXPERIMENTS)
    for name in overrides:
        if not any(name in EXPERIMENTS[one].uses for one in chosen):
            raise UsageError(f"{name} would be ignored by {', '.join(chosen)}.", f"Leave out {name}.")


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads that share matrices of this size mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
