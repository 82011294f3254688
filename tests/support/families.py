"""Tiny random models of each family, with attention that is neither uniform nor one-hot.

`build(name)` makes a model, `inputs(name, model)` its inputs. No two sizes are equal by accident:
six query heads on two key heads in families with groups (head h // 3, never h % 2), head_dim 10 and d_model 40 or 48,
biases and norms that are not trivial, a sliding window and a softcap that have an effect.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

VOCABULARY, FIRST_WORD = 99, 3
SPREAD: dict[str, float] = {
    **dict.fromkeys(("bert", "roberta", "albert", "bart"), 1.8),
    **{"t5": 0.76, "gpt_neo": 0.76, "gemma2": 1.8, "qwen3": 1.0, "gemma3": 1.0},
}
"""Standard deviation of an entry of q and of k for inputs of variance 1, by family (default: 1.4, which makes logits of
about 2 if they are divided by √head_dim). Models that normalise after each block mix their tokens more and need more;
T5 and GPT-Neo do not divide, Gemma divides by √24, and before a QK-norm it has no effect."""
NORM_GAIN = {"qwen3": 1.4, "gemma3": 1.8}
"""Factors of the gains of QK-norms (Gemma's gain is 1 + its weight, hence added)."""

TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BLOCKS = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56}
SEQ2SEQ: dict[str, Any] = TEXT | {
    "d_model": 40, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 56, "decoder_ffn_dim": 56,
}  # fmt: skip
ENCODER: dict[str, Any] = TEXT | BLOCKS | {"max_position_embeddings": 64}
GROUPED = ENCODER | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
PIXELS: dict[str, Any] = BLOCKS | {"image_size": 12, "patch_size": 4}
OPENAI: dict[str, Any] = TEXT | {"n_embd": 40, "n_layer": 2, "n_head": 4}
KINDS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = GROUPED | {"query_pre_attn_scalar": 24}
T5 = {
    "vocab_size": VOCABULARY, "d_model": 40, "d_kv": 12, "d_ff": 56, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0,
    "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
WHISPER = SEQ2SEQ | {
    "num_mel_bins": 8, "max_source_positions": 15, "max_target_positions": 64, "decoder_start_token_id": 1,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
BART = SEQ2SEQ | {"max_position_embeddings": 64, "decoder_start_token_id": 2, "forced_eos_token_id": None}
DISTILBERT = TEXT | {"dim": 40, "n_layers": 2, "n_heads": 4, "hidden_dim": 56, "max_position_embeddings": 64}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4}}
CLIP = {
    "text_config": ENCODER | {"projection_dim": 16}, "vision_config": PIXELS | {"projection_dim": 16},
    "projection_dim": 16,
}  # fmt: skip
PHI3 = {name: size for name, size in GROUPED.items() if name != "head_dim"} | {"hidden_size": 60}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}
DEBERTA: dict[str, Any] = ENCODER | {
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 6, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "type_vocab_size": 0,
}  # fmt: skip
GPT_NEO = TEXT | {
    "hidden_size": 40, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
    "window_size": 5, "max_position_embeddings": 64,
}  # fmt: skip
FALCON = {name: size for name, size in ENCODER.items() if name != "intermediate_size"}

FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "bert": (tf.BertForMaskedLM, tf.BertConfig, ENCODER),
    "roberta": (tf.RobertaForMaskedLM, tf.RobertaConfig, ENCODER | {"pad_token_id": 1, "bos_token_id": 0}),
    "distilbert": (tf.DistilBertForMaskedLM, tf.DistilBertConfig, DISTILBERT),
    "albert": (tf.AlbertForMaskedLM, tf.AlbertConfig, ENCODER | {"num_hidden_layers": 3, "embedding_size": 24}),
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config, OPENAI | {"n_positions": 64}),
    "gpt_neox": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, ENCODER | PARTIAL),
    "opt": (tf.OPTForCausalLM, tf.OPTConfig, ENCODER | {"ffn_dim": 56, "word_embed_proj_dim": 40}),
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, GROUPED | {"attention_bias": True}),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig, GROUPED | {"sliding_window": 5}),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config, GROUPED),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, GROUPED),
    "gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config, GEMMA | {"attn_logit_softcapping": 3.0, "sliding_window": 5}),
    "gemma3": (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, GEMMA | KINDS),
    "phi3": (tf.Phi3ForCausalLM, tf.Phi3Config, PHI3 | {"sliding_window": None}),
    "cohere": (tf.CohereForCausalLM, tf.CohereConfig, GROUPED | {"use_qk_norm": False}),
    "gpt_oss": (tf.GptOssForCausalLM, tf.GptOssConfig, GROUPED | KINDS | EXPERTS),
    "t5": (tf.T5ForConditionalGeneration, tf.T5Config, T5),
    "bart": (tf.BartForConditionalGeneration, tf.BartConfig, BART),
    "whisper": (tf.WhisperForConditionalGeneration, tf.WhisperConfig, WHISPER),
    "vit": (tf.ViTModel, tf.ViTConfig, PIXELS),
    "clip": (tf.CLIPModel, tf.CLIPConfig, CLIP),
    "bloom": (tf.BloomForCausalLM, tf.BloomConfig, TEXT | {"hidden_size": 40, "n_layer": 2, "n_head": 4}),
    "mpnet": (tf.MPNetForMaskedLM, tf.MPNetConfig, ENCODER),
    "deberta_v2": (tf.DebertaV2ForMaskedLM, tf.DebertaV2Config, DEBERTA),
    "gptj": (tf.GPTJForCausalLM, tf.GPTJConfig, OPENAI | {"rotary_dim": 4, "n_positions": 64}),
    "gpt_neo": (tf.GPTNeoForCausalLM, tf.GPTNeoConfig, GPT_NEO),
    "falcon": (tf.FalconForCausalLM, tf.FalconConfig, FALCON | {"multi_query": True, "alibi": True}),
    "mamba": (tf.MambaForCausalLM, tf.MambaConfig, TEXT | {"hidden_size": 40, "num_hidden_layers": 2, "state_size": 6}),
    "yoso": (tf.YosoForMaskedLM, tf.YosoConfig, ENCODER),
}
"""Name → class of the model, class of its configuration, and settings of the configuration."""
REFUSED = ("mamba", "yoso")
"""Families that have no attention, or none with a softmax."""
TRACED = ("bloom", "mpnet", "deberta_v2", "gptj", "gpt_neo", "falcon")
"""Families that compute their attention by hand."""
REACHED = tuple(name for name in FAMILIES if name not in REFUSED)
ALIKE = (
    *("roberta", "distilbert", "mpnet", "opt", "qwen2", "qwen3"),
    *("gptj", "gpt_neox", "falcon", "cohere", "phi3", "bart"),
)
"""Families that differ from another family only in the layout of their weights."""
UNLIKE = [pytest.param(name, marks=pytest.mark.full) if name in ALIKE else name for name in REACHED]
CAUSAL = (
    *("gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "cohere"),
    *("gpt_oss", "bloom", "gptj", "gpt_neo", "falcon"),
)
"""Families with causal self-attention."""


def build(name: str, seed: int = 0) -> Any:
    """Build the tiny model of a family in evaluation mode and float32, the same for the same seed."""
    model_class, config, settings = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config(**copy.deepcopy(settings))).eval().requires_grad_(False)
        if name != "mamba":
            for path, module in model.named_modules():
                for key, parameter in module.named_parameters(path, recurse=False):
                    _draw(name, key, module, parameter)
    return model


def _draw(name: str, key: str, module: nn.Module, parameter: Tensor) -> None:
    """Draw matrices so that each keeps the variance of its inputs, W_Q and W_K sharper; shake vectors."""
    if parameter.ndim == 1:
        gain = NORM_GAIN[name] - 1 if key.endswith(("q_norm.weight", "k_norm.weight")) else 0
        parameter.add_(0.3 * torch.randn_like(parameter)).add_(gain)
    elif isinstance(module, nn.Embedding):
        parameter.normal_()
    elif parameter.ndim > 1:
        spread = SPREAD.get(name, 1.4) if any(part in key for part in QUERY_KEY) else 1.0
        inputs_first = type(module).__name__.endswith(("Conv1D", "Experts"))  # GPT-2's and GPT-OSS's
        parameter.normal_(std=spread / (parameter.shape[-2] if inputs_first else parameter[0].numel()) ** 0.5)


QUERY_KEY = (
    *("query", "key.", "q_proj", "k_proj", "q_lin", "k_lin", "c_attn", "qkv_proj"),
    *("Attention.q.", "Attention.k.", "attn.q.", "attn.k."),
)
"""Parts of the names of W_Q and W_K, also if W_V shares their matrix."""


Side = Literal["left", "right"]


def inputs(
    name: str, model: Any, batch: int = 2, tokens: int = 12, padded: bool = False, side: Side = "right", seed: int = 0
) -> dict[str, Tensor]:
    """Draw inputs of a family's model; `padded` leaves the first sequence whole and cuts the others by 4, 5, ….

    If there is a text encoder, its decoder gets two tokens fewer, so that their lengths differ.
    """
    draw = torch.Generator().manual_seed(seed)

    def words(prefix: str, tokens: int) -> dict[str, Tensor]:
        ids = torch.randint(FIRST_WORD, VOCABULARY, (batch, tokens), generator=draw)
        lengths = torch.tensor([max(2, tokens - 3 - row) if row and padded else tokens for row in range(batch)])
        mask = (torch.arange(tokens) < lengths[:, None]).long()
        mask = mask.flip(1) if side == "left" else mask
        ids = ids.masked_fill(mask == 0, model.config.get_text_config().pad_token_id)
        return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}

    if name in ("vit", "clip"):
        pixels = {"pixel_values": torch.randn(batch, 3, 12, 12, generator=draw)}
        return pixels if name == "vit" else pixels | words("", tokens)
    if name == "whisper":
        return {"input_features": torch.randn(batch, 8, 30, generator=draw)} | words("decoder_", tokens)
    return words("", tokens) | (words("decoder_", tokens - 2) if name in ("t5", "bart") else {})
