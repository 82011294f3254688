"""Trains a model and its Primal.+ alike: the same start, batches and steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2LMHeadModel

from attnlens import primal
from attnlens.ksvd import ETA

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import GPT2Config, PreTrainedModel

CANONICAL, PRIMAL = WAYS = ("canonical", "primal")
WARM_UP = 20
"""Steps over which the learning rate rises."""


@dataclass(frozen=True)
class Training:
    """How both are trained: AdamW on random windows of a text."""

    steps: int = 120
    """Batches seen."""
    batch: int = 16
    """Windows of a batch."""
    lr: float = 3e-3
    """The largest learning rate; it rises, then falls linearly to a twentieth."""
    scores: int = 16
    """s of the primal layer."""
    eta: float = ETA
    """Weight of ΣJ² in the loss of Primal.+, in the paper's convention."""

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self.lr * min(1.0, (step + 1) / WARM_UP) * (1 - 0.95 * step / self.steps)


def pair(config: GPT2Config, scores: int, seed: int) -> dict[str, PreTrainedModel]:
    """A new model, and its copy whose last layer is primal; they share all initial weights that both have."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config)
        return {CANONICAL: model, PRIMAL: primal.build(copy.deepcopy(model), layers="last", scores=scores)}


def fit(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows tokens"],
    training: Training,
    seed: int,
    progress: Callable[[int], None],
) -> None:
    """Train in place: the loss in nats, and + η·ΣJ² where a layer is primal. The seed alone decides the batches."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=training.lr, betas=(0.9, 0.95), weight_decay=0.1)
    regularised = any(isinstance(part, primal.PrimalHeads) for part in model.modules())
    model.train()
    for step in range(training.steps):
        for group in optimiser.param_groups:
            group["lr"] = training.rate(step)
        chosen = windows[torch.randperm(len(windows), generator=generator)[: training.batch]]
        optimiser.zero_grad()
        with torch.enable_grad():
            loss = nats(model, chosen)
            if regularised:
                loss = loss + training.eta * primal.regulariser(model)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        progress(step + 1)
    model.train(False)


def nats(model: PreTrainedModel, windows: Int[Tensor, "windows tokens"]) -> Float[Tensor, ""]:
    """Mean negative log likelihood of every token but a window's first."""
    logits = model(windows, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
