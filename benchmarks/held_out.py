"""Measure how often a plan's promise holds on pieces of new texts, of the calibrated kind or of other kinds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from scipy import stats

from attnlens.arguments import Budget
from attnlens.kernels import parsed
from attnlens.lab.ranks.search import BudgetSearch, Choice, Trial, cut_samples, measure_losses
from attnlens.maths.statistics import Design
from attnlens.models import hooks, loading, texts
from attnlens.models.texts import Batches, Content, Cut
from attnlens.models.texts.targets import feed, task_of
from attnlens.records import Rise, Site
from attnlens.records.plans import MARGIN


@dataclass(frozen=True)
class Piece:
    """Windows spread over one stretch of a text, and the effect of the plan on them."""

    kind: str
    text: str
    number: int
    before: float
    """Nats per prediction."""
    rise: float
    """Rise in the unit of the budget."""
    ppl: float
    """Rise of the perplexity."""


@dataclass(frozen=True)
class HeldOut:
    """A plan, its bounds, and the pieces that it was measured on."""

    choice: Choice
    bounds: dict[str, float]
    """By name."""
    pieces: list[Piece]
    cached: float
    """Share of the keys' numbers that is cached."""
    seconds: float
    """Processor time of the search."""
    loss: float
    """Nats per prediction on the windows that chose the plan."""


def evaluate_plan(
    loaded: loading.Loaded,
    calibration: Sequence[Content],
    contents: Sequence[tuple[str, Content]],
    cut: Cut,
    budget: Budget,
) -> HeldOut:
    """Choose a plan on the calibration texts and measure it on pieces of the other texts; print both."""
    task, nothing = task_of(loaded.model), Batches((), 0, 0, (), 0.0)
    parts = cut_samples(loaded, calibration, cut, nothing, None)
    print(f"{len(calibration)} texts, {[part.batches.sequences for part in parts]} windows", flush=True)
    fed = feed(loaded, parts[0].batches, task, 0)
    sites = tuple(capture.site for capture in hooks.survey(loaded.model, fed[0].inputs))
    swaps: dict[Site, hooks.Replacement] = {site: hooks.Replacement(parsed("rank:65536")) for site in sites}
    search, start = BudgetSearch(loaded, sites, swaps, task, progress=lambda _: None), time.process_time()
    choice = search.choose(*parts, budget)
    seconds = time.process_time() - start
    total = sum(size for basis in choice.bases.values() for size in basis.sizes)
    cached = sum(sum(ranks) for ranks in choice.ranks.values()) / total
    loss = Trial.of(search, parts[1]).original.mean
    outcome = HeldOut(choice, list_bounds(choice, budget), [], cached, seconds, loss)
    print_plan(outcome)
    size = max(1, parts[2].batches.sequences // len(calibration))
    print(f"four pieces of each text, of {size} windows: as many as the promise reads of each text", flush=True)
    for kind, content in contents:
        for piece in measure_pieces(loaded, sites, choice, kind, content, replace(cut, sequences=size), budget):
            outcome.pieces.append(piece)
            print(f"  {kind:22.21}{piece.number:3}{100 * piece.rise:+9.2f} %{100 * piece.ppl:+9.2f} % ppl", flush=True)
    return outcome


def list_bounds(choice: Choice, budget: Budget) -> dict[str, float]:
    """List the bounds that a plan promises."""
    rise = choice.promised
    assert rise is not None
    bounds = {
        "upper end of the interval": rise.high,
        "highest of the upper end and of each text": max([rise.high, *rise.by_text.values()]),
        f"bound with {MARGIN} half-widths": rise.bound(MARGIN),
        "budget": budget.share,
    }
    return bounds | ({} if rise.further is None else {"one more text": rise.further})


def print_plan(result: HeldOut) -> None:
    """Print the plan."""
    for form in result.choice.forms:
        rise = "diverged" if form.rise is None else f"{100 * form.rise.share:+.2f} %, {format_rises(form.rise)}"
        print(f"  half of all numbers, {form.form}: {rise}")
    print(f"{100 * result.cached:.1f} % of the keys' numbers kept; search {result.seconds:.0f} s of processor time")
    for name, rise in (("estimated", result.choice.estimated), ("promised", result.choice.promised)):
        if rise is not None:
            print(f"  {name} {100 * rise.share:+.2f} % {rise.ci95} over {rise.over}: {format_rises(rise)}")
    print(f"  bounds: {', '.join(f'{name} {100 * at:+.2f} %' for name, at in result.bounds.items())}", flush=True)


def format_rises(rise: Rise) -> str:
    """Format the rise of each text."""
    return ", ".join(f"{name} {100 * share:+.2f} %" for name, share in rise.by_text.items())


def measure_pieces(
    loaded: loading.Loaded,
    sites: tuple[Site, ...],
    choice: Choice,
    kind: str,
    content: Content,
    cut: Cut,
    budget: Budget,
) -> Iterator[Piece]:
    """Yield four stretches of a text, each of `cut.sequences` windows, with the rise on each."""
    task = task_of(loaded.model)
    long = len(content.text) // 4
    for number in range(4):
        part = replace(content, text=content.text[number * long : (number + 1) * long])
        batches = texts.batches(loaded, [part], replace(cut, placement="spread"))
        fed, design = feed(loaded, batches, task, 0), Design.plain(batches.sequences)
        before = measure_losses(loaded, fed, task, design)
        with hooks.replace(loaded.model, sites, choice.swaps):
            after = measure_losses(loaded, fed, task, design)
        ppl = math.expm1(after.mean - before.mean)
        rise = ppl if budget.unit == "ppl" else after.mean / before.mean - 1
        yield Piece(kind, content.name, number, before.mean, rise, ppl)


def print_bounds(result: HeldOut) -> None:
    """Print how often each bound was exceeded, in all and by kind, with exact intervals."""
    print(f"\nrise above the bound, of {len(result.pieces)} pieces, with the exact 95 % interval")
    for name, bound in result.bounds.items():
        beyond = [piece for piece in result.pieces if piece.rise > bound]
        low, high = stats.binomtest(len(beyond), len(result.pieces)).proportion_ci(method="exact")
        kinds = ", ".join(f"{kind} {count_kind(beyond, kind)}" for kind in dict.fromkeys(p.kind for p in result.pieces))
        print(f"  {name:44}{100 * bound:+7.2f} %{len(beyond):4} [{low:.2f}, {high:.2f}]   {kinds}")
    mean = sum(piece.rise for piece in result.pieces) / len(result.pieces)
    largest = max(piece.rise for piece in result.pieces)
    print(f"  mean rise {100 * mean:+.2f} %, largest {100 * largest:+.2f} %, ratio of it to the budget's: ", end="")
    print(f"{largest / result.bounds['budget']:.2f}")


def count_kind(beyond: Sequence[Piece], kind: str) -> int:
    """Count the pieces of a kind."""
    return sum(piece.kind == kind for piece in beyond)
