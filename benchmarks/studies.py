"""What the studies share: what each block of windows reads of a head, and what it loses when that head is changed."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
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
from attnlens.runs.swap.sweep import sweep, units

if TYPE_CHECKING:
    from attnlens.report.export import Report

SPLITS = 100
"""Random halvings of the blocks of each text."""


def arguments(description: str | None) -> argparse.Namespace:
    """The options of a study."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny subject, few windows: does it still run?")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--figure", help="draw them into this file")
    parser.add_argument("--models", nargs="*", help="of its models only these; all")
    return parser.parse_args()


def write(path: str, found: dict[str, Any]) -> None:
    """The figures as JSON, rounded to four significant digits."""

    def short(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: short(one) for name, one in part.items()}
        if isinstance(part, list | tuple):
            return [short(one) for one in part]
        if isinstance(part, float):
            return float(f"{part:.4g}") if math.isfinite(part) else None
        return part

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(short(found)) + "\n", encoding="utf-8")


def blocks_of(loaded: loading.Loaded, contents: Sequence[texts.Content], cut: texts.Cut) -> texts.Batches:
    """The windows in blocks that each lie within one text."""
    made = texts.batches(loaded, contents, cut)
    assert all(len(set(batch.parts)) == 1 for batch in made)
    return made


def in_blocks(report: Report, made: texts.Batches, name: str) -> Tensor:
    """A measure's mean over the windows of each block, (blocks, heads); NaN windows don't count."""
    windows = report.windows
    assert windows is not None
    assert [text for text, _ in windows.windows] == list(made.parts)
    parts = windows.values[name].double().split([batch.size for batch in made])
    return torch.stack([part.nanmean(0) for part in parts])


def inspected(loaded: loading.Loaded, files: Sequence[str], cut: texts.Cut, source: str = "tokens") -> Report:
    """Every measure of the same windows."""
    size = {"length": cut.tokens, "windows": cut.sequences, "batch_size": cut.batch_size, "pack": cut.pack}
    analyzers = ("symmetry",) if source == "tokens" else ("symmetry", "spectrum")
    return attnlens.inspect(loaded, source=source, analyzers=analyzers, text=files, **size)


def harms(loaded: loading.Loaded, made: texts.Batches, words: str) -> tuple[Tensor, list[int], list[object]]:
    """What each block loses by the swap of each head alone, (blocks, heads); each head's layer, and its weights.

    The rise of the loss in nats; of a headless model 1 − cosine of its last hidden states. Layers that share a module
    (ALBERT) share its heads' weights.
    """
    task = task_of(loaded.model)
    reached = hooks.survey(loaded.model, made.batches[0].inputs)
    sites = tuple(one.site for one in reached)
    swaps = {site: hooks.Replacement(parsed(words, allow_signed=True)) for site in sites}
    every = units(swaps, "heads", {one.site: one.call.query.shape[1] for one in reached})
    work = (loaded, sites, swaps, every)
    blocks = zip(feed(loaded, made, task, seed=0), made, strict=True)
    rows = [sweep(*work, [fed], task, Design.plain(one.size), "auto", lambda _: None).harms for fed, one in blocks]
    return torch.stack(rows), [site.layer for site, _ in every], [(site.path, head) for site, head in every]


def reliability(values: Tensor, names: Sequence[str]) -> float:
    """Spearman's ρ over heads between two halves of the blocks, stepped up to all of them by 2r/(1 + r).

    The median over random halvings (Spearman 1910, Brown 1910), within each text where all have two blocks; at least 0.
    """
    if min(names.count(name) for name in names) < 2:
        names = ["all"] * len(names)
    draw, found = torch.Generator().manual_seed(0), []
    for _ in range(SPLITS):
        half = torch.zeros(len(names), dtype=torch.bool)
        for name in dict.fromkeys(names):
            own = torch.tensor([place for place, one in enumerate(names) if one == name])
            half[own[torch.randperm(len(own), generator=draw)[: len(own) // 2]]] = True
        found.append(rank_correlation(values[half].nanmean(0), values[~half].nanmean(0), draws=2).value)
    middle = float(torch.tensor(found).nanmedian())
    return max(0.0, 2 * middle / (1 + middle))


def correlation(
    x: Tensor, y: Tensor, names: Sequence[str], layers: Sequence[int], heads: Sequence[object]
) -> dict[str, Any]:
    """How the mean reading of a head goes with its mean harm, and how far noise would let it.

    Readings with the same entry in `heads` are of one head, in whose draws they stay together.
    """
    value = rank_correlation(x.nanmean(0), y.nanmean(0), heads)
    own = {
        name: rank_correlation(x[own].nanmean(0), y[own].nanmean(0), draws=2).value
        for name in dict.fromkeys(names)
        for own in [torch.tensor([one == name for one in names])]
    }
    both = reliability(x, names), reliability(y, names)
    ceiling = math.sqrt(both[0] * both[1])
    return {
        "rho": value.value,
        "heads95": value[1:],
        "layers95": rank_correlation(x.nanmean(0), y.nanmean(0), layers)[1:],
        "by_text": own,
        "texts95": over_texts(list(own.values())),
        "reliability": both,
        "ceiling": ceiling,
        "ratio_to_ceiling": value.value / ceiling if ceiling > 0 else math.nan,
        "rank_r2": value.value**2,
    }


def over_texts(found: Sequence[float]) -> tuple[float, float]:
    """The interval of a text's mean ρ, by Student's t of artanh ρ over texts; NaN for fewer than FEWEST_TEXTS."""
    drawn = torch.tensor([rho for rho in found if rho == rho], dtype=torch.float64).clamp(-0.999999, 0.999999).atanh()
    if len(drawn) < FEWEST_TEXTS:
        return math.nan, math.nan
    reach = float(stats.t.ppf(0.975, len(drawn) - 1)) * float(drawn.std()) / math.sqrt(len(drawn))
    return math.tanh(float(drawn.mean()) - reach), math.tanh(float(drawn.mean()) + reach)
