"""Records of a swap: outcomes, healing, the swap itself."""

from attnlens.records.swaps.healings import Healing, HealingControl, HealingRate, HealingStep, HealingTraining
from attnlens.records.swaps.outcomes import (
    Agreement,
    BeyondWindow,
    Change,
    Control,
    Outcome,
    Pair,
    PositionChange,
    Stage,
    TextChange,
    TextCosine,
)
from attnlens.records.swaps.swap import PARTS, Effect, SiteSwap, Swap, Task

__all__ = [
    "PARTS",
    "Agreement",
    "BeyondWindow",
    "Change",
    "Control",
    "Effect",
    "Healing",
    "HealingControl",
    "HealingRate",
    "HealingStep",
    "HealingTraining",
    "Outcome",
    "Pair",
    "PositionChange",
    "SiteSwap",
    "Stage",
    "Swap",
    "Task",
    "TextChange",
    "TextCosine",
]
