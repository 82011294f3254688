"""Sensitivity of the loss to each direction of a latent's logits, from gradients and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens import texts
from attnlens.attention import attend
from attnlens.kernels import Kernel, parsed
from attnlens.models import Loaded
from attnlens.records import Call, Site, Task
from attnlens.run.progress import Tell
from attnlens.run.swap.ranks.bases import ANY, Basis
from attnlens.run.swap.ranks.gradients import sampled
from attnlens.texts.targets import Fed

if TYPE_CHECKING:
    from jaxtyping import Float


LEVELS = 16
"""Ranks whose loss is estimated, evenly spaced from 0 to head_dim; the others lie on the lines between them."""


def sensitivities(
    loaded: Loaded,
    sites: tuple[Site, ...],
    found: Mapping[Site, Basis],
    batches: Sequence[Fed],
    task: Task,
    seed: int,
    progress: Tell,
) -> dict[Site, Float[Tensor, "latents ranks"]]:
    """The rise of the loss in nats per prediction where that latent alone keeps 0 … all of its numbers.

    The output of query i changes by δo_i, computed through the softmax, and the loss by ⟨g_i, δo_i⟩, g_i = ∂loss/∂o_i.
    With targets drawn from the model's own predictions that has mean 0 and its second moment is the Fisher information
    (Martens 2020, Eq. 7), so that the rise is ½ Σ_i ⟨g_i, δo_i⟩², queries and heads taken as independent. A gradient
    of the logits would say 0 for a saturated head, which loses everything once the logits that saturate it are cut.
    Raises ModelError where the loss has no gradient.
    """
    totals = {site: torch.zeros(len(basis.sizes), max(basis.sizes) + 1) for site, basis in found.items()}
    generator, count, kernel = torch.Generator().manual_seed(seed), 0, parsed(ANY)
    for fed in batches:
        calls, outputs, loss, drawn = sampled(loaded, sites, found, fed, task, generator)
        gradients = torch.autograd.grad(loss, list(outputs.values()), allow_unused=True)
        count += drawn
        for (site, output), gradient in zip(outputs.items(), gradients, strict=True):
            if gradient is not None:
                with torch.no_grad():
                    totals[site] = totals[site] + _risen(found[site], kernel, calls[site], output, gradient).cpu()
        progress(texts.sequences_in(fed.inputs))
    return {site: _between(total / (2 * count), found[site].sizes) for site, total in totals.items()}


def levels(size: int) -> list[int]:
    """The ranks whose loss is estimated, all of them among them."""
    return [*range(0, size, -(-size // LEVELS)), size]


def _risen(
    basis: Basis,
    kernel: Kernel,
    call: Call,
    output: Float[Tensor, "batch queries all_heads value_dim"],
    gradient: Float[Tensor, "batch queries all_heads value_dim"],
) -> Float[Tensor, "latents ranks"]:
    """Σ_i ⟨g_i, δo_i⟩² at every level of rank, summed over the heads of each latent; 0 at the other ranks."""
    heads, sizes = list(basis.heads), basis.sizes
    own, slope, part = output[:, :, heads], gradient[:, :, heads].double(), call.select(heads)
    found = torch.zeros(len(sizes), max(sizes) + 1, dtype=torch.float64)
    latent_of = torch.tensor(basis.latent_of)
    for step in range(len(levels(max(sizes))) - 1):
        ranks = [(levels(size) + [size] * LEVELS)[step] for size in sizes]
        change = (slope * (attend(part, kernel.with_fitted(basis.maps(ranks))) - own)).sum(-1)
        each = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, latent_of, change.square().sum((0, 1)).cpu())
        for latent, (rank, size) in enumerate(zip(ranks, sizes, strict=True)):
            if rank < size:
                found[latent, rank] = each[latent]
    return found


def _between(costs: Float[Tensor, "latents ranks"], sizes: Sequence[int]) -> Float[Tensor, "latents ranks"]:
    """The ranks between two levels on the line that joins those; ∞ beyond all of a latent's numbers."""
    for row, size in zip(costs, sizes, strict=True):
        row[size + 1 :] = torch.inf
        for low, high in pairwise(levels(size)):
            share = torch.arange(high - low, dtype=costs.dtype) / (high - low)
            row[low:high] = row[low] + (row[high] - row[low]) * share
    return costs
