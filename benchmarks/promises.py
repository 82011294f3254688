"""Measure how often the rise that `--budget` promises holds for the whole text.

python benchmarks/promises.py [TEXT ...] [--quick] [--json FILE]
python benchmarks/promises.py [TEXT ...] --held-out KIND=FILE ... [--model MODEL] [--json FILE]

Each placement (seed) uses other windows of a text for fitting, choosing and promising. The truth is the plan's rise on
all windows of that text except those used to fit and choose it. Three schemes are compared: that of attnlens; the same
plans with the estimate on the windows used to choose them as the promise; and that of attnlens 0.1, which fitted on the
first half of consecutive windows, chose on the second half with a margin of one half-width of the interval, and
promised from the second half. Without a TEXT, the parts of the built-in sample are the texts. A 95 % interval should
hold in 95 % of placements, and its upper end in 97.5 %; each share is printed with its exact interval (Clopper &
Pearson 1934).

With --held-out one plan is made from all TEXTs and measured on four pieces of each FILE, none of which it read: how
often does the rise of a piece exceed the promise, by kind of text (held_out.py)?
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import get_args

import held_out
import subjects
import torch
from scipy import stats

from attnlens.arguments import Budget
from attnlens.arguments import budget as read_budget
from attnlens.choices import Placement
from attnlens.files import write_atomically
from attnlens.kernels import parsed
from attnlens.lab.ranks.search import BudgetSearch, Choice, Losses, Sample, cut_samples, measure_losses
from attnlens.maths.statistics import Design
from attnlens.models import hooks, loading, texts
from attnlens.models.texts import Batches, Content, Cut
from attnlens.models.texts.targets import Fed, feed, task_of
from attnlens.records import Rise, Site

PROMISED, ESTIMATED, CONSECUTIVE = "promised", "estimated", "windows in a row"
ALL_DIRECTIONS = "rank:65536"


@dataclass(frozen=True)
class Outcome:
    """The promise of one plan, and the truth; rises are shares of the loss."""

    text: str
    scheme: str
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

    def build_search(self, margin: float | None = None) -> BudgetSearch:
        """Build a search over all heads."""
        swaps: dict[Site, hooks.Replacement] = {site: hooks.Replacement(parsed(ALL_DIRECTIONS)) for site in self.sites}
        search = BudgetSearch(self.loaded, self.sites, swaps, self.task, progress=lambda _: None)
        return search if margin is None else replace(search, margin=margin)


def main() -> None:
    """Print and write what every scheme promised."""
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
        for outcome in run_schemes(Population(loaded, content, cut), budget, 2 if options.quick else options.placements)
    ]
    print_table(outcomes, budget.share)
    if options.json:
        write_json(Path(options.json), outcomes, vars(options), contents)


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
        write_atomically(Path(options.json), f"{json.dumps(data, ensure_ascii=False, indent=1)}\n".encode())


def split_text(content: Content, parts: int) -> list[Content]:
    """Split a text into consecutive parts."""
    if parts == 1:
        return [content]
    size = len(content.text) // parts
    return [
        Content(content.text[at * size : (at + 1) * size], f"{content.name}, {at + 1} of {parts}")
        for at in range(parts)
    ]


def run_schemes(population: Population, budget: Budget, placements: int) -> Iterator[Outcome]:
    """Yield what every scheme promises at every placement."""
    name = population.content.name
    print(f"\n{name}: {population.design.count} windows of {population.cut.tokens} tokens", flush=True)
    for seed in range(placements):
        parts = cut_spread(population, seed)
        choice = population.build_search().choose(*parts, budget)
        truth = population.measure_truth(choice, list_windows(parts[:2]))
        for scheme, rise in ((PROMISED, choice.promised), (ESTIMATED, choice.estimated)):
            yield build_outcome(name, scheme, seed, choice, truth, rise)
        first, second = cut_consecutive(population, seed)
        choice = population.build_search(margin=1).choose(first, second, second, budget)
        yield build_outcome(name, CONSECUTIVE, seed, choice, population.measure_truth(choice, ()), choice.estimated)
        print(".", end="", flush=True)
    print()


def build_outcome(name: str, scheme: str, seed: int, choice: Choice, truth: float, rise: Rise | None) -> Outcome:
    """Combine the promise of one scheme with the truth."""
    assert rise is not None
    low, high = rise.ci95 or (0.0, 0.0)
    return Outcome(name, scheme, seed, compute_mean_rank(choice), truth, rise.share, low, high)


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


def cut_consecutive(population: Population, seed: int) -> tuple[Sample, Sample]:
    """Cut consecutive windows, from a random place in the text, into a first and a second half."""
    cut, text = replace(population.cut, placement="first"), population.content.text
    share = min(1.0, 1.1 * cut.sequences / population.design.count)
    start = Random(seed).randrange(max(1, int(len(text) * (1 - share))))  # noqa: S311  # no secret
    batches = texts.batches(population.loaded, [replace(population.content, text=text[start:])], cut)
    half = len(batches) // 2
    parts = (batches.batches[:half], batches.batches[half:])
    halves = (replace(batches, batches=part, sequences=sum(batch.size for batch in part)) for part in parts)
    first, second = (Sample(half, Design.plain(half.sequences)) for half in halves)
    return first, second


def list_windows(parts: Iterable[Sample]) -> set[int]:
    """List the numbers of the windows in these parts."""
    return {window for part in parts for text in part.batches.texts for window in text.windows}


# --- tables ---------------------------------------------------------------------------------------------------------


def print_table(outcomes: Sequence[Outcome], budget: float) -> None:
    """Print a row for every text and scheme, and for all texts."""
    print(f"\nbudget {100 * budget:g} %; share of placements with its exact 95 % interval; rises in % of the loss")
    print(f"{'text':34}{'scheme':18}{'n':>4}{'truth ≤ upper end':>20}{'in interval':>20}", end="")
    print(f"{'truth > budget':>20}{'upper end > budget':>20}{'truth':>8}{'promise':>8}{'rank':>7}")
    for text in [*dict.fromkeys(outcome.text for outcome in outcomes), None]:
        for scheme in (PROMISED, ESTIMATED, CONSECUTIVE):
            print_row(
                [outcome for outcome in outcomes if outcome.scheme == scheme and text in (None, outcome.text)],
                text or "all",
                budget,
            )
    promised = [outcome for outcome in outcomes if outcome.scheme == PROMISED]
    errors = torch.tensor([outcome.share - outcome.truth for outcome in promised], dtype=torch.float64)
    width = sum(outcome.high - outcome.low for outcome in promised) / len(promised) / 2
    print("\npromised: ratio of the interval's mean half-width to 1.96 sd of (promised − truth): ", end="")
    print(f"{width / (1.96 * float(errors.std())):.2f} (1 is exact, more is conservative)")


def print_row(outcomes: Sequence[Outcome], text: str, budget: float) -> None:
    """Print how often a scheme held."""
    print(f"{text:34.33}{outcomes[0].scheme:18}{len(outcomes):4}", end="")
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
        compute_mean(getattr(outcome, name) for outcome in outcomes) for name in ("truth", "share", "mean_rank")
    )
    print(f"{100 * truth:8.2f}{100 * share:8.2f}{rank:7.2f}")


def compute_mean(numbers: Iterable[float]) -> float:
    """Compute the mean of some numbers."""
    values = list(numbers)
    return sum(values) / len(values)


def write_json(
    path: Path, outcomes: Sequence[Outcome], options: dict[str, object], contents: Sequence[Content]
) -> None:
    """Write every placement as JSON, with the options and the digests of the texts."""
    shown = {name: value for name, value in options.items() if name not in ("json", "text")}
    digests = {content.name: sha256(content.text.encode()).hexdigest() for content in contents}
    rows = [{name: round_float(value) for name, value in asdict(item).items()} for item in outcomes]
    body = ",\n  ".join(json.dumps(item, ensure_ascii=False) for item in rows)
    head = json.dumps({"asked": shown, "texts": digests}, ensure_ascii=False)[:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f'{head}, "placements": [\n  {body}\n]}}\n'.encode())


def round_float(value: object) -> object:
    """Round a float to six significant digits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
