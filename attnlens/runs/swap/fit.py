"""Fit a kernel's free parameters to the original kernel of each head, in closed form from calibration text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.kernels import Kernel
from attnlens.kernels.attention import attend, weights
from attnlens.kernels.attention.primal_scores import features
from attnlens.kernels.attention.rows import positions
from attnlens.kernels.lowrank import MapsFit
from attnlens.kernels.modifiers import NEAR_WEIGHT
from attnlens.kernels.registry import Fit, OutputFit
from attnlens.models import hooks
from attnlens.models.hooks.survey import unpadded
from attnlens.models.loading import Loaded
from attnlens.models.texts import Batch, Batches
from attnlens.models.texts.targets import feed
from attnlens.records import Call, Site, Task
from attnlens.runs.progress import Tell
from attnlens.runs.swap.ranks.bases import SEQUENCES, give_metrics, give_rotations

if TYPE_CHECKING:
    from jaxtyping import Float

LARGEST, HALVINGS = 30.0, 50
"""Bound on |log γ|, and number of halvings of [−30, 30]: to a width of 5e-14."""


@dataclass
class NearShares:
    """Fit of log γ such that near keys have the same mean share of the weights over queries as in the original model.

    This log γ minimises Σ KL(own ‖ hybrid) over queries, whose derivative Σ γN/(γN + F) − Σ own share increases with
    log γ. N is the weight of near keys at γ = 1; F is that of far keys plus the sink, which counts as an outcome.
    Queries that see only near keys are ignored.
    """

    kernel: Kernel  # the hybrid with its fitted parameters, and γ = 1
    own: list[Float[Tensor, "heads queries"]] = field(default_factory=list)
    """Share of near keys in the original model, one tensor per batch."""
    odds: list[Float[Tensor, "heads queries"]] = field(default_factory=list)  # log N/F

    def update(self, call: Call) -> None:
        """Add a batch: append each query's share of near keys and log N/F."""
        assert self.kernel.near is not None  # noqa: S101  # only hybrids have γ
        every = slice(0, call.query.shape[2]), slice(0, call.key.shape[2])
        near = positions(call, self.kernel.near).keys_kept(self.kernel.near, *every)
        own, new = (weights(call, kernel).double() for kernel in (hooks.OWN, self.kernel))
        self.own.append((own * near).sum(-1).transpose(0, 1).flatten(1).cpu())
        among, beyond = (new * near).sum(-1), (new * ~near).sum(-1)
        beyond = beyond if call.sinks is None else beyond + (1 - new.sum(-1)).clamp_min(0)
        self.odds.append((among.log() - beyond.log()).transpose(0, 1).flatten(1).cpu())

    def best(self) -> dict[str, Tensor]:
        """Return the fitted parameters of the hybrid, including log γ, found by bisection; 0 without usable queries."""
        own, odds = torch.cat(self.own, -1), torch.cat(self.odds, -1)
        counts = odds.isfinite()
        low, high = (torch.full((len(own),), bound, dtype=torch.float64) for bound in (-LARGEST, LARGEST))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            more = ((odds + middle[:, None]).sigmoid() - own).masked_fill(~counts, 0.0).sum(-1) > 0
            low, high = torch.where(more, low, middle), torch.where(more, middle, high)
        found = torch.where(counts.any(-1), (low + high) / 2, 0.0)
        return {**self.kernel.fitted, NEAR_WEIGHT: found.to(self.kernel.fitted[NEAR_WEIGHT])}


MOST_FITTED = 128
"""Maximum number of calibration sequences that a fit reads."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Interpolation weights tried between the typed parameters (0) and the fitted ones (1)."""
TINIEST = 1e-30
"""Lower bound on attention weights, so that the logarithm of a masked key's weight stays finite."""


@dataclass
class Search:
    """Line search per head between the typed and the fitted parameters, minimising the divergence from own attention.

    Least squares weights all scores equally, softmax mainly the large ones: the least-squares optimum can have a larger
    KL(own ‖ new) of the attention rows (including the share of a sink) than the typed parameters have.
    """

    kernel: Kernel  # the kernel as typed
    typed: dict[str, float]  # parameters before the fit
    fitted: dict[str, Tensor]  # parameters after the fit
    divergence: Tensor = field(default_factory=lambda: torch.zeros(()))  # Σ KL, (shares, heads)

    def update(self, call: Call) -> None:
        """Add Σ KL(own ‖ new) of a batch, per share and head."""
        own = _append_sink(call, weights(call, hooks.OWN))
        found = []
        for share in SHARES:
            new = _append_sink(call, weights(call, self.kernel.with_fitted(self.at(torch.tensor(share)))))
            rows = (own * (own.clamp_min(TINIEST).log() - new.clamp_min(TINIEST).log())).sum(-1)
            found.append(rows.sum((0, 2)).cpu())
        self.divergence = self.divergence + torch.stack(found)

    def at(self, share: Tensor) -> dict[str, Tensor]:
        """Interpolate between typed (0) and fitted (1) parameters; `share` is a scalar or has one entry per head."""
        return {
            name: self.typed[name] + share.reshape(-1, *[1] * (part.dim() - 1)).to(part) * (part - self.typed[name])
            for name, part in self.fitted.items()
        }

    def best(self) -> dict[str, Tensor]:
        """Return the parameters with the smallest divergence, chosen per head."""
        return self.at(torch.tensor(SHARES)[self.divergence.nan_to_num(torch.inf).argmin(0)])


