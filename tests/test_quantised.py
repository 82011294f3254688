"""Tests that codes are read as the weights that they stand for, method by method, and refused where they can't be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hostile import edited, refused, stored, weights

import attnlens
from attnlens.errors import ModelError
from attnlens.models import loading
from attnlens.report.report import Report

Tensors = dict[str, torch.Tensor]
HIDDEN, GROUP = 48, 16


def _in_blocks(weight: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float8 codes, a scale for each block (those at the edges are smaller), and what they stand for."""
    rows, columns = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
    scale, codes, plain = torch.zeros(rows, columns), torch.zeros_like(weight), torch.zeros_like(weight)
    for i in range(rows):
        for j in range(columns):
            place = slice(i * height, i * height + height), slice(j * width, j * width + width)
            scale[i, j] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scale[i, j]).to(torch.float8_e4m3fn).float()
            plain[place] = codes[place] * scale[i, j]
    return codes.to(torch.float8_e4m3fn), scale, plain


def fp8_blocks(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale, plain = _in_blocks(weight, 20, 20)
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}, plain


def fp8_tensor(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale, plain = _in_blocks(weight, *weight.shape)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale.reshape(())}, plain


def fp8_rows(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale, plain = _in_blocks(weight, 1, weight.shape[1])
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale}, plain


def _packed(codes: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Codes in words of 32 bits along the rows, one by one, the lowest bits first."""
    count = 32 // bits
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // count), dtype=torch.int64)
    for column in range(codes.shape[1]):
        place = order[column % count] if order else column % count
        words[:, column // count] |= codes[:, column].long() << (bits * place)
    return words.to(torch.int32)  # the highest bit becomes the sign


def _grouped(weight: torch.Tensor, bits: int, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes, zeros and scales of each row's groups of inputs, and what they stand for; all with a row an output."""
    groups = int(index.max()) + 1
    low, high = (torch.stack([of(weight[:, index == g]) for g in range(groups)], 1) for of in (_least, _most))
    scale = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scale).round().clamp(1, 2**bits - 1)
    codes = (weight / scale[:, index] + zeros[:, index]).round().clamp(0, 2**bits - 1)
    return codes, zeros, scale, (codes - zeros[:, index]) * scale[:, index]


def _least(part: torch.Tensor) -> torch.Tensor:
    return part.min(1).values.clamp(max=-1e-3)


def _most(part: torch.Tensor) -> torch.Tensor:
    return part.max(1).values.clamp(min=1e-3)


def gptq(name: str, weight: torch.Tensor, bits: int = 4) -> tuple[Tensors, torch.Tensor]:
    index = torch.arange(weight.shape[1]).flip(0) // GROUP  # as act-order leaves it
    codes, zeros, scale, plain = _grouped(weight, bits, index)
    tensors = {"qweight": _packed(codes, bits).T, "qzeros": _packed(zeros.T - 1, bits), "scales": scale.T.half()}
    tensors |= {"g_idx": index.int()}
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in tensors.items()}, plain


def awq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scale, plain = _grouped(weight, 4, torch.arange(weight.shape[1]) // GROUP)
    order = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight columns stands in its word
    tensors = {"qweight": _packed(codes.T, 4, order), "qzeros": _packed(zeros.T, 4, order), "scales": scale.T.half()}
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in tensors.items()}, plain


def pack_quantized(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scale, plain = _grouped(weight, 4, torch.arange(weight.shape[1]) // GROUP)
    tensors = {"packed": _packed(codes, 4), "zero_point": _packed(zeros.T, 4).T, "scale": scale}
    tensors |= {"shape": torch.tensor(weight.shape)}
    return {f"{name}.weight_{part}": tensor.contiguous() for part, tensor in tensors.items()}, plain


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
    """nf4 whose largest of each block are codes too; the values of a code are of no matter, since they are stored."""
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


def _groups(bits: int) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits}}}


