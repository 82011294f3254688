"""What the healing of a swap can be asked for: each option once, with its help, its bounds and its default."""

from __future__ import annotations

from typing import Annotated, TypedDict

from attnlens.choices import HealingGoal
from attnlens.requests.fields import Option
from attnlens.requests.healing import Amount


class HealingRequest(TypedDict, total=False):
    """What `swap_kernel` can be asked for about healing."""

    heal: Annotated[
        int | str,
        Option(
            "Train W_Q, W_K and the kernel's parameters: for steps (`200`), tokens (`2Mtok`) or a time (`30min`).",
            0,
            metavar="AMOUNT",
            typed=str,
            shown="0",
            check=lambda _name, given: Amount.of(given),
        ),
    ]
    heal_on: Annotated[
        HealingGoal | None,
        Option(
            "What healing learns: the predictions of the original (`teacher`), or the next tokens of the `text`.",
            metavar="GOAL",
            noun="--heal-on",
            shown="teacher",
        ),
    ]
    heal_batch: Annotated[
        int | None,
        Option(
            "Sequences of one training step; default: one batch, or fewer where few tokens are asked for.",
            metavar="N",
            least=1,
            most=65536,
        ),
    ]
    heal_rank: Annotated[
        int | None,
        Option("Let healing change each weight by a product of this rank alone.", metavar="R", least=1, most=65536),
    ]
    heal_control: Annotated[
        bool, Option("With `--heal-on text`: train the original model's same numbers equally long, and compare.", False)
    ]
    heal_checkpointing: Annotated[
        bool, Option("Healing in less memory: compute activations a second time on the way back.", False)
    ]
