"""Runs two models over the same windows, the second one as it is and on the first one's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from attnlens import attention, hooks
from attnlens.hooks.survey import hiding_padding, real_parts
from attnlens.kernels import OWN
from attnlens.records import Call, Site
from attnlens.run.compare.sides import Block, ComparedModel
from attnlens.run.inspect.sink import PIECE_BYTES

FLOOR = 1e-12
"""Weights below it count as it, so that a key that only one model hides costs at most 27.6 nats."""
STATES = ("hidden_states", "encoder_hidden_states")
"""Names under which blocks take states; whatever its name, the first input of a block is one."""


@dataclass
class Recorded:
    """One pass of the first model."""

    side: ComparedModel
    calls: dict[Site, Call] = field(default_factory=dict)
    """What each site was asked for."""
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """The states that each block took, by the block's path and the input's name."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """The states that each block gave."""


@dataclass
class Passed:
    """One pass of a second model, beside the one that was recorded."""

    rows: dict[Site, Tensor] = field(default_factory=dict)
    """KL(first ‖ second) of each sequence and head, mean over queries; NaN where no query sees a key."""
    calls: dict[Site, Call] = field(default_factory=dict)
    """What the second model's sites were asked for, by its own sites."""
    blocks: dict[str, Tensor] = field(default_factory=dict)
    """‖o' − o‖/‖o‖ of each sequence, o what a block gives of the states that the first model's took."""


def record(side: ComparedModel, inputs: Mapping[str, Tensor], blocks: Sequence[Block]) -> Recorded:
    """Run the first model, and keep what the second one is compared with."""
    found = Recorded(side)
    chosen = set(side.sites)

    def visit(site: Site, call: Call) -> None:
        if site in chosen:
            found.calls[site] = call

    def keep(path: str) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            found.states[path] = _states(block, args, given)

        return hook

    handles = [block.register_forward_pre_hook(keep(path), with_kwargs=True) for path, block in blocks]
    try:
        with hooks.recorded(blocks) as outputs:
            _pass(side, inputs, visit)
    finally:
        for handle in handles:
            handle.remove()
    found.outputs.update(
        (path, given.clone()) for path, output in outputs.items() if (given := _first(output)) is not None
    )
    return found


def beside(
    recorded: Recorded,
    side: ComparedModel,
    sites: Mapping[Site, Site],
    inputs: Mapping[str, Tensor],
    order: Mapping[Site, Sequence[int]],
    blocks: Sequence[Block] = (),
) -> Passed:
    """One pass of the side's model, compared with the one that was recorded, by the first model's sites.

    `sites` are the first model's by the side's, `order` the side's head for each head of the first. With
    `blocks` each block is given the states that the first model's block took, so that what differs is of the block.
    """
    found = Passed()

    def visit(site: Site, call: Call) -> None:
        first = sites.get(site)
        if first is None or first not in recorded.calls:  # which has its own kernel, beside others that have not
            return
        found.calls[site] = call
        own, other = _rows(recorded.side, first), _rows(side, site)
        pair = (recorded.calls[first], own), (call, other)
        found.rows[first] = divergence(*pair, order[first], first, inputs)

    with _given(blocks, recorded.states), hooks.recorded(blocks) as outputs:
        _pass(side, inputs, visit)
    for path, own in recorded.outputs.items():
        other = _first(outputs.get(path))
        if other is not None and other.shape == own.shape:
            found.blocks[path] = _apart(own, other.to(own.device), inputs)
    return found


def _first(output: Any) -> Tensor | None:
    """The states among what a block gives."""
    output = output[0] if isinstance(output, tuple | list) and output else output
    return output if isinstance(output, Tensor) else None


