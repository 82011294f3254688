"""Small transformers with a configurable kernel, position encoding and value function (Tsai et al. 2019)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput, Seq2SeqLMOutput, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import modeling_auto as auto
from transformers.utils.generic import ModelOutput

from attnlens.choices import KERNEL_TRANSFORMER
from attnlens.errors import ModelError
from attnlens.kernels import parsed
from attnlens.kernels.attention import attend
from attnlens.kernels.attention.primal_heads import PrimalHeads
from attnlens.kernels.attention.sums import as_exponential
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    Added = Float[Tensor, "#batch heads queries keys"]
    States = Float[Tensor, "batch tokens d_model"]
    Split = Float[Tensor, "batch heads tokens head_dim"]
    Unpadded = Bool[Tensor, "batch tokens"] | None

Placing = Literal["none", "sum", "table", "product", "symmetric product"]
"""How positions t enter the kernel of features f. `none`: not at all; `sum`: k(f + t, f' + t') (Eq. 4); `table`: L(t −
t', f)·k(f, f') with a learned table L (Eq. 6); `product`: k(f, f')·k_f(t, t') with an asymmetric kernel (Eq. 5);
`symmetric product`: k_F(f, f')·k_T(t, t') with symmetric kernels (Eq. 9)."""
Place = Literal["encoder", "decoder", "cross"]  # role of an attention module; cross: cross-attention


@dataclass(frozen=True)
class AttentionForm:
    """The form of attention Σ_j k(x_i, x_j) v(x_j) / Σ_j k(x_i, x_j) over the allowed keys j (Tsai et al., Def. 1)."""

    kernel: str = "exponential"
    """Kernel k in command-line syntax, such as `rbf:gamma=1`; with positions "sum", it is applied to f + t."""
    symmetric: bool = False  # True if queries and keys share one projection, W_Q = W_K
    positions: Placing = "none"  # how positions enter the kernel
    places: tuple[Place, ...] = ("encoder", "decoder", "cross")  # the attention modules that use positions
    in_value: bool = False  # True if values include positions, v(x) = (f + t)W_V (Eq. 7), not v(x) = f W_V (Eq. 8)
    primal: Literal["none", "last", "all"] = "none"  # layers with Primal-Attention (Chen et al. 2023)
    scores: int = 0  # number s of scores of each primal head
    eta: float = 0.0  # weight η of the primal layers' regulariser ΣJ² in the loss


FURTHEST = 16  # largest distance in tokens with a separate vector; larger distances are clipped (Shaw et al. 2018)
WAVELENGTH = 10_000.0  # wavelength of the slowest sinusoid, in units of 2π tokens


def sinusoids(places: Float[Tensor, " places"], d_model: int) -> Float[Tensor, "places d_model"]:
    """Return sin(t/10000^{2p/d_model}) for positions t and p < d_model/2, followed by the cosines of the same angles.

    Vaswani et al. 2017 interleave sines and cosines.
    """
    half = torch.arange((d_model + 1) // 2, device=places.device, dtype=places.dtype)
    angles = places[:, None] * torch.exp(-math.log(WAVELENGTH) * 2 * half / d_model)
    return torch.cat((angles.sin(), angles.cos()), 1)[:, :d_model]


def distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the distance t_i − t_j between each query i and key j, (queries, keys)."""
    return torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)


