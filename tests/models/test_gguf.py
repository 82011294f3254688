"""Tests that a GGUF file's settings of attention are applied or refused by name, and that no tensor of it is lost."""

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers as tf
from factors import check_heads
from gguf_files import write, write_random
from hostile import each_refused, refused

import attnlens
from attnlens.errors import ModelError
from attnlens.models import loading
from attnlens.models.loading.gguf import ATTENTION_NAMES, FACTORS, KNOWN

gguf = pytest.importorskip("gguf", reason="GGUF files need the package gguf")
pytest.importorskip("accelerate", reason="GGUF files need the package accelerate")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LAYERS = 64, 4, 2, 16, 64, 2
NAMES = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk"},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"},
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
inspect = partial(attnlens.inspect, source="weights", analyzers=["symmetry"])


def llama(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **heads, max_position_embeddings=256, **changes))
    for name, part in model.named_parameters():
        part.data *= 8 if "q_proj" in name or "k_proj" in name else 1
    return model.eval()


def written(path, fields, extra=None, **changes):
    """Write that Llama as a GGUF file, with more fields and tensors, and return it."""
    model, tensors = llama(**changes), {}
    for name, part in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:  # as llama.cpp's converter orders them
            heads = HEADS if "q_proj" in name else KV_HEADS
            part = part.reshape(heads, 2, HEAD_DIM // 2, HIDDEN).transpose(1, 2).reshape(part.shape)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = part
    sizes = {"block_count": LAYERS, "context_length": 256, "embedding_length": HIDDEN, "feed_forward_length": 96}
    sizes |= {"head_count": HEADS, "head_count_kv": KV_HEADS, "layer_norm_rms_eps": model.config.rms_norm_eps}
    sizes |= {"rope_dimension_count": HEAD_DIM, "vocab_size": VOCABULARY}
    tokens = [f"t{number}" for number in range(VOCABULARY)]
    write(path, "llama", sizes, tokens, fields, tensors | (extra or {}))
    return model


def attention(model):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.stack(model.double()(input_ids=torch.arange(3, 51)[None], output_attentions=True).attentions)


def check_same(path, twin):
    """Check that the file's model attends like its twin, and that its weights read from the file agree."""
    loaded = loading.load(path)
    assert (loaded.missing_keys, loaded.unused_keys, loaded.info.unexpected) == ((), (), [])
    whole, parts = inspect(loaded), inspect(path, from_files=True)
    assert float((attention(loaded.model) - attention(twin)).abs().max()) <= 1e-6
    assert (whole.coverage.complete, parts.coverage.complete) == (True, True)
    assert [file.name for file in parts.model.files_in_parts] == [path.name]
    check_heads(parts.heads, whole.heads, 1e-4, 1e-5)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}


def llama3_factors():
    """Return the factors that llama.cpp's converter writes, from the formula of Llama 3.1."""
    factors = []
    for index in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi * 10000 ** (2 * index / HEAD_DIM)
        smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
        factors.append(1 / min(1.0, max(1 / 8.0, (1 - smooth) / 8.0 + smooth)))
    assert len({*factors}) > 2
    return factors


