"""Speed, accuracy and memory of attention computed with another kernel.

python benchmarks/swap.py [--quick]

Our attention and a dense computation of the same kernel run in turn on the same tensors (8 heads of 64 dimensions,
causal, float32), one thread each; medians are printed. Memory is the growth of a fresh process's peak, including the
output. The last rows compare a whole model with the RBF kernel in all heads with the unchanged model.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import TYPE_CHECKING

import subjects

# A process inherits the peak memory of its parent: import torch only after starting the others.
if TYPE_CHECKING:
    from torch import Tensor

    from attnlens.kernels import Kernel
    from attnlens.models.hooks import Replacement
    from attnlens.models.loading import Loaded
    from attnlens.records import Call, Site

HEADS, HEAD_DIM = 8, 64
TARGETS = {
    "rbf": (2.5, 150),
    "polynomial": (2, 350),
    "taylor": (2, 350),
    "linear": (40, 150),
    "elu": (40, 150),
    "random-features": (40, 150),
}
"""Kernel → minimum ratio of times and maximum extra memory in MB, at 8,192 tokens."""
TOKENS_PER_SECOND = 0.85
"""Minimum speed of the swapped model, as a share of the original's tokens per second."""


def main() -> None:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 tokens, demo, one round: does it still run?")
    parser.add_argument("--extra", nargs=2, metavar=("KERNEL", "TOKENS"), help="run only this, print its extra bytes")
    options = parser.parse_args()
    if options.extra:
        print(measure_extra(options.extra[0], int(options.extra[1])))
        return
    print(subjects.describe_machine())
    tokens, rounds = (512, 1) if options.quick else (8192, 3)
    megabytes = {words: int(subjects.run_python(__file__, "--extra", words, str(tokens))) / 1e6 for words in TARGETS}
    print(f"\nattention: {HEADS} heads × {HEAD_DIM}, {tokens} tokens, causal, float32, one thread, medians of {rounds}")
    for words, (ratio, memory) in TARGETS.items():
        print_row(words, tokens, rounds)
        print(f"    extra memory {megabytes[words]:.0f} MB; targets at 8,192 tokens: ratio ≥ {ratio}, ≤ {memory} MB")
    compare_whole_model(*(("demo", "demo") if options.quick else find_smollm2()), rounds=1 if options.quick else 7)


def print_row(words: str, tokens: int, rounds: int) -> None:
    """Print the time and error of one kernel, compared with its dense computation."""
    import torch

    from attnlens.kernels import parsed
    from attnlens.kernels.attention import attend, route

    torch.set_num_threads(1)
    kernel, inputs = parsed(words), draw_call(tokens)
    with torch.no_grad():
        attend(draw_call(256), kernel)
        functions = (partial(attend, inputs, kernel), partial(compute_densely, inputs, kernel))
        (ours, peer), outputs = subjects.time_in_turn(functions, rounds)
    times = f"ours {1e3 * ours:.0f} ms, dense {1e3 * peer:.0f} ms, ratio {peer / ours:.1f}"
    print(f"  {kernel.spelling} by {route(inputs, kernel)}: {times}")
    print(f"    largest difference {measure_difference(*outputs):.0e} of the largest output")


def compute_densely(call: Call, kernel: Kernel) -> Tensor:
    """Compute the same kernel in one piece: all queries × keys at once."""
    log_k = kernel.log(call.query, call.paired_key, call.scale)
    mass = log_k.masked_fill(~call.visible(), -float("inf"))
    if not kernel.signed:
        return (mass.softmax(-1) @ call.paired_value).transpose(1, 2)
    mass = (mass - mass.amax(-1, keepdim=True)).exp() * kernel.sign(call.query, call.paired_key, call.scale)
    return ((mass / mass.sum(-1, keepdim=True)) @ call.paired_value).transpose(1, 2)


def measure_difference(output: Tensor, expected: Tensor) -> float:
    """Compute max|output − expected| / max|expected|."""
    return float((output - expected).abs().max() / expected.abs().max())


