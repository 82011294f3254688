"""Measure how often the rise that `--budget` promises holds for the whole text.

python benchmarks/promises.py [TEXT ...] [--quick] [--json FILE]
python benchmarks/promises.py [TEXT ...] --held-out KIND=FILE ... [--model MODEL] [--json FILE]

Each placement (seed) uses other windows of a text for fitting, choosing and promising. The truth is the plan's rise on
all windows of that text except those used to fit and choose it. Without a TEXT, the parts of the built-in sample are
the texts. A 95 % interval should hold in 95 % of placements, and its upper end in 97.5 %; each share is printed with
its exact interval (Clopper & Pearson 1934).

With --held-out one plan is made from all TEXTs and measured on four pieces of each FILE, none of which it read: how
often does the rise of a piece exceed the promise, by kind of text (held_out.py)?
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import get_args

import held_out
import subjects
import torch
from scipy import stats

from attnlens.arguments import Budget
from attnlens.arguments import budget as read_budget
from attnlens.choices import Placement
from attnlens.kernels import parsed
from attnlens.lab.ranks.search import BudgetSearch, Choice, Losses, Sample, cut_samples, measure_losses
from attnlens.maths.statistics import Design
from attnlens.models import hooks, loading, texts
from attnlens.models.texts import Batches, Content, Cut
from attnlens.models.texts.targets import Fed, feed, task_of
from attnlens.records import Site

ALL_DIRECTIONS = "rank:65536"


@dataclass(frozen=True)
class Outcome:
    """The promise of one plan, and the truth; rises are shares of the loss."""

    text: str
    seed: int
    mean_rank: float
    truth: float
    """Rise on all windows except those used to fit and choose the plan."""
    share: float
    """Promised rise."""
    low: float
    high: float
    """Interval of the promised rise."""


class Population:
    """One text with the loss of each of its windows."""

    def __init__(self, loaded: loading.Loaded, content: Content, cut: Cut) -> None:
        self.loaded, self.content, self.cut, self.task = loaded, content, cut, task_of(loaded.model)
        batches = texts.batches(loaded, [content], replace(cut, sequences=10**9, placement="first"))
        self.fed = feed(loaded, batches, self.task, 0)
        self.design = Design.plain(batches.sequences)
        self.sites = tuple(capture.site for capture in hooks.survey(loaded.model, self.fed[0].inputs))
        self.original = self.compute_losses(self.fed)

    def compute_losses(self, fed: Sequence[Fed]) -> Losses:
        """Compute the losses of all windows under the current model."""
        return measure_losses(self.loaded, fed, self.task, self.design)

    def measure_truth(self, choice: Choice, used: Iterable[int]) -> float:
        """Compute the plan's rise on all windows except those used to find it."""
        with hooks.replace(self.loaded.model, self.sites, choice.swaps):
            after = self.compute_losses(self.fed).means
        left = torch.ones(len(after), dtype=torch.bool)
        left[list(used)] = False
        weights = self.original.counts * left
        return float((after * weights).sum() / (self.original.means * weights).sum()) - 1

    def build_search(self) -> BudgetSearch:
        """Build a search over all heads."""
        swaps: dict[Site, hooks.Replacement] = {site: hooks.Replacement(parsed(ALL_DIRECTIONS)) for site in self.sites}
        return BudgetSearch(self.loaded, self.sites, swaps, self.task, progress=lambda _: None)


