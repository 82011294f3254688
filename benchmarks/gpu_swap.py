"""Speed, accuracy and memory of attention with each kernel on a GPU.

python benchmarks/gpu_swap.py [--quick] [--dtype bfloat16]

One sequence, 16 heads of 64 dimensions, causal. Times are medians by CUDA events; the ratio is plain SDPA's time on the
same tensors divided by ours; extra memory is the peak of the allocator above the inputs; errors are ‖out − ref‖/‖ref‖
over the last 256 queries, compared with the same kernel in float64. Without a GPU the script exits with 2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnlens.kernels import Kernel, parsed
from attnlens.kernels.attention import attend, route, weights
from attnlens.records import Call

HEADS, HEAD_DIM, CHECKED = 16, 64, 256
KERNELS = (
    "exponential",
    "rbf",
    "cosine",
    "polynomial",
    "taylor",
    "exponential+window:256",
    "exponential+sink-window:4,256",
    "exponential+strided:64",
    "linear",
    "elu",
    "random-features",
    "laplacian",
)
DTYPES = ("bfloat16", "float16", "float32")


def main() -> None:
    """Print a markdown table of kernels × tokens × types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,024 tokens, one round: does it still run?")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES, help="(default: all)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: not measured on a GPU", file=sys.stderr)
        sys.exit(2)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {HEADS} heads × {HEAD_DIM}, causal\n")
    print("| kernel | path | tokens | type | ms | ratio to SDPA's speed | extra MB | error |")
    print("|---|---|---|---|---|---|---|---|")
    sizes, rounds = ((1024,), 1) if options.quick else ((1024, 4096, 16384), 20)
    with torch.no_grad():
        for words in KERNELS:
            for tokens in sizes:
                for dtype in options.dtype:
                    print_row(parsed(words), tokens, getattr(torch, dtype), rounds)


def print_row(kernel: Kernel, tokens: int, dtype: torch.dtype, rounds: int) -> None:
    """Print one line of the table."""
    exact = draw_call(tokens)
    call = replace(exact, query=exact.query.to(dtype), key=exact.key.to(dtype), value=exact.value.to(dtype))

    def run_ours() -> Tensor:
        return attend(call, kernel)

    def run_sdpa() -> Tensor:
        return scaled_dot_product_attention(call.query, call.key, call.value, is_causal=True, scale=call.scale)

    mine, theirs, memory = time_on_gpu(run_ours, rounds), time_on_gpu(run_sdpa, rounds), measure_extra(run_ours)
    label = f"{kernel.spelling} | {route(call, kernel)} | {tokens} | {str(dtype).removeprefix('torch.')}"
    error = measure_error(run_ours(), exact, kernel)
    print(f"| {label} | {mine:.2f} | {theirs / mine:.2f} | {memory / 1e6:.0f} | {error:.0e} |")


def draw_call(tokens: int) -> Call:
    """Draw queries, keys and values in float64; their mean keeps Σ⟨q, k⟩ of the signed kernel away from zero."""
    draw = torch.Generator("cuda").manual_seed(0)
    shape = (1, HEADS, tokens, HEAD_DIM)
    query, key, value = (torch.randn(shape, generator=draw, device="cuda", dtype=torch.float64) + 0.5 for _ in range(3))
    return Call(query, key, value, HEAD_DIM**-0.5, causal=True)


def time_on_gpu(function: Callable[[], Tensor], rounds: int) -> float:
    """Return the median time by CUDA events, after two runs that compile and warm up."""
    function(), function()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def measure_extra(function: Callable[[], Tensor]) -> int:
    """Return the allocator's peak above what was allocated before, in bytes; the output counts."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_error(output: Tensor, exact: Call, kernel: Kernel) -> float:
    """Compute ‖out − ref‖/‖ref‖ of the last queries, with the weights written out in float64."""
    rows = slice(exact.query.shape[2] - CHECKED, exact.query.shape[2])
    expected = (weights(exact, kernel, rows) @ exact.paired_value).transpose(1, 2)
    return float((output[:, rows].double() - expected).norm() / expected.norm())


if __name__ == "__main__":
    main()