def scaled(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0} | more}


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
FIRST = {"original_max_position_embeddings": 64}
STRETCHED = scaled("yarn", **FIRST, attention_factor=1.5 * (1 + 0.1 * math.log(4)))
LONG, SHORT = [1.5 + number / 2 for number in range(8)], [1 + number / 10 for number in range(8)]
LONG_FIELDS = {"rope.scaling.attn_factor": 1.19, "rope.scaling.original_context_length": 32}
LONG_TENSORS = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}
LONGROPE = {"rope_type": "longrope", "factor": 1.0, "long_factor": LONG, "short_factor": SHORT, "rope_theta": 10000.0}
LONGROPE |= {"attention_factor": 1.19, "original_max_position_embeddings": 32}
USUAL = {"attention.scale": HEAD_DIM**-0.5, "attention.sliding_window": 0, "attention.causal": True}
USUAL |= {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM, "attention.clamp_kqv": 0.0}
USUAL |= {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0, "rope.scaling.finetuned": True}
WITHOUT = {"attention.scale": 0.0, "attn_logit_softcapping": 0.0, "rope.scaling.type": "none"}
WITHOUT |= {"rope.scaling.factor": 4.0}
SETTINGS = {
    "linear": (LINEAR, {}, scaled("linear")),
    "without a type": ({"rope.scaling.factor": 4.0}, {}, scaled("linear")),
    "old": ({"rope.scale_linear": 4.0}, {}, scaled("linear")),
    "yarn": (YARN, {}, scaled("yarn", **FIRST)),
    "stretched yarn": (YARN | {"rope.scaling.attn_factor": 1.5}, {}, STRETCHED),
    "yarn's own": (
        YARN | {f"rope.scaling.yarn_{end}_factor": 1.0 for end in ("ext", "attn")},
        {},
        scaled("yarn", **FIRST),
    ),
    "longrope": (LONG_FIELDS, LONG_TENSORS, {"rope_parameters": LONGROPE}),
    "base": ({"rope.freq_base": 500.0}, {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "factors": ({}, {"rope_freqs.weight": llama3_factors()}, {"rope_parameters": LLAMA3}),
    "usual": (USUAL, {}, {}),
    "none": (WITHOUT, {}, {}),
}
OF_OTHERS = ("without a type", "old", "yarn", "yarn's own")
"""Aliases of other settings, or a part of them."""
KINDS = [pytest.param(kind, marks=pytest.mark.full) if kind in OF_OTHERS else kind for kind in SETTINGS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rotation_is_applied_and_settings_without_effect_are_accepted(kind, tmp_path):
    fields, extra, changes = SETTINGS[kind]
    twin = written(tmp_path / "m.gguf", fields, extra, **{name: dict(value) for name, value in changes.items()})
    check_same(tmp_path / "m.gguf", twin)
    assert (float((attention(twin) - attention(llama())).abs().max()) > 1e-2) == bool(changes), "a control"


def test_factors_of_a_rotation_are_saved_with_the_model_and_pass_the_doctor(tmp_path):
    written(tmp_path / "m.gguf", {}, {"rope_freqs.weight": llama3_factors()})
    loaded = loading.load(tmp_path / "m.gguf")
    loaded.model.save_pretrained(tmp_path / "saved")
    models = loaded.model, loading.load(tmp_path / "saved").model, llama()
    ours, theirs, plain = (dict(model.named_buffers())["model.rotary_emb.inv_freq"] for model in models)
    assert torch.equal(ours, theirs)
    assert float((ours - plain).abs().max()) > 1e-3
    assert all(check.passed for check in attnlens.doctor(tmp_path / "m.gguf", length=32).doctor)


def file(fields, words, extra=None):
    return lambda place: written(place / "m.gguf", fields, extra), words, "m.gguf"


def field(name, value, **more):
    return file({name: value} | more, f"{name} = {value!r}".removesuffix(".0"))


def tensor(name, values, **fields):
    return file(fields, name, {name: values})


REFUSED = {
    "an unknown scaling": file({"rope.scaling.type": "spiral", "rope.scaling.factor": 2.0}, "rope.scaling.type"),
    "an infinite scale": file({"rope.scaling.type": "linear", "rope.scaling.factor": math.nan}, "factor"),
    "no base": field("rope.freq_base", 0.0),
    "a stretched rotation": field("rope.scaling.attn_factor", 2.0),
    "no ramp": field("rope.scaling.yarn_beta_slow", 0.0, **YARN),
    "a window of words": field("attention.sliding_window", "wide"),
    "other heads": field("attention.key_length", 8),
    "two widths": field("attention.value_length", 8),
    "another scale": field("attention.scale", 0.5),
    "a window": field("attention.sliding_window", 4),
    "capped scores": field("attn_logit_softcapping", 50.0),
    "both directions": field("attention.causal", False),
    "clamped": field("attention.clamp_kqv", 8.0),
    "alibi": field("attention.max_alibi_bias", 8.0),
    "an invention that is off": field("rope.wormholes", 0),
    "an invention outside the groups": field("attn_wormholes", 2.0),
    "layers without rotation": field("no_rope_layer_step", 4),
    "a share of full layers": field("full_attention_interval", 4),
    "a longrope of one factor": field("rope.scaling.type", "longrope", **{"rope.scaling.factor": 4.0}),
    "no extrapolation": field("rope.scaling.yarn_ext_factor", 0.0, **YARN),
    "scaled embeddings": field("embedding_scale", 12.0),
    "scaled experts": field("expert_weights_scale", 2.5),
    "sigmoids of experts": field("expert_gating_func", 2),
    "too few factors": tensor("rope_freqs.weight", [1.0] * 3),
    "no numbers": tensor("rope_freqs.weight", [math.nan] * 8),
    "factors and a scale": tensor("rope_freqs.weight", [2.0] * 8, **LINEAR),
    "biases": tensor("blk.0.attn_q.bias", [1.0] * HIDDEN),
    "positions": tensor("position_embd.weight", [1.0] * HIDDEN),
    "an indexer": tensor("blk.0.indexer.k_norm.weight", [1.0] * HEAD_DIM),
}


def test_settings_that_change_attention_and_can_not_be_applied_are_refused_by_name(tmp_path):
    (tmp_path / "model").mkdir()
    calls = (lambda place, way=way: loading.load(place / "m.gguf", from_files=way) for way in (False, True))
    each_refused(ModelError, tmp_path / "model", REFUSED, *calls)


def test_the_documented_table_contains_every_field_of_attention_and_rotation():
    keys, text = gguf.constants.Keys, (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    table = text.partition("| GGUF field or tensor |")[2].partition("\n\n")[0]
    documented = {name for name in re.findall(r"`([a-z0-9_.]+)`", table) if not name.endswith("weight")}
    constants = [
        value for owner in (keys.Attention, keys.Attention.Indexer, keys.Rope) for value in vars(owner).values()
    ]
    constants += [
        value
        for value in vars(keys.LLM).values()
        if ATTENTION_NAMES.search(str(value)) or str(value).endswith("_scale")
    ]
    fields = {value.removeprefix("{arch}.") for value in constants if str(value).startswith("{arch}.")}
    others = {name for name in fields if name.startswith(("expert", "activation"))}  # of experts and MLPs
    assert fields - others <= KNOWN
    assert documented == KNOWN
    assert tuple(re.findall(r"`(rope_[a-z_]+\.weight)`", table)) == FACTORS


def test_one_part_of_a_model_and_other_kinds_of_files_are_refused(tmp_path):
    for name, value, *words in (
        ("split.count", 2, "split GGUF", "llama-gguf-split --merge", "m-00001-of-00002.gguf"),
        ("split.tensors.count", 2, "split GGUF", "m-00001-of-00002.gguf"),
        ("general.type", "adapter", "general.type is 'adapter'"),
    ):
        path = tmp_path / "m-00002-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        (writer.add_uint16 if value == 2 else writer.add_string)(name, value)
        for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
            getattr(writer, step)()
        for way in (False, True):
            refused(ModelError, partial(loading.load, path, from_files=way), *words)


def test_a_tensor_without_a_parameter_is_named(tmp_path):
    written(tmp_path / "m.gguf", {}, {"blk.0.ffn_up.bias": [0.5] * 96})
    for way in (False, True):
        loaded = loading.load(tmp_path / "m.gguf", from_files=way)
        assert loaded.info.unexpected == ["blk.0.ffn_up.bias"]
        assert loaded.unused_keys == ("blk.0.ffn_up.bias",)


def gemma(path, architecture, fields):
    shapes = {"attn_q": (16, 32), "attn_k": (8, 32), "attn_v": (8, 32), "attn_output": (32, 16)}
    shapes |= {"post_attention_norm": 32, "post_ffw_norm": 32}
    shapes |= {"attn_q_norm": 8, "attn_k_norm": 8} if architecture == "gemma3" else {}
    sizes = {"head_count_kv": 1, "key_length": 8, "value_length": 8, "sliding_window": 16}
    write_random(path, architecture, 6, sizes, fields, shapes)
    return loading.load(path)


def test_gemma_3_scales_only_full_attention_and_its_scores_by_the_width_of_a_head(tmp_path):
    """As llama.cpp does; transformers' defaults are those of one size of Gemma."""
    fields = {"rope.freq_base": 5000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    loaded = gemma(tmp_path / "m.gguf", "gemma3", fields)
    plain, buffers = torch.arange(0, 8, 2) / 8, dict(loaded.model.named_buffers())
    for kind, expected in (("full", 5000.0**-plain / 8), ("sliding", 10000.0**-plain)):
        name = next(name for name in buffers if name.endswith(f"{kind}_attention_inv_freq"))
        assert torch.allclose(buffers[name], expected)
    scales = {getattr(module, "scaling", None) for module in loaded.model.modules()}
    assert {scale for scale in scales if isinstance(scale, float)} == {8**-0.5}
    assert loaded.info.unexpected == []


def test_gemma_2_takes_caps_and_scale_from_the_file(tmp_path):
    fields = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 7.0}
    config = gemma(tmp_path / "m.gguf", "gemma2", fields).model.config
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (20.0, 7.0)
    assert (config.query_pre_attn_scalar, config.sliding_window) == (8, 16)
    for name in ("rope.freq_base_swa", "rope.dimension_count_swa"):
        refused(ModelError, partial(gemma, tmp_path / "m.gguf", "gemma2", {name: 4}), f"{name} = 4")
