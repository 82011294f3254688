"""Tests that watched attention is read as it is computed, reaches every site, and that the model is restored."""

import itertools
import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import families
import pytest
import torch
import transformers as tf
from loaded import sites_of
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from attnlens.analyzers.registry import select_analyzers
from attnlens.errors import ModelError
from attnlens.kernels import OWN
from attnlens.kernels.attention import attend
from attnlens.models import hooks, weights
from attnlens.models.hooks.interface import read_call

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


LEAST = torch.finfo(torch.float32).min
close = torch.testing.assert_close


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read(query, mask=None, **more):
    return read_call(torch.nn.Identity(), query, query, query, mask, more)


def split(mask):
    call = read(torch.zeros(mask.shape[0], 2, *mask.shape[-2:]), mask)
    return call.allowed, call.bias


def visibility():
    """Random visibility, each query sees itself; the first sequence sees everything, as Swin's first window does."""
    seen = torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(0)) > 0.3
    seen[0] = True
    return seen | torch.eye(6, dtype=torch.bool)


def test_any_number_that_takes_the_weight_away_is_a_mask():
    numbers = {torch.float32: (-50.0, -100.0, -1e4, -1e9, LEAST, -math.inf)}
    numbers |= {torch.bfloat16: (-100.0, -1e9), torch.float16: (-100.0, -65504.0)}
    seen = visibility()
    for dtype, visible in ((dtype, visible) for dtype in numbers for visible in (0.0, 1.0)):
        for number in numbers[dtype]:
            allowed, bias = split(torch.where(seen, visible, number).to(dtype))
            assert torch.equal(allowed, seen), (dtype, number, visible)
            assert bias is None, (dtype, number, visible)


def test_a_mask_on_top_of_a_position_bias_is_separated_from_it():
    seen, bias = visibility(), 8 * draw(1, 2, 6, 6, seed=1).clamp(-1, 1)
    for number in (-100.0, -1e4, -1e9, LEAST):
        allowed, added = split(bias + torch.where(seen, 0.0, number))
        assert torch.equal(allowed, seen.expand_as(allowed))
        # the bias of a masked pair is known from the sequence that sees it
        close(added, bias.expand_as(added), rtol=0, atol=1e-6)
    seen, bias = seen.clone(), bias.repeat(4, 1, 1, 1)
    seen[:, :, 0, 1] = False
    bias[1, :, 2] += 1.0
    allowed, added = split(bias + torch.where(seen, 0.0, -100.0))
    assert (added[:, :, 0, 1] == 0).all(), "no sequence sees this pair"
    unknown = allowed[0, :, 2] & allowed[1, :, 2] & ~allowed[2, :, 2]
    assert unknown.any()
    assert (added[2, :, 2][unknown] == 0).all(), "the bias differs between sequences"


DISTANCE = (torch.arange(300)[:, None] - torch.arange(300)).abs()
BIASES = {
    "ALiBi": -DISTANCE * torch.tensor([1.0, 0.5])[:, None, None],
    "learned by distance": -40 * DISTANCE.clamp(max=16).double().log1p()[None].float(),
    "one far value": torch.where(DISTANCE == 7, -30.0, 0.0)[None],
}


def test_a_deep_position_bias_is_not_a_mask():
    for name, number in itertools.product(BIASES, (0.0, -1e4, LEAST)):
        bias = BIASES[name][None]
        seen = torch.ones_like(bias, dtype=torch.bool) & ((torch.arange(300) < 280) | (number == 0))
        allowed, added = split(torch.where(seen, bias, number))
        assert torch.equal(allowed, seen), name
        close(added, bias * seen)
        assert added.min() < -20, "control: a fixed bound would cut it"


