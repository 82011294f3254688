"""Plants damage and harmless changes in models with the layouts of GPT-2, BERT and LLaMA."""

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


def layers(model: Any) -> list[SimpleNamespace]:
    """Return each layer's block, attention module, norm next to the attention, and projections."""
    kind = model.config.model_type
    if kind == "gpt2":
        return [_gpt2(block) for block in model.transformer.h]
    if kind == "bert":
        return [_bert(block) for block in model.base_model.encoder.layer]
    return [_llama(block) for block in model.model.layers]


def _layer(block: Any, attention: Any, norm: Any, *projections: Linear) -> SimpleNamespace:
    query, key, value, output = projections
    fields = {"query": query, "key": key, "value": value, "output": output}
    return SimpleNamespace(block=block, attention=attention, norm=norm, **fields)


def _bert(block: Any) -> SimpleNamespace:
    own, behind = block.attention.self, block.attention.output
    return _layer(block, own, behind.LayerNorm, *map(_linear, (own.query, own.key, own.value, behind.dense)))


def _llama(block: Any) -> SimpleNamespace:
    own = block.self_attn
    return _layer(block, own, block.input_layernorm, *map(_linear, (own.q_proj, own.k_proj, own.v_proj, own.o_proj)))


def _linear(module: Any) -> Linear:
    return module.weight.data, None if module.bias is None else module.bias.data


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


def _shuffle(model: Any, layer: int) -> None:
    (weight, _), rows = layers(model)[layer].key, _rows(model, [HEAD])
    weight[rows] = weight[rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]]


def _zero(model: Any, layer: int) -> None:
    for part in _tensors(layers(model)[layer].key):
        part[_rows(model, [HEAD])] = 0


def _quantise(model: Any, layer: int) -> None:
    for weight in layers(model)[layer].block.parameters():
        if weight.dim() > 1:
            step = weight.abs().max() / 4
            weight.copy_((weight / step).round() * step)


def _double_gain(model: Any, layer: int) -> None:
    layers(model)[layer].norm.weight *= 2


def _leak(model: Any, layer: int) -> None:
    layers(model)[layer].attention.is_causal = False


def _change_base(model: Any, _layer: int) -> None:
    model.model.rotary_emb.inv_freq *= 0.5


def _round(model: Any, _layer: int) -> None:
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())


def _reorder(model: Any, layer: int) -> None:
    """Move key heads one place on, each with its query heads, values and output columns."""
    (kv_heads, group), own = _groups(model), layers(model)[layer]
    order = torch.arange(kv_heads).roll(1).tolist()
    keys = _rows(model, order)
    queries = _rows(model, [head * group + place for head in order for place in range(group)])
    for projection, rows in ((own.query, queries), (own.key, keys), (own.value, keys)):
        for part in _tensors(projection):
            part.copy_(part[rows].clone())
    own.output[0].copy_(own.output[0][:, queries].clone())


def _change_gauge(model: Any, _layer: int) -> None:
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


CHANGES = {
    **{"W_K shuffled": _shuffle, "head zeroed": _zero, "3 bits": _quantise, "gain doubled": _double_gain},
    **{"mask leaks": _leak, "RoPE base": _change_base, "bf16": _round, "reordered": _reorder, "gauge": _change_gauge},
}


def plant(model: Any, changes: Mapping[str, int]) -> Any:
    """Return the model with each change at its layer; RoPE's base, rounding and the gauge change in all layers."""
    with torch.no_grad():
        for name, layer in changes.items():
            CHANGES[name](model, layer)
    return model
