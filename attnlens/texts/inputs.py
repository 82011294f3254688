"""Makes the tensors that a model takes of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from inspect import signature
from typing import TYPE_CHECKING, Any

from attnlens.errors import TextError
from attnlens.models.configs import text_config
from attnlens.models.placement import device_of_inputs

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor
    from transformers import PreTrainedModel

NO_START = ("The model's config names no start token that its decoder knows.", "Set decoder_start_token_id in it.")
CHARACTERS = 128
"""From how many ids is drawn for a model that takes any (CANINE hashes characters)."""


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
    model: PreTrainedModel, ids: Int[Tensor, "batch tokens"], mask: Int[Tensor, "batch tokens"], start: int = 0
) -> dict[str, Tensor]:
    """Keyword arguments of the model for those ids, on its device; a decoder gets those from `start` on.

    A decoder beside an encoder that reads the same text gets it shifted to the right by the start token, so that its
    mask is the encoder's; a decoder beside an encoder that reads pixels or sound gets the text as it is, whose special
    tokens begin with the start token.
    """
    inputs: dict[str, Tensor] = {}
    if reads_ids(model):
        inputs |= {"input_ids": ids, "inputs": ids, "attention_mask": mask}
    if decodes_text(model):
        said, seen = ids[:, start:], mask[:, start:]
        decoder_ids = shifted(model, said) if reads_ids(model) else said
        inputs |= {"decoder_input_ids": decoder_ids, "decoder_attention_mask": seen}
    taken = set(signature(model.forward).parameters)
    taken -= {"inputs"} if "input_ids" in taken else set()
    return {name: tensor.to(device_of_inputs(model)) for name, tensor in inputs.items() if name in taken}


def reads_ids(model: PreTrainedModel) -> bool:
    """Whether token ids are what the model reads, or a part of it; Perceiver calls them just inputs."""
    taken = signature(model.forward).parameters
    named = model.main_input_name == "inputs" and not model.config.is_encoder_decoder
    return "input_ids" in taken or (named and "inputs" in taken and vocabulary(model) is not None)


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


def not_made(model: PreTrainedModel, names: Sequence[str]) -> tuple[str, str]:
    """What is wrong where these inputs can't be made up, and what to do."""
    return (
        f"attnlens can't make up {' and '.join(names)} for a {type(model).__name__}.",
        "Put the checkpoint's preprocessor_config.json beside its weights, or give the inputs to attnlens.capture.",
    )


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
