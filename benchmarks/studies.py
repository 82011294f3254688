"""Functions that the studies share: the measures of a head on each block of windows, and the harm of changing it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from scipy import stats
from torch import Tensor

import attnlens
from attnlens.kernels import parsed
from attnlens.maths.statistics import Design, rank_correlation
from attnlens.maths.statistics.design import FEWEST_TEXTS
from attnlens.models import hooks, loading, texts
from attnlens.models.texts.targets import feed, task_of
from attnlens.runs.swap.sites import SwapSetup
from attnlens.runs.swap.sweep import list_units, sweep

if TYPE_CHECKING:
    from attnlens.report.report import Report

SPLITS = 100
"""Number of random halvings of the blocks of each text."""


def parse_options(description: str | None) -> argparse.Namespace:
    """Parse the options of a study."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny subject, few windows: does it still run?")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--figure", help="draw the figures into this file")
    parser.add_argument("--models", nargs="*", help="(default: all of its models)")
    return parser.parse_args()


def build_blocks(loaded: loading.Loaded, contents: Sequence[texts.Content], cut: texts.Cut) -> texts.Batches:
    """Build the windows in blocks, each within one text."""
    batches = texts.batches(loaded, contents, cut)
    assert all(len(set(batch.parts)) == 1 for batch in batches)
    return batches


def average_blocks(report: Report, batches: texts.Batches, name: str) -> Tensor:
    """Average a measure over the windows of each block, (blocks, heads), ignoring NaN."""
    windows = report.windows
    assert windows is not None
    assert [text for text, _ in windows.windows] == list(batches.parts)
    parts = windows.values[name].double().split([batch.size for batch in batches])
    return torch.stack([part.nanmean(0) for part in parts])


def inspect_windows(loaded: loading.Loaded, files: Sequence[str], cut: texts.Cut, source: str = "tokens") -> Report:
    """Inspect the same windows with all measures."""
    size = {"length": cut.tokens, "windows": cut.sequences, "batch_size": cut.batch_size, "pack": cut.pack}
    analyzers = ("symmetry",) if source == "tokens" else ("symmetry", "spectrum")
    return attnlens.inspect(loaded, source=source, analyzers=analyzers, text=files, **size)


def measure_harms(loaded: loading.Loaded, batches: texts.Batches, words: str) -> tuple[Tensor, list[int], list[object]]:
    """Measure the harm of swapping each head alone, (blocks, heads); return it with each head's layer and weights.

    Harm is the rise in the loss in nats, or 1 − cosine of the last hidden states of a headless model. Layers that share
    a module (ALBERT) share the weights of its heads.
    """
    task = task_of(loaded.model)
    captures = hooks.survey(loaded.model, batches.batches[0].inputs)
    sites = tuple(item.site for item in captures)
    swaps = {site: hooks.Replacement(parsed(words, allow_signed=True)) for site in sites}
    head_units = list_units(swaps, "heads", {item.site: item.call.query.shape[1] for item in captures})
    setup = SwapSetup(loaded, sites, swaps, task)
    blocks = zip(feed(loaded, batches, task, seed=0), batches, strict=True)
    rows = [sweep(setup, head_units, [fed], Design.plain(item.size), lambda _: None).harms for fed, item in blocks]
    return torch.stack(rows), [site.layer for site, _ in head_units], [(site.path, head) for site, head in head_units]


def estimate_reliability(values: Tensor, names: Sequence[str]) -> float:
    """Estimate Spearman's ρ over heads between two halves of the blocks, stepped up to all by 2r/(1 + r).

    The result is the median over random halvings (Spearman 1910, Brown 1910), at least 0. If all texts have two blocks,
    each text is halved separately.
    """
    if min(names.count(name) for name in names) < 2:
        names = ["all"] * len(names)
    draw, rhos = torch.Generator().manual_seed(0), []
    for _ in range(SPLITS):
        half = torch.zeros(len(names), dtype=torch.bool)
        for name in dict.fromkeys(names):
            blocks = torch.tensor([place for place, other in enumerate(names) if other == name])
            half[blocks[torch.randperm(len(blocks), generator=draw)[: len(blocks) // 2]]] = True
        rhos.append(rank_correlation(values[half].nanmean(0), values[~half].nanmean(0), draws=2).value)
    middle = float(torch.tensor(rhos).nanmedian())
    return max(0.0, 2 * middle / (1 + middle))


def correlate_harm(
    x: Tensor, y: Tensor, names: Sequence[str], layers: Sequence[int], heads: Sequence[object]
) -> dict[str, Any]:
    """Correlate the mean value of a head with its mean harm, and estimate the ceiling set by noise.

    Values with the same entry in `heads` are of one head and stay together when heads are drawn.
    """
    value = rank_correlation(x.nanmean(0), y.nanmean(0), heads)
    rhos = {
        name: rank_correlation(x[mask].nanmean(0), y[mask].nanmean(0), draws=2).value
        for name in dict.fromkeys(names)
        for mask in [torch.tensor([other == name for other in names])]
    }
    reliabilities = estimate_reliability(x, names), estimate_reliability(y, names)
    ceiling = math.sqrt(reliabilities[0] * reliabilities[1])
    return {
        "rho": value.value,
        "heads95": value[1:],
        "layers95": rank_correlation(x.nanmean(0), y.nanmean(0), layers)[1:],
        "by_text": rhos,
        "texts95": estimate_interval(list(rhos.values())),
        "reliability": reliabilities,
        "ceiling": ceiling,
        "ratio_to_ceiling": value.value / ceiling if ceiling > 0 else math.nan,
        "rank_r2": value.value**2,
    }


def estimate_interval(rhos: Sequence[float]) -> tuple[float, float]:
    """Estimate the interval of the mean ρ of a text, by Student's t of artanh ρ; NaN for fewer than FEWEST_TEXTS."""
    drawn = torch.tensor([rho for rho in rhos if rho == rho], dtype=torch.float64).clamp(-0.999999, 0.999999).atanh()
    if len(drawn) < FEWEST_TEXTS:
        return math.nan, math.nan
    reach = float(stats.t.ppf(0.975, len(drawn) - 1)) * float(drawn.std()) / math.sqrt(len(drawn))
    return math.tanh(float(drawn.mean()) - reach), math.tanh(float(drawn.mean()) + reach)
