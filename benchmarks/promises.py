"""How often the rise that `--budget` promises holds for the whole text.

python benchmarks/promises.py [TEXT ...] [--quick] [--json FILE]
python benchmarks/promises.py [TEXT ...] --held-out KIND=FILE ... [--model MODEL] [--json FILE]

At every placement (seed) other windows of a text are fitted on, chosen by and promised from; the plan's rise on all
windows of that text that neither fitted nor chose is the truth. Three schemes are compared: as attnlens does it; the
same plans with the estimate of the text that chose them in the place of the promise; and as attnlens 0.1 did it, which
fitted on the first half of windows in a row, chose on the second by one half-width of the interval, and promised from
there. Without a TEXT, the parts of the built-in sample are taken for texts. An interval of 95 % holds in 95 % of
placements, and its upper end in 97.5 %; beside each share stands its own exact interval (Clopper & Pearson 1934).

With --held-out one plan is made of all TEXTs, and measured on four pieces of each FILE, none of which it read: how
often does the rise of a piece exceed what was promised, by kind of text (held_out.py)?
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
from attnlens.lab.ranks.search import Budgeting, Choice, Losses, Sample, cut_samples, losses
from attnlens.maths.statistics import Design
from attnlens.models import hooks, loading, texts
from attnlens.models.texts import Batches, Content, Cut
from attnlens.models.texts.targets import Fed, feed, task_of
from attnlens.records import Rise, Site

PROMISED, ESTIMATED, CONSECUTIVE = "promised", "estimated", "windows in a row"
ALL_DIRECTIONS = "rank:65536"


@dataclass(frozen=True)
class Outcome:
    """One plan's promise and its truth; rises are shares of the loss."""

    text: str
    scheme: str
    seed: int
    mean_rank: float
    truth: float
    """The rise on all windows that neither fitted nor chose."""
    share: float
    """The rise told."""
    low: float
    high: float
    """Its interval."""


class Population:
    """One text with the loss of each of its windows."""

    def __init__(self, loaded: loading.Loaded, content: Content, cut: Cut) -> None:
        self.loaded, self.content, self.cut, self.task = loaded, content, cut, task_of(loaded.model)
        every = texts.batches(loaded, [content], replace(cut, sequences=10**9, placement="first"))
        self.fed = feed(loaded, every, self.task, 0)
        self.design = Design.plain(every.sequences)
        self.sites = tuple(found.site for found in hooks.survey(loaded.model, self.fed[0].inputs))
        self.own = self.losses(self.fed)

    def losses(self, fed: Sequence[Fed]) -> Losses:
        """Of every window, under the model as it is now."""
        return losses(self.loaded, fed, self.task, self.design)

    def truth(self, choice: Choice, used: Iterable[int]) -> float:
        """The plan's rise on all windows but those that were used to find it."""
        with hooks.replace(self.loaded.model, self.sites, choice.swaps):
            after = self.losses(self.fed).means
        left = torch.ones(len(after), dtype=torch.bool)
        left[list(used)] = False
        weights = self.own.counts * left
        return float((after * weights).sum() / (self.own.means * weights).sum()) - 1

    def search(self, margin: float | None = None) -> Budgeting:
        """A search over all heads."""
        swaps: dict[Site, hooks.Replacement] = {site: hooks.Replacement(parsed(ALL_DIRECTIONS)) for site in self.sites}
        found = Budgeting(self.loaded, self.sites, swaps, self.task, "auto", 0, lambda _: None)
        return found if margin is None else replace(found, margin=margin)


