"""Speed and memory of Primal-Attention against canonical attention.

python benchmarks/primal.py [--quick] [--device cuda]

Forward and backward of one layer's attention from queries and keys (and values) to the output: 8 heads of 64
dimensions, 30 scores as in the published code, causal, float32, run in turn; on one thread, or on a GPU. Times are
medians, and of work that is done: a GPU is waited for. Memory is by how much a pass raises a fresh process's peak, or
that of the GPU's allocator. Slopes are those of log time and log memory on log tokens, by least squares. Without a GPU
`--device cuda` says so and exits with 2.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING

import subjects

# A process begins with the peak memory of the one that started it: no torch before the others have been started.
if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HEADS, HEAD_DIM, SCORES = 8, 64, 30
SIZES = (1024, 2048, 4096, 8192, 16384)
MOST_EAGER = 4096
"""Tokens up to which the whole matrix is written out: 16,384 tokens would take 8 GB for each copy."""
SLOPE, RATIO = 1.1, 3.0
"""Largest slope, and least ratio of SDPA's time at the largest size."""


def main() -> None:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 and 1,024 tokens, one round: does it still run?")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (default: cpu)")
    parser.add_argument("--extra", nargs=2, metavar=("WAY", "TOKENS"), help="do this alone, print its extra bytes")
    wanted = parser.parse_args()
    if wanted.extra:
        print(extra(wanted.extra[0], int(wanted.extra[1])))
        return
    print(subjects.machine() if wanted.device == "cpu" else f"{gpu()}; {subjects.machine()}")
    table(wanted.device, *(((512, 1024), 1) if wanted.quick else (SIZES, 3)))


def table(device: str, sizes: tuple[int, ...], rounds: int) -> None:
    """One row a number of tokens, and the slopes."""
    measured = megabytes if device == "cpu" else gpu_megabytes
    memory = {(way, size): measured(way, size) for way in WAYS for size in sizes if _possible(way, size)}
    print(f"\nforward and backward: {HEADS} heads × {HEAD_DIM}, s = {SCORES}, causal, float32, medians of {rounds}")
    print("  tokens      primal             sdpa               eager              ratio to sdpa")
    seconds, digits = {}, 0 if device == "cpu" else 2
    for size in sizes:
        ways = [way for way in WAYS if _possible(way, size)]
        seconds |= {(way, size): found for way, found in zip(ways, timed(ways, size, rounds, device), strict=True)}
        cells = [
            f"{1e3 * seconds[w, size]:7.{digits}f} ms {memory[w, size]:5.0f} MB" if w in ways else "–" for w in WAYS
        ]
        print(f"  {size:6d}  " + "  ".join(f"{cell:>17}" for cell in cells), end="")
        print(f"  {seconds['sdpa', size] / seconds['primal', size]:8.1f}")
    for name, found in (("time", seconds), ("memory", memory)):
        rates = {way: slope([(n, found[way, n]) for n in sizes if _possible(way, n)]) for way in WAYS}
        print(f"  slope of log {name}: " + ", ".join(f"{way} {rate:.2f}" for way, rate in rates.items()))
    print(f"    targets from 1,024 to 16,384 tokens: primal's slopes ≤ {SLOPE}; at 16,384 ratio to sdpa ≥ {RATIO:g}")


def _possible(way: str, size: int) -> bool:
    return way != "eager" or size <= MOST_EAGER


def slope(points: list[tuple[int, float]]) -> float:
    """Least squares of log y on log x."""
    x, y = ([math.log(max(value, 1e-9)) for value in column] for column in zip(*points, strict=True))
    centre = sum(x) / len(x)
    return sum((a - centre) * b for a, b in zip(x, y, strict=True)) / sum((a - centre) ** 2 for a in x)


def way_of(name: str, tokens: int, device: str = "cpu") -> Callable[[], object]:
    """One forward and backward pass on random queries, keys and values, done when it returns."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from attnlens.lab.primal import PrimalHeads

    torch.set_num_threads(1)
    draw, shape = torch.Generator(device).manual_seed(0), (1, HEADS, tokens, HEAD_DIM)
    query, key, value = (torch.randn(shape, generator=draw, device=device).requires_grad_() for _ in range(3))
    heads = PrimalHeads(HEADS, HEAD_DIM, SCORES).to(device)

    def eager() -> Tensor:
        above = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
        scores = (query @ key.mT * HEAD_DIM**-0.5).masked_fill(above, -torch.inf)
        return scores.softmax(-1) @ value

    ways: dict[str, Callable[[], Tensor]] = {
        "primal": lambda: heads(query, key, causal=True),
        "sdpa": lambda: scaled_dot_product_attention(query, key, value, is_causal=True),
        "eager": eager,
    }

    def work() -> None:
        ways[name]().square().sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return work


WAYS = ("primal", "sdpa", "eager")


def timed(ways: list[str], tokens: int, rounds: int, device: str = "cpu") -> list[float]:
    """Median seconds of each, in turn."""
    passes = [way_of(way, tokens, device) for way in ways]
    found: list[list[float]] = [[] for _ in ways]
    # a GPU picks its kernels by size
    for name in ways:
        way_of(name, 256 if device == "cpu" else tokens, device)()
    for _ in range(rounds):
        for work, times in zip(passes, found, strict=True):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return [median(times) for times in found]


def megabytes(way: str, tokens: int) -> float:
    """By how much one pass raises a fresh process's peak memory."""
    command = [sys.executable, __file__, "--extra", way, str(tokens)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout) / 1e6  # noqa: S603  # our own program


def extra(way: str, tokens: int) -> int:
    """The same in bytes, in this process, after a small pass."""
    from attnlens.runs.provenance import peak_memory

    way_of(way, 256)()
    work = way_of(way, tokens)
    before = peak_memory()
    work()
    return peak_memory() - before


def gpu() -> str:
    """The GPU's name; without one the program ends."""
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: not measured on a GPU", file=sys.stderr)
        sys.exit(2)
    return torch.cuda.get_device_name()


def gpu_megabytes(way: str, tokens: int) -> float:
    """By how much a second pass raises the allocator's peak above the inputs, their gradients and the parameters."""
    import torch

    work = way_of(way, tokens, "cuda")
    work()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


if __name__ == "__main__":
    main()
