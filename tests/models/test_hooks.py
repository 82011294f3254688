"""Tests that watching attention changes no output, reaches every site, and restores the model."""

import itertools
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import families
import pytest
import torch
from loaded import sites_of
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from attnlens.kernels.attention import attend
from attnlens.models import hooks

identity = sys.modules[hooks.identity_error.__module__]  # `hooks.survey` is the function of that name

BOTH = ["encoder", "encoder", "decoder", "cross", "decoder", "cross"]
PARTS = {name: ["decoder"] * 2 for name in families.CAUSAL}
PARTS |= {"bert": ["encoder"] * 2, "vit": ["encoder"] * 2, "bart": BOTH, "t5": BOTH, "whisper": BOTH}


def built(name, dtype=torch.float32, **more):
    """The tiny model of a family in that precision, and its inputs."""
    model = families.build(name).to(dtype)
    if dtype == torch.float64:
        hooks.allow_float64(model)
    return model, hooks.as_dtype(families.inputs(name, model, **more), dtype)


def change(model, inputs, alter):
    """Relative change of the outputs if every call is altered before the model's own kernel answers it."""
    with torch.no_grad():
        return hooks.difference(model, inputs, hooks.answer_calls(model, lambda call: attend(alter(call), hooks.OWN)))


@pytest.mark.parametrize("name", families.REACHED)
def test_recomputed_attention_gives_the_familys_outputs_and_needs_its_mask(name):
    for padded in (True, False):
        model, inputs = built(name, torch.float64, padded=padded)
        assert hooks.identity_error(model, inputs) <= 2e-6
    if name in PARTS:
        assert [site.part for site in sites_of(model, inputs)] == PARTS[name]
    if "decoder" in PARTS.get(name, ()) and name not in ("t5", "whisper"):
        assert change(model, inputs, lambda call: replace(call, allowed=None, causal=False)) > 1e-3


def test_a_dropped_argument_or_a_mispaired_key_head_changes_the_outputs():
    for name, alter in {
        "gemma2": lambda call: replace(call, softcap=None),
        "gpt_oss": lambda call: replace(call, sinks=None),
        "t5": lambda call: replace(call, bias=None),
        "llama": lambda call: replace(call, key=call.key.flip(1), value=call.value.flip(1)),
    }.items():
        assert change(*built(name, torch.float64), alter) > 1e-3, name


def test_a_sliding_window_is_in_the_mask_and_a_query_that_sees_nothing_has_an_empty_row():
    model, inputs = built("mistral")
    (reached, *_) = hooks.survey(model, inputs)
    assert reached.call.visible().sum(-1).max() == model.config.sliding_window < inputs["input_ids"].shape[1] == 12
    model, inputs = built("gpt2")
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, :4] = 0
    (reached, *_) = hooks.survey(model, inputs)
    attention = reached.call.query_key(reached.site).attention
    assert (attention[0, :, :4] == 0).all()
    torch.testing.assert_close(attention[0, :, 4:].sum(-1), torch.ones(4, 8, dtype=torch.float64))


def test_sites_are_named_by_path_and_call_and_keep_their_numbers_over_batches():
    model, inputs = built("albert")
    sites, seen = sites_of(model, inputs), []
    assert len({site.path for site in sites}) == 1
    assert [(site.ordinal, site.layer, site.repeated) for site in sites] == [(0, 0, True), (1, 1, True), (2, 2, True)]
    assert len({site.name for site in sites}) == 3
    with torch.no_grad(), hooks.watch(model, sites, lambda site, _call: seen.append(site)):
        for _ in range(3):
            hooks.forward(model, inputs)
    assert seen == list(sites) * 3
    model, inputs = built("bert")
    surveyed = hooks.survey(model, inputs)
    names = [reached.site.name for reached in surveyed]
    assert names == [f"bert.encoder.layer.{layer}.attention.self" for layer in (0, 1)]
    with hooks.record_inputs(surveyed) as latest:
        hooks.forward(model, inputs)
    for reached in surveyed:
        torch.testing.assert_close(latest[reached.module], reached.arguments["hidden_states"])


def test_implementations_and_registered_names_are_restored_even_after_an_error():
    def state(model):
        chosen = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
        return chosen, set(AttentionInterface().valid_keys()), set(AttentionMaskInterface().valid_keys())

    model, inputs = built("clip")
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    before = state(model)
    assert {"eager", "sdpa"} <= {*before[0]}
    hooks.survey(model, inputs)
    with pytest.raises(ZeroDivisionError), hooks.answer_calls(model, lambda _call: 1 / 0):
        hooks.forward(model, inputs)
    assert state(model) == before


