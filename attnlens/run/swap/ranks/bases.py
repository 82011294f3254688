"""Directions of the latents at every swapped site, fitted to all calibration texts or to all but one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from attnlens import hooks, texts
from attnlens.errors import UsageError
from attnlens.hooks.padding import unpadded
from attnlens.kernels import Kernel
from attnlens.kernels.fitting import pairs_weighted
from attnlens.kernels.latents import Latents
from attnlens.kernels.lowrank import MapsFit
from attnlens.models import Loaded
from attnlens.records import Call, Site, Task
from attnlens.run.progress import Tell
from attnlens.run.swap.ranks.preparation import give_metrics, give_rotations
from attnlens.texts.targets import Fed

ANY = "rank:65536"
"""A rank that cuts nothing in any head."""
Fits = dict[Site, MapsFit]
"""What was read at each site."""


@dataclass(frozen=True)
class Basis:
    """The latents of one site, and the heads that read them."""

    heads: tuple[int, ...]
    """The query heads swapped, those of one key head side by side."""
    kv_heads: tuple[int, ...]
    """Their key heads."""
    latents: Latents
    """The directions of each latent."""

    @property
    def query_map(self) -> Tensor:
        """A of every latent, (latents, size, directions)."""
        return self.latents.query_map

    @property
    def key_map(self) -> Tensor:
        """B."""
        return self.latents.key_map

    @property
    def head_dim(self) -> int:
        """Coordinates of a key."""
        return self.latents.head_dim

    @property
    def sizes(self) -> list[int]:
        """The numbers that each latent's keys have."""
        return self.latents.sizes

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The key heads of each latent, as the module counts them."""
        return [tuple(self.kv_heads[own] for own in group) for group in self.latents.groups]

    @property
    def latent_of(self) -> list[int]:
        """The latent of each query head swapped."""
        groups = self.latents.groups
        return [next(at for at, group in enumerate(groups) if own in group) for own in self.latents.key_of]

    def heads_of(self, latent: int) -> list[int]:
        """The query heads that read a latent."""
        return [head for head, own in zip(self.heads, self.latent_of, strict=True) if own == latent]

    def maps(self, ranks: Sequence[int]) -> dict[str, Tensor]:
        """The kernel's fitted parameters where each latent keeps so many numbers."""
        return self.latents.maps(ranks)


@dataclass
class FormsRead:
    """What was read of the calibration texts, form by form and text by text."""

    heads: dict[Site, tuple[int, ...]]
    """The query heads swapped at each site."""
    kv_heads: dict[Site, tuple[int, ...]]
    """Their key heads."""
    fits: dict[str, dict[str, Fits]]
    """Of each form of latents, by its spelling, the fits by text and site."""

    def bases(self, form: str, without: str | None = None) -> dict[Site, Basis]:
        """The directions of every site, fitted to all texts, or to all but one."""
        read = [fits for name, fits in self.fits[form].items() if name != without]
        return {
            site: Basis(self.heads[site], self.kv_heads[site], reduce(MapsFit.plus, (f[site] for f in read)).latents())
            for site in self.heads
        }


def bases(
    loaded: Loaded, sites: tuple[Site, ...], swaps: hooks.Swaps, batches: Sequence[Fed], progress: Tell
) -> dict[Site, Basis]:
    """The directions of every swapped site, in one pass of the original model, in the form that its kernel names.

    Raises UsageError where some, but not all of the query heads that share a key head are swapped.
    """
    form = next(iter(swaps.values())).kernel
    return gathered(loaded, sites, swaps, [form], [("", fed) for fed in batches], "hidden", 0, progress).bases(
        form.spelling
    )


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
    """What every form of latents reads of these batches, each of one text, in one pass of the original model.

    Where pairs are weighted by the output, each text's are by gradients of that text: what is read of it alone stays
    out of maps fitted to the others. Raises UsageError where some, but not all of the query heads that share a key head
    are swapped, and what `give_rotations` and `give_metrics` raise.
    """
    found = FormsRead({}, {}, _fits_by_text(loaded, swaps, forms, dict.fromkeys(name for name, _ in batches)))
    for name in next(iter(found.fits.values())):
        own = [fed for text, fed in batches if text == name]
        give_metrics(loaded, sites, swaps, _every(fits[name] for fits in found.fits.values()), own, task, seed)

    def visit(site: Site, call: Call) -> None:
        if site not in swaps:
            return
        heads = tuple(sorted(swaps[site].heads or range(call.query.shape[1])))
        found.heads[site], found.kv_heads[site] = heads, _whole_groups(site, heads, call.group)
        own = [fits[text][site] for fits in found.fits.values()]
        for part in unpadded(call.select(heads), site, fed.inputs):
            by_attention = pairs_weighted(part)
            for fit in own:
                fit.update(part, by_attention)

    with torch.no_grad(), hooks.watch(loaded.model, sites, visit):
        for text, fed in batches:  # noqa: B007  # which `visit` reads
            hooks.forward(loaded.model, fed.inputs)
            progress(texts.sequences_in(fed.inputs))
    found.heads = {site: found.heads[site] for site in swaps}
    return found


def _fits_by_text(
    loaded: Loaded, swaps: hooks.Swaps, forms: Sequence[Kernel], names: Iterable[str]
) -> dict[str, dict[str, Fits]]:
    """A fit of each form, text and site that has read nothing yet, with its rotation."""
    blank = {form.spelling: {site: _blank(form) for site in swaps} for form in forms}
    give_rotations(loaded, swaps, _every(blank.values()))
    texts_named = list(names)
    return {
        form: {name: {site: copy(fit) for site, fit in fits.items()} for name in texts_named}
        for form, fits in blank.items()
    }


def _every(fits: Iterable[Fits]) -> list[tuple[Site, MapsFit]]:
    return [pair for found in fits for pair in found.items()]


def _blank(form: Kernel) -> MapsFit:
    return MapsFit(**{name: int(value) for name, value in form.parameters.items()})


def _whole_groups(site: Site, heads: tuple[int, ...], group: int) -> tuple[int, ...]:
    """The key heads of these query heads."""
    kv_heads = tuple(sorted({head // group for head in heads}))
    every = [head for kv_head in kv_heads for head in range(kv_head * group, (kv_head + 1) * group)]
    if list(heads) != every:
        raise UsageError(
            f"At {site.name} the heads {', '.join(map(str, every))} share key heads, and not all of them are chosen.",
            "A key shrinks for all of its query heads or for none: choose whole groups with --heads.",
        )
    return kv_heads
