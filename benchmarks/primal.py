"""How fast and in how much memory is Primal-Attention computed, against canonical attention?

python benchmarks/primal.py [--quick]

Forward and backward of one layer's attention from queries and keys (and values) to the output: 8 heads of 64
dimensions, 30 scores as in the published code, causal, float32, one thread, run in turn. Times are medians; memory is
the growth of a fresh process's peak. Slopes are those of log time and log memory on log tokens, by least squares.
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
    parser.add_argument("--extra", nargs=2, metavar=("WAY", "TOKENS"), help="do this alone, print its extra bytes")
    wanted = parser.parse_args()
    if wanted.extra:
        print(extra(wanted.extra[0], int(wanted.extra[1])))
        return
    print(subjects.machine())
    sizes, rounds = ((512, 1024), 1) if wanted.quick else (SIZES, 3)
    memory = {(way, size): megabytes(way, size) for way in WAYS for size in sizes if _possible(way, size)}
    print(f"\nforward and backward: {HEADS} heads × {HEAD_DIM}, s = {SCORES}, causal, float32, medians of {rounds}")
    print("  tokens      primal             sdpa               eager              ratio to sdpa")
    seconds = {}
    for size in sizes:
        ways = [way for way in WAYS if _possible(way, size)]
        seconds |= {(way, size): found for way, found in zip(ways, timed(ways, size, rounds), strict=True)}
        cells = [f"{1e3 * seconds[w, size]:7.0f} ms {memory[w, size]:5.0f} MB" if w in ways else "–" for w in WAYS]
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


def way_of(name: str, tokens: int) -> Callable[[], object]:
    """One forward and backward pass on random queries, keys and values."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from attnlens.primal import PrimalHeads

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, HEADS, tokens, HEAD_DIM, generator=draw).requires_grad_() for _ in range(3))
    heads = PrimalHeads(HEADS, HEAD_DIM, SCORES)

    def eager() -> Tensor:
        above = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores = (query @ key.mT * HEAD_DIM**-0.5).masked_fill(above, -torch.inf)
        return scores.softmax(-1) @ value

    ways: dict[str, Callable[[], Tensor]] = {
        "primal": lambda: heads(query, key, causal=True),
        "sdpa": lambda: scaled_dot_product_attention(query, key, value, is_causal=True),
        "eager": eager,
    }
    return lambda: ways[name]().square().sum().backward()


WAYS = ("primal", "sdpa", "eager")


def timed(ways: list[str], tokens: int, rounds: int) -> list[float]:
    """Median seconds of each, in turn."""
    passes = [way_of(way, tokens) for way in ways]
    found: list[list[float]] = [[] for _ in ways]
    for name in ways:
        way_of(name, 256)()
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
    from attnlens.run.collect import peak_memory

    way_of(way, 256)()
    work = way_of(way, tokens)
    before = peak_memory()
    work()
    return peak_memory() - before


if __name__ == "__main__":
    main()
