"""Swaps each head or layer alone and ranks the effects on the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnlens import hooks, texts
from attnlens.attention import Route
from attnlens.models import Loaded
from attnlens.records import Effect, Site, Task
from attnlens.run.outcomes.outputs import divergence, predictions, sequence_losses, sequence_means
from attnlens.runs.progress import Tell
from attnlens.runs.work import Keep, keep_nothing
from attnlens.statistics import Design, false_discovery, p_values, paired_difference
from attnlens.texts.targets import NOTHING, Fed, asking, states_of

if TYPE_CHECKING:
    from jaxtyping import Float

Unit = tuple[Site, int | None]
"""A site, and one of its heads or all."""


def units(swaps: hooks.Swaps, what: str, heads_of: Mapping[Site, int]) -> list[Unit]:
    """What is swapped alone, one after the other: every chosen head, or every chosen layer."""
    if what == "layers":
        return [(site, None) for site in swaps]
    return [(site, head) for site, swap in swaps.items() for head in swap.heads or range(heads_of[site])]


@dataclass(frozen=True)
class Alone:
    """What each of some units does by itself, sequence by sequence of those in which anything is predicted."""

    units: list[Unit]
    """What was swapped alone."""
    own: Float[Tensor, " windows"]
    """The original's loss, or its distance from itself."""
    changed: Float[Tensor, "units windows"]
    """The same with each unit swapped."""
    sizes: Float[Tensor, " windows"]
    """What each sequence weighs in the mean."""
    kept: list[int]
    """The numbers of these sequences among those fed."""
    design: Design
    """How they were sampled."""
    tested: bool
    """Whether differences can be tested; distances are never negative."""

    @property
    def harms(self) -> Float[Tensor, " units"]:
        """The mean rise of each unit; NaN where it diverged."""
        means = (self.changed - self.own).double() @ self.sizes / self.sizes.sum()
        return torch.where(self.changed.isfinite().all(1), means, torch.nan)

    def effects(self, seed: int) -> list[Effect]:
        """The effect of each unit, the most harmful first.

        Effects are differences of the loss in nats, with paired 95 % intervals and two-sided p-values over sequences;
        `significant` holds at a false discovery rate of 5 %. On noise the effect is KL(original ‖ changed), of a
        headless model 1 − cosine of its hidden states: distances, which are never negative and have no p-value.
        """
        effects = [
            _effect(unit, self.own, new, self.sizes, self.design, seed)
            for unit, new in zip(self.units, self.changed, strict=True)
        ]
        if self.tested:
            differences = self.changed - self.own
            finite = differences.isfinite().all(1)
            found = torch.full((len(effects),), torch.nan, dtype=torch.float64)  # one that diverged has no p-value
            found[finite] = p_values(differences[finite], self.design, self.sizes, seed)
            effects = [
                effect.model_copy(update={"p_value": None if p != p else p, "significant": named})
                for effect, p, named in zip(effects, found.tolist(), false_discovery(found).tolist(), strict=True)
            ]
        return sorted(effects, key=lambda effect: -float("inf") if effect.delta is None else -effect.delta)


def sweep(
    loaded: Loaded,
    sites: tuple[Site, ...],
    swaps: hooks.Swaps,
    chosen: Sequence[Unit],
    batches: Sequence[Fed],
    task: Task,
    design: Design,
    path: Route,
    progress: Tell,
    keep: Keep = keep_nothing,
) -> Alone:
    """What each unit alone does to each sequence; blocks before it are not computed again.

    `keep` may know what an earlier run found of a batch and a site.
    """
    blocks = hooks.blocks(loaded.model, batches[0].inputs)
    before: list[Tensor] = []
    after: dict[Unit, list[Tensor]] = defaultdict(list)
    for number, fed in enumerate(batches):
        batch = SweptBatch(loaded, sites, swaps, fed, task, path, blocks)
        for unit in chosen:
            site, head = unit
            name = f"batch {number}, {site.name}, " + ("all heads" if head is None else f"head {head}")
            found = keep(name, partial(batch.losses, site, head))
            after[unit].append(found["changed"])
            progress(1)
        before.append(found["own"])
    every = torch.cat([_sizes(fed, task) for fed in batches])
    kept = (every > 0).nonzero()[:, 0].tolist()
    changed = torch.stack([torch.cat(after[unit]) for unit in chosen])
    tested = task != "hidden" and not batches[0].noise
    return Alone(list(chosen), torch.cat(before), changed, every[kept], kept, design.select(kept), tested)