def test_scale_chosen_keys_and_position_bias_of_a_call_are_read():
    assert read(torch.ones(1, 2, 3, 16)).scale == 0.25, "one over the root of the head's width"
    assert read(torch.ones(1, 2, 3, 16), scaling=2.0).scale == 2.0
    for options, words in (({"scaling": 1j}, "scales its scores by a complex number"), ({"sinks": 1}, "separate sink")):
        with pytest.raises(ModelError, match=words):
            read(torch.ones(1, 2, 3, 16), **options)
    query, module = torch.ones(1, 2, 3, 4), torch.nn.Identity()
    module.indexer = SimpleNamespace(build_block_mask=lambda blocks, *_: torch.where(blocks, 0.0, LEAST))
    chosen = torch.tensor([[[0, 2], [1, 0], [2, 0]]], dtype=torch.int32)
    blocks = torch.tensor([[[[True, False, True], [True, True, False], [True, False, True]]]])
    for mask in (torch.ones(1, 1, 3, 3, dtype=torch.bool).tril(), None):  # an indexer's keys under the mask
        for indices in ({"indices": chosen}, {"block_indices": blocks}):
            call = read_call(module, query, query, query, mask, indices)
            assert call.allowed.int().tolist() == [[[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]]
            assert not call.causal
    few, many = draw(1, 2, 3, 4), draw(1, 4, 3, 4, seed=1)
    for key, value in ((few, many), (many, few)):  # heads that share a key or a value are neighbours
        call = read_call(torch.nn.Identity(), many, key, value, None, {})
        for ours, theirs in ((call.key, key), (call.value, value)):
            assert all(torch.equal(ours[:, head], theirs[:, head * theirs.shape[1] // 4]) for head in range(4))
    seen = visibility().expand(4, 2, 6, 6)
    beside, numbers = (8 * draw(1, heads, 6, 6, seed=1).clamp(-1, 1) for heads in (2, 1))
    call = read(torch.zeros(4, 2, 6, 6), torch.where(visibility(), numbers, LEAST), position_bias=beside)
    close(call.bias.expand(4, 2, 6, 6)[seen], (beside + numbers).expand(4, 2, 6, 6)[seen])


def test_one_row_of_a_mask_holds_for_all_queries(monkeypatch):
    monkeypatch.setattr("attnlens.kernels.attention.rows.TILE_BYTES", 1)  # tiles of 16 rows
    query, key, value = draw(3, 2, 3, 40, 4)
    seen = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    seen[1, ..., 30:] = False
    for mask in (seen, torch.where(seen, 0.0, LEAST)):
        call = read_call(torch.nn.Identity(), query, key, value, mask, {})
        assert call.allowed.shape == (2, 1, 40, 40)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen.expand(-1, -1, 40, -1))
        close(attend(call, OWN, "eager").transpose(1, 2), expected)


def drawn(model):
    for name, parameter in model.named_parameters():
        if "relative" in name:
            parameter.data.normal_()
        elif parameter.ndim > 1:
            sharp = 1.4 if "q_proj" in name or "k_proj" in name else 1.0
            parameter.data.normal_(std=sharp / parameter[0].numel() ** 0.5)
    return model.eval().requires_grad_(False)


def swin():
    """Shifted windows: its mask tells which patches were neighbours in the image, beside relative positions."""
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}

    def visible(reached):
        mask = reached.arguments["attention_mask"] == 0
        repeated = mask.repeat(reached.call.query.shape[0] // len(mask), 1, 1)
        return repeated[:, None], reached.module.relative_position_bias()

    return drawn(tf.SwinModel(tf.SwinConfig(**sizes))), torch.randn(2, 3, 16, 16), visible


def eomt():
    config = tf.EomtConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=8, num_blocks=2,
        num_queries=5, mlp_ratio=2, num_upscale_blocks=1, num_labels=3, num_register_tokens=1,
    )  # fmt: skip
    model = tf.EomtForUniversalSegmentation(config)
    model.attn_mask_probs.fill_(1.0)
    return drawn(model), torch.randn(2, 3, 32, 32), lambda reached: (reached.arguments["attention_mask"] == 1, None)


def plain_scores(query_key):
    return query_key.query.double() @ query_key.key.double().mT * query_key.scale


def largest_change(query_key, changed):
    """Largest difference of any symmetry measure of a site with other scores or another mask."""
    analyzer = next(one for one in select_analyzers(["symmetry"]) if one.source == "tokens")
    own, other = (analyzer.function(one) for one in (query_key, changed))
    return max(float((own[name] - other[name]).abs().nan_to_num(0).max()) for name in own)


@pytest.mark.parametrize("build", [swin, eomt])
def test_models_with_other_masks_read_as_with_a_boolean_one(build):
    torch.manual_seed(0)
    model, pixels, visible = build()
    inputs = {"pixel_values": pixels}
    sites = hooks.survey(model, inputs)
    masked = [reached for reached in sites if reached.arguments.get("attention_mask") is not None]
    assert masked
    assert hooks.identity_error(model, inputs) < hooks.IDENTITY_TOLERANCE
    for reached in masked:
        (seen, bias), call = visible(reached), reached.call
        assert not seen.all()
        assert torch.equal(call.allowed, seen.expand_as(call.allowed))
        ours = call.query_key(reached.site)
        scores = call.query.double() @ call.key.double().mT * call.scale + (0 if bias is None else bias)
        close(ours.logits, scores.double())
        close(ours.attention, scores.masked_fill(~seen, -math.inf).softmax(-1))
        added = (scores + torch.where(seen, 0.0, -100.0) - plain_scores(ours)).expand(*ours.query.shape[:-1], -1)
        unit = torch.eye(added.shape[-1], dtype=torch.float64).expand(*ours.key.shape[:-1], -1)
        query, key = torch.cat([ours.query.double(), added / ours.scale], -1), torch.cat([ours.key.double(), unit], -1)
        unmasked = replace(ours, query=query, key=key, bias=None, allowed=None)
        assert largest_change(ours, unmasked) > 0.05, "control: as scores the mask is seen as structure"
        assert largest_change(ours, replace(ours, bias=scores - plain_scores(ours))) < 1e-6
    if build is swin:  # its mask is made for all windows together
        for reached, factors in zip(sites, weights.factors(model, sites, sites), strict=True):
            assert factors.rotation is None
            close(factors.maps.query, reached.module.q_proj.weight.double().view(2, 8, 16).mT, rtol=1e-6, atol=1e-6)
