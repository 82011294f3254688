"""Tests that a mask is a mask whatever number stands for it, and a position bias a bias however deep."""

import math
from dataclasses import replace

import pytest
import torch
import transformers as tf

from attnlens.analyzers.registry import select_analyzers
from attnlens.kernels import OWN
from attnlens.kernels.attention import attend
from attnlens.models import hooks, weights
from attnlens.models.hooks.interface import read_call
from attnlens.records import Call, Site

LEAST = torch.finfo(torch.float32).min


def split(mask):
    query = torch.zeros(mask.shape[0], 2, *mask.shape[-2:])
    call = read_call(torch.nn.Identity(), query, query, query, mask, {})
    return call.allowed, call.bias


def windows(share=0.3, tokens=6):
    """Random visibility, each query sees itself; the first sequence sees everything, as Swin's first window does."""
    seen = torch.rand(4, 1, tokens, tokens, generator=torch.Generator().manual_seed(0)) > share
    seen[0] = True
    return seen | torch.eye(tokens, dtype=torch.bool)


def relative(heads=2, tokens=6, size=8.0):
    return size * torch.randn(1, heads, tokens, tokens, generator=torch.Generator().manual_seed(1)).clamp(-1, 1)


NUMBERS = [(torch.float32, n) for n in (-50.0, -100.0, -1e4, -1e9, LEAST, -math.inf)]
NUMBERS += [(torch.bfloat16, -100.0), (torch.bfloat16, -1e9), (torch.float16, -100.0), (torch.float16, -65504.0)]


@pytest.mark.parametrize(("dtype", "number"), NUMBERS)
@pytest.mark.parametrize("visible", [0.0, 1.0])
def test_any_number_that_takes_the_weight_away_is_a_mask(dtype, number, visible):
    seen = windows()
    mask = torch.where(seen, visible, number).to(dtype)
    allowed, bias = split(mask)
    assert torch.equal(allowed, seen)
    assert bias is None


@pytest.mark.parametrize("number", [-100.0, -1e4, -1e9, LEAST])
def test_a_mask_on_top_of_a_position_bias_is_taken_apart(number):
    seen, bias = windows(), relative()
    allowed, added = split(bias + torch.where(seen, 0.0, number))
    assert torch.equal(allowed, seen.expand_as(allowed))
    # what a masked pair would have had is known from the sequence that sees it
    torch.testing.assert_close(added, bias.expand_as(added), rtol=0, atol=1e-6)


def test_the_bias_of_a_pair_that_no_sequence_sees_or_that_differs_between_them_is_zero():
    seen, bias = windows(), relative().repeat(4, 1, 1, 1)
    seen[:, :, 0, 1] = False
    bias[1, :, 2] += 1.0
    allowed, added = split(bias + torch.where(seen, 0.0, -100.0))
    assert (added[:, :, 0, 1] == 0).all()
    unknown = allowed[0, :, 2] & allowed[1, :, 2] & ~allowed[2, :, 2]
    assert unknown.any()
    assert (added[2, :, 2][unknown] == 0).all()


DISTANCE = (torch.arange(300)[:, None] - torch.arange(300)).abs()
BIASES = {
    "ALiBi": -DISTANCE * torch.tensor([1.0, 0.5])[:, None, None],
    "learned by distance": -40 * DISTANCE.clamp(max=16).double().log1p()[None].float(),
    "one far value": torch.where(DISTANCE == 7, -30.0, 0.0)[None],
}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("number", [0.0, -1e4, LEAST])
def test_a_deep_position_bias_is_no_mask_with_or_without_one(name, number):
    bias = BIASES[name][None]
    seen = torch.ones_like(bias, dtype=torch.bool)
    if number:
        seen = seen & (torch.arange(300) < 280)
    allowed, added = split(torch.where(seen, bias, number))
    assert torch.equal(allowed, seen)
    torch.testing.assert_close(added, bias * seen)
    assert added.min() < -20, "control: it reaches where a fixed bound would cut it"


