"""Keeps the state of a healing in a folder, safetensors and JSON, and goes on from there."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from attnlens.choices import HealingStage
from attnlens.errors import UsageError
from attnlens.files import make_folder, read_object, sha256, write_atomically, written
from attnlens.records import HealingStep, HealingTraining, Record
from attnlens.requests.healing import STATE
from attnlens.run.swap.healing.course import Course, adamw
from attnlens.run.swap.healing.held_out import Best, Distances, put_back
from attnlens.unit_files import Folder

TENSORS = re.compile(r"healing-[0-9]{1,15}\.safetensors")
"""How the file with the numbers is called: by the step that they are of."""
ANEW = "Add --no-resume to begin anew, or give --heal-checkpoint another folder."


class SavedHealing(Record):
    """The content of healing.json."""

    identity: dict[str, str]
    """What must be the same to go on: attnlens, model, kernel, texts, seed, options."""
    tensors: str
    """The file with the numbers."""
    sha256: str
    """Its hash."""
    stage: HealingStage
    begun: float
    step: int
    tokens: int
    seconds: float
    within: int
    rate: float
    order: list[int]
    """What is left of this round through the text."""
    ended: bool
    """Whether the stage is over."""
    best_step: int
    best_distance: float
    curve: list[HealingStep]
    trainings: list[HealingTraining]
    shares: list[float]
    """Of all work, at each check of this stage."""


class StateFolder:
    """A folder with the state of one healing."""

    def __init__(self, folder: Path, identity: dict[str, str], resume: bool = True) -> None:
        """`identity` names what decides the healing's numbers; `resume`: whether to go on from a state."""
        self.folder, self.identity, self.resume = folder, identity, resume

    def save(self, course: Course, best: Best, seen: Sequence[tuple[float, Distances]], facts: dict[str, Any]) -> None:
        """Write the numbers under a name of their own, then the facts that name them, then remove the last ones.

        Not others, which the same command may be writing there at the same time.
        """
        make_folder(self.folder)
        name, content = f"healing-{course.step}.safetensors", save(_tensors(course, best, seen))
        last = self._last()
        write_atomically(self.folder / name, content)
        saved = SavedHealing(
            identity=self.identity,
            tensors=name,
            sha256=hashlib.sha256(content).hexdigest(),
            stage=course.stage,
            begun=course.begun,
            step=course.step,
            tokens=course.tokens,
            seconds=course.seconds,
            within=course.within,
            rate=course.rate,
            order=course.order,
            best_step=best.step,
            best_distance=best.distance,
            shares=[share for share, _ in seen],
            **facts,
        )
        write_atomically(self.folder / STATE, (json.dumps(saved.model_dump(mode="json"), indent=1) + "\n").encode())
        if last is not None and last != name:
            (self.folder / last).unlink(missing_ok=True)

    def _last(self) -> str | None:
        """The file with numbers that the facts name now."""
        try:
            named = read_object(self.folder / STATE, UsageError, ANEW).get("tensors")
        except UsageError:  # there are none, or another run that is at its end has removed them
            return None
        return named if isinstance(named, str) and TENSORS.fullmatch(named) else None

    def load(self) -> SavedHealing | None:
        """The facts, or None where there are none yet, or the healing is to begin anew.

        Raises UsageError where they can't be read, or belong to another healing, by the name of what differs.
        """
        if not (self.resume and (self.folder / STATE).exists()):
            return None
        found = read_object(self.folder / STATE, UsageError, ANEW)
        try:
            saved = SavedHealing.model_validate(found)
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise UsageError(f"{self.folder / STATE} is no state of a healing (at {written(place)}).", ANEW) from None
        for name in {**self.identity, **saved.identity}:
            mine, its = (one.get(name, "nothing") for one in (self.identity, saved.identity))
            if mine != its:
                raise UsageError(
                    f"The state in {self.folder} is of another healing: its {name} is {written(its)}, not "
                    f"{written(mine)}.",
                    ANEW,
                )
        return saved

    def restore(self, saved: SavedHealing, course: Course, best: Best) -> list[tuple[float, Distances]]:
        """Put course and best numbers where they were, and give the distances of this stage's checks.

        Raises UsageError where the file with the numbers is not the one that the facts name, or does not fit.
        """
        try:
            tensors = self._read(saved)
            return _restore(saved, tensors, course, best)
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
            told = getattr(error, "strerror", None) or "it is damaged, or not of this healing"
            raise UsageError(f"{self.folder / saved.tensors} can't be read: {told}.", ANEW) from None

    def _read(self, saved: SavedHealing) -> dict[str, Tensor]:
        path = self.folder / saved.tensors
        if not TENSORS.fullmatch(saved.tensors) or not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(saved.tensors)
        if sha256(path) != saved.sha256:
            raise ValueError(saved.sha256)
        return load_file(path)


def clear_state(folder: Path) -> None:
    """Remove the states that a run kept in folders of this one, which are of healings that are finished."""
    for state in [*folder.glob("*"), folder]:
        Folder(state).remove([STATE, *(one.name for one in state.glob("*") if TENSORS.fullmatch(one.name))])


def _tensors(course: Course, best: Best, seen: Sequence[tuple[float, Distances]]) -> dict[str, Tensor]:
    found = {"generator": course.generator.get_state(), "counts": seen[-1][1].counts}
    found |= {f"distances.{index}": distances.each for index, (_, distances) in enumerate(seen)}
    assert course.optimiser is not None  # noqa: S101  # a state is kept after steps
    for index, leaf in enumerate(course.healer.leaves):
        found[f"now.{index}"] = leaf.detach()
        found[f"best.{index}"] = best.kept[index]
        for name, value in course.optimiser.state.get(leaf, {}).items():
            found[f"{name}.{index}"] = value
    return {name: value.detach().cpu().contiguous() for name, value in found.items()}


def _restore(
    saved: SavedHealing, tensors: dict[str, Tensor], course: Course, best: Best
) -> list[tuple[float, Distances]]:
    leaves = course.healer.leaves
    if sorted(saved.order) != sorted(set(saved.order) & set(range(len(course.train)))):
        raise ValueError("order")
    for index, leaf in enumerate(leaves):
        for name in ("now", "best"):
            if tensors[f"{name}.{index}"].shape != leaf.shape or tensors[f"{name}.{index}"].dtype != leaf.dtype:
                raise ValueError(name)
    course.generator.set_state(tensors["generator"])
    course.stage, course.begun, course.rate, course.within = saved.stage, saved.begun, saved.rate, saved.within
    course.step, course.tokens, course.spent, course.order = saved.step, saved.tokens, saved.seconds, saved.order
    put_back(leaves, [tensors[f"now.{index}"] for index in range(len(leaves))])
    best.step, best.distance = saved.best_step, saved.best_distance
    best.kept = [tensors[f"best.{index}"].to(leaf.device) for index, leaf in enumerate(leaves)]
    course.optimiser = adamw(leaves, saved.rate)
    for index, leaf in enumerate(leaves):
        if f"exp_avg.{index}" in tensors:
            moments = {name: tensors[f"{name}.{index}"].to(leaf.device) for name in ("exp_avg", "exp_avg_sq")}
            if any(moment.shape != leaf.shape for moment in moments.values()):
                raise ValueError("moments")
            course.optimiser.state[leaf] = {"step": tensors[f"step.{index}"].to(torch.float32), **moments}
    each = [tensors[f"distances.{index}"] for index in range(len(saved.shares))]
    return [(share, Distances(one, tensors["counts"])) for share, one in zip(saved.shares, each, strict=True)]
