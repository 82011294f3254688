"""Small transformers of any kernel: a decoder, an encoder with a decoder, and an encoder that classifies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.nn import functional

from attnlens.kernel_transformers.attention import KernelAttention
from attnlens.kernel_transformers.forms import AttentionForm, Place

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
