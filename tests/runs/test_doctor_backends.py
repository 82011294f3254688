"""Tests that doctor names planted faults of attention backends and masks, and reports none in healthy models."""

import families
import pytest
import torch
import transformers as tf
from hostile import refused
from junitparser import JUnitXml
from loaded import family, loaded
from program import invoke
from transformers import cache_utils, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface
from transformers.models.gemma2 import modeling_gemma2

import attnlens
from attnlens.errors import ModelError, UsageError
from attnlens.report import export
from attnlens.report.findings import find
from attnlens.report.shapes import Shapes

PLAIN = {"length": 16, "windows": 2}


def checked(model, **options):
    """Return each backend's check and its tests of masks, by name."""
    report = attnlens.doctor(family(model) if isinstance(model, str) else model, **PLAIN | options)
    return {each.backend: (each, {mask.mask: mask for mask in each.masks}) for each in report.backends}


def plant(monkeypatch, change, backend="sdpa"):
    """Give one backend another mask: `change` maps the keywords of transformers' mask function to others."""
    honest = AttentionMaskInterface._global_mapping[backend]

    def faulty(**options):
        return honest(**options | change(options))

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, backend, faulty)


def widen(monkeypatch, tokens):
    """Make all sliding windows wider by this many tokens."""
    honest = masking_utils.sliding_window_causal_mask_function
    monkeypatch.setattr(masking_utils, "sliding_window_causal_mask_function", lambda width: honest(width + tokens))


OTHERS = ("gpt2", "gemma2", "gemma3", "albert", "bart", "bloom")
"""Models whose masks are of the same kinds as those of the others."""


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "mistral", "bert", "t5", "whisper", "gpt_neo", "gpt_oss"),
        *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS),
    ],
)
def test_healthy_models_have_no_fault_under_any_mask(name):
    backends = checked(name)
    assert list(backends) == (["eager"] if name in ("bloom", "gemma2", "gpt_neo", "gpt_oss") else ["eager", "sdpa"])
    causal = name not in ("bert", "albert")
    expected = {"padding-left", "padding-right", "causal" if causal else "bidirectional"}
    expected |= {"cache"} if causal else set()
    expected |= {"packed"} if name in ("gpt2", "llama", "mistral", "gemma2", "gemma3", "gpt_neo") else set()
    expected |= {"window"} if name in ("mistral", "gemma2", "gemma3", "gpt_neo", "gpt_oss") else set()
    expected |= {"bidirectional"} if name in ("t5", "bart") else set()
    for check, masks in backends.values():
        assert check.verdict == "agrees"
        assert check.output_error < 1e-6
        assert check.greedy_agreement == 1
        assert all(site.error < 1e-5 for site in check.sites)
        tested = {mask for mask, each in masks.items() if each.verdict == "agrees"}
        assert tested == expected
        assert tested == set(masks)
        assert not any(each.faults for each in masks.values())


def shift(options):
    """Shift a causal mask by one token."""
    mask = options["mask_function"]
    return {"mask_function": lambda b, h, q, k: mask(b, h, q + 1, k), "allow_is_causal_skip": False}


@pytest.mark.parametrize(
    ("name", "backend", "sites"),
    [
        ("llama", "sdpa", "model.layers.{}.self_attn"),
        ("whisper", "sdpa", "model.decoder.layers.{}.self_attn"),
        pytest.param("gemma2", "eager", "model.layers.{}.self_attn", marks=pytest.mark.full),
    ],
)
def test_a_causal_mask_off_by_one_in_one_backend_is_named(monkeypatch, name, backend, sites):
    plant(monkeypatch, shift, backend)
    backends = checked(name, masks="causal")
    check, masks = backends.pop(backend)
    assert all(other.verdict == "agrees" for other, _ in backends.values())
    assert check.verdict == masks["causal"].verdict == "differs"
    faults = masks["causal"].faults
    assert [(fault.kind, fault.site) for fault in faults] == [("sees", sites.format(layer)) for layer in (0, 1)]
    assert all(fault.token == fault.output + 1 for fault in faults)
    missed = 12 * (name == "gemma2")  # the window of its first layer is off by one, too
    assert masks["causal"].count == 2 * 15 + missed


