"""Which tensors does a model take, and how are they made of token ids or of noise?"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from attnlens.errors import TextError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedModel

IMAGE_SIZE = 224
"""Height and width of an image where the config names none."""
NO_START = ("The model's config names no start token for its decoder.", "Set decoder_start_token_id in it.")
SAMPLES = 16_000
"""Sound samples of a sequence: one second at the usual rate."""


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
    if model.config.is_encoder_decoder:
        decoder_ids = shifted(model, ids) if encoder_reads else ids
        inputs |= {"decoder_input_ids": decoder_ids, "decoder_attention_mask": mask}
    taken = signature(model.forward).parameters
    return {name: tensor.to(model.device) for name, tensor in inputs.items() if name in taken}


def shifted(model: PreTrainedModel, ids: Int[Tensor, "batch tokens"]) -> Int[Tensor, "batch tokens"]:
    """What a decoder reads to learn those ids: the start token, then all but the last; by the model's own rule, if any.

    Raises TextError where neither model nor config names a start token.
    """
    own: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        try:
            result: Tensor = own(labels=ids)
        except ValueError:  # T5 wants decoder_start_token_id itself
            raise TextError(*NO_START) from None
        return result
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    start = next((found for name in names if (found := getattr(model.config, name, None)) is not None), None)
    if start is None:
        raise TextError(*NO_START)
    return ids.roll(1, dims=1).index_fill(1, ids.new_zeros(1), start)


def noise(model: PreTrainedModel, name: str, count: int, seed: int, skip: int = 0) -> Float[Tensor, "batch ..."]:
    """`count` standard normal inputs of the shape that `name` has in this model, as normalised images or sounds have.

    They are the draws `skip`, `skip` + 1, … of the seed, whatever their count.

    Raises TextError for inputs whose shape attnlens does not know.
    """
    import torch

    config = model.config
    shape: tuple[int, ...]
    if name == "pixel_values":
        shape = _image_shape(getattr(config, "vision_config", getattr(config, "encoder", config)))
    elif name == "input_values":
        shape = (SAMPLES,)
    elif hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        # Whisper's encoder halves the number of frames and takes no other length
        shape = (config.num_mel_bins, 2 * config.max_source_positions)
    else:
        raise TextError(f"attnlens can't make up {name} for a {type(model).__name__}.", "Use --source weights.")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(skip):
        torch.randn(shape, generator=generator)
    # One draw at a time: the numbers of a larger one depend on its size.
    return torch.stack([torch.randn(shape, generator=generator) for _ in range(count)])


def _image_shape(config: Any) -> tuple[int, int, int]:
    size = getattr(config, "image_size", None) or IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return getattr(config, "num_channels", 3), height, width
