"""The trainable parameters of a swapped model, and the distances that healing minimises."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only  # private: torch has no public map over nested arguments
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from attnlens.choices import HealingStage
from attnlens.errors import ModelError
from attnlens.kernels import Kernel
from attnlens.kernels.attention.sums import regulariser
from attnlens.kernels.lowrank import shared_indices
from attnlens.maths.ksvd import Convention
from attnlens.maths.statistics import paired_difference
from attnlens.models import hooks, texts
from attnlens.models.texts.targets import NOTHING, Fed, logits_of, output_options, states_of
from attnlens.models.trace import remove_hooks
from attnlens.records import Call, HealingRate, Site
from attnlens.records.provenance import FEWEST_DRAWS
from attnlens.requests import HealRequest
from attnlens.runs.outputs import average_by_sequence, divergence, predictions, sequence_index, token_losses, tokens_in
from attnlens.runs.swap.fit import TINIEST, expand_parameters
from attnlens.runs.swap.sites import SwapSetup


def trainable(
    model: PreTrainedModel, sites: tuple[Site, ...], swaps: hooks.Swaps, inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return masks of weight matrices by name: 1 for entries that affect only queries or keys of swapped heads.

    Weights without such entries are omitted. The effects of an entry are found from gradients, so any layout is
    supported (fused, interleaved, shared by heads or sites).
    """
    short = texts.first(inputs, 1)
    affecting: dict[str, Tensor] = {}  # entries that affect queries and keys of swapped heads
    fixed: dict[str, Tensor] = {}  # entries that affect anything else

    def visit(site: Site, call: Call) -> None:
        inside = {name: p for name, p in leaves.items() if name.startswith(f"{site.path}.") and p.dim() > 1}
        all_heads = range(call.query.shape[1])
        chosen = list(swaps[site].heads or all_heads) if site in swaps else []
        others = [head for head in all_heads if head not in chosen]
        keys, other_keys = (sorted({head // call.group for head in heads}) for heads in (chosen, others))
        ours = [call.query[:, chosen], call.key[:, keys]]
        for entries, part in ((affecting, ours), (fixed, [call.value, call.query[:, others], call.key[:, other_keys]])):
            for name, gradient in _gradients(part, inside).items():
                entries[name] = entries.get(name, torch.zeros_like(gradient, dtype=torch.bool)) | (gradient != 0)

    def cut(
        _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Detach a module's inputs, since a weight shared by several calls also affects the inputs of later calls."""
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        return args, kwargs

    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    attentions = filter(hooks.is_attention, model.modules())
    handles = [module.register_forward_pre_hook(cut, with_kwargs=True) for module in attentions]
    with torch.enable_grad(), hooks.watch(model, sites, visit), remove_hooks(handles):
        torch.func.functional_call(model, leaves, (), {**short, **hooks.without_cache(model)})
    masks = {name: mask & ~fixed.get(name, torch.zeros_like(mask)) for name, mask in affecting.items()}
    return {name: mask.float() for name, mask in masks.items() if bool(mask.any())}


def _gradients(parts: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of a random linear combination of `parts` with respect to each leaf that affects them."""
    generator, total = torch.Generator().manual_seed(0), torch.zeros(())
    for part in parts:
        total = total + (part * torch.randn(part.shape, generator=generator).to(part)).sum().float()
    if not leaves or not total.requires_grad:
        return {}
    gradients = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
    return {name: gradient for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None}


@dataclass
class Trained:
    """A trainable weight or kernel parameter: an initial value plus a change, which is float32 to keep small steps."""

    start: Tensor  # initial value
    change: Tensor  # added to the initial value; a float32 leaf
    mask: Tensor | None = None  # factor of the change: 1 (trained) or 0 (fixed), or step sizes; None: all 1
    rows: Tensor | None = None  # row of `start` for each head; None if heads do not share rows
    right: Tensor | None = None  # V (columns, R) of a change mask ∘ (U Vᵀ), U = `change` (Hu et al. 2022, Eq. 3)

    @classmethod
    def of(cls, start: Tensor, mask: Tensor | None = None, copies: Tensor | None = None) -> Trained:
        """Create a change of full rank, initially 0; heads with equal numbers in `copies` share one change."""
        if copies is not None:
            first = [int((copies == number).nonzero()[0]) for number in range(int(copies.max()) + 1)]
            start, mask = start[first], None if mask is None else mask[first]
        return cls(start, torch.zeros_like(start, dtype=torch.float32, requires_grad=True), mask, copies)

    @classmethod
    def of_rank(cls, start: Tensor, mask: Tensor, rank: int, seed: int) -> Trained:
        """Create a change of rank R, initially 0: U is 0, and V is sampled from N(0, 1/R) using `seed`."""
        rows, columns = start.flatten(1).shape
        right = torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed)) * rank**-0.5
        left = torch.zeros(rows, rank, device=start.device, requires_grad=True)
        return cls(start, left, mask, None, right.to(start.device).requires_grad_())

    @property
    def value(self) -> Tensor:
        """Current value; kernel parameters have one row per head."""
        added = self.change if self.right is None else (self.change @ self.right.mT).view_as(self.start)
        added = added if self.mask is None else added * self.mask
        value = (self.start.float() + added).to(self.start.dtype)
        return value if self.rows is None else value[self.rows]

    @property
    def leaves(self) -> list[Tensor]:
        """Tensors that the optimiser updates."""
        return [self.change] if self.right is None else [self.change, self.right]

    @property
    def count(self) -> int:
        """Number of trained entries, excluding rows of U and V that affect no entry with mask ≠ 0."""
        if self.mask is None:
            return self.change.numel()
        entries = self.mask.flatten(1) != 0
        if self.right is None:
            return int(entries.sum())
        return int(entries.any(1).sum() + entries.any(0).sum()) * self.right.shape[1]


@dataclass(kw_only=True)
class Healer(SwapSetup):
    """The swapped model that `heal` trains towards the original model or on text, with its trainable parameters."""

    options: HealRequest
    weights: dict[str, Trained] = field(default_factory=dict)
    parameters: dict[Site, dict[str, Trained]] = field(default_factory=dict)
    blocks: list[nn.Module] = field(default_factory=list)  # modules that checkpointing recomputes in the backward pass
    interrupted: bool = False  # True if the user ended the healing early

    def prepare(self, batch: texts.Batch) -> None:
        """Create the changes to trainable weights and kernel parameters, initially 0.

        Raises ModelError if no weight is trainable, or if checkpointing is requested and no block can be recomputed.
        """
        masks = trainable(self.loaded.model, self.sites, self.swaps, batch.inputs)
        if not masks:
            problem = "No weight can be trained: no weight affects only the queries or keys of the swapped heads."
            raise ModelError(problem, "Use swap-kernel, which does not train.")
        self.swaps = expand_parameters(self, [batch])
        if self.options.ksvd_convention == "code":  # initialise Λ to √(nΛ), n the sequence length, where J is 0
            for site, swap in self.swaps.items():
                if swap.kernel.info.form == "output":
                    fitted = swap.kernel.fitted
                    multipliers = (fitted["log_multipliers"] + fitted["tokens"].log()[:, None]) / 2
                    kernel = swap.kernel.with_fitted({**fitted, "log_multipliers": multipliers})
                    self.swaps = {**self.swaps, site: hooks.Replacement(kernel, swap.heads)}
        by_name, rank = dict(self.loaded.model.named_parameters()), self.options.rank
        for name, mask in masks.items():
            if rank is None or rank >= min(by_name[name].flatten(1).shape):
                self.weights[name] = Trained.of(by_name[name], mask)
            else:
                # the seed depends on the name, so that weights of equal shape draw different V
                seed = int.from_bytes(hashlib.sha256(f"{self.seed} {name}".encode()).digest()[:7], "big")
                self.weights[name] = Trained.of_rank(by_name[name], mask, rank, seed)
        if self.options.checkpointing:
            self.blocks = [block for _, block in hooks.blocks(self.loaded.model, texts.first(batch.inputs, 1))]
            if not self.blocks:
                problem = "Checkpointing needs blocks that run exactly once per forward pass, but this model has none."
                raise ModelError(problem, "Pass checkpointing=False.")
        for site, swap in self.swaps.items():
            shared, self.parameters[site] = shared_indices(swap.kernel.fitted), {}
            for name, part in swap.kernel.fitted.items():
                if name in swap.kernel.trainable:
                    sizes = _step_sizes(swap.kernel, self.options.ksvd_convention, name)
                    self.parameters[site][name] = Trained.of(part.float(), sizes, shared.get(name))

    @property
    def leaves(self) -> list[Tensor]:
        """All tensors that the optimiser updates."""
        parameters = (part for by_name in self.parameters.values() for part in by_name.values())
        return [leaf for part in (*self.weights.values(), *parameters) for leaf in part.leaves]

    @property
    def count(self) -> int:
        """Number of trained entries."""
        parameters = (part.change.numel() for by_name in self.parameters.values() for part in by_name.values())
        return sum(part.count for part in self.weights.values()) + sum(parameters)

    def healed_swaps(self) -> hooks.Swaps:
        """Return the swaps with the current kernel parameters."""
        swaps = {}
        for site, swap in self.swaps.items():
            trained = {name: part.value for name, part in self.parameters[site].items()}
            swaps[site] = hooks.Replacement(swap.kernel.with_fitted({**swap.kernel.fitted, **trained}), swap.heads)
        return swaps

    def descend(self, inputs: Mapping[str, Tensor], targets: Tensor | None, weight: float) -> None:
        """Add the gradient of `weight` · (loss + `penalty`) to the leaves (Chen et al. 2023, section 3.3).

        The loss is the mean of the losses of `run_student`.
        """
        penalties: list[Tensor] = []
        with torch.enable_grad(), self.run_student(inputs, targets, penalties) as (losses, _):
            loss: Tensor = weight * (losses.mean() + self.penalty(penalties))
            loss.backward()  # type: ignore[no-untyped-call]

    def by_sequence(self, inputs: Mapping[str, Tensor], targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return each sequence's mean loss and number of compared tokens; omit sequences without compared tokens."""
        with torch.no_grad(), self.run_student(inputs, targets, []) as (losses, owners):
            return average_by_sequence(losses, owners, texts.sequences_in(inputs))

    def penalty(self, penalties: list[Tensor]) -> Tensor | float:
        """Return η times the sum of the layers' regularisers (convention `code`: their mean); 0 if there are none."""
        if not self.options.eta or not penalties:
            return 0.0
        squares = torch.stack(penalties)
        return self.options.eta * (squares.sum() if self.options.ksvd_convention == "paper" else squares.mean())

    def collect_penalties(self, swaps: hooks.Swaps, penalties: list[Tensor]) -> Callable[[Site, Call], None] | None:
        """Return a function that appends J² of an attention call to `penalties`; None if J² is not part of the loss."""

        def visit(site: Site, call: Call) -> None:
            swap = swaps[site]
            part = call if swap.heads is None else call.select(swap.heads)
            penalties.append(regulariser(part, swap.kernel, self.options.ksvd_convention))

        return visit if self.options.eta else None

    @contextmanager
    def run_student(
        self, inputs: Mapping[str, Tensor], targets: Tensor | None, penalties: list[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run the swapped model (the student); yield the loss at each compared token, and the token's sequence index.

        The loss is KL(original ‖ swapped) in nats, 1 − cosine of the states of headless models or, for the goal `text`,
        the cross-entropy of `targets`. The J² of primal layers are appended to `penalties`. The backward pass must run
        inside the `with` block, where the student stays in place, because modules can be recomputed.
        """
        model, options = self.loaded.model, output_options(self.task)
        text, original = targets if self.options.learn == "text" else None, None
        if text is None:
            with torch.no_grad():
                original = self._select_output(hooks.forward(model, inputs, **options))
        swaps, values = self.healed_swaps(), {name: part.value for name, part in self.weights.items()}
        with (
            hooks.replace(model, self.sites, swaps, self.path, visit=self.collect_penalties(swaps, penalties)),
            # private: the public functional_call would restore the parameters before blocks are recomputed
            _reparametrize_module(model, values, tie_weights=True),
            _apply_checkpointing(self.blocks),
        ):
            result = hooks.forward(model, inputs, **options)
            if original is not None:
                yield self._compare(original, self._select_output(result), inputs)
            elif text is not None:
                logits = predictions(result, Fed(dict(inputs), text), self.task)
                assert logits is not None  # noqa: S101  # a model without predictions has no targets
                yield token_losses(logits, text), (text != NOTHING).nonzero()[:, 0]

    def _select_output(self, result: object) -> Tensor:
        return states_of(result) if self.task == "hidden" else logits_of(result)

    def _compare(self, original: Tensor, new: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the distance of `new` from `original` at each real token, and the index of the token's sequence."""
        owners = sequence_index(original, inputs)
        if owners is None:  # attribute all to the first sequence
            owners = torch.zeros(original[..., 0].numel(), dtype=torch.long)
        if self.task != "classification":
            original, new = (hooks.at_real_tokens(part, inputs) for part in (original, new))
        if self.task == "hidden":
            losses = 1 - nn.functional.cosine_similarity(original.float(), new.float(), dim=-1)
        else:
            losses = divergence(original.float(), new.float())
        return losses.flatten(), owners

    def values(self) -> dict[str, Tensor]:
        """Return the current values of the trained weights, keyed by name and detached from the graph."""
        return {name: part.value.detach() for name, part in self.weights.items()}


def _step_sizes(kernel: Kernel, convention: Convention, name: str) -> Tensor | None:
    """Return the factor that scales the optimiser's step in each column of the map `name`; None if all are 1.

    For A and B of kernel `rank`, the factor is the column's length divided by the root mean square of all lengths, so
    that all columns turn by equal angles. For primal's maps, the factor is √σ, at most 1, because the curvature of J in
    a column is proportional to 1/σ, where σ is the column's singular value.
    """
    if name not in ("query_map", "key_map"):
        return None
    if kernel.info.form != "output":
        squares = kernel.fitted[name].float().square()
        return (squares.mean(-2, keepdim=True) / squares.mean().clamp_min(TINIEST)).sqrt().expand_as(squares)
    power = 1.0 if convention == "code" else 0.5
    length = kernel.fitted["tokens"].log()[:, None] / 2 if convention == "paper" else 0.0
    return (-(power * kernel.fitted["log_multipliers"] + length)).exp().clamp_max(1.0).float()[:, None]


@contextmanager
def _apply_checkpointing(blocks: list[nn.Module]) -> Iterator[None]:
    """Context manager: apply gradient checkpointing (Chen et al. 2016) to `blocks`."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # restores the method of the class


SMALLEST = 1e-30  # lower bound on ‖original‖² in relative errors, since a site's output can be 0


def transfer(healer: Healer, inputs: Mapping[str, Tensor], weight: float = 1.0) -> float:
    """Compute the attention transfer loss, add `weight` times its gradient to the leaves, and return the loss.

    The loss is Σ_sites ‖new − original‖² / ‖original‖² of the site outputs softmax(…)V, averaged over sequences (Zhang
    et al. 2024, LoLCATs, Eq. 6, with relative errors), plus the regulariser of primal attention. Each module runs
    separately, on its input in the original model, so that only one autograd graph is in memory.
    """
    total, terms = 0.0, 1 if healer.options.ksvd_convention == "paper" else len(healer.swaps)
    with torch.enable_grad():
        for errors, penalties in _site_errors(healer, inputs):
            penalty = healer.penalty(penalties) / terms
            loss = sum((error.mean() for error in errors), torch.zeros((), device=errors[0].device)) + penalty
            if loss.requires_grad:  # a site that shares its weights can lack trainable weights
                (weight * loss).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    return total


def transfer_errors(healer: Healer, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return Σ_sites ‖new − original‖² / ‖original‖² of each sequence, without gradients or regulariser.

    Sites that split the sequences into a different number of rows than the first site does are left out.
    """
    with torch.no_grad():
        errors = [error for by_site, _ in _site_errors(healer, inputs) for error in by_site]
    # for example, attention within windows of an image has one row per window
    alike = [error for error in errors if len(error) == len(errors[0])]
    return torch.stack(alike).double().sum(0).cpu()


class _AllModulesRan(Exception):  # noqa: N818
    """Exception that ends a forward pass early."""


def _site_errors(healer: Healer, inputs: Mapping[str, Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield for each module each site's relative squared errors, one per sequence, and the J² values of its sites."""
    model, sites, swaps = healer.loaded.model, healer.sites, healer.healed_swaps()
    paths = {model.get_submodule(site.path): site.path for site in swaps}
    calls = list[tuple[nn.Module, tuple[object, ...], dict[str, object]]]()  # modules and their arguments
    original, new, penalties = dict[Site, Tensor](), dict[Site, Tensor](), list[Tensor]()
    healed = {site for site in sites if site.path in paths.values()}

    def record_output(site: Site, output: Tensor) -> None:
        if site in healed:
            original[site] = output
        if len(original) == len(healed):
            raise _AllModulesRan

    handles = [module.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True) for module in paths]
    watching = hooks.watch(model, sites, lambda _site, _call: None, record_output)
    with suppress(_AllModulesRan), torch.no_grad(), remove_hooks(handles), watching:
        hooks.forward(model, inputs)
    visit = healer.collect_penalties(swaps, penalties)
    with hooks.replace(model, sites, swaps, healer.path, visit=visit, answered=new.__setitem__):
        for module, args, kwargs in calls:
            begin = f"{paths[module]}."
            inside = {name: part for name, part in healer.weights.items() if name.startswith(begin)}
            local = {name.removeprefix(begin): part.value for name, part in inside.items()}
            torch.func.functional_call(module, local, args, kwargs)
            errors = []
            for site, output in new.items():
                real, pair = hooks.real_tokens(original[site], inputs), (output - original[site], original[site])
                error, size = ((part.float().square().flatten(2).sum(-1) * real).sum(1) for part in pair)
                errors.append(error / size.clamp_min(SMALLEST))
            yield errors, penalties
            new.clear()
            penalties.clear()


@dataclass(frozen=True)
class Distances:
    """The distance that training minimises, on each of several sequences."""

    each: Tensor  # mean distance over the compared tokens of each sequence, float64
    counts: Tensor  # number of tokens compared in each sequence; 1 in the stage `transfer`

    @property
    def mean(self) -> float:
        """Mean over all compared tokens; ∞ if a distance is not finite, and 0 if rounding makes the mean negative."""
        if not self.finite:
            return math.inf
        return max(0.0, float((self.each * self.counts).sum() / self.counts.sum()))

    @property
    def finite(self) -> bool:
        """True if the distance of every sequence is finite."""
        return math.isfinite(float(self.each.sum()))

    def falls_from(self, before: Distances) -> bool:
        """Return True if the distances are significantly smaller than `before` (for few sequences: smaller on average).

        If `self` or `before` is not finite, return whether `self` is finite.
        """
        if not (self.finite and before.finite):
            return self.finite
        value, _, high = paired_difference(before.each, self.each, weights=self.counts)
        return (value if len(self.each) < FEWEST_DRAWS or math.isnan(high) else high) < 0


def measure_distances(healer: Healer, fed: Sequence[Fed], stage: HealingStage = "whole") -> Distances:
    """Measure the distance that `stage` minimises, without the regulariser, on each sequence of `fed`."""
    if stage == "transfer":
        errors = torch.cat([transfer_errors(healer, batch.inputs) for batch in fed])
        return Distances(errors, torch.ones_like(errors))
    parts = [healer.by_sequence(batch.inputs, batch.targets) for batch in fed]
    means, counts = (torch.cat(part).double() for part in zip(*parts, strict=True))
    return Distances(means, counts)


BETAS = 0.9, 0.95  # β₁ and β₂ of AdamW; with few steps and β₂ = 0.999, the large first gradients would dominate
LONGEST = 1.0  # maximum gradient norm, for clipping


def set_values(leaves: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy `values` into `leaves`."""
    with torch.no_grad():
        for leaf, value in zip(leaves, values, strict=True):
            leaf.copy_(value)


def adamw(leaves: Sequence[Tensor], rate: float) -> torch.optim.AdamW:
    """Build AdamW without weight decay, because the leaves are weight changes, not weights."""
    return torch.optim.AdamW(list(leaves), lr=rate, betas=BETAS, weight_decay=0.0)


def descend(
    healer: Healer, optimiser: torch.optim.Optimizer, parts: Sequence[Fed], stage: HealingStage, rate: float
) -> None:
    """Take one optimiser step at `rate` on the mean loss over all tokens of `parts`, with a clipped gradient."""
    optimiser.param_groups[0]["lr"] = rate
    optimiser.zero_grad()
    counts = [tokens_in(part) for part in parts]
    for part, count in zip(parts, counts, strict=True):
        weight = count / sum(counts)
        if stage == "transfer":
            transfer(healer, part.inputs, weight)
        else:
            healer.descend(part.inputs, part.targets, weight)
    nn.utils.clip_grad_norm_(healer.leaves, LONGEST)
    optimiser.step()


RATES: dict[HealingStage, tuple[float, ...]] = {
    "transfer": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "whole": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
}
"""Learning rates tried in each stage, in ascending order, until a rate gains less than ENOUGH of the best gain."""
SLOWER, LEAST = 0.1, 1e-7  # factor and lower bound of further rates, tried if no listed rate reduces the distance
STEPS = 8  # steps per tried rate, over which the rate rises and falls; at most a tenth of all planned steps
ENOUGH = 0.9  # share of the best gain that suffices for a larger rate, which gains more in a longer run


def choose_rate(
    healer: Healer, stage: HealingStage, steps: Sequence[Sequence[Fed]], held_out: Sequence[Fed]
) -> tuple[float, list[HealingRate]]:
    """Return the largest rate whose gain is at least ENOUGH of the best gain (0: no gain), and all tried rates.

    The gain of a rate is the decrease in the distance on `held_out` after training on `steps`.
    """
    before = [leaf.detach().clone() for leaf in healer.leaves]
    start = measure_distances(healer, held_out, stage).mean
    half = (len(steps) + 1) // 2  # the rate rises over half of the steps, and falls over the others
    distances: dict[float, float] = {}  # by rate; ∞ if not finite

    def try_rate(rate: float) -> None:
        optimiser = adamw(healer.leaves, rate)
        for number, parts in enumerate(steps):
            descend(healer, optimiser, parts, stage, rate * min(number + 1, len(steps) - number) / half)
        distances[rate] = measure_distances(healer, held_out, stage).mean
        set_values(healer.leaves, before)

    def gains_enough(rate: float) -> bool:
        return start - distances[rate] >= ENOUGH * (start - min(distances.values()))

    for rate in RATES[stage]:
        try_rate(rate)
        if not gains_enough(rate):
            break
    while min(distances.values()) >= start > 0 and min(distances) * SLOWER >= LEAST:
        try_rate(min(distances) * SLOWER)
    tried = [HealingRate(rate=rate, validation=None if math.isinf(d) else d) for rate, d in distances.items()]
    return 0.0 if min(distances.values()) >= start else max(filter(gains_enough, distances)), tried
