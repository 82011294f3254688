"""Tests that every refusal is true: what can't run, was not run, is random, was never tested."""

import families
import model_types
import pytest
import tiny
import torch
import transformers as tf
from loaded import family, loaded
from typer.testing import CliRunner

import attnlens
from attnlens.errors import IdentityError, ModelError, TextError
from attnlens.kernels import parsed
from attnlens.models import hooks, texts
from attnlens.models.texts import sequences
from attnlens.models.texts.targets import last_states, task_of
from attnlens.runs import checks
from attnlens.runs.swap import sites as gates

FEW = {"length": 12, "windows": 2}


def of_type(name):
    return loaded(model_types.build(name), tiny.tokenizer("roberta"))


def test_a_model_that_is_random_itself_is_named_so_and_not_misread():
    bert = family("bert")
    inputs = texts.placeholder(bert, 8, 0).batches[0].inputs
    assert checks.prove_identity(bert, inputs)[0] < 1e-5
    passes = iter(range(1, 100))
    bert.model.bert.embeddings.register_forward_hook(lambda _module, _args, output: output * next(passes))
    with pytest.raises(IdentityError, match="the model is not deterministic"):
        checks.prove_identity(bert, inputs)


def sites(given, inputs):
    return tuple(found.site for found in hooks.survey(given.model, inputs))


def test_what_a_model_draws_is_the_same_in_every_pass_and_outside_nothing_changes():
    mae = of_type("vit_mae")
    inputs = texts.placeholder(mae, 2, 0).batches[0].inputs
    with torch.no_grad():
        assert not torch.equal(mae.model(**inputs)[0], mae.model(**inputs)[0]), "the control: it is random"
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert hooks.repeat_error(mae.model, inputs) == 0.0
    assert torch.equal(torch.rand(1), expected)
    assert hooks.identity_error(mae.model, inputs) < 1e-5


def test_a_forward_pass_asks_no_part_for_a_cache_and_gives_the_settings_back():
    model = model_types.build("llava")
    assert model.config.text_config.use_cache
    asked = []
    inner = model.model.language_model
    inner.register_forward_pre_hook(lambda module, _args: asked.append(module.config.use_cache))
    reached = hooks.survey(model, {"input_ids": torch.arange(5)[None] + 3})
    assert asked == [False]
    assert model.config.text_config.use_cache
    assert all(found.arguments["past_key_values"] is None for found in reached)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mimi_decoder", "cannot generate latents for a MimiDecoder"),
        ("gemma4_audio", "cannot generate input_features for a Gemma4Audio"),
        ("xmod", "can't run on input_ids and attention_mask: ValueError: Input language unknown"),
    ],
)
def test_what_a_model_needs_and_attnlens_can_not_make_up_is_named(name, says):
    given = of_type(name)
    for refused in (attnlens.inspect, attnlens.swap_kernel):
        with pytest.raises((ModelError, TextError), match=says) as caught:
            refused(given, windows=2)
        assert "--source" not in caught.value.remedy, "weights are read from a running model too"


def test_a_tower_that_is_not_run_is_said_to_be_so_and_swap_passes_over_it():
    given = of_type("voxtral")
    report = attnlens.inspect(given, **FEW)
    assert {(skip.site.split(".")[1], skip.reason) for skip in report.coverage.skipped} == {
        ("audio_tower", checks.NOT_RUN)
    }
    swap = attnlens.swap_kernel(given, "exponential", **FEW)
    assert swap.coverage.analysed == 8
    assert {skip.reason for skip in swap.coverage.skipped} == {checks.NOT_RUN}


def test_attention_that_runs_and_cannot_be_read_stops_a_swap_without_layers():
    given = of_type("led")  # its encoder attends in overlapping chunks
    with pytest.raises(ModelError, match="can't be swapped: its softmax has the axes"):
        attnlens.swap_kernel(given, "exponential", **FEW)
    assert attnlens.swap_kernel(given, "exponential", layers=[0], **FEW).coverage.analysed == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama", "rotary"), ("nanochat", "rotary"), ("hunyuan_v1_dense", "unknown"), ("dinov3_vit", "rotary")],
)
def test_rotary_types_are_called_rotary_or_unknown(name, expected, dtype):
    given = of_type(name)
    given.model.to(dtype)
    options = FEW if name != "dinov3_vit" else {"windows": 2}
    report = attnlens.inspect(given, analyzers=["symmetry"], **options)
    assert report.model.conventions.position == expected


def test_an_absolute_position_is_said_where_every_site_was_tested():
    assert attnlens.inspect(family("bert"), **FEW).model.conventions.position == "absolute"


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_says_of_each_site_and_of_the_model_what_was_checked():
    whole = attnlens.doctor(family("llama"), length=8)
    assert whole.summary.verdict == "agrees"
    assert {check.verdict for check in whole.doctor} == {"agrees"}
    partly = attnlens.doctor(of_type("hunyuan_v1_dense"), length=8)
    assert {check.verdict for check in partly.doctor} == {"partly checked"}
    assert partly.summary.verdict == "partly checked"
    assert partly.summary.verdict != "differs"
    assert not partly.coverage.complete
    assert "without weights.*" in partly.coverage.sentence


