"""How far is a changed model from the original where there is no loss, and what does an axis of it say?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlens.tables.swaps.facts import EFFECTS, UNITS

if TYPE_CHECKING:
    from attnlens.records import Outcome, Swap


def distance_of(swap: Swap, outcome: Outcome) -> float | None:
    """KL(original ‖ changed) on noise, 1 − cosine of a headless model's hidden states; None where it diverged."""
    if swap.judged_by == "kl":
        return outcome.kl
    return None if outcome.hidden_cosine is None else 1 - outcome.hidden_cosine


def axis_of(swap: Swap) -> str:
    """`loss, nats per token`."""
    unit = "" if swap.judged_by == "hidden" else f", {UNITS[swap.task]}"
    return f"{EFFECTS[swap.judged_by]}{unit}"
