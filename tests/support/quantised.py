"""Tiny Llamas whose projections are stored as codes, by method of quantisation.

An encoder returns the stored tensors of a weight, by the suffixes of their names, and the decoded weight.
"""

import json
from functools import cache, partial

import torch
import transformers as tf
from hostile import edited, stored, weights

HIDDEN, GROUP = 48, 16


def float8(weight, scale_name, height=None, width=None):
    """Encode as float8 with a scale for each block (smaller at the edges); by default, a block is the whole matrix."""
    height, width = height or weight.shape[0], width or weight.shape[1]
    rows, columns = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
    padded = torch.zeros(rows * height, columns * width)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scale = padded.reshape(rows, height, columns, width).abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {".weight": codes, scale_name: scale.reshape(()) if scale.numel() == 1 else scale}, codes.float() * spread


def packed(codes, bits, order=()):
    """Pack codes into words of 32 bits along the rows, the lowest bits first."""
    count = 32 // bits
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // count), dtype=torch.int64)
    for column in range(codes.shape[1]):
        place = order[column % count] if order else column % count
        words[:, column // count] |= codes[:, column].long() << (bits * place)
    return words.to(torch.int32)  # the highest bit becomes the sign


def _grouped(weight, bits=4, index=None):
    """Return codes, zeros and scales of each row's groups of inputs, one row per output, and the decoded weight."""
    index = torch.arange(weight.shape[1]) // GROUP if index is None else index
    groups = [weight[:, index == group] for group in range(int(index.max()) + 1)]
    low = torch.stack([group.min(1).values for group in groups], 1).clamp(max=-1e-3)
    high = torch.stack([group.max(1).values for group in groups], 1).clamp(min=1e-3)
    scale = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scale).round().clamp(1, 2**bits - 1)
    zeros[0, 0] = 0  # GPTQ, which stores zeros less 1, wraps it to 2^bits − 1
    codes = (weight / scale[:, index] + zeros[:, index]).round().clamp(0, 2**bits - 1)
    return codes, zeros, scale, (codes - zeros[:, index]) * scale[:, index]


def gptq(weight, bits=4):
    index = torch.arange(weight.shape[1]).flip(0) // GROUP  # as act-order leaves it
    codes, zeros, scale, plain = _grouped(weight, bits, index)
    tensors = {
        ".qweight": packed(codes, bits).T,
        ".qzeros": packed((zeros.T - 1) % 2**bits, bits),
        ".scales": scale.T.half(),
    }
    return tensors | {".g_idx": index.int()}, plain


def symmetric(weight, zero):
    """Encode as GPTQ with the zero 8, stored as `zero`."""
    parts = weight.reshape(len(weight), -1, GROUP)
    scale = (parts.abs().amax(2) / 7).half().float()
    codes = (parts / scale[..., None] + 8).round().clamp(0, 15)
    tensors = {".qweight": packed(codes.flatten(1), 4).T, ".scales": scale.T.half()}
    tensors |= {".qzeros": packed(torch.full(scale.T.shape, zero), 4)}
    return tensors, ((codes - 8) * scale[..., None]).flatten(1)


def awq(weight):
    codes, zeros, scale, plain = _grouped(weight)
    pack = partial(packed, bits=4, order=(0, 4, 1, 5, 2, 6, 3, 7))  # where each of eight columns stands in its word
    return {".qweight": pack(codes.T), ".qzeros": pack(zeros.T), ".scales": scale.T.half()}, plain


def pack_quantized(weight):
    codes, zeros, scale, plain = _grouped(weight)
    tensors = {".weight_packed": packed(codes, 4), ".weight_zero_point": packed(zeros.T, 4).T, ".weight_scale": scale}
    return tensors | {".weight_shape": torch.tensor(weight.shape)}, plain


