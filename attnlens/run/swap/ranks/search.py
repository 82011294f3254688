"""Searches the smallest ranks within a loss budget: nested plans, fitted, chosen and promised on separate windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens import hooks
from attnlens.attention import Route
from attnlens.errors import TextError, UsageError
from attnlens.kernels import Kernel
from attnlens.linalg.nested import nested
from attnlens.models import Loaded
from attnlens.records import PlanStep, Rise, Site, Task
from attnlens.run.progress import Tell
from attnlens.run.swap.ranks.calibration import Sample
from attnlens.run.swap.ranks.rises import Losses, losses, rise_of
from attnlens.run.swap.ranks.sensitivity import Basis, bases, sensitivities
from attnlens.texts.targets import HEADLESS, Fed, feed

if TYPE_CHECKING:
    from jaxtyping import Float

MARGIN = 2
"""Half-widths of its interval by which a plan's estimated rise has to stay below the budget. With one, the rise over
all windows keeps the budget too, but the promise made from as much other text reaches beyond it in a third of runs;
with two in 5 % of them (benchmarks/promises.py), for ranks larger by 0.4 to 0.6 of 16."""
TRIES = 7
"""How many nested plans are measured."""


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
    """The rank of every swapped key head."""
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
    margin: float = MARGIN
    """Half-widths of the estimate's interval that have to fit below the budget."""

    def choose(self, fitting: Sample, choosing: Sample, promising: Sample, budget: float) -> Choice:
        """The smallest ranks among nested plans whose rise on `choosing` stays below the budget by `margin` half-widths
        of its interval, and within it on every text alone, where there are several. `promising` chooses nothing.

        Raises TextError where there is no loss, and what `bases` and `sensitivities` raise.
        """
        fitted = feed(self.loaded, fitting.batches, self.task, self.seed)
        self.found = bases(self.loaded, self.sites, self.swaps, fitted, self.progress)
        costs = sensitivities(self.loaded, self.sites, self.found, fitted, self.task, self.seed, self.progress)
        self.table = _table([costs[site] for site in self.found])
        self.steps = nested(self.table)
        best, tried = self._searched(Trial.of(self, choosing), budget)
        chosen = self.ranks_after(best)
        reason = None if best else "no plan tried with fewer directions stayed well within the budget"
        return Choice(
            bases=self.found,
            ranks=self.by_site(chosen),
            swaps=self.swapped(self.by_site(chosen)),
            estimated=tried[best].rise,
            promised=Trial.of(self, promising).rise(chosen),
            steps=[tried[number] for number in sorted(tried) if number],
            reason=reason,
        )

    def _searched(self, trial: Trial, budget: float) -> tuple[int, dict[int, PlanStep]]:
        """The step where the interval, widened to the margin, meets the budget, and those tried: guessed from what the
        sensitivities predicted.
        """
        loss = trial.own.mean
        nothing = Rise(share=0.0, sequences=len(trial.own.means), over=trial.own.design.over)
        tried = {0: PlanStep(mean_rank=self.mean_rank(self.ranks_after(0)), predicted=0.0, rise=nothing)}
        best, low, high = 0, 0, len(self.steps) + 1
        at = min(max(1, self._steps_within(budget * loss)), len(self.steps))
        for _ in range(TRIES):
            ranks = self.ranks_after(at)
            rise, predicted = trial.rise(ranks), self.predicted(ranks)
            if rise is not None:
                tried[at] = PlanStep(mean_rank=self.mean_rank(ranks), predicted=predicted / loss, rise=rise)
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
        """The rank of every key head after so many steps."""
        ranks = [basis.head_dim for basis in self.found.values() for _ in basis.kv_heads]
        for head, rank in self.steps[:count]:
            ranks[head] = rank
        return ranks

    def predicted(self, ranks: Sequence[int]) -> float:
        """The sum of the sensitivities in nats."""
        return float(self.table.gather(1, torch.tensor(ranks)[:, None]).sum())

    def mean_rank(self, ranks: Sequence[int]) -> float:
        """Mean over query heads."""
        groups = [basis.group for basis in self.found.values() for _ in basis.kv_heads]
        return sum(rank * group for rank, group in zip(ranks, groups, strict=True)) / sum(groups)

    def by_site(self, ranks: Sequence[int]) -> dict[Site, list[int]]:
        """The ranks of each site's key heads."""
        left = iter(ranks)
        return {site: [next(left) for _ in basis.kv_heads] for site, basis in self.found.items()}

    def swapped(self, ranks: Mapping[Site, Sequence[int]]) -> hooks.Swaps:
        """The swaps with these ranks; the kernel names the largest of them."""
        most = max(max(found) for found in ranks.values())
        kernel = next(iter(self.swaps.values())).kernel
        named: Kernel = replace(kernel, parameters={"rank": max(1, most)})
        return {
            site: hooks.Replacement(
                named.with_fitted(self.found[site].maps(found)),
                None if self.swaps[site].heads is None else self.found[site].heads,
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
        """With the rank of every key head; None where it diverges."""
        search = self.search
        swaps = search.swapped(search.by_site(ranks))
        with hooks.replace(search.loaded.model, search.sites, swaps, search.path):
            after = losses(search.loaded, self.fed, search.task, self.part.design)
        search.progress(len(after.means))
        return rise_of(self.own, after.means, self.part.names, search.seed)


def budget_work(fitting: Sample, choosing: Sample, promising: Sample) -> int:
    """Sequences that go through the model at most: twice to fit, once for every plan tried, once to promise."""
    sizes = (part.batches.sequences for part in (fitting, choosing, promising))
    return sum(times * size for times, size in zip((2, TRIES, 1), sizes, strict=True))


def _table(costs: Sequence[Tensor]) -> Float[Tensor, "kv_heads ranks"]:
    """All sites below each other; ∞ beyond a site's own head_dim."""
    wide = max(cost.shape[-1] for cost in costs)
    return torch.cat([torch.nn.functional.pad(c, (0, wide - c.shape[-1]), value=torch.inf) for c in costs]).double()
