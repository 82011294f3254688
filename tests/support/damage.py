"""Plants damage and harmless changes in trained models: GPT-2, BERT and LLaMA layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEAD = 1
"""Which key head is damaged."""


@dataclass
class Linear:
    """A projection as (out, in) rows, a view of the model's own parameters."""

    weight: Tensor
    bias: Tensor | None


@dataclass
class Projections:
    """One layer's own, with the block and its first norm."""

    block: Any
    attention: Any
    norm: Any
    query: Linear
    key: Linear
    value: Linear
    output: Linear


def layers(model: Any) -> list[Projections]:
    """Every layer of the model."""
    kind = model.config.model_type
    if kind == "gpt2":
        return [_gpt2(block) for block in model.transformer.h]
    return [_bert(block) if kind == "bert" else _llama(block) for block in _blocks(model)]


def _blocks(model: Any) -> Any:
    return model.base_model.encoder.layer if model.config.model_type == "bert" else model.model.layers


def _bert(block: Any) -> Projections:
    own, behind = block.attention.self, block.attention.output
    parts = map(_linear, (own.query, own.key, own.value, behind.dense))
    return Projections(block, own, behind.LayerNorm, *parts)


def _llama(block: Any) -> Projections:
    own = block.self_attn
    parts = map(_linear, (own.q_proj, own.k_proj, own.v_proj, own.o_proj))
    return Projections(block, own, block.input_layernorm, *parts)


def _linear(module: Any) -> Linear:
    return Linear(module.weight.data, None if module.bias is None else module.bias.data)


def _gpt2(block: Any) -> Projections:
    attention = block.attn
    weights, biases = (part.data.chunk(3, -1) for part in (attention.c_attn.weight, attention.c_attn.bias))
    parts = [Linear(weight.T, bias) for weight, bias in zip(weights, biases, strict=True)]
    output = Linear(attention.c_proj.weight.data.T, attention.c_proj.bias.data)
    return Projections(block, attention, block.ln_1, *parts, output)


def _rows(model: Any, heads: Sequence[int]) -> Tensor:
    """The rows of these heads in a projection."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return torch.cat([torch.arange(head * size, (head + 1) * size) for head in heads])


def _shuffled(model: Any, layer: int) -> None:
    key, rows = layers(model)[layer].key, _rows(model, [HEAD])
    key.weight[rows] = key.weight[rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]]


def _zeroed(model: Any, layer: int) -> None:
    key, rows = layers(model)[layer].key, _rows(model, [HEAD])
    key.weight[rows] = 0
    if key.bias is not None:
        key.bias[rows] = 0


def _three_bits(model: Any, layer: int) -> None:
    for weight in layers(model)[layer].block.parameters():
        if weight.dim() > 1:
            step = weight.abs().max() / 4
            weight.copy_((weight / step).round() * step)


def _gain(model: Any, layer: int) -> None:
    layers(model)[layer].norm.weight *= 2


def _leaking(model: Any, layer: int) -> None:
    layers(model)[layer].attention.is_causal = False


def _other_base(model: Any, _layer: int) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq *= 0.5


def _bf16(model: Any, _layer: int) -> None:
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())


def _reordered(model: Any, layer: int) -> None:
    """Key heads one place on, each with its query heads, values and output columns."""
    config, one = model.config, layers(model)[layer]
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    group = config.num_attention_heads // kv_heads
    order = torch.arange(kv_heads).roll(1).tolist()
    keys, queries = (
        _rows(model, order),
        _rows(model, [head * group + place for head in order for place in range(group)]),
    )
    for part, rows in ((one.query, queries), (one.key, keys), (one.value, keys)):
        part.weight.copy_(part.weight[rows].clone())
        if part.bias is not None:
            part.bias.copy_(part.bias[rows].clone())
    one.output.weight.copy_(one.output.weight[:, queries].clone())


def _gauge(model: Any, _layer: int) -> None:
    """W_Q A and W_K A⁻ᵀ; under RoPE an A that turns each pair of coordinates and stretches it."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    group = config.num_attention_heads // kv_heads
    for one in layers(model):
        for head in range(kv_heads):
            size = len(_rows(model, [head]))
            change = _turn(size, generator) if hasattr(model.config, "rope_parameters") else _mixture(size, generator)
            for query in range(head * group, (head + 1) * group):
                _apply(one.query, _rows(model, [query]), change)
            _apply(one.key, _rows(model, [head]), torch.linalg.inv(change).T)


def _mixture(size: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return torch.eye(size, dtype=torch.float64) + noise / size**0.5 / 2


def _turn(size: int, generator: torch.Generator) -> Tensor:
    angles, lengths = torch.rand(2, size // 2, generator=generator, dtype=torch.float64)
    cos, sin = ((lengths + 0.5) * part for part in ((6 * angles).cos(), (6 * angles).sin()))
    return torch.cat([torch.cat([cos.diag(), -sin.diag()], 1), torch.cat([sin.diag(), cos.diag()], 1)])


def _apply(part: Linear, rows: Tensor, change: Tensor) -> None:
    part.weight[rows] = (change @ part.weight[rows].double()).to(part.weight.dtype)
    if part.bias is not None:
        part.bias[rows] = (change @ part.bias[rows].double()).to(part.bias.dtype)


CHANGES: dict[str, Callable[[Any, int], None]] = {
    "W_K shuffled": _shuffled,
    "head zeroed": _zeroed,
    "3 bits": _three_bits,
    "gain doubled": _gain,
    "mask leaks": _leaking,
    "RoPE base": _other_base,
    "bf16": _bf16,
    "reordered": _reordered,
    "gauge": _gauge,
}


def plant(model: Any, changes: Mapping[str, int]) -> Any:
    """The model with these changes, each at its layer; RoPE's base, rounding and gauge are of all layers."""
    with torch.no_grad():
        for what, layer in changes.items():
            CHANGES[what](model, layer)
    return model