def test_a_module_without_a_softmax_is_distinguished_from_one_that_does_not_run():
    class HandWrittenAttention(torch.nn.Module):
        def forward(self, x):
            return x

    model, inputs = built("bert")
    model.bert.idle = HandWrittenAttention()
    assert hooks.run_survey(model, inputs).missed == {"bert.idle": None}
    model.bert.embeddings.by_hand = HandWrittenAttention()
    model.bert.embeddings.register_forward_hook(lambda module, _args, output: module.by_hand(output))
    reason = "it does not multiply values by a softmax of query–key products"
    assert hooks.run_survey(model, inputs).missed == {"bert.embeddings.by_hand": reason, "bert.idle": None}


@pytest.mark.parametrize("name", families.REACHED)
def test_half_precision_is_proven_site_by_site_in_float64(name, monkeypatch):
    model, inputs = built(name, torch.bfloat16)
    rounding = hooks.difference(model, inputs, hooks.answer_calls(model, identity.recompute))
    assert rounding > 1e-3 or name == "gemma2", "whose eager attention is ours, step by step"
    largest = identity.largest_site_error(model, inputs, partial(identity.widen, model))
    assert largest < 2e-7, "the modules' own softmax may be in float32"
    own = identity.recompute
    monkeypatch.setattr(identity, "recompute", lambda call: own(replace(call, scale=1.01 * call.scale)))
    assert 1e-3 < identity.largest_site_error(model, inputs, partial(identity.widen, model)) < 0.1, "control"
    assert {part.dtype for part in model.parameters()} == {torch.bfloat16}, "restored"


def test_one_attention_module_at_a_time_is_widened():
    (model, inputs), wide = built("llama", torch.bfloat16), []
    largest = max(sum(part.numel() for part in layer.self_attn.parameters()) for layer in model.model.layers)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda *_: wide.append(sum(p.numel() for p in model.parameters() if p.dtype == torch.float64))
        )
    assert hooks.identity_error(model, inputs) < 1e-7
    assert set(wide) == {0, largest}


def test_a_random_model_or_one_that_stays_in_half_precision_keeps_its_first_error(monkeypatch):
    model, inputs = built("bert", torch.bfloat16)
    assert hooks.identity_error(model, inputs) < 1e-7, "control"
    half = model.bert.encoder.layer[0].attention.self.query.register_forward_hook(lambda *args: args[-1].bfloat16())
    assert hooks.identity_error(model, inputs) > 1e-5
    half.remove()
    passes = itertools.count(1)
    random = model.bert.embeddings.register_forward_hook(lambda _module, _args, output: output * next(passes))
    assert hooks.identity_error(model, inputs) > 1e-5
    random.remove()
    original = identity.answer_calls
    untouched = lambda *args, **more: nullcontext() if "content" in more else original(*args, **more)  # noqa: E731
    monkeypatch.setattr(identity, "answer_calls", untouched)
    assert hooks.identity_error(model, inputs) > 1e-3, "a module that requests no attention proves nothing"


def test_answers_reach_the_module_contiguous():
    (model, inputs), seen = built("bert"), []
    with hooks.answer_calls(model, lambda call: attend(call, hooks.OWN).transpose(1, 2).contiguous().transpose(1, 2)):
        name = model.config._attn_implementation
        own = AttentionInterface()[name]
        watched = lambda *args, **more: (seen.append(own(*args, **more)[0]) or seen[-1], None)  # noqa: E731
        AttentionInterface._global_mapping[name] = watched
        hooks.forward(model, inputs)
    assert seen
    assert all(part.is_contiguous() for part in seen)


@pytest.mark.parametrize("name", families.REACHED)
def test_a_pass_without_logits_makes_the_same_calls_and_at_most_one_position_of_logits(name):
    model, inputs = built(name)
    recorded = []
    for options in ({}, hooks.without_logits(model)):
        calls = {}
        with torch.no_grad(), hooks.watch(model, sites_of(model, inputs), calls.__setitem__):
            result = hooks.forward(model, inputs, **options)
        recorded.append([(site, call.query, call.key, call.value) for site, call in calls.items()])
        if options:
            assert result.logits.shape[1] == 1
    for (site, *before), (other, *after) in zip(*recorded, strict=True):
        assert site == other
        assert all(map(torch.equal, before, after))
    assert bool(hooks.without_logits(model)) == (name in families.CAUSAL)
