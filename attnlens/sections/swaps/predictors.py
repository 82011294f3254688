"""The section on what predicts a kernel's harm in single heads."""

from __future__ import annotations

from collections.abc import Sequence

from attnlens.records import Predictor, Swap
from attnlens.sections.section import Column, Section, Table
from attnlens.sentences.swaps.effects import interval
from attnlens.sentences.swaps.predictions import (
    found_sentence,
    left_out_sentence,
    p_value,
    prediction_help,
)
from attnlens.wording import NO_VALUE, clean, written

MOST, FEW = 8, 3
"""Measures shown of one kernel, and of each of several."""


def prediction_section(swaps: Sequence[Swap]) -> Section:
    """What predicts the harm of each kernel; the strongest measures in a table."""
    lines = [found_sentence(swap) for swap in swaps]
    rows = [(swap, one) for swap in swaps for one in _strongest(swap, MOST if len(swaps) == 1 else FEW)]
    notes = (prediction_help(swaps), left_out_sentence(swaps))
    table = _table(rows, named=len(swaps) > 1) if rows else None
    return Section("What predicts harm", lines=tuple(lines), table=table, notes=tuple(filter(None, notes)))


def _strongest(swap: Swap, most: int) -> list[Predictor]:
    return sorted(swap.predictors, key=lambda one: -abs(one.rho))[:most]


def _table(rows: Sequence[tuple[Swap, Predictor]], *, named: bool) -> Table:
    """A row a measure."""
    found = [one for _, one in rows]
    names = [Column("", "measure", tuple(clean(one.measure) for one in found), words=True)]
    if named:
        names.insert(0, Column("", "kernel", tuple(clean(swap.kernel) for swap, _ in rows), words=True))
    columns = [
        Column("", "ρ", tuple(written(one.rho, 2) for one in found)),
        Column("", "over heads", tuple(_ends(one.heads_ci95) for one in found)),
        Column("", "over layers", tuple(_ends(one.layers_ci95) for one in found)),
        Column("", "over windows", tuple(_ends(one.sequences_ci95) for one in found)),
        Column("", "p", tuple(p_value(one.p_corrected) for one in found)),
        Column("", "holds", tuple("*" if one.holds else "" for one in found), words=True),
    ]
    if len({one.heads for one in found}) > 1:
        columns.append(Column("", "heads", tuple(str(one.heads) for one in found)))
    return Table(tuple(names), tuple(columns))


def _ends(bounds: tuple[float, float] | None) -> str:
    return NO_VALUE if bounds is None else interval(bounds, 2)
