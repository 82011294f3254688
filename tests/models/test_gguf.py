"""Tests that a GGUF file's settings of attention are applied or refused by name, and that no tensor of it is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hostile import refused

import attnlens
from attnlens.errors import ModelError
from attnlens.models import loading

gguf = pytest.importorskip("gguf", reason="GGUF files need the package gguf")
pytest.importorskip("accelerate", reason="GGUF files need the package accelerate")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LAYERS = 64, 4, 2, 16, 64, 2
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}
Fields = Mapping[str, Any]
NONE: Fields = {}


def llama(**changes: Any) -> tf.LlamaForCausalLM:
    """A Llama with sharp attention, of two layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **heads, max_position_embeddings=256, **changes))
    for name, part in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            part.data *= 8
    return model.eval()


def written(
    path: Path, fields: Fields = NONE, extra: Fields = NONE, architecture: str = "llama", **changes: Any
) -> tf.LlamaForCausalLM:
    """Write that Llama as a GGUF file, with those fields and tensors besides, and return it."""
    model = llama(**changes)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(VOCABULARY)])
    writer.add_token_merges(["t 1"])
    kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for name, value in fields.items():
        kinds.get(type(value), writer.add_array)(f"{architecture}.{name}", value)
    for name, part in model.state_dict().items():
        tensor = part.clone()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):  # as llama.cpp's converter orders them
            heads = HEADS if "q_proj" in name else KV_HEADS
            tensor = tensor.reshape(heads, 2, HEAD_DIM // 2, HIDDEN).transpose(1, 2).reshape(part.shape)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, tensor.contiguous().numpy())
    for name, value in extra.items():
        writer.add_tensor(name, torch.as_tensor(value, dtype=torch.float32).numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return model


IDS = torch.arange(3, 51)[None]


def attention(model: tf.PreTrainedModel) -> torch.Tensor:
    """Attention of all layers, in float64."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model.double()(input_ids=IDS, output_attentions=True).attentions
    return torch.stack(found)


def same(path: Path, twin: tf.PreTrainedModel, tolerance: float = 1e-6) -> None:
    """Assert that the file's model attends as its twin, and that its weights read from the file give the same."""
    loaded = loading.load(path)
    assert (loaded.missing_keys, loaded.unused_keys, loaded.info.unexpected) == ((), (), [])
    assert float((attention(loaded.model) - attention(twin)).abs().max()) <= tolerance
    whole, parts = (attnlens.inspect(path, source="weights", from_files=way) for way in (False, True))
    twin.float().save_pretrained(path.parent / "twin")
    twins = attnlens.inspect(path.parent / "twin", source="weights")
    assert whole.coverage.complete
    for one, other, plain in zip(whole.heads, parts.heads, twins.heads, strict=True):
        for name, measure in plain.measures.items():
            for found in (one.measures[name].value, other.measures[name].value):
                assert found == pytest.approx(measure.value, rel=1e-4, abs=1e-5), name


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}


def llama3_factors() -> list[float]:
    """The factors that llama.cpp's converter writes, from the formula of Llama 3.1."""
    factors = []
    for index in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi * 10000 ** (2 * index / HEAD_DIM)
        low, high = 32 / 1.0, 32 / 4.0
        smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
        inside = 1 / ((1 - smooth) / 8.0 + smooth)
        factors.append(1.0 if wavelength < high else 8.0 if wavelength > low else inside)
    assert len({*factors}) > 2
    return factors


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0} | more}