def main() -> None:
    """Print and write what every scheme promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="*", help="text files, each a population (default: thirds of the sample)")
    parser.add_argument("--quick", action="store_true", help="two placements: does it still run?")
    parser.add_argument("--model", default="demo", help="any causal or masked language model (default: demo)")
    parser.add_argument("--budget", default="loss:1%", help="largest rise of the loss (default: loss:1%%)")
    parser.add_argument("--placements", type=int, default=20, help="seeds for each text (default: 20)")
    parser.add_argument("--placement", choices=get_args(Placement), default="random", help="(default: random)")
    parser.add_argument("--length", type=int, default=32, help="of a window (default: 32)")
    parser.add_argument("--windows", type=int, default=48, help="windows of all three parts (default: 48)")
    parser.add_argument("--parts", type=int, default=3, help="texts that a TEXT is cut into (default: 3)")
    parser.add_argument("--held-out", nargs="+", metavar="KIND=FILE", help="texts that a plan of all TEXTs is held to")
    parser.add_argument("--json", metavar="FILE", help="write every placement here")
    asked = parser.parse_args()
    print(subjects.machine())
    torch.set_num_threads(1)
    loaded = loading.load(asked.model)
    cut = Cut(asked.length, asked.windows, placement=asked.placement, allow_foreign=True)
    if asked.held_out:
        held_to(loaded, asked, cut)
        return
    contents = [
        part for text in texts.read_each(asked.text) or texts.sample("demo") for part in split(text, asked.parts)
    ]
    budget = read_budget(asked.budget)
    found = [
        outcome
        for content in (contents[:1] if asked.quick else contents)
        for outcome in outcomes(Population(loaded, content, cut), budget, 2 if asked.quick else asked.placements)
    ]
    told(found, budget.share)
    if asked.json:
        write(Path(asked.json), found, vars(asked), contents)


def held_to(loaded: loading.Loaded, asked: argparse.Namespace, cut: Cut) -> None:
    """One plan, and pieces of texts that it did not read."""
    calibration = list(texts.read_each(asked.text) or texts.sample(loaded.info.id))
    kinds = [one.split("=", 1) for one in asked.held_out]
    held = [(kind, content) for kind, file in kinds for content in texts.read_each([file]) or ()]
    found = held_out.found(loaded, calibration, held, replace(cut, placement="spread"), read_budget(asked.budget))
    held_out.told(found)
    if asked.json:
        told = {"model": Path(loaded.info.id).name, "budget": asked.budget}  # of a folder no more than its name
        told |= {"length": asked.length, "windows": asked.windows}
        told |= {"kept": found.kept, "search_seconds": found.seconds, "loss": found.loss, "bounds": found.bounds}
        for part, contents in (("calibration", calibration), ("held_out", [content for _, content in held])):
            told[part] = {one.name: sha256(one.text.encode()).hexdigest() for one in contents}
        told |= {"promised": found.choice.promised and found.choice.promised.model_dump()}
        told |= {"forms": [one.model_dump() for one in found.choice.forms]}
        told |= {"pieces": [asdict(piece) for piece in found.pieces]}
        write_atomically(Path(asked.json), f"{json.dumps(told, ensure_ascii=False, indent=1)}\n".encode())


def split(content: Content, parts: int) -> list[Content]:
    """A text in so many parts, one behind the other."""
    if parts == 1:
        return [content]
    size = len(content.text) // parts
    return [
        Content(content.text[at * size : (at + 1) * size], f"{content.name}, {at + 1} of {parts}")
        for at in range(parts)
    ]


def outcomes(population: Population, budget: Budget, placements: int) -> Iterator[Outcome]:
    """What every scheme promises at every placement."""
    name = population.content.name
    print(f"\n{name}: {population.design.count} windows of {population.cut.tokens} tokens", flush=True)
    for seed in range(placements):
        parts = spread_parts(population, seed)
        choice = population.search().choose(*parts, budget)
        truth = population.truth(choice, used(parts[:2]))
        for scheme, rise in ((PROMISED, choice.promised), (ESTIMATED, choice.estimated)):
            yield outcome(name, scheme, seed, choice, truth, rise)
        first, second = consecutive_parts(population, seed)
        choice = population.search(margin=1).choose(first, second, second, budget)
        yield outcome(name, CONSECUTIVE, seed, choice, population.truth(choice, ()), choice.estimated)
        print(".", end="", flush=True)
    print()


def outcome(name: str, scheme: str, seed: int, choice: Choice, truth: float, rise: Rise | None) -> Outcome:
    """One scheme's promise beside the truth."""
    assert rise is not None
    low, high = rise.ci95 or (0.0, 0.0)
    return Outcome(name, scheme, seed, mean_rank(choice), truth, rise.share, low, high)


def mean_rank(choice: Choice) -> float:
    """Numbers kept for each key head, over query heads."""
    latents = [
        (rank / len(group), len(choice.bases[site].heads_of(at)))
        for site, ranks in choice.ranks.items()
        for at, (rank, group) in enumerate(zip(ranks, choice.bases[site].groups, strict=True))
    ]
    return sum(rank * heads for rank, heads in latents) / sum(heads for _, heads in latents)


