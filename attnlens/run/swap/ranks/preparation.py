"""What a fit of ranks reads of the model itself: the rotation of keys, and what a head's output does to predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens import hooks, texts, weights
from attnlens.errors import UnreadableError, UsageError
from attnlens.kernels.lowrank import MapsFit
from attnlens.kernels.shared_keys import Turn
from attnlens.models import Loaded
from attnlens.records import Rotation, Site, Task
from attnlens.run.swap.ranks.gradients import sampled
from attnlens.texts.targets import Fed

if TYPE_CHECKING:
    from jaxtyping import Float

WINDOW = 64
"""Positions from which frequencies are told."""
SEQUENCES = 16
"""Sequences of a text whose gradients make the output metric, at most."""


def give_rotations(loaded: Loaded, swaps: hooks.Swaps, fits: Iterable[tuple[Site, MapsFit]]) -> None:
    """Give each fit of keys before the rotation how they are turned back.

    Raises UsageError at a site whose keys are not rotated by distance, or whose attention is not told the positions.
    """
    before = [(site, fit) for site, fit in fits if fit.before]
    found = turns(loaded, list(swaps)) if before else {}
    for site, fit in before:
        turn = found[site]
        if isinstance(turn, str):
            raise UsageError(
                f"{site.name} has no keys before a rotation: {turn}.", "Leave out rotation=before, or such layers."
            )
        fit.turn = turn


def give_metrics(
    loaded: Loaded,
    sites: tuple[Site, ...],
    swaps: hooks.Swaps,
    fits: Iterable[tuple[Site, MapsFit]],
    fed: Sequence[Fed],
    task: Task,
    seed: int,
) -> None:
    """Give each fit that weighs pairs by the output the metric of these batches, which should be what it reads.

    Raises UsageError for a model without predictions, ModelError where the loss has no gradient.
    """
    by_output = [(site, fit) for site, fit in fits if fit.by_output]
    if not by_output:
        return
    if task == "hidden":
        raise UsageError(
            "metric=output weighs pairs by what they do to predictions, and this model makes no predictions.",
            "Leave out metric=output.",
        )
    metrics = output_metrics(loaded, sites, _first(fed, SEQUENCES), task, seed)
    for site, fit in by_output:
        heads = swaps[site].heads
        fit.output = metrics[site] if heads is None else metrics[site][list(heads)]


def _first(fed: Sequence[Fed], sequences: int) -> Iterator[Fed]:
    """The first `sequences` of these batches, whatever their size."""
    for one in fed:
        count = texts.sequences_in(one.inputs)
        if sequences <= 0:
            return
        yield one if count <= sequences else one.rows(0, sequences)
        sequences -= count


def turns(loaded: Loaded, sites: Sequence[Site]) -> dict[Site, Turn | str]:
    """The rotation of each site's keys by frequencies, or why there is none that could be taken back."""
    inputs = texts.placeholder(loaded, WINDOW, 0).batches[0].inputs
    reached = [found for found in hooks.survey(loaded.model, inputs) if found.site in sites]
    told = {found.site: found.call.places is not None for found in reached}
    found = dict(zip([one.site for one in reached], weights.rotations(loaded.model, reached), strict=True))
    return {site: _turn(found[site]) if told[site] else NOT_TOLD for site in sites}


NOT_TOLD = "the model does not tell its attention the positions of the tokens"


def _turn(found: Rotation | UnreadableError | None) -> Turn | str:
    if isinstance(found, UnreadableError):
        return found.problem
    if found is None:
        return "its keys are not rotated"
    if not found.by_distance:
        return "its rotation is not one of distances"
    angles = weights.frequencies(found)
    frequency, partner = angles.new_zeros(found.size), torch.arange(found.size)
    first, second = found.pairs.unbind(-1)
    frequency[first], frequency[second] = -angles, angles
    partner[first], partner[second] = second, first
    return Turn(frequency, partner)


def output_metrics(
    loaded: Loaded, sites: tuple[Site, ...], fed: Iterable[Fed], task: Task, seed: int
) -> dict[Site, Float[Tensor, "heads value_dim value_dim"]]:
    """E[g gᵀ] of each head, g = ∂loss/∂o with targets that the model itself draws: W_Oᵀ F W_O of its output o.

    F is the Fisher information of the predictions at the residual stream (Martens 2020, Eq. 7); with F = 1 a head's
    metric is W_OᵀW_O.
    """
    totals: dict[Site, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for one in fed:
        drawn = sampled(loaded, sites, sites, one, task, generator)
        gradients = torch.autograd.grad(drawn.loss, list(drawn.outputs.values()), allow_unused=True)
        for (site, output), gradient in zip(drawn.outputs.items(), gradients, strict=True):
            slope = torch.zeros_like(output) if gradient is None else gradient
            moment = torch.einsum("bqhv,bqhw->hvw", slope.double(), slope.double())
            totals[site] = totals.get(site, torch.zeros_like(moment)) + moment
    return totals
