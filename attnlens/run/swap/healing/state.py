"""The state of a healing, kept at each check, from which an interrupted healing goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnlens.records import HealingStep, HealingTraining
from attnlens.run.swap.healing.course import Course, adamw
from attnlens.run.swap.healing.held_out import Best, Distances, put_back
from attnlens.runs.work import Store

COURSE = ("stage", "begun", "rate", "within", "step", "tokens", "order")
"""Fields of a course that are kept as they are."""


@dataclass(frozen=True)
class HealingState:
    """The state of one healing among the kept parts of its kernel."""

    store: Store
    name: str
    """What determines the healing's numbers, beside what names the store."""

    def save(self, course: Course, best: Best, seen: Sequence[tuple[float, Distances]], **facts: Any) -> None:
        """Write everything that the rest of the healing depends on, and these `facts`."""
        assert course.optimiser is not None  # noqa: S101  # a state is kept after steps
        leaves = course.healer.leaves
        value = {
            "course": {name: getattr(course, name) for name in COURSE},
            "seconds": course.seconds,
            "generator": course.generator.get_state(),
            "now": leaves,
            "moments": [dict(course.optimiser.state.get(leaf, {})) for leaf in leaves],
            "best": [best.step, best.distance, best.kept],
            "seen": [[share, distances.each, distances.counts] for share, distances in seen],
            "facts": facts,
        }
        self.store.keep(self.name, value)

    def load(self) -> dict[str, Any] | None:
        """Return what was saved; None if there is nothing, or it is not to be used."""
        found: dict[str, Any] | None = self.store.load(self.name) if self.store.resume else None
        return found

    @staticmethod
    def restore(value: dict[str, Any], course: Course, best: Best) -> list[tuple[float, Distances]]:
        """Put course and best numbers where they were; returns the distances of this stage's checks."""
        for name in COURSE:
            setattr(course, name, value["course"][name])
        course.spent = value["seconds"]
        course.generator.set_state(value["generator"])
        leaves = course.healer.leaves
        put_back(leaves, value["now"])
        best.step, best.distance, kept = value["best"]
        best.kept = [part.to(leaf.device) for part, leaf in zip(kept, leaves, strict=True)]
        course.optimiser = adamw(leaves, course.rate)
        for leaf, moments in zip(leaves, value["moments"], strict=True):
            if moments:
                placed = {name: part.to(leaf.device) for name, part in moments.items() if name != "step"}
                course.optimiser.state[leaf] = {"step": moments["step"].to(torch.float32), **placed}
        return [(share, Distances(each, counts)) for share, each, counts in value["seen"]]


def curve_of(value: dict[str, Any]) -> tuple[list[HealingStep], list[HealingTraining], bool]:
    """Return the checks, the stages, and whether the last one is over, of what was saved."""
    facts = value["facts"]
    steps = [HealingStep.model_validate(one) for one in facts["curve"]]
    return steps, [HealingTraining.model_validate(one) for one in facts["trainings"]], facts["ended"]
