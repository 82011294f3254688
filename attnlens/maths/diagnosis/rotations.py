"""Describe how the frequencies of two RoPEs differ: a different base, linear scaling or piecewise scaling."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

SAME = 1e-5  # largest relative difference of equal frequencies, which models compute in float32


def name_rotation(first: Float[Tensor, " pairs"], second: Float[Tensor, " pairs"]) -> str | None:
    """Return a clause that describes how RoPE's frequencies differ, or None if they are equal up to rounding.

    With θ_p = base^(−p/pairs), a different base gives ratios θ'_p/θ_p that are exponential in p, linear scaling gives a
    constant ratio, and both together give an exponential times a constant. All other ratios, such as those of llama3 or
    yarn scaling, are reported as a range.
    """
    if first.shape != second.shape:
        return f"RoPE rotates {2 * len(second)} coordinates of a head instead of {2 * len(first)}"
    before, after = (part.double().abs().sort(descending=True).values for part in (first, second))
    used = (before > 0) & (after > 0)
    before, after = before[used], after[used]
    if len(before) == 0 or bool(((after - before).abs() <= SAME * before).all()):
        return None
    ratios = (after / before).log()
    if float((ratios - ratios.mean()).abs().max()) <= SAME:
        return f"RoPE's positions are multiplied by {_format_number(math.exp(float(ratios.mean())))} (linear scaling)"
    # θ = base^(−x): the first pair has x = 0, so its ratio is the linear scaling
    scaling = float(ratios[0]) if abs(float(ratios[0])) > SAME else 0.0
    logs, scaled_logs = before.log(), after.log() - scaling
    if len(logs) > (2 if scaling else 1) and float(logs[-1]) != 0:
        # with another base, log θ' is a multiple of log θ
        power = float((logs * scaled_logs).sum() / logs.square().sum())
        if float((scaled_logs - power * logs).abs().max()) <= SAME * len(logs):
            bases = [_find_base(part) for part in (before, after)]
            text = f"RoPE's base is {_format_number(bases[1])} instead of {_format_number(bases[0])}"
            factor = _format_number(math.exp(scaling))
            return f"{text}, and positions are multiplied by {factor} (linear scaling)" if scaling else text
    low, high = (_format_number(math.exp(float(each))) for each in (ratios.min(), ratios.max()))
    return f"RoPE's frequencies are multiplied by {low} to {high}, depending on the pair (as in llama3 or yarn scaling)"


def _find_base(frequencies: Tensor) -> float:
    """Return the base b of θ_p = b^(−p/pairs), from the ratio of the first and the last frequency."""
    pairs = len(frequencies)
    return math.exp(float((frequencies[0] / frequencies[-1]).log()) * pairs / (pairs - 1))


def _format_number(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"
