"""Search the smallest ranks within a budget: fit, choose and promise on separate windows, among nested plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnlens.arguments import Budget
from attnlens.choices import Intervals, Unit
from attnlens.errors import TextError, UsageError
from attnlens.kernels import Kernel
from attnlens.kernels.attention import Route
from attnlens.maths.linalg.spectra import nested
from attnlens.maths.statistics import Design, further, paired_difference
from attnlens.maths.statistics.design import FEWEST_TEXTS
from attnlens.models import hooks, texts
from attnlens.models.loading import Loaded
from attnlens.models.texts import MOST_SHARED, Batches, Content, Cut, shared_share
from attnlens.models.texts.targets import HEADLESS, NOTHING, Fed, feed
from attnlens.records import FormTried, PlanStep, Rise, Site, Task, Text
from attnlens.runs.differences import Differences
from attnlens.runs.outputs import run, sequence_losses
from attnlens.runs.progress import Tell
from attnlens.runs.store import Keep, keep_nothing, key_of
from attnlens.runs.swap.healing.descent import digest_of
from attnlens.runs.swap.ranks.bases import (
    Basis,
    FormsRead,
    by_output,
    form_name,
    gathered,
    possible_forms,
    sensitivities,
)

if TYPE_CHECKING:
    from jaxtyping import Float

SEQUENCES = 192
"""Number of calibration windows for a budget, over all texts and parts."""
PARTS = 3
"""Number of parts of the calibration text: for fitting, choosing ranks and estimating the promised rise, in turn."""
LEAST = 4
"""Minimum number of windows per text and part: one or two do not represent a text."""


class Sample(NamedTuple):
    """A part of the calibration text."""

    batches: Batches  # its windows
    design: Design  # text of each window, and what intervals are over


def wanted(contents: Sequence[Content]) -> int:
    """Return the number of windows for a budget: SEQUENCES, or LEAST for each text and part if that is more."""
    return max(SEQUENCES, PARTS * LEAST * len(contents))


def samples(
    loaded: Loaded,
    contents: Sequence[Content],
    cut: Cut,
    evaluated: Batches,
    intervals: Intervals | None,
    count: int = PARTS,
) -> tuple[Sample, ...]:
    """Return the first `count` parts of the calibration text, without evaluated windows.

    Part i consists of windows i, i + 3, i + 6 … of the windows chosen of each text. Raises TextError if a text has too
    few windows that are not evaluated, or if a part repeats tokens of earlier ones; UsageError for intervals over texts
    with fewer than five texts.
    """
    found: list[Batches] = []
    for turn in range(count):
        if turn == 1:
            taken, what = evaluated.taken, "windows" if found[0].pack else "lines"
            there = {text.name: (text.available or 0) - len(taken.get(text.sha256, ())) for text in found[0].texts}
            for content in contents:
                if (free := there.get(content.name, 0)) < PARTS * LEAST:
                    raise TextError(
                        f"{content.name} has {free} {what} that are not evaluated; a budget needs {PARTS * LEAST} of "
                        f"each text, {LEAST} to fit on, {LEAST} to choose ranks by and {LEAST} to promise from.",
                        "Give a longer text, fewer --length or --windows, or leave that text out.",
                    )
            if intervals == "texts" and len(contents) < FEWEST_TEXTS:
                raise UsageError(
                    f"Intervals over texts need {FEWEST_TEXTS} texts, and a budget has {len(contents)} to choose by.",
                    "Give more --calibration, or leave out intervals='texts'.",
                )
        skip = evaluated.sequences + turn * cut.sequences
        part = replace(cut, turn=(turn, PARTS))
        found.append(texts.batches(loaded, contents, part, apart_from=evaluated, skip_noise=skip))
    uses = ("what ranks are chosen by", "fitted on"), ("what the promise is made from", "fitted on or chosen by")
    for number, (repeating, (use, earlier)) in enumerate(zip(found[1:], uses, strict=False), start=1):
        share = shared_share(loaded.tokenizer, repeating.passages, texts.passages(found[:number]))
        if share > MOST_SHARED:
            raise TextError(
                f"The calibration text repeats itself: {100 * share:.0f} % of {use} is {earlier} too.",
                "Give a --calibration text that says things once.",
            )
    return tuple(Sample(part, Design.of(part.parts, intervals)) for part in found)


def by_text(fed: Sequence[Fed], part: Sample) -> list[tuple[str, Fed]]:
    """Split the batches of a part such that each contains windows of one text; return (text name, batch) pairs."""
    found, start = [], 0
    for one in fed:
        names = part.batches.parts[start : start + texts.sequences_in(one.inputs)]
        start += len(names)
        edges = [0, *(at for at in range(1, len(names)) if names[at] != names[at - 1]), len(names)]
        found += [(names[low], one.rows(low, high)) for low, high in pairwise(edges)]
    return found


def joined(parts: Iterable[Batches]) -> list[Text]:
    """Merge the texts of several parts by hash; each gets the windows of all parts."""
    merged: dict[str, Text] = {}
    for text in (text for part in parts for text in part.texts):
        other = merged.get(text.sha256)
        windows = sorted({*text.windows, *(other.windows if other else ())})
        merged[text.sha256] = text.model_copy(update={"windows": windows})
    return list(merged.values())


UNITS: dict[Unit, Callable[[Tensor], Tensor]] = {"loss": torch.log, "ppl": lambda mean: mean}
"""Function f of a mean loss with f(after) − f(before) = log(after / before), of the loss or of perplexity."""


class Losses(NamedTuple):
    """Losses of the sequences with predictions."""

    means: Float[Tensor, " some"]  # nats per prediction
    counts: Float[Tensor, " some"]  # number of predictions
    design: Design  # how the sequences were sampled

    @property
    def mean(self) -> float:
        """Mean over all predictions, in nats."""
        return float((self.means * self.counts).sum() / self.counts.sum())


def losses(loaded: Loaded, batches: Sequence[Fed], task: Task, design: Design) -> Losses:
    """Compute the loss of each sequence with predictions in the current model; `design` covers all sequences."""
    found, there = [], []
    for fed in batches:
        logits = run(loaded.model, fed, task).logits
        assert logits is not None and fed.targets is not None  # noqa: S101, PT018  # ensured by check_task
        found.append(sequence_losses(logits, fed.targets))
        there.append((fed.targets != NOTHING).any(1).cpu())
    means, counts = (torch.cat(part) for part in zip(*found, strict=True))
    return Losses(means, counts, design.select(torch.cat(there).nonzero()[:, 0].tolist()))


def rise_of(before: Losses, after: Tensor, names: Sequence[str], seed: int, unit: Unit = "loss") -> Rise | None:
    """Compute after / before − 1 of the mean loss over tokens (or its exponential, perplexity); None if it diverges.

    `after` is the mean loss of each sequence in the changed model. `names` are the texts of the design; if there are
    several, the rise of each text is computed too.
    """
    if not bool(after.isfinite().all()):
        return None
    design = before.design
    share, interval = _rise(before, after, seed, unit)
    alone = {}
    for number, name in enumerate(names if len(names) > 1 else ()):
        own = [at for at, text in enumerate(design.texts) if text == number]
        if own:
            part = Losses(before.means[own], before.counts[own], Design.plain(len(own)))
            alone[name] = _rise(part, after[own], seed, unit)
    return Rise(
        share=share,
        ci95=interval,
        over=design.over,
        sequences=len(after),
        by_text={name: found for name, (found, _) in alone.items()},
        ci95_by_text={name: ends for name, (_, ends) in alone.items() if ends is not None},
        further=further([found for found, _ in alone.values()]) if len(alone) > 1 else None,
    )


def _rise(before: Losses, after: Tensor, seed: int, unit: Unit) -> tuple[float, tuple[float, float] | None]:
    """Compute the rise and its 95 % interval; the interval is None if there is no spread."""
    own, counts, design = before
    found = paired_difference(own, after, design, weights=counts, of=UNITS[unit], seed=seed)
    share, low, high = (math.expm1(end) for end in found)
    return share, None if math.isnan(low) else (low, high)


def rise_in(found: Differences, names: Sequence[str], seed: int, unit: Unit = "loss") -> Rise | None:
    """Compute the rise of a comparison on the evaluation text; see `rise_of`."""
    before, after, counts = (torch.cat(part) for part in (found.before, found.after, found.counts))
    return rise_of(Losses(before, counts, found.sampled), after, names, seed, unit)


MARGIN = 2
"""Half-widths of its interval by which a plan's estimated rise must stay below the budget. With 1, the rise over all
windows meets the budget too, but the promise from an equal amount of other text exceeds it in a third of the runs;
with 2 in 5 % of them (benchmarks/promises.py), at the cost of ranks larger by 0.4 to 0.6 of 16."""
TRIES = 7
"""Maximum number of nested plans measured."""
FORMS = 5
"""Maximum number of forms of latents compared."""


def check_task(task: Task) -> None:
    """Raise UsageError if the model has no loss on the text, which a budget is a share of."""
    if task not in ("causal", "masked", "seq2seq"):
        what = f"has {HEADLESS}" if task == "hidden" else "is measured against its own choices alone"
        raise UsageError(
            f"This model {what}, so that there is no loss to spend.",
            "Give one rank for all heads, as in --kernel rank:16.",
        )


@dataclass(frozen=True)
class Choice:
    """The plan with the smallest ranks found, or a given one."""

    bases: dict[Site, Basis]  # the directions of each site
    ranks: dict[Site, list[int]]  # the rank of each latent
    swaps: hooks.Swaps  # the swap with these ranks
    estimated: Rise | None  # rise on the text that chose the ranks; None if they were given
    promised: Rise | None
    """Rise on calibration text not used to fit or choose; None if it diverges, or if the ranks were given."""
    steps: list[PlanStep]  # the measured nested plans, by decreasing ranks
    reason: str | None  # why no rank could be reduced
    forms: list[FormTried] = field(default_factory=list)
    """The compared forms of latents, at half of full rank."""
    held_out: bool = False  # True if each text was measured with maps fitted to the other texts


@dataclass
class Budgeting:
    """A search for ranks."""

    loaded: Loaded
    sites: tuple[Site, ...]
    swaps: hooks.Swaps
    task: Task
    path: Route
    seed: int
    progress: Tell
    form_named: bool = False  # True: use the kernel's form of latents instead of choosing one
    margin: float = MARGIN  # see MARGIN
    found: dict[Site, Basis] = field(default_factory=dict)  # the directions of each site
    left_out: dict[str, dict[Site, Basis]] = field(default_factory=dict)
    """Directions fitted to all texts but one, by the name of that text."""
    unit: Unit = "loss"  # rises are shares of the loss or of perplexity
    keep: Keep = keep_nothing
    """Stores the losses of measured plans, from which an interrupted search resumes."""

    def choose(self, fitting: Sample, choosing: Sample, promising: Sample, budget: Budget) -> Choice:
        """Choose the smallest ranks among nested plans that stay within the budget.

        The rise on `choosing` must stay below the budget by `margin` half-widths of its interval, and within it on each
        single text. `promising` only serves for the promised rise. If there are several texts, the rise on each is
        measured with maps fitted to the others, so that the promise covers texts that were not fitted on. The form of
        the latents is the one with the smallest rise at half of full rank. Raises TextError if the loss is 0, and what
        `gathered` and `sensitivities` raise.
        """
        self.unit = budget.unit
        fitted = feed(self.loaded, fitting.batches, self.task, self.seed)
        trial = Trial.of(self, choosing)
        tried = self._choose_form(by_text(fitted, fitting), trial)

        def measure() -> Tensor:
            costs = sensitivities(self.loaded, self.sites, self.found, fitted, self.task, self.seed, self.progress)
            wide = max(cost.shape[-1] for cost in costs.values())  # pad with ∞ beyond a latent's full rank
            rows = [
                torch.nn.functional.pad(costs[s], (0, wide - costs[s].shape[-1]), value=torch.inf) for s in self.found
            ]
            return torch.cat(rows).double()

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

    def _choose_form(self, fitted: Sequence[tuple[str, Fed]], trial: Trial) -> list[FormTried]:
        """Fit each form, keep the best at half of full rank, try it weighted by the output too; return the trials."""
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
        """Measure the rise if each latent of this form has half of its full rank."""
        self.take(read, form)
        ranks = [size // 2 for basis in self.found.values() for size in basis.sizes]
        return FormTried(form=form_name(form), rise=trial.rise(ranks))

    def gather(self, fitted: Sequence[tuple[str, Fed]], forms: Sequence[Kernel]) -> FormsRead:
        """Fit these forms to the calibration texts; see `gathered`."""
        return gathered(self.loaded, self.sites, self.swaps, forms, fitted, self.task, self.seed, self.progress)

    def take(self, read: FormsRead, form: Kernel) -> None:
        """Use this form, fitted to all texts and, if there are several, also to all texts but one."""
        self.found = read.bases(form.spelling)
        names = list(read.fits[form.spelling])
        self.left_out = {name: read.bases(form.spelling, name) for name in names} if len(names) > 1 else {}
        self.swaps = {site: hooks.Replacement(form, swap.heads) for site, swap in self.swaps.items()}

    def _searched(self, trial: Trial, budget: float) -> tuple[int, dict[int, PlanStep]]:
        """Find the last step whose rise plus margin meets the budget, guided by the sensitivities; return all tried."""
        loss = trial.own.mean
        nothing = Rise(share=0.0, sequences=len(trial.own.means), over=trial.own.design.over)
        tried = {0: PlanStep(mean_rank=self.mean_rank(self.ranks_after(0)), predicted=0.0, rise=nothing)}
        best, low, high = 0, 0, len(self.steps) + 1
        allowed = budget * loss if self.unit == "loss" else math.log1p(budget)
        at = min(max(1, self._count_steps(allowed)), len(self.steps))
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
            at = self._next_step(predicted, budget / largest if largest > 0 else math.inf, low, high)
        return best, tried

    def _next_step(self, predicted: float, share: float, low: int, high: int) -> int:
        """Predict the step that meets the budget, at least an eighth of the range away from either end."""
        least = max(1, (high - low) // 8)
        guess = self._count_steps(predicted * share) if math.isfinite(share) else high
        return min(max(guess, low + least), high - least)

    def ranks_after(self, count: int) -> list[int]:
        """Return the rank of each latent after `count` steps."""
        ranks = [size for basis in self.found.values() for size in basis.sizes]
        for latent, rank in self.steps[:count]:
            ranks[latent] = rank
        return ranks

    def predicted(self, ranks: Sequence[int]) -> float:
        """Return the rise predicted for these ranks: the sum of their sensitivities, in nats."""
        return float(self.table.gather(1, torch.tensor(ranks)[:, None]).sum())

    def mean_rank(self, ranks: Sequence[int]) -> float:
        """Return the rank per key head, mean over query heads."""
        latents = [
            (len(group), len(basis.heads_of(at)))
            for basis in self.found.values()
            for at, group in enumerate(basis.groups)
        ]
        total = sum(rank / keys * heads for rank, (keys, heads) in zip(ranks, latents, strict=True))
        return total / sum(heads for _, heads in latents)

    def by_site(self, ranks: Sequence[int]) -> dict[Site, list[int]]:
        """Split the ranks of all latents by site."""
        left = iter(ranks)
        return {site: [next(left) for _ in basis.sizes] for site, basis in self.found.items()}

    def swapped(self, ranks: Mapping[Site, Sequence[int]], bases: Mapping[Site, Basis] | None = None) -> hooks.Swaps:
        """Build the swaps with these ranks from `bases` or `found`; the kernel's `rank` is the most per key head."""
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

    def _count_steps(self, cost: float) -> int:
        """Return the largest number of steps whose predicted rise is at most `cost` nats, by bisection."""
        low, high = 0, len(self.steps)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.predicted(self.ranks_after(middle)) <= cost else (low, middle - 1)
        return low


