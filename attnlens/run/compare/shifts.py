"""Distributions of measures over the heads of two models whose heads don't correspond."""

from __future__ import annotations

import numpy as np

from attnlens.records import Comparison, Report, Shift, Spread

OTHER_HEADS = "The models have other sites or heads, so that none corresponds to one: distributions alone."


def apart(first: Report, second: Report, fdr: float, why: str) -> Comparison:
    """A comparison of distributions, and why it is no more."""
    return Comparison(base=first.model, paired=False, fdr=fdr, shifts=shifts(first, second), notes=[why])


def shifts(first: Report, second: Report) -> list[Shift]:
    """The quartiles of every measure that both have."""
    found = []
    for name in first.measure_names():
        spreads = [_spread(report, name) for report in (first, second)]
        if spreads[0] is not None and spreads[1] is not None:
            found.append(Shift(measure=name, before=spreads[0], after=spreads[1]))
    return found


def _spread(report: Report, name: str) -> Spread | None:
    """The quartiles over the heads that have a value; None for categories, and where no head has one."""
    each = [head.measures[name] for head in report.heads if name in head.measures]
    values = [measure.value for measure in each if measure.value is not None and measure.label is None]
    if not values:
        return None
    low, middle, high = (float(part) for part in np.quantile(values, (0.25, 0.5, 0.75)))
    return Spread(heads=len(values), quartiles=(low, middle, high), median_se=report.summary.median_errors.get(name))
