"""Captures the inputs of attention modules in a running model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from attnlens.hooks.survey import Reached, by_name


@contextmanager
def inputs_of(reached: Iterable[Reached]) -> Iterator[dict[nn.Module, Tensor]]:
    """Inside the block, module → the inputs (batch, tokens, d_model) of its latest call, for these sites' modules."""
    latest: dict[nn.Module, Tensor] = {}
    known = {found.module: found for found in reached}

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        latest[module] = known[module].sequences(by_name(module, args, kwargs)[known[module].input_name])

    hooks = [module.register_forward_pre_hook(remember, with_kwargs=True) for module in known]
    try:
        yield latest
    finally:
        for hook in hooks:
            hook.remove()
