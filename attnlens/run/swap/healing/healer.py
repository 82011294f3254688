"""The numbers that a healing trains, and the distance to the original model that it makes smaller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens import hooks
from attnlens.attention import Route
from attnlens.attention.primal_scores import regulariser
from attnlens.errors import ModelError
from attnlens.kernels import Kernel
from attnlens.ksvd import Convention
from attnlens.models import Loaded
from attnlens.records import Call, Site, Task
from attnlens.run.outcomes.outputs import divergence
from attnlens.run.swap.fit import unfitted
from attnlens.run.swap.healing.trainable import outputs_with, trainable
from attnlens.texts import Batch
from attnlens.texts.targets import asking, logits_of, states_of


@dataclass
class Trained:
    """A number that is trained: a part of a weight, or a kernel's parameter."""

    start: Tensor
    """Its value before."""
    change: Tensor
    """What is added to it, float32 and a leaf."""
    mask: Tensor | None = None
    """1 where a weight belongs to W_Q or W_K of the swapped heads, or how long its steps are; None: 1 everywhere."""

    @property
    def value(self) -> Tensor:
        """Its value now."""
        added = self.change if self.mask is None else self.change * self.mask
        return (self.start.float() + added).to(self.start.dtype)


@dataclass
class Healer:
    """One healing: the original model teaches itself with another kernel."""

    loaded: Loaded
    sites: tuple[Site, ...]
    swaps: hooks.Swaps
    task: Task
    path: Route
    eta: float | None = None
    """Weight of the KSVD regulariser, for kernels that have one; None for the others."""
    convention: Convention = "paper"
    """How its objective J is counted."""
    weights: dict[str, Trained] = field(default_factory=dict)
    parameters: dict[Site, dict[str, Trained]] = field(default_factory=dict)
    interrupted: bool = False
    """Whether the user ended it early."""

    def prepare(self, batch: Batch) -> None:
        """Find what is trained: the entries of weights that make queries and keys of swapped heads and nothing else,
        and the kernels' trainable parameters (primal: its maps, too), which begin as fitted, or else as typed.
        """
        masks = trainable(self.loaded.model, self.sites, self.swaps, batch.inputs)
        if not masks:
            raise ModelError(
                "No weight moves queries or keys of swapped heads, and those alone.", "Swap without --heal."
            )
        self.swaps = unfitted(self.loaded, self.sites, self.swaps, [batch])
        if self.convention == "code":
            self.swaps = {site: _as_code(swap) for site, swap in self.swaps.items()}
        named = dict(self.loaded.model.named_parameters())
        self.weights = {
            name: Trained(named[name], torch.zeros_like(named[name], dtype=torch.float32, requires_grad=True), mask)
            for name, mask in masks.items()
        }
        for site, swap in self.swaps.items():
            self.parameters[site] = {
                name: Trained(
                    part.float(),
                    torch.zeros_like(part, dtype=torch.float32, requires_grad=True),
                    _step(name, swap.kernel, self.convention),
                )
                for name, part in swap.kernel.fitted.items()
                if name in swap.kernel.info.trainable
            }

    @property
    def leaves(self) -> list[Tensor]:
        """Everything that the optimiser changes."""
        every = [*self.weights.values(), *(part for found in self.parameters.values() for part in found.values())]
        return [part.change for part in every]

    @property
    def count(self) -> int:
        """How many numbers are trained."""
        of_weights = sum(int(part.mask.sum()) for part in self.weights.values() if part.mask is not None)
        return of_weights + sum(part.change.numel() for found in self.parameters.values() for part in found.values())

    @property
    def regularised(self) -> dict[str, object]:
        """The regulariser's fields of a Healing."""
        return {} if self.eta is None else {"eta": self.eta, "ksvd_convention": self.convention}

    def healed_swaps(self) -> hooks.Swaps:
        """The swaps with the kernels' parameters as trained so far."""
        return {
            site: hooks.Replacement(
                swap.kernel.with_fitted(
                    dict(swap.kernel.fitted) | {name: part.value for name, part in self.parameters[site].items()}
                ),
                swap.heads,
            )
            for site, swap in self.swaps.items()
        }

    def loss(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """What training minimises: the distance, and for primal attention + η·ΣJ² (Chen et al. 2023, section 3.3)."""
        if not self.eta:
            return self.distance(inputs)
        penalties: list[Tensor] = []
        distance = self.distance(inputs, penalties)
        each = torch.stack(penalties)
        return distance + self.eta * (each.sum() if self.convention == "paper" else each.mean())

    def distance(self, inputs: Mapping[str, Tensor], penalties: list[Tensor] | None = None) -> Tensor:
        """Mean KL(original ‖ swapped) over real tokens in nats, or a headless model's mean 1 − cosine.

        Each primal layer's regulariser is added to `penalties`, where there is a list.
        """
        with torch.no_grad():
            own = self._outputs(hooks.forward(self.loaded.model, inputs, **asking(self.task)), inputs)
        values = {name: part.value for name, part in self.weights.items()}
        swaps = self.healed_swaps()

        def visit(site: Site, call: Call) -> None:
            swap = swaps[site]
            if penalties is not None:
                part = call if swap.heads is None else call.select(swap.heads)
                penalties.append(regulariser(part, swap.kernel, self.convention))

        with hooks.replace(self.loaded.model, self.sites, swaps, self.path, visit=visit):
            new = self._outputs(outputs_with(self.loaded.model, values, inputs, **asking(self.task)), inputs)
        if self.task == "hidden":
            return (1 - nn.functional.cosine_similarity(own, new, dim=-1)).mean()
        return divergence(own, new).mean()

    def _outputs(self, result: object, inputs: Mapping[str, Tensor]) -> Tensor:
        if self.task == "classification":
            return logits_of(result).float()
        found = states_of(result) if self.task == "hidden" else logits_of(result)
        return hooks.at_real_tokens(found, inputs).float()

    def values(self) -> dict[str, Tensor]:
        """The trained weights by name."""
        return {name: part.value.detach() for name, part in self.weights.items()}


def _step(name: str, kernel: Kernel, convention: Convention) -> Tensor | None:
    """By how much a change of W_e's and W_r's columns is scaled: √σ, σ of the mean over tokens.

    J has the curvature C/σ in a column: an optimiser's equal steps would leap out of its valley where σ is small.
    """
    if name not in ("query_map", "key_map"):
        return None
    of = kernel.fitted
    power = 1.0 if convention == "code" else 0.5
    length = of["tokens"].log()[:, None] / 2 if convention == "paper" else 0.0
    return (-(power * of["log_multipliers"] + length)).exp().clamp_max(1.0).float()[:, None]


def _as_code(swap: hooks.Replacement) -> hooks.Replacement:
    """The same swap with √(nΛ) in the place of Λ, n the length of a sequence: J in the code's convention is 0 there."""
    kernel = swap.kernel
    if kernel.info.form != "output":
        return swap
    changed = (kernel.fitted["log_multipliers"] + kernel.fitted["tokens"].log()[:, None]) / 2
    return hooks.Replacement(kernel.with_fitted({**kernel.fitted, "log_multipliers": changed}), swap.heads)


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
