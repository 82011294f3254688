"""The small transformers as models of transformers, saved and loaded like any other."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

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
from attnlens.kernel_transformers.attention import KernelAttention
from attnlens.kernel_transformers.forms import AttentionForm
from attnlens.kernel_transformers.stacks import Classifier, EncoderDecoder, LanguageModel

if TYPE_CHECKING:
    from torch import Tensor


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