class PositionScores(nn.Module):
    """Scores that depend on the positions of a query and a key; they are added to the scores of the features.

    f_i is the feature vector of token i, t_i its position or positional embedding, and s the scale. `table`: log L(t_i
    − t_j, f_i) = s⟨f_i W_Q, a_{t_i − t_j}⟩, with a learned vector a for each distance (Eq. 6). `product`: log k_f(t_i,
    t_j) = s⟨f_i W_Q, r_{t_i − t_j} W_R⟩, with the sinusoids r of a distance (Eq. 5), as in Transformer-XL without its
    two learned offsets. `symmetric product`: log k_T(t_i, t_j) = s⟨t_i W_T, t_j W_T⟩ (Eq. 9).
    """

    def __init__(self, positions: Placing, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads, head_dim = heads, d_model // heads
        self.vectors = self.relative = self.place = None
        if positions == "table":
            self.vectors = nn.Parameter(torch.randn(2 * FURTHEST + 1, head_dim) * head_dim**-0.5)
        elif positions == "product":
            self.relative = _build_projection(d_model)
        else:
            self.place = _build_projection(d_model)

    def forward(self, query: Split, keys: int, scale: float) -> Added:
        """Compute the scores, (batch or 1, heads, queries, keys), for `query` = f W_Q and s = `scale`."""
        queries = query.shape[2]
        if self.place is not None:
            projected = self._project(self.place, query, 0, max(queries, keys))
            return (projected[:, :queries] @ projected[:, :keys].mT * scale)[None]
        index = distances(queries, keys, query.device)
        if self.relative is not None:
            vectors, index = self._project(self.relative, query, 1 - keys, queries), index + keys - 1
        else:
            vectors, index = cast("Tensor", self.vectors), index.clamp(-FURTHEST, FURTHEST) + FURTHEST
        return (query @ vectors.mT * scale).gather(-1, index.expand(*query.shape[:2], -1, -1))

    def _project(self, projection: nn.Linear, like: Tensor, start: int, stop: int) -> Tensor:
        places = torch.arange(start, stop, device=like.device, dtype=like.dtype)
        projected: Tensor = projection(sinusoids(places, projection.in_features))
        return projected.unflatten(1, (self.heads, -1)).transpose(0, 1)  # type: ignore[no-any-return, no-untyped-call]


OWN = "eager"  # name of transformers' implementation under which KernelAttention computes attention itself


class KernelAttention(nn.Module):
    """Attention Σ_j k(x_i, x_j) v(x_j) W_O / Σ_j k(x_i, x_j) over the allowed j, per head (Tsai et al. 2019, Def. 1).

    x = (f, t) combines features and positions according to `form`. While attnlens watches or replaces attention, the
    configuration names an attention implementation other than OWN. That implementation computes the softmax of log k,
    which it receives as products of transformed queries and keys.
    """

    def __init__(
        self, config: KernelTransformerConfig, form: AttentionForm, place: Place, *, primal: bool = False
    ) -> None:
        super().__init__()
        d_model, heads = config.hidden_size, config.num_attention_heads
        self.config, self.form, self.part, self.heads = config, form, place, heads
        self.causal = place == "decoder"
        self.positions = form.positions if place in form.places else "none"
        self.kernel = parsed(form.kernel)
        self.query = _build_projection(d_model)
        symmetric = form.symmetric or form.positions == "symmetric product"  # Eq. 9 also has W_Q = W_K
        self.key = None if symmetric else _build_projection(d_model)
        self.primal = PrimalHeads(heads, d_model // heads, form.scores) if primal else None
        self.value = None if primal else _build_projection(d_model)
        self.output = _build_projection(d_model)
        adds = self.positions not in ("none", "sum")
        self.added = PositionScores(self.positions, d_model, heads) if adds else None

    def forward(
        self, features: States, key_value_states: States | None = None, mask: Bool[Tensor, "batch keys"] | None = None
    ) -> States:
        """Compute attention from `features` to `key_value_states` (None: to `features`); `mask` is False at padding."""
        source = features if key_value_states is None else key_value_states
        query, key, value = features, source, source
        if self.positions == "sum":  # Eq. 4
            query, key = features + _token_sinusoids(features), source + _token_sinusoids(source)
        if self.form.in_value and self.positions != "none":  # Eq. 7
            value = source + _token_sinusoids(source)
        queries, keys = self._split(self.query(query)), self._split((self.key or self.query)(key))
        if self.primal is not None:
            attended = self.primal(queries, keys, causal=self.causal, real=None if mask is None else mask[:, None])
        else:
            values = self._split(cast("nn.Linear", self.value)(value))
            attended = self._attend(queries, keys, values, mask, cross=key_value_states is not None)
        return cast("Tensor", self.output(attended.transpose(1, 2).flatten(2)))

    @property
    def kernel_parameters(self) -> int:
        """Number of parameters of the query and key projections and of the position scores."""
        parts = [part for part in (self.query, self.key, self.added) if part is not None]
        return sum(parameter.numel() for part in parts for parameter in part.parameters())

    def _attend(self, query: Split, key: Split, value: Split, mask: Tensor | None, *, cross: bool) -> Split:
        scale = query.shape[-1] ** -0.5
        bias = None if self.added is None else self.added(query, key.shape[2], scale)
        # keys that are not padding and, if causal, not later; None if `causal` alone decides
        allowed = None if mask is None else mask[:, None, None, :].expand(-1, 1, query.shape[2], -1)
        if allowed is not None and self.causal:
            allowed = allowed.tril()
        causal = self.causal and allowed is None
        implementation = self.config._attn_implementation  # private, but transformers' own modules read it
        if implementation in (OWN, None):
            call = Call(query, key, value, scale, allowed, causal, bias, cross=cross, module=self)
            return attend(call, self.kernel).transpose(1, 2)
        query, key, scale = as_exponential(query, key, scale, self.kernel)
        is_causal = implementation == "sdpa" and causal  # torch's causal mask is the fastest
        if causal and not is_causal:
            allowed = (distances(query.shape[2], key.shape[2], query.device) >= 0)[None, None]
        options = {"scaling": scale, "position_bias": bias, "is_causal": is_causal}
        output: Tensor = ALL_ATTENTION_FUNCTIONS[implementation](self, query, key, value, allowed, **options)[0]
        return output.transpose(1, 2)

    def _split(self, projected: States) -> Split:
        return projected.reshape(*projected.shape[:2], self.heads, -1).transpose(1, 2)


def _build_projection(d_model: int) -> nn.Linear:
    layer = nn.Linear(d_model, d_model, bias=False)
    nn.init.xavier_uniform_(layer.weight)
    return layer


def _token_sinusoids(features: States) -> Float[Tensor, "tokens d_model"]:
    """Return the sinusoids at the position of each token."""
    places = torch.arange(features.shape[1], device=features.device, dtype=features.dtype)
    return sinusoids(places, features.shape[2])


class Layer(nn.Module):
    """Pre-norm layer: attention, cross-attention to a memory if `crosses`, and MLP with GELU, each as x + f(LN(x))."""

    def __init__(
        self, config: KernelTransformerConfig, form: AttentionForm, place: Place, number: int, *, crosses: bool
    ) -> None:
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
        self, x: States, mask: Unpadded = None, memory: States | None = None, memory_mask: Unpadded = None
    ) -> States:
        """Compute the layer's output; `mask` and `memory_mask` are True for tokens that are not padding."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        if self.cross_attention is not None and self.cross_norm is not None:
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), memory, memory_mask))
        inner = functional.gelu(self.forward_in(self.forward_norm(x)))
        return x + cast("Tensor", self.dropout(self.forward_out(inner)))


class Stack(nn.Module):
    """The layers of an encoder or a decoder, followed by a layer norm."""

    def __init__(
        self, config: KernelTransformerConfig, form: AttentionForm, place: Place, *, crosses: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(config, form, place, number, crosses=crosses) for number in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(
        self, x: States, mask: Unpadded = None, memory: States | None = None, memory_mask: Unpadded = None
    ) -> States:
        """Return the last layer's output after the layer norm."""
        for layer in self.layers:
            x = layer(x, mask, memory, memory_mask)
        return cast("Tensor", self.norm(x))


class Embeddings(nn.Module):
    """Token embeddings (rows of √d_model · E) and next-token logits (h Eᵀ for features h), with a shared matrix E."""

    def __init__(self, size: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, d_model)
        nn.init.normal_(self.table.weight, std=d_model**-0.5)

    def forward(self, ids: Tensor) -> States:
        """Embed ids (batch, tokens) as features (batch, tokens, d_model)."""
        return cast("Tensor", self.table(ids) * self.table.embedding_dim**0.5)

    def logits(self, features: States) -> Float[Tensor, "batch tokens vocabulary"]:
        """Return the next-token logits at each position."""
        return features @ self.table.weight.mT


class LanguageModel(nn.Module):
    """Causal language model: a decoder stack that predicts each next token."""

    def __init__(self, config: KernelTransformerConfig, form: AttentionForm) -> None:
        super().__init__()
        self.words = Embeddings(config.vocab_size, config.hidden_size)
        self.decoder = Stack(config, form, "decoder")

    def forward(self, inputs: Tensor, mask: Unpadded = None, _decoder_inputs: Tensor | None = None) -> Tensor:
        """Map ids (batch, tokens) to logits (batch, tokens, vocabulary)."""
        return self.words.logits(self.decoder(self.words(inputs), mask))


class EncoderDecoder(nn.Module):
    """Encoder–decoder that predicts each target token from the source (by cross-attention) and earlier targets."""

    def __init__(self, config: KernelTransformerConfig, form: AttentionForm) -> None:
        super().__init__()
        self.words = Embeddings(config.vocab_size, config.hidden_size)
        self.encoder = Stack(config, form, "encoder")
        self.decoder = Stack(config, form, "decoder", crosses=True)

    def encode(self, inputs: Tensor, mask: Unpadded = None) -> States:
        """Map source ids (batch, tokens) to the encoder's features."""
        return cast("Tensor", self.encoder(self.words(inputs), mask))

    def decode(self, decoder_inputs: Tensor, memory: States, mask: Unpadded = None) -> Tensor:
        """Map target ids (batch, tokens) to logits (batch, tokens, vocabulary); `mask` hides padding in `memory`."""
        return self.words.logits(self.decoder(self.words(decoder_inputs), None, memory, mask))

    def forward(self, inputs: Tensor, mask: Unpadded, decoder_inputs: Tensor) -> Tensor:
        """Map source ids and target ids to logits; targets need no mask if they are padded on the right."""
        return self.decode(decoder_inputs, self.encode(inputs, mask), mask)


class Classifier(nn.Module):
    """Classifier of token ids or multichannel time series: a linear layer on the mean of an encoder's features."""

    def __init__(self, config: KernelTransformerConfig, form: AttentionForm) -> None:
        super().__init__()
        d_model = config.hidden_size
        self.words = Embeddings(config.vocab_size, d_model) if config.vocab_size else None
        self.channels = None if config.vocab_size else nn.Linear(config.channels, d_model)
        self.encoder = Stack(config, form, "encoder")
        self.classes = nn.Linear(d_model, config.classes)

    def forward(self, inputs: Tensor, mask: Unpadded = None, _decoder_inputs: Tensor | None = None) -> Tensor:
        """Map ids (batch, tokens) or a series (batch, steps, channels) to logits (batch, classes)."""
        embedding = self.words or cast("nn.Linear", self.channels)
        features: Tensor = self.encoder(embedding(inputs), mask)
        if mask is None:
            return cast("Tensor", self.classes(features.mean(1)))
        share = mask[..., None].to(features.dtype)
        return cast("Tensor", self.classes((features * share).sum(1) / share.sum(1).clamp_min(1)))


class KernelTransformerConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Sizes of a small transformer, and the form of its attention as a dictionary (see `AttentionForm`)."""

    model_type = KERNEL_TRANSFORMER

    vocab_size: int = 0
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    intermediate_size: int = 256
    max_position_embeddings: int = 64
    dropout: float = 0.0
    channels: int = 0
    classes: int = 2
    form: dict[str, object] = field(default_factory=lambda: asdict(AttentionForm()))
    decoder_start_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = False

    @property
    def attention_form(self) -> AttentionForm:
        """The model's attention form. Raises ModelError if `form` has unknown fields or invalid values."""
        try:
            return TypeAdapter(AttentionForm).validate_json(json.dumps(self.form), strict=True, extra="forbid")
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, ("form", *first["loc"])))
            problem = f"The model's config.json has invalid attention settings in {where}: {first['msg']}."
            raise ModelError(problem, "Restore the config.json that `attnlens reproduce` wrote.") from None


