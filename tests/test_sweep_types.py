"""Tests an eighth of transformers' model types, each built tiny: what is accepted, and what is refused.

benchmarks/sweep.py goes through all of them. Chosen are the quick ones of every kind, and all that were once read
wrongly: with caches that slip in, norms without weights, rotations of a fixed length, functions that are eager alone.
"""

import model_types
import own_softmax
import pytest
import tiny
from loaded import loaded

import attnlens
from attnlens import texts
from attnlens.errors import ModelError, TextError

ROTARY, ABSOLUTE, HIDDEN, SOME = "all rotary", "all absolute", "none unknown", "some rotary"
READ: dict[str, str] = {
    **dict.fromkeys(("llava", "internvl", "aya_vision", "got_ocr2"), ROTARY),
    **dict.fromkeys(("qwen3_vl", "glm4v", "qwen2_vl", "qwen3_5"), SOME),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "moonshine", "qwen3_next", "bamba"), ROTARY),
    **dict.fromkeys(("nanochat", "llama4_text", "neomme", "muse_glimmer_text", "afmoe", "lfm2"), ROTARY),
    **dict.fromkeys(("qwen2_audio", "voxtral", "granite_speech", "gpt_oss", "gemma3n_text", "modernbert"), ROTARY),
    **dict.fromkeys(("phi3", "cohere2", "olmo2", "starcoder2", "stablelm", "granite", "nemotron", "esm"), ROTARY),
    **dict.fromkeys(("exaone4", "smollm3"), ROTARY),
    **dict.fromkeys(("ctrl", "splinter", "vit_mae", "bigbird_pegasus", "nllb-moe", "pegasus_x"), ABSOLUTE),
    **dict.fromkeys(("lw_detr_vit", "vitpose_backbone", "rf_detr_dinov2", "siglip2_vision_model"), ABSOLUTE),
    **dict.fromkeys(("audio-spectrogram-transformer", "speech_to_text", "siglip_vision_model"), ABSOLUTE),
    **dict.fromkeys(("jamba", "m2m_100", "wav2vec2", "beit"), ABSOLUTE),
    **dict.fromkeys(("parakeet_encoder", "wav2vec2-bert", "longt5", "pop2piano"), "all bias"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3", "kimi_k25", "youtu"), HIDDEN),
    **dict.fromkeys(("longcat_flash", "persimmon", "fuyu", "hunyuan_v1_dense", "zaya", "jetmoe"), HIDDEN),
    **dict.fromkeys(("dinov3_vit", "pixtral", "mlcd_vision_model", "eomt_dinov3"), HIDDEN),
    **dict.fromkeys(("detr", "conditional_detr", "deformable_detr"), HIDDEN),
    "deepseek_v4": "some rotary",
}
"""Which weights.* a type has, and how its positions are called: rotary or unknown where there is a rotation."""
REFUSED: dict[str, str] = {
    "mamba": "has no softmax attention",
    "mimi_decoder": "can't make up latents",
    "sam2_video": "can't make up inference_session",
    "gemma4_audio": "can't make up input_features",
    "lilt": "its scores are a sum of 2 products",
    "xmod": "can't run on input_ids and attention_mask: ValueError: Input language unknown",
    "inkling2_text": "gives every query a sink of its own",
}
"""What is said of a type that can't be read."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "passage.txt"
    file.write_text(texts.sample("demo")[0].text[:2000])
    return [str(file)]


def options(given, text):
    return {"tokens": 12, "sequences": 2, "text": text} if texts.reads_text(given) else {"sequences": 2}


@pytest.mark.parametrize("name", READ)
def test_a_type_is_read_as_it_computes(name, text):
    given = loaded(model_types.build(name), tiny.tokenizer("roberta"))
    report = attnlens.inspect(given, analyzers=["symmetry"], **options(given, text))
    without = report.coverage.without.get("weights", 0)
    weights = "all" if not without else "none" if without == report.coverage.heads else "some"
    assert f"{weights} {report.model.conventions.position}" == READ[name]
    assert report.summary.identity_error < 1e-5
    inputs = texts.placeholder(given, 12, 0, sequences=2).batches[0].inputs
    assert own_softmax.difference(given.model, inputs) < 2e-6


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_is_refused_with_what_happened(name, text):
    given = loaded(model_types.build(name), tiny.tokenizer("roberta"))
    for command in (attnlens.inspect, attnlens.swap_kernel):
        with pytest.raises((ModelError, TextError), match=REFUSED[name]):
            command(given, **options(given, text))


def test_there_is_an_eighth_of_the_types():
    assert len(model_types.TYPES()) // 8 <= len({**READ, **REFUSED})


@pytest.mark.parametrize("name", ["radio", "deepseek_v4"])
def test_integer_buffers_are_no_codes_whatever_their_path_in_the_file(name, tmp_path):
    model_types.build(name).save_pretrained(tmp_path)
    tiny.tokenizer("roberta").save_pretrained(tmp_path)
    assert attnlens.load(tmp_path).model.config.model_type == name


def test_images_that_a_model_cuts_into_windows_stay_one_sequence_each():
    report = attnlens.swap_kernel(loaded(model_types.build("lw_detr_vit"), None), "rbf", sequences=3)
    assert report.settings.sequences == 3
    assert 0 < report.swap.hidden_cosine < 1
    assert report.swap.hidden_cosine_ci95[0] <= report.swap.hidden_cosine <= report.swap.hidden_cosine_ci95[1]
