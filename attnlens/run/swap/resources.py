"""Speed and memory of a model, and what to do where memory does not suffice."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnlens import hooks
from attnlens.errors import ModelError, is_memory
from attnlens.run.outcomes.differences import Variant
from attnlens.run.provenance import peak_memory

CLEAR = Path("/proc/self/clear_refs")


def speed(tokens: Sequence[int], seconds: Sequence[float]) -> float:
    """Tokens per second: the median over passes, the first left out where there are more (it warms up)."""
    rates = [count / time for count, time in zip(tokens, seconds, strict=True)]
    return statistics.median(rates[1:] or rates)


def peak_of(model: PreTrainedModel, work: Callable[[], object]) -> int | None:
    """Largest memory while `work` ran, in bytes: allocated on a GPU, resident on a CPU; None where neither is told."""
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        work()
        return int(torch.cuda.max_memory_allocated(model.device))
    try:
        CLEAR.write_text("5")  # Linux: start the high-water mark anew
    except OSError:
        work()
        return None
    work()
    return peak_memory()


@contextmanager
def enough_memory(model: PreTrainedModel, inputs: dict[str, Tensor], variant: Variant | None) -> Iterator[None]:
    """Turn running out of memory into a ModelError that says which batch size would fit, by trying it.

    `variant` is None where a forward pass takes less than what ran out: then nothing is tried.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory(error):
            raise
        size = next(iter(inputs.values())).shape[0]
        if variant is None:
            raise ModelError(
                f"Not enough memory to train on {size} sequences at once.",
                "Use a smaller --batch-size." if size > 1 else "Use a smaller --tokens.",
            ) from None
        halves = (size >> step for step in range(1, size.bit_length()))
        fits = next((fewer for fewer in halves if _runs(model, inputs, fewer, variant)), None)
        raise ModelError(
            f"Not enough memory for {size} sequences at once.",
            f"Use --batch-size {fits}, which fits." if fits else "Use a smaller --tokens: one sequence does not fit.",
        ) from None


def _runs(model: PreTrainedModel, inputs: dict[str, Tensor], size: int, variant: Variant) -> bool:
    try:
        with torch.no_grad(), variant():
            hooks.forward(model, {name: tensor[:size] for name, tensor in inputs.items()})
    except (MemoryError, RuntimeError) as error:
        if not is_memory(error):
            raise
        return False
    return True
