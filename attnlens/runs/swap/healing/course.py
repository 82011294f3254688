"""The state of a healing while it trains, and the range test (Smith 2017) that chooses its learning rate."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.choices import HealingGoal, HealingStage
from attnlens.errors import TextError
from attnlens.maths.statistics import paired_difference
from attnlens.maths.statistics.intervals import FEWEST_DRAWS
from attnlens.models import hooks, texts
from attnlens.models.texts import Batches
from attnlens.models.texts.sequences import chosen
from attnlens.models.texts.targets import Fed, feed
from attnlens.records import Call, HealingRate, Site
from attnlens.requests.healing import Amount
from attnlens.runs.outputs import tokens_in
from attnlens.runs.swap.healing.healer import Healer

SMALLEST = 1e-30
"""‖own‖² below which a site's output counts as this: a site that gives nothing has no relative error."""


class _Seen(Exception):  # noqa: N818  # no error: it ends a pass whose rest nobody needs
    """All attention modules that are trained have run."""


def transfer(healer: Healer, inputs: Mapping[str, Tensor], weight: float = 1.0) -> float:
    """Σ_sites ‖new − own‖² / ‖own‖² of softmax(…)V, mean over sequences; the leaves gain its gradient times `weight`.

    (Zhang et al. 2024, LoLCATs, Eq. 6, with relative errors, so that every site counts.) The original model runs once,
    up to the last site that is trained; each module then runs again by itself on what it was given there, so that
    nothing is derived through the model, and one module's graph is held at a time. Primal attention: + its regulariser.
    """
    total = 0.0
    with torch.enable_grad():
        for pairs, penalties in _pairs(healer, inputs):
            errors = [_relative_errors(*pair, inputs).mean() for pair in pairs]
            penalty = healer.penalty(penalties) / (1 if healer.convention == "paper" else len(healer.swaps))
            loss = sum(errors, torch.zeros((), device=errors[0].device)) + penalty
            if loss.requires_grad:  # a site whose weights others share may have nothing to train
                (weight * loss).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    return total


def transferred(healer: Healer, inputs: Mapping[str, Tensor]) -> Tensor:
    """The same sum for each sequence, without gradient or regulariser."""
    with torch.no_grad():
        each = [_relative_errors(*pair, inputs) for pairs, _ in _pairs(healer, inputs) for pair in pairs]
    alike = [found for found in each if len(found) == len(each[0])]
    return torch.stack(alike).double().sum(0).cpu()


def _pairs(healer: Healer, inputs: Mapping[str, Tensor]) -> Iterator[tuple[list[tuple[Tensor, Tensor]], list[Tensor]]]:
    """Module by module: what its sites answer and what they answered in the original model, and its regularisers."""
    new, penalties = dict[Site, Tensor](), list[Tensor]()
    paths = {healer.loaded.model.get_submodule(site.path): site.path for site in healer.swaps}
    calls, own = _passed(healer, inputs, paths)
    swaps = healer.healed_swaps()

    def visit(site: Site, call: Call) -> None:
        if healer.eta:
            penalties.append(healer.regulariser(call, swaps[site]))

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
            yield [(found, own[site]) for site, found in new.items()], penalties
            new.clear()
            penalties.clear()


def _passed(
    healer: Healer, inputs: Mapping[str, Tensor], paths: Mapping[nn.Module, str]
) -> tuple[list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]], dict[Site, Tensor]]:
    """The calls (module, args, kwargs) of these modules in the original model, and what their sites answer."""
    calls, own = list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]](), dict[Site, Tensor]()
    expected = sum(site.path in paths.values() for site in healer.sites)

    def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((module, args, kwargs))

    def answered(site: Site, found: Tensor) -> None:
        if site.path in paths.values():
            own[site] = found
        if len(own) == expected:
            raise _Seen

    handles = [module.register_forward_pre_hook(entered, with_kwargs=True) for module in paths]
    try:
        with torch.no_grad(), hooks.watch(healer.loaded.model, healer.sites, lambda _site, _call: None, answered):
            hooks.forward(healer.loaded.model, inputs)
    except _Seen:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return calls, own


