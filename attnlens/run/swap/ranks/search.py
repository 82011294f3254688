"""Searches the smallest ranks within a budget: nested plans, fitted, chosen and promised on separate windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens import hooks, texts
from attnlens.arguments import Budget
from attnlens.attention import Route
from attnlens.choices import Unit
from attnlens.errors import TextError, UsageError
from attnlens.kernels import Kernel
from attnlens.linalg.spectra import nested
from attnlens.models import Loaded
from attnlens.records import FormTried, PlanStep, Rise, Site, Task
from attnlens.run.swap.healing.procedure import digest_of
from attnlens.run.swap.ranks.bases import (
    Basis,
    FormsRead,
    by_output,
    form_name,
    gathered,
    possible_forms,
    sensitivities,
)
from attnlens.run.swap.ranks.calibration import Losses, Sample, by_text, losses, rise_of
from attnlens.runs.progress import Tell
from attnlens.runs.work import Keep, keep_nothing, key_of
from attnlens.statistics import Design
from attnlens.texts.targets import HEADLESS, Fed, feed

if TYPE_CHECKING:
    from jaxtyping import Float

MARGIN = 2
"""Half-widths of its interval by which a plan's estimated rise has to stay below the budget. With one, the rise over
all windows keeps the budget too, but the promise made from as much other text reaches beyond it in a third of runs;
with two in 5 % of them (benchmarks/promises.py), for ranks larger by 0.4 to 0.6 of 16."""
TRIES = 7
"""How many nested plans are measured."""
FORMS = 5
"""How many forms of latents are compared at most."""


def check_task(task: Task) -> None:
    """Raise UsageError where a model has no loss against the text that a budget could be a share of."""
    if task not in ("causal", "masked", "seq2seq"):
        what = f"has {HEADLESS}" if task == "hidden" else "is measured against its own choices alone"
        raise UsageError(
            f"This model {what}, so that there is no loss to spend.",
            "Give one rank for all heads, as in --kernel rank:16.",
        )


@dataclass(frozen=True)
class Choice:
    """The cheapest plan that was found."""

    bases: dict[Site, Basis]
    """The directions of every site."""
    ranks: dict[Site, list[int]]
    """The numbers that every latent keeps."""
    swaps: hooks.Swaps
    """The swap that has them."""
    estimated: Rise | None
    """On the calibration text that chose it; None where the ranks were given."""
    promised: Rise | None
    """On calibration text that neither fitted nor chose; None where it diverges, or where the ranks were given."""
    steps: list[PlanStep]
    """The nested plans that were measured, the largest ranks first."""
    reason: str | None
    """Why no direction could be spared."""
    forms: list[FormTried] = field(default_factory=list)
    """The forms of latents that were compared, at half of the numbers."""
    held_out: bool = False
    """Whether each text was judged by maps fitted to the others alone."""


@dataclass
class Budgeting:
    """One search for ranks."""

    loaded: Loaded
    sites: tuple[Site, ...]
    swaps: hooks.Swaps
    task: Task
    path: Route
    seed: int
    progress: Tell
    form_named: bool = False
    """Whether the form of the latents is that of the kernel, and none is chosen."""
    margin: float = MARGIN
    """Half-widths of the estimate's interval that have to fit below the budget."""
    found: dict[Site, Basis] = field(default_factory=dict)
    """The directions of every site."""
    left_out: dict[str, dict[Site, Basis]] = field(default_factory=dict)
    """Those fitted to all texts but one, by that text's name."""
    unit: Unit = "loss"
    """What a rise is a share of."""
    keep: Keep = keep_nothing
    """Keeps the losses of the plans that were measured, from which an interrupted search resumes."""

    def choose(self, fitting: Sample, choosing: Sample, promising: Sample, budget: Budget) -> Choice:
        """The smallest ranks among nested plans whose rise on `choosing` stays below the budget by `margin` half-widths
        of its interval, and within it on every text alone, where there are several. `promising` chooses nothing.

        Where there are several texts, the rise on each is that of maps fitted to the others alone, so that the promise
        covers a kind of text that was not fitted on. The form of the latents is that of least rise at half of the
        numbers. Raises TextError where there is no loss, and what `gathered` and `sensitivities` raise.
        """
        self.unit = budget.unit
        fitted = feed(self.loaded, fitting.batches, self.task, self.seed)
        trial = Trial.of(self, choosing)
        tried = self._formed(by_text(fitted, fitting), trial)

        def measure() -> Tensor:
            costs = sensitivities(self.loaded, self.sites, self.found, fitted, self.task, self.seed, self.progress)
            return _table([costs[site] for site in self.found])

        whole = self.swapped(self.by_site([size for basis in self.found.values() for size in basis.sizes]))
        self.table = self.keep(f"sensitivities {key_of(digests_of(whole))}", measure)
        self.steps = nested(self.table)
        best, steps = self._searched(trial, budget.share)
        chosen = self.ranks_after(best)
        reason = None if best else "no plan tried with fewer directions stayed well within the budget"
        return Choice(
            bases=self.found,
            ranks=self.by_site(chosen),
            swaps=self.swapped(self.by_site(chosen)),
            estimated=steps[best].rise,
            promised=Trial.of(self, promising).rise(chosen),
            steps=[steps[number] for number in sorted(steps) if number],
            reason=reason,
            forms=tried,
            held_out=bool(self.left_out),
        )

    def _formed(self, fitted: Sequence[tuple[str, Fed]], trial: Trial) -> list[FormTried]:
        """Fit every form there is, and keep that of least rise at half of the numbers; those tried, if several.

        Pairs are weighted by the output in the best of them alone.
        """
        own = next(iter(self.swaps.values())).kernel
        asked = [own] if self.form_named else possible_forms(self.loaded, self.swaps)
        read = self.gather(fitted, asked)
        if self.form_named:
            self.take(read, own)
            return []
        tried = [(form, read, self._tried(read, form, trial)) for form in asked]
        best = by_output(min(tried, key=_rise_of)[0])
        again = self.gather(fitted, [best])
        tried.append((best, again, self._tried(again, best, trial)))
        self.take(*reversed(min(tried, key=_rise_of)[:2]))
        return [one for _, _, one in tried]

    def _tried(self, read: FormsRead, form: Kernel, trial: Trial) -> FormTried:
        """The rise where every latent of that form keeps half of its numbers."""
        self.take(read, form)
        ranks = [size // 2 for basis in self.found.values() for size in basis.sizes]
        return FormTried(form=form_name(form), rise=trial.rise(ranks))

    def gather(self, fitted: Sequence[tuple[str, Fed]], forms: Sequence[Kernel]) -> FormsRead:
        """What these forms read of the calibration texts."""
        return gathered(self.loaded, self.sites, self.swaps, forms, fitted, self.task, self.seed, self.progress)

    def take(self, read: FormsRead, form: Kernel) -> None:
        """Go on with that form, fitted to all texts, and to all but each where there are several."""
        self.found = read.bases(form.spelling)
        names = list(read.fits[form.spelling])
        self.left_out = {name: read.bases(form.spelling, name) for name in names} if len(names) > 1 else {}
        self.swaps = {site: hooks.Replacement(form, swap.heads) for site, swap in self.swaps.items()}

    def _searched(self, trial: Trial, budget: float) -> tuple[int, dict[int, PlanStep]]:
        """The step where the interval, widened to the margin, meets the budget, and those tried: guessed from what the
        sensitivities predicted.
        """
        loss = trial.own.mean
        nothing = Rise(share=0.0, sequences=len(trial.own.means), over=trial.own.design.over)
        tried = {0: PlanStep(mean_rank=self.mean_rank(self.ranks_after(0)), predicted=0.0, rise=nothing)}
        best, low, high = 0, 0, len(self.steps) + 1
        allowed = budget * loss if self.unit == "loss" else math.log1p(budget)
        at = min(max(1, self._steps_within(allowed)), len(self.steps))
        for _ in range(TRIES):
            ranks = self.ranks_after(at)
            rise, predicted = trial.rise(ranks), self.predicted(ranks)
            if rise is not None:
                share = predicted / loss if self.unit == "loss" else math.expm1(predicted)
                tried[at] = PlanStep(mean_rank=self.mean_rank(ranks), predicted=share, rise=rise)
            largest = math.inf if rise is None else rise.bound(self.margin)
            if largest <= budget:
                best = low = at
            else:
                high = at
            if high - low < 2:
                break
            at = self._next(predicted, budget / largest if largest > 0 else math.inf, low, high)
        return best, tried

    def _next(self, predicted: float, share: float, low: int, high: int) -> int:
        """Where the rise meets the budget if it grows as predicted, an eighth of the way from either end at least."""
        least = max(1, (high - low) // 8)
        guess = self._steps_within(predicted * share) if math.isfinite(share) else high
        return min(max(guess, low + least), high - least)

    def ranks_after(self, count: int) -> list[int]:
        """The numbers of every latent after so many steps."""
        ranks = [size for basis in self.found.values() for size in basis.sizes]
        for latent, rank in self.steps[:count]:
            ranks[latent] = rank
        return ranks

    def predicted(self, ranks: Sequence[int]) -> float:
        """The sum of the sensitivities in nats."""
        return float(self.table.gather(1, torch.tensor(ranks)[:, None]).sum())

    def mean_rank(self, ranks: Sequence[int]) -> float:
        """Numbers for each key head, mean over query heads."""
        latents = [
            (len(group), len(basis.heads_of(at)))
            for basis in self.found.values()
            for at, group in enumerate(basis.groups)
        ]
        total = sum(rank / keys * heads for rank, (keys, heads) in zip(ranks, latents, strict=True))
        return total / sum(heads for _, heads in latents)

    def by_site(self, ranks: Sequence[int]) -> dict[Site, list[int]]:
        """The numbers of each site's latents."""
        left = iter(ranks)
        return {site: [next(left) for _ in basis.sizes] for site, basis in self.found.items()}

    def swapped(self, ranks: Mapping[Site, Sequence[int]], bases: Mapping[Site, Basis] | None = None) -> hooks.Swaps:
        """The swaps with these numbers, of all texts' maps or of others; the kernel names the largest of them."""
        bases = bases or self.found
        keys = {site: [len(group) for group in bases[site].groups] for site in ranks}
        most = max(-(-r // count) for s, found in ranks.items() for r, count in zip(found, keys[s], strict=True))
        kernel = next(iter(self.swaps.values())).kernel
        named: Kernel = replace(kernel, parameters={**kernel.parameters, "rank": max(1, most)})
        return {
            site: hooks.Replacement(
                named.with_fitted(bases[site].maps(found)),
                None if self.swaps[site].heads is None else bases[site].heads,
            )
            for site, found in ranks.items()
        }

    def _steps_within(self, cost: float) -> int:
        """How many steps the sensitivities allow."""
        low, high = 0, len(self.steps)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.predicted(self.ranks_after(middle)) <= cost else (low, middle - 1)
        return low


@dataclass(frozen=True)
class Trial:
    """What ranks do to the loss on one part of the calibration text."""

    search: Budgeting
    part: Sample
    fed: list[Fed]
    """The part with its targets."""
    own: Losses
    """Of the model as it is."""

    @classmethod
    def of(cls, search: Budgeting, part: Sample) -> Trial:
        """Raises TextError where the model has nothing to lose on it."""
        fed = feed(search.loaded, part.batches, search.task, search.seed)
        own = losses(search.loaded, fed, search.task, part.design)
        if not own.mean > 0:
            raise TextError("The model's loss is 0 on the calibration text.", "Give another --calibration text.")
        return cls(search, part, fed, own)

    def rise(self, ranks: Sequence[int]) -> Rise | None:
        """With the numbers of every latent; None where it diverges. Each text under maps that did not read it."""
        search, found = self.search, []
        by_site = search.by_site(ranks)
        for name, batches in groupby(by_text(self.fed, self.part), key=itemgetter(0)):
            fed = [one for _, one in batches]
            alone = Design.plain(sum(texts.sequences_in(one.inputs) for one in fed))
            swaps = search.swapped(by_site, search.left_out.get(name))

            def measure(swaps: hooks.Swaps = swaps, fed: list[Fed] = fed, alone: Design = alone) -> Tensor:
                with hooks.replace(search.loaded.model, search.sites, swaps, search.path):
                    return losses(search.loaded, fed, search.task, alone).means

            facts = [digest_of(one.inputs) for one in fed], digests_of(swaps)
            found.append(search.keep(f"losses on {name} {key_of(facts)}", measure))
            search.progress(len(found[-1]))
        return rise_of(self.own, torch.cat(found), self.part.names, search.seed, search.unit)


def digests_of(swaps: hooks.Swaps) -> dict[str, str]:
    """Return a hash of the fitted parameters at every site."""
    return {site.name: digest_of(dict(swap.kernel.fitted)) for site, swap in swaps.items()}


def _rise_of(tried: tuple[Kernel, FormsRead, FormTried]) -> float:
    rise = tried[2].rise
    return math.inf if rise is None else rise.share


def budget_work(fitting: Sample, choosing: Sample, promising: Sample, *, form_named: bool) -> int:
    """Sequences that go through the model at most: to fit, for every form and plan tried, and to promise."""
    times = (2, TRIES, 1) if form_named else (3, FORMS + TRIES, 1)
    return sum(
        often * part.batches.sequences for often, part in zip(times, (fitting, choosing, promising), strict=True)
    )


def _table(costs: Sequence[Tensor]) -> Float[Tensor, "latents ranks"]:
    """All sites below each other; ∞ beyond a latent's own numbers."""
    wide = max(cost.shape[-1] for cost in costs)
    return torch.cat([torch.nn.functional.pad(c, (0, wide - c.shape[-1]), value=torch.inf) for c in costs]).double()
