"""Speed and accuracy of `inspect` for tokens.* beside the model's plain forward.

python benchmarks/inspection.py [--quick]

Medians of runs taken in turn, on one thread where nothing else is said, on a model that is already loaded. The peers
are the forward under the model's own attention, torch.linalg.eigvalsh, and one thread. The script is not called
inspect.py: its folder comes first on Python's path, where it would hide the standard module.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import subjects
import torch
from spectra import by_eigenvalues, row

from attnlens.maths import linalg
from attnlens.models import hooks, loading
from attnlens.models.loading import Loaded
from attnlens.models.texts import Batches
from attnlens.report.export import Report

TARGETS = {"without spectra": 3, "all analyzers": 10}


def main() -> None:
    """Print every row."""
    quick = subjects.started(__doc__)
    name, model = subjects.main_model(quick=quick)
    loaded = loading.load(model)
    tokens, sequences = (32, 4) if quick else (128, 32)
    against_forward(loaded, name, tokens, sequences, rounds=1 if quick else 5)
    most = 64 if quick else min(512, loaded.model.config.max_position_embeddings)
    definiteness(loaded, name, most, rounds=1 if quick else 3)
    threads(loaded, name, tokens, sequences, rounds=1 if quick else 5)


def against_forward(loaded: Loaded, name: str, tokens: int, sequences: int, rounds: int) -> None:
    """attnlens.inspect on tokens, in turn with the forward."""
    batches = subjects.batches(loaded, tokens, sequences)
    tasks = [partial(subjects.inspected, loaded, task, tokens, sequences) for task in subjects.TASKS]
    plain, *ours = medians(rounds, partial(subjects.forward, loaded, batches), *tasks)
    print(
        f"\ninspect --source tokens: {name}, {sequences} sequences of {tokens} tokens, one thread, medians of {rounds}"
    )
    print("  ours is all of attnlens.inspect on a loaded model: tokenizing, survey, identity proof, forward, report")
    for (task, target), taken in zip(TARGETS.items(), ours, strict=True):
        print(f"  {task}: ours {taken:.2f} s, forward {plain:.2f} s, ratio {taken / plain:.1f} (target ≤ {target})")
    error = rank_error(tasks[-1](), loaded, batches)
    print(f"  tokens.effective_rank against the model's own eager attention: largest relative error {error:.0e}")


def rank_error(report: Report, loaded: Loaded, batches: Batches) -> float:
    """Effective ranks once more, from the probabilities that the model itself hands out."""
    with torch.no_grad(), hooks.implementation(loaded.model, "eager"):
        given = [loaded.model(**batch.inputs, output_attentions=True).attentions for batch in batches]
    values = torch.linalg.svdvals(torch.cat([torch.stack(layers).double() for layers in given], dim=1))
    shares = values / values.sum(-1, keepdim=True)
    expected = torch.special.entr(shares).sum(-1).exp().mean(1).flatten()
    found = [head.measures["tokens.effective_rank"].value for head in report.heads]
    return float((torch.tensor(found, dtype=torch.float64) / expected - 1).abs().max())


def definiteness(loaded: Loaded, name: str, tokens: int, rounds: int) -> None:
    """The verdicts on the kernels of one real sequence against all their eigenvalues."""
    reached = hooks.survey(loaded.model, subjects.batches(loaded, tokens, 1).batches[0].inputs)
    logits = torch.cat([found.call.query_key(found.site).logits[0] for found in reached])
    verdicts, truth = linalg.definite(logits), by_eigenvalues(logits)
    print(f"\nis exp(L) positive semidefinite: {len(logits)} heads of {name}, {tokens} tokens (target ≥ 14 at 512)")
    label = f"{int((verdicts == truth).sum())} of {len(logits)} verdicts agree, {int(truth.sum())} positive"
    row(label, partial(linalg.definite, logits), partial(by_eigenvalues, logits), rounds)


def threads(loaded: Loaded, name: str, tokens: int, sequences: int, rounds: int) -> None:
    """All of tokens.*, forward included, with two threads against one."""

    def on(count: int) -> Callable[[], None]:
        def run() -> None:
            torch.set_num_threads(count)
            subjects.inspected(loaded, "all analyzers", tokens, sequences)
            torch.set_num_threads(1)

        return run

    print(f"\nthreads: all of tokens.* on {name}, forward included (meaningful with two idle cores)")
    row("two threads against one", on(2), on(1), rounds)


def medians(rounds: int, *functions: Callable[[], object]) -> list[float]:
    """Median seconds of each, run in turn after one round that does not count."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 1):
        for function, times in zip(functions, seconds, strict=True):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
    return [statistics.median(times[1:]) for times in seconds]


if __name__ == "__main__":
    main()
