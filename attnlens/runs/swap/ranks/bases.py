"""Directions of the latents at each swapped site, and the sensitivity of the loss to their ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnlens.errors import ModelError, UnreadableError, UsageError
from attnlens.kernels import Kernel, parsed
from attnlens.kernels.attention import attend
from attnlens.kernels.lowrank import AFTER, ALL, BEFORE, OUTPUT, Latents, MapsFit, Turn
from attnlens.kernels.spec import pairs_weighted
from attnlens.models import hooks, texts, weights
from attnlens.models.hooks.survey import unpadded
from attnlens.models.loading import Loaded
from attnlens.models.texts.targets import Fed
from attnlens.records import Call, Rotation, Site, Task
from attnlens.runs.outputs import predictions
from attnlens.runs.progress import Tell

if TYPE_CHECKING:
    from jaxtyping import Float


def sampled(
    loaded: Loaded, sites: tuple[Site, ...], wanted: Collection[Site], fed: Fed, task: Task, generator: torch.Generator
) -> tuple[dict[Site, Call], dict[Site, Tensor], Tensor, int]:
    """Run a batch with targets drawn from the model's predictions; return calls, outputs, loss and target count.

    Calls are those of all sites. Outputs of the `wanted` sites, (batch, queries, heads, value_dim), are in the graph of
    the loss, which is summed over targets, in nats. Raises ModelError if the loss has no gradient.
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
        return calls, {site: outputs[site] for site in wanted if site in outputs}, loss, len(drawn)


@contextmanager
def _differentiable(model: PreTrainedModel) -> Iterator[None]:
    """Let all floating-point weights require gradients inside the block."""
    before = [(weight, weight.requires_grad) for weight in model.parameters() if weight.is_floating_point()]
    try:
        for weight, _ in before:
            weight.requires_grad_(True)
        yield
    finally:
        for weight, own in before:
            weight.requires_grad_(own)


SEQUENCES = 16
"""Maximum number of sequences per text for the gradients of the output metric."""


def give_rotations(loaded: Loaded, swaps: hooks.Swaps, fits: Iterable[tuple[Site, MapsFit]]) -> None:
    """Set the rotation of fits of keys before the rotation; raise UsageError at a site where it is unknown."""
    before = [(site, fit) for site, fit in fits if fit.before]
    found = turns(loaded, list(swaps)) if before else {}
    for site, fit in before:
        turn = found[site]
        if isinstance(turn, str):
            raise UsageError(
                f"{site.name} has no keys before a rotation: {turn}.", "Leave out rotation=before, or such layers."
            )
        fit.turn = turn


def give_metrics(
    loaded: Loaded,
    sites: tuple[Site, ...],
    swaps: hooks.Swaps,
    fits: Iterable[tuple[Site, MapsFit]],
    fed: Sequence[Fed],
    task: Task,
    seed: int,
) -> None:
    """Set the output metric of fits that need one; raise UsageError or ModelError without predictions or gradient."""
    by_output = [(site, fit) for site, fit in fits if fit.by_output]
    if not by_output:
        return
    if task == "hidden":
        raise UsageError(
            "metric=output weighs pairs by what they do to predictions, and this model makes no predictions.",
            "Leave out metric=output.",
        )
    metrics = output_metrics(loaded, sites, _first_sequences(fed, SEQUENCES), task, seed)
    for site, fit in by_output:
        heads = swaps[site].heads
        fit.output = metrics[site] if heads is None else metrics[site][list(heads)]


def _first_sequences(fed: Sequence[Fed], sequences: int) -> Iterator[Fed]:
    """Yield the first `sequences` sequences of these batches, cutting the last batch if needed."""
    for one in fed:
        count = texts.sequences_in(one.inputs)
        if sequences <= 0:
            return
        yield one if count <= sequences else one.rows(0, sequences)
        sequences -= count


