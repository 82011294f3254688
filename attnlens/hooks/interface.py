"""Watches attention or replaces its kernel inside `with`: sites are counted, and everything is restored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from dataclasses import replace as changed
from itertools import count
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from attnlens.attention import Route, attend
from attnlens.errors import ModelError
from attnlens.hooks.call import read_call
from attnlens.hooks.implementations import choose, implementation, implementations
from attnlens.kernels import OWN, Kernel
from attnlens.records import Call, Site
from attnlens.tracer import Refused, tracing

NAMES = "attnlens_"
"""How the names begin under which transformers knows attnlens' answers."""

_door_numbers = count()
_answering: WeakSet[nn.Module] = WeakSet()


@contextmanager
def opened(
    model: PreTrainedModel,
    answer: Callable[[Call], Tensor],
    *,
    modules: Collection[nn.Module] | None = None,
    content: Collection[Tensor] | None = None,
    prove: bool = False,
) -> Iterator[Refused]:
    """Every attention computation of `model` is answered by `answer` inside the block; restored at its end.

    Attention that goes through transformers' interface is answered there. Of what modules compute by hand that of
    `modules` is traced, None being all; `content` and `prove` are those of `tracing`. The block's value says which
    could not be read.
    """
    names = _register(f"{NAMES}{next(_door_numbers)}", answer)
    nothing: Refused = {}
    skipped = nullcontext(nothing) if modules is not None and not modules else None
    try:
        with (
            _noted(model),
            implementation(model, *names),
            skipped or tracing(model, answer, modules=modules, content=content, prove=prove) as refused,
        ):
            yield refused
    finally:
        for name in names:
            del AttentionInterface._global_mapping[name]
            del AttentionMaskInterface._global_mapping[name]


def install(model: PreTrainedModel, name: str, answer: Callable[[Call], Tensor]) -> None:
    """Answer every attention computation of `model` by `answer` for good, for a model that owns its attention.

    transformers then knows it by `name`, in this process. Raises ModelError where no part of the model goes through the
    interface.
    """
    choose(model, *_register(name, answer))


def _register(name: str, answer: Callable[[Call], Tensor]) -> tuple[str, str]:
    """The names under which transformers knows `answer`: in the place of its SDPA function, and of its eager one.

    Each has the mask function that goes with what it replaces; without one the mask silently becomes None.
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, None]:
        with torch._C.DisableTorchFunction():  # what answers is not traced
            answered = answer(read_call(module, query, key, value, attention_mask, more))
            # transformers' own functions return contiguous tensors, and some modules rely on it
            return answered.contiguous(), None

    def as_eager(*args: Any, **more: Any) -> tuple[Tensor, None]:
        return attention(*args, **more | {"is_causal": False})  # eager functions mask nothing by themselves

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    AttentionInterface.register(f"{name}_eager", as_eager)
    AttentionMaskInterface.register(f"{name}_eager", eager_mask)
    return name, f"{name}_eager"


@dataclass
class CallCounter:
    """Counts calls while attention is watched or replaced, so that each is known by its site."""

    sites: Mapping[tuple[str, int], Site]
    """The sites to expect, by path and ordinal."""
    names: Mapping[nn.Module, str]
    """Module → dotted path."""
    calls: Counter[str] = field(default_factory=Counter)
    """How often each path was called so far."""

    def site(self, module: nn.Module) -> Site:
        """The site of the module's next call; passes follow each other, so ordinals repeat from 0."""
        path = self.names[module]
        own = self._ordinals(path)
        if not own:
            raise ModelError(
                f"{path} runs on this input, and did not on the one that the sites were found on.",
                "Give inputs of the same kind in both places.",
            )
        self.calls[path] += 1
        return self.sites[path, (self.calls[path] - 1) % own]

    def begin(self, *_: Any) -> None:
        """A pass begins: ordinals are 0 again, also where an exception ended the one before."""
        for path in self.calls:
            self.calls[path] += -self.calls[path] % self._ordinals(path)

    def _ordinals(self, path: str) -> int:
        return sum(known == path for known, _ in self.sites)


