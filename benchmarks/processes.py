"""Time and memory of whole commands, each in a fresh process.

python benchmarks/processes.py [--quick]

The peer for memory is the model's plain forward over the same batches. A process begins with the peak memory of the one
that started it, so this one stays small: it imports no torch before it has started the others.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import subjects


def main() -> None:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="demo, few sequences, one round: does it still run?")
    parser.add_argument("--peak", choices=["forward", *subjects.TASKS], help="do this alone, print its peak in bytes")
    parser.add_argument("--model", default="demo", help="model of --peak")
    parser.add_argument("--windows", type=int, default=32, help="sequences of --peak")
    wanted = parser.parse_args()
    if wanted.peak:
        print(peak(wanted.peak, wanted.model, wanted.windows))
        return
    print(subjects.machine())
    start(rounds=1 if wanted.quick else 5)
    whole(subjects.models(quick=wanted.quick), rounds=1 if wanted.quick else 3)
    memory(*subjects.main_model(quick=wanted.quick), (4,) if wanted.quick else (32, 128))


def start(rounds: int) -> None:
    """The commands that need no model."""
    print(f"\nstart, medians of {rounds} (target < 0.3 s)")
    for command in ("--version", "--help", "list"):
        print(f"  attnlens {command}: {seconds(rounds, command):.2f} s")


def whole(models: dict[str, str], rounds: int) -> None:
    """The program from start to table."""
    print(f"\nattnlens inspect MODEL, all of it on all threads, with imports and loading, medians of {rounds}")
    for name, model in models.items():
        print(f"  {name}: {seconds(rounds, 'inspect', model, '--no-progress'):.1f} s")


def seconds(rounds: int, *arguments: str) -> float:
    """Median time of the program."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        finished("-m", "attnlens", *arguments)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def memory(name: str, model: str, sizes: tuple[int, ...]) -> None:
    """Peak resident memory of the inspection above the forward's, for few and many sequences."""
    print(
        f"\npeak memory, {name}, 128 tokens, batches of 8, all threads (target ≤ forward + 300 MB, whatever the number)"
    )
    for count in sizes:
        own, *ours = (
            int(finished(__file__, "--peak", task, "--model", model, "--windows", str(count))) / 1e6
            for task in ("forward", *subjects.TASKS)
        )
        above = ", ".join(f"{task} {peak - own:+.0f} MB" for task, peak in zip(subjects.TASKS, ours, strict=True))
        print(f"  {count} sequences: forward {own:.0f} MB, {above}, ratio {max(ours) / own:.2f}")


def finished(*arguments: str) -> str:
    """What a Python process prints."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603  # our own program
    return done.stdout


def peak(task: str, model: str, sequences: int) -> int:
    """Load the model, do the task, and say how much memory the process has held at most, in bytes."""
    from attnlens.models import loading
    from attnlens.runs.provenance import peak_memory

    loaded = loading.load(model)
    if task == "forward":
        subjects.forward(loaded, subjects.batches(loaded, 128, sequences))
    else:
        subjects.inspected(loaded, task, 128, sequences)
    return peak_memory()


if __name__ == "__main__":
    main()