def int_quantized(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round()
    return {".weight": codes.to(torch.int8), ".weight_scale": scale}, codes * scale


def eight_bits(weight):
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round()
    tensors = {".weight": codes.to(torch.int8), ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes * largest[:, None] / 127


def four_bits(weight):
    """Encode as nf4 with coded absmax; any table of values will do, because it is stored."""
    values, outer, side = torch.linspace(-1, 1, 16) ** 3, torch.linspace(-1, 1, 256), 12
    blocks = weight.reshape(-1, 32)
    largest = blocks.abs().amax(1)
    offset = float(largest.mean())
    sizes = (largest - offset).abs().reshape(-1, side).amax(1).repeat_interleave(side)
    of_largest = ((largest - offset) / sizes)[:, None].sub(outer).abs().argmin(-1)
    decoded = outer[of_largest] * sizes + offset
    codes = (blocks / decoded[:, None])[..., None].sub(values).abs().argmin(-1)
    pairs = codes.reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": list(weight.shape)}
    state |= {"nested_blocksize": side, "nested_dtype": "float32", "nested_offset": offset}
    tensors = {
        ".weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
        ".weight.absmax": of_largest.to(torch.uint8),
        ".weight.quant_map": values,
        ".weight.nested_absmax": sizes[::side].clone(),
        ".weight.nested_quant_map": outer,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
    }
    return tensors, (values[codes] * decoded[:, None]).reshape(weight.shape)


def groups(bits, **more):
    """Return compressed-tensors' settings of all layers."""
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits} | more}}}


BLOCKS, ROWS = partial(float8, scale_name=".weight_scale_inv"), partial(float8, scale_name=".weight_scale", height=1)
COMPRESSED, FOUR = {"quant_method": "compressed-tensors"}, {"bits": 4, "group_size": GROUP}
METHODS = {
    "fp8 in blocks": (partial(BLOCKS, height=20, width=20), {"quant_method": "fp8", "weight_block_size": [20, 20]}),
    "fp8 per tensor": (partial(float8, scale_name=".weight_scale"), {"quant_method": "fp8"}),
    "fp8 by rows": (ROWS, {"quant_method": "fbgemm_fp8"}),
    "gptq": (gptq, {"quant_method": "gptq", "desc_act": True} | FOUR),
    "gptq, eight bits": (partial(gptq, bits=8), {"quant_method": "gptq", "bits": 8}),
    "awq": (awq, {"quant_method": "awq", "version": "gemm"} | FOUR),
    "packed": (pack_quantized, COMPRESSED | {"format": "pack-quantized"} | groups(4)),
    "int8": (int_quantized, COMPRESSED | {"format": "int-quantized"} | groups(8)),
    "float8": (ROWS, COMPRESSED | {"format": "float-quantized"} | groups(8)),
    "LLM.int8": (eight_bits, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": (four_bits, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}
SYMMETRIC = {"quant_method": "gptq", "sym": True} | FOUR
VARIANTS = {
    **{f"zeros stored as {zero}": (partial(symmetric, zero=zero), SYMMETRIC) for zero in (7, 8)},
    **{f"blocks of {n}": (partial(BLOCKS, height=n, width=n), {"quant_method": "fp8"}) for n in (64, 128)},
}
"""Methods with unusual settings."""


@cache
def _llama(width):
    torch.manual_seed(3)
    sizes = {"hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64))
    for projection in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj):
        projection.weight.data *= 20
    return model


@cache
def _encoded(encode, width):
    """Return the tensors of the Llama with its projections as codes, and its decoded tensors."""
    codes, plain = ({name: part.detach() for name, part in _llama(width).named_parameters()} for _ in range(2))
    for name in [name.removesuffix(".weight") for name in plain if "proj" in name]:
        parts, plain[f"{name}.weight"] = encode(codes.pop(f"{name}.weight"))
        codes |= {name + end: tensor.contiguous() for end, tensor in parts.items()}
    return codes, plain


def saved(place):
    _llama(HIDDEN).save_pretrained(place)
    return weights(place)


def quantised(place, method, width=HIDDEN, **changes):
    """Save a tiny Llama whose projections are codes of that method, and return its decoded tensors."""
    encode, settings = (METHODS | VARIANTS)[method]
    codes, plain = _encoded(encode, width)
    _llama(width).save_pretrained(place)
    stored(place, codes)
    edited(place / "config.json", quantization_config=settings | changes)
    return dict(plain)
