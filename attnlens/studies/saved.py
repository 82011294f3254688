"""Keeps the models of a study as folders that transformers and attnlens open."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from attnlens.files import make_folder, unwritten_folder
from attnlens.kernel_transformers import KernelTransformer
from attnlens.models.building import quiet
from attnlens.runs import work
from attnlens.runs.work import Store
from attnlens.studies.tasks import StudyTask

if TYPE_CHECKING:
    from attnlens.studies.cells import CellResult

STEP = "step-{:06d}"
"""The name of a step's folder, which `converge --checkpoints` reads the step of."""


def save_step(model: KernelTransformer, task: StudyTask, folder: Path, step: int) -> None:
    """Write the model as it is after so many steps, with its tokenizer where it has one."""
    from transformers import PreTrainedTokenizerFast

    place = folder / STEP.format(step)
    pairs = getattr(task, "pairs", None)
    try:
        with quiet():
            model.save_pretrained(place)
            if pairs is not None:
                tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs.tokenizer)  # type: ignore[no-untyped-call]
                tokenizer.save_pretrained(place)
    except (OSError, SafetensorError) as error:
        raise unwritten_folder(place, getattr(error, "strerror", None) or str(error)) from None


def save_cells(folder: Path, found: Sequence[CellResult], store: Store) -> None:
    """Copy every cell's kept steps to `folder`/task/cell. Raises OutputError where they can't be written."""
    for one in found:
        kept = models_of(store, one.first_name)
        place = folder / slug(one.task) / slug(one.cell.name)
        make_folder(place.parent)
        try:
            shutil.copytree(kept, place)
        except OSError as error:
            raise unwritten_folder(place, error.strerror or str(error)) from None


def models_of(store: Store, name: str) -> Path:
    """Return the folder in which the models of a unit are kept."""
    return Path(store.folder) / "models" / work.slug(name)


def slug(name: str) -> str:
    """The name as a folder is called: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9.+]+", "-", name.lower()).strip("-.") or "unnamed"
