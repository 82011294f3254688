"""What an engine adds to each unit of work: units that do nothing, one after the other and all at once.

python benchmarks/engines.py [--quick] [--units 300]

Each engine has two workers of this machine, which have begun before anything is timed. The median is of single units
from their submission to their `Done`; the peer is a bare pool of processes of Python.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import subjects

from attnlens.engines import Workers, completed, engine

TARGETS = {"local": 20.0, "ray": 100.0}
"""Milliseconds a unit, at most."""
JOBS = 2


def main() -> None:
    """Print a row an engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five units: does it still run?")
    parser.add_argument("--units", type=int, default=300, help="how many are timed, alone and together")
    wanted = parser.parse_args()
    units = 5 if wanted.quick else wanted.units
    print(subjects.machine())
    print(f"\nempty units, medians of {units}; ratio: the engine's time to the target")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(abs, 0).result()
        print(f"  bare pool of processes: {median(lambda unit: pool.submit(abs, unit).result(), units):.2f} ms a unit")
    for name, target in TARGETS.items():
        if name != "local" and find_spec(name) is None:
            print(f"  {name} is not installed (pip install attnlens[{name}]): its row is left out.")
            continue
        with engine(name, jobs=JOBS) as workers:
            row(name, workers, units, target)


def row(name: str, workers: Workers, units: int, target: float) -> None:
    """Print what a unit takes alone, and what it takes of the time of all."""
    list(completed(workers, time.sleep, [0.2] * JOBS))  # every worker begins
    alone = median(lambda unit: list(completed(workers, abs, [unit])), units)
    began = time.perf_counter()
    assert len(list(completed(workers, abs, range(units)))) == units
    together = 1e3 * (time.perf_counter() - began) / units
    times = f"{alone:.2f} ms a unit alone, {together:.2f} ms together"
    print(f"  {name}, {JOBS} workers: {times} (target ≤ {target:.0f} ms), ratio {alone / target:.3f}", flush=True)


def median(run: Callable[[int], object], units: int) -> float:
    """Milliseconds."""
    taken = []
    for unit in range(units):
        began = time.perf_counter()
        run(unit)
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)


if __name__ == "__main__":
    main()