class KernelTransformer(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Base class of three small models that the library transformers can load."""

    config_class = KernelTransformerConfig
    stacks: ClassVar[type[nn.Module]]  # class of the module that computes the logits
    output: ClassVar[type[ModelOutput]]  # class of the result

    def __init__(self, config: KernelTransformerConfig) -> None:
        super().__init__(config)
        self.core = self.stacks(config, config.attention_form)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **_more: object,
    ) -> ModelOutput:
        """Compute logits, and with `labels` the loss, for ids (batch, tokens) or a series (batch, steps, channels).

        The labels of a causal language model are its input ids, which this method shifts; labels of −100 are ignored.
        """
        mask = None if attention_mask is None or bool((attention_mask != 0).all()) else attention_mask != 0
        logits: Tensor = self.core(input_ids, mask, decoder_input_ids)
        if labels is None:
            return self.output(loss=None, logits=logits)
        predicted, labels = (logits[:, :-1], labels[:, 1:]) if self.stacks is LanguageModel else (logits, labels)
        return self.output(loss=functional.cross_entropy(predicted.flatten(0, -2), labels.flatten()), logits=logits)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Return True, because transformers' own test does not recognise `KernelAttention`."""
        return True

    def attentions(self) -> list[KernelAttention]:
        """Return the model's attention modules in the order in which they run."""
        return [module for module in self.modules() if isinstance(module, KernelAttention)]

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing, because the modules initialise their weights when they are built."""


class KernelTransformerForCausalLM(KernelTransformer):  # type: ignore[no-untyped-call]
    """Causal language model."""

    stacks, output = LanguageModel, CausalLMOutput


class KernelTransformerForSeq2SeqLM(KernelTransformer):  # type: ignore[no-untyped-call]
    """Sequence-to-sequence model, e.g. for translation."""

    stacks, output = EncoderDecoder, Seq2SeqLMOutput


class KernelTransformerForSequenceClassification(KernelTransformer):  # type: ignore[no-untyped-call]
    """Sequence classifier."""

    stacks, output = Classifier, SequenceClassifierOutput


MODELS: dict[str, type[KernelTransformer]] = {  # Model class of each kind of task
    "language": KernelTransformerForCausalLM,
    "translation": KernelTransformerForSeq2SeqLM,
    "classification": KernelTransformerForSequenceClassification,
}

AutoConfig.register(KERNEL_TRANSFORMER, KernelTransformerConfig, exist_ok=True)
auto.AutoModelForCausalLM.register(KernelTransformerConfig, KernelTransformerForCausalLM, exist_ok=True)
auto.AutoModelForSeq2SeqLM.register(KernelTransformerConfig, KernelTransformerForSeq2SeqLM, exist_ok=True)
auto.AutoModelForSequenceClassification.register(
    KernelTransformerConfig, KernelTransformerForSequenceClassification, exist_ok=True
)


def draw_model(task: str, config: KernelTransformerConfig, seed: int) -> KernelTransformer:
    """Build a model for the task (a key of MODELS), with random weights determined by `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config.is_encoder_decoder = task == "translation"
        return MODELS[task](config)
