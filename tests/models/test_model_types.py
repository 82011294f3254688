"""Tests an eighth of transformers' model types, each built tiny: what is accepted, and what is refused.

benchmarks/sweep.py goes through all of them. Chosen are the quick ones of every kind, and all that were once read
wrongly: with caches that slip in, norms without weights, rotations of a fixed length, functions that are eager alone.
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

TABLE = {one.model_type: one for one in architectures()[1]}
READ = (
    *("qwen3_vl", "llava", "internvl", "glm4v", "aya_vision", "qwen2_vl", "got_ocr2", "granitemoe"),
    *("granitemoehybrid", "moonshine", "qwen3_5", "qwen3_next", "bamba", "nanochat", "llama4_text"),
    *("neomme", "muse_glimmer_text", "afmoe", "lfm2", "qwen2_audio", "voxtral", "granite_speech"),
    *("gpt_oss", "gemma3n_text", "modernbert", "phi3", "cohere2", "olmo2", "starcoder2", "stablelm"),
    *("granite", "nemotron", "esm", "exaone4", "smollm3", "ctrl", "splinter", "vit_mae", "bigbird_pegasus"),
    *("nllb-moe", "pegasus_x", "lw_detr_vit", "vitpose_backbone", "rf_detr_dinov2", "siglip2_vision_model"),
    *("audio-spectrogram-transformer", "speech_to_text", "siglip_vision_model", "jamba", "m2m_100"),
    *("wav2vec2", "beit", "parakeet_encoder", "wav2vec2-bert", "longt5", "pop2piano", "deepseek_v2"),
    *("deepseek_v3", "deepseek_v32", "minicpm3", "kimi_k25", "youtu", "longcat_flash", "persimmon", "fuyu"),
    *("hunyuan_v1_dense", "zaya", "jetmoe", "dinov3_vit", "pixtral", "mlcd_vision_model", "eomt_dinov3"),
    *("detr", "conditional_detr", "deformable_detr", "deepseek_v4", "mpnet", "deberta-v2", "bloom"),
    *("falcon", "mpt", "gptj", "gpt_neo", "codegen", "blip", "sam", "canine", "table-transformer"),
    *("layoutlmv3", "hiera", "levit", "xlnet", "swinv2", "siglip", "whisper", "llama4"),
    *("xglm", "squeezebert", "gemma4", "lilt"),
)
"""The types that are read here; what is expected of each stands in the table of architectures."""
FUSED = ("falcon", "sam", "siglip", "siglip_vision_model", "siglip2_vision_model")
"""Types with modules that call torch's fused attention, whose softmax nobody sees."""
MORE = {"none": 0, "some": 1, "all": 2}
REFUSED: dict[str, str] = {
    **dict.fromkeys(("mra", "yoso", "rwkv"), "has its own attention code, without a softmax"),
    "longformer": "its softmax has the axes",
    "mamba": "has no softmax attention",
    "mimi_decoder": "cannot generate latents",
    "sam2_video": "cannot generate inference_session",
    "gemma4_audio": "cannot generate input_features",
    "patchtst": "cannot generate past_values",
    "lxmert": "can't run on input_ids and attention_mask: ValueError: `visual_feats` cannot be `None`",
    "instructblip": "cannot generate qformer_input_ids",
    "xmod": "can't run on input_ids and attention_mask: ValueError: Input language unknown",
    "inkling2_text": "has a separate sink for every query",
}
"""What is said of a type that can't be read."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "passage.txt"
    file.write_text(texts.sample("demo")[0].text[:2000])
    return [str(file)]


def built(name, folder):
    """A tiny model with a tokenizer, and the folder of its processor."""
    model = model_types.build(name)
    processors.save(model, folder)
    return replace(loaded(model, tiny.tokenizer("roberta")), folder=folder)


def options(given, text):
    return {"length": 12, "windows": 2, "text": text} if texts.reads_text(given) else {"windows": 2}


@pytest.mark.parametrize("name", READ)
def test_a_type_is_read_as_it_computes(name, text, tmp_path):
    given = built(name, tmp_path)
    report = attnlens.inspect(given, analyzers=["symmetry"], **options(given, text))
    without = report.coverage.without.get("weights", 0)
    weights = "all" if not without else "none" if without == report.coverage.heads else "some"
    assert report.coverage.complete or TABLE[name].read == "in part"
    assert MORE[weights] >= MORE[TABLE[name].weights], "no type gets worse"
    assert report.model.conventions.position == TABLE[name].positions
    assert report.summary.identity_error < 1e-5
    inputs = texts.placeholder(given, 12, 0, sequences=2).batches[0].inputs
    error = own_softmax.difference(given.model, inputs)
    assert error is None if name in FUSED else error < 2e-6


def test_of_a_sparse_model_s_keys_those_are_seen_whose_blocks_its_indexer_chose(text):
    given = loaded(model_types.build("minimax_m3_vl"), tiny.tokenizer("roberta"))
    report = attnlens.inspect(given, analyzers=["symmetry"], length=12, windows=2, text=text)
    assert report.summary.identity_error < 1e-5


PLANTED = ("bloom", "falcon", "mpt", "codegen", "gpt_neox", "phi3", "blip", "siglip", "qwen3")
"""Types of unlike layouts: one matrix with its heads whole, interleaved or in blocks; one each; with norms."""


@pytest.mark.parametrize("name", PLANTED)
def test_planted_weights_read_plus_and_minus_one_and_not_with_heads_in_another_order(name, monkeypatch, tmp_path):
    given = built(name, tmp_path)
    inputs = texts.placeholder(given, 12, 0, sequences=2).batches[0].inputs
    assert planting.read(given, inputs) == "±1"
    honest = weights.factors

    def shifted(*arguments):
        for factors in honest(*arguments):
            moved = factors.maps.query.roll(1, 0)
            yield replace(factors, maps=replace(factors.maps, query=moved))

    monkeypatch.setattr(weights, "factors", shifted)
    assert planting.read(given, inputs) != "±1"


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_is_refused_with_what_happened(name, text, tmp_path):
    given = built(name, tmp_path)
    for command in (attnlens.inspect, attnlens.swap_kernel):
        with pytest.raises((ModelError, TextError), match=REFUSED[name]):
            command(given, **options(given, text))


def test_there_is_an_eighth_of_the_types():
    assert len(model_types.TYPES()) // 8 <= len({*READ, *REFUSED})


@pytest.mark.parametrize("name", ["radio", "deepseek_v4"])
def test_integer_buffers_are_no_codes_whatever_their_path_in_the_file(name, tmp_path):
    model_types.build(name).save_pretrained(tmp_path)
    tiny.tokenizer("roberta").save_pretrained(tmp_path)
    assert attnlens.load(tmp_path).model.config.model_type == name


def test_images_that_a_model_cuts_into_windows_stay_one_sequence_each():
    report = attnlens.swap_kernel(loaded(model_types.build("lw_detr_vit"), None), "rbf", windows=3)
    assert report.settings.windows == 3
    assert 0 < report.swap.hidden_cosine < 1
    assert report.swap.hidden_cosine_ci95[0] <= report.swap.hidden_cosine <= report.swap.hidden_cosine_ci95[1]
