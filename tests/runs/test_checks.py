"""Tests that numbers exist or a true reason: what can't run, was not run, is random or degenerate, was never tested."""

import itertools
import math

import families
import model_types
import pytest
import tiny
import torch
import transformers as tf
import views
from loaded import BARE, family, loaded, sites_of

import attnlens
from attnlens.errors import AttnlensError, IdentityError, ModelError, TextError
from attnlens.kernels import parsed
from attnlens.models import hooks, texts
from attnlens.models.texts import sequences
from attnlens.models.texts.targets import last_states, task_of
from attnlens.runs import checks
from attnlens.runs.swap import sites as gates

FEW = {"length": 12, "windows": 2}
SWAP = FEW | BARE
full = pytest.mark.full


def of_type(name):
    return loaded(model_types.build(name), tiny.tokenizer("roberta"))


def inputs_of(model, length, sequences=1):
    return texts.placeholder(model, length, 0, sequences=sequences).batches[0].inputs


def test_what_a_model_does_itself_is_not_blamed_on_attnlens_or_the_kernel():
    bert = family("bert")
    inputs = inputs_of(bert, 12, 2)
    kernel = dict.fromkeys(sites_of(bert.model, inputs), hooks.Replacement(parsed("rbf")))
    variant = lambda: hooks.replace(bert.model, tuple(kernel), kernel)  # noqa: E731
    assert checks.prove_identity(bert, inputs)[0] < 1e-5
    assert gates.LeakTest(bert, inputs, variant, 0).mask_error(left=False) < 1e-5
    # a model that mixes all tokens, padding too, before its attention
    embeddings = bert.model.bert.embeddings
    mixing = embeddings.register_forward_hook(lambda _m, _a, output: output + output.mean(1, keepdim=True))
    errors = gates.LeakTest(bert, inputs, variant, 0).measure(tuple(kernel))
    assert "even under the model's own kernel" in errors["mask_error"]
    mixing.remove()
    passes = itertools.count(1)
    embeddings.register_forward_hook(lambda _module, _args, output: output * next(passes))
    with pytest.raises(IdentityError, match="is not deterministic: two passes"):
        checks.prove_identity(bert, inputs)


def test_what_a_model_draws_is_the_same_in_every_pass_and_outside_nothing_changes():
    mae = of_type("vit_mae")
    inputs = inputs_of(mae, 2)
    with torch.no_grad():
        assert not torch.equal(mae.model(**inputs)[0], mae.model(**inputs)[0]), "the control: it is random"
    before = torch.get_rng_state()
    assert hooks.repeat_error(mae.model, inputs) == 0.0
    assert torch.equal(torch.get_rng_state(), before)
    assert hooks.identity_error(mae.model, inputs) < 1e-5


def test_a_forward_pass_uses_no_cache_and_restores_the_settings():
    model, used = model_types.build("llava"), []
    assert model.config.text_config.use_cache
    inner = model.model.language_model
    inner.register_forward_pre_hook(lambda module, _args: used.append(module.config.use_cache))
    reached = hooks.survey(model, {"input_ids": torch.arange(5)[None] + 3})
    assert used == [False]
    assert model.config.text_config.use_cache
    assert all(found.arguments["past_key_values"] is None for found in reached)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mimi_decoder", "cannot generate latents for MimiDecoder"),
        pytest.param("gemma4_audio", "cannot generate input_features for Gemma4Audio", marks=full),
        ("xmod", "can't run on input_ids and attention_mask: ValueError: Input language unknown"),
    ],
)
def test_inputs_that_attnlens_can_not_generate_are_named(name, problem):
    model = of_type(name)
    for call in (attnlens.inspect, attnlens.swap_kernel):
        with pytest.raises((ModelError, TextError), match=problem) as caught:
            call(model, windows=2)
        assert "--source" not in caught.value.remedy, "weights are read from a running model too"


def test_a_tower_that_does_not_run_is_skipped_and_attention_that_cannot_be_read_prevents_a_swap():
    voxtral = of_type("voxtral")
    skipped = attnlens.inspect(voxtral, analyzers=["symmetry"], **FEW).coverage.skipped
    assert {(skip.site.split(".")[1], skip.reason) for skip in skipped} == {("audio_tower", checks.NOT_RUN)}
    coverage = attnlens.swap_kernel(voxtral, "exponential", **SWAP).coverage
    assert (coverage.analysed, {skip.reason for skip in coverage.skipped}) == (8, {checks.NOT_RUN})
    led = of_type("led")  # its encoder attends in overlapping chunks
    with pytest.raises(ModelError, match="can't be swapped: its softmax has the shape"):
        attnlens.swap_kernel(led, "exponential", **SWAP)
    assert attnlens.swap_kernel(led, "exponential", layers="decoder.0", **SWAP).coverage.analysed == 4


