"""Plants damage and harmless changes in models with the layouts of GPT-2, BERT, LLaMA, T5 and Whisper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
"""The attention, the norm next to it, and its projections, as submodules of a block."""


def layers(model: Any) -> list[SimpleNamespace]:
    """Return each layer's block, attention module, norm next to the attention, and projections."""
    kind = model.config.model_type
    if kind == "gpt2":
        return [_gpt2(block) for block in model.transformer.h]
    made = []
    for block in _blocks(model):
        attention, norm, *linear = map(block.get_submodule, PARTS.get(kind, PARTS["llama"]).split())
        projections = [(part.weight.data, None if part.bias is None else part.bias.data) for part in linear]
        made.append(_layer(block, attention, norm, *projections))
    return made


def _blocks(model: Any) -> list[Any]:
    """Return the blocks, the encoder's before the decoder's."""
    match model.config.model_type:
        case "bert":
            return [*model.base_model.encoder.layer]
        case "t5":
            return [*model.encoder.block, *model.decoder.block]
        case "whisper":
            return [*model.model.encoder.layers, *model.model.decoder.layers]
        case _:
            return [*model.model.layers]


def _layer(block: Any, attention: Any, norm: Any, *projections: Linear) -> SimpleNamespace:
    fields = dict(zip(("query", "key", "value", "output"), projections, strict=True))
    return SimpleNamespace(block=block, attention=attention, norm=norm, **fields)


def _gpt2(block: Any) -> SimpleNamespace:
    attention, output = block.attn, block.attn.c_proj
    weights, biases = (part.data.chunk(3, -1) for part in (attention.c_attn.weight, attention.c_attn.bias))
    parts = [(weight.T, bias) for weight, bias in zip(weights, biases, strict=True)]
    return _layer(block, attention, block.ln_1, *parts, (output.weight.data.T, output.bias.data))


def _rows(model: Any, heads: Iterable[int]) -> Tensor:
    """Return the rows of these heads in a projection."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return torch.cat([torch.arange(head * size, (head + 1) * size) for head in heads])


def _groups(model: Any) -> tuple[int, int]:
    """Return the number of key heads, and of query heads per key head."""
    heads = model.config.num_attention_heads
    kv_heads = getattr(model.config, "num_key_value_heads", None) or heads
    return kv_heads, heads // kv_heads


def _tensors(projection: Linear) -> list[Tensor]:
    return [part for part in projection if part is not None]


def _reorder(model: Any, own: SimpleNamespace) -> None:
    """Move key heads one place on, each with its query heads, values and output columns."""
    kv_heads, group = _groups(model)
    order = torch.arange(kv_heads).roll(1).tolist()
    keys = _rows(model, order)
    queries = _rows(model, [head * group + place for head in order for place in range(group)])
    for projection, rows in ((own.query, queries), (own.key, keys), (own.value, keys)):
        for part in _tensors(projection):
            part.copy_(part[rows].clone())
    own.output[0].copy_(own.output[0][:, queries].clone())


def _change_gauge(model: Any) -> None:
    """Make W_Q W_Q A and W_K W_K A⁻ᵀ; under RoPE, A turns and stretches each pair of coordinates."""
    generator, (kv_heads, group) = torch.Generator().manual_seed(0), _groups(model)
    draw = _turn if hasattr(model.config, "rope_parameters") else _mixture
    for own in layers(model):
        for head in range(kv_heads):
            change = draw(len(_rows(model, [head])), generator)
            for query in range(head * group, (head + 1) * group):
                _apply(own.query, _rows(model, [query]), change)
            _apply(own.key, _rows(model, [head]), torch.linalg.inv(change).T)


def _mixture(size: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return torch.eye(size, dtype=torch.float64) + noise / size**0.5 / 2


def _turn(size: int, generator: torch.Generator) -> Tensor:
    angles, lengths = torch.rand(2, size // 2, generator=generator, dtype=torch.float64)
    cos, sin = ((lengths + 0.5) * part for part in ((6 * angles).cos(), (6 * angles).sin()))
    return torch.cat([torch.cat([cos.diag(), -sin.diag()], 1), torch.cat([sin.diag(), cos.diag()], 1)])


def _apply(projection: Linear, rows: Tensor, change: Tensor) -> None:
    for part in _tensors(projection):
        part[rows] = (change @ part[rows].double()).to(part.dtype)


@torch.no_grad()
def plant(model: Any, changes: Mapping[str, int]) -> Any:
    """Return the model with each change at its layer; RoPE's base, rounding and the gauge change in all layers."""
    rows = _rows(model, [HEAD])
    for name, layer in changes.items():
        own = layers(model)[layer]
        match name:
            case "W_K shuffled":
                order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
                own.key[0][rows] = own.key[0][rows[order]]
            case "head zeroed":
                for part in _tensors(own.key):
                    part[rows] = 0
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
