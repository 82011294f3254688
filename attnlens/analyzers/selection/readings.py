"""Reduces a solved selection problem and its nulls to measures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attnlens import records
from attnlens.choices import Space

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnlens.attsvm.head import Chosen, Nearness


@dataclass(frozen=True)
class SelectionReading:
    """What one problem read, without its tensors."""

    values: dict[str, float]
    """By measure, without what says in which space."""
    reason: str | None
    """Why there are no more of them."""
    margins: list[float] = field(default_factory=list)
    """Least margin of each query over the best possible, ascending."""
    best: float = 0.0
    """1/‖W_mm‖."""
    picks: list[records.Pick] = field(default_factory=list)
    """What was posed, where that is to be shown."""


BySpace = dict[Space, SelectionReading]
"""What the problems of one form read, space by space."""


def reading_of(chosen: Chosen, found: Nearness | str, numbers: Sequence[int] | None) -> SelectionReading:
    """A solved problem without its tensors; with its picks where the sequences' `numbers` are given."""
    posed = {"queries": float(len(chosen.sets))}
    if chosen.sets:
        posed["least_decided"] = float(chosen.log_odds.min().sigmoid())
    if isinstance(found, str):
        return SelectionReading(posed, found)
    values = {
        "margin": float(found.margins.min()),
        "efficiency": float(found.shares.min()),
        "efficiency_q05": float(found.shares.quantile(0.05)),
        "svm_cosine": found.svm_cosine,
        "support": float(found.solution.support.double().mean()),
    }
    picks = [] if numbers is None else _picks(found, numbers)
    return SelectionReading(posed | values, None, found.shares.sort().values.tolist(), found.best, picks)


def measured(what: str, own: SelectionReading, draws: Sequence[SelectionReading] = ()) -> records.Measure:
    """A problem's reading with the null that its draws make, where there are any."""
    if what not in own.values:
        return records.Measure(value=None, reason=own.reason)
    return records.Measure(value=own.values[what], n=round(own.values["queries"]), null=_null(what, draws))


def _null(what: str, draws: Sequence[SelectionReading]) -> records.Null | None:
    """Mean and sd over the draws that have the measure; None for fewer than two."""
    import torch

    values = torch.tensor([draw.values[what] for draw in draws if what in draw.values], dtype=torch.float64)
    return records.Null(mean=float(values.mean()), sd=float(values.std())) if len(values) > 1 else None


def _picks(found: Nearness, numbers: Sequence[int]) -> list[records.Pick]:
    """Every posed query, with the places of what it selects and of its support."""
    problem, solution = found.posed.problem, found.solution
    carrying = solution.support & ~problem.equal
    return [
        records.Pick(
            sequence=numbers[number],
            query=position,
            selected=chosen.nonzero().flatten().tolist(),
            support=sorted(found.posed.token_of[carrying & (problem.query_of == row)].tolist()),
            weight=float(found.chosen.log_odds[row].sigmoid()),
            margin=float(found.shares[row]),
        )
        for row, (number, position, chosen) in enumerate(found.chosen.rows)
    ]
