"""Measure the overhead per unit of work: compute, write and load small units, compared with writing their bytes.

python benchmarks/work.py [--quick]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from attnlens.runs.store import Store
from attnlens.runs.work import NOTHING_KEPT, run_units


def main() -> None:
    """Print milliseconds per unit and the ratio to `safetensors.torch.save_file`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 units: does it still run?")
    names = [f"unit {number}" for number in range(20 if parser.parse_args().quick else 200)]
    tensors = {f"measure {number}": torch.rand(32, 12, dtype=torch.float64) for number in range(20)}
    with tempfile.TemporaryDirectory() as folder:
        store, plain = Store(Path(folder, "run"), {}), Path(folder, "plain.safetensors")
        bare = _time_unit(lambda: [save_file(tensors, plain) for _ in names], len(names))
        for what in ("computed and written", "loaded"):
            spent = _time_unit(lambda: run_units(names, lambda _: tensors, NOTHING_KEPT, store), len(names))
            print(f"{what:22} {spent:6.2f} ms per unit, ratio to save_file {spent / bare:.1f}")


def _time_unit(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start) / count


if __name__ == "__main__":
    main()
