"""Trains units here with one thread, or by the workers of an engine, and keeps what is finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from uuid import uuid4

import torch

from attnlens.engines import Workers, completed
from attnlens.errors import ModelError
from attnlens.studies.tasks import StudyTask
from attnlens.studies.units import RunOutcome, TrainingUnit, computed

Tell = Callable[[str, int, int], None]
MakeTasks = Callable[[], Sequence[StudyTask]]
"""Makes the tasks in another process: their tensors, one a sentence, are too many to be handed over."""
_made: dict[str, Mapping[str, StudyTask]] = {}
"""In a worker: the tasks of the study that it trains for."""


@dataclass(frozen=True)
class UnitTrainer:
    """What another process needs to train a unit."""

    make: MakeTasks
    """Makes the tasks."""
    folder: Path
    """Where outcomes are kept."""
    study: str = field(default_factory=lambda: uuid4().hex)
    """Tells it from other studies, whose tasks may have the same names."""

    def __call__(self, unit: TrainingUnit) -> RunOutcome:
        """Its outcome, with one thread, on which it depends."""
        torch.set_num_threads(1)
        if self.study not in _made:
            _made.clear()
            _made[self.study] = _named(self.make())
        return computed(unit, _made[self.study][unit.task], self.folder)


class Pool:
    """Inside `with`: units become outcomes.

    Each is trained with one thread, here or elsewhere, so that its outcome does not depend on where.
    """

    def __init__(
        self, tasks: Sequence[StudyTask], training: UnitTrainer, workers: Workers | None, total: int, tell: Tell
    ) -> None:
        self.tasks, self.training, self.workers = _named(tasks), training, workers
        self.total, self.tell, self.done = total, tell, 0
        self.threads = torch.get_num_threads()

    def __enter__(self) -> Pool:
        torch.set_num_threads(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        torch.set_num_threads(self.threads)

    def outcomes(self, units: Sequence[TrainingUnit], stage: str) -> dict[TrainingUnit, RunOutcome]:
        """Each unit's outcome. Raises ModelError where a worker can't train one, at its second try either."""
        every, folder = list(dict.fromkeys(units)), self.training.folder
        if self.workers is None:
            return {unit: self._told(stage, computed(unit, self.tasks[unit.task], folder)) for unit in every}
        found = {}
        for done in completed(self.workers, self.training, every):
            if done.value is None:
                again = (
                    "Run the same command again, with fewer --jobs where memory was short: what is finished is kept."
                )
                raise done.error or ModelError(
                    f"A model of {done.unit.task} could not be trained: {done.reason}", again
                )
            found[done.unit] = self._told(stage, done.value)
        return found

    def _told(self, stage: str, outcome: RunOutcome) -> RunOutcome:
        self.done += 1
        self.tell(stage, self.done, self.total)
        return outcome


def _named(tasks: Sequence[StudyTask]) -> Mapping[str, StudyTask]:
    return {task.name: task for task in tasks}
