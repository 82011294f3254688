"""The papers' tables (cells, tasks, published numbers) and the scales `tiny`, `small` and `paper` of the models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import comb
from typing import Literal

from attnlens.lab.study.examples import TaskForm
from attnlens.models.kernel_transformers import AttentionForm


@dataclass(frozen=True)
class Scale:
    """Sizes of model, data and training, the same for every cell of a task."""

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


PRODUCT = AttentionForm(positions="product")  # language models of Tsai et al. (Eq. 5, values without positions)
SUM = AttentionForm(positions="sum", in_value=True)  # their translation models (Eq. 4), and the other papers' models
SCORES, ETAS = (8, 16), (0.0, 0.1)  # searched for primal layers: s (at most head_dim) and η (0, or as in their code)


@dataclass(frozen=True)
class PaperCell:
    """Cell of a table: the attention of its row, trained on the form of task of its column."""

    name: str  # row
    task: TaskForm  # column
    forms: tuple[AttentionForm, ...]  # forms of attention; the best is chosen together with the learning rate
    published: float | None = None  # published value; None if the paper did not train this cell or it did not converge
    diverged: bool = False  # True if the paper reports that training did not converge


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper to reproduce: its question, its cells and what their published numbers measure."""

    name: str  # name on the command line
    question: str
    source: str  # paper and table number
    cells: tuple[PaperCell, ...]  # row by row
    data: Mapping[TaskForm, str] = field(default_factory=dict)  # data and measure of each published column


def _pair(name: str, language: AttentionForm, translation: AttentionForm, *published: float | None) -> list[PaperCell]:
    """Build the two cells of a row; `published` are perplexity and BLEU, omitted if training did not converge."""
    perplexity, bleu = published or (None, None)
    first = PaperCell(name, "language", (language,), perplexity, not published)
    return [first, PaperCell(name, "translation", (translation,), bleu, not published)]


def _kernels() -> Iterator[PaperCell]:
    published: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {  # perplexity and BLEU, asymmetric or not
        "linear": ((), ()),
        "polynomial": ((25.91, 32.72), (26.25, 32.43)),
        "exponential": ((24.10, 33.98), (24.01, 33.78)),
        "rbf:gamma=1": ((24.13, 34.26), (24.21, 34.14)),
    }
    for kernel, both in published.items():
        for symmetric, known in zip((False, True), both, strict=True):
            name = f"{kernel.split(':')[0]}, {'symmetric' if symmetric else 'asymmetric'}"
            first, second = (replace(form, kernel=kernel, symmetric=symmetric) for form in (PRODUCT, SUM))
            yield from _pair(name, first, second, *known)


SYMMETRIC_PRODUCT = AttentionForm(positions="symmetric product")
PLACINGS = {  # name → form, BLEU and perplexity with and without positions in the values (Table 4)
    "direct sum (Eq. 4)": (SUM, (33.98, 34.02), (30.97, 30.50)),
    "look-up table (Eq. 6)": (AttentionForm(positions="table"), (34.04, 34.12), (27.56, 27.45)),
    "product, asymmetric (Eq. 5)": (PRODUCT, (33.32, 33.62), (24.18, 24.10)),
    "product, symmetric (Eq. 9)": (SYMMETRIC_PRODUCT, (34.60, 34.71), (24.42, 24.28)),
}


def _positions() -> Iterator[PaperCell]:
    for name, (form, bleu, perplexity) in PLACINGS.items():
        # Table 1 has positions in the values of the direct sum, and of the look-up tables of language models
        language, translation = form.positions in ("sum", "table"), form.positions == "sum"
        first, second = (replace(form, in_value=in_value) for in_value in (language, translation))
        yield from _pair(name, first, second, perplexity[not language], bleu[not translation])


def _order() -> Iterator[PaperCell]:
    product, unplaced = SYMMETRIC_PRODUCT, (AttentionForm(symmetric=True),)
    yield PaperCell("in the encoder, in cross-attention and in the decoder (Eq. 9)", "translation", (product,), 34.71)
    yield PaperCell(
        "not in the decoder (Eq. 9)", "translation", (replace(product, places=("encoder", "cross")),), 34.49
    )
    yield PaperCell("not in cross-attention (Eq. 9)", "translation", (replace(product, places=("encoder", "decoder")),))
    yield PaperCell("not in the encoder (Eq. 9)", "translation", (replace(product, places=("decoder", "cross")),))
    # W_Q = W_K as in Eq. 9, so that only the positions are removed
    yield PaperCell("nowhere", "translation", unplaced, 14.47)
    yield PaperCell("direct sum (Eq. 4)", "language", (SUM,), 30.97)
    yield PaperCell("product, symmetric (Eq. 9)", "language", (product,), 24.28)
    yield PaperCell("nowhere", "language", unplaced, 30.92)


