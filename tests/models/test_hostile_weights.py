"""Tests that measured numbers are those of the files: no codes, no adapter left out, no tensor unseen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers as tf
from hostile import edited, refused, stored, weights
from program import attnlens

from attnlens import inspect
from attnlens.errors import ModelError
from attnlens.models import loading
from attnlens.report.report import read_report


def _codes(folder: Path, kind: torch.dtype, names: tuple[str, ...] = ("c_attn.weight", "c_fc.weight")) -> None:
    tensors = weights(folder)
    for name in [name for name in tensors if name.endswith(names)]:
        scale = tensors[name].abs().max() / 127
        tensors[name] = (tensors[name] / scale).round().to(kind)
        tensors[f"{name}_scale"] = scale
    stored(folder, tensors)


CODES = (torch.int8, torch.uint8, torch.bool, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("kind", CODES, ids=str)
def test_codes_are_never_read_as_weights(kind: torch.dtype, folder: Path) -> None:
    _codes(folder, kind)
    refused(ModelError, lambda: loading.load(str(folder)), "transformer.h.0.attn.c_attn.weight and 3 more", "codes")


def test_one_tensor_of_codes_is_named_in_a_pickle_too(folder: Path) -> None:
    _codes(folder, torch.int8, ("h.1.attn.c_attn.bias",))
    torch.save(weights(folder), folder / "pytorch_model.bin")
    refused(ModelError, lambda: loading.load(str(folder)), "c_attn.bias as I8")
    (folder / "model.safetensors").unlink()
    refused(ModelError, lambda: loading.load(str(folder), allow_pickle=True), "c_attn.bias as int8")


def test_masks_and_positions_of_old_checkpoints_are_no_codes(folder: Path) -> None:
    stored(folder, weights(folder) | {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool)})
    assert loading.load(str(folder)).unused_keys == ()
    bert = families.build("bert")
    bert.save_pretrained(folder)
    stored(folder, weights(folder) | {"bert.embeddings.position_ids": torch.arange(64)[None]})
    assert loading.load(str(folder)).missing_keys == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "nosuch"}, ("quantised with nosuch", "GGUF")),
        ({"bits": 4}, ("quantised with None", "GGUF")),
        ("int8", ("quantised with int8", "GGUF")),
        ({"quant_method": ["fp8"]}, ("quantised with ['fp8']", "GGUF")),
        *(
            ({"quant_method": method}, (f"quantised with {method}", "GGUF"))
            for method in ("torchao", "quanto", "hqq", "aqlm", "quark", "mxfp8")
        ),
        *(
            ({"quant_method": method}, (f"quantised with {method}", "but the files contain none"))
            for method in ("gptq", "awq", "bitsandbytes", "fp8")
        ),
        ({"load_in_8bit": True}, ("quantised with bitsandbytes",)),
        ({"load_in_4bit": True}, ("quantised with bitsandbytes",)),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, ("nvfp4", "is not supported")),
        ({"quant_method": "awq", "version": "gemv"}, ("gemv", "is not supported")),
    ],
    ids=str,
)
def test_quantised_checkpoints_are_refused_by_their_method(settings: Any, words: tuple[str, ...], folder: Path) -> None:
    edited(folder / "config.json", quantization_config=settings)
    refused(ModelError, lambda: loading.load(str(folder)), *words)
    edited(folder / "config.json", quantization_config=None, vision_config={"quantization_config": settings})
    refused(ModelError, lambda: loading.load(str(folder)), "vision_config.quantization_config")


def _in_blocks(weight: torch.Tensor, side: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 codes of a weight, and the scale of each square of it."""
    height, width = weight.shape
    squares = weight.reshape(height // side, side, width // side, side)
    scale = squares.abs().amax((1, 3)) / 448
    return (squares / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn), scale


@pytest.fixture
def float8(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A tiny Llama in float8 with a scale for each square of a weight, and its weights before."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, vocab_size=64)).save_pretrained(tmp_path)
    before = weights(tmp_path)
    after = dict(before)
    for name in [name for name in before if "proj" in name]:
        after[name], after[f"{name}_scale_inv"] = _in_blocks(before[name])
    stored(tmp_path, after)
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    edited(tmp_path / "config.json", quantization_config=settings)
    return tmp_path, before


def test_float8_with_its_scales_is_decoded(float8: tuple[Path, dict[str, torch.Tensor]]) -> None:
    place, before = float8
    loaded = loading.load(str(place))
    assert (loaded.missing_keys, loaded.unused_keys) == ((), ())
    for name, parameter in loaded.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert (parameter - before[name]).abs().max() <= before[name].abs().max() / 16, name


@pytest.mark.parametrize("lacking", ["the scale", "the settings"])
def test_float8_that_can_not_be_decoded_is_refused(lacking: str, float8: tuple[Path, dict[str, torch.Tensor]]) -> None:
    place, _ = float8
    name = "model.layers.1.self_attn.q_proj.weight"
    if lacking == "the scale":
        stored(place, {other: tensor for other, tensor in weights(place).items() if other != f"{name}_scale_inv"})
    else:
        edited(place / "config.json", quantization_config=None)
    refused(ModelError, lambda: loading.load(str(place)), "F8_E4M3", "q_proj.weight" if lacking == "the scale" else "")


@pytest.mark.parametrize("mark", ["lora_A.weight", "lora_B.default.weight", "lora_embedding_A"])
def test_unmerged_adapters_are_refused(mark: str, folder: Path) -> None:
    stored(folder, weights(folder) | {f"base_model.model.transformer.h.0.attn.c_attn.{mark}": torch.ones(2, 2)})
    refused(ModelError, lambda: loading.load(str(folder)), mark, "merge_and_unload")
    stored(folder, {f"base_model.model.h.0.{mark}": torch.ones(2, 2)})
    refused(ModelError, lambda: loading.load(str(folder)), mark, "merge_and_unload")


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of the sixteen codes of four bits (E2M1)."""


def test_mxfp4_is_decoded(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 2, "num_experts_per_tok": 1}
    tf.GptOssForCausalLM(tf.GptOssConfig(**sizes, vocab_size=64, layer_types=["full_attention"])).save_pretrained(
        tmp_path
    )
    tensors, expected = weights(tmp_path), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, height = tensors.pop(name).shape
        codes = torch.randint(0, 256, (experts, height, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 128, (experts, height, width // 32), dtype=torch.uint8)
        pairs = torch.stack([FP4[(codes & 15).long()], FP4[(codes >> 4).long()]], -1).flatten(-2)
        decoded = pairs * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = decoded.reshape(experts, height, width).mT
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    stored(tmp_path, tensors)
    left = ["model.layers.*.self_attn", "lm_head", "model.embed_tokens", "model.layers.*.mlp.router"]
    edited(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": left})
    loaded = loading.load(str(tmp_path))
    assert (loaded.missing_keys, loaded.unused_keys, loaded.info.quantised) == ((), (), "mxfp4")
    assert len(expected) == 2
    for name, values in expected.items():
        assert torch.equal(loaded.model.get_parameter(name), values)
    read, files = (inspect(tmp_path, source="weights", from_files=way) for way in (False, True))
    assert files.heads == read.heads
    assert files.coverage.complete


def test_tensors_without_a_place_are_named_and_strict_sees_them(folder: Path) -> None:
    words = (
        "inspect",
        folder,
        "--source",
        "weights",
        "--layers",
        "0",
        "--strict",
        "--json",
        folder.parent / "r.json",
        "-q",
    )
    assert attnlens(*words).returncode == 0
    assert read_report(folder.parent / "r.json").model.unexpected == []
    stored(folder, weights(folder) | {"head.of.another": torch.ones(2)})
    strict = attnlens(*words)
    assert strict.returncode == 3
    assert "head.of.another" in strict.stderr
    report = read_report(folder.parent / "r.json")
    assert report.model.unexpected == ["head.of.another"]
    assert report.coverage.complete
    assert attnlens(*(word for word in words if word != "--strict")).returncode == 0
