"""Speed and memory of Primal-Attention against canonical attention.

python benchmarks/primal.py [--quick] [--device cuda]

A pass runs one layer's attention forward and backward, from queries and keys (and values) to the output: 8 heads of 64
dimensions, 30 scores as in the published code, causal, float32, on one thread or on a GPU. The passes run in turn.
Times are medians, and the GPU is synchronized. Memory is the amount by which a pass raises the peak of a fresh process,
or of the GPU's allocator. Slopes are those of log time and log memory on log tokens, by least squares. Without a GPU
`--device cuda` exits with 2.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

import subjects

# A process inherits the peak memory of its parent: import torch only after starting the others.
if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HEADS, HEAD_DIM, SCORES = 8, 64, 30
SIZES = (1024, 2048, 4096, 8192, 16384)
MOST_EAGER = 4096
"""Most tokens at which the whole matrix is written out: 16,384 would take 8 GB per copy."""
SLOPE, RATIO = 1.1, 3.0
"""Largest slope, and least ratio of SDPA's time to ours at the largest size."""


def main() -> None:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 and 1,024 tokens, one round: does it still run?")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    parser.add_argument("--extra", nargs=2, metavar=("WAY", "TOKENS"), help="run only this, print its extra bytes")
    options = parser.parse_args()
    if options.extra:
        print(measure_extra(options.extra[0], int(options.extra[1])))
        return
    print(
        subjects.describe_machine()
        if options.device == "cpu"
        else f"{subjects.describe_gpu()}; {subjects.describe_machine()}"
    )
    print_table(options.device, *(((512, 1024), 1) if options.quick else (SIZES, 3)))


def print_table(device: str, sizes: tuple[int, ...], rounds: int) -> None:
    """Print one row per number of tokens, and the slopes."""
    measured = measure_megabytes if device == "cpu" else measure_gpu_megabytes
    memory = {(way, size): measured(way, size) for way in WAYS for size in sizes if _is_possible(way, size)}
    print(f"\nforward and backward: {HEADS} heads × {HEAD_DIM}, s = {SCORES}, causal, float32, medians of {rounds}")
    print("  tokens      primal             sdpa               eager              ratio to sdpa")
    seconds, digits = {}, 0 if device == "cpu" else 2
    for size in sizes:
        ways = [way for way in WAYS if _is_possible(way, size)]
        seconds |= {
            (way, size): numbers for way, numbers in zip(ways, time_passes(ways, size, rounds, device), strict=True)
        }
        cells = [
            f"{1e3 * seconds[w, size]:7.{digits}f} ms {memory[w, size]:5.0f} MB" if w in ways else "–" for w in WAYS
        ]
        print(f"  {size:6d}  " + "  ".join(f"{cell:>17}" for cell in cells), end="")
        print(f"  {seconds['sdpa', size] / seconds['primal', size]:8.1f}")
    for name, numbers in (("time", seconds), ("memory", memory)):
        rates = {way: fit_slope([(n, numbers[way, n]) for n in sizes if _is_possible(way, n)]) for way in WAYS}
        print(f"  slope of log {name}: " + ", ".join(f"{way} {rate:.2f}" for way, rate in rates.items()))
    print(f"    targets from 1,024 to 16,384 tokens: primal's slopes ≤ {SLOPE}; at 16,384 ratio to sdpa ≥ {RATIO:g}")


def _is_possible(way: str, size: int) -> bool:
    return way != "eager" or size <= MOST_EAGER


def fit_slope(points: list[tuple[int, float]]) -> float:
    """Fit log y on log x by least squares."""
    x, y = ([math.log(max(value, 1e-9)) for value in column] for column in zip(*points, strict=True))
    centre = sum(x) / len(x)
    return sum((a - centre) * b for a, b in zip(x, y, strict=True)) / sum((a - centre) ** 2 for a in x)


def build_pass(name: str, tokens: int, device: str = "cpu") -> Callable[[], object]:
    """Build one forward and backward pass on random queries, keys and values, complete when it returns."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from attnlens.lab.primal import PrimalHeads

    torch.set_num_threads(1)
    draw, shape = torch.Generator(device).manual_seed(0), (1, HEADS, tokens, HEAD_DIM)
    query, key, value = (torch.randn(shape, generator=draw, device=device).requires_grad_() for _ in range(3))
    heads = PrimalHeads(HEADS, HEAD_DIM, SCORES).to(device)

    def attend_eagerly() -> Tensor:
        above = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
        scores = (query @ key.mT * HEAD_DIM**-0.5).masked_fill(above, -torch.inf)
        return scores.softmax(-1) @ value

    ways: dict[str, Callable[[], Tensor]] = {
        "primal": lambda: heads(query, key, causal=True),
        "sdpa": lambda: scaled_dot_product_attention(query, key, value, is_causal=True),
        "eager": attend_eagerly,
    }

    def run() -> None:
        ways[name]().square().sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


WAYS = ("primal", "sdpa", "eager")


def time_passes(ways: list[str], tokens: int, rounds: int, device: str = "cpu") -> list[float]:
    """Return the median seconds of each pass, run in turn."""
    passes = [build_pass(way, tokens, device) for way in ways]
    # a GPU selects its kernels by size
    for name in ways:
        build_pass(name, 256 if device == "cpu" else tokens, device)()
    return subjects.time_in_turn(passes, rounds)[0]


def measure_megabytes(way: str, tokens: int) -> float:
    """Measure by how much one pass raises the peak memory of a fresh process."""
    return int(subjects.run_python(__file__, "--extra", way, str(tokens))) / 1e6


def measure_extra(way: str, tokens: int) -> int:
    """Return by how many bytes a pass raises the peak memory of this process, after a small pass."""
    build_pass(way, 256)()
    return subjects.measure_extra_memory(build_pass(way, tokens))


def measure_gpu_megabytes(way: str, tokens: int) -> float:
    """Measure by how much a second pass raises the allocator's peak above inputs, gradients and parameters."""
    import torch

    work = build_pass(way, tokens, "cuda")
    work()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


if __name__ == "__main__":
    main()
