"""The state of a healing during training, and the range test (Smith 2017) that chooses its learning rate."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from attnlens.choices import HealingGoal, HealingStage
from attnlens.errors import TextError
from attnlens.lab.heal.healer import Healer
from attnlens.maths.statistics import paired_difference
from attnlens.maths.statistics.intervals import FEWEST_DRAWS
from attnlens.models import hooks, texts
from attnlens.models.texts import Batches
from attnlens.models.texts.sequences import choose_windows
from attnlens.models.texts.targets import Fed, feed
from attnlens.models.trace import remove_hooks
from attnlens.records import HealingRate, Site
from attnlens.requests.swap import Amount
from attnlens.runs.outputs import tokens_in

SMALLEST = 1e-30
"""Lower bound on ‖own‖² in relative errors, since a site's output can be 0."""


ModuleCall = tuple[nn.Module, tuple[object, ...], dict[str, object]]
"""A module, and the positional and keyword arguments that it was called with."""


class _AllModulesRan(Exception):  # noqa: N818  # not an error: it ends a forward pass early
    """Signal that all attention modules to train have run."""


def transfer(healer: Healer, inputs: Mapping[str, Tensor], weight: float = 1.0) -> float:
    """Compute the attention transfer loss, add `weight` times its gradient to the leaves, and return the loss.

    Σ_sites ‖new − own‖² / ‖own‖² of the site outputs softmax(…)V, mean over sequences (Zhang et al. 2024, LoLCATs, Eq.
    6, with relative errors so that all sites count), and the regulariser of primal attention. The original model runs
    once, then each module alone on its recorded input, so that only one module's graph is in memory.
    """
    total = 0.0
    with torch.enable_grad():
        for pairs, penalties in _pairs(healer, inputs):
            errors = [_relative_errors(*pair, inputs).mean() for pair in pairs]
            penalty = healer.penalty(penalties) / (1 if healer.convention == "paper" else len(healer.swaps))
            loss = sum(errors, torch.zeros((), device=errors[0].device)) + penalty
            if loss.requires_grad:  # a site that shares its weights can lack trainable ones
                (weight * loss).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    return total