def test_faults_of_models_with_several_parts_name_the_layer_of_its_part(monkeypatch):
    plant(monkeypatch, shift)
    report = attnlens.doctor(family("t5"), masks="causal", **PLAIN)
    (masks,) = (each.masks for each in report.backends if each.backend == "sdpa")
    (number, *_) = (fault.layer for fault in masks[0].faults)
    name = report.model.layer_name(number)
    assert name.startswith("decoder.")
    assert number != int(name.removeprefix("decoder."))
    texts = {form: export.WRITERS[form](report) for form in ("junit", "markdown", "html")}
    texts["screen"] = " ".join(finding.answer for finding in find(Shapes(report)))
    for form, text in texts.items():
        assert f"layer {name} (decoder.block." in text, form
        assert f"layer {number} " not in text, form


@pytest.mark.parametrize(
    ("model", "only"), [("mistral", True), ("mistral", False), pytest.param("gemma2", False, marks=pytest.mark.full)]
)
def test_a_window_that_is_one_token_too_wide_is_named_even_if_all_backends_agree(monkeypatch, model, only):
    if only:
        wide = masking_utils.sliding_window_causal_mask_function(6)
        plant(monkeypatch, lambda _options: {"mask_function": wide})
    else:
        widen(monkeypatch, 1)
    backends = checked(model, masks="window")
    for name, (check, masks) in backends.items():
        if only and name == "eager":
            assert check.verdict == "agrees"
            continue
        first = masks["window"].faults[0]
        assert (first.kind, first.layer, first.output - first.token) == ("sees", 0, 5)


def test_a_wrong_window_is_named_before_the_masks_that_it_breaks(monkeypatch):
    widen(monkeypatch, 1)
    report = attnlens.doctor(family("mistral"), backends="eager", **PLAIN)
    (answer,) = (each.answer for each in find(Shapes(report)) if each.question == "Masks right?")
    assert answer.startswith("No: eager, window: token ")
    assert answer.endswith("which can also explain the faults under causal, padding-left, padding-right, cache.")


def test_two_faults_are_both_named(monkeypatch):
    plant(monkeypatch, lambda _options: {"attention_mask": None})
    forget_positions(monkeypatch)
    report = attnlens.doctor(family("llama"), masks="causal,padding-left,cache", backends="sdpa", **PLAIN)
    (answer,) = (each.answer for each in find(Shapes(report)) if each.question == "Masks right?")
    assert answer.startswith("No: sdpa, padding-left: token ")
    assert "; sdpa, cache: token 3 differs" in answer


def forget_positions(monkeypatch):
    """Make the cache drop its first position at each step."""
    honest = cache_utils.DynamicLayer.update

    def forget(self, keys, values, *args, **kwargs):
        honest(self, keys, values, *args, **kwargs)
        if keys.shape[2] == 1:
            self.keys, self.values = self.keys[:, :, 1:], self.values[:, :, 1:]
        return self.keys, self.values

    monkeypatch.setattr(cache_utils.DynamicLayer, "update", forget)


def test_a_window_that_is_too_narrow_misses_a_token(monkeypatch):
    widen(monkeypatch, -1)
    fault = checked("mistral", masks="window")["eager"][1]["window"].faults[0]
    assert (fault.kind, fault.output - fault.token) == ("misses", 4)


def test_packed_documents_that_leak_are_named(monkeypatch):
    plant(monkeypatch, lambda _options: {"mask_function": causal_mask_function})
    backends = checked("llama")
    assert backends["eager"][0].verdict == "agrees"
    _, masks = backends["sdpa"]
    assert {name for name, mask in masks.items() if mask.verdict == "differs"} == {"packed"}
    fault = masks["packed"].faults[0]
    assert (fault.kind, fault.layer) == ("sees", 0)
    assert fault.token < 2 <= fault.output or fault.token < 4 <= fault.output


def test_packing_is_tested_only_if_the_model_separates_documents_or_it_is_requested(monkeypatch):
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda _places: None)
    assert "packed" not in checked("llama")["eager"][1]
    requested = checked("llama", masks="packed")["eager"][1]["packed"]
    assert requested.verdict == "differs"
    assert requested.faults[0].kind == "sees"


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *(("llama", "sdpa"), ("bert", "sdpa"), ("whisper", "sdpa")),
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("t5", "sdpa"), ("gemma2", "eager"))),
    ],
)
def test_padding_that_is_read_is_named(monkeypatch, name, backend):
    plant(monkeypatch, lambda _options: {"attention_mask": None}, backend)
    backends = checked(name)
    _, masks = backends.pop(backend)
    assert all(other.verdict == "agrees" for other, _ in backends.values())
    wrong = {mask for mask, each in masks.items() if each.verdict == "differs"}
    # no token of a causal model sees padding on its right
    assert wrong == {"padding-left"} | ({"padding-right"} if name in ("bert", "t5") else set())
    assert masks["padding-left"].faults[0].token < 2 <= masks["padding-left"].faults[0].output


