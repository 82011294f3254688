"""How much does the loss rise when a key head's logits lose directions? For every rank at once, from gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnlens import hooks
from attnlens.errors import ModelError, UsageError
from attnlens.kernels.lowrank import MapsFit, directions
from attnlens.models import Loaded
from attnlens.records import Call, Site, Task
from attnlens.run.compare import predictions
from attnlens.run.tasks import Fed

if TYPE_CHECKING:
    from jaxtyping import Float


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

    def shared(self, tensor: Float[Tensor, "batch all_heads tokens head_dim"]) -> Float[Tensor, "batch kv rows dim"]:
        """The swapped query heads' rows, those of one key head below each other."""
        chosen = tensor[:, list(self.heads)].detach().double()
        batch, _, tokens, width = chosen.shape
        return chosen.reshape(batch, len(self.kv_heads), self.group * tokens, width)

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
    loaded: Loaded,
    sites: tuple[Site, ...],
    swaps: Mapping[Site, hooks.Swap],
    batches: Sequence[Fed],
    progress: Callable[[int], None],
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
        part = call.select(heads)
        fits.setdefault(site, MapsFit(part.query.shape[-1])).update(part.query, part.key, part.scale, part.visible())

    with torch.no_grad(), hooks.watch(loaded.model, sites, visit):
        for fed in batches:
            hooks.forward(loaded.model, fed.inputs)
            progress(next(iter(fed.inputs.values())).shape[0])
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
    progress: Callable[[int], None],
) -> dict[Site, Float[Tensor, "kv_heads ranks"]]:
    """The rise of the loss in nats per prediction, second order, where that head alone keeps 0 … head_dim directions.

    Without the directions l > r the logits of query i change by −⟨q_i, Σ_l a_l b_lᵀ k_j⟩, and the loss by −Σ_l x_il,
    x_il = ⟨q_i, a_l⟩⟨b_l, g_i⟩, g_i = ∂loss/∂q_i, since ∂loss/∂⟨q_i, k_j⟩ summed over the keys is g_i. With targets
    drawn from the model's own predictions the gradient has mean 0 and its second moment is the Fisher information
    (Martens 2020, Eq. 7), so that the rise is ½ Σ_i (Σ_{l>r} x_il)², queries taken as independent. Raises ModelError
    where the loss has no gradient.
    """
    totals = {site: torch.zeros(len(basis.kv_heads), basis.head_dim + 1) for site, basis in found.items()}
    generator, count = torch.Generator().manual_seed(seed), 0
    for fed in batches:
        queries, loss, drawn = _sampled(loaded, sites, found, fed, task, generator)
        gradients = torch.autograd.grad(loss, list(queries.values()), allow_unused=True)
        count += drawn
        for (site, query), gradient in zip(queries.items(), gradients, strict=True):
            if gradient is not None:
                totals[site] = totals[site] + _risen(found[site], query, gradient).cpu()
        progress(next(iter(fed.inputs.values())).shape[0])
    return {site: total / (2 * count) for site, total in totals.items()}


def _sampled(
    loaded: Loaded,
    sites: tuple[Site, ...],
    found: Mapping[Site, Basis],
    fed: Fed,
    task: Task,
    generator: torch.Generator,
) -> tuple[dict[Site, Tensor], Tensor, int]:
    """Queries in the graph, the summed loss of targets that the model itself draws, and how many those are."""
    queries: dict[Site, Tensor] = {}

    def visit(site: Site, call: Call) -> None:
        if site in found:
            queries[site] = call.query

    with torch.enable_grad(), _differentiable(loaded.model), hooks.watch(loaded.model, sites, visit):
        logits = predictions(hooks.forward(loaded.model, fed.inputs), fed, task)
        if logits is None or not logits.requires_grad:
            raise ModelError("This model's loss has no gradient.", "Give ranks by hand, as in --kernel rank:32.")
        drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0].to(logits.device)
        return queries, torch.nn.functional.cross_entropy(logits, drawn, reduction="sum"), len(drawn)


def _risen(basis: Basis, query: Tensor, gradient: Tensor) -> Float[Tensor, "kv_heads ranks"]:
    """Σ_i (Σ_{l>r} x_il)² for r = 0 … head_dim."""
    parts = (basis.shared(query) @ basis.query_map) * (basis.shared(gradient) @ basis.key_map)
    lost = parts.flip(-1).cumsum(-1).flip(-1).square().sum((0, 2))
    return torch.cat([lost, torch.zeros_like(lost[:, :1])], -1)


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
