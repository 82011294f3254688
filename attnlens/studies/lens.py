"""What a model's heads look like while it is trained: medians over heads of inspect's measures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from attnlens import hooks, registry
from attnlens.analyzers.selection.gatherer import Selector
from attnlens.attention import attend
from attnlens.attsvm.head import Nearness
from attnlens.choices import Part
from attnlens.kernel_transformers import KernelTransformer
from attnlens.kernel_transformers.attention import KernelAttention
from attnlens.records import Call, QueryKey, Site
from attnlens.studies.tasks import Examples

if TYPE_CHECKING:
    from torch import Tensor

MEASURES = (
    *("weights.symmetry", "weights.positivity", "weights.effective_rank"),
    *("tokens.share_skew", "tokens.share_positive", "tokens.entropy", "tokens.max_weight", "tokens.effective_rank"),
)
"""Symmetry, definiteness, spectrum and how peaked rows are: of W_Q W_Kᵀ, and of log k on held-out sequences."""
DECIDED, COSINE = "selection.decided", "selection.projected_svm_cosine"
"""Selection: the share of decided queries, and the cosine between a head and the SVM of its own choices."""
SEQUENCES = 8
"""That tokens.* are read on."""


def medians(model: KernelTransformer, batch: Examples) -> dict[str, float]:
    """The median over all heads of each measure that has a value there; of a causal head shares have none.

    tokens.* are those of `inspect` with log k of the model's own kernel in the place of s⟨q, k⟩, so that they say what
    its attention does, in the mean over held-out sequences; weights.* are of s W_Q W_Kᵀ, whatever the kernel. A kernel
    that can be negative has no log k: of it weights.* alone are told, as of primal layers nothing is. The SVM of the
    selection is that on queries and keys, of kernels that are functions of products alone and without a position bias.
    """
    sequences = [batch.single(row) for row in range(min(SEQUENCES, len(batch.inputs)))]
    tokens = [_tokens(model, one) for one in sequences]
    read = [_readings(_weights(model)), _selection(model, tokens), *(_readings(one) for one in tokens)]
    found: dict[str, list[Tensor]] = {}
    for readings in read:
        for name, value in readings.items():
            found.setdefault(name, []).append(value)
    heads = {name: torch.stack(values).nanmean(0) for name, values in found.items()}
    return {name: float(value.nanmedian()) for name, value in heads.items() if not bool(value.isnan().all())}


def _readings(query_keys: Iterable[QueryKey]) -> dict[str, Tensor]:
    """Each measure of all heads, one after another."""
    found: dict[str, list[Tensor]] = {}
    for query_key in query_keys:
        for analyzer in registry.analyzers(("symmetry", "spectrum"), query_key.source):
            if isinstance(analyzer, registry.Analyzer):
                for name, value in analyzer.function(query_key).items():
                    if name in MEASURES:
                        found.setdefault(name, []).append(value.double().reshape(-1))
    return {name: torch.cat(values) for name, values in found.items()}


def _selection(model: KernelTransformer, tokens: Sequence[Sequence[QueryKey]]) -> dict[str, Tensor]:
    """How selection stands, of all heads of all modules, over all sequences."""
    decided: list[float] = []
    cosines: list[float] = []
    for module, *queries in zip(_modules(model), *tokens, strict=True) if any(tokens) else ():
        selector = Selector(registry.GatheringPlace(queries[0].site))
        for number, query_key in enumerate(queries):
            selector.update(query_key, number)
        decided += [sum(shares.values()) / len(shares) for shares in selector.shares.values()]
        posed = selector.kept and module.kernel.tie is None and module.kernel.info.dot is not None
        found = [selector.nearness(head) for head in selector.shares] if posed else []
        cosines += [one.svm_cosine if isinstance(one, Nearness) else math.nan for one in found]
    return {name: torch.tensor(values) for name, values in ((DECIDED, decided), (COSINE, cosines)) if values}


def _weights(model: KernelTransformer) -> Iterator[QueryKey]:
    """s W_Q W_Kᵀ of every module with a kernel, in float64."""
    for layer, module in enumerate(_modules(model)):
        query, key = (_of_heads(part.weight, module.heads) for part in (module.query, module.key or module.query))
        yield QueryKey(
            query=query,
            key=key,
            scale=query.shape[-1] ** -0.5,
            source="weights",
            site=Site(f"layer {layer}", 0, layer, module.part),
            heads=tuple(range(module.heads)),
            key_of=tuple(range(module.heads)),
        )


def _of_heads(weight: Tensor, heads: int) -> Tensor:
    """(outputs, inputs) of a linear map → (heads, inputs, head_dim)."""
    size = weight.shape[0] // heads
    return weight.detach().cpu().double().mT.reshape(-1, heads, size).transpose(0, 1)


def _tokens(model: KernelTransformer, batch: Examples) -> list[QueryKey]:
    """log k of every module on one sequence."""
    if any(module.kernel.signed for module in _modules(model)):
        return []
    few = batch.to(next(model.parameters()).device)
    calls: list[Call] = []

    def answer(call: Call) -> Tensor:
        calls.append(call)
        return attend(call, hooks.OWN)

    model.train(False)
    with torch.no_grad(), hooks.opened(model, answer, modules=()):
        model.core(few.inputs, few.kept, few.given)
    return [call.query_key(Site(f"layer {at}", 0, at, _part(call))) for at, call in enumerate(calls)]


def _modules(model: KernelTransformer) -> list[KernelAttention]:
    return [module for module in model.attentions() if module.primal is None]


def _part(call: Call) -> Part:
    assert isinstance(call.module, KernelAttention)  # noqa: S101  # no other module asks
    return call.module.part