def test_a_row_without_a_visible_key_is_empty_and_one_with_equal_entries_is_whole():
    for number, empty in ((LEAST, True), (-1e9, True), (-100.0, False), (-3.0, False)):
        mask = torch.zeros(1, 1, 4, 4)
        mask[0, 0, 1] = number
        allowed, _ = split(mask)
        assert allowed[0, 0, [0, 2, 3]].all()
        assert bool(allowed[0, 0, 1].any()) != empty  # −100 for every key leaves the softmax as it was


# --- the two models ---------------------------------------------------------------------------------------------------


def swin():
    model = tf.SwinModel(
        tf.SwinConfig(image_size=16, patch_size=2, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
    )
    return drawn(model), {"pixel_values": torch.randn(2, 3, 16, 16)}


def eomt():
    config = tf.EomtConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=8, num_blocks=2,
        num_queries=5, mlp_ratio=2, num_upscale_blocks=1, num_labels=3, num_register_tokens=1,
    )  # fmt: skip
    model = tf.EomtForUniversalSegmentation(config)
    model.attn_mask_probs.fill_(1.0)
    return drawn(model), {"pixel_values": torch.randn(2, 3, 32, 32)}


def drawn(model):
    for name, parameter in model.named_parameters():
        if "relative" in name:
            parameter.data.normal_()
        elif parameter.ndim > 1:
            sharp = 1.4 if "q_proj" in name or "k_proj" in name else 1.0
            parameter.data.normal_(std=sharp / parameter[0].numel() ** 0.5)
    return model.eval().requires_grad_(False)


def boolean_swin(found):
    """Shifted windows: which patches were neighbours in the image, and the table of relative positions."""
    mask = found.arguments["attention_mask"]
    count = found.call.query.shape[0] // len(mask)
    return (mask == 0).repeat(count, 1, 1)[:, None], found.module.relative_position_bias()


def boolean_eomt(found):
    return found.arguments["attention_mask"] == 1, None


@pytest.mark.parametrize(("build", "boolean"), [(swin, boolean_swin), (eomt, boolean_eomt)])
def test_models_with_other_masks_read_as_with_a_boolean_one(build, boolean):
    torch.manual_seed(0)
    model, inputs = build()
    masked = [found for found in hooks.survey(model, inputs) if found.arguments.get("attention_mask") is not None]
    assert masked
    assert hooks.identity_error(model, inputs) < hooks.IDENTITY_TOLERANCE
    for found in masked:
        seen, bias = boolean(found)
        assert not seen.all()
        call = found.call
        assert torch.equal(call.allowed, seen.expand_as(call.allowed))
        ours = call.query_key(found.site)
        scores = call.query.double() @ call.key.double().mT * call.scale + (0 if bias is None else bias)
        torch.testing.assert_close(ours.logits, scores.double())
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        torch.testing.assert_close(ours.attention, weights)
        old = scores + torch.where(seen, 0.0, -100.0)
        added = (old - plain_scores(ours)).expand(*ours.query.shape[:-1], -1) / ours.scale
        unit = torch.eye(added.shape[-1], dtype=torch.float64).expand(*ours.key.shape[:-1], -1)
        parts = {"query": torch.cat([ours.query.double(), added], -1), "key": torch.cat([ours.key.double(), unit], -1)}
        unmasked = readings(ours, replace(ours, **parts, bias=None, allowed=None))
        assert max(unmasked.values()) > 0.05, "control: as scores the mask is seen as structure"
        assert max(readings(ours, replace(ours, bias=scores - plain_scores(ours))).values()) < 1e-6


def test_weights_are_read_behind_a_mask_that_is_made_for_all_windows_together():
    model, inputs = swin()
    found = hooks.survey(model, inputs)
    for one, factors in zip(found, weights.factors(model, found, found), strict=True):
        assert factors.rotation is None
        expected = one.module.q_proj.weight.double().view(2, 8, 16).mT
        torch.testing.assert_close(factors.maps.query, expected, rtol=1e-6, atol=1e-6)


def plain_scores(query_key):
    """Products of queries and keys alone."""
    return query_key.query.double() @ query_key.key.double().mT * query_key.scale