def _apart(own: Tensor, other: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """‖o' − o‖/‖o‖ of each sequence, without its padding."""
    own, other = own.double(), other.double()
    masks = (inputs.get(name) for name in ("decoder_attention_mask", "attention_mask"))
    mask = next((mask for mask in masks if mask is not None and mask.shape == own.shape[:2]), None)
    if mask is not None:
        own, other = own * mask[..., None], other * mask[..., None]
    own, other = own.flatten(1), other.flatten(1)
    moved: Tensor = (other - own).norm(dim=1) / own.norm(dim=1)
    return moved.cpu()


def _pass(side: ComparedModel, inputs: Mapping[str, Tensor], visit: Callable[[Site, Call], None]) -> None:
    """One forward pass of a side's model, its attention watched."""
    model, sites = side.loaded.model, side.inspection.sites
    seen = hooks.replace(model, sites, side.swaps, visit=visit) if side.swaps else hooks.watch(model, sites, visit)
    with torch.no_grad(), seen:
        hooks.forward(model, inputs)


@contextmanager
def _given(blocks: Sequence[Block], states: Mapping[str, Mapping[str, Tensor]]) -> Iterator[None]:
    """Inside, each of the blocks takes these states in the place of its own."""

    def put(path: str) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, Any]:
            names = _names(block)
            changed = [_instead(states[path].get(name), value) for name, value in zip(names, args, strict=False)]
            named = {name: _instead(states[path].get(name), value) for name, value in given.items()}
            return (*changed, *args[len(names) :]), named

        return hook

    handles = [block.register_forward_pre_hook(put(path), with_kwargs=True) for path, block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _instead(state: Tensor | None, own: Any) -> Any:
    """The state in the place of the block's own, of its type and device; so that a tracer sees where it comes from."""
    if state is None or not isinstance(own, Tensor) or own.shape != state.shape:
        return own
    always = torch.ones((), dtype=torch.bool, device=own.device)
    return torch.where(always, state.to(own.device, own.dtype), own)


def _names(block: nn.Module) -> list[str]:
    return list(signature(block.forward).parameters)


def _states(block: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Tensor]:
    names = _names(block)
    named = dict(zip(names, args, strict=False)) | given
    kept = {name: named.get(name) for name in {*names[:1], *STATES}}
    return {name: state.clone() for name, state in kept.items() if isinstance(state, Tensor)}


Rows = Callable[[Call], Tensor]
"""The attention weights of a call."""


def _rows(side: ComparedModel, site: Site) -> Rows:
    """How a side's site weighs its keys: by the exponential kernel, or by that of a saved swap."""
    swap = side.swaps.get(site)

    def rows(call: Call) -> Tensor:
        weights = attention.weights(call, OWN)
        if swap is not None:  # NaN if its rows are none, or may be negative
            heads = range(call.query.shape[1]) if swap.heads is None else swap.heads
            info = swap.kernel.info
            some = info.form != "output" and info.positive
            other = attention.weights(call.select(heads), swap.kernel).to(weights.dtype) if some else torch.nan
            weights[:, list(heads)] = other
        return weights

    return rows


def divergence(
    first: tuple[Call, Rows], second: tuple[Call, Rows], order: Sequence[int], site: Site, inputs: Mapping[str, Tensor]
) -> Tensor:
    """KL(P ‖ P') of each sequence and head, mean over its real queries, Σ_j p log(p/p'); (sequences, heads).

    `order` is the second's head for each head of the first.
    """
    sides = [(hiding_padding(_exact(call), inputs), rows) for call, rows in (first, second)]
    call = sides[0][0]
    found = call.query.new_full(call.query.shape[:2], torch.nan)
    for batch, queries, keys in real_parts(call.allowed, len(found), site.part):
        pair = [(call.sequences(batch, queries, keys), rows) for call, rows in sides]
        size = 8 * found.shape[1] * pair[0][0].query.shape[2] * pair[0][0].key.shape[2]
        step = max(1, PIECE_BYTES // size)
        for start in range(0, len(batch), step):
            some = list(range(start, min(start + step, len(batch))))
            one, other = (_whole(rows(call.sequences(some, slice(None), slice(None)))) for call, rows in pair)
            terms = one * (one.clamp(min=FLOOR).log() - other[:, list(order)].clamp(min=FLOOR).log())
            found[[batch[row] for row in some]] = terms.sum(-1).mean(-1).clamp(min=0)
    return found.cpu()


def _exact(call: Call) -> Call:
    bias = None if call.bias is None else call.bias.double()
    return replace(call, query=call.query.double(), key=call.key.double(), value=call.value.double(), bias=bias)


def _whole(rows: Tensor) -> Tensor:
    """The weights with what a sink takes as a last column."""
    return torch.cat((rows, (1 - rows.sum(-1, keepdim=True)).clamp(min=0)), -1)