def draw_call(tokens: int) -> Call:
    """Draw queries, keys and values of one sequence; scores have unit variance and are mostly positive."""
    import torch

    from attnlens.records import Call

    draw = torch.Generator().manual_seed(0)
    # the mean keeps the signed kernel's denominators, Σ⟨q, k⟩, away from zero
    query, key, value = (torch.randn(1, HEADS, tokens, HEAD_DIM, generator=draw) + 0.5 for _ in range(3))
    return Call(query, key, value, HEAD_DIM**-0.5, causal=True)


def measure_extra(words: str, tokens: int) -> int:
    """Return by how many bytes one attention raises the peak memory of this process, after a small one."""
    import torch

    from attnlens.kernels import parsed
    from attnlens.kernels.attention import attend

    torch.set_num_threads(1)
    kernel, inputs = parsed(words), draw_call(tokens)
    with torch.no_grad():
        attend(draw_call(256), kernel)
        return subjects.measure_extra_memory(partial(attend, inputs, kernel))


def find_smollm2() -> tuple[str, str]:
    """Return the name and path of SmolLM2, or of demo if SmolLM2 is not installed."""
    paths = subjects.find_models(quick=False)
    name = "SmolLM2" if "SmolLM2" in paths else "demo"
    return name, paths[name]


def compare_whole_model(name: str, path: str, rounds: int) -> None:
    """Compare tokens per second with RBF in every head with those of the unchanged model."""
    import torch

    from attnlens.kernels import parsed
    from attnlens.models import hooks, loading

    loaded = loading.load(path)
    batch = next(iter(subjects.build_batches(loaded, 512 if rounds > 1 else 64, 8)))
    sites = tuple(capture.site for capture in hooks.survey(loaded.model, batch.inputs))
    swaps = {site: hooks.Replacement(parsed("rbf")) for site in sites}

    def run_plain() -> Tensor:
        with torch.no_grad():
            return loaded.model(**batch.inputs)[0]

    def run_swapped() -> Tensor:
        with hooks.replace(loaded.model, sites, swaps):
            return run_plain()

    run_plain(), run_swapped()
    times, _ = subjects.time_in_turn((run_plain, run_swapped), rounds)
    before, after = (batch.inputs["input_ids"].numel() / seconds for seconds in times)
    print(f"\n{name}, rbf in every head of {len(sites)} sites, sequences of {batch.inputs['input_ids'].shape}")
    print(f"  tokens per second: {after:.0f} swapped, {before:.0f} unchanged, ratio {after / before:.2f}")
    print(f"    target: ratio ≥ {TOKENS_PER_SECOND}")
    compare_sweep(loaded, sites, swaps, batch.inputs)


def compare_sweep(
    loaded: Loaded, sites: tuple[Site, ...], swaps: dict[Site, Replacement], inputs: dict[str, Tensor]
) -> None:
    """Compare a sweep over the layers, which resumes each pass at the swapped one, with as many whole passes."""
    import torch

    from attnlens.maths.statistics import Design
    from attnlens.models import hooks
    from attnlens.models.texts import Batch, Batches
    from attnlens.models.texts.targets import feed, task_of
    from attnlens.runs.swap.sites import SwapSetup
    from attnlens.runs.swap.sweep import list_units, sweep

    task = task_of(loaded.model)
    short = {name: value[:2, :128] for name, value in inputs.items()}
    fed = feed(loaded, Batches((Batch(short, ()),), 2, 128, texts=(), unknown={}), task, seed=0)
    chosen = list_units(swaps, "layers", {})
    start = time.perf_counter()
    design = Design.plain(sum(len(batch.inputs["input_ids"]) for batch in fed))
    sweep(SwapSetup(loaded, sites, swaps, task), chosen, fed, design, lambda _done: None)
    resumed = time.perf_counter() - start
    start = time.perf_counter()
    for site in swaps:
        with hooks.replace(loaded.model, sites, {site: swaps[site]}), torch.no_grad():
            hooks.forward(loaded.model, short)
    whole = time.perf_counter() - start
    print(
        f"  a sweep over {len(chosen)} layers: {resumed:.1f} s, whole passes {whole:.1f} s, ratio {resumed / whole:.2f}"
    )
    print("    target: about 0.5")


if __name__ == "__main__":
    main()
