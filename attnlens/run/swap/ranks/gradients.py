"""Gradients of the loss of targets that the model itself draws, at the outputs of attention."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnlens import hooks
from attnlens.errors import ModelError
from attnlens.models import Loaded
from attnlens.records import Call, Site, Task
from attnlens.run.outcomes.outputs import predictions
from attnlens.texts.targets import Fed


class Sampled(NamedTuple):
    """One forward pass, its graph kept."""

    calls: dict[Site, Call]
    """What each site was asked for."""
    outputs: dict[Site, Tensor]
    """What it answered, (batch, queries, heads, value_dim), in the graph."""
    loss: Tensor
    """The summed loss of the targets drawn, in nats."""
    drawn: int
    """How many those are."""


def sampled(
    loaded: Loaded,
    sites: tuple[Site, ...],
    wanted: Collection[Site],
    fed: Fed,
    task: Task,
    generator: torch.Generator,
) -> Sampled:
    """Calls and outputs of the `wanted` sites, and the loss of targets drawn from the model's own predictions.

    Raises ModelError where that loss has no gradient.
    """
    calls: dict[Site, Call] = {}
    outputs: dict[Site, Tensor] = {}

    with (
        torch.enable_grad(),
        _differentiable(loaded.model),
        hooks.watch(loaded.model, sites, calls.__setitem__, outputs.__setitem__),
    ):
        logits = predictions(hooks.forward(loaded.model, fed.inputs), fed, task)
        if logits is None or not logits.requires_grad:
            raise ModelError("This model's loss has no gradient.", "Give ranks by hand, as in --kernel rank:32.")
        drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0].to(logits.device)
        loss = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
        return Sampled(calls, {site: outputs[site] for site in wanted if site in outputs}, loss, len(drawn))


@contextmanager
def _differentiable(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block every weight asks for gradients, so that what comes of it has some."""
    before = [(weight, weight.requires_grad) for weight in model.parameters() if weight.is_floating_point()]
    try:
        for weight, _ in before:
            weight.requires_grad_(True)
        yield
    finally:
        for weight, own in before:
            weight.requires_grad_(own)
