"""Takes a model's own attention probabilities: those of its softmaxes, or those that its modules hand out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.hooks.implementations import implementation
from attnlens.hooks.survey import Reached
from attnlens.records import Call, Site
from attnlens.tracer import tracing


@contextmanager
def handed_out(model: PreTrainedModel, reached: Sequence[Reached], found: dict[Site, Tensor]) -> Iterator[None]:
    """Inside, the model uses transformers' eager attention, and `found` are the weights of its softmaxes.

    Where none has the shape of a site's (a sink has a column of its own), they are what the module hands out.
    """
    shapes = {one.site: (*one.call.query.shape[:3], one.call.key.shape[2]) for one in reached}
    sites = {(site.path, site.ordinal): site for site in shapes}
    paths = {one.module: one.site.path for one in reached}
    softmaxes, calls = Counter[str](), Counter[str]()

    def shown(module: nn.Module, weights: Tensor) -> None:
        path = paths.get(module, "")
        site = sites.get((path, softmaxes[path]))
        if site is not None and weights.shape == shapes[site]:
            found[site] = weights
        softmaxes[path] += 1

    def remember(path: str) -> Any:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            site = sites[path, calls[path]]
            calls[path] += 1
            for part in output if isinstance(output, tuple) and softmaxes[path] < calls[path] else ():
                if isinstance(part, Tensor) and part.shape == shapes[site]:
                    found[site] = part  # the last of them, as T5 hands out its position bias first

        return hook

    handles = [one.module.register_forward_hook(remember(one.site.path)) for one in reached if one.site.ordinal == 0]
    try:
        with implementation(model, "eager"), tracing(model, _unused, prove=True, shown=shown):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _unused(call: Call) -> Tensor:
    """An answer that the model does not go on with."""
    return call.value
