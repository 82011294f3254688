"""A model with another kernel that is trained: its numbers, and how far its predictions are from their goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnlens import hooks, texts
from attnlens.attention import Route
from attnlens.attention.primal_scores import regulariser
from attnlens.choices import HealingGoal
from attnlens.errors import ModelError
from attnlens.kernels import Kernel
from attnlens.kernels.lowrank import copies
from attnlens.ksvd import Convention
from attnlens.models import Loaded
from attnlens.records import Call, Site, Task
from attnlens.run.outcomes.outputs import divergence, owned_means, owners_of, predictions
from attnlens.run.swap.fit import TINIEST, unfitted
from attnlens.run.swap.healing.trained import LowRankChange, Trained, seed_of, standing_in, trainable
from attnlens.texts import Batch
from attnlens.texts.targets import NOTHING, Fed, asking, logits_of, states_of


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
    goal: HealingGoal = "teacher"
    """What it learns: the original model's predictions, or the text."""
    rank: int | None = None
    """Rank of each weight's change; None where it is free."""
    seed: int = 0
    """What changes of low rank are drawn by, together with the names of their weights."""
    weights: dict[str, Trained] = field(default_factory=dict)
    parameters: dict[Site, dict[str, Trained]] = field(default_factory=dict)
    recompute: bool = False
    """Whether activations inside the model's blocks are computed again on the way back, and not kept."""
    blocks: list[nn.Module] = field(default_factory=list)
    """These blocks."""
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
        if self.convention == "code":  # √(nΛ) in the place of Λ, n the length of a sequence: J is 0 there
            for site, swap in self.swaps.items():
                of = swap.kernel.fitted
                if swap.kernel.info.form == "output":
                    changed = (of["log_multipliers"] + of["tokens"].log()[:, None]) / 2
                    kernel = swap.kernel.with_fitted({**of, "log_multipliers": changed})
                    self.swaps = {**self.swaps, site: hooks.Replacement(kernel, swap.heads)}
        named = dict(self.loaded.model.named_parameters())
        for name, mask in masks.items():
            if self.rank is None or self.rank >= min(named[name].flatten(1).shape):
                self.weights[name] = Trained.of(named[name], mask)
            else:
                self.weights[name] = LowRankChange.of_rank(named[name], mask, self.rank, seed_of(self.seed, name))
        if self.recompute:
            self.blocks = _blocks(self.loaded, batch)
        for site, swap in self.swaps.items():
            shared = copies(swap.kernel.fitted)
            self.parameters[site] = {
                name: Trained.of(part.float(), _step(name, swap.kernel, self.convention), shared.get(name))
                for name, part in swap.kernel.fitted.items()
                if name in swap.kernel.trainable
            }

    @property
    def leaves(self) -> list[Tensor]:
        """Everything that the optimiser changes."""
        every = [*self.weights.values(), *(part for found in self.parameters.values() for part in found.values())]
        return [leaf for part in every for leaf in part.leaves]

    @property
    def count(self) -> int:
        """How many numbers are trained."""
        of_weights = sum(part.count for part in self.weights.values())
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

    def loss(self, inputs: Mapping[str, Tensor], targets: Tensor | None = None) -> Tensor:
        """What training minimises: the distance, and for primal attention + η·ΣJ² (Chen et al. 2023, section 3.3)."""
        penalties: list[Tensor] = []
        distance = self.distance(inputs, penalties, targets)
        return distance + self.penalty(penalties)

    def descend(self, inputs: Mapping[str, Tensor], targets: Tensor | None, weight: float) -> None:
        """Add `weight` times the gradient of the loss to the leaves'.

        The model stays the student on the way back: blocks that are computed again need its kernels and weights.
        """
        penalties: list[Tensor] = []
        with torch.enable_grad(), ExitStack() as back:
            each, _ = self._each(inputs, targets, penalties, back)
            loss: Tensor = weight * (each.mean() + self.penalty(penalties))
            loss.backward()  # type: ignore[no-untyped-call]

    def penalty(self, penalties: list[Tensor]) -> Tensor | float:
        """η times the sum of the layers' regularisers, in the code's convention their mean; 0 without."""
        if not self.eta or not penalties:
            return 0.0
        each = torch.stack(penalties)
        return self.eta * (each.sum() if self.convention == "paper" else each.mean())

    def distance(
        self, inputs: Mapping[str, Tensor], penalties: list[Tensor] | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Mean KL(original ‖ swapped) over real tokens in nats, or a headless model's mean 1 − cosine.

        Where the text is learned, nats per token of `targets`. Each primal layer's regulariser is added to `penalties`,
        where there is a list.
        """
        return self._each(inputs, targets, penalties)[0].mean()

    def by_sequence(self, inputs: Mapping[str, Tensor], targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The mean distance of each sequence that has one, and over how many tokens."""
        with torch.no_grad():
            each, owners = self._each(inputs, targets)
        return owned_means(each, owners, texts.sequences_in(inputs))

    def _each(
        self,
        inputs: Mapping[str, Tensor],
        targets: Tensor | None,
        penalties: list[Tensor] | None = None,
        back: ExitStack | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The distance at each compared token, and the sequence that it is of.

        The model stays the student until `back` ends, where that is given and blocks are computed again.
        """
        if self.goal == "text" and targets is not None:
            result = self._as_student(inputs, penalties, back)
            logits, there = predictions(result, Fed(dict(inputs), targets), self.task), targets != NOTHING
            assert logits is not None  # noqa: S101  # a model without predictions has no targets
            return nn.functional.cross_entropy(logits, targets[there], reduction="none"), there.nonzero()[:, 0]
        more = asking(self.task)
        with torch.no_grad():
            own = self._outputs(hooks.forward(self.loaded.model, inputs, **more))
        new = self._outputs(self._as_student(inputs, penalties, back))
        owners = owners_of(own, inputs)
        if owners is None:  # all count as the first's
            owners = torch.zeros(own[..., 0].numel(), dtype=torch.long)
        own, new = (hooks.at_real_tokens(part, inputs) if self.by_token else part for part in (own, new))
        if self.task == "hidden":
            each = 1 - nn.functional.cosine_similarity(own.float(), new.float(), dim=-1)
        else:
            each = divergence(own.float(), new.float())
        return each.flatten(), owners

    def _as_student(
        self, inputs: Mapping[str, Tensor], penalties: list[Tensor] | None, back: ExitStack | None
    ) -> object:
        with ExitStack() as pass_alone:
            recomputing = back is not None and bool(self.blocks)
            (back if back is not None and recomputing else pass_alone).enter_context(self.student(penalties))
            if back is not None and recomputing:
                back.enter_context(_recomputed(self.blocks))
            return hooks.forward(self.loaded.model, inputs, **asking(self.task))

    @contextmanager
    def student(self, penalties: list[Tensor] | None = None) -> Iterator[None]:
        """Inside the block the model is the one that is trained: its kernels, and its weights with their gradients."""
        swaps, values = self.healed_swaps(), {name: part.value for name, part in self.weights.items()}

        def visit(site: Site, call: Call) -> None:
            if penalties is not None and self.eta:
                penalties.append(self.regulariser(call, swaps[site]))

        with (
            hooks.replace(self.loaded.model, self.sites, swaps, self.path, visit=visit),
            standing_in(self.loaded.model, values),
        ):
            yield

    def regulariser(self, call: Call, swap: hooks.Replacement) -> Tensor:
        """J² of one layer."""
        part = call if swap.heads is None else call.select(swap.heads)
        return regulariser(part, swap.kernel, self.convention)

    @property
    def by_token(self) -> bool:
        """Whether there is an output for each token."""
        return self.task != "classification"

    def _outputs(self, result: object) -> Tensor:
        return states_of(result) if self.task == "hidden" else logits_of(result)

    def values(self) -> dict[str, Tensor]:
        """The trained weights by name."""
        return {name: part.value.detach() for name, part in self.weights.items()}


def _step(name: str, kernel: Kernel, convention: Convention) -> Tensor | None:
    """By how much a change of a map's columns is scaled, as an optimiser's steps are equal in all of them; None: not.

    Of A and B of a rank: a column's length, as a share of the root mean square, so that long and short ones turn alike.
    Of primal's maps: √σ, σ of the mean over tokens; J has the curvature C/σ in a column, and equal steps would leap out
    of its valley where σ is small.
    """
    if name not in ("query_map", "key_map"):
        return None
    if kernel.info.form != "output":
        squares = kernel.fitted[name].float().square()
        return (squares.mean(-2, keepdim=True) / squares.mean().clamp_min(TINIEST)).sqrt().expand_as(squares)
    of = kernel.fitted
    power = 1.0 if convention == "code" else 0.5
    length = of["tokens"].log()[:, None] / 2 if convention == "paper" else 0.0
    return (-(power * of["log_multipliers"] + length)).exp().clamp_max(1.0).float()[:, None]


def _blocks(loaded: Loaded, batch: Batch) -> list[nn.Module]:
    """The model's blocks. Raises ModelError for a model without any that run once in a pass."""
    found = [block for _, block in hooks.blocks(loaded.model, texts.first(batch.inputs, 1))]
    if not found:
        raise ModelError(
            "This model has no blocks that run once in a pass, whose activations could be computed again.",
            "Leave out --heal-checkpointing.",
        )
    return found


@contextmanager
def _recomputed(blocks: list[nn.Module]) -> Iterator[None]:
    """Inside the block each of these keeps its inputs alone (gradient checkpointing, Chen et al. 2016)."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # the class's own method is seen again
