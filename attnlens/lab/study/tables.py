"""The papers' tables (cells, tasks, published numbers) and the scales `tiny`, `small` and `paper` of the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import comb
from typing import Any, Literal

from attnlens.lab.study.tasks import TaskForm
from attnlens.models.kernel_transformers import AttentionForm

ScaleName = Literal["tiny", "small", "paper"]


@dataclass(frozen=True)
class Scale:
    """One size of everything: the same for every cell of a task."""

    layers: int  # of each stack
    d_model: int  # width of the features
    heads: int  # of each layer
    d_forward: int  # width inside the pointwise networks
    vocabulary: int  # pairs of the byte-level BPE, bytes included
    length: int  # most tokens of a sequence
    batch: int  # sequences of a step
    steps: int  # of a training run
    search_steps: int  # of each run that the learning rate is chosen by
    rates: tuple[float, ...]  # learning rates to choose from
    seeds: int  # training runs of each cell
    evaluated: int  # most held-out sequences, spread evenly over what is held out
    dropout: float  # of residual branches
    warmup: float = 0.1  # share of the steps in which the rate rises
    looks: int = 6  # how often the validation loss is read in a run


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


TSAI, WRIGHT, CHEN = "Tsai et al. 2019", "Wright & Gonzalez 2021", "Chen et al. 2023"
PLACED = AttentionForm(positions="product")
"""As Tsai et al. place tokens in language modelling (Eq. 5, values without positions)."""
ADDED = AttentionForm(positions="sum", in_value=True)
"""As they place tokens in translation (Eq. 4, values with positions), and as the other papers do throughout."""


SCORES, ETAS = (8, 16), (0.0, 0.1)
"""What the search tries of primal layers: s, of at most head_dim, and η, 0 or that of the published code."""


@dataclass(frozen=True)
class PaperCell:
    """One way to attend, trained on one form of task."""

    name: str
    """Its row."""
    task: TaskForm
    """Its column."""
    form: AttentionForm
    """Its attention."""
    published: float | None = None
    """What the paper reports; None where it did not train this, or where that did not converge."""
    diverged: bool = False
    """Whether the paper reports that it did not converge."""
    others: tuple[AttentionForm, ...] = ()
    """Forms beside `form` of which the search takes the best, as it does among learning rates."""

    @property
    def forms(self) -> tuple[AttentionForm, ...]:
        """Every form that the search tries."""
        return (self.form, *self.others)


@dataclass(frozen=True)
class PaperTable:
    """One table of a paper."""

    name: str
    """What it is called on the command line."""
    question: str
    """What it asks, in one line."""
    source: str
    """Paper and number of the table."""
    cells: tuple[PaperCell, ...]
    """Row by row."""
    data: Mapping[TaskForm, str] = field(default_factory=dict)
    """Of each column that was published: on which data, in which measure."""


def _kernels() -> PaperTable:
    published: dict[str, tuple[tuple[float, float] | None, tuple[float, float] | None]] = {
        "linear": (None, None),
        "polynomial": ((32.72, 25.91), (32.43, 26.25)),
        "exponential": ((33.98, 24.10), (33.78, 24.01)),
        "rbf:gamma=1": ((34.26, 24.13), (34.14, 24.21)),
    }
    cells: list[PaperCell] = []
    for kernel, both in published.items():
        for symmetric, found in zip((False, True), both, strict=True):
            name = f"{kernel.split(':')[0]}, {'symmetric' if symmetric else 'asymmetric'}"
            bleu, perplexity = found or (None, None)
            placed, added = (replace(form, kernel=kernel, symmetric=symmetric) for form in (PLACED, ADDED))
            cells.append(PaperCell(name, "language", placed, perplexity, found is None))
            cells.append(PaperCell(name, "translation", added, bleu, found is None))
    return PaperTable(
        "kernels", "Which kernel is best, and need it be asymmetric?", f"{TSAI}, Table 2", tuple(cells), TSAI_DATA
    )


TSAI_DATA: dict[TaskForm, str] = {"translation": "IWSLT'14 de-en, BLEU", "language": "WikiText-103, perplexity"}


def _positions() -> PaperTable:
    forms = {
        "direct sum (Eq. 4)": (ADDED, 33.98, 30.97),
        "look-up table (Eq. 6)": (AttentionForm(positions="table"), 34.12, 27.56),
        "product, asymmetric (Eq. 5)": (PLACED, 33.62, 24.10),
        "product, symmetric (Eq. 9)": (AttentionForm(positions="symmetric product"), 34.71, 24.28),
    }
    cells: list[PaperCell] = []
    for name, (form, bleu, perplexity) in forms.items():
        # the paper's look-up tables have positions in the values of its language models alone (Table 4)
        own = replace(form, in_value=True) if form.positions == "table" else form
        cells += [PaperCell(name, "language", own, perplexity), PaperCell(name, "translation", form, bleu)]
    return PaperTable(
        "positions", "How do positions best enter the kernel?", f"{TSAI}, Table 1", tuple(cells), TSAI_DATA
    )


def _order() -> PaperTable:
    product = AttentionForm(positions="symmetric product")
    cells = [
        PaperCell("in the encoder, across and in the decoder (Eq. 9)", "translation", product, 34.71),
        PaperCell("not in the decoder (Eq. 9)", "translation", replace(product, places=("encoder", "cross")), 34.49),
        PaperCell("not across (Eq. 9)", "translation", replace(product, places=("encoder", "decoder"))),
        PaperCell("not in the encoder (Eq. 9)", "translation", replace(product, places=("decoder", "cross"))),
        # W_Q = W_K as in Eq. 9, so that positions alone are what is left out
        PaperCell("nowhere", "translation", AttentionForm(symmetric=True), 14.47),
        PaperCell("direct sum (Eq. 4)", "language", ADDED, 30.97),
        PaperCell("product, symmetric (Eq. 9)", "language", product, 24.28),
        PaperCell("nowhere", "language", AttentionForm(symmetric=True), 30.92),
    ]
    return PaperTable("order", "Where does attention need positions?", f"{TSAI}, Table 3", tuple(cells), TSAI_DATA)


def _values() -> PaperTable:
    forms = {
        "direct sum (Eq. 4)": (ADDED, (33.98, 34.02), (30.97, 30.50)),
        "look-up table (Eq. 6)": (AttentionForm(positions="table"), (34.04, 34.12), (27.56, 27.45)),
        "product, asymmetric (Eq. 5)": (PLACED, (33.32, 33.62), (24.18, 24.10)),
        "product, symmetric (Eq. 9)": (AttentionForm(positions="symmetric product"), (34.60, 34.71), (24.42, 24.28)),
    }
    cells: list[PaperCell] = []
    for name, (form, bleu, perplexity) in forms.items():
        for held, at in ((True, 0), (False, 1)):
            row, own = f"{name}, value {'with' if held else 'without'} positions", replace(form, in_value=held)
            cells += [PaperCell(row, "language", own, perplexity[at]), PaperCell(row, "translation", own, bleu[at])]
    return PaperTable(
        "values", "Does the value need positions? (Eq. 7 and 8)", f"{TSAI}, Table 4", tuple(cells), TSAI_DATA
    )


def _dimension() -> PaperTable:
    published: dict[str, tuple[float, float] | None] = {
        "exponential": (30.41, 76.70),
        "rbf:gamma=1": (30.32, 74.24),
        "intersection": (30.84, 74.90),
        "l2": (19.45, 76.78),
        "polynomial": (29.56, 76.24),
    }
    approximate = [f"taylor:{order}" for order in (2, 4, 8)] + [f"random-features:{count}" for count in (16, 64, 256)]
    published |= dict.fromkeys(approximate)
    names = {"polynomial": "quadratic", "rbf:gamma=1": "rbf"}
    cells = []
    for kernel, known in published.items():
        bleu, accuracy = known or (None, None)
        form, name = replace(ADDED, kernel=kernel), names.get(kernel, kernel)
        cells += [PaperCell(name, "translation", form, bleu), PaperCell(name, "classification", form, accuracy)]
        cells.append(PaperCell(name, "language", form))
    return PaperTable(
        "dimension",
        "Does an infinite feature dimension matter?",
        f"{WRIGHT}, their table of kernels",
        tuple(cells),
        {"translation": "IWSLT'14 de-en, BLEU, as recalled", "classification": "SST-2, accuracy in %, as recalled"},
    )


def _primal() -> PaperTable:
    swept: dict[Literal["all", "last"], tuple[AttentionForm, ...]] = {
        layers: tuple(replace(ADDED, primal=layers, scores=s, eta=eta) for s in SCORES for eta in ETAS)
        for layers in ("all", "last")
    }
    cells = []
    for task, canonical, former, plus in (("classification", 71.9, 73.0, 73.1), ("language", 33.0, None, 31.0)):
        of: TaskForm = task  # type: ignore[assignment]  # a tuple's words are any words to mypy
        cells.append(PaperCell("canonical", of, ADDED, canonical))
        cells.append(PaperCell("PrimalFormer", of, swept["all"][0], former, others=swept["all"][1:]))
        cells.append(PaperCell("Primal.+", of, swept["last"][0], plus, others=swept["last"][1:]))
    return PaperTable(
        "primal",
        "Does Primal-Attention learn as well as softmax attention?",
        CHEN,
        tuple(cells),
        {"classification": "UEA archive, mean accuracy in %", "language": "WikiText-103, perplexity"},
    )


def features_of(cell: PaperCell, scale: Scale) -> str:
    """How many features the kernel of a head has: Φ of k(q, k) = ⟨Φ(q), Φ(k)⟩; empty where that is not known."""
    name, _, given = cell.form.kernel.partition(":")
    d = scale.d_model // scale.heads
    if cell.form.primal != "none" or name not in FEATURES:
        return ""
    return FEATURES[name](d, int(given) if given.isdigit() else 0)


FEATURES: dict[str, Callable[[int, int], str]] = {
    **dict.fromkeys(("exponential", "rbf", "intersection"), lambda _d, _given: "∞"),
    "linear": lambda d, _given: str(d),
    "polynomial": lambda d, _given: str(d * (d + 1) // 2),  # monomials of degree 2
    "taylor": lambda d, order: str(comb(d + order, order)),  # monomials of degree `order` at most
    "random-features": lambda _d, count: str(count),
}
"""Kernel → its feature dimension, from head_dim and its parameter."""
TABLES: dict[str, PaperTable] = {
    table.name: table for table in (_kernels(), _positions(), _order(), _values(), _dimension(), _primal())
}
"""Name on the command line → table."""
