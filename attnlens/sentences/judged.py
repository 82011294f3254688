"""The quantity by which a swap is judged, its unit, and its distance from the original."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnlens.records import Outcome, Swap

UNITS = {
    "causal": "nats per token",
    "masked": "nats per masked token",
    "seq2seq": "nats per token",
    "classification": "nats per prediction",
    "hidden": "nats",
}
"""What loss and KL count in, by task."""
EFFECTS = {"loss": "loss", "kl": "KL to the original", "hidden": "1 − cosine of hidden states"}
"""What a swap is judged by, in the few words of an axis."""


def effect_name(swap: Swap) -> str:
    """`loss in nats per token`."""
    return EFFECTS[swap.judged_by] + ("" if swap.judged_by == "hidden" else f" in {UNITS[swap.task]}")


def distance(swap: Swap, outcome: Outcome) -> float | None:
    """Where there is no loss: KL(original ‖ changed), or 1 − cosine of hidden states; None where it diverged."""
    if swap.judged_by == "kl":
        return outcome.kl
    return None if outcome.hidden_cosine is None else 1 - outcome.hidden_cosine


def distance_ci95(swap: Swap, outcome: Outcome) -> tuple[float, float] | None:
    """The 95 % interval of that distance; None where there is none."""
    if swap.judged_by == "kl":
        return outcome.kl_ci95
    ends = outcome.hidden_cosine_ci95
    return None if ends is None else (1 - ends[1], 1 - ends[0])
