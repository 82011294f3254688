"""How weights were trained towards the original model: stages, rates, steps, and what an equal training brings."""

from __future__ import annotations

from typing import Literal

from attnlens.choices import HealingGoal, HealingStage
from attnlens.records.measures import Number, Record
from attnlens.records.swaps.outcomes import Change


class HealingStep(Record):
    """The healing at one step."""

    step: int
    """Optimiser steps done."""
    validation: Number | None
    """Distance to the original on calibration text kept back from training: KL in nats per token, or 1 − cosine."""
    loss: Number | None = None
    """Loss on the evaluation text, at the steps drawn; it is never used to choose."""
    tokens: int | None = None
    """Tokens trained on so far, repetitions counted; None in reports of before it was kept."""
    stage: HealingStage | None = None
    """In which stage: attention transfer, or the whole model."""


class HealingRate(Record):
    """One learning rate that the range test tried."""

    rate: Number
    """Of AdamW."""
    validation: Number | None
    """After a few steps at it, on text kept back: Σ over sites of ‖new − own‖² / ‖own‖² (transfer), or the distance
    (whole); None where it is not finite."""


class HealingTraining(Record):
    """One stage of a healing."""

    stage: HealingStage
    """transfer: each site's output against its own; whole: the models' predictions, or the text."""
    steps: int
    """Optimiser steps."""
    tokens: int
    """Tokens trained on, those of the range test not: up to eight steps at each of its rates."""
    seconds: Number
    """What the steps took, without range test and checks."""
    tokens_per_second: Number | None = None
    """tokens / seconds; None where nothing was trained."""
    learning_rate: Number
    """Largest learning rate of AdamW; 0 where none that was tried led nearer, so that the stage was left out."""
    lowered_from: Number | None = None
    """The one that the range test chose, where no check at it was nearer than the stage's start and the stage began
    again with smaller steps; None where it was not lowered."""
    rates: list[HealingRate] = []
    """What the range test tried, in its order."""
    stopped: bool = False
    """Whether it ended early, as the 95 % interval of what the last checks gained contains 0, or was left out."""


class HealingControl(Record):
    """A copy of the original model whose same numbers were trained equally long on the same text."""

    best: int
    """The step whose numbers were kept."""
    tokens: int
    """Tokens trained on."""
    learning_rate: Number
    """Largest learning rate of AdamW."""
    loss: Change
    """Nats per token of the evaluation text: the original, and the original trained."""
    perplexity: Change
    """exp(loss)."""
    ratio: Number
    """Perplexity of the healed model over that of the trained original."""
    ratio_ci95: tuple[Number, Number] | None = None
    """Its 95 % interval, paired as that of the loss."""


class Healing(Record):
    """How W_Q and W_K were fine-tuned towards the original model."""

    steps: int
    """Steps asked for; those done, where tokens or a time were asked for."""
    best: int
    """The step whose weights were kept: the least validation distance."""
    parameters: int
    """How many numbers were trained."""
    learning_rate: Number
    """Largest learning rate of AdamW in the last stage that trained."""
    curve: list[HealingStep]
    """Step by step, as far as it was measured."""
    eta: Number | None = None
    """Weight η of the KSVD regulariser in the training loss; None for kernels without one."""
    ksvd_convention: Literal["paper", "code"] | None = None
    """How its objective J is counted: the paper's sums, or the published code's means with Λ²."""
    asked: str | None = None
    """How much was asked for: `200 steps`, `2,000,000 tokens`, `1,800 seconds`."""
    goal: HealingGoal = "teacher"
    """What was learned: the original model's predictions, or the text."""
    rank: int | None = None
    """Rank of each weight's change; None where it was free."""
    batch: int | None = None
    """Sequences of a training step."""
    tokens: int | None = None
    """Tokens trained on, repetitions counted; those of the range tests not, which train up to eight steps at each of up
    to five rates in a stage (and at smaller ones where none gains) and put the numbers back."""
    seconds: Number | None = None
    """All of it: range tests, steps, checks."""
    stages: list[HealingTraining] = []
    """Attention transfer, then the whole model."""
    peak_memory_bytes: int | None = None
    """Largest memory meanwhile: resident (CPU) or allocated (GPU)."""
    control: HealingControl | None = None
    """The original model trained equally long, where that was asked for."""
    interrupted: bool = False
    """Whether the user ended it before its time."""
    reasons: dict[str, str] = {}
    """Why a field of this record is null, by its name."""
