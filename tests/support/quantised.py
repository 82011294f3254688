"""Tiny Llamas whose projections are stored as codes, by method of quantisation."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from hostile import edited, stored, weights

Tensors = dict[str, torch.Tensor]
Encoder = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
HIDDEN, GROUP = 48, 16


def float8(scale_name: str, blocks: Callable[[torch.Tensor], tuple[int, int]]) -> Encoder:
    """Encode as float8 with a scale for each block (smaller at the edges); `blocks` returns their height and width."""

    def encode(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        sides = blocks(weight)
        (rows, height), (columns, width) = ((-(-n // side), side) for n, side in zip(weight.shape, sides, strict=True))
        padded = torch.zeros(rows * height, columns * width)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scale = padded.reshape(rows, height, columns, width).abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)[: weight.shape[0], : weight.shape[1]]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        scale = scale.reshape(()) if scale.numel() == 1 else scale
        return {f"{name}.weight": codes, f"{name}.{scale_name}": scale}, codes.float() * spread

    return encode


def packed(codes: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack codes into words of 32 bits along the rows, the lowest bits first."""
    count = 32 // bits
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // count), dtype=torch.int64)
    for column in range(codes.shape[1]):
        place = order[column % count] if order else column % count
        words[:, column // count] |= codes[:, column].long() << (bits * place)
    return words.to(torch.int32)  # the highest bit becomes the sign


def _grouped(weight: torch.Tensor, bits: int, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return codes, zeros and scales of each row's groups of inputs, one row per output, and the decoded weight."""
    groups = [weight[:, index == group] for group in range(int(index.max()) + 1)]
    low = torch.stack([group.min(1).values for group in groups], 1).clamp(max=-1e-3)
    high = torch.stack([group.max(1).values for group in groups], 1).clamp(min=1e-3)
    scale = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scale).round().clamp(1, 2**bits - 1)
    codes = (weight / scale[:, index] + zeros[:, index]).round().clamp(0, 2**bits - 1)
    return codes, zeros, scale, (codes - zeros[:, index]) * scale[:, index]


def gptq(name: str, weight: torch.Tensor, bits: int = 4) -> tuple[Tensors, torch.Tensor]:
    index = torch.arange(weight.shape[1]).flip(0) // GROUP  # as act-order leaves it
    codes, zeros, scale, plain = _grouped(weight, bits, index)
    tensors = {"qweight": packed(codes, bits).T, "qzeros": packed(zeros.T - 1, bits), "scales": scale.T.half()}
    tensors |= {"g_idx": index.int()}
    return {f"{name}.{part}": tensor for part, tensor in tensors.items()}, plain


def awq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scale, plain = _grouped(weight, 4, torch.arange(weight.shape[1]) // GROUP)
    order = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight columns stands in its word
    tensors = {"qweight": packed(codes.T, 4, order), "qzeros": packed(zeros.T, 4, order), "scales": scale.T.half()}
    return {f"{name}.{part}": tensor for part, tensor in tensors.items()}, plain


def pack_quantized(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scale, plain = _grouped(weight, 4, torch.arange(weight.shape[1]) // GROUP)
    tensors = {"packed": packed(codes, 4), "zero_point": packed(zeros.T, 4).T, "scale": scale}
    tensors |= {"shape": torch.tensor(weight.shape)}
    return {f"{name}.weight_{part}": tensor for part, tensor in tensors.items()}, plain


def int_quantized(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round()
    return {f"{name}.weight": codes.to(torch.int8), f"{name}.weight_scale": scale}, codes * scale


def eight_bits(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round()
    tensors = {f"{name}.weight": codes.to(torch.int8), f"{name}.SCB": largest}
    return tensors | {f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8)}, codes * largest[:, None] / 127


def four_bits(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Encode as nf4 with coded absmax; any table of values serves, since it is stored."""
    values, outer = torch.linspace(-1, 1, 16) ** 3, torch.linspace(-1, 1, 256)
    blocks = weight.reshape(-1, 32)
    largest = blocks.abs().amax(1)
    offset, side = float(largest.mean()), 12
    sizes = (largest - offset).abs().reshape(-1, side).amax(1)
    of_largest = (
        ((largest - offset).reshape(-1, side) / sizes[:, None])[..., None].sub(outer).abs().argmin(-1).flatten()
    )
    decoded = outer[of_largest] * sizes.repeat_interleave(side) + offset
    codes = (blocks / decoded[:, None])[..., None].sub(values).abs().argmin(-1)
    pairs = codes.flatten().reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": list(weight.shape)}
    state |= {"nested_blocksize": side, "nested_dtype": "float32", "nested_offset": offset}
    tensors = {
        "": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
        ".absmax": of_largest.to(torch.uint8),
        ".quant_map": values,
        ".nested_absmax": sizes,
        ".nested_quant_map": outer,
        ".quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    plain = (values[codes] * decoded[:, None]).reshape(weight.shape)
    return {f"{name}.weight{part}": tensor for part, tensor in tensors.items()}, plain


def groups(bits: int, **more: Any) -> dict[str, Any]:
    """Return compressed-tensors' settings of all layers."""
    return {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits} | more}}


COMPRESSED = {"quant_method": "compressed-tensors"}
METHODS: dict[str, tuple[Encoder, dict[str, Any]]] = {
    "fp8 in blocks": (
        float8("weight_scale_inv", lambda _: (20, 20)),
        {"quant_method": "fp8", "weight_block_size": [20, 20]},
    ),
    "fp8 per tensor": (float8("weight_scale", lambda weight: tuple(weight.shape)), {"quant_method": "fp8"}),
    "fp8 by rows": (float8("weight_scale", lambda weight: (1, weight.shape[1])), {"quant_method": "fbgemm_fp8"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "gptq, eight bits": (partial(gptq, bits=8), {"quant_method": "gptq", "bits": 8}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "packed": (pack_quantized, COMPRESSED | {"format": "pack-quantized", "config_groups": groups(4)}),
    "int8": (int_quantized, COMPRESSED | {"format": "int-quantized", "config_groups": groups(8)}),
    "float8": (
        float8("weight_scale", lambda weight: (1, weight.shape[1])),
        COMPRESSED | {"format": "float-quantized", "config_groups": groups(8)},
    ),
    "LLM.int8": (eight_bits, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": (four_bits, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}


@cache
def _llama() -> tf.LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64))
    for projection in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj):
        projection.weight.data *= 20
    return model


@cache
def _encoded(encode: Encoder) -> tuple[Tensors, Tensors]:
    """Return the tensors of the Llama with its projections as codes, and what they decode to."""
    return encoded({name: part.detach() for name, part in _llama().named_parameters()}, encode)


def encoded(tensors: Tensors, encode: Encoder) -> tuple[Tensors, Tensors]:
    """Return a model's tensors with its projections as codes, and its decoded tensors."""
    plain, codes = dict(tensors), dict(tensors)
    for name in [name.removesuffix(".weight") for name in tensors if "proj" in name]:
        parts, plain[f"{name}.weight"] = encode(name, codes.pop(f"{name}.weight"))
        codes |= {part: tensor.contiguous() for part, tensor in parts.items()}
    return codes, plain


def saved(place: Path) -> Tensors:
    """Save a tiny Llama, and return its tensors."""
    _llama().save_pretrained(place)
    return weights(place)


def quantised(place: Path, method: str, **changes: Any) -> Tensors:
    """Save a tiny Llama whose projections are codes of that method, and return its decoded tensors."""
    encode, settings = METHODS[method]
    return save_codes(place, encode, settings | changes)


def save_codes(place: Path, encode: Encoder, settings: dict[str, Any]) -> Tensors:
    """Save a tiny Llama with its projections as these codes, and return its decoded tensors."""
    _llama().save_pretrained(place)
    codes, plain = _encoded(encode)
    stored(place, codes)
    edited(place / "config.json", quantization_config=settings)
    return dict(plain)