@dataclass(frozen=True)
class Trial:
    """Measurement of the rise caused by ranks on one part of the calibration text."""

    search: Budgeting
    part: Sample
    fed: list[Fed]  # batches of the part with targets
    own: Losses  # losses of the original model

    @classmethod
    def of(cls, search: Budgeting, part: Sample) -> Trial:
        """Create a trial with the losses of the original model; raise TextError if their mean is 0."""
        fed = feed(search.loaded, part.batches, search.task, search.seed)
        own = losses(search.loaded, fed, search.task, part.design)
        if not own.mean > 0:
            raise TextError("The model's loss is 0 on the calibration text.", "Give another --calibration text.")
        return cls(search, part, fed, own)

    def rise(self, ranks: Sequence[int]) -> Rise | None:
        """Measure the rise for the rank of each latent, with maps not fitted to the text; None if it diverges."""
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
        return rise_of(
            self.own, torch.cat(found), list(dict.fromkeys(self.part.batches.parts)), search.seed, search.unit
        )


def digests_of(swaps: hooks.Swaps) -> dict[str, str]:
    """Return a hash of the fitted parameters at every site."""
    return {site.name: digest_of(dict(swap.kernel.fitted)) for site, swap in swaps.items()}


def _rise_of(tried: tuple[Kernel, FormsRead, FormTried]) -> float:
    rise = tried[2].rise
    return math.inf if rise is None else rise.share


def budget_work(fitting: Sample, choosing: Sample, promising: Sample, *, form_named: bool) -> int:
    """Return the maximum number of sequences run through the model: to fit, to try forms and plans, and to promise."""
    times = (2, TRIES, 1) if form_named else (3, FORMS + TRIES, 1)
    return sum(
        often * part.batches.sequences for often, part in zip(times, (fitting, choosing, promising), strict=True)
    )
