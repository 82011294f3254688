"""Replays cached outputs of the blocks before the first swapped one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.hooks.survey import forward
from attnlens.records import Site


def blocks(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[tuple[str, nn.Module]]:
    """The elements of the model's outermost module lists that run once in a forward pass, in the order of execution.

    None is found in a model that calls one module again and again (ALBERT): then nothing can be left out.
    """
    listed: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in listed)
        if isinstance(module, nn.ModuleList) and not inside:
            listed += [(f"{path}.{index}", block) for index, block in enumerate(module)]
    order: list[nn.Module] = []
    handles = [block.register_forward_hook(lambda module, _args, _output: order.append(module)) for _, block in listed]
    try:
        with torch.no_grad():
            forward(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    names, calls = {block: path for path, block in listed}, Counter(order)
    return [(names[block], block) for block in order if calls[block] == 1]


@contextmanager
def recorded(found: Sequence[tuple[str, nn.Module]]) -> Iterator[dict[str, Any]]:
    """What each block gives in the forward pass inside the `with`, by its path."""
    given: dict[str, Any] = {}

    def remember(path: str) -> Any:
        return lambda _module, _args, output: given.__setitem__(path, output)

    handles = [block.register_forward_hook(remember(path)) for path, block in found]
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def resumed(found: Sequence[tuple[str, nn.Module]], given: Mapping[str, Any], site: Site) -> Iterator[None]:
    """Let the blocks that run before the one that holds `site` answer with what they gave, without computing.

    Exact as long as what is changed lies in that block or behind it. Where no block holds the site, all are computed.
    """
    holding = [index for index, (path, _) in enumerate(found) if site.path.startswith(f"{path}.")]
    before = found[: holding[0]] if holding else []
    for path, block in before:
        block.forward = _answer(given[path])
    try:
        yield
    finally:
        for _, block in before:
            del block.forward  # the class's own method is seen again


def _answer(given: Any) -> Any:
    return lambda *_args, **_kwargs: given
