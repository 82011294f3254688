"""Fit a kernel's free parameters to the original kernel of each head, from calibration text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.errors import ModelError, UnreadableError, UsageError
from attnlens.kernels import Kernel
from attnlens.kernels.attention import weights
from attnlens.kernels.attention.rows import positions
from attnlens.kernels.lowrank import MapsFit, Turn
from attnlens.kernels.registry import NEAR_WEIGHT, Fit
from attnlens.models import hooks, texts
from attnlens.models import weights as model_weights
from attnlens.models.hooks.survey import iterate_unpadded
from attnlens.models.loading import Loaded
from attnlens.models.texts.targets import Fed, feed
from attnlens.records import Call, Rotation, Site
from attnlens.runs.outputs import predictions
from attnlens.runs.progress import AddSteps
from attnlens.runs.swap.sites import SwapSetup

if TYPE_CHECKING:
    from jaxtyping import Float

LARGEST, HALVINGS = 30.0, 50  # bound on |log γ|, and number of halvings of [−30, 30]: to a width of 5e-14


@dataclass
class NearShares:
    """Fit of γ, a hybrid's weight of near keys, that minimises Σ KL(original ‖ hybrid) over queries.

    The derivative with respect to log γ, Σ γN/(γN + F) minus the sum of the original shares of near keys, increases
    with γ. N is the weight of a query's near keys at γ = 1, and F that of its far keys and the sink.
    """

    kernel: Kernel  # the hybrid with its fitted parameters, and γ = 1
    original: list[Float[Tensor, "heads queries"]] = field(default_factory=list)  # share of near keys, by batch
    odds: list[Float[Tensor, "heads queries"]] = field(default_factory=list)  # log N/F, by batch

    def update(self, call: Call) -> None:
        """Add a batch: append each query's log(N/F) and original share of near keys."""
        assert self.kernel.near is not None  # noqa: S101  # only hybrids have γ
        whole = slice(0, call.query.shape[2]), slice(0, call.key.shape[2])
        near = positions(call, self.kernel.near).keys_kept(self.kernel.near, *whole)
        original, new = (weights(call, kernel).double() for kernel in (hooks.OWN, self.kernel))
        self.original.append((original * near).sum(-1).transpose(0, 1).flatten(1).cpu())
        inside, outside = (new * near).sum(-1), (new * ~near).sum(-1)
        outside = outside if call.sinks is None else outside + (1 - new.sum(-1)).clamp_min(0)
        self.odds.append((inside.log() - outside.log()).transpose(0, 1).flatten(1).cpu())

    def best(self) -> dict[str, Tensor]:
        """Find each head's log γ by bisection (0 if no query has both near and far keys); return all fitted values."""
        original, odds = torch.cat(self.original, -1), torch.cat(self.odds, -1)
        usable = odds.isfinite()
        low, high = (torch.full((len(original),), bound, dtype=torch.float64) for bound in (-LARGEST, LARGEST))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            too_large = ((odds + middle[:, None]).sigmoid() - original).masked_fill(~usable, 0.0).sum(-1) > 0
            low, high = torch.where(too_large, low, middle), torch.where(too_large, middle, high)
        log_weight = torch.where(usable.any(-1), (low + high) / 2, 0.0)
        return {**self.kernel.fitted, NEAR_WEIGHT: log_weight.to(self.kernel.fitted[NEAR_WEIGHT])}


MOST_FITTED = 128  # maximum number of calibration sequences that a fit reads
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # tried weights between the user's parameters (0) and fitted parameters (1)
TINIEST = 1e-30  # lower bound on attention weights in logarithms


@dataclass
class Search:
    """Line search from the user's to the fitted parameters of each head for the smallest KL(original ‖ new attention).

    The fitted parameters can have a larger KL than the user's, because least squares gives all scores equal weight,
    while softmax depends mainly on the large scores.
    """

    kernel: Kernel  # kernel with the user's parameters
    typed: dict[str, float]  # the user's parameters
    fitted: dict[str, Tensor]  # the parameters after the fit
    divergence: Tensor = field(default_factory=lambda: torch.zeros(()))  # Σ KL, (shares, heads)

    def update(self, call: Call) -> None:
        """Add the sum of KL(original ‖ new) over the queries of a batch, for each of SHARES and each head."""
        original = _append_sink(call, weights(call, hooks.OWN))
        divergences = []
        for share in SHARES:
            new = _append_sink(call, weights(call, self.kernel.with_fitted(self.at(torch.tensor(share)))))
            rows = (original * (original.clamp_min(TINIEST).log() - new.clamp_min(TINIEST).log())).sum(-1)
            divergences.append(rows.sum((0, 2)).cpu())
        self.divergence = self.divergence + torch.stack(divergences)

    def at(self, share: Tensor) -> dict[str, Tensor]:
        """Interpolate from the user's (`share` 0) to the fitted parameters (`share` 1); `share` can differ by head."""
        return {
            name: self.typed[name] + share.reshape(-1, *[1] * (part.dim() - 1)).to(part) * (part - self.typed[name])
            for name, part in self.fitted.items()
        }

    def best(self) -> dict[str, Tensor]:
        """Return, for each head, the tried parameters with the smallest divergence."""
        return self.at(torch.tensor(SHARES)[self.divergence.nan_to_num(torch.inf).argmin(0)])