def _relative_errors(new: Tensor, own: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Of each sequence ‖new − own‖² / ‖own‖² over real tokens, whatever else is in its batch."""
    real = hooks.real_tokens(own, inputs)
    missed, whole = ((part.float().square().flatten(2).sum(-1) * real).sum(1) for part in (new - own, own))
    return missed / whole.clamp_min(SMALLEST)


SHARE, MOST, A_BATCH = 0.125, 4, 40
"""Share of the calibration batches that is kept back from training, how many at most, and for how many batches that are
trained on there is one: measuring on them should take less than the training."""


@dataclass
class HeldOut:
    """The batches kept back, and what was measured on them."""

    healer: Healer
    fed: Sequence[Fed]

    def distances(self, stage: HealingStage = "whole", most: int = MOST) -> Distances:
        """What a stage makes smaller, for each sequence of the first `most` batches; of the whole the distance."""
        if stage == "transfer":
            errors = torch.cat([transferred(self.healer, one.inputs) for one in self.fed[:most]])
            return Distances(errors, torch.ones_like(errors))
        found = [self.healer.by_sequence(one.inputs, one.targets) for one in self.fed[:most]]
        each, counts = (torch.cat([part[side].double() for part in found]) for side in (0, 1))
        return Distances(each, counts)


@dataclass(frozen=True)
class Distances:
    """Distances sequence by sequence."""

    each: Tensor  # their means over tokens, float64
    counts: Tensor  # over how many tokens

    @property
    def mean(self) -> float:
        """Over all tokens, ∞ where it is not finite; below 0 it is rounding, and no nearer than the model itself."""
        if not self.finite:
            return math.inf
        return max(0.0, float((self.each * self.counts).sum() / self.counts.sum()))

    @property
    def finite(self) -> bool:
        """Whether there is one."""
        return math.isfinite(float(self.each.sum()))

    def falls_from(self, before: Distances) -> bool:
        """Whether the paired 95 % interval is below `before`; the mean alone with fewer than FEWEST_DRAWS."""
        if not (self.finite and before.finite):
            return self.finite
        value, _, high = paired_difference(before.each, self.each, weights=self.counts)
        return (value if len(self.each) < FEWEST_DRAWS or math.isnan(high) else high) < 0


@dataclass
class Best:
    """The step with the least distance so far, whose numbers are kept."""

    step: int = 0
    distance: float = math.inf
    kept: list[Tensor] = field(default_factory=list)

    def offer(self, step: int, distance: float, leaves: Sequence[Tensor]) -> None:
        """Keep the numbers where the distance is the least."""
        if distance < self.distance:  # strictly: of equals the first, and never NaN
            self.step, self.distance = step, distance
            self.kept = [leaf.detach().clone() for leaf in leaves]

    def restore(self, leaves: Sequence[Tensor]) -> None:
        """Put the best step's numbers back."""
        put_back(leaves, self.kept)


def put_back(leaves: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Give the leaves these numbers."""
    with torch.no_grad():
        for leaf, value in zip(leaves, kept, strict=True):
            leaf.copy_(value)


def split(healer: Healer, batches: Batches, seed: int, trained: float = math.inf) -> tuple[list[Fed], list[Fed]]:
    """Split into training batches and those kept back, spread over the texts; raises TextError for fewer than two."""
    if len(batches) < 2:
        raise TextError(
            "Healing needs two batches of calibration text at least: one to train, one to choose the best step.",
            "Give a longer text with --calibration, or a smaller --batch-size.",
        )
    if healer.goal == "text":
        fed = feed(healer.loaded, batches, healer.task, seed)
    else:
        fed = [Fed(batch.inputs, None) for batch in batches]
    back = chosen(len(batches), max(1, round(min(MOST, len(batches) * SHARE, trained / A_BATCH))), "spread", seed=0)
    return [one for number, one in enumerate(fed) if number not in back], [fed[number] for number in back]


def parts_of(fed: Sequence[Fed], size: int | None) -> tuple[list[Fed], int]:
    """Cut batches into parts of at most `size` sequences; also return how many parts make a step of `size`."""
    whole = texts.sequences_in(fed[0].inputs)
    if size is None or size == whole:
        return list(fed), 1
    if size > whole:
        return list(fed), -(-size // whole)
    found = []
    for one in fed:
        count = texts.sequences_in(one.inputs)
        if count == 1:
            found.append(one)
            continue
        found += [one.rows(start, start + size) for start in range(0, count, size)]
    return found, 1


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
    train: Sequence[Fed]  # what is trained on, in parts that are run at once
    per_step: int  # how many of them make a step
    amount: Amount  # how long it trains
    generator: torch.Generator  # draws the order of the text
    order: list[int] = field(default_factory=list)  # what is left of this round through the text, last first
    stage: HealingStage = "transfer"
    begun: float = 0.0  # share of all work at which the stage began
    step: int = 0
    tokens: int = 0
    spent: float = 0.0  # seconds of the sessions before this one
    within: int = 0  # steps of this stage at this rate
    rate: float = 0.0
    optimiser: torch.optim.AdamW | None = None
    step_tokens: float = 0.0  # tokens of a step, about
    start: float = field(default_factory=time.monotonic)  # when this session began

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
        parts = []
        for _ in range(self.per_step):
            self.order = self.order or torch.randperm(len(self.train), generator=self.generator).tolist()
            parts.append(self.train[self.order.pop()])
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
