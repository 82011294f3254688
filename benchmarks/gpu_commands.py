"""Time whole commands on the CPU and on a GPU, and compare the numbers of their reports.

python benchmarks/gpu_commands.py [--quick] [--model MODEL] [--device cuda]

Each command runs once on each device in float32, as its own process; the times include the start of Python. A number
differs if it is off by more than 1 % and by more than 1e-5. Settings, times and memory are not compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import subjects

COMMANDS = {
    "inspect": "inspect {model}",
    "inspect, KSVD": "inspect {model} --analyzer ksvd",
    "inspect, Att-SVM": "inspect {model} --analyzer selection --layers 1",
    "swap-kernel, rbf": "swap-kernel {model} --kernel rbf",
    "swap-kernel, linear, per layer": "swap-kernel {model} --kernel linear --sweep layers",
    "ranks": "ranks {model} --budget loss:5%",
    "heal, 200 steps": "heal {model} --kernel rbf --train 200",
    "heal, Primal-Attention": "heal {model} --kernel primal:8 --train 100",
    "converge, a head": "converge {model} --head 1.2",
}
QUICK = ("inspect", "swap-kernel, rbf")
SAME = ("--dtype", "float32", "--no-progress")
LEFT_OUT = {"timings", "environment", "settings", "peak_memory_bytes", "tokens_per_second", "seconds", "command"}
RELATIVE, ABSOLUTE = 1e-2, 1e-5


def main() -> None:
    """Print one row per command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two commands on 8 windows of 32 tokens")
    parser.add_argument("--model", default="demo", help="(default: demo)")
    parser.add_argument("--device", default="cuda", help="device to compare with the CPU (default: cuda)")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS), help="only these commands")
    options = parser.parse_args()
    print(f"{subjects.describe_gpu()}; {subjects.describe_machine()}\n")
    print(
        "| command | CPU, s | GPU, s | ratio | numbers | differ | largest difference |\n|---|---|---|---|---|---|---|"
    )
    size = ["--windows", "8", "--length", "32"] if options.quick else []
    for name in QUICK if options.quick else options.only:
        compare_devices(name, COMMANDS[name].format(model=options.model).split() + size, options.device)


def compare_devices(name: str, words: list[str], device: str) -> None:
    """Run the command on both devices and print its row; print the end of stderr if a run fails."""
    seconds, reports = [], []
    for place in ("cpu", device):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "report.json")
            start = time.perf_counter()
            run = subprocess.run(  # noqa: S603  # our own command
                [sys.executable, "-m", "attnlens", *words, *SAME, "--device", place, "--json", str(path)],
                capture_output=True,
                text=True,
            )
            seconds.append(time.perf_counter() - start)
            if run.returncode:
                print(f"| {name} | exit {run.returncode} on {place}: {run.stderr[-2000:]}")
                return
            reports.append(json.loads(path.read_text()))
    numbers = list(pair_numbers(*reports))
    different = [
        (abs(first - second), f"{where}: {first:.6g}, {second:.6g}")
        for where, first, second in numbers
        if abs(first - second) > max(ABSOLUTE, RELATIVE * abs(first))
    ]
    largest = max(different)[1] if different else "–"
    print(
        f"| {name} | {seconds[0]:.1f} | {seconds[1]:.1f} | {seconds[0] / seconds[1]:.2f} | {len(numbers)} | "
        f"{len(different)} | {largest} |",
        flush=True,
    )


def pair_numbers(first: object, second: object, where: str = "") -> Iterator[tuple[str, float, float]]:
    """Yield each number of two reports with its place; a value present or numeric in only one of them counts as inf."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in (first.keys() | second.keys()) - LEFT_OUT:
            yield from pair_numbers(first.get(key), second.get(key), f"{where}.{key}")
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for number, pair in enumerate(zip(first, second, strict=True)):
            yield from pair_numbers(*pair, f"{where}[{number}]")
    elif isinstance(first, (int, float)) and isinstance(second, (int, float)):
        yield where, first, second
    elif type(first) is not type(second) or isinstance(first, list):
        yield where, 0.0, float("inf")


if __name__ == "__main__":
    main()
