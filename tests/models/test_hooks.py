"""Tests that watching attention changes nothing by itself, misses nothing, and leaves nothing behind."""

import itertools
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import families
import pytest
import torch

from attnlens.errors import ModelError
from attnlens.kernels import parsed
from attnlens.kernels.attention import attend
from attnlens.models import hooks

identity = sys.modules[hooks.identity_error.__module__]  # `hooks.survey` is the function of that name

TOKENS = 12
RBF = hooks.Replacement(parsed("rbf:gamma=1"))
REACHED = families.REACHED
CAUSAL = families.CAUSAL


def precise(name):
    model = families.build(name).double()
    hooks.allow_float64(model)
    return model


def fed(name, model, **more):
    return hooks.as_dtype(families.inputs(name, model, **more), torch.float64)


def changed(model, inputs, alter):
    """Relative change of the outputs when every call is altered before it is answered with the model's own kernel."""
    with torch.no_grad():
        own = hooks.real_outputs(hooks.forward(model, inputs), inputs)
        with hooks.answer_calls(model, lambda call: attend(alter(call), hooks.OWN)):
            again = hooks.real_outputs(hooks.forward(model, inputs), inputs)
    return max(float((a - b).norm() / a.norm()) for a, b in zip(own, again, strict=True))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", REACHED)
def test_own_kernel_through_the_door_is_the_models_own_output(name, padded):
    model = precise(name)
    assert hooks.identity_error(model, fed(name, model, padded=padded)) <= 2e-6


@pytest.mark.parametrize("name", [*CAUSAL, "bart"])
def test_a_dropped_mask_is_seen(name):
    model = precise(name)
    assert changed(model, fed(name, model), lambda call: replace(call, allowed=None, causal=False)) > 1e-3


@pytest.mark.parametrize(
    ("name", "field"), [("gemma2", "softcap"), ("gpt_oss", "sinks"), ("t5", "bias")], ids=["softcap", "sinks", "bias"]
)
def test_a_dropped_argument_is_seen(name, field):
    model = precise(name)
    assert changed(model, fed(name, model), lambda call: replace(call, **{field: None})) > 1e-3


def test_mispaired_key_heads_are_seen():
    model = precise("llama")
    alter = lambda call: replace(call, key=call.key.flip(1), value=call.value.flip(1))  # noqa: E731  # one expression
    assert changed(model, fed("llama", model), alter) > 1e-3


def test_a_window_narrower_than_the_text_is_in_the_mask():
    model = precise("mistral")
    reached = hooks.survey(model, fed("mistral", model))
    seen = reached[0].call.visible().sum(-1)
    assert seen.max() == model.config.sliding_window < TOKENS


def test_sites_are_named_by_path_and_call():
    albert = families.build("albert")
    sites = [found.site for found in hooks.survey(albert, families.inputs("albert", albert))]
    assert len({site.path for site in sites}) == 1
    assert [(site.ordinal, site.layer, site.repeated) for site in sites] == [(0, 0, True), (1, 1, True), (2, 2, True)]
    assert len({site.name for site in sites}) == 3
    bert = families.build("bert")
    names = [found.site.name for found in hooks.survey(bert, families.inputs("bert", bert))]
    assert names == [f"bert.encoder.layer.{layer}.attention.self" for layer in (0, 1)]


@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_encoder_decoder_and_cross_attention_are_told_apart(name):
    model = families.build(name)
    parts = [found.site.part for found in hooks.survey(model, families.inputs(name, model))]
    assert parts == ["encoder", "encoder", "decoder", "cross", "decoder", "cross"]


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_bidirectional_attention_is_an_encoders(name):
    model = families.build(name)
    assert {found.site.part for found in hooks.survey(model, families.inputs(name, model))} == {"encoder"}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_attention_is_a_decoders(name):
    model = families.build(name)
    assert {found.site.part for found in hooks.survey(model, families.inputs(name, model))} == {"decoder"}


def implementations(model):
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


def test_everything_is_restored_even_after_an_error():
    model = families.build("clip")
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    before = implementations(model)
    assert "eager" in before
    assert "sdpa" in before
    with pytest.raises(ZeroDivisionError), hooks.answer_calls(model, lambda _call: 1 / 0):
        hooks.forward(model, families.inputs("clip", model))
    assert implementations(model) == before


def test_the_registered_names_go_away():
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    model = families.build("bert")
    before = set(AttentionInterface().valid_keys()), set(AttentionMaskInterface().valid_keys())
    hooks.survey(model, families.inputs("bert", model))
    assert (set(AttentionInterface().valid_keys()), set(AttentionMaskInterface().valid_keys())) == before


@pytest.mark.parametrize(("name", "why"), [("yoso", "its own attention code"), ("mamba", "no softmax attention")])
def test_a_model_out_of_reach_is_refused_by_name(name, why):
    model = families.build(name)
    with pytest.raises(ModelError) as refusal:
        hooks.survey(model, families.inputs(name, model))
    assert type(model).__name__ in refusal.value.problem
    assert why in refusal.value.problem
    assert "\n" not in refusal.value.problem
    assert "Llama" in refusal.value.remedy, "what does work is named"
    assert "\n" not in refusal.value.remedy


def test_layers_keep_their_numbers_over_batches():
    model = families.build("albert")
    inputs = families.inputs("albert", model)
    sites = tuple(found.site for found in hooks.survey(model, inputs))
    seen = []
    with torch.no_grad(), hooks.watch(model, sites, lambda site, _call: seen.append(site)):
        for _ in range(3):
            hooks.forward(model, inputs)
    assert seen == list(sites) * 3


