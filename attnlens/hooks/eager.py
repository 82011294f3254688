"""Takes the attention probabilities that a model's modules hand out under transformers' eager attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.hooks.interface import implementation
from attnlens.hooks.survey import Reached
from attnlens.records import Site


@contextmanager
def handed_out(model: PreTrainedModel, reached: Sequence[Reached], found: dict[Site, Tensor]) -> Iterator[None]:
    """Inside, the model uses transformers' eager attention, and what its modules hand out is `found`."""
    shapes = {one.site: (*one.call.query.shape[:3], one.call.key.shape[2]) for one in reached}
    sites = {(site.path, site.ordinal): site for site in shapes}
    calls: Counter[str] = Counter()

    def remember(path: str) -> Any:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            site = sites[path, calls[path]]
            calls[path] += 1
            for part in output if isinstance(output, tuple) else ():
                if isinstance(part, Tensor) and part.shape == shapes[site]:
                    found[site] = part  # the last of them, as T5 hands out its position bias first

        return hook

    handles = [one.module.register_forward_hook(remember(one.site.path)) for one in reached if one.site.ordinal == 0]
    try:
        with implementation(model, "eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()
