"""Chooses the sites that a swap replaces, and makes the change at each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnlens import hooks
from attnlens.attention import Route, attend, route, weights
from attnlens.choices import Part
from attnlens.errors import ModelError, UsageError
from attnlens.hooks import Reached
from attnlens.kernels import TIES, Kernel
from attnlens.kernels.lowrank import ALL
from attnlens.models import Loaded
from attnlens.records import Call, Site, SiteSwap, Skipped
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
    placed = kernel.filter or kernel.near
    what, why = kernel.tie or (placed.modifier.name if placed else None), ""
    if kernel.info.form == "output":
        what, why = kernel.info.name, ": its e- and r-scores would belong to the tokens of two sequences"
    elif kernel.info.oracle is not None:
        what, why = kernel.info.name, ": no token has both a query and a key there"
    if crossing and what:
        raise UsageError(
            f"{what} has no meaning in cross-attention ({crossing.name}){why}.",
            "Choose --part encoder or --part decoder.",
        )


ROWS = 256
"""Rows of the attention matrix that are written out at once."""
PRIMAL = (
    "Primal attention maps each token's own e- and r-scores to the output and reads no values; where the mask is "
    "causal the scores are those of running means of queries and keys, without a mask a token sees no other (samples "
    "apart)."
)
CONSTANT = 1e-4
"""Relative spread of ‖k‖ below which keys have one length; more where the type rounds by more."""


@dataclass
class Local:
    """What one forward pass of the original model shows about a swap, site by site."""

    sites: list[SiteSwap] = field(default_factory=list)
    """In the order of execution."""
    capped: int = 0
    biased: int = 0
    sinking: int = 0
    constant: int = 0
    """At how many sites scores are capped, biased, compete with a sink, or keys have one length."""
    bounded: int = 0
    """At how many sites there are fewer scores than asked for."""
    left: list[int] = field(default_factory=list)
    """How many key heads the last latent has, at each site where these are fewer than the others have."""
    beyond: list[int] = field(default_factory=list)
    """How many key heads there are, at each site with fewer than were to share a latent."""

    def count(self, call: Call, kernel: Kernel) -> None:
        """Note what is special about a site."""
        output = kernel.info.form == "output"
        self.bounded += output and kernel.fitted["query_map"].shape[-1] < kernel.parameters["scores"]
        key_heads = len(set(call.key_heads))
        self.left += [left] if (left := kernel.leaves(key_heads)) else []
        self.beyond += [key_heads] if key_heads < kernel.parameters.get("group", 1) < ALL else []
        self.capped += call.softcap is not None
        self.biased += call.bias is not None
        self.sinking += call.sinks is not None
        norms = call.key.double().norm(dim=-1)
        spread = max(CONSTANT, 2 * torch.finfo(call.key.dtype).eps)
        self.constant += bool((norms.std(-1) <= spread * norms.mean(-1)).all())

    def notes(self, kernel: Kernel) -> list[str]:
        """What a reader must know, one sentence each."""
        total = len(self.sites)
        if kernel.info.form == "output":
            return self._of_output(kernel, total)
        notes = []
        if self.capped:
            kept = "is read through the model's softcap" if kernel.info.form == "score" else "replaces it whole"
            notes.append(f"The model caps its scores at {self.capped} of {total} sites; the new kernel {kept}.")
        if self.biased:
            notes.append(f"The model adds a position bias at {self.biased} of {total} sites; it is added to log k too.")
        if self.sinking:
            notes.append(
                f"The model has attention sinks at {self.sinking} of {total} sites; log k keeps all its terms."
            )
        if self.constant and kernel.info.equal_lengths:
            notes.append(
                f"All keys of a head have one length at {self.constant} of {total} sites (QK-norm of unit gain): there "
                f"{kernel.info.name} is {kernel.info.equal_lengths}."
            )
        if kernel.oracle:
            notes.append(
                "An analysis: the parts that are kept are those of the evaluated text's own logits, each sequence seen "
                "as a whole. No model computes them."
            )
        elif kernel.info.caution:
            notes.append(kernel.info.caution)
        if kernel.tie is not None and TIES[kernel.tie].caution:
            notes.append(TIES[kernel.tie].caution)
        if self.left:
            notes.append(
                f"The groups do not divide the key heads at {len(self.left)} of {total} sites: the last latent there "
                f"has {_numbers(self.left)}."
            )
        if self.beyond:
            notes.append(
                f"group={kernel.parameters['group']:g} is more than the key heads at {len(self.beyond)} of {total} "
                f"sites ({_numbers(self.beyond)} there): all of them share one latent, as with group=all."
            )
        if kernel.signed:
            notes.append("The kernel can be negative: rows of its attention matrix are no probabilities.")
        return notes

    def _of_output(self, kernel: Kernel, total: int) -> list[str]:
        """The notes on a kernel without scores of a query and a key."""
        notes = [PRIMAL]
        if self.capped or self.biased or self.sinking:
            notes.append("What the model adds to its scores (softcap, position bias, sinks) has no place in it.")
        if self.bounded:
            asked = f"{kernel.parameters['scores']:.0f} scores were asked for"
            bounds = "head_dim or the number of samples" if kernel.parameters["samples"] else "head_dim"
            notes.append(
                f"{asked}; at {self.bounded} of {total} sites {bounds} bounds their rank, and there are no more."
            )
        return notes


def locally(
    loaded: Loaded,
    sites: tuple[Site, ...],
    swaps: hooks.Swaps,
    inputs: Mapping[str, Tensor],
    path: Route,
) -> Local:
    """Each site's own and new output on the original model's queries, keys and values, in one forward pass."""
    found = Local()

    def visit(site: Site, call: Call) -> None:
        if site not in swaps:
            return
        swap = swaps[site]
        part = call if swap.heads is None else call.select(swap.heads)
        both = attend(part, hooks.OWN), attend(part, swap.kernel, path)
        own, new = (hooks.at_real_tokens(output, inputs).double() for output in both)
        error = float((new - own).norm() / own.norm())
        heads = list(swap.heads or range(call.query.shape[1]))
        found.sites.append(
            SiteSwap(
                site=site.name,
                layer=site.layer,
                part=site.part,
                heads=heads,
                path=route(part, swap.kernel, path),
                output_error=error if error == error and error != float("inf") else None,
                off_simplex=_off_simplex(part, swap.kernel, inputs),
            )
        )
        found.count(part, swap.kernel)

    with torch.no_grad(), hooks.watch(loaded.model, sites, visit):
        hooks.forward(loaded.model, inputs)
    return found


def _numbers(found: Sequence[int]) -> str:
    """`1 or 2`: each once."""
    return " or ".join(map(str, sorted(set(found))))


def _off_simplex(call: Call, kernel: Kernel, inputs: Mapping[str, Tensor]) -> float | None:
    """Mean over real tokens' rows of Σ max(−w, 0) / Σ |w|; 0 for a positive kernel, None where a row is not finite and
    where there are no rows.
    """
    if kernel.info.form == "output":
        return None
    if not kernel.signed:
        return 0.0
    shares = []
    for start in range(0, call.query.shape[2], ROWS):
        rows = weights(call, kernel, slice(start, start + ROWS)).double()
        shares.append((-rows).clamp(min=0).sum(-1) / rows.abs().sum(-1))
    mean = float(hooks.at_real_tokens(torch.cat(shares, dim=-1).transpose(1, 2), inputs).mean())
    return mean if mean == mean else None


def mean_of(numbers: Iterable[float | None]) -> float | None:
    """The mean of those that exist."""
    present = [number for number in numbers if number is not None]
    return sum(present) / len(present) if present else None
