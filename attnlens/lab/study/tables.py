"""The papers' tables (cells, tasks, published numbers) and the scales `tiny`, `small` and `paper` of the models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import comb
from pathlib import Path

from pydantic import TypeAdapter

from attnlens.lab.study.examples import TaskForm
from attnlens.models.kernel_transformers import AttentionForm


@dataclass(frozen=True)
class Scale:
    """Sizes of model, data and training, which all cells of a task share."""

    layers: int  # layers per stack
    d_model: int  # width of the features
    heads: int  # heads per layer
    d_forward: int  # hidden width of the pointwise networks
    vocabulary: int  # number of ids of the byte-level BPE, including bytes
    length: int  # maximum number of tokens in a sequence
    batch: int  # sequences per step
    steps: int  # steps of a training run
    search_steps: int  # steps of each learning-rate search run
    rates: tuple[float, ...]  # learning rates to choose from
    seeds: int  # training runs per cell
    evaluated: int  # maximum number of held-out sequences, spread evenly over the held-out data
    dropout: float  # dropout rate in residual branches
    warmup: float = 0.1  # share of the steps used for warm-up
    looks: int = 6  # number of validation-loss evaluations in a run


SCALES: dict[str, Scale] = {  # Sizes for every form of task; tiny: minutes on two cores; small: an hour on a GPU
    "tiny": Scale(2, 64, 4, 256, 1024, 64, 32, 300, 100, (6e-3, 2e-2, 6e-2), 3, 256, 0.0),
    "small": Scale(6, 256, 4, 1024, 8192, 128, 64, 20_000, 2_000, (2.5e-4, 5e-4, 1e-3), 5, 2_000, 0.1),
}
PAPER: dict[TaskForm, Scale] = {
    # Transformer-XL's base model for WikiText-103, used by Tsai et al., but with byte pairs instead of words
    "language": Scale(16, 410, 10, 2100, 32_000, 150, 60, 200_000, 5_000, (1.25e-4, 2.5e-4, 5e-4), 5, 7_000, 0.1),
    # fairseq's transformer_iwslt_de_en, used by Tsai et al.
    "translation": Scale(6, 512, 4, 1024, 10_000, 150, 128, 50_000, 5_000, (2.5e-4, 5e-4, 1e-3), 5, 7_000, 0.3),
    # Flowformer's settings for the UEA archive, used by Chen et al.
    "classification": Scale(2, 512, 8, 2048, 10_000, 150, 16, 10_000, 5_000, (2.5e-4, 5e-4, 1e-3), 5, 7_000, 0.1),
}


SUM = AttentionForm(positions="sum", in_value=True)  # most papers' models: positions are added to the features (Eq. 4)


@dataclass(frozen=True)
class PaperCell:
    """Cell of a table: a form of attention (row), trained on a form of task (column)."""

    name: str  # row
    task: TaskForm  # column
    forms: tuple[AttentionForm, ...]  # forms of attention; the best is chosen together with the learning rate
    published: float | None = None  # published value; None if the paper did not train this cell or it did not converge
    diverged: bool = False  # True if the paper reports that training did not converge


@dataclass(frozen=True)
class PaperTable:
    """A paper's table to reproduce: the question that it answers, its cells, and what its columns measure."""

    name: str  # name on the command line
    question: str
    source: str  # paper and table number
    cells: tuple[PaperCell, ...]  # row by row
    data: Mapping[TaskForm, str] = field(default_factory=dict)  # data and measure of each published column


def describe_features(form: AttentionForm, d: int) -> str:
    """Format the number of features of Φ on R^d, for kernels ⟨Φ(q), Φ(k)⟩: `64`, `∞`, or empty (no Φ, or primal)."""
    name, _, parameter = form.kernel.partition(":")
    number = int(parameter) if parameter.isdigit() else 0
    features = {
        "linear": d,
        "polynomial": d * (d + 1) // 2,  # monomials of degree 2
        "taylor": comb(d + number, number),  # monomials up to this degree
        "random-features": number,
        **dict.fromkeys(("exponential", "rbf", "intersection"), "∞"),
    }
    return "" if form.primal != "none" else str(features.get(name, ""))


TABLES = {
    table.name: table
    for table in TypeAdapter(list[PaperTable]).validate_json(Path(__file__).with_name("tables.json").read_bytes())
}
"""The papers' tables, keyed by name on the command line.

`kernels`: As in Tsai et al., language models use a product with positions (Eq. 5) and values without positions;
translation models use the direct sum (Eq. 4) and values with positions. `positions`: Values contain positions with the
direct sum and, in language models, with the look-up table. `order`: Models without positions keep W_Q = W_K of Eq. 9,
so that only the positions are removed. `primal`: The number of scores (at most head_dim) and η (0, or as in the
published code) are chosen by validation loss.
"""