YARN: Fields = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
SCALING: dict[str, tuple[Fields, dict[str, Any]]] = {
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, scaled("linear")),
    "without a type": ({"rope.scaling.factor": 4.0}, scaled("linear")),
    "of old": ({"rope.scale_linear": 4.0}, scaled("linear")),
    "none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
    "yarn": (YARN, scaled("yarn", original_max_position_embeddings=64)),
    "another base": ({"rope.freq_base": 500.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
}


@pytest.mark.parametrize("kind", SCALING)
def test_a_scaled_rotation_is_applied(kind: str, tmp_path: Path) -> None:
    fields, changes = SCALING[kind]
    twin = written(tmp_path / "m.gguf", fields, **changes)
    same(tmp_path / "m.gguf", twin)
    if kind != "none":
        assert float((attention(twin) - attention(llama())).abs().max()) > 1e-2, "a control"


def test_frequency_factors_are_applied(tmp_path: Path) -> None:
    twin = written(tmp_path / "m.gguf", {}, {"rope_freqs.weight": llama3_factors()}, rope_parameters=dict(LLAMA3))
    same(tmp_path / "m.gguf", twin)
    assert float((attention(twin) - attention(llama())).abs().max()) > 1e-2, "a control"
    report = attnlens.doctor(tmp_path / "m.gguf", length=32)
    assert all(check.passed for check in report.doctor)


def test_a_rotation_of_a_file_is_saved_with_the_model(tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", {}, {"rope_freqs.weight": llama3_factors()})
    loaded = loading.load(tmp_path / "m.gguf")
    loaded.model.save_pretrained(tmp_path / "saved")
    again = loading.load(tmp_path / "saved")
    ours, theirs = (dict(one.model.named_buffers())["model.rotary_emb.inv_freq"] for one in (loaded, again))
    assert torch.equal(ours, theirs)
    assert float((ours - dict(llama().named_buffers())["model.rotary_emb.inv_freq"]).abs().max()) > 1e-3


CONTRADICTIONS: dict[str, tuple[Fields, Mapping[str, Any], tuple[str, ...]]] = {
    "an unknown scaling": ({"rope.scaling.type": "spiral", "rope.scaling.factor": 2.0}, {}, ("rope.scaling.type",)),
    "an infinite scale": ({"rope.scaling.type": "linear", "rope.scaling.factor": math.nan}, {}, ("factor",)),
    "endless rotated dimensions": (
        {"rope.dimension_count_swa": 8, "rope.dimension_sections": 3},
        {},
        ("sections = 3",),
    ),
    "no base": ({"rope.freq_base": 0.0}, {}, ("rope.freq_base = 0",)),
    "stretched rotation": ({"rope.scaling.attn_factor": 2.0}, {}, ("rope.scaling.attn_factor = 2",)),
    "no ramp": (YARN | {"rope.scaling.yarn_beta_slow": 0.0}, {}, ("rope.scaling.yarn_beta_slow = 0",)),
    "a window of words": ({"attention.sliding_window": "wide"}, {}, ("attention.sliding_window = 'wide'",)),
    "a scale of words": ({"attention.scale": "large"}, {}, ("attention.scale = 'large'",)),
    "other heads": ({"attention.key_length": 8}, {}, ("attention.key_length = 8",)),
    "two widths": ({"attention.value_length": 8}, {}, ("attention.value_length = 8",)),
    "another scale": ({"attention.scale": 0.5}, {}, ("attention.scale = 0.5",)),
    "a window": ({"attention.sliding_window": 4}, {}, ("attention.sliding_window = 4",)),
    "capped scores": ({"attn_logit_softcapping": 50.0}, {}, ("attn_logit_softcapping = 50",)),
    "both directions": ({"attention.causal": False}, {}, ("attention.causal = False",)),
    "clamped": ({"attention.clamp_kqv": 8.0}, {}, ("attention.clamp_kqv = 8",)),
    "alibi": ({"attention.max_alibi_bias": 8.0}, {}, ("attention.max_alibi_bias = 8",)),
    "a later invention": ({"attention.wormholes": 3}, {}, ("attention.wormholes = 3",)),
    "scaled embeddings": ({"embedding_scale": 12.0}, {}, ("embedding_scale = 12",)),
    "too few factors": ({}, {"rope_freqs.weight": [1.0] * 3}, ("rope_freqs.weight",)),
    "no numbers": ({}, {"rope_freqs.weight": [math.nan] * 8}, ("rope_freqs.weight",)),
    "factors and a scale": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope_freqs.weight": [2.0] * 8},
        ("rope_freqs.weight", "rope.scaling"),
    ),
    "biases": ({}, {"blk.0.attn_q.bias": [1.0] * HIDDEN}, ("blk.0.attn_q.bias",)),
    "sinks": ({}, {"blk.1.attn_sinks.weight": [1.0] * HEADS}, ("blk.1.attn_sinks.weight",)),
}


@pytest.mark.parametrize("way", [False, True], ids=["loaded", "files"])
@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_changes_attention_and_can_not_be_applied_is_refused_by_name(case: str, way: bool, tmp_path: Path) -> None:
    fields, extra, words = CONTRADICTIONS[case]
    written(tmp_path / "m.gguf", fields, extra)
    read: Callable[[], Any] = lambda: loading.load(tmp_path / "m.gguf", from_files=way)  # noqa: E731
    refused(ModelError, read, str(tmp_path / "m.gguf"), *words)


NEUTRAL: dict[str, Fields] = {
    "the usual scale": {"attention.scale": HEAD_DIM**-0.5},
    "no scale": {"attention.scale": 0.0},
    "no window": {"attention.sliding_window": 0},
    "causal": {"attention.causal": True},
    "widths": {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM},
    "no cap": {"attn_logit_softcapping": 0.0, "attention.clamp_kqv": 0.0},
    "no scaling": {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0, "rope.scaling.finetuned": True},
}


@pytest.mark.parametrize("case", NEUTRAL)
def test_what_says_the_usual_is_read(case: str, tmp_path: Path) -> None:
    twin = written(tmp_path / "m.gguf", NEUTRAL[case])
    same(tmp_path / "m.gguf", twin)


@pytest.mark.parametrize("way", [False, True], ids=["loaded", "files"])
def test_a_tensor_without_a_place_is_named(way: bool, tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", {}, {"blk.0.ffn_up.bias": [0.5] * 96})
    loaded = loading.load(tmp_path / "m.gguf", from_files=way)
    assert loaded.info.unexpected == ["blk.0.ffn_up.bias"]
    assert loaded.unused_keys == ("blk.0.ffn_up.bias",)


def gemma(path: Path, architecture: str, fields: Fields) -> None:
    """Write a Gemma of six layers of random numbers, whose settings alone matter."""
    layers = 6
    writer = gguf.GGUFWriter(path, architecture)
    for step, value in (
        (writer.add_block_count, layers),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 1),
        (writer.add_key_length, 8),
        (writer.add_value_length, 8),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_vocab_size, 8),
        (writer.add_sliding_window, 16),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_token_list, [*"abcdefg", "ab"]),
        (writer.add_token_merges, ["a b"]),
    ):
        step(value)
    kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for name, value in fields.items():
        kinds[type(value)](f"{architecture}.{name}", value)
    shapes = {"token_embd.weight": (8, 32), "output_norm.weight": (32,)}
    for layer in range(layers):
        matrices = {"attn_q": (16, 32), "attn_k": (8, 32), "attn_v": (8, 32), "attn_output": (32, 16)}
        matrices |= {"ffn_gate": (32, 32), "ffn_up": (32, 32), "ffn_down": (32, 32), "attn_norm": (32,)}
        matrices |= dict.fromkeys(("post_attention_norm", "ffn_norm", "post_ffw_norm"), (32,))
        if architecture == "gemma3":
            matrices |= {"attn_q_norm": (8,), "attn_k_norm": (8,)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in matrices.items()}
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, torch.randn(shape, generator=generator).numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def test_gemma_3_scales_its_full_attention_alone_and_its_scores_by_the_width_of_a_head(tmp_path: Path) -> None:
    """As llama.cpp does; transformers' defaults are those of one size of Gemma."""
    fields = {"rope.freq_base": 5000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    gemma(tmp_path / "m.gguf", "gemma3", fields)
    loaded = loading.load(tmp_path / "m.gguf")
    buffers = dict(loaded.model.named_buffers())
    plain = torch.arange(0, 8, 2) / 8
    full, sliding = (
        next(part for name, part in buffers.items() if name.endswith(f"{kind}_attention_inv_freq"))
        for kind in ("full", "sliding")
    )
    assert torch.allclose(full, 5000.0**-plain / 8)
    assert torch.allclose(sliding, 10000.0**-plain)
    scales = {
        module.scaling for module in loaded.model.modules() if isinstance(getattr(module, "scaling", None), float)
    }
    assert scales == {8**-0.5}
    assert loaded.info.unexpected == []


def test_gemma_2_takes_its_caps_and_its_scale_from_the_file(tmp_path: Path) -> None:
    gemma(tmp_path / "m.gguf", "gemma2", {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 7.0})
    config = loading.load(tmp_path / "m.gguf").model.config
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (20.0, 7.0)
    assert (config.query_pre_attn_scalar, config.sliding_window) == (8, 16)
