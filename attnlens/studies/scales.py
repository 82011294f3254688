"""Sizes of the study's models and how long each is trained: `tiny`, `small` and `paper`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from attnlens.studies.tasks import TaskForm

ScaleName = Literal["tiny", "small", "paper"]


@dataclass(frozen=True)
class Scale:
    """One size of everything: the same for every cell of a task."""

    layers: int
    """Of each stack."""
    d_model: int
    """Width of the features."""
    heads: int
    """Of each layer."""
    d_forward: int
    """Width inside the pointwise networks."""
    vocabulary: int
    """Pairs of the byte-level BPE, bytes included."""
    length: int
    """Most tokens of a sequence."""
    batch: int
    """Sequences of a step."""
    steps: int
    """Of a training run."""
    search_steps: int
    """Of each run that the learning rate is chosen by."""
    rates: tuple[float, ...]
    """Learning rates to choose from."""
    seeds: int
    """Training runs of each cell."""
    evaluated: int
    """Most held-out sequences, spread evenly over what is held out."""
    dropout: float
    """Of residual branches."""
    warmup: float = 0.1
    """Share of the steps in which the rate rises."""
    looks: int = 6
    """How often the validation loss is read in a run."""


SCALES: dict[str, Scale] = {
    "tiny": Scale(2, 64, 4, 256, 1024, 64, 32, 300, 100, (6e-3, 2e-2, 6e-2), 3, 256, 0.0),
    "small": Scale(6, 256, 4, 1024, 8192, 128, 64, 20_000, 2_000, (2.5e-4, 5e-4, 1e-3), 5, 2_000, 0.1),
    "paper": Scale(6, 512, 4, 1024, 10_000, 150, 128, 50_000, 5_000, (2.5e-4, 5e-4, 1e-3), 5, 7_000, 0.3),
}
"""tiny: minutes on two cores; small: an hour on a GPU; paper: fairseq's transformer_iwslt_de_en, as Tsai et al. take
it for translation, and for other tasks what PAPER says."""
PAPER: dict[TaskForm, dict[str, Any]] = {
    # Transformer-XL's base model for WikiText-103, which Tsai et al. take; here in byte pairs, there in words
    "language": {
        "layers": 16,
        "d_model": 410,
        "heads": 10,
        "d_forward": 2100,
        "vocabulary": 32_000,
        "batch": 60,
        "steps": 200_000,
        "rates": (1.25e-4, 2.5e-4, 5e-4),
        "dropout": 0.1,
    },
    # Flowformer's for the UEA archive, which Chen et al. take
    "classification": {"layers": 2, "heads": 8, "d_forward": 2048, "batch": 16, "steps": 10_000, "dropout": 0.1},
}
"""What differs from the paper scale of translation."""


def scale_of(name: ScaleName, form: TaskForm) -> Scale:
    """The sizes of one form of task: the same for every cell of it."""
    return replace(SCALES[name], **PAPER.get(form, {})) if name == "paper" else SCALES[name]