@pytest.mark.parametrize(
    ("name", "token", "layer"),
    [
        *(("llama", 3, 0), ("whisper", 3, 2)),
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("t5", 3, 2), ("gemma2", 6, 0))),
    ],
)
def test_a_cache_that_drops_a_position_is_named(monkeypatch, name, token, layer):
    forget_positions(monkeypatch)
    backends = checked(name)
    # the mask of eager attention still has a column for the dropped token
    assert backends["eager"][1]["cache"].reason.startswith(f"token {token} can't be decoded with the cache")
    for check, masks in backends.values():
        assert check.verdict == "differs"
        assert {name for name, mask in masks.items() if mask.verdict == "differs"} == {"cache"}
    if "sdpa" in backends:
        first = backends["sdpa"][1]["cache"].faults[0]
        assert (first.kind, first.output, first.layer) == ("differs", token, layer)
        assert backends["sdpa"][1]["cache"].reason == "the cache contains 3 of 6 tokens"


def coarse_attention(module, query, key, value, mask, **options):
    """Compute attention from queries, keys and values that are rounded to bfloat16."""
    mask = mask.bfloat16() if mask is not None and mask.is_floating_point() else mask
    parts = [part.bfloat16() for part in (query, key, value)]
    output, weights = sdpa_attention_forward(module, *parts, mask, **options)
    return output.to(query.dtype), weights


def coarse_softmax(
    module, query, key, value, attention_mask, scaling=None, softcap=None, position_bias=0.0, is_causal=None, **_more
):
    """Compute attention with the softmax in bfloat16."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)) + position_bias
    if attention_mask is None:
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool)
        causal = module.is_causal if is_causal is None else is_causal
        attention_mask = attention_mask.tril() if causal and query.shape[2] > 1 else attention_mask
    elif attention_mask.is_floating_point():
        attention_mask = attention_mask == 0
    scores = scores.masked_fill(~attention_mask, torch.finfo(torch.bfloat16).min)
    weights = scores.to(torch.bfloat16).softmax(-1).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


@pytest.mark.parametrize(
    ("name", "coarse"),
    [
        *(("bert", coarse_attention), ("mistral", coarse_attention)),
        *(("llama", coarse_softmax), ("whisper", coarse_softmax)),
        *(pytest.param(each, coarse_softmax, marks=pytest.mark.full) for each in ("t5", "gemma2")),
    ],
)
def test_attention_in_bfloat16_is_an_error_of_the_backend_not_of_its_masks(monkeypatch, name, coarse):
    backend = "eager" if name == "gemma2" else "sdpa"
    if backend == "eager":
        monkeypatch.setattr(modeling_gemma2, "eager_attention_forward", coarse)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", coarse)
    backends = checked(name)
    check, masks = backends.pop(backend)
    assert all(other.verdict == "agrees" for other, _ in backends.values())
    assert check.verdict == "differs"
    assert 1e-4 < check.output_error < 0.1
    assert check.sites[0].error > check.tolerance
    assert {mask.verdict for mask in masks.values()} == {"agrees"}


def test_a_fault_of_the_models_own_backend_is_not_blamed_on_float64(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", coarse_softmax)
    report = attnlens.doctor(family("whisper"), **PLAIN)
    assert report.settings.dtype == "float64"
    assert not any("float32" in note for note in report.settings.notes)


def test_one_pair_of_tokens_that_leaks_far_from_the_start_is_named(monkeypatch):
    def leak(options):
        own = options["mask_function"]
        return {
            "mask_function": lambda b, h, q, k: own(b, h, q, k) | ((q == 8) & (k == 9)),
            "allow_is_causal_skip": False,
        }

    for backend in ("eager", "sdpa"):
        plant(monkeypatch, leak, backend)
    for _, masks in checked("llama", masks="causal").values():
        assert [(fault.kind, fault.output, fault.token) for fault in masks["causal"].faults[:1]] == [("sees", 8, 9)]


def test_tokens_beyond_a_chunk_are_hidden_as_declared():
    settings = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "intermediate_size": 48}
    sizes = families.GROUPED | settings | {"attention_chunk_size": 4, "num_hidden_layers": 2}
    config = tf.Llama4TextConfig(**sizes, layer_types=["chunked_attention", "full_attention"])
    torch.manual_seed(0)
    for check, masks in checked(loaded(tf.Llama4ForCausalLM(config).eval()), masks="causal").values():
        assert (check.verdict, masks["causal"].verdict) == ("agrees", "agrees"), masks


def test_a_leak_outside_attention_is_named_without_a_layer():
    model = family("llama")
    model.model.model.layers[0].mlp.register_forward_hook(lambda _m, _i, output: output + output.roll(-1, 1))
    for check, masks in checked(model, masks="causal").values():
        assert check.verdict == "differs"
        (fault,) = masks["causal"].faults
        assert (fault.kind, fault.layer, fault.site) == ("sees", None, None)
        assert fault.token > fault.output


def falcon():
    """Build a Falcon with ALiBi, whose bias transformers' eager attention adds to the mask and to the scores."""
    torch.manual_seed(0)
    return tf.FalconForCausalLM(tf.FalconConfig(**families.FALCON | {"alibi": True})).eval()