def spread_parts(population: Population, seed: int) -> tuple[Sample, Sample, Sample]:
    """The three parts as a run with that seed cuts them; nothing is evaluated beside them."""
    cut = replace(population.cut, seed=seed)
    nothing = Batches((), 0, 0, (), 0.0)
    fitting, choosing, promising = cut_samples(population.loaded, [population.content], cut, nothing, None)
    return fitting, choosing, promising


def consecutive_parts(population: Population, seed: int) -> tuple[Sample, Sample]:
    """As many windows in a row, from anywhere in the text: the first half of them, and the second."""
    cut, text = replace(population.cut, placement="first"), population.content.text
    share = min(1.0, 1.1 * cut.sequences / population.design.count)
    start = Random(seed).randrange(max(1, int(len(text) * (1 - share))))  # noqa: S311  # no secret
    found = texts.batches(population.loaded, [replace(population.content, text=text[start:])], cut)
    half = len(found) // 2
    parts = (found.batches[:half], found.batches[half:])
    halves = (replace(found, batches=part, sequences=sum(batch.size for batch in part)) for part in parts)
    first, second = (Sample(half, Design.plain(half.sequences)) for half in halves)
    return first, second


def used(parts: Iterable[Sample]) -> set[int]:
    """The numbers of the windows that are in these parts."""
    return {window for part in parts for text in part.batches.texts for window in text.windows}


# --- tables ---------------------------------------------------------------------------------------------------------


def told(found: Sequence[Outcome], budget: float) -> None:
    """A row for every text and scheme, and for all texts."""
    print(f"\nbudget {100 * budget:g} %; share of placements with its exact 95 % interval; rises in % of the loss")
    print(f"{'text':34}{'scheme':18}{'n':>4}{'truth ≤ upper end':>20}{'in interval':>20}", end="")
    print(f"{'truth > budget':>20}{'upper end > budget':>20}{'truth':>8}{'told':>8}{'rank':>7}")
    for text in [*dict.fromkeys(one.text for one in found), None]:
        for scheme in (PROMISED, ESTIMATED, CONSECUTIVE):
            row([one for one in found if one.scheme == scheme and text in (None, one.text)], text or "all", budget)
    own = [one for one in found if one.scheme == PROMISED]
    errors = torch.tensor([one.share - one.truth for one in own], dtype=torch.float64)
    width = sum(one.high - one.low for one in own) / len(own) / 2
    print("\npromised: ratio of the interval's mean half-width to 1.96 sd of (promised − truth): ", end="")
    print(f"{width / (1.96 * float(errors.std())):.2f} (1 is exact, more is careful)")


def row(found: Sequence[Outcome], text: str, budget: float) -> None:
    """How often a scheme held."""
    print(f"{text:34.33}{found[0].scheme:18}{len(found):4}", end="")
    for holds in (
        [one.truth <= one.high for one in found],
        [one.low <= one.truth <= one.high for one in found],
        [one.truth > budget for one in found],
        [one.high > budget for one in found],
    ):
        low, high = stats.binomtest(sum(holds), len(holds)).proportion_ci(method="exact")
        told_share = f"{sum(holds) / len(holds):.2f} [{low:.2f}, {high:.2f}]"
        print(f"{told_share:>20}", end="")
    truth, share, rank = (mean(getattr(one, name) for one in found) for name in ("truth", "share", "mean_rank"))
    print(f"{100 * truth:8.2f}{100 * share:8.2f}{rank:7.2f}")


def mean(numbers: Iterable[float]) -> float:
    """Of some numbers."""
    every = list(numbers)
    return sum(every) / len(every)


def write(path: Path, found: Sequence[Outcome], asked: dict[str, object], contents: Sequence[Content]) -> None:
    """Every placement as JSON, with what was asked for and the texts' digests."""
    shown = {name: value for name, value in asked.items() if name not in ("json", "text")}
    digests = {content.name: sha256(content.text.encode()).hexdigest() for content in contents}
    rows = [{name: shortened(value) for name, value in asdict(one).items()} for one in found]
    body = ",\n  ".join(json.dumps(one, ensure_ascii=False) for one in rows)
    head = json.dumps({"asked": shown, "texts": digests}, ensure_ascii=False)[:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f'{head}, "placements": [\n  {body}\n]}}\n'.encode())


def shortened(value: object) -> object:
    """A float with six significant digits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
