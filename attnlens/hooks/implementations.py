"""Chooses the attention implementation of every part of a model, and restores it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attnlens.errors import ModelError

IN_REACH = "BERT, GPT-2, Llama, Mistral, Qwen, Gemma, Phi, T5, BART, Whisper, ViT, CLIP and most newer families"
"""Whose attention goes through transformers' interface."""
PIECES = ("Output", "Projection", "Structure", "Bias", "MLP", "Norm", "Residual")
"""What the names of modules beside attention end in."""


@contextmanager
def implementation(model: PreTrainedModel, name: str, in_place_of_eager: str | None = None) -> Iterator[None]:
    """Inside the block the model uses the attention implementation `name`; every configuration is restored at its end.

    Those parts whose own implementation is the eager one use `in_place_of_eager`, if it is given; a part that computes
    its attention by hand has no other.
    """
    before = implementations(model)
    try:
        if _parts(model):
            choose(model, name, in_place_of_eager or name)
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own


def choose(model: PreTrainedModel, name: str, in_place_of_eager: str) -> None:
    """Set the implementation of every part that goes through the interface; the model's own class need not."""
    if not (parts := _parts(model)):
        raise out_of_reach(model)
    before = implementations(model)
    for part in parts[:1] if parts[0] is model else parts:
        part.set_attn_implementation(name)
    for config, own in before:
        if own == "eager" and config._attn_implementation_internal == name:
            config._attn_implementation_internal = in_place_of_eager


def _parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Of the model and the models inside it, those whose attention goes through the interface."""
    inside = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part for part in inside if part._can_set_attn_implementation()]


def configs_of(model: PreTrainedModel) -> list[Any]:
    """Every configuration in use, each once."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    nested = [getattr(config, name, None) for config in configs for name in getattr(config, "sub_configs", {})]
    return list({id(config): config for config in [*configs, *nested] if config is not None}.values())


def implementations(model: PreTrainedModel) -> list[tuple[Any, str | None]]:
    """Every configuration that carries the name of an attention implementation, with that name."""
    named = [config for config in configs_of(model) if hasattr(config, "_attn_implementation")]
    return [(config, config._attn_implementation_internal) for config in named]


def out_of_reach(
    model: PreTrainedModel, refused: Mapping[str, str] | None = None, ran: Iterable[nn.Module] | None = None
) -> ModelError:
    """The error for a model none of whose attention is read: it has none, ran none, or computes it in another way.

    `refused` says by module what was found and why it can't be read; `ran` are the modules of a pass.
    """
    name = type(model).__name__
    if refused:
        path, reason = next(iter(refused.items()))
        return ModelError(f"{name} can't be read: at {path}, {reason}.", f"Choose another model: {IN_REACH}.")
    if not any(is_attention(module) for module in model.modules()):
        return ModelError(f"{name} has no softmax attention that attnlens can reach.", f"Choose another: {IN_REACH}.")
    if ran is not None and not any(map(is_attention, ran)):
        return ModelError(
            f"{name} runs none of its attention on this input.", "Give an input in which it finds something to attend."
        )
    return ModelError(
        f"{name} computes its attention by hand, without a softmax of queries times keys that sums up values.",
        f"Choose a model with softmax attention: {IN_REACH}.",
    )


def is_attention(module: nn.Module) -> bool:
    """Whether a module's class calls itself attention, and no piece beside it."""
    name = type(module).__name__
    return "Attention" in name and not name.endswith(PIECES)
