"""Puts pairs of sentences side by side as an encoder and a decoder read them, with ids that begin, end and pad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attnlens.studies.tasks.batching import padded
from attnlens.studies.tasks.task import NOTHING, Examples

if TYPE_CHECKING:
    from torch import Tensor

PADDING, BEGIN, END = 0, 1, 2
"""The first ids of every vocabulary of sentences."""
SPECIALS = ("<pad>", "<s>", "</s>")
"""Their names."""


def paired(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Examples:
    """The encoder reads a source and END; the decoder reads BEGIN and the target, and predicts the target and END."""
    end, begin = torch.tensor([END]), torch.tensor([BEGIN])
    inputs, kept = padded([torch.cat((source, end)) for source in sources], PADDING)
    given, _ = padded([torch.cat((begin, target)) for target in targets], PADDING)
    predicted, _ = padded([torch.cat((target, end)) for target in targets], NOTHING)
    return Examples(inputs, None if bool(kept.all()) else kept, predicted, given)
