"""A Swap: what was exchanged, what it cost, and the checks behind the numbers."""

from __future__ import annotations

from typing import Literal, get_args

from attnlens.choices import Part
from attnlens.records.measures import Number, Record
from attnlens.records.predictions import Prediction, Predictor
from attnlens.records.swaps.healings import Healing
from attnlens.records.swaps.outcomes import Control, Outcome, Pair, Stage

PARTS: tuple[Part, ...] = get_args(Part)
"""The order in which parts stand, so that the layers of one stand together."""
Task = Literal["causal", "masked", "seq2seq", "classification", "hidden"]


class SiteSwap(Record):
    """One site whose kernel was exchanged."""

    site: str
    """The site's name."""
    layer: int
    """Its running number."""
    part: Part
    """encoder, decoder or cross."""
    heads: list[int]
    """Query heads that have the new kernel."""
    path: str
    """How it was computed: sdpa, running sums, row tiles, …"""
    output_error: Number | None = None
    """‖new − own‖ / ‖own‖ of the site's output on the original model's queries, keys and values."""
    off_simplex: Number | None = None
    """Share of the attention's mass that is negative, Σ max(−w, 0) / Σ |w|; 0 for positive kernels."""


class Effect(Record):
    """What the swap of one head or layer alone does to the loss (`--sweep`)."""

    layer: int
    """The site's running number."""
    head: int | None = None
    """The query head; None for the whole layer."""
    part: Part
    """encoder, decoder or cross."""
    delta: Number | None
    """Change of the loss, or of the distance that stands in its place (Swap.judged_by); None where it diverged."""
    ci95: tuple[Number, Number] | None = None
    """Its 95 % interval."""
    p_value: Number | None = None
    """Two-sided, of no change, by a studentised bootstrap over windows (or texts); None for a distance."""
    significant: bool = False
    """Whether it stands at a false discovery rate of 5 % (Benjamini & Hochberg 1995)."""


class Swap(Outcome):
    """What one kernel did to the model; the outcome of its last stage stands at the top."""

    kernel: str
    """As typed, with its parameters: `rbf:gamma=0.5+window:64`."""
    formula: str
    """log k(q, k), or the whole output where the kernel is none of queries and keys."""
    formula_of: Literal["log k", "output"] = "log k"
    """Which of the two."""
    parameters: dict[str, Number] = {}
    """Its numbers, defaults included."""
    fitted: list[str] = []
    """Parameters that were chosen per head from calibration text."""
    task: Task
    """What is predicted."""
    noise: bool = False
    """Whether the model's input is noise that attnlens made up, so that no loss means anything."""
    sites: list[SiteSwap]
    """Where the kernel was exchanged; every site asked for, or there is no report."""
    identity_error: Number
    """Relative change of the outputs when attention is recomputed with the model's own kernel; at most 1e-5."""
    causality_error: Number | None = None
    """Relative change of outputs before a position when the tokens after it change; 0 where nothing leaks."""
    mask_error: Number | None = None
    """Relative change of outputs at real tokens when the padding's content changes; 0 where nothing leaks."""
    off_simplex: Number | None = None
    """Share of the attention's mass that is negative, mean over the exchanged sites."""
    tokens_per_second: Pair
    """Forward passes of the evaluation, median over batches."""
    peak_memory_bytes: Pair
    """Largest memory during the evaluation's forward passes: resident (CPU) or allocated (GPU)."""
    stages: list[Stage]
    """As swapped, then fitted, then healed, as far as was asked for."""
    healing: Healing | None = None
    """How it was healed."""
    state: Number | None = None
    """Numbers that a swapped head keeps of a whole window's tokens, mean over sites: m·(value_dim + 1) by running sums
    over m features, head_dim + value_dim for each key that a filter leaves in sight, or for each token without one."""
    controls: list[Control] = []
    """Simple alternatives, measured on the same windows."""
    sweep: list[Effect] = []
    """Each head or layer swapped alone, the most harmful first."""
    predictors: list[Predictor] = []
    """How each measure of `inspect` goes with the effects of single heads, the surest first."""
    prediction: Prediction | None = None
    """What was looked at to find them."""
    notes: list[str] = []
    """What a reader must know: what a softcap, a bias, a QK-norm does to this kernel."""

    @property
    def judged_by(self) -> Literal["loss", "kl", "hidden"]:
        """What ranks its sweep and is drawn: the loss; on noise KL; of a headless model 1 − cosine of hidden states."""
        return "hidden" if self.task == "hidden" else "kl" if self.noise else "loss"
