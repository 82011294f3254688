"""What each window of a swap's evaluation text read: losses, KL and hidden cosines, by kernel and stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attnlens.records import Settings, Windows
from attnlens.run.outcomes.differences import Differences

PREDICTED = ("loss.before", "loss.after", "kl", "tokens")
STATES = ("hidden_cosine", "hidden_tokens")
"""What is told of each window, in this order: of its predictions, and of its hidden states."""


def windows_of(found: Mapping[tuple[str, str], Differences], settings: Settings) -> Windows:
    """The paired losses, KL and hidden cosines by (kernel, stage), and over how many tokens of a window each is."""
    units = [{"kernel": kernel, "stage": stage} for kernel, stage in found]
    every = list(found.values())
    columns: dict[str, list[Tensor]] = {}
    if all(one.before for one in every):
        columns = {
            "loss.before": [_whole(one, one.before) for one in every],
            "loss.after": [_whole(one, one.after) for one in every],
            "kl": [_whole(one, one.divergences) for one in every],
            "tokens": [_whole(one, one.counts) for one in every],
        }
    if all(one.cosines for one in every):
        columns["hidden_cosine"] = [torch.cat(one.cosines) for one in every]
        columns["hidden_tokens"] = [torch.cat(one.real) for one in every]
    return placed_windows({name: torch.stack(parts, 1) for name, parts in columns.items()}, units, settings)


def placed_windows(
    columns: Mapping[str, Tensor], units: Sequence[Mapping[str, str | int]], settings: Settings
) -> Windows:
    """These columns with the text and number of each window; none where no window has a number."""
    placed = [(text.name, number) for text in settings.texts for number in text.windows]
    if not columns or not placed:
        return Windows([], units, {})
    return Windows(placed, units, {name: columns[name] for name in (*PREDICTED, *STATES) if name in columns})


def _whole(one: Differences, parts: list[Tensor]) -> Tensor:
    """One number a window; NaN where there is nothing to predict."""
    kept = torch.cat(one.kept)
    every = torch.full((len(kept),), torch.nan, dtype=torch.float64)
    every[kept] = torch.cat(parts).double()
    return every