def _append_sink(call: Call, rows: Tensor) -> Tensor:
    """Convert attention rows to float64 and append the share of the sink, if there is one, as the last column."""
    rows = rows.double()
    return rows if call.sinks is None else torch.cat([rows, (1 - rows.sum(-1, keepdim=True)).clamp_min(0)], -1)


def fit(setup: SwapSetup, batches: texts.Batches, progress: AddSteps) -> hooks.Swaps:
    """Return the swaps with parameters fitted in closed form, then refined by `NearShares` or `Search` if needed."""
    swaps = setup.swaps
    fits = _create_fits(swaps)
    map_fits = [(site, each) for site, each in fits.items() if isinstance(each, MapsFit)]
    set_rotations(setup, map_fits)
    if any(each.by_output for _, each in map_fits):
        set_metrics(setup, map_fits, feed(setup.loaded, batches.some(SEQUENCES), setup.task, setup.seed))
    if all(swap.kernel.near is not None for swap in swaps.values()):  # fits of far parts need only shapes
        _update_fits(setup, fits, batches.some(1))
    else:
        _update_fits(setup, fits, batches, progress)
    fitted = {site: each.solve() for site, each in fits.items()}
    searches = dict[Site, Search | NearShares]()
    for site, parameters in fitted.items():
        kernel, typed = swaps[site].kernel, fits[site].typed
        if kernel.near is not None:
            searches[site] = NearShares(kernel.with_fitted(parameters))
        elif typed:
            searches[site] = Search(kernel, typed, parameters)
    _update_fits(setup, searches, batches, progress)
    fitted |= {site: search.best() for site, search in searches.items()}
    return {site: hooks.Replacement(swap.kernel.with_fitted(fitted[site]), swap.heads) for site, swap in swaps.items()}


def expand_parameters(setup: SwapSetup, batches: Iterable[texts.Batch]) -> hooks.Swaps:
    """Return the swaps, with the value of each trainable parameter that is not fitted copied to every head."""
    unfitted = {site: swap for site, swap in setup.swaps.items() if swap.kernel.trainable and not swap.kernel.fitted}
    expanded = dict(setup.swaps)
    fits = _create_fits(unfitted)
    _update_fits(setup, fits, batches)
    for site, each in fits.items():
        kernel, parameters = unfitted[site].kernel, each.solve()
        start = {
            name: torch.full_like(part, each.typed[name])
            for name, part in parameters.items()
            if name in kernel.trainable
        }
        expanded[site] = hooks.Replacement(kernel.with_fitted(start), unfitted[site].heads)
    return expanded


def _create_fits(swaps: hooks.Swaps) -> dict[Site, Fit]:
    """Create a fit for each swapped site whose kernel has free parameters."""
    fits = {site: swap.kernel.build_fit() for site, swap in swaps.items()}
    return {site: each for site, each in fits.items() if each is not None}


def _update_fits(
    setup: SwapSetup,
    fits: Mapping[Site, Fit | Search | NearShares],
    batches: Iterable[texts.Batch],
    progress: AddSteps = lambda _: None,
) -> None:
    """Run the original model on each batch; update each site's fit with the calls of its swapped heads, unpadded."""

    def answer(site: Site, call: Call) -> None:
        if site in fits:
            heads = setup.swaps[site].heads
            for part in iterate_unpadded(call, site, batch.inputs):
                fits[site].update(part if heads is None else part.select(heads))

    if not fits:
        return
    with torch.no_grad(), hooks.watch(setup.loaded.model, setup.sites, answer):
        for batch in batches:  # `answer` reads this variable
            hooks.forward(setup.loaded.model, batch.inputs, **hooks.without_logits(setup.loaded.model))
            progress(batch.size)


