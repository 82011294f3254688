"""Names the towers of a multimodal model: the models inside it that read one modality each."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from attnlens.choices import Part

OF_MODALITY: dict[str, Part] = {"image": "vision", "video": "vision", "audio": "audio", "text": "text"}
"""The tower of a modality, by transformers' own word for it."""


def towers(model: PreTrainedModel) -> dict[nn.Module, Part]:
    """Each attention module's tower, where the model has more than one; nothing where one encoder is all there is.

    A module belongs to the innermost model around it that says what it reads; where that reads several modalities it
    is none's. A decoder is no tower of an encoder–decoder: Whisper has an encoder, and Florence-2 vision and text.
    """
    found: dict[nn.Module, Part] = {}
    decoder = model.get_decoder() if model.config.is_encoder_decoder else None  # type: ignore[no-untyped-call]
    writing = set(decoder.modules()) - {model} if isinstance(decoder, nn.Module) else set()
    for inner in model.modules():  # from the outside in
        if isinstance(inner, PreTrainedModel) and inner is not model:
            part, inside = _reads(inner), set(inner.modules())
            found = {module: tower for module, tower in found.items() if module not in inside}
            found |= {} if part is None else dict.fromkeys(inside, part)
    found = {module: part for module, part in found.items() if module not in writing}
    return found if len(set(found.values())) > 1 else {}


def _reads(model: PreTrainedModel) -> Part | None:
    """The only modality that a model reads; None where it reads several."""
    said = model.input_modalities
    parts = {OF_MODALITY[one] for one in ([said] if isinstance(said, str) else said) if one in OF_MODALITY}
    return parts.pop() if len(parts) == 1 else None
