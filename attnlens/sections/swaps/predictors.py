"""The section on what predicts a kernel's harm in single heads."""

from __future__ import annotations

from collections.abc import Sequence

from attnlens.records import Predictor, Swap
from attnlens.sections.section import Column, Section, Table
from attnlens.sentences.swaps.effects import interval
from attnlens.wording import NO_VALUE, clean, counted, listed, written

MOST, FEW = 8, 3
"""Measures shown of one kernel, and of each of several."""
NAMED = 8
"""Measures that a sentence names."""


def prediction_section(swaps: Sequence[Swap]) -> Section:
    """What predicts the harm of each kernel; the strongest measures in a table."""
    lines = [found_sentence(swap) for swap in swaps]
    most = MOST if len(swaps) == 1 else FEW
    rows = [(swap, one) for swap in swaps for one in sorted(swap.predictors, key=lambda one: -abs(one.rho))[:most]]
    notes = (prediction_help(swaps), left_out_sentence(swaps))
    table = _table(rows, named=len(swaps) > 1) if rows else None
    return Section("What predicts harm", lines=tuple(lines), table=table, notes=tuple(filter(None, notes)))


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


def found_sentence(swap: Swap) -> str:
    """Which measure goes with the harm of a kernel, or that none does."""
    prediction = swap.prediction
    if prediction is None or not swap.predictors:
        return f"{clean(swap.kernel)}: no measure can be set against the harm: none differs, or the harm has no value."
    holding = [one for one in swap.predictors if one.holds]
    first = max(holding or swap.predictors, key=lambda one: abs(one.rho))
    looked = f"{counted(prediction.measures, 'measure')} over {counted(first.heads, 'head')}"
    if holding:
        others = f"; so do {len(holding) - 1} more" if len(holding) > 1 else ""
        return f"{clean(swap.kernel)}: of {looked}, {strength(first)} goes with the harm{others}."
    return f"{clean(swap.kernel)}: of {looked}, none holds over heads and layers; the strongest is {strength(first)}."


def strength(one: Predictor) -> str:
    """`tokens.entropy (ρ −0.84, over layers −0.92 to 0.08, p 0.0001)`."""
    layers = "" if one.layers_ci95 is None else f", over layers {interval(one.layers_ci95, 2)}"
    return f"{clean(one.measure)} (ρ {written(one.rho, 2)}{layers}, p {p_value(one.p_corrected)})"


def prediction_help(swaps: Sequence[Swap]) -> str:
    """How the table is to be read, and what it does not say."""
    said = (
        "ρ: Spearman's, over heads, of a measure of the original model on the same windows with Δ. 95 % intervals: "
        "bootstrap of heads, of whole layers, and of windows (or texts). p: permutations of heads, corrected for all "
        "measures (maxT). *: p < 0.05, and the interval over layers lies on one side of 0. A correlation is no cause"
    )
    found = [swap.prediction for swap in swaps if swap.prediction is not None]
    ceilings = [written(one.ceiling, 2) for one in found if one.ceiling is not None]
    if ceilings:
        least = " and ".join(dict.fromkeys(ceilings))
        said += f"; of a measure that told the harm but for the windows' noise, ρ ≈ {least} is expected (split halves)"
    lost = sum(one.diverged for one in found)
    return said + (f"; {counted(lost, 'diverged head')} left out." if lost else ".")


def left_out_sentence(swaps: Sequence[Swap]) -> str:
    """Measures that were not compared, by their reasons."""
    first = swaps[0].prediction
    why: dict[str, list[str]] = {}
    for name, reason in (first.left_out if first is not None else {}).items():
        why.setdefault(reason, []).append(name)
    told = [f"{listed([clean(name) for name in names], NAMED)} ({clean(reason)})" for reason, names in why.items()]
    return f"Not compared: {'; '.join(told)}." if told else ""


def p_value(number: float | None) -> str:
    """A p-value in two figures."""
    return NO_VALUE if number is None else f"{number:.2g}"
