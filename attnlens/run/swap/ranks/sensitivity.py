"""Sensitivity of the loss to each direction of a key head's logits, from gradients and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnlens import hooks, texts
from attnlens.attention import attend
from attnlens.errors import ModelError, UsageError
from attnlens.hooks.padding import unpadded
from attnlens.kernels.lowrank import MapsFit, directions
from attnlens.models import Loaded
from attnlens.records import Call, Site, Task
from attnlens.run.outcomes.outputs import predictions
from attnlens.run.progress import Tell
from attnlens.texts.targets import Fed

if TYPE_CHECKING:
    from jaxtyping import Float


LEVELS = 16
"""Ranks whose loss is estimated, evenly spaced from 0 to head_dim; the others lie on the lines between them."""


@dataclass(frozen=True)
class Basis:
    """The directions of one site's logits, the leading ones first; query heads that share a key head share them.

    Were they not shared, each query head would need a key of its own, and a cached token would grow instead of shrink.
    """

    heads: tuple[int, ...]
    """The query heads swapped, those of one key head side by side."""
    kv_heads: tuple[int, ...]
    """Their key heads."""
    query_map: Float[Tensor, "kv_heads head_dim directions"]
    """A of C_q^½ C_k^½ = UΣVᵀ, C_q summed over the query heads of a key head (kernels/lowrank.py)."""
    key_map: Float[Tensor, "kv_heads head_dim directions"]
    """B."""

    @property
    def head_dim(self) -> int:
        """How many directions there are."""
        return self.key_map.shape[-1]

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return len(self.heads) // len(self.kv_heads)

    def maps(self, ranks: Sequence[int]) -> dict[str, Tensor]:
        """`query_map` and `key_map` of the swapped query heads, rank by key head.

        They are as wide as the largest rank, with zeros beyond a head's own; the identity where a head keeps all.
        """
        width, size = max(1, *ranks), self.head_dim
        kept = torch.arange(size, device=self.key_map.device) < torch.tensor(ranks, device=self.key_map.device)[:, None]
        whole = torch.tensor([rank >= size for rank in ranks], device=self.key_map.device)[:, None, None]
        found = {}
        for name, part in (("query_map", self.query_map), ("key_map", self.key_map)):
            cut = torch.where(whole, torch.eye(size).to(part), part * kept[:, None])
            found[name] = cut[..., :width].repeat_interleave(self.group, 0)
        return found


def bases(
    loaded: Loaded, sites: tuple[Site, ...], swaps: hooks.Swaps, batches: Sequence[Fed], progress: Tell
) -> dict[Site, Basis]:
    """The directions of every swapped site, in one pass of the original model.

    Raises UsageError where some, but not all of the query heads that share a key head are swapped.
    """
    fits: dict[Site, MapsFit] = {}
    shared: dict[Site, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def visit(site: Site, call: Call) -> None:
        if site not in swaps:
            return
        heads = tuple(sorted(swaps[site].heads or range(call.query.shape[1])))
        shared[site] = heads, _whole_groups(site, heads, call.group)
        for part in unpadded(call.select(heads), site, fed.inputs):
            fits.setdefault(site, MapsFit(part.query.shape[-1])).update(part)

    with torch.no_grad(), hooks.watch(loaded.model, sites, visit):
        for fed in batches:
            hooks.forward(loaded.model, fed.inputs)
            progress(texts.sequences_in(fed.inputs))
    found = {}
    for site, (heads, kv_heads) in shared.items():
        grams = (
            gram.reshape(len(kv_heads), -1, *gram.shape[1:]).sum(1) for gram in (fits[site].queries, fits[site].keys)
        )
        found[site] = Basis(heads, kv_heads, *directions(*grams))
    return found


def _whole_groups(site: Site, heads: tuple[int, ...], group: int) -> tuple[int, ...]:
    """The key heads of these query heads."""
    kv_heads = tuple(sorted({head // group for head in heads}))
    every = [head for kv_head in kv_heads for head in range(kv_head * group, (kv_head + 1) * group)]
    if list(heads) != every:
        raise UsageError(
            f"At {site.name} the heads {', '.join(map(str, every))} share key heads, and not all of them are chosen.",
            "A key shrinks for all of its query heads or for none: choose whole groups with --heads.",
        )
    return kv_heads


def sensitivities(
    loaded: Loaded,
    sites: tuple[Site, ...],
    found: Mapping[Site, Basis],
    batches: Sequence[Fed],
    task: Task,
    seed: int,
    progress: Tell,
) -> dict[Site, Float[Tensor, "kv_heads ranks"]]:
    """The rise of the loss in nats per prediction where that head alone keeps 0 … head_dim directions.

    The output of query i changes by δo_i, computed through the softmax, and the loss by ⟨g_i, δo_i⟩, g_i = ∂loss/∂o_i.
    With targets drawn from the model's own predictions that has mean 0 and its second moment is the Fisher information
    (Martens 2020, Eq. 7), so that the rise is ½ Σ_i ⟨g_i, δo_i⟩², queries and heads taken as independent. A gradient
    of the logits would say 0 for a saturated head, which loses everything once the logits that saturate it are cut.
    Raises ModelError where the loss has no gradient.
    """
    totals = {site: torch.zeros(len(basis.kv_heads), basis.head_dim + 1) for site, basis in found.items()}
    generator, count = torch.Generator().manual_seed(seed), 0
    for fed in batches:
        calls, outputs, loss, drawn = _sampled(loaded, sites, found, fed, task, generator)
        gradients = torch.autograd.grad(loss, list(outputs.values()), allow_unused=True)
        count += drawn
        for (site, output), gradient in zip(outputs.items(), gradients, strict=True):
            if gradient is not None:
                with torch.no_grad():
                    totals[site] = totals[site] + _risen(found[site], calls[site], output, gradient).cpu()
        progress(texts.sequences_in(fed.inputs))
    return {site: _between(total / (2 * count)) for site, total in totals.items()}


def _sampled(
    loaded: Loaded,
    sites: tuple[Site, ...],
    found: Mapping[Site, Basis],
    fed: Fed,
    task: Task,
    generator: torch.Generator,
) -> tuple[dict[Site, Call], dict[Site, Tensor], Tensor, int]:
    """Calls, their outputs in the graph, the summed loss of targets that the model itself draws, how many those are."""
    calls: dict[Site, Call] = {}
    outputs: dict[Site, Tensor] = {}

    with (
        torch.enable_grad(),
        _differentiable(loaded.model),
        hooks.watch(loaded.model, sites, calls.__setitem__, outputs.__setitem__),
    ):
        logits = predictions(hooks.forward(loaded.model, fed.inputs), fed, task)
        if logits is None or not logits.requires_grad:
            raise ModelError("This model's loss has no gradient.", "Give ranks by hand, as in --kernel rank:32.")
        drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0].to(logits.device)
        loss = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
        return calls, {site: outputs[site] for site in found if site in outputs}, loss, len(drawn)


def levels(head_dim: int) -> list[int]:
    """The ranks whose loss is estimated, head_dim among them."""
    return [*range(0, head_dim, -(-head_dim // LEVELS)), head_dim]


def _risen(
    basis: Basis,
    call: Call,
    output: Float[Tensor, "batch queries all_heads value_dim"],
    gradient: Float[Tensor, "batch queries all_heads value_dim"],
) -> Float[Tensor, "kv_heads ranks"]:
    """Σ_i ⟨g_i, δo_i⟩² at every level of rank; 0 at the others."""
    heads, kv_heads = list(basis.heads), len(basis.kv_heads)
    own, slope = output[:, :, heads], gradient[:, :, heads].double()
    part, found = call.select(heads), torch.zeros(kv_heads, basis.head_dim + 1, dtype=torch.float64)
    low_query, low_key = (
        tensor.double() @ side.repeat_interleave(basis.group, 0)
        for tensor, side in ((part.query, basis.query_map), (part.key, basis.key_map))
    )
    for rank in levels(basis.head_dim)[:-1]:
        # no direction at all: one of zeros, as in the swap
        query, key = (low[..., : max(1, rank)] * (rank > 0) for low in (low_query, low_key))
        cut = replace(part, query=query.to(own), key=key.to(own))
        change = (slope * (attend(cut, hooks.OWN) - own)).sum(-1)
        found[:, rank] = change.square().sum((0, 1)).reshape(kv_heads, -1).sum(-1).cpu()
    return found


def _between(costs: Float[Tensor, "kv_heads ranks"]) -> Float[Tensor, "kv_heads ranks"]:
    """The ranks between two levels on the line that joins those."""
    known = levels(costs.shape[-1] - 1)
    for low, high in pairwise(known):
        share = torch.arange(high - low, dtype=costs.dtype) / (high - low)
        costs[:, low:high] = costs[:, [low]] + (costs[:, [high]] - costs[:, [low]]) * share
    return costs


@contextmanager
def _differentiable(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block every weight asks for gradients, so that what comes of it has some."""
    before = [(weight, weight.requires_grad) for weight in model.parameters() if weight.is_floating_point()]
    try:
        for weight, _ in before:
            weight.requires_grad_(True)
        yield
    finally:
        for weight, own in before:
            weight.requires_grad_(own)
