"""Which ranks are the cheapest within a loss budget? Nested plans by sensitivity, the loss measured along them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens import hooks
from attnlens.attention import Path
from attnlens.errors import TextError, UsageError
from attnlens.kernels import Kernel
from attnlens.models import Loaded
from attnlens.records import PlanStep, Rise, Site, Task
from attnlens.run.compare import Comparison, run, sequence_losses
from attnlens.run.sensitivities import Basis, bases, sensitivities
from attnlens.run.tasks import Fed, feed
from attnlens.statistics import paired_difference
from attnlens.texts import MOST_SHARED, Batches, shared_share

if TYPE_CHECKING:
    from jaxtyping import Float

SEQUENCES = 128
"""Sequences of calibration text that a budget asks for."""
CHOOSING = 1 / 2
"""Share of them that is kept apart from the fit, to choose by: the wider the interval, the fewer directions go."""
LEAST = 4
"""Sequences of each text to choose by, at least: what one or two rise by says little of a text."""
TRIES = 7
"""How many nested plans are measured."""

Step = tuple[int, int]
"""A key head, counted over all sites, and its next smaller rank."""


def parsed_budget(words: str) -> float:
    """`loss:1%` → 0.01. Raises UsageError for anything else, and for a budget that is not positive."""
    if not isinstance(words, str):
        raise UsageError(f"The budget {words!r} can't be read.", 'Write it as in budget="loss:1%".')
    found = re.fullmatch(r"loss:([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)%", words.replace(" ", ""))
    try:
        share = float(found.group(1)) / 100 if found else math.nan
    except ValueError:
        share = math.nan
    if math.isnan(share):
        raise UsageError(f"The budget {words!r} can't be read.", "Write it as in --budget loss:1%.")
    if not 0 < share < math.inf:
        limit = "is no limit" if share > 0 else "leaves nothing to spend"
        raise UsageError(f"The budget {words!r} {limit}.", "Give more than 0, as in --budget loss:1%.")
    return share


def check_task(task: Task) -> None:
    """Raise UsageError where a model has no loss against the text that a budget could be a share of."""
    if task not in ("causal", "masked", "seq2seq"):
        what = "has no head that predicts anything" if task == "hidden" else "is measured against its own choices alone"
        raise UsageError(
            f"This model {what}, so that there is no loss to spend.",
            "Give one rank for all heads, as in --kernel rank:16.",
        )


def nested(costs: Float[Tensor, "kv_heads ranks"]) -> list[Step]:
    """Steps from all directions to none, the cheapest per direction first: the plans after each are nested.

    Each head goes along the lower convex hull of its costs, on which no step costs less per direction than the one
    before it, so that the greedy plan after every step is the cheapest of its size (Fox 1966). Costs are ≥ 0, and 0
    with all directions, so that the hull falls with rank; beyond a head's own head_dim they are infinite.
    """
    steps: list[tuple[float, int, int]] = []
    for head, row in enumerate(costs.tolist()):
        cost = [c for c in row if math.isfinite(c)]
        for low, high in reversed(list(pairwise(_hull(cost)))):
            steps.append(((cost[low] - cost[high]) / (high - low), head, low))
    return [(head, rank) for _, head, rank in sorted(steps, key=lambda step: step[0])]


def _hull(cost: Sequence[float]) -> list[int]:
    """The ranks on the lower convex hull of the costs, the smallest first."""
    hull: list[int] = []
    for rank in range(len(cost)):
        while len(hull) > 1 and _above(cost, hull[-2], hull[-1], rank):
            hull.pop()
        hull.append(rank)
    return hull


def _above(cost: Sequence[float], first: int, middle: int, last: int) -> bool:
    """Whether the middle point lies on or above the line from the first to the last."""
    return (cost[middle] - cost[first]) * (last - first) >= (cost[last] - cost[first]) * (middle - first)


def rise_of(before: Tensor, after: Tensor, counts: Tensor, seed: int, texts: Sequence[str] = ()) -> Rise | None:
    """after / before − 1 of the mean losses over tokens, its paired interval over sequences; None where it diverges.

    `texts` names the text of every sequence, where they are of several.
    """
    if not bool(after.isfinite().all()):
        return None
    found = [math.expm1(x) for x in paired_difference(before, after, weights=counts, of=torch.log, seed=seed)]
    by_text = {}
    for name in dict.fromkeys(texts):
        own = counts * counts.new_tensor([other == name for other in texts])
        by_text[name] = float((after * own).sum() / (before * own).sum()) - 1
    interval = (found[1], found[2]) if len(counts) > 1 else None
    return Rise(share=found[0], ci95=interval, sequences=len(counts), by_text=by_text)


def rise_in(found: Comparison, seed: int) -> Rise | None:
    """The same of a comparison on the evaluation text."""
    before, after, counts = (torch.cat(part) for part in (found.before, found.after, found.counts))
    return rise_of(before, after, counts, seed)


@dataclass(frozen=True)
class Choice:
    """The cheapest plan that was found."""

    bases: dict[Site, Basis]
    """The directions of every site."""
    ranks: dict[Site, list[int]]
    """The rank of every swapped key head."""
    swaps: dict[Site, hooks.Swap]
    """The swap that has them."""
    promised: Rise | None
    """On calibration text kept apart from the fit; None where the ranks were given."""
    steps: list[PlanStep]
    """The nested plans that were measured, the largest ranks first."""
    reason: str | None
    """Why no direction could be spared."""


@dataclass
class Budgeting:
    """One search for ranks."""

    loaded: Loaded
    sites: tuple[Site, ...]
    swaps: Mapping[Site, hooks.Swap]
    task: Task
    path: Path
    seed: int
    progress: Callable[[int], None]

    def choose(self, batches: Batches, budget: float) -> Choice:
        """The smallest ranks among nested plans whose measured rise stays within the budget: with its whole interval,
        and on every text alone, where the calibration text is of several.

        Raises TextError where there are fewer than two batches, or too little to choose by that is not fitted on, and
        what `bases` and `sensitivities` raise.
        """
        parts = split(batches)
        _check_choosing(self.loaded, *parts)
        fitting, choosing = (feed(self.loaded, part, self.task, self.seed) for part in parts)
        self.texts = [name for batch in parts[1] for name in batch.parts]
        self.found = bases(self.loaded, self.sites, self.swaps, fitting, self.progress)
        costs = sensitivities(self.loaded, self.sites, self.found, fitting, self.task, self.seed, self.progress)
        self.table = _table([costs[site] for site in self.found])
        self.steps = nested(self.table)
        self.own = _losses(self.loaded, choosing, self.task)
        loss = float((self.own[0] * self.own[1]).sum() / self.own[1].sum())
        if not loss > 0:
            raise TextError("The model's loss is 0 on the calibration text.", "Give another --calibration text.")
        return self._searched(choosing, budget, loss)

    def _searched(self, choosing: Sequence[Fed], budget: float, loss: float) -> Choice:
        """The step where the interval meets the budget, between those tried, guessed from what they predicted."""
        tried: dict[int, PlanStep] = {}
        whole = Rise(share=0.0, ci95=None, sequences=len(self.own[1]))
        best, promised, low, high = 0, whole, 0, len(self.steps) + 1
        at = min(max(1, self._steps_within(budget * loss)), len(self.steps))
        for _ in range(TRIES):
            ranks = self.ranks_after(at)
            rise = self._measured(choosing, ranks)
            predicted = self.predicted(ranks)
            if rise is not None:
                tried[at] = PlanStep(mean_rank=self.mean_rank(ranks), predicted=predicted / loss, rise=rise)
            largest = math.inf if rise is None else rise.largest
            if rise is not None and largest <= budget:
                best, promised, low = at, rise, at
            else:
                high = at
            if high - low < 2:
                break
            at = self._next(predicted, budget / largest if largest > 0 else math.inf, low, high)
        chosen = self.by_site(self.ranks_after(best))
        reason = None if best else "no plan tried with fewer directions stayed within the budget on calibration text"
        steps = [tried[number] for number in sorted(tried)]
        return Choice(self.found, chosen, self.swapped(chosen), promised, steps, reason)

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

    def swapped(self, ranks: Mapping[Site, Sequence[int]]) -> dict[Site, hooks.Swap]:
        """The swaps with these ranks; the kernel names the largest of them."""
        most = max(max(found) for found in ranks.values())
        kernel = next(iter(self.swaps.values())).kernel
        named: Kernel = replace(kernel, parameters={"rank": max(1, most)})
        return {
            site: hooks.Swap(
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

    def _measured(self, choosing: Sequence[Fed], ranks: Sequence[int]) -> Rise | None:
        """What these ranks do to the loss on the text kept apart."""
        swaps = self.swapped(self.by_site(ranks))
        with hooks.replace(self.loaded.model, self.sites, swaps, self.path):
            after, counts = _losses(self.loaded, choosing, self.task)
        self.progress(len(counts))
        return rise_of(self.own[0], after, counts, self.seed, self.texts)


def budget_work(batches: Batches) -> int:
    """Sequences that go through the model at most: twice to fit, and once for every plan tried."""
    fitting, choosing = (sum(batch.size for batch in part) for part in split(batches))
    return 2 * fitting + TRIES * choosing


def split(batches: Batches) -> tuple[Batches, Batches]:
    """The batches to fit on, and those to choose by."""
    if len(batches) < 2:
        raise TextError(
            "A budget needs two batches of calibration text at least: one to fit, one to choose the ranks by.",
            "Give a longer text with --calibration, or a smaller --batch-size.",
        )
    size = batches.batches[0].size
    some = batches.batches[: max(2, -(-SEQUENCES // size))]
    back = max(1, round(len(some) * CHOOSING))
    return replace(batches, batches=some[:-back]), replace(batches, batches=some[-back:])


def _check_choosing(loaded: Loaded, fitting: Batches, choosing: Batches) -> None:
    """Raise TextError where a text has too few sequences to choose by, or those that are fitted on say the same."""
    fitted, there = (Counter(name for batch in part for name in batch.parts) for part in (fitting, choosing))
    for name in fitted:
        if there[name] < LEAST:
            raise TextError(
                f"{name} leaves {there[name]} sequences to choose ranks by; a budget needs {LEAST} of each text.",
                "Give a longer text, shorter sequences with --tokens, or leave that text out.",
            )
    share = shared_share(loaded.tokenizer, choosing.ids, fitting.ids)
    if share > MOST_SHARED:
        raise TextError(
            f"The calibration text repeats itself: {100 * share:.0f} % of what ranks are chosen by is fitted on too.",
            "Give a --calibration text that says things once.",
        )


def _losses(loaded: Loaded, batches: Sequence[Fed], task: Task) -> tuple[Tensor, Tensor]:
    """The mean loss of each sequence, and its number of predictions."""
    found = []
    for fed in batches:
        logits = run(loaded.model, fed, task).logits
        assert logits is not None and fed.targets is not None  # noqa: S101, PT018  # check_task has seen to it
        found.append(sequence_losses(logits, fed.targets))
    means, counts = zip(*found, strict=True)
    return torch.cat(means), torch.cat(counts)


def _table(costs: Sequence[Tensor]) -> Float[Tensor, "kv_heads ranks"]:
    """All sites below each other; ∞ beyond a site's own head_dim."""
    wide = max(cost.shape[-1] for cost in costs)
    return torch.cat([torch.nn.functional.pad(c, (0, wide - c.shape[-1]), value=torch.inf) for c in costs]).double()
