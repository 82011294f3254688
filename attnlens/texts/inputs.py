"""Makes the tensors that a model takes, of token ids or of noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from inspect import signature
from typing import TYPE_CHECKING, Any

from attnlens.errors import TextError
from attnlens.files import shortened
from attnlens.models.classes import text_config

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedModel

LARGEST_INPUT = 2**24
"""Numbers in one image or sound beyond which none is made: 2364 × 2364 pixels in colour, or 17 minutes at 16 kHz."""
IMAGE_SIZE = 224
"""Height and width of an image where the config names none."""
NO_START = ("The model's config names no start token that its decoder knows.", "Set decoder_start_token_id in it.")
SAMPLES, FRAMES = 16_000, 100
"""Sound samples of a sequence, or frames of a spectrogram: one second at the usual rate."""
CHARACTERS = 128
"""From how many ids is drawn for a model that takes any (CANINE hashes characters)."""
NO_NOISE = "Choose a model of text, images or sound."


def token_tensors(
    rows: Sequence[Sequence[int]], pad: int
) -> tuple[Int[Tensor, "batch tokens"], Int[Tensor, "batch tokens"]]:
    """Ids padded on the right to the longest row, and the mask: 1 for a token, 0 for padding."""
    import torch

    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def text_inputs(
    model: PreTrainedModel, ids: Int[Tensor, "batch tokens"], mask: Int[Tensor, "batch tokens"], *, encoder_reads: bool
) -> dict[str, Tensor]:
    """Keyword arguments of the model for those ids, on its device.

    A decoder beside an encoder that reads the same text gets it shifted to the right by the start token, so that its
    mask is the encoder's; a decoder beside an encoder that reads pixels or sound gets the text as it is, whose special
    tokens begin with the start token.
    """
    inputs: dict[str, Tensor] = {}
    if encoder_reads:
        inputs |= {"input_ids": ids, "attention_mask": mask}
    if decodes_text(model):
        decoder_ids = shifted(model, ids) if encoder_reads else ids
        inputs |= {"decoder_input_ids": decoder_ids, "decoder_attention_mask": mask}
    taken = signature(model.forward).parameters
    return {name: tensor.to(model.device) for name, tensor in inputs.items() if name in taken}


def decodes_text(model: PreTrainedModel) -> bool:
    """Whether a decoder beside an encoder reads token ids; DETR's reads queries of its own."""
    return bool(model.config.is_encoder_decoder) and "decoder_input_ids" in signature(model.forward).parameters


def vocabulary(model: PreTrainedModel) -> int | None:
    """How many token ids the model knows, by its config or else its embedding; None where neither says."""
    said: int | None = getattr(text_config(model.config), "vocab_size", None)
    if said is not None:
        return said
    try:
        known: int | None = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:
        return None
    return known


def wanted(model: PreTrainedModel) -> list[str]:
    """What the model's forward pass can't do without, by its signature; its main input where that names nothing."""
    parameters = signature(model.forward).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    main = model.main_input_name
    return needed or (main if isinstance(main, list) else [main])


def shifted(model: PreTrainedModel, ids: Int[Tensor, "batch tokens"]) -> Int[Tensor, "batch tokens"]:
    """What a decoder reads to learn those ids: the start token, then all but the last; by the model's own rule, if any.

    Raises TextError where neither model, config.json nor generation_config.json names a start token.
    """
    own: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    names = ["decoder_start_token_id"]
    if own is None:
        names += ["bos_token_id", "pad_token_id"]
    else:
        with suppress(
            ValueError, TypeError, AttributeError, IndexError
        ):  # T5 wants it in its config; MusicGen writes no text
            result: Tensor = own(labels=ids)
            return result
    settings = model.config, getattr(model, "generation_config", None)
    starts = (getattr(config, name, None) for name in names for config in settings)
    start = next((found for found in starts if found is not None), None)
    known = vocabulary(model)
    if not isinstance(start, int) or not 0 <= start < (known or start + 1):
        raise TextError(*NO_START)
    return ids.roll(1, dims=1).index_fill(1, ids.new_zeros(1), start)


