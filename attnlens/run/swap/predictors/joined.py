"""Sets the harm of each swapped head against inspect's measures of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attnlens.records import Prediction, Predictor
from attnlens.run.swap.predictors.readings import SweptMeasures
from attnlens.run.swap.sweep import Alone
from attnlens.statistics import Interval, rank_correlation
from attnlens.statistics.associations import PERMUTATIONS, over_windows, permutation_tests, split_half

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LEVEL = 0.05
"""p below which a measure is named."""
FEWEST_HEADS = 8
"""Heads from which measures are set against their harm."""
ONE_LAYER, ONE_WINDOW = "all heads are of one layer", "one window, or one text, has no spread"
TOO_FEW = "fewer than four heads have both, or the harm is the same in all of them"
PARTIAL = "some heads have no value in each window"


def predicted_by(alone: Alone, measures: SweptMeasures, seed: int) -> tuple[list[Predictor], Prediction]:
    """Each measure's rank correlation with the harm of these heads, the surest first; and what was looked at.

    Heads that diverged have no harm, and are left out.
    """
    harm = alone.harms
    names, left_out = list(measures.values), dict(measures.reasons)
    table = torch.stack(list(measures.values.values())) if names else torch.zeros(0, len(harm), dtype=torch.float64)
    tests = permutation_tests(table, harm, seed=seed)
    found = []
    for name, p_value, corrected in zip(names, tests.p_value.tolist(), tests.corrected.tolist(), strict=True):
        if math.isnan(p_value):
            left_out[name] = TOO_FEW
        else:
            found.append(_predictor(name, alone, measures, harm, (p_value, corrected), seed))
    found.sort(key=lambda one: (one.p_corrected, -abs(one.rho)))
    return found, _prediction(alone, harm, len(found), left_out, seed)


def _predictor(
    name: str,
    alone: Alone,
    measures: SweptMeasures,
    harm: Float[Tensor, " units"],
    p_values: tuple[float, float],
    seed: int,
) -> Predictor:
    """One measure."""
    value = measures.values[name]
    own = [(site.path, head) for site, head in alone.units]  # ALBERT's layers share heads
    over_heads = rank_correlation(value, harm, own, seed=seed)
    over_layers = rank_correlation(value, harm, [site.layer for site, _ in alone.units], seed=seed)
    ends, why = _over_windows(name, alone, measures, over_heads.value, seed)
    there = ~(value + harm).isnan()
    layers = _ends(over_layers)
    reasons = {"sequences_ci95": why} if ends is None else {}
    return Predictor(
        measure=name,
        rho=over_heads.value,
        heads=int(there.sum()),
        left_out=int((~there).sum()),
        heads_ci95=_ends(over_heads),
        layers_ci95=layers,
        sequences_ci95=ends,
        p_value=p_values[0],
        p_corrected=p_values[1],
        holds=p_values[1] < LEVEL and layers is not None and layers[0] * layers[1] > 0,
        reasons=reasons | ({"layers_ci95": ONE_LAYER} if layers is None else {}),
    )


def _over_windows(
    name: str, alone: Alone, measures: SweptMeasures, value: float, seed: int
) -> tuple[tuple[float, float] | None, str]:
    """The interval over windows, or why there is none."""
    there = ~(measures.values[name] + alone.harms).isnan()
    rises = (alone.changed - alone.own)[there].mT
    measure = measures.values[name][there]
    if name in measures.windows:
        measure = measures.windows[name][alone.kept][:, there]
    ends = _ends(over_windows(measure, rises, alone.sizes, alone.design, value, seed=seed))
    return ends, ONE_WINDOW if alone.design.freedom < 1 else PARTIAL


def _prediction(
    alone: Alone, harm: Float[Tensor, " units"], measures: int, left_out: dict[str, str], seed: int
) -> Prediction:
    """What was looked at, and how much of the harm is noise of the windows."""
    finite = ~harm.isnan()
    stable = split_half((alone.changed - alone.own)[finite].mT, alone.sizes, alone.design, seed)
    known = stable == stable
    why = "fewer than two windows, or four heads with a harm, or it is the same in all"
    return Prediction(
        heads=len(harm),
        diverged=int((~finite).sum()),
        measures=measures,
        permutations=PERMUTATIONS,
        reliability=stable if known else None,
        ceiling=math.sqrt(stable) if known else None,
        left_out=left_out,
        reasons={} if known else dict.fromkeys(("reliability", "ceiling"), why),
    )


def listed(values: Float[Tensor, " units"]) -> list[float | None]:
    """Numbers, None for those that are none."""
    return [None if one != one else one for one in values.tolist()]


def _ends(found: Interval) -> tuple[float, float] | None:
    return None if math.isnan(found.low) else (found.low, found.high)
