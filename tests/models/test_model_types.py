"""Tests an eighth of transformers' model types, each built tiny: what is accepted, and what is refused.

benchmarks/sweep.py runs all of them. The default tests take quick ones of every kind, the full tests all that were once
misread: with caches that appear unasked, norms without weights, rotations of a fixed length, functions that are only
eager.
"""

from dataclasses import replace

import model_types
import own_softmax
import planting
import processors
import pytest
import tiny
from loaded import loaded

import attnlens
from attnlens.errors import ModelError, TextError
from attnlens.models import texts, weights
from attnlens.records.architectures import architectures

TABLE = {row.model_type: row for row in architectures()[1]}
READ = (
    *("afmoe", "beit", "bigbird_pegasus", "canine", "codegen", "ctrl", "deberta-v2", "deepseek_v32", "deepseek_v4"),
    *("deformable_detr", "exaone4", "falcon", "fuyu", "gemma4", "gpt_neo", "gpt_oss", "granitemoehybrid"),
    *("hunyuan_v1_dense", "jamba", "jetmoe", "lfm2", "lilt", "llama4_text", "longt5", "minicpm3", "modernbert"),
    *("mpnet", "mpt", "nanochat", "pegasus_x", "persimmon", "pixtral", "qwen2_vl", "qwen3_next", "rf_detr_dinov2"),
    *("siglip_vision_model", "squeezebert", "voxtral", "xglm", "xlnet", "zaya"),
)
SWEEP = (
    *("audio-spectrogram-transformer", "aya_vision", "bamba", "blip", "bloom", "cohere2", "conditional_detr"),
    *("deepseek_v2", "deepseek_v3", "detr", "dinov3_vit", "eomt_dinov3", "esm", "gemma3n_text", "glm4v", "got_ocr2"),
    *("gptj", "granite", "granite_speech", "granitemoe", "hiera", "internvl", "kimi_k25", "layoutlmv3", "levit"),
    *("llama4", "llava", "longcat_flash", "lw_detr_vit", "m2m_100", "mlcd_vision_model", "moonshine"),
    *("muse_glimmer_text", "nemotron", "neomme", "nllb-moe", "olmo2", "parakeet_encoder", "phi3", "pop2piano"),
    *("qwen2_audio", "qwen3_5", "qwen3_vl", "sam", "siglip", "siglip2_vision_model", "smollm3", "speech_to_text"),
    *("splinter", "stablelm", "starcoder2", "swinv2", "table-transformer", "vit_mae", "vitpose_backbone", "wav2vec2"),
    *("wav2vec2-bert", "whisper", "youtu"),
)
FUSED = ("falcon", "sam", "siglip", "siglip_vision_model", "siglip2_vision_model")
"""Types with modules that call torch's fused attention, whose softmax nobody sees."""
WEIGHTS = ("none", "some", "all")
REFUSED = {
    "mra": "has its own attention code, without a softmax",
    "longformer": "its softmax has the axes",
    "mamba": "has no softmax attention",
    "patchtst": "cannot generate past_values",
    "lxmert": "can't run on input_ids and attention_mask: ValueError: `visual_feats` cannot be `None`",
    "xmod": "can't run on input_ids and attention_mask: ValueError: Input language unknown",
    "inkling2_text": "has a separate sink for every query",
}
REFUSED_SWEEP = {
    "yoso": "has its own attention code, without a softmax",
    "rwkv": "has its own attention code, without a softmax",
    "mimi_decoder": "cannot generate latents",
    "sam2_video": "cannot generate inference_session",
    "gemma4_audio": "cannot generate input_features",
    "instructblip": "cannot generate qformer_input_ids",
}


def built(name, folder):
    """Build a tiny model with a tokenizer, and save its processor in a folder of its own."""
    model, place = model_types.build(name), folder / name
    place.mkdir()
    processors.save(model, place)
    return replace(loaded(model, tiny.tokenizer("roberta")), folder=place)


def options(model, folder):
    if not texts.reads_text(model):
        return {"windows": 2}
    file = folder / "passage.txt"
    file.write_text(texts.sample("demo")[0].text[:2000])
    return {"length": 12, "windows": 2, "text": [str(file)]}


def check_read(name, folder):
    model = built(name, folder)
    report = attnlens.inspect(model, analyzers=["symmetry"], **options(model, folder))
    without = report.coverage.without.get("weights", 0)
    some = "all" if not without else "none" if without == report.coverage.heads else "some"
    assert report.coverage.complete or TABLE[name].read == "in part", name
    assert WEIGHTS.index(some) >= WEIGHTS.index(TABLE[name].weights), f"{name} got worse"
    assert report.model.conventions.position == TABLE[name].positions, name
    assert report.summary.identity_error < 1e-5, name
    inputs = texts.placeholder(model, 12, 0, sequences=2).batches[0].inputs
    error = own_softmax.difference(model.model, inputs)
    assert error is None if name in FUSED else error < 2e-6, name


def check_refused(name, words, folder):
    model = built(name, folder)
    for command in (attnlens.inspect, attnlens.swap_kernel):
        with pytest.raises((ModelError, TextError), match=words):
            command(model, **options(model, folder))


@pytest.mark.parametrize("name", READ)
def test_attention_of_a_type_is_read_as_it_is_computed(name, tmp_path):
    check_read(name, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_is_refused_with_the_reason(name, tmp_path):
    check_refused(name, REFUSED[name], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("group", range(6))
def test_other_types_are_read_or_refused(group, tmp_path):
    for name in SWEEP[group::6]:
        check_read(name, tmp_path)
    for name in list(REFUSED_SWEEP)[group::6]:
        check_refused(name, REFUSED_SWEEP[name], tmp_path)
    assert len({*READ, *SWEEP, *REFUSED, *REFUSED_SWEEP}) >= len(model_types.TYPES()) // 8


def test_keys_of_a_sparse_model_are_those_whose_blocks_its_indexer_chose(tmp_path):
    model = loaded(model_types.build("minimax_m3_vl"), tiny.tokenizer("roberta"))
    report = attnlens.inspect(model, analyzers=["symmetry"], **options(model, tmp_path))
    assert report.summary.identity_error < 1e-5


PLANTED = ("falcon", "codegen", "gpt_neox", "phi3", "qwen3")
PLANTED_SWEEP = ("bloom", "mpt", "blip", "siglip")
"""Types of unlike layouts: one matrix with its heads whole, interleaved or in blocks; one each; with norms."""


@pytest.mark.parametrize("name", [*PLANTED, *(pytest.param(name, marks=pytest.mark.full) for name in PLANTED_SWEEP)])
def test_planted_weights_are_read_as_plus_and_minus_one_but_not_in_another_order(name, monkeypatch, tmp_path):
    model = built(name, tmp_path)
    inputs = texts.placeholder(model, 12, 0, sequences=2).batches[0].inputs
    assert planting.read(model, inputs) == "±1"
    factors = weights.factors

    def shifted(*arguments):
        for one in factors(*arguments):
            yield replace(one, maps=replace(one.maps, query=one.maps.query.roll(1, 0)))

    monkeypatch.setattr(weights, "factors", shifted)
    assert planting.read(model, inputs) != "±1"


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