def sample_gradients(
    setup: SwapSetup, chosen: Collection[Site], fed: Fed, generator: torch.Generator
) -> tuple[dict[Site, Call], dict[Site, Tensor], dict[Site, Tensor], int]:
    """Run the model on a batch, with targets drawn from its predictions.

    Return all calls, the outputs (batch, queries, heads, value_dim) of the chosen sites, the gradients of the summed
    loss in nats with respect to these outputs, and the number of targets. Raise ModelError if the predictions are
    missing or have no gradient.
    """
    model, calls, outputs = setup.loaded.model, dict[Site, Call](), dict[Site, Tensor]()

    def record_output(site: Site, output: Tensor) -> None:
        outputs[site] = output.requires_grad_()  # the weights may be frozen

    with torch.enable_grad(), hooks.watch(model, setup.sites, calls.__setitem__, record_output):
        logits = predictions(hooks.forward(model, fed.inputs), fed, setup.task)
        if logits is None or not logits.requires_grad:
            remedy = "Leave metric=output out of the kernel; for attnlens ranks, add --latents metric=attention."
            raise ModelError("metric=output needs predictions with a gradient, which this model lacks.", remedy)
        targets = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0].to(logits.device)
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    outputs = {site: outputs[site] for site in chosen if site in outputs}
    gradients = torch.autograd.grad(loss, list(outputs.values()), allow_unused=True, materialize_grads=True)
    return calls, outputs, dict(zip(outputs, gradients, strict=True)), len(targets)


SEQUENCES = 16  # maximum number of sequences for the gradients of an output metric (in `ranks`, of each text)


def set_rotations(setup: SwapSetup, fits: Iterable[tuple[Site, MapsFit]]) -> None:
    """Set the rotation of fits that use keys before rotation. Raise UsageError if a site's rotation is unknown."""
    before = [(site, fit) for site, fit in fits if fit.before]
    by_site = find_turns(setup.loaded, list(setup.swaps)) if before else {}
    for site, fit in before:
        turn = by_site[site]
        if isinstance(turn, str):
            problem = f"rotation=before cannot be used at {site.name}: {turn}."
            raise UsageError(problem, "Omit rotation=before, or exclude this layer with --layers.")
        fit.turn = turn


def set_metrics(setup: SwapSetup, fits: Iterable[tuple[Site, MapsFit]], fed: Sequence[Fed]) -> None:
    """Set the output metric of fits with metric=output. Raise ModelError if predictions or gradients are missing."""
    by_output = [(site, fit) for site, fit in fits if fit.by_output]
    first, left = list[Fed](), SEQUENCES if by_output else 0
    for batch in fed:
        count = texts.sequences_in(batch.inputs)
        if left > 0:
            first.append(batch if count <= left else batch.rows(0, left))
        left -= count
    metrics = output_metrics(setup, first)
    for site, fit in by_output:
        heads = setup.swaps[site].heads
        fit.output = metrics[site] if heads is None else metrics[site][list(heads)]


def find_turns(loaded: Loaded, sites: Sequence[Site]) -> dict[Site, Turn | str]:
    """Return each site's key rotation as frequencies, or the reason why the rotation is unknown."""
    inputs = texts.placeholder(loaded, 64, 0).batches[0].inputs
    site_calls = [each for each in hooks.survey(loaded.model, inputs) if each.site in sites]
    rotations = zip(site_calls, model_weights.rotations(loaded.model, site_calls), strict=True)
    by_site = {each.site: _read_turn(each.call, rotation) for each, rotation in rotations}
    return {site: by_site[site] for site in sites}


def _read_turn(call: Call, rotation: Rotation | UnreadableError | None) -> Turn | str:
    if call.places is None:
        return "the model does not pass token positions to its attention"
    if isinstance(rotation, UnreadableError):
        return rotation.problem
    if rotation is None:
        return "the keys are not rotated"
    if not rotation.by_distance:
        return "the rotation does not depend on distances alone"
    angles = model_weights.frequencies(rotation)
    frequency, partner = angles.new_zeros(rotation.size), torch.arange(rotation.size)
    first, second = rotation.pairs.unbind(-1)
    frequency[first], frequency[second] = -angles, angles
    partner[first], partner[second] = second, first
    return Turn(frequency, partner)


def output_metrics(setup: SwapSetup, fed: Iterable[Fed]) -> dict[Site, Float[Tensor, "heads value_dim value_dim"]]:
    """Compute each head's Σ g gᵀ over tokens, where g = ∂loss/∂o is the gradient with respect to the head's output o.

    The loss has targets sampled from the predictions. The sum over n tokens estimates n W_Oᵀ F W_O, where F is the
    predictions' Fisher information at the residual stream (Martens 2020, Eq. 7); the factor n does not affect a fit.
    """
    totals: dict[Site, Tensor] = {}
    generator = torch.Generator().manual_seed(setup.seed)
    for batch in fed:
        _, _, gradients, _ = sample_gradients(setup, setup.sites, batch, generator)
        for site, slope in gradients.items():
            moment = torch.einsum("bqhv,bqhw->hvw", slope.double(), slope.double())
            totals[site] = totals.get(site, torch.zeros_like(moment)) + moment
    return totals
