"""Chooses the sites that a swap replaces, and refuses a kernel that has no meaning at one of them."""

from __future__ import annotations

from collections.abc import Sequence

from attnlens import hooks
from attnlens.choices import Part
from attnlens.errors import ModelError, UsageError
from attnlens.hooks import Reached
from attnlens.kernels import Kernel
from attnlens.records import Site, Skipped
from attnlens.run import checks


def chosen_sites(
    reached: Sequence[Reached], layers: Sequence[int] | None, heads: Sequence[int] | None, part: Part | None
) -> dict[Site, tuple[int, ...] | None]:
    """The sites of these layers and this part, each with those of the heads asked for that it has; None means all.

    Raises UsageError for a layer or head that the model does not have, and where no site is left.
    """
    heads_of = {found.site: found.call.query.shape[1] for found in reached}
    checks.check_chosen(layers, heads, reached)
    sites = [site for site in heads_of if layers is None or site.layer in layers]
    sites = [site for site in sites if part in (None, site.part)]
    own = {site: None if heads is None else tuple(head for head in heads if head < heads_of[site]) for site in sites}
    # A site with fewer heads than the one that has most may have none of those asked for.
    found = {site: its for site, its in own.items() if its != ()}
    if not found:
        parts = ", ".join(sorted({site.part for site in heads_of}))
        raise UsageError(
            "No site is left to swap.", f"The model has the parts {parts}; widen --layers, --heads or --part."
        )
    return found


def idle_sites(survey: hooks.Surveyed, layers: Sequence[int] | None) -> list[Skipped]:
    """Attention that the inputs do not run.

    Raises ModelError where all layers are to be swapped and one's can't be read.
    """
    missed = survey.missed
    outside = [(path, why) for path, why in missed.items() if why is not None]
    if outside and layers is None:
        raise ModelError(
            f"{outside[0][0]} can't be swapped: {outside[0][1]}.",
            f"Swap the {len(survey.reached)} sites within reach: --layers 0-{len(survey.reached) - 1}.",
        )
    return [Skipped(site=path, reason=checks.NOT_RUN) for path, why in missed.items() if why is None]


def refuse_crossing(kernel: Kernel, sites: Sequence[Site]) -> None:
    """Raise UsageError where the kernel has no meaning in a cross-attention among the sites."""
    crossing = next((site for site in sites if site.part == "cross"), None)
    if crossing and kernel.info.form == "output":
        raise UsageError(
            f"{kernel.info.name} has no meaning in cross-attention ({crossing.name}): "
            "its e- and r-scores would belong to the tokens of two sequences.",
            "Choose --part encoder or --part decoder.",
        )
    if crossing and kernel.info.oracle is not None:
        raise UsageError(
            f"{kernel.info.name} has no meaning in cross-attention ({crossing.name}): no token has both a query and a "
            "key there.",
            "Choose --part encoder or --part decoder.",
        )
    placed = kernel.filter or kernel.near
    modifier = kernel.tie or (placed.modifier.name if placed else None)
    if crossing and modifier:
        raise UsageError(
            f"{modifier} has no meaning in cross-attention ({crossing.name}).",
            "Choose --part encoder or --part decoder.",
        )
