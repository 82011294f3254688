"""Watches attention or replaces its kernel inside `with`: sites are counted, and everything is restored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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

from attnlens.errors import ModelError
from attnlens.kernels import OWN, Kernel
from attnlens.kernels.attention import Route, attend
from attnlens.kernels.attention.rows import split_mask
from attnlens.models.trace import Refused, tracing
from attnlens.records import Call, Site

IN_REACH = "BERT, GPT-2, Llama, Mistral, Qwen, Gemma, Phi, T5, BART, Whisper, ViT, CLIP and most newer families"
"""Whose attention goes through transformers' interface."""
PIECES = ("Output", "Projection", "Structure", "Bias", "MLP", "Norm", "Residual")
"""What the names of modules beside attention end in."""


@contextmanager
def implementation(model: PreTrainedModel, name: str, in_place_of_eager: str | None = None) -> Iterator[None]:
    """Inside the block the model uses the attention implementation `name`; every configuration is restored at its end.

    Those parts whose own implementation is the eager one use `in_place_of_eager`, if it is given; a part that computes
    its attention by hand has no other.
    """
    before = implementations(model)
    try:
        if _parts(model):
            choose(model, name, in_place_of_eager or name)
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own


def choose(model: PreTrainedModel, name: str, in_place_of_eager: str) -> None:
    """Set the implementation of every part that goes through the interface; the model's own class need not."""
    if not (parts := _parts(model)):
        raise out_of_reach(model)
    before = implementations(model)
    for part in parts[:1] if parts[0] is model else parts:
        part.set_attn_implementation(name)
    for config, own in before:
        if own == "eager" and config._attn_implementation_internal == name:
            config._attn_implementation_internal = in_place_of_eager


def _parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Of the model and the models inside it, those whose attention goes through the interface."""
    inside = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part for part in inside if part._can_set_attn_implementation()]


def configs_of(model: PreTrainedModel) -> list[Any]:
    """Every configuration in use, each once."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    nested = [getattr(config, name, None) for config in configs for name in getattr(config, "sub_configs", {})]
    return list({id(config): config for config in [*configs, *nested] if config is not None}.values())


def implementations(model: PreTrainedModel) -> list[tuple[Any, str | None]]:
    """Every configuration that carries the name of an attention implementation, with that name."""
    named = [config for config in configs_of(model) if hasattr(config, "_attn_implementation")]
    return [(config, config._attn_implementation_internal) for config in named]


def out_of_reach(
    model: PreTrainedModel, refused: Mapping[str, str] | None = None, ran: Iterable[nn.Module] | None = None
) -> ModelError:
    """The error for a model none of whose attention is read: it has none, ran none, or computes it in another way.

    `refused` says by module what was found and why it can't be read; `ran` are the modules of a pass.
    """
    name = type(model).__name__
    if refused:
        path, reason = next(iter(refused.items()))
        return ModelError(f"{name} can't be read: at {path}, {reason}.", f"Choose another model: {IN_REACH}.")
    if not any(is_attention(module) for module in model.modules()):
        return ModelError(f"{name} has no softmax attention that attnlens can reach.", f"Choose another: {IN_REACH}.")
    if ran is not None and not any(map(is_attention, ran)):
        return ModelError(
            f"{name} runs none of its attention on this input.", "Give an input in which it finds something to attend."
        )
    return ModelError(
        f"{name} computes its attention by hand, without a softmax of queries times keys that sums up values.",
        f"Choose a model with softmax attention: {IN_REACH}.",
    )


def is_attention(module: nn.Module) -> bool:
    """Whether a module's class calls itself attention, and no piece beside it."""
    name = type(module).__name__
    return "Attention" in name and not name.endswith(PIECES)


def read_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, more: dict[str, Any]
) -> Call:
    """The arguments of transformers' attention functions in one vocabulary.

    Raises ModelError for one that changes the scores and is not known here.
    """
    scaling = more.get("scaling")
    if more.get("sinks") is not None:
        raise ModelError(
            f"{type(module).__name__} gives every query a sink of its own, which attnlens can't compute yet.",
            "Choose another model; one sink for each head is supported.",
        )
    if isinstance(scaling, complex):  # the root of a negative number in a config
        raise ModelError(f"{type(module).__name__} multiplies its scores by {scaling:.3g}.", "Mend its config.json.")
    heads = max(key.shape[1], value.shape[1])  # one of them may be shared by more queries than the other
    if key.shape[1] != value.shape[1]:
        key, value = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (key, value))
    if mask is not None:  # one row may stand for all queries (LightGlue)
        mask = mask[..., : key.shape[2]].expand(*mask.shape[:-2], query.shape[2], -1)
    allowed, added = split_mask(mask)
    bias = more.get("position_bias")
    if bias is not None and added is not None:
        bias = bias + added
    places, own = more.get("position_ids"), more.get("is_causal")
    call = Call(
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        allowed=allowed,
        # transformers' own rule for a missing mask (its SDPA function)
        causal=mask is None and query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if own is None else own),
        bias=added if bias is None else bias,
        softcap=more.get("softcap"),
        sinks=more.get("s_aux"),
        dropout=(more.get("dropout") or 0.0) if module.training else 0.0,
        module=module,
        places=places if isinstance(places, Tensor) and places.shape[1:] == query.shape[2:3] else None,
    )
    return _narrowed(call, more)


def _narrowed(call: Call, more: dict[str, Any]) -> Call:
    """The call with those keys alone visible that a sparse model's indexer chose for each query, where it has one.

    Modules put them into the mask that they give to transformers' own functions; others get the numbers of the keys, or
    of blocks of keys (MiniMax-M3).
    """
    indices, blocks = more.get("indices"), more.get("block_indices")
    if indices is None and blocks is None:
        return call
    query, keys = call.query, call.key.shape[2]
    chosen = query.new_zeros(query.shape[0], 1, query.shape[2], keys, dtype=torch.bool)
    if indices is not None:
        chosen = chosen.scatter(-1, indices.long()[:, None], True)
    else:
        indexer = cast("Any", call.module).indexer
        chosen = indexer.build_block_mask(blocks, ~chosen, keys, query.dtype, query.device, None) == 0
    seen = call.visible()
    return changed(call, allowed=chosen if seen is None else chosen & seen, causal=False)


NAMES = "attnlens_"  # how the names begin under which transformers knows attnlens' answers

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

    sites: Mapping[tuple[str, int], Site]  # the sites to expect, by path and ordinal
    names: Mapping[nn.Module, str]  # module → dotted path
    calls: Counter[str] = field(default_factory=Counter)  # how often each path was called so far

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

    kernel: Kernel  # the new one; its fitted parameters are those of `heads`, in their order
    heads: tuple[int, ...] | None = None  # query heads; None means all


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