def _values() -> Iterator[PaperCell]:
    for name, (form, bleu, perplexity) in PLACINGS.items():
        for at, word in enumerate(("with", "without")):
            cell_form = replace(form, in_value=word == "with")
            yield from _pair(f"{name}, value {word} positions", cell_form, cell_form, perplexity[at], bleu[at])


def _dimension() -> Iterator[PaperCell]:
    published: dict[str, tuple[float | None, float | None]] = {  # BLEU and accuracy
        "exponential": (30.41, 76.70),
        "rbf:gamma=1": (30.32, 74.24),
        "intersection": (30.84, 74.90),
        "l2": (19.45, 76.78),
        "polynomial": (29.56, 76.24),
    }
    approximate = [f"taylor:{order}" for order in (2, 4, 8)] + [f"random-features:{count}" for count in (16, 64, 256)]
    names = {"polynomial": "quadratic", "rbf:gamma=1": "rbf"}
    for kernel, (bleu, accuracy) in (published | dict.fromkeys(approximate, (None, None))).items():
        forms, name = (replace(SUM, kernel=kernel),), names.get(kernel, kernel)
        yield PaperCell(name, "translation", forms, bleu)
        yield PaperCell(name, "classification", forms, accuracy)
        yield PaperCell(name, "language", forms)


def _primal() -> Iterator[PaperCell]:
    def sweep(layers: Literal["all", "last"]) -> tuple[AttentionForm, ...]:
        return tuple(replace(SUM, primal=layers, scores=s, eta=eta) for s in SCORES for eta in ETAS)

    published: dict[TaskForm, tuple[float, float | None, float]] = {
        "classification": (71.9, 73.0, 73.1),
        "language": (33.0, None, 31.0),
    }
    for task, (canonical, former, plus) in published.items():
        yield PaperCell("canonical", task, (SUM,), canonical)
        yield PaperCell("PrimalFormer", task, sweep("all"), former)
        yield PaperCell("Primal.+", task, sweep("last"), plus)


def describe_features(form: AttentionForm, d: int) -> str:
    """Format the number of features of Φ in k = ⟨Φ(q), Φ(k)⟩ on R^d: `64`, `∞`, or empty without Φ or if primal."""
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


TSAI, CHEN = "Tsai et al. 2019, Table", "Chen et al. 2023"
WRIGHT = "Wright & Gonzalez 2021, their table of kernels"
TSAI_DATA: dict[TaskForm, str] = {"translation": "IWSLT'14 de-en, BLEU", "language": "WikiText-103, perplexity"}
WRIGHT_DATA: dict[TaskForm, str] = {
    "translation": "IWSLT'14 de-en, BLEU, quoted from memory",
    "classification": "SST-2, accuracy in %, quoted from memory",
}
CHEN_DATA: dict[TaskForm, str] = {
    "classification": "UEA archive, mean accuracy in %",
    "language": "WikiText-103, perplexity",
}
TABLES = {
    name: PaperTable(name, question, source, tuple(cells), data)
    for name, question, source, cells, data in (
        ("kernels", "Which kernel is best, and does it need to be asymmetric?", f"{TSAI} 2", _kernels(), TSAI_DATA),
        ("positions", "What is the best way to include positions in the kernel?", f"{TSAI} 1", _positions(), TSAI_DATA),
        ("order", "Where does attention need positions?", f"{TSAI} 3", _order(), TSAI_DATA),
        ("values", "Do values need positions? (Eq. 7 and 8)", f"{TSAI} 4", _values(), TSAI_DATA),
        ("dimension", "Does an infinite feature dimension matter?", WRIGHT, _dimension(), WRIGHT_DATA),
        ("primal", "Does Primal-Attention learn as well as softmax attention?", CHEN, _primal(), CHEN_DATA),
    )
}  # name on the command line → table
