"""Sizes of the study's models and how long each is trained: `tiny`, `small` and `paper`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScaleName = Literal["tiny", "small", "paper"]


@dataclass(frozen=True)
class Scale:
    """One size of everything: the same for every cell of a table."""

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
    # Transformer-XL's and fairseq's IWSLT'14 settings, as Tsai et al. take them: 16 layers of 410 for WikiText-103,
    # 6 of 512 with 4 heads for translation; one scale for both here, that of the translation.
    "paper": Scale(6, 512, 4, 1024, 10_000, 150, 128, 200_000, 5_000, (2.5e-4, 5e-4), 5, 7_000, 0.3),
}
"""tiny: minutes on two cores; small: an hour on a GPU; paper: the papers' own, as far as one scale can say it."""
