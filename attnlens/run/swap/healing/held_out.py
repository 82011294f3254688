"""Attention transfer, and calibration text kept back: the distance there chooses the best step and ends a stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnlens import hooks, texts
from attnlens.choices import HealingStage
from attnlens.errors import TextError
from attnlens.records import Call, Site
from attnlens.run.swap.healing.healer import Healer
from attnlens.statistics import paired_difference
from attnlens.statistics.intervals import FEWEST_DRAWS
from attnlens.texts import Batches
from attnlens.texts.sequences import chosen
from attnlens.texts.targets import Fed, feed

SMALLEST = 1e-30
"""‖own‖² below which a site's output counts as this: a site that gives nothing has no relative error."""


class _Seen(Exception):  # noqa: N818  # no error: it ends a pass whose rest nobody needs
    """All attention modules that are trained have run."""


@dataclass(frozen=True)
class ModuleCall:
    """One call of an attention module in the original model."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


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
    with _students(healer, new, penalties):
        for passed in calls:
            begin = f"{paths[passed.module]}."
            local = {
                name.removeprefix(begin): part.value for name, part in healer.weights.items() if name.startswith(begin)
            }
            torch.func.functional_call(passed.module, local, passed.args, passed.kwargs)
            yield [(found, own[site]) for site, found in new.items()], penalties
            new.clear()
            penalties.clear()


def _passed(
    healer: Healer, inputs: Mapping[str, Tensor], paths: Mapping[nn.Module, str]
) -> tuple[list[ModuleCall], dict[Site, Tensor]]:
    """The calls of these modules in the original model, in their order, and what their sites answer."""
    calls, own = list[ModuleCall](), dict[Site, Tensor]()
    expected = sum(site.path in paths.values() for site in healer.sites)

    def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(ModuleCall(module, args, kwargs))

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


@contextmanager
def _students(healer: Healer, new: dict[Site, Tensor], penalties: list[Tensor]) -> Iterator[None]:
    """Inside the block modules that are run alone have the new kernels; their answers and regularisers are gathered."""

    def visit(site: Site, call: Call) -> None:
        if healer.eta:
            penalties.append(healer.regulariser(call, swaps[site]))

    swaps, store = healer.healed_swaps(), new.__setitem__
    with hooks.replace(healer.loaded.model, healer.sites, swaps, healer.path, visit=visit, answered=store):
        yield


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
    """What is measured."""
    fed: Sequence[Fed]
    """On which batches."""

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

    each: Tensor
    """Their means over tokens, float64."""
    counts: Tensor
    """Over how many tokens."""

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
        """Whether it is lower than `before`, with its paired 95 % interval over the sequences.

        Of fewer than FEWEST_DRAWS sequences, whose interval says too little, whether it is lower at all.
        """
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

    def offer(self, step: int, distance: float, leaves: Sequence[Tensor]) -> bool:
        """Keep the numbers where the distance is the least; whether it is."""
        if not distance < self.distance:  # strictly: of equals the first, and never NaN
            return False
        self.step, self.distance = step, distance
        self.kept = [leaf.detach().clone() for leaf in leaves]
        return True

    def restore(self, leaves: Sequence[Tensor]) -> None:
        """Put the best step's numbers back."""
        put_back(leaves, self.kept)


def put_back(leaves: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Give the leaves these numbers."""
    with torch.no_grad():
        for leaf, value in zip(leaves, kept, strict=True):
            leaf.copy_(value)


def split(healer: Healer, batches: Batches, seed: int, trained: float = math.inf) -> tuple[list[Fed], list[Fed]]:
    """Training batches, and those kept back, which are spread over the texts; `trained`: how many are trained on.

    Raises TextError for fewer than two.
    """
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
    """The batches cut into parts of at most `size` sequences, and how many of them make a step of so many.

    A step of more sequences than a batch holds takes several batches, one after another.
    """
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
        for start in range(0, count, size):
            rows = slice(start, start + size)
            inputs = {name: value[rows] for name, value in one.inputs.items()}
            found.append(Fed(inputs, None if one.targets is None else one.targets[rows], one.noise))
    return found, 1
