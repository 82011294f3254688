"""Units of work that are computed in other processes: they succeed, fail, or end their process, as their names say."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attnlens.errors import ModelError

FACTS: dict[str, Any] = {"command": "test", "settings": {"seed": 0}}


def begun(folder: str | Path, name: str) -> int:
    """Note down that a unit was begun; returns how often."""
    path = Path(folder) / f"{name}.begun"
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return len(path.read_text().splitlines())


def compute_in(folder: str, name: str) -> Any:
    """Compute the unit of a name."""
    times = begun(folder, name)
    if name.startswith("killed") and (times == 1 or "always" in name):
        os.kill(os.getpid(), signal.SIGKILL)
    if name.startswith("failing") and (times == 1 or "always" in name):
        raise ZeroDivisionError("no such luck\nat all")
    if name.startswith("refused"):
        raise ModelError("The model is broken.", "Mend it.")
    if name.startswith("interrupted"):
        os.kill(os.getpid(), signal.SIGINT)
    if name.startswith("long"):
        time.sleep(60)
    return {"name": name, "process": os.getpid(), "threads": os.environ.get("OMP_NUM_THREADS")}


def opened(folder: str, seed: int = 0) -> tuple[Mapping[str, Any], Callable[[str], Any]]:
    """Prepare a run in another process, and note down that it was prepared."""
    with (Path(folder) / "opened").open("a") as file:
        file.write(f"{seed}\n")
    return FACTS | {"settings": {"seed": seed}}, lambda name: compute_in(folder, name)
