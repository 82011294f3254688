"""The transformers class that a checkpoint asks for, and what such a model reads."""

from __future__ import annotations

from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from attnlens.choices import KERNEL_TRANSFORMER
from attnlens.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

InputKind = Literal["text", "seq2seq", "pixels", "pixels+text", "audio", "other"]

AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")
"""The heads that predict tokens, for a checkpoint that brings its own code."""


def model_class(config: PreTrainedConfig, *, gguf: bool, own_code: bool) -> Any:
    """The class named by the config's `architectures` (the right head, or none), else a fitting Auto class.

    A GGUF file names no class; it holds a language model, so it gets that head. Whatever else names no class that
    transformers knows is loaded without a head.
    """
    import transformers

    if own_code:
        auto_map: dict[str, str] = getattr(config, "auto_map", {})
        return getattr(transformers, next((name for name in AUTO_CLASSES if name in auto_map), "AutoModel"))
    known = own_models(config.model_type) or transformers
    for name in config.architectures or ():
        named = getattr(known, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
    if gguf and config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    if gguf and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def own_models(model_type: object) -> ModuleType | None:
    """The module with the models that `study` saves, which transformers then knows; None for any other type."""
    if model_type != KERNEL_TRANSFORMER:
        return None
    from attnlens import kernel_transformers

    return kernel_transformers


def refuse_own_code(config: dict[str, Any], where: str) -> None:
    """Raise ModelError where the model brings code that transformers does not know itself; never ask on stdin."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config.get("auto_map") and str(config.get("model_type")) not in CONFIG_MAPPING:
        raise ModelError(
            f"{where} brings its own code, which would run on this machine.",
            "Read the code in the folder; if you trust it, add --trust-remote-code.",
        )


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the part that reads text; of two, the encoder's (MusicGen)."""
    try:
        return config.get_text_config()
    except ValueError:  # transformers calls it ambiguous
        return config.get_text_config(encoder=True)


def kind_of(model: PreTrainedModel) -> InputKind:
    """What the model reads: text, text on both sides (seq2seq), pixels, pixels and text (CLIP), sound, or other."""
    main = model.main_input_name
    if not isinstance(main, str) or main not in signature(model.forward).parameters:
        return "other"
    if main == "pixel_values":
        return "pixels"
    if main in ("input_features", "input_values"):
        return "audio"
    if main != "input_ids":
        return "other"
    if hasattr(model, "get_image_features") and hasattr(model, "get_text_features"):
        return "pixels+text"
    return "seq2seq" if model.config.is_encoder_decoder else "text"
