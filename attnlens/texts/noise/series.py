"""Series of noise: what was measured until now, and what a robot saw, did and gained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlens.texts.noise.asked import Asked

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 16
"""Steps of an episode, or of a series whose length the config leaves open."""


def past(asked: Asked) -> Tensor:
    """The values until now, with as many before them as the model looks back."""
    channels: int | None = asked.said("num_input_channels")
    if channels is None and (asked.said("input_size") or 1) > 1:
        channels = asked.said("input_size")
    return asked.draw(_length(asked), *(() if channels is None else (channels,)))


def past_times(asked: Asked) -> Tensor:
    """What is known of each of these times: hour, day, month."""
    return _features(asked, _length(asked))


def future(asked: Asked) -> Tensor | None:
    """The values that a decoder continues."""
    width: int = asked.said("input_size") or 1
    return None if not _lagged(asked) else asked.draw(_ahead(asked), *((width,) if width > 1 else ()))


def future_times(asked: Asked) -> Tensor:
    """What is known of the times to come."""
    return _features(asked, _ahead(asked))


def observed(asked: Asked) -> Tensor:
    """A mask: everything was measured."""
    import torch

    return torch.ones_like(past(asked))


def padding(asked: Asked) -> Tensor:
    """A mask: nothing is padding."""
    import torch

    return torch.zeros(1, _length(asked))


def frequency(asked: Asked) -> Tensor:
    """How often is measured: often."""
    import torch

    return torch.zeros(1, 1, dtype=torch.long)


def states(asked: Asked) -> Tensor | None:
    """What was seen at each step."""
    return asked.draw(STEPS, asked.said("state_dim")) if asked.said("state_dim") else None


def state(asked: Asked) -> Tensor | None:
    """What a robot feels now."""
    return asked.draw(asked.said("max_state_dim")) if asked.said("max_state_dim") else None


def actions(asked: Asked) -> Tensor | None:
    """What was done at each step; of a policy that guesses a stretch of them, the noise that it begins with."""
    if asked.said("act_dim"):
        return asked.draw(STEPS, asked.said("act_dim"))
    return asked.draw(asked.said("chunk_size"), asked.said("max_action_dim"))


def gains(asked: Asked) -> Tensor:
    """What is still to be gained, or was gained, at each step."""
    return asked.draw(STEPS, 1)


def steps(asked: Asked) -> Tensor:
    """The steps' numbers."""
    import torch

    return torch.arange(STEPS)[None]


def _features(asked: Asked, length: int) -> Tensor:
    import torch

    count = asked.said("num_time_features") or 0
    return asked.draw(length, count) if count else torch.zeros(1, length, 0)


def _ahead(asked: Asked) -> int:
    return asked.said("prediction_length") or STEPS


def _lagged(asked: Asked) -> list[int]:
    return list(asked.said("lags_sequence") or ())


def _length(asked: Asked) -> int:
    length: int = asked.said("context_length") or asked.said("prediction_length") or STEPS
    return length + max(_lagged(asked), default=0)
