"""Numbers that a healing trains: masked weights of the swapped heads, free or of low rank, and kernel parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens import hooks, texts
from attnlens.records import Call, Site
from attnlens.tracer import hooked


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
        torch.func.functional_call(model, leaves, (), {**short, **hooks.without_cache(model)})
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
        alone = [value.detach() if isinstance(value, Tensor) else value for value in (*args, *kwargs.values())]
        return tuple(alone[: len(args)]), dict(zip(kwargs, alone[len(args) :], strict=True))

    attentions = [module for module in model.modules() if hooks.is_attention(module)]
    handles = [module.register_forward_pre_hook(cut, with_kwargs=True) for module in attentions]
    with hooked(handles):
        yield


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


@dataclass
class Trained:
    """A number that is trained: a part of a weight, or a kernel's parameter; its change is kept in float32.

    Steps below the spacing of bfloat16 or float16 are lost in the weight itself, and add up in its change.
    """

    start: Tensor
    """Its value before."""
    change: Tensor
    """What is added to it, float32 and a leaf."""
    mask: Tensor | None = None
    """1 where a weight belongs to W_Q or W_K of the swapped heads, or how long its steps are; None: 1 everywhere."""
    rows: Tensor | None = None
    """Which row of `start` each head has, where several have one in common; None: each has its own."""

    @classmethod
    def of(cls, start: Tensor, mask: Tensor | None = None, copies: Tensor | None = None) -> Trained:
        """A free change, 0 at first; heads of equal numbers in `copies` have one in common."""
        if copies is not None:
            first = [int((copies == number).nonzero()[0]) for number in range(int(copies.max()) + 1)]
            start, mask = start[first], None if mask is None else mask[first]
        return cls(start, torch.zeros_like(start, dtype=torch.float32, requires_grad=True), mask, copies)

    @property
    def added(self) -> Tensor:
        """What is added to it, in float32."""
        return self.change if self.mask is None else self.change * self.mask

    @property
    def value(self) -> Tensor:
        """Its value now, head by head."""
        found = (self.start.float() + self.added).to(self.start.dtype)
        return found if self.rows is None else found[self.rows]

    @property
    def leaves(self) -> list[Tensor]:
        """What the optimiser changes."""
        return [self.change]

    @property
    def count(self) -> int:
        """How many numbers are trained."""
        return self.change.numel() if self.mask is None else int((self.mask != 0).sum())


@dataclass
class LowRankChange(Trained):
    """A weight W + mask ∘ (U Vᵀ), U and V of R columns (Hu et al. 2022, Eq. 3, with the scale in the learning rate)."""

    right: Tensor = field(default_factory=lambda: torch.zeros(()))
    """V; `change` is U, 0 at first, so that the weight begins as it is."""

    @classmethod
    def of_rank(cls, start: Tensor, mask: Tensor, rank: int, seed: int) -> LowRankChange:
        """A change of rank R, V drawn from N(0, 1/R) by `seed`."""
        rows, columns = start.flatten(1).shape
        drawn = torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed)) * rank**-0.5
        left = torch.zeros(rows, rank, device=start.device, requires_grad=True)
        return cls(start, left, mask, None, drawn.to(start.device).requires_grad_())

    @property
    def added(self) -> Tensor:
        """mask ∘ (U Vᵀ)."""
        assert self.mask is not None  # noqa: S101  # only weights have a low rank
        return (self.change @ self.right.mT).view_as(self.mask) * self.mask

    @property
    def leaves(self) -> list[Tensor]:
        """U and V."""
        return [self.change, self.right]

    @property
    def count(self) -> int:
        """Numbers of U's and V's rows that reach any entry of the mask."""
        assert self.mask is not None  # noqa: S101
        seen = self.mask.flatten(1) != 0
        return int(seen.any(1).sum() + seen.any(0).sum()) * self.change.shape[1]


def seed_of(seed: int, name: str) -> int:
    """A seed for one weight: `seed` and its name, hashed, so that no two weights of one shape draw the same V."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")


@contextmanager
def changed_weights(model: PreTrainedModel, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the block the model has these weights; its own are put back at the end."""
    named = dict(model.named_parameters())
    before = {name: named[name].detach().clone() for name in values}
    try:
        with torch.no_grad():
            for name, value in values.items():
                named[name].copy_(value)
        yield
    finally:
        with torch.no_grad():
            for name, own in before.items():
                named[name].copy_(own)


@contextmanager
def standing_in(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the block these tensors, with their gradients, stand in the place of the model's parameters.

    As torch.func.functional_call does for one call; a block that is computed again on the way back meets them too.
    """
    named = dict(model.named_parameters())
    stands = {id(named[name]): value for name, value in values.items()}
    before: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, own in list(module._parameters.items()):
                if own is not None and id(own) in stands:
                    before.append((module._parameters, name, own))
                    module._parameters[name] = stands[id(own)]  # type: ignore[assignment]  # as torch does itself
        yield
    finally:
        for parameters, name, own in before:
            parameters[name] = own
