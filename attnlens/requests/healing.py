"""Options of a healing: how long it trains, on what, and how much of each weight."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from attnlens.arguments import LARGEST, shown
from attnlens.choices import HealingGoal, HealingUnit
from attnlens.errors import UsageError
from attnlens.requests.fields import Request, Whole, checks, option

WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(|steps?|tok|ktok|Mtok|s|min|h)")
UNITS: dict[str, tuple[HealingUnit, float]] = {
    "": ("steps", 1),
    "step": ("steps", 1),
    "steps": ("steps", 1),
    "tok": ("tokens", 1),
    "ktok": ("tokens", 1e3),
    "Mtok": ("tokens", 1e6),
    "s": ("seconds", 1),
    "min": ("seconds", 60),
    "h": ("seconds", 3600),
}
"""Counted quantity and size of each unit."""
HOW = "Give steps, at least 0, or tokens, or a time: --heal 200, 500ktok, 2Mtok, 90s, 30min or 2h."
NEEDED = "Add --heal, as in --heal 200, or leave it out."


@dataclass(frozen=True)
class Amount:
    """Length of a healing."""

    number: float
    """Number of units."""
    unit: HealingUnit

    def __str__(self) -> str:
        """Format for messages: `200 steps`, `1 second`."""
        return f"{self.number:,.10g} {self.unit.removesuffix('s') if self.number == 1 else self.unit}"

    @classmethod
    def of(cls, given: Any) -> Amount:
        """Parse 200, "200", "2Mtok" or "30min". Raise UsageError for anything else."""
        if isinstance(given, cls):
            return given
        wrong = UsageError(f"heal={shown(given)} makes no sense.", HOW)
        if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= LARGEST:
            return cls(given, "steps")
        match = WRITTEN.fullmatch(given.strip()) if isinstance(given, str) else None
        if match is None:
            raise wrong
        unit, factor = UNITS[match[2]]
        number = float(match[1]) * factor
        if not math.isfinite(number) or number > LARGEST or (unit != "seconds" and number != int(number)):
            raise wrong
        if number == 0 and unit != "steps":
            raise wrong
        return cls(number, unit)


@dataclass(frozen=True)
class HealOptions:
    """Checked options of one healing."""

    amount: Amount
    """Length of training."""
    batch: Whole | None = None
    """Sequences per optimiser step; None: those of a forward pass."""
    rank: Whole | None = None
    """Rank of each weight's change; None: unrestricted."""
    goal: HealingGoal = "teacher"
    """Training target: the original model's predictions, or the text."""
    control: bool = False
    """True if a copy of the original model is trained equally long."""
    checkpointing: bool = False
    """True if activations are recomputed in the backward pass."""

    @classmethod
    def of(cls, request: HealingRequest) -> HealOptions | None:
        """Return the options; None without healing. Raise UsageError for contradictory or unused options."""
        amount = request.heal
        details = [name for name in NAMES if getattr(request, name) not in (None, False)]
        goal: HealingGoal = request.heal_on or "teacher"
        if not amount.number:
            for name in details:
                raise UsageError(f"--{name.replace('_', '-')} is given and nothing is healed.", NEEDED)
            return None
        if request.heal_control and goal != "text":
            raise UsageError(
                "--heal-control: taught by itself, the original model has nothing to learn.",
                "Add --heal-on text, so that both models learn the text.",
            )
        more = request.heal_batch, request.heal_rank, goal, request.heal_control, request.heal_checkpointing
        return cls(amount, *more)


NAMES = ("heal_batch", "heal_rank", "heal_on", "heal_control", "heal_checkpointing")
"""Options that require --heal."""


class HealingRequest(Request):
    """Options of `swap_kernel` on healing."""

    heal: Annotated[Amount, checks(lambda _name, value: Amount.of(value))] = option(
        "Train W_Q, W_K and the kernel's parameters: for steps (`200`), tokens (`2Mtok`) or a time (`30min`).",
        Amount(0, "steps"),
        metavar="AMOUNT",
        typed=str,
        shown="0",
    )
    heal_on: HealingGoal | None = option(
        "What healing learns: the predictions of the original (`teacher`), or the next tokens of the `text`.",
        metavar="GOAL",
        noun="--heal-on",
        shown="teacher",
    )
    heal_batch: Whole | None = option(
        "Sequences of one training step; default: one batch, or fewer where few tokens are asked for.",
        metavar="N",
        least=1,
        most=65536,
    )
    heal_rank: Whole | None = option(
        "Let healing change each weight by a product of this rank alone.", metavar="R", least=1, most=65536
    )
    heal_control: bool = option(
        "With `--heal-on text`: train the original model's same numbers equally long, and compare.", False
    )
    heal_checkpointing: bool = option(
        "Healing in less memory: compute activations a second time on the way back.", False
    )
