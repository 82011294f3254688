"""Loss token by token: by place in the sequence, and where the evidence lies further back than a window reaches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.records import BeyondWindow, Change, PositionChange
from attnlens.run.outcomes.paired import paired_change
from attnlens.statistics import Design
from attnlens.texts.targets import NOTHING
from attnlens.wording import counted

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

BINS = 8
"""Parts of a sequence whose losses are told apart."""
FEWEST = 8
"""Tokens below which a mean over them says nothing."""


@dataclass
class TokenLosses:
    """The loss of each predicted token under the original and a changed model, batch by batch."""

    before: list[Float[Tensor, "sequences places"]] = field(default_factory=list)
    """A row a sequence, its predicted tokens from the front; NaN behind them."""
    after: list[Float[Tensor, "sequences places"]] = field(default_factory=list)
    """The same under the changed model."""
    back: list[Int[Tensor, "sequences places"]] = field(default_factory=list)
    """How far back each token's evidence lies: see `evidence`."""

    def add(
        self,
        losses: Sequence[Float[Tensor, " predicted"]],
        targets: Int[Tensor, "batch positions"],
        ids: Int[Tensor, "batch positions"],
    ) -> None:
        """Take in the losses at a batch's targets: the original's, and the changed model's."""
        there = (targets != NOTHING).cpu()
        for found, rows in zip(losses, (self.before, self.after), strict=True):
            rows.append(_from_front(found.double().cpu(), there, torch.nan))
        self.back.append(_from_front(evidence(ids, targets)[there], there, 0))

    def joined(self) -> TokenLosses:
        """The same with all batches in one."""
        before, after = _rows(self.before, torch.nan), _rows(self.after, torch.nan)
        return TokenLosses([before], [after], [_rows(self.back, 0)])

    def by_position(self, design: Design, seed: int) -> list[PositionChange]:
        """The change on each of 8 parts of the sequences, equally long but for rounding; fewer on fewer tokens."""
        before, after = _rows(self.before, torch.nan), _rows(self.after, torch.nan)
        places, found = before.shape[1], []
        bins = min(BINS, places)
        for start, end in ((places * part // bins, places * (part + 1) // bins) for part in range(bins)):
            some = torch.zeros_like(before, dtype=torch.bool)
            some[:, start:end] = True
            change, tokens = _change(before, after, some, design, seed)
            found.append(PositionChange(first=start + 1, last=end, tokens=tokens, change=change))
        return found

    def count(self, window: int) -> int:
        """How many tokens have their evidence more than `window` tokens back."""
        return sum(int((part > window).sum()) for part in self.back)

    def beyond(self, window: int, design: Design, seed: int) -> BeyondWindow | str:
        """The change on tokens whose evidence lies more than `window` tokens back, or why there is none."""
        some = _rows(self.back, 0) > window
        if (count := self.count(window)) < FEWEST:
            back = counted(window, "token")
            have = "has its" if count == 1 else "have their"
            return f"{counted(count, 'token')} {have} evidence more than {back} back, fewer than {FEWEST}"
        change, tokens = _change(_rows(self.before, torch.nan), _rows(self.after, torch.nan), some, design, seed)
        return BeyondWindow(window=window, tokens=tokens, change=change)


def evidence(
    ids: Int[Tensor, "batch positions"], targets: Int[Tensor, "batch positions"]
) -> Int[Tensor, "batch positions"]:
    """How many places ago the pair (id, target) stood in the sequence last; 0 where it did not.

    A copying (induction) head reads the target off the token behind the former id, so many places before the target
    itself: a window of w keys, the query's own among them, holds it where that is at most w.
    """
    found = torch.zeros(targets.shape, dtype=torch.long)
    for row, (own, following) in enumerate(zip(ids.tolist(), targets.tolist(), strict=True)):
        for place, distance in _distances(own, following):
            found[row, place] = distance
    return found


def _distances(ids: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(place, how many places ago its pair stood last), where it did."""
    last: dict[tuple[int, int], int] = {}
    for place, pair in enumerate(zip(ids, targets, strict=True)):
        if pair[1] == NOTHING:
            continue
        if pair in last:
            yield place, place - last[pair]
        last[pair] = place


def _change(before: Tensor, after: Tensor, some: Tensor, design: Design, seed: int) -> tuple[Change, int]:
    """The change of the mean over `some` tokens, paired over the sequences that have any, and how many they are."""
    some = some & ~before.isnan()
    counts = some.sum(1).double()
    first, second = (torch.where(some, part, 0.0).sum(1) / counts for part in (before, after))
    return paired_change(first, second, counts, design, seed), int(counts.sum())


def _from_front(values: Tensor, there: Bool[Tensor, "batch positions"], nothing: float) -> Tensor:
    """The values, those of each row from its first place on."""
    rows = values.new_full(there.shape, nothing)
    rows[there.sort(dim=1, descending=True, stable=True).values] = values
    return rows[:, : int(there.sum(1).max())]


def _rows(parts: Sequence[Tensor], nothing: float) -> Tensor:
    """All batches' rows, the shorter ones filled up."""
    most = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, most - part.shape[1]), value=nothing) for part in parts])
