"""Units for other processes: they succeed, fail, or end their process, depending on their names."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attnlens.errors import ModelError

FACTS: dict[str, Any] = {"command": "test", "settings": {"seed": 0}}


def times(folder: Path) -> dict[str, int]:
    """Return how often each unit was begun."""
    return {path.stem: len(path.read_text().splitlines()) for path in folder.glob("*.begun")}


def compute_in(folder: str, name: str) -> Any:
    """Compute a unit, and record the process that began it."""
    with (Path(folder) / f"{name}.begun").open("a") as file:
        file.write(f"{os.getpid()}\n")
    fails = "always" in name or times(Path(folder))[name] == 1
    if name.startswith("killed") and fails:
        os.kill(os.getpid(), signal.SIGKILL)
    if name.startswith("failing") and fails:
        raise ZeroDivisionError("no such luck\nat all")
    if name.startswith("refused"):
        raise ModelError("The model is broken.", "Mend it.")
    if name.startswith("interrupted"):
        os.kill(os.getpid(), signal.SIGINT)
    if name.startswith("long"):
        time.sleep(60)
    return {"name": name, "process": os.getpid(), "threads": os.environ.get("OMP_NUM_THREADS")}


def opened(folder: str, seed: int = 0) -> tuple[Mapping[str, Any], Callable[[str], Any]]:
    """Prepare a run in another process, and record that it was prepared."""
    with (Path(folder) / "opened").open("a") as file:
        file.write(f"{seed}\n")
    return FACTS | {"settings": {"seed": seed}}, lambda name: compute_in(folder, name)