def test_falcon_with_alibi_differs_under_eager_attention():
    backends = checked(loaded(falcon()))
    assert backends["sdpa"][0].verdict == "agrees"
    check, masks = backends["eager"]
    assert check.verdict == "differs"
    assert check.output_error > 1e-3
    assert all(mask.verdict == "agrees" for mask in masks.values())


def test_a_requested_backend_that_cannot_run_is_named_with_the_reason():
    check, _ = checked("llama", backends="eager,flash_attention_2", masks="causal")["flash_attention_2"]
    assert check.verdict == "not run"
    assert "FlashAttention2" in check.reason or "flash" in check.reason.lower()
    check, _ = checked("bloom", backends=["sdpa"], masks="causal")["sdpa"]
    assert check.reason == "BloomForCausalLM has its own attention code, which does not support sdpa"
    refused(UsageError, lambda: attnlens.doctor("demo", backends="sdpaa"), "Did you mean 'sdpa'?")
    refused(UsageError, lambda: attnlens.doctor("demo", masks=["causl"]), "Did you mean 'causal'?")


def test_a_prefix_is_seen_by_all_outputs_and_an_absent_property_is_not_checked():
    for _, masks in checked("llama", masks="prefix,window,bidirectional").values():
        assert masks["prefix"].verdict == "agrees"
        assert masks["window"].reason == "the configuration declares no window"
        assert masks["bidirectional"].verdict == "not checked"