def main() -> None:
    """Print and write the promise and the truth of each placement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="*", help="text files, each a population (default: thirds of the sample)")
    parser.add_argument("--quick", action="store_true", help="two placements: does it still run?")
    parser.add_argument("--model", default="demo", help="any causal or masked language model (default: demo)")
    parser.add_argument("--budget", default="loss:1%", help="largest rise in the loss (default: loss:1%%)")
    parser.add_argument("--placements", type=int, default=20, help="seeds for each text (default: 20)")
    parser.add_argument("--placement", choices=get_args(Placement), default="random", help="(default: random)")
    parser.add_argument("--length", type=int, default=32, help="tokens per window (default: 32)")
    parser.add_argument("--windows", type=int, default=48, help="windows of all three parts (default: 48)")
    parser.add_argument("--parts", type=int, default=3, help="texts to cut each TEXT into (default: 3)")
    parser.add_argument("--held-out", nargs="+", metavar="KIND=FILE", help="texts to measure a plan from all TEXTs on")
    parser.add_argument("--json", metavar="FILE", help="write every placement here")
    options = parser.parse_args()
    print(subjects.describe_machine())
    torch.set_num_threads(1)
    loaded = loading.load(options.model)
    cut = Cut(options.length, options.windows, placement=options.placement, allow_foreign=True)
    if options.held_out:
        run_held_out(loaded, options, cut)
        return
    contents = [
        part
        for text in texts.read_each(options.text) or texts.sample("demo")
        for part in split_text(text, options.parts)
    ]
    budget = read_budget(options.budget)
    outcomes = [
        outcome
        for content in (contents[:1] if options.quick else contents)
        for outcome in run_placements(
            Population(loaded, content, cut), budget, 2 if options.quick else options.placements
        )
    ]
    print_table(outcomes, budget.share)
    if options.json:
        asked = {name: value for name, value in vars(options).items() if name not in ("json", "text")}
        digests = {content.name: sha256(content.text.encode()).hexdigest() for content in contents}
        placements = [asdict(outcome) for outcome in outcomes]
        subjects.write_json(options.json, {"asked": asked, "texts": digests, "placements": placements})


def run_held_out(loaded: loading.Loaded, options: argparse.Namespace, cut: Cut) -> None:
    """Make one plan and measure it on pieces of texts that it did not read."""
    calibration = list(texts.read_each(options.text) or texts.sample(loaded.info.id))
    kinds = [item.split("=", 1) for item in options.held_out]
    held_out_texts = [(kind, content) for kind, file in kinds for content in texts.read_each([file]) or ()]
    result = held_out.evaluate_plan(
        loaded, calibration, held_out_texts, replace(cut, placement="spread"), read_budget(options.budget)
    )
    held_out.print_bounds(result)
    if options.json:
        data = {"model": Path(loaded.info.id).name, "budget": options.budget}  # only the name of a folder
        data |= {"length": options.length, "windows": options.windows}
        data |= {"kept": result.cached, "search_seconds": result.seconds, "loss": result.loss, "bounds": result.bounds}
        for part, contents in (("calibration", calibration), ("held_out", [content for _, content in held_out_texts])):
            data[part] = {item.name: sha256(item.text.encode()).hexdigest() for item in contents}
        data |= {"promised": result.choice.promised and result.choice.promised.model_dump()}
        data |= {"forms": [item.model_dump() for item in result.choice.forms]}
        data |= {"pieces": [asdict(piece) for piece in result.pieces]}
        subjects.write_json(options.json, data)


def split_text(content: Content, parts: int) -> list[Content]:
    """Split a text into consecutive parts."""
    if parts == 1:
        return [content]
    size = len(content.text) // parts
    return [
        Content(content.text[at * size : (at + 1) * size], f"{content.name}, {at + 1} of {parts}")
        for at in range(parts)
    ]


def run_placements(population: Population, budget: Budget, placements: int) -> Iterator[Outcome]:
    """Yield the promise and the truth of each placement."""
    name = population.content.name
    print(f"\n{name}: {population.design.count} windows of {population.cut.tokens} tokens", flush=True)
    for seed in range(placements):
        parts = cut_spread(population, seed)
        choice = population.build_search().choose(*parts, budget)
        truth = population.measure_truth(choice, list_windows(parts[:2]))
        assert choice.promised is not None
        low, high = choice.promised.ci95 or (0.0, 0.0)
        yield Outcome(name, seed, compute_mean_rank(choice), truth, choice.promised.share, low, high)
        print(".", end="", flush=True)
    print()


def compute_mean_rank(choice: Choice) -> float:
    """Compute the numbers kept per key head, averaged over query heads."""
    latents = [
        (rank / len(group), len(choice.bases[site].heads_of(at)))
        for site, ranks in choice.ranks.items()
        for at, (rank, group) in enumerate(zip(ranks, choice.bases[site].groups, strict=True))
    ]
    return sum(rank * heads for rank, heads in latents) / sum(heads for _, heads in latents)


def cut_spread(population: Population, seed: int) -> tuple[Sample, Sample, Sample]:
    """Cut the three parts as a run with this seed cuts them; no windows are evaluated."""
    cut = replace(population.cut, seed=seed)
    nothing = Batches((), 0, 0, (), 0.0)
    fitting, choosing, promising = cut_samples(population.loaded, [population.content], cut, nothing, None)
    return fitting, choosing, promising


def list_windows(parts: Iterable[Sample]) -> set[int]:
    """List the numbers of the windows in these parts."""
    return {window for part in parts for text in part.batches.texts for window in text.windows}


# --- tables ---------------------------------------------------------------------------------------------------------


def print_table(outcomes: Sequence[Outcome], budget: float) -> None:
    """Print a row for every text, and for all texts."""
    print(f"\nbudget {100 * budget:g} %; share of placements with its exact 95 % interval; rises in % of the loss")
    print(f"{'text':34}{'n':>4}{'truth ≤ upper end':>20}{'in interval':>20}", end="")
    print(f"{'truth > budget':>20}{'upper end > budget':>20}{'truth':>8}{'promise':>8}{'rank':>7}")
    for text in dict.fromkeys(outcome.text for outcome in outcomes):
        print_row([outcome for outcome in outcomes if outcome.text == text], text, budget)
    print_row(outcomes, "all", budget)
    errors = torch.tensor([outcome.share - outcome.truth for outcome in outcomes], dtype=torch.float64)
    width = sum(outcome.high - outcome.low for outcome in outcomes) / len(outcomes) / 2
    print("\npromised: ratio of the interval's mean half-width to 1.96 sd of (promised − truth): ", end="")
    print(f"{width / (1.96 * float(errors.std())):.2f} (1 is exact, more is conservative)")


def print_row(outcomes: Sequence[Outcome], text: str, budget: float) -> None:
    """Print how often the promises held."""
    print(f"{text:34.33}{len(outcomes):4}", end="")
    for hits in (
        [outcome.truth <= outcome.high for outcome in outcomes],
        [outcome.low <= outcome.truth <= outcome.high for outcome in outcomes],
        [outcome.truth > budget for outcome in outcomes],
        [outcome.high > budget for outcome in outcomes],
    ):
        low, high = stats.binomtest(sum(hits), len(hits)).proportion_ci(method="exact")
        cell = f"{sum(hits) / len(hits):.2f} [{low:.2f}, {high:.2f}]"
        print(f"{cell:>20}", end="")
    truth, share, rank = (
        fmean(getattr(outcome, name) for outcome in outcomes) for name in ("truth", "share", "mean_rank")
    )
    print(f"{100 * truth:8.2f}{100 * share:8.2f}{rank:7.2f}")


if __name__ == "__main__":
    main()
