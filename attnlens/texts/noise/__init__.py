"""Inputs of noise where the configuration says their shape: a maker for each name of an input, one file a modality."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING

from attnlens.texts.noise import beside, images, series, sound
from attnlens.texts.noise.asked import LARGEST_INPUT, Asked, said, values_of
from attnlens.texts.noise.images import is_packed

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["LARGEST_INPUT", "OF", "SAID", "is_packed", "made", "makable", "said", "values_of"]


Maker = Callable[[Asked], "Tensor | None"]
"""The input of one sequence, its first axis 1 (or the number of its patches); None where its shape can't be told."""
MAKERS: dict[str, dict[str, Maker]] = {
    "image": {
        "pixel_values": images.pixels,
        "pixel_values_videos": images.video,
        "hidden_states": images.patches,
        **dict.fromkeys(("grid_thw", "image_grid_thw"), images.grid),
        **dict.fromkeys(("spatial_shapes", "target_sizes"), images.shape),
        **dict.fromkeys(("merge_sizes", "image_merge_sizes"), images.merge),
        **dict.fromkeys(("pixel_position_ids", "image_position_ids"), images.places),
        "pixel_attention_mask": images.all_patches,
        "high_res_pixel_values": images.finer,
        "image_sizes": images.size,
        **dict.fromkeys(("prompt_pixel_values", "prompt_masks"), images.prompt),
        "aspect_ratio_ids": images.aspect,
        "aspect_ratio_mask": images.first_tile,
        "cross_attention_mask": images.seen_tiles,
        "image_attention_mask": images.seen_images,
        "visual_feats": beside.regions,
        "visual_embeds": beside.regions,
        "visual_pos": beside.region_boxes,
        "query_embeds": beside.queries,
        "encoder_hidden_states": beside.seen_by_queries,
    },
    "audio": {
        "input_values": sound.samples,
        **dict.fromkeys(("input_features", "audio_mel"), sound.spectrogram),
        **dict.fromkeys(
            ("input_features_mask", "feature_attention_mask", "audio_mel_mask", "padding_mask"), sound.all_frames
        ),
        "is_longer": sound.no_longer,
    },
    "series": {
        "past_values": series.past,
        "past_time_features": series.past_times,
        "past_observed_mask": series.observed,
        "past_values_padding": series.padding,
        "future_values": series.future,
        "future_time_features": series.future_times,
        "freq": series.frequency,
        "states": series.states,
        "actions": series.actions,
        "rewards": series.gains,
        "returns_to_go": series.gains,
        "timesteps": series.steps,
        "state": series.state,
    },
    "page": {"bbox": beside.boxes},
    "question": dict.fromkeys(("qformer_input_ids", "task_inputs"), beside.question),
}
"""By modality, and by what transformers' forward passes call the input."""
NEEDS = {
    "hidden_states": "grid_thw",
    "encoder_hidden_states": "query_embeds",
    "cross_attention_mask": "aspect_ratio_ids",
    "image_attention_mask": "perceiver_embeddings",
    "padding_mask": "input_features",
}
"""Names that mean something else where the other is not named too."""
OF = {name: modality for modality, makers in MAKERS.items() for name in makers}
"""The modality of an input."""
SAID = {"image": "random pixels", "audio": "random sound", "series": "random series"}
"""What a report calls the noise of a modality; nothing is random in the others."""


def makable(model: PreTrainedModel) -> tuple[str, ...]:
    """The inputs that the model's forward pass names and that can be made."""
    named = signature(model.forward).parameters
    return tuple(name for name in named if name in OF and NEEDS.get(name, name) in named)


def made(model: PreTrainedModel, names: tuple[str, ...], draws: torch.Generator, width: int) -> dict[str, Tensor]:
    """These inputs of one sequence of `width` ids; without those whose shape the configuration does not say."""
    found = {name: MAKERS[OF[name]][name](Asked(model, draws, name, width)) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None}
