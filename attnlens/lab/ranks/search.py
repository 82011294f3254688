"""Search nested plans for the smallest ranks within a loss budget; fit, choose and estimate on separate windows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnlens.arguments import Budget
from attnlens.choices import Intervals, Unit
from attnlens.errors import TextError, UsageError
from attnlens.kernels import Kernel
from attnlens.kernels.lowrank import OUTPUT
from attnlens.lab.ranks.bases import (
    Basis,
    Forms,
    fit_forms,
    form_name,
    list_forms,
    mean_rank,
    sensitivities,
    with_parameters,
)
from attnlens.maths.linalg.spectra import nested_steps
from attnlens.maths.statistics import Design, paired_difference, prediction_bound
from attnlens.maths.statistics.design import FEWEST_TEXTS
from attnlens.models import hooks, texts
from attnlens.models.loading import Loaded
from attnlens.models.texts import MOST_SHARED, Batches, Content, Cut, shared_share
from attnlens.models.texts.targets import NOTHING, Fed, feed
from attnlens.records import FormTried, PlanStep, Rise, Site, Task
from attnlens.records.plans import MARGIN
from attnlens.runs.outputs import run, sequence_losses
from attnlens.runs.progress import AddSteps
from attnlens.runs.store import Keep, hash_json, keep_nothing
from attnlens.runs.swap.kernel_run import hash_parameters, hash_tensors
from attnlens.runs.swap.sites import SwapSetup
from attnlens.wording import format_count

if TYPE_CHECKING:
    from jaxtyping import Float

SEQUENCES = 192  # number of calibration windows of a search, over all texts and parts
USES = ("fitting", "choosing ranks", "estimating the rise")  # use of each part of the calibration text
PARTS = len(USES)
DEFAULT_WINDOWS = 32  # a search reads SEQUENCES calibration windows if at least this many windows are evaluated
LEAST = 4  # minimum number of windows per text and part: one or two do not represent a text


class Sample(NamedTuple):
    """A part of the calibration text."""

    batches: Batches  # windows of this part
    design: Design  # text of each window, and the units that intervals resample


def count_windows(contents: Sequence[Content], evaluated: int) -> int:
    """Return the number of calibration windows of a search: SEQUENCES, but at least LEAST per text and part.

    If fewer than DEFAULT_WINDOWS windows are evaluated, SEQUENCES is reduced in proportion.
    """
    share = min(1.0, evaluated / DEFAULT_WINDOWS)
    return max(round(share * SEQUENCES), PARTS * LEAST * len(contents))


def cut_samples(
    loaded: Loaded,
    contents: Sequence[Content],
    cut: Cut,
    evaluated: Batches,
    intervals: Intervals | None,
    count: int = PARTS,
) -> tuple[Sample, ...]:
    """Return the first `count` parts of the calibration text, leaving out windows used for evaluation.

    Part i has windows i, i + 3, i + 6 … of those chosen from each text. Raises TextError if a text has too few windows
    that are not evaluated, or if too much of a part also occurs in earlier parts. Raises UsageError for intervals over
    fewer than five texts.
    """
    parts: list[Batches] = []
    for turn in range(count):
        if turn == 1:
            _check_amount(contents, parts[0], evaluated, intervals)
        skip = evaluated.sequences + turn * cut.sequences
        one_third = replace(cut, turn=(turn, PARTS))
        part = texts.batches(loaded, contents, one_third, apart_from=evaluated, skip_noise=skip)
        share = shared_share(loaded.tokenizer, texts.passages([part]), texts.passages(parts)) if parts else 0.0
        if share > MOST_SHARED:
            used = f"the text for {USES[turn]} also occurs in the text for {' or '.join(USES[:turn])}"
            problem = f"The calibration text is repetitive: {100 * share:.0f} % of {used}."
            raise TextError(problem, "Give a less repetitive --calibration text.")
        parts.append(part)
    return tuple(Sample(part, Design.of(part.parts, intervals)) for part in parts)


def _check_amount(contents: Sequence[Content], first: Batches, evaluated: Batches, intervals: Intervals | None) -> None:
    """Raise TextError if a text has too few windows, and UsageError for intervals over too few texts."""
    available = {text.name: (text.available or 0) - len(evaluated.taken.get(text.sha256, ())) for text in first.texts}
    for content in contents:
        if (free := available.get(content.name, 0)) < PARTS * LEAST:
            count = format_count(free, "window" if first.pack else "line")
            needed = f"{PARTS * LEAST} per text: {LEAST} each for {', '.join(USES[:-1])} and {USES[-1]}"
            problem = f"{content.name} has {count} not used for evaluation; a budget needs {needed}."
            raise TextError(problem, "Give a longer text, reduce --length or --windows, or omit that text.")
    if intervals == "texts" and len(contents) < FEWEST_TEXTS:
        chosen = f"but the ranks are chosen on only {len(contents)}"
        problem = f"Intervals over texts need at least {FEWEST_TEXTS} texts, {chosen}."
        raise UsageError(problem, "Give more --calibration texts, or omit intervals='texts'.")


def split_by_text(fed: Sequence[Fed], part: Sample) -> list[tuple[str, Fed]]:
    """Split the batches of a part wherever the text changes; return (text name, batch) pairs."""
    pairs, start = [], 0
    for batch in fed:
        names = part.batches.parts[start : start + texts.sequences_in(batch.inputs)]
        start += len(names)
        edges = [0, *(row for row in range(1, len(names)) if names[row] != names[row - 1]), len(names)]
        pairs += [(names[low], batch.rows(low, high)) for low, high in pairwise(edges)]
    return pairs


UNITS: dict[Unit, Callable[[Tensor], Tensor]] = {"loss": torch.log, "ppl": lambda mean: mean}
"""Function f of the mean loss for which f(after) − f(before) is the log of the ratio of losses or perplexities."""


class Losses(NamedTuple):
    """Mean loss of each sequence that has predictions."""

    means: Float[Tensor, " some"]  # nats per prediction
    counts: Float[Tensor, " some"]  # number of predictions
    design: Design  # how the sequences were sampled

    @property
    def mean(self) -> float:
        """Mean over all predictions, in nats."""
        return float((self.means * self.counts).sum() / self.counts.sum())


def measure_losses(loaded: Loaded, batches: Sequence[Fed], task: Task, design: Design) -> Losses:
    """Compute the loss of the model as it now is, on each sequence with predictions; `design` covers all sequences."""
    by_batch, predicted = [], []
    for fed in batches:
        logits = run(loaded.model, fed, task).logits
        assert logits is not None and fed.targets is not None  # noqa: S101, PT018  # ensured by RankSearch.cut
        by_batch.append(sequence_losses(logits, fed.targets))
        predicted.append((fed.targets != NOTHING).any(1).cpu())
    means, counts = (torch.cat(part) for part in zip(*by_batch, strict=True))
    return Losses(means, counts, design.select(torch.cat(predicted).nonzero()[:, 0].tolist()))


def rise_of(before: Losses, after: Tensor, names: Sequence[str], seed: int, unit: Unit = "loss") -> Rise | None:
    """Compute after / before − 1 for the mean loss over tokens, or for perplexity; None if `after` is not finite.

    `after` is the mean loss of each sequence in the changed model. `names` are the names of the texts, in the order of
    `before.design`. If there are several texts, the rise on each text is also computed.
    """
    if not bool(after.isfinite().all()):
        return None

    def measure(rows: list[int], design: Design) -> tuple[float, tuple[float, float] | None]:
        """Compute the rise over the sequences `rows`, and its 95 % interval (None if the spread is unknown)."""
        pair, counts = (before.means[rows], after[rows]), before.counts[rows]
        share, low, high = map(math.expm1, paired_difference(*pair, design, weights=counts, of=UNITS[unit], seed=seed))
        return share, None if math.isnan(low) else (low, high)

    design = before.design
    share, interval = measure(list(range(len(after))), design)
    by_text = {}
    for number, name in enumerate(names if len(names) > 1 else ()):
        if rows := [row for row, text in enumerate(design.texts) if text == number]:
            by_text[name] = measure(rows, Design.plain(len(rows)))
    return Rise(
        share=share,
        ci95=interval,
        over=design.over,
        sequences=len(after),
        by_text={name: rise for name, (rise, _) in by_text.items()},
        ci95_by_text={name: ends for name, (_, ends) in by_text.items() if ends is not None},
        further=prediction_bound([rise for rise, _ in by_text.values()]) if len(by_text) > 1 else None,
    )


TRIES = 7  # maximum number of nested plans that are measured
FORMS = 5  # maximum number of forms of latents compared


@dataclass(frozen=True)
class Choice:
    """Chosen ranks, with the maps fitted for them."""

    bases: dict[Site, Basis]  # the latents of each site
    ranks: dict[Site, list[int]]  # the rank of each latent
    swaps: hooks.Swaps  # the swaps with these ranks
    estimated: Rise | None = None  # rise on the text used to choose the ranks; None for the ranks of a given plan
    promised: Rise | None = None  # rise on held-out text; None for the ranks of a given plan or infinite losses
    steps: list[PlanStep] = field(default_factory=list)  # the measured nested plans, from large to small ranks
    reason: str | None = None  # reason if a search reduced no rank; None otherwise
    forms: list[FormTried] = field(default_factory=list)  # the compared forms of latents, at half of full rank
    held_out: bool = False  # True if each text was measured with maps fitted to the other texts


@dataclass(kw_only=True)
class BudgetSearch(SwapSetup):
    """A search for the smallest ranks within a loss budget."""

    progress: AddSteps
    form_named: bool = False  # True to use the kernel's form of latents, False to choose the form
    margin: float = MARGIN  # half-widths of its interval by which a rise must lie below the budget
    bases: dict[Site, Basis] = field(default_factory=dict)  # the latents of each site
    bases_without: dict[str, dict[Site, Basis]] = field(default_factory=dict)  # latents fitted without the named text
    unit: Unit = "loss"  # quantity whose relative rise is limited: loss or perplexity
    keep: Keep = keep_nothing  # stores the losses of measured plans, from which an interrupted search resumes

    def choose(self, fitting: Sample, choosing: Sample, promising: Sample, budget: Budget) -> Choice:
        """Choose the plan with the smallest ranks among the tried nested plans that stay within the budget.

        The rise on `choosing` must lie below the budget by `margin` half-widths of its interval, and the rise on each
        single text must be within the budget. The promised rise is measured on `promising`. If there are several texts,
        the rise on each text is measured with maps fitted to the other texts.
        """
        self.unit = budget.unit
        fed = feed(self.loaded, fitting.batches, self.task, self.seed)
        trial = Trial.of(self, choosing)
        forms = self._choose_form(split_by_text(fed, fitting), trial)

        def measure() -> Tensor:
            costs = sensitivities(self, self.bases, fed, self.progress)
            rows = [row for site in self.bases for row in costs[site]]  # padded with ∞ beyond a latent's full rank
            return pad_sequence(rows, batch_first=True, padding_value=torch.inf).double()

        full = self.build_swaps(self.split_by_site(self.full_ranks))
        self.table = self.keep(f"sensitivities {hash_json(hash_parameters(full))}", measure)
        self.steps = nested_steps(self.table)
        best, steps = self._search_steps(trial, budget.share)
        ranks = self.ranks_after(best)
        by_site = self.split_by_site(ranks)
        return Choice(
            bases=self.bases,
            ranks=by_site,
            swaps=self.build_swaps(by_site),
            estimated=steps[best].rise,
            promised=Trial.of(self, promising).rise(ranks),
            steps=[steps[number] for number in sorted(steps) if number],
            reason=None if best else "no tried plan with smaller ranks was clearly within the budget",
            forms=forms,
            held_out=bool(self.bases_without),
        )

    def _choose_form(self, fed: Sequence[tuple[str, Fed]], trial: Trial) -> list[FormTried]:
        """Try each form at half rank, then the best form with `metric=output`; adopt the best of all.

        Return the record of each trial. If `form_named`, adopt the kernel's form without trials.
        """
        original = next(iter(self.swaps.values())).kernel
        if self.form_named:
            self.use_form(fit_forms(self, [original], fed, self.progress), original)
            return []
        forms = list_forms(self.loaded, self.swaps)
        fits = fit_forms(self, forms, fed, self.progress)
        tried: list[FormTried] = []

        def try_form(form: Kernel) -> float:
            self.use_form(fits, form)
            rise = trial.rise([size // 2 for size in self.full_ranks])
            tried.append(FormTried(form=form_name(form), rise=rise))
            return math.inf if rise is None else rise.share

        rises = [try_form(form) for form in forms]
        forms.append(with_parameters(forms[rises.index(min(rises))], metric=OUTPUT))
        fits |= fit_forms(self, forms[-1:], fed, self.progress)
        rises.append(try_form(forms[-1]))
        self.use_form(fits, forms[rises.index(min(rises))])
        return tried

    def use_form(self, fits: Forms, form: Kernel) -> None:
        """Adopt a form of latents, with its fit to all texts and, for several texts, its leave-one-text-out fits."""
        self.bases = fits[form.spelling][None]
        self.bases_without = {name: bases for name, bases in fits[form.spelling].items() if name is not None}
        self.swaps = {site: hooks.Replacement(form, swap.heads) for site, swap in self.swaps.items()}

    def _search_steps(self, trial: Trial, budget: float) -> tuple[int, dict[int, PlanStep]]:
        """Find the last step within the budget, including the margin, by a bisection guided by the predicted rise.

        Return the step's number (0: none) and, keyed by number, all tried steps with a finite rise. At most TRIES steps
        are tried.
        """
        loss = trial.original.mean
        no_rise = Rise(share=0.0, sequences=len(trial.original.means), over=trial.original.design.over)
        tried = {0: PlanStep(mean_rank=self.mean_rank(self.ranks_after(0)), predicted=0.0, rise=no_rise)}
        best, low, high = 0, 0, len(self.steps) + 1
        allowed = budget * loss if self.unit == "loss" else math.log1p(budget)
        at = min(max(1, self._count_steps(allowed)), len(self.steps))
        for _ in range(TRIES):
            ranks = self.ranks_after(at)
            rise, predicted = trial.rise(ranks), self.predict_rise(ranks)
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
            # step predicted to meet the budget, but at least an eighth of the range away from either end
            least = max(1, (high - low) // 8)
            guess = self._count_steps(predicted * (budget / largest)) if largest > 0 else high
            at = min(max(guess, low + least), high - least)
        return best, tried

    @property
    def full_ranks(self) -> list[int]:
        """Full rank of each latent."""
        return [size for basis in self.bases.values() for size in basis.sizes]

    def ranks_after(self, count: int) -> list[int]:
        """Return the rank of each latent after the first `count` of `steps`, which reduce one latent each."""
        ranks = self.full_ranks
        for latent, rank in self.steps[:count]:
            ranks[latent] = rank
        return ranks

    def predict_rise(self, ranks: Sequence[int]) -> float:
        """Return the rise in the loss predicted for `ranks`, in nats: the sum of their sensitivities."""
        return float(self.table.gather(1, torch.tensor(ranks)[:, None]).sum())

    def mean_rank(self, ranks: Sequence[int]) -> float:
        """Return the rank per key head, averaged over query heads."""
        return mean_rank(self.bases, self.split_by_site(ranks))

    def split_by_site(self, ranks: Sequence[int]) -> dict[Site, list[int]]:
        """Split the ranks of all latents by site."""
        remaining = iter(ranks)
        return {site: [next(remaining) for _ in basis.sizes] for site, basis in self.bases.items()}

    def build_swaps(
        self, ranks: Mapping[Site, Sequence[int]], bases: Mapping[Site, Basis] | None = None
    ) -> hooks.Swaps:
        """Build the swaps with `ranks`; the kernel's `rank` becomes the largest rank per key head, rounded up."""
        bases = bases or self.bases  # default: fitted to all texts
        per_key = [
            -(-rank // len(group))
            for site, of_site in ranks.items()
            for rank, group in zip(of_site, bases[site].groups, strict=True)
        ]
        kernel = with_parameters(next(iter(self.swaps.values())).kernel, rank=max(1, *per_key))
        return {
            site: hooks.Replacement(
                kernel.with_fitted(bases[site].latents.maps(of_site)),
                None if self.swaps[site].heads is None else bases[site].heads,
            )
            for site, of_site in ranks.items()
        }

    def _count_steps(self, cost: float) -> int:
        """Return the largest number of steps whose predicted rise is at most `cost` nats."""
        counts = range(1, len(self.steps) + 1)
        return bisect_right(counts, cost, key=lambda count: self.predict_rise(self.ranks_after(count)))


@dataclass(frozen=True)
class Trial:
    """A part of the calibration text on which the rise in the loss is measured for given ranks."""

    search: BudgetSearch
    part: Sample
    fed: list[Fed]  # batches of the part with targets
    original: Losses  # losses of the original model

    @classmethod
    def of(cls, search: BudgetSearch, part: Sample) -> Trial:
        """Create a trial with the losses of the original model; raise TextError if their mean is 0."""
        fed = feed(search.loaded, part.batches, search.task, search.seed)
        original = measure_losses(search.loaded, fed, search.task, part.design)
        if not original.mean > 0:
            raise TextError("The model's loss is 0 on the calibration text.", "Give another --calibration text.")
        return cls(search, part, fed, original)

    def rise(self, ranks: Sequence[int]) -> Rise | None:
        """Measure the rise in the loss for `ranks`; None if a loss is not finite.

        If there are several texts, each is measured with maps fitted to the others.
        """
        search, means = self.search, []
        by_site = search.split_by_site(ranks)
        for name, pairs in groupby(split_by_text(self.fed, self.part), key=itemgetter(0)):
            fed = [batch for _, batch in pairs]
            swaps = search.build_swaps(by_site, search.bases_without.get(name))

            def measure(swaps: hooks.Swaps = swaps, fed: list[Fed] = fed) -> Tensor:
                design = Design.plain(sum(texts.sequences_in(batch.inputs) for batch in fed))
                with hooks.replace(search.loaded.model, search.sites, swaps, search.path):
                    return measure_losses(search.loaded, fed, search.task, design).means

            facts = [hash_tensors(batch.inputs) for batch in fed], hash_parameters(swaps)
            means.append(search.keep(f"losses on {name} {hash_json(facts)}", measure))
            search.progress(len(means[-1]))
        names = list(dict.fromkeys(self.part.batches.parts))
        return rise_of(self.original, torch.cat(means), names, search.seed, search.unit)
