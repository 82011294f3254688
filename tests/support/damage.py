"""Plants damage and harmless changes in models with the layouts of GPT-2, BERT, LLaMA, T5 and Whisper."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HEAD = 1
"""The key head that is damaged."""
Linear = tuple[Tensor, Tensor | None]
"""A projection as (out, in) rows and its bias, views of the model's own parameters."""
PARTS = {
    "t5": "layer.0.SelfAttention layer.0.layer_norm layer.0.SelfAttention.q layer.0.SelfAttention.k "
    "layer.0.SelfAttention.v layer.0.SelfAttention.o",
    "whisper": "self_attn self_attn_layer_norm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj",
    "bert": "attention.self attention.output.LayerNorm "
    "attention.self.query attention.self.key attention.self.value attention.output.dense",
    "llama": "self_attn input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj",
}
"""Names of the attention, the norm next to it, and its projections, as submodules of a block."""


def layers(model: Any) -> list[SimpleNamespace]:
    """Return each layer's block, attention module, norm next to the attention, and projections."""
    match model.config.model_type:
        case "gpt2":
            return [_gpt2(block) for block in model.transformer.h]
        case "bert":
            blocks = [*model.base_model.encoder.layer]
        case "t5":
            blocks = [*model.encoder.block, *model.decoder.block]
        case "whisper":
            blocks = [*model.model.encoder.layers, *model.model.decoder.layers]
        case _:
            blocks = [*model.model.layers]
    made = []
    for block in blocks:
        names = PARTS.get(model.config.model_type, PARTS["llama"]).split()
        attention, norm, *linear = map(block.get_submodule, names)
        projections = [(part.weight.data, None if part.bias is None else part.bias.data) for part in linear]
        made.append(_layer(block, attention, norm, *projections))
    return made


def _layer(block: Any, attention: Any, norm: Any, *projections: Linear) -> SimpleNamespace:
    fields = dict(zip(("query", "key", "value", "output"), projections, strict=True))
    return SimpleNamespace(block=block, attention=attention, norm=norm, **fields)


def _gpt2(block: Any) -> SimpleNamespace:
    attention, output = block.attn, block.attn.c_proj
    weights, biases = (part.data.chunk(3, -1) for part in (attention.c_attn.weight, attention.c_attn.bias))
    parts = [(weight.T, bias) for weight, bias in zip(weights, biases, strict=True)]
    return _layer(block, attention, block.ln_1, *parts, (output.weight.data.T, output.bias.data))


def _groups(model: Any) -> tuple[int, int]:
    """Return the number of key heads, and of query heads per key head."""
    heads = model.config.num_attention_heads
    kv_heads = getattr(model.config, "num_key_value_heads", None) or heads
    return kv_heads, heads // kv_heads


def _split(projection: Linear, *heads: int) -> list[Tensor]:
    """Return weight and bias, if any, as views of shape (*heads, size, …)."""
    return [part.unflatten(0, (*heads, -1)) for part in projection if part is not None]


def _reorder(model: Any, own: SimpleNamespace) -> None:
    """Move key heads one place on, each with its query heads, values and output columns."""
    kv_heads, _ = _groups(model)
    output = own.output[0].T, None
    for part in (part for each in (own.query, own.key, own.value, output) for part in _split(each, kv_heads)):
        part.copy_(part.roll(1, 0))


def _change_gauge(model: Any) -> None:
    """Make W_Q W_Q A and W_K W_K A⁻ᵀ; under RoPE, A turns and stretches each pair of coordinates."""
    generator, groups = torch.Generator().manual_seed(0), _groups(model)
    draw = _turn if hasattr(model.config, "rope_parameters") else _mixture
    for own in layers(model):
        queries, keys = _split(own.query, *groups), _split(own.key, groups[0], 1)
        for head in range(groups[0]):
            change = draw(keys[0].shape[2], generator)
            for parts, matrix in ((queries, change), (keys, torch.linalg.inv(change).T)):
                for part in parts:
                    part[head] = torch.einsum("ij,gj...->gi...", matrix, part[head].double())


def _mixture(size: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return torch.eye(size, dtype=torch.float64) + noise / size**0.5 / 2


def _turn(size: int, generator: torch.Generator) -> Tensor:
    angles, lengths = torch.rand(2, size // 2, generator=generator, dtype=torch.float64)
    cos, sin = ((lengths + 0.5) * part for part in ((6 * angles).cos(), (6 * angles).sin()))
    return torch.cat([torch.cat([cos.diag(), -sin.diag()], 1), torch.cat([sin.diag(), cos.diag()], 1)])


@torch.no_grad()
def plant(model: Any, changes: Mapping[str, int]) -> Any:
    """Return the model with each change at its layer; RoPE's base, rounding and the gauge change in all layers."""
    kv_heads, _ = _groups(model)
    for name, layer in changes.items():
        own = layers(model)[layer]
        match name:
            case "W_K shuffled":
                rows = _split(own.key, kv_heads)[0][HEAD]
                rows.copy_(rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))])
            case "head zeroed":
                for part in _split(own.key, kv_heads):
                    part[HEAD] = 0
            case "3 bits":
                for weight in (weight for weight in own.block.parameters() if weight.dim() > 1):
                    step = weight.abs().max() / 4
                    weight.copy_((weight / step).round() * step)
            case "gain doubled":
                own.norm.weight *= 2
            case "mask leaks":
                own.attention.is_causal = False
            case "RoPE base":
                model.model.rotary_emb.inv_freq *= 0.5
            case "bf16":
                for weight in model.parameters():
                    weight.copy_(weight.bfloat16())
            case "reordered":
                _reorder(model, own)
            case "gauge":
                _change_gauge(model)
            case _:
                raise ValueError(name)
    return model
