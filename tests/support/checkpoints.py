"""Checkpoints of the demo model."""

import shutil
from pathlib import Path

import hostile
from program import DEMO


def checkpoint(step: int) -> str:
    return str(DEMO / "checkpoints" / f"step-{step:05d}")


def other_shape(tmp_path: Path, **fields: int) -> str:
    """Return a checkpoint of the demo with changed fields in its config."""
    folder = tmp_path / "step-77"
    shutil.copytree(checkpoint(100), folder)
    (folder / "config.json").chmod(0o644)
    hostile.edited(folder / "config.json", **fields)
    return str(folder)