@dataclass
class SweptBatch:
    """A batch on which units are swapped alone."""

    loaded: Loaded
    sites: tuple[Site, ...]
    swaps: hooks.Swaps
    fed: Fed
    task: Task
    path: Route
    blocks: list[tuple[str, nn.Module]]
    """Of the model, in the order of execution."""

    @cached_property
    def original(self) -> tuple[dict[str, Any], Tensor, Tensor]:
        """What each block gives under the model's own kernel, what is predicted, and the loss of each sequence."""
        with hooks.recorded(self.blocks) as given:
            own = _run(self.loaded, self.fed, self.task)
        return given, own, _losses(own, own, self.fed, self.task)

    def losses(self, site: Site, head: int | None) -> dict[str, Tensor]:
        """The original's loss of each sequence, and the same with a head of a site, or all of them, swapped."""
        given, own, own_losses = self.original
        alone = {site: _alone(self.swaps[site], head)}
        with hooks.replace(self.loaded.model, self.sites, alone, self.path), hooks.resumed(self.blocks, given, site):
            new = _run(self.loaded, self.fed, self.task)
        return {"own": own_losses, "changed": _losses(own, new, self.fed, self.task)}


def _alone(swap: hooks.Replacement, head: int | None) -> hooks.Replacement:
    """The swap of one head, with its own fitted parameters."""
    if head is None:
        return swap
    index = head if swap.heads is None else swap.heads.index(head)
    return hooks.Replacement(swap.kernel.of_head(index), (head,))


def _run(loaded: Loaded, fed: Fed, task: Task) -> Tensor:
    """The predictions at the predicted positions, or a headless model's (batch, tokens, d_model) states."""
    with torch.no_grad():
        result = hooks.forward(loaded.model, fed.inputs, **asking(task))
    found = predictions(result, fed, task)
    return states_of(result) if found is None else found


def _losses(own: Tensor, new: Tensor, fed: Fed, task: Task) -> Tensor:
    """The mean loss of each sequence; on noise KL, of a headless model the mean of 1 − cosine over its real tokens."""
    if task == "hidden":
        apart = 1 - torch.nn.functional.cosine_similarity(own.double(), new.double(), dim=-1)
        apart = apart.reshape(texts.sequences_in(fed.inputs), -1)  # of images cut into windows, or in one row
        mask = fed.inputs.get("attention_mask", torch.ones_like(apart))
        mask = mask if mask.shape == apart.shape else torch.ones_like(apart)
        return ((apart * mask).sum(1) / mask.sum(1)).clamp_min(0).cpu()  # below 0 is rounding
    targets = own.argmax(-1, keepdim=True) if fed.targets is None else fed.targets
    if fed.noise:
        return sequence_means(divergence(own, new), targets != NOTHING)[0].clamp_min(0)
    return sequence_losses(new, targets)[0]


def _sizes(fed: Fed, task: Task) -> Tensor:
    """What each sequence weighs in the mean: its predicted tokens, its real tokens where nothing is predicted, or 1."""
    if task == "hidden" and "attention_mask" in fed.inputs:
        return fed.inputs["attention_mask"].sum(1).double().cpu()
    if fed.targets is None:
        return torch.ones(texts.sequences_in(fed.inputs), dtype=torch.float64)
    return (fed.targets != NOTHING).sum(1).double().cpu()


def _effect(unit: Unit, before: Tensor, after: Tensor, sizes: Tensor, design: Design, seed: int) -> Effect:
    site, head = unit
    if not bool(after.isfinite().all()):
        return Effect(layer=site.layer, head=head, part=site.part, delta=None)
    delta, low, high = paired_difference(before, after, design, weights=sizes, seed=seed)
    return Effect(layer=site.layer, head=head, part=site.part, delta=delta, ci95=(low, high) if low == low else None)
