"""Tests that codes are read as the weights that they stand for, method by method, and refused where they can't be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hostile import edited, refused, stored, weights
from quantised import GROUP, HIDDEN, METHODS, Tensors, _groups, _in_blocks, _packed, quantised, saved

import attnlens
from attnlens.errors import ModelError
from attnlens.models import loading
from attnlens.report.report import Report


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