def test_replacing_the_kernel_changes_the_chosen_sites_only():
    model = precise("gpt2")
    inputs = fed("gpt2", model)
    sites = tuple(found.site for found in hooks.survey(model, inputs))
    with torch.no_grad():
        own = hooks.real_outputs(hooks.forward(model, inputs), inputs)[0]
        with hooks.replace(model, sites, dict.fromkeys(sites, hooks.Replacement(hooks.OWN))):
            same = hooks.real_outputs(hooks.forward(model, inputs), inputs)[0]
        with hooks.replace(model, sites, {}):
            none = hooks.real_outputs(hooks.forward(model, inputs), inputs)[0]
        with hooks.replace(model, sites, dict.fromkeys(sites[1:], RBF)):
            other = hooks.real_outputs(hooks.forward(model, inputs), inputs)[0]
    torch.testing.assert_close(same, own)
    torch.testing.assert_close(none, own)
    assert (other - own).norm() > 1e-3 * own.norm()


def test_a_swap_that_misses_a_site_is_an_error():
    model = families.build("bart")
    sites = tuple(found.site for found in hooks.survey(model, families.inputs("bart", model)))
    ids = families.inputs("bart", model)["input_ids"]
    with pytest.raises(ModelError, match="never reached"), hooks.replace(model, sites, dict.fromkeys(sites, RBF)):
        model.get_encoder()(input_ids=ids)


def test_a_query_that_may_see_nothing_has_an_empty_row():
    model = families.build("gpt2")
    inputs = families.inputs("gpt2", model)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, :4] = 0
    found = hooks.survey(model, inputs)[0]
    attention = found.call.query_key(found.site).attention
    assert torch.equal(attention[0, :, :4], torch.zeros_like(attention[0, :, :4]))
    torch.testing.assert_close(attention[0, :, 4:].sum(-1), torch.ones(4, TOKENS - 4, dtype=torch.float64))


def test_a_module_without_a_softmax_is_told_from_one_that_is_not_run():
    model = families.build("bert")

    class HandWrittenAttention(torch.nn.Module):
        def forward(self, x):
            return x

    inputs = families.inputs("bert", model)
    model.bert.idle = HandWrittenAttention()
    assert hooks.run_survey(model, inputs).missed == {"bert.idle": None}
    model.bert.embeddings.by_hand = HandWrittenAttention()
    model.bert.embeddings.register_forward_hook(lambda module, _args, output: module.by_hand(output))
    assert hooks.run_survey(model, inputs).missed == {
        "bert.embeddings.by_hand": "it has no softmax over query–key products that weights the values",
        "bert.idle": None,
    }


@pytest.mark.parametrize("name", REACHED)
def test_half_precision_is_proven_site_by_site_in_float64(name, monkeypatch):
    model = families.build(name).bfloat16()
    inputs = hooks.as_dtype(families.inputs(name, model), torch.bfloat16)
    rounding = hooks.difference(model, inputs, hooks.answer_calls(model, identity.recompute))
    assert rounding > 1e-3 or name == "gemma2", "whose eager attention is ours, step by step"
    largest = identity.largest_site_error(model, inputs, partial(identity.widen, model))
    assert largest < 2e-7, "the modules' own softmax may be in float32"
    own = identity.recompute
    monkeypatch.setattr(identity, "recompute", lambda call: own(replace(call, scale=1.01 * call.scale)))
    assert 1e-3 < identity.largest_site_error(model, inputs, partial(identity.widen, model)) < 0.1, "a misreading"
    assert {part.dtype for part in model.parameters()} == {torch.bfloat16}, "given back"


def test_one_attention_module_at_a_time_is_widened():
    model = families.build("llama").bfloat16()
    most = max(sum(part.numel() for part in layer.self_attn.parameters()) for layer in model.model.layers)
    wide = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda *_: wide.append(sum(p.numel() for p in model.parameters() if p.dtype == torch.float64))
        )
    assert hooks.identity_error(model, families.inputs("llama", model)) < 1e-7
    assert set(wide) == {0, most}


def test_a_model_that_does_not_repeat_itself_or_can_not_run_in_float64_is_measured_in_its_own_type():
    model = families.build("bert").bfloat16()
    inputs = families.inputs("bert", model)
    assert hooks.identity_error(model, inputs) < 1e-7, "a control"
    single = model.bert.encoder.layer[0].attention.self.query.register_forward_hook(lambda *found: found[-1].bfloat16())
    assert hooks.identity_error(model, inputs) > 1e-5
    single.remove()
    passes = itertools.count(1)
    model.bert.embeddings.register_forward_hook(lambda _module, _args, output: output * next(passes))
    assert hooks.identity_error(model, inputs) > 1e-5


def test_what_the_door_gives_back_is_contiguous_as_transformers_own_functions_are():
    model = families.build("bert")
    inputs = families.inputs("bert", model)
    seen = []
    from transformers.modeling_utils import AttentionInterface

    with hooks.answer_calls(model, lambda call: attend(call, hooks.OWN).transpose(1, 2).contiguous().transpose(1, 2)):
        name = model.config._attn_implementation
        own = AttentionInterface()[name]

        def watched(*args, **more):
            seen.append(own(*args, **more)[0])
            return seen[-1], None

        AttentionInterface._global_mapping[name] = watched
        hooks.forward(model, inputs)
    assert seen
    assert all(part.is_contiguous() for part in seen)


def test_a_module_that_asks_for_no_attention_by_itself_proves_nothing(monkeypatch):
    model = families.build("llama").bfloat16()
    inputs = families.inputs("llama", model)
    assert hooks.identity_error(model, inputs) < 1e-7, "a control"
    honest = identity.answer_calls

    def untouched(model, answer, **more):
        return nullcontext() if "content" in more else honest(model, answer, **more)

    monkeypatch.setattr(identity, "answer_calls", untouched)
    assert hooks.identity_error(model, inputs) > 1e-3, "the first error stands"