def turns(loaded: Loaded, sites: Sequence[Site]) -> dict[Site, Turn | str]:
    """Return the rotation of each site's keys as frequencies, or the reason if it cannot be inverted."""
    inputs = texts.placeholder(loaded, 64, 0).batches[0].inputs
    reached = [found for found in hooks.survey(loaded.model, inputs) if found.site in sites]
    positioned = {found.site: found.call.places is not None for found in reached}
    found = dict(zip([one.site for one in reached], weights.rotations(loaded.model, reached), strict=True))
    unknown = "the model does not tell its attention the positions of the tokens"
    return {site: _read_turn(found[site]) if positioned[site] else unknown for site in sites}


def _read_turn(found: Rotation | UnreadableError | None) -> Turn | str:
    if isinstance(found, UnreadableError):
        return found.problem
    if found is None:
        return "its keys are not rotated"
    if not found.by_distance:
        return "its rotation is not one of distances"
    angles = weights.frequencies(found)
    frequency, partner = angles.new_zeros(found.size), torch.arange(found.size)
    first, second = found.pairs.unbind(-1)
    frequency[first], frequency[second] = -angles, angles
    partner[first], partner[second] = second, first
    return Turn(frequency, partner)


def output_metrics(
    loaded: Loaded, sites: tuple[Site, ...], fed: Iterable[Fed], task: Task, seed: int
) -> dict[Site, Float[Tensor, "heads value_dim value_dim"]]:
    """Compute Σ g gᵀ over tokens for each head, g = ∂loss/∂o of its output o, with targets drawn from the model.

    Up to a factor this estimates W_Oᵀ F W_O, F the Fisher information of the predictions at the residual stream
    (Martens 2020, Eq. 7); with F = 1 the metric is W_OᵀW_O.
    """
    totals: dict[Site, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for one in fed:
        _, outputs, loss, _ = sampled(loaded, sites, sites, one, task, generator)
        gradients = torch.autograd.grad(loss, list(outputs.values()), allow_unused=True)
        for (site, output), gradient in zip(outputs.items(), gradients, strict=True):
            slope = torch.zeros_like(output) if gradient is None else gradient
            moment = torch.einsum("bqhv,bqhw->hvw", slope.double(), slope.double())
            totals[site] = totals.get(site, torch.zeros_like(moment)) + moment
    return totals


def possible_forms(loaded: Loaded, swaps: hooks.Swaps) -> list[Kernel]:
    """Return the possible forms, the kernel's own first: latents shared or not, of keys after or before rotation."""
    named = next(iter(swaps.values())).kernel
    inputs = texts.placeholder(loaded, 2, 0).batches[0].inputs
    reached = [found for found in hooks.survey(loaded.model, inputs) if found.site in swaps]
    groups = [1, ALL] if any(found.call.key.shape[1] > 1 for found in reached) else [1]
    undone = not any(isinstance(turn, str) for turn in turns(loaded, list(swaps)).values())
    return [_with(named, group=group, rotation=r) for r in ([AFTER, BEFORE] if undone else [AFTER]) for group in groups]


def by_output(form: Kernel) -> Kernel:
    """Return the form with pairs weighted by their effect on the output."""
    return _with(form, metric=OUTPUT)


def form_name(form: Kernel) -> str:
    """Format the form as typed after `rank:`, as in `group=all,rotation=before,metric=attention`."""
    words = {p.name: {number: word for word, number in p.words} for p in form.info.parameters}
    values = {name: form.parameters[name] for name in ("group", "rotation", "metric")}
    return ",".join(f"{name}={words[name].get(value, f'{value:g}')}" for name, value in values.items())


def _with(kernel: Kernel, **parameters: float) -> Kernel:
    return replace(kernel, parameters={**kernel.parameters, **parameters})


Fits = dict[Site, MapsFit]
"""The fit of each site."""


@dataclass(frozen=True)
class Basis:
    """The latents of one site, and the heads that read them."""

    heads: tuple[int, ...]  # swapped query heads, ordered by key head
    kv_heads: tuple[int, ...]  # their key heads
    latents: Latents  # the directions of each latent

    @property
    def sizes(self) -> list[int]:
        """Full rank of each latent: the summed size of its keys."""
        return self.latents.sizes

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Key heads of each latent, numbered as in the module."""
        return [tuple(self.kv_heads[own] for own in group) for group in self.latents.groups]

    @property
    def latent_of(self) -> list[int]:
        """Latent of each swapped query head."""
        groups = self.latents.groups
        return [next(at for at, group in enumerate(groups) if own in group) for own in self.latents.key_of]

    def heads_of(self, latent: int) -> list[int]:
        """Return the query heads that use a latent."""
        return [head for head, own in zip(self.heads, self.latent_of, strict=True) if own == latent]

    def maps(self, ranks: Sequence[int]) -> dict[str, Tensor]:
        """Return the kernel's fitted parameters for these ranks, one per latent."""
        return self.latents.maps(ranks)


@dataclass
class FormsRead:
    """The fits to the calibration texts, by form and text."""

    heads: dict[Site, tuple[int, ...]]  # swapped query heads of each site
    kv_heads: dict[Site, tuple[int, ...]]  # their key heads
    fits: dict[str, dict[str, Fits]]  # fits by spelling of the form, text and site

    def bases(self, form: str, without: str | None = None) -> dict[Site, Basis]:
        """Return the directions of each site, fitted to all texts, or to all but `without`."""
        read = [fits for name, fits in self.fits[form].items() if name != without]
        return {
            site: Basis(self.heads[site], self.kv_heads[site], reduce(MapsFit.plus, (f[site] for f in read)).latents())
            for site in self.heads
        }


def gathered(
    loaded: Loaded,
    sites: tuple[Site, ...],
    swaps: hooks.Swaps,
    forms: Sequence[Kernel],
    batches: Sequence[tuple[str, Fed]],
    task: Task,
    seed: int,
    progress: Tell,
) -> FormsRead:
    """Fit each form of latents to these batches, each of one text, in one pass of the original model.

    If pairs are weighted by the output, the weights of each text come from gradients on that text, so that maps fitted
    to the other texts do not depend on it. Raises UsageError if only some of the query heads that share a key head are
    swapped, and what `give_rotations` and `give_metrics` raise.
    """
    numbers = {form.spelling: {name: int(value) for name, value in form.parameters.items()} for form in forms}
    blank = {form: {site: MapsFit(**given) for site in swaps} for form, given in numbers.items()}
    give_rotations(loaded, swaps, _all_fits(blank.values()))
    names = list(dict.fromkeys(name for name, _ in batches))
    by_text = {
        form: {name: {s: copy(fit) for s, fit in fits.items()} for name in names} for form, fits in blank.items()
    }
    found = FormsRead({}, {}, by_text)
    for name in next(iter(found.fits.values())):
        own = [fed for text, fed in batches if text == name]
        give_metrics(loaded, sites, swaps, _all_fits(fits[name] for fits in found.fits.values()), own, task, seed)

    def visit(site: Site, call: Call) -> None:
        if site not in swaps:
            return
        heads = tuple(sorted(swaps[site].heads or range(call.query.shape[1])))
        found.heads[site], found.kv_heads[site] = heads, _check_groups(site, heads, call.group)
        own = [fits[text][site] for fits in found.fits.values()]
        for part in unpadded(call.select(heads), site, fed.inputs):
            by_attention = pairs_weighted(part)
            for fit in own:
                fit.update(part, by_attention)

    with torch.no_grad(), hooks.watch(loaded.model, sites, visit):
        for text, fed in batches:  # noqa: B007  # `visit` reads both variables
            hooks.forward(loaded.model, fed.inputs)
            progress(texts.sequences_in(fed.inputs))
    found.heads = {site: found.heads[site] for site in swaps}
    return found


def _all_fits(fits: Iterable[Fits]) -> list[tuple[Site, MapsFit]]:
    return [pair for found in fits for pair in found.items()]


def _check_groups(site: Site, heads: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Return the key heads of these query heads; raise UsageError if other query heads share them."""
    kv_heads = tuple(sorted({head // group for head in heads}))
    every = [head for kv_head in kv_heads for head in range(kv_head * group, (kv_head + 1) * group)]
    if list(heads) != every:
        raise UsageError(
            f"At {site.name} the heads {', '.join(map(str, every))} share key heads, and not all of them are chosen.",
            "A key shrinks for all of its query heads or for none: choose whole groups with --heads.",
        )
    return kv_heads


LEVELS = 16
"""Number of evenly spaced ranks from 0 to full rank whose loss is estimated; others are interpolated linearly."""


def sensitivities(
    loaded: Loaded,
    sites: tuple[Site, ...],
    found: Mapping[Site, Basis],
    batches: Sequence[Fed],
    task: Task,
    seed: int,
    progress: Tell,
) -> dict[Site, Float[Tensor, "latents ranks"]]:
    """Estimate the rise of the loss, in nats per prediction, if one latent alone has rank 0 … its full rank.

    The output of query i changes by δo_i, computed through the softmax, and the loss by ⟨g_i, δo_i⟩, g_i = ∂loss/∂o_i.
    With targets drawn from the model's own predictions, this change has mean 0, and its second moment is the Fisher
    information (Martens 2020, Eq. 7). The rise is therefore ½ Σ_i ⟨g_i, δo_i⟩², with queries and heads taken as
    independent. A gradient with respect to the logits would be 0 for a saturated head, although such a head loses
    everything once the saturating logits are cut. Raises ModelError if the loss has no gradient.
    """
    totals = {site: torch.zeros(len(basis.sizes), max(basis.sizes) + 1) for site, basis in found.items()}
    generator, count, kernel = torch.Generator().manual_seed(seed), 0, parsed("rank:65536")  # `maps` set the rank
    for fed in batches:
        calls, outputs, loss, drawn = sampled(loaded, sites, found, fed, task, generator)
        gradients = torch.autograd.grad(loss, list(outputs.values()), allow_unused=True)
        count += drawn
        for (site, output), gradient in zip(outputs.items(), gradients, strict=True):
            if gradient is not None:
                with torch.no_grad():
                    totals[site] = totals[site] + _squares(found[site], kernel, calls[site], output, gradient).cpu()
        progress(texts.sequences_in(fed.inputs))
    return {site: _between(total / (2 * count), found[site].sizes) for site, total in totals.items()}


def levels(size: int) -> list[int]:
    """Return the ranks whose loss is estimated, including 0 and `size`."""
    return [*range(0, size, -(-size // LEVELS)), size]


def _squares(
    basis: Basis,
    kernel: Kernel,
    call: Call,
    output: Float[Tensor, "batch queries all_heads value_dim"],
    gradient: Float[Tensor, "batch queries all_heads value_dim"],
) -> Float[Tensor, "latents ranks"]:
    """Compute Σ_i ⟨g_i, δo_i⟩² at each level of rank, summed over the heads of each latent; 0 at other ranks."""
    heads, sizes = list(basis.heads), basis.sizes
    own, slope, part = output[:, :, heads], gradient[:, :, heads].double(), call.select(heads)
    found = torch.zeros(len(sizes), max(sizes) + 1, dtype=torch.float64)
    latent_of = torch.tensor(basis.latent_of)
    for step in range(len(levels(max(sizes))) - 1):
        ranks = [(levels(size) + [size] * LEVELS)[step] for size in sizes]
        change = (slope * (attend(part, kernel.with_fitted(basis.maps(ranks))) - own)).sum(-1)
        each = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, latent_of, change.square().sum((0, 1)).cpu())
        for latent, (rank, size) in enumerate(zip(ranks, sizes, strict=True)):
            if rank < size:
                found[latent, rank] = each[latent]
    return found


def _between(costs: Float[Tensor, "latents ranks"], sizes: Sequence[int]) -> Float[Tensor, "latents ranks"]:
    """Interpolate linearly between the levels of rank, and set ∞ beyond a latent's full rank, in place."""
    for row, size in zip(costs, sizes, strict=True):
        row[size + 1 :] = torch.inf
        for low, high in pairwise(levels(size)):
            share = torch.arange(high - low, dtype=costs.dtype) / (high - low)
            row[low:high] = row[low] + (row[high] - row[low]) * share
    return costs