def test_the_position_is_rotary_absolute_or_unknown():
    for name in ("llama", "nanochat", "hunyuan_v1_dense", "dinov3_vit"):
        model, options = of_type(name), {"length": 12} if name != "dinov3_vit" else {}
        model.model.to(torch.bfloat16)  # whose rounding must not hide a rotation
        report = attnlens.inspect(model, analyzers=["symmetry"], windows=1, **options)
        assert report.model.conventions.position == ("unknown" if "hunyuan" in name else "rotary"), name
    assert attnlens.inspect(family("bert"), source="weights", length=12).model.conventions.position == "absolute"


def test_the_task_of_a_model_depends_on_what_its_predictions_see():
    for name, task in (("llava", "causal"), ("paligemma", "hidden"), ("gemma3", "causal"), ("xlm", "masked")):
        model = of_type(name)
        assert task_of(model.model) == "causal"
        assert checks.find_task(model, inputs_of(model, 8, 2)) == task, name
    config = families.build("bert").config
    mask = (torch.arange(8) < 6).long()[None]
    for decodes, task in ((False, "hidden"), (True, "causal")):
        config.is_decoder = decodes
        model = loaded(tf.BertLMHeadModel(config).eval(), tiny.tokenizer("roberta"))
        assert checks.find_task(model, {"input_ids": torch.arange(20, 28)[None], "attention_mask": mask}) == task
    audio = of_type("qwen2_audio")
    assert task_of(audio.model) == "causal"
    assert task_of(families.build("whisper")) == "seq2seq"
    assert attnlens.swap_kernel(audio, "exponential", **SWAP).swap.kl == pytest.approx(0, abs=1e-6)
    assert last_states((torch.zeros(2, 3, 4),)) is None, "a plain tuple has no hidden states"


def test_what_a_model_reads_is_found_in_its_config_or_its_modules(monkeypatch):
    detr = of_type("detr")
    assert detr.model.config.is_encoder_decoder
    assert not texts.reads_text(detr)
    assert set(inputs_of(detr, 5)) == {"pixel_values"}
    t5, ids = families.build("t5"), torch.arange(4)[None] + 3
    expected = sequences.shift_right(t5, ids)
    del t5.config.__dict__["decoder_start_token_id"]
    t5.config.pad_token_id = None
    t5.generation_config.decoder_start_token_id = 0
    assert torch.equal(sequences.shift_right(t5, ids), expected), "the start token of the generation config"
    bert = families.build("bert")
    monkeypatch.setattr(bert.config, "get_text_config", lambda: tf.CanineConfig())
    assert texts.vocabulary(bert) == families.VOCABULARY, "read from the embedding"
    assert texts.vocabulary(model_types.build("canine")) is None


def test_swins_windows_are_averaged_by_image():
    config = tf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
    swin = loaded(model_types.sharpened(tf.SwinModel(config).eval().requires_grad_(False)))
    report = attnlens.inspect(swin, windows=3, analyzers=["symmetry"])
    assert report.coverage.complete
    assert {head.measures["tokens.share_key"].n for head in report} == {3}
    assert {check.verdict for check in attnlens.doctor(swin).doctor} == {"agrees"}


def test_a_matcher_that_finds_nothing_to_attend_to_is_refused():
    model = model_types.build("lightglue")
    inputs = {"pixel_values": torch.randn(1, 2, 3, 96, 96, generator=torch.Generator().manual_seed(0))}
    assert hooks.survey(model, inputs)
    for module in model.modules():
        if hasattr(module, "keypoint_threshold"):
            module.keypoint_threshold = 2.0  # of a probability
    with pytest.raises(ModelError, match="does not run attention on this input"):
        hooks.survey(model, inputs)


def scale(factor):
    return lambda model: [parameter.mul_(factor) for parameter in model.parameters()]


def put(value):
    return lambda model: model.transformer.h[1].attn.c_attn.weight[3].index_fill_(0, torch.tensor(5), value)


