"""Tests an eighth of transformers' model types, each built tiny: what is accepted, and what is refused.

benchmarks/sweep.py runs all of them. The default tests take quick ones of every kind, the full tests all that were once
misread: with caches that appear unasked, norms without weights, rotations of a fixed length, functions that are only
eager.
"""

import re
from dataclasses import replace

import model_types
import own_softmax
import processors
import pytest
import tiny
from loaded import loaded
from model_type_settings import listed

import attnlens
from attnlens.errors import ModelError, TextError
from attnlens.models import texts
from attnlens.records.architectures import architectures

TABLE = {row.model_type: row for row in architectures()[1]}
READ = listed(
    "beit canine deepseek_v32 fuyu gemma4 gpt_oss granitemoehybrid hunyuan_v1_dense lfm2 longt5 minicpm3 modernbert "
    "nanochat squeezebert xlnet zaya"
)
SWEEP = listed(
    "afmoe audio-spectrogram-transformer aya_vision bamba bigbird_pegasus blip bloom codegen cohere2 conditional_detr "
    "ctrl deberta-v2 deepseek_v2 deepseek_v3 deepseek_v4 deformable_detr detr dinov3_vit eomt_dinov3 esm exaone4 "
    "falcon gemma3n_text glm4v got_ocr2 gpt_neo gptj granite granite_speech granitemoe hiera internvl jamba jetmoe "
    "kimi_k25 layoutlmv3 levit lilt llama4 llama4_text llava longcat_flash lw_detr_vit m2m_100 minimax_m3_vl "
    "mlcd_vision_model moonshine mpnet mpt muse_glimmer_text nemotron neomme nllb-moe olmo2 parakeet_encoder "
    "pegasus_x persimmon phi3 pixtral pop2piano qwen2_audio qwen2_vl qwen3_5 qwen3_next qwen3_vl rf_detr_dinov2 sam "
    "siglip siglip2_vision_model siglip_vision_model smollm3 speech_to_text splinter stablelm starcoder2 swinv2 "
    "table-transformer vit_mae vitpose_backbone voxtral wav2vec2 wav2vec2-bert whisper xglm youtu"
)
FUSED = ("falcon", "sam", "siglip", "siglip_vision_model", "siglip2_vision_model")
"""Types with modules that call torch's fused attention, whose softmax nobody sees."""
WEIGHTS = ("none", "some", "all")
REFUSED = {
    "mra": "has its own attention code, which does not multiply",
    "longformer": "its softmax has the shape",
    "mamba": "has no softmax attention",
    "patchtst": "cannot generate past_values",
    "gemma4_audio": "cannot generate input_features",
    "lxmert": "can't run on input_ids and attention_mask: ValueError: `visual_feats` cannot be `None`",
    "xmod": "can't run on input_ids and attention_mask: ValueError: Input language unknown",
    "inkling2_text": "has a separate sink for every query",
}
REFUSED_SWEEP = {
    **dict.fromkeys(("yoso", "rwkv"), "has its own attention code, which does not multiply"),
    "mimi_decoder": "cannot generate latents",
    "sam2_video": "cannot generate inference_session",
    "instructblip": "cannot generate qformer_input_ids",
}


def types(quick, sweep):
    """Marks the tests of a sweep as full ones."""
    return pytest.mark.parametrize("name", [*quick, *(pytest.param(name, marks=pytest.mark.full) for name in sweep)])


def built(name, folder):
    """Build a tiny model with a tokenizer, and save its processor in a folder of its own."""
    model = model_types.build(name)
    processors.save(model, folder)
    return replace(loaded(model, tiny.tokenizer("roberta")), folder=folder)


def options(model, folder):
    if not texts.reads_text(model):
        return {"windows": 2}
    file = folder / "passage.txt"
    file.write_text(texts.sample("demo")[0].text[:2000])
    return {"length": 12, "windows": 2, "text": [str(file)]}


@types(READ, SWEEP)
def test_attention_of_a_type_is_read_as_it_is_computed(name, tmp_path):
    model, row = built(name, tmp_path), TABLE[name]
    report = attnlens.inspect(model, analyzers=["symmetry"], **options(model, tmp_path))
    without = report.coverage.without.get("weights", 0)
    some = "all" if not without else "none" if without == report.coverage.heads else "some"
    assert report.coverage.complete or row.read == "in part"
    assert WEIGHTS.index(some) >= WEIGHTS.index(row.weights), "got worse"
    assert report.model.conventions.position == row.positions
    assert report.summary.identity_error < 1e-5
    error = own_softmax.difference(model.model, texts.placeholder(model, 12, 0, sequences=2).batches[0].inputs)
    assert error is None if name in FUSED else error < 2e-6


@types(REFUSED, REFUSED_SWEEP)
def test_a_type_is_refused_with_the_reason(name, tmp_path):
    model, reason = built(name, tmp_path), (REFUSED | REFUSED_SWEEP)[name]
    for command in (attnlens.inspect, attnlens.swap_kernel):
        with pytest.raises((ModelError, TextError), match=reason) as refusal:
            command(model, **options(model, tmp_path))
        if "cannot generate" in reason:
            assert f"for {type(model.model).__name__}." in refusal.value.problem
            assert re.search(r"preprocessor_config\.json.*attnlens\.capture", refusal.value.remedy)
        if re.match("has (its own|no)", reason):
            assert type(model.model).__name__ in refusal.value.problem
            assert "attnlens list architectures" in refusal.value.remedy


def test_integer_buffers_are_not_codes_whatever_their_path_in_the_file(tmp_path):
    for name in ("radio", "deepseek_v4"):
        for part in (model_types.build(name), tiny.tokenizer("roberta")):
            part.save_pretrained(tmp_path / name)
        assert attnlens.load(tmp_path / name).model.config.model_type == name


def test_images_that_a_model_cuts_into_windows_stay_one_sequence_each():
    report = attnlens.swap_kernel(loaded(model_types.build("lw_detr_vit"), None), "rbf", windows=3)
    assert report.settings.windows == 3
    assert 0 < report.swap.hidden_cosine < 1
    assert report.swap.hidden_cosine_ci95[0] <= report.swap.hidden_cosine <= report.swap.hidden_cosine_ci95[1]
