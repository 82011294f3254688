"""The small transformers as models of transformers, saved and loaded like any other."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput, Seq2SeqLMOutput, SequenceClassifierOutput

from attnlens.choices import KERNEL_TRANSFORMER
from attnlens.errors import ModelError
from attnlens.kernel_transformers.attention import AttentionForm, KernelAttention, Place

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    States = Float[Tensor, "batch tokens d_model"]
    Unpadded = Bool[Tensor, "batch tokens"] | None


class Layer(nn.Module):
    """x + A(LN(x)), then what it reads of a memory, then x + F(LN(x)); F of 4 d_model GELUs."""

    def __init__(self, config: Any, form: AttentionForm, place: Place, number: int, *, crosses: bool) -> None:
        super().__init__()
        d_model, last = config.hidden_size, config.num_hidden_layers - 1
        primal = form.primal == "all" or (form.primal == "last" and number == last)
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = KernelAttention(config, form, place, primal=primal)
        self.cross_norm = nn.LayerNorm(d_model) if crosses else None
        self.cross_attention = KernelAttention(config, form, "cross") if crosses else None
        self.forward_norm = nn.LayerNorm(d_model)
        self.forward_in = nn.Linear(d_model, config.intermediate_size)
        self.forward_out = nn.Linear(config.intermediate_size, d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: States, kept: Unpadded = None, memory: States | None = None, memory_kept: Unpadded = None
    ) -> States:
        """The layer's output; `kept` and `memory_kept` say what is no padding."""
        x = x + self.dropout(self.attention(self.attention_norm(x), kept=kept))
        if self.cross_attention is not None and self.cross_norm is not None:
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), memory, memory_kept))
        inner = functional.gelu(self.forward_in(self.forward_norm(x)))
        return x + cast("Tensor", self.dropout(self.forward_out(inner)))


