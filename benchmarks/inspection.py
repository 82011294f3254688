"""Speed of `inspect` for tokens.*, compared with the model's plain forward pass.

python benchmarks/inspection.py [--quick]

Times are medians of runs taken in turn on a loaded model, on one thread. The peers are the model's own forward pass and
torch.linalg.eigvalsh. The script is not called inspect.py because its folder comes first
on Python's path, where it would hide the standard module.
"""

from __future__ import annotations

from functools import partial

import subjects
import torch
from spectra import compare_times, judge_by_eigenvalues

from attnlens.maths import linalg
from attnlens.models import hooks, loading
from attnlens.models.loading import Loaded

TARGETS = {"without spectra": 3, "all analyzers": 10}


def main() -> None:
    """Print every row."""
    quick = subjects.start_benchmark(__doc__)
    name, model = subjects.find_main_model(quick=quick)
    loaded = loading.load(model)
    tokens, sequences = (32, 4) if quick else (128, 32)
    compare_with_forward(loaded, name, tokens, sequences, rounds=1 if quick else 5)
    most = 64 if quick else min(512, loaded.model.config.max_position_embeddings)
    compare_verdicts(loaded, name, most, rounds=1 if quick else 3)


def compare_with_forward(loaded: Loaded, name: str, tokens: int, sequences: int, rounds: int) -> None:
    """Time attnlens.inspect on tokens in turn with the forward pass."""
    batches = subjects.build_batches(loaded, tokens, sequences)
    tasks = [partial(subjects.inspect_windows, loaded, task, tokens, sequences) for task in subjects.TASKS]
    functions = [partial(subjects.run_forward, loaded, batches), *tasks]
    plain, *ours = subjects.time_in_turn(functions, rounds, warm=True)[0]
    print(
        f"\ninspect --source tokens: {name}, {sequences} sequences of {tokens} tokens, one thread, medians of {rounds}"
    )
    print("  ours is all of attnlens.inspect on a loaded model: tokenizing, survey, identity proof, forward, report")
    for (task, target), seconds in zip(TARGETS.items(), ours, strict=True):
        print(f"  {task}: ours {seconds:.2f} s, forward {plain:.2f} s, ratio {seconds / plain:.1f} (target ≤ {target})")


def compare_verdicts(loaded: Loaded, name: str, tokens: int, rounds: int) -> None:
    """Compare the verdicts on the kernels of one real sequence with all their eigenvalues."""
    captures = hooks.survey(loaded.model, subjects.build_batches(loaded, tokens, 1).batches[0].inputs)
    logits = torch.cat([capture.call.query_key(capture.site).logits[0] for capture in captures])
    verdicts, truth = linalg.definite(logits), judge_by_eigenvalues(logits)
    print(f"\nis exp(L) positive semidefinite: {len(logits)} heads of {name}, {tokens} tokens (target ≥ 14 at 512)")
    label = f"{int((verdicts == truth).sum())} of {len(logits)} verdicts agree, {int(truth.sum())} positive"
    compare_times(label, partial(linalg.definite, logits), partial(judge_by_eigenvalues, logits), rounds)


if __name__ == "__main__":
    main()
