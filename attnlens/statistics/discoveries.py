"""Which of many hypotheses to reject."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


def false_discovery(p_values: Float[Tensor, " n"], rate: float = 0.05) -> Bool[Tensor, " n"]:
    """Which hypotheses to reject so that at most `rate` of the rejected are true (Benjamini & Hochberg 1995).

    The k smallest p-values, k the largest with p_(k) ≤ rate · k/n; NaN is never rejected and doesn't count in n.
    """
    tests = int((~p_values.isnan()).sum())
    # Not strict: the procedure rejects at equality. NaN is sorted last and compares as false.
    ranked, order = p_values.double().sort()
    passed = ranked <= rate * torch.arange(1, len(ranked) + 1, device=ranked.device) / max(tests, 1)
    last = int(passed.nonzero().max()) + 1 if passed.any() else 0
    rejected = torch.zeros_like(passed)
    rejected[order[:last]] = True
    return rejected