def _append_sink(call: Call, rows: Tensor) -> Tensor:
    """Convert attention rows to float64 and append the share of a sink, if there is one, as a last outcome."""
    rows = rows.double()
    return rows if call.sinks is None else torch.cat([rows, (1 - rows.sum(-1, keepdim=True)).clamp_min(0)], -1)


def fit(
    loaded: Loaded,
    sites: tuple[Site, ...],
    swaps: hooks.Swaps,
    batches: Batches,
    progress: Tell,
    task: Task = "hidden",
    seed: int = 0,
) -> hooks.Swaps:
    """Return the swaps with parameters fitted per head to the original model's queries and keys (maths.md section 5).

    Makes two passes over the text: least squares in closed form, then the line search of `Search` or, for a hybrid,
    the weight of near keys. Kernels without typed parameters to start from make only the first pass.
    """
    fits = _create_fits(swaps)
    ranks = [(site, found) for site, found in fits.items() if isinstance(found, MapsFit)]
    give_rotations(loaded, swaps, ranks)
    if any(found.by_output for _, found in ranks):
        fed = feed(loaded, batches.some(SEQUENCES), task, seed)
        give_metrics(loaded, sites, swaps, ranks, fed, task, seed)
    hybrid = all(swap.kernel.near is not None for swap in swaps.values())  # fits of far parts need only shapes
    _read(loaded, sites, swaps, fits, *((batches.first(), lambda _: None) if hybrid else (batches, progress)))
    solved = {site: found.solve() for site, found in fits.items()}
    searches = dict[Site, Search | NearShares]()
    for site, found in solved.items():
        kernel, typed = swaps[site].kernel, fits[site].typed
        if kernel.near is not None:
            searches[site] = NearShares(kernel.with_fitted(found))
        elif typed:
            searches[site] = Search(kernel, typed, found)
    if searches:
        chosen = {site: swaps[site] for site in searches}
        _each(loaded, sites, chosen, batches, lambda site, part: searches[site].update(part), progress)
    solved |= {site: search.best() for site, search in searches.items()}
    return {site: hooks.Replacement(swap.kernel.with_fitted(solved[site]), swap.heads) for site, swap in swaps.items()}


def unfitted(loaded: Loaded, sites: tuple[Site, ...], swaps: hooks.Swaps, batches: Iterable[Batch]) -> hooks.Swaps:
    """Expand unfitted trainable parameters to one value per head, the typed one; fits of `batches` give the shapes."""
    bare = {s: swap for s, swap in swaps.items() if swap.kernel.trainable and not swap.kernel.fitted}
    found = dict(swaps)
    fits = _create_fits(bare)
    _read(loaded, sites, bare, fits, batches, lambda _: None)
    for site, fitting in fits.items():
        kernel = bare[site].kernel
        start = {
            name: torch.full_like(part, fitting.typed[name])
            for name, part in fitting.solve().items()
            if name in kernel.trainable
        }
        found[site] = hooks.Replacement(kernel.with_fitted(start), bare[site].heads)
    return found


def _create_fits(swaps: hooks.Swaps) -> dict[Site, Fit | OutputFit]:
    """Create a fit for each swapped site whose kernel has free parameters."""
    fits = {site: swap.kernel.fitting() for site, swap in swaps.items()}
    return {site: found for site, found in fits.items() if found is not None}


def _read(
    loaded: Loaded,
    sites: tuple[Site, ...],
    swaps: hooks.Swaps,
    fits: Mapping[Site, Fit | OutputFit],
    batches: Iterable[Batch],
    progress: Tell,
) -> None:
    """Update each fit with the queries and keys of its site in the original model."""

    def add(site: Site, part: Call) -> None:
        found = fits[site]
        if isinstance(found, OutputFit):
            seen = features(part, int(swaps[site].kernel.parameters.get("samples", 0)))
            found.observe(seen.query, seen.key, seen.kept, attend(part, hooks.OWN).transpose(1, 2))
        else:
            found.update(part)

    if fits:
        _each(loaded, sites, swaps, batches, add, progress)


def _each(
    loaded: Loaded,
    sites: tuple[Site, ...],
    swaps: hooks.Swaps,
    batches: Iterable[Batch],
    visit: Callable[[Site, Call], None],
    progress: Tell,
) -> None:
    """Call `visit` with the swapped heads of each swapped site, batch by batch, without padding."""

    def answer(site: Site, call: Call) -> None:
        if site in swaps:
            heads = swaps[site].heads
            for part in unpadded(call, site, batch.inputs):
                visit(site, part if heads is None else part.select(heads))

    with torch.no_grad(), hooks.watch(loaded.model, sites, answer):
        for batch in batches:  # `answer` reads this variable
            hooks.forward(loaded.model, batch.inputs)
            progress(batch.size)
