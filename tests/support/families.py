"""Tiny random models that stand for the families, with attention that is neither uniform nor one-hot.

`build(name)` makes one, `inputs(name, model)` feeds it. Sizes are chosen so that nothing coincides by accident: six
query heads on two key heads where the family groups them (head h // 3, never h % 2), head_dim 10 beside d_model 40 or
48, biases and norms that are not trivial, a sliding window and a softcap that bite.
`tests/models/test_families.py` tests these properties.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import transformers as tf
from torch import Tensor, nn

VOCABULARY, FIRST_WORD = 99, 3
SPREAD: dict[str, float] = {
    **dict.fromkeys(("bert", "roberta", "albert", "bart"), 1.8),
    **{"t5": 0.76, "gpt_neo": 0.76, "gemma2": 1.8, "qwen3": 1.0, "gemma3": 1.0},
}
"""Standard deviation of an entry of q and of k for inputs of variance 1, by family, else 1.4, which makes logits of
about 2 when they are divided by √head_dim. Models that normalise after each block mix their tokens more and want more;
T5 and GPT-Neo do not divide, Gemma divides by √24, and behind a QK-norm it has no effect."""
NORM_GAIN = {"qwen3": 1.4, "gemma3": 1.8}
"""What the gains of the QK-norms are multiplied by (Gemma's gain is 1 + its weight, hence added)."""

TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ: dict[str, Any] = TEXT | {
    "d_model": 40,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 56,
}
ENCODER: dict[str, Any] = TEXT | {
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
}
GROUPED: dict[str, Any] = ENCODER | {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
PIXELS: dict[str, Any] = {
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "image_size": 12,
    "patch_size": 4,
}


def _distilbert() -> Any:
    return tf.DistilBertConfig(**TEXT, dim=40, n_layers=2, n_heads=4, hidden_dim=56, max_position_embeddings=64)


def _albert() -> Any:
    return tf.AlbertConfig(**ENCODER | {"num_hidden_layers": 3}, embedding_size=24)


def _gpt2() -> Any:
    return tf.GPT2Config(**TEXT, n_embd=40, n_layer=2, n_head=4, n_positions=64)


def _opt() -> Any:
    return tf.OPTConfig(**ENCODER, ffn_dim=56, word_embed_proj_dim=40)


def _gemma2() -> Any:
    return tf.Gemma2Config(**GROUPED, query_pre_attn_scalar=24, attn_logit_softcapping=3.0, sliding_window=5)


def _gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    return tf.Gemma3TextConfig(**GROUPED, query_pre_attn_scalar=24, sliding_window=5, layer_types=kinds)


def _gpt_oss() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    return tf.GptOssConfig(
        **GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, layer_types=kinds, attention_bias=True
    )


def _gpt_neox() -> Any:
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4}
    return tf.GPTNeoXConfig(**ENCODER, rope_parameters=rotary)


def _phi3() -> Any:
    sizes = {name: size for name, size in GROUPED.items() if name != "head_dim"} | {"hidden_size": 60}
    return tf.Phi3Config(**sizes, sliding_window=None)


def _t5() -> Any:
    return tf.T5Config(
        vocab_size=VOCABULARY,
        d_model=40,
        d_kv=12,
        d_ff=56,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )


def _bart() -> Any:
    return tf.BartConfig(**SEQ2SEQ, max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=None)


def _whisper() -> Any:
    return tf.WhisperConfig(
        **SEQ2SEQ,
        num_mel_bins=8,
        max_source_positions=15,
        max_target_positions=64,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


def _clip() -> Any:
    text = ENCODER | {"max_position_embeddings": 64, "projection_dim": 16}
    return tf.CLIPConfig(text_config=text, vision_config=PIXELS | {"projection_dim": 16}, projection_dim=16)


def _mamba() -> Any:
    return tf.MambaConfig(**TEXT, hidden_size=40, num_hidden_layers=2, state_size=6)


def _bloom() -> Any:
    return tf.BloomConfig(**TEXT, hidden_size=40, n_layer=2, n_head=4)


def _mpnet() -> Any:
    return tf.MPNetConfig(**ENCODER)


def _deberta() -> Any:
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 6}
    return tf.DebertaV2Config(**ENCODER, **relative, norm_rel_ebd="layer_norm", share_att_key=True, type_vocab_size=0)


def _gptj() -> Any:
    return tf.GPTJConfig(**TEXT, n_embd=40, n_layer=2, n_head=4, rotary_dim=4, n_positions=64)


def _gpt_neo() -> Any:
    kinds = [[["global", "local"], 1]]
    return tf.GPTNeoConfig(
        **TEXT,
        hidden_size=40,
        num_layers=2,
        num_heads=4,
        attention_types=kinds,
        window_size=5,
        max_position_embeddings=64,
    )


def _falcon() -> Any:
    sizes = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    return tf.FalconConfig(**TEXT, **sizes, multi_query=True, alibi=True)


def _yoso() -> Any:
    return tf.YosoConfig(**ENCODER)


FAMILIES: dict[str, tuple[type[Any], Callable[[], Any]]] = {
    "bert": (tf.BertForMaskedLM, lambda: tf.BertConfig(**ENCODER)),
    "roberta": (tf.RobertaForMaskedLM, lambda: tf.RobertaConfig(**ENCODER | {"pad_token_id": 1, "bos_token_id": 0})),
    "distilbert": (tf.DistilBertForMaskedLM, _distilbert),
    "albert": (tf.AlbertForMaskedLM, _albert),
    "gpt2": (tf.GPT2LMHeadModel, _gpt2),
    "gpt_neox": (tf.GPTNeoXForCausalLM, _gpt_neox),
    "opt": (tf.OPTForCausalLM, _opt),
    "llama": (tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**GROUPED, attention_bias=True)),
    "mistral": (tf.MistralForCausalLM, lambda: tf.MistralConfig(**GROUPED, sliding_window=5)),
    "qwen2": (tf.Qwen2ForCausalLM, lambda: tf.Qwen2Config(**GROUPED)),
    "qwen3": (tf.Qwen3ForCausalLM, lambda: tf.Qwen3Config(**GROUPED)),
    "gemma2": (tf.Gemma2ForCausalLM, _gemma2),
    "gemma3": (tf.Gemma3ForCausalLM, _gemma3),
    "phi3": (tf.Phi3ForCausalLM, _phi3),
    "cohere": (tf.CohereForCausalLM, lambda: tf.CohereConfig(**GROUPED, use_qk_norm=False)),
    "gpt_oss": (tf.GptOssForCausalLM, _gpt_oss),
    "t5": (tf.T5ForConditionalGeneration, _t5),
    "bart": (tf.BartForConditionalGeneration, _bart),
    "whisper": (tf.WhisperForConditionalGeneration, _whisper),
    "vit": (tf.ViTModel, lambda: tf.ViTConfig(**PIXELS)),
    "clip": (tf.CLIPModel, _clip),
    "bloom": (tf.BloomForCausalLM, _bloom),
    "mpnet": (tf.MPNetForMaskedLM, _mpnet),
    "deberta_v2": (tf.DebertaV2ForMaskedLM, _deberta),
    "gptj": (tf.GPTJForCausalLM, _gptj),
    "gpt_neo": (tf.GPTNeoForCausalLM, _gpt_neo),
    "falcon": (tf.FalconForCausalLM, _falcon),
    "mamba": (tf.MambaForCausalLM, _mamba),
    "yoso": (tf.YosoForMaskedLM, _yoso),
}


