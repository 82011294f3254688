"""Speed, accuracy and memory of attention computed with another kernel.

python benchmarks/swap.py [--quick]

Ours and the same kernel written densely, in one piece, run in turn on the same tensors (8 heads of 64 dimensions,
causal, float32), one thread each; medians are printed. Memory is the growth of a fresh process's peak, the output
included. The last rows are a whole model whose heads all have the RBF kernel, against the model as it is.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import subjects

# A process begins with the peak memory of the one that started it: no torch before the others have been started.
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
"""Kernel → least ratio of times and most extra memory in MB, at 8,192 tokens."""
TOKENS_PER_SECOND = 0.85
"""Least share of the unswapped model's tokens per second."""


def main() -> None:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 tokens, demo, one round: does it still run?")
    parser.add_argument("--extra", nargs=2, metavar=("KERNEL", "TOKENS"), help="do this alone, print its extra bytes")
    wanted = parser.parse_args()
    if wanted.extra:
        print(extra(wanted.extra[0], int(wanted.extra[1])))
        return
    print(subjects.machine())
    tokens, rounds = (512, 1) if wanted.quick else (8192, 3)
    megabytes = {words: int(finished("--extra", words, str(tokens))) / 1e6 for words in TARGETS}
    print(f"\nattention: {HEADS} heads × {HEAD_DIM}, {tokens} tokens, causal, float32, one thread, medians of {rounds}")
    for words, (ratio, memory) in TARGETS.items():
        row(words, tokens, rounds)
        print(f"    extra memory {megabytes[words]:.0f} MB; targets at 8,192 tokens: ratio ≥ {ratio}, ≤ {memory} MB")
    whole_model(*(("demo", "demo") if wanted.quick else smollm2()), rounds=1 if wanted.quick else 7)


def row(words: str, tokens: int, rounds: int) -> None:
    """One kernel's time and error against its dense computation."""
    import torch

    from attnlens.kernels import parsed
    from attnlens.kernels.attention import attend, route

    torch.set_num_threads(1)
    kernel, asked = parsed(words), call(tokens)
    with torch.no_grad():
        attend(call(256), kernel)
        (ours, peer), found = medians((partial(attend, asked, kernel), partial(dense, asked, kernel)), rounds)
    times = f"ours {1e3 * ours:.0f} ms, dense {1e3 * peer:.0f} ms, ratio {peer / ours:.1f}"
    print(f"  {kernel.spelling} by {route(asked, kernel)}: {times}")
    print(f"    largest difference {apart(*found):.0e} of the largest output")


def dense(asked: Call, kernel: Kernel) -> Tensor:
    """The same kernel in one piece: all queries × keys at once."""
    log_k = kernel.log(asked.query, asked.paired_key, asked.scale)
    mass = log_k.masked_fill(~asked.visible(), -float("inf"))
    if not kernel.signed:
        return (mass.softmax(-1) @ asked.paired_value).transpose(1, 2)
    mass = (mass - mass.amax(-1, keepdim=True)).exp() * kernel.sign(asked.query, asked.paired_key, asked.scale)
    return ((mass / mass.sum(-1, keepdim=True)) @ asked.paired_value).transpose(1, 2)


def apart(found: Tensor, expected: Tensor) -> float:
    """max|found − expected| / max|expected|."""
    return float((found - expected).abs().max() / expected.abs().max())


def call(tokens: int) -> Call:
    """Random queries, keys and values of one sequence; scores have unit variance and are mostly positive."""
    import torch

    from attnlens.records import Call

    draw = torch.Generator().manual_seed(0)
    # the mean keeps the signed kernel's denominators, Σ⟨q, k⟩, away from zero
    query, key, value = (torch.randn(1, HEADS, tokens, HEAD_DIM, generator=draw) + 0.5 for _ in range(3))
    return Call(query, key, value, HEAD_DIM**-0.5, causal=True)


def medians(functions: tuple[Callable[[], Tensor], ...], rounds: int) -> tuple[list[float], list[Tensor]]:
    """Median seconds of each, in turn, and what each returned."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        results = []
        for function, times in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            results.append(function())
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds], results


def finished(*arguments: str) -> str:
    """What this script prints in a process of its own."""
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603  # our own program


def extra(words: str, tokens: int) -> int:
    """By how many bytes one attention raises this process's peak memory, after a small one."""
    import torch

    from attnlens.kernels import parsed
    from attnlens.kernels.attention import attend
    from attnlens.runs.provenance import peak_memory

    torch.set_num_threads(1)
    kernel, asked = parsed(words), call(tokens)
    with torch.no_grad():
        attend(call(256), kernel)
        before = peak_memory()
        attend(asked, kernel)
    return peak_memory() - before


def smollm2() -> tuple[str, str]:
    """Name and place of SmolLM2; of demo where it is not installed."""
    found = subjects.models(quick=False)
    name = "SmolLM2" if "SmolLM2" in found else "demo"
    return name, found[name]


def whole_model(name: str, place: str, rounds: int) -> None:
    """Tokens per second with every head's kernel exchanged for RBF, against the model as it is."""
    import torch

    from attnlens.kernels import parsed
    from attnlens.models import hooks, loading

    loaded = loading.load(place)
    batch = next(iter(subjects.batches(loaded, 512 if rounds > 1 else 64, 8)))
    sites = tuple(found.site for found in hooks.survey(loaded.model, batch.inputs))
    swaps = {site: hooks.Replacement(parsed("rbf")) for site in sites}

    def plain() -> Tensor:
        with torch.no_grad():
            return loaded.model(**batch.inputs)[0]

    def swapped() -> Tensor:
        with hooks.replace(loaded.model, sites, swaps):
            return plain()

    plain(), swapped()
    before, after = (batch.inputs["input_ids"].numel() / taken for taken in medians((plain, swapped), rounds)[0])
    print(f"\n{name}, rbf in every head of {len(sites)} sites, sequences of {batch.inputs['input_ids'].shape}")
    print(f"  tokens per second: {after:.0f} swapped, {before:.0f} as it is, ratio {after / before:.2f}")
    print(f"    target: ratio ≥ {TOKENS_PER_SECOND}")
    swept(loaded, sites, swaps, batch.inputs)


def swept(loaded: Loaded, sites: tuple[Site, ...], swaps: dict[Site, Replacement], inputs: dict[str, Tensor]) -> None:
    """A sweep over the layers, which resumes each pass at the swapped one, against as many whole passes."""
    import torch

    from attnlens.maths.statistics import Design
    from attnlens.models import hooks
    from attnlens.models.texts import Batch, Batches
    from attnlens.models.texts.targets import feed, task_of
    from attnlens.runs.swap.sweep import sweep, units

    task = task_of(loaded.model)
    short = {name: value[:2, :128] for name, value in inputs.items()}
    fed = feed(loaded, Batches((Batch(short, ()),), 2, 128, texts=(), unknown={}), task, seed=0)
    chosen = units(swaps, "layers", {})
    start = time.perf_counter()
    design = Design.plain(sum(len(one.inputs["input_ids"]) for one in fed))
    sweep(loaded, sites, swaps, chosen, fed, task, design, "auto", lambda _done: None)
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
