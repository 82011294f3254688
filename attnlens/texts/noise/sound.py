"""Sounds of noise: samples, or frames of a spectrogram."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnlens.texts.noise.asked import Asked

if TYPE_CHECKING:
    from torch import Tensor

SAMPLES, FRAMES = 16_000, 100
"""Sound samples of a sequence, or frames of a spectrogram: one second at the usual rate."""
SOUND = (
    "thinker_config",
    "audio_config",
    "encoder_config",
    "speech_config",
    "audio_encoder",
    "encoder",
    "decoder_config",
    "dac_config",
)
"""Under which names the configuration of what hears lies in a model's own."""


def samples(asked: Asked) -> Tensor:
    """One second of samples; of a spectrogram, all frames that the model takes (AST)."""
    if hasattr(asked.model.config, "frequency_stride"):
        return asked.draw(asked.model.config.max_length, asked.model.config.num_mel_bins)
    return asked.draw(*_channels(asked), SAMPLES)


def spectrogram(asked: Asked) -> Tensor | None:
    """The frames of one sound; None where the config does not say how many numbers each has."""
    found = _frames_shape(asked)
    return None if found is None else asked.draw(*found)


def all_frames(asked: Asked) -> Tensor | None:
    """A mask that hides no frame."""
    import torch

    found = _frames_shape(asked)
    return None if found is None else torch.ones(1, _time(found), dtype=torch.bool)


def no_longer(asked: Asked) -> Tensor:
    """The sound is not longer than what is read of it (CLAP)."""
    import torch

    return torch.zeros(1, 1, dtype=torch.bool)


def _channels(asked: Asked) -> tuple[int, ...]:
    """The axis of a codec's channels; none where sounds have no such axis."""
    found = asked.said("audio_channels", of=SOUND)
    if found is None and asked.said("codebook_size", of=SOUND) is not None:
        return (1,)
    return () if found is None else (found,)


def _time(frames: tuple[int, ...]) -> int:
    return FRAMES if frames[-2] == FRAMES else frames[-1]


def _frames_shape(asked: Asked) -> tuple[int, ...] | None:
    """(frames, features of each), or (mel, frames) for an encoder that begins with a convolution over frames."""
    for config in (asked.model.config, *(asked.config("thinker_config", name) for name in SOUND)):
        if (found := _frames_of(config, asked)) is not None:
            return found
    return None


def _frames_of(config: Any, asked: Asked) -> tuple[int, ...] | None:
    import torch

    if hasattr(config, "spec_size"):  # CLAP cuts its image of the sound from as many frames
        return 4 if config.enable_fusion else 1, config.spec_size**2 // config.num_mel_bins, config.num_mel_bins
    if hasattr(config, "input_feat_per_channel"):
        return FRAMES, config.input_feat_per_channel * getattr(config, "input_channels", 1)
    sizes = ("feature_projection_input_dim", "input_dim", "input_feat_size")
    if (features := next((getattr(config, name) for name in sizes if hasattr(config, name)), None)) is not None:
        return FRAMES, features
    maps = (part for name, part in asked.model.named_modules() if name.endswith("input_linear"))
    if (row := next((part.in_features for part in maps if isinstance(part, torch.nn.Linear)), None)) is not None:
        return FRAMES, row
    mel = getattr(config, "num_mel_bins", getattr(config, "feature_size", None))
    if mel is None:
        return None
    if hasattr(config, "max_source_positions"):
        # Whisper's encoder halves the number of frames and takes no other length
        return mel, 2 * config.max_source_positions
    if hasattr(config, "n_window"):
        return mel, 2 * config.n_window
    mel *= getattr(config, "num_stacked_frames", 1)
    first = any(isinstance(part, torch.nn.Conv1d) and part.in_channels == mel for part in asked.model.modules())
    return (mel, FRAMES) if first else (FRAMES, mel)
