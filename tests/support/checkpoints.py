"""Checkpoints of the demo model."""

import json
import shutil
from pathlib import Path

from program import DEMO


def checkpoint(step: int) -> str:
    return str(DEMO / "checkpoints" / f"step-{step:05d}")


def other_shape(tmp_path: Path, **fields: int) -> str:
    """A checkpoint of the demo whose config says otherwise."""
    folder = tmp_path / "step-77"
    shutil.copytree(checkpoint(100), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config | fields))
    return str(folder)
