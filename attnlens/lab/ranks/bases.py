"""Directions of the latents at each swapped site, and the sensitivity of the loss to the latents' ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.errors import UsageError
from attnlens.kernels import Kernel, parsed
from attnlens.kernels.attention import attend
from attnlens.kernels.lowrank import AFTER, ALL, BEFORE, Latents, MapsFit
from attnlens.kernels.pair_weights import pairs_weighted
from attnlens.models import hooks, texts
from attnlens.models.hooks.survey import iterate_unpadded
from attnlens.models.loading import Loaded
from attnlens.models.texts.targets import Fed
from attnlens.records import Call, Site
from attnlens.runs.progress import AddSteps
from attnlens.runs.swap.fit import find_turns, sample_gradients, set_metrics, set_rotations
from attnlens.runs.swap.sites import SwapSetup

if TYPE_CHECKING:
    from jaxtyping import Float


def list_forms(loaded: Loaded, swaps: hooks.Swaps) -> list[Kernel]:
    """Return the forms of latents to compare: one latent per key head or per site, of keys after or before rotation.

    Forms for keys before the rotation are included only if the rotation of every site can be inverted.
    """
    kernel = next(iter(swaps.values())).kernel
    inputs = texts.placeholder(loaded, 2, 0).batches[0].inputs
    key_heads = [each.call.key.shape[1] for each in hooks.survey(loaded.model, inputs) if each.site in swaps]
    groups = [1, ALL] if max(key_heads) > 1 else [1]
    invertible = not any(isinstance(turn, str) for turn in find_turns(loaded, list(swaps)).values())
    rotations = [AFTER, BEFORE] if invertible else [AFTER]
    return [with_parameters(kernel, group=group, rotation=rotation) for rotation in rotations for group in groups]


def form_name(form: Kernel) -> str:
    """Spell a form as typed after `rank:`, such as `group=all,rotation=before,metric=attention`."""
    words = {p.name: {number: word for word, number in p.words} for p in form.info.parameters}
    values = {name: form.parameters[name] for name in ("group", "rotation", "metric")}
    return ",".join(f"{name}={words[name].get(value, f'{value:g}')}" for name, value in values.items())


def with_parameters(kernel: Kernel, **parameters: float) -> Kernel:
    """Return a copy of the kernel with the given parameters changed."""
    return replace(kernel, parameters={**kernel.parameters, **parameters})


@dataclass(frozen=True)
class Basis:
    """The latents of one site, and the heads that read them."""

    heads: tuple[int, ...]  # swapped query heads, ordered by key head
    kv_heads: tuple[int, ...]  # key heads that the query heads read
    latents: Latents  # the directions of each latent

    @property
    def sizes(self) -> list[int]:
        """Largest possible rank of each latent: the sum of head_dim over its key heads."""
        return self.latents.sizes

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Key heads of each latent, numbered as in the module."""
        return [tuple(self.kv_heads[index] for index in group) for group in self.latents.groups]

    @property
    def latent_of(self) -> list[int]:
        """Index of the latent that each swapped query head reads."""
        by_key = {key: latent for latent, group in enumerate(self.latents.groups) for key in group}
        return [by_key[key] for key in self.latents.key_of]

    def heads_of(self, latent: int) -> list[int]:
        """Return the query heads that read a latent."""
        return [head for head, used in zip(self.heads, self.latent_of, strict=True) if used == latent]


def mean_rank(bases: Mapping[Site, Basis], ranks: Mapping[Site, Sequence[int]]) -> float:
    """Return the rank per key head, averaged over query heads; `ranks` lists the ranks of each site's latents."""
    pairs = [
        (rank / len(group), len(basis.heads_of(latent)))
        for site, basis in bases.items()
        for latent, (rank, group) in enumerate(zip(ranks[site], basis.groups, strict=True))
    ]
    return sum(rank * readers for rank, readers in pairs) / sum(readers for _, readers in pairs)


Forms = dict[str, dict[str | None, dict[Site, Basis]]]
"""Latents keyed by the form's spelling, the name of the text left out of the fit (None: no text), and the site."""


