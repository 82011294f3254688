"""The checkpoints of a series: places, training steps, equal shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from attnlens import models
from attnlens.errors import ModelError, UsageError
from attnlens.models.configs import has_tokenizer, sizes
from attnlens.models.locate import DEMO, Location, find, read_json

STEP = re.compile(r"step[-_=]?(\d+)|(\d+)$", re.IGNORECASE)
"""`step1000-tokens2B`, `checkpoint-500`: the number after «step», else the one at the end."""


@dataclass(frozen=True)
class Checkpoint:
    """One model of a series."""

    name: str
    """As a person would call it: the folder's own name, or the revision."""
    model: str
    """As `load` takes it."""
    revision: str | None
    """Of a hub model."""
    place: Location
    """Where it lies."""
    step: int | None
    """The training step that its name tells, None where it tells none."""


def of_demo() -> list[str]:
    """The checkpoints that ship with attnlens, and the trained model itself."""
    return [*sorted(str(folder) for folder in (DEMO / "checkpoints").iterdir()), "demo"]


def named(names: Sequence[str], loading: models.Loading) -> list[Checkpoint]:
    """Folders, files or hub ids as checkpoints in the order of their steps, or as given where not all have a step.

    Raises UsageError for fewer than two or one that is named twice, ModelError where one is not there.
    """
    return _ordered([_checkpoint(name, None, loading) for name in names])


def revised(model: str, revisions: Sequence[str], loading: models.Loading) -> list[Checkpoint]:
    """Revisions of one hub model as checkpoints, in the same order.

    Raises UsageError for fewer than two, one that is named twice, or a model that has no revisions; ModelError where
    one is not there.
    """
    return _ordered([_checkpoint(model, revision, loading) for revision in revisions])


def step_of(name: str) -> int | None:
    """The training step that a name tells; None where it tells none."""
    if name == "demo":
        return int(read_json(DEMO / "training.json")["steps"])
    found = STEP.search(Path(name).name)
    return int(found.group(1) or found.group(2)) if found else None


def with_tokenizer(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The last one that has a tokenizer, which then reads the text for all; None where none has."""
    return next((one for one in reversed(checkpoints) if has_tokenizer(one.place)), None)


def refuse_different(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise ModelError where two are not of one architecture and shape, as far as their configs tell."""
    first = checkpoints[0]
    for other in checkpoints[1:]:
        own, its = _shape(first.place), _shape(other.place)
        differing = [field for field in own if field in its and own[field] != its[field]]
        if differing:
            told = ", ".join(
                f"{field} is {own[field]} in {first.name} and {its[field]} in {other.name}" for field in differing
            )
            raise ModelError(f"The checkpoints are of different shapes: {told}.", "Give checkpoints of one model.")


def _checkpoint(model: str, revision: str | None, loading: models.Loading) -> Checkpoint:
    options = {"offline": False, "allow_pickle": False, **loading}
    offline, pickle = cast("bool", options["offline"]), cast("bool", options["allow_pickle"])
    place = find(model, revision, offline=offline, allow_pickle=pickle)
    told = revision or model.partition("@")[2] or Path(model.rstrip("/\\")).name
    return Checkpoint(told, model, revision, place, step_of(revision or model))


def _ordered(found: list[Checkpoint]) -> list[Checkpoint]:
    if len(found) < 2:
        raise UsageError(
            "A series needs at least two checkpoints.",
            "Name two or more, as in --checkpoints step-100 step-200, or --revisions.",
        )
    places = [(one.place.folder, one.place.file) for one in found]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise UsageError(f"The checkpoint {found[number].name} is named twice.", "Name each one once.")
    steps = [one.step for one in found]
    if None in steps or len(set(steps)) < len(steps):
        return [replace(one, step=None) for one in found]
    return sorted(found, key=lambda one: cast("int", one.step))


def _shape(place: Location) -> dict[str, object]:
    """What two checkpoints of one model have in common; empty for a GGUF file, whose weights will tell."""
    config = place.config
    kept: dict[str, object] = {field: config[field] for field in ("model_type", "architectures") if field in config}
    return kept | dict(sizes(config))