class Stack(nn.Module):
    """Layers of one place, with a layer norm at their end."""

    def __init__(self, config: Any, form: AttentionForm, place: Place, *, crosses: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(config, form, place, number, crosses=crosses) for number in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(
        self, x: States, kept: Unpadded = None, memory: States | None = None, memory_kept: Unpadded = None
    ) -> States:
        """The last layer's output, normed."""
        for layer in self.layers:
            x = layer(x, kept, memory, memory_kept)
        return cast("Tensor", self.norm(x))


class Embeddings(nn.Module):
    """Token embeddings √d_model E, and the logits h Eᵀ of what comes next."""

    def __init__(self, size: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, d_model)
        nn.init.normal_(self.table.weight, std=d_model**-0.5)

    def forward(self, ids: Tensor) -> States:
        """(batch, tokens) → features."""
        features: Tensor = self.table(ids) * self.table.embedding_dim**0.5
        return features

    def logits(self, features: States) -> Float[Tensor, "batch tokens vocabulary"]:
        """Of every word."""
        logits: Tensor = features @ self.table.weight.mT
        return logits


class LanguageModel(nn.Module):
    """Predicts each next token by a causal stack."""

    def __init__(self, config: Any, form: AttentionForm) -> None:
        super().__init__()
        self.words = Embeddings(config.vocab_size, config.hidden_size)
        self.decoder = Stack(config, form, "decoder")

    def forward(self, inputs: Tensor, kept: Unpadded = None, given: Tensor | None = None) -> Tensor:
        """(batch, tokens) ids → (batch, tokens, vocabulary) logits."""
        del given
        found: Tensor = self.decoder(self.words(inputs), kept)
        return self.words.logits(found)


class EncoderDecoder(nn.Module):
    """Predicts each next token of a target from the source: encoder self-, decoder self- and cross-attention."""

    def __init__(self, config: Any, form: AttentionForm) -> None:
        super().__init__()
        self.words = Embeddings(config.vocab_size, config.hidden_size)
        self.encoder = Stack(config, form, "encoder")
        self.decoder = Stack(config, form, "decoder", crosses=True)

    def encode(self, inputs: Tensor, kept: Unpadded = None) -> States:
        """(batch, tokens) ids of sources → their features."""
        return cast("Tensor", self.encoder(self.words(inputs), kept))

    def decode(self, given: Tensor, memory: States, kept: Unpadded = None) -> Tensor:
        """(batch, target tokens) ids → (batch, target tokens, vocabulary) logits of the next; `kept` of the memory."""
        return self.words.logits(self.decoder(self.words(given), None, memory, kept))

    def forward(self, inputs: Tensor, kept: Unpadded = None, given: Tensor | None = None) -> Tensor:
        """Sources and targets so far → logits; padding of targets comes after what is predicted: none sees it."""
        assert given is not None  # noqa: S101  # a translation has a target
        return self.decode(given, self.encode(inputs, kept), kept)


class Classifier(nn.Module):
    """Predicts a class from the mean of an encoder's features; reads words, or the channels of a series."""

    def __init__(self, config: Any, form: AttentionForm) -> None:
        super().__init__()
        d_model = config.hidden_size
        self.words = Embeddings(config.vocab_size, d_model) if config.vocab_size else None
        self.channels = None if config.vocab_size else nn.Linear(config.channels, d_model)
        self.encoder = Stack(config, form, "encoder")
        self.classes = nn.Linear(d_model, config.classes)

    def forward(self, inputs: Tensor, kept: Unpadded = None, given: Tensor | None = None) -> Tensor:
        """(batch, tokens) ids or (batch, steps, channels) → (batch, classes) logits."""
        del given
        read = self.words or self.channels
        assert read is not None  # noqa: S101  # one of the two
        found = self.encoder(read(inputs), kept)
        if kept is None:
            return cast("Tensor", self.classes(found.mean(1)))
        share = kept[..., None].to(found.dtype)
        return cast("Tensor", self.classes((found * share).sum(1) / share.sum(1).clamp_min(1)))


REMEDY = "Restore the config.json that attnlens study wrote."


class KernelTransformerConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Sizes of a small transformer, and the form of its attention as a dictionary of `AttentionForm`'s fields."""

    model_type = KERNEL_TRANSFORMER

    def __init__(
        self,
        vocab_size: int = 0,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        intermediate_size: int = 256,
        max_position_embeddings: int = 64,
        dropout: float = 0.0,
        channels: int = 0,
        classes: int = 2,
        form: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.intermediate_size = num_attention_heads, intermediate_size
        self.max_position_embeddings, self.dropout = max_position_embeddings, dropout
        self.channels, self.classes = channels, classes
        self.form = asdict(AttentionForm()) if form is None else form
        super().__init__(**{"tie_word_embeddings": False, "use_cache": False} | more)

    @property
    def attention_form(self) -> AttentionForm:
        """Which attention the model has; raises ModelError for fields that make none."""
        try:
            return TypeAdapter(AttentionForm).validate_json(json.dumps(self.form), strict=True, extra="forbid")
        except (ValidationError, TypeError) as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
            where = ".".join(map(str, ("form", *first["loc"])))
            raise ModelError(f"The model's config.json has no attention in {where}: {first['msg']}.", REMEDY) from None


class KernelTransformer(PreTrainedModel):  # type: ignore[no-untyped-call]
    """What the three small transformers have in common as models of transformers."""

    config_class = KernelTransformerConfig
    stacks: ClassVar[type[nn.Module]]
    """The module that computes."""

    def __init__(self, config: KernelTransformerConfig) -> None:
        super().__init__(config)
        self.core = self.stacks(config, config.attention_form)
        self.post_init()  # type: ignore[no-untyped-call]

    def attentions(self) -> list[KernelAttention]:
        """Its attention modules, in the order in which they run."""
        return [module for module in self.modules() if isinstance(module, KernelAttention)]

    def _init_weights(self, module: nn.Module) -> None:
        """Weights are drawn where modules are made."""


class KernelTransformerForCausalLM(KernelTransformer):  # type: ignore[no-untyped-call]
    """Predicts the next token."""

    stacks = LanguageModel

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **_more: Any
    ) -> CausalLMOutput:
        """(batch, tokens) ids → logits; with `labels`, which are shifted here, the loss."""
        logits = self.core(input_ids, _kept(attention_mask))
        loss = None if labels is None else _loss(logits[:, :-1], labels[:, 1:])
        return CausalLMOutput(loss=loss, logits=logits)


class KernelTransformerForSeq2SeqLM(KernelTransformer):  # type: ignore[no-untyped-call]
    """Writes a sentence for a sentence."""

    stacks = EncoderDecoder

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **_more: Any,
    ) -> Seq2SeqLMOutput:
        """Ids of sources and of targets so far → logits of what comes next; with `labels`, the loss."""
        logits = self.core(input_ids, _kept(attention_mask), decoder_input_ids)
        return Seq2SeqLMOutput(loss=None if labels is None else _loss(logits, labels), logits=logits)


class KernelTransformerForSequenceClassification(KernelTransformer):  # type: ignore[no-untyped-call]
    """Names a class."""

    stacks = Classifier

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **_more: Any
    ) -> SequenceClassifierOutput:
        """Ids, or a series (batch, steps, channels), → logits of the classes."""
        logits = self.core(input_ids, _kept(attention_mask))
        return SequenceClassifierOutput(loss=None if labels is None else _loss(logits, labels), logits=logits)


MODELS: dict[str, type[KernelTransformer]] = {
    "language": KernelTransformerForCausalLM,
    "translation": KernelTransformerForSeq2SeqLM,
    "classification": KernelTransformerForSequenceClassification,
}
"""The model of each form of task."""


def made(form_of_task: str, config: KernelTransformerConfig, seed: int) -> KernelTransformer:
    """A new model, its weights drawn by `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config.is_encoder_decoder = form_of_task == "translation"
        return MODELS[form_of_task](config)


def _kept(mask: Tensor | None) -> Tensor | None:
    """Which tokens are no padding; None where none is."""
    return None if mask is None or bool((mask != 0).all()) else mask != 0


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())  # which leaves out −100


AutoConfig.register(KERNEL_TRANSFORMER, KernelTransformerConfig, exist_ok=True)
for _auto, _class in (
    (AutoModelForCausalLM, KernelTransformerForCausalLM),
    (AutoModelForSeq2SeqLM, KernelTransformerForSeq2SeqLM),
    (AutoModelForSequenceClassification, KernelTransformerForSequenceClassification),
):
    _auto.register(KernelTransformerConfig, _class, exist_ok=True)