def transfer_errors(healer: Healer, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return Σ_sites ‖new − own‖² / ‖own‖² of each sequence, without gradient and regulariser."""
    with torch.no_grad():
        errors = [_relative_errors(*pair, inputs) for pairs, _ in _pairs(healer, inputs) for pair in pairs]
    # add only sites with one row per sequence as the first: others attend within windows of an image, each its own row
    alike = [error for error in errors if len(error) == len(errors[0])]
    return torch.stack(alike).double().sum(0).cpu()


def _pairs(healer: Healer, inputs: Mapping[str, Tensor]) -> Iterator[tuple[list[tuple[Tensor, Tensor]], list[Tensor]]]:
    """Yield (new output, original output) of the sites of each module, and the module's regularisers."""
    new, penalties = dict[Site, Tensor](), list[Tensor]()
    paths = {healer.loaded.model.get_submodule(site.path): site.path for site in healer.swaps}
    calls, original = _record_calls(healer, inputs, paths)
    swaps = healer.healed_swaps()
    visit = healer.collect_penalties(swaps, penalties)
    students = hooks.replace(
        healer.loaded.model, healer.sites, swaps, healer.path, visit=visit, answered=new.__setitem__
    )
    with students:
        for module, args, kwargs in calls:
            begin = f"{paths[module]}."
            local = {
                name.removeprefix(begin): part.value for name, part in healer.weights.items() if name.startswith(begin)
            }
            torch.func.functional_call(module, local, args, kwargs)
            yield [(output, original[site]) for site, output in new.items()], penalties
            new.clear()
            penalties.clear()


def _record_calls(
    healer: Healer, inputs: Mapping[str, Tensor], paths: Mapping[nn.Module, str]
) -> tuple[list[ModuleCall], dict[Site, Tensor]]:
    """Record the calls of these modules in the original model, and their sites' outputs."""
    calls, original = list[ModuleCall](), dict[Site, Tensor]()
    expected = sum(site.path in paths.values() for site in healer.sites)

    def record_call(*call: *ModuleCall) -> None:
        calls.append(call)

    def record_output(site: Site, output: Tensor) -> None:
        if site.path in paths.values():
            original[site] = output
        if len(original) == expected:
            raise _AllModulesRan

    handles = [module.register_forward_pre_hook(record_call, with_kwargs=True) for module in paths]
    watching = hooks.watch(healer.loaded.model, healer.sites, lambda _site, _call: None, record_output)
    with suppress(_AllModulesRan), torch.no_grad(), remove_hooks(handles), watching:
        hooks.forward(healer.loaded.model, inputs)
    return calls, original


def _relative_errors(new: Tensor, original: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute ‖new − own‖² / ‖own‖² of each sequence over its real tokens."""
    real = hooks.real_tokens(original, inputs)
    error, size = ((part.float().square().flatten(2).sum(-1) * real).sum(1) for part in (new - original, original))
    return error / size.clamp_min(SMALLEST)


SHARE, MOST, A_BATCH = 0.125, 4, 40
"""Held-out batches: share of the calibration batches, maximum number, and training batches per held-out batch, so that
checks take less time than training."""


@dataclass(frozen=True)
class Distances:
    """Distances of several sequences from their goal."""

    each: Tensor  # mean distance over the tokens of each sequence, float64
    counts: Tensor  # number of these tokens

    @property
    def mean(self) -> float:
        """Mean over all tokens, ∞ if it is not finite; clamped to 0, since negative values are rounding errors."""
        if not self.finite:
            return math.inf
        return max(0.0, float((self.each * self.counts).sum() / self.counts.sum()))

    @property
    def finite(self) -> bool:
        """True if the distance of every sequence is finite."""
        return math.isfinite(float(self.each.sum()))

    def falls_from(self, before: Distances) -> bool:
        """Return True if the paired 95 % interval lies below `before`; use the mean for fewer than FEWEST_DRAWS."""
        if not (self.finite and before.finite):
            return self.finite
        value, _, high = paired_difference(before.each, self.each, weights=self.counts)
        return (value if len(self.each) < FEWEST_DRAWS or math.isnan(high) else high) < 0


def measure_distances(healer: Healer, fed: Sequence[Fed], stage: HealingStage = "whole") -> Distances:
    """Measure the stage's loss on each sequence of these batches, without gradients and regulariser."""
    if stage == "transfer":
        errors = torch.cat([transfer_errors(healer, batch.inputs) for batch in fed])
        return Distances(errors, torch.ones_like(errors))
    parts = [healer.by_sequence(batch.inputs, batch.targets) for batch in fed]
    means, counts = (torch.cat(part).double() for part in zip(*parts, strict=True))
    return Distances(means, counts)


def set_values(leaves: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy these values into the leaves."""
    with torch.no_grad():
        for leaf, value in zip(leaves, values, strict=True):
            leaf.copy_(value)


def split(healer: Healer, batches: Batches, seed: int, trained: float = math.inf) -> tuple[list[Fed], list[Fed]]:
    """Split into training and held-out batches, spread over the texts; raise TextError for fewer than two batches."""
    if len(batches) < 2:
        raise TextError(
            "Healing needs at least two batches of calibration text: one to train on, one to choose the best step.",
            "Give a longer text with --calibration, or a smaller --batch-size.",
        )
    if healer.goal == "text":
        fed = feed(healer.loaded, batches, healer.task, seed)
    else:
        fed = [Fed(batch.inputs, None) for batch in batches]
    count = max(1, round(min(MOST, len(batches) * SHARE, trained / A_BATCH)))
    held_out = choose_windows(len(batches), count, "spread", seed=0)
    return [batch for number, batch in enumerate(fed) if number not in held_out], [fed[number] for number in held_out]


def cut_parts(fed: Sequence[Fed], size: int | None) -> tuple[list[Fed], int]:
    """Cut batches into parts of at most `size` sequences; also return the number of parts per step."""
    whole = texts.sequences_in(fed[0].inputs)
    if size is None or size == whole:
        return list(fed), 1
    if size > whole:
        return list(fed), -(-size // whole)
    parts = []
    for batch in fed:
        count = texts.sequences_in(batch.inputs)
        parts += [batch] if count == 1 else [batch.rows(start, start + size) for start in range(0, count, size)]
    return parts, 1


STAGES: tuple[HealingStage, ...] = ("transfer", "whole")
"""Stages in order."""
TRANSFER: dict[HealingGoal, float] = {"teacher": 0.9, "text": 0.25}
"""Share of the total work at which attention transfer ends at the latest, by goal. Tuned on `demo`: per token, transfer
gains more than end-to-end training, but it does not learn a new text."""
WARM_UP = 20
"""Warm-up steps of the learning rate, at most a tenth of the stage's steps."""
LOWEST = 0.02
"""Share of the learning rate at the end of the cosine decay."""
BETAS = 0.9, 0.95
"""AdamW's β₁ and β₂. With few steps, the usual β₂ = 0.999 is dominated by the larger gradients of the first steps."""
LONGEST = 1.0
"""Maximum gradient norm, for clipping."""


@dataclass
class Course:
    """The training state of a healing, and its learning rate schedule."""

    healer: Healer
    train: Sequence[Fed]  # training text, in parts that run as one batch
    per_step: int  # parts per step
    amount: Amount  # amount of training
    generator: torch.Generator  # draws the order of the text
    order: list[int] = field(default_factory=list)  # parts left in this epoch, next one last
    stage: HealingStage = "transfer"
    begun: float = 0.0  # share of the total work at which the stage started
    step: int = 0
    tokens: int = 0
    spent: float = 0.0  # seconds of previous sessions
    within: int = 0  # steps of this stage at the current rate
    rate: float = 0.0
    start: float = field(default_factory=time.monotonic)  # start of this session

    def __post_init__(self) -> None:
        """Create the optimiser, and estimate the share of the total work per step; 0 if the amount is a time."""
        self.optimiser = adamw(self.healer.leaves, self.rate)
        step_tokens = sum(map(tokens_in, self.train)) / len(self.train) * self.per_step
        self.one_step = {"steps": 1.0, "tokens": step_tokens, "seconds": 0.0}[self.amount.unit] / self.amount.number

    @property
    def seconds(self) -> float:
        """Seconds of healing, over all sessions."""
        return self.spent + time.monotonic() - self.start

    @property
    def done(self) -> float:
        """Finished work, in the unit of the amount."""
        return {"steps": self.step, "tokens": self.tokens, "seconds": self.seconds}[self.amount.unit]

    @property
    def share(self) -> float:
        """Finished share of the total work, at most 1."""
        return min(1.0, self.done / self.amount.number)

    @property
    def end(self) -> float:
        """Share of the total work at which the stage ends."""
        return TRANSFER[self.healer.goal] if self.stage == "transfer" else 1.0

    @property
    def over(self) -> bool:
        """True if the stage has used its share of the work; attention transfer leaves one step for the next stage."""
        if self.stage == "whole":
            return self.share >= 1
        return self.share + self.one_step > self.end + 1e-9 or self.share >= self.end  # 1e-9: rounding of shares

    def begin(self, stage: HealingStage, rate: float) -> None:
        """Start a stage from the current parameters, or restart it at another rate, with a new optimiser."""
        self.stage, self.begun, self.rate, self.within = stage, self.share, rate, 0
        self.optimiser = adamw(self.healer.leaves, rate)

    def advance(self) -> int:
        """Make one training step and return its number of tokens."""
        parts = []
        for _ in range(self.per_step):
            self.order = self.order or torch.randperm(len(self.train), generator=self.generator).tolist()
            parts.append(self.train[self.order.pop()])
        length = self.end - self.begun
        steps = length / self.one_step if self.one_step else math.inf
        factor = shape(self.within, (self.share - self.begun) / length if length > 0 else 1.0, steps)
        descend(self.healer, self.optimiser, parts, self.stage, self.rate * factor)
        tokens = sum(map(tokens_in, parts))
        self.step, self.within, self.tokens = self.step + 1, self.within + 1, self.tokens + tokens
        return tokens


def adamw(leaves: Sequence[Tensor], rate: float) -> torch.optim.AdamW:
    """Build AdamW without weight decay, because the leaves are changes of weights."""
    return torch.optim.AdamW(list(leaves), lr=rate, betas=BETAS, weight_decay=0.0)


def shape(step: int, share: float, steps: float) -> float:
    """Return min(1, (step + 1) / warm-up) times a cosine that falls from 1 to LOWEST as `share` rises from 0 to 1."""
    warm = min(WARM_UP, max(1, steps // 10))
    fall = (1 + math.cos(math.pi * min(1.0, max(0.0, share)))) / 2
    return min(1.0, (step + 1) / warm) * (LOWEST + (1 - LOWEST) * fall)


def descend(
    healer: Healer, optimiser: torch.optim.Optimizer, parts: Sequence[Fed], stage: HealingStage, rate: float
) -> None:
    """Make one optimiser step on the mean loss over all tokens of `parts`, with summed and clipped gradients."""
    optimiser.param_groups[0]["lr"] = rate
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
"""Learning rates tried, in ascending order, until one gains less than ENOUGH of the best gain."""
SLOWER, LEAST = 0.1, 1e-7
"""If no rate improves on the start, the smallest is multiplied by SLOWER and tried, down to LEAST."""
STEPS = 8
"""Steps per tried rate, over which it rises and falls; at most a tenth of all planned steps."""
ENOUGH = 0.9
"""Share of the best gain that suffices for a larger rate, which gains more over more steps."""


def choose_rate(
    healer: Healer, stage: HealingStage, steps: Sequence[Sequence[Fed]], held_out: Sequence[Fed]
) -> tuple[float, list[HealingRate]]:
    """Return the largest rate that gains at least ENOUGH of the largest gain (0 if none gains), and the tried rates.

    A gain is a reduction of the held-out distance. The parameters are restored after each trial.
    """
    before = [leaf.detach().clone() for leaf in healer.leaves]
    start = measure_distances(healer, held_out, stage).mean
    half = (len(steps) + 1) // 2  # the rate rises over half of the steps, and falls over the others
    distances: dict[float, float] = {}  # by rate; ∞ if not finite

    def try_rate(rate: float) -> None:
        optimiser = adamw(healer.leaves, rate)
        for number, parts in enumerate(steps):
            descend(healer, optimiser, parts, stage, rate * min(number + 1, len(steps) - number) / half)
        distances[rate] = measure_distances(healer, held_out, stage).mean
        set_values(healer.leaves, before)

    def enough(rate: float) -> bool:
        return start - distances[rate] >= ENOUGH * (start - min(distances.values()))

    for rate in RATES[stage]:
        try_rate(rate)
        if not enough(rate):
            break
    while min(distances.values()) >= start > 0 and min(distances) * SLOWER >= LEAST:
        try_rate(min(distances) * SLOWER)
    tried = [HealingRate(rate=rate, validation=None if math.isinf(d) else d) for rate, d in distances.items()]
    return 0.0 if min(distances.values()) >= start else max(filter(enough, distances)), tried