REFUSED = ("mamba", "yoso")
"""Families that have no attention, or none with a softmax."""
TRACED = ("bloom", "mpnet", "deberta_v2", "gptj", "gpt_neo", "falcon")
"""Families that compute their attention by hand."""
REACHED = tuple(name for name in FAMILIES if name not in REFUSED)
CAUSAL = (
    "gpt2",
    "gpt_neox",
    "opt",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "cohere",
    "gpt_oss",
    "bloom",
    "gptj",
    "gpt_neo",
    "falcon",
)
"""Families whose self-attention sees the past alone."""


def build(name: str, seed: int = 0) -> Any:
    """The tiny model of that family in evaluation mode and float32, the same for the same seed."""
    model_class, config = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config()).eval().requires_grad_(False)
        if name != "mamba":
            for path, module in model.named_modules():
                for key, parameter in module.named_parameters(path, recurse=False):
                    _draw(name, key, module, parameter)
    return model


def _draw(name: str, key: str, module: nn.Module, parameter: Tensor) -> None:
    """Draw matrices so that each keeps the variance of its inputs, W_Q and W_K sharper; shake vectors."""
    if parameter.ndim == 0:
        return
    if parameter.ndim == 1:
        parameter.add_(0.3 * torch.randn_like(parameter))
        if key.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.add_(NORM_GAIN[name] - 1)
    elif isinstance(module, nn.Embedding):
        parameter.normal_()
    else:
        sharp = any(part in key for part in QUERY_KEY)
        parameter.normal_(std=(SPREAD.get(name, 1.4) if sharp else 1.0) / _inputs_of(module, parameter) ** 0.5)


QUERY_KEY = (
    "query",
    "key.",
    "q_proj",
    "k_proj",
    "q_lin",
    "k_lin",
    "c_attn",
    "qkv_proj",
    "Attention.q.",
    "Attention.k.",
    "attn.q.",
    "attn.k.",
)
"""Parts of the names of W_Q and W_K, also where W_V shares their matrix."""


def _inputs_of(module: nn.Module, parameter: Tensor) -> int:
    """How many inputs each output sums: GPT-2's Conv1D and the experts store inputs first, all others outputs."""
    if type(module).__name__ == "Conv1D":
        return parameter.shape[0]
    if type(module).__name__.endswith("Experts"):
        return parameter.shape[-2]
    return parameter[0].numel()


def inputs(
    name: str,
    model: Any,
    batch: int = 2,
    tokens: int = 12,
    padded: bool = False,
    side: Literal["left", "right"] = "right",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random inputs of that family's model; `padded` leaves the first sequence whole and cuts the others by 4, 5, ….

    A decoder beside a text encoder gets two tokens fewer, so that their lengths can't be mistaken for each other.
    """
    draw = torch.Generator().manual_seed(seed)
    words = partial(_words, model, draw, batch, padded=padded, side=side)
    if name in ("vit", "clip"):
        pixels = {"pixel_values": torch.randn(batch, 3, 12, 12, generator=draw)}
        return pixels if name == "vit" else pixels | words("", tokens)
    if name == "whisper":
        frames = {"input_features": torch.randn(batch, 8, 30, generator=draw)}
        return frames | words("decoder_", tokens)
    if name in ("t5", "bart"):
        return words("", tokens) | words("decoder_", tokens - 2)
    return words("", tokens)


def _words(
    model: Any, draw: torch.Generator, batch: int, prefix: str, tokens: int, *, padded: bool, side: str
) -> dict[str, Tensor]:
    ids = torch.randint(FIRST_WORD, VOCABULARY, (batch, tokens), generator=draw)
    lengths = torch.tensor([tokens if row == 0 or not padded else max(2, tokens - 3 - row) for row in range(batch)])
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    if side == "left":
        mask = mask.flip(1)
    ids = ids.masked_fill(mask == 0, model.config.get_text_config().pad_token_id)
    return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}