def readings(query_key, changed):
    """Largest difference of each measure from those of the same site with other scores or another mask."""
    analyzer = next(one for one in select_analyzers(["symmetry"]) if one.source == "tokens")
    own, other = (analyzer.function(one) for one in (query_key, changed))
    return {name: float((own[name] - other[name]).abs().nan_to_num(0).max()) for name in own}


def test_a_call_without_a_scale_has_one_over_the_root_of_the_head_s_width():
    query = torch.ones(1, 2, 3, 16)
    assert read_call(torch.nn.Identity(), query, query, query, None, {}).scale == 0.25
    assert read_call(torch.nn.Identity(), query, query, query, None, {"scaling": 2.0}).scale == 2.0


def test_of_the_keys_under_the_mask_those_are_seen_that_an_indexer_chose():
    query, before = torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    chosen = torch.tensor([[[0, 2], [1, 0], [2, 0]]], dtype=torch.int32)
    call = read_call(torch.nn.Identity(), query, query, query, before, {"indices": chosen})
    assert call.allowed.int().tolist() == [[[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]]


@pytest.mark.parametrize("kind", ["boolean", "numbers"])
def test_one_row_of_a_mask_stands_for_all_queries(kind, monkeypatch):
    monkeypatch.setattr("attnlens.kernels.attention.rows.TILE_BYTES", 1)  # tiles of 16 rows
    query, key, value = torch.randn(3, 2, 3, 40, 4, generator=torch.Generator().manual_seed(0))
    seen = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    seen[1, ..., 30:] = False
    mask = seen if kind == "boolean" else torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    call = read_call(torch.nn.Identity(), query, key, value, mask, {})
    assert call.allowed.shape == (2, 1, 40, 40)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen.expand(-1, -1, 40, -1))
    torch.testing.assert_close(attend(call, OWN, "eager").transpose(1, 2), expected)


def test_a_position_bias_beside_a_mask_of_numbers_is_added_to_it():
    query, beside = torch.zeros(4, 2, 6, 6), relative()
    mask = torch.where(windows(), relative(heads=1), LEAST)
    call = read_call(torch.nn.Identity(), query, query, query, mask, {"position_bias": beside})
    seen = windows().expand(4, 2, 6, 6)
    torch.testing.assert_close(
        call.bias.expand(4, 2, 6, 6)[seen], (beside + relative(heads=1)).expand(4, 2, 6, 6)[seen]
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_factors_of_a_grouped_call_are_its_attention_head_by_head(softcap):
    draws = torch.Generator().manual_seed(2)
    query, key = (2 * torch.randn(1, heads, 5, 4, generator=draws) for heads in (6, 2))
    bias, seen = torch.randn(1, 6, 5, 5, generator=draws), torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    call = Call(query, key, key, 0.7, allowed=seen, bias=bias, softcap=softcap)
    found = call.query_key(Site("layer", 0, 0, "decoder")).attention[0]

    def naive(head, key_head):
        scores = 0.7 * query[0, head].double() @ key[0, key_head].double().T
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        return (scores + bias[0, head]).masked_fill(~seen[0, 0], -math.inf).softmax(-1)

    for head in range(6):
        torch.testing.assert_close(found[head], naive(head, head // 3), rtol=1e-6, atol=1e-7)
    assert (found[1] - naive(1, 1)).abs().max() > 0.05, "the control: query head 1 meets key head 0"


def test_some_queries_and_keys_of_a_sequence_are_those_and_no_others():
    draws = torch.Generator().manual_seed(3)
    query, key = torch.randn(3, 2, 5, 4, generator=draws), torch.randn(3, 2, 7, 4, generator=draws)
    bias = torch.randn(3, 2, 5, 7, generator=draws)
    whole = Call(query, key, key, 0.5, bias=bias, cross=True).query_key(Site("layer", 0, 0, "cross"))
    queries, keys = torch.tensor([0, 2, 3]), torch.tensor([1, 2, 5, 6])
    some = whole.sequences([2], queries, keys)
    torch.testing.assert_close(some.logits[0], whole.logits[2][:, queries][..., keys])
    assert some.value.shape == (1, 2, 4, 4)
