"""The state of a healing while it trains, and the range test (Smith 2017) that chooses its learning rate."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from attnlens.choices import HealingGoal, HealingStage
from attnlens.records import HealingRate
from attnlens.requests.healing import Amount
from attnlens.run.outcomes.outputs import tokens_in
from attnlens.run.swap.healing.healer import Healer
from attnlens.run.swap.healing.held_out import HeldOut, put_back, transfer
from attnlens.texts.targets import Fed

STAGES: tuple[HealingStage, ...] = ("transfer", "whole")
"""In their order."""
TRANSFER: dict[HealingGoal, float] = {"teacher": 0.9, "text": 0.25}
"""Share of all work at which attention transfer ends at the latest, by what is learned. Chosen on `demo`: a token of
attention transfer gains more than one of the whole model's; of a new text it teaches nothing."""
WARM_UP = 20
"""Steps over which the learning rate rises, and no more than a tenth of the stage's."""
LOWEST = 0.02
"""Share of the learning rate to which the cosine falls."""
BETAS = 0.9, 0.95
"""Averages of AdamW: of few steps the usual 0.999 remembers the first, whose gradients are larger."""
LONGEST = 1.0
"""Norm to which a gradient is cut."""


@dataclass
class Course:
    """How far a healing has come, and how it goes on."""

    healer: Healer
    train: Sequence[Fed]
    """What is trained on, in parts that are run at once."""
    per_step: int
    """How many of them make a step."""
    amount: Amount
    """How long it trains."""
    generator: torch.Generator
    """Draws the order of the text."""
    order: list[int] = field(default_factory=list)
    """What is left of this round through the text, last first."""
    stage: HealingStage = "transfer"
    begun: float = 0.0
    """Share of all work at which the stage began."""
    step: int = 0
    tokens: int = 0
    spent: float = 0.0
    """Seconds of the sessions before this one."""
    within: int = 0
    """Steps of this stage at this rate."""
    rate: float = 0.0
    optimiser: torch.optim.AdamW | None = None
    step_tokens: float = 0.0
    """Tokens of a step, about."""
    start: float = field(default_factory=time.monotonic)
    """When this session began."""

    def __post_init__(self) -> None:
        """Count the tokens of a step."""
        self.step_tokens = sum(map(tokens_in, self.train)) / len(self.train) * self.per_step

    @property
    def seconds(self) -> float:
        """Since the healing began, all sessions together."""
        return self.spent + time.monotonic() - self.start

    @property
    def done(self) -> float:
        """How much is done, in the unit of the amount."""
        return {"steps": self.step, "tokens": self.tokens, "seconds": self.seconds}[self.amount.unit]

    @property
    def share(self) -> float:
        """Of all work, what is done."""
        return min(1.0, self.done / self.amount.number)

    @property
    def one_step(self) -> float:
        """The share of all work that a step is, about; 0 where a time was given."""
        return {"steps": 1.0, "tokens": self.step_tokens, "seconds": 0.0}[self.amount.unit] / self.amount.number

    @property
    def end(self) -> float:
        """Share of all work at which the stage ends."""
        return TRANSFER[self.healer.goal] if self.stage == "transfer" else 1.0

    @property
    def over(self) -> bool:
        """Whether the stage has had its share; attention transfer leaves a step for the whole model."""
        if self.stage == "whole":
            return self.share >= 1
        return self.share + self.one_step > self.end + 1e-9 or self.share >= self.end

    def begin(self, stage: HealingStage, rate: float) -> None:
        """A new stage, or the same one at another rate, from the numbers as they are."""
        self.stage, self.begun, self.rate, self.within = stage, self.share, rate, 0
        self.optimiser = adamw(self.healer.leaves, rate)

    def advance(self) -> int:
        """One step; its tokens."""
        parts = self._next()
        assert self.optimiser is not None  # noqa: S101  # begun
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * self.shape()
        descend(self.healer, self.optimiser, parts, self.stage)
        found = sum(map(tokens_in, parts))
        self.step, self.within, self.tokens = self.step + 1, self.within + 1, self.tokens + found
        return found

    def shape(self) -> float:
        """The step's share of the stage's rate: it rises over the warm-up and falls as a cosine."""
        wide = self.end - self.begun
        steps = math.inf if not self.one_step else wide / self.one_step
        return shape(self.within, (self.share - self.begun) / wide if wide > 0 else 1.0, steps)

    def _next(self) -> list[Fed]:
        found = []
        for _ in range(self.per_step):
            self.order = self.order or torch.randperm(len(self.train), generator=self.generator).tolist()
            found.append(self.train[self.order.pop()])
        return found


