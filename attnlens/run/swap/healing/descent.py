"""Trains swapped heads towards the original model by AdamW, and keeps the step that is nearest to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from attnlens import hooks
from attnlens.errors import ModelError, TextError
from attnlens.records import Healing, HealingStep
from attnlens.run.progress import Tell
from attnlens.run.swap.healing.healer import Healer, changed_weights
from attnlens.texts import Batch, Batches
from attnlens.texts.sampling import chosen

LEARNING_RATE = 1e-3
"""First learning rate of AdamW; it rises over WARM_UP steps and falls as a cosine."""
SLOWER = 0.1
"""Factor of the learning rate each time that a check finds nothing nearer than the start: a kernel that cost much needs
large steps, one that cost little is harmed by them."""
WARM_UP = 20
"""Steps over which the learning rate rises, and no more than there are up to the first check."""
VALIDATION_SHARE = 0.125
"""Share of the calibration text that is kept back from training, to choose the best step."""
CHECKS = 10
"""How often the validation distance is measured during a healing."""
PATIENCE = 3
"""Checks without an improvement after which it ends."""
DRAWN = (0, 50, 200, 1000)
"""Steps at which the loss on the evaluation text is measured for the picture."""

Evaluate = Callable[[], float | None]
"""The loss on the evaluation text of the model as it is."""


def heal(healer: Healer, batches: Batches, steps: int, seed: int, evaluate: Evaluate, progress: Tell) -> Healing:
    """Train for `steps` steps of AdamW on shuffled batches, keep the step with the least validation distance.

    The best numbers stay in the healer; the distance is Healer.distance, on batches kept back from training. While no
    check is better than the start, it begins again from there with smaller steps. Raises TextError where there are
    fewer than two batches, and ModelError where the distance is not finite. Once a step was checked, Ctrl-C ends it
    early, and `healer.interrupted` says so.
    """
    train, kept_back = _split(batches)
    healer.prepare(train[0])
    descent = _Descent(healer.leaves, LEARNING_RATE, steps)
    generator, order = torch.Generator().manual_seed(seed), list[int]()
    best = _Best(healer, kept_back)
    curve = [best.check(0).model_copy(update={"loss": _evaluated(healer, evaluate)})]
    every = max(1, steps // CHECKS)
    try:
        for step in range(1, steps + 1):
            order = order or torch.randperm(len(train), generator=generator).tolist()
            with torch.enable_grad():
                descent.step(healer.loss(train[order.pop()].inputs))
            progress(1)
            if step % every == 0 or step == steps or step in DRAWN:
                drawn = _evaluated(healer, evaluate) if step in DRAWN or step == steps else None
                curve.append(best.check(step).model_copy(update={"loss": drawn}))
                if best.waited >= PATIENCE:
                    break
                if best.waited and best.step == 0:
                    best.restore()
                    descent = _Descent(healer.leaves, descent.rate * SLOWER, steps - step)
    except KeyboardInterrupt:
        if len(curve) < 2:
            raise
        healer.interrupted = True
    best.restore()
    curve = [_with_loss(step, healer, evaluate) if step.step == best.step else step for step in curve]
    found = Healing(steps=steps, best=best.step, parameters=healer.count, learning_rate=descent.rate, curve=curve)
    return found.model_copy(update=healer.regularised)


class _Descent:
    """AdamW from one learning rate on."""

    def __init__(self, leaves: Sequence[Tensor], rate: float, steps: int) -> None:
        self.leaves, self.rate = list(leaves), rate
        self.optimiser = torch.optim.AdamW(self.leaves, lr=rate, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimiser, lambda step: _rate(step, max(steps, 1)))

    def step(self, loss: Tensor) -> None:
        """One step down this loss."""
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.leaves, 1.0)
        self.optimiser.step()
        self.schedule.step()


@dataclass
class _Best:
    """The step with the least validation distance so far."""

    healer: Healer
    batches: Sequence[Batch]
    step: int = 0
    distance: float = math.inf
    waited: int = 0
    kept: list[Tensor] = field(default_factory=list)

    def check(self, step: int) -> HealingStep:
        """Measure the distance and keep the weights where it is the least."""
        with torch.no_grad():
            found = [float(self.healer.distance(batch.inputs)) for batch in self.batches]
        distance = sum(found) / len(found)
        # below 0 it is rounding, and nothing nearer than the model itself
        distance = 0.0 if distance < 0 else distance
        if step == 0 and not math.isfinite(distance):
            raise ModelError(
                "The swapped model diverges, so that nothing can be healed.", "Try --fit, or fewer layers."
            )
        if distance < self.distance:
            self.step, self.distance, self.waited = step, distance, 0
            self.kept = [leaf.detach().clone() for leaf in self.healer.leaves]
        else:
            self.waited += 1
        return HealingStep(step=step, validation=distance if math.isfinite(distance) else None)

    def restore(self) -> None:
        """Put the best step's numbers back."""
        with torch.no_grad():
            for leaf, kept in zip(self.healer.leaves, self.kept, strict=True):
                leaf.copy_(kept)


def _with_loss(kept: HealingStep, healer: Healer, evaluate: Evaluate) -> HealingStep:
    """The step whose numbers the healer has, with its loss on the evaluation text."""
    return kept if kept.loss is not None else kept.model_copy(update={"loss": _evaluated(healer, evaluate)})


def _evaluated(healer: Healer, evaluate: Evaluate) -> float | None:
    """The loss on the evaluation text with the numbers as trained so far."""
    with (
        changed_weights(healer.loaded.model, healer.values()),
        hooks.replace(healer.loaded.model, healer.sites, healer.healed_swaps(), healer.path),
    ):
        return evaluate()


def _split(batches: Batches) -> tuple[list[Batch], list[Batch]]:
    """Training batches, and those kept back, which are spread over the texts."""
    if len(batches) < 2:
        raise TextError(
            "Healing needs two batches of calibration text at least: one to train, one to choose the best step.",
            "Give a longer text with --calibration, or a smaller --batch-size.",
        )
    back = chosen(len(batches), max(1, round(len(batches) * VALIDATION_SHARE)), "spread", seed=0)
    every = list(enumerate(batches.batches))
    return [batch for number, batch in every if number not in back], [every[number][1] for number in back]


def _rate(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / min(WARM_UP, max(1, steps // CHECKS))) * (
        0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
    )
