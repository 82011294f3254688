"""How fast each form trains, beside a standard transformer whose attention is torch's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from attnlens.kernel_transformers import AttentionForm
from attnlens.studies.tasks import Examples, StudyTask
from attnlens.studies.training import accelerator_of, count_of, step_of
from attnlens.studies.units import TrainingUnit, model_of

ROUNDS = 12
"""Steps that are timed, after one that is not."""
STANDARD = AttentionForm(positions="sum", in_value=True)
"""The transformer of Vaswani et al. 2017."""


@dataclass(frozen=True)
class Speed:
    """Of training steps."""

    tokens_per_second: float
    """The median over steps."""
    beside_sdpa: float
    """That over the standard transformer's by `scaled_dot_product_attention`, step by step in one loop."""


def speeds(units: Sequence[TrainingUnit], task: StudyTask) -> Iterator[Speed]:
    """Each unit's speed on one batch of the task; a step of the standard transformer comes before each of its own."""
    if not units:
        return
    batch = next(iter(task.training(units[0].scale.batch, 0)))
    standard = _stepper(replace(units[0], form=STANDARD), task, batch, implementation="sdpa")
    for unit in units:
        own = _stepper(unit, task, batch)
        pairs = [(standard(), own()) for _ in range(1 + ROUNDS)][1:]
        yield Speed(count_of(batch) / median(b for _, b in pairs), median(a / b for a, b in pairs))


def _stepper(
    unit: TrainingUnit, task: StudyTask, batch: Examples, implementation: str | None = None
) -> Callable[[], float]:
    """Takes a training step of a new model, and says how many seconds it took."""
    accelerator, model = accelerator_of(), model_of(unit, task)
    if implementation is not None:
        model.config._attn_implementation = implementation
    module, optimiser = accelerator.prepare(model.core, torch.optim.AdamW(model.core.parameters(), lr=unit.run.rate))

    def step() -> float:
        start = time.perf_counter()
        step_of(accelerator, module, optimiser, batch, unit.run)
        return time.perf_counter() - start

    return step