def adamw(leaves: Sequence[Tensor], rate: float) -> torch.optim.AdamW:
    """AdamW without decay: what is trained is a change, and 0 means none."""
    return torch.optim.AdamW(list(leaves), lr=rate, betas=BETAS, weight_decay=0.0)


def shape(step: int, share: float, steps: float) -> float:
    """min(1, (step + 1) / warm-up) times a cosine from 1 to LOWEST over the stage's share."""
    warm = min(WARM_UP, max(1, steps // 10))
    fall = (1 + math.cos(math.pi * min(1.0, max(0.0, share)))) / 2
    return min(1.0, (step + 1) / warm) * (LOWEST + (1 - LOWEST) * fall)


def descend(healer: Healer, optimiser: torch.optim.Optimizer, parts: Sequence[Fed], stage: HealingStage) -> None:
    """One step down the mean loss over all tokens of these batches, whose gradients are added up."""
    optimiser.zero_grad()
    counts = [tokens_in(part) for part in parts]
    for part, count in zip(parts, counts, strict=True):
        weight = count / sum(counts)
        if stage == "transfer":
            transfer(healer, part.inputs, weight)
        else:
            healer.descend(part.inputs, part.targets, weight)
    nn.utils.clip_grad_norm_(healer.leaves, LONGEST)
    optimiser.step()


RATES: dict[HealingStage, tuple[float, ...]] = {
    "transfer": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "whole": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
}
"""What is tried, from the least on, until one gains less than ENOUGH of what the best has gained."""
SLOWER, LEAST = 0.1, 1e-7
"""Where none leads nearer than the start, this share of the least is tried, down to the smallest that is."""
STEPS = 8
"""Steps at each rate, over which it rises and falls, and no more than a tenth of all that are planned."""
ENOUGH = 0.9
"""Share of the largest gain from which a larger rate is taken: over more steps it gains more."""


def chosen_rate(
    healer: Healer, stage: HealingStage, steps: Sequence[Sequence[Fed]], held: HeldOut
) -> tuple[float, list[HealingRate]]:
    """The largest rate after whose steps the held-out distance has fallen as far as after any, and what was tried.

    As far: by at least ENOUGH of the largest fall.

    The numbers are put back. 0 where no rate leads nearer than the start.
    """
    before = [leaf.detach().clone() for leaf in healer.leaves]
    start = held.distances(stage, most=1).mean
    tried: list[HealingRate] = []

    def distance(rate: float) -> float:
        optimiser = adamw(healer.leaves, rate)
        for number, parts in enumerate(steps):
            for group in optimiser.param_groups:
                group["lr"] = rate * min(number + 1, len(steps) - number) / ((len(steps) + 1) // 2)
            descend(healer, optimiser, parts, stage)
        found = held.distances(stage, most=1)
        put_back(healer.leaves, before)
        tried.append(HealingRate(rate=rate, validation=found.mean if found.finite else None))
        return found.mean if found.finite else math.inf

    known: dict[float, float] = {}
    for rate in RATES[stage]:
        known[rate] = distance(rate)
        if not enough(known[rate], min(known.values()), start):
            break
    while min(known.values()) >= start > 0 and min(known) * SLOWER >= LEAST:
        rate = min(known) * SLOWER
        known[rate] = distance(rate)
    least = min(known.values())
    if least >= start:
        return 0.0, tried
    return max(rate for rate, found in known.items() if enough(found, least, start)), tried


def enough(distance: float, least: float, start: float) -> bool:
    """Whether a rate gains nearly what the best one gains."""
    return start - distance >= ENOUGH * (start - least)