def keyless(model):
    for block in model.transformer.h:
        block.attn.c_attn.weight[:, :64] = 0
        block.attn.c_attn.bias[:64] = 0


def identical(model):
    for block in model.transformer.h:
        weight = block.attn.c_attn.weight
        weight.copy_(torch.cat([weight[:, 32 * part : 32 * part + 8].repeat(1, 4) for part in range(3)], 1))


CHANGES = {
    **{"all zero": scale(0.0), "1e-40": scale(1e-40), "1e30": scale(1e30), "all NaN": scale(math.nan)},
    **{"one NaN": put(math.nan), "one Inf": put(math.inf)},
    **{"no queries and keys": keyless, "identical heads": identical},
}
SIZES = {"one head": {"n_head": 1}, "head_dim 1": {"n_head": 32}, "one layer": {"n_layer": 1}}
TINY = {"windows": 2, "length": 16}
VERBS = {
    "inspect": lambda model: attnlens.inspect(model, **TINY),
    "ksvd": lambda model: attnlens.inspect(model, analyzers=["ksvd"], **TINY),
    "doctor": lambda model: attnlens.doctor(model, backends=["eager"], **TINY),
    "rbf": lambda model: attnlens.swap_kernel(model, ["rbf", "linear"], allow_signed=True, generate=4, **TINY),
    "rank": lambda model: attnlens.swap_kernel(model, "rank:1", **TINY, **BARE),
    "sweep": lambda model: attnlens.swap_kernel(model, "rbf", sweep="layers", **TINY, **BARE),
    "head": lambda model: attnlens.converge_head(model, head=(0, 0), iterations=5, **TINY),
}
NOT_FINITE = dict.fromkeys(("rbf", "rank", "sweep"), "contains NaN or Inf")
REFUSED = {
    "all zero": {"head": "no query sees two different tokens"},
    "1e-40": {"head": "no query sees two different tokens"},
    "no queries and keys": {"head": "the largest scores are tied in all"},
    "all NaN": {"head": "NaN or Inf in every sequence", **dict.fromkeys(("inspect", "ksvd"), "contains NaN or Inf")},
    "1e30": dict.fromkeys(("inspect", "ksvd", "rbf", "rank", "sweep", "head"), "overflow"),
}
SOME = {
    **{"all zero": ["ksvd", "doctor"], "1e-40": ["head"], "1e30": ["rbf"], "all NaN": ["ksvd"], "one head": ["rbf"]},
    **{"one NaN": ["inspect", "rank"], "one Inf": ["sweep"], "no queries and keys": ["sweep"]},
    **{"identical heads": ["head"], "head_dim 1": ["ksvd"], "one layer": ["rank"]},
}
EACH = [pytest.param({name: VERBS}, marks=full, id=name) for name in (*CHANGES, *SIZES)]


def degenerate(name):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4} | SIZES.get(name, {})
    model = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes)).eval()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight *= 60
        CHANGES.get(name, scale(1))(model)
    return loaded(model, tiny.tokenizer("gpt2"))


@pytest.mark.usefixtures("without_layout")
@pytest.mark.parametrize("cases", [pytest.param(SOME, id="some"), *EACH])
def test_a_degenerate_model_is_measured_or_refused_with_the_true_reason(cases, tmp_path):
    for name, verb in ((name, verb) for name, verbs in cases.items() for verb in verbs):
        problems = (NOT_FINITE if name in ("all NaN", "one NaN", "one Inf") else {}) | REFUSED.get(name, {})
        if verb in problems:
            with pytest.raises(AttnlensError, match=problems[verb]):
                VERBS[verb](degenerate(name))
            continue
        report = VERBS[verb](degenerate(name))
        report.write_json(tmp_path / "report.json")  # which can't hold NaN
        assert attnlens.read_report(tmp_path / "report.json").to_json() == report.to_json()
        for head in report.heads:
            for measure, value in head.measures.items():
                assert (value.value is None) == (value.reason is not None), (name, verb, measure)
        if verb == "inspect" and name in ("one NaN", "one Inf"):
            skipped = [skip.heads for skip in report.coverage.skipped if "contains NaN or Inf" in skip.reason]
            assert {head for heads in skipped for head in heads} == {0}
        if verb in ("inspect", "rbf", "sweep"):
            assert views.save_pictures(report, tmp_path / "page.svg")
