"""Time and memory of whole commands, each in a fresh process.

python benchmarks/processes.py [--quick]

The peer for memory is the model's plain forward pass over the same batches. A process inherits the peak memory of its
parent, so this one stays small: it imports torch only after starting the others.
"""

from __future__ import annotations

import argparse
from functools import partial

import subjects


def main() -> None:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="demo, few sequences, one round: does it still run?")
    parser.add_argument("--peak", choices=["forward", *subjects.TASKS], help="run only this, print its peak in bytes")
    parser.add_argument("--model", default="demo", help="model of --peak")
    parser.add_argument("--windows", type=int, default=32, help="sequences of --peak")
    options = parser.parse_args()
    if options.peak:
        print(measure_peak(options.peak, options.model, options.windows))
        return
    print(subjects.describe_machine())
    time_start(rounds=1 if options.quick else 5)
    time_inspect(subjects.find_models(quick=options.quick), rounds=1 if options.quick else 3)
    compare_memory(*subjects.find_main_model(quick=options.quick), (4,) if options.quick else (32, 128))


def time_start(rounds: int) -> None:
    """Time the commands that load no model."""
    print(f"\nstart, medians of {rounds} (target < 0.3 s)")
    for command in ("--version", "--help", "list"):
        print(f"  attnlens {command}: {time_program(rounds, command):.2f} s")


def time_inspect(models: dict[str, str], rounds: int) -> None:
    """Time the program from start to table."""
    print(f"\nattnlens inspect MODEL, all of it on all threads, with imports and loading, medians of {rounds}")
    for name, model in models.items():
        print(f"  {name}: {time_program(rounds, 'inspect', model, '--no-progress'):.1f} s")


def time_program(rounds: int, *arguments: str) -> float:
    """Return the median time of the program."""
    run = partial(subjects.run_python, "-m", "attnlens", *arguments)
    return subjects.time_in_turn([run], rounds)[0][0]


def compare_memory(name: str, model: str, sizes: tuple[int, ...]) -> None:
    """Compare the peak resident memory of the inspection with that of the forward pass, for few and many sequences."""
    print(
        f"\npeak memory, {name}, 128 tokens, batches of 8, all threads (target ≤ forward + 300 MB, whatever the number)"
    )
    for count in sizes:
        forward, *ours = (
            int(subjects.run_python(__file__, "--peak", task, "--model", model, "--windows", str(count))) / 1e6
            for task in ("forward", *subjects.TASKS)
        )
        above = ", ".join(f"{task} {peak - forward:+.0f} MB" for task, peak in zip(subjects.TASKS, ours, strict=True))
        print(f"  {count} sequences: forward {forward:.0f} MB, {above}, ratio {max(ours) / forward:.2f}")


def measure_peak(task: str, model: str, sequences: int) -> int:
    """Load the model, run the task, and return the peak memory of the process in bytes."""
    from attnlens.models import loading
    from attnlens.runs.provenance import peak_memory

    loaded = loading.load(model)
    if task == "forward":
        subjects.run_forward(loaded, subjects.build_batches(loaded, 128, sequences))
    else:
        subjects.inspect_windows(loaded, task, 128, sequences)
    return peak_memory()


if __name__ == "__main__":
    main()