@dataclass(frozen=True)
class Replacement:
    """Which kernel takes the place of a site's own, and in which heads."""

    kernel: Kernel
    """The new one; its fitted parameters are those of `heads`, in their order."""
    heads: tuple[int, ...] | None = None
    """Query heads; None means all."""


Swaps = Mapping[Site, Replacement]
"""What is swapped at which sites."""


@contextmanager
def watch(
    model: PreTrainedModel,
    sites: tuple[Site, ...],
    visit: Callable[[Site, Call], None],
    answered: Callable[[Site, Tensor], None] | None = None,
) -> Iterator[CallCounter]:
    """Show every attention computation to `visit` and answer it with the model's own kernel.

    `answered` is shown the answer, (batch, queries, heads, value_dim), as the model goes on with it.
    """

    def answer(site: Site, call: Call) -> Tensor:
        visit(site, call)
        found = attend(call, OWN)
        if answered is not None:
            answered(site, found)
        return found

    with _counted(model, sites, answer) as counter:
        yield counter


@contextmanager
def replace(
    model: PreTrainedModel,
    sites: tuple[Site, ...],
    swaps: Swaps,
    path: Route = "auto",
    *,
    every_site: bool = True,
    visit: Callable[[Site, Call], None] | None = None,
    answered: Callable[[Site, Tensor], None] | None = None,
) -> Iterator[CallCounter]:
    """Answer the sites of `swaps` with their new kernels and the others with the model's own.

    `path` is how the new kernels are computed; `visit` sees what the sites of `swaps` are asked for, and `answered`
    what they answer, (batch, queries, heads, value_dim). Raises UsageError where a kernel can't serve a site, and with
    `every_site` ModelError at the end of the block where one of them was never reached.
    """

    def answer(site: Site, call: Call) -> Tensor:
        if site not in swaps:
            return attend(call, OWN)
        if visit is not None:
            visit(site, call)
        found = swapped(call, swaps[site], path)
        if answered is not None:
            answered(site, found)
        return found

    with _counted(model, sites, answer) as counter:
        yield counter
    missed = [site.name for site in swaps if not counter.calls[site.path]]
    if missed and every_site:
        raise ModelError(
            f"The swap never reached {len(missed)} of {len(swaps)} sites, first {missed[0]}.",
            "Run a forward pass that uses these layers, or leave them out with --layers.",
        )


def swapped(call: Call, swap: Replacement, path: Route = "auto") -> Tensor:
    """The output of one site under a swap: (batch, queries, heads, value_dim)."""
    total = call.query.shape[1]
    if swap.heads is None or swap.heads == tuple(range(total)):
        return attend(call, swap.kernel, path)
    others = [head for head in range(total) if head not in swap.heads]
    parts = attend(call.select(others), OWN), attend(call.select(swap.heads), swap.kernel, path)
    order = torch.tensor([*others, *swap.heads], device=call.query.device).argsort()
    return torch.cat(parts, dim=2)[:, :, order]


@contextmanager
def _counted(
    model: PreTrainedModel, sites: tuple[Site, ...], answer: Callable[[Site, Call], Tensor]
) -> Iterator[CallCounter]:
    by_call = {(site.path, site.ordinal): site for site in sites}
    counter = CallCounter(by_call, {module: name for name, module in model.named_modules()})

    def numbered(call: Call) -> Tensor:
        site = counter.site(cast("nn.Module", call.module))
        return answer(site, changed(call, cross=site.part == "cross"))

    begins = model.register_forward_pre_hook(counter.begin)
    traced = [model.get_submodule(site.path) for site in sites if site.traced]
    try:
        with opened(model, numbered, modules=traced):
            yield counter
    finally:
        begins.remove()


def is_answered(model: PreTrainedModel) -> bool:
    """Whether attnlens answers attention of the model: for a while, or installed for good."""
    return model in _answering or any((name or "").startswith(NAMES) for _, name in implementations(model))


@contextmanager
def _noted(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block the model is known to be answered, also where its configurations name no implementation."""
    first = model not in _answering
    _answering.add(model)
    try:
        yield
    finally:
        if first:
            _answering.discard(model)
