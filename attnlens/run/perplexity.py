"""Whether a model guesses a text worse than evenly over its vocabulary, so that the text is foreign to it.

A byte-level tokenizer knows every text; what its model does not know shows in the loss alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnlens.models import Loaded
from attnlens.run.outputs import sequence_losses
from attnlens.texts import Batches
from attnlens.texts.targets import NOTHING, feed, logits_of, of_text, task_of

if TYPE_CHECKING:
    from jaxtyping import Float


LOSS = "loss"
"""What is skipped if a model's predictions rest on weights that its checkpoint lacks."""


def predicts_text(loaded: Loaded) -> bool:
    """Return whether the model predicts the next token of a text, so that it has a loss on it."""
    return loaded.kind == "text" and task_of(loaded.model) == "causal"


@dataclass
class Guesses:
    """The loss of a causal language model on each sequence that it reads; of any other model nothing."""

    targets: list[Tensor]
    """The next tokens of each batch; empty for any other model."""
    means: list[Tensor] = field(default_factory=list)
    """Mean loss of each sequence read so far."""
    counts: list[Tensor] = field(default_factory=list)
    """How many tokens of it are predicted."""
    vocabulary: int = 0
    """Among how many tokens it guesses."""

    @classmethod
    def of(cls, loaded: Loaded, batches: Batches) -> Guesses:
        """None made so far."""
        fed = feed(loaded, batches, "causal", 0) if predicts_text(loaded) else []
        return cls([one.targets for one in fed if one.targets is not None])

    def add(self, number: int, result: Any) -> None:
        """Take in the outputs of batch `number`, sequence by sequence: a second copy of all logits would be large."""
        if not self.targets:
            return
        every = self.targets[number]
        for logits, targets in zip(of_text(logits_of(result), every, sees=True), every, strict=True):
            mean, count = sequence_losses(logits[targets != NOTHING].float(), targets[None])
            self.vocabulary = logits.shape[-1]
            self.means.append(mean)
            self.counts.append(count)


def guess_notes(
    means: Float[Tensor, " sequences"], counts: Float[Tensor, " sequences"], names: Sequence[str], vocabulary: float
) -> list[str]:
    """Say of each text, named by sequence, if its mean loss over tokens is above ln(vocabulary), an even guess."""
    even, told = math.log(vocabulary), []
    for name in dict.fromkeys(names):
        own = [place for place, of in enumerate(names) if of == name]
        loss = float((means[own] * counts[own]).sum() / counts[own].sum())
        if loss > even:
            told.append(
                f"The model's loss on {name} is {loss:.2f} nats per token, worse than an even guess (ln {vocabulary} = "
                f"{even:.2f}): the text is foreign to the model, or the model is not trained."
            )
    return told
