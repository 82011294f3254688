"""Sentences of a healing: how long it trained, at which rates, how near it came, and its control."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attnlens.records import Healing, HealingControl, HealingTraining
from attnlens.sentences.swaps.effects import figures

STAGES = {"transfer": "Attention transfer", "whole": "Whole model"}
"""How the stages are called."""


def healing(found: Healing, unit: str) -> list[str]:
    """Amount, best step, trained numbers; each stage; the distance kept back; the evaluation text on the way."""
    distances = {step.step: step.validation for step in found.curve if step.validation is not None}
    near = []
    if distances and found.best in distances:
        first, best = distances[min(distances)], distances[found.best]
        name = "Loss on text kept back" if found.goal == "text" else "Validation distance to the original"
        near.append(f"{name}: {figures(first)} at first, {figures(best)} at its best")
    return [*_amounts(found), *map(_stage, found.stages), *near, *_losses(found, unit), *_control(found)]


def _amounts(found: Healing) -> Iterator[str]:
    of_rank = f", as changes of rank {found.rank}" if found.rank else ""
    yield (
        f"Healing: {_done(found)}, step {found.best} kept; {found.parameters:,} numbers trained{of_rank}, "
        f"learning rate {rate(found.learning_rate)}"
    )
    if found.tokens is not None and found.seconds is not None:
        goal = "the next tokens of the text" if found.goal == "text" else "the original model"
        peak = f"; {found.peak_memory_bytes / 2**20:,.0f} MiB at most" if found.peak_memory_bytes else ""
        many = f"{_many(found.tokens, 'token')}, {_many(found.batch or 0, 'sequence')} a step"
        yield f"Taught by {goal}: {many}, {found.seconds:,.0f} s{peak}"
    if found.eta is not None:
        yield f"Training loss: the distance + {found.eta:g} · the KSVD regulariser, as in the {found.ksvd_convention}"


def _done(found: Healing) -> str:
    """`200 steps asked for, 200 done`, `5,000 tokens asked for, 5,120 done in 40 steps`, and whether it was ended."""
    steps = max(found.curve[-1].step if found.curve else 0, sum(stage.steps for stage in found.stages))
    asked = found.asked or _many(found.steps, "step").replace(",", "")
    done = f"{steps} done"
    for unit, number in (("token", found.tokens), ("second", found.seconds)):
        if asked.rstrip("s").endswith(unit) and number is not None:
            done = f"{number:,.0f} done in {_many(steps, 'step')}"
    return f"{asked} asked for, {done}" + (", interrupted" if found.interrupted else "")


def _many(number: int, noun: str) -> str:
    """`1 token`, `5,000 tokens`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _stage(stage: HealingTraining) -> str:
    rates = sorted(one.rate for one in stage.rates)
    tried = f" (of {', '.join(map(rate, rates))})"
    name = STAGES[stage.stage]
    if not stage.steps:
        return f"{name}: left out, as no learning rate{tried if stage.rates else ''} led nearer"
    speed = f", {stage.tokens_per_second:,.0f} tokens per second" if stage.tokens_per_second else ""
    ended = "; ended early, as the last checks gained nothing beyond their interval" if stage.stopped else ""
    lowered = "" if stage.lowered_from is None else f", lowered from {rate(stage.lowered_from)}"
    if not lowered and rates and stage.learning_rate < 0.99 * rates[0]:  # an older report does not say from what
        lowered = ", lowered later"
    chosen = f"learning rate {rate(stage.learning_rate)}{lowered}{tried if rates else ''}"
    return f"{name}: {_many(stage.steps, 'step')}, {_many(stage.tokens, 'token')}{speed}, {chosen}{ended}"


def _losses(found: Healing, unit: str) -> Iterator[str]:
    drawn = [step for step in found.curve if step.loss is not None]
    by_tokens = [
        f"{figures(math.exp(step.loss))} at {step.tokens:,}"
        for step in drawn
        if step.tokens is not None and step.loss is not None and step.loss < 700
    ]
    if by_tokens:
        yield f"Perplexity of the evaluation text, by tokens trained on: {', '.join(by_tokens)}"
    elif drawn:
        losses = [f"{figures(step.loss, 4)} at step {step.step}" for step in drawn if step.loss is not None]
        yield f"Loss on the evaluation text, in {unit}: {', '.join(losses)}"


def _control(found: Healing) -> Iterator[str]:
    control: HealingControl | None = found.control
    if control is None:
        return
    ends = control.ratio_ci95
    interval = f" (95 % interval {ends[0]:.3f} to {ends[1]:.3f})" if ends else ""
    yield (
        f"Control, the original trained on the same text for {_many(control.tokens, 'token')}: perplexity "
        f"{figures(control.perplexity.before)} before, {figures(control.perplexity.after)} after; the healed one's is "
        f"{control.ratio:.3f} times that{interval}"
    )


def rate(found: float) -> str:
    """A learning rate as it is written: 1e-3."""
    return f"{found:.0e}".replace("e-0", "e-")