def noise(model: PreTrainedModel, name: str, count: int, seed: int, skip: int = 0) -> Float[Tensor, "batch ..."]:
    """`count` standard normal inputs of the shape that `name` has in this model, as normalised images or sounds have.

    They are the draws `skip`, `skip` + 1, … of the seed, whatever their count.

    Raises TextError for inputs whose shape attnlens does not know, or whose config asks for an endless one.
    """
    import torch

    shape = _shape(model, name)
    if shape is None:
        raise TextError(f"attnlens can't make up {name} for a {type(model).__name__}.", NO_NOISE)
    if not all(isinstance(size, int) and size > 0 for size in shape) or math.prod(shape) > LARGEST_INPUT:
        asked = " × ".join(shortened(str(size)) for size in shape)
        raise TextError(
            f"The config asks for {name} of {asked} numbers, which attnlens does not make up.",
            "Mend its sizes in config.json.",
        )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(skip):
        torch.randn(shape, generator=generator)
    # One draw at a time: the numbers of a larger one depend on its size.
    return torch.stack([torch.randn(shape, generator=generator) for _ in range(count)])


def beside_noise(model: PreTrainedModel, count: int) -> dict[str, Tensor]:
    """What goes with `count` images of patches (SigLIP 2): that all patches are there, and how they lie."""
    import torch

    if not _reads_patches(model):
        return {}
    patches, _ = _patches_shape(model.config)
    side = math.isqrt(patches)
    inputs = {
        "pixel_attention_mask": torch.ones(count, patches, dtype=torch.long),
        "spatial_shapes": torch.tensor([[side, side]] * count),
    }
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


def _shape(model: PreTrainedModel, name: str) -> tuple[int, ...] | None:
    """The shape of one input called `name`; None where it is not known."""
    config = model.config
    if name == "pixel_values" and _reads_patches(model):
        return _patches_shape(config)
    if name == "pixel_values":
        return _image_shape(getattr(config, "vision_config", getattr(config, "encoder", config)))
    if name == "input_values" and hasattr(config, "frequency_stride"):  # AST reads a spectrogram
        return config.max_length, config.num_mel_bins
    if name == "input_values":
        return (SAMPLES,)
    return _frames_shape(model) if name == "input_features" else None


def _frames_shape(model: PreTrainedModel) -> tuple[int, int] | None:
    """(frames, features of each), or (mel, frames) for an encoder that begins with a convolution over frames."""
    import torch

    parts: list[Any] = [getattr(model.config, name, None) for name in ("encoder_config", "audio_config")]
    for config in [model.config, *filter(None, parts)]:
        if hasattr(config, "input_feat_per_channel"):
            return FRAMES, config.input_feat_per_channel * config.input_channels
        if hasattr(config, "feature_projection_input_dim"):
            return FRAMES, config.feature_projection_input_dim
        mel = getattr(config, "num_mel_bins", None)
        if mel is not None and hasattr(config, "max_source_positions"):
            # Whisper's encoder halves the number of frames and takes no other length
            return mel, 2 * config.max_source_positions
        if mel is not None:
            first = any(isinstance(part, torch.nn.Conv1d) and part.in_channels == mel for part in model.modules())
            return (mel, FRAMES) if first else (FRAMES, mel)
    return None


def _reads_patches(model: PreTrainedModel) -> bool:
    return "spatial_shapes" in signature(model.forward).parameters


def _patches_shape(config: Any) -> tuple[int, int]:
    config = getattr(config, "vision_config", config)
    return config.num_patches, config.num_channels * config.patch_size**2


def _image_shape(config: Any) -> tuple[int, ...]:
    size = getattr(config, "image_size", None) or IMAGE_SIZE
    return getattr(config, "num_channels", 3), *(size if isinstance(size, list | tuple) else (size, size))
