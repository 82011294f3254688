"""Masks of the weights that make queries and keys of the swapped heads, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens import hooks, texts
from attnlens.records import Call, Site


def trainable(
    model: PreTrainedModel, sites: tuple[Site, ...], swaps: hooks.Swaps, inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Masks of the weights (two axes or more) of swapped sites: 1 where an entry moves queries or keys of swapped heads
    and moves neither values nor other heads' queries and keys.

    Read from gradients, so that it holds for every layout: fused, interleaved, shared by several heads or sites.
    """
    short = texts.first(inputs, 1)
    moved: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}

    def visit(site: Site, call: Call) -> None:
        inside = {name: p for name, p in leaves.items() if name.startswith(f"{site.path}.") and p.dim() > 1}
        every = tuple(range(call.query.shape[1]))
        ours, others = _parts(call, (swaps[site].heads or every) if site in swaps else ())
        for store, part in ((moved, ours), (kept, others)):
            for name, gradient in _gradients(part, inside).items():
                store[name] = store.get(name, torch.zeros_like(gradient, dtype=torch.bool)) | (gradient != 0)

    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    with torch.enable_grad(), hooks.watch(model, sites, visit), _detached(model):
        outputs_with(model, leaves, short)
    masks = {name: mask & ~kept.get(name, torch.zeros_like(mask)) for name, mask in moved.items()}
    return {name: mask.float() for name, mask in masks.items() if bool(mask.any())}


@contextmanager
def _detached(model: PreTrainedModel) -> Iterator[None]:
    """Cut gradients at the inputs of attention modules: a weight that several calls share moves the later ones' inputs,
    which is not what it makes.
    """

    def cut(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(_alone, args)), {name: _alone(value) for name, value in kwargs.items()}

    attentions = [module for module in model.modules() if hooks.is_attention(module)]
    handles = [module.register_forward_pre_hook(cut, with_kwargs=True) for module in attentions]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _alone(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _parts(call: Call, chosen: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Queries and keys of the chosen heads, and the tensors that must not move: values, and what other heads use."""
    others = [head for head in range(call.query.shape[1]) if head not in chosen]
    used = sorted({head // call.group for head in chosen})
    elsewhere = sorted({head // call.group for head in others})
    ours = [call.query[:, list(chosen)], call.key[:, used]]
    return ours, [call.value, call.query[:, others], call.key[:, elsewhere]]


def _gradients(parts: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a random combination of the parts by leaf; those that it does not depend on are left out."""
    generator = torch.Generator().manual_seed(0)
    sums = [(part * torch.randn(part.shape, generator=generator).to(part)).sum() for part in parts if part.numel()]
    total = sum((part.float() for part in sums), torch.zeros(()))
    if not leaves or not total.requires_grad:
        return {}
    found = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
    return {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}


def outputs_with(
    model: PreTrainedModel, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor], **more: bool
) -> object:
    """The model's outputs with some of its weights replaced."""
    return torch.func.functional_call(model, dict(values), (), {**inputs, **hooks.without_cache(model), **more})