def test_doctor_calls_nothing_checked_where_the_eager_attention_is_another():
    report = attnlens.doctor(of_type("paligemma"), length=8)
    assert {check.verdict for check in report.doctor} == {"not checked"}
    assert all("eager attention changes" in check.reason for check in report.doctor)
    assert report.summary.identity_error < 1e-5
    assert report.summary.verdict != "differs"
    assert report.summary.verdict == "partly checked"


def test_doctor_exits_with_three_where_it_is_strict_and_not_all_was_checked(tmp_path):
    from attnlens.cli.commands import app

    model_types.build("hunyuan_v1_dense").save_pretrained(tmp_path)
    tiny.tokenizer("roberta").save_pretrained(tmp_path)
    words = ["doctor", str(tmp_path), "--length", "8", "--no-progress"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert CliRunner().invoke(app, [*words, "--strict"]).exit_code == 3
    assert CliRunner().invoke(app, ["doctor", "demo", "--length", "8", "--no-progress", "--strict"]).exit_code == 0


# --- what a model reads -----------------------------------------------------------------------------------------------


def test_a_detector_with_a_decoder_reads_no_text():
    given = of_type("detr")
    assert given.model.config.is_encoder_decoder
    assert not texts.reads_text(given)
    assert set(texts.placeholder(given, 5, 0).batches[0].inputs) == {"pixel_values"}


def test_a_language_model_that_hears_predicts_the_next_token():
    given = of_type("qwen2_audio")
    assert task_of(given.model) == "causal"
    assert task_of(families.build("whisper")) == "seq2seq"
    assert attnlens.swap_kernel(given, "exponential", **FEW).swap.kl == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "task"), [("llava", "causal"), ("paligemma", "hidden"), ("gemma3", "causal"), ("xlm", "masked")]
)
def test_a_model_that_sees_later_tokens_predicts_none(name, task):
    given = of_type(name)
    assert task_of(given.model) == "causal"
    inputs = texts.placeholder(given, 8, 0, sequences=2).batches[0].inputs
    assert checks.task_on(given, inputs) == task


def test_a_bert_whose_head_is_to_predict_the_next_token_sees_it():
    config = families.build("bert").config
    for decodes, task in ((False, "hidden"), (True, "causal")):
        config.is_decoder = decodes
        given = loaded(tf.BertLMHeadModel(config).eval(), tiny.tokenizer("roberta"))
        ids = torch.arange(20, 28)[None]
        mask = torch.ones_like(ids)
        mask[:, 6:] = 0
        assert checks.task_on(given, {"input_ids": ids, "attention_mask": mask}) == task


def test_a_start_token_may_stand_in_the_generation_config_alone():
    model = families.build("t5")
    ids = torch.arange(4)[None] + 3
    expected = sequences.shift_right(model, ids)
    del model.config.__dict__["decoder_start_token_id"]
    model.config.pad_token_id = None
    model.generation_config.decoder_start_token_id = 0
    assert torch.equal(sequences.shift_right(model, ids), expected)


def test_a_vocabulary_is_read_from_the_embedding_where_the_config_names_none(monkeypatch):
    bert = families.build("bert")
    monkeypatch.setattr(bert.config, "get_text_config", lambda: tf.CanineConfig())
    assert texts.vocabulary(bert) == families.VOCABULARY
    assert texts.vocabulary(model_types.build("canine")) is None


# --- gates ------------------------------------------------------------------------------------------------------------


def test_a_leak_that_the_model_has_itself_is_not_blamed_on_the_kernel():
    bert = family("bert")
    inputs = texts.placeholder(bert, 12, 0, sequences=2).batches[0].inputs
    kernel = dict.fromkeys(sites(bert, inputs), hooks.Replacement(parsed("rbf")))
    variant = lambda: hooks.replace(bert.model, tuple(kernel), kernel)  # noqa: E731  # one expression
    assert gates.mask_error(bert, inputs, variant, 0, left=False) < 1e-5
    # a model that mixes all tokens, padding too, before its attention
    bert.model.bert.embeddings.register_forward_hook(lambda _m, _a, output: output + output.mean(1, keepdim=True))
    assert "even under the model's own kernel" in gates.leaks(bert, tuple(kernel), inputs, variant, 0)["mask_error"]


def test_swin_probes_windows_and_averages_them_by_image():
    config = tf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
    given = loaded(model_types.sharpened(tf.SwinModel(config).eval().requires_grad_(False)))
    report = attnlens.inspect(given, windows=3, analyzers=["symmetry"])
    assert report.coverage.complete
    assert all(head.measures["tokens.share_key"].n == 3 for head in report)
    assert {check.verdict for check in attnlens.doctor(given).doctor} == {"agrees"}


def test_a_matcher_that_finds_nothing_to_attend_says_so():
    given = of_type("lightglue")
    inputs = {"pixel_values": torch.randn(1, 2, 3, 224, 224, generator=torch.Generator().manual_seed(0))}
    assert hooks.survey(given.model, inputs)
    for module in given.model.modules():
        if hasattr(module, "keypoint_threshold"):
            module.keypoint_threshold = 2.0  # of a probability
    with pytest.raises(ModelError, match="does not run attention on this input"):
        hooks.survey(given.model, inputs)


def test_outputs_that_are_a_plain_tuple_have_no_hidden_states():
    assert last_states((torch.zeros(2, 3, 4),)) is None
