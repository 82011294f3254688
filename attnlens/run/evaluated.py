"""What each window of a swap's evaluation text read: losses before and after, by kernel and stage."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attnlens.records import Settings, Windows
from attnlens.run.compare import Comparison


def windows_of(found: Mapping[tuple[str, str], Comparison], settings: Settings) -> Windows:
    """The paired losses by (kernel, stage), and how many tokens of each window are predicted."""
    placed = [(text.name, number) for text in settings.texts for number in text.windows]
    units = [{"kernel": kernel, "stage": stage} for kernel, stage in found]
    predicting = [comparison for comparison in found.values() if comparison.before]
    if len(predicting) < len(units) or not placed:
        return Windows([], units, {})
    columns = {
        "loss.before": [_whole(one, one.before) for one in predicting],
        "loss.after": [_whole(one, one.after) for one in predicting],
        "tokens": [_whole(one, one.counts) for one in predicting],
    }
    return Windows(placed, units, {name: torch.stack(parts, 1) for name, parts in columns.items()})


def _whole(comparison: Comparison, parts: list[Tensor]) -> Tensor:
    """One number a window; NaN where there is nothing to predict."""
    kept = torch.cat(comparison.kept)
    every = torch.full((len(kept),), torch.nan, dtype=torch.float64)
    every[kept] = torch.cat(parts).double()
    return every