METHODS: dict[str, tuple[Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    "fp8 in blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [20, 20]}),
    "fp8 per tensor": (fp8_tensor, {"quant_method": "fp8"}),
    "fp8 by rows": (fp8_rows, {"quant_method": "fbgemm_fp8"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "gptq, eight bits": (lambda name, weight: gptq(name, weight, 8), {"quant_method": "gptq", "bits": 8}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "packed": (
        pack_quantized,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": _groups(4)},
    ),
    "int8": (
        int_quantized,
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": _groups(8)},
    ),
    "float8": (
        fp8_rows,
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": _groups(8)},
    ),
    "LLM.int8": (eight_bits, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": (four_bits, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}


def saved(place: Path) -> Tensors:
    """A tiny Llama, and its tensors."""
    torch.manual_seed(3)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64))
    for projection in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj):
        projection.weight.data *= 20
    model.save_pretrained(place)
    return weights(place)


def quantised(place: Path, method: str) -> Tensors:
    """A tiny Llama whose projections are codes of that method, and what all its tensors stand for."""
    encode, settings = METHODS[method]
    tensors = saved(place)
    plain = dict(tensors)
    for name in [name.removesuffix(".weight") for name in tensors if "proj" in name]:
        codes, plain[f"{name}.weight"] = encode(name, tensors.pop(f"{name}.weight"))
        tensors |= codes
    stored(place, tensors)
    edited(place / "config.json", quantization_config=settings)
    return plain


@pytest.mark.parametrize("method", METHODS)
def test_codes_are_read_as_their_decoded_twin(method: str, tmp_path: Path) -> None:
    plain = quantised(tmp_path / "codes", method)
    loaded = loading.load(tmp_path / "codes")
    assert (loaded.missing_keys, loaded.unused_keys) == ((), ())
    assert loaded.info.quantised == METHODS[method][1]["quant_method"]
    assert len(plain) > 8
    for name, parameter in loaded.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.allclose(parameter, plain[name], rtol=1e-6, atol=1e-7 * float(plain[name].abs().max())), name
    saved(tmp_path / "twin")
    stored(tmp_path / "twin", plain)
    codes, twin = (attnlens.inspect(tmp_path / one, source="weights") for one in ("codes", "twin"))
    assert alike(codes, twin, 1e-4, 1e-5)
    assert alike(attnlens.inspect(tmp_path / "codes", source="weights", from_files=True), codes, 1e-6, 1e-9)


def alike(one: Report, other: Report, relative: float, absolute: float) -> bool:
    """Whether all values of two reports are the same, up to that; there are some of each head."""
    assert one.model.quantised is not None
    pairs = [
        (mine.measures[name].value, pytest.approx(theirs.measures[name].value, rel=relative, abs=absolute))
        for mine, theirs in zip(one.heads, other.heads, strict=True)
        for name in theirs.measures
    ]
    return len(pairs) >= 4 * 8 and all(mine == theirs for mine, theirs in pairs)


@pytest.mark.parametrize("method", METHODS)
def test_the_codes_of_queries_and_keys_are_read_and_no_others(method: str, tmp_path: Path) -> None:
    quantised(tmp_path, method)
    tensors = weights(tmp_path)
    for name in tensors:
        if name.startswith("model.layers.0.mlp") and not name.endswith(("_shape", "_packed", "state", "nf4")):
            tensors[name] = torch.full_like(tensors[name], 3)
    loaded = loading.load(tmp_path, from_files=True)
    before = attnlens.inspect(loaded, source="weights")
    of_site = {name: part.nbytes for name, part in tensors.items() if f"{Q[:-6]}" in name}
    read = {name: size for name, size in of_site.items() if "v_proj" not in name and "o_proj" not in name}
    assert loaded.deferred.bytes_read == pytest.approx(sum(read.values()), rel=0.05)
    assert sum(read.values()) < 0.7 * sum(of_site.values()), "a control: the site has more"
    stored(tmp_path, tensors)
    assert alike(attnlens.inspect(tmp_path, source="weights", from_files=True), before, 1e-9, 0)


Q = "model.layers.0.self_attn.q_proj"
FAULTS: dict[str, tuple[str, Callable[[Tensors], Any], tuple[str, ...]]] = {
    "a scale of another grid": (
        "fp8 in blocks",
        lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(5, 5)}),
        (Q, "do not divide"),
    ),
    "codes without a scale": ("gptq", lambda t: t.pop(f"{Q}.scales"), (Q, "scales is missing")),
    "codes alone": (
        "gptq",
        lambda t: [t.pop(f"{Q}.{part}") for part in ("scales", "qzeros", "g_idx")],
        (f"{Q}.qweight",),
    ),
    "groups beyond the scales": (
        "gptq",
        lambda t: t.update({f"{Q}.g_idx": torch.full((HIDDEN,), 9, dtype=torch.int32)}),
        (Q, "groups of inputs"),
    ),
    "awq without zeros": ("awq", lambda t: t.pop(f"{Q}.qzeros"), (Q, "qzeros is missing")),
    "another shape": (
        "packed",
        lambda t: t.update({f"{Q}.weight_shape": torch.tensor([HIDDEN, 2**40])}),
        (Q, "contain 1099511627776 codes"),
    ),
    "another state": (
        "nf4",
        lambda t: t.update({f"{Q}.weight.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)}),
        (Q, "a valid description of its codes is missing"),
    ),
    "no values": ("nf4", lambda t: t.pop(f"{Q}.weight.quant_map"), (Q, "quant_map is missing")),
    "another order": (
        "LLM.int8",
        lambda t: t.update({f"{Q}.weight_format": torch.tensor(2, dtype=torch.uint8)}),
        (Q, "stored row by row"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_codes_that_can_not_be_decoded_are_refused(fault: str, tmp_path: Path) -> None:
    method, spoil, words = FAULTS[fault]
    quantised(tmp_path, method)
    tensors = weights(tmp_path)
    spoil(tensors)
    stored(tmp_path, tensors)
    refused(ModelError, lambda: loading.load(tmp_path), *words)
    refused(ModelError, lambda: attnlens.inspect(tmp_path, source="weights", from_files=True), *words[:1])


@pytest.mark.parametrize("method", METHODS)
def test_codes_of_which_the_config_says_nothing_are_refused(method: str, tmp_path: Path) -> None:
    quantised(tmp_path, method)
    edited(tmp_path / "config.json", quantization_config=None)
    refused(ModelError, lambda: loading.load(tmp_path), "codes", "does not describe the quantisation", "unquantised")


def test_a_scale_beside_plain_weights_is_not_left_out(tmp_path: Path) -> None:
    stored(tmp_path, saved(tmp_path) | {f"{Q}.weight_scale": torch.tensor(2.0)})
    refused(ModelError, lambda: loading.load(tmp_path), f"{Q}.weight_scale")


def test_scales_of_activations_are_named(tmp_path: Path) -> None:
    quantised(tmp_path, "fp8 per tensor")
    stored(tmp_path, weights(tmp_path) | {f"{Q}.input_scale": torch.tensor(2.0)})
    assert loading.load(tmp_path).info.unexpected == [f"{Q}.input_scale"]


# --- settings that contradict the tensors ---------------------------------------------------------------------------


def symmetric_gptq(place: Path, stored_zero: int, **settings: Any) -> Tensors:
    """A tiny Llama whose projections are codes of GPTQ with the zero 8, stored as `stored_zero`, and its weights."""
    tensors = saved(place)
    plain = dict(tensors)
    for name in [name.removesuffix(".weight") for name in tensors if "proj" in name]:
        weight = tensors.pop(f"{name}.weight")
        groups = weight.reshape(weight.shape[0], -1, GROUP)
        scale = (groups.abs().amax(2) / 7).half().float()
        codes = (groups / scale[..., None] + 8).round().clamp(0, 15)
        plain[f"{name}.weight"] = ((codes - 8) * scale[..., None]).reshape(weight.shape)
        zeros = torch.full(scale.T.shape, stored_zero)
        parts = {
            "qweight": _packed(codes.reshape(weight.shape), 4).T,
            "qzeros": _packed(zeros, 4),
            "scales": scale.T.half(),
        }
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    stored(place, tensors)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True} | settings
    edited(place / "config.json", quantization_config=settings)
    return plain


@pytest.mark.parametrize(("zero", "form"), [(7, "gptq"), (8, "gptq_v2")])
def test_symmetric_gptq_is_read_in_both_formats(zero: int, form: str, tmp_path: Path) -> None:
    plain = symmetric_gptq(tmp_path, zero, checkpoint_format=form)
    for name, parameter in loading.load(tmp_path).model.named_parameters():
        assert torch.allclose(parameter, plain[name], rtol=1e-6, atol=1e-7), name


GPTQ_CONTRADICTIONS: dict[str, tuple[int, dict[str, Any], str]] = {
    "zeros stored as 8 in the first format": (8, {"checkpoint_format": "gptq"}, "sym"),
    "zeros stored as 7 in the second": (7, {"checkpoint_format": "gptq_v2"}, "sym"),
    "other bits": (7, {"bits": 8}, "bits"),
    "other groups": (7, {"group_size": 2 * GROUP}, "group_size"),
    "one group": (7, {"group_size": -1}, "group_size"),
}


def both_refused(place: Path, *words: str) -> None:
    """Assert that the model is refused with those words, loaded and read from its files."""
    refused(ModelError, lambda: loading.load(place), *words)
    refused(ModelError, lambda: attnlens.inspect(place, source="weights", from_files=True), *words)


def test_settings_that_hold_for_some_modules_alone_contradict_no_tensors(tmp_path: Path) -> None:
    plain = symmetric_gptq(tmp_path, 7, bits=8, group_size=32, dynamic={"+:.*": {"bits": 4, "group_size": GROUP}})
    loaded = dict(loading.load(tmp_path).model.named_parameters())
    assert torch.allclose(loaded[f"{Q}.weight"], plain[f"{Q}.weight"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", GPTQ_CONTRADICTIONS)
def test_gptq_whose_settings_contradict_its_tensors_is_refused(case: str, tmp_path: Path) -> None:
    zero, settings, word = GPTQ_CONTRADICTIONS[case]
    symmetric_gptq(tmp_path, zero, **settings)
    both_refused(tmp_path, "proj", word)


def large_fp8(place: Path, side: int, **settings: Any) -> Tensors:
    """A Llama of width 192 whose projections are float8 with a scale for each block of that side, and its weights."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4}
    tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=64)).save_pretrained(place)
    tensors = weights(place)
    plain = dict(tensors)
    for name in [name.removesuffix(".weight") for name in tensors if "proj" in name]:
        codes, scale, plain[f"{name}.weight"] = _in_blocks(tensors.pop(f"{name}.weight"), side, side)
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}
    stored(place, tensors)
    edited(place / "config.json", quantization_config={"quant_method": "fp8"} | settings)
    return plain


def test_blocks_of_which_the_config_says_nothing_have_the_usual_side(tmp_path: Path) -> None:
    plain = large_fp8(tmp_path, 128)
    for name, parameter in loading.load(tmp_path).model.named_parameters():
        assert torch.allclose(parameter, plain[name], rtol=1e-6, atol=1e-7), name
    loaded, parts = (attnlens.inspect(tmp_path, source="weights", from_files=way) for way in (False, True))
    assert alike(parts, loaded, 1e-6, 1e-9)


@pytest.mark.parametrize(("side", "settings"), [(64, {}), (48, {"weight_block_size": [64, 64]})])
def test_blocks_that_do_not_fit_their_scales_are_refused(side: int, settings: dict[str, Any], tmp_path: Path) -> None:
    large_fp8(tmp_path, side, **settings)
    both_refused(tmp_path, "proj", "scales do not")


OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "one scale instead of blocks": ("fp8 per tensor", {"weight_block_size": [20, 20]}, "weight_block_size"),
    "awq of other groups": ("awq", {"group_size": 2 * GROUP}, "group_size"),
    "awq without zeros": ("awq", {"zero_point": False}, "zero_point"),
    "codes of eight bits": ("nf4", {"load_in_8bit": True, "load_in_4bit": False}, "load_in_8bit"),
    "codes of four bits": ("LLM.int8", {"load_in_8bit": False, "load_in_4bit": True}, "load_in_4bit"),
    "another table": ("nf4", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type"),
    "no zeros": (
        "packed",
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": True}}}},
        "symmetric",
    ),
    "groups of another size": (
        "packed",
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}},
        "group_size",
    ),
    "int8 of four bits": ("int8", {"config_groups": _groups(4)}, "num_bits"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_codes_whose_settings_contradict_their_tensors_are_refused_by_name(case: str, tmp_path: Path) -> None:
    method, settings, word = OTHERS[case]
    quantised(tmp_path, method)
    edited(tmp_path / "config.json", quantization_config=METHODS[method][1] | settings)
    both_refused(tmp_path, "proj", word)