def neox(largest):
    """Build a GPT-NeoX whose scores are all near −`largest` and differ little."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(vocab_size=99, max_position_embeddings=64, **sizes)).eval()
    with torch.no_grad():
        for layer in model.gpt_neox.layers:
            joint = layer.attention.query_key_value
            weight, bias = joint.weight.view(4, 3, 12, 48), joint.bias.view(4, 3, 12)
            weight[:, :2, :11] *= 8
            weight[:, :2, 11] *= 0.1
            bias[:, 0, 11] = (largest * 12**0.5) ** 0.5
            bias[:, 1, 11] = -bias[:, 0, 11]
    return model


def test_the_rounding_of_the_models_own_softmax_is_not_an_error_of_attnlens(tmp_path):
    model = neox(1.2e5)
    report = attnlens.doctor(loaded(model), length=16)
    assert report.summary.verdict == "agrees"
    assert all(
        site.rounding > 1e-4 and "rounds scores of up to 1.2e+05 to float32" in site.reason for site in report.doctor
    )
    eager, sdpa = report.backends
    assert (eager.verdict, sdpa.verdict) == ("rounds", "agrees")
    assert eager.output_error > 1e-4 > 1e-10 > sdpa.output_error
    assert "rounds scores" in eager.reason
    assert not any(mask.verdict == "differs" for each in report.backends for mask in each.masks)
    # the control: a real error of the same size is not explained by small scores
    small = attnlens.doctor(loaded(neox(10.0)), length=16)
    assert all(site.rounding is None for site in small.doctor)
    model.save_pretrained(tmp_path)
    result = invoke("doctor", tmp_path, "--length", "16", "--dtype", "float16", "--no-progress")
    assert result.returncode == 2
    assert "overflows float16" in result.stderr
    assert "rightly" not in result.stdout + result.stderr


def test_a_model_that_cannot_be_compared_is_refused_only_if_asked(monkeypatch):
    from attnlens.runs import backends

    def fail(*_):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(backends.Comparison, "_prepare", fail)
    report = attnlens.doctor("demo", layers=[0], **PLAIN)
    assert report.backends == []
    assert "no such operator" in report.settings.notes[-1]
    refused(ModelError, lambda: attnlens.doctor("demo", layers=[0], masks="causal", **PLAIN), "no such operator")


def test_the_command_names_the_fault_exits_with_2_and_writes_junit(tmp_path):
    falcon().save_pretrained(tmp_path / "falcon")
    words = ("doctor", tmp_path / "falcon", "--length", "16", "--no-progress", "--masks", "causal")
    saved = tmp_path / "report.json"
    result = invoke(*words, "--junit", tmp_path / "tests.xml", "--json", saved)
    assert result.returncode == 2
    assert "eager (outputs)" in result.stderr
    assert "No: eager differs from float64 by" in " ".join(result.stdout.split())
    text = (tmp_path / "tests.xml").read_text()
    assert 'failures="1"' in text
    assert 'classname="attnlens.doctor.eager" name="outputs"' in text
    (causal,) = (line.split() for line in result.stdout.splitlines() if line.startswith("causal "))
    assert causal[1::2] == ["agrees", "agrees"], "the mask is right, whatever the outputs do"
    assert "its error includes that of the backend" in " ".join(result.stdout.split())
    assert f"attnlens report {saved} --table" in result.stdout
    assert invoke(*words, "--backends", "sdpa").returncode == 0
    missing = invoke(*words, "--backends", "sdpa,flex_attention")
    assert "flex_attention" in missing.stdout
    assert missing.returncode == 0
    assert invoke(*words, "--backends", "sdpa,flex_attention", "--strict").returncode == 3


def test_a_requested_mask_that_did_not_run_is_named_skipped_and_exits_with_3(tmp_path):
    report = attnlens.doctor(family("bert"), masks="causal,bidirectional", backends="eager", **PLAIN)
    (answer,) = (each.answer for each in find(Shapes(report)) if each.question == "Masks right?")
    assert answer.startswith(
        "Yes: every output depends on exactly the tokens that it may see (bidirectional). Not tested: causal: the model"
    )
    family("bert").model.save_pretrained(tmp_path / "bert")
    words = ("doctor", tmp_path / "bert", "--length", "16", "--no-progress", "--backends", "eager")
    result = invoke(*words, "--masks", "causal", "--strict", "--junit", tmp_path / "tests.xml")
    assert "Not tested: causal: the model has no causal attention." in " ".join(result.stdout.split())
    assert result.returncode == 3
    (suite,) = JUnitXml.fromfile(str(tmp_path / "tests.xml"))
    (case,) = (case for case in suite if case.name == "causal")
    assert suite.skipped == 1
    assert case.classname == "attnlens.doctor.eager"
    assert case.result[0].message == "the model has no causal attention"
    assert invoke(*words, "--masks", "causal").returncode == 0
    assert invoke(*words, "--strict").returncode == 0


def test_the_table_stands_once_before_the_next_commands():
    report = attnlens.doctor("demo", backends="eager", masks="causal", **PLAIN)
    titles = [section.title for section in export.summary(report, all_heads=True).sections]
    assert titles.count("Backends and masks") == 1
    assert titles[-1] == "Next"


def test_a_model_without_predictions_has_no_row_of_same_tokens():
    model = tf.BertModel(family("bert").model.config).eval()
    report = attnlens.doctor(loaded(model), backends="eager", **PLAIN)
    (section,) = (each for each in export.summary(report).sections if each.title == "Backends and masks")
    assert section.table.names[0].cells == ["outputs", "bidirectional", "padding-left", "padding-right"]
    verdicts, errors = section.table.columns
    assert set(verdicts.cells) == {"agrees"}
    assert "–" in errors.cells, "BERT has other positions under left padding"
    assert "not comparable because padding moves the positions" in section.notes[-1]


def test_the_screen_of_demo_is_at_most_24_lines_of_80_columns():
    lines = invoke("doctor", "demo", "--no-progress", COLUMNS="80").stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