def fit_forms(
    setup: SwapSetup, forms: Sequence[Kernel], batches: Sequence[tuple[str, Fed]], progress: AddSteps
) -> Forms:
    """Fit each form of latents in one pass of the original model over `batches`, each from a single text.

    With `metric=output`, further passes compute gradients separately for each text, so that maps fitted without a text
    are independent of that text. Raises UsageError if only some query heads of a key head are swapped.
    """
    model, swaps = setup.loaded.model, setup.swaps
    names = list(dict.fromkeys(name for name, _ in batches))
    by_form: dict[str, dict[str, dict[Site, MapsFit]]] = {}
    for form in forms:
        parameters = {name: int(value) for name, value in form.parameters.items()}
        blank = {site: MapsFit(**parameters) for site in swaps}
        set_rotations(setup, blank.items())
        by_form[form.spelling] = {name: {site: copy(fit) for site, fit in blank.items()} for name in names}
    for name in names:
        pairs = [pair for by_text in by_form.values() for pair in by_text[name].items()]
        set_metrics(setup, pairs, [fed for text, fed in batches if text == name])
    heads_of: dict[Site, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # query heads and key heads

    def visit(site: Site, call: Call) -> None:
        if site not in swaps:
            return
        heads = tuple(sorted(swaps[site].heads or range(call.query.shape[1])))
        heads_of[site] = heads, _find_key_heads(site, heads, call.group)
        for part in iterate_unpadded(call.select(heads), site, fed.inputs):
            by_attention = pairs_weighted(part)
            for by_text in by_form.values():
                by_text[text][site].update(part, by_attention)

    with torch.no_grad(), hooks.watch(model, setup.sites, visit):
        for text, fed in batches:  # noqa: B007  # `visit` reads both variables
            hooks.forward(model, fed.inputs, **hooks.without_logits(model))
            progress(texts.sequences_in(fed.inputs))

    def join(by_text: Mapping[str, dict[Site, MapsFit]], left_out: str | None) -> dict[Site, Basis]:
        parts = [fits for name, fits in by_text.items() if name != left_out]
        joined = {site: reduce(MapsFit.plus, (fits[site] for fits in parts)) for site in swaps}
        return {site: Basis(*heads_of[site], fit.latents()) for site, fit in joined.items()}

    subsets = [None, *(names if len(names) > 1 else ())]
    return {form: {name: join(by_text, name) for name in subsets} for form, by_text in by_form.items()}


def _find_key_heads(site: Site, heads: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Return the key heads that the query heads `heads` read; raise UsageError if other query heads also read them."""
    kv_heads = tuple(sorted({head // group for head in heads}))
    sharing = [head for kv_head in kv_heads for head in range(kv_head * group, (kv_head + 1) * group)]
    if list(heads) != sharing:
        names = ", ".join(map(str, sharing))
        problem = f"At {site.name}, heads {names} share key heads, but only some of them are selected."
        raise UsageError(problem, "Select all or none of the query heads that share a key head (--heads).")
    return kv_heads


LEVELS = 16  # number of evenly spaced ranks at which the loss is estimated, with linear interpolation in between


def sensitivities(
    setup: SwapSetup, bases: Mapping[Site, Basis], batches: Sequence[Fed], progress: AddSteps
) -> dict[Site, Float[Tensor, "latents ranks"]]:
    """Estimate the rise in the loss, in nats per prediction, from cutting one latent at a time to each smaller rank.

    The output of query i changes by δo_i, computed through the softmax, and the loss changes by ⟨g_i, δo_i⟩, where g_i
    is ∂loss/∂o_i. If targets are sampled from the model's own predictions, this change has mean 0, and the expected
    rise is half its second moment (Fisher information; Martens 2020, Eq. 7). If queries and heads are treated as
    independent, that is ½ Σ_i ⟨g_i, δo_i⟩², divided by the number of predictions. Ranks beyond a latent's full rank
    get ∞. Gradients with respect to logits are not used, because they vanish in saturated heads.
    """
    totals = {site: torch.zeros(len(basis.sizes), max(basis.sizes) + 1) for site, basis in bases.items()}
    generator, count, kernel = torch.Generator().manual_seed(setup.seed), 0, parsed("rank:65536")  # `maps` cuts ranks
    for fed in batches:
        calls, outputs, gradients, drawn = sample_gradients(setup, bases, fed, generator)
        count += drawn
        for site, gradient in gradients.items():
            with torch.no_grad():
                squares = _sum_squares(bases[site], kernel, calls[site], outputs[site], gradient)
                totals[site] = totals[site] + squares.cpu()
        progress(texts.sequences_in(fed.inputs))
    return {site: _interpolate(total / (2 * count), bases[site].sizes) for site, total in totals.items()}


def levels(size: int) -> list[int]:
    """Return the ranks at which the rise in the loss is estimated, from 0 to the full rank `size`."""
    return [*range(0, size, -(-size // LEVELS)), size]


def _sum_squares(
    basis: Basis,
    kernel: Kernel,
    call: Call,
    output: Float[Tensor, "batch queries all_heads value_dim"],
    gradient: Float[Tensor, "batch queries all_heads value_dim"],
) -> Float[Tensor, "latents ranks"]:
    """Compute Σ_i ⟨g_i, δo_i⟩² at each rank of `levels`, summed over the heads of each latent; other ranks get 0."""
    heads, sizes = list(basis.heads), basis.sizes
    original, slope, part = output[:, :, heads], gradient[:, :, heads].double(), call.select(heads)
    squares = torch.zeros(len(sizes), max(sizes) + 1, dtype=torch.float64)
    latent_of = torch.tensor(basis.latent_of)
    for ranks in zip_longest(*(levels(size)[:-1] for size in sizes)):  # None beyond a latent's levels: its full rank
        cut = [size if rank is None else rank for rank, size in zip(ranks, sizes, strict=True)]
        change = (slope * (attend(part, kernel.with_fitted(basis.latents.maps(cut))) - original)).sum(-1)
        by_head = change.square().sum((0, 1)).cpu()
        for latent, rank in enumerate(ranks):
            if rank is not None:
                squares[latent, rank] = by_head[latent_of == latent].sum()
    return squares


def _interpolate(costs: Float[Tensor, "latents ranks"], sizes: Sequence[int]) -> Float[Tensor, "latents ranks"]:
    """Interpolate `costs` linearly between `levels`, in place, with ∞ beyond a latent's full rank; return `costs`."""
    for row, size in zip(costs, sizes, strict=True):
        row[size + 1 :] = torch.inf
        for low, high in pairwise(levels(size)):
            share = torch.arange(high - low, dtype=costs.dtype) / (high - low)
            row[low:high] = row[low] + (row[high] - row[low]) * share
    return costs
