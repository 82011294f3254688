"""What stands beside a text: places on a page, what was found in an image, a question to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlens.texts.noise.asked import Asked

if TYPE_CHECKING:
    from torch import Tensor

REGIONS = 8
"""Regions of an image that were found by another model."""
QUESTION = 8
"""Ids of a question beside a text."""
COLUMNS, PAGE = 10, 1000
"""Words in a line of a page, and its height and width."""


def boxes(asked: Asked) -> Tensor:
    """Left, top, right and bottom of each word, in lines of ten on a page of 1000 × 1000."""
    import torch

    places = torch.arange(asked.width)
    left, top = places % COLUMNS * (PAGE // COLUMNS), places // COLUMNS * (PAGE // COLUMNS // 4) % (PAGE - 20)
    return torch.stack([left, top, left + 80, top + 20], dim=-1)[None]


def regions(asked: Asked) -> Tensor:
    """What another model found in an image: a vector of each region."""
    return asked.draw(REGIONS, asked.said("visual_feat_dim", "visual_embedding_dim"))


def region_boxes(asked: Asked) -> Tensor:
    """Where it lies, as shares of the image."""
    return asked.draw(REGIONS, asked.said("visual_pos_dim")).sigmoid()


def question(asked: Asked) -> Tensor:
    """The first ids of the vocabulary, but for those of special tokens."""
    import torch

    length = asked.said("task_seq_len") or QUESTION
    return torch.arange(10, 10 + length)[None]


def queries(asked: Asked) -> Tensor:
    """What a Q-Former asks an image."""
    return asked.draw(QUESTION, asked.said("hidden_size"))


def seen_by_queries(asked: Asked) -> Tensor:
    """The image that it asks."""
    return asked.draw(QUESTION, asked.said("encoder_hidden_size"))
